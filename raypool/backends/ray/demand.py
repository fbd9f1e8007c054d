"""The resources that a worker needs, the nodes that have them, and how far a cluster may grow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from raypool.backends.ray.calls import ask_node
from raypool.gpus.sharing import MOST
from raypool.profiles import WorkerResources, has_labels
from raypool.ray_private import worker

ACCELERATOR = "accelerator_type:"
"""Begins the names of resources by which Ray tells kinds of accelerators apart."""

Node = Mapping[str, Any]
"""A node, as `ray.nodes` describes it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of one kind of worker.

    Attributes:
        kind: The scarce resource, "GPU" or "CPU".
        each: How much of it a claim takes.
        bundle: Everything that a claim takes.
        workers_per_claim: The most workers on a claim.
        labels: Ray's labels that its node must have.
        first_workers: How many workers a claim has at first.
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
        """Whether a node is of the right kind, whatever its size."""
        kinds = [name for name in self.bundle if name.startswith(ACCELERATOR)]
        return has_labels(node["Labels"], self.labels) and all(
            name in node["Resources"] for name in kinds
        )

    def fits(self, node: Node) -> int:
        """Return how many claims a node could hold if it were empty."""
        if not self.allows(node):
            return 0
        # 1e-9: a quotient that rounding has put just below a whole number is that number
        return min(
            int(node["Resources"].get(name, 0) / amount + 1e-9)
            for name, amount in self.bundle.items()
        )


@dataclass(frozen=True, slots=True)
class Need:
    """From `least` to `most` claims of one kind, besides the `num_held` of the pool.

    `is_listed`: the user has listed them one by one, so that there is no range to suggest.
    """

    demand: Demand
    least: int
    most: int
    num_held: int = 0
    is_listed: bool = False


def demand_of(
    wanted: WorkerResources,
    has_chosen_gpus: bool,
    per_gpu: int | str | None,
    nodes: Sequence[Node],
) -> Demand:
    """Return the needs of a worker with these resources on a cluster.

    Args:
        wanted: The user's wishes.
        has_chosen_gpus: Whether the user has named the GPUs.
        per_gpu: How many workers share a GPU unless `wanted` says; "auto": first one, then more.
        nodes: The nodes of the cluster.
    """
    gpus, share, first = wanted.gpus, wanted.workers_per_gpu, wanted.workers_per_gpu
    if gpus is None:
        has_some = any(
            gpus_of(node) and has_labels(node["Labels"], wanted.labels) for node in nodes
        )
        gpus = 1.0 if has_chosen_gpus or has_some else 0.0
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
        # as Ray's own option `accelerator_type`; a node has 1, which is a mark rather than a limit
        bundle[f"{ACCELERATOR}{wanted.accelerator_type}"] = 0.001
    kind = "GPU" if gpus else "CPU"
    memory_bytes, labels = wanted.memory_bytes or 0, dict(wanted.labels)
    # Ray refuses a bundle of nothing, so it gets one byte
    each, bundle = bundle.get(kind, 0.0), bundle or {"memory": 1.0}
    return Demand(
        kind, each, bundle, share, share_of(gpus, share), cpus, memory_bytes, labels, first
    )


def share_of(gpus: float, share: int) -> float:
    """Return which part of a GPU to ask Ray for.

    Ray counts ten thousandths, and rounds: six sixths would not fit.

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
    """Return a node's name: the given one, else its machine's."""
    given = str(node["NodeName"])
    # Ray's default for the name is the address
    is_default = given in ("", node["NodeManagerAddress"])
    return str(node["NodeManagerHostname"]) if is_default else given


def names_of(node: Node) -> tuple[str, ...]:
    """Return every name by which a user may call a node."""
    keys = ("NodeName", "NodeManagerHostname", "NodeManagerAddress", "NodeID")
    return tuple(str(node[key]) for key in keys)


def gpus_of(node: Node) -> int:
    """Return how many whole GPUs a node has."""
    return int(node["Resources"].get("GPU", 0))


def _most_beside(wanted: WorkerResources, nodes: Sequence[Node]) -> int:
    """Return for how many workers on each GPU the best node has cores and memory."""
    most = 1
    for node in nodes:
        gpus, resources = gpus_of(node), node["Resources"]
        if gpus and has_labels(node["Labels"], wanted.labels):
            needed = {"CPU": wanted.cpus or 0, "memory": wanted.memory_bytes or 0}
            rooms = [
                int(resources.get(name, 0) / gpus / amount + 1e-9)
                for name, amount in needed.items()
                if amount
            ]
            most = max(most, min([MOST, *rooms]))
    return most


# --- growth of a cluster --------------------------------------------------------------------------
#
# Source: Ray's `autoscaler/_private/monitor.py` (which reads that file, on the head), and
# "Configuring Autoscaling" in its documentation.


IS_NEW, IN_KUBERNETES = "RAY_enable_autoscaler_v2", "RAY_CLUSTER_NAME"
"""Set on a head that KubeRay's operator has made, for a cluster that it grows."""

OPTION = "--autoscaling-config="

HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head."""

ASK_TIMEOUT_S = 10.0
"""How long the head may take to say how it grows [s]; after that, a cluster counts as fixed."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The nodes that Ray's autoscaler may add to a cluster.

    Attributes:
        kinds: Nodes, as `ray.nodes` describes them, and how many of each there may be.
        most: The most in all; None: unknown (Kubernetes' operator grows the cluster).
    """

    kinds: tuple[tuple[Node, int], ...] = ()
    most: int | None = 0

    def holds(self, demand: Demand) -> int:
        """Return how many claims the cluster could hold if it were fully grown and empty."""
        if self.most is None:
            return NO_LIMIT
        there = sum(demand.fits(node) for node in living_nodes() if HEAD in node["Resources"])
        left = self.most
        kinds = ((demand.fits(node), count) for node, count in self.kinds)
        for fits, count in sorted(kinds, reverse=True):
            there += min(count, left) * fits
            left -= min(count, left)
        return there


NO_LIMIT = 10**6
"""More workers than anybody asks for: no number was given, or nobody knows how many fit."""

NONE = Growth()


def growth() -> Growth:
    """Return the nodes that Ray's autoscaler may add to the connected cluster."""
    node = worker.global_worker.node  # None from outside
    if node is not None and node.is_head():
        return NONE  # this process has started it, without any
    heads = [node["NodeID"] for node in living_nodes() if HEAD in node["Resources"]]
    if not heads:
        return NONE
    settings = ask_node(heads[0], ASK_TIMEOUT_S, _settings_here)
    return NONE if settings is None else growth_of(settings)


def _settings_here() -> dict[str, Any] | None:
    """Return this machine's autoscaler settings; {}: Kubernetes' operator's; None: none."""
    import yaml

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            for word in process.cmdline():
                if word.startswith(OPTION):
                    file = Path(word.removeprefix(OPTION)).expanduser()
                    content: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
                    return content
    return {} if os.environ.get(IS_NEW) == "1" and IN_KUBERNETES in os.environ else None


def growth_of(settings: Mapping[str, Any]) -> Growth:
    """Return the nodes that an autoscaler with these settings may add.

    Example:
        >>> gpu = {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 4}
        >>> kinds = {"head": {}, "gpu": gpu}
        >>> growth_of({"head_node_type": "head", "max_workers": 3, "available_node_types": kinds})
        Growth(kinds=(({'Resources': {'CPU': 8, 'GPU': 1}, 'Labels': {}}, 4),), most=3)
    """
    if not settings:
        return Growth(most=None)
    most = int(settings.get("max_workers", 0))
    kinds = []
    for name, kind in settings.get("available_node_types", {}).items():
        if name != settings.get("head_node_type"):
            node = {"Resources": kind.get("resources", {}), "Labels": kind.get("labels", {})}
            kinds.append((node, int(kind.get("max_workers", most))))
    return Growth(tuple(kinds), most) if kinds else NONE
