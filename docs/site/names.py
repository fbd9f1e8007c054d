"""Names in running text lead to their place in the reference: `parpool(2)`, `pool.parfor`, `Future.cancel`.

MkDocs calls `on_config` (mkdocs.yml, "hooks"). That each link leads somewhere is checked when the site is built.
"""

import inspect
import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig

import raypool

WORDS = {"parpool", "parfor", "parfeval", "spmd"}
"""Names that mean ours also where they stand alone; `report` or `gpu` alone may be a column of a table."""

VARIABLES = {
    "pool": "ParallelPool",
    "results": "Results",
    "future": "Future",
    "job": "Future",
    "run": "TrainingRun",
}
"""What the documents call a thing, and its class."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the links to what is done with Markdown."""
    config.markdown_extensions.append(Names())  # type: ignore[arg-type]
    return config


class Names(Extension):
    """Adds the links, before references are looked up."""

    def extendMarkdown(self, md: Markdown) -> None:  # Markdown's own name
        """Come after backquotes have been read."""
        md.treeprocessors.register(Links(md), "raypool-names", 5)


class Links(Treeprocessor):
    """Puts a reference around each name in backquotes that is ours."""

    def run(self, root: Element) -> None:
        """Change the tree of a page, or of a docstring."""
        for parent in root.iter():
            if parent.tag in ("a", "autoref", "pre", "h1", "h2", "h3", "h4"):
                continue
            for place, child in enumerate(parent):
                if child.tag == "code" and (identifier := identifier_of(child.text or "")):
                    link = Element("autoref", identifier=identifier)
                    link.tail, child.tail = child.tail, None
                    link.append(child)
                    parent[place] = link


def identifier_of(code: str) -> str | None:
    """Return where a name stands in the reference, None for what is no name of ours.

    >>> identifier_of("pool.parfor(fn, items)"), identifier_of("Future.cancel"), identifier_of("gpu"), identifier_of("gpu(1)")
    ('raypool.ParallelPool.parfor', 'raypool.Future.cancel', None, 'raypool.gpu')
    """
    match = re.fullmatch(r"(raypool\.)?(\w+)(?:\.(\w+))?(\(.*\))?", code, re.DOTALL)
    if match is None:
        return None
    prefix, first, second, call = match.groups()
    if second is None and first in WORDS - {"parpool"}:
        return f"raypool.ParallelPool.{first}"
    if second is not None:
        owner = VARIABLES.get(first, first)
        return member(owner, second) if owner in raypool.__all__ else None
    is_clear = prefix or call or "_" in first or first != first.lower() or first in WORDS
    return f"raypool.{first}" if first in raypool.__all__ and is_clear else None


def member(owner: str, name: str) -> str | None:
    """Return where a method or property stands; fields stand in the table of their class."""
    kinds = [
        kind
        for kind in getattr(getattr(raypool, owner), "__mro__", ())
        if kind.__module__.startswith("raypool")
    ]
    found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
    if not name.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
        return f"raypool.{owner}.{name}"
    return f"raypool.{owner}" if any(name in kind.__annotations__ for kind in kinds) else None
