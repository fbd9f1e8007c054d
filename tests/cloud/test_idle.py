"""An unused cluster is deleted by its head, which goes last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private import providers as providers_of_ray
from ray.job_submission import JobDetails, JobStatus, JobType

from raypool.cluster import gcp, idle
from raypool.cluster.plan import draft
from raypool.errors import CloudError
from tests.cloud import fake_gce
from tests.cloud.ray_provider import Cluster
from tests.cloud.test_skypilot import CAN_UNSHARE, MACHINE

MINUTES = 0.001


def a_job(status: str, end_time: int | None = None) -> JobDetails:
    return JobDetails(
        type=JobType.DRIVER, status=JobStatus(status), entrypoint="", end_time=end_time
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_cluster_is_used_while_any_job_has_not_ended() -> None:
    ended = [a_job("SUCCEEDED", 1000), a_job("FAILED", 5000)]
    assert idle.last_use(ended, now=99.0) == 5.0
    assert idle.last_use([], now=99.0) == 0.0
    for status in ("PENDING", "RUNNING"):
        assert idle.last_use([*ended, a_job(status)], now=99.0) == 99.0


def test_it_is_to_go_once_it_was_unused_for_so_long() -> None:
    looks = [[a_job("RUNNING")], [a_job("PENDING")], CloudError("no answer"), []]

    def find_jobs() -> list[JobDetails]:
        found = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(found, CloudError):
            raise found
        return found

    assert idle.watch(MINUTES, find_jobs)
    assert looks == [[]], "not before the jobs had ended"


def test_a_second_watcher_takes_over(home: Path) -> None:
    def find_jobs() -> list[JobDetails]:
        (home / ".raypool-idle.pid").write_text(str(os.getpid() + 1))
        return [a_job("RUNNING")]

    assert not idle.watch(MINUTES, find_jobs)


# Ray leaves files open
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_all_machines_are_deleted_and_the_head_last(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: Any, providers: None
) -> None:
    gce = fake_gce.install(monkeypatch, home)
    content = gcp.write(draft("gcp", project=fake_gce.PROJECT, zone="us-central1-a", gpu="T4"))
    content["file_mounts"] = {}
    cluster = Cluster(content)
    cluster.up(home / "cluster.yaml", shell)
    [head] = gce.instances
    cluster.add_workers("worker", 2)
    config = home / "ray_bootstrap_config.yaml"
    config.write_text(json.dumps(cluster.config))
    stopped = home / "stopped"
    (home / "ray").write_text(f"#!/bin/sh\necho $1 >> {stopped}\n")
    (home / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    monkeypatch.setattr(idle, "LOOK_S", 0.0)
    failures = [OSError("the network is down for a moment")]
    left: list[set[str]] = []
    answer = gce.request
    make = providers_of_ray._get_node_provider
    not_made = [OSError("the metadata server does not answer yet")]

    def make_provider(*args: Any) -> Any:
        if not_made:
            raise not_made.pop()
        return make(*args)

    def request(uri: str, method: str = "GET", *args: Any, **kwargs: Any) -> Any:
        if method == "DELETE":
            assert stopped.exists(), "or the autoscaler would make others"
            if failures:
                raise failures.pop()
            left.append(set(gce.instances))
        return answer(uri, method, *args, **kwargs)

    monkeypatch.setattr(gce, "request", request)
    monkeypatch.setattr(providers_of_ray, "_get_node_provider", make_provider)
    idle.shut_down(config)
    assert not not_made
    assert not gce.instances
    assert left[-1] == {head}
    assert len(left) == 3


PROVIDER = """
class Provider:
    def __init__(self, config, name):
        self.name = name

    def non_terminated_nodes(self, tags):
        return ["head"] if tags else ["head", "one", "two"]

    def terminate_nodes(self, nodes):
        print("deleted", self.name, *nodes, flush=True)
"""

# Ray itself is not stopped: it ends with its namespace.
HEAD = """
set -e
ip link set lo up
{ray} start --head --disable-usage-stats --dashboard-host=127.0.0.1 --num-cpus=1 --object-store-memory=80000000 >/dev/null
export PATH=$HOME:$PATH PYTHONPATH=$HOME:$PYTHONPATH
exec {python} -m raypool.cluster.idle --minutes {minutes} --config $HOME/config.json
"""


@pytest.mark.ci
@pytest.mark.skipif(not CAN_UNSHARE, reason="unshare -Urn is not allowed here")
def test_on_a_real_head_the_watcher_is_let_in_and_deletes_what_nobody_uses(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("a" * 64)
    (home / "pretended.py").write_text(PROVIDER)
    provider = {"type": "external", "module": "pretended.Provider"}
    (home / "config.json").write_text(json.dumps({"cluster_name": "lab", "provider": provider}))
    (home / "ray").write_text("#!/bin/sh\necho ray $@\n")
    (home / "ray").chmod(0o755)
    ray = f"{sys.executable} -m ray.scripts.scripts"
    script = HEAD.format(ray=ray, python=sys.executable, minutes=MINUTES)
    done = subprocess.run(
        [*MACHINE, "bash", "-c", script],
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["ray stop", "deleted lab one two", "deleted lab head"]
