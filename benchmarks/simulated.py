"""The scheduler alone in simulated time, under loads of several kinds: what it costs, and how good
its schedules are.

Nothing but `Scheduler` and a heap of events that lie ahead, whose cost is not counted. Every
outcome is checked.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random

from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason

START_S = 0.1
RANKS = 8
SLOW = 0.2
PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Load:
    """What is to be done, and what goes wrong.

    `tail`: the exponent of a Pareto distribution of the items' times (at most 100 s), else they
        take `least_s` to twice that.
    `slow`: this part of the workers is five times slower. `p_loss`: a call loses its worker, half
        way; those of gangs do not.
    `gang_each`: so many tasks, then a gang.
    """

    name: str
    tail: float | None = None
    slow: float = 0.0
    p_loss: float = 0.0
    gang_each: int = 0
    least_s: float = 1.0

    @property
    def is_alike(self) -> bool:
        """Whether any worker does any item in the same time, and by itself."""
        return not (self.slow or self.p_loss or self.gang_each)

    def item_s(self, random: Random) -> float:
        """Return how long an item takes on a worker that is not slow [s]."""
        if self.tail is None:
            return self.least_s * (1 + random.random())
        return min(random.paretovariate(self.tail), 100.0)

    def speed(self, place: int) -> float:
        """Return how fast the worker in a place is: the slow ones are spread over the places."""
        return SLOW if self.slow > 0 and place % round(1 / self.slow) == 0 else 1.0

    def is_gang(self, number: int) -> bool:
        """Whether this task is a gang."""
        return self.gang_each > 0 and number % self.gang_each == 0

    def bound_s(self, work_s: float, longest_s: float, num_workers: int) -> float:
        """Return what no schedule could be faster than: all work on all workers, or the longest
        item on the fastest of them.
        """
        return max(work_s / sum(map(self.speed, range(num_workers))), longest_s)


LOADS = {
    load.name: load
    for load in (
        Load("even"),
        Load("heavy tail", tail=1.5),
        Load("stragglers", slow=0.02),
        Load("faults", p_loss=0.01),
        Load("gangs", gang_each=100),
        Load("all at once", tail=1.5, slow=0.02, p_loss=0.01, gang_each=100),
    )
}


class Course:
    """One simulation, which can be looked at after every so many events.

    Args:
        num_workers: Workers of the pool.
        num_tasks: Tasks, all of which are handed in first.
        load: Of what kind they are.
    """

    def __init__(self, num_workers: int, num_tasks: int, load: Load) -> None:
        self.num_events = 0
        self.handling_s = 0.0
        self.task_bytes = 0.0  # of memory, for each that is queued
        self.end_s = 0.0
        self._num_workers = num_workers
        self._num_tasks = num_tasks
        self._load = load
        self._random = Random(0)
        self._scheduler = Scheduler()
        self._ahead: list[tuple[float, int, m.Event]] = []
        self._count = 0
        self._places: dict[int, int] = {}  # by worker
        self._lost: dict[int, int] = {}  # losses, by task
        self._outcomes = bytearray(num_tasks)  # so many for each task (a gang: for each rank)
        self._num_failed = 0
        self._work_s = self._longest_s = 0.0

    def slices(self, size):
        """Go on, and stop after every so many events; the last stop is the end."""
        for _ in self._events():
            self.num_events += 1
            if self.num_events % size == 0:
                yield
        self._check()
        yield

    def bound_s(self):
        """Return what no schedule could be faster than."""
        return self._load.bound_s(self._work_s, self._longest_s, self._num_workers)

    def guarantee_s(self):
        """Return what list scheduling never takes longer than, where workers are alike: at most 2 -
        1/m times the optimum.

        Source:
            R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM Journal on Applied
            Mathematics 17 (1969).
        """
        return self._work_s / self._num_workers + (1 - 1 / self._num_workers) * self._longest_s

    def _events(self):
        self._handle(0.0, m.ResizeRequested(add=tuple(range(self._num_workers))))
        while self._ahead and self._ahead[0][0] <= START_S:
            self._step()
            yield
        before = _resident_bytes()
        for number in range(self._num_tasks):
            self._handle(START_S, m.TaskSubmitted(self._spec(number)))
            yield
        self.task_bytes = (_resident_bytes() - before) / self._num_tasks
        while self._ahead:
            self._step()
            yield

    def _spec(self, number):
        if self._load.is_gang(number):
            return TaskSpec(number, 1, size=min(RANKS, self._num_workers // 2), is_gang=True)
        return TaskSpec(number, 0)

    def _step(self):
        now, _, event = heappop(self._ahead)
        self._handle(now, event)

    def _handle(self, now, event):
        before = time.perf_counter()
        commands = self._scheduler.handle(event, now)
        self.handling_s += time.perf_counter() - before
        for command in commands:
            self._carry_out(command, now)

    def _carry_out(self, command, now):
        if isinstance(command, m.RunTasks):
            self._run(command, now)
        elif isinstance(command, m.SettleItems):
            self._settle(command.items, now)
        elif isinstance(command, m.FailItems):
            self._num_failed += command.items.stop - command.items.start
            self._settle(command.items, now)
        elif isinstance(command, m.RunGang):
            for call in command.runs:
                self._run(call, now)
        elif isinstance(command, m.StartWorker):
            self._places[command.worker_id] = command.place
            self._later(now + START_S, m.WorkerReady(command.worker_id))
        elif isinstance(command, m.SetTimer) and command.kind != "ready":
            self._later(command.at, m.TimerFired(*command[1:]))

    def _run(self, call, now):
        (piece,) = call.slices  # all items are long
        may_be_lost = self._load.p_loss > 0 and not self._load.is_gang(piece.task_id)
        if may_be_lost and self._random.random() < self._load.p_loss:
            self._lost[piece.task_id] = self._lost.get(piece.task_id, 0) + 1
            self._later(
                now + self._load.item_s(self._random) / 2,
                m.WorkerLost(call.worker_id, LossReason.EXIT),
            )
            return
        item_s = self._load.item_s(self._random)
        self._work_s += item_s
        self._longest_s = max(self._longest_s, item_s)
        took_s = item_s / self._load.speed(self._places[call.worker_id])
        self._later(
            now + took_s,
            m.AttemptFinished(call.worker_id, call.attempt_id, (Report(1, busy_s=took_s),)),
        )

    def _settle(self, items, now):
        self._outcomes[items.task_id] += items.stop - items.start
        self.end_s = now - START_S

    def _later(self, at, event):
        self._count += 1
        heappush(self._ahead, (at, self._count, event))

    def _check(self):
        """Make sure that each item has one outcome, and that those have failed that have lost their
        workers too often.
        """
        wrong = [
            number
            for number, outcomes in enumerate(self._outcomes)
            if outcomes != self._spec(number).size
        ]
        assert not wrong, f"tasks without just one outcome for each item: {wrong[:5]}"
        num_doomed = sum(losses > TaskSpec(0, 0).retries for losses in self._lost.values())
        assert self._num_failed == num_doomed, (
            f"{self._num_failed} items have failed, and not {num_doomed}"
        )


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
