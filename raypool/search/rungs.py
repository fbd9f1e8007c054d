"""Successive halving by rungs: which waiting trial continues next."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

Entry = tuple[float, int]
"""The score of a trial, negated so that the best one comes first, and the trial's number."""


class Rungs:
    """The trials that have reached each rung, and those that wait there.

    Asynchronous successive halving: as soon as a waiting trial is among the best of its rung (one
    in `factor`), it continues to the next rung.

    Args:
        levels: The epochs after which trials are compared, in ascending order; the last one is the
            end of a trial.
        factor: One in this many trials continues.

    Source:
        Li et al. 2020, A System for Massively Parallel Hyperparameter Tuning, algorithm 2.

    Example:
        >>> rungs = Rungs([1, 3, 9], factor=3)
        >>> for trial, score in enumerate([0.5, 0.9, 0.7]):
        ...     rungs.reach(trial, 0, score)
        >>> rungs.promote(), rungs.promote()
        ((1, 1), None)
    """

    def __init__(self, levels: list[int], factor: int) -> None:
        self.levels = levels
        self._factor = factor
        self._reached: list[list[Entry]] = [[] for _ in levels]  # sorted
        self._waiting: list[list[Entry]] = [[] for _ in levels]  # heaps

    def reach(self, trial: int, rung: int, score: float, *, is_waiting: bool = True) -> None:
        """Note that a trial has reached a rung with a score (more is better), and waits there.

        With `is_waiting=False` it has gone on since, or has ended: others are compared with it.
        """
        insort(self._reached[rung], (-score, trial))
        if is_waiting and rung + 1 < len(self.levels):
            heappush(self._waiting[rung], (-score, trial))

    def promote(self) -> tuple[int, int] | None:
        """Return a trial that continues now, and to which rung; None: they all have to wait."""
        for rung in reversed(range(len(self.levels) - 1)):  # first those that have come far
            waiting, reached = self._waiting[rung], self._reached[rung]
            if not waiting:
                continue
            # all that are better than the best waiting one do not wait anymore
            if bisect_left(reached, waiting[0]) < len(reached) // self._factor:
                return heappop(waiting)[1], rung + 1
        return None
