"""A future that knows where its task is, and one of several."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from raypool.errors import InvalidTypeError

T = TypeVar("T")

logger = logging.getLogger("raypool")


class Values(Protocol):
    """The return values of a call, which may still be elsewhere."""

    def get(self) -> list[Any]:
        """Return them, one for each item of the call (None for a failed one, `Missing` for one that can't be opened)."""


class Missing(NamedTuple):
    """Stands for a value that has arrived and cannot be opened."""

    error: Exception


class Deferred:
    """One of these values, brought here when somebody asks for it."""

    __slots__ = ("_position", "_values")

    def __init__(self, values: Values, position: int) -> None:
        self._values = values
        self._position = position

    def fetch(self) -> Any:
        """Return it."""
        value = self._values.get()[self._position]
        if type(value) is Missing:
            raise value.error
        return value


class Future(concurrent.futures.Future[T], Generic[T]):
    """The handle of one task: a `concurrent.futures.Future` with the task's own story beside its result.

    `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future` and `add_done_callback` take it as it is. Its callbacks
    run in the pool's own thread, in which nothing else runs meanwhile: keep them short.

    Attributes:
        name: What the caller named the work, or the function's name.
        worker: The number of the worker that ran it last, None before.
        attempts: How often it was started; above 1 only after a worker was lost or by `retry_on`.
        submitted_at: When it was handed in.
        started_at: When its (last) run began, None before.
        finished_at: When it ended, None before.
        read: Whether `fetch_next` or `fetch_outputs` has delivered it.
    """

    def __init__(self, name: str, on_cancel: Callable[[Future[T]], object] | None = None) -> None:
        super().__init__()
        self.name = name
        self.worker: int | None = None
        self.attempts = 0
        self.submitted_at = datetime.now(UTC)
        self.started_at: datetime | None = None
        self.finished_at: datetime | None = None
        self.read = False
        self.duration_s: float | None = None
        self._unopened: BaseException | Literal[False] | None = None  # why its value can't be opened; None: not tried
        self.on_cancel = on_cancel  # the pool's own
        self.task_id = -1  # likewise
        self._is_notified = False

    @property
    def state(self) -> str:
        """Where it is: "queued", "running", "finished", "failed" or "cancelled"."""
        if self.cancelled():
            return "cancelled"
        if not self.done():
            return "running" if self.running() else "queued"
        return "failed" if super().exception() is not None or self._unopened else "finished"

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with, None if it has not ended or ended well. Never waits."""
        if not self.done() or self.cancelled():
            return None
        return super().exception() or self._unopened or None

    @property
    def running_duration_s(self) -> float | None:
        """How long it has run, or ran [s]; None if it has not started."""
        if self.duration_s is not None or self.started_at is None:
            return self.duration_s
        return (datetime.now(UTC) - self.started_at).total_seconds()

    def result(self, timeout: float | None = None) -> T:
        """Return the value that the task returned, waiting for it at most `timeout` seconds.

        Raises:
            TimeoutError: It has not ended by then; it goes on.
            concurrent.futures.CancelledError: It was cancelled.
            Exception: What the task raised, as itself.
        """
        value: Any = super().result(timeout)
        return value.fetch() if type(value) is Deferred else value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that the task ended with, None if it ended well, waiting at most `timeout` seconds.

        A value that has arrived and cannot be unpickled here counts as a `SerializationError`.
        """
        error = super().exception(timeout)
        if error is None and self._unopened is None:
            self._unopened = _error_of(super().result())
        return error or self._unopened or None

    def start(self) -> bool:
        """Mark it as running; False if it was cancelled first. For the pool."""
        with self._condition:
            if self.cancelled():
                return False
            return self.set_running_or_notify_cancel()

    def notify_cancelled(self) -> None:
        """Tell those who wait for several futures that this one is cancelled; twice does nothing. For the pool."""
        if not self._is_notified:
            self._is_notified = True
            self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn(self)` when it has ended, at once if it has; what `fn` raises is logged and otherwise ignored."""
        super().add_done_callback(functools.partial(_call_back, fn))

    def cancel(self) -> bool:
        """Cancel it if it has not started; return whether it is cancelled."""
        was_cancelled = self.cancelled()
        is_cancelled = super().cancel()
        if is_cancelled and not was_cancelled:
            self.finished_at = datetime.now(UTC)
            if self.on_cancel is not None:
                self.on_cancel(self)
        return is_cancelled

    def __repr__(self) -> str:
        where = "" if self.worker is None else f" on worker {self.worker}"
        return f"<Future {self.name!r}: {self.state}{where}>"

    def __reduce__(self) -> Any:
        raise InvalidTypeError("A future belongs to the process that made it. Send its result instead.")


def _call_back(fn: Callable[[Any], object], future: Any) -> None:
    try:
        fn(future)
    except (SystemExit, KeyboardInterrupt):  # the standard library logs all others; these would end the pool's thread
        logger.exception("A callback of %r wanted to end the process, from a thread of the pool.", future)


def _error_of(value: Any) -> BaseException | Literal[False]:
    if type(value) is not Deferred:
        return False
    try:
        value.fetch()
    except Exception as error:
        return error
    return False


def gather(futures: Sequence[Future[Any]], name: str) -> Future[list[Any]]:
    """Return a future of all their results, in this order; it fails with the first of their errors when all have ended."""

    def cancel_parts(whole: Future[list[Any]]) -> None:
        for future in futures:
            future.cancel()
        whole.notify_cancelled()

    whole: Future[list[Any]] = Future(name, on_cancel=cancel_parts)
    lock = threading.Lock()
    missing = len(futures)

    def note(_: Any) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        if not whole.start():
            return
        try:
            whole.set_result([future.result() for future in futures])
        except BaseException as error:
            whole.set_exception(error)

    if not futures:
        whole.set_result([])
    for future in futures:
        future.add_done_callback(note)
    return whole
