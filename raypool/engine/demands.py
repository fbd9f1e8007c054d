"""What workers of one kind need of a node, and which nodes could give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from raypool.core.sharing import MOST
from raypool.profiles import WorkerResources, has_labels

ACCELERATOR = "accelerator_type:"
"""What a resource's name begins with by which Ray tells kinds of accelerators apart."""

Node = Mapping[str, Any]
"""A node, as `ray.nodes` describes it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What workers of one kind need: `kind` is what is scarce ("GPU" or "CPU"), `each` how much of it a claim takes.

    `labels`: which of Ray's labels its node must have. `workers_per_claim`: for so many workers there is room on a claim, and so
    many stand on it at first: `first_workers`.
    """

    kind: str
    each: float
    bundle: dict[str, float]
    workers_per_claim: int
    worker_gpus: float
    worker_cpus: float
    worker_memory_bytes: int
    labels: dict[str, str] = field(default_factory=dict)
    first_workers: int = 1

    def allows(self, node: Node) -> bool:
        """Whether a node is of the kind that was asked for, however large it is."""
        kinds = [name for name in self.bundle if name.startswith(ACCELERATOR)]
        return has_labels(node["Labels"], self.labels) and all(name in node["Resources"] for name in kinds)

    def fits(self, node: Node) -> int:
        """Return how many claims a node could hold if it were empty."""
        if not self.allows(node):
            return 0
        return min(int(node["Resources"].get(name, 0) / amount + 1e-9) for name, amount in self.bundle.items())


@dataclass(frozen=True, slots=True)
class Need:
    """Between `least` and `most` claims of one kind, beside the `num_held` that the pool holds already.

    `is_listed`: they stand in a list of the user's, one by one, so that there is no range to ask for instead.
    """

    demand: Demand
    least: int
    most: int
    num_held: int = 0
    is_listed: bool = False


def demand_of(
    wanted: WorkerResources, has_chosen_gpus: bool, per_gpu: int | str | None = None, nodes: Sequence[Node] | None = None
) -> Demand:
    """Return what a worker with these resources needs on a cluster.

    Args:
        wanted: What the user has said of it.
        has_chosen_gpus: Whether the user has named the GPUs.
        per_gpu: How many workers share a GPU that does not say so itself; "auto": one at first, more as they fit.
        nodes: The nodes of the cluster. None: of the one that is connected.
    """
    nodes = living_nodes() if nodes is None else nodes
    gpus, share, first = wanted.gpus, wanted.workers_per_gpu, wanted.workers_per_gpu
    if gpus is None:
        gpus = 1.0 if has_chosen_gpus or _has_gpus(wanted.labels, nodes) else 0.0
        if gpus and per_gpu is not None:
            share = _most_beside(wanted, nodes) if isinstance(per_gpu, str) else per_gpu
            first = 1 if isinstance(per_gpu, str) else per_gpu
    if not gpus:
        share = first = 1
    cpus = wanted.cpus if wanted.cpus is not None else (0.0 if gpus else 1.0)
    bundle = {
        "GPU": float(max(gpus, 1)) if gpus else 0.0,
        "CPU": cpus * share,
        "memory": (wanted.memory_bytes or 0) * share,
    }
    bundle = {name: amount for name, amount in bundle.items() if amount > 0}
    if wanted.accelerator_type is not None:
        bundle[f"{ACCELERATOR}{wanted.accelerator_type}"] = 0.001
    kind = "GPU" if gpus else "CPU"
    memory_bytes, labels = wanted.memory_bytes or 0, dict(wanted.labels)
    each, bundle = bundle.get(kind, 0.0), bundle or {"memory": 1.0}
    return Demand(kind, each, bundle, share, share_of(gpus, share), cpus, memory_bytes, labels, first)


def share_of(gpus: float, share: int) -> float:
    """Return which part of a GPU Ray is asked for: it counts ten thousandths, and rounds, so that six sixths would not fit.

    Example:
        >>> share_of(1.0, 6), share_of(2.0, 1)
        (0.1666, 2.0)
    """
    return gpus if share == 1 else 10_000 // share / 10_000


def living_nodes() -> list[Node]:
    """Return the nodes of the cluster that is connected."""
    return [node for node in ray.nodes() if node["Alive"]]


def total(demand: Demand) -> int:
    """Return how many claims the cluster could hold if it were empty."""
    return sum(map(demand.fits, living_nodes()))


def name_of(node: Node) -> str:
    """Return what to call a node: the name that it was given, else that of its machine."""
    given = str(node["NodeName"])
    return given if given not in ("", node["NodeManagerAddress"]) else str(node["NodeManagerHostname"])


def names_of(node: Node) -> tuple[str, ...]:
    """Return all that a user may call a node."""
    return tuple(str(node[key]) for key in ("NodeName", "NodeManagerHostname", "NodeManagerAddress", "NodeID"))


def _has_gpus(labels: Mapping[str, str], nodes: Sequence[Node]) -> bool:
    return any(node["Resources"].get("GPU", 0) >= 1 and has_labels(node["Labels"], labels) for node in nodes)


def _most_beside(wanted: WorkerResources, nodes: Sequence[Node]) -> int:
    """Return for how many workers beside each other on a GPU a node has what else they need, where it has most of it."""
    most = 1
    for node in nodes:
        gpus, resources = int(node["Resources"].get("GPU", 0)), node["Resources"]
        if gpus and has_labels(node["Labels"], wanted.labels):
            needed = {"CPU": wanted.cpus or 0, "memory": wanted.memory_bytes or 0}
            rooms = [int(resources.get(name, 0) / gpus / amount + 1e-9) for name, amount in needed.items() if amount]
            most = max(most, min([MOST, *rooms]))
    return most
