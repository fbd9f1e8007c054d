"""Test your own code, or raypool, without Ray and without waiting: a pool in simulated time, with faults on demand.

A function that is handed to a simulated pool really runs, in this process; when it starts, how long it takes and whether its
worker dies is decided by a `FaultPlan`. The same plan gives the same course of events, always.

>>> with sim_pool(4, FaultPlan(seed=1, p_loss=0.2)) as pool:
...     list(pool.parfor(lambda x: x * x, range(5)))
[0, 1, 4, 9, 16]
"""

from __future__ import annotations

import hashlib
import platform
import random
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.model import Counts, Report, TaskSpec
from raypool.core.policy import MAX_IN_FLIGHT
from raypool.core.scheduler import Scheduler
from raypool.engine.backend import Failure, Function, LocalValues, Part, SliceResult, WorkerInfo, nothing_done
from raypool.engine.engine import Engine
from raypool.engine.exchange import LocalExchange
from raypool.engine.guard import Guard
from raypool.engine.inbox import Message
from raypool.engine.runner import Surroundings, run_parts
from raypool.engine.trace import read_settings, read_trace
from raypool.errors import LossReason
from raypool.pool import ParallelPool
from raypool.profiles import Profile
from raypool.task import Say, Way

__all__ = ["FaultPlan", "SimBackend", "SimReport", "VirtualClock", "replay", "sim_pool", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong in a simulation, and how long things take.

    Args:
        seed: Of all that follows.
        p_loss: Probability that a call loses its worker: half of the time before the function runs, half of the time after.
        p_failed_start: Probability that a worker does not come up.
        p_stubborn: Probability that a call that is told to end does not, so that its worker is ended after `grace_s`.
        grace_s: How long that takes [s].
        p_straggler: Probability that a call takes `straggler_factor` times as long.
        straggler_factor: How much longer.
        start_s: How long a worker takes to come up [s].
        item_s: How long an item takes, on average; between half and one and a half times as much [s].
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


class VirtualClock:
    """Time that passes only when something is waited for; also the inbox of a simulated driver, since waiting is its job."""

    is_threaded = False

    def __init__(self) -> None:
        self._now = 0.0
        self._messages: deque[Message] = deque()
        self._later: list[tuple[float, int, Message]] = []
        self._count = 0
        self.put = self._messages.append

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be handled now."""
        return not self._messages

    def now(self) -> float:
        """Return the time [s]."""
        return self._now

    def put_later(self, delay_s: float, message: Message) -> None:
        """Let a message arrive after some time [s]."""
        self._count += 1
        heappush(self._later, (self._now + delay_s, self._count, message))

    def get(self, until: float | None) -> Message | None:
        """Return the next message, and let the time pass until then."""
        if self._messages:
            return self._messages.popleft()
        if self._later and (until is None or self._later[0][0] <= until):
            self._now, _, message = heappop(self._later)
            return message
        if until is not None:
            self._now = max(self._now, until)
        return None


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
        self._courses: defaultdict[int, deque[Course]] = defaultdict(lambda: deque(maxlen=MAX_IN_FLIGHT))  # by worker

    def happens(self, probability: float) -> bool:
        """Decide whether something happens."""
        return self._random.random() < probability

    def item_s(self) -> float:
        """Decide how long an item takes [s]."""
        seconds = self.plan.item_s * self._random.uniform(0.5, 1.5)
        return seconds * self.plan.straggler_factor if self.happens(self.plan.p_straggler) else seconds

    def note(self, worker_id: int, course: Course) -> None:
        """Remember how a call will go."""
        self._courses[worker_id].append(course)

    def stop(self, worker_id: int, attempt_id: int, now: float) -> tuple[float, m.WorkerLost | m.AttemptFinished] | None:
        """Decide what becomes of a call that is told to end, after how long [s]; None: it ends before, or goes on for others."""
        course = next(course for course in reversed(self._courses[worker_id]) if course.attempt_id == attempt_id)
        event: m.WorkerLost | m.AttemptFinished
        if self.happens(self.plan.p_stubborn):
            seconds, event = self.plan.grace_s, m.WorkerLost(worker_id, LossReason.STOPPED)
        elif course.num_slices == 1:
            seconds, event = STOPPING_S, m.AttemptFinished(worker_id, attempt_id, (Report(0),))
        else:
            return None
        return (seconds, event) if now + seconds < course.ends_at else None


class _Call(NamedTuple):
    """A call, how long each of its items takes [s], and whether its worker dies, before it begins or after."""

    worker_id: int
    attempt_id: int
    parts: Sequence[Part]
    functions: Sequence[Function]
    seconds: float
    is_lost: bool
    dies_first: bool


class SimBackend:
    """A backend whose workers exist in simulated time only."""

    sizing, devices = nullcontext, list  # nobody else changes its size, and it has no cards

    def __init__(self, clock: VirtualClock, plan: FaultPlan, say: Say) -> None:
        self._clock = clock
        self._say = say
        self._dice = Dice(plan)
        self._next_place = 0
        self._infos: dict[int, WorkerInfo] = {}
        self._exchange = LocalExchange()
        self._ranks: dict[int, list[_Call]] = {}  # of gangs whose first rank has not come, by task

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim as many places as wanted (one, if any number will do)."""
        count = most or 1
        places = list(range(self._next_place, self._next_place + count))
        self._next_place += count
        return places

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Let a worker come up after a while, or not."""
        info = self._infos[worker_id] = WorkerInfo(place, platform.node(), worker_id, gpus=(place,))
        message: Message = (m.WorkerReady(worker_id), info)
        if self._dice.happens(self._dice.plan.p_failed_start):
            message = (m.WorkerLost(worker_id, LossReason.START), "it was planned that it would not start")
        self._clock.put_later(self._dice.plan.start_s, message)

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """Nothing has to be given back."""

    def find_way(self) -> Way:
        """Return the way to the exchange, which is a real one."""
        return self._exchange

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Return the value: it does not travel."""
        return value

    def run(self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function]) -> None:
        """Run a call now; its answer, or the loss of its worker, arrives later. Ranks run when the first has come, the last."""
        is_lost = self._dice.happens(self._dice.plan.p_loss)
        call = _Call(worker_id, attempt_id, parts, functions, self._dice.item_s(), is_lost, is_lost and self._dice.happens(0.5))
        if not parts[0].is_rank:
            self._finish(call, None if call.dies_first else self._run(call))
            return
        self._dice.note(worker_id, Course(attempt_id, inf, len(parts)))
        self._ranks.setdefault(parts[0].task_id, []).append(call)
        if parts[0].start == 0:
            self._run_gang(self._ranks.pop(parts[0].task_id))

    def _run_gang(self, gang: list[_Call]) -> None:
        """Run all ranks at once, in threads. If one is to die first, none runs: the others wait for it until they are stopped."""
        dying = [call for call in gang if call.dies_first]
        with ThreadPoolExecutor(len(gang)) as threads:
            answers = threads.map(self._run, [] if dying else gang)
            for call, answer in zip(dying or gang, [None] * len(dying) or answers, strict=True):
                self._finish(call, answer)

    def _run(self, call: _Call) -> Message:
        """Call the functions; return what the worker answers, if it lives."""
        find = {function.fn_id: function.packed for function in call.functions}.__getitem__
        info = self._infos[call.worker_id]
        here = Surroundings(info, find, lambda items: items, Guard(), self._say, find_way=self.find_way)
        try:
            raw = run_parts(call.attempt_id, call.parts, here)
        except SystemExit as error:
            return m.WorkerLost(call.worker_id, LossReason.EXIT), f"the function called sys.exit({error.code!r})"
        results = []
        for part in raw:
            durations_s = array("d", [call.seconds] * part.done)
            failures = {index: Failure(error, None) for index, error in part.errors.items()}
            values = LocalValues(part.values)
            results.append(SliceResult(part.start, part.done, values, 0, failures, durations_s, self._clock.now()))
        return m.AttemptFinished(call.worker_id, call.attempt_id, ()), results

    def _finish(self, call: _Call, answer: Message | None) -> None:
        """Let a call end: with what the worker answers (None: it has died before it could begin), or with its death."""
        ends_at = self._clock.now() + call.seconds * sum(part.num_items for part in call.parts)
        self._dice.note(call.worker_id, Course(call.attempt_id, ends_at, len(call.parts)))
        is_answer = answer is not None and isinstance(answer[0], m.AttemptFinished)
        seconds = call.seconds * (sum(result.done for result in answer[1]) if answer is not None and is_answer else 1)
        if call.is_lost:
            answer = (m.WorkerLost(call.worker_id, LossReason.EXIT), "it was planned that it would die")
        assert answer is not None
        self._clock.put_later(seconds, answer)

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: m.Signal) -> None:
        """Let a call that is told to end come back soon, or lose its worker. The function has run already."""
        if wish is m.Signal.CANCEL and (ending := self._dice.stop(worker_id, attempt_id, self._clock.now())):
            seconds, event = ending
            is_lost = isinstance(event, m.WorkerLost)
            self._clock.put_later(seconds, (event, "it was planned that it would not end" if is_lost else [nothing_done()]))

    def close(self) -> None:
        """End the exchange; nothing else is left."""
        self._exchange.close()


def sim_pool(num_workers: int, plan: FaultPlan | None = None, **changes: Any) -> ParallelPool:
    """Return a pool of simulated workers; `changes` are fields of its profile."""
    clock = VirtualClock()
    profile = Profile(backend="inline", **changes)
    engine = Engine(profile, clock, lambda _, hub, __: SimBackend(clock, plan or FaultPlan(), hub.say))
    engine.add_workers(num_workers, num_workers)
    return ParallelPool(engine)


@dataclass(frozen=True, slots=True)
class SimReport:
    """How a simulation went.

    Attributes:
        num_events: How many events the scheduler handled.
        makespan_s: When the last task ended, in simulated time [s].
        work_s: The sum of the times of all calls that came back [s].
        counts: What became of the tasks.
        trace: A hash of all commands in their order: equal for equal courses.
        num_ended: How many tasks have ended.
    """

    num_events: int
    makespan_s: float
    work_s: float
    counts: Counts
    trace: str
    num_ended: int


def simulate(num_workers: int, specs: Iterable[TaskSpec], plan: FaultPlan, *, check: bool = False) -> SimReport:
    """Run the scheduler alone, without a driver or any user code, on tasks that all arrive at the start.

    Args:
        num_workers: Workers of the pool.
        specs: The tasks, in order of their ids.
        plan: How long items take, and what goes wrong.
        check: Check all invariants after every event (slow).

    Example:
        >>> simulate(3, [TaskSpec(i, 0) for i in range(10)], FaultPlan(seed=7, p_loss=0.1), check=True).counts.finished
        10
    """
    return _Simulation(num_workers, plan, check).run(specs)


class _Simulation:
    """A heap of future events, and what is counted on the way."""

    def __init__(self, num_workers: int, plan: FaultPlan, check: bool) -> None:
        self._scheduler = Scheduler()
        self._dice = Dice(plan)
        self._check = check
        self._heap: list[tuple[float, int, m.Event]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._now = self._work_s = self._end_s = 0.0
        self._num_events = self._num_ended = self._count = 0
        self._handle(m.ResizeRequested(add=tuple(range(num_workers))))

    def run(self, specs: Iterable[TaskSpec]) -> SimReport:
        for spec in specs:
            self._handle(m.TaskSubmitted(spec))
        self._handle(m.ShutdownRequested())
        while self._heap:
            self._now, _, event = heappop(self._heap)
            self._handle(event)
        return SimReport(
            self._num_events, self._end_s, self._work_s, self._scheduler.counts, self._hash.hexdigest(), self._num_ended
        )

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
            seconds, event = self._outcome(command)
            self._dice.note(command.worker_id, Course(command.attempt_id, self._now + seconds, len(command.slices)))
            self._later(seconds, event)
        elif isinstance(command, m.StartWorker):
            fails = self._dice.happens(plan.p_failed_start)
            lost = m.WorkerLost(command.worker_id, LossReason.START)
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
        seconds = self._dice.item_s()
        if self._dice.happens(self._dice.plan.p_loss):
            return seconds, m.WorkerLost(command.worker_id, LossReason.EXIT)
        counts = [piece.stop - piece.start for piece in command.slices]
        reports = tuple([Report(count, busy_s=seconds * count) for count in counts])
        busy_s = sum(report.busy_s for report in reports)
        self._work_s += busy_s
        return busy_s, m.AttemptFinished(command.worker_id, command.attempt_id, reports)

    def _later(self, delay_s: float, event: m.Event) -> None:
        self._count += 1
        heappush(self._heap, (self._now + delay_s, self._count, event))


def replay(path: str | Path) -> list[tuple[m.Event, list[m.Command]]]:
    """Run the events of a recorded pool (`Profile.trace`) through a fresh scheduler; return each with what it answers.

    All invariants are checked on the way, so a recorded mistake shows where it began.

    Raises:
        InternalError: The scheduler cannot take an event, as when it was recorded.
        AssertionError: An invariant does not hold.
    """
    scheduler = Scheduler(**read_settings(path))
    course = []
    for now, event in read_trace(path):
        course.append((event, scheduler.handle(event, now)))
        check_invariants(scheduler)
    return course
