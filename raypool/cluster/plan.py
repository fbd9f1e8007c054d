"""`ClusterPlan`: the machines of a cluster, and their place. Files for all providers are written
from it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Provider = Literal["gcp", "aws", "on-prem", "kubernetes", "sky"]
"""The providers of machines."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Machines of one kind.

    Args:
        name: What to call the group: "head", "worker".
        machine: The provider's name for the kind of machine; on Kubernetes, where pods say what
            they need, empty.
        gpu: The kind of its GPUs by Ray's name for it ("T4", "A100", "H100"), None without any.
        gpus: How many each machine has.
        cpus: How many vCPUs each has; None: what the catalogue says.
        memory_gb: Its main memory [GB]; None: what the catalogue says.
        least: So many machines are always there.
        most: So many at most, while there is work for them.
        spot: Whether the provider may take them back: cheap, with half a minute's or two minutes'
            notice.
        disk_gb: Size of the disk of each [GB].
        priority: Of groups that would do equally well, Ray makes machines of the highest first.
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
        name: What to call it.
        provider: Who has the machines.
        head: The machine that everything else joins.
        workers: The machines that the work is done on.
        most: So many of them at most together; None: as many as the groups allow.
        project: The project that pays (GCP).
        zone: Where ("us-central1-a"; on AWS an availability zone, or several that are tried in
            turn, "us-west-2a,us-west-2b").
        hosts: Addresses of the machines of a cluster on premises, the head's first.
        ssh_user: Who logs in on the machines.
        ssh_key: The file with that user's private key; None: SSH's own choice, or the launcher's.
        packages: What is installed on every machine (see `raypool.cluster.packages`), besides the
            raypool of this machine; none: everything is installed already.
        lock: The file beside the cluster's that lists them.
        image: The Docker image that everything runs in; None: the machines themselves.
        job: The command that a cluster on Kubernetes is for, and that SkyPilot runs; None: none.
        working_dir: Where the code of a job on Kubernetes is: the address of a zip, or a folder of
            the image; None: to be filled in.
        python: The version of Python that it is installed for ("3.11"); the one here: Ray wants it
            the same at both ends.
        idle_minutes: After so long without work a machine is given back [min].
        idle_shutdown_minutes: After so long without any job, pool or client, all machines are
            deleted, also the head [min]; 0: never. In clouds only.
    """

    name: str
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
    def region(self) -> str | None:
        """The region of the zone.

        Example:
            >>> head = NodeGroup(name="head", machine="n2-standard-4")
            >>> here = {"provider": "gcp", "zone": "us-central1-a"}
            >>> ClusterPlan(name="lab", head=head, workers=(), **here).region
            'us-central1'
        """
        if self.zone is None:
            return None
        if self.provider == "gcp":
            return self.zone.rpartition("-")[0]
        return self.zone.partition(",")[0].rstrip("abcdef")
