"""`Work`, a task for the driver: what to send, and where results go. `CallWork`: a single call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from raypool.channel.capture import add_last_lines
from raypool.channel.records import Failure, Function, Part, SliceResult, WorkerInfo, where
from raypool.core.model import Slice, TaskState
from raypool.engine.explanations import missing_module
from raypool.engine.in_flight import Call
from raypool.errors import RemoteTraceback, TaskError
from raypool.futures import Deferred, Future

Pack = Callable[[Any, str], Any]


class Work(Protocol):
    """One task. The driver's thread calls these, except where they say otherwise."""

    function: Function

    @property
    def holder(self) -> Any:
        """The future or loop that gets the task's reports and output, as long as it is held."""

    def begin(self, piece: Slice, worker: WorkerInfo, call: Call) -> bool:
        """Note that a slice is about to be sent, or is left of a call; False if nobody wants it."""

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return the slice ready to travel."""

    def describe(self, piece: Slice) -> str:
        """Return the name of these items for a message."""

    def wants_retry(self, error: BaseException) -> bool:
        """Whether an item that raised this should run again."""

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Take these items' outcomes."""

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Record that these items never get an outcome of their own."""

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Record that these items run again: a text says how they were lost, or their error."""

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Note that no more outcomes will come; `error` is for items without one."""


@runtime_checkable
class GangWork(Work, Protocol):
    """A task whose items are ranks, all called at the same time."""

    def assemble(self, members: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Note, before `begin`, who they are, by rank: worker id, worker."""


def described(failure: Failure, label: str, piece: Slice, worker: WorkerInfo) -> BaseException:
    """Return the user's exception with a note of where it happened, and its traceback there."""
    error, remote_traceback = failure
    place = where(worker)
    if worker.index >= 0:
        place = f"worker {worker.index} ({place})"
    note = f"raypool: {label}, attempt {piece.attempt}, {place}"
    with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
            if isinstance(error, ModuleNotFoundError) and remote_traceback is not None:
                step = missing_module(str(error.name), worker.host)
                if step is not None:
                    error.add_note(step)
        if remote_traceback is not None and error.__cause__ is None:
            error.__cause__ = RemoteTraceback(remote_traceback)
    return error


class CallWork:
    """A single call; its outcome is a future."""

    __slots__ = ("_call", "_retry_on", "checkpoints", "function", "future")

    def __init__(
        self,
        function: Function,
        call: Any,
        future: Future[Any],
        retry_on: tuple[type[BaseException], ...],
    ) -> None:
        self.function = function
        self.future = future
        self.checkpoints: tuple[str, tuple[str, ...]] | None = None  # see `Part`
        self._call = call
        self._retry_on = retry_on

    @property
    def holder(self) -> Future[Any]:
        """The future."""
        return self.future

    def begin(self, piece: Slice, worker: WorkerInfo, call: Call) -> bool:
        """Mark the future as running, unless it was cancelled in this instant."""
        future = self.future
        if not future.running() and not future.start():
            return False
        future.worker = worker.index
        future.attempts = piece.attempt
        began_at = call.began_at
        future.started_at = (
            datetime.now(UTC) if began_at is None else datetime.fromtimestamp(began_at, UTC)
        )
        return True

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return the call, which was packed when it was submitted."""
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
            checkpoints=self.checkpoints,
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
        future.peak_memory_bytes = result.peak_memory_bytes
        # by the worker's clock: until now it was known as the time when the call was sent
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
        """Fail the future."""
        # a lost worker cannot note what it printed last
        if self.future.feed is not None:
            add_last_lines(error, self.future.feed.text())
        self._fail_with(error)

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Do nothing: `attempts` says how often it has run."""

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Cancel or fail the future if it has no outcome."""
        self._call = None  # the arguments: not needed any more, and they may be large
        future = self.future
        if future.cancelled() or (state is TaskState.CANCELLED and future.cancel()):
            future.notify_cancelled()
        elif not future.done():
            self._fail_with(
                error
                or TaskError(f"{future.name} was stopped while it ran: the pool was shut down.")
            )

    def _fail_with(self, error: BaseException) -> None:
        future = self.future
        if future.done() or not (future.running() or future.start()):
            return  # it was cancelled
        future.finished_at = datetime.now(UTC)
        with contextlib.suppress(InvalidStateError):  # in this instant
            future.set_exception(error)
