"""The commands that are run on machines: that a shell takes them, more than once, and what they say
to Ray.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from raypool.cluster import launcher_file
from raypool.cluster.plan import ClusterPlan, NodeGroup

HEAD = NodeGroup(name="head", machine="n2-standard-4")
PLAN = ClusterPlan(
    name="lab",
    provider="gcp",
    head=HEAD,
    workers=(),
    packages=("timm<2",),
)


def in_a_shell(command: str, home: Path) -> str:
    """Run a command as Ray does on a machine."""
    words = [
        "bash",
        "--login",
        "-c",
        "-i",
        f"source ~/.bashrc; export OMP_NUM_THREADS=1 && ({command})",
    ]
    done = subprocess.run(
        words,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home where the tool that installs is there already, and says what it is to do."""
    (tmp_path / ".local/bin").mkdir(parents=True)
    (tmp_path / ".local/bin/uv").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / ".local/bin/uv").chmod(0o755)
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'\n")
    return tmp_path


def test_the_environment_comes_first_on_the_path_also_when_set_up_twice(home: Path) -> None:
    for command in launcher_file.setup_commands(PLAN) * 2:
        in_a_shell(command, home)
    assert (home / ".bashrc").read_text().count("raypool-venv") == 1
    assert in_a_shell("echo $PATH", home).startswith(f"{home}/raypool-venv/bin:")


def test_nothing_is_installed_where_all_is_there() -> None:
    commands = launcher_file.commands(replace(PLAN, packages=()))
    assert [commands[name] for name in ("setup_commands", "head_setup_commands")] == [[], []]


def test_a_head_that_costs_is_watched_and_others_are_not() -> None:
    def started(**changes: object) -> str:
        return launcher_file.commands(replace(PLAN, **changes))["head_start_ray_commands"][-1]

    assert "-m raypool.cluster.idle --minutes 60 </dev/null" in started()
    assert "--minutes 90 " in started(provider="aws", idle_shutdown_minutes=90)
    for changes in ({"idle_shutdown_minutes": 0}, {"provider": "on-prem"}):
        assert "ray start" in started(**changes)


def test_the_watcher_outlives_the_shell_where_machines_are_taken_back(home: Path) -> None:
    *_, last = launcher_file.worker_commands("on-prem")
    assert "ray start" in last
    *_, last = launcher_file.worker_commands("gcp")
    script = '#!/bin/sh\necho "$@"\nwhile [ ! -e ~/end ]; do sleep 0.05; done\n'
    (home / "raypool-venv/bin").mkdir(parents=True)
    (home / "raypool-venv/bin/python").write_text(script)
    (home / "raypool-venv/bin/python").chmod(0o755)
    try:
        path = in_a_shell(f'export PATH="$HOME/raypool-venv/bin:$PATH"; {last}', home)
        assert path == "", "the shell has ended, and the watcher has none of its output"
        log = home / "raypool-preemption.log"
        subprocess.run(
            ["bash", "-c", f"until grep -q cloud {log}; do sleep 0.05; done"], check=True
        )
        assert log.read_text() == "-m raypool.cluster.preemption --cloud gcp\n"
    finally:
        (home / "end").touch()


def test_ray_knows_all_options_that_it_is_started_with() -> None:
    """Its own command line is asked; `--head` and `--address` exclude each other."""
    from ray.scripts.scripts import start

    known = {
        option
        for parameter in start.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for command in (
        launcher_file.head_commands()[-1],
        launcher_file.worker_commands("on-prem")[-1],
    ):
        used = set(re.findall(r"--[a-z-]+", command))
        assert len(used) > 1
        assert used <= known
