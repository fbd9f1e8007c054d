"""Looks at the GPUs that were claimed: a task inside each claim says which they are, and how much of them is free."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypool.engine import shortages
from raypool.engine.claims import Claim
from raypool.engine.demands import Demand
from raypool.engine.ray_calls import UNRECORDED
from raypool.gpus.devices import GpuDevice, Inventory, index_of
from raypool.gpus.sharing import CONTEXT_BYTES

PROBE_TIMEOUT_S = 10.0
"""How long a task that only looks may take on a machine that is very busy [s]; after that, nothing is known of its GPUs."""

AGAIN_S = 0.25
"""How often to look whether somebody has given memory back [s]."""

logger = logging.getLogger("raypool")


class Survey:
    """Says what GPUs claims have got, and which have too little free memory.

    Args:
        inventory: Who knows the GPUs of a machine; it is asked on the machine itself.
        min_free_bytes: Cards of which less is free are of no use; those of which it is not known count as free. None: all are.
    """

    def __init__(self, inventory: Inventory, min_free_bytes: int | None) -> None:
        self.min_free_bytes = min_free_bytes
        self._inventory = inventory
        self._told: set[tuple[str, int]] = set()
        self._ask = ray.remote(num_cpus=0, max_retries=0, **UNRECORDED)(_look_inside)  # its claim may be given back meanwhile
        self._asked: WeakKeyDictionary[Claim, tuple[float, Any]] = (
            WeakKeyDictionary()
        )  # when, and what will be the answer; None when it has come

    def concerns(self, demand: Demand) -> bool:
        """Whether claims of this kind have to be looked at, whichever GPUs they get."""
        return demand.kind == "GPU" and (self.min_free_bytes is not None or demand.workers_per_claim > 1)

    def look(self, claims: Iterable[Claim]) -> None:
        """Ask those that are there and were not asked yet, and note the answers that have come; waits for none."""
        claims = list(claims)
        for claim in claims:
            if claim not in self._asked:
                # As much of its GPUs as it takes to be told of all of them.
                gpus = claim.demand.each if claim.demand.each > 1 else 0.0001
                options = self._ask.options(num_gpus=gpus, scheduling_strategy=claim.strategy())
                self._asked[claim] = time.monotonic(), options.remote(self._inventory)
        asked = {claim: self._asked[claim] for claim in claims if self._asked[claim][1] is not None}
        done = ray.wait([ref for _, ref in asked.values()], num_returns=len(asked), timeout=0)[0] if asked else []
        for claim, (at, ref) in asked.items():
            if ref in done:
                self._note(claim, ref)
            elif time.monotonic() > at + PROBE_TIMEOUT_S:
                ray.cancel(ref, force=True)  # else it would have a part of the GPU, and no worker could start there
                self._asked[claim], claim.cards = (at, None), claim.cards or ()

    def _note(self, claim: Claim, ref: Any) -> None:
        at, _ = self._asked.pop(claim)
        try:
            claim.host, claim.cards = ray.get(ref)
        except ray.exceptions.RayError:
            return  # its process has died; it is asked again
        self._asked[claim] = at, None

    def look_again(self, claims: Iterable[Claim]) -> None:
        """Ask those anew that have answered a while ago; until then the old answers stand."""
        for claim in [claim for claim in claims if claim in self._asked]:
            at, ref = self._asked[claim]
            if ref is None and time.monotonic() > at + AGAIN_S:
                del self._asked[claim]

    def is_crowded(self, claim: Claim) -> bool:
        """Whether too little memory is free on one of its cards."""
        return bool(self.crowd([claim]))

    def crowd(self, claims: Iterable[Claim]) -> dict[tuple[str, int], GpuDevice]:
        """Return the cards among those of these claims that have too little memory, by machine and index."""
        least = self.min_free_bytes or 0
        return {
            (claim.host, card.index): card
            for claim in claims
            for card in claim.cards or ()
            if card.free_bytes is not None and card.free_bytes < least
        }

    def tell(self, kept: Sequence[Claim], crowded: Iterable[Claim]) -> None:
        """Say which cards were left out, and of which that could not be known; once of each."""
        if self.min_free_bytes is None:
            return
        crowd = {card: device for card, device in self.crowd(crowded).items() if card not in self._told}
        dark = {
            (claim.host, card.index)
            for claim in kept
            for card in claim.cards or [GpuDevice(index=-1)]
            if card.free_bytes is None and (claim.host, card.index) not in self._told
        }
        self._told |= crowd.keys() | dark
        if crowd:
            logger.warning("%s", shortages.said_of(crowd, self.min_free_bytes))
        if dark:
            names = ", ".join(f"GPU {index} of {host}" if host else "some GPU" for host, index in sorted(dark))
            logger.warning("How much memory of %s is free is not known: it counts as free for min_free_memory_bytes.", names)

    def check_sharing(self, claims: Iterable[Claim]) -> None:
        """Make sure that so many workers fit on the cards that they are to share at first, as far as their memory is known.

        Raises:
            ResourceError: One of them cannot even hold what each of its workers needs before it has computed anything.
        """
        for claim in claims:
            share = claim.demand.first_workers
            for card in claim.cards or () if share > 1 else ():
                if card.total_bytes is not None and card.total_bytes / share < CONTEXT_BYTES:
                    raise shortages.too_narrow(share, claim.host, card.index, card.total_bytes)

    def known_on(self, node_id: str) -> list[int] | None:
        """Return which GPUs a node has, whoever holds them; None if that cannot be found out."""
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ref = ray.remote(num_cpus=0, scheduling_strategy=there, **UNRECORDED)(_list_all).remote(self._inventory)
        try:
            indices: Sequence[int] = ray.get(ref, timeout=PROBE_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            return None
        return list(indices) or None


def _look_inside(inventory: Inventory) -> tuple[str, tuple[GpuDevice, ...]]:
    """Return the name of this machine, and the GPUs that Ray has given to this task."""
    cards = []
    for device in map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]):
        known = inventory.find(device)
        cards.append(known or GpuDevice(index=index_of(device, known)))
    return platform.node(), tuple(cards)


def _list_all(inventory: Inventory) -> list[int]:
    return [card.index for card in inventory.devices()]
