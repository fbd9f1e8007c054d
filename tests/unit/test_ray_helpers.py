"""Ray without the processes that have nothing to do; with them where this Ray cannot leave them
out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raypool.backends.ray import dashboard_agent
from raypool.backends.ray.session import SWITCHES, without_helpers

node = pytest.importorskip("ray._private.node")
parameter = pytest.importorskip("ray._private.parameter")
services = pytest.importorskip("ray._private.services")
utils = pytest.importorskip("ray._private.utils")

PATCHED = [
    (node.Node, "start_api_server"),
    (parameter, "RayParams"),
    (services, "get_node"),
    (services, "_build_python_executable_command_memory_profileable"),
    (utils, "get_dashboard_dependency_error"),
]


def patched() -> list[object]:
    return [getattr(place, name) for place, name in PATCHED]


def test_everything_is_as_before_afterwards() -> None:
    before = patched()
    with without_helpers():
        settings = parameter.RayParams()
        assert {name: getattr(settings, name) for name in SWITCHES} == SWITCHES
        assert not set(patched()) & set(before)
        assert utils.get_dashboard_dependency_error() is not None
    assert patched() == before


def test_a_ray_without_these_switches_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter, "RayParams", lambda include_dashboard: None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before


@pytest.mark.parametrize(("place", "name"), PATCHED)
def test_a_ray_without_such_a_name_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str
) -> None:
    monkeypatch.delattr(place, name)
    others = [other for other in PATCHED if other != (place, name)]
    before = [getattr(*other) for other in others]
    with without_helpers():
        assert [getattr(*other) for other in others] == before


def test_a_ray_whose_names_are_elsewhere_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    before = node.Node.start_api_server, parameter.RayParams
    with without_helpers():
        assert (node.Node.start_api_server, parameter.RayParams) == before


RAYLET = """
import os, subprocess, sys
script, folder = sys.argv[1:]
env = {**os.environ, "RAY_NODE_ID": "7", "RAY_RAYLET_PID": str(os.getpid())}
agent = subprocess.Popen([sys.executable, "-S", script, "--session-dir=" + folder], env=env, stdout=subprocess.DEVNULL)
print(agent.pid, flush=True)
sys.stdin.read()
print(agent.poll())
"""


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_agent_of_the_dashboard_stays_as_long_as_its_raylet(
    tmp_path: Path, eventually: Callable[..., bool], has_pidfd: bool
) -> None:
    """The raylet ends if its agent does, and waits for the files with its ports."""
    script = tmp_path / "agent.py"
    source = Path(dashboard_agent.__file__).read_text()
    script.write_text(source if has_pidfd else source.replace("os.pidfd_open", "os.no_such_name"))
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET, str(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    agent = psutil.Process(int(raylet.stdout.readline()))
    assert eventually(lambda: len([*tmp_path.glob("*_port_7")]) == len(dashboard_agent.PORTS))
    assert eventually(lambda: agent.status() == psutil.STATUS_SLEEPING)
    said, _ = raylet.communicate(timeout=300)
    assert said == "None\n", "it had ended before"
    assert eventually(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


def test_the_agent_of_a_raylet_that_has_ended_ends(tmp_path: Path) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", ""])
    raylet.wait(300)
    env = {**os.environ, "RAY_NODE_ID": "7", "RAY_RAYLET_PID": str(raylet.pid)}
    command = [sys.executable, dashboard_agent.__file__, f"--session-dir={tmp_path}"]
    assert subprocess.run(command, env=env, timeout=300, check=False).returncode == 0
