"""Which waiting trial continues next: successive halving (`Rungs`), populations (`Members`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from heapq import heappop, heappush

Entry = tuple[float, int]
"""The score of a trial, negated so that the best one comes first, and the trial's number."""


class Rungs:
    """The trials that have reached each rung, and those that wait there.

    Asynchronous successive halving: as soon as a waiting trial is among the best of its rung (one
    in `factor`), it continues to the next rung (`promote`). For a worker that would be idle, the
    best waiting trial continues before that (`promote_early`). Such a trial does not count among
    those of which one in `factor` continues, until it has become one of the best: it gives no
    other trial a place.

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
        self._early: list[list[Entry]] = [[] for _ in levels]  # sorted; by the rung they left early
        self._num_counted = [0] * len(levels)
        self._last_rungs: dict[int, int] = {}

    def reach(self, trial: int, rung: int, score: float, *, is_waiting: bool = True) -> None:
        """Note that a trial has reached a rung with a score (more is better), and waits there.

        With `is_waiting=False` it has gone on since, or has ended: others are compared with it.
        """
        insort(self._reached[rung], (-score, trial))
        self._num_counted[rung] += not self._left_early(trial, rung - 1)
        self._last_rungs[trial] = rung
        if is_waiting and rung + 1 < len(self.levels):
            heappush(self._waiting[rung], (-score, trial))

    @property
    def summary(self) -> str:
        """How many trials have reached each rung, and how many wait there, in a line.

        Example:
            >>> rungs = Rungs([1, 3, 9], factor=3)
            >>> for trial in range(4):
            ...     rungs.reach(trial, 0, score=trial)
            >>> _ = rungs.promote()
            >>> rungs.summary
            'rungs: 4 at 1, 0 at 3, 0 at 9 epochs; 3 wait'
        """
        counts = zip(map(len, self._reached), self.levels, strict=True)
        words = ", ".join(f"{count:,} at {level:,}" for count, level in counts)
        num_waiting = sum(map(len, self._waiting))
        return f"rungs: {words} epochs" + (f"; {num_waiting:,} wait" if num_waiting else "")

    def promote(self) -> tuple[int, int] | None:
        """Return a trial that continues now, and to which rung; None: they all have to wait."""
        for rung in range(len(self.levels) - 1):  # upwards: one that counts may let others count
            early = self._early[rung]
            while early and self._is_among_best(early[0], rung):
                _, trial = early.pop(0)
                self._num_counted[rung + 1] += self._last_rungs[trial] > rung
        for rung in reversed(range(len(self.levels) - 1)):  # first those that have come far
            waiting = self._waiting[rung]
            # all that are better than the best waiting one do not wait anymore
            if waiting and self._is_among_best(waiting[0], rung):
                return heappop(waiting)[1], rung + 1
        return None

    def promote_early(self) -> tuple[int, int] | None:
        """Return the best waiting trial of the highest rung, and its next one; None: none waits.

        Call it only after `promote` has returned None.
        """
        for rung in reversed(range(len(self.levels) - 1)):
            if self._waiting[rung]:
                entry = heappop(self._waiting[rung])
                insort(self._early[rung], entry)
                return entry[1], rung + 1
        return None

    def is_early(self, trial: int) -> bool:
        """Whether a trial that runs was promoted early, and has not become one of the best."""
        return self._left_early(trial, self._last_rungs.get(trial, -1))

    def _left_early(self, trial: int, rung: int) -> bool:
        return rung >= 0 and any(each == trial for _, each in self._early[rung])

    def _is_among_best(self, entry: Entry, rung: int) -> bool:
        num_places = self._num_counted[rung] // self._factor
        return bisect_left(self._reached[rung], entry) < num_places


class Members:
    """The members of a population: which one continues next, and which are replaced.

    Truncation selection: members in the worst quarter are replaced by copies of those in the best.
    Members are compared by their scores at the same rung, since those that wait for a worker are
    behind; one that has not come so far counts with its last score.

    Args:
        levels: The epochs after which members pause, in ascending order, then the last epoch.
        size: The number of members. None continues before all have begun.

    Source:
        Jaderberg et al. 2017, Population Based Training of Neural Networks.

    Example:
        >>> members = Members([5, 10], size=4)
        >>> for trial, score in enumerate([0.5, 0.9, 0.7, 0.1]):
        ...     members.join(trial)
        ...     members.reach(trial, 0, score)
        >>> members.promote(), members.parents(0), members.parents(3)
        ((0, 1), [], [1])
    """

    def __init__(self, levels: list[int], size: int) -> None:
        self.levels = levels
        self._size = size
        self._members: set[int] = set()
        self._scores: dict[int, list[float]] = {}  # of members and those before them, by rung
        self._waiting: set[int] = set()
        self._kept: set[int] = set()  # those whose checkpoint of their last rung still exists

    @property
    def summary(self) -> str:
        """How many members have come how far, in a line; see `Rungs.summary`."""
        counts = Counter(len(self._scores[member]) for member in self._members)
        words = [f"{counts[rung]:,} at {level:,}" for rung, level in enumerate([0, *self.levels])]
        num_waiting = len(self._waiting)
        return f"members: {', '.join(words)} epochs" + (
            f"; {num_waiting:,} wait" * bool(num_waiting)
        )

    @property
    def num_missing(self) -> int:
        """How many members have not begun."""
        return self._size - len(self._members)

    def join(self, trial: int) -> None:
        """Take a trial that begins."""
        self._members.add(trial)
        self._scores[trial] = []

    def leave(self, trial: int) -> None:
        """Remove a member that has failed."""
        self._members.discard(trial)
        self._size -= 1

    def reach(self, trial: int, rung: int, score: float, *, is_waiting: bool = True) -> None:
        """Note that a member has reached a rung; see `Rungs.reach`."""
        self._scores[trial][rung:] = [score]
        if is_waiting:
            self._waiting.add(trial)
            self._kept.add(trial)

    def promote(self) -> tuple[int, int] | None:
        """Return the member that continues now, and to which rung; None: there is none."""
        if self.num_missing > 0 or not self._waiting:
            return None
        trial = min(self._waiting, key=lambda each: (len(self._scores[each]), each))
        self._waiting.remove(trial)
        self._kept.remove(trial)  # it will change its checkpoint
        return trial, len(self._scores[trial])

    def rung(self, trial: int) -> int:
        """Return the last rung that a member has reached."""
        return len(self._scores[trial]) - 1

    def parents(self, trial: int) -> list[int]:
        """Return the members of which one is copied in this one's place; none: this one continues.

        They have come at least as far: otherwise members whose scores fall would train forever.
        """
        ranked, rung = self._ranked(trial), self.rung(trial)
        quarter = len(self._members) // 4
        # members without a score may turn out to be worse
        if ranked.index(trial) < len(self._members) - quarter:
            return []
        own = self._scores[trial][rung]
        return [
            each
            for each in ranked[:quarter]
            if each in self._kept and self.rung(each) >= rung and self._scores[each][rung] > own
        ]

    def keep(self, trial: int) -> bool:
        """Return whether to keep a copy of a member's checkpoint while it runs: if it is among the
        best, others may begin there.
        """
        if trial in self._ranked(trial)[: len(self._members) // 4]:
            self._kept.add(trial)
        return trial in self._kept

    def replace(self, trial: int, child: int, parent: int, rung: int) -> list[float]:
        """Let a child, which has joined, replace a member; return its scores at earlier rungs.

        The member's scores stay: with the parent's instead, one member after the other would fall
        into the worst quarter of a rung.
        """
        for each in (self._members, self._waiting, self._kept):
            each.discard(trial)
        own = self._scores[trial]
        self._scores[child] = [*own, *self._scores[parent][len(own) : rung + 1]]
        return list(self._scores[child])

    def _ranked(self, trial: int) -> list[int]:
        """Return the members that have scores, the best at this member's rung first."""
        num_rungs = len(self._scores[trial])
        known = [each for each in self._members if self._scores[each]]
        return sorted(known, key=lambda each: (-self._scores[each][:num_rungs][-1], each))
