"""Claims on particular GPUs, or on cores: placement groups of one bundle, kept while worker processes come and go in them.

A bundle keeps its GPU for life, so whatever runs in it runs on that GPU. A GPU that several workers share is claimed whole.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypool.devices.gpus import GpuDevice
from raypool.engine.demands import Demand
from raypool.engine.shortages import held_by, holders
from raypool.profiles import for_ray

POLL_S = 0.01

SILENT_S = 1.0
"""Nobody is told of a wait that is shorter [s]."""

logger = logging.getLogger("raypool")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Claim:
    """A bundle of resources of one node."""

    group: PlacementGroup
    demand: Demand
    num_workers: int = 0
    host: str = ""  # the name of its machine, and what is known of its GPUs; where that was asked
    cards: tuple[GpuDevice, ...] | None = None
    node_id: str | None = None  # where it was when somebody looked last
    is_released: bool = False
    room: int = 0  # so many workers may stand on it now

    def __post_init__(self) -> None:
        self.room = self.room or self.demand.first_workers

    @property
    def gpu(self) -> int | None:
        """The index of its (first) GPU, where that was asked."""
        return self.cards[0].index if self.cards else None

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that puts an actor or task into it."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


class Wanted:
    """How long something is waited for: some time, and not beyond the end of the pool.

    Args:
        timeout_s: So long at most.
        closed: Set when the pool ends.
        others: What other open pools of this process hold, by the line that opened them. These are not waited for.
    """

    def __init__(self, timeout_s: float, closed: threading.Event, others: Mapping[str, Sequence[Claim]]) -> None:
        self.others = others
        self._timeout_s = timeout_s
        self._begin = time.monotonic()
        self._closed = closed
        self._has_told = False

    def tell(self, missing: Callable[[], str]) -> None:
        """Say what is waited for, once, and not before a second has passed."""
        if not self._has_told and time.monotonic() > self._begin + SILENT_S:
            self._has_told = True
            others = tuple(name for name in holders() if _holder() not in name)  # what has come already is not waited for
            who = held_by(others) if others else ""
            logger.warning("Waiting for %s, for start_timeout_s=%g at most. %s", missing(), self._timeout_s, who)

    def is_over(self) -> bool:
        """Whether to give up."""
        return self._closed.is_set() or time.monotonic() > self._begin + self._timeout_s


def _holder() -> str:
    """Return what holds the claims of this process, as others see it."""
    return f"raypool in process {os.getpid()} on {platform.node()}"


def release_all(claims: Sequence[Claim]) -> None:
    """Give back the resources of these claims, as far as that was not done."""
    for claim in claims:
        if not claim.is_released:
            claim.is_released = True
            claim.release()


def request(demand: Demand, node_id: str | None = None) -> Claim:
    """Ask Ray for what a claim takes, on a particular node if one is named."""
    labels = {**for_ray(demand.labels), **({"ray.io/node-id": node_id} if node_id is not None else {})}
    name = f"{_holder()}#{uuid.uuid4().hex}"  # Ray wants each name once
    return Claim(placement_group([demand.bundle], name=name, bundle_label_selector=[labels] if labels else None), demand)


def is_ready(claim: Claim) -> bool:
    """Whether it is there."""
    return locate(claim) is not None


def locate(claim: Claim) -> str | None:
    """Return which node a claim is on, None if it is on none: Ray looks for another where its node has died."""
    entry = placement_group_table(claim.group)
    claim.node_id = str(entry["bundles_to_node_id"][0]) if entry.get("state") == "CREATED" else None  # of one long gone nothing
    return claim.node_id


def wait_released(claims: Sequence[Claim], timeout_s: float) -> None:
    """Wait until Ray could give what these claims held to somebody else, at most so long.

    A bundle has resources of its own, named after it, for as long as it holds anything.
    """
    names = [claim.group.id.hex() for claim in claims]
    deadline = time.monotonic() + timeout_s
    while any(name in resource for resource in ray.cluster_resources() for name in names) and time.monotonic() < deadline:
        time.sleep(POLL_S)
