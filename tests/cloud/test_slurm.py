"""Pools and jobs on a real Slurm with two nodes: `parpool`, `batch`, `raypool submit`, signals, lost
nodes, and what is left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.slurm_lab import HAS_ALL, REASON, SlurmLab, until

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not HAS_ALL, reason=REASON)]

PROFILES = """
[profiles.hpc]
kind = "slurm"
gpus_per_node = 2
time = 30
notice_s = 60
folder = "jobs"
start_timeout_s = 300

[profiles.full]
kind = "slurm"
gpus_per_node = 2
nodes = 3
folder = "jobs"

[profiles.unknown]
kind = "slurm"
partition = "lov"
folder = "jobs"
"""

TASKS = """
import os, platform, sys, time
from pathlib import Path
import raypool
from raypool import current_task, load_checkpoint, parpool, save_checkpoint

HERE = Path(__file__).parent

def look(x):
    return platform.node(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SLURM_PROCID")

def seen():
    # on every worker once
    return sorted(raypool.gcp().parfeval_on_all(look, 0).result(300))

def until_gone(name):
    while (HERE / name).exists():
        time.sleep(0.1)

def train(x):
    "Counts to a hundred, from where it was, and looks whether it should stop at each."
    state = load_checkpoint() or {"step": 0, "from": []}
    state["from"].append(state["step"])
    while state["step"] < 100:
        if state["step"] == 3:
            (HERE / f"running-{x}").touch()
        if state["step"] > 3:
            until_gone("gate")
        if current_task().should_stop:
            save_checkpoint(state)
            return None
        state["step"] += 1
    return state["from"]
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Start Slurm; its files are not in /tmp, which each host has for itself."""
    folder = Path(tempfile.mkdtemp(prefix="raypool-slurm-", dir="/var/tmp"))
    lab = SlurmLab(folder)
    try:
        yield lab
    finally:
        lab.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def user(lab: SlurmLab) -> Iterator[User]:
    user = User(lab)
    yield user
    user.leave()


class User:
    """Somebody at the login node, with a folder of their own."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab
        self.folder = Path(tempfile.mkdtemp(dir=lab.folder))
        (self.folder / "raypool.toml").write_text(PROFILES)
        (self.folder / "tasks.py").write_text(TASKS)

    def start(self, *command: str, host: str = "login"):
        return self.lab.start("env", "-C", str(self.folder), *command, host=host)

    def run(self, *command: str) -> str:
        return self.lab.run("env", "-C", str(self.folder), *command)

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name
