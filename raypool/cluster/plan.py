"""`ClusterPlan`: the machines of a cluster, and their place. Every cluster file is made from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Provider = Literal["gcp", "aws", "on-prem", "kubernetes", "sky"]
"""The providers of machines."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Machines of one type.

    Args:
        name: The name of the group: "head", "worker".
        machine: The provider's name for the machine type; "" on Kubernetes, where pods say what
            they need.
        gpu: The kind of its GPUs by Ray's name ("T4", "A100", "H100"); None: none.
        gpus: The number of GPUs of each machine.
        cpus: The number of vCPUs; None: from the catalogue.
        memory_gb: The main memory [GB]; None: from the catalogue.
        least: The minimum number of machines.
        most: The maximum number of machines.
        spot: Whether the provider may take them back (cheap; half a minute's or two minutes'
            notice).
        disk_gb: The size of each disk [GB].
        priority: Of several groups that would do, Ray prefers the highest.
    """

    name: str
    machine: str = ""
    gpu: str | None = None
    gpus: int = 0
    cpus: int | None = None
    memory_gb: float | None = None
    least: int = 0
    most: int = 0
    spot: bool = False
    disk_gb: int = 200
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan of a cluster.

    Args:
        name: The name of the cluster.
        provider: The provider of the machines.
        head: The machine that all others join.
        workers: The machines that do the work.
        most: The maximum number of workers together; None: the sum of the groups' `most`.
        project: The project to bill (GCP).
        zone: The zone ("us-central1-a"); on AWS also several that are tried in turn
            ("us-west-2a,us-west-2b").
        hosts: The addresses of machines on premises, the head's first.
        ssh_user: The user for SSH on the machines.
        ssh_key: The file with that user's private key; None: the default of SSH or the launcher.
        packages: The packages to install on every machine (see `raypool.cluster.packages`) besides
            this raypool; none: everything is installed already.
        lock: The file that lists them, beside the cluster's file.
        image: The Docker image that everything runs in; None: the machines themselves.
        job: The command that a cluster on Kubernetes is for, or that SkyPilot runs.
        working_dir: The code of a job on Kubernetes: the address of a zip, or a folder of the
            image.
        python: The version of Python to install ("3.11"); Ray needs the same at both ends.
        idle_minutes: A machine without work is released after this time [min].
        idle_shutdown_minutes: A cluster in a cloud that no job, pool or client uses is deleted
            after this time [min]; 0: never.
    """

    name: str = "raypool"
    provider: Provider
    head: NodeGroup
    workers: tuple[NodeGroup, ...]
    most: int | None = None
    project: str | None = None
    zone: str | None = None
    hosts: tuple[str, ...] = ()
    ssh_user: str = "ubuntu"
    ssh_key: str | None = None
    packages: tuple[str, ...] = ()
    lock: str = "cluster.lock.txt"
    image: str | None = None
    job: str | None = None
    working_dir: str | None = None
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    idle_minutes: float = 10
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
        """The region of the zone.

        Example:
            >>> head = NodeGroup(name="head", machine="n2-standard-4")
            >>> ClusterPlan(head=head, workers=(), provider="gcp", zone="us-central1-a").region
            'us-central1'
        """
        if self.zone is None:
            return None
        if self.provider == "gcp":
            return self.zone.rpartition("-")[0]
        return self.zone.partition(",")[0].rstrip("abcdef")
