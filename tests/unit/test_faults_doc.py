"""docs/faults.md names a test for each fault; each of them exists, and has the case that is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if re.match(r"\| (?!fault)[^-]", line)]


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_the_tests_of_a_fault_exist(row: str) -> None:
    fault, sees, lost, tests = (cell.strip() for cell in row.strip("|").split(" | "))
    assert fault
    assert sees
    assert lost
    named = re.findall(r"`([\w/]+\.py)::(\w+)(?:\[(.+?)\])?`", tests)
    assert named, row
    for file, name, case in named:
        path = ROOT / "tests" / file
        assert path.exists(), file
        assert name in names_in(path), f"{file}::{name}"
        assert case in path.read_text(), f"{file}::{name}[{case}]"


def test_all_faults_are_there() -> None:
    assert len(ROWS) > 40
