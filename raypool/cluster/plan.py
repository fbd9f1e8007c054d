"""`ClusterPlan`: the machines of a cluster, and their place. Every cluster file is made from it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from raypool.cluster.machines import OF_PROVIDERS, catalogue, region_of
from raypool.cluster.packages import default_packages
from raypool.errors import CloudError

Provider = Literal["gcp", "aws", "on-prem", "kubernetes", "sky"]

HEADS = {"gcp": "n2-standard-4", "aws": "m5.xlarge"}
PLACES = {"gcp": "us-central1-a", "aws": "us-west-2"}  # the defaults, if the GPUs are there


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Machines of one type."""

    name: str  # the name of the group: "head", "worker"
    # The provider's name for the machine type; "" on Kubernetes, where pods say what they need.
    machine: str = ""
    gpu: str | None = None  # the kind of its GPUs by Ray's name ("T4", "A100", "H100"); None: none
    gpus: int = 0
    least: int = 0
    most: int = 0
    # Whether the provider may take them back (cheap; half a minute's or two minutes' notice).
    spot: bool = False
    disk_gb: int = 200
    priority: int = 0  # of several groups that would do, Ray prefers the highest


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan of a cluster."""

    name: str = "raypool"
    provider: Provider
    head: NodeGroup  # the machine that all others join
    workers: tuple[NodeGroup, ...]
    # The maximum number of workers together; None: the sum of the groups' `most`.
    most: int | None = None
    project: str | None = None  # the project to bill (GCP)
    # "us-central1-a"; on AWS also several that Ray tries one after the other:
    # "us-west-2a,us-west-2b".
    zone: str | None = None
    hosts: tuple[str, ...] = ()  # the addresses of machines on premises, the head's first
    ssh_user: str = "ubuntu"
    # The file with that user's private key; None: the default of SSH or the launcher.
    ssh_key: str | None = None
    # The packages to install on every machine (see `raypool.cluster.packages`) besides this
    # raypool; none: everything is installed already.
    packages: tuple[str, ...] = ()
    lock: str = "cluster.lock.txt"  # the file that lists them, beside the cluster's file
    # The Docker image that everything runs in; None: the machines themselves.
    image: str | None = None
    job: str | None = None  # the command of a RayJob on Kubernetes, or of a task for SkyPilot
    # The code of a job on Kubernetes: the address of a zip, or a folder of the image.
    working_dir: str | None = None
    # The version of Python to install ("3.11"); Ray needs the same at both ends.
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    # A cluster in a cloud that no job, pool or client uses is deleted after this time [min]; 0:
    # never.
    idle_shutdown_minutes: float = 60

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """All groups, the head's first."""
        return (self.head, *self.workers)

    @property
    def gpus(self) -> list[str]:
        """The kinds of GPUs of all groups."""
        return [group.gpu for group in self.groups if group.gpu]

    @property
    def region(self) -> str | None:
        """The region of the zone."""
        if self.zone is None:
            return None
        if self.provider == "gcp":
            return region_of(self.zone)
        return self.zone.partition(",")[0].rstrip("abcdef")


def draft(  # noqa: PLR0913 - options of a command, all named
    provider: Provider,
    *,
    machine: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    head_machine: str | None = None,
    least: int = 0,
    most: int = 4,
    spot: bool = True,
    fallback: bool = False,
    zone: str | None = None,
    packages: tuple[str, ...] = (),
    **others: Any,
) -> ClusterPlan:
    """Return the plan of a cluster with one kind of worker.

    None means raypool's choice: the smallest machine with these GPUs and four vCPUs for each; the
    GPUs of `machine`, else one T4; a zone that has them. `fallback` adds the same machines on
    demand, for when no spot machine is available. `others` are arguments of `ClusterPlan`.

    Raises:
        CloudError: The arguments contradict each other, or there is no such machine, GPU or Python.

    Example:
        >>> plan = draft("gcp", gpu="A100", gpus=8, most=2)
        >>> plan.workers[0].machine, plan.zone
        ('a2-highgpu-8g', 'us-central1-a')
    """
    others = {name: value for name, value in others.items() if value is not None}
    if least > most:
        raise CloudError(
            f"The minimum number of workers ({least}) is more than the maximum ({most})."
        )
    if not re.fullmatch(r"3\.\d+(\.\d+)?", others.get("python", "3.11")):
        raise CloudError(f"{others['python']!r} is not a Python version, such as 3.11.")
    if fallback and not spot:
        raise CloudError("--fallback is for spot machines: leave out --fallback or --on-demand.")
    if provider in OF_PROVIDERS:
        machine, gpu, gpus = _machine(provider, machine, gpu, gpus)
        zone = zone or _zone(provider, gpu)
    elif provider == "sky":
        gpu = gpu or "T4"
    elif provider == "on-prem":  # all machines belong to the cluster from beginning to end
        least = most = max(len(others.get("hosts", ())) - 1, 0)
        spot = False
    worker = NodeGroup(
        name="worker",
        machine=machine or "",
        gpu=gpu,
        gpus=gpus or 1,
        least=least,
        most=most,
        spot=spot,
    )
    workers: tuple[NodeGroup, ...] = (worker,)
    if fallback:
        # Ray prefers the higher priority, and uses the other group for a while after a failure.
        on_demand = replace(worker, name="worker-on-demand", least=0, spot=False)
        workers = (replace(worker, priority=1), on_demand)
    return ClusterPlan(
        provider=provider,
        head=NodeGroup(name="head", machine=head_machine or HEADS.get(provider, "")),
        workers=workers,
        most=most if fallback else None,
        zone=zone,
        packages=default_packages(provider, packages),
        **others,
    )


def _machine(
    provider: Provider, machine: str | None, gpu: str | None, gpus: int | None
) -> tuple[str, str, int]:
    """Return the machine type of the workers, and the kind and number of its GPUs."""
    known = catalogue(OF_PROVIDERS[provider])
    if machine is None:
        gpu, gpus = known.gpu(gpu or "T4").name, gpus or 1
        return known.smallest(gpu, gpus).name, gpu, gpus
    try:
        shape = known.machine(machine)
    except CloudError as error:
        if gpu and gpus:  # newer than the catalogue
            return machine, gpu, gpus
        raise CloudError(f"{error} If it is newer, add --gpu and --gpus.") from error
    gpu, gpus = known.gpu(gpu or shape.gpu or "T4").name, gpus or shape.gpus or 1
    known.check(machine, gpu, gpus)
    return machine, gpu, gpus


def _zone(provider: Provider, gpu: str) -> str | None:
    """Return a zone that has these GPUs, None if none is known."""
    known = catalogue(OF_PROVIDERS[provider]).gpus.get(gpu)
    if known is None:
        return None
    places = sorted(known.zones or known.regions)
    place = PLACES[provider] if PLACES[provider] in places else next(iter(places), None)
    return f"{place}a" if place and provider == "aws" else place
