"""`raypool sweep` as a user starts it: a process of its own, workers on Ray, Ctrl-C, and the same
command again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import time
from pathlib import Path

import beside

def train(config):
    time.sleep(0.1)  # so that each goes by itself
    if config["width"] == 36:
        raise ValueError("36 is no multiple of 8")
    if config["width"] == 64 and not Path(config["gate"]).exists():
        Path(config["ready"]).touch()
        time.sleep(600)
    return {"accuracy": beside.accuracy(config["width"])}
"""

COMMAND = """
import os, sys
os.chdir({folder!r})
from raypool.cli.main import main
main({arguments!r})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a script, a module beside it, and configurations."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "train.py").write_text(TRAIN)
    (tmp_path / "models" / "beside.py").write_text("def accuracy(width):\n    return width / 100\n")
    return tmp_path


@pytest.fixture
def start_sweep(folder: Path, start_python: Callable[..., Any]) -> Callable[..., Any]:
    """Start `raypool sweep models/train.py:train` in that folder."""

    def start(configs: str, *options: str) -> Any:
        arguments = ["sweep", "models/train.py:train", configs, "--run-dir", "run", *options]
        return start_python(COMMAND.format(folder=str(folder), arguments=arguments))

    return start


def test_a_function_of_a_file_runs_on_workers_with_the_modules_beside_it(
    folder: Path, start_sweep: Callable[..., Any]
) -> None:
    (folder / "configs.yaml").write_text("- {width: 8}\n- {width: 36}\n- {width: 16}\n")
    done = start_sweep("configs.yaml", "--workers", "2", "--json").finish()
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    assert [row["accuracy"] for row in rows] == [0.08, None, 0.16]
    assert [row["status"] for row in rows] == ["finished", "failed", "finished"]
    assert "raypool: 2 workers on " in done.stderr
    assert "Failed: item 1 (width=36): ValueError: 36 is no multiple of 8" in done.stderr


@pytest.mark.parametrize("profile", ["threads", pytest.param("local", marks=pytest.mark.long)])
def test_ctrl_c_and_the_same_command_again(
    folder: Path, start_sweep: Callable[..., Any], eventually: Callable[..., bool], profile: str
) -> None:
    paths = {"ready": str(folder / "ready"), "gate": str(folder / "gate")}
    (folder / "configs.jsonl").write_text(
        "".join(json.dumps({"width": width, **paths}) + "\n" for width in (8, 16, 64))
    )
    options = ("configs.jsonl", "--workers", "1", "--profile", profile)
    started = start_sweep(*options)
    assert eventually((folder / "ready").exists), started.finish(1)
    os.killpg(started.pid, signal.SIGINT)
    done = started.finish()
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    said, again = done.stderr.splitlines()[-2:]
    assert said == (
        "Interrupted: 2 of 3 items finished; their results are in run. To run the others:"
    )
    assert again == (
        f"  raypool sweep models/train.py:train configs.jsonl --run-dir run --workers 1 --profile"
        f" {profile}"
    )
    assert eventually(lambda: not started.family())

    (folder / "gate").touch()
    done = start_sweep(*options, "--json").finish()
    assert done.returncode == 0, done.stderr
    assert [row["accuracy"] for row in json.loads(done.stdout)] == [0.08, 0.16, 0.64]


def test_more_workers_than_there_is_room_for_is_wrong_use(
    folder: Path, start_sweep: Callable[..., Any]
) -> None:
    (folder / "configs.csv").write_text("width\n8\n")
    done = start_sweep("configs.csv", "--workers", "5000").finish()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "requested 5000, available" in " ".join(done.stderr.split())
    assert not (folder / "run").exists()
