"""Functions over several futures: wait for them, read them as they end, and go on with what they gave."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, TypeVar

from raypool.channel.queues import check_timeout
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.futures import ENDED, Future, owners_of

T = TypeVar("T")

_reading = threading.Lock()
"""Held while `fetch_next` chooses: no result is delivered twice, to two threads either."""


def fetch_next(futures: Sequence[Future[T]], timeout_s: float | None = None) -> tuple[int, T]:
    """Return the next result that has not been read, in the order in which they end, with its place in `futures`.

    Args:
        futures: Futures of any pools, also those of `after_each`.
        timeout_s: Longest wait [s]; None waits for ever.

    Raises:
        ValueError: All have been read.
        TimeoutError: None has ended in time; nothing is marked as read.
        InvalidValueError: This is a callback of a pool that one of them waits for, and none has ended.
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
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        with _reading:
            unread = [future for future in checked if not future.read]
            if not unread:
                raise InvalidValueError("There is no future left to read.")
            ended = [future for future in unread if future._state in ENDED]  # `done`, without its lock
            if ended:
                first = _first_of(ended)
                first.read = True
                break
        left_s = None if until is None else max(0.0, until - time.monotonic())
        if not _wait(unread, left_s, concurrent.futures.FIRST_COMPLETED).done:
            raise TimeoutError(f"None of {len(unread)} futures has ended within {timeout_s} s; they go on.")
    return checked.index(first), first.result()


def _first_of(ended: list[Future[T]]) -> Future[T]:
    try:
        return min(ended, key=attrgetter("finished_at"))
    except TypeError:  # one has no time yet: it ends right now
        return min(ended, key=lambda future: future.finished_at or datetime.now(UTC))


def fetch_outputs(futures: Sequence[Future[T]], stack: bool = False) -> Any:
    """Wait for all, mark them as read, and return their results in the order of `futures`.

    Args:
        futures: Futures of any pools, also those of `after_each`.
        stack: Return one NumPy array, the results one below the other, instead of a list.

    Raises:
        InvalidValueError: The results have shapes that do not stack; each is still there in its future.
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
    for future in checked:
        future.read = True
    results = [future.result() for future in checked]
    if not stack:
        return results
    import numpy as np

    rows = [np.atleast_2d(np.asarray(result)) for result in results]
    widths = {row.shape[1:] for row in rows}
    if len(widths) > 1:
        raise InvalidValueError(
            f"The results do not stack: their rows have the shapes {sorted(widths)}. Use stack=False for a list."
        )
    return np.concatenate(rows)


def wait(futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
    """Wait until all have ended, in whatever way; return whether they have, after at most `timeout_s` seconds.

    What became of them raises nothing here.

    Raises:
        InvalidValueError: This is a callback of a pool that one of them waits for: it would wait for itself.

    Source:
        MATLAB R2025b, wait.

    Example:
        >>> from raypool import parpool
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     wait([pool.parfeval(divmod, 1, 0)])
        True
    """
    check_timeout(timeout_s)
    return not _wait(_checked(futures), timeout_s).not_done


def after_each(futures: Sequence[Future[Any]], fn: Callable[[Any], T], pass_future: bool = False) -> list[Future[T]]:
    """Call `fn(value)` here for each of these futures when it has ended; return a future of each of these calls.

    The calls are made in this process, by one thread for all of them, one after the other in the order in which the futures end:
    `fn` may write to a file or draw without a lock, and the next call waits as long as it takes. A future that fails or is
    cancelled is skipped: `fn` is not called, and the new future ends with the same error, or cancelled. What is returned can be
    waited for, read, cancelled (as long as `fn` has not begun) and given to `after_each` and `after_all` again.

    Args:
        futures: Futures of any pools, also those of `after_each`.
        fn: A function of a value. Within it, results of its own kind cannot be waited for: the thread would wait for itself.
        pass_future: Give `fn` the futures themselves instead; then none is skipped.

    Raises:
        InvalidTypeError: Something is not a future, or `fn` is not callable. What `fn` raises is the new future's exception.

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
    return [_after_one(future, fn, pass_future) for future in _checked(futures)]


def after_all(futures: Sequence[Future[Any]] | Future[Any], fn: Callable[[Any], T], pass_future: bool = False) -> Future[T]:
    """Call `fn(values)` here when all of these futures have ended; return a future of that call.

    `values` is the list of their values, in the order of `futures`; those of futures that failed or were cancelled are left out.
    The call is made by the thread that makes the calls of `after_each`.

    Args:
        futures: Futures of any pools, also those of `after_each`. A single one counts by itself: `fn` is called with its value,
            and not at all if it fails.
        fn: A function of a list of values.
        pass_future: Give `fn` the list of the futures (or the single one) instead.

    Raises:
        InvalidTypeError: Something is not a future, or `fn` is not callable. What `fn` raises is the new future's exception.

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
    if isinstance(futures, Future):
        return _after_one(futures, fn, pass_future)
    checked = _checked(futures)

    def call() -> T:
        return fn(checked if pass_future else [future.result() for future in checked if _has_value(future)])

    follower: _Follower[T] = _Follower(_name_of(fn))
    follower.owners = owners_of(checked)
    missing = len(checked) or 1
    counting = threading.Lock()

    def note(_: Any) -> None:
        nonlocal missing
        with counting:
            missing -= 1
            if missing:
                return
        _dispatcher.put(functools.partial(follower.run, call))

    for future in checked:
        future.add_done_callback(note)
    if not checked:
        note(None)
    return follower


def _after_one(future: Future[Any], fn: Callable[[Any], T], pass_future: bool) -> Future[T]:
    follower: _Follower[T] = _Follower(f"{_name_of(fn)} of {future.name}")
    follower.owners = future.owners

    def run() -> None:
        if future.cancelled() and not pass_future:
            follower.cancel()
        else:
            follower.run(lambda: fn(future if pass_future else future.result()))

    future.add_done_callback(lambda _: _dispatcher.put(run))
    return follower


def _has_value(future: Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


class _Follower(Future[T]):
    """A future of a call that is made here when others have ended."""

    def cancel(self) -> bool:
        """Cancel it if its call has not begun; return whether it is cancelled. What runs in this process cannot be stopped."""
        if not super().cancel():
            return False
        self.notify_cancelled()
        return True

    def run(self, call: Callable[[], T]) -> None:
        """Make the call, unless somebody has cancelled it."""
        if not self.start():
            return
        self.attempts = 1
        self.started_at = datetime.now(UTC)
        before = time.perf_counter()
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as raised:  # also one that would end this thread: others wait for it
            error = raised
        self.duration_s = time.perf_counter() - before
        self.finished_at = datetime.now(UTC)
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def check_wait(self, timeout: float | None) -> None:
        """Make sure that neither the thread of the calls waits for it, nor that of a pool whose future it comes after.

        Raises:
            InvalidValueError: It would, for ever.
        """
        if timeout is None and _dispatcher.is_here:
            raise InvalidValueError(
                f"The function of an after_each or after_all waits for {self.name!r}, which can only run after it. "
                "Chain them instead: give its future to after_all."
            )
        super().check_wait(timeout)


class _Dispatcher:
    """Makes calls one after the other, in a thread that is there as long as there are any.

    The interpreter waits for that thread at its end: what has come in by then is not lost.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # the collector may end a pool, and its futures, in the middle of `put`

    @property
    def is_here(self) -> bool:
        """Whether this code runs in its thread."""
        return threading.current_thread() is self._thread

    def put(self, call: Callable[[], None]) -> None:
        """Make a call, soon, in its turn; it must not raise."""
        with self._lock:
            self._calls.append(call)
            if self._thread is not None and self._thread.is_alive():  # it does not live in a forked child
                return
            self._thread = threading.Thread(target=self._make_calls, name="raypool-callbacks", daemon=False)
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
            del call  # while it waits for the next, it holds nothing


_dispatcher = _Dispatcher()


def _wait(futures: Sequence[Future[Any]], timeout_s: float | None, until: str = concurrent.futures.ALL_COMPLETED) -> Any:
    for future in futures:
        if future._state not in ENDED:
            future.check_wait(timeout_s)
    return concurrent.futures.wait(futures, timeout_s, until)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise InvalidTypeError(f"{fn!r} is not callable. Give a function of one argument.")


def _checked(futures: Iterable[Future[T]]) -> list[Future[T]]:
    if isinstance(futures, Future):
        raise InvalidTypeError(f"{futures!r} is a single future. Put it into a list.")
    checked = list(futures) if isinstance(futures, Iterable) else [futures]
    if all(issubclass(kind, Future) for kind in set(map(type, checked))):
        return checked
    stranger = next(future for future in checked if not isinstance(future, Future))
    raise InvalidTypeError(f"{stranger!r} is not a future of a pool.")
