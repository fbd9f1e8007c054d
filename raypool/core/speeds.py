"""How fast each kind of worker runs a function, learned from what the items of a loop cost and how long they took.

An item that costs c takes c^slope / speed seconds. The user gives costs "roughly and in any unit": one who gives the width of a
network has times that grow with its square. So the slope is fitted too, as one for all kinds (a line for each kind through the
logarithms, all of the same steepness), and begins at 1. It was tried on 300 simulated loops, against the plain policy: with
times that grow with the root of the cost the worst took 1.025 times as long (1.064 with the slope left at 1), with its square
1.085 times (1.112).
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

PRIOR = 0.25
"""The weight of what was believed of the slope before, in squared logarithms of costs: items of equal cost change nothing."""

FLATTEST, STEEPEST = 0.25, 4.0

SHORTEST_S = 1e-6


class Speeds(NamedTuple):
    """What is believed: the slope, and the speed of each kind of which something is known."""

    slope: float = 1.0
    by_kind: dict[int, float] = {}  # noqa: RUF012 - never changed

    def work(self, cost: float) -> float:
        """Return how long an item takes on a worker of speed 1 [s]."""
        return cost if self.slope == 1 or cost <= 0 else exp(self.slope * log(cost))

    def cost(self, work: float) -> float:
        """Return what an item costs that takes so long on a worker of speed 1."""
        return work if self.slope == 1 or work <= 0 else exp(log(work) / self.slope)


class _Sums:
    """Of the items that one kind has finished: how many, and sums of the logarithms of cost (x) and time (y)."""

    __slots__ = ("count", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.count = 0
        self.x = self.y = self.xx = self.xy = 0.0


class Fit:
    """Learns the speeds for one loop.

    Args:
        before: What an earlier loop of the same function has taught. Its costs may have been in another unit: what a kind is
            found to do now says by how much all that is known of others has to change.
    """

    __slots__ = ("_before", "_sums", "speeds")

    def __init__(self, before: Speeds) -> None:
        self.speeds = before
        self._before = before
        self._sums: dict[int, _Sums] = {}

    def note(self, kind: int, cost: float, busy_s: float) -> None:
        """Take in that an item has taken so long [s] on a worker of this kind."""
        if cost <= 0:
            return
        sums = self._sums.get(kind)
        if sums is None:
            sums = self._sums[kind] = _Sums()
        x, y = log(cost), log(max(busy_s, SHORTEST_S))
        sums.count += 1
        sums.x += x
        sums.y += y
        sums.xx += x * x
        sums.xy += x * y
        self.speeds = self._fitted()

    def _fitted(self) -> Speeds:
        rise, run = PRIOR * self._before.slope, PRIOR
        for sums in self._sums.values():
            rise += sums.xy - sums.x * sums.y / sums.count
            run += sums.xx - sums.x * sums.x / sums.count
        slope = min(max(rise / run, FLATTEST), STEEPEST)
        own = {kind: exp((slope * sums.x - sums.y) / sums.count) for kind, sums in self._sums.items()}
        before = self._before.by_kind
        shared = max((kind for kind in own if kind in before), key=lambda kind: self._sums[kind].count, default=None)
        if shared is None:
            return Speeds(slope, own)
        factor = own[shared] / before[shared]
        return Speeds(slope, {kind: speed * factor for kind, speed in before.items()} | own)
