"""`ClusterPlan`: the machines of a cluster, and their place. Every cluster file is made from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Provider = Literal["gcp", "aws", "on-prem", "kubernetes", "sky"]
"""The providers of machines."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Machines of one type."""

    name: str  # the name of the group: "head", "worker"
    # The provider's name for the machine type; "" on Kubernetes, where pods say what they need.
    machine: str = ""
    gpu: str | None = None  # the kind of its GPUs by Ray's name ("T4", "A100", "H100"); None: none
    gpus: int = 0
    cpus: int | None = None  # the number of vCPUs; None: from the catalogue
    memory_gb: float | None = None  # the main memory [GB]; None: from the catalogue
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
    # The zone ("us-central1-a"); on AWS also several that are tried in turn ("us-west-2a,us-
    # west-2b").
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
    job: str | None = None  # the command that a cluster on Kubernetes is for, or that SkyPilot runs
    # The code of a job on Kubernetes: the address of a zip, or a folder of the image.
    working_dir: str | None = None
    # The version of Python to install ("3.11"); Ray needs the same at both ends.
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    idle_minutes: float = 10  # a machine without work is released after this time [min]
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
            return self.zone.rpartition("-")[0]
        return self.zone.partition(",")[0].rstrip("abcdef")
