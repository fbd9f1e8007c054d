"""The programs of README.md and docs/tour.md, on the Ray that raypool starts: the ten lines, pasted
into a Python prompt, the sweeps, spmd and trainings.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks_of

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/tour.md").read_text()
FRONT = {block.heading: block.code for block in blocks_of("README.md", "python")}
TEN_LINES, RESUME, FIT = FRONT["A first program"], FRONT["Resume"], FRONT["One model on all GPUs"]
CODE = {block.heading: block.code for block in blocks_of("docs/tour.md", "python")}
SWEEP, DURABLE = CODE["Watch and stop trainings live"], CODE["Resume an interrupted sweep"]
SPMD, TRAINING, SHARED = (
    CODE["SPMD: run on every worker together"],
    CODE["Distributed training of one model"],
    CODE["GPUs: inspect and share"],
)


def run(*args: str, code: str | None = None, cwd: Path) -> str:
    """Run Python, with a home of its own, and return what it printed."""
    home = {**os.environ, "HOME": str(cwd)}
    done = subprocess.run(
        [sys.executable, *args],
        input=code,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
        env=home,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


def test_the_ten_lines_at_a_prompt(tmp_path: Path) -> None:
    printed = run("-i", "-q", code=TEN_LINES, cwd=tmp_path)
    assert re.search(r"raypool: \d+ workers? on \S+: (CPU|GPU)", printed)
    rows = re.findall(
        r"^ *(\d+) +(8|32|128) +(0\.\d+) +(\d\S+)",
        printed.replace(">>> ", "").replace("... ", ""),
        re.MULTILINE,
    )
    assert len(rows) == 9
    losses = [float(row[3]) for row in rows]
    assert losses == sorted(losses)
    assert losses[0] < 0.1


def test_resume_and_fit(tmp_path: Path) -> None:
    printed = run("-c", f"{TEN_LINES}\n{RESUME}\n{FIT}", cwd=tmp_path)
    assert re.search(r"^loss +0\.0\d+$", printed, re.MULTILINE)
    assert "<h1>train in first</h1>" in (tmp_path / "first.html").read_text()
    assert "torch.Size([512, 1])" in printed


@pytest.mark.parametrize(
    "opened", ['parpool(2, profile="threads")', pytest.param("parpool()", marks=pytest.mark.long)]
)
def test_the_sweep_that_survives(
    opened: str, tmp_path: Path, start_python: Callable[..., Any], eventually: Callable[..., bool]
) -> None:
    """It is killed when the first checkpoints are there, started again, and one of its trainings is
    replayed.
    """
    assert "with parpool() as pool" in DURABLE
    (tmp_path / "sweep.py").write_text(DURABLE.replace("parpool()", opened))
    run_it = (
        f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path('sweep.py',"
        " run_name='__main__')"
    )
    process = start_python(run_it)
    assert eventually(lambda: list(tmp_path.glob("runs/widths/items/*/checkpoint/checkpoint.pt")))
    process.process.kill()
    process.process.wait()
    printed = run("sweep.py", cwd=tmp_path)
    rows = re.findall(r"^(\d) +(\d+) +(0\.\d+) +finished$", printed, re.MULTILINE)
    assert [(int(index), int(width)) for index, width, _ in rows] == list(
        enumerate((4, 8, 16, 32, 64, 128))
    )
    assert len(re.findall(r"^\d +0\.\d+$", printed, re.MULTILINE)) == 6, "the best of each"
    again = run(
        "-c",
        "from raypool.cli.main import main; main()",
        "replay",
        "runs/widths",
        "3",
        cwd=tmp_path,
    )
    assert float(ast.literal_eval(again.strip())["loss"]) == pytest.approx(
        float(rows[3][2]), abs=1e-6
    )


def test_the_programs_of_the_tour(tmp_path: Path) -> None:
    """Each by itself, but in one process, which imports torch once."""
    programs = (SPMD, TRAINING, SHARED)
    code = (
        f"for code in {programs!r}:\n    exec(code, {{'__name__': '__main__'}})\n    print('NEXT')"
    )
    spmd, training, shared, _ = run("-c", code, cwd=tmp_path).split("NEXT\n")
    assert "<Composite of 2 ranks>\n  0: Linear, 9 parameters\n  1: Linear, 9 parameters\n" in spmd
    losses = re.search(r"^\[([\d.]+), ([\d.]+)\]$", spmd, re.MULTILINE)
    assert losses
    assert losses[1] != losses[2]

    rows = re.findall(r"^\d+ +0 +(\d+) +(\d\S+)$", training, re.MULTILINE)
    assert [epoch for epoch, _ in rows] == ["17", "18", "19"]
    (path,) = re.findall(
        r"^(/.*raypool_runs/train_loop-.*/checkpoint_000020)$", training, re.MULTILINE
    )
    assert sorted(each.name for each in Path(path).parent.glob("checkpoint_??????")) == [
        "checkpoint_000019",
        "checkpoint_000020",
    ]
    assert "torch.Size([512, 1])" in training

    assert re.search(r"^\d+ GPUs$", shared, re.MULTILINE)
    assert len(re.findall(r"^[0-5] +\d+ +\d\.\S+ ", shared, re.MULTILINE)) == 6, (
        "a width and a loss in each row"
    )


@pytest.mark.quick
def test_the_sweep_is_the_example() -> None:
    assert (ROOT / "examples/watch_a_sweep.py").read_text().endswith(f'"""\n\n{SWEEP}')


def tell_story(printed: str) -> dict[str, str]:
    """Check that a run of the sweep went as the README tells, and return the state of each
    training.
    """
    stopped = re.search(r"^(width .*) learns nothing and is stopped:$", printed, re.MULTILINE)
    assert stopped
    error = re.search(
        r"^ArithmeticError: (?:.*\n)raypool: its last output:\n((?:  epoch .*\n)+)raypool: (.*),"
        r" attempt 1",
        printed,
        re.MULTILINE,
    )
    assert error
    assert [line.split(":")[0] for line in error[1].splitlines()] == [
        "  epoch 0",
        "  epoch 1",
        "  epoch 2",
    ]
    best = re.search(r"^Best: (.*), after .* s on worker \d+$", printed, re.MULTILINE)
    assert best
    assert re.search(
        r"free again after \d+ ms: <ParallelPool: (\d+) workers?, \1 idle>$", printed, re.MULTILINE
    )
    table = re.findall(
        r"^(width \d+, lr \S+) +(finished|failed|cancelled)\b", printed, re.MULTILINE
    )
    states = dict(table)
    assert len(table) == len(states) == 10
    assert states[stopped[1]] == states[best[1]] == "finished"
    assert states[error[2]] == "failed"
    assert list(states.values()).count("failed") == 1
    assert stopped[1] != best[1]
    assert "cancelled" in states.values()
    return states


@pytest.mark.long
def test_the_sweep_goes_as_it_is_told(tmp_path: Path) -> None:
    states = tell_story(run("-c", SWEEP, cwd=tmp_path))
    recorded = re.findall(r"```\n(raypool: .*?)```", TOUR, re.DOTALL)
    assert list(tell_story(recorded[0])) == list(states)
