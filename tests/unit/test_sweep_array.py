"""`raypool sweep --array` with a pretended Slurm: its tasks run here, one by one."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raypool import JournalError, load_results
from raypool.cli.main import main
from raypool.journal.lock import RunLock
from raypool.testing import sim_pool
from raypool.testing.simulation import FaultPlan

MODULE = """
import random
from pathlib import Path
from raypool import current_task, load_checkpoint, report, save_checkpoint

def train(config):
    begun = load_checkpoint() or 0
    save_checkpoint(begun + 1)
    with open("ran", "a") as ran:
        ran.write(config["name"])
    if config["name"] == "b" and not Path("mended").exists():
        raise ValueError("not yet")
    report(loss=begun)
    return {"begun": begun, "index": current_task().index, "luck": random.random()}
"""

SBATCH = """#!/bin/sh
echo "$*" >>submitted
echo 7
"""

SQUEUE = """#!/bin/sh
cat queue
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "module_of_array.py").write_text(MODULE)
    (tmp_path / "raypool.toml").write_text('[profiles.hpc]\nkind = "slurm"\nfolder = "jobs"\n')
    (tmp_path / "queue").touch()
    yield tmp_path
    sys.modules.pop("module_of_array", None)


def sweep(configs: str, *options: str, run_dir: str = "run") -> Result:
    words = ["sweep", "module_of_array:train", configs, "--run-dir", run_dir, "--seed", "5"]
    return CliRunner().invoke(main, [*words, *options])


def submitted() -> Result:
    return sweep("names.csv", "--array", "2", "--profile", "hpc")


def task(number: int, run: int, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run a task as the job file does, but inline."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
    return sweep("run/parts/configs.csv", "--profile", "inline", "--part-of", str(run))


def statuses() -> list[str]:
    return load_results("run").to_frame()["status"].tolist()


def test_parts_are_one_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers see all parts; a requeued task runs what it has not; the same command submits what is
    missing or failed; and every item has the number, seed and checkpoint that it has in one pool.
    """
    configs = folder / "names.csv"
    configs.write_text("name\na\nb\nc\n")
    done = submitted()
    assert done.exit_code == 0, done.output
    assert "Slurm job 7 for 3 of 3 items, 2 per task" in done.stderr
    assert "--array=0-1" in (folder / "submitted").read_text()
    assert statuses() == ["missing"] * 3

    configs.write_text("name\nother\n")  # after the job was submitted
    assert task(0, 1, monkeypatch).exit_code == 1
    again = task(0, 1, monkeypatch)
    assert "Failed: item 1 (name=b): ValueError: not yet" in again.stderr
    assert "1 of 2 finished, 1 failed" in again.stderr
    assert (folder / "ran").read_text() == "ab"
    assert statuses() == ["finished", "failed", "missing"]
    (run,) = json.loads(CliRunner().invoke(main, ["ls", "--json"]).stdout)
    assert (run["items"], run["finished"], run["failed"]) == (3, 1, 1)
    (folder / "run/parts/0").chmod(0o777)
    with pytest.raises(JournalError, match=r"parts/0 is not read: .* can be changed by others"):
        load_results("run")
    (folder / "run/parts/0").chmod(0o700)

    killed = folder / "run/parts/1"  # a task that was killed as it started
    killed.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(killed / "journal.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert (killed / "journal.sqlite").stat().st_size > 0
    assert statuses() == ["finished", "failed", "missing"]

    configs.write_text("name\na\nb\nc\n")
    lock = RunLock(folder / "run/parts/0")  # as while the task runs
    assert "parts/0 is in use by another call" in sweep("names.csv", "--profile", "inline").stderr
    lock.release()
    (folder / "queue").write_text("7_0\n7_1\n")
    refused = submitted()
    assert refused.exit_code == 1
    assert "Slurm job 7 has not ended" in refused.stderr
    (folder / "queue").write_text("")
    (folder / "mended").touch()
    assert "for 2 of 3 items" in submitted().stderr
    assert statuses() == ["finished", "failed", "missing"]
    assert not (folder / "run/parts/0").exists()
    old = task(1, 1, monkeypatch)
    assert old.exit_code == 1
    assert "Another run has used " in old.stderr
    assert task(0, 2, monkeypatch).exit_code == 0
    assert statuses() == ["finished"] * 3
    assert not caplog.messages

    count = (folder / "submitted").read_text().count("--parsable")
    table = submitted()
    assert table.exit_code == 0, table.output
    assert re.search(r"^ *1 +b +1 ", table.stdout, re.MULTILINE), table.stdout
    assert (folder / "submitted").read_text().count("--parsable") == count == 2
    assert (folder / "ran").read_text() == "abbc"
    assert sweep("names.csv", "--profile", "inline", run_dir="whole").exit_code == 0
    results, whole = load_results("run"), load_results("whole")
    assert [value | {"begun": 0} for value in results] == list(whole)
    assert [value["begun"] for value in results] == [0, 1, 0]
    assert [row["loss"] for row in results.metrics.to_dict("records")] == [0, 1, 0]


def test_a_preempted_task_leaves_the_rest_to_slurm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no command: its own is not the user's, and Slurm runs it again."""
    (folder / "names.csv").write_text("name\na\nb\n")
    submitted()
    plan = FaultPlan(item_s=1.0, preempted_s=0.0)
    monkeypatch.setattr("raypool.pool.parpool", lambda *_, **__: sim_pool(1, plan))
    done = task(0, 1, monkeypatch)
    assert done.exit_code == 75
    last = done.stderr.splitlines()[-1]
    assert last == "Preempted: 1 of 2 items finished; their results are in run."


def test_what_has_no_array(folder: Path) -> None:
    (folder / "names.csv").write_text("name\na\n")
    done = sweep("names.csv", "--array", "--profile", "inline")
    assert done.exit_code == 2
    assert '--array submits a job array to Slurm. Use a profile with kind = "slurm".' in " ".join(
        done.stderr.split()
    )
    done = sweep("names.csv", "--array", "--profile", "hpc", "--notify", "http://here")
    assert done.exit_code == 2
    assert "--notify does not go with --array" in " ".join(done.stderr.split())
