"""`Draft`, a user's wishes for a cluster, completed to a plan by good defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from raypool.cluster.launcher_file import CPUS_PER_GPU, default_packages
from raypool.cluster.machines import OF_PROVIDERS, Catalogue, Machine, catalogue, one_of
from raypool.cluster.plan import ClusterPlan, NodeGroup, Provider
from raypool.errors import CloudError

HEADS = {"gcp": "n2-standard-4", "aws": "m5.xlarge"}
PLACES = {"gcp": ("us-central1-a",), "aws": ("us-west-2",)}
"""The default places of clusters, if the GPUs are available there."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A user's wishes for a cluster; None: chosen by raypool.

    Args:
        provider: The provider of the machines.
        name: The name of the cluster.
        project: The project to bill (GCP).
        zone: The zone.
        gpu: The kind of GPU that workers have; None: what `machine` comes with, else T4.
        gpus: How many each worker has; None: as many as `machine` comes with, else 1.
        machine: The kind of machine that workers are; None: the smallest with these GPUs and four
            vCPUs for each.
        head_machine: The kind of machine that the head is.
        least: So many workers are always there.
        most: So many at most.
        spot: Whether the provider may take the workers back: cheap.
        fallback: Whether workers are made on demand while no spot machine can be had.
        hosts: Addresses of machines on premises, the head's first.
        ssh_user: Who logs in on the machines.
        ssh_key: The file with that user's private key.
        packages: Packages to install on the machines besides raypool and what it needs.
        python: The version of Python there; None: as here.
        job: The command that a cluster on Kubernetes is for, and that SkyPilot runs.
        working_dir: Where the code of a job on Kubernetes is.
        idle_shutdown_minutes: After so long unused the whole cluster is deleted [min]; 0: never.

    Example:
        >>> plan = Draft(provider="gcp", gpu="A100", gpus=8, most=2).plan()
        >>> plan.workers[0].machine, plan.zone
        ('a2-highgpu-8g', 'us-central1-a')
    """

    provider: Provider
    name: str = "raypool"
    project: str | None = None
    zone: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    machine: str | None = None
    head_machine: str | None = None
    least: int = 0
    most: int = 4
    spot: bool = True
    fallback: bool = False
    hosts: tuple[str, ...] = ()
    ssh_user: str = "ubuntu"
    ssh_key: str | None = None
    packages: tuple[str, ...] = ()
    python: str | None = None
    job: str | None = None
    working_dir: str | None = None
    idle_shutdown_minutes: float = 60

    def plan(self) -> ClusterPlan:
        """Return the plan of the cluster.

        Raises:
            CloudError: There is no such machine, it cannot have these GPUs, there would be more
                workers at least than at most, or there is no such version of Python.
        """
        if self.least > self.most:
            raise CloudError(
                f"There are to be at least {self.least} workers and at most {self.most}: make the"
                " first at most the second."
            )
        if self.python is not None and not re.fullmatch(r"3\.\d+(\.\d+)?", self.python):
            raise CloudError(f"{self.python!r} is no version of Python; one is like 3.11.")
        if self.fallback and not self.spot:
            raise CloudError(
                "--fallback is for spot machines: leave out --fallback or --on-demand."
            )
        worker = self._worker()
        workers: tuple[NodeGroup, ...] = (worker,)
        if self.fallback:
            # of two groups that would do, Ray takes the one with the higher priority, and then the
            # other one for a while if that could not be had
            on_demand = replace(worker, name="worker-on-demand", least=0, spot=False)
            workers = (replace(worker, priority=1), on_demand)
        plan = ClusterPlan(
            name=self.name,
            provider=self.provider,
            head=NodeGroup(name="head", machine=self.head_machine or HEADS.get(self.provider, "")),
            workers=workers,
            most=worker.most if self.fallback else None,
            project=self.project,
            zone=self.zone or self._place(worker),
            hosts=self.hosts,
            ssh_user=self.ssh_user,
            ssh_key=self.ssh_key,
            packages=default_packages(self.provider, self.packages),
            job=self.job,
            working_dir=self.working_dir,
            idle_shutdown_minutes=self.idle_shutdown_minutes,
        )
        return plan if self.python is None else replace(plan, python=self.python)

    def _worker(self) -> NodeGroup:
        machine, gpu, gpus = (
            self._machine() if self.provider in OF_PROVIDERS else ("", self.gpu, self.gpus or 1)
        )
        most = max(len(self.hosts) - 1, 0) if self.provider == "on-prem" else self.most
        least = most if self.provider == "on-prem" else self.least
        spot = self.spot and self.provider != "on-prem"
        if self.provider == "sky":
            gpu = gpu or "T4"
        return NodeGroup(
            name="worker", machine=machine, gpu=gpu, gpus=gpus, least=least, most=most, spot=spot
        )

    def _machine(self) -> tuple[str, str, int]:
        """Return the kind of machine that workers are, and the kind and number of its GPUs."""
        known = catalogue(OF_PROVIDERS[self.provider])
        try:
            shape = known.machine(self.machine) if self.machine else None
        except CloudError as error:
            if self.machine and self.gpu and self.gpus:  # newer than the catalogue
                return self.machine, self.gpu, self.gpus
            raise CloudError(f"{error} If it is newer than that, add --gpu and --gpus.") from error
        gpu = known.gpu(self.gpu or (shape and shape.gpu) or "T4").name
        gpus = self.gpus or (shape and shape.gpus) or 1
        machine = shape.name if shape else smallest(known, gpu, gpus).name
        known.check(machine, gpu, gpus)
        return machine, gpu, gpus

    def _place(self, worker: NodeGroup) -> str | None:
        """Return the zone or region that has such workers."""
        if self.provider not in OF_PROVIDERS or worker.gpu is None:
            return None
        known = catalogue(OF_PROVIDERS[self.provider])
        if worker.gpu not in known.gpus:
            return None
        places = known.zones(worker.gpu) if self.provider == "gcp" else known.regions(worker.gpu)
        place = next(
            (place for place in (*PLACES[self.provider], *places) if place in places), None
        )
        return f"{place}a" if place and self.provider == "aws" else place


def smallest(known: Catalogue, gpu: str, gpus: int) -> Machine:
    """Return the smallest machine with so many GPUs and, if there is one, four vCPUs for each.

    Raises:
        CloudError: No machine has so many.
    """
    fit = [
        machine for machine in known.machines.values() if gpus in known.allowed(machine.name, gpu)
    ]
    if not fit:
        counts = sorted({count for name in known.machines for count in known.allowed(name, gpu)})
        raise CloudError(f"No machine has {gpus} {gpu}; {one_of(counts)} can be had.")
    good = [machine for machine in fit if machine.vcpus >= CPUS_PER_GPU * gpus]
    return min(
        good or fit,
        key=lambda machine: (machine.vcpus, "standard" not in machine.name, machine.memory_gb),
    )
