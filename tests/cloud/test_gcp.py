"""Clusters on Google Cloud: Ray's own provider makes machines of what we write, and a fake refuses
what Google would.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypool.cluster import checks, gcp, packages
from raypool.cluster.documents import documents_of
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError
from tests.cloud import fake_gce
from tests.cloud.fake_gce import FakeGce
from tests.cloud.ray_provider import Cluster

HEAD = NodeGroup(name="head", machine="n2-standard-4")
WORKER = NodeGroup(name="worker", machine="n1-standard-16", gpu="T4", gpus=4, most=8, spot=True)
PLAN = ClusterPlan(
    name="lab",
    provider="gcp",
    project=fake_gce.PROJECT,
    zone="us-central1-a",
    head=HEAD,
    workers=(WORKER,),
    packages=packages.default_packages("gcp"),
)


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, providers: None) -> FakeGce:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    gce = fake_gce.install(monkeypatch, tmp_path)
    packages.make_wheel()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.lock.txt").touch()
    return gce


def test_ray_makes_the_head_and_starts_it_with_a_token(
    gce: FakeGce, shell: Any, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(gcp.write(PLAN)))
    Cluster(gcp.write(PLAN)).up(file, shell)

    [head] = gce.instances.values()
    assert head["machineType"].endswith("/n2-standard-4")
    assert head["serviceAccounts"][0]["email"].startswith("ray-autoscaler-sa-v1@"), (
        "it may make machines"
    )
    [start] = [line for line in shell.commands if "ray start" in line]
    assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in start
    assert any("rsync" in line and "auth_token" in line for line in shell.commands)
    assert any("rsync" in line and "cluster.lock.txt" in line for line in shell.commands)
    assert any("uv pip install" in line and packages.LOCK in line for line in shell.commands)


def test_the_autoscaler_makes_workers_loses_one_and_gives_the_rest_back(gce: FakeGce) -> None:
    cluster = Cluster(gcp.write(PLAN))
    cluster.add_workers("worker", 3)
    workers = cluster.workers()
    assert len(workers) == 3
    assert gce.gpus == 12
    gce.preempt(workers[0])
    assert set(cluster.workers()) == set(workers[1:])
    for worker in workers[1:]:
        cluster.provider.terminate_node(worker)
    assert not gce.instances


WORKERS = [
    ("n1-standard-8", "V100", 1, True),
    ("n1-standard-8", "P100", 1, False),
    ("a2-highgpu-8g", "A100", 8, True),
    ("a2-ultragpu-1g", "A100-80G", 1, False),
    ("g2-standard-24", "L4", 2, True),
    ("a3-highgpu-8g", "H100", 8, True),
    ("n2-highmem-8", None, 0, True),
    ("n2-highmem-8", None, 0, False),
]


def test_all_kinds_of_workers_are_taken(gce: FakeGce) -> None:
    groups = tuple(
        NodeGroup(name=f"worker-{number}", machine=machine, gpu=gpu, gpus=gpus, most=2, spot=spot)
        for number, (machine, gpu, gpus, spot) in enumerate(WORKERS)
    )
    cluster = Cluster(gcp.write(replace(PLAN, workers=groups)))
    for group in groups:
        cluster.add_workers(group.name, 1)
    assert gce.machine_types() == sorted(group.machine for group in groups)


@pytest.mark.ci
def test_the_longest_name_that_we_take_is_taken(gce: FakeGce) -> None:
    name = "a" * gcp.NAME_LIMIT
    cluster = Cluster(gcp.write(replace(PLAN, name=name)))
    cluster.add_workers("worker", 1)
    with pytest.raises(Exception, match=r"resource\.name"):
        Cluster(gcp.write(replace(PLAN, name=name + "a"))).add_workers("worker", 1)


def no_termination(instance: dict[str, Any]) -> None:
    del instance["scheduling"]["onHostMaintenance"]


def as_ray_writes_it(instance: dict[str, Any]) -> None:
    instance["scheduling"] = [{"preemptible": True}]


def misspelt(instance: dict[str, Any]) -> None:
    instance["guestAccelerator"] = instance.pop("guestAccelerators")


def unknown_model(instance: dict[str, Any]) -> None:
    instance["scheduling"]["provisioningModel"] = "PREEMPTIBLE"


def other_zone(instance: dict[str, Any]) -> None:
    instance["disks"][0]["initializeParams"]["diskType"] = "zones/us-west1-b/diskTypes/pd-balanced"


def restarts(instance: dict[str, Any]) -> None:
    instance["scheduling"]["automaticRestart"] = True


@pytest.mark.ci
def test_what_google_refuses_we_refuse_first(gce: FakeGce) -> None:
    # Ray's own examples have a list there, and are said to work: that is a warning
    content = copy.deepcopy(gcp.write(PLAN))
    as_ray_writes_it(content["available_node_types"]["worker"]["node_config"])
    [document] = documents_of(yaml.safe_dump(content, sort_keys=False), "cluster.yaml")
    assert any("mapping, not a list" in warning for warning in checks.check(document))
    for spoil in (no_termination, misspelt, unknown_model, other_zone, restarts):
        content = copy.deepcopy(gcp.write(PLAN))
        spoil(content["available_node_types"]["worker"]["node_config"])
        with pytest.raises(Exception, match=r"HttpError 400|onHostMaintenance|live migration"):
            Cluster(content).add_workers("worker", 1)
        [document] = documents_of(yaml.safe_dump(content, sort_keys=False), "cluster.yaml")
        with pytest.raises(CloudError, match="line"):
            checks.check(document)


def test_a_machine_that_cannot_have_the_gpus_is_refused_by_the_generator() -> None:
    worker = replace(WORKER, machine="n1-standard-32", gpu="V100", gpus=2)
    with pytest.raises(CloudError, match="worker: n1-standard-32 cannot have 2 V100, only 4 or 8"):
        gcp.write(replace(PLAN, workers=(worker,)))


def test_a_plan_without_a_zone_is_refused() -> None:
    with pytest.raises(CloudError, match="Choose one with --zone"):
        gcp.write(replace(PLAN, zone=None))
