"""What the verbs of `raypool.interop.multiprocessing.Pool` return, and the thread that calls back."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import multiprocessing
import multiprocessing.pool
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from raypool.errors import InvalidValueError, RemoteTraceback, SerializationError
from raypool.futures import Future
from raypool.gathered import cancel_each

T = TypeVar("T")

Callback = Callable[[Any], object]

logger = logging.getLogger("raypool")


class Job(Protocol):
    """What a verb has handed in, as long as not all of it has ended."""

    def finish(self) -> None:
        """Take it that all of it has ended; called in the collector's thread."""

    def hurry(self) -> None:
        """Hand in what is left without waiting for somebody to take results."""

    def stop(self) -> None:
        """Hand in nothing more."""

    def cancel(self) -> None:
        """Hand in nothing more, and cancel what was handed in."""


class Collector:
    """Brings outcomes here and calls back, one after the other, in a thread of its own, until it is closed and none is left.

    It holds its pool by the jobs that have not ended only.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: dict[Job, None] = {}
        self._changed = threading.Condition()
        self._at_end: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._live, name="raypool-collector", daemon=True)
        self.thread.start()

    def open(self, job: Job) -> None:
        """Take in a job of which something has been handed in, or will be.

        Raises:
            ValueError: It was closed meanwhile: nobody would finish the job.
        """
        with self._changed:
            if self._at_end is not None:
                raise ValueError("Pool not running")
            self._open[job] = None

    def note_ended(self, job: Job) -> None:
        """Take it that all of a job has ended; from any thread, and at once."""
        self._ended.put(job)

    def jobs(self) -> list[Job]:
        """Return those that have not ended."""
        with self._changed:
            return list(self._open)

    def close(self, at_end: Callable[[], object]) -> None:
        """Take no more jobs; call something when the last has ended."""
        with self._changed:
            self._at_end = at_end
        self._ended.put(None)

    def check_wait(self, timeout: float | None = None) -> None:
        """Raise InvalidValueError in a callback: who waits for a job there waits for itself, for ever or until the time is up."""
        if threading.current_thread() is self.thread and (timeout is None or timeout > 0):
            raise InvalidValueError(
                "A callback cannot wait for results of its pool, or join it: the pool would wait for itself. "
                "Give what is waited for a callback too."
            )

    def _live(self) -> None:
        while self._at_end is None or self._open:
            job = self._ended.get()
            if job is not None:
                job.finish()
                with self._changed:
                    self._open.pop(job, None)
            del job  # it holds the pool
        self._at_end()


def outcome_of(future: Future[Any]) -> Any:
    """Return the value of a call that has ended, or raise what it has raised, in the manner of the standard pool."""
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise concurrent.futures.CancelledError(f"{future.name} was cancelled, as all is by terminate().") from None
    except SerializationError as error:
        raise multiprocessing.pool.MaybeEncodingError(error, error.what) from error  # type: ignore[attr-defined]
    except BaseException as error:
        if type(error.__cause__) is RemoteTraceback:
            error.__cause__ = multiprocessing.pool.RemoteTraceback(str(error.__cause__))  # type: ignore[attr-defined]
        raise
    finally:
        del future  # the traceback of its error would hold it


def only(values: list[Any]) -> Any:
    """Return the value of the only call."""
    return values[0]


def joined(chunks: list[list[Any]]) -> list[Any]:
    """Return the values of all calls of a `map`."""
    return list(itertools.chain.from_iterable(chunks))


class Gathering(Generic[T]):
    """The calls of one `apply_async` or `map_async`, and their result when all of them have ended.

    Args:
        pool: Kept from being collected until then.
        collector: Who calls back.
        futures: The calls.
        assemble: Makes the result from their values.
        callback: Called with the result.
        error_callback: Called with the error.

    Attributes:
        collector: The same.
        ended: Set when all have ended and the callback was called.
        is_success: Whether `value` is the result; else it is the error.

    Raises:
        ValueError: The pool was closed; the calls are cancelled.
    """

    def __init__(
        self,
        pool: object,
        collector: Collector,
        futures: Sequence[Future[Any]],
        assemble: Callable[[list[Any]], T],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        self._pool: object = pool
        self.collector = collector
        self._futures = futures
        self._assemble = assemble
        self._callbacks = (error_callback, callback)
        self.ended = threading.Event()
        self.is_success = False
        self.value: Any = None
        self._missing = len(futures)
        self._lock = threading.Lock()
        try:
            collector.open(self)
        except ValueError:
            self.cancel()
            raise
        for future in futures:
            future.add_done_callback(self._note)
        if not futures:
            collector.note_ended(self)

    def _note(self, _: Any) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        self.collector.note_ended(self)

    def finish(self) -> None:
        """Fetch the values, and call back."""
        try:
            self.value, self.is_success = self._assemble([outcome_of(future) for future in self._futures]), True
        except BaseException as error:
            self.value = error
        self._futures = ()
        callback = self._callbacks[self.is_success]
        self._callbacks = (None, None)
        if callback is not None:
            try:
                callback(self.value)
            except BaseException:
                logger.exception("A callback of a pool, %r, has failed; nothing else is harmed.", callback)
        self._pool = None  # before anybody goes on: who drops the pool then is the last to hold it
        self.ended.set()

    def hurry(self) -> None:
        """Do nothing: all was handed in."""

    def stop(self) -> None:
        """Do nothing: all was handed in."""

    def cancel(self) -> None:
        """Cancel what has not ended."""
        cancel_each(self._futures)


class AsyncResult(Generic[T]):
    """The result of one call, or of the calls of one `map`, which may not be there yet.

    Args:
        gathering: The calls.

    Source:
        multiprocessing.pool.AsyncResult.

    Example:
        >>> from raypool.interop.multiprocessing import Pool
        >>> with Pool(2, profile="threads") as pool:
        ...     result = pool.map_async(abs, [-1, -2])
        ...     result.get(timeout=10)
        ...     result.ready(), result.successful()
        [1, 2]
        (True, True)
    """

    def __init__(self, gathering: Gathering[T]) -> None:
        self._gathering = gathering

    def ready(self) -> bool:
        """Return whether all calls have ended."""
        return self._gathering.ended.is_set()

    def successful(self) -> bool:
        """Return whether they ended without an exception.

        Raises:
            ValueError: They have not ended.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._gathering.is_success

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls have ended and the callback was called, at most `timeout` seconds.

        Raises:
            InvalidValueError: This is a callback of the same pool: it would wait for itself.
        """
        if not self.ready():
            self._gathering.collector.check_wait(timeout)
        self._gathering.ended.wait(timeout)

    def get(self, timeout: float | None = None) -> T:
        """Return the result; wait for it at most `timeout` seconds.

        Raises:
            multiprocessing.TimeoutError: It is not there by then; the calls go on.
            concurrent.futures.CancelledError: The pool was terminated.
            multiprocessing.pool.MaybeEncodingError: A value could not be sent back.
            Exception: What the first of the calls that have failed has raised, as itself; its cause is the remote traceback.
        """
        self.wait(timeout)
        if not self.ready():
            raise multiprocessing.TimeoutError(f"The result had not come after {timeout:g} s; the work goes on.")
        if self._gathering.is_success:
            return self._gathering.value  # type: ignore[no-any-return]
        try:
            raise self._gathering.value
        finally:
            del self  # the traceback of the error would hold it
