"""Every notebook runs from the first cell to the last in a fresh kernel; its own cells assert what
has to come out.

nbmake runs a copy, in a process of its own: the kernel starts a Ray of its own, as a user's does,
and nothing of either is left.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

RUN = """
    import sys, pytest
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", {folder!r}, "--nbmake-timeout=150", "--overwrite"]
    sys.exit(pytest.main([*options, "--nbmake", {path!r}]))
"""
"""Runs a notebook as `pytest --nbmake` does, and keeps its outputs."""

OURS = re.compile(r"raypool: .*|\s*")
"""What may stand on the standard error stream of a notebook: raypool's own lines, and the empty
ones between them.
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs_of(path: Path) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(cell["outputs"] for cell in code_cells(path))


def assert_whole_and_clean(path: Path) -> None:
    """Every cell has run, once and in order; none has failed, and no library has complained of
    anything.
    """
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(outputs_of(path))
    assert all(output["output_type"] != "error" for output in outputs_of(path))
    said = "".join(
        "".join(output["text"]) for output in outputs_of(path) if output.get("name") == "stderr"
    )
    assert [line for line in said.splitlines() if not OURS.fullmatch(line)] == []


def stem(path: Path) -> str:
    return path.stem


def test_they_are_numbered() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [
        f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)
    ]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)
def test_it_runs(
    path: Path, start_python: Callable[..., Any], eventually: Callable[..., bool], tmp_path: Path
) -> None:
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    settings = {name: str(tmp_path) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    process = start_python(RUN.format(folder=str(tmp_path), path=str(copy)), **settings)
    done = process.finish()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert_whole_and_clean(copy)
    assert eventually(lambda: not process.family()), process.family()


def test_what_is_stored_is_a_whole_run() -> None:
    for path in NOTEBOOKS:
        assert_whole_and_clean(path)
