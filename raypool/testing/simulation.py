"""The scheduler alone in simulated time, with faults on demand; `raypool.testing` has the public
names.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.model import Counts, Report, TaskSpec
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong in a simulation, and how long things take.

    Args:
        seed: The seed of all random choices below.
        p_loss: Probability that a call loses its worker: half of the time before the function runs,
            half of the time after.
        p_failed_start: Probability that a worker does not start.
        p_stubborn: Probability that a cancelled call does not end, so that its worker is ended
            after `grace_s`.
        grace_s: How long that takes [s].
        p_straggler: Probability that a call takes `straggler_factor` times as long.
        straggler_factor: How much longer.
        start_s: How long a worker takes to start [s].
        item_s: How long an item takes, on average [s].
        spread: It takes between `1 - spread` and `1 + spread` times as long.
        speeds: How fast the workers are: the first in place 0, and so on, then from the beginning
            again.
        submit_s: When the tasks are submitted [s]; for `simulate`.
        preempted_s: How long after the first call all nodes are announced to shut down, with no
            replacement [s]; None: never. Running tasks are interrupted `grace_s` later, and the
            pool ends `grace_s` after that.
    """

    seed: int = 0
    p_loss: float = 0.0
    p_failed_start: float = 0.0
    p_stubborn: float = 0.0
    grace_s: float = 5.0
    p_straggler: float = 0.0
    straggler_factor: float = 10.0
    start_s: float = 1.0
    item_s: float = 0.1
    spread: float = 0.5
    speeds: tuple[float, ...] = (1.0,)
    submit_s: float = 0.0
    preempted_s: float | None = None

    def speed(self, place: int) -> float:
        """Return how fast the worker in a place is."""
        return self.speeds[place % len(self.speeds)]


@dataclass(frozen=True, slots=True)
class Course:
    """How a call will go, if nobody stops it."""

    attempt_id: int
    ends_at: float
    num_slices: int


STOPPING_S = 0.005
"""How long a call takes to end that is told to [s]."""


class Dice:
    """The decisions of a plan, one after the other."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._random = random.Random(plan.seed)
        self._has_begun = False
        self._courses: defaultdict[int, dict[int, Course]] = defaultdict(dict)  # by worker, attempt

    def happens(self, probability: float) -> bool:
        """Decide whether something happens."""
        return self._random.random() < probability

    def preemption(self, now: float) -> tuple[float, m.PoolLeaving] | None:
        """Return how long after the first call, which is now, all nodes are to go [s]."""
        delay_s, grace_s = self.plan.preempted_s, self.plan.grace_s
        if delay_s is None or self._has_begun:
            return None
        self._has_begun = True
        at = now + delay_s + grace_s
        return delay_s, m.PoolLeaving(is_final=True, at=at, gone_at=at + grace_s)

    def item_s(self) -> float:
        """Decide how long an item takes [s]."""
        seconds = self.plan.item_s * self._random.uniform(
            1 - self.plan.spread, 1 + self.plan.spread
        )
        return (
            seconds * self.plan.straggler_factor if self.happens(self.plan.p_straggler) else seconds
        )

    def note(self, worker_id: int, course: Course, now: float) -> None:
        """Remember how a call will go, and forget calls that have ended."""
        known = self._courses[worker_id].items()
        kept = {attempt_id: each for attempt_id, each in known if each.ends_at >= now}
        self._courses[worker_id] = {**kept, course.attempt_id: course}

    def stop(
        self, worker_id: int, attempt_id: int, now: float
    ) -> tuple[float, m.WorkerLost | m.AttemptFinished] | None:
        """Decide how a cancelled call ends, after how long [s]; None: it ends before, or continues
        for others.
        """
        if (course := self._courses[worker_id].get(attempt_id)) is None:
            return None
        event: m.WorkerLost | m.AttemptFinished
        if self.happens(self.plan.p_stubborn):
            seconds, event = self.plan.grace_s, m.WorkerLost(worker_id, LossReason.STOPPED)
        elif course.num_slices == 1:
            seconds, event = STOPPING_S, m.AttemptFinished(worker_id, attempt_id, (Report(0),))
        else:
            return None
        return (seconds, event) if now + seconds < course.ends_at else None


@dataclass(frozen=True, slots=True)
class SimReport:
    """The results of a simulation.

    Attributes:
        num_events: How many events the scheduler handled.
        makespan_s: When the last task ended, in simulated time [s].
        work_s: The sum of the times of all calls that came back [s].
        counts: How many tasks ended in which way.
        trace: A hash of all commands in their order: equal for equal courses.
        num_ended: How many tasks have ended.
    """

    num_events: int
    makespan_s: float
    work_s: float
    counts: Counts
    trace: str
    num_ended: int


def simulate(
    num_workers: int, specs: Iterable[TaskSpec], plan: FaultPlan, *, check: bool = False
) -> SimReport:
    """Run the scheduler alone, without a driver or any user code, on tasks that all arrive at once.

    Args:
        num_workers: Workers of the pool.
        specs: The tasks, in order of their ids.
        plan: How long items take, and what goes wrong.
        check: Check all invariants after every event (slow).

    Example:
        >>> specs = [TaskSpec(i, 0) for i in range(10)]
        >>> simulate(3, specs, FaultPlan(seed=7, p_loss=0.1), check=True).counts.finished
        10
    """
    return _Simulation(num_workers, plan, check).run(specs)


class _Simulation:
    """A heap of future events, and the counts so far."""

    def __init__(self, num_workers: int, plan: FaultPlan, check: bool) -> None:
        self._scheduler = Scheduler()
        self._dice = Dice(plan)
        self._check = check
        self._heap: list[tuple[float, int, m.Event]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._now = self._work_s = self._end_s = 0.0
        self._num_events = self._num_ended = self._count = 0
        self._places: dict[int, int] = {}  # by worker
        self._handle(m.ResizeRequested(add=tuple(range(num_workers))))

    def run(self, specs: Iterable[TaskSpec]) -> SimReport:
        while self._heap and self._heap[0][0] <= self._dice.plan.submit_s:
            self._step()
        for spec in specs:
            self._handle(m.TaskSubmitted(spec))
        self._handle(m.ShutdownRequested())
        while self._heap:
            self._step()
        return SimReport(
            self._num_events,
            self._end_s,
            self._work_s,
            self._scheduler.counts,
            self._hash.hexdigest(),
            self._num_ended,
        )

    def _step(self) -> None:
        self._now, _, event = heappop(self._heap)
        self._handle(event)

    def _handle(self, event: m.Event) -> None:
        self._num_events += 1
        commands = self._scheduler.handle(event, self._now)
        if self._check:
            check_invariants(self._scheduler)
        for command in commands:
            self._hash.update(repr(command).encode())
            self._carry_out(command)

    def _carry_out(self, command: m.Command) -> None:
        plan = self._dice.plan
        for call in command.runs if isinstance(command, m.RunGang) else ():
            self._carry_out(call)
        if isinstance(command, m.RunTasks):
            if preemption := self._dice.preemption(self._now):
                self._later(*preemption)
            seconds, event = self._outcome(command)
            self._dice.note(
                command.worker_id,
                Course(command.attempt_id, self._now + seconds, len(command.slices)),
                self._now,
            )
            self._later(seconds, event)
        elif isinstance(command, m.StartWorker):
            fails = self._dice.happens(plan.p_failed_start)
            lost = m.WorkerLost(command.worker_id, LossReason.START)
            self._places[command.worker_id] = command.place
            self._later(plan.start_s, lost if fails else m.WorkerReady(command.worker_id))
        elif isinstance(command, m.SetTimer) and command.kind != "ready":
            self._later(command.at - self._now, m.TimerFired(*command[1:]))
        elif isinstance(command, m.SignalTask):
            if ending := self._dice.stop(command.worker_id, command.attempt_id, self._now):
                self._later(*ending)
        elif isinstance(command, m.EndTask):
            self._num_ended += 1
            self._end_s = self._now

    def _outcome(self, command: m.RunTasks) -> tuple[float, m.Event]:
        plan = self._dice.plan
        seconds = self._dice.item_s() / plan.speed(self._places[command.worker_id])
        if self._dice.happens(plan.p_loss):
            return seconds, m.WorkerLost(command.worker_id, LossReason.EXIT)
        counts = [piece.stop - piece.start for piece in command.slices]
        reports = tuple([Report(count, busy_s=seconds * count) for count in counts])
        busy_s = sum(report.busy_s for report in reports)
        self._work_s += busy_s
        return busy_s, m.AttemptFinished(command.worker_id, command.attempt_id, reports)

    def _later(self, delay_s: float, event: m.Event) -> None:
        self._count += 1
        heappush(self._heap, (self._now + delay_s, self._count, event))
