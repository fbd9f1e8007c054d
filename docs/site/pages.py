"""The site's pages are the repository's documents, each at its own place: so one link leads right on GitHub and on the site.

MkDocs calls `on_files` (mkdocs.yml, "hooks").
"""

from pathlib import Path

import nbconvert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["*.md", "docs/**/*.md", "benchmarks/RESULTS.md", "examples/README.md"]
SHOWN = ["examples/*.py", "notebooks/*.ipynb"]
GIVEN = [
    "cluster.yaml",
    "cloud_examples/**/*.yaml",
    "LICENSE",
    "benchmarks/results/*.json",
    "benchmarks/results/*.svg",
    "docs/site/*.css",
    "docs/pictures/*.svg",
    "docs/pictures/*.png",
]


class Shown(File):
    """A file that is no Markdown, and has a page."""

    def is_documentation_page(self) -> bool:
        """Let MkDocs make a page of it."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the repository for the folder of documents; what the theme and plugins bring stays."""
    brought = [file for file in files if file.src_dir != config.docs_dir]
    here = [
        File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
        for uri in uris(DOCUMENTS + GIVEN)
    ]
    shown = [page for uri in uris(SHOWN) for page in pages_of(uri, config)]
    return Files([*brought, *here, *shown])


def uris(patterns: list[str]) -> list[str]:
    """Return the paths that match, as links have them."""
    return [
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
    ]


def pages_of(uri: str, config: MkDocsConfig) -> list[File]:
    """Return the page of a program or a notebook, and the pictures on it."""
    if uri.endswith(".py"):
        return [Shown.generated(config, uri, content=program(ROOT / uri))]
    text, resources = nbconvert.MarkdownExporter().from_filename(str(ROOT / uri))
    folder = uri.rpartition("/")[0]
    pictures = [
        File.generated(config, f"{folder}/{name}", content=data)
        for name, data in resources["outputs"].items()
    ]
    return [Shown.generated(config, uri, content=text), *pictures]


def program(path: Path) -> str:
    """Return a program as Markdown, what it says of itself first."""
    code = path.read_text()
    return f"# {path.name}\n\n```python\n{code}```\n"
