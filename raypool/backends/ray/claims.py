"""Claims on GPUs or cores: placement groups of one bundle, which outlive the workers in them.

A bundle keeps its GPU for life, so every process in it uses that GPU. A GPU that several workers
share is claimed whole. `claim_number` claims any GPUs or cores, `Choice` the GPUs that the user has
chosen, and `Survey` asks which GPUs claims have got, and how full these are.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raypool.backends.ray import shortages
from raypool.backends.ray.calls import UNRECORDED
from raypool.backends.ray.demand import (
    NONE,
    Demand,
    Growth,
    Need,
    Node,
    living_nodes,
    name_of,
    names_of,
    total,
)
from raypool.backends.ray.shortages import held_by, holders
from raypool.errors import ResourceError
from raypool.gpus.devices import GpuDevice, Inventory, index_of
from raypool.gpus.sharing import CONTEXT_BYTES
from raypool.profiles import for_ray

POLL_S = 0.01

SILENT_S = 1.0
"""Shorter waits are not reported [s]."""

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
    """How long to wait for claims: a limited time, and not beyond the end of the pool.

    Args:
        timeout_s: So long at most.
        closed: Set when the pool ends.
        others: What other open pools of this process hold, by the line that opened them. These are
            not waited for.
    """

    def __init__(
        self, timeout_s: float, closed: threading.Event, others: Mapping[str, Sequence[Claim]]
    ) -> None:
        self.others = others
        self._timeout_s = timeout_s
        self._begin = time.monotonic()
        self._closed = closed
        self._has_told = False

    def tell(self, missing: Callable[[], str]) -> None:
        """Say what is waited for, once, and not before a second has passed."""
        if not self._has_told and time.monotonic() > self._begin + SILENT_S:
            self._has_told = True
            # what has come already is not waited for
            others = tuple(name for name in holders() if _holder() not in name)
            who = held_by(others) if others else ""
            logger.warning(
                "Waiting for %s, for start_timeout_s=%g at most. %s",
                missing(),
                self._timeout_s,
                who,
            )

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
    labels = {
        **for_ray(demand.labels),
        **({"ray.io/node-id": node_id} if node_id is not None else {}),
    }
    name = f"{_holder()}#{uuid.uuid4().hex}"  # Ray wants each name once
    return Claim(
        placement_group(
            [demand.bundle], name=name, bundle_label_selector=[labels] if labels else None
        ),
        demand,
    )


def is_ready(claim: Claim) -> bool:
    """Whether it is there."""
    return locate(claim) is not None


def locate(claim: Claim) -> str | None:
    """Return which node a claim is on, None if it is on none: Ray looks for another where its node
    has died.
    """
    entry = placement_group_table(claim.group)
    # of one long gone nothing
    claim.node_id = str(entry["bundles_to_node_id"][0]) if entry.get("state") == "CREATED" else None
    return claim.node_id


def wait_released(claims: Sequence[Claim], timeout_s: float) -> None:
    """Wait until Ray could give what these claims held to somebody else, at most so long.

    A bundle has resources of its own, named after it, for as long as it holds anything.
    """
    names = [claim.group.id.hex() for claim in claims]
    deadline = time.monotonic() + timeout_s
    while (
        any(name in resource for resource in ray.cluster_resources() for name in names)
        and time.monotonic() < deadline
    ):
        time.sleep(POLL_S)


# --- claims on any GPUs or cores ------------------------------------------------------------------


NO_LIMIT = 10**6
"""No limit: the user has given no number."""

SETTLE_S = 1.0
"""How long to wait for resources that somebody seems to hold, when any number will do: they may
just have been given back [s].
"""


class ClaimProgress:
    """The claims of one kind that were requested, and those that were granted."""

    def __init__(self, need: Need, total: int, survey: Survey) -> None:
        self.need = need
        self.claims: list[Claim] = []
        self.good: list[Claim] = []
        self.crowded: list[Claim] = []  # held meanwhile, so that others come instead
        self.total = total
        self._survey = survey if survey.concerns(need.demand) else None
        self._is_seen = False  # whether all that have come were looked at

    def go_on(self) -> None:
        """Ask for what is missing, and see what has come."""
        missing = min(self.need.most + len(self.crowded), self.total) - len(self.claims)
        self.claims += (request(self.need.demand) for _ in range(missing))
        there = [claim for claim in self.claims if is_ready(claim)]
        seen = there
        if self._survey is not None:
            if not self.has_enough:
                self._survey.look_again(self.crowded)
            self._survey.look(there)
            seen = [claim for claim in there if claim.cards is not None]
            self.crowded = [claim for claim in seen if self._survey.is_crowded(claim)]
        self._is_seen = len(seen) == len(there)
        self.good = [claim for claim in seen if claim not in self.crowded][: self.need.most]

    @property
    def has_enough(self) -> bool:
        """Whether the least is there."""
        return len(self.good) >= self.need.least

    @property
    def is_complete(self) -> bool:
        """Whether there is as much as there can be, of which enough may still be crowded."""
        return self._is_seen and len(self.good) >= min(
            self.need.most, self.total - len(self.crowded)
        )

    @property
    def is_settled(self) -> bool:
        """Whether these claims are enough, if nothing has been given back for a while."""
        return self.is_complete or (self._is_seen and self.has_enough)


def claim_number(
    needs: Sequence[Need], wanted: Wanted, survey: Survey, may_grow: Callable[[], Growth] = Growth
) -> list[list[Claim]]:
    """Claim what is needed of each kind, as much as there is, or as is to come: what is asked for
    makes the cluster grow.

    Raises:
        ResourceError: There is less than the least of one kind, even when the time is over; nothing
            of any kind is kept.
    """
    there = [max(0, total(need.demand) - need.num_held) for need in needs]
    is_waiting = any(number < need.least for need, number in zip(needs, there, strict=True))
    if is_waiting:
        there = _grown(needs, there, may_grow())
    else:
        shortages.check_sum(needs)
        for need in needs if wanted.others else ():
            room = shortages.room_beside(need, wanted.others)
            if room < need.least and may_grow() == NONE:
                kind, each = need.demand.kind, need.demand.each
                raise shortages.held_here(
                    kind, need.least * each, max(room, 0) * each, kind, wanted.others
                )
    gatherings = [
        ClaimProgress(need, number, survey) for need, number in zip(needs, there, strict=True)
    ]
    kept: list[list[Claim]] = []
    try:
        _gather(gatherings, wanted)
        if all(gathering.has_enough for gathering in gatherings):
            kept = [gathering.good for gathering in gatherings]
    finally:
        good = {claim for claims in kept for claim in claims}
        release_all(
            [claim for gathering in gatherings for claim in gathering.claims if claim not in good]
        )
    for gathering in gatherings:
        if not gathering.has_enough:  # claims are given back before the error says who holds any
            crowd = survey.crowd(gathering.crowded)
            if is_waiting:
                raise shortages.not_yet(gathering.need, len(gathering.good))
            raise shortages.too_few(
                gathering.need, len(gathering.good), crowd, survey.min_free_bytes
            )
        survey.tell(gathering.good, gathering.crowded)
    return kept


def _grown(needs: Sequence[Need], there: Sequence[int], growth: Growth) -> list[int]:
    """Return how many claims of each kind to ask for, where there are too few nodes: no more than
    are really wanted.

    Raises:
        ResourceError: The cluster cannot become that large.
    """
    larger = []
    for need, number in zip(needs, there, strict=True):
        most = max(number, growth.holds(need.demand) - need.num_held)
        if most < need.least:
            raise (
                shortages.too_few(need, number, {}, None)
                if growth == NONE
                else shortages.never(need, number, most)
            )
        wanted = need.least if need.most >= NO_LIMIT else need.most
        larger.append(max(number, min(wanted, most)))
    shortages.say_growing(needs, there)
    return larger


def _gather(gatherings: Sequence[ClaimProgress], wanted: Wanted) -> None:
    since, most = time.monotonic(), 0
    while True:
        for gathering in gatherings:
            gathering.go_on()
        there = sum(len(gathering.good) for gathering in gatherings)
        if there > most:
            since, most = time.monotonic(), there  # where one came late, the next may be on its way
        if all(gathering.has_enough and gathering.is_complete for gathering in gatherings):
            return
        if not all(gathering.has_enough for gathering in gatherings):
            wanted.tell(lambda: " and ".join(map(_said, gatherings)))
        has_settled = time.monotonic() - since > SETTLE_S and all(
            gathering.is_settled for gathering in gatherings
        )
        if wanted.is_over() or has_settled:
            return
        time.sleep(POLL_S)


def _said(gathering: ClaimProgress) -> str:
    need, available = gathering.need, len(gathering.good)
    each, kind = need.demand.each, need.demand.kind
    return f"{need.least * each:g} {kind} ({available * each:g} available)"


# --- claims on chosen GPUs ------------------------------------------------------------------------
#
# Ray gives out GPUs without being asked for a particular one. So, in rounds, all that are free are
# claimed, each claim is asked which GPU it got, and those that were not meant are given back.


ROUND_S = 1.0
"""How long to hold on to GPUs that are not meant while the one that is might still turn up [s]."""

# two pools of this process that choose at once would hold what the other wants
_choosing = threading.Lock()


class Spot(NamedTuple):
    """A GPU of a node."""

    node_id: str
    gpu: int


def spots(
    gpus: Sequence[int] | Mapping[str, Sequence[int]], *, skip_missing: bool = False
) -> list[Spot]:
    """Return the GPUs that are meant: of the node of this process, or of the machines that are
    named.

    Args:
        gpus: Their indices, or those for each machine.
        skip_missing: Leave out those of machines that are not there.

    Raises:
        ResourceError: A machine is not there, or the name is that of more than one, or of one that
            was named already.
    """
    if not isinstance(gpus, Mapping):
        here = ray.get_runtime_context().get_node_id()
        return [Spot(here, index) for index in gpus]
    found: dict[str, str] = {}
    meant = []
    nodes = living_nodes()
    for machine, indices in gpus.items():
        same = [str(node["NodeID"]) for node in nodes if machine in names_of(node)]
        if len(same) != 1:
            if skip_missing:
                continue
            raise shortages.no_such_machine(machine, indices, nodes)
        (node_id,) = same
        if node_id in found:
            raise shortages.same_machine(found[node_id], machine, len(indices))
        found[node_id] = machine
        meant += [Spot(node_id, index) for index in indices]
    return meant


class Choice:
    """Certain GPUs.

    Args:
        demand: What is claimed with each of them.
        meant: Which these are.
        survey: Looks which GPUs claims have got.
    """

    def __init__(self, demand: Demand, meant: Sequence[Spot], survey: Survey) -> None:
        self._demand = demand
        self._meant = meant
        self._survey = survey
        nodes = {spot.node_id for spot in meant}
        self._nodes: dict[str, Node] = {
            node["NodeID"]: node for node in living_nodes() if node["NodeID"] in nodes
        }
        self._here = ray.get_runtime_context().get_node_id()
        self._found: dict[Spot, Claim] = {}
        self._seen: set[Spot] = set()  # those that were free
        # those of them with too little memory; given back, all the same
        self._crowd: dict[Spot, Claim] = {}

    def claim(
        self, least: int | None, most: int, wanted: Wanted, besides: Sequence[Claim] = ()
    ) -> list[Claim]:
        """Claim the first `most` of them, without those that somebody else fills.

        Args:
            least: So many must be had. None: all that nobody else fills, and one at least.
            most: No more than these.
            wanted: How long those that somebody holds are waited for.
            besides: What was claimed for other kinds of worker.

        Raises:
            ResourceError: One of them does not exist, or too few are free in time; nothing is kept,
                nor what is `besides`.
        """
        try:
            if self._meant and most:
                self._check_nodes()
                self._check_others(min(len(self._meant), most) if least is None else least, wanted)
                self._search(least, most, wanted)
            wishes = self._wishes()
            kept = [self._found[spot] for spot in wishes if spot in self._found][:most]
            if len(kept) < (max(1, min(len(wishes), most)) if least is None else least):
                # before the error says who holds any: not these
                release_all([*self._found.values(), *besides])
                raise self._shortage(least, most)
        except BaseException:
            release_all([*self._found.values(), *besides])
            raise
        release_all([claim for claim in self._found.values() if claim not in kept])
        self._survey.tell(kept, self._crowd.values())
        return kept

    # --- missing GPUs -----------------------------------------------------------------------------

    def _wishes(self) -> list[Spot]:
        return [spot for spot in self._meant if spot not in self._crowd]

    def _missing(self, most: int) -> list[Spot]:
        """Return which of the first `most` chosen GPUs were not found yet."""
        return [spot for spot in self._wishes()[:most] if spot not in self._found]

    def _total(self, node_id: str) -> int:
        return int(self._nodes[node_id]["Resources"].get("GPU", 0))

    def _absent(self, spots: Iterable[Spot]) -> list[Spot]:
        """Return which of these do not exist: all GPUs of their nodes were seen, and they were not
        among them.
        """
        seen = [spot.node_id for spot in self._seen]
        return [
            spot
            for spot in spots
            if spot not in self._seen and seen.count(spot.node_id) == self._total(spot.node_id)
        ]

    @property
    def _has_nameless(self) -> bool:
        """Whether GPUs came whose index nobody knows: Ray calls them by UUIDs, and the inventory is
        silent.
        """
        return any(spot.gpu < 0 for spot in self._seen)

    # --- search -----------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Make sure that each node could hold what is wanted of it, if it were empty."""
        for node_id, node in self._nodes.items():
            indices = [spot.gpu for spot in self._meant if spot.node_id == node_id]
            total = self._total(node_id)
            if len(indices) > total:
                known = self._survey.known_on(node_id)
                # else Ray has some of them, and the search will show which
                if known is None or len(known) == total:
                    there = known or range(total)
                    raise self._no_such(
                        node_id,
                        [index for index in indices if index not in there] or indices,
                        there,
                    )
            words = shortages.lacking(self._demand, [node])
            if words is not None:
                raise ResourceError(
                    f"{name_of(node)}: {words}", requested=len(indices), available=0, holders=()
                )

    def _check_others(self, needed: int, wanted: Wanted) -> None:
        """Make sure that other open pools of this process leave enough of them: waiting for these
        would be in vain.
        """
        taken = {
            Spot(str(claim.node_id), claim.gpu or 0)
            for claims in wanted.others.values()
            for claim in claims
            if claim.cards
        }
        left = [spot.node_id for spot in self._meant if spot not in taken]
        rooms = {
            str(node["NodeID"]): self._demand.fits(node)
            for node in shortages.without(wanted.others, self._nodes.values())
        }
        available = sum(min(left.count(node_id), room) for node_id, room in rooms.items())
        if available < needed and wanted.others:
            names = ", ".join(self._name(spot) for spot in self._meant)
            raise shortages.held_here(f"GPU {names}", needed, available, "GPU", wanted.others)

    def _search(self, least: int | None, most: int, wanted: Wanted) -> None:
        """Find them, until there is nothing more to be had, or the time is over."""
        started = time.monotonic()
        needed, is_known = 1 if least is None else least, False
        for number in itertools.count():
            if len(self._wishes()) < needed:
                self._crowd.clear()  # their memory may have come back: they are looked at again
            with _choosing:
                self._go_round(most)
            missing = self._missing(most)
            is_enough = least is not None and len(self._found) >= least
            # one round may take long by itself
            is_late = number > 0 and time.monotonic() - started > ROUND_S
            if not missing and (len(self._wishes()) >= needed or is_late):
                return
            if (
                wanted.is_over()
                or self._absent(missing)
                or (missing and self._has_nameless)
                or (is_enough and is_late)
            ):
                return
            if missing and not is_enough:
                wanted.tell(lambda: f"GPU {', '.join(map(self._name, missing))}")  # noqa: B023  (it is called at once)
            if missing and not is_known:
                is_known = True
                self._check_existence({spot.node_id for spot in missing})
            # a random pause lets another process that chooses go first
            time.sleep(random.Random().uniform(0.01, 0.1))

    def _check_existence(self, node_ids: Iterable[str]) -> None:
        """Do not wait for GPUs that a machine does not have, as far as it knows what it has.

        Where it knows of fewer than Ray does, Ray was told of some that it cannot know.
        """
        for node_id in node_ids:
            known = self._survey.known_on(node_id)
            indices = [spot.gpu for spot in self._meant if spot.node_id == node_id]
            absent = [index for index in indices if known is not None and index not in known]
            if absent and known is not None and len(known) >= self._total(node_id):
                raise self._no_such(node_id, absent, known)

    def _go_round(self, most: int) -> None:
        """Claim what is free, keep what is wanted of it, and note what was free."""
        claims: list[Claim] = []
        deadline = time.monotonic() + ROUND_S
        try:
            for node_id in self._nodes:
                held = sum(spot.node_id == node_id for spot in self._found)
                claims += (
                    request(self._demand, node_id) for _ in range(self._total(node_id) - held)
                )
            while claims:
                there = [claim for claim in claims if is_ready(claim)]
                self._survey.look(there)
                for claim in [claim for claim in there if claim.cards is not None]:
                    self._sort(claim, claims)
                if not self._missing(most):
                    return
                late_s = time.monotonic() - deadline
                are_asked = any(claim.cards is None for claim in there)
                if late_s > (PROBE_TIMEOUT_S if are_asked else 0) or all(
                    claim.cards is not None for claim in claims
                ):
                    return
                time.sleep(POLL_S)
        finally:
            for claim in claims:
                claim.release()

    def _sort(self, claim: Claim, claims: list[Claim]) -> None:
        """Take a claim out of those of a round if it is meant."""
        if claim.gpu is None or claim.node_id is None:
            return
        spot = Spot(claim.node_id, claim.gpu)
        self._seen.add(spot)
        if spot not in self._meant or spot in self._found:
            return
        if self._survey.is_crowded(claim):
            self._crowd[spot] = claim
            return
        self._crowd.pop(spot, None)
        claims.remove(claim)
        self._found[spot] = claim

    # --- shortages --------------------------------------------------------------------------------

    def _shortage(self, least: int | None, most: int) -> ResourceError:
        missing = [spot for spot in self._wishes() if spot not in self._found]
        absent = self._absent(missing)
        if absent:
            node_id = absent[0].node_id
            seen = sorted(spot.gpu for spot in self._seen if spot.node_id == node_id)
            return self._no_such(
                node_id, [spot.gpu for spot in absent if spot.node_id == node_id], seen
            )
        if missing and self._has_nameless:
            return shortages.nameless([self._name(spot) for spot in missing])
        asked = min(len(self._meant), most) if least is None else least
        crowd = shortages.said_of(
            self._survey.crowd(self._crowd.values()), self._survey.min_free_bytes
        )
        if not missing:
            return shortages.all_crowded(asked, len(self._found), crowd)
        free = [self._name(spot) for spot in sorted(self._seen)]
        return shortages.in_use(
            [self._name(spot) for spot in missing], free, asked, len(self._found), crowd
        )

    def _name(self, spot: Spot) -> str:
        return (
            f"{spot.gpu}"
            if spot.node_id == self._here
            else f"{spot.gpu} of {name_of(self._nodes[spot.node_id])}"
        )

    def _no_such(self, node_id: str, absent: Sequence[int], known: Sequence[int]) -> ResourceError:
        machine = None if node_id == self._here else name_of(self._nodes[node_id])
        return shortages.no_such_gpus(absent, known, self._total(node_id), machine)


# --- survey of claimed GPUs -----------------------------------------------------------------------


PROBE_TIMEOUT_S = 10.0
"""How long a survey task may take on a busy machine [s]; after that, its GPUs count as unknown."""

AGAIN_S = 0.25
"""How often to look whether somebody has given memory back [s]."""


class Survey:
    """Asks which GPUs claims have got, and which have too little free memory, by a task inside each
    claim.

    Args:
        inventory: Who knows the GPUs of a machine; it is asked on the machine itself.
        min_free_bytes: GPUs with less free memory are left out; unknown counts as free. None: all
            count as free.
    """

    def __init__(self, inventory: Inventory, min_free_bytes: int | None) -> None:
        self.min_free_bytes = min_free_bytes
        self._inventory = inventory
        self._told: set[tuple[str, int]] = set()
        # its claim may be given back meanwhile
        self._ask = ray.remote(num_cpus=0, max_retries=0, **UNRECORDED)(_look_inside)
        # when, and what will be the answer; None when it has come
        self._asked: WeakKeyDictionary[Claim, tuple[float, Any]] = WeakKeyDictionary()

    def concerns(self, demand: Demand) -> bool:
        """Whether claims of this kind have to be looked at, whichever GPUs they get."""
        return demand.kind == "GPU" and (
            self.min_free_bytes is not None or demand.workers_per_claim > 1
        )

    def look(self, claims: Iterable[Claim]) -> None:
        """Ask those that are there and were not asked yet, and note the answers that have come;
        waits for none.
        """
        claims = list(claims)
        for claim in claims:
            if claim not in self._asked:
                # All of several GPUs, else Ray would tell the task of some only; the least share of
                # a single one.
                gpus = claim.demand.each if claim.demand.each > 1 else 0.0001
                options = self._ask.options(num_gpus=gpus, scheduling_strategy=claim.strategy())
                self._asked[claim] = time.monotonic(), options.remote(self._inventory)
        asked = {claim: self._asked[claim] for claim in claims if self._asked[claim][1] is not None}
        done = (
            ray.wait([ref for _, ref in asked.values()], num_returns=len(asked), timeout=0)[0]
            if asked
            else []
        )
        for claim, (at, ref) in asked.items():
            if ref in done:
                self._note(claim, ref)
            elif time.monotonic() > at + PROBE_TIMEOUT_S:
                # else it would keep a share of the GPU, and no worker could start there
                ray.cancel(ref, force=True)
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
        """Whether too little memory is free on one of its GPUs."""
        return bool(self.crowd([claim]))

    def crowd(self, claims: Iterable[Claim]) -> dict[tuple[str, int], GpuDevice]:
        """Return the GPUs of these claims that have too little free memory, by machine and
        index.
        """
        least = self.min_free_bytes or 0
        return {
            (claim.host, card.index): card
            for claim in claims
            for card in claim.cards or ()
            if card.free_bytes is not None and card.free_bytes < least
        }

    def tell(self, kept: Sequence[Claim], crowded: Iterable[Claim]) -> None:
        """Warn which GPUs were left out, and whose free memory is unknown; once for each."""
        if self.min_free_bytes is None:
            return
        crowd = {
            card: device for card, device in self.crowd(crowded).items() if card not in self._told
        }
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
            names = ", ".join(
                f"GPU {index} of {host}" if host else "some GPU" for host, index in sorted(dark)
            )
            logger.warning(
                "How much memory of %s is free is not known: it counts as free for"
                " min_free_memory_bytes.",
                names,
            )

    def check_sharing(self, claims: Iterable[Claim]) -> None:
        """Make sure that so many workers fit on the GPUs that they share at first, as far as their
        memory is known.

        Raises:
            ResourceError: One of them cannot even hold what each of its workers needs before it has
                computed anything.
        """
        for claim in claims:
            share = claim.demand.first_workers
            for card in claim.cards or () if share > 1 else ():
                if card.total_bytes is not None and card.total_bytes / share < CONTEXT_BYTES:
                    raise shortages.too_narrow(share, claim.host, card.index, card.total_bytes)

    def known_on(self, node_id: str) -> list[int] | None:
        """Return which GPUs a node has, whoever holds them; None if that cannot be found out."""
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ref = ray.remote(num_cpus=0, scheduling_strategy=there, **UNRECORDED)(_list_all).remote(
            self._inventory
        )
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
