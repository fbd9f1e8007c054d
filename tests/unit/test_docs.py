"""What the documents say is true: their code runs, their links lead somewhere, their tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import raypool
from raypool.core import messages, model
from raypool.errors import InvalidTypeError

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    for target in re.findall(r"`((?:raypool|tests|benchmarks|notebooks|examples)/[\w/.-]+\.(?:py|md|json))`", path.read_text()):
        assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_the_design_names_every_event_command_and_state() -> None:
    text = (ROOT / "DESIGN.md").read_text()
    names = [name for name, value in vars(messages).items() if isinstance(value, type) and value.__module__ == messages.__name__]
    assert len(names) > 15
    states = [state.name for kind in (model.TaskState, model.WorkerState, model.PoolState) for state in kind]
    missing = [name for name in (*names, *states) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_readme_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The first six run with Ray, by tests of their own (tests/integration/test_readme.py)."""
    _, _, _, _, _, _, *others = python_blocks(ROOT / "README.md")
    for block in others:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "1024" in printed
    assert "ZeroDivisionError" in printed


def test_the_code_about_durable_sweeps_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(ROOT / "docs/durable.md"):
        exec(compile(block, "durable.md", "exec"), {"__name__": "durable"})
    printed = capsys.readouterr().out
    assert re.search(r"^3 +0.4 +0.216 +finished$", printed, re.MULTILINE)
    assert len(re.findall(r"^\d+ .* (0|1|2) +0\.\d+$", printed, re.MULTILINE)) == 12, "three steps of each of four"


def test_the_code_about_gpus_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Also on a machine without one."""
    for block in python_blocks(ROOT / "docs/gpus.md"):
        exec(compile(block, "gpus.md", "exec"), {"__name__": "gpus"})
    printed = capsys.readouterr().out
    assert len(re.findall(r"^[01] +0\.\d+$", printed, re.MULTILINE)) == 2, "a loss of each training"
    assert f"[{16 * 2**30}, {4 * 2**30}]" in printed


def test_names_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    pool_names = set(re.findall(r"\bpool\.([a-z_]+)", text))
    missing = [name for name in pool_names if not hasattr(raypool.ParallelPool, name)]
    assert not missing


def test_a_future_says_that_it_cannot_travel() -> None:
    import pickle

    with pytest.raises(InvalidTypeError, match="belongs to the process that made it"):
        pickle.dumps(raypool.Future("x"))
