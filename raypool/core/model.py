"""The nouns of the scheduler: tasks, slices, attempts, workers, places.

A **task** is what a user submitted under one id: one call (`parfeval`) or the items of one loop
(`parfor`), numbered from 0. A **slice** is a run of consecutive items of one task; it is what
travels. An **attempt** is one call to one worker with one or more slices in it. A **place** is a
claim on a device, and outlives the worker processes that come and go in it. Ids are small integers,
never used twice. No value of the user's is stored here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from raypool.core.policy import Pace
from raypool.core.queue import Order, Queue
from raypool.errors import LossReason

Flight = tuple[int, int]
"""(attempt id, worker id) of a call that is on its way."""


Group = dict[int, None]
"""The ids of workers that could do the same next, in the order in which they joined."""


class TaskState(Enum):
    """Where a task is. RUNNING: some of it was sent to a worker. FINISHED, FAILED and CANCELLED are
    never left.
    """

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
    """Where a worker is. LOST and STOPPED are never left: whatever comes after has a new id.
    PARKED: it has no process.
    """

    PARKED = "parked"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"
    STOPPED = "stopped"


class PoolState(Enum):
    """Where the pool is. CLOSED and BROKEN are never left."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


class TaskSpec(NamedTuple):
    """What is known of a task when it is submitted.

    `fn_id`: tasks with the same number run the same function, so that short ones may share a call
        and their times.
    `is_open`: more items may follow (`ItemsAdded`). `retries`: how often an item may run again
    after it has lost its worker; with 0 an item never shares a call and never runs twice. `place`:
    runs on the worker that holds this place now, or fails with it. `is_gang`: its items are ranks,
    which start together and never run again. `places`: the only places that it may use, in the
    order of a gang's ranks. `fail_fast`: the first failure ends the task. `chunk_size`: a call
    takes so many items, whatever they take (None: by their pace). `timeout_s`: an item that runs
    longer has failed [s]; such items never share a call. `is_fresh`: each item runs in a process
    that has run nothing before, and ends after it.
    `retry_delay_s`: an item that runs again waits so long first, twice as long each time.
    `is_loan`: a gang that wants the places only: the workers of its ranks end, and others start
    there when the ranks have come back.
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
        """Whether these wishes have a meaning, and go together."""
        if self.place is not None and (self.is_gang or self.is_fresh or self.places is not None):
            return False  # a bound task means a process, not a place
        if self.is_gang and (
            self.is_open or self.fail_fast or self.is_fresh or self.max_workers is not None
        ):
            return False  # one failure ends a gang anyway, but not before all ranks have come back
        if self.is_loan and not self.is_gang:
            return False
        may_start = (self.max_workers is None or self.max_workers > 0) and (
            self.chunk_size is None or self.chunk_size > 0
        )
        may_last = self.timeout_s is None or self.timeout_s > 0
        return (
            may_start
            and may_last
            and self.size >= 0
            and self.retries >= 0
            and self.retry_delay_s >= 0
        )

    def may_meet(self, other: TaskSpec) -> bool:
        """Whether there could be a place for both, at some time."""
        return (
            self.places is None
            or other.places is None
            or not set(self.places).isdisjoint(other.places)
        )

    def runs_alone(self) -> bool:
        """Whether an item of it never shares a call, and nothing is queued behind it."""
        return self.retries == 0 or self.timeout_s is not None or self.is_fresh


class Slice(NamedTuple):
    """Items `start` to `stop - 1` of a task, for the `attempt`-th time (from 1)."""

    task_id: int
    start: int
    stop: int
    attempt: int

    def without(self, items: tuple[int, ...]) -> list[Slice]:
        """Return the runs of items that are left without these, which ascend.

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

    `done`: so many items, counted from the slice's start, have an outcome; the rest was not begun
        and is handed back.
    `failed`: so many of them ended with an error. `retry`: the numbers of those of them that may
        run again.
    `busy_s`: time spent in the user's function [s]. `again`: the numbers of failed items that were
    crowded out by others on their GPU: they always run again, and that does not count as a retry.
    """

    done: int
    failed: int = 0
    retry: tuple[int, ...] = ()
    busy_s: float = 0.0
    again: tuple[int, ...] = ()

    def is_about(self, piece: Slice) -> bool:
        """Whether this can be said of a slice; `retry` and `again` have to ascend, and have nothing
        in common.
        """
        if not self.retry and not self.again:
            return 0 <= self.failed <= self.done <= piece.stop - piece.start
        stop, repeated = piece.start + self.done, self.repeated(self.retry)
        ascends = all(a < b for a, b in pairwise((piece.start - 1, *repeated, stop)))
        return ascends and stop <= piece.stop and len(repeated) <= self.failed <= self.done

    def leaves(self, piece: Slice, kept: int) -> bool:
        """Whether so many items of a slice can come after those that are done."""
        return 0 <= kept <= piece.stop - piece.start - self.done

    def repeated(self, retry: tuple[int, ...]) -> tuple[int, ...]:
        """Return what runs again, in order, if these may be tried once more."""
        return tuple(sorted(retry + self.again)) if self.again else retry


class IdleHeap:
    """Free workers, the one in the lowest place first.

    A worker that becomes busy keeps its entry until that reaches the head: it may be free again by
    then.
    """

    __slots__ = ("_heap", "_seated")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (place, worker id)
        self._seated: set[int] = set()  # the workers in the heap

    def seat(self, worker: Worker) -> None:
        """Note that a worker has become free."""
        if worker.worker_id not in self._seated:
            self._seated.add(worker.worker_id)
            heappush(self._heap, (worker.place, worker.worker_id))

    def first(self, idle: Group) -> int | None:
        """Return the first of those workers that are really idle."""
        heap = self._heap
        while heap and heap[0][1] not in idle:
            self._seated.remove(heappop(heap)[1])
        return heap[0][1] if heap else None

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._seated


@dataclass(slots=True, eq=False)
class Lane:
    """A queue beside the pool's, for tasks that may run in certain places only, or on one
    particular worker only.

    It lasts as long as it has tasks. A place leaves it when its worker is to take nothing more, and
    the lane of one worker is left when that worker is lost. When the last place leaves, what waits
    can never run: `lost` says why.
    """

    key: tuple[int, ...] | int  # the places that were asked for, or the worker
    queue: Queue = field(default_factory=Queue)  # those of its tasks that could be dispatched
    tasks: dict[int, None] = field(default_factory=dict)  # all that have not ended
    places: dict[int, None] = field(default_factory=dict)
    idle_heap: IdleHeap = field(default_factory=IdleHeap)  # of the workers in these
    lost: LossReason | None = None


class Rest(NamedTuple):
    """Slices of a task that wait until they may run again, in the order in which they may."""

    until: float
    number: int  # of the task's rests: two may end at the same time
    pieces: tuple[Slice, ...]


@dataclass(slots=True)
class Task:
    """A task and its progress. Every item is queued, resting, in flight or settled:
    `check_invariants` counts them.
    """

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

    @property
    def order(self) -> Order:
        """Its position in a queue: by priority, then submission."""
        return -self.spec.priority, self.spec.task_id

    @property
    def waiting(self) -> int:
        """Items that wait to be dispatched, and may be."""
        return self.size - self.settled - self.items_in_flight - self.items_resting

    @property
    def is_ready(self) -> bool:
        """Whether one more slice could be dispatched."""
        limit = self.spec.max_workers
        is_left = self.settled + self.items_in_flight + self.items_resting < self.size
        return is_left and (limit is None or len(self.flights or ()) < limit)

    @property
    def is_suspect(self) -> bool:
        """Whether its next slice has lost a worker before, and so runs with nothing beside it."""
        return bool(self.again) and self.again[0].attempt > 1  # type: ignore[index]


@dataclass(slots=True, eq=False)
class WaitingGang:
    """A gang and the free workers that are held for it until there are enough."""

    gang: Task
    members: Group = field(default_factory=dict)

    def wants(self, place: int) -> bool:
        """Whether the worker in a place could be one of them."""
        return self.gang.lane is None or place in self.gang.lane.places


class Attempt(NamedTuple):
    """What one call to one worker holds, all of it for one function."""

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

    While the worker is starting, it may have one that has to be in a process of its own, and is
    sent when the worker is ready.
    """

    worker_id: int
    place: int
    state: WorkerState = WorkerState.STARTING
    attempts: dict[int, Attempt] = field(default_factory=dict)
    has_delivered: bool = False  # an attempt has come back from it
    since: float = 0.0  # when it became busy
    group: Group | None = None  # the group of `Workers` that it is in


class Departure(NamedTuple):
    """Why a place is about to be given up, and what the user is told about it."""

    reason: LossReason
    at: float = math.inf  # what still runs there then is interrupted
    failed: int = 0
    finished: int = 0


@dataclass(slots=True, eq=False)
class FailureStreak:
    """Consecutive failed calls of one function in a place, and its counts elsewhere when they
    began.
    """

    pace: Pace
    good: int
    bad: int
    finished: int
    calls: int = 0  # first attempts
    repeats: int = 0  # later ones
    items: int = 0  # in all of these


@dataclass(slots=True)
class Place:
    """A claim on a device and the worker in it."""

    place: int
    worker_id: int = -1
    failed_starts: int = 0
    losses: int = 0  # since the last worker here that has delivered
    # it goes when its worker, which takes nothing more, has come to an end
    leaving: Departure | None = None
    # whose tasks may run here, by key
    lanes: dict[tuple[int, ...] | int, Lane] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """How much has happened so far. Items, not tasks, in the first four; attempts are calls to
    workers.

    `cancelled`: items that got no outcome because their task had ended, for whatever reason.
    """

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    attempts: int = 0
    workers_lost: int = 0
