"""Results of `raypool.interop.multiprocessing.Pool`: `AsyncResult`, `IMapIterator`, and
callbacks.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import multiprocessing
import multiprocessing.pool
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from raypool.errors import InvalidValueError, RemoteTraceback, SerializationError
from raypool.futures import Future, cancel_each

T = TypeVar("T")

Callback = Callable[[Any], object]

logger = logging.getLogger("raypool")


class Unfinished(Protocol):
    """The submitted work of a verb that has not ended."""

    def finish(self) -> None:
        """Finish, after all calls have ended; called in the collector's thread."""

    def hurry(self) -> None:
        """Submit the rest without waiting for results to be taken."""

    def stop(self) -> None:
        """Submit nothing more."""

    def cancel(self) -> None:
        """Submit nothing more, and cancel the submitted calls."""


class Collector:
    """Brings outcomes here and calls back, one after the other, in a thread of its own, until it is
    closed and none is left.

    Only unfinished jobs keep its pool alive.
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Unfinished | None] = queue.SimpleQueue()
        self._open: dict[Unfinished, None] = {}
        self._changed = threading.Condition()
        self._at_end: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._live, name="raypool-collector", daemon=True)
        self.thread.start()

    def open(self, job: Unfinished) -> None:
        """Take in a job of which something has been handed in, or will be.

        Raises:
            ValueError: It was closed meanwhile: nobody would finish the job.
        """
        with self._changed:
            if self._at_end is not None:
                raise ValueError("Pool not running")
            self._open[job] = None

    def note_ended(self, job: Unfinished) -> None:
        """Take it that all of a job has ended; from any thread, and at once."""
        self._ended.put(job)

    def jobs(self) -> list[Unfinished]:
        """Return those that have not ended."""
        with self._changed:
            return list(self._open)

    def close(self, at_end: Callable[[], object]) -> None:
        """Take no more jobs; call `at_end` when the last has ended."""
        with self._changed:
            self._at_end = at_end
        self._ended.put(None)

    def check_wait(self, timeout: float | None = None) -> None:
        """Raise InvalidValueError in a callback, where a wait for a job would wait for itself."""
        if threading.current_thread() is self.thread and (timeout is None or timeout > 0):
            raise InvalidValueError(
                "A callback cannot wait for results of its pool, or join it: the pool would wait"
                " for itself. Give what is waited for a callback too."
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
    """Return the value of an ended call, or raise its error, as the standard pool does."""
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise concurrent.futures.CancelledError(
            f"{future.name} was cancelled, as all is by terminate()."
        ) from None
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


class CallGroup(Generic[T]):
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
            for future in futures:
                future.add_done_callback(self._note)
        except BaseException as error:
            self.cancel()
            if not isinstance(error, ValueError):  # Ctrl-C: not all calls would tell of their end
                collector.note_ended(self)
            raise
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
            self.value, self.is_success = (
                self._assemble([outcome_of(future) for future in self._futures]),
                True,
            )
        except BaseException as error:
            self.value = error
        self._futures = ()
        callback = self._callbacks[self.is_success]
        self._callbacks = (None, None)
        if callback is not None:
            try:
                callback(self.value)
            except BaseException:
                logger.exception(
                    "A callback of a pool, %r, has failed; nothing else is harmed.", callback
                )
        self._pool = None  # first: then a waiter that drops the pool holds the last reference
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

    def __init__(self, gathering: CallGroup[T]) -> None:
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
            Exception: What the first of the calls that have failed has raised, as itself; its cause
                is the remote traceback.
        """
        self.wait(timeout)
        if not self.ready():
            raise multiprocessing.TimeoutError(
                f"The result had not come after {timeout:g} s; the work goes on."
            )
        if self._gathering.is_success:
            return self._gathering.value  # type: ignore[no-any-return]
        try:
            raise self._gathering.value
        finally:
            del self  # the traceback of the error would hold it


# --- results of `imap` and `imap_unordered`, and the thread that draws items ----------------------


class IMapIterator(Iterator[T], Generic[T]):
    """The results of `imap` or `imap_unordered`: brought here one by one, while a thread draws from
    the iterable.

    When nobody holds it any more, what was drawn runs on and its results are thrown away. If
    results were taken from it, a generator is drawn no further; if none were, all of it is, as of a
    list.

    Args:
        drawing: Who hands in the calls.

    Source:
        multiprocessing.pool.IMapIterator.

    Example:
        >>> import itertools
        >>> from raypool.interop.multiprocessing import Pool
        >>> with Pool(2, profile="threads") as pool:
        ...     results = pool.imap(abs, itertools.count(-2))
        ...     next(results), results.next(timeout=10)
        (2, 1)
    """

    def __init__(self, drawing: Drawing[T]) -> None:
        self._drawing = drawing
        self._has_begun = False

    def __next__(self) -> T:
        try:
            return self.next()
        finally:
            del self  # the traceback of an error would hold it

    def next(self, timeout: float | None = None) -> T:
        """Return the next result; wait for it at most `timeout` seconds.

        What the iterable has raised comes after the results of what it gave before; and so does the
        `UnpicklableError` of an item that cannot be sent. After a call that has failed, the results
        of the next ones follow.

        Raises:
            StopIteration: There are no more.
            multiprocessing.TimeoutError: It is not there by then; the calls go on.
            Exception: What the call has raised, as itself; its cause is the remote traceback.
        """
        self._has_begun = True
        try:
            return self._drawing.take(timeout)
        finally:
            del self  # the traceback of an error would hold it

    def __del__(self) -> None:
        self._drawing.forget(self._has_begun)


class Drawing(Generic[T]):
    """Draws from an iterable in a thread of its own, and hands in a call for each entry.

    Args:
        pool: Kept from being collected until all has ended.
        collector: Who is told when all has ended.
        submit: Hands in the call for an entry of `calls`.
        calls: What the calls are made with, drawn one by one.
        is_chunked: Each call gives a list of results, not one.
        is_ordered: The results come in the order of the calls, not in that in which they end.
        most_ahead: So many calls are handed in at most beyond those of which the results were
            taken; None: any number.

    Raises:
        ValueError: The pool was closed.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        pool: object,
        collector: Collector,
        submit: Callable[[Any], Future[Any]],
        calls: Iterator[Any],
        *,
        is_chunked: bool,
        is_ordered: bool,
        most_ahead: int | None,
    ) -> None:
        self._pool: object = pool
        self._collector = collector
        self._is_chunked = is_chunked
        self._is_ordered = is_ordered
        self._most_ahead = most_ahead
        self._is_as_taken = most_ahead is not None
        self._changed = threading.Condition()
        self._pending: OrderedDict[Future[Any], None] = OrderedDict()
        self._ready: deque[Future[Any]] = deque()
        self._values: deque[T] = deque()  # of the last call that was taken
        self._why: BaseException | None = None  # raised after what was drawn before
        self._is_drawn = False  # no more calls are submitted
        self._is_forgotten = False  # no one takes results
        try:
            collector.open(self)
            threading.Thread(
                target=self._draw, args=(submit, calls), name="raypool-imap", daemon=True
            ).start()
        except BaseException:  # Ctrl-C, say: nobody draws
            self._end(None)
            raise

    # --- drawing thread ---------------------------------------------------------------------------

    def _draw(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> None:
        why = None
        try:
            while self._wait_for_room() and self._hand_in(submit, calls):
                pass
        except BaseException as error:  # of the user's iterable, or of an item that cannot be sent
            why = error
        try:
            self._end(why)
        finally:
            # the traceback of the error would hold them, and by them the pool
            del self, submit, calls, why

    def _wait_for_room(self) -> bool:
        """Wait until another call may be handed in; False if none may."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_drawn or self._has_room())
            return not self._is_drawn

    def _has_room(self) -> bool:
        return self._most_ahead is None or len(self._pending) + len(self._ready) < self._most_ahead

    def _hand_in(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> bool:
        """Hand in the next call; False if there is none, or nobody wants any more of them."""
        try:
            entry = next(calls, self)
            if entry is self:
                return False
            future = submit(entry)  # it may take its time, in which results are taken
            with self._changed:
                is_wanted = not self._is_drawn
                self._pending[future] = None
            future.add_done_callback(self._note)
            if not is_wanted:
                future.cancel()
            return is_wanted
        finally:
            del self, submit, calls

    def _note(self, future: Any) -> None:
        with self._changed:
            if self._is_ordered:
                while self._pending and (first := next(iter(self._pending))).done():
                    self._move(first)
            elif future in self._pending:
                self._move(future)
            self._changed.notify_all()
            is_ended = self._is_drawn and not self._pending
        if is_ended:
            self._collector.note_ended(self)

    def _move(self, future: Future[Any]) -> None:
        del self._pending[future]
        if not self._is_forgotten:
            self._ready.append(future)

    def _end(self, why: BaseException | None) -> None:
        """Hand in nothing more, and raise `why` where the next result would have been."""
        with self._changed:
            if not self._is_drawn:
                self._is_drawn, self._why = True, None if self._is_forgotten else why
            self._changed.notify_all()
            is_ended = not self._pending
        if is_ended:  # else the last call ends it: the drawing thread may wait forever
            self._collector.note_ended(self)

    # --- for the pool -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Let go of the pool."""
        self._pool = None

    def hurry(self) -> None:
        """Draw all that is left, however far ahead."""
        with self._changed:
            if not self._is_forgotten:
                self._most_ahead = None
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand in nothing more."""
        self._end(
            concurrent.futures.CancelledError(
                "The pool was terminated before all of the iterable was drawn."
            )
        )

    def cancel(self) -> None:
        """Hand in nothing more, and cancel what has not ended."""
        self.stop()
        cancel_each(list(self._pending))

    # --- for the iterator -------------------------------------------------------------------------

    def take(self, timeout: float | None) -> T:
        """Do what `IMapIterator.next` says."""
        with self._changed:
            if not self._changed.wait_for(self._has_next, timeout):
                raise multiprocessing.TimeoutError(
                    f"The next result had not come after {timeout:g} s; the work goes on."
                )
            if self._values:
                return self._values.popleft()
            if not self._ready:
                self._raise_end()
            future = self._ready.popleft()
            self._changed.notify_all()
        try:
            values = outcome_of(future) if self._is_chunked else [outcome_of(future)]
        except StopIteration as error:
            raise RuntimeError(
                "A call of imap raised StopIteration, which would end the loop over the results."
            ) from error
        finally:
            del future
        with self._changed:
            self._values.extend(values)
            return self._values.popleft()

    def _has_next(self) -> bool:
        return bool(self._values or self._ready or (self._is_drawn and not self._pending))

    def _raise_end(self) -> NoReturn:
        why, self._why = self._why, None
        try:
            raise StopIteration if why is None else why
        finally:
            del why  # it would hold itself, by its traceback

    def forget(self, has_begun: bool) -> None:
        """Discard the results, as the iterator is gone; stop drawing from a generator that was
        begun.
        """
        with self._changed:
            self._is_forgotten = True
            self._ready.clear()
            self._values.clear()
            self._why = None
            self._changed.notify_all()
        if has_begun and self._is_as_taken:
            self._end(None)
