"""Which place of a pool stands on which claim; `claims` gets them from Ray."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from raypool.devices.cores import usable_cores
from raypool.engine import claims as claiming
from raypool.engine.choosing import Choice
from raypool.engine.claims import Claim, Demand, Need, Wanted
from raypool.errors import PoolClosedError, ResourceError
from raypool.profiles import Profile
from raypool.resources import WorkerResources

NO_LIMIT = 10**6

Found = dict[WorkerResources, list[Claim]]
"""For each kind of worker what it may stand on."""


class Seating:
    """The places of a pool on Ray, numbered in the order of its workers. No number is used twice.

    `claim` may take long, in the thread of whoever asks for it; `leave` and `close` are for the driver's.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._chosen = tuple(profile.gpus) if isinstance(profile.gpus, tuple) else None
        self._demands = {kind: claiming.demand_of(kind, profile.gpus is not None) for kind in profile.kinds}
        self._claims: dict[int, Claim] = {}  # by place
        self._entries: dict[int, int] = {}  # by place; which of the profile's list of resources it is for
        self._next_place = 0
        self._released: list[Claim] = []  # which Ray may not have taken back yet
        self._seating = threading.Lock()
        self._claiming = threading.Lock()
        self._closed = threading.Event()

    # --- more of them -------------------------------------------------------------------------------------------------

    def claim(self, least: int | None, most: int | None) -> dict[int, Claim]:
        """Claim GPUs, or cores where workers have no GPU; shares of GPUs that the pool holds already come first.

        Returns:
            The new places, in order, and what each stands on.

        Raises:
            ResourceError: There are fewer than `least`; nothing is kept.
            PoolClosedError: The pool was closed meanwhile; nothing is kept.
        """
        with self._claiming:
            wanted = Wanted(self._profile.start_timeout_s, self._closed)
            if self._profile.listed:
                entries = self._next_entries(least, most)
                seats: Iterable[tuple[WorkerResources, int]] = [(self._profile.listed[entry], entry) for entry in entries]
                numbers = Counter(kind for kind, _ in seats)
                found = self._claim_more({kind: (number if least else 0, number) for kind, number in numbers.items()}, wanted)
            elif least is None or most is None:
                (kind,) = self._profile.kinds
                found, seats = self._claim_all(kind, wanted), itertools.repeat((kind, -1))
            else:
                (kind,) = self._profile.kinds
                found, seats = self._claim_more({kind: (least, most)}, wanted), itertools.repeat((kind, -1), most)
            if self._closed.is_set():
                claiming.release_all(_unused(found))
                raise PoolClosedError("The pool was shut down while it was to grow.")
            return self._seated(found, seats)

    def _claim_all(self, kind: WorkerResources, wanted: Wanted) -> Found:
        demand = self._demands[kind]
        if self._chosen is not None:
            return {kind: self._choice(kind, self._chosen).claim(wanted)}
        is_elsewhere = self._profile.address is not None
        most = NO_LIMIT if demand.kind == "GPU" or is_elsewhere else usable_cores()
        return {kind: claiming.claim_number([Need(demand, 1, most)], wanted)[0]}

    def _next_entries(self, least: int | None, most: int | None) -> list[int]:
        """Return which of the listed resources the next workers are for: the first ones that no worker has."""
        listed = self._profile.listed
        free = [entry for entry in range(len(listed)) if entry not in self._entries.values()]
        if least is not None and least > len(free):
            raise ResourceError(
                f"Requested {least} workers, available {len(free)}: resources=[...] says what each of {len(listed)} workers "
                "gets, and nothing of any more. Open a pool with a longer list.",
                requested=least,
                available=len(free),
                holders=(),
            )
        return free[:most]

    def _claim_more(self, numbers: dict[WorkerResources, tuple[int, int]], wanted: Wanted) -> Found:
        """Return what the pool holds and what it needs besides for so many (least, most) more workers of each kind."""
        found: Found = {}
        needs: dict[WorkerResources, Need] = {}
        chosen: dict[WorkerResources, list[int]] = {}
        for kind, (least, most) in numbers.items():
            demand = self._demands[kind]
            share = demand.workers_per_claim
            held = found[kind] = self._held(demand)
            spare = sum(share - claim.num_workers for claim in held)
            need = Need(
                demand, max(0, -(-(least - spare) // share)), max(0, most - spare), len(held), len(self._profile.listed) > 0
            )
            if self._chosen is not None and demand.kind == "GPU":
                chosen[kind] = self._chosen_gpus(need, held, least)
            else:
                needs[kind] = need
        for kind, claims in zip(needs, claiming.claim_number(list(needs.values()), wanted), strict=True):
            found[kind] += claims
        for kind, gpus in chosen.items():
            found[kind] += self._choice(kind, gpus).claim(wanted, besides=_unused(found))
        return found

    def _choice(self, kind: WorkerResources, gpus: Sequence[int]) -> Choice:
        return Choice(self._demands[kind], gpus, self._profile.inventory)

    def _chosen_gpus(self, need: Need, held: list[Claim], least: int) -> list[int]:
        """Return which of the GPUs that the user has chosen come next."""
        gpus, share = self._chosen or (), need.demand.workers_per_claim
        others = [gpu for gpu in gpus if gpu not in {claim.gpu for claim in held}]
        if need.least > len(others):
            there = sum(share - claim.num_workers for claim in held) + len(others) * share
            raise ResourceError(
                f"GPU: requested {least} workers, available {there}: the pool may use GPU {', '.join(map(str, gpus))} only. "
                "Name more GPUs in gpus=[...], or ask for fewer workers.",
                requested=least,
                available=there,
                holders=(),
            )
        return others[: need.most]

    def _held(self, demand: Demand) -> list[Claim]:
        return list({id(claim): claim for claim in list(self._claims.values()) if claim.demand is demand}.values())

    def _seated(self, found: Found, seats: Iterable[tuple[WorkerResources, int]]) -> dict[int, Claim]:
        """Spread workers over what was found for their kind evenly, as long as there is room; give back what none stands on."""
        places: dict[int, Claim] = {}
        with self._seating:
            for kind, entry in seats:
                share = self._demands[kind].workers_per_claim
                free = [claim for claim in found[kind] if claim.num_workers < share and not claim.is_released]
                if not free:
                    if entry >= 0:
                        continue  # there may be room for the next, which is of another kind
                    break
                claim = min(free, key=lambda claim: claim.num_workers)
                claim.num_workers += 1
                places[self._next_place] = self._claims[self._next_place] = claim
                if entry >= 0:
                    self._entries[self._next_place] = entry
                self._next_place += 1
        claiming.release_all(_unused(found))
        return places

    # --- fewer of them ------------------------------------------------------------------------------------------------

    def leave(self, place: int) -> Claim | None:
        """Give a place up; return its claim if nobody stands on that any more, for `give_back` once its worker has ended."""
        with self._seating:
            claim = self._claims.pop(place)
            self._entries.pop(place, None)
            claim.num_workers -= 1
            claim.is_released = claim.num_workers == 0
        return claim if claim.is_released else None

    def give_back(self, claim: Claim) -> None:
        """Give the resources of a claim back to Ray."""
        claim.release()
        self._released.append(claim)

    def stop_claiming(self) -> None:
        """Let whoever is claiming give up, and wait for that; nobody can claim any more."""
        self._closed.set()
        with self._claiming:
            pass

    def close(self, timeout_s: float) -> None:
        """Give everything back, and wait until Ray could give it to somebody else, at most so long."""
        for place in list(self._claims):  # those that came too late to be heard of
            left = self.leave(place)
            if left is not None:
                self.give_back(left)
        claiming.wait_released(self._released, timeout_s)


def _unused(found: Found) -> list[Claim]:
    return [claim for claims in found.values() for claim in claims if claim.num_workers == 0]
