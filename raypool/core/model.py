"""The nouns of the scheduler: tasks, slices, attempts, workers, places.

A **task** is a call (`parfeval`) or the items of a loop (`parfor`), numbered from 0. A **slice** is
a run of consecutive items of a task. An **attempt** is one call to one worker, with one or more
slices. A **place** is a claim on a device, and outlives the workers in it. Ids are small integers,
never used twice. No value of the user's is stored here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from raypool.core.policy import Pace
from raypool.errors import LossReason

Order = tuple[int, int]
"""(-priority, task id): tasks start in ascending order of this."""

Flight = tuple[int, int]
"""(attempt id, worker id) of a call that is on its way."""


WaitingList = dict[int, None]
"""The ids of workers that wait for the same, in the order in which they joined."""


class TaskState(Enum):
    """The state of a task. RUNNING: some items were sent to a worker. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the task has ended."""
        return self in _FINAL_STATES


_FINAL_STATES = frozenset({TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED})


class WorkerState(Enum):
    """The state of a worker. PARKED: it has no process. LOST and STOPPED are final."""

    PARKED = "parked"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"
    STOPPED = "stopped"


class PoolState(Enum):
    """The state of the pool. CLOSED and BROKEN are final."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


class TaskSpec(NamedTuple):
    """What is known of a task when it is submitted.

    `fn_id`: tasks with the same number run the same function, and may share calls and a pace.
    `is_open`: more items may follow (`ItemsAdded`). `retries`: how often an item may run again
    after it has lost its worker; with 0 an item never shares a call and never runs twice. `place`:
    runs on the worker that holds this place now, or fails with it. `is_gang`: its items are ranks,
    which start together and never run again. `places`: the only places that it may use, in the
    order of a gang's ranks. `fail_fast`: the first failure ends the task. `chunk_size`: items of a
    call (None: by their pace). `timeout_s`: an item that runs longer has failed [s]; such items
    never share a call. `is_fresh`: each item runs in a new process of its own. `retry_delay_s`: the
    delay before an item runs again, twice as long each time [s]. `is_loan`: a gang that wants only
    the places: their workers end, and others start when the ranks have returned.
    """

    task_id: int
    fn_id: int
    size: int = 1
    is_open: bool = False
    priority: int = 0
    retries: int = 2
    max_workers: int | None = None
    place: int | None = None
    is_gang: bool = False
    places: tuple[int, ...] | None = None
    fail_fast: bool = False
    chunk_size: int | None = None
    timeout_s: float | None = None
    is_fresh: bool = False
    retry_delay_s: float = 0.0
    is_loan: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether these options are valid, and valid together."""
        if self.place is not None and (self.is_gang or self.is_fresh or self.places is not None):
            return False  # a bound task means a process, not a place
        if self.is_gang and (
            self.is_open or self.fail_fast or self.is_fresh or self.max_workers is not None
        ):
            return False  # one failure ends a gang anyway, but not before all ranks have come back
        if self.is_loan and not self.is_gang:
            return False
        return (
            (self.max_workers is None or self.max_workers > 0)
            and (self.chunk_size is None or self.chunk_size > 0)
            and (self.timeout_s is None or self.timeout_s > 0)
            and self.size >= 0
            and self.retries >= 0
            and self.retry_delay_s >= 0
        )

    def may_meet(self, other: TaskSpec) -> bool:
        """Whether two tasks may want the same place."""
        if self.places is None or other.places is None:
            return True
        return not set(self.places).isdisjoint(other.places)

    def runs_alone(self) -> bool:
        """Whether an item never shares a call, and no call waits behind it."""
        return self.retries == 0 or self.timeout_s is not None or self.is_fresh


class Slice(NamedTuple):
    """Items `start` to `stop - 1` of a task, for the `attempt`-th time (from 1)."""

    task_id: int
    start: int
    stop: int
    attempt: int

    def without(self, items: tuple[int, ...]) -> list[Slice]:
        """Return the runs of items without these, which have to ascend.

        Example:
            >>> [(run.start, run.stop) for run in Slice(0, 3, 9, attempt=1).without((3, 5))]
            [(4, 5), (6, 9)]
        """
        starts = (self.start, *(item + 1 for item in items))
        stops = (*items, self.stop)
        return [self._replace(start=a, stop=b) for a, b in zip(starts, stops, strict=True) if a < b]

    def for_next_attempt(self, size: int) -> list[Slice]:
        """Return the same items for the next attempt, in pieces of this size."""
        return [
            Slice(self.task_id, start, min(start + size, self.stop), self.attempt + 1)
            for start in range(self.start, self.stop, size)
        ]


class Report(NamedTuple):
    """A worker's report of one slice.

    `done`: the number of items with an outcome, from the slice's start; the rest was not begun and
    is handed back. `failed`: the number of these that ended with an error. `retry`: the failed
    items that may run again. `busy_s`: time spent in the user's function [s]. `again`: failed items
    that found no room on a shared GPU, or could not be unpickled together: they run again, each by
    itself, which does not count as a retry.
    """

    done: int
    failed: int = 0
    retry: tuple[int, ...] = ()
    busy_s: float = 0.0
    again: tuple[int, ...] = ()

    def is_about(self, piece: Slice) -> bool:
        """Whether this report fits a slice; `retry` and `again` ascend and are disjoint."""
        if not self.retry and not self.again:
            return 0 <= self.failed <= self.done <= piece.stop - piece.start
        stop, repeated = piece.start + self.done, self.repeated(self.retry)
        ascends = all(a < b for a, b in pairwise((piece.start - 1, *repeated, stop)))
        return ascends and stop <= piece.stop and len(repeated) <= self.failed <= self.done

    def leaves(self, piece: Slice, kept: int) -> bool:
        """Whether a slice has `kept` items after those that are done."""
        return 0 <= kept <= piece.stop - piece.start - self.done

    def repeated(self, retry: tuple[int, ...]) -> tuple[int, ...]:
        """Return the items that run again, in order, if `retry` may."""
        return tuple(sorted(retry + self.again)) if self.again else retry


class Queue:
    """Tasks that could be dispatched, by their order."""

    __slots__ = ("_beside", "_line")

    def __init__(self) -> None:
        # nearly all tasks arrive in order, and a deque costs the same at any length
        self._line: deque[Order] = deque()
        # a heap of the others: those with a higher priority, and those queued again
        self._beside: list[Order] = []

    def push(self, order: Order) -> None:
        """Add a task."""
        if self._line and order < self._line[-1]:
            heappush(self._beside, order)
        else:
            self._line.append(order)

    def first(self) -> Order | None:
        """Return the head, or None."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return self._beside[0]
        return self._line[0] if self._line else None

    def pop(self) -> Order:
        """Remove the head."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return heappop(self._beside)
        return self._line.popleft()

    def remove(self, order: Order) -> None:
        """Remove a task from anywhere in the queue."""
        if order in self._beside:
            self._beside.remove(order)
            heapify(self._beside)
        else:
            self._line.remove(order)

    def __len__(self) -> int:
        return len(self._line) + len(self._beside)

    def __iter__(self) -> Iterator[Order]:
        yield from self._line
        yield from self._beside


class IdleHeap:
    """Free workers, the one in the lowest place first."""

    __slots__ = ("_heap", "_seated")

    def __init__(self) -> None:
        # (place, worker id); a worker that becomes busy keeps its entry until that reaches the
        # head, because it may be free again by then
        self._heap: list[tuple[int, int]] = []
        self._seated: set[int] = set()  # the workers in the heap

    def seat(self, worker: Worker) -> None:
        """Note that a worker has become free."""
        if worker.worker_id not in self._seated:
            self._seated.add(worker.worker_id)
            heappush(self._heap, (worker.place, worker.worker_id))

    def first(self, idle: WaitingList) -> int | None:
        """Return the first worker that is still idle."""
        heap = self._heap
        while heap and heap[0][1] not in idle:
            self._seated.remove(heappop(heap)[1])
        return heap[0][1] if heap else None

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._seated


@dataclass(slots=True, eq=False)
class Lane:
    """A queue of its own for tasks that are bound to certain places or to one worker.

    It exists while it has tasks. A place leaves it when its worker takes no more calls, or, in the
    lane of one worker, when that is lost. When the last place has left, `lost` says why: its tasks
    can never run.
    """

    key: tuple[int, ...] | int  # the places that were asked for, or the worker
    queue: Queue = field(default_factory=Queue)  # those of its tasks that could be dispatched
    tasks: dict[int, None] = field(default_factory=dict)  # all that have not ended
    places: dict[int, None] = field(default_factory=dict)
    idle_heap: IdleHeap = field(default_factory=IdleHeap)  # of the workers in these
    lost: LossReason | None = None


class Rest(NamedTuple):
    """Slices of a task that wait for their time to run again, ordered by it."""

    until: float
    number: int  # of the task's rests: two may end at the same time
    pieces: tuple[Slice, ...]


@dataclass(slots=True)
class Task:
    """A task and its progress. Every item is queued, resting, in flight or settled."""

    spec: TaskSpec
    pace: Pace  # of its function
    size: int
    is_open: bool
    lane: Lane | None = None  # where it waits; None: in the pool's queue
    cursor: int = 0  # the first item that was never dispatched
    # slices to run before the cursor advances; None is much smaller than an empty deque
    again: deque[Slice] | None = None
    # attempt -> worker, of what is in flight and still counts; None is smaller
    flights: dict[int, int] | None = None
    rests: list[Rest] | None = None  # a heap; None is smaller
    num_rests: int = 0  # so far
    items_in_flight: int = 0
    items_resting: int = 0
    settled: int = 0
    is_queued: bool = False  # it is in a queue
    is_draining: bool = False  # nothing more of it starts

    @property
    def order(self) -> Order:
        """Its position in a queue: by priority, then submission."""
        return -self.spec.priority, self.spec.task_id

    @property
    def waiting(self) -> int:
        """The number of items that may be dispatched."""
        return self.size - self.settled - self.items_in_flight - self.items_resting

    @property
    def has_more(self) -> bool:
        """Whether some of it has still to begin, for the first time or again."""
        return bool(self.waiting or self.items_resting or self.is_open)

    @property
    def is_ready(self) -> bool:
        """Whether one more slice could be dispatched."""
        limit = self.spec.max_workers
        is_left = self.settled + self.items_in_flight + self.items_resting < self.size
        has_room = limit is None or len(self.flights or ()) < limit
        return is_left and has_room and not self.is_draining

    @property
    def is_suspect(self) -> bool:
        """Whether its next slice has lost a worker before, and so runs alone."""
        return bool(self.again) and self.again[0].attempt > 1  # type: ignore[index]


@dataclass(slots=True, eq=False)
class WaitingGang:
    """A gang and the free workers that are held for it until there are enough."""

    gang: Task
    members: WaitingList = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the gang can start."""
        return len(self.members) == self.gang.size

    def wants(self, place: int) -> bool:
        """Whether the gang may use a place."""
        return self.gang.lane is None or place in self.gang.lane.places


class Attempt(NamedTuple):
    """One call to one worker: slices for one function."""

    slices: tuple[Slice, ...]
    pace: Pace  # of that function
    runs_alone: bool  # nothing may be queued behind it
    is_fresh: bool = False  # in a process of its own
    lasts: bool = False  # nothing is queued behind it any more
    # a rank that has the place to itself; its worker starts when it has come back
    is_loan: bool = False


@dataclass(slots=True)
class Worker:
    """A process (or thread) that runs tasks; `attempts` is ordered, the first one is running.

    A starting worker may have an attempt that needs a new process, and is sent when that is ready.
    """

    worker_id: int
    place: int
    state: WorkerState = WorkerState.STARTING
    attempts: dict[int, Attempt] = field(default_factory=dict)
    has_delivered: bool = False  # an attempt has come back from it
    since: float = 0.0  # when it became busy
    waiting_list: WaitingList | None = None  # set by `Workers.move`


class Departure(NamedTuple):
    """Why a place is about to be given up, for the user."""

    reason: LossReason
    at: float = math.inf  # its tasks are interrupted then
    failed: int = 0
    finished: int = 0


@dataclass(slots=True, eq=False)
class FailureStreak:
    """Consecutive failed calls of one function in a place."""

    pace: Pace
    # the pace when they began
    good: int
    bad: int
    finished: int
    calls: int = 0  # first attempts
    repeats: int = 0  # later ones
    items: int = 0  # in all of these
    longest_s: float = 0.0  # of these


@dataclass(slots=True)
class Place:
    """A claim on a device and the worker in it."""

    place: int
    worker_id: int = -1
    failed_starts: int = 0
    losses: int = 0  # since the last worker here that has delivered
    # given up when its worker, which takes no more calls, has ended
    leaving: Departure | None = None
    # lanes whose tasks may run here, by key
    lanes: dict[tuple[int, ...] | int, Lane] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """Totals so far: of items in the first four fields; attempts are calls to workers.

    `cancelled`: items without an outcome when their task ended, for any reason.
    """

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    attempts: int = 0
    workers_lost: int = 0
