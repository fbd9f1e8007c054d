"""The places of a pool on Ray: which claim each place uses. `claims` gets the claims from Ray."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

import ray

from raypool.backends.ray import shortages
from raypool.backends.ray.claims import (
    POLL_S,
    Choice,
    Claim,
    Spot,
    Survey,
    Wanted,
    claim_number,
    is_ready,
    release_all,
    request,
    spots,
    wait_released,
)
from raypool.backends.ray.client import is_outside
from raypool.backends.ray.demand import (
    NO_LIMIT,
    NONE,
    Demand,
    Need,
    demand_of,
    gpus_of,
    growth,
    living_nodes,
)
from raypool.errors import PoolClosedError, ResourceError
from raypool.gpus.devices import usable_cores
from raypool.profiles import Profile, WorkerResources

_placements: weakref.WeakSet[Placement] = weakref.WeakSet()

LEND_TIMEOUT_S = 5.0
"""How long a pool waits until Ray could give lent resources to a training [s]."""

Found = dict[WorkerResources, list[Claim]]
"""The claims for each kind of worker."""


class Placement:
    """The places of a pool on Ray, numbered in the order of its workers, no number twice.

    `claim` may block, in the caller's thread; `leave` and `close` are for the driver's.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        # it takes a moment to ask: only once, and where something is missing
        self._growth = functools.cache(growth)
        nodes = living_nodes()
        if not any(map(gpus_of, nodes)):
            # workers may get those of nodes that an autoscaler adds
            nodes += (node for node, _ in self._growth().kinds)
        self._demands = {
            kind: demand_of(kind, profile.gpus is not None, profile.workers_per_gpu, nodes)
            for kind in profile.kinds
        }
        self._survey = Survey(profile.inventory, profile.min_free_memory_bytes)
        self._claims: dict[int, Claim] = {}  # by place
        # by place; which of the profile's list of resources it is for
        self._entries: dict[int, int] = {}
        # places to be left, since too many are on a claim
        self._leaving: set[int] = set()
        self._next_place = 0
        self._released: list[Claim] = []  # which Ray may not have taken back yet
        self._placing = threading.Lock()  # held for moments only: the driver's thread takes it, too
        self._claiming = threading.Lock()  # held by a thread that claims, however long it waits
        self._closed = threading.Event()
        self.is_ending = False
        self._opened_at = _line_of_user()
        _placements.add(self)

    def _others(self) -> dict[str, list[Claim]]:
        """Return the claims of this process's other open pools, by the line that opened them."""
        found: dict[str, list[Claim]] = {}
        for other in list(_placements):
            if other is not self and not (other.is_ending or other._closed.is_set()):
                claims = {id(claim): claim for claim in list(other._claims.values())}
                found.setdefault(other._opened_at, []).extend(claims.values())
        return {line: claims for line, claims in found.items() if claims}

    def may_move(self, staying: Set[str]) -> bool:
        """Whether workers could run on these nodes, or an autoscaler may bring others."""
        if isinstance(self._profile.gpus, tuple):  # chosen GPUs of this machine
            return False
        others = [node for node in living_nodes() if node["NodeID"] in staying]
        has_room = any(demand.fits(node) for node in others for demand in self.demands)
        return has_room or self._growth() != NONE

    # --- new places -------------------------------------------------------------------------------

    def claim(self, least: int | None, most: int | None) -> dict[int, Claim]:
        """Claim GPUs, or cores where workers have no GPU; room on claims of the pool is used first.

        Returns:
            The new places, in order, and their claims.

        Raises:
            ResourceError: There are fewer than `least`; nothing is kept.
            PoolClosedError: The pool was closed meanwhile; nothing is kept.
        """
        with self._claiming:
            wanted = Wanted(self._profile.start_timeout_s, self._closed, self._others())
            if self._profile.listed:
                entries = self._next_entries(least, most)
                workers: Iterable[tuple[WorkerResources, int]] = [
                    (self._profile.listed[entry], entry) for entry in entries
                ]
                numbers = Counter(kind for kind, _ in workers)
                needs = {kind: (number if least else 0, number) for kind, number in numbers.items()}
                found = self._claim_more(needs, wanted)
            elif least is None or most is None:
                (kind,) = self._profile.kinds
                found, workers = self._claim_all(kind, wanted), itertools.repeat((kind, -1))
            else:
                (kind,) = self._profile.kinds
                found = self._claim_more({kind: (least, most)}, wanted)
                workers = itertools.repeat((kind, -1), most)
            try:
                if self._closed.is_set():
                    raise PoolClosedError("The pool was shut down while it was growing.")
                self._survey.check_sharing(_unused(found))
            except BaseException:  # Ctrl-C, or Ray's own, if it is gone
                release_all(_unused(found))
                raise
            return self._place_workers(found, workers)

    def _claim_all(self, kind: WorkerResources, wanted: Wanted) -> Found:
        demand = self._demands[kind]
        if self._profile.gpus is not None:
            meant = spots(self._profile.gpus)
            return {kind: Choice(demand, meant, self._survey).claim(None, len(meant), wanted)}
        is_elsewhere = (
            self._profile.address is not None
            or bool(os.environ.get("RAY_ADDRESS"))
            or is_outside()
            or len(living_nodes()) > 1
        )
        most = NO_LIMIT
        if demand.kind == "CPU" and not is_elsewhere:
            most = usable_cores()  # physical ones, while Ray counts the logical ones
        elif not demand.each:  # any number would fit
            most = int(ray.cluster_resources().get("CPU", 1))
        return {kind: claim_number([Need(demand, 1, most)], wanted, self._survey, self._growth)[0]}

    def _next_entries(self, least: int | None, most: int | None) -> list[int]:
        """Return which of the listed resources the next workers get: the first that are free."""
        listed = self._profile.listed
        free = [entry for entry in range(len(listed)) if entry not in self._entries.values()]
        if least is not None and least > len(free):
            raise ResourceError(
                f"Workers: requested {least}, available {len(free)}: resources=[...] describes"
                f" {len(listed)} in all. Open a pool with a longer list.",
                requested=least,
                available=len(free),
            )
        return free[:most]

    def _claim_more(self, numbers: dict[WorkerResources, tuple[int, int]], wanted: Wanted) -> Found:
        """Claim for (least, most) more workers of each kind; return the pool's claims, too."""
        found: Found = {}
        needs: dict[WorkerResources, Need] = {}
        wishes: dict[WorkerResources, Need] = {}  # for GPUs that were chosen
        chosen: dict[WorkerResources, list[Spot]] = {}
        widened: dict[WorkerResources, int] = {}  # how many more workers share their GPUs
        for kind, (least, most) in numbers.items():
            demand = self._demands[kind]
            claims = {id(claim): claim for claim in list(self._claims.values())}
            held = [claim for claim in claims.values() if claim.demand is demand]
            found[kind] = held
            # "auto" begins with one worker per GPU; later, the user may want more on the same ones
            if held and least:
                widened[kind] = most
            share = demand.workers_per_claim if kind in widened else demand.first_workers
            spare = sum(_spare(claim) for claim in held)
            room = sum(max(share, claim.room) - claim.num_workers for claim in held)
            need = Need(
                demand,
                max(0, -(-(least - room) // share)),
                max(0, most - spare),
                len(held),
                len(self._profile.listed) > 0,
            )
            if self._profile.gpus is not None and demand.kind == "GPU":
                chosen[kind], wishes[kind] = self._chosen_spots(need, held, least), need
            else:
                needs[kind] = need
        new = claim_number(list(needs.values()), wanted, self._survey, self._growth)
        for kind, granted in zip(needs, new, strict=True):
            found[kind] += granted
        for kind, meant in chosen.items():
            choice, need = Choice(self._demands[kind], meant, self._survey), wishes[kind]
            found[kind] += choice.claim(need.least, need.most, wanted, besides=_unused(found))
        for kind, most in widened.items():
            _make_room(found[kind], most)
        return found

    def _chosen_spots(self, need: Need, held: list[Claim], least: int) -> list[Spot]:
        """Return the chosen GPUs that the pool does not hold."""
        gpus, share = self._profile.gpus or (), need.demand.first_workers
        ours = {(claim.node_id, claim.gpu) for claim in held}
        others = [spot for spot in spots(gpus, skip_missing=not need.least) if spot not in ours]
        if need.least > len(others):
            there = sum(_spare(claim) for claim in held) + len(others) * share
            raise shortages.no_more_chosen(gpus, least, there)
        return others

    def _place_workers(
        self, found: Found, workers: Iterable[tuple[WorkerResources, int]]
    ) -> dict[int, Claim]:
        """Spread workers evenly over their kind's claims; give unused claims back."""
        places: dict[int, Claim] = {}
        with self._placing:
            for kind, entry in workers:
                free = [claim for claim in found[kind] if _spare(claim) and not claim.is_released]
                if not free:
                    if entry >= 0:
                        continue  # there may be room for the next, which is of another kind
                    break
                claim = min(free, key=lambda claim: claim.num_workers)
                place = self._add_place(claim)
                places[place] = claim
                if entry >= 0:
                    self._entries[place] = entry
        release_all(_unused(found))
        return places

    def _add_place(self, claim: Claim) -> int:
        place = self._next_place
        self._next_place += 1
        claim.num_workers += 1
        self._claims[place] = claim
        return place

    # --- loans ------------------------------------------------------------------------------------

    @property
    def demands(self) -> list[Demand]:
        """What each kind of worker needs."""
        return list(self._demands.values())

    def lend(self, claims: Sequence[Claim]) -> None:
        """Give these claims back to Ray, but keep their places; wait until others can have them."""
        for claim in claims:
            claim.release()
        wait_released(claims, LEND_TIMEOUT_S)

    def take_back(self, lent: Mapping[int, tuple[Claim, int | None]]) -> dict[int, Claim]:
        """Claim lent resources again, as far as they are available.

        Args:
            lent: By place, the old claim and the index of its GPU, if any.
        """
        with self._claiming:
            wanted = Wanted(self._profile.start_timeout_s, self._closed, self._others())
            alive = {str(node["NodeID"]) for node in living_nodes()}
            there = {
                place: old
                for place, old in lent.items()
                if old[0].node_id in alive and place in self._claims
            }
            found: dict[int, Claim] = {}
            try:
                self._claim_same(there, wanted, found)
            except BaseException:  # also Ctrl-C
                release_all(list(found.values()))
                raise
            with self._placing:
                for place, claim in found.items():
                    if place in self._claims:  # else it was left meanwhile
                        claim.num_workers = 1
                        self._claims[place] = claim
            release_all([claim for claim in found.values() if not claim.num_workers])
            return found

    def _claim_same(
        self, there: Mapping[int, tuple[Claim, int | None]], wanted: Wanted, found: dict[int, Claim]
    ) -> None:
        asked: dict[int, Claim] = {}
        for demand in self._demands.values():
            places = {place: old for place, old in there.items() if old[0].demand is demand}
            spots = {
                Spot(str(old.node_id), gpu): place
                for place, (old, gpu) in places.items()
                if gpu is not None
            }
            # all of them in good time, then those that are free
            for least in (len(spots), 1) if spots else ():
                with contextlib.suppress(ResourceError):
                    claims = Choice(demand, list(spots), self._survey).claim(
                        least, len(spots), wanted
                    )
                    found |= {
                        spots[Spot(str(claim.node_id), claim.gpu)]: claim
                        for claim in claims
                        if claim.gpu is not None
                    }
                    break
            asked |= {
                place: request(demand, old.node_id)
                for place, (old, gpu) in places.items()
                if gpu is None
            }
        found |= asked
        while not all(map(is_ready, asked.values())) and not wanted.is_over():
            time.sleep(POLL_S)
        late = [place for place, claim in asked.items() if not is_ready(claim)]
        release_all([found.pop(place) for place in late])

    def why_taken(self, gpu: int | None) -> str:
        """Say who holds a claim that was lent."""
        what = "its core" if gpu is None else f"GPU {gpu}"
        words = (
            f"{what} was lent to a training, and another program claimed it before the pool could"
            f" take it back. {shortages.held_by(())}"
        )
        return words.rstrip(".")

    # --- shared GPUs ------------------------------------------------------------------------------

    def widen(self, claim: Claim, room: int) -> dict[int, Claim]:
        """Allow this many workers on a claim; return the new places."""
        with self._placing:
            if claim.is_released or self._closed.is_set():
                return {}
            places = [self._add_place(claim) for _ in range(room - claim.num_workers)]
            claim.room = len(self._staying(claim))
            return dict.fromkeys(places, claim)

    def narrow(self, claim: Claim, room: int) -> tuple[int, ...]:
        """Allow at most this many workers on a claim; return the newest places, to be left."""
        with self._placing:
            claim.room = room
            leaving = tuple(self._staying(claim)[room:])
            self._leaving.update(leaving)
            return leaving

    def _staying(self, claim: Claim) -> list[int]:
        """Return the places on a claim that are not to be left, in order."""
        return [
            place
            for place, other in self._claims.items()
            if other is claim and place not in self._leaving
        ]

    # --- places given back ------------------------------------------------------------------------

    def leave(self, place: int) -> Claim | None:
        """Give a place up; return its claim if no other place is on it.

        It is for `give_back`, once its worker has ended.
        """
        with self._placing:
            claim = self._claims.pop(place)
            self._entries.pop(place, None)
            self._leaving.discard(place)
            claim.num_workers -= 1
            claim.is_released = claim.num_workers == 0
        return claim if claim.is_released else None

    def give_back(self, claim: Claim) -> None:
        """Give the resources of a claim back to Ray."""
        self._released.append(claim)
        claim.release()

    def stop_claiming(self) -> None:
        """Let running claims give up, and wait for that; no thread can claim any more."""
        self._closed.set()
        with self._claiming:
            pass

    def close(self, timeout_s: float) -> None:
        """Give everything back, and wait until Ray could give it to others, at most this long."""
        for place in list(self._claims):  # those that came too late to be heard of
            left = self.leave(place)
            if left is not None:
                self.give_back(left)
        wait_released(self._released, timeout_s)


def _line_of_user() -> str:
    """Return the line of the user's code that is opening a pool, and where it is."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("raypool", "joblib"):
            break
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    is_cell = "ipykernel_" in file or file.startswith("<ipython-input")
    where = f"line {number} of a notebook cell" if is_cell else f"{Path(file).name}:{number}"
    line = linecache.getline(file, number, frame.f_globals).strip()
    return f"{where}, `{line}`" if line else where


def _make_room(claims: Sequence[Claim], num_workers: int) -> None:
    """Let this many more workers stand on these claims, or as many as can."""
    while sum(map(_spare, claims)) < num_workers:
        free = [claim for claim in claims if claim.room < claim.demand.workers_per_claim]
        if not free:
            return
        min(free, key=lambda claim: claim.room).room += 1


def _spare(claim: Claim) -> int:
    return max(claim.room - claim.num_workers, 0)


def _unused(found: Found) -> list[Claim]:
    return [claim for claims in found.values() for claim in claims if claim.num_workers == 0]
