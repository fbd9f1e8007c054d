"""Workers of several kinds: who takes which item of a loop, if it is known what the items cost.

Without knowledge the longest item goes to whoever is free, and a slow worker that takes the longest is what the whole loop
waits for. So the speeds are learned (`raypool.core.speeds`), at first from items that are short. While much is left, everybody
takes the longest item that he will end before the others have done the rest. Towards the end, what follows is played through
(`raypool.core.plans`), and who could not be done in time takes something shorter, or leaves what waits to faster ones.

None of this matters while items are short enough to share calls, or the user has said how many a call takes, or how many may run.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from raypool.core.crew import Crew
from raypool.core.ladder import Ladder
from raypool.core.model import Lane, Report, Slice, Task, Worker, WorkerState
from raypool.core.plans import Hand, plan, soonest
from raypool.core.speeds import Fit

MOST_PLANNED = 256
"""What follows is played through if no more items than this wait, and half as many workers are there."""

ENOUGH_TO_TRY = 6
"""A loop with so many items for each worker begins with short ones where a kind's speed is not known."""

NEARLY = 0.98
"""A worker this close to the fastest takes the longest item."""

SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 30.0

AT_ONCE_S = 1e-9
"""Nobody who is not free now is free sooner than this."""

PATIENCE = 1.5
"""Whoever leaves something to others looks again if nobody has come back after so many times what was expected."""

BUSY = WorkerState.BUSY  # Python 3.11 takes its time to look these up


class Pick(NamedTuple):
    """A free worker, and the item that he takes; None: what comes first."""

    worker: Worker
    item: int | None


class Later(NamedTuple):
    """Whoever is free leaves what waits to others; at this time somebody should look again [s]."""

    at: float


class Kinds:
    """Chooses, for a task whose costs are known, in a pool that is mixed."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def matter_for(self, task: Task) -> bool:
        """Whether it is of any use to choose."""
        spec = task.spec
        is_one_by_one = not task.pace.is_short and spec.chunk_size in (None, 1)
        return self._crew.squads.is_mixed and spec.costs is not None and is_one_by_one and spec.max_workers is None

    def choose(self, task: Task, free: dict[int, Worker], may_wait: bool, now: float) -> Pick | Later:
        """Return who of the free (one of each kind) takes what; `may_wait`: nobody may, unless there is nothing else to do."""
        ladder, fit = _learning(task)
        speeds = fit.speeds.by_kind
        counts = self._crew.squads.counts if task.lane is None else self._counts(task.lane)
        num_workers = sum(counts.values())
        if task.size >= ENOUGH_TO_TRY * num_workers and ladder.count:
            for kind, worker in free.items():
                if kind not in speeds:
                    item = ladder.from_here(task.size * 3 // 4)
                    return Pick(worker, ladder.last if item is None else item)
        best = max(speeds.values(), default=1.0)
        rates = {kind: speeds.get(kind, best) for kind in counts}
        fastest = max(free, key=lambda kind: (rates[kind], -free[kind].place))
        if rates[fastest] >= NEARLY * max(rates.values()):
            return Pick(free[fastest], None)
        if ladder.count + len(task.again or ()) > MOST_PLANNED or num_workers > MOST_PLANNED // 2:
            total = sum(rates[kind] * count for kind, count in counts.items())
            return Pick(free[fastest], self._in_time(ladder, fit, rates[fastest] / total))
        return self._planned(task, free, rates, may_wait, now)

    def _planned(self, task: Task, free: dict[int, Worker], rates: dict[int, float], may_wait: bool, now: float) -> Pick | Later:
        """Choose by playing through what follows."""
        ladder, fit = _learning(task)
        assert task.spec.costs is not None
        items = [item for piece in task.again or () for item in range(piece.start, piece.stop)]
        items = sorted(items + ladder.waiting())
        works = [fit.speeds.work(task.spec.costs[item]) for item in items]
        rates = {kind: min(rate, self._most(task, kind, now)) for kind, rate in rates.items()}
        by_speed = sorted(free, key=lambda kind: -rates[kind])
        hands = self._hands(task, free, rates, now)
        if works[0] * sum(hand.speed for hand in hands) <= sum(works) * rates[by_speed[0]]:
            return Pick(free[by_speed[0]], None)
        shares = plan(works, hands)
        if shares is None:
            return Pick(free[by_speed[0]], None)
        for kind in by_speed:
            if kind in shares:
                return Pick(free[kind], items[shares[kind]])
        wait_s = soonest(hands)
        if not may_wait or wait_s is None:
            return Pick(free[by_speed[0]], items[-1])
        return Later(now + min(max(PATIENCE * wait_s, SHORTEST_LOOK_S), LONGEST_LOOK_S))

    def _in_time(self, ladder: Ladder, fit: Fit, share: float) -> int | None:
        """Return the longest item that a worker who does this share of all work can end in time; or the shortest there is."""
        if not ladder.count:
            return None
        work = ladder.count * fit.speeds.work(ladder.cost / ladder.count)
        item = ladder.at_most(fit.speeds.cost(share * work))
        return ladder.last if item is None else item

    def _hands(self, task: Task, free: dict[int, Worker], rates: dict[int, float], now: float) -> list[Hand]:
        """Return those who could take something of a task, and when each of them is free."""
        crew, asking = self._crew, [worker.worker_id for worker in free.values()]
        hands: list[Hand] = []
        places = crew.places if task.lane is None else task.lane.places
        for place in places:
            worker = crew.workers[crew.places[place].worker_id]
            if worker.kind is None or worker.worker_id in crew.retiring:
                continue
            if worker.worker_id in crew.idle or worker.worker_id in asking:
                hands.append(Hand(0.0, rates[worker.kind], worker.kind))
            elif worker.worker_id in crew.torn and not crew.gatherings:
                hands.append(Hand(AT_ONCE_S, rates[worker.kind], worker.kind))  # it is asked next
            elif worker.state is BUSY and (left_s := _left_s(worker, task, rates[worker.kind], now)) is not None:
                hands.append(Hand(left_s, rates[worker.kind], worker.kind))
        return hands

    def _most(self, task: Task, kind: int, now: float) -> float:
        """Return how fast a kind can be at most: one of which nothing has come back yet cannot have done what it is at."""
        _, fit = _learning(task)
        if kind in fit.speeds.by_kind:
            return inf
        busy = [worker for worker in self._crew.workers.values() if worker.kind == kind and worker.state is BUSY]
        works = [(_work(worker, task), now - worker.since) for worker in busy]
        return min((work / elapsed_s for work, elapsed_s in works if work > 0 and elapsed_s > 0), default=inf)

    def _counts(self, lane: Lane) -> dict[int, int]:
        """Return how many workers of each kind there are in a lane."""
        counts: dict[int, int] = {}
        for place in lane.places:
            kind = self._crew.workers[self._crew.places[place].worker_id].kind
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
        return counts


def learn(task: Task, fit: Fit, kind: int | None, piece: Slice, report: Report) -> None:
    """Take in how long a worker of a kind has taken for a slice, if all of it went well."""
    if kind is None or report.failed or report.done != piece.stop - piece.start:
        return
    assert task.spec.costs is not None
    cost = sum(task.spec.costs[piece.start : piece.stop])
    fit.note(kind, cost / report.done, report.busy_s / report.done)
    task.pace.speeds = fit.speeds


def _learning(task: Task) -> tuple[Ladder, Fit]:
    """Return what waits of a task, and what is known of the speeds; from now on, any item may be taken."""
    if task.ladder is None or task.fit is None:
        assert task.spec.costs is not None
        task.ladder = Ladder(task.spec.costs, task.cursor)
        task.cursor = task.size
        task.fit = Fit(task.pace.speeds)
    return task.ladder, task.fit


def _left_s(worker: Worker, task: Task, speed: float, now: float) -> float | None:
    """Return how long a busy worker needs for what it runs [s]; None: nobody knows.

    One that should have been done long ago will need as long again: the later it is, the less can be built on it.
    """
    seconds = worker.since - now + _work(worker, task) / speed
    for attempt in worker.attempts.values():
        for piece in attempt.slices:
            if piece.task_id == task.spec.task_id:
                continue
            if not attempt.pace.calls:
                return None
            seconds += attempt.pace.mean_s * (piece.stop - piece.start)
    return max(abs(seconds), AT_ONCE_S)


def _work(worker: Worker, task: Task) -> float:
    """Return how long what a worker has of a task takes on one of speed 1 [s]."""
    assert task.fit is not None
    assert task.spec.costs is not None
    pieces = [piece for attempt in worker.attempts.values() for piece in attempt.slices if piece.task_id == task.spec.task_id]
    return sum(task.fit.speeds.work(cost) for piece in pieces for cost in task.spec.costs[piece.start : piece.stop])
