"""Manifests for Kubernetes: what is written is what Kubernetes, KubeRay and Ray's autoscaler
take.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from raypool.cluster import checks, kubernetes
from raypool.cluster.documents import documents_of
from raypool.cluster.kubernetes import DRAIN, how_to_connect, write
from raypool.cluster.packages import default_packages
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError
from raypool.profile_files import named_profile

HEAD = NodeGroup(name="head")
T4 = NodeGroup(name="t4", gpu="T4", gpus=4, most=9, spot=True)
CODE = "https://example.org/code.zip"


def plan(*workers: NodeGroup, head: NodeGroup = HEAD, **changes: Any) -> ClusterPlan:
    return ClusterPlan(
        name="lab",
        provider="kubernetes",
        head=head,
        workers=workers,
        packages=default_packages("kubernetes", ["raypool @ https://a.org/a.whl#sha256=1a"]),
        **changes,
    )


PLANS = {
    "GPUs on spot machines": plan(T4),
    "of a size": plan(NodeGroup(name="h100", gpu="H100", gpus=8, least=2, most=2)),
    "any GPU": plan(NodeGroup(name="gpu", gpus=1, least=1, most=4)),
    "several groups": plan(T4, NodeGroup(name="parameter-server", least=3, most=3), python="3.12"),
    "a head with GPUs": plan(head=NodeGroup(name="head", gpu="V100", gpus=2)),
    "nothing to install": ClusterPlan(name="lab", provider="kubernetes", head=HEAD, workers=(T4,)),
}


def job(plan: ClusterPlan, entrypoint: str = "python train.py") -> dict[str, Any]:
    """Return a RayJob whose placeholder is filled in."""
    manifest = write(replace(plan, job=entrypoint))
    manifest["spec"]["runtimeEnvYAML"] = manifest["spec"]["runtimeEnvYAML"].replace(
        kubernetes.CODE, CODE
    )
    return manifest


def warnings_about(manifest: dict[str, Any]) -> tuple[str, ...]:
    """Return what is said of a manifest that is not refused."""
    [document] = documents_of(yaml.safe_dump(manifest, sort_keys=False), "lab.yaml")
    return checks.check(document)


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


# --- what is written ------------------------------------------------------------------------------


def as_pod(group: dict[str, Any]) -> dict[str, Any]:
    """Return a pod of a group, with what the operator gives each."""
    metadata = {"name": "pod", "labels": group["labels"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": group["template"]["spec"],
    }


def test_kubernetes_takes_the_pods() -> None:
    for plan in PLANS.values():
        for group in groups(write(plan)):
            kubernetes_validate.validate(
                as_pod(group), kubernetes_validate.latest_version(), strict=True
            )
    pod = as_pod(groups(write(PLANS["of a size"]))[0])
    pod["spec"]["containers"][0]["resurces"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resurces"):
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_what_is_written_is_found_to_be_right(plan: ClusterPlan) -> None:
    assert not warnings_about(write(plan))
    assert not warnings_about(job(plan))


def test_the_image_has_the_minor_version_of_python() -> None:
    [head, *_] = groups(write(replace(PLANS["any GPU"], python="3.11.9")))
    assert head["template"]["spec"]["containers"][0]["image"].endswith("-py311")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_autoscaler_of_ray_reads_the_groups(plan: ClusterPlan) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )
    from ray.autoscaler._private.util import validate_config

    manifest = write(plan)
    manifest["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(manifest)
    validate_config(config)
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == (3 * plan.head.gpus)
    for group in plan.workers:
        there = types[group.name]
        assert (there["min_workers"], there["max_workers"]) == (group.least, group.most)
        assert there["resources"].get("GPU", 0) == group.gpus
        if group.gpu:  # a pool that wants this kind makes the group grow from nothing
            assert there["resources"][f"accelerator_type:{group.gpu}"] == 1
        assert there["labels"]["raypool/role"] == group.name


def test_a_group_grows_for_the_kind_of_gpu_that_a_pool_asks_for() -> None:
    """The kind that `WorkerResources(accelerator_type=...)` asks Ray for is the one that the
    manifest promises.
    """
    from raypool.backends.ray.demand import demand_of
    from raypool.profiles import WorkerResources

    demand = demand_of(
        WorkerResources(gpus=1, accelerator_type="T4"),
        has_chosen_gpus=False,
        per_gpu=None,
        nodes=[],
    )
    [worker] = write(plan(T4))["spec"]["workerGroupSpecs"]
    assert set(worker["resources"]) <= set(demand.bundle)


NODES = {
    "GKE": {
        "cloud.google.com/gke-nodepool": "p",
        "cloud.google.com/gke-accelerator": "nvidia-tesla-t4",
    },
    "EKS": {"eks.amazonaws.com/nodegroup": "p", "eks.amazonaws.com/capacityType": "ON_DEMAND"},
    "Karpenter": {"karpenter.sh/nodepool": "p", "karpenter.sh/capacity-type": "on-demand"},
    "AKS": {"kubernetes.azure.com/agentpool": "p"},
}
SPOT = {
    "GKE": {"cloud.google.com/gke-spot": "true"},
    "EKS": {"eks.amazonaws.com/capacityType": "SPOT"},
    "Karpenter": {"karpenter.sh/capacity-type": "spot"},
    "AKS": {"kubernetes.azure.com/scalesetpriority": "spot"},
}


def fits(group: NodeGroup, labels: dict[str, str]) -> bool:
    """Whether Kubernetes would put pods of a group on a node: one term must hold altogether."""
    [worker] = write(plan(group))["spec"]["workerGroupSpecs"]
    affinity = worker["template"]["spec"]["affinity"]["nodeAffinity"]
    [terms] = affinity["requiredDuringSchedulingIgnoredDuringExecution"].values()

    def holds(rule: dict[str, Any]) -> bool:
        if rule["operator"] == "DoesNotExist":
            return rule["key"] not in labels
        return labels.get(rule["key"]) in rule["values"]

    return any(all(map(holds, term["matchExpressions"])) for term in terms)


def test_pods_find_spot_machines_and_gpus_in_any_cloud() -> None:
    on_demand = NodeGroup(name="t4", gpu="T4", gpus=1, most=1)
    for cloud, labels in NODES.items():
        assert fits(on_demand, labels), cloud
        assert fits(T4, labels | SPOT[cloud]), cloud
        assert not fits(T4, labels), f"{cloud}: a spot group on a machine on demand"
    other = NODES["GKE"] | {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert not fits(on_demand, other)
    assert not fits(T4, other | SPOT["GKE"])
    [worker] = write(plan(T4))["spec"]["workerGroupSpecs"]
    tolerated = {each["key"] for each in worker["template"]["spec"]["tolerations"]}
    assert tolerated >= {next(iter(SPOT["GKE"])), next(iter(SPOT["AKS"])), "nvidia.com/gpu"}


def test_the_command_runs_where_it_is_told_to() -> None:
    spec = job(plan(T4), "python train.py --lr 0.1")["spec"]
    assert spec["entrypoint"] == "python train.py --lr 0.1"
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"working_dir": CODE}
    assert spec["shutdownAfterJobFinishes"] is True


def test_pods_end_after_ray_has_drained() -> None:
    for group in groups(write(plan(T4, NodeGroup(name="steady", gpus=1, least=1, most=1)))):
        pod = group["template"]["spec"]
        [drain] = [
            variable["value"]
            for variable in pod["containers"][0]["env"]
            if variable["name"] == DRAIN
        ]
        assert 0 < int(drain) < pod["terminationGracePeriodSeconds"]


def test_the_profile_that_is_shown_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = how_to_connect("lab")
    start = next(number for number, line in enumerate(lines) if "[profiles.lab]" in line)
    (tmp_path / "raypool.toml").write_text("\n".join(lines[start:]))
    assert tomllib.loads("\n".join(lines[start:]))
    monkeypatch.chdir(tmp_path)
    profile = named_profile("lab")
    assert profile.address == "ray://127.0.0.1:10001"
    assert profile.token_file is not None
    commands = "\n".join(line.strip() for line in lines[1:3])
    assert subprocess.run(["bash", "-n", "-c", commands], check=False).returncode == 0


names = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@st.composite
def plans(draw: Callable[..., Any]) -> ClusterPlan:
    workers = []
    for name in draw(
        st.lists(names.filter(lambda name: name != "headgroup"), max_size=3, unique=True)
    ):
        least = draw(st.integers(0, 5))
        gpus = draw(st.integers(0, 8))
        kind = draw(st.sampled_from([None, "T4", "L4", "A100", "H100"])) if gpus else None
        most, spot = least + draw(st.integers(0, 5)), draw(st.booleans())
        workers.append(NodeGroup(name=name, gpu=kind, gpus=gpus, least=least, most=most, spot=spot))
    return ClusterPlan(
        name=draw(names),
        provider="kubernetes",
        head=HEAD,
        workers=tuple(workers),
        packages=("a>1", "raypool @ https://a.org/a'b.whl#sha256=1a"),
    )


@given(plans())
@settings(max_examples=20)
def test_any_plan_gives_manifests_that_are_right(plan: ClusterPlan) -> None:
    for manifest in write(plan), job(plan):
        assert not warnings_about(manifest)


# --- what KubeRay takes ---------------------------------------------------------------------------


KUBERAY_CRD = os.environ.get("RAYPOOL_KUBERAY_CRD", "")
"""A folder with ray.io_rayclusters.yaml and ray.io_rayjobs.yaml of KubeRay."""

with_kuberay = pytest.mark.skipif(
    not KUBERAY_CRD, reason="RAYPOOL_KUBERAY_CRD names no folder with definitions of KubeRay"
)


@functools.cache
def definition(kind: str) -> dict[str, Any]:
    """Return what KubeRay's own definition says of a kind."""
    content = yaml.load(
        (Path(KUBERAY_CRD) / f"ray.io_{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader
    )
    [version] = [each for each in content["spec"]["versions"] if each["name"] == "v1"]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """Return a definition of Kubernetes as a JSON schema that takes no setting that it does not
    know.
    """
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {
        key: strict(value)
        for key, value in schema.items()
        if key not in ("format", "required", "properties", "description")
    }
    properties = schema.get("properties", {})
    if properties:
        result["properties"] = {name: strict(value) for name, value in properties.items()}
        result.setdefault(
            "additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        )
    # The API server fills in what has a default before it looks for what is missing.
    result["required"] = [
        name for name in schema.get("required", ()) if "default" not in properties.get(name, {})
    ]
    return result


def loose(kind: str) -> dict[str, Any]:
    """Return KubeRay's definition of a kind; what Kubernetes itself knows of metadata does not
    stand there.
    """
    schema = definition(kind)
    return {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}


@pytest.mark.long
@with_kuberay
def test_kuberay_takes_the_manifests() -> None:
    for plan in PLANS.values():
        for manifest in write(plan), write(replace(plan, job="python train.py")):
            errors = [
                error.message
                for error in Draft202012Validator(loose(manifest["kind"])).iter_errors(manifest)
            ]
            assert errors == []
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert list(Draft202012Validator(loose("RayJob")).iter_errors(manifest))


# --- files of others ------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(write(plan(T4))))
    return path


REFUSAL = 'Error from server (BadRequest): strict decoding error: unknown field "spec.maxReplica"'


def test_kubernetes_is_asked_and_its_words_are_told(
    file: Path, kubectl: Callable[[str], None], tmp_path: Path
) -> None:
    """`kubectl` is the test's: it notes how it was called, and answers for a cluster that
    refuses.
    """
    kubectl(
        f"""echo "$@" >> {tmp_path}/calls; if [ "$1" = apply ]; then echo '{REFUSAL}' >&2; exit 1; fi"""
    )
    with pytest.raises(CloudError) as caught:
        checks.check_file(file)
    assert str(caught.value) == f"{file}: Kubernetes: {REFUSAL}"
    assert (tmp_path / "calls").read_text().splitlines()[-1] == f"apply --dry-run=server -f {file}"

    kubectl(
        "if [ $1 = apply ]; then echo 'Warning: it is old' >&2; echo raycluster.ray.io/lab"
        " created; fi"
    )
    assert checks.check_file(file) == (f"{file}: Kubernetes: Warning: it is old",)


def test_a_kubernetes_that_cannot_be_asked_refuses_nothing(
    file: Path, kubectl: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl("echo 'The connection was refused' >&2; exit 1")
    [said] = checks.check_file(file)
    assert "Kubernetes did not check this file" in said
    assert said.endswith("kubectl cannot reach a cluster (The connection was refused).")
    monkeypatch.setenv("PATH", "")
    [said] = checks.check_file(file)
    assert said.endswith("kubectl is not installed here.")
    manifest = yaml.safe_load(file.read_text())
    manifest["spec"]["workerGroupSpecs"][0]["rayStartParams"] = {"num-gpus": "8"}
    file.write_text(yaml.safe_dump(manifest))
    with pytest.raises(CloudError, match="Ray is told of 8 GPUs"):
        checks.check_file(file)


def test_a_cluster_that_lets_strangers_in_is_warned_of() -> None:
    manifest = write(plan(T4))
    del manifest["spec"]["authOptions"]
    manifest["spec"]["headGroupSpec"]["serviceType"] = "LoadBalancer"
    door, token = sorted(warnings_about(manifest))
    assert "LoadBalancer opens Ray's unencrypted ports" in door
    assert "Ray requires no token" in token


def test_gpus_by_other_names_are_left_to_kubernetes() -> None:
    manifest = write(plan(T4))
    [worker] = manifest["spec"]["workerGroupSpecs"]
    worker["rayStartParams"] = {"num-gpus": "2"}
    worker["template"]["spec"]["containers"][0]["resources"]["limits"] = {
        "cpu": "4",
        "amd.com/gpu": 2,
    }
    assert not warnings_about(manifest)
