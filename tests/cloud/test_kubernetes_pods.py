"""Pods of our manifests, as KubeRay starts them: what is installed first, and what happens when Kubernetes tells one to end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool.cloud.kubernetes import END_S, SPOT_GRACE_S, write
from raypool.cloud.plan import ClusterPlan, NodeGroup

PLAN = ClusterPlan(
    name="lab",
    provider="kubernetes",
    head=NodeGroup(name="head"),
    workers=(NodeGroup(name="worker", gpu="T4", gpus=1, most=1, spot=True),),
    packages=("some-package==1.0",),
)
[GROUP] = write(PLAN)["spec"]["workerGroupSpecs"]
[WORKER] = GROUP["template"]["spec"]["containers"]


def command(container: dict[str, Any], start: str) -> list[str]:
    """Return what the operator makes of a container's own arguments and its `ray start`.

    Source: KubeRay 1.7, `BuildPod` and `GetContainerCommand`.
    """
    own = "".join(f" {argument} " for argument in container.get("args", ()))
    start = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"
    return ["/bin/bash", "-c", "--", f"{own} && {start}" if own else start]


def parameters(group: dict[str, Any]) -> str:
    """Return what the operator tells Ray of a group.

    Source: KubeRay 1.7, `updateRayStartParamsResources`, `updateRayStartParamsLabels` and `addWellKnownAcceleratorResources`.
    """
    [container] = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    own = json.dumps({name: float(amount) for name, amount in group["resources"].items()})
    labels = ",".join(f"{name}={value}" for name, value in group["labels"].items())
    return f"--num-gpus={gpus} --resources='{own}' --labels={labels}"


@pytest.fixture
def programs(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    """Give `programs(name, script)`, which puts one on the PATH; returns the environment that has it there."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def add(name: str, script: str) -> dict[str, str]:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    return add


def test_packages_are_installed_before_ray_starts(tmp_path: Path, programs: Callable[[str, str], dict[str, str]]) -> None:
    programs("pip", f'echo "pip $@" >> {tmp_path}/log')
    env = programs("ray", f'echo "ray $@" >> {tmp_path}/log')
    done = subprocess.run(command(WORKER, "ray start --block"), env=env, check=False, timeout=20)
    assert done.returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "pip install --no-cache-dir some-package==1.0",
        "ray start --block",
    ]


def test_ray_does_not_start_where_nothing_could_be_installed(
    tmp_path: Path, programs: Callable[[str, str], dict[str, str]]
) -> None:
    programs("pip", "exit 3")
    env = programs("ray", f"touch {tmp_path}/started")
    done = subprocess.run(command(WORKER, "ray start --block"), env=env, check=False, timeout=20)
    assert done.returncode == 1
    assert not (tmp_path / "started").exists()


def test_ray_is_the_first_process_of_a_pod(tmp_path: Path, programs: Callable[[str, str], dict[str, str]]) -> None:
    """Otherwise the shell would get the signal, and pass it on to nobody."""
    programs("pip", "true")
    env = programs("ray", f"echo $$ > {tmp_path}/pid")
    with subprocess.Popen(command(WORKER, "ray start --block"), env=env) as pod:
        assert pod.wait(timeout=20) == 0
    assert int((tmp_path / "pid").read_text()) == pod.pid


DRAINING = """
import os, signal, subprocess, sys, time
import ray
from ray._private.state import state
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
ray_command = os.path.join(os.path.dirname(sys.executable), "ray")
options = "--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats --block " + PARAMETERS
start = f"{ray_command} start --address={cluster.address} {options}"
shell = COMMAND.replace("@start", start)
pod = subprocess.Popen(["/bin/bash", "-c", "--", shell], start_new_session=True, stdout=subprocess.DEVNULL)
head = ray.get_runtime_context().get_node_id()

def until(look, limit_s):
    end = time.monotonic() + limit_s
    while not (found := look()):
        assert time.monotonic() < end, look
        time.sleep(0.05)
    return found

def others():
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]

try:
    [node] = until(others, 40)
    [entry] = [each for each in ray.nodes() if each["NodeID"] == node]
    assert entry["Resources"]["GPU"] == entry["Resources"]["accelerator_type:T4"] == 1, entry
    assert entry["Labels"]["raypool/role"] == "worker", entry
    assert entry["Labels"]["ray.io/accelerator-type"] == "T4", entry
    Busy = ray.remote(type("Busy", (), {"ping": lambda self: "here"}))
    busy = Busy.options(num_cpus=1, scheduling_strategy=On(node, soft=False)).remote()
    assert ray.get(busy.ping.remote(), timeout=40) == "here"
    told = time.monotonic()
    os.kill(pod.pid, signal.SIGTERM)
    until(lambda: node in state.get_draining_nodes(), 5)
    left_s = state.get_draining_nodes()[node] / 1000 - time.time()
    print("left", left_s)
    assert ray.get(busy.ping.remote(), timeout=10) == "here"  # it goes on, and has so long to save what it has
    pod.wait(timeout=40)
    print("ended", time.monotonic() - told)
finally:
    if pod.poll() is None:
        os.killpg(pod.pid, signal.SIGKILL)
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.long
def test_a_pod_that_is_told_to_end_drains_first(
    run_python: Callable[..., subprocess.CompletedProcess[str]], programs: Callable[[str, str], dict[str, str]]
) -> None:
    env = programs("pip", "true")
    settings = {variable["name"]: variable["value"] for variable in WORKER["env"]}
    shell = command(WORKER, "@start")[-1]
    done = run_python(f"COMMAND = {shell!r}\nPARAMETERS = {parameters(GROUP)!r}\n{DRAINING}", PATH=env["PATH"], **settings)
    said = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("left", "ended")))
    assert 5 < float(said["left"]) <= SPOT_GRACE_S - END_S
    assert float(said["ended"]) < SPOT_GRACE_S
