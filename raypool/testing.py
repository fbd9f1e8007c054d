"""Test your own code, or raypool, without Ray and without waiting: a pool in simulated time, with faults on demand.

A function that is handed to a simulated pool really runs, in this process; when it starts, how long it takes and whether its
worker dies is decided by a `FaultPlan`. The same plan gives the same course of events, always.

>>> with sim_pool(4, FaultPlan(seed=1, p_loss=0.2)) as pool:
...     list(pool.parfor(lambda x: x * x, range(5)))
[0, 1, 4, 9, 16]

`SimulatedGpus` are cards that do not exist, for a pool's `inventory=`: its workers find them, share them and run out of their
memory as they would with real ones (see docs/gpus.md).
"""

from __future__ import annotations

import platform
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.scheduler import Scheduler
from raypool.devices.gpus import GpuDevice
from raypool.devices.simulated import SimulatedGpus
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
from raypool.simulation import Course, Dice, FaultPlan, SimReport, simulate
from raypool.task import Say, Way

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

    def give_way(self) -> None:
        """Do nothing: whoever hands something in is the driver."""

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
        name = f"simulated GPU {self._dice.plan.kind(place)}"
        info = self._infos[worker_id] = WorkerInfo(place, platform.node(), worker_id, gpus=(place,), gpu_name=name)
        message: Message = (m.WorkerReady(worker_id), info)
        if self._dice.happens(self._dice.plan.p_failed_start):
            message = (m.WorkerLost(worker_id, LossReason.START), "it was planned that it would not start")
        self._clock.put_later(self._dice.plan.start_s, message)

    def vacate(self, place: int, *, keep: bool = False) -> None:
        """Nothing has to be given back."""

    def gpu_memory(self, take: object) -> None:
        """Say nothing: it has no cards."""

    def find_way(self) -> Way:
        """Return the way to the exchange, which is a real one."""
        return self._exchange

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Return the value: it does not travel."""
        return value

    def run(
        self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function], behind: int | None
    ) -> None:
        """Run a call now; its answer, or the loss of its worker, arrives later. Ranks run when the first has come, the last."""
        is_lost = self._dice.happens(self._dice.plan.p_loss)
        call = _Call(
            worker_id, attempt_id, parts, functions, self._item_s(worker_id), is_lost, is_lost and self._dice.happens(0.5)
        )
        if not parts[0].is_rank:
            self._finish(call, None if call.dies_first else self._run(call))
            return
        self._dice.note(worker_id, Course(attempt_id, inf, len(parts)))
        self._ranks.setdefault(parts[0].task_id, []).append(call)
        if parts[0].start == 0:
            self._run_gang(self._ranks.pop(parts[0].task_id))

    def _item_s(self, worker_id: int) -> float:
        return self._dice.item_s() / self._dice.plan.speed(self._infos[worker_id].index)

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
