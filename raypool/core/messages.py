"""The scheduler's messages: events (facts, in the past tense) and commands (imperatives).

All are plain tuples of ids, sizes and kinds, which can be compared, written as JSON and replayed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from raypool.core.model import Report, Slice, TaskSpec, TaskState
from raypool.errors import LossReason


class Signal(Enum):
    """A request to a running task.

    STOP: return early, with a result. CANCEL: the task is interrupted. LEAVE: the machine is about
    to shut down; save and return, to run again elsewhere.
    """

    STOP = "stop"
    CANCEL = "cancel"
    LEAVE = "leave"


# --- events ---------------------------------------------------------------------------------------


class TaskSubmitted(NamedTuple):
    """A task was submitted."""

    spec: TaskSpec


class ItemsAdded(NamedTuple):
    """An open task got `count` more items; `is_open` says whether more may follow.

    `is_open=None`: any task got items that run again; it stays open or closed.
    """

    task_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    is_open: bool | None


class CancelRequested(NamedTuple):
    """The task was cancelled: queued items never run, running items are interrupted.

    `item`: only the one with this number, unless it shares a call with others.
    """

    task_id: int
    item: int | None = None


class DrainRequested(NamedTuple):
    """The task starts nothing more; when its calls have come back, it ends as cancelled."""

    task_id: int


class FirstRequested(NamedTuple):
    """The item with this number, if it waits, is the next one of its task to run."""

    task_id: int
    item: int


class StopRequested(NamedTuple):
    """Running items of the task should return early; their results count.

    `item`: only the one with this number; None: all.
    """

    task_id: int
    item: int | None = None


class WorkerReady(NamedTuple):
    """A worker has started and passed its checks."""

    worker_id: int


class WorkerLost(NamedTuple):
    """A worker is gone. `was_idle`: it began nothing, so its calls do not count as retries."""

    worker_id: int
    reason: LossReason
    was_idle: bool = False


class PlaceLeaving(NamedTuple):
    """A place will be gone soon: it takes no more calls, and running tasks get a signal.

    `at`: they are interrupted then (None: never).
    """

    place: int
    at: float | None = None


class PoolLeaving(NamedTuple):
    """All places will be gone soon: nothing new starts, and running tasks get a signal.

    `is_final`: no other node can come. The pool ends when nothing runs any more, at `gone_at` at
    the latest; what still runs at `at` is interrupted (None: never). Else it waits for a node.
    """

    is_final: bool
    at: float | None = None
    gone_at: float | None = None


class PoolResumed(NamedTuple):
    """The pool has a place on a node that stays: tasks start again."""


class PlaceLost(NamedTuple):
    """A place is gone with its worker: none will ever start there again."""

    place: int
    reason: LossReason


class AttemptFinished(NamedTuple):
    """A worker has answered, with one report for each slice of the attempt, in order.

    `is_spent`: its process holds leftover memory, and is replaced before it runs anything else; the
    last answer decides.
    """

    worker_id: int
    attempt_id: int
    reports: tuple[Report, ...]
    is_spent: bool = False


class AttemptNarrowed(NamedTuple):
    """A worker in a long attempt reports what is done of each slice, in order.

    `kept`: the numbers of items after these that it keeps. It will begin neither the rest nor any
    call that was sent after this one before this was heard.
    """

    worker_id: int
    attempt_id: int
    reports: tuple[Report, ...]
    kept: tuple[int, ...]


class TimerFired(NamedTuple):
    """The time of a `SetTimer` has come."""

    kind: str
    worker_id: int
    attempt_id: int = -1
    task_id: int = -1


class ResizeRequested(NamedTuple):
    """The pool got new places (`add`), or has to give back these (`leave`), or all but `size`.

    Of `leave`, places with tasks that are bound to their worker stay. If there are fewer than
    `size`, workers that an earlier `size` lets go, and that have not ended, stay.
    """

    add: tuple[int, ...] = ()
    size: int | None = None
    leave: tuple[int, ...] = ()


class ShutdownRequested(NamedTuple):
    """The pool takes no more tasks; queued or running tasks may be cancelled."""

    cancel_queued: bool = False
    cancel_running: bool = False


Event = (
    TaskSubmitted
    | ItemsAdded
    | CancelRequested
    | DrainRequested
    | FirstRequested
    | StopRequested
    | WorkerReady
    | WorkerLost
    | PlaceLeaving
    | PoolLeaving
    | PoolResumed
    | PlaceLost
    | AttemptFinished
    | AttemptNarrowed
    | TimerFired
    | ResizeRequested
    | ShutdownRequested
)

# --- commands -------------------------------------------------------------------------------------


class StartWorker(NamedTuple):
    """Start a worker in a place; it replaces any other there."""

    worker_id: int
    place: int


class Vacate(NamedTuple):
    """End the worker in a place, if there is one, and give the place back."""

    place: int


class ParkWorker(NamedTuple):
    """End the worker in a place and keep the place: the pool is idle."""

    place: int


class RunTasks(NamedTuple):
    """Call the worker with these slices."""

    worker_id: int
    attempt_id: int
    slices: tuple[Slice, ...]


class RunGang(NamedTuple):
    """Make these calls at the same time: the ranks of a gang, in order.

    `is_loan`: no worker is called. The processes in these places end, and the submitter of the gang
    has the places until `AttemptFinished` arrives for each rank.
    """

    runs: tuple[RunTasks, ...]
    is_loan: bool = False


class SignalTask(NamedTuple):
    """Send a signal to a task in an attempt, unless the worker has answered meanwhile."""

    worker_id: int
    attempt_id: int
    task_id: int
    signal: Signal


class SettleItems(NamedTuple):
    """The outcomes of these items in this attempt count."""

    attempt_id: int
    items: Slice


class FailItems(NamedTuple):
    """These items have failed: they lost their worker, and have no retries left.

    So has a rank of a gang that was not begun (`LossReason.STOPPED`: the gang was being stopped).
    """

    items: Slice
    reason: LossReason


class TimeOutItems(NamedTuple):
    """These items have failed because they exceeded their time limit.

    For a gang this names all ranks and settles none: each is reported when it has returned.
    """

    items: Slice
    timeout_s: float


class CancelItem(NamedTuple):
    """This item was cancelled alone: it never gets an outcome."""

    item: Slice


class EndTask(NamedTuple):
    """The task has ended: items that are not settled never will be."""

    task_id: int
    state: TaskState


class DropPlace(NamedTuple):
    """The pool has lost this place, and is smaller now.

    With `LossReason.FAULTY`: the number of items that failed there in a row, and that finished
    elsewhere meanwhile.
    """

    place: int
    reason: LossReason
    failed: int = 0
    finished: int = 0


class SetTimer(NamedTuple):
    """Send `TimerFired(kind, worker_id, attempt_id, task_id)` at this time [s, the clock of `now`].

    "start": a worker's delayed start. "ready": its start took too long. "timeout": the attempt took
    too long. "leave": the worker's machine is about to go. Without a worker: "idle": the pool may
    have been idle for long enough; "retry": items of the task may run again; "hold": a place
    that may be faulty was held for long enough; "leave" and "gone": the times of a `PoolLeaving`.
    """

    at: float
    kind: str
    worker_id: int
    attempt_id: int = -1
    task_id: int = -1


class BreakPool(NamedTuple):
    """No place is left, or none for long; tasks that end after this have failed because of it."""


class ClosePool(NamedTuple):
    """All tasks have ended, and all places are given back."""


Command = (
    StartWorker
    | Vacate
    | ParkWorker
    | RunTasks
    | RunGang
    | SignalTask
    | SettleItems
    | FailItems
    | TimeOutItems
    | CancelItem
    | EndTask
    | DropPlace
    | SetTimer
    | BreakPool
    | ClosePool
)
