"""The scheduler's messages: events (facts, in the past tense) and commands (imperatives).

All are plain tuples of ids, sizes and kinds, so that they can be compared, written as JSON and
replayed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from raypool.core.model import Report, Slice, TaskSpec, TaskState
from raypool.errors import LossReason


class Signal(Enum):
    """What a running task is told.

    STOP: end by yourself, and return what you have. CANCEL: you are interrupted. LEAVE: your
    machine is about to go; save what you have and come back, you run again elsewhere.
    """

    STOP = "stop"
    CANCEL = "cancel"
    LEAVE = "leave"


# --- events ---------------------------------------------------------------------------------------


class TaskSubmitted(NamedTuple):
    """A task was submitted."""

    spec: TaskSpec


class ItemsAdded(NamedTuple):
    """An open task got `count` more items; `is_open` says whether more may follow."""

    task_id: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    is_open: bool


class CancelRequested(NamedTuple):
    """The task was cancelled: queued items never run, running ones are interrupted, and late
    results are dropped.
    """

    task_id: int


class StopRequested(NamedTuple):
    """Whatever runs of the task now should end by itself and return what it has; that counts as any
    result.
    """

    task_id: int


class WorkerReady(NamedTuple):
    """A worker has come up and passed its checks."""

    worker_id: int


class WorkerLost(NamedTuple):
    """A worker is gone. `was_idle`: it died before it began what was sent to it, so that is not
    charged.
    """

    worker_id: int
    reason: LossReason
    was_idle: bool = False


class PlaceLeaving(NamedTuple):
    """A place will be gone soon. It takes nothing more; what runs there is told, and has until `at`
    to end (None: no limit).

    `is_kept`: the pool has no other place, so this one stays, and moves to another node later; what
        runs is told.
    """

    place: int
    at: float | None = None
    is_kept: bool = False


class PlaceLost(NamedTuple):
    """A place is gone with whatever was in it: no worker will ever start there again."""

    place: int
    reason: LossReason


class AttemptFinished(NamedTuple):
    """A worker has answered; one report for each slice of the attempt, in order.

    `is_spent`: its process holds memory that it should not, and is replaced before it runs anything
    else; the last answer decides.
    """

    worker_id: int
    attempt_id: int
    reports: tuple[Report, ...]
    is_spent: bool = False


class AttemptNarrowed(NamedTuple):
    """A worker busy with a long attempt says of each slice, in order, what is done, and what it
    keeps.

    `kept`: so many items after those that are done; the rest it will not begin. Nor will it begin
    any call that was sent after this one before this was heard.
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
    """New places were claimed for the pool (`add`), or it is to give back so many (`remove`), or
    these (`leave`).

    Of the latter those stay that tasks are bound to.
    """

    add: tuple[int, ...] = ()
    remove: int = 0
    leave: tuple[int, ...] = ()


class ShutdownRequested(NamedTuple):
    """No task is taken from now on. What is queued, or running, may be cancelled."""

    cancel_queued: bool = False
    cancel_running: bool = False


Event = (
    TaskSubmitted
    | ItemsAdded
    | CancelRequested
    | StopRequested
    | WorkerReady
    | WorkerLost
    | PlaceLeaving
    | PlaceLost
    | AttemptFinished
    | AttemptNarrowed
    | TimerFired
    | ResizeRequested
    | ShutdownRequested
)

# --- commands -------------------------------------------------------------------------------------


class StartWorker(NamedTuple):
    """Start a worker in a place, instead of any that was there."""

    worker_id: int
    place: int


class Vacate(NamedTuple):
    """End the worker in a place, if there is one, and give the place back."""

    place: int


class ParkWorker(NamedTuple):
    """End the worker in a place and keep the place: the pool has had no work for a while."""

    place: int


class RunTasks(NamedTuple):
    """Call the worker with these slices."""

    worker_id: int
    attempt_id: int
    slices: tuple[Slice, ...]


class RunGang(NamedTuple):
    """Make these calls at the same time: the ranks of a gang, in order.

    `is_loan`: no worker is called. Processes in the places of these workers, which have not
    started, end; the submitter of the gang has the places until `AttemptFinished` comes for each
    rank.
    """

    runs: tuple[RunTasks, ...]
    is_loan: bool = False


class SignalTask(NamedTuple):
    """Tell what runs of this task in this attempt to stop. An attempt that the worker has answered
    meanwhile is not meant.
    """

    worker_id: int
    attempt_id: int
    task_id: int
    signal: Signal


class SettleItems(NamedTuple):
    """The outcomes that came with this attempt for these items count."""

    attempt_id: int
    items: Slice


class FailItems(NamedTuple):
    """These items have lost their worker for the last time.

    A rank of a gang that was not begun has failed too: with `LossReason.STOPPED` if the gang was
    being stopped by then.
    """

    items: Slice
    reason: LossReason


class TimeOutItems(NamedTuple):
    """These items have run longer than they may; they have failed, whatever still comes of them.

    For a gang it is one notice about all its ranks, and settles nothing: each rank is reported as
    it comes back.
    """

    items: Slice
    timeout_s: float


class EndTask(NamedTuple):
    """The task has ended: all its items are settled, or what is missing never will be."""

    task_id: int
    state: TaskState


class DropPlace(NamedTuple):
    """There will be no worker in this place any more; the pool is smaller now.

    With `LossReason.FAULTY`: so many items have failed there in a row (`failed`), while others have
    not (`finished`).
    """

    place: int
    reason: LossReason
    failed: int = 0
    finished: int = 0


class SetTimer(NamedTuple):
    """Send `TimerFired(kind, worker_id, attempt_id, task_id)` at this time [s, the clock of `now`].

    "start": a worker's delayed start. "ready": it has to have come up. "timeout": the attempt has
    to have come back. "leave": what still runs on the worker has to go elsewhere. Of no worker:
    "idle": the pool may have had no task for long enough;
    "retry": something of the task may run again.
    """

    at: float
    kind: str
    worker_id: int
    attempt_id: int = -1
    task_id: int = -1


class BreakPool(NamedTuple):
    """No worker is left that can come back; the tasks ended after this have failed because of
    it.
    """


class ClosePool(NamedTuple):
    """All tasks have ended and all places are given back."""


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
    | EndTask
    | DropPlace
    | SetTimer
    | BreakPool
    | ClosePool
)
