"""Futures of tasks, the results of `map`, and functions over several futures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Reversible, Sequence
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures._base import CANCELLED as IS_CANCELLED  # the states have no public names
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

from raypool.channel.feed import Feed, MetricsReport, Row, as_html, feed_of, report_of_row
from raypool.channel.queues import DataQueue, check_timeout
from raypool.channel.records import Missing, Values, function_name
from raypool.errors import (
    CANCELLED,
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    TaskCancelled,
    explains_calls,
    no_such_attribute,
    reason_of,
    told,
    whole_number,
)
from raypool.options import takes
from raypool.worker.running import in_task

if TYPE_CHECKING:
    import pandas as pd

    from raypool.engine.driver import Driver

T = TypeVar("T")


# --- lock of a future -----------------------------------------------------------------------------


class Meeting:
    """The lock of a future, and the lists of those that wait for it or are to be called.

    A `threading.Condition` takes ten times as much memory; this makes one once a thread waits.
    """

    __slots__ = ("_awaited", "_lock", "callbacks", "waiters")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._awaited: threading.Condition | None = None
        self.waiters: list[Any] = []
        self.callbacks: list[Any] = []

    def acquire(self) -> bool:
        """Take the lock."""
        return self._lock.acquire()

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified; the caller holds the lock."""
        if self._awaited is None:
            self._awaited = threading.Condition(self._lock)
        return self._awaited.wait(timeout)

    def notify_all(self) -> None:
        """Wake the waiting threads; the caller holds the lock."""
        if self._awaited is not None:
            self._awaited.notify_all()


_making = threading.RLock()
"""Held for an instant while a future makes its `Meeting`: one lock for all futures."""


def _renew_locks() -> None:
    # in a forked child: another thread of the parent may have held them
    global _making, _reading
    _making, _reading = threading.RLock(), threading.Lock()
    Deferred.taking = threading.Lock()
    dispatcher.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


logger = logging.getLogger("raypool")


# --- future of a task -----------------------------------------------------------------------------


class Deferred:
    """One of these values, fetched on first use, and from then on kept only here."""

    __slots__ = ("_position", "_value", "_values")

    taking = threading.Lock()  # one for all: it is held for an instant

    def __init__(self, values: Values, position: int) -> None:
        self._values: Values | None = values
        self._position = position
        self._value: Any = None

    def fetch(self) -> Any:
        """Return it."""
        values = self._values
        if values is not None:
            whole = values.get()
            with self.taking:
                if self._values is not None:  # nobody was quicker
                    # taken out of the list: who drops this, frees it
                    self._value, whole[self._position] = whole[self._position], None
                    self._values = None
        if type(self._value) is Missing:
            raise self._value.error
        return self._value


class Future(concurrent.futures.Future[T], Generic[T]):
    """The handle of a task: a `concurrent.futures.Future` with state, metrics and output.

    `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future` and `await` take it too.
    Callbacks run in the pool's own thread, which does nothing else meanwhile: keep them short. They
    cannot wait for futures of the same pool: `result`, `fetch_next` and the like raise an error,
    the standard library's functions would wait forever. Functions of `after_each` and `after_all`
    can.

    Attributes:
        name: The caller's name for the work, or the function's.
        worker: The number of the worker that ran it last, None before.
        attempts: How often it started; above 1 only after the loss of a worker or with `retry_on`.
        started_at: The start of its (last) run, None before.
        finished_at: Its end, None before.
        stop_requested: Whether `request_stop` was called.
        worker_replaced: Whether its cancellation cost the worker. False: it stopped, and the worker
            continues. True: it did not stop in time, and its worker was killed and replaced. None:
            not known yet, or it was not cancelled while it ran.
        peak_memory_bytes: The worker's peak memory on its (first) GPU while the task ran
            [bytes]; None before its end, or without one.
        read: Whether `fetch_next` or `fetch_outputs` has delivered it.
    """

    # few bytes, as many may be queued: its lock and its lists are made when they are needed
    __slots__ = (
        "_exception",
        "_is_notified",
        "_meeting",
        "_result",
        "_state",
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

    if not TYPE_CHECKING:
        __getattr__ = no_such_attribute

    def __init__(self, name: str, on_ask: Callable[[Future[T]], object] | None = None) -> None:
        # not the base's, which makes the lock and the lists now
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._meeting: Meeting | None = None
        self.name = name
        self.worker: int | None = None
        self.attempts = 0
        self._submitted_at = time.time()
        self.started_at: datetime | None = None
        self.finished_at: datetime | None = None
        self.read = False
        self.duration_s: float | None = None
        self.peak_memory_bytes: int | None = None
        # why its value can't be opened; None: not tried
        self._unopened: BaseException | Literal[False] | None = None
        self.stop_requested = False
        self.worker_replaced: bool | None = None
        # For the pool, from here on; `Driver.submit` sets the first three.
        self.on_ask = on_ask  # takes its requests, when it is cancelled or asked to stop
        self.owners: tuple[Driver, ...] = ()  # their threads end it, and must not wait for it
        self.task_id = -1
        self.feed: Feed | None = None  # made when the task says something: queued ones are many
        # waits for what it said before it ended; returns the feed if that is not its own
        self.catch_up: Callable[[], Feed | None] | None = None
        self.whole: Future[Any] | None = None  # shown instead of this: the training, of an attempt
        self._is_notified = False

    @property
    def _condition(self) -> Meeting:  # type: ignore[override]
        return self._meeting or self._meet()

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return (self._meeting or self._meet()).waiters

    @property
    def _done_callbacks(self) -> list[Any]:
        return (self._meeting or self._meet()).callbacks

    def _meet(self) -> Meeting:
        made = Meeting()
        with _making:
            if self._meeting is None:  # nobody was quicker
                self._meeting = made
            return self._meeting

    # The base takes the lock for these, and the driver asks for each call. Without the lock, the
    # state has to be set last.

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._state in (IS_CANCELLED, CANCELLED_AND_NOTIFIED)

    def running(self) -> bool:
        """Return whether it runs now."""
        return self._state == RUNNING

    def done(self) -> bool:
        """Return whether it has ended: with a value, an error, or by being cancelled."""
        return self._state in (FINISHED, IS_CANCELLED, CANCELLED_AND_NOTIFIED)

    @property
    def submitted_at(self) -> datetime:
        """When it was submitted."""
        return datetime.fromtimestamp(self._submitted_at, UTC)

    @property
    def state(self) -> str:
        """Its state: "queued", "running", "finished", "failed" or "cancelled"."""
        if self.cancelled():
            return "cancelled"
        if not self.done():
            return "running" if self.running() else "queued"
        return "finished" if self.error is None else "failed"

    @property
    def error(self) -> BaseException | None:
        """The exception that it ended with, None if there is none (yet). Never waits."""
        if not self.done() or self.cancelled():
            return None
        return self._either(super().exception())

    @property
    def reason(self) -> str | None:
        """Why it has no value, such as "cancelled" or "gpu out of memory"; None if it may have one.

        See `raypool.errors.reason_of` for all reasons. Never waits.
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
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics reported so far (`raypool.report`); complete once the task has ended.

        A row for each report, in order: `time` (UTC), `attempt`, then the metrics in the order in
        which they first appear. A metric with the name of one of those two is in "reported_NAME".

        Example:
            >>> from raypool import parpool, report
            >>> def train():
            ...     for step in range(3):
            ...         report(step=step, loss=0.5**step)
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     job = pool.parfeval(train)
            >>> job.metrics["loss"].tolist()
            [1.0, 0.5, 0.25]
        """
        return self._caught_up().metrics(None)

    @property
    def diary(self) -> str:
        """What the task has printed so far, to stdout and stderr; complete once it has ended.

        A task that runs again has the output of each attempt, separated by the line "[raypool: it
        runs again]". The newest MiB is kept; a first line says how much is missing. On Ray it is
        the Python output of all threads of the worker; with "threads" and "inline", of the task's
        own thread. Output of native code is not in it.

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
        """Return the task's value, waiting for it at most `timeout` seconds.

        Raises:
            TimeoutError: It has not ended by then; it keeps running.
            concurrent.futures.CancelledError: It was cancelled.
            InvalidValueError: It has not ended, and this is a callback of its own pool.
            Exception: The task's own exception.
        """
        __tracebackhide__ = True  # notebooks and pytest: only the user's own line
        error = None
        try:
            # Not the base's `result`, which before Python 3.14 takes an error that is false for
            # none.
            error = self.exception(timeout)
            if error is not None:
                raise error
            value: Any = self._result
            result: T = value.fetch() if type(value) is Deferred else value
            return result
        finally:
            # else the error's traceback would hold them, and they the error: a cycle
            del self, error

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result in an asyncio program; its event loop continues.

        As with `asyncio.wrap_future`, cancelling the coroutine cancels the task.

        Example:
            >>> import asyncio
            >>> from raypool import parpool
            >>> async def main():
            ...     with parpool(2, profile="threads", quiet=True) as pool:
            ...         return await pool.parfeval(pow, 2, 10)
            >>> asyncio.run(main())
            1024
        """
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio  # imported late: most programs do not need it

        if not self.done():
            self.check_wait(None)
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
        if type(self._result) is Deferred:  # fetched and opened elsewhere: it may take long
            return await loop.run_in_executor(None, self.result)
        return self.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the task's exception, None if it ended well, waiting at most `timeout` seconds.

        A value that has arrived and cannot be unpickled here counts as a `SerializationError`.
        """
        if not self.done():
            self.check_wait(timeout)
        error = super().exception(timeout)
        if error is None and self._unopened is None:
            self._unopened = _error_of(self._result)
        return self._either(error)

    def _get_snapshot(self) -> tuple[bool, bool, T | None, BaseException | None]:
        """Return whether it is done, and cancelled, its result and its exception."""
        # for asyncio, from Python 3.14 on: the base's would give away a `Deferred`
        if not self.done():
            return False, False, None, None
        if self.cancelled():
            return True, True, None, None
        error = self.exception()
        return True, False, None if error is not None else self.result(), error

    def check_wait(self, timeout: float | None) -> None:
        """Make sure that it can end while this thread waits for it. For the pool.

        Raises:
            InvalidValueError: Only this thread can end it.
            PoolClosedError: Only the process that this one was forked from can.
        """
        if timeout is not None and timeout <= 0:
            return
        for owner in self.owners:
            if owner.is_forked:
                raise PoolClosedError(
                    f"Cannot wait for {self.name!r} here: this process was forked from the one that"
                    " opened its pool, and only that one gets the result. Wait for it there."
                )
            if owner.is_own_thread:
                raise InvalidValueError(
                    f"Cannot wait for {self.name!r} here: this is the thread of its own pool (which"
                    " runs callbacks of futures), and it would wait for itself. Use"
                    " raypool.after_each, or another thread."
                )

    def _either(self, error: BaseException | None) -> BaseException | None:
        # not `or`: an error may be false, one of `len` 0, say
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
        """Tell those who wait for several futures that this one is cancelled. For the pool."""
        with self._condition:
            if not self._is_notified:
                self._is_notified = True
                self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn(self)` when it has ended; an exception of `fn` is logged and ignored."""
        super().add_done_callback(functools.partial(_call_back, fn))

    def add_report_callback(self, fn: Callable[[Future[T], MetricsReport], object]) -> None:
        """Call `fn(self, report)` for every `raypool.report` of the task, as it arrives.

        It begins with the reports that are already here. Reports arrive in order, a few hundredths
        of a second after they were made, and the last ones may arrive after the result. What `fn`
        raises is ignored, as in `add_done_callback`, and only the first failure is logged.

        Raises:
            InvalidTypeError: `fn` is not a function of a future and a report.

        Example:
            >>> from raypool import parpool, report
            >>> def train():
            ...     for epoch in range(3):
            ...         report(epoch=epoch, loss=0.5**epoch)
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     job = pool.parfeval(train)
            ...     job.add_report_callback(lambda job, report: print(report.metrics))
            {'epoch': 0, 'loss': 1.0}
            {'epoch': 1, 'loss': 0.5}
            {'epoch': 2, 'loss': 0.25}
        """
        if not (callable(fn) and takes(fn, (self, None))):
            raise InvalidTypeError(
                f"{fn!r} cannot be called with a future and a report. Pass a function of two"
                " arguments: fn(future, report)."
            )
        has_failed = False

        def pass_on(row: Row) -> None:
            nonlocal has_failed
            try:
                fn(self, report_of_row(row))
            except BaseException as error:  # also sys.exit(): the pool needs the thread
                if isinstance(error, TaskCancelled) and in_task():
                    raise  # in a serial pool of a task: it means the task
                if not has_failed:  # the same traceback for each report would fill a disk
                    logger.exception(
                        "A report callback of %r failed; it is still called for later reports, but"
                        " further failures are not logged.",
                        self,
                    )
                has_failed = True

        self._subscribe(lambda rows: self._pass_on(pass_on, rows))

    def _subscribe(self, listener: Callable[[list[Row]], object]) -> None:
        feed_of(self).subscribe(listener)

    def _pass_on(self, take: Callable[[Row], None], rows: list[Row]) -> None:
        def call() -> None:
            for row in rows:
                take(row)

        for owner in self.owners[:1]:
            owner.do(call)

    def cancel(self) -> bool:
        """Cancel it, even while it runs; return whether it is cancelled.

        It counts as cancelled at once, and a late return value is dropped. `TaskCancelled` is
        raised in its Python code if it runs, and its worker takes the next task. If it has not
        ended after the profile's `cancel_grace_s`, its worker is killed and replaced on the same
        GPU: `worker_replaced` says so.
        """
        with self._condition:
            if self.cancelled():
                return True
            is_queued = self._state == PENDING
            if not is_queued and (self._state != RUNNING or self.on_ask is None):
                return False
            self.finished_at = datetime.now(UTC)  # first: others read the state without the lock
            if is_queued:
                self._state = IS_CANCELLED
            else:
                # As the standard library does for one that waits; callbacks find it complete.
                self._state = CANCELLED_AND_NOTIFIED
                self._is_notified = True
                for waiter in self._waiters:
                    waiter.add_cancelled(self)
            self._condition.notify_all()
        # without the lock: callbacks may take it, and that of another future
        self._invoke_callbacks()  # type: ignore[attr-defined]
        if self.on_ask is not None:
            self.on_ask(self)
        return True

    def request_stop(self) -> bool:
        """Ask the task to end early, with a result: `current_task().should_stop` becomes true.

        Returns:
            Whether it had not ended. A queued task still runs, and finds the request from its first
            line on.

        Example:
            >>> from raypool import current_task, parpool
            >>> def train():
            ...     while not current_task().should_stop:
            ...         pass
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

    def _repr_html_(self) -> str:
        return as_html(repr(self), futures_frame([self]))

    def __reduce__(self) -> Any:
        raise InvalidTypeError(
            "A future belongs to the process that made it. Send its result instead."
        )


def futures_frame(futures: Sequence[Future[Any]]) -> pd.DataFrame:
    """Return a table of futures as they are now, for a notebook."""
    import pandas as pd

    return pd.DataFrame(
        {
            "name": [future.name for future in futures],
            "state": [future.state for future in futures],
            "worker": ["-" if future.worker is None else future.worker for future in futures],
            "attempts": [future.attempts for future in futures],
            "duration_s": pd.array(
                [future.running_duration_s for future in futures], dtype="float64"
            ),
            "error": ["-" if not future.error else told(future.error) for future in futures],
        }
    )


def _call_back(fn: Callable[..., object], *args: Any) -> None:
    try:
        fn(*args)
    except Exception:
        raise  # the standard library logs it
    except BaseException as error:
        # which it lets through, into the thread of the pool: that of `future.result()`, say
        if isinstance(error, TaskCancelled) and in_task():
            raise  # in a serial pool of a task: it means the task
        logger.exception("A callback of %r has failed.", args[0])


def _error_of(value: Any) -> BaseException | Literal[False]:
    if type(value) is not Deferred:
        return False
    try:
        value.fetch()
    except Exception as error:  # it runs the user's code, to unpickle the value
        return error
    return False


def owners_of(futures: Iterable[Future[Any]]) -> tuple[Driver, ...]:
    """Return the owners of these, each once."""
    return tuple(dict.fromkeys(owner for future in futures for owner in future.owners))


def joined_feed(futures: Iterable[Future[Any]]) -> Feed:
    """Return the reports and output of all of these, one after the other."""
    feed = Feed()
    for future in futures:
        feed.add_all_of(future._caught_up())
    return feed


# --- several futures as one -----------------------------------------------------------------------


class _Whole(Future[list[Any]]):
    """A future of the results of others: it runs while one of them does."""

    parts: Sequence[Future[Any]] = ()

    def _subscribe(self, listener: Callable[[list[Row]], object]) -> None:
        for part in self.parts:
            part._subscribe(listener)

    def running(self) -> bool:
        """Whether one of them runs, or has run, and it has not ended."""
        return not self.done() and any(part.running() or part.done() for part in self.parts)


class _Gathered:
    """The results of futures that have ended well, not fetched in the thread of the pool."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def get(self) -> list[Any]:
        """Return the list of them, as the only value."""
        return [[future.result() for future in self._futures]]


def cancel_each(futures: Reversible[Future[Any]]) -> None:
    """Cancel those that have not ended."""
    # the last first: a worker that becomes free would begin with the next that waits
    for future in reversed(futures):
        future.cancel()


def gather(futures: Sequence[Future[Any]], name: str) -> Future[list[Any]]:
    """Return a future of all their results; it fails, once all have ended, with the first error.

    Its metrics and its diary join theirs, one after the other.
    """

    def ask_parts(whole: Future[list[Any]]) -> None:
        if whole.cancelled():
            cancel_each(futures)
            whole.notify_cancelled()
        else:
            for future in futures:
                future.request_stop()

    whole = _Whole(name, on_ask=ask_parts)
    whole.parts = futures
    whole.owners = owners_of(futures)
    whole.catch_up = functools.partial(joined_feed, futures)
    if not futures:
        whole.set_result([])
        return whole

    def end() -> None:
        if not whole.start():
            return
        begins = (future.started_at for future in futures if future.started_at is not None)
        whole.started_at, whole.finished_at = min(begins, default=None), datetime.now(UTC)
        whole.attempts = max(future.attempts for future in futures)
        # `error`, not `exception`: that fetches values, and this is the thread of the pool
        errors = (CancelledError() if each.cancelled() else each.error for each in futures)
        error = next((each for each in errors if each is not None), None)
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            if error is None:
                whole.set_result(Deferred(_Gathered(futures), 0))  # type: ignore[arg-type]
            else:
                whole.set_exception(error)

    when_ended(futures, end)
    return whole


def when_ended(futures: Sequence[Future[Any]], call: Callable[[], object]) -> None:
    """Call this when all have ended, in the thread that ends the last one."""
    if not futures:
        call()
    missing = len(futures)
    counting = threading.Lock()  # they may end in several threads at once

    def note(_: Any) -> None:
        nonlocal missing
        with counting:
            missing -= 1
            if missing:
                return
        call()

    for future in futures:
        future.add_done_callback(note)


# --- results of `map` -----------------------------------------------------------------------------


P = ParamSpec("P")


class MapResults(Iterator[T], Generic[T]):
    """The results of `PoolView.map`, also after a failed call.

    The remaining calls are cancelled by `close`, when the time is up, and when the iterator is
    dropped after its first result.

    Args:
        submit: Submits the call with these arguments.
        rows: The arguments of each call.
        timeout: When `next` stops waiting [s], from now; None: never.
        buffersize: How many calls are submitted ahead of the results; None: all, now.

    Raises:
        SerializationError: The arguments of a call cannot be sent; all calls are cancelled.
    """

    def __init__(
        self,
        submit: Callable[[tuple[Any, ...]], Future[T]],
        rows: Iterator[tuple[Any, ...]],
        timeout: float | None,
        buffersize: int | None,
    ) -> None:
        self._has_begun = False
        self._futures: deque[Future[T]] = deque()
        self._timeout = timeout
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        # holds the pool and the user's iterables
        self._calls: Iterator[Future[T]] = map(submit, rows)
        self._why: Exception | None = None  # raised where the next call would have been
        try:
            while (buffersize is None or len(self._futures) < buffersize) and self._hand_in():
                pass
        except BaseException:
            self.close()
            raise

    def _hand_in(self) -> bool:
        """Submit the next call; return whether there was one."""
        count = len(self._futures)
        # no Ctrl-C can come between: a call that is not in here is lost
        self._futures.extend(itertools.islice(self._calls, 1))
        if len(self._futures) == count:
            self._calls = iter(())
            return False
        return True

    def __next__(self) -> T:
        self._has_begun = True
        try:
            self._hand_in()
        except Exception as error:
            # of the user's iterable, or since nothing can be submitted any more
            self._calls, self._why = iter(()), error
        except BaseException:
            # Ctrl-C: a row that was drawn in this instant would be missing without a word
            self.close()
            raise
        if not self._futures:
            self._raise_end()
        future = self._futures.popleft()
        try:
            return future.result(
                None if self._ends_at is None else self._ends_at - time.monotonic()
            )
        except StopIteration as error:
            raise RuntimeError(
                "A call of map raised StopIteration, which would end the loop over the results."
            ) from error
        except TimeoutError as error:
            if error is future.error:  # the call's own
                raise
            self._futures.appendleft(future)
            self.close()
            raise TimeoutError(
                f"map() had no result {self._timeout:g} s after its call. The remaining calls are"
                " cancelled."
            ) from None
        except BaseException:
            if not future.done():  # Ctrl-C
                self._futures.appendleft(future)
                self.close()
            raise
        finally:
            # the traceback of an error would hold them, and what is left is cancelled when nobody
            # does
            del self, future

    def _raise_end(self) -> NoReturn:
        why, self._why = self._why, None
        try:
            raise StopIteration if why is None else why
        finally:
            del why

    def close(self) -> None:
        """Cancel the remaining calls; no more results follow."""
        self._calls, self._why = iter(()), None
        while self._futures:
            # the last first, as `cancel_each` does; if Ctrl-C comes, the rest is still here
            self._futures.pop().cancel()

    def __del__(self) -> None:
        if self._has_begun:
            self.close()


def unless_interrupted(submit: Callable[P, Future[T]]) -> Callable[P, Future[T]]:
    """Let Ctrl-C in a call that runs inline end the submission of further calls."""

    def submit_unless(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = submit(*args, **kwargs)
        try:
            # it means all of the calls
            if isinstance(future.error, KeyboardInterrupt):
                raise future.error
            return future
        finally:
            del future  # the traceback of its error would hold it

    return submit_unless


def checked_buffersize(chunksize: Any, buffersize: Any) -> int | None:
    """Return `buffersize` as an `int`; refuse the sizes that the standard library refuses."""
    if not isinstance(chunksize, int) and whole_number(chunksize) is None:  # it takes True
        raise InvalidTypeError(f"chunksize must be an integer. It is {chunksize!r}.")
    if chunksize < 1:
        raise InvalidValueError(f"chunksize must be >= 1. It is {chunksize!r}.")
    if buffersize is None:
        return None
    if not isinstance(buffersize, int) and whole_number(buffersize) is None:
        raise InvalidTypeError(f"buffersize must be an integer or None. It is {buffersize!r}.")
    if buffersize < 1:
        raise InvalidValueError(f"buffersize must be None or > 0. It is {buffersize!r}.")
    return int(buffersize)


# --- functions over several futures ---------------------------------------------------------------


_reading = threading.Lock()
"""Held while `fetch_next` chooses: no result is delivered twice, to two threads either."""


@explains_calls
def fetch_next(
    futures: Sequence[Future[T]] | Future[T], timeout_s: float | None = None
) -> tuple[int, T]:
    """Return the position and the result of the next future that ends and has not been read.

    Args:
        futures: Futures of any pools, also those of `after_each`; a single one counts as a list.
        timeout_s: Longest wait [s]; None waits forever.

    Raises:
        ValueError: All have been read.
        TimeoutError: None has ended in time; nothing is marked as read.
        InvalidValueError: None has ended, and this is a callback of the pool of one of them.
        Exception: The task's own exception, or `CancelledError`; the future counts as read.

    Source:
        MATLAB R2025b, fetchNext.

    Example:
        >>> from raypool import parpool
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     fetch_next([pool.parfeval(abs, -3)])
        (0, 3)
    """
    checked = _checked(futures)
    check_timeout(timeout_s)
    until = None if timeout_s is None else time.monotonic() + float(timeout_s)
    while True:
        with _reading:
            unread = [future for future in checked if not future.read]
            if not unread:
                raise InvalidValueError(
                    "fetch_next() has nothing to return: every future in the list was already read"
                    " by fetch_next() or fetch_outputs()."
                    if checked
                    else "fetch_next() has nothing to return: the list of futures is empty."
                )
            ended = [future for future in unread if future.done()]
            if ended:
                try:
                    first = min(ended, key=attrgetter("finished_at"))
                except TypeError:  # one has no time yet: it ends right now
                    now = datetime.now(UTC)
                    first = min(ended, key=lambda future: future.finished_at or now)
                first.read = True
                break
        left_s = None if until is None else max(0.0, until - time.monotonic())
        if not _wait(unread, left_s, concurrent.futures.FIRST_COMPLETED):
            raise TimeoutError(
                f"None of {len(unread)} futures has ended within {timeout_s} s; they keep running."
            )
    try:
        return checked.index(first), first.result()
    except BaseException as error:
        first.read = _is_outcome(error, [first])  # not if Ctrl-C came while its value was fetched
        raise


@explains_calls
def fetch_outputs(futures: Sequence[Future[T]] | Future[T], stack: bool = False) -> Any:
    """Wait for all, mark them as read, and return their results in the order of `futures`.

    If the wait is interrupted (Ctrl-C), none is marked.

    Args:
        futures: Futures of any pools, also those of `after_each`; a single one counts as a list.
        stack: Return one NumPy array, the results one below the other, instead of a list.

    Raises:
        InvalidValueError: The shapes of the results do not stack (each future still has its own),
            or there is nothing to stack.
        Exception: The first exception among them.

    Source:
        MATLAB R2025b, fetchOutputs.

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     fetch_outputs([pool.parfeval(abs, x) for x in (-3, 4)])
        [3, 4]
    """
    checked = _checked(futures)
    if stack and not checked:
        raise InvalidValueError(
            "fetch_outputs(stack=True) has nothing to stack: the list of futures is empty."
        )
    are_read = True
    try:
        results = [future.result() for future in checked]
    except BaseException as error:
        are_read = _is_outcome(error, checked)
        raise
    finally:
        if are_read:
            for future in checked:
                future.read = True
    if not stack:
        return results
    import numpy as np

    rows = [np.atleast_2d(np.asarray(result)) for result in results]
    widths = {row.shape[1:] for row in rows}
    if len(widths) > 1:
        raise InvalidValueError(
            f"The results do not stack: their rows have the shapes {sorted(widths)}. Use"
            " stack=False for a list."
        )
    return np.concatenate(rows)


@explains_calls
def wait(futures: Sequence[Future[Any]] | Future[Any], timeout_s: float | None = None) -> bool:
    """Wait at most `timeout_s` seconds until all have ended; return whether they have.

    Their errors are not raised here. A single future counts as a list of one.

    Raises:
        InvalidValueError: This is a callback of the pool of one of them, which would wait for
            itself.

    Source:
        MATLAB R2025b, wait.

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     wait([pool.parfeval(divmod, 1, 0)])
        True
    """
    check_timeout(timeout_s)
    return _wait(_checked(futures), timeout_s)


@explains_calls
def after_each(
    futures: Sequence[Future[Any]] | Future[Any], fn: Callable[[Any], T], pass_future: bool = False
) -> list[Future[T]]:
    """Call `fn(value)` here when each of these has ended; return futures of these calls.

    One thread of this process makes the calls, one after the other, in the order in which the
    futures end: `fn` may write to a file or draw without a lock. A future that fails or is
    cancelled is skipped, and the new one ends with the same error, or cancelled. A call can be
    cancelled until it begins.

    Args:
        futures: Futures of any pools, also those of `after_each`; a single one counts as a list.
        fn: A function of a value. It cannot wait for futures of this kind: its thread would wait
            for itself.
        pass_future: Pass `fn` the futures themselves; then none is skipped.

    Raises:
        InvalidTypeError: An input is not a future, or `fn` is not callable. An exception of `fn` is
            the new future's.

    Source:
        MATLAB R2025b, afterEach (which returns one future for all).

    Example:
        >>> from raypool import fetch_outputs, parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     squares = [pool.parfeval(pow, x, 2) for x in (1, 2, 3)]
        ...     fetch_outputs(after_each(squares, lambda square: square + 0.5))
        [1.5, 4.5, 9.5]
    """
    _check_callable(fn)
    _check_pass_future(pass_future)
    return [_after_one(future, fn, pass_future) for future in _checked(futures)]


@explains_calls
def after_all(
    futures: Sequence[Future[Any]] | Future[Any], fn: Callable[[Any], T], pass_future: bool = False
) -> Future[T]:
    """Call `fn(values)` here when all of these futures have ended; return a future of that call.

    `values` has their values in order, without those that failed or were cancelled. The call is
    made by the thread of `after_each`.

    Args:
        futures: Futures of any pools, also those of `after_each`. For a single one, `fn` is called
            with its value, and not at all if it fails.
        fn: A function of a list of values.
        pass_future: Pass `fn` the list of the futures (or the single one) instead.

    Raises:
        InvalidTypeError: An input is not a future, or `fn` is not callable. An exception of `fn` is
            the new future's.

    Source:
        MATLAB R2025b, afterAll (which does not call `fn` if one has failed).

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     squares = [pool.parfeval(pow, x, 2) for x in (1, 2, 3)]
        ...     after_all(squares, sum).result()
        14
    """
    _check_callable(fn)
    _check_pass_future(pass_future)
    if isinstance(futures, Future):
        return _after_one(futures, fn, pass_future)
    checked = _checked(futures)

    def call() -> T:
        return fn(
            checked
            if pass_future
            else [
                future.result()
                for future in checked
                if not future.cancelled() and future.exception() is None
            ]
        )

    follower: _Follower[T] = _Follower(function_name(fn))
    follower.owners = owners_of(checked)
    run = functools.partial(dispatcher.put, functools.partial(follower.run, call))
    when_ended(checked, run)
    return follower


def _check_pass_future(pass_future: Any) -> None:
    if not isinstance(pass_future, bool):
        raise InvalidTypeError(
            f"pass_future must be True or False, not {pass_future!r}. after_each and after_all take"
            " no number of outputs, unlike MATLAB's afterEach and afterAll."
        )


def _after_one(future: Future[Any], fn: Callable[[Any], T], pass_future: bool) -> Future[T]:
    follower: _Follower[T] = _Follower(f"{function_name(fn)} of {future.name}")
    follower.owners = future.owners

    def run() -> None:
        if future.cancelled() and not pass_future:
            follower.cancel()
        else:
            follower.run(lambda: fn(future if pass_future else future.result()))

    future.add_done_callback(lambda _: dispatcher.put(run))
    return follower


class _Follower(Future[T]):
    """A future of a call that runs in this process when other futures have ended."""

    def cancel(self) -> bool:
        """Cancel it if its call has not begun; return whether it is cancelled."""
        if not super().cancel():  # one that runs: what runs in this process cannot be stopped
            return False
        self.notify_cancelled()
        return True

    def run(self, call: Callable[[], T]) -> None:
        """Make the call, unless it was cancelled."""
        if not self.start():
            return
        self.attempts = 1
        self.started_at = datetime.now(UTC)
        before = time.perf_counter()
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as raised:
            # also one that would end this thread: other futures wait for it
            error = raised
        self.duration_s = time.perf_counter() - before
        self.finished_at = datetime.now(UTC)
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def check_wait(self, timeout: float | None) -> None:
        """Refuse to wait in the thread of the calls, or of a pool whose future this comes after.

        Raises:
            InvalidValueError: It would wait forever.
        """
        if timeout is None and dispatcher.is_here:
            raise InvalidValueError(
                f"The function of an after_each or after_all waits for {self.name!r}, which can"
                " only run after it. Chain them instead: pass its future to after_all."
            )
        super().check_wait(timeout)


class _Dispatcher:
    """Makes calls one after the other, in a thread that ends when none is left."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        # reentrant: the collector may end a pool, and so call `put`, within `put`
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Replace the lock, in a forked child: another thread of the parent may have held it."""
        self._lock = threading.RLock()

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return threading.current_thread() is self._thread

    def finish(self, timeout_s: float) -> None:
        """Wait for the calls made now, for so long at most."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise."""
        with self._lock:
            self._calls.append(call)
            # in a forked child it is not alive
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(
                target=self._make_calls,
                name="raypool-callbacks",
                daemon=False,  # the interpreter waits for it; for a later one, `finish` does
            )
            try:
                self._thread.start()
                return
            except RuntimeError:  # the interpreter ends, or the system has no thread left
                self._thread = threading.current_thread()
        self._make_calls()

    def _make_calls(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
            call()
            del call  # so that a waiting thread keeps nothing alive


dispatcher = _Dispatcher()
"""Makes the calls of `after_each` and `after_all`."""


def _wait(
    futures: Sequence[Future[Any]],
    timeout_s: float | None,
    until: str = concurrent.futures.ALL_COMPLETED,
) -> bool:
    """Return whether all have ended in time, or one of them with `FIRST_COMPLETED`."""
    # `concurrent.futures.wait` would wait until the pool has noted a cancellation: this may be the
    # pool's thread, or a forked child, which has no such thread
    left = [future for future in futures if not future.done()]
    is_one_enough = until == concurrent.futures.FIRST_COMPLETED
    if not left or (is_one_enough and len(left) < len(futures)):
        return True
    for future in left:
        future.check_wait(timeout_s)
    if timeout_s is not None:  # Python refuses longer waits, and those of NumPy's float32
        timeout_s = min(float(timeout_s), threading.TIMEOUT_MAX)
    done, not_done = concurrent.futures.wait(left, timeout_s, until)
    return bool(done) if is_one_enough else not not_done


def _is_outcome(error: BaseException, futures: Iterable[Future[Any]]) -> bool:
    """Whether one of these has ended with it, and not the wait for it (by Ctrl-C, say)."""
    return isinstance(error, CancelledError) or any(error is each.error for each in futures)


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise InvalidTypeError(f"{fn!r} is not callable. Pass a function of one argument.")


def _checked(futures: Iterable[Future[T]] | Future[T]) -> list[Future[T]]:
    if isinstance(futures, DataQueue):  # to iterate over it would wait for its values
        raise InvalidTypeError(
            f"{futures!r} has values, not futures. Call a function for each of them with"
            " queue.after_each(fn)."
        )
    checked = list(futures) if isinstance(futures, Iterable) else [futures]
    if all(issubclass(kind, Future) for kind in set(map(type, checked))):
        return checked
    stranger = next(future for future in checked if not isinstance(future, Future))
    raise InvalidTypeError(f"{stranger!r} is not a future of a pool.")
