"""What `raypool sweep`, `ls` and `show` look like on a real terminal of 100 and of 60 columns, and
in a pipe.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RAYPOOL = [sys.executable, "-m", "raypool"]
SWEEP = ["sweep", "train:train", "configs.csv", "--profile", "threads", "--run-dir"]
TRAIN = """
def train(config):
    if config["lr"] > 1:
        raise ArithmeticError(f"the loss is {1e9 * config['lr']:.3g} after epoch 2")
    loss = (1 - config["lr"]) ** config["epochs"] + 1 / config["width"]
    return {"loss": loss, "accuracy": 1 - loss}
"""

BEST = ["19", "18", "17", "16", "15", "14", "13", "12", "11", "10"]
"""The items with the smallest losses, in their order: those with the largest lr, then width."""

Look = Callable[..., Any]


@pytest.fixture(scope="module")
def pictures() -> Any:
    """Load the program that makes the pictures of the documents."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures/record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a function and 22 configurations, of which the last two fail."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "train.py").write_text(TRAIN)
    configs = [(lr, width) for lr in (0.003, 0.03, 0.1, 0.3) for width in (16, 64, 128, 256, 512)]
    rows = (f"{lr},{width},20,sgd with momentum\n" for lr, width in [*configs, (3, 16), (3, 64)])
    (folder / "configs.csv").write_text(f"lr,width,epochs,optimizer\n{''.join(rows)}")
    return folder


@pytest.fixture(params=[100, 60])
def look(request: pytest.FixtureRequest, pictures: Any, folder: Path, tmp_path: Path) -> Look:
    """Run a command on a terminal of 30 lines; return its screen. A picture of it is in `tmp_path`,
    for whoever wants to see why a test fails.
    """

    def run(*words: str, status: int = 0) -> Any:
        frames, screen = pictures.record([*RAYPOOL, *words], folder, request.param, 30, status)
        svg = pictures.animation(" ".join(words), frames[-1:], screen)
        (tmp_path / f"{words[0]}.svg").write_text(svg)
        return screen

    run.columns = request.param  # type: ignore[attr-defined]
    return run


def table_of(screen: Any) -> list[list[str]]:
    """Return the rows from the heading to the first line that is none, each as cells."""
    lines = [line.rstrip() for line in screen.display]
    first = next(at for at, line in enumerate(lines) if re.match("(index|run) ", line))
    rows = [re.split(" {2,}", line.strip()) for line in lines[first:]]
    return [row for row in rows if len(row) > 1]


def red_texts(screen: Any) -> list[str]:
    """Return the texts in red, from top to bottom."""
    cells = (screen.buffer[row][column] for row in range(30) for column in range(screen.columns))
    marked = "".join(cell.data if cell.fg == "red" else "\0" for cell in cells)
    return [text.strip() for text in marked.split("\0") if text]


def check_best(screen: Any) -> None:
    heading, *rows = table_of(screen)
    assert [row[0] for row in rows[:10]] == BEST, screen.display
    assert all(len(row) == len(heading) for row in rows[:10]), "each row is in one line"
    assert rows[0][heading.index("loss")] == "0.002751"
    assert not re.search(r"\d…|…\d", " ".join(screen.display)), "numbers are not cut"
    if screen.columns == 100:
        assert heading[-4:] == ["accuracy", "status", "duration_s", "worker"]
    else:
        assert heading == ["index", "lr", "width", "epochs", "optimizer", "loss", "accuracy"]
        left_out = "The terminal is too narrow for status, duration_s, worker."
        assert left_out in map(str.rstrip, screen.display)


def test_a_sweep_ends_with_the_best_items_and_the_failures_in_red(look: Look) -> None:
    screen = look(*SWEEP, f"runs/{look.columns}", status=1)  # type: ignore[attr-defined]
    assert re.match(r"train ━+ 22 of 22, 2 failed", screen.display[1]), screen.display
    check_best(screen)
    assert any(line.startswith("The 10 best by loss, of 22 items.") for line in screen.display)
    failures = [text for text in red_texts(screen) if text.startswith("Failed: item")]
    assert [text[:16] for text in failures] == ["Failed: item 20 ", "Failed: item 21 "]
    assert all(text.endswith("the loss is 3e+09 after epoch 2") for text in failures)


@pytest.fixture(scope="module")
def run(folder: Path) -> str:
    """Make a saved run."""
    command = [*RAYPOOL, *SWEEP, "saved/lr", "--json"]
    subprocess.run(command, cwd=folder, check=False, capture_output=True)  # status 1: some fail
    return "saved/lr"


def test_saved_runs_are_listed_in_a_line_each(look: Look, run: str) -> None:
    screen = look("ls", "saved")
    heading, row = table_of(screen)
    assert heading[:2] == ["run", "function"]
    assert row[:2] == ["lr", "train.train"]
    assert row[heading.index("state")] == "finished, 2 failed"
    assert red_texts(screen) == ["2 failed"]
    left_out = [name for name in ("started", "function", "items", "size") if name not in heading]
    said = f"The terminal is too narrow for {', '.join(left_out)}."
    assert (said in map(str.rstrip, screen.display)) == bool(left_out) == (screen.columns == 60)


def test_the_table_of_a_run_fits_and_its_failures_are_red(look: Look, run: str) -> None:
    check_best(look("show", run, "--sort", "loss", "--top", "10"))
    screen = look("show", run, "--failed")
    heading, *rows = table_of(screen)
    assert [row[0] for row in rows] == ["20", "21"]
    assert heading[-1] == "error"
    assert rows[0][-1].startswith("ArithmeticError")
    screen = look("show", run, "--columns", "lr,status")
    assert red_texts(screen) == ["failed", "failed"]


def test_in_a_pipe_there_are_no_colors_and_all_columns(folder: Path, run: str) -> None:
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60"}
    for words in ([*SWEEP, "piped"], ["ls", "saved"], ["show", run], ["show", run, "--failed"]):
        done = subprocess.run(
            [*RAYPOOL, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stdout.splitlines()[0].split()[-1] in ("worker", "error", "size")
