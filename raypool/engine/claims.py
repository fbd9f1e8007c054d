"""Claims on particular GPUs, or on cores: placement groups of one bundle, kept while worker processes come and go in them.

A bundle keeps its GPU for life, so whatever runs in it runs on that GPU. A GPU that several workers share is claimed whole.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypool.errors import ResourceError
from raypool.resources import WorkerResources

POLL_S = 0.01

OURS = ("PoolWorker", "NodeAgent")
"""Actors of pools, which hold nothing beside their pools' placement groups."""

SETTLE_S = 1.0
"""How long to wait for resources that somebody seems to hold, when any number will do: they may just have been given back [s]."""


@dataclass(slots=True, eq=False)
class Claim:
    """A bundle of resources of one node."""

    group: PlacementGroup
    demand: Demand
    num_workers: int = 0
    gpu: int | None = None  # its index, where that was asked
    node_id: str | None = None  # where it was when somebody looked last
    is_released: bool = False

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that puts an actor or task into it."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


@dataclass(frozen=True, slots=True)
class Demand:
    """What workers of one kind need: `kind` is what is scarce ("GPU" or "CPU"), `each` how much of it a claim takes."""

    kind: str
    each: float
    bundle: dict[str, float]
    workers_per_claim: int
    worker_gpus: float
    worker_cpus: float
    worker_memory_bytes: int


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


class Wanted:
    """How long something is waited for: some time, and not beyond the end of the pool."""

    def __init__(self, timeout_s: float, closed: threading.Event) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._closed = closed

    def is_over(self) -> bool:
        """Whether to give up."""
        return self._closed.is_set() or time.monotonic() > self._deadline


def demand_of(wanted: WorkerResources, has_chosen_gpus: bool) -> Demand:
    """Return what a worker with these resources needs on the cluster that is connected."""
    gpus = wanted.gpus
    if gpus is None:
        gpus = 1.0 if has_chosen_gpus or ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    cpus = wanted.cpus if wanted.cpus is not None else (0.0 if gpus else 1.0)
    share = wanted.workers_per_gpu if gpus else 1
    bundle = {
        "GPU": float(max(gpus, 1)) if gpus else 0.0,
        "CPU": cpus * share,
        "memory": (wanted.memory_bytes or 0) * share,
    }
    bundle = {name: amount for name, amount in bundle.items() if amount > 0}
    if wanted.accelerator_type is not None:
        bundle[f"accelerator_type:{wanted.accelerator_type}"] = 0.001
    kind = "GPU" if gpus else "CPU"
    return Demand(kind, bundle.get(kind, 0.0), bundle or {"memory": 1.0}, share, gpus, cpus, wanted.memory_bytes or 0)


def claim_number(needs: Sequence[Need], wanted: Wanted) -> list[list[Claim]]:
    """Claim what is needed of each kind, as much as there is.

    Raises:
        ResourceError: There is less than the least of one kind, even when the time is over; nothing of any kind is kept.
    """
    totals = [max(0, _total(need.demand) - need.num_held) for need in needs]
    for need, total in zip(needs, totals, strict=True):
        if total < need.least:
            raise _too_few(need, total)
    _check_sum(needs)
    claims: list[list[Claim]] = []
    ready: list[list[Claim]] = []
    try:
        for need, total in zip(needs, totals, strict=True):
            claims.append([])
            claims[-1] += (request(need.demand) for _ in range(min(need.most, total)))
        started = time.monotonic()
        while ready != claims:
            ready = [[claim for claim in group if is_ready(claim)] for group in claims]
            are_enough = all(len(group) >= need.least for group, need in zip(ready, needs, strict=True))
            if wanted.is_over() or (are_enough and time.monotonic() - started > SETTLE_S):
                break
            time.sleep(POLL_S)
        for group, need in zip(ready, needs, strict=True):
            if len(group) < need.least:
                release_all([claim for group in claims for claim in group])  # before it is said who holds any
                raise _too_few(need, len(group))
    except BaseException:
        ready = [[] for _ in claims]
        raise
    finally:
        kept = {id(claim) for group in ready for claim in group}
        release_all([claim for group in claims for claim in group if id(claim) not in kept])
    return ready


def release_all(claims: Sequence[Claim]) -> None:
    """Give back the resources of these claims, as far as that was not done."""
    for claim in claims:
        if not claim.is_released:
            claim.is_released = True
            claim.release()


def request(demand: Demand, node_id: str | None = None) -> Claim:
    """Ask Ray for what a claim takes, on a particular node if one is named."""
    selector = [{"ray.io/node-id": node_id}] if node_id is not None else None
    name = f"raypool in process {os.getpid()} on {platform.node()}#{uuid.uuid4().hex}"  # Ray wants each name once
    return Claim(placement_group([demand.bundle], name=name, bundle_label_selector=selector), demand)


def is_ready(claim: Claim) -> bool:
    """Whether it is there."""
    return locate(claim) is not None


def locate(claim: Claim) -> str | None:
    """Return which node a claim is on, None if it is on none: Ray looks for another where its node has died."""
    entry = placement_group_table(claim.group)
    claim.node_id = str(entry["bundles_to_node_id"][0]) if entry["state"] == "CREATED" else None
    return claim.node_id


def _total(demand: Demand) -> int:
    """Return how many bundles the cluster could hold if it were empty, by what is scarce."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in demand.bundle.items()) for node in nodes)


def holders() -> tuple[str, ...]:
    """Return who holds GPUs or cores in placement groups, and which other actors are alive, as far as Ray tells."""
    found = []
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            amounts: dict[str, float] = {}
            for bundle in group["bundles"].values():
                for name in ("GPU", "CPU"):
                    amounts[name] = amounts.get(name, 0) + bundle.get(name, 0)
            held = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)
            found.append(f"{group['name'].partition('#')[0] or 'a placement group'} ({held})")
    merged = [f"{count} x {name}" if (count := found.count(name)) > 1 else name for name in dict.fromkeys(found)]
    return (*merged, *_other_actors())


def _other_actors() -> list[str]:
    from ray._private import state  # the public state API needs the dashboard

    return [
        f"perhaps actor {actor['Name'] or actor['ActorClassName']} (process {actor['Pid']})"
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] not in OURS
    ]


def held_by(names: tuple[str, ...]) -> str:
    """Say who holds what is missing."""
    names = names or holders()
    return f"Held by: {'; '.join(names)}." if names else "Nobody holds any."


def _check_sum(needs: Sequence[Need]) -> None:
    """Make sure that a cluster that is empty has enough for all kinds together."""
    for name in ("GPU", "CPU"):
        amounts = [need.least * need.demand.bundle.get(name, 0) for need in needs]
        requested, capacity = sum(amounts), ray.cluster_resources().get(name, 0)
        if requested > capacity and len(needs) > 1:
            parts = " + ".join(f"{amount:g}" for amount in amounts if amount)
            raise ResourceError(
                f"{name}: requested {requested:g} ({parts}) for {sum(need.least for need in needs)} workers, "
                f"available {capacity:g}. Ask for fewer workers in resources=[...], or for less for each.",
                requested=requested,
                available=capacity,
                holders=(),
            )


def _too_few(need: Need, there: int) -> ResourceError:
    demand, least = need.demand, need.least
    lacking = _lacking(demand)
    if lacking:
        return ResourceError(
            f"No node of the cluster is large enough for a worker: {'; '.join(lacking)}. "
            "Give workers less (resources=WorkerResources(...)), or connect to a cluster that has such nodes.",
            requested=least,
            available=0,
            holders=(),
        )
    requested, available = least * demand.each, there * demand.each
    capacity = ray.cluster_resources().get(demand.kind, 0)
    names = holders()
    return ResourceError(
        f"{demand.kind}: requested {requested:g}, available {available:g} (the cluster has {capacity:g}). "
        f"{held_by(names)} {_next_step(need, there, capacity)}",
        requested=requested,
        available=available,
        holders=names,
    )


def _next_step(need: Need, there: int, capacity: float) -> str:
    if not capacity:
        return "Give workers less (resources=WorkerResources(...)), or connect to a cluster that has some."
    if not there:
        return "Wait for them to end, or end them."
    if need.is_listed:
        return f"Name at most {there} such workers in resources=[...]."
    return f"Ask for at most {there}, or for a range: parpool((1, {need.least}))."


def _lacking(demand: Demand) -> list[str]:
    """Say what of a claim no node has, whoever may hold it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in demand.bundle}
    return [
        f"{name}: requested {amount:g}, the largest has {largest[name]:g}"
        for name, amount in demand.bundle.items()
        if largest[name] < amount and name != demand.kind
    ]


def wait_released(claims: Sequence[Claim], timeout_s: float) -> None:
    """Wait until Ray could give what these claims held to somebody else, at most so long.

    A bundle has resources of its own, named after it, for as long as it holds anything.
    """
    names = [claim.group.id.hex() for claim in claims]
    deadline = time.monotonic() + timeout_s
    while any(name in resource for resource in ray.cluster_resources() for name in names) and time.monotonic() < deadline:
        time.sleep(POLL_S)
