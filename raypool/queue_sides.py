"""The two sides of a queue: `Home`, where it was made and is read, and `Away`, in workers that put into it."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from raypool.errors import InvalidValueError, PoolClosedError, QueueClosedError, SerializationError
from raypool.task import Link, in_task, link

Answer = Callable[[str], object]
"""Tells whoever has offered a value what has become of it; it returns at once."""

TAKEN, CLOSED = "taken", "closed"
"""What becomes of a value that was offered."""

LINGER_S = 0.5
"""How long the thread of the listeners waits for another value before it ends [s]; the next value starts another."""

LOOK_AGAIN_S = 0.05
"""Who waits looks again so often [s]: a cancelled task in a thread is told only while it runs Python code."""

logger = logging.getLogger("raypool")


class Source(Protocol):
    """A pool whose workers put values into queues of this process."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the pool's `Exchange`, and wait for its answer."""

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
    """A value that waits for room. Whoever has put it reads `outcome`, or is told by `answer` if it is elsewhere."""

    __slots__ = ("answer", "entry", "outcome")

    def __init__(self, entry: Any, answer: Answer | None = None) -> None:
        self.entry = entry
        self.answer = answer
        self.outcome: str | None = None


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
        self._putters: deque[_Putter] = deque()
        self._listeners: list[Listener] = []
        lock = threading.RLock()  # the queue may be collected, and so call `abandon`, at any line
        self._filled = threading.Condition(lock)  # readers wait for it
        self._freed = threading.Condition(lock)  # all others
        self._is_closing = False  # closed, but something may still be on its way
        self._server: threading.Thread | None = None
        self._is_handing_out = False

    # --- in -----------------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> None:
        """Put a value in, waiting for room."""
        with self._freed:
            if self.is_closed:
                raise closed_error()
            if self._has_room():
                self._append(value)
                return
            putter = _Putter(value)
            self._putters.append(putter)
            try:
                while putter.outcome is None:
                    self._freed.wait(LOOK_AGAIN_S)
            except BaseException:  # Ctrl-C, or the task was cancelled
                with contextlib.suppress(ValueError):
                    self._putters.remove(putter)
                raise
        if putter.outcome == CLOSED:
            raise closed_error()

    def accept(self, entry: Any) -> None:
        """Take what has come from elsewhere; while the queue is being closed, it was put before."""
        with self._filled:
            if not self.is_closed or self._is_closing:
                self._append(entry)

    def offer(self, entry: Any, answer: Answer) -> None:
        """Take what has come from elsewhere, now or when there is room."""
        with self._filled:
            outcome = CLOSED if self.is_closed else TAKEN
            if outcome == TAKEN:
                if not self._has_room():
                    self._putters.append(_Putter(entry, answer))
                    return
                self._append(entry)
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
        with self._filled:
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
        admitted: list[_Putter] = []
        while self._putters and len(self.values) < self._capacity:
            putter = self._putters.popleft()
            self.values.append(putter.entry)
            putter.outcome = TAKEN
            admitted.append(putter)
        if admitted:
            self._freed.notify_all()
        return entry, admitted

    # --- listeners ----------------------------------------------------------------------------------------------------

    def listen(self, fn: Callable[[Any], object]) -> Listener:
        """Add a listener."""
        listener = Listener(fn, self._unlisten)
        with self._filled:
            self._listeners.append(listener)
            if self.values and self._server is None:
                self._serve()
            self._filled.notify_all()
        return listener

    def _unlisten(self, listener: Listener) -> None:
        with self._filled:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                kept.pop(self.key, None)
            self._filled.notify_all()
            self._freed.notify_all()

    def _serve(self) -> None:
        self._server = threading.Thread(target=self._hand_out, name=f"raypool-queue-{self.key[:8]}", daemon=True)
        self._server.start()

    def _hand_out(self) -> None:
        """Give the listeners what there is, one after the other; end after a silence."""
        while True:
            with self._filled:
                self._is_handing_out = False
                if not self.values:
                    self._freed.notify_all()  # whoever closes it
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
        except SerializationError:
            logger.exception("No listener gets this value.")
            return
        is_had = False
        for listener in listeners:
            if not listener.is_removed:
                is_had = True
                listener.call(value)
        if not is_had:  # they were removed in this instant: it waits for others
            with self._filled:
                if len(self.values) != self.values.maxlen:
                    self.values.appendleft(entry)
                    self._filled.notify()

    # --- the end ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Wait for what tasks that have ended had put; return whether there could be any."""
        if not self.has_travelled or not sources:
            return False
        for source in tuple(sources):
            with contextlib.suppress(PoolClosedError):
                source.catch_up({})
        return True

    def close(self) -> None:
        """Let nothing more in; return when everything is here, and the listeners have had it."""
        with self._filled:
            is_first = not self.is_closed
            self.is_closed = True
            self._is_closing |= is_first
            rejected = self._reject(CLOSED)
        _tell(rejected)
        try:
            if is_first and self.has_travelled:
                for source in tuple(sources):
                    with contextlib.suppress(PoolClosedError):
                        source.catch_up(source.ask("end_queue", self.key))
        finally:
            with self._filled:
                self._is_closing &= not is_first
                self._filled.notify_all()
                is_own = threading.current_thread() is self._server
                while self._listeners and not is_own and (self.values or self._is_handing_out):
                    self._freed.wait(LOOK_AGAIN_S)
                if not is_own:
                    kept.pop(self.key, None)

    def abandon(self) -> None:
        """Release those elsewhere who wait for room: nobody holds the queue any more."""
        with self._freed:
            rejected = self._reject(TAKEN)
        _tell(rejected)

    def _reject(self, outcome: str) -> list[_Putter]:
        """Let nobody wait for room any more."""
        rejected = list(self._putters)
        self._putters.clear()
        for putter in rejected:
            putter.outcome = outcome
        self._freed.notify_all()
        return rejected


def _tell(putters: list[_Putter]) -> None:
    for putter in putters:
        if putter.answer is not None and putter.outcome is not None:
            putter.answer(putter.outcome)


class Away:
    """What a queue is elsewhere: a key, and a way to where it was made."""

    def __init__(self, key: str, waits: bool, is_of_task: bool, is_closed: bool) -> None:
        self.key = key
        self.is_of_task = is_of_task
        self.is_closed = is_closed
        self._waits = waits
        self._joined: Link | None = None

    def put(self, value: Any) -> None:
        """Send a value."""
        way = link()
        if way is None or self.is_of_task:
            raise InvalidValueError(
                "This process is neither the one that has made the queue nor a worker of a pool of its own, so nothing can be "
                "put here. Make the queue where the pool is opened, and put into it in tasks."
            )
        if self.is_closed:
            raise closed_error()
        pickled = way.pack(value, "a value of a queue")
        if self._waits:
            self.is_closed = way.ask("offer", self.key, pickled) == CLOSED
        else:
            self._join(way)
            if not self.is_closed:
                way.send("queue", self.key, pickled)
        # It may have been closed in this instant. What was sent before this process has said that it knows still counts.
        if self.is_closed:
            raise closed_error()

    def _join(self, way: Link) -> None:
        """Make sure, once for each exchange, that this process hears of the queue's end."""
        if self._joined is not way:
            _hear_of_ends(way)
            self.is_closed = way.ask("join_queue", self.key, way.worker_id)
            self._joined = way


away_by_key: weakref.WeakValueDictionary[str, Away] = weakref.WeakValueDictionary()
"""Those in this process."""

_heard: Link | None = None


def _hear_of_ends(way: Link) -> None:
    """Let a thread wait for the ends of queues, for as long as the pool lives."""
    global _heard
    if _heard is not way:
        _heard = way
        threading.Thread(target=_hear, args=(way,), name="raypool-queue-ends", daemon=True).start()


def _hear(way: Link) -> None:
    ended: list[str] = []
    number = 0
    while True:
        try:
            ended = way.ask("queue_ends", way.worker_id, ended, number)
            for key in ended:
                away = away_by_key.get(key)
                if away is not None:
                    away.is_closed = True
            number = way.flush()
        except Exception:  # the pool has ended, and soon this process
            return


def closed_error() -> QueueClosedError:
    """Return the error for whoever puts something into a queue that was closed."""
    return QueueClosedError("The queue was closed, so nothing more can be put into it. Whoever has made it wants no more.")
