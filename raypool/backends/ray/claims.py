"""Claims on GPUs or cores: placement groups of one bundle, which outlive the workers in them.

A bundle keeps its GPU for life, so every process in it uses that GPU; a shared GPU is claimed
whole. `claim_number` claims any GPUs or cores, `Choice` the GPUs that the user has chosen, and
`Survey` finds out which GPUs claims have got, and how full these are.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
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
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypool.backends.ray import client, shortages
from raypool.backends.ray.calls import UNRECORDED, ask_node, given_gpus
from raypool.backends.ray.demand import (
    NO_LIMIT,
    NONE,
    Demand,
    Growth,
    Need,
    Node,
    gpus_of,
    living_nodes,
    name_of,
    names_of,
    total,
)
from raypool.backends.ray.shortages import besides_us, held_by, holders, our_name
from raypool.errors import InvalidValueError, ResourceError
from raypool.gpus.devices import GpuDevice, Inventory, index_of
from raypool.gpus.sharing import CONTEXT_BYTES
from raypool.profiles import for_ray

POLL_S = 0.01
"""How often to look, since Ray tells nobody that it has granted or freed a claim [s]."""

SILENT_S = 1.0
"""Shorter waits are not reported [s]."""

logger = logging.getLogger("raypool")


@dataclass(slots=True, eq=False, weakref_slot=True)  # a key of dictionaries, by identity
class Claim:
    """A bundle of resources of one node."""

    group: PlacementGroup
    demand: Demand
    num_workers: int = 0
    host: str = ""  # the name of its machine, and what is known of its GPUs; where that was asked
    cards: tuple[GpuDevice, ...] | None = None
    node_id: str | None = None  # where it was when somebody looked last
    was_on: str | None = None  # where it was before its node died
    is_released: bool = False
    room: int = 0  # so many workers may stand on it now

    def __post_init__(self) -> None:
        self.room = self.room or self.demand.first_workers

    @property
    def gpu(self) -> int | None:
        """The index of its (first) GPU, if known."""
        return self.cards[0].index if self.cards else None

    @property
    def last_node_id(self) -> str | None:
        """The last node that it is known to have been on."""
        return self.node_id or self.was_on

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that puts an actor or task into it."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


class Wanted:
    """How long to wait for claims: a limited time, and not beyond the end of the pool.

    `others` are the claims of this process's other open pools, by the line that opened them, which
    are not waited for.
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
        """Report once, after a second, what the pool waits for."""
        if not self._has_told and time.monotonic() > self._begin + SILENT_S:
            self._has_told = True
            # claims of this process are not waited for
            others = besides_us(holders())
            logger.warning(
                "Waiting for %s, at most start_timeout_s=%g.%s",
                missing(),
                self._timeout_s,
                f" {held_by(others)}" if others else "",
            )

    def is_over(self) -> bool:
        """Whether to give up."""
        return self._closed.is_set() or time.monotonic() > self._begin + self._timeout_s


def release_all(claims: Sequence[Claim]) -> None:
    """Release those of these claims that are not released yet."""
    for claim in claims:
        if not claim.is_released:
            claim.is_released = True
            claim.release()


def request(demand: Demand, node_id: str | None = None) -> Claim:
    """Ask Ray for a claim, on this node if one is named."""
    labels = for_ray(demand.labels)
    if node_id is not None:
        labels = {**labels, "ray.io/node-id": node_id}
    name = f"{our_name()}#{uuid.uuid4().hex}"  # Ray wants each name once
    selector = [labels] if labels else None
    group = placement_group([demand.bundle], name=name, bundle_label_selector=selector)
    return Claim(group, demand)


def is_ready(claim: Claim) -> bool:
    """Whether Ray has granted it."""
    return locate(claim) is not None


def locate(claim: Claim) -> str | None:
    """Return a claim's node, None if it has none; Ray moves claims whose node has died."""
    entry = placement_group_table(claim.group)
    claim.was_on = claim.last_node_id
    # Ray forgets groups that were removed: the entry is empty
    claim.node_id = str(entry["bundles_to_node_id"][0]) if entry.get("state") == "CREATED" else None
    return claim.node_id


def wait_released(claims: Sequence[Claim], timeout_s: float) -> None:
    """Wait, for this long at most, until Ray could give these claims' resources to others."""
    # a bundle has resources of its own, named after it, as long as it holds anything
    names = [claim.group.id.hex() for claim in claims]
    deadline = time.monotonic() + timeout_s
    while (
        any(name in resource for resource in ray.cluster_resources() for name in names)
        and time.monotonic() < deadline
    ):
        time.sleep(POLL_S)


# --- claims on any GPUs or cores ------------------------------------------------------------------


SETTLE_S = 1.0
"""How long to wait for resources that seem taken, if any number will do: they may have been given
back just now [s].
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
        """Request missing claims, and look at those that were granted."""
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
        """Whether the least number was granted."""
        return len(self.good) >= self.need.least

    @property
    def is_complete(self) -> bool:
        """Whether everything possible was granted, though some may be crowded."""
        return self._is_seen and len(self.good) >= min(
            self.need.most, self.total - len(self.crowded)
        )

    @property
    def is_settled(self) -> bool:
        """Whether these claims are enough, if nothing is given back for a while."""
        return self.is_complete or (self._is_seen and self.has_enough)


def claim_number(
    needs: Sequence[Need], wanted: Wanted, survey: Survey, may_grow: Callable[[], Growth]
) -> list[list[Claim]]:
    """Claim as much of each kind as possible; the requests make the cluster grow.

    Raises:
        ResourceError: One kind has less than its least, even after the wait; nothing is kept.
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
    kinds = [ClaimProgress(need, number, survey) for need, number in zip(needs, there, strict=True)]
    kept: list[list[Claim]] = []
    try:
        _await_claims(kinds, wanted)
        if all(kind.has_enough for kind in kinds):
            kept = [kind.good for kind in kinds]
    finally:
        good = set(itertools.chain(*kept))
        release_all([claim for kind in kinds for claim in kind.claims if claim not in good])
    # claims were given back before an error says who holds any
    for progress in kinds:
        need, good_ones = progress.need, progress.good
        if not progress.has_enough:
            if is_waiting:
                raise shortages.not_yet(need, len(good_ones))
            crowd = survey.crowd(progress.crowded)
            raise shortages.too_few(need, len(good_ones), crowd, survey.min_free_bytes)
        survey.tell(good_ones, progress.crowded)
    return kept


def _grown(needs: Sequence[Need], there: Sequence[int], growth: Growth) -> list[int]:
    """Return how many claims of each kind to request, so that the cluster grows.

    Raises:
        ResourceError: It cannot become that large.
    """
    larger = []
    for need, number in zip(needs, there, strict=True):
        most = max(number, growth.holds(need.demand) - need.num_held)
        if most < need.least:
            if growth == NONE:
                raise shortages.too_few(need, number, {}, None)
            raise shortages.never(need, number, most)
        # where the user has set no limit, more than the least would be a waste of machines
        wanted = need.least if need.most >= NO_LIMIT else need.most
        larger.append(max(number, min(wanted, most)))
    shortages.say_growing(needs, there)
    return larger


def _await_claims(kinds: Sequence[ClaimProgress], wanted: Wanted) -> None:
    since, most = time.monotonic(), 0

    def missing() -> str:
        return " and ".join(
            f"{kind.need.least * kind.need.demand.each:g} {kind.need.demand.kind}"
            f" ({len(kind.good) * kind.need.demand.each:g} granted so far)"
            for kind in kinds
        )

    while True:
        for kind in kinds:
            kind.go_on()
        there = sum(len(kind.good) for kind in kinds)
        if there > most:
            since, most = time.monotonic(), there  # where one came late, the next may be on its way
        has_enough = all(kind.has_enough for kind in kinds)
        if has_enough and all(kind.is_complete for kind in kinds):
            return
        if not has_enough:
            wanted.tell(missing)
        is_quiet = time.monotonic() - since > SETTLE_S
        if wanted.is_over() or (is_quiet and all(kind.is_settled for kind in kinds)):
            return
        time.sleep(POLL_S)


# --- claims on chosen GPUs ------------------------------------------------------------------------
#
# Ray gives out GPUs without being asked for a particular one. So, in rounds, all that are free are
# claimed, each claim is asked which GPU it got, and those that were not meant are given back.


ROUND_S = 1.0
"""How long to hold unwanted GPUs while the wanted one might still turn up [s]."""

EXISTENCE_S = 10.0
"""How long to look for chosen GPUs that may not exist, if pools of this process hold others [s]."""

# two pools of this process that choose at once would hold what the other wants
_choosing = threading.Lock()


class Spot(NamedTuple):
    """A GPU of a node."""

    node_id: str
    gpu: int


def spots(
    gpus: Sequence[int] | Mapping[str, Sequence[int]], *, skip_missing: bool = False
) -> list[Spot]:
    """Return the chosen GPUs: of this process's node, or of the machines that are named.

    Args:
        gpus: Their indices, or those for each machine.
        skip_missing: Leave out machines that are not there.

    Raises:
        ResourceError: A machine is missing, named twice, or its name is that of several.
        InvalidValueError: None is named, and this process is not on a node of the cluster.
    """
    if not isinstance(gpus, Mapping):
        if client.is_outside():
            raise InvalidValueError(
                f"gpus={list(gpus)} are GPUs of this machine, which is not a node of the cluster"
                f" at {client.server()}. Specify the machine: gpus={{'lab-3': {list(gpus)}}}."
            )
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


def _pause() -> None:
    """Wait for a random time, which lets another process that chooses go first."""
    time.sleep(random.Random().uniform(0.01, 0.1))


class Choice:
    """The GPUs `meant`, each claimed with `demand`; `survey` tells which one a claim has got."""

    def __init__(self, demand: Demand, meant: Sequence[Spot], survey: Survey) -> None:
        self._demand = demand
        # first without the rest, of which there may be too little for all GPUs of a node
        bare = {"GPU": demand.bundle["GPU"]}
        self._bare = demand if demand.bundle == bare else dataclasses.replace(demand, bundle=bare)
        self._meant = meant
        self._survey = survey
        nodes = {spot.node_id for spot in meant}
        self._nodes: dict[str, Node] = {
            node["NodeID"]: node for node in living_nodes() if node["NodeID"] in nodes
        }
        self._here = ray.get_runtime_context().get_node_id()
        self._found: dict[Spot, Claim] = {}
        self._seen: set[Spot] = set()  # those that were free
        self._taken: set[Spot] = set()  # those that this process's other pools hold
        # those with too little memory; their claims are given back all the same
        self._crowd: dict[Spot, Claim] = {}

    def claim(
        self, least: int | None, most: int, wanted: Wanted, besides: Sequence[Claim] = ()
    ) -> list[Claim]:
        """Claim the first `most` of them, without those that others fill.

        Args:
            least: The least number. None: all that others do not fill, and at least one.
            most: The greatest number.
            wanted: How long to wait for those that somebody holds.
            besides: Claims for other kinds of worker.

        Raises:
            ResourceError: One does not exist, or too few are free in time; nothing is kept, and
                `besides` is released.
        """
        self._taken = {
            Spot(str(claim.node_id), card.index)
            for claims in wanted.others.values()
            for claim in claims
            for card in claim.cards or ()
            if card.index >= 0  # else nobody knows which it is
        }
        try:
            if self._meant and most:
                self._check_nodes()
                self._check_others(least, most, wanted)
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
        """Return which of the first `most` chosen GPUs are not found yet."""
        return [spot for spot in self._wishes()[:most] if spot not in self._found]

    def _total(self, node_id: str) -> int:
        return gpus_of(self._nodes[node_id])

    def _absent(self, spots: Iterable[Spot]) -> list[Spot]:
        """Return which do not exist: all GPUs of their nodes are known, but not these."""
        known = self._seen | self._taken
        return [spot for spot in spots if spot not in known and self._knows_all(spot.node_id)]

    def _knows_all(self, node_id: str) -> bool:
        known = [spot for spot in self._seen | self._taken if spot.node_id == node_id]
        return len(known) == self._total(node_id)

    @property
    def _has_nameless(self) -> bool:
        """Whether Ray names GPUs by UUIDs whose index the inventory cannot tell."""
        return any(spot.gpu < 0 for spot in self._seen)

    # --- search -----------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Make sure that each node, if empty, could hold the claims on it."""
        for node_id, node in self._nodes.items():
            indices = [spot.gpu for spot in self._meant if spot.node_id == node_id]
            total = self._total(node_id)
            if len(indices) > total:
                known = self._survey.known_on(node_id)
                # else Ray has some of them, and the search will show which
                if known is None or len(known) == total:
                    there = known or range(total)
                    absent = [index for index in indices if index not in there]
                    raise self._no_such(node_id, absent or indices, there)
            words = shortages.lacking(self._demand, [node])
            if words is not None:
                words = f"{name_of(node)}: {words}"
                raise ResourceError(words, requested=len(indices), available=0)

    def _check_others(self, least: int | None, most: int, wanted: Wanted) -> None:
        """Make sure that this process's other pools leave enough: they are not waited for."""
        needed = min(len(self._meant), most) if least is None else least
        left = [spot.node_id for spot in self._meant if spot not in self._taken]
        rooms = {
            str(node["NodeID"]): self._demand.fits(node)
            for node in shortages.without(wanted.others, self._nodes.values())
        }
        available = sum(min(left.count(node_id), room) for node_id, room in rooms.items())
        if available < needed and wanted.others:
            if left:  # one that does not exist is held by nobody
                self._look_for_all(self._check_existence(set(left)), most, wanted)
                if not self._missing(most):  # the other pools have ended meanwhile
                    return
            names = ", ".join(self._name(spot) for spot in self._meant)
            raise shortages.held_here(f"GPU {names}", needed, available, "GPU", wanted.others)

    def _look_for_all(self, node_ids: set[str], most: int, wanted: Wanted) -> None:
        """Look at the GPUs of these nodes; raise an error if a chosen one turns out not to exist.

        A pool for which no GPUs were chosen does not know which it has. Then nobody can tell.
        """
        claims = [claim for others in wanted.others.values() for claim in others]
        if any(claim.cards is None for claim in claims if str(claim.node_id) in node_ids):
            return
        deadline = time.monotonic() + EXISTENCE_S
        while True:
            if absent := self._absent(self._meant):
                raise self._none_of(absent)
            if (
                not self._missing(most)
                or all(self._knows_all(node_id) for node_id in node_ids)
                or self._has_nameless
                or besides_us(holders())
                or wanted.is_over()
                or time.monotonic() > deadline
            ):
                return
            # again: a round does not see a GPU that was given back only a moment ago
            with _choosing:
                self._go_round(most)
            _pause()

    def _search(self, least: int | None, most: int, wanted: Wanted) -> None:
        """Look for them until there is nothing more to be had, or time is up."""
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
            if wanted.is_over() or self._absent(missing) or (is_enough and is_late):
                return
            if missing and self._has_nameless:
                return
            if missing and not is_enough:
                # called at once
                wanted.tell(lambda: f"GPU {', '.join(map(self._name, missing))}")  # noqa: B023
            if missing and not is_known:
                is_known = True
                self._check_existence({spot.node_id for spot in missing})
            _pause()

    def _check_existence(self, node_ids: Iterable[str]) -> set[str]:
        """Do not wait for GPUs that a machine knows it lacks; return the nodes that do not know."""
        unsure = set()
        for node_id in node_ids:
            known = self._survey.known_on(node_id)
            indices = [spot.gpu for spot in self._meant if spot.node_id == node_id]
            absent = [index for index in indices if index not in (known or ())]
            # where it knows fewer than Ray, Ray was told of some that it cannot know
            if known is None or len(known) < self._total(node_id):
                unsure.add(node_id)
            elif absent:
                raise self._no_such(node_id, absent, known)
        return unsure

    def _go_round(self, most: int) -> None:
        """Claim everything free, keep what is wanted of it, and note what was free."""
        claims: list[Claim] = []
        deadline = time.monotonic() + ROUND_S
        try:
            for node_id in self._nodes:
                held = sum(spot.node_id == node_id for spot in self._found)
                claims += (request(self._bare, node_id) for _ in range(self._total(node_id) - held))
            while claims:
                there = [claim for claim in claims if is_ready(claim)]
                self._survey.look(there)
                for claim in [claim for claim in there if claim.cards is not None]:
                    self._sort(claim, claims)
                if not self._missing(most):
                    return
                late_s = time.monotonic() - deadline
                are_asked = any(claim.cards is None for claim in there)
                if late_s > (PROBE_TIMEOUT_S if are_asked else 0):
                    return
                if all(claim.cards is not None for claim in claims):
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
        if claim.demand is self._demand:
            self._found[spot] = claim
        else:  # of this node's GPUs only those that are wanted are free now: the next gets one
            claim.release()
            claims.append(request(self._demand, claim.node_id))

    # --- shortages --------------------------------------------------------------------------------

    def _shortage(self, least: int | None, most: int) -> ResourceError:
        missing = [spot for spot in self._wishes() if spot not in self._found]
        if absent := self._absent(missing):
            return self._none_of(absent)
        names = [self._name(spot) for spot in missing]
        if missing and self._has_nameless:
            return shortages.nameless(names)
        asked, found = min(len(self._meant), most) if least is None else least, len(self._found)
        crowd = self._survey.crowd(self._crowd.values())
        words = shortages.said_of(crowd, self._survey.min_free_bytes)
        if not missing:
            return shortages.all_crowded(asked, found, words)
        free = [self._name(spot) for spot in sorted(self._seen)]
        if missing and set(missing) <= self._seen and self._bare is not self._demand:
            return shortages.too_little_beside(names, self._demand, asked, found)
        return shortages.in_use(names, free, asked, found, words)

    def _name(self, spot: Spot) -> str:
        if spot.node_id == self._here:
            return f"{spot.gpu}"
        return f"{spot.gpu} of {name_of(self._nodes[spot.node_id])}"

    def _none_of(self, absent: Sequence[Spot]) -> ResourceError:
        """Return the error for those of the first one's node, all of whose GPUs are known."""
        node_id = absent[0].node_id
        indices = [spot.gpu for spot in absent if spot.node_id == node_id]
        known = self._seen | self._taken
        there = sorted(spot.gpu for spot in known if spot.node_id == node_id)
        return self._no_such(node_id, indices, there)

    def _no_such(self, node_id: str, absent: Sequence[int], known: Sequence[int]) -> ResourceError:
        machine = None if node_id == self._here else name_of(self._nodes[node_id])
        return shortages.no_such_gpus(absent, known, self._total(node_id), machine)


# --- survey of claimed GPUs -----------------------------------------------------------------------


PROBE_TIMEOUT_S = 10.0
"""How long a survey task may take [s]; after that, its GPUs count as unknown."""

AGAIN_S = 0.25
"""How often to look whether others have given memory back [s]."""


class Survey:
    """Finds out which GPUs claims have got, and how full they are, by a task in each claim.

    Args:
        inventory: Knows the GPUs of a machine; asked on the machine itself.
        min_free_bytes: GPUs with less free memory are left out; unknown, or None, counts as free.
    """

    def __init__(self, inventory: Inventory, min_free_bytes: int | None) -> None:
        self.min_free_bytes = min_free_bytes
        self._inventory = inventory
        self._told: set[tuple[str, int]] = set()
        self._ask = ray.remote(num_cpus=0, max_retries=0, **UNRECORDED)(_look_inside)
        # when, and the reference of the answer, None once it has come; claims may be given back
        self._asked: WeakKeyDictionary[Claim, tuple[float, Any]] = WeakKeyDictionary()

    def concerns(self, demand: Demand) -> bool:
        """Whether claims of this kind have to be looked at, whichever GPUs they get."""
        is_looked_at = self.min_free_bytes is not None or demand.workers_per_claim > 1
        return demand.kind == "GPU" and is_looked_at

    def look(self, claims: Iterable[Claim]) -> None:
        """Ask new claims, and note the answers that have come; waits for none."""
        claims = list(claims)
        for claim in claims:
            if claim not in self._asked:
                # All of several GPUs, else Ray would tell the task of some only; the least share of
                # a single one.
                gpus = claim.demand.each if claim.demand.each > 1 else 0.0001
                options = self._ask.options(num_gpus=gpus, scheduling_strategy=claim.strategy())
                self._asked[claim] = time.monotonic(), options.remote(self._inventory)
        asked = {claim: self._asked[claim] for claim in claims if self._asked[claim][1] is not None}
        if not asked:  # Ray refuses to wait for nothing
            return
        refs = [ref for _, ref in asked.values()]
        # only looks: the caller's loop comes back after `POLL_S`
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for claim, (at, ref) in asked.items():
            if ref in done:
                try:
                    claim.host, claim.cards = ray.get(ref)
                    self._asked[claim] = at, None
                except ray.exceptions.RayError:
                    del self._asked[claim]  # its process has died; it is asked again
            elif time.monotonic() > at + PROBE_TIMEOUT_S:
                # else it would keep a share of the GPU, and no worker could start there
                ray.cancel(ref, force=True)
                self._asked[claim], claim.cards = (at, None), claim.cards or ()

    def look_again(self, claims: Iterable[Claim]) -> None:
        """Ask claims again that answered a while ago; until then the old answers count."""
        for claim in [claim for claim in claims if claim in self._asked]:
            at, ref = self._asked[claim]
            if ref is None and time.monotonic() > at + AGAIN_S:
                del self._asked[claim]

    def is_crowded(self, claim: Claim) -> bool:
        """Whether one of its GPUs has too little free memory."""
        return bool(self.crowd([claim]))

    def crowd(self, claims: Iterable[Claim]) -> dict[tuple[str, int], GpuDevice]:
        """Return these claims' GPUs with too little free memory, by machine and index."""
        least = self.min_free_bytes or 0
        return {
            (claim.host, card.index): card
            for claim in claims
            for card in claim.cards or ()
            if card.free_bytes is not None and card.free_bytes < least
        }

    def tell(self, kept: Sequence[Claim], crowded: Iterable[Claim]) -> None:
        """Warn, once for each GPU, of those left out and those of unknown free memory."""
        if self.min_free_bytes is None:
            return
        crowd = {key: gpu for key, gpu in self.crowd(crowded).items() if key not in self._told}
        dark = {
            (claim.host, card.index)
            for claim in kept
            for card in claim.cards or [GpuDevice(index=-1)]
            if card.free_bytes is None
        } - self._told
        self._told |= crowd.keys() | dark
        if crowd:
            logger.warning("%s", shortages.said_of(crowd, self.min_free_bytes))
        if dark:
            logger.warning(
                "The free memory of %s is unknown; min_free_memory_bytes counts it as free.",
                ", ".join(
                    f"GPU {index} of {host}" if host else "some GPU" for host, index in sorted(dark)
                ),
            )

    def check_sharing(self, claims: Iterable[Claim]) -> None:
        """Make sure that GPUs can hold the workers that share them at first, as far as is known.

        Raises:
            ResourceError: One lacks the memory that its workers need before they compute anything.
        """
        for claim in claims:
            share = claim.demand.first_workers
            for card in claim.cards or () if share > 1 else ():
                if card.total_bytes is not None and card.total_bytes / share < CONTEXT_BYTES:
                    raise shortages.too_narrow(share, claim.host, card.index, card.total_bytes)

    def known_on(self, node_id: str) -> list[int] | None:
        """Return the GPUs of a node, whoever holds them; None: unknown."""
        return ask_node(node_id, PROBE_TIMEOUT_S, _list_all, self._inventory) or None


def _look_inside(inventory: Inventory) -> tuple[str, tuple[GpuDevice, ...]]:
    """Return this machine's name, and the GPUs that Ray has given to this task."""
    cards = []
    for device in given_gpus():
        known = inventory.find(device)
        cards.append(known or GpuDevice(index=index_of(device, known)))
    return platform.node(), tuple(cards)


def _list_all(inventory: Inventory) -> list[int]:
    return [card.index for card in inventory.devices()]
