"""A pool of two levels in simulated time: a root hands blocks of items to drivers, each with a `Scheduler` and its workers.

A driver is a server: each call to a worker takes it so long, one after the other, and each message it handles; so is the root,
for each message. A driver asks for more while it still has something, names what has come back since, and gets half of its share
of what is left (factoring, Hummel and others 1992), so that blocks shrink. If a driver is lost, the root hands out again what it
has not been told of: such items may run twice, and the first outcome counts. With one driver, which has all from the beginning,
this is the pool of one level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.core.scheduler import Scheduler

LOW_WATER = 0.5
"""A driver asks for more when it has fewer items left than this for each of its workers."""

LEAST_BLOCK = 0.25
"""A block has at least so many items for each worker of a driver: each costs the root a message."""


@dataclass(frozen=True)
class Costs:
    """How long things take [s]: a driver for a call, anybody for a message, the root for each item that one names, the way."""

    call_s: float
    message_s: float = 0.001
    item_s: float = 1e-5
    latency_s: float = 0.001


@dataclass
class Outcome:
    """How it went. `ends`: how often an outcome of each item was counted; `runs`: how often it was run to its end."""

    makespan_s: float
    bound_s: float
    num_messages: int  # to and from the root
    ends: bytearray
    runs: bytearray
    busy: list[float]  # the part of the time in which the root had something to do, and each driver


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
    num_workers: int
    server: Server = field(default_factory=Server)
    blocks: list[range] = field(default_factory=list)  # of items, by task
    waiting: int = 0  # items that have not come back
    news: list[int] = field(default_factory=list)  # items that have, and of which the root was not told
    owed: dict[int, None] = field(default_factory=dict)  # items that the root waits for
    is_asking: bool = False
    is_lost: bool = False


def simulate(durations, num_workers, num_drivers, costs, lost=()):
    """Run items of these durations [s]; `lost`: (when [s], which driver) goes with all its workers."""
    return _Simulation(durations, num_workers, num_drivers, costs).run(lost)


class _Simulation:
    def __init__(self, durations, num_workers, num_drivers, costs):
        self._durations = durations
        self._costs = costs
        self._root = Server()
        self._left: list[range] = [range(len(durations))]
        self._num_left = len(durations)
        ends = [num_workers * number // num_drivers for number in range(num_drivers + 1)]
        self._drivers = [Driver(Scheduler(), stop - start) for start, stop in pairwise(ends)]
        self._bound_s = max(sum(durations) / num_workers, max(durations, default=0.0))
        self._ahead: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._count = self._num_messages = 0
        self._now = self._end_s = 0.0
        self._ends, self._runs = bytearray(len(durations)), bytearray(len(durations))

    def run(self, lost):
        for driver in self._drivers:
            self._tell(driver, m.ResizeRequested(add=tuple(range(driver.num_workers))))
            for number in range(driver.num_workers):
                self._tell(driver, m.WorkerReady(number))
        for at, number in lost:
            self._later(at, self._lose, self._drivers[number])
        for driver in self._drivers:
            self._ask_if_low(driver)
        while self._ahead:
            self._now, _, call, arguments = heappop(self._ahead)
            call(*arguments)
        servers = [self._root, *(driver.server for driver in self._drivers)]
        busy = [server.busy_s / max(self._end_s, 1e-9) for server in servers]
        return Outcome(self._end_s, self._bound_s, self._num_messages, self._ends, self._runs, busy)

    # --- the root -----------------------------------------------------------------------------------------------------

    def _hear(self, driver, news):
        """Take in what a driver says when it asks for more, or has come to an end."""
        self._num_messages += 1
        at = self._root.serve(self._now, self._costs.message_s + len(news) * self._costs.item_s)
        for item in news:
            driver.owed.pop(item, None)
            if not self._ends[item]:
                self._ends[item] = 1
                self._end_s = at
        if not driver.is_lost:
            self._answer(driver, at)

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
        """Hand out again what was with a driver that is lost, to whoever asks and to those that have stopped asking."""
        driver.is_lost = True
        self._left += [range(item, item + 1) for item in driver.owed]
        self._num_left += len(driver.owed)
        driver.owed.clear()
        for other in self._drivers:
            self._ask_if_low(other)

    # --- a driver -----------------------------------------------------------------------------------------------------

    def _receive(self, driver, block):
        if driver.is_lost:
            return
        driver.is_asking = False
        now = driver.server.serve(self._now, self._costs.message_s)
        for part in block:
            driver.waiting += len(part)
            driver.blocks.append(part)
            self._tell(driver, m.TaskSubmitted(TaskSpec(len(driver.blocks) - 1, 0, size=len(part), chunk_size=1)), now)
        self._ask_if_low(driver)

    def _ask_if_low(self, driver):
        """Ask for more before there is nothing left, while the root has something; tell it of the rest when all is done."""
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
        for command in driver.scheduler.handle(event, now):
            if isinstance(command, m.RunTasks):
                self._call(driver, command, now)
            elif isinstance(command, m.SettleItems):
                block = driver.blocks[command.items.task_id]
                item = block[command.items.start]
                self._runs[item] += 1
                driver.waiting -= 1
                driver.news.append(item)

    def _call(self, driver, command, now):
        (piece,) = command.slices
        took_s = self._durations[driver.blocks[piece.task_id][piece.start]]
        started = driver.server.serve(now, self._costs.call_s) + self._costs.latency_s
        event = m.AttemptFinished(command.worker_id, command.attempt_id, (Report(1, busy_s=took_s),))
        self._later(started + took_s + self._costs.latency_s, self._come_back, driver, event)

    def _later(self, at, call, *arguments):
        self._count += 1
        heappush(self._ahead, (at, self._count, call, arguments))
