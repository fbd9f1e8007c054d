"""A future that knows where its task is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures._base import CANCELLED as IS_CANCELLED  # the states have no public names
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from raypool.errors import CANCELLED, InvalidTypeError, InvalidValueError, TaskCancelled, reason_of
from raypool.feed import Feed
from raypool.lean_future import LeanFuture
from raypool.task import in_task

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

ENDED = frozenset({IS_CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED})

logger = logging.getLogger("raypool")


class Values(Protocol):
    """The return values of a call, which may still be elsewhere."""

    def get(self) -> list[Any]:
        """Return them, one for each item of the call (None for a failed one, `Missing` for one that can't be opened)."""


class Missing(NamedTuple):
    """Stands for a value that has arrived and cannot be opened."""

    error: Exception


class Deferred:
    """One of these values, brought here when somebody asks for it, and from then on nowhere else: who drops it, frees it."""

    __slots__ = ("_position", "_value", "_values")

    _taking = threading.Lock()  # one for all: it is held for an instant

    def __init__(self, values: Values, position: int) -> None:
        self._values: Values | None = values
        self._position = position
        self._value: Any = None

    def fetch(self) -> Any:
        """Return it."""
        values = self._values
        if values is not None:
            whole = values.get()
            with self._taking:
                if self._values is not None:  # nobody was quicker
                    self._value, whole[self._position] = whole[self._position], None
                    self._values = None
        if type(self._value) is Missing:
            raise self._value.error
        return self._value


class Owner(Protocol):
    """Who brings a future to its end."""

    @property
    def is_own_thread(self) -> bool:
        """Whether this code runs in the thread that does it: waiting here would be for ever."""


class Future(LeanFuture[T], Generic[T]):
    """The handle of one task: a `concurrent.futures.Future` with the task's own story beside its result.

    `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future` and `add_done_callback` take it as it is, and a coroutine
    may `await` it. Its callbacks run in the pool's own thread, in which nothing else runs meanwhile: keep them short. Futures of
    the same pool that have not ended cannot be waited for there: `result`, `fetch_next` and the like raise an error, but
    `concurrent.futures.wait` and `as_completed` would wait for ever. The functions of `after_each` and `after_all` may wait for
    them.

    Attributes:
        name: What the caller named the work, or the function's name.
        worker: The number of the worker that ran it last, None before.
        attempts: How often it was started; above 1 only after a worker was lost or by `retry_on`.
        started_at: When its (last) run began, None before.
        finished_at: When it ended, None before.
        stop_requested: Whether `request_stop` was called.
        worker_replaced: What its cancellation has cost, if it was running then: False, the task has stopped and the worker goes
            on; True, it did not stop and was killed with its worker, which is replaced; None while that is not known, or was not
            asked.
        peak_memory_bytes: The most that its worker had of its (first) GPU's memory while it ran [bytes]; None before its end,
            or if it had none.
        read: Whether `fetch_next` or `fetch_outputs` has delivered it.
    """

    __slots__ = (
        "_is_notified",
        "_submitted_at",
        "_unopened",
        "attempts",
        "catch_up",
        "duration_s",
        "feed",
        "finished_at",
        "name",
        "on_ask",
        "owners",
        "peak_memory_bytes",
        "read",
        "started_at",
        "stop_requested",
        "task_id",
        "whole",
        "worker",
        "worker_replaced",
    )

    def __init__(self, name: str, on_ask: Callable[[Future[T]], object] | None = None) -> None:
        super().__init__()
        self.name = name
        self.worker: int | None = None
        self.attempts = 0
        self._submitted_at = time.time()
        self.started_at: datetime | None = None
        self.finished_at: datetime | None = None
        self.read = False
        self.duration_s: float | None = None
        self.peak_memory_bytes: int | None = None
        self._unopened: BaseException | Literal[False] | None = None  # why its value can't be opened; None: not tried
        self.stop_requested = False
        self.worker_replaced: bool | None = None
        self.on_ask = on_ask  # the pool's own: told of a cancellation, and of a wish for an early end
        self.owners: tuple[Owner, ...] = ()  # likewise: who must not wait for it
        self.task_id = -1  # likewise
        self.feed: Feed | None = None  # likewise: made when the task says something
        self.catch_up: Callable[[], Feed | None] | None = None  # likewise: waits for what it said before it ended
        self.whole: Future[Any] | None = None  # likewise: what this is only a part of, and what is shown instead
        self._is_notified = False

    @property
    def submitted_at(self) -> datetime:
        """When it was handed in."""
        return datetime.fromtimestamp(self._submitted_at, UTC)

    @property
    def state(self) -> str:
        """Where it is: "queued", "running", "finished", "failed" or "cancelled"."""
        if self.cancelled():
            return "cancelled"
        if not self.done():
            return "running" if self.running() else "queued"
        return "finished" if self._either(super().exception()) is None else "failed"

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with, None if it has not ended or ended well. Never waits."""
        if not self.done() or self.cancelled():
            return None
        return self._either(super().exception())

    @property
    def reason(self) -> str | None:
        """Why it has no value, in a word or two, such as "cancelled" or "gpu out of memory"; None until then, or if it has one.

        See `raypool.errors.reason_of` for all of them. Never waits.
        """
        if self.cancelled():
            return CANCELLED
        error = self.error
        return None if error is None else reason_of(error)

    @property
    def running_duration_s(self) -> float | None:
        """How long it has run, or ran [s]; None if it has not started."""
        if self.duration_s is not None or self.started_at is None:
            return self.duration_s
        return (datetime.now(UTC) - self.started_at).total_seconds()

    @property
    def metrics(self) -> pd.DataFrame:
        """What the task has reported so far (`raypool.report`), all of it once it has ended.

        A row for each report, in order: `time` (UTC), `attempt`, then the metrics in the order in which they first appear. A
        metric that is called like one of those two is in "reported_NAME". Empty if it has reported nothing.

        Example:
            >>> from raypool import parpool, report
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     job = pool.parfeval(lambda: [report(step=step, loss=0.5**step) for step in range(3)])
            >>> job.metrics["loss"].tolist()
            [1.0, 0.5, 0.25]
        """
        return self._caught_up().metrics(None)

    @property
    def diary(self) -> str:
        """What the task has printed so far, to `sys.stdout` and `sys.stderr` alike; all of it once it has ended.

        A task that runs again (its worker was lost, perhaps by another task in the same call, or by `retry_on`) has what it
        printed each time; the line "[raypool: it runs again]" stands between. The newest MiB is kept; a first line says how much
        is missing before that. On Ray it is what the whole worker process writes from Python, in whatever thread; with "threads"
        and "inline", what the task's own thread writes. What native code prints by itself is not in it.

        Source:
            MATLAB R2025b, Diary of a parallel.Future.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     job = pool.parfeval(print, "epoch 1")
            epoch 1
            >>> job.diary.splitlines()
            ['epoch 1']
        """
        return self._caught_up().text()

    def _caught_up(self) -> Feed:
        joined = self.catch_up() if self.catch_up is not None else None
        return joined or self.feed or Feed()

    def result(self, timeout: float | None = None) -> T:
        """Return the value that the task returned, waiting for it at most `timeout` seconds.

        Raises:
            TimeoutError: It has not ended by then; it goes on.
            concurrent.futures.CancelledError: It was cancelled.
            InvalidValueError: It has not ended, and this is a callback of its own pool, which would wait for itself.
            Exception: What the task raised, as itself.
        """
        error = None
        try:
            # Not the base's `result`, which before Python 3.14 takes an error that is false for none.
            error = self.exception(timeout)
            if error is not None:
                raise error
            value: Any = self._result
            return value.fetch() if type(value) is Deferred else value  # type: ignore[no-any-return]
        finally:
            del self, error  # which the error, by its traceback, would hold, and they it

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result in an asyncio program, whose event loop goes on meanwhile.

        As with `asyncio.wrap_future`: if the coroutine that waits is cancelled, so is this. A value that is still elsewhere is
        fetched and opened in another thread.

        Example:
            >>> import asyncio
            >>> from raypool import parpool
            >>> async def main():
            ...     with parpool(2, profile="threads", quiet=True) as pool:
            ...         job = pool.parfeval(pow, 2, 10)
            ...         return await job
            >>> asyncio.run(main())
            1024
        """
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio  # which most need not wait for

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        self.add_done_callback(wake)
        try:
            await ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        if type(self._result) is Deferred:
            return await loop.run_in_executor(None, self.result)
        return self.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that the task ended with, None if it ended well, waiting at most `timeout` seconds.

        A value that has arrived and cannot be unpickled here counts as a `SerializationError`.
        """
        if self._state not in ENDED:
            self.check_wait(timeout)
        error = super().exception(timeout)
        if error is None and self._unopened is None:
            self._unopened = _error_of(self._result)
        return self._either(error)

    def _get_snapshot(self) -> tuple[bool, bool, T | None, BaseException | None]:
        """Return what asyncio asks for from Python 3.14 on: whether it is done, and cancelled, its result and its exception.

        The base's would hand out what stands for a value that is still elsewhere.
        """
        if not self.done():
            return False, False, None, None
        if self.cancelled():
            return True, True, None, None
        error = self.exception()
        return True, False, None if error is not None else self.result(), error

    def check_wait(self, timeout: float | None) -> None:
        """Make sure that this thread does not wait for what only it can bring to an end. For the pool, while that is to come.

        Raises:
            InvalidValueError: It would, for ever or until the time is up.
        """
        if timeout is not None and timeout <= 0:
            return
        for owner in self.owners:
            if owner.is_own_thread:
                raise InvalidValueError(
                    f"{self.name!r} cannot be waited for here: this is the thread of its own pool (the callback of a future runs "
                    "in it, say), which would wait for itself. Use raypool.after_each, or another thread."
                )

    def _either(self, error: BaseException | None) -> BaseException | None:
        """Return the error of the task, or why its value cannot be opened; an error may be false, one of `len` 0, say."""
        if error is not None or self._unopened is False:
            return error
        return self._unopened

    def start(self) -> bool:
        """Mark it as running; False if it was cancelled first. For the pool."""
        with self._condition:
            if self.cancelled():
                return False
            return self.set_running_or_notify_cancel()

    def notify_cancelled(self) -> None:
        """Tell those who wait for several futures that this one is cancelled; twice does nothing. For the pool."""
        with self._condition:
            if not self._is_notified:
                self._is_notified = True
                self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn(self)` when it has ended, at once if it has; what `fn` raises is logged and otherwise ignored."""
        super().add_done_callback(functools.partial(_call_back, fn))

    def cancel(self) -> bool:
        """Cancel it, also while it runs; return whether it is cancelled.

        For everybody here it is cancelled at once, and what it may still return is dropped. One that runs is interrupted where it
        is in its Python code (`TaskCancelled` is raised there), and its worker takes the next task. If it has not ended after the
        profile's `cancel_grace_s`, it is killed, and its worker replaced on the same GPU: `worker_replaced` says which it was.
        """
        with self._condition:
            if self.cancelled():
                return True
            if not self._turn_cancelled():
                return False
        self._invoke_callbacks()  # type: ignore[attr-defined]
        if self.on_ask is not None:
            self.on_ask(self)
        return True

    def _turn_cancelled(self) -> bool:
        """Do what the standard library does for a future that waits, also for one that runs; its callbacks find it complete."""
        if self._state == PENDING:
            self._state = IS_CANCELLED
        elif self._state == RUNNING and self.on_ask is not None:
            self._state = CANCELLED_AND_NOTIFIED
            self._is_notified = True
            for waiter in self._waiters:
                waiter.add_cancelled(self)
        else:
            return False
        self.finished_at = datetime.now(UTC)
        self._condition.notify_all()
        return True

    def request_stop(self) -> bool:
        """Ask the task to end early by itself: `current_task().should_stop` becomes true in it, and what it returns then counts.

        Returns:
            Whether it had not ended. One that waits still runs, and finds the wish from its first line on.

        Example:
            >>> from raypool import current_task, parpool
            >>> def train():
            ...     steps = 0
            ...     while not current_task().should_stop:
            ...         steps += 1
            ...     return "what I have"
            >>> with parpool(1, profile="threads", quiet=True) as pool:
            ...     job = pool.parfeval(train)
            ...     job.request_stop()
            ...     job.result()
            True
            'what I have'
        """
        if self.done():
            return False
        self.stop_requested = True
        if self.on_ask is not None:
            self.on_ask(self)
        return True

    def __repr__(self) -> str:
        where = "" if self.worker is None else f" on worker {self.worker}"
        return f"<Future {self.name!r}: {self.state}{where}>"

    def __reduce__(self) -> Any:
        raise InvalidTypeError("A future belongs to the process that made it. Send its result instead.")


def _call_back(fn: Callable[[Any], object], future: Any) -> None:
    try:
        fn(future)
    except Exception:
        raise  # the standard library logs it
    except BaseException as error:  # which it lets through, into the thread of the pool: that of `future.result()`, say
        if isinstance(error, TaskCancelled) and in_task():
            raise  # in a serial pool of a task: it means the task
        logger.exception("A callback of %r has failed.", future)


def _error_of(value: Any) -> BaseException | Literal[False]:
    if type(value) is not Deferred:
        return False
    try:
        value.fetch()
    except Exception as error:
        return error
    return False


def owners_of(futures: Iterable[Future[Any]]) -> tuple[Owner, ...]:
    """Return who must not wait for what comes after these, each once."""
    return tuple(dict.fromkeys(owner for future in futures for owner in future.owners))
