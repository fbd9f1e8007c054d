"""What a queue is where it was made: there it is read and closed."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from raypool.errors import InvalidValueError, PoolClosedError, QueueClosedError, SerializationError, WorkerLostError
from raypool.worker.running import Way, in_task

Answer = Callable[[str], object]
"""Tells whoever has offered a value what has become of it; it returns at once."""

TAKEN, CLOSED = "taken", "closed"
"""What becomes of a value that was offered."""

LINGER_S = 0.5
"""How long the thread of the listeners waits for another value before it ends [s]; the next value starts another."""

LOOK_AGAIN_S = 0.05
"""Who waits looks again so often [s]: a cancelled task in a thread is told only while it runs Python code."""

PATIENCE_S = 10.0
"""When nobody has read anything for so long, whoever waits for room is told what he waits for [s]."""

NOBODY_READS = (
    "put() has waited for room in a queue of at most %d values for %g s, in which nobody has read any. Read in another thread "
    "than the one that puts: with profile='inline', tasks run in the one that asks for them."
)

logger = logging.getLogger("raypool")


class Source(Way, Protocol):
    """A pool whose workers put values into queues of this process."""

    def catch_up(self, sent: dict[int, int]) -> None:
        """Wait for what calls that have ended had said before, and for these batches (by worker id)."""


class Listener:
    """A function that gets what comes, until `remove` is called."""

    def __init__(self, fn: Callable[..., object], on_remove: Callable[[Listener], None]) -> None:
        self._fn = fn
        self._on_remove = on_remove
        self.is_removed = False

    def remove(self) -> None:
        """Call the function no more; a call that has begun goes on. Twice does nothing."""
        self.is_removed = True
        self._on_remove(self)

    def call(self, *values: Any) -> None:
        """Hand over what has come; what the function raises is logged."""
        try:
            self._fn(*values)
        except BaseException:  # also sys.exit(): the thread has values for others
            logger.exception("The listener %r has failed; it is called again all the same.", self._fn)


class Packed:
    """A value that has come from elsewhere."""

    __slots__ = ("pickled",)

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled


def opened(entry: Any) -> Any:
    """Return the value of an entry.

    Raises:
        SerializationError: It has come from elsewhere and cannot be unpickled here.
    """
    if type(entry) is not Packed:
        return entry
    try:
        return pickle.loads(entry.pickled)
    except Exception as error:
        raise SerializationError(
            f"A value has come through a queue but cannot be unpickled here ({type(error).__name__}: {error}). "
            "Its class must be importable in this process too.",
            what="a value of a queue",
        ) from error


class _Putter:
    """A value that waits for room. Whoever has put it is woken by `bell` to read `outcome`, or is told by `answer` elsewhere."""

    __slots__ = ("answer", "bell", "entry", "outcome")

    def __init__(self, entry: Any, answer: Answer | None = None) -> None:
        self.entry = entry
        self.answer = answer
        self.outcome: str | None = None
        self.bell = threading.Lock()
        self.bell.acquire()

    def settle(self, outcome: str) -> None:
        """Note what has become of it."""
        self.outcome = outcome
        self.bell.release()


kept: dict[str, object] = {}
"""Queues with listeners, by key: they live without anybody who holds them."""

sources: list[Source] = []
"""The pools from whose workers values may come."""


class Home:
    """What a queue is in the process that has made it."""

    def __init__(self, key: str, maxsize: int | None, keeps_latest: bool) -> None:
        self.key = key
        self.values: deque[Any] = deque(maxlen=maxsize if keeps_latest else None)
        self.is_of_task = in_task()
        self.is_closed = False
        self.has_travelled = False
        self._capacity = math.inf if maxsize is None or keeps_latest else maxsize
        self._num_taken = 0
        self._putters: deque[_Putter] = deque()
        self._listeners: list[Listener] = []
        # The queue may be collected, and so call `abandon`, at any line of a thread that holds the lock. And whoever takes it may
        # be interrupted at any line: a lock by itself is not left locked then, a condition would be.
        self._lock = threading.RLock()
        self._filled = threading.Condition(self._lock)  # readers wait for it
        self._emptied = threading.Condition(self._lock)  # whoever closes the queue
        self._is_closing = False  # closed, but something may still be on its way
        self._server: threading.Thread | None = None
        self._is_handing_out = False

    # --- in -----------------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> None:
        """Put a value in, waiting for room."""
        with self._lock:
            if self.is_closed:
                raise closed_error()
            if self._has_room():
                self._append(value)
                return
        putter = _Putter(value)
        try:
            with self._lock:
                self._enqueue(putter)
            self._wait_for(putter)
        except BaseException:  # Ctrl-C, or the task was cancelled
            with self._lock, contextlib.suppress(ValueError):
                self._putters.remove(putter)
            raise
        if putter.outcome == CLOSED:
            raise closed_error()

    def _enqueue(self, putter: _Putter) -> None:
        """Let a value in behind those that wait already, now or when there is room."""
        if self.is_closed:
            putter.settle(CLOSED)
        elif self._has_room():
            self._append(putter.entry)
            putter.settle(TAKEN)
        else:
            self._putters.append(putter)

    def _wait_for(self, putter: _Putter) -> None:
        num_taken, until = self._num_taken, time.monotonic() + PATIENCE_S
        while putter.outcome is None:
            putter.bell.acquire(timeout=LOOK_AGAIN_S)
            if time.monotonic() > until:
                until = math.inf
                if self._num_taken == num_taken:
                    logger.warning(NOBODY_READS, self._capacity, PATIENCE_S)

    def accept(self, entry: Any) -> None:
        """Take what has come from elsewhere; while the queue is being closed, it was put before."""
        with self._lock:
            if not self.is_closed or self._is_closing:
                self._append(entry)

    def offer(self, entry: Any, answer: Answer) -> None:
        """Take what has come from elsewhere, now or when there is room."""
        putter = _Putter(entry, answer)
        with self._lock:
            self._enqueue(putter)
            outcome = putter.outcome
        if outcome is not None:
            answer(outcome)

    def _has_room(self) -> bool:
        return len(self.values) < self._capacity and not self._putters

    def _append(self, entry: Any) -> None:
        self.values.append(entry)
        if self._listeners and self._server is None:
            self._serve()
        self._filled.notify()

    # --- out ----------------------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None, waited_s: float | None = None) -> Any:
        """Return the oldest entry."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while True:
                if self._listeners:
                    raise InvalidValueError(
                        f"get() was called, but the queue has {len(self._listeners)} listeners, which get everything. "
                        "Remove them, or read in them."
                    )
                if self.values:
                    entry, admitted = self._pop()
                    break
                if self.is_closed and not self._is_closing:
                    raise QueueClosedError("The queue was closed, and everything in it was read.")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"Nothing was put into the queue within {waited_s or timeout_s:g} s.")
                self._filled.wait(min(left_s, 10 * LOOK_AGAIN_S))
        _tell(admitted)
        return entry

    def _pop(self) -> tuple[Any, list[_Putter]]:
        """Return the oldest entry, and those who wait no longer since there is room now."""
        entry = self.values.popleft()
        self._num_taken += 1
        admitted: list[_Putter] = []
        while self._putters and len(self.values) < self._capacity:
            putter = self._putters.popleft()
            self.values.append(putter.entry)
            putter.settle(TAKEN)
            admitted.append(putter)
        return entry, admitted

    # --- listeners ----------------------------------------------------------------------------------------------------

    def listen(self, fn: Callable[[Any], object]) -> Listener:
        """Add a listener."""
        listener = Listener(fn, self._unlisten)
        with self._lock:
            self._listeners.append(listener)
            if self.values and self._server is None:
                self._serve()
            self._filled.notify_all()
        return listener

    def _unlisten(self, listener: Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                kept.pop(self.key, None)
            self._filled.notify_all()
            self._emptied.notify_all()

    def _serve(self) -> None:
        self._server = threading.Thread(target=self._hand_out, name=f"raypool-queue-{self.key[:8]}", daemon=True)
        self._server.start()

    def _hand_out(self) -> None:
        """Give the listeners what there is, one after the other; end after a silence."""
        while True:
            with self._lock:
                self._is_handing_out = False
                if not self.values:
                    self._emptied.notify_all()  # whoever closes it
                self._filled.wait_for(lambda: self.values or not self._listeners or self.is_closed, LINGER_S)
                if not (self.values and self._listeners):
                    self._server = None
                    return
                self._is_handing_out = True
                listeners = tuple(self._listeners)
                entry, admitted = self._pop()
            _tell(admitted)
            self._hand_over(entry, listeners)
            del entry

    def _hand_over(self, entry: Any, listeners: tuple[Listener, ...]) -> None:
        try:
            value = opened(entry)
        except BaseException:  # also what code of the user's raises when it is unpickled: the thread has values for others
            logger.exception("No listener gets this value.")
            return
        is_had = False
        for listener in listeners:
            if not listener.is_removed:
                is_had = True
                listener.call(value)
        if not is_had:  # they were removed in this instant: it waits for others
            with self._lock:
                if len(self.values) != self.values.maxlen:
                    self.values.appendleft(entry)
                    self._filled.notify()

    # --- the end ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Wait for what tasks that have ended had put; return whether there could be any."""
        if not self.has_travelled or not sources:
            return False
        for source in tuple(sources):
            with contextlib.suppress(PoolClosedError, WorkerLostError):
                source.catch_up({})
        return True

    def close(self) -> None:
        """Let nothing more in; return when everything is here, and the listeners have had it."""
        with self._lock:
            is_first = not self.is_closed
            self.is_closed = True
            self._is_closing |= is_first
            rejected = self._reject(CLOSED)
        _tell(rejected)
        try:
            if is_first and self.has_travelled:
                for source in tuple(sources):
                    with contextlib.suppress(PoolClosedError, WorkerLostError):
                        source.catch_up(source.ask("end_queue", self.key))
        finally:
            with self._lock:
                self._is_closing &= not is_first
                self._filled.notify_all()
                is_own = threading.current_thread() is self._server
                while self._listeners and not is_own and (self.values or self._is_handing_out):
                    self._emptied.wait(LOOK_AGAIN_S)
                if not is_own:
                    kept.pop(self.key, None)

    def abandon(self) -> None:
        """Release those elsewhere who wait for room: nobody holds the queue any more."""
        with self._lock:
            rejected = self._reject(TAKEN)
        _tell(rejected)

    def _reject(self, outcome: str) -> list[_Putter]:
        """Let nobody wait for room any more."""
        rejected = list(self._putters)
        self._putters.clear()
        for putter in rejected:
            putter.settle(outcome)
        return rejected


def _tell(putters: list[_Putter]) -> None:
    for putter in putters:
        if putter.answer is not None and putter.outcome is not None:
            putter.answer(putter.outcome)


def closed_error() -> QueueClosedError:
    """Return the error for whoever puts something into a queue that was closed."""
    return QueueClosedError("The queue was closed, so nothing more can be put into it. Whoever has made it wants no more.")
