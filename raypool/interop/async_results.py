"""Results and callbacks of `raypool.interop.multiprocessing.Pool`."""

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
from typing import Any, Generic, TypeAlias, TypeVar

from raypool.errors import InvalidValueError, RemoteTraceback, SerializationError
from raypool.futures import Future, cancel_each

T = TypeVar("T")

Callback = Callable[[Any], object]
Job: TypeAlias = "CallGroup[Any] | Drawing[Any]"

logger = logging.getLogger("raypool")


class Collector:
    """Finishes jobs in its own thread, until it is closed and none is left."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: dict[Job, None] = {}  # these alone keep their pool from being collected
        self._lock = threading.RLock()  # reentrant: a pool's finalizer closes it at any moment
        self._at_end: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._live, name="raypool-collector", daemon=True)
        self.thread.start()

    def open(self, job: Job) -> None:
        """Take a job; raise ValueError if closed."""
        with self._lock:
            if self._at_end is not None:  # nobody would finish the job
                raise ValueError("Pool not running")
            self._open[job] = None

    def note_ended(self, job: Job) -> None:
        """Finish a job, whose calls have ended, soon; from any thread."""
        self._ended.put(job)

    def jobs(self) -> list[Job]:
        """Return the unfinished jobs."""
        with self._lock:
            return list(self._open)

    def close(self, at_end: Callable[[], object]) -> None:
        """Take no more jobs; call `at_end` after the last one."""
        with self._lock:
            self._at_end = at_end
        self._ended.put(None)  # wakes the thread

    def check_wait(self, timeout: float | None = None) -> None:
        """Raise InvalidValueError in a callback, which would wait for itself."""
        if threading.current_thread() is self.thread and (timeout is None or timeout > 0):
            raise InvalidValueError(
                "A callback cannot wait for results of its pool, or join it: the pool would wait"
                " for itself. Use a callback of that result instead."
            )

    def _live(self) -> None:
        while self._at_end is None or self._open:
            job = self._ended.get()
            if job is not None:
                job.finish()
                with self._lock:
                    self._open.pop(job, None)
            del job  # it holds the pool
        self._at_end()


standard: Any = multiprocessing.pool  # typeshed lacks two of its exceptions


def outcome_of(future: Future[Any]) -> Any:
    """Return an ended call's value, or raise its error as the standard pool's."""
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise concurrent.futures.CancelledError(
            f"{future.name} was cancelled by terminate()."
        ) from None
    except SerializationError as error:
        raise standard.MaybeEncodingError(error, error.what) from error
    except BaseException as error:
        if type(error.__cause__) is RemoteTraceback:
            error.__cause__ = standard.RemoteTraceback(str(error.__cause__))
        raise
    finally:
        del future  # the traceback of its error would hold it


def joined(chunks: list[list[Any]]) -> list[Any]:
    """Return the values of all calls of a `map`."""
    return list(itertools.chain.from_iterable(chunks))


class CallGroup(Generic[T]):
    """The calls of one `apply_async` or `map_async`, whose values `assemble` joins."""

    def __init__(
        self,
        pool: object,
        collector: Collector,
        futures: Sequence[Future[Any]],
        assemble: Callable[[list[Any]], T],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        self._pool: object = pool  # not collected before all calls have ended
        self.collector = collector
        self._futures = futures
        self._assemble = assemble
        self._callbacks = (error_callback, callback)  # by `is_success`
        self.ended = threading.Event()  # set after the callback
        self.is_success = False
        self.value: Any = None  # the result or the error
        self._missing = len(futures)
        self._lock = threading.Lock()
        try:
            collector.open(self)
            for future in futures:
                future.add_done_callback(self._note)
        except BaseException as error:
            self.cancel()
            # with a ValueError the pool was closed meanwhile; after Ctrl-C not all calls would tell
            # of their end
            if not isinstance(error, ValueError):
                collector.note_ended(self)
            raise
        if not futures:
            collector.note_ended(self)

    def _note(self, _: Any) -> None:
        with self._lock:  # calls may end in several threads at once
            self._missing -= 1
            if self._missing:
                return
        self.collector.note_ended(self)

    def finish(self) -> None:
        """Fetch the values, and call back."""
        try:
            self.value = self._assemble([outcome_of(future) for future in self._futures])
            self.is_success = True
        except BaseException as error:
            self.value = error
        callback = self._callbacks[self.is_success]
        # a result that the user keeps must not keep these
        self._futures, self._callbacks = (), (None, None)
        if callback is not None:
            try:
                callback(self.value)
            except BaseException:
                logger.exception(
                    "The callback %r of a pool failed; nothing else is affected.", callback
                )
        self._pool = None  # first: then a waiter that drops the pool holds the last reference
        self.ended.set()

    def hurry(self) -> None:
        """Do nothing: all calls are submitted."""

    def stop(self) -> None:
        """Do nothing: all calls are submitted."""

    def cancel(self) -> None:
        """Cancel all calls."""
        cancel_each(self._futures)


class AsyncResult(Generic[T]):
    """The future result of one call or of one `map`.

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
        """Return whether all calls ended without an exception.

        Raises:
            ValueError: They have not ended.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._gathering.is_success

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all calls and the callback, at most `timeout` seconds.

        Raises:
            InvalidValueError: This is a callback of the same pool, which would wait for itself.
        """
        if not self.ready():
            self._gathering.collector.check_wait(timeout)
        self._gathering.ended.wait(timeout)

    def get(self, timeout: float | None = None) -> T:
        """Return the result; wait for it at most `timeout` seconds.

        Raises:
            multiprocessing.TimeoutError: The time is over; the calls continue.
            concurrent.futures.CancelledError: The pool was terminated.
            multiprocessing.pool.MaybeEncodingError: A value could not be sent back.
            Exception: The exception of the first failed call; its cause is the remote traceback.
        """
        self.wait(timeout)
        if not self.ready():
            raise multiprocessing.TimeoutError(
                f"There was no result after {timeout:g} s; the work continues."
            )
        if self._gathering.is_success:
            return self._gathering.value  # type: ignore[no-any-return]
        try:
            raise self._gathering.value
        finally:
            del self  # the traceback of the error would hold it


# --- results of `imap` and `imap_unordered`, and the thread that draws items ----------------------


class IMapIterator(Iterator[T], Generic[T]):
    """The results of `imap` or `imap_unordered`, while a thread draws from the iterable.

    Without the iterator, submitted calls still run, and their results are discarded. A generator is
    drawn no further if results were taken; otherwise all of it is drawn, like a list.

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

        An exception of the iterable, or the `UnpicklableError` of an item, is raised after the
        results of the items before. After a failed call, the next results follow.

        Raises:
            StopIteration: There are no more.
            multiprocessing.TimeoutError: The time is over; the calls continue.
            Exception: The exception of the call; its cause is the remote traceback.
        """
        self._has_begun = True
        try:
            return self._drawing.take(timeout)
        finally:
            del self  # the traceback of an error would hold it

    def __del__(self) -> None:
        self._drawing.forget(self._has_begun)


class Drawing(Generic[T]):
    """Draws entries of `calls` in its own thread, and submits a call for each.

    Args:
        is_chunked: Each call returns a list of results.
        is_ordered: Results come in the order of the calls, not as they end.
        most_ahead: The most submitted calls whose results were not taken; None: any number.
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
        self._pool: object = pool  # not collected before all calls have ended
        self._collector = collector
        self._is_chunked = is_chunked
        self._is_ordered = is_ordered
        self._most_ahead = most_ahead
        self._is_as_taken = most_ahead is not None
        self._changed = threading.Condition()
        self._pending: OrderedDict[Future[Any], None] = OrderedDict()
        self._ready: deque[Future[Any]] = deque()
        self._values: deque[T] = deque()  # of the last call that was taken
        self._why: BaseException | None = None  # raised after the last result
        self._is_drawn = False  # no more calls are submitted
        self._is_forgotten = False  # the iterator is gone
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
            while self._submit_next(submit, calls):
                pass
        except BaseException as error:  # of the user's iterable, or of an item that cannot be sent
            why = error
        try:
            self._end(why)
        finally:
            # the traceback of the error would hold them, and by them the pool
            del self, submit, calls, why

    def _submit_next(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> bool:
        """Submit the next call when there is room; return whether to continue."""
        try:
            with self._changed:
                self._changed.wait_for(self._has_room)
                if self._is_drawn:
                    return False
            # without the lock: both may take long, and results are taken meanwhile
            entry = next(calls, self)
            if entry is self:
                return False
            future = submit(entry)
            with self._changed:
                is_wanted = not self._is_drawn
                self._pending[future] = None
            future.add_done_callback(self._note)
            if not is_wanted:
                future.cancel()
            return is_wanted
        finally:
            del self, submit, calls  # as in `_draw`

    def _has_room(self) -> bool:
        num_ahead = len(self._pending) + len(self._ready)
        return self._is_drawn or self._most_ahead is None or num_ahead < self._most_ahead

    def _note(self, future: Any) -> None:
        with self._changed:
            if self._is_ordered:  # others may have waited for this one
                ended = list(itertools.takewhile(lambda one: one.done(), self._pending))
            else:
                ended = [future] if future in self._pending else []
            for one in ended:
                del self._pending[one]
            if not self._is_forgotten:
                self._ready += ended
            self._changed.notify_all()
            is_ended = self._is_drawn and not self._pending
        if is_ended:
            self._collector.note_ended(self)

    def _end(self, why: BaseException | None) -> None:
        """Submit nothing more, and raise `why` after the last result."""
        with self._changed:
            if not self._is_drawn:
                self._is_drawn, self._why = True, None if self._is_forgotten else why
            self._changed.notify_all()
            is_ended = not self._pending
        if is_ended:  # else the last call ends it: the drawing thread may wait forever
            self._collector.note_ended(self)

    # --- for the pool -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Release the pool."""
        self._pool = None

    def hurry(self) -> None:
        """Submit all other calls without waiting for results to be taken."""
        with self._changed:
            if not self._is_forgotten:
                self._most_ahead = None
            self._changed.notify_all()

    def stop(self) -> None:
        """Submit nothing more."""
        self._end(
            concurrent.futures.CancelledError(
                "The pool was terminated before all of the iterable was drawn."
            )
        )

    def cancel(self) -> None:
        """Submit nothing more, and cancel all calls."""
        self.stop()
        cancel_each(list(self._pending))

    # --- for the iterator -------------------------------------------------------------------------

    def take(self, timeout: float | None) -> T:
        """Return the next result; see `IMapIterator.next`."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._values or self._ready or (self._is_drawn and not self._pending),
                timeout,
            ):
                raise multiprocessing.TimeoutError(
                    f"There was no next result after {timeout:g} s; the work continues."
                )
            if self._values:
                return self._values.popleft()
            if not self._ready:
                why, self._why = self._why, None
                try:
                    raise StopIteration if why is None else why
                finally:
                    del why  # it would hold itself, by its traceback
            future = self._ready.popleft()
            self._changed.notify_all()  # there is room for another call
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

    def forget(self, has_begun: bool) -> None:
        """Discard the results; stop drawing from a generator if results were taken."""
        with self._changed:
            self._is_forgotten = True
            self._ready.clear()
            self._values.clear()
            self._why = None
            self._changed.notify_all()
        if has_begun and self._is_as_taken:
            self._end(None)
