"""Every notebook runs from the first cell to the last in a fresh kernel; its own cells assert what has to come out.

The kernel is a process of its own and starts a Ray of its own, as a user's does. What it starts is ended with the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

RUN = """
    import tempfile
    import nbclient, nbformat, traitlets.config

    notebook = nbformat.read({path!r}, as_version=4)
    with tempfile.TemporaryDirectory() as folder:  # its name is short: those of sockets may not be long
        config = traitlets.config.Config(KernelManager=dict(transport="ipc", ip=folder + "/kernel"))
        nbclient.NotebookClient(notebook, timeout=150, config=config).execute()
"""
"""Runs a notebook; through sockets in a folder of its own, as ipykernel warns of ports."""


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def stem(path: Path) -> str:
    return path.stem


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "path", [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.long) for path in NOTEBOOKS[1:])], ids=stem
)
def test_it_runs(path: Path, run_python: Any, tmp_path: Path) -> None:
    folders = {name: str(tmp_path) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    run_python(RUN.format(path=str(path)), timeout_s=180, **folders)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_a_whole_run(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
