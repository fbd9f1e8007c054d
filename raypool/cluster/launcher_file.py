"""Files for Ray's launcher: the entries that all providers share, for installation and start of
Ray.

Every cluster requires a token, binds the dashboard to localhost, and notices a lost machine within
seconds.

Source: Ray's `autoscaler/_private/updater.py` (the commands are run in this order, each by a login
shell) and the page "Cluster YAML Configuration Options" of its documentation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from raypool.cluster import packages, software
from raypool.cluster.documents import Findings
from raypool.cluster.machines import CPUS_PER_GPU, OF_PROVIDERS, catalogue
from raypool.cluster.plan import ClusterPlan, NodeGroup
from raypool.errors import CloudError

TOKEN = "~/.ray/auth_token"  # where Ray looks for it, on every machine
PORT = 6379  # of the head, which the workers join
CLIENT_PORT = 10001  # of the head, for Ray Client; Ray's default
IDLE_MINUTES = 10  # a machine without work is released after this time
START = "ray start"  # marks a command that starts Ray

FAST_NETWORKS = ("p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6-", "a3-", "a4-")
"""The beginnings of names of machines that have EFA or GPUDirect."""

INSTALL_DRIVER = (
    "! grep -qs 0x10de /sys/bus/pci/devices/*/vendor || nvidia-smi -L || (sudo apt-get update -qq"
    " && sudo apt-get install -yq linux-modules-nvidia-{0}-server-$(uname -r)"
    " nvidia-headless-no-dkms-{0}-server nvidia-utils-{0}-server && sudo modprobe nvidia)"
)
"""Installs a branch of NVIDIA's driver on an Ubuntu that has a GPU (0x10de) and no driver."""

# All packages are apart from those of the image, whose Python may differ.
ENVIRONMENT = "~/raypool-venv"
UV = "0.13.9"  # makes the environment and its Python, and installs packages into it

ROLE = "raypool/role"  # the label with the group of a machine
ACCELERATOR = "ray.io/accelerator-type"  # Ray's own label with the kind of GPU

# By default Ray gives up a silent machine after 65 s (5 times 3 s + 10 s), so after 8 s.
HEALTH_CHECKS = (
    "RAY_health_check_period_ms=1000",
    "RAY_health_check_timeout_ms=2000",
    "RAY_health_check_failure_threshold=3",
)


class Rented(NamedTuple):
    """What a `node_config` rents: the machine type, its GPUs, and whether it is a spot machine."""

    machine: str
    gpu: str | None
    gpus: int
    is_spot: bool


def launcher_file(
    plan: ClusterPlan,
    provider: Mapping[str, Any],
    node_config: Callable[[NodeGroup], dict[str, Any]],
) -> dict[str, Any]:
    """Return a file for Ray's launcher, for rented machines.

    `provider` is the entry about the provider; `node_config` returns its settings for a group.

    Raises:
        CloudError: The plan has no zone, or a machine cannot have its GPUs.
    """
    if plan.zone is None:
        raise CloudError(
            "No zone is set, and none is known to have the GPUs. Choose one with --zone."
        )
    known = catalogue(OF_PROVIDERS[plan.provider])
    for group in plan.groups:
        if group.machine not in known.machines:
            continue  # a newer one: the check of the file warns
        try:
            known.check(group.machine, group.gpu, group.gpus)
        except CloudError as error:
            raise CloudError(f"{group.name}: {error}") from None
    most = sum(group.most for group in plan.workers) if plan.most is None else plan.most
    return {
        "cluster_name": plan.name,
        "provider": dict(provider),
        "auth": login(plan),
        "max_workers": most,
        "idle_timeout_minutes": IDLE_MINUTES,
        "head_node_type": plan.head.name,
        "available_node_types": {
            group.name: {
                "resources": _resources(plan, group),
                "labels": {ROLE: group.name} | ({ACCELERATOR: group.gpu} if group.gpu else {}),
                "min_workers": group.least,
                "max_workers": group.most,
                **({"priority": group.priority} if group.priority else {}),
                "node_config": node_config(group),
            }
            for group in plan.groups
        },
        **({"docker": {"image": plan.image, "container_name": "raypool"}} if plan.image else {}),
        **commands(plan),
    }


def login(plan: ClusterPlan) -> dict[str, str]:
    """Return the entry about the login on the machines."""
    key = {"ssh_private_key": plan.ssh_key} if plan.ssh_key else {}
    return {"ssh_user": plan.ssh_user, **key}


def _resources(plan: ClusterPlan, group: NodeGroup) -> dict[str, int]:
    if group is plan.head and not group.gpus:
        return {"CPU": 0}  # tasks stay off the head
    shape = catalogue(OF_PROVIDERS[plan.provider]).shape(group.machine)
    cpus = shape.vcpus or CPUS_PER_GPU * max(group.gpus, 1)
    if not group.gpus:
        return {"CPU": cpus}
    # A machine tells Ray its kind of GPU; the autoscaler has to know it before there is one.
    kind = {f"accelerator_type:{group.gpu}": 1} if group.gpu else {}
    return {"CPU": cpus, "GPU": group.gpus, **kind}


def commands(plan: ClusterPlan) -> dict[str, Any]:
    """Return the entries for copying, installing and starting."""
    is_watched = plan.provider in OF_PROVIDERS and plan.idle_shutdown_minutes > 0
    idle = _in_background("idle", f"--minutes {plan.idle_shutdown_minutes:g}")
    docker = ["sudo chmod a+rw /var/run/docker.sock"] if plan.image else []  # of its one user
    registry = (plan.image or "").partition("/")[0]
    if registry.endswith(("gcr.io", "pkg.dev")):
        docker.append(f"gcloud auth configure-docker --quiet {shlex.quote(registry)}")
    # Empty entries stay: for a missing one, Ray takes defaults that open the dashboard to everybody
    # and install an old version.
    return {
        "file_mounts": {TOKEN: TOKEN, **package_mounts(plan)},
        "initialization_commands": docker,
        "setup_commands": setup_commands(plan),
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [*head_commands(), *([idle] if is_watched else [])],
        "worker_start_ray_commands": worker_commands(plan.provider),
    }


def setup_commands(plan: ClusterPlan) -> list[str]:
    """Return the commands that install a plan's packages; they may run again on a machine."""
    if not plan.packages:
        return []  # Ray has to be on the PATH already
    if plan.image:
        return [f"python -m pip install -r {' '.join(package_mounts(plan))}"]
    driver = software.image(plan.provider, plan.gpus) if plan.provider in OF_PROVIDERS else {}
    build = software.torch_build(plan.gpus, packages.version_of("torch", plan.packages))
    is_new = not any(software.why_no_kernels(gpu, "cu130") for gpu in plan.gpus)
    if plan.provider == "sky" and is_new:
        build = software.AUTO  # its images have drivers of several ages
    install = [
        f"~/.local/bin/uv pip install --python {ENVIRONMENT}/bin/python",
        f"--torch-backend={build}",
        # the wheel may have changed under the same version
        f"--reinstall-package raypool -r {packages.LOCK}",
        *(there for there in package_mounts(plan) if there != packages.LOCK),
    ]
    path = f'export PATH="{ENVIRONMENT.replace("~", "$HOME")}/bin:$PATH"'
    return [
        (
            "set -o pipefail; [ -x ~/.local/bin/uv ] || curl -LsSf"
            f" https://astral.sh/uv/{UV}/install.sh | sh"
        ),
        f"~/.local/bin/uv venv --allow-existing --python {shlex.quote(plan.python)} {ENVIRONMENT}",
        *([INSTALL_DRIVER.format(driver["driver"])] if driver.get("install_driver") else []),
        " ".join(install),
        f"grep -qxF {shlex.quote(path)} ~/.bashrc || echo {shlex.quote(path)} >> ~/.bashrc",
    ]


def package_mounts(plan: ClusterPlan) -> dict[str, str]:
    """Return the mounts of the lock file and, unless it names another raypool, the wheel."""
    if not plan.packages:
        return {}
    wheel = packages.wheel_name()
    ships = packages.ships_wheel(plan.packages)
    return {
        packages.LOCK: plan.lock,
        **({f"{packages.FOLDER}/{wheel}": f"{packages.CACHE}/{wheel}"} if ships else {}),
    }


def head_commands() -> list[str]:
    """Return the commands that start Ray on the head."""
    options = "--dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml"
    return ["ray stop", _start(f"--head --port={PORT} {options}", HEALTH_CHECKS)]


def worker_commands(provider: str) -> list[str]:
    """Return the commands that start Ray on a worker, and the watcher for preemption notices."""
    start = ["ray stop", _start(f"--address=$RAY_HEAD_IP:{PORT}")]
    watcher = _in_background("preemption", f"--cloud {provider}")
    return [*start, watcher] if provider in OF_PROVIDERS else start


def _start(options: str, settings: Iterable[str] = ()) -> str:
    exports = " ".join(["RAY_AUTH_MODE=token", *settings])
    # Without the first option, Ray asks at the terminal whether it may report its usage.
    start = f"{START} --disable-usage-stats {options}"
    return f"ulimit -n 65536; export {exports}; {start}"


def _in_background(module: str, options: str) -> str:
    # setsid and nohup: the program outlives the shell
    return (
        f"setsid nohup python -m raypool.cluster.{module} {options} </dev/null"
        f" >~/raypool-{module}.log 2>&1 &"
    )


def check_resources(node: Findings, gpu: str | None, gpus: int, is_filled_in: bool = False) -> None:
    """Note where a node type tells Ray of other GPUs than the machine has, and torch without
    kernels for them.

    Ray believes it: with too many GPUs, work waits forever; with too few, some are idle. A user may
    choose another number of CPUs. `is_filled_in` says whether Ray asks the provider for a missing
    number.
    """
    resources = node.at("resources") or {}
    told = resources.get("GPU", gpus if is_filled_in else 0)
    if told != gpus:
        has = f"{gpus} {gpu}" if gpus else "none"
        text = f"Ray is told of {told} GPUs, but the machine has {has}: it must be `GPU: {gpus}`."
        node.add(text, "resources", *(["GPU"] if "GPU" in resources else []))
    label = node.at("labels", ACCELERATOR)
    if label is not None and label != gpu:
        right = f"it must be {gpu}" if gpu else "the machine has no GPU"
        node.add(f"the label is {label!r}; {right}.", "labels", ACCELERATOR)
    whole = node.whole()
    if not gpu or whole.at("docker", "image"):
        return  # an image may have its own torch
    for number, command in enumerate(whole.at("setup_commands") or ()):
        build = re.search(r"(?:--torch-backend[= ]|/whl/)(cu\d+)", command)
        if build and (why := software.why_no_kernels(gpu, build[1])):
            hint = "`raypool cluster init` chooses the right one"
            whole.add(f"{why}; {hint}.", "setup_commands", number)
        elif "pip install" in command and not build and software.why_no_kernels(gpu, "cu130"):
            node.doubt(
                f"torch from PyPI has no kernels for {gpu} GPUs. Add --torch-backend=cu126 (uv), or"
                " --extra-index-url https://download.pytorch.org/whl/cu126 (pip).",
                "node_config",
            )
