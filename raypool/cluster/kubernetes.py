"""Files for Kubernetes: writes KubeRay's RayCluster and RayJob, and checks them.

The operator takes the role of Ray's launcher: it makes pods, starts Ray in them, and resizes the
groups. Workers need no watcher: Kubernetes tells the pods of a machine that is taken back to end,
and `ray start --block`, their first process, then drains the node.

Source: KubeRay 1.7, `apis/ray/v1/raycluster_types.go`, `rayjob_types.go` and
`controllers/ray/common/pod.go` (what the operator adds to a pod); Ray 2.60, `_private/node.py`
(what it does at SIGTERM) and `autoscaler/_private/kuberay/autoscaling_config.py` (how the
autoscaler reads the groups); GKE's pages "Spot VMs" (how long pods have) and "Run GPUs" (labels of
its nodes); EKS's "Managed node groups" and AKS's "Add a spot node pool" (labels and taints).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator

from raypool.cluster import packages, software
from raypool.cluster.documents import PLACEHOLDER, Findings, form
from raypool.cluster.launcher_file import (
    ACCELERATOR,
    CLIENT_PORT,
    HEALTH_CHECKS,
    IDLE_MINUTES,
    PORT,
    ROLE,
)
from raypool.cluster.machines import catalogue
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError
from raypool.profiles import DASHBOARD_PORT

GPU = "nvidia.com/gpu"  # what NVIDIA's device plugin calls the GPUs of a node
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"  # `ray start --block` drains so long after SIGTERM

GKE_SPOT = "cloud.google.com/gke-spot"
AKS_SPOT = "kubernetes.azure.com/scalesetpriority"
SPOT_LABELS = {
    GKE_SPOT: "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    AKS_SPOT: "spot",
}
"""The labels of nodes on spot machines: GKE, EKS by node groups or by Karpenter, AKS."""

SPOT_TAINTS = (GKE_SPOT, AKS_SPOT)  # two of these labels are taints, too

# No file can travel to a pod. This is to be filled in where raypool was installed from a folder.
RAYPOOL = "<address of a wheel of raypool: https://...#sha256=...>"
# Pods cannot see the folder that a job is submitted from.
CODE = "<address of a zip of your code: https://...>"

# from SIGTERM to SIGKILL; GKE gives pods on spot machines 15 s, whatever they ask for
GRACE_S, SPOT_GRACE_S = 60, 15
END_S = 5  # of that, what Ray needs to end after draining

# the operator appends to it, and Kubernetes allows 63 letters
LONGEST_NAME = {"RayCluster": 53, "RayJob": 47}

PATIENCE_S = 60  # for an answer to `kubectl`

# What a pod asks for, for each of its GPUs: it fits where a machine has 4 vCPUs and 15 GB for each,
# of which Kubernetes keeps some.
CPUS, MEMORY_GB = 3, 12


def write(plan: ClusterPlan) -> dict[str, Any]:
    """Return the RayCluster of a plan, autoscaled if a group may grow; with a job, the RayJob that
    makes the cluster, runs the command on its head, and deletes the cluster.

    A group with a `gpu` asks for it by GKE's label of nodes; in other clouds, and without a `gpu`,
    pods run on any nodes that have GPUs.

    Raises:
        CloudError: There is no GPU with this name.
    """
    grows = any(group.most > group.least for group in plan.workers)
    autoscaling = {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": IDLE_MINUTES * 60},
    }
    # a head without GPUs offers no CPUs either, so tasks stay off it
    head = _group(plan, plan.head, {} if plan.head.gpus else {"num-cpus": "0"})
    [container] = head["template"]["spec"]["containers"]
    settings = (each.split("=") for each in HEALTH_CHECKS)
    container["env"] += [{"name": name, "value": value} for name, value in settings]
    ports = {"gcs-server": PORT, "dashboard": DASHBOARD_PORT, "client": CLIENT_PORT}
    container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    workers = []
    for group in plan.workers:
        described = _group(plan, group, {})
        template = described.pop("template")
        # user code needs no access to Kubernetes
        template["spec"]["automountServiceAccountToken"] = False
        sizes = {"replicas": group.least, "minReplicas": group.least, "maxReplicas": group.most}
        # Ray sees the kind of an existing GPU; the autoscaler has to know it before the first one.
        offers = {"resources": {f"accelerator_type:{group.gpu}": "1"}} if group.gpu else {}
        workers.append(
            {"groupName": group.name, **sizes, **described, **offers, "template": template}
        )
    spec: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        **(autoscaling if grows else {}),
        "headGroupSpec": head,
        "workerGroupSpecs": workers,
    }
    if plan.job is not None:
        spec = {
            "entrypoint": plan.job,
            "runtimeEnvYAML": f'working_dir: "{plan.working_dir or CODE}"\n',
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 300,  # so long its logs can be read there
            "rayClusterSpec": spec,
        }
    kind = "RayCluster" if plan.job is None else "RayJob"
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": plan.name}, "spec": spec}


def how_to_connect(name: str) -> list[str]:
    """Return lines on getting the token and ports of a RayCluster, and its profile."""
    token = f"~/.ray/{name}.token"
    secret = f"kubectl get secret {name} -o jsonpath='{{.data.auth_token}}'"
    return [
        (
            "The operator creates a token. Fetch it once, then keep the second command running"
            " while you work:"
        ),
        f"  (umask 077; mkdir -p ~/.ray; {secret} | base64 -d > {token})",
        f"  kubectl port-forward service/{name}-head-svc {CLIENT_PORT} {DASHBOARD_PORT}",
        f'parpool(profile="{name}") uses the cluster with these lines in raypool.toml:',
        f"  [profiles.{name}]",
        f'  address = "ray://127.0.0.1:{CLIENT_PORT}"',
        f'  token_file = "{token}"',
    ]


def _group(plan: ClusterPlan, group: NodeGroup, start: dict[str, str]) -> dict[str, Any]:
    """Return what head and workers have in common; `start` has options of `ray start`."""
    kind = {ACCELERATOR: group.gpu} if group.gpu else {}
    market = "spot" if group.spot else "on-demand"
    grace_s = SPOT_GRACE_S if group.spot else GRACE_S
    terms, tolerations = _nodes(group)
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    beside = max(group.gpus, 1)
    amounts = {"cpu": str(CPUS * beside), "memory": f"{MEMORY_GB * beside * 1000}M"}
    if group.gpus:
        amounts[GPU] = str(group.gpus)
    # The operator appends `&& ulimit ...; ray start ...`: without the exit, Ray would start even
    # if nothing could be installed, and fail later, without saying why.
    install = {"args": [f"{_install(plan)} || exit 1"]} if plan.packages else {}
    python = "".join(plan.python.split(".")[:2])  # as in the names of Ray's images
    cuda = "-gpu" if group.gpus else ""
    container = {
        "name": "ray",
        "image": f"rayproject/ray:{version('ray')}-py{python}{cuda}",
        **install,
        "env": [{"name": DRAIN, "value": str(grace_s - END_S)}],
        # limits equal requests: memory that is lent beyond them is taken back by force
        "resources": {"requests": amounts, "limits": dict(amounts)},
    }
    pod = {
        "terminationGracePeriodSeconds": grace_s,
        **({"affinity": {"nodeAffinity": required}} if terms else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        "containers": [container],
    }
    return {
        "rayStartParams": start,
        "labels": {ROLE: group.name, "ray.io/market-type": market, **kind},
        "template": {"spec": pod},
    }


def _install(plan: ClusterPlan) -> str:
    """Return the command that installs a plan's packages in a pod."""
    torch = packages.version_of("torch", plan.packages)
    build = software.torch_build(plan.gpus, torch)
    lines = list(plan.packages)
    index = ""
    if build != software.AUTO:
        index = f"--extra-index-url https://download.pytorch.org/whl/{build} "
        lines = [f"{line}+{build}" if line == f"torch=={torch}" else line for line in lines]
    if packages.ships_wheel(lines):
        lines.append(packages.address() or f"raypool @ {RAYPOOL}")
    return f"pip install --no-cache-dir {index}{' '.join(map(shlex.quote, lines))}"


def _nodes(group: NodeGroup) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return terms of nodes for a group's pods, of which one must hold, and tolerated taints."""

    def has(label: str, value: str) -> dict[str, Any]:
        return {"key": label, "operator": "In", "values": [value]}

    tolerations = []
    if group.gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    kind = []
    if group.gpu is not None:
        accelerator = str(catalogue("gce").gpu(group.gpu).accelerator)
        kind = [has("cloud.google.com/gke-accelerator", accelerator)]
    if not group.spot:
        # other clouds have no label of their own for a kind of GPU
        elsewhere = [{"key": "cloud.google.com/gke-nodepool", "operator": "DoesNotExist"}]
        alternatives = [kind, elsewhere] if kind else []
    else:
        alternatives = [
            [has(label, value), *(kind if label == GKE_SPOT else [])]
            for label, value in SPOT_LABELS.items()
        ]
        for label in SPOT_TAINTS:
            taint = {"key": label, "operator": "Equal", "value": SPOT_LABELS[label]}
            tolerations.append({**taint, "effect": "NoSchedule"})
    return [{"matchExpressions": each} for each in alternatives], tolerations


# --- checks of manifests --------------------------------------------------------------------------


def is_manifest(content: object) -> bool:
    """Whether it is for KubeRay's operator."""
    return isinstance(content, dict) and str(content.get("apiVersion")).startswith("ray.io/")


def check(findings: Findings) -> None:
    """Note open access, and what Kubernetes does not notice although it cannot work."""
    kind = str(findings.at("kind"))
    if kind not in LONGEST_NAME:
        return  # Kubernetes checks KubeRay's other kinds, and refuses unknown ones
    longest = LONGEST_NAME[kind]
    name = form(
        rf"[a-z]([-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?",
        f"have at most {longest} lower-case letters, digits and -, begin with a letter and not end"
        " with -",
    )
    metadata = {"required": ["name"], "properties": {"name": name}}
    findings.check_schema(
        Draft7Validator({"required": ["metadata"], "properties": {"metadata": metadata}})
    )
    spec = findings.within("spec")
    if kind == "RayJob":
        _check_job(spec)
        has_cluster = spec.at("clusterSelector")
        spec = spec.within("rayClusterSpec")
        if spec.at() is None and has_cluster:
            return
    if spec.at("authOptions", "mode") != "token":
        spec.doubt(
            "Ray requires no token: anyone who can reach it can run code. Set `authOptions:"
            " {mode: token}`.",
            "authOptions",
            "mode",
        )
    head = spec.within("headGroupSpec")
    for at in (("serviceType",), ("headService", "spec", "type")):
        if (service := head.at(*at)) in ("LoadBalancer", "NodePort"):
            text = (
                f"{service} opens Ray's unencrypted ports to anyone who can reach the nodes. Use"
                " `kubectl port-forward` instead."
            )
            head.doubt(text, *at)
    groups = spec.at("workerGroupSpecs")
    count = len(groups) if isinstance(groups, list) else 0
    for group in (head, *(spec.within("workerGroupSpecs", number) for number in range(count))):
        _check_group(group)


def _check_job(spec: Findings) -> None:
    """Check what a RayJob runs."""
    if not spec.at("entrypoint") and spec.at("submissionMode") != "InteractiveMode":
        spec.add("entrypoint is missing. Set the command to run, such as python train.py.")
    environment = str(spec.at("runtimeEnvYAML"))
    folder = re.search(r"^\s*working_dir:\s*[\"']?([^\"'\n]+)", environment, re.MULTILINE)
    if folder and not re.match(rf"\w+://|/|{PLACEHOLDER}", folder[1]):
        spec.add(
            f"working_dir is {folder[1]!r}, which pods do not have; it must be the address of a"
            " zip, or an absolute path in the image.",
            "runtimeEnvYAML",
        )


def _check_group(group: Findings) -> None:
    """Note a group of pods that can have no size, or whose Ray is told of too many GPUs."""
    least, most = group.at("minReplicas"), group.at("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        group.add(f"minReplicas ({least}) is more than maxReplicas ({most}).", "maxReplicas")
    limits = group.at("template", "spec", "containers", 0, "resources", "limits")
    named = {
        str(name): str(count)
        for name, count in (limits.items() if isinstance(limits, dict) else ())
    }
    if any(re.search(r"gpu$|/mig-", name) for name in named if name != GPU):
        return  # parts of GPUs, and those of other makers
    # Work would wait for missing GPUs forever. Unless told, Ray takes the number of the limits.
    has = named.get(GPU, "0")
    for at in (("resources", "GPU"), ("rayStartParams", "num-gpus")):
        told = str(group.at(*at))
        if told.isdecimal() and has.isdecimal() and int(told) > int(has):
            text = f"Ray is told of {told} GPUs, but the pod's limits allow {has}. Leave it out."
            group.add(text, *at)


def ask(path: str | Path) -> tuple[str, ...]:
    """Let the cluster that `kubectl` reaches check a file, in a dry run.

    Returns:
        Its warnings, or a warning that it could not be asked.

    Raises:
        CloudError: It refuses the file; the message is Kubernetes'.
    """
    unasked = f"{path}: Kubernetes did not check this file, so unknown settings are not found"
    if shutil.which("kubectl") is None:
        return (f"{unasked}: kubectl is not installed here.",)
    # asks the server for its version, too, and so finds out at once whether there is one
    if (answer := _kubectl("version", "--request-timeout=10s")) is None or answer.returncode:
        why = answer.stderr.strip().splitlines()[-1:] if answer else []
        return (
            f"{unasked}: kubectl cannot reach a cluster{''.join(f' ({line})' for line in why)}.",
        )
    answer = _kubectl("apply", "--dry-run=server", "-f", str(path))
    if answer is None:
        return (f"{unasked}: it did not answer within {PATIENCE_S} s.",)
    told = tuple(
        f"{path}: Kubernetes: {line}" for line in answer.stderr.splitlines() if line.strip()
    )
    if answer.returncode:
        raise CloudError("\n".join(told) or f"{path}: Kubernetes refuses it without a reason.")
    return told


def _kubectl(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Run kubectl; None if it does not end in time."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        return subprocess.run(
            ["kubectl", *words],
            stdin=subprocess.DEVNULL,  # it could ask for a password
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    return None
