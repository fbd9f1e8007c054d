"""Claims as many GPUs, or cores, as there are and are wanted, whichever these are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from raypool.engine import shortages
from raypool.engine.claims import POLL_S, Claim, Wanted, is_ready, release_all, request
from raypool.engine.demands import Need, total
from raypool.engine.growth import NONE, Growth
from raypool.engine.survey import Survey

NO_LIMIT = 10**6
"""So many, and nobody has said how many."""

SETTLE_S = 1.0
"""How long to wait for resources that somebody seems to hold, when any number will do: they may just have been given back [s]."""


class Gathering:
    """What was asked for of one kind, and what has come of it."""

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
        return self._is_seen and len(self.good) >= min(self.need.most, self.total - len(self.crowded))

    @property
    def is_settled(self) -> bool:
        """Whether it can be left at this, if nothing has been given back for a while."""
        return self.is_complete or (self._is_seen and self.has_enough)


def claim_number(
    needs: Sequence[Need], wanted: Wanted, survey: Survey, may_grow: Callable[[], Growth] = Growth
) -> list[list[Claim]]:
    """Claim what is needed of each kind, as much as there is, or as is to come: what is asked for makes the cluster grow.

    Raises:
        ResourceError: There is less than the least of one kind, even when the time is over; nothing of any kind is kept.
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
                raise shortages.held_here(kind, need.least * each, max(room, 0) * each, kind, wanted.others)
    gatherings = [Gathering(need, number, survey) for need, number in zip(needs, there, strict=True)]
    kept: list[list[Claim]] = []
    try:
        _gather(gatherings, wanted)
        if all(gathering.has_enough for gathering in gatherings):
            kept = [gathering.good for gathering in gatherings]
    finally:
        good = {claim for claims in kept for claim in claims}
        release_all([claim for gathering in gatherings for claim in gathering.claims if claim not in good])
    for gathering in gatherings:
        if not gathering.has_enough:  # nothing is held any more, when it is said who holds any
            crowd = survey.crowd(gathering.crowded)
            if is_waiting:
                raise shortages.not_yet(gathering.need, len(gathering.good))
            raise shortages.too_few(gathering.need, len(gathering.good), crowd, survey.min_free_bytes)
        survey.tell(gathering.good, gathering.crowded)
    return kept


def _grown(needs: Sequence[Need], there: Sequence[int], growth: Growth) -> list[int]:
    """Return how many claims of each kind to ask for, where there are too few nodes: no more than are really wanted.

    Raises:
        ResourceError: The cluster cannot become that large.
    """
    larger = []
    for need, number in zip(needs, there, strict=True):
        most = max(number, growth.holds(need.demand) - need.num_held)
        if most < need.least:
            raise shortages.too_few(need, number, {}, None) if growth == NONE else shortages.never(need, number, most)
        wanted = need.least if need.most >= NO_LIMIT else need.most
        larger.append(max(number, min(wanted, most)))
    shortages.say_growing(needs, there)
    return larger


def _gather(gatherings: Sequence[Gathering], wanted: Wanted) -> None:
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
        has_settled = time.monotonic() - since > SETTLE_S and all(gathering.is_settled for gathering in gatherings)
        if wanted.is_over() or has_settled:
            return
        time.sleep(POLL_S)


def _said(gathering: Gathering) -> str:
    need, available = gathering.need, len(gathering.good)
    each, kind = need.demand.each, need.demand.kind
    return f"{need.least * each:g} {kind} ({available * each:g} available)"
