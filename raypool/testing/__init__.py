"""Test your own code, or raypool, without Ray and without waiting: a pool in simulated time, with
faults on demand.

A function submitted to a simulated pool really runs, in this process; a `FaultPlan` decides
when it starts, how long it takes and whether its worker dies. The same plan always gives the same
course of events.

>>> with sim_pool(4, FaultPlan(seed=1, p_loss=0.2)) as pool:
...     list(pool.parfor(lambda x: x * x, range(5)))
[0, 1, 4, 9, 16]

`SimulatedGpus` are GPUs that do not exist, for a pool's `inventory=`: its workers find them, share
them and run out of their memory as with real ones (see docs/gpus.md).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from raypool.backends.local import InlineBackend
from raypool.channel.records import Function, NodeDevices, Part, WorkerInfo, nothing_done
from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.scheduler import Scheduler
from raypool.engine.engine import Engine
from raypool.engine.inbox import Message
from raypool.engine.trace import read_settings, read_trace
from raypool.errors import LossReason
from raypool.gpus.devices import GpuDevice
from raypool.gpus.simulated import SimulatedGpus
from raypool.pool import ParallelPool
from raypool.profiles import Profile
from raypool.testing.simulation import Course, Dice, FaultPlan, SimReport, simulate
from raypool.worker.running import Say

__all__ = [
    "FaultPlan",
    "GpuDevice",
    "SimBackend",
    "SimReport",
    "SimulatedGpus",
    "VirtualClock",
    "replay",
    "sim_pool",
    "simulate",
]


class VirtualClock:
    """Time that passes only when something is waited for; also the inbox of a simulated driver,
    since waiting is its job.
    """

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

    def give_way(self) -> None:
        """Do nothing: the submitting thread is the driver."""

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


class _Call(NamedTuple):
    """A call, how long each of its items takes [s], and whether its worker dies, before it begins
    or after.
    """

    worker_id: int
    attempt_id: int
    parts: Sequence[Part]
    functions: Sequence[Function]
    seconds: float
    is_lost: bool
    dies_first: bool


class SimBackend(InlineBackend):
    """The backend "inline", with workers that start, answer and die in simulated time.

    Functions run at once. Their outcomes are held back until their worker, by the plan, has
    started, is done or has died.
    """

    _limits_time = False  # the driver does, in simulated time

    def __init__(self, profile: Profile, clock: VirtualClock, plan: FaultPlan, say: Say) -> None:
        super().__init__(profile, self._hold_back, say)
        self._clock = clock
        self._dice = Dice(plan)
        self._answers: dict[int, Message] = {}  # by worker
        self._gangs: dict[int, list[_Call]] = {}  # of which the first rank has not come, by task

    def _hold_back(self, event: m.Event, what: Any) -> None:
        """Take what the workers tell the driver, in whichever thread; what Ctrl-C tells it arrives
        at once.
        """
        if isinstance(event, (m.WorkerReady, m.WorkerLost, m.AttemptFinished)):
            self._answers[event.worker_id] = event, what
        else:
            self._clock.put((event, what))

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim the requested number of places (one, if any number will do)."""
        count = most or 1
        places = list(range(self._next_place, self._next_place + count))
        self._next_place += count
        return places

    def devices(self) -> list[NodeDevices]:
        """Return none: the GPUs of simulated workers are numbers."""
        return []

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Let a worker start after a while, or not."""
        if self._dice.happens(self._dice.plan.p_failed_start):
            self._hold_back(
                m.WorkerLost(worker_id, LossReason.START), "as planned, it did not start"
            )
        else:
            super().start_worker(worker_id, place, setups)
        self._clock.put_later(self._dice.plan.start_s, self._answers.pop(worker_id))

    def _note(self, worker_id: int, place: int) -> WorkerInfo:
        info = replace(super()._note(worker_id, place), gpus=(place,), gpu_name="simulated GPU")
        self._workers[worker_id] = info
        return info

    def run(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        behind: int | None,
    ) -> None:
        """Run a call now; its answer, or the loss of its worker, arrives later. Ranks run when the
        first has come, the last.
        """
        if preemption := self._dice.preemption(self._clock.now()):
            seconds, leaving = preemption
            self._clock.put_later(seconds, (leaving, "the simulated nodes will shut down"))
        item_s = self._dice.item_s() / self._dice.plan.speed(self._workers[worker_id].index)
        is_lost = self._dice.happens(self._dice.plan.p_loss)
        call = _Call(
            worker_id,
            attempt_id,
            parts,
            functions,
            item_s,
            is_lost,
            is_lost and self._dice.happens(0.5),
        )
        if parts[0].is_rank:
            self._dice.note(worker_id, Course(attempt_id, inf, len(parts)), self._clock.now())
            self._gangs.setdefault(parts[0].task_id, []).append(call)
            if parts[0].start == 0:
                self._run_all(self._gangs.pop(parts[0].task_id))
        else:
            self._run_all([call])

    def _run_all(self, calls: list[_Call]) -> None:
        """Run a call, or all ranks of a gang; none if one is to die first, for which the others
        would wait until stopped.

        Ranks that have run end together: what each has raised is known, and not only that of the
        first to answer.
        """
        dying = [call for call in calls if call.dies_first]
        for call in [] if dying else calls:
            super().run(call.worker_id, call.attempt_id, call.parts, call.functions, None)
        longest_s = max(call.seconds * sum(part.num_items for part in call.parts) for call in calls)
        for call in dying or calls:
            self._finish(call, longest_s)

    def _finish(self, call: _Call, longest_s: float) -> None:
        """Let a call end: with what the worker answers, or with its death. It takes this long at
        most; a rank always does.
        """
        now = self._clock.now()
        course = Course(call.attempt_id, now + longest_s, len(call.parts))
        self._dice.note(call.worker_id, course, now)
        event, what = self._answers.pop(call.worker_id, (None, None))
        num_done = 1
        if isinstance(event, m.AttemptFinished):
            num_done = sum(result.done for result in what)
            for result in what:
                result.durations_s = array("d", [call.seconds] * result.done)
                result.started_at = now
        if call.is_lost:
            event, what = (
                m.WorkerLost(call.worker_id, LossReason.EXIT),
                "as planned, it died",
            )
        self._clock.put_later(
            longest_s if call.parts[0].is_rank else call.seconds * num_done, (event, what)
        )

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: m.Signal) -> None:
        """Let a call that is told to end come back soon, or lose its worker. The function has run
        already.
        """
        if wish is m.Signal.CANCEL and (
            ending := self._dice.stop(worker_id, attempt_id, self._clock.now())
        ):
            seconds, event = ending
            is_lost = isinstance(event, m.WorkerLost)
            self._clock.put_later(
                seconds,
                (event, "as planned, it did not end" if is_lost else [nothing_done()]),
            )


def sim_pool(num_workers: int, plan: FaultPlan | None = None, **changes: Any) -> ParallelPool:
    """Return a pool of simulated workers; `changes` are fields of its profile."""
    clock = VirtualClock()
    profile = Profile(backend="inline", **changes)
    engine = Engine(
        profile, clock, lambda _, hub, __: SimBackend(profile, clock, plan or FaultPlan(), hub.say)
    )
    engine.add_workers(num_workers, num_workers)
    return ParallelPool(engine)


def replay(path: str | Path) -> list[tuple[m.Event, list[m.Command]]]:
    """Run the events of a recorded pool (`Profile.trace`) through a fresh scheduler; return each
    with its answer.

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
