"""The pages by which a newcomer finds the way into the code (docs/internals) say what is true."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from functools import reduce

import pytest

from tests.documents import ROOT, blocks_of

PACKAGE = ROOT / "raypool"
FOLDER = "docs/internals"
MAP, GLOSSARY, FIRST = (
    (ROOT / FOLDER / name).read_text()
    for name in ("README.md", "glossary.md", "first_ten_minutes.md")
)
PLACES = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", MAP + GLOSSARY + FIRST)
"""A file of the package and a name in it, wherever a page names them side by side."""

QUESTIONS = [
    (
        "A canceled task should end without the grace period.",
        "interrupted",
        "worker/interrupts.py",
        "Interrupts",
    ),
    (
        "A user asks for a GPU by its UUID and gets another one.",
        "claim",
        "backends/ray/claims.py",
        "claim_number",
    ),
    (
        "The HTML report should show the peak memory of each item.",
        "HTML",
        "views/report.py",
        "page",
    ),
    (
        "An item whose machine was taken twice should not run again.",
        "runs again",
        "core/outcomes.py",
        "Outcomes",
    ),
    (
        "The error after a crash should name the machine.",
        "errors",
        "engine/explanations.py",
        "lost",
    ),
    ("A profile needs a field for the log level of workers.", "profile", "profiles.py", "Profile"),
    ("The journal needs another column.", "journal", "journal/schema.py", "migrate"),
    ("A rank needs reduce_scatter.", "collective", "spmd/collectives.py", "all_reduce"),
    ("fit should give a faster GPU more samples.", "batch", "train/shares.py", "share_of"),
    ("Clusters on Azure.", "cloud", "cluster/cluster_file.py", "WRITERS"),
    (
        "The live display should count the items that were retried.",
        "display",
        "views/status.py",
        "LoopStatus",
    ),
    ("report(image=...) should be accepted.", "metrics", "task.py", "report"),
    (
        "Of two tasks of equal priority the shorter one should go first.",
        "priority",
        "core/model.py",
        "Task.order",
    ),
    (
        "Workers should stay for an hour after the last task.",
        "idle",
        "core/scheduler.py",
        "Idleness",
    ),
    ("Ctrl-C should let running items finish.", "Ctrl-C", "parallel_for.py", "LoopRun.run"),
]
"""A change, a word that somebody looks for who has only the map, and where the map has to lead."""


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = re.split(r"^#+ ", page.split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
    return [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ][1:]


def has_code(code: str) -> bool:
    """Whether a module has more in it than what it says of itself."""
    return any(not isinstance(node, (ast.Expr, ast.ImportFrom)) for node in ast.parse(code).body)


def test_every_module_is_on_the_map() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", MAP.split("## Every module")[1], re.MULTILINE)
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")
    }
    assert sorted(listed) == sorted(
        name
        for name, source in files.items()
        if has_code(source) or not name.endswith("__init__.py")
    )


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)))
def test_a_name_is_in_its_file(file: str, name: str) -> None:
    module = importlib.import_module(
        "raypool." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )
    assert reduce(getattr, name.split("."), module)
    first = name.partition(".")[0]
    assert re.search(rf"^(?:class |def |){first}\b", (PACKAGE / file).read_text(), re.MULTILINE), (
        "it is only imported there"
    )


def test_a_file_in_the_picture_exists() -> None:
    """What stands in running text is looked for by test_docs.py."""
    drawn = re.findall(r"[\w/]+\.py", blocks_of(f"{FOLDER}/README.md", "")[0].code)
    assert len(drawn) > 8
    assert not [path for path in drawn if not any(PACKAGE.rglob(path))]


def test_every_word_of_the_glossary_has_its_place() -> None:
    entries = re.findall(r"^- .*", GLOSSARY, re.MULTILINE)
    words = [
        re.match(r"- \*\*([\w -]+)\*\* \(`[\w/]+\.py` `[\w.]+`\): \w", entry) for entry in entries
    ]
    assert [entry for entry, word in zip(entries, words, strict=True) if word is None] == []
    assert len(words) == len({word[1] for word in words if word}) > 50


def test_the_tour_prints_what_the_page_shows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raypool.testing.tour"], capture_output=True, text=True, check=True
    )
    shown = "\n".join(block.code for block in blocks_of(f"{FOLDER}/first_ten_minutes.md", ""))
    assert shown.split("\n") == done.stdout.split("\n")


@pytest.mark.parametrize(
    ("change", "word", "file", "name"), QUESTIONS, ids=[question[1] for question in QUESTIONS]
)
def test_the_map_leads_to_the_place_of_a_change(
    change: str, word: str, file: str, name: str
) -> None:
    leads = [
        start for to_change, start, _ in rows(MAP, "Where do I change X?") if word in to_change
    ]
    assert f"`{file}` `{name}`" in leads, change
    assert len(leads) <= 3, "one who looks for this word has to try too many places"
