"""A task as the driver knows it: what to send, and what to do with what comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, runtime_checkable

from raypool.core.model import Slice, TaskState
from raypool.engine.backend import Failure, Function, Part, SliceResult, WorkerInfo
from raypool.engine.diary import add_last_lines
from raypool.engine.verdicts import where
from raypool.errors import RemoteTraceback, TaskError
from raypool.feed import Feed
from raypool.futures import Deferred, Future

Pack = Callable[[Any, str], Any]


class Work(Protocol):
    """One task. The driver's thread calls these, except where they say otherwise."""

    function: Function

    @property
    def holder(self) -> Any:
        """Whoever is told what the task reports and prints, for as long as somebody holds it."""

    def begin(self, piece: Slice, worker: WorkerInfo) -> bool:
        """Note that a slice is about to run; False if nobody wants it any more."""

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return the slice ready to travel."""

    def describe(self, piece: Slice) -> str:
        """Return what to call these items in a message."""

    def wants_retry(self, error: BaseException) -> bool:
        """Whether an item that raised this should run again."""

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Take these items' outcomes."""

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Take it that these items never get an outcome of their own."""

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Take it that nothing more will come; `error` stands for items without an outcome."""


@runtime_checkable
class GangWork(Work, Protocol):
    """A task whose items are ranks, all called at the same time."""

    def assemble(self, members: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Take note of who they are, by rank: worker id, worker. Comes before `begin`."""


def described(failure: Failure, label: str, piece: Slice, worker: WorkerInfo) -> BaseException:
    """Return the user's exception with a note of where it happened, and the traceback there as its cause."""
    error, remote_traceback = failure
    note = f"raypool: {label}, attempt {piece.attempt}, worker {worker.index} ({where(worker)})"
    with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        if remote_traceback is not None and error.__cause__ is None:
            error.__cause__ = RemoteTraceback(remote_traceback)
    return error


class CallWork:
    """A single call; its outcome is a future."""

    def __init__(self, function: Function, call: Any, future: Future[Any], retry_on: tuple[type[BaseException], ...]) -> None:
        self.function = function
        self.future = future
        self._call = call
        self._retry_on = retry_on

    @property
    def holder(self) -> Future[Any]:
        """The future."""
        return self.future

    def begin(self, piece: Slice, worker: WorkerInfo) -> bool:
        """Mark the future as running, unless it was cancelled in this instant."""
        future = self.future
        if not future.running() and not future.start():
            return False
        future.worker = worker.index
        future.attempts = piece.attempt
        future.started_at = datetime.now(UTC)
        return True

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return the call, which was packed when it was handed in."""
        future = self.future
        return Part(
            piece.task_id,
            self.function.fn_id,
            self._call,
            1,
            0,
            piece.attempt,
            is_call=True,
            name=future.name,
            should_stop=future.stop_requested,
        )

    def wants_retry(self, error: BaseException) -> bool:
        """Whether `retry_on` names this."""
        return isinstance(error, self._retry_on)

    def describe(self, piece: Slice) -> str:
        """Return the name of the call."""
        return self.future.name

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Resolve the future; its value stays where it is until somebody asks."""
        future = self.future
        if future.cancelled():
            return
        future.duration_s = result.durations_s[0]
        future.started_at = datetime.fromtimestamp(result.started_at, UTC)
        future.finished_at = datetime.now(UTC)
        future.catch_up = result.catch_up
        failure = result.failures.get(0)
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            if failure is not None:
                future.set_exception(described(failure, future.name, piece, worker))
            else:
                future.set_result(Deferred(result.values, result.offset))

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Fail the future; nobody was there to note what it had printed last."""
        if self.future.feed is not None:
            add_last_lines(error, self.future.feed.text())
        self._fail_with(error)

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Cancel or fail the future if it has no outcome; what it was called with is not needed any more."""
        self._call = None
        future = self.future
        if future.cancelled() or (state is TaskState.CANCELLED and future.cancel()):
            future.notify_cancelled()
        elif not future.done():
            self._fail_with(error or TaskError(f"{future.name} was given up while it ran: the pool was shut down."))

    def _fail_with(self, error: BaseException) -> None:
        future = self.future
        if future.done() or not (future.running() or future.start()):
            return  # it was cancelled
        future.finished_at = datetime.now(UTC)
        with contextlib.suppress(InvalidStateError):  # in this instant
            future.set_exception(error)


class Segment(NamedTuple):
    """Outcomes of a slice of a loop, as they came back together."""

    items: Slice
    result: SliceResult
    worker: WorkerInfo


class LoopOptions(NamedTuple):
    """How a loop is run.

    `is_fixed`: the user has said how many items a call takes. `order`: the numbers of the items in the order in which they are
    handed out; None: as they are.
    """

    label: str
    retry_on: tuple[type[BaseException], ...] = ()
    seed: int | None = None
    stops_on_error: bool = False
    is_fixed: bool = False
    order: Sequence[int] | None = None


class LoopWork:
    """The items of one `parfor`; its outcomes are collected in segments, for whoever waits to put together.

    Slices are cut from the order in which the items are handed out; to the user they are always called by their own numbers.
    """

    def __init__(self, function: Function, items: Sequence[Any], options: LoopOptions) -> None:
        self.function = function
        self.items = items
        self.label = options.label
        self._options = options
        self.segments: list[Segment] = []
        self.errors: dict[int, BaseException] = {}
        self.first_error: BaseException | None = None
        self.lost: list[tuple[Slice, TaskError]] = []
        self.running: dict[int, tuple[Slice, float]] = {}  # worker index -> what it runs, since when
        self.state = TaskState.QUEUED
        self.broken_by: BaseException | None = None
        self.num_settled = 0
        self.changed = threading.Condition()
        self.feed = Feed()
        self._catch_ups: dict[int, Callable[[], None]] = {}  # by worker: waits for what it said before it answered last

    def caught_up(self) -> Feed:
        """Return the feed, when all that items have said which have come back is in it. From any thread."""
        for catch_up in list(self._catch_ups.values()):
            catch_up()
        return self.feed

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.state.is_final

    @property
    def holder(self) -> LoopWork:
        """The loop itself."""
        return self

    def numbers(self, piece: Slice) -> Sequence[int]:
        """Return the numbers of the items of a slice. From any thread."""
        order = self._options.order
        return range(piece.start, piece.stop) if order is None else order[piece.start : piece.stop]

    def begin(self, piece: Slice, worker: WorkerInfo) -> bool:
        """Note what the worker runs now."""
        self.state = TaskState.RUNNING
        self._note_stopped(piece)  # elsewhere, if it runs again because a worker was lost
        self.running[worker.index] = (piece, datetime.now(UTC).timestamp())
        return True

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return these items, packed."""
        numbers = None if self._options.order is None else self.numbers(piece)
        items = self.items[piece.start : piece.stop] if numbers is None else [self.items[index] for index in numbers]
        packed = pack(items, self.describe(piece))
        return Part(
            piece.task_id,
            self.function.fn_id,
            packed,
            len(items),
            piece.start,
            piece.attempt,
            is_call=False,
            seed=self._options.seed,
            name=self.label,
            stops_on_error=self._options.stops_on_error and not self._options.retry_on,
            is_fixed=self._options.is_fixed,
            numbers=numbers,
        )

    def wants_retry(self, error: BaseException) -> bool:
        """Whether `retry_on` names this."""
        return isinstance(error, self._options.retry_on)

    def describe(self, piece: Slice) -> str:
        """Return the numbers of the items, and the name of the loop."""
        return f"{named(self.numbers(piece))} of {self.label}"

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Keep the outcomes."""
        numbers = self.numbers(piece)
        for position, failure in result.failures.items():
            if piece.start <= position < piece.stop:
                index = numbers[position - piece.start]
                self._note_error(index, described(failure, f"item {index} of {self.label}", piece, worker))
        if result.catch_up is not None:
            self._catch_ups[worker.index] = result.catch_up
        self.segments.append(Segment(piece, result, worker))
        self._note_settled(piece)

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Keep the error for each of these items."""
        for index in self.numbers(piece):
            self._note_error(index, error)
        self.lost.append((piece, error))
        self._note_settled(piece)

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Wake whoever waits."""
        with self.changed:
            self.broken_by = error
            self.state = state
            self.changed.notify_all()

    def _note_error(self, index: int, error: BaseException) -> None:
        self.errors[index] = error
        if self.first_error is None:
            self.first_error = error

    def _note_stopped(self, piece: Slice) -> None:
        for index, (running, _) in list(self.running.items()):
            if running.start <= piece.start < running.stop:
                del self.running[index]

    def _note_settled(self, piece: Slice) -> None:
        self._note_stopped(piece)
        with self.changed:
            self.num_settled += piece.stop - piece.start
            self.changed.notify_all()


def named(numbers: Sequence[int]) -> str:
    """Return what to call these items.

    Example:
        >>> named([3]), named(range(3, 6)), named([9, 2]), named([9, 2, 7, 5, 1])
        ('item 3', 'items 3 to 5', 'items 9 and 2', 'items 9, 2 and 3 more')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"item {first}"
    if isinstance(numbers, range):
        return f"items {first} to {last}"
    return f"items {first} and {last}" if len(numbers) == 2 else f"items {first}, {numbers[1]} and {len(numbers) - 2:,} more"
