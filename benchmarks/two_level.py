"""A pool of two levels in simulated time: a root hands blocks of items to drivers, each with a
`Scheduler` and its workers.

A driver is a server: each call to a worker takes it so long, one after the other, and each message
it handles; so is the root, for each message. A driver asks for more while it still has something,
names what has come back since, and gets half of its share of what is left (factoring, Hummel and
others 1992), so that blocks shrink. If a driver is lost, the root hands out again what it has not
been told of: such items may run twice, and the first outcome counts. With one driver, which has all
from the beginning, this is the pool of one level. The loads are those of `simulated.py`: an item of
theirs may be a gang, all of whose ranks run in one driver; a worker that is lost is replaced by its
driver, and the root hears nothing of it but the outcome.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby, pairwise
from math import inf
from random import Random
from typing import Any

from benchmarks.simulated import LOADS, RANKS, START_S
from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason

LOW_WATER = 0.5
"""A driver asks for more when it has fewer items left than this for each of its workers."""

LEAST_BLOCK = 0.25
"""A block has at least so many items for each worker of a driver: each costs the root a message."""


@dataclass(frozen=True)
class Costs:
    """How long things take [s]: a driver for a call, anybody for a message, the root for each item
    that one names, the way.
    """

    call_s: float
    message_s: float = 0.001
    item_s: float = 1e-5
    latency_s: float = 0.001


@dataclass
class Outcome:
    """How it went. `ends`: how often an outcome of an item was counted; `runs`: how often it was
    run to its end (all ranks).
    """

    makespan_s: float
    bound_s: float
    num_messages: int  # to and from the root
    ends: bytearray
    runs: bytearray
    failed: set[int]  # items that have lost their worker too often
    busy: list[float]  # the part of the time in which the root had something to do, and each driver
    events: list[int]  # of each driver's scheduler
    handling_s: float  # that all schedulers took for these, in real time
    root_s: float  # that the root took for what it heard, likewise


@dataclass
class Server:
    """Who does one thing after the other."""

    free_at: float = 0.0
    busy_s: float = 0.0

    def serve(self, now, seconds):
        """Return when something is done that comes now and takes so long."""
        self.busy_s += seconds
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


@dataclass
class Driver:
    """A driver and what the root knows of it."""

    scheduler: Scheduler
    first_place: int  # of the whole pool's
    num_workers: int
    server: Server = field(default_factory=Server)
    num_events: int = 0
    places: dict[int, int] = field(default_factory=dict)  # by worker
    # by worker: short items are sent before the last has ended
    idle_at: dict[int, float] = field(default_factory=dict)
    blocks: list[range] = field(default_factory=list)  # of items, by task
    # ranks of a gang that have not come back, by task
    missing: dict[int, int] = field(default_factory=dict)
    waiting: int = 0  # items that have not come back, and ranks
    # items that have, and of which the root was not told
    news: list[int] = field(default_factory=list)
    owed: dict[int, None] = field(default_factory=dict)  # items that the root waits for
    is_asking: bool = False
    is_lost: bool = False


def simulate(durations, num_workers, num_drivers, costs, lost=(), load=LOADS["even"]):
    """Run items of these durations [s]; `lost`: (when [s], which driver) goes with all its workers.

    `load` says which items are gangs, each of whose ranks takes so long, which workers are slow,
    and which calls lose theirs.
    """
    return _Simulation(durations, num_workers, num_drivers, costs, load).run(lost)


class _Simulation:
    def __init__(self, durations, num_workers, num_drivers, costs, load):
        self._durations = durations
        self._costs = costs
        self._load = load
        self._random = Random(0)
        self._num_workers = num_workers
        # a gang fits into each driver
        self._num_ranks = max(1, min(RANKS, num_workers // max(2, num_drivers)))
        self._root = Server()
        self._left: list[range] = [range(len(durations))]
        self._num_left = len(durations)
        ends = [num_workers * number // num_drivers for number in range(num_drivers + 1)]
        self._drivers = [Driver(Scheduler(), start, stop - start) for start, stop in pairwise(ends)]
        self._ahead: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._count = self._num_messages = 0
        self._now = self._end_s = 0.0
        self._handling_s = self._root_s = 0.0
        self._ends, self._runs, self._failed = (
            bytearray(len(durations)),
            bytearray(len(durations)),
            set(),
        )

    def run(self, lost):
        for driver in self._drivers:
            self._tell(driver, m.ResizeRequested(add=tuple(range(driver.num_workers))))
            for worker_id in list(driver.places):
                self._tell(driver, m.WorkerReady(worker_id))
        for at, number in lost:
            self._later(at, self._lose, self._drivers[number])
        for driver in self._drivers:
            self._ask_if_low(driver)
        while self._ahead:
            self._now, _, call, arguments = heappop(self._ahead)
            call(*arguments)
        servers = [self._root, *(driver.server for driver in self._drivers)]
        busy = [server.busy_s / max(self._end_s, 1e-9) for server in servers]
        events = [driver.num_events for driver in self._drivers]
        counts = (self._num_messages, self._ends, self._runs, self._failed)
        return Outcome(
            self._end_s, self._bound_s(), *counts, busy, events, self._handling_s, self._root_s
        )

    def _bound_s(self):
        """Return what no schedule of what has run could be faster than."""
        ran = [item for item in range(len(self._durations)) if self._runs[item]]
        work_s = sum(self._durations[item] * self._width(item) for item in ran)
        return self._load.bound_s(
            work_s, max((self._durations[item] for item in ran), default=0.0), self._num_workers
        )

    def _width(self, item):
        """Return how many workers an item takes."""
        return self._num_ranks if self._load.is_gang(item) else 1

    # --- the root ---------------------------------------------------------------------------------

    def _hear(self, driver, news):
        """Take in what a driver says when it asks for more, or has come to an end."""
        before = time.perf_counter()
        self._num_messages += 1
        at = self._root.serve(self._now, self._costs.message_s + len(news) * self._costs.item_s)
        for item in news:
            driver.owed.pop(item, None)
            if not self._ends[item]:
                self._ends[item] = 1
                self._end_s = at
        if not driver.is_lost:
            self._answer(driver, at)
        self._root_s += time.perf_counter() - before

    def _answer(self, driver, at):
        block = self._take(self._size(driver)) if self._num_left else []
        if not block:
            driver.is_asking = False  # it says by itself when it has come to an end
            return
        driver.owed.update(dict.fromkeys(item for part in block for item in part))
        self._num_messages += 1
        self._later(at + self._costs.latency_s, self._receive, driver, block)

    def _size(self, driver):
        """Return how many items the next block has."""
        alive = [other for other in self._drivers if not other.is_lost]
        if len(self._drivers) == 1:
            return self._num_left
        share = driver.num_workers / sum(other.num_workers for other in alive)
        return max(int(self._num_left * share / 2), int(LEAST_BLOCK * driver.num_workers), 1)

    def _take(self, count):
        parts = []
        while count and self._left:
            part = self._left.pop()
            taken, rest = part[:count], part[count:]
            if rest:
                self._left.append(rest)
            parts.append(taken)
            count -= len(taken)
            self._num_left -= len(taken)
        return parts

    def _lose(self, driver):
        """Hand out again what was with a driver that is lost, to whoever asks and to those that
        have stopped asking.
        """
        driver.is_lost = True
        self._left += [range(item, item + 1) for item in driver.owed]
        self._num_left += len(driver.owed)
        driver.owed.clear()
        for other in self._drivers:
            self._ask_if_low(other)

    # --- a driver ---------------------------------------------------------------------------------

    def _receive(self, driver, block):
        if driver.is_lost:
            return
        driver.is_asking = False
        now = driver.server.serve(self._now, self._costs.message_s)
        for part in block:
            for is_gang, items in groupby(part, self._load.is_gang):
                alike = list(items)
                for run in (
                    [range(item, item + 1) for item in alike]
                    if is_gang
                    else [range(alike[0], alike[-1] + 1)]
                ):
                    self._submit(driver, run, is_gang, now)
        self._ask_if_low(driver)

    def _submit(self, driver, run, is_gang, now):
        """Hand items to the driver's own scheduler: one gang, or a run of others."""
        task_id, size = len(driver.blocks), self._num_ranks if is_gang else len(run)
        driver.blocks.append(run)
        driver.waiting += size
        if is_gang:
            driver.missing[task_id] = size
        self._tell(
            driver,
            m.TaskSubmitted(
                TaskSpec(task_id, is_gang, size, is_gang=is_gang, chunk_size=None if is_gang else 1)
            ),
            now,
        )

    def _ask_if_low(self, driver):
        """Ask for more before there is nothing left, while the root has something; tell it of the
        rest when all is done.
        """
        low = driver.waiting - driver.num_workers < LOW_WATER * driver.num_workers
        wants = low and self._num_left > 0
        is_done = driver.waiting == 0 and driver.news
        if not driver.is_lost and not driver.is_asking and (wants or is_done):
            driver.is_asking, news, driver.news = True, driver.news, []
            self._later(self._now + self._costs.latency_s, self._hear, driver, news)

    def _come_back(self, driver, event):
        """Handle an answer as soon as the driver comes to it."""
        if driver.server.free_at > self._now:
            self._later(driver.server.free_at, self._tell_of, driver, event)
        else:
            self._tell_of(driver, event)

    def _tell_of(self, driver, event):
        self._tell(driver, event, self._now)
        self._ask_if_low(driver)

    def _tell(self, driver, event, now=0.0):
        if driver.is_lost:
            return
        before = time.perf_counter()
        commands = driver.scheduler.handle(event, now)
        self._handling_s += time.perf_counter() - before
        driver.num_events += 1
        for command in commands:
            self._carry_out(driver, command, now)

    def _carry_out(self, driver, command, now):
        if isinstance(command, m.RunTasks):
            self._call(driver, command, now)
        elif isinstance(command, m.RunGang):
            for call in command.runs:
                self._call(driver, call, now)
        elif isinstance(command, m.SettleItems | m.FailItems):
            self._settle(driver, command.items, isinstance(command, m.FailItems))
        elif isinstance(command, m.StartWorker):
            driver.places[command.worker_id] = command.place
            if now > 0:  # all are there when it begins
                self._later(
                    now + START_S, self._come_back, driver, m.WorkerReady(command.worker_id)
                )
        elif isinstance(command, m.SetTimer) and command.kind != "ready":
            self._later(command.at, self._come_back, driver, m.TimerFired(*command[1:]))

    def _settle(self, driver, items, has_failed):
        """Note outcomes: that of a gang once all its ranks have come back."""
        count = items.stop - items.start
        driver.waiting -= count
        run = driver.blocks[items.task_id]
        if items.task_id in driver.missing:
            driver.missing[items.task_id] -= count
            done = [] if driver.missing[items.task_id] else [run[0]]
        else:
            done = run[items.start : items.stop]
        for item in done:
            driver.news.append(item)
            if has_failed:
                self._failed.add(item)
            else:
                self._runs[item] += 1

    def _call(self, driver, command, now):
        (piece,) = command.slices
        run = driver.blocks[piece.task_id]
        item = run[0] if piece.task_id in driver.missing else run[piece.start]
        place = driver.first_place + driver.places[command.worker_id]
        took_s = self._durations[item] / self._load.speed(place)
        arrives = driver.server.serve(now, self._costs.call_s) + self._costs.latency_s
        started = max(arrives, driver.idle_at.get(command.worker_id, 0.0))
        may_be_lost = self._load.p_loss > 0 and not self._load.is_gang(item)
        if started == inf:
            return  # the worker will be lost before it comes to this
        if may_be_lost and self._random.random() < self._load.p_loss:
            driver.idle_at[command.worker_id] = inf
            self._later(
                started + took_s / 2,
                self._come_back,
                driver,
                m.WorkerLost(command.worker_id, LossReason.EXIT),
            )
            return
        driver.idle_at[command.worker_id] = started + took_s
        event = m.AttemptFinished(
            command.worker_id, command.attempt_id, (Report(1, busy_s=took_s),)
        )
        self._later(started + took_s + self._costs.latency_s, self._come_back, driver, event)

    def _later(self, at, call, *arguments):
        self._count += 1
        heappush(self._ahead, (at, self._count, call, arguments))
