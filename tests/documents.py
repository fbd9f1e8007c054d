"""The repository's documents, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        ROOT / "benchmarks/RESULTS.md",
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Code in a document: its language ("" for what is no code), and the last heading above it."""

    document: str
    heading: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.document}, {self.heading}: {self.code.splitlines()[0]}"


def blocks_of(document: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a document, of all languages or of one, from the top down."""
    text = (ROOT / document).read_text()
    found = [
        Block(document, heading_above(text[: match.start()]), match[1], match[2])
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def heading_above(text: str) -> str:
    """Return the last heading of a text; a comment in a block of code is none."""
    return re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)[-1]


def all_blocks(language: str | None = None) -> list[Block]:
    """Return the blocks of all documents."""
    return [
        block
        for path in DOCUMENTS
        for block in blocks_of(path.relative_to(ROOT).as_posix(), language)
    ]


def commands_of(document: str) -> list[str]:
    """Return the lines by which a document calls raypool."""
    lines = [line for block in blocks_of(document, "shell") for line in block.code.splitlines()]
    return [line for line in lines if line.startswith("raypool ")]
