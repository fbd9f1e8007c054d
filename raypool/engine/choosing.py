"""Claims on GPUs that the user has chosen.

Ray gives out GPUs without being asked for a particular one. So, in rounds, all that are free are claimed, each claim is asked
which GPU it got, and those that were not meant are given back.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ray

from raypool.engine import shortages
from raypool.engine.claims import POLL_S, Claim, Wanted, is_ready, release_all, request
from raypool.engine.demands import Demand, Node, living_nodes, name_of, names_of
from raypool.engine.survey import PROBE_TIMEOUT_S, Survey
from raypool.errors import ResourceError

ROUND_S = 1.0
"""How long to hold on to GPUs that are not meant while the one that is might still turn up [s]."""

_choosing = threading.Lock()  # two pools of this process that choose at once would hold what the other wants


class Spot(NamedTuple):
    """A GPU of a node."""

    node_id: str
    gpu: int


def spots(gpus: Sequence[int] | Mapping[str, Sequence[int]], *, skip_missing: bool = False) -> list[Spot]:
    """Return the GPUs that are meant: of the node of this process, or of the machines that are named.

    Args:
        gpus: Their indices, or those for each machine.
        skip_missing: Leave out those of machines that are not there.

    Raises:
        ResourceError: A machine is not there, or the name is that of more than one, or of one that was named already.
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
        self._nodes: dict[str, Node] = {node["NodeID"]: node for node in living_nodes() if node["NodeID"] in nodes}
        self._here = ray.get_runtime_context().get_node_id()
        self._found: dict[Spot, Claim] = {}
        self._seen: set[Spot] = set()  # those that were free
        self._crowd: dict[Spot, Claim] = {}  # those of them with too little memory; given back, all the same

    def claim(self, least: int | None, most: int, wanted: Wanted, besides: Sequence[Claim] = ()) -> list[Claim]:
        """Claim the first `most` of them, without those that somebody else fills.

        Args:
            least: So many must be had. None: all that nobody else fills, and one at least.
            most: No more than these.
            wanted: How long those that somebody holds are waited for.
            besides: What was claimed for other kinds of worker.

        Raises:
            ResourceError: One of them does not exist, or too few are free in time; nothing is kept, nor what is `besides`.
        """
        try:
            if self._meant and most:
                self._check_nodes()
                self._check_others(min(len(self._meant), most) if least is None else least, wanted)
                self._search(least, most, wanted)
            wishes = self._wishes()
            kept = [self._found[spot] for spot in wishes if spot in self._found][:most]
            if len(kept) < (max(1, min(len(wishes), most)) if least is None else least):
                release_all([*self._found.values(), *besides])  # before it is said who holds any
                raise self._shortage(least, most)
        except BaseException:
            release_all([*self._found.values(), *besides])
            raise
        release_all([claim for claim in self._found.values() if claim not in kept])
        self._survey.tell(kept, self._crowd.values())
        return kept

    # --- what is left of them -----------------------------------------------------------------------------------------

    def _wishes(self) -> list[Spot]:
        return [spot for spot in self._meant if spot not in self._crowd]

    def _missing(self, most: int) -> list[Spot]:
        """Return those that would have to be found yet, if the first ones of them are to be had."""
        return [spot for spot in self._wishes()[:most] if spot not in self._found]

    def _total(self, node_id: str) -> int:
        return int(self._nodes[node_id]["Resources"].get("GPU", 0))

    def _absent(self, spots: Iterable[Spot]) -> list[Spot]:
        """Return those of these that are not there: all GPUs of their nodes were seen, and they were not among them."""
        seen = [spot.node_id for spot in self._seen]
        return [spot for spot in spots if spot not in self._seen and seen.count(spot.node_id) == self._total(spot.node_id)]

    @property
    def _has_nameless(self) -> bool:
        """Whether GPUs came whose index nobody knows: Ray calls them by UUIDs, and the inventory is silent."""
        return any(spot.gpu < 0 for spot in self._seen)

    # --- the search ---------------------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Make sure that each node could hold what is wanted of it, if it were empty."""
        for node_id, node in self._nodes.items():
            indices = [spot.gpu for spot in self._meant if spot.node_id == node_id]
            total = self._total(node_id)
            if len(indices) > total:
                known = self._survey.known_on(node_id)
                if known is None or len(known) == total:  # else Ray has some of them, and the search will show which
                    there = known or range(total)
                    raise self._no_such(node_id, [index for index in indices if index not in there] or indices, there)
            words = shortages.lacking(self._demand, [node])
            if words is not None:
                raise ResourceError(f"{name_of(node)}: {words}", requested=len(indices), available=0, holders=())

    def _check_others(self, needed: int, wanted: Wanted) -> None:
        """Make sure that other open pools of this process leave enough of them: these would be waited for in vain."""
        taken = {Spot(str(claim.node_id), claim.gpu or 0) for claims in wanted.others.values() for claim in claims if claim.cards}
        left = [spot.node_id for spot in self._meant if spot not in taken]
        rooms = {str(node["NodeID"]): self._demand.fits(node) for node in shortages.without(wanted.others, self._nodes.values())}
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
            is_late = number > 0 and time.monotonic() - started > ROUND_S  # one round may take long by itself
            if not missing and (len(self._wishes()) >= needed or is_late):
                return
            if wanted.is_over() or self._absent(missing) or (missing and self._has_nameless) or (is_enough and is_late):
                return
            if missing and not is_enough:
                wanted.tell(lambda: f"GPU {', '.join(map(self._name, missing))}")  # noqa: B023  (it is called at once)
            if missing and not is_known:
                is_known = True
                self._check_existence({spot.node_id for spot in missing})
            time.sleep(random.Random().uniform(0.01, 0.1))  # another process may be choosing too: let it

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
                claims += (request(self._demand, node_id) for _ in range(self._total(node_id) - held))
            while claims:
                there = [claim for claim in claims if is_ready(claim)]
                self._survey.look(there)
                for claim in [claim for claim in there if claim.cards is not None]:
                    self._sort(claim, claims)
                if not self._missing(most):
                    return
                late_s = time.monotonic() - deadline
                are_asked = any(claim.cards is None for claim in there)
                if late_s > (PROBE_TIMEOUT_S if are_asked else 0) or all(claim.cards is not None for claim in claims):
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

    # --- too few ------------------------------------------------------------------------------------------------------

    def _shortage(self, least: int | None, most: int) -> ResourceError:
        missing = [spot for spot in self._wishes() if spot not in self._found]
        absent = self._absent(missing)
        if absent:
            node_id = absent[0].node_id
            seen = sorted(spot.gpu for spot in self._seen if spot.node_id == node_id)
            return self._no_such(node_id, [spot.gpu for spot in absent if spot.node_id == node_id], seen)
        if missing and self._has_nameless:
            return shortages.nameless([self._name(spot) for spot in missing])
        asked = min(len(self._meant), most) if least is None else least
        crowd = shortages.said_of(self._survey.crowd(self._crowd.values()), self._survey.min_free_bytes)
        if not missing:
            return shortages.all_crowded(asked, len(self._found), crowd)
        free = [self._name(spot) for spot in sorted(self._seen)]
        return shortages.in_use([self._name(spot) for spot in missing], free, asked, len(self._found), crowd)

    def _name(self, spot: Spot) -> str:
        return f"{spot.gpu}" if spot.node_id == self._here else f"{spot.gpu} of {name_of(self._nodes[spot.node_id])}"

    def _no_such(self, node_id: str, absent: Sequence[int], known: Sequence[int]) -> ResourceError:
        machine = None if node_id == self._here else name_of(self._nodes[node_id])
        return shortages.no_such_gpus(absent, known, self._total(node_id), machine)
