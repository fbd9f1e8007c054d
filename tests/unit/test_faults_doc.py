"""docs/faults.md names a test for each fault; each of them exists, and has the case that is
named.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/faults.md").read_text().splitlines()
    if re.match(r"\| (?!fault)[^-]", line)
]


@functools.cache
def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_the_tests_of_all_faults_exist() -> None:
    wrong = []
    for row in ROWS:
        *cells, tests = (cell.strip() for cell in row.strip("|").split(" | "))
        named = re.findall(r"`([\w/]+\.py)::(\w+)(?:\[(.+?)\])?`", tests)
        if len(cells) != 3 or not all(cells) or not named:
            wrong.append(row)
        for file, name, case in named:
            path = ROOT / "tests" / file
            if not path.exists() or name not in names_in(path) or case not in path.read_text():
                wrong.append(f"{file}::{name}[{case}]")
    assert len(ROWS) > 40
    assert not wrong
