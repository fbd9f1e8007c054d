"""Data queues: values from tasks to the process that made the queue, none lost.

A queue (`QueueOwner`) lives in the process that has made it. Elsewhere it is a key (`QueueProxy`);
values that a worker puts travel to the owner::

    no limit, or "latest":    link.send -> the pool's agent -> hub -> deliver(key, payload)
    a limit (waits for room): link.ask("offer") -> Exchange -> offer(key, payload, answer) -> answer

In pools of this process ("threads", "inline") it is the same object everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import pickle
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    QueueClosedError,
    SerializationError,
    WorkerLostError,
    explains_calls,
    optional_count,
)
from raypool.worker.running import in_task, this_process

if TYPE_CHECKING:
    from raypool.backends.ray.agents import Agents
    from raypool.backends.ray.worker import WorkerLink

T = TypeVar("T")


@explains_calls
class DataQueue(Generic[T]):
    """A queue from tasks, which `put`, to the process that made it, which reads.

    It reads with `get`, in a loop, or by `after_each`. A queue goes to tasks like any value: in an
    argument, in a closure, in a list. Values arrive while the task runs, in the order in which it
    puts them; none is lost, even just before a task ends or is cancelled. (A worker that is
    killed may lose the values of its last tenth of a second.) On Ray, a value is sent as it is at
    `put`; in pools of this process it is the value itself.

    A queue without references and listeners is forgotten; later values are dropped.

    Args:
        maxsize: With "block", how many values may wait to be read: `put` waits for room. With
            "latest", how many of the newest are kept (one, if None). None: no limit.
        policy: What happens when the queue is full: "block" waits in `put`, "latest" drops the
            oldest value.

    Raises:
        InvalidValueError, InvalidTypeError: An argument is invalid.

    Source:
        MATLAB R2025b, parallel.pool.DataQueue and PollableDataQueue; the limit is that of Python's
        `queue.Queue`.

    Example:
        >>> from raypool import parpool
        >>> losses = DataQueue()
        >>> def train(num_epochs):
        ...     for epoch in range(num_epochs):
        ...         losses.put((epoch, 1 / (epoch + 1)))
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     pool.parfeval(train, 2).result()
        >>> losses.get(), losses.get()
        ((0, 1.0), (1, 0.5))
    """

    def __init__(
        self, maxsize: int | None = None, policy: Literal["block", "latest"] = "block"
    ) -> None:
        if policy not in ("block", "latest"):
            raise InvalidValueError(f"policy must be 'block' or 'latest', not {policy!r}.")
        maxsize = optional_count("maxsize", maxsize, least=1)
        if policy == "latest":
            maxsize = maxsize or 1
        key = uuid.uuid4().hex
        self._set_up(key, maxsize, policy, QueueOwner(key, maxsize, policy == "latest"))

    def _set_up(
        self, key: str, maxsize: int | None, policy: str, end: QueueOwner | QueueProxy
    ) -> None:
        self._key, self._maxsize, self._policy = key, maxsize, policy
        self._end = end
        if isinstance(end, QueueOwner):
            _here[key] = self
            weakref.finalize(self, end.abandon).atexit = False

    # --- methods for tasks and the owner ----------------------------------------------------------

    def put(self, value: T) -> None:
        """Put a value in; wait only if the queue is full and its policy is "block".

        With profile "inline" the task runs in the thread that submits it: read in another, or with
        `after_each`.

        Raises:
            QueueClosedError: The queue was closed, perhaps while this call waited for room.
            SerializationError: The value cannot be sent; it names the variable.
            InvalidValueError: This process neither made the queue nor is a worker of its pools.
            PoolClosedError: The pool has ended meanwhile.
        """
        self._end.put(value)

    @property
    def backlog(self) -> int:
        """How many values wait to be read; 0 in workers, which cannot know."""
        owner = self._end
        if isinstance(owner, QueueProxy):
            return 0
        owner.catch_up()
        return len(owner.values)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, as far as is known here."""
        return self._end.is_closed

    # --- methods for the owner --------------------------------------------------------------------

    @explains_calls
    def get(self, timeout_s: float | None = None) -> T:
        """Return the oldest value; wait for one if the queue is empty.

        Args:
            timeout_s: How long to wait [s]; 0 returns at once, None waits forever.

        Raises:
            TimeoutError: No value arrived in this time.
            QueueClosedError: The queue was closed, and everything in it was read.
            SerializationError: The value cannot be unpickled here; the next `get` skips it.
            InvalidValueError: This is a task, or the queue has listeners, which get every value.

        Example:
            >>> queue = DataQueue()
            >>> queue.put("first")
            >>> queue.get(timeout_s=0)
            'first'
            >>> queue.get(timeout_s=0)
            Traceback (most recent call last):
            TimeoutError: Nothing was put into the queue within 0 s.
        """
        __tracebackhide__ = True  # notebooks and pytest: only the user's own line
        check_timeout(timeout_s)
        owner = self._owner("get")
        try:
            entry = owner.take(timeout_s)
        except TimeoutError as late:
            # a task that has ended may have put values that are still on their way
            if not owner.catch_up():
                raise
            try:
                entry = owner.take(0.0)
            except TimeoutError:
                raise late from None
        return opened(entry)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[T]:
        """Yield values until the queue is closed and everything in it was read.

        Example:
            >>> queue = DataQueue()
            >>> for number in range(3):
            ...     queue.put(number)
            >>> queue.close()
            >>> list(queue)
            [0, 1, 2]
        """
        with contextlib.suppress(QueueClosedError):  # closed, and read to its end: the loop ends
            while True:
                yield self.get()

    def after_each(self, fn: Callable[[T], object]) -> Listener:
        """Call `fn(value)` for each value: first for queued ones, then as they arrive.

        The queue's own thread calls it, for one value after the other. Exceptions do not stop the
        queue, and only the first is logged. Each of several listeners gets every value that arrives
        while it is registered. A queue with listeners lives until they are removed, or it is
        closed.

        Returns:
            The listener, with a method `remove()`. Without listeners, values wait in the queue.

        Raises:
            InvalidTypeError: `fn` cannot be called.
            InvalidValueError: This is a task.

        Source:
            MATLAB R2025b, afterEach (DataQueue).

        Example:
            >>> queue, seen = DataQueue(), []
            >>> queue.put("early")
            >>> listener = queue.after_each(seen.append)
            >>> queue.put("late")
            >>> queue.close()
            >>> seen
            ['early', 'late']
        """
        if not callable(fn):
            raise InvalidTypeError(f"{fn!r} is not callable. Pass a function of one value.")
        owner = self._owner("after_each")
        kept[self._key] = self
        return owner.listen(fn)

    def close(self) -> None:
        """Close the queue: `put` raises `QueueClosedError`. Values in it can still be read.

        A `put` that waits for room raises that error now, in workers too. `close` returns when
        everything that was put before has arrived, and the listeners have received it (unless a
        listener calls it). A closed queue cannot be opened again; a second `close` has no effect.

        Raises:
            InvalidValueError: This is a task.

        Source:
            MATLAB R2025b, close (PollableDataQueue).
        """
        self._owner("close").close()

    def _owner(self, verb: str) -> QueueOwner:
        owner = self._end
        if isinstance(owner, QueueProxy) or (in_task() and not owner.is_of_task):
            raise InvalidValueError(
                f"{verb}() was called in a task. Read and close a queue in the process that made"
                " it; in tasks, call put()."
            )
        return owner

    def __reduce__(self) -> Any:
        """Travel as a key."""
        owner = self._end
        is_of_task = owner.is_of_task
        if isinstance(owner, QueueOwner):
            owner.has_travelled = True
        return _arrived, (self._key, self._maxsize, self._policy, is_of_task, owner.is_closed)

    def __repr__(self) -> str:
        limit = "" if self._maxsize is None else f" of at most {self._maxsize}"
        where = (
            f"{len(self._end.values)} queued"
            if isinstance(self._end, QueueOwner)
            else "made in another process"
        )
        return f"<DataQueue{limit}: {where}{', closed' if self.is_closed else ''}>"


# --- queues of this process -----------------------------------------------------------------------

_here: weakref.WeakValueDictionary[str, DataQueue[Any]] = weakref.WeakValueDictionary()  # by key


def deliver(key: str, pickled: bytes) -> None:
    """Take a worker's value for a queue; drop it if nobody holds that any more."""
    queue = _here.get(key)
    if queue is not None and isinstance(queue._end, QueueOwner):
        queue._end.accept(Packed(pickled))


def offer(key: str, pickled: bytes, answer: Answer) -> None:
    """Take a worker's value as soon as there is room; answer "taken" or "closed" then."""
    queue = _here.get(key)
    if queue is not None and isinstance(queue._end, QueueOwner):
        queue._end.offer(Packed(pickled), answer)
    else:  # nobody holds it any more: the value is dropped
        answer(TAKEN)


def _arrived(
    key: str, maxsize: int | None, policy: str, is_of_task: bool, is_closed: bool
) -> DataQueue[Any]:
    queue = _here.get(key)
    if queue is None:
        queue = DataQueue.__new__(DataQueue)
        proxy = proxies_by_key.get(key)
        if proxy is None:
            proxy = proxies_by_key[key] = QueueProxy(key, maxsize, policy, is_of_task)
        proxy.is_closed |= is_closed
        queue._set_up(key, maxsize, policy, proxy)
    return queue


def _become_proxies() -> None:
    # in a forked child, the parent's queues are those of another process
    for queue in list(_here.values()):
        queue._end = QueueProxy(queue._key, queue._maxsize, queue._policy, is_of_task=False)
    _here.clear()
    kept.clear()
    sources.clear()


os.register_at_fork(after_in_child=_become_proxies)


def check_timeout(timeout_s: Any) -> None:
    """Raise an error for a time to wait (or None) that is not a number, or negative."""
    if timeout_s is None:
        return
    if not isinstance(timeout_s, numbers.Real) or isinstance(timeout_s, bool):
        raise InvalidTypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}.")
    if not float(timeout_s) >= 0:
        raise InvalidValueError(
            f"timeout_s must be at least 0, not {timeout_s}. Use None to wait forever."
        )


# --- owner: the process that reads and closes a queue ---------------------------------------------


Answer = Callable[[str], object]
"""Takes the outcome of an offered value, TAKEN or CLOSED; it returns at once."""

TAKEN, CLOSED = "taken", "closed"

LINGER_S = 0.5
"""How long the listeners' thread waits for a value before it ends [s]; another replaces it."""

LOOK_AGAIN_S = 0.05
"""The length of a wait's pieces [s]: a thread is cancelled only while it runs Python code."""

PATIENCE_S = 10.0
"""A `put` warns when it waits for room, and nothing was read for this long [s]."""

NOBODY_READS = (
    "put() waits for room in a queue of at most %d values, and nothing was read for %g s. Read in"
    " another thread: with profile='inline', tasks run in the thread that submits them."
)

logger = logging.getLogger("raypool")


class Listener:
    """A function that gets values until `remove` is called."""

    def __init__(self, fn: Callable[..., object], on_remove: Callable[[Listener], None]) -> None:
        self._fn = fn
        self._on_remove = on_remove
        self._has_failed = False
        self.is_removed = False

    def remove(self) -> None:
        """Stop calling the function; a running call completes. A second `remove` has no effect."""
        self.is_removed = True
        self._on_remove(self)

    def call(self, *values: Any) -> None:
        """Call the function; its first exception is logged."""
        try:
            self._fn(*values)
        except BaseException:  # also sys.exit(): other listeners need the thread
            if not self._has_failed:  # the same traceback for each value would fill a disk
                logger.exception(
                    "The listener %r failed; it is still called for later values, but further"
                    " failures are not logged.",
                    self._fn,
                )
            self._has_failed = True


class Packed:
    """A value from another process."""

    __slots__ = ("pickled",)

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled


def opened(entry: Any) -> Any:
    """Return the value of an entry.

    Raises:
        SerializationError: It comes from another process and cannot be unpickled here.
    """
    if type(entry) is not Packed:
        return entry
    try:
        return pickle.loads(entry.pickled)
    except Exception as error:  # whatever the user's classes raise
        raise SerializationError(
            "A value has come through a queue but cannot be unpickled here"
            f" ({type(error).__name__}: {error}). Its class must be importable in this process"
            " too.",
            what="a value of a queue",
        ) from error


class _Putter:
    """A value that waits for room: of a thread here, or of another process (`answer`)."""

    __slots__ = ("answer", "bell", "entry", "outcome")

    def __init__(self, entry: Any, answer: Answer | None = None) -> None:
        self.entry = entry
        self.answer = answer
        self.outcome: str | None = None
        self.bell = threading.Lock()  # which the thread here tries to get
        self.bell.acquire()

    def settle(self, outcome: str) -> None:
        """Note its outcome, TAKEN or CLOSED."""
        self.outcome = outcome
        self.bell.release()


kept: dict[str, object] = {}
"""Queues with listeners, by key: this reference keeps them alive."""

sources: list[Agents] = []
"""The agents of pools from whose workers values may come."""


class QueueOwner:
    """A queue in the process that has made it."""

    def __init__(self, key: str, maxsize: int | None, keeps_latest: bool) -> None:
        self.key = key
        self.values: deque[Any] = deque(maxlen=maxsize if keeps_latest else None)
        self.is_of_task = in_task()
        self.is_closed = False
        self.has_travelled = False
        self._capacity = math.inf if maxsize is None or keeps_latest else maxsize
        self._num_taken = 0
        self._putters: deque[_Putter] = deque()
        self._untold: list[_Putter] = []  # those of other processes that have an outcome
        self._listeners: list[Listener] = []
        # Reentrant: the queue may be collected, and so call `abandon`, in a thread that holds the
        # lock. And a thread may be interrupted while it takes the lock: unlike a condition, a plain
        # lock is not left locked then.
        self._lock = threading.RLock()
        self._filled = threading.Condition(self._lock)  # readers wait for it: something has arrived
        self._emptied = threading.Condition(self._lock)  # `close` waits for it
        self._is_closing = False  # closed, but something may still be on its way
        self._server: threading.Thread | None = None
        self._is_handing_out = False

    # --- values that arrive -----------------------------------------------------------------------

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
            num_taken, until = self._num_taken, time.monotonic() + PATIENCE_S
            while putter.outcome is None:
                putter.bell.acquire(timeout=LOOK_AGAIN_S)
                if time.monotonic() > until:
                    until = math.inf
                    if self._num_taken == num_taken:
                        logger.warning(NOBODY_READS, self._capacity, PATIENCE_S)
        except BaseException:  # Ctrl-C, or the task was cancelled
            with self._lock, contextlib.suppress(ValueError):
                self._putters.remove(putter)
            raise
        if putter.outcome == CLOSED:
            raise closed_error()

    def _enqueue(self, putter: _Putter) -> None:
        """Let a value in, or have it wait for room behind others."""
        if self.is_closed:
            putter.settle(CLOSED)
        elif self._has_room():
            self._append(putter.entry)
            putter.settle(TAKEN)
        else:
            self._putters.append(putter)

    def accept(self, entry: Any) -> None:
        """Take a value from another process."""
        with self._lock:
            # while the queue is being closed, what still arrives was put before
            if not self.is_closed or self._is_closing:
                self._append(entry)

    def offer(self, entry: Any, answer: Answer) -> None:
        """Take a value from another process, now or when there is room."""
        putter = _Putter(entry, answer)
        with self._lock:
            self._enqueue(putter)
            outcome = putter.outcome
        # outside the lock, as in `_let_in`: it is a callback
        if outcome is not None:
            answer(outcome)

    def _has_room(self) -> bool:
        return len(self.values) < self._capacity and not self._putters

    def _append(self, entry: Any) -> None:
        if self._listeners:
            self._serve()  # first: if a signal interrupts after it, no value is left unserved
        self.values.append(entry)
        self._filled.notify()

    # --- values that are taken --------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> Any:
        """Return the oldest entry."""
        deadline = math.inf if timeout_s is None else time.monotonic() + float(timeout_s)
        entry, is_out = None, False
        try:
            with self._lock:
                while not self.values or self._listeners:
                    if self._listeners:
                        raise InvalidValueError(
                            "get() cannot be called while the queue has listeners, which get every"
                            " value. Remove them first."
                        )
                    if self.is_closed and not self._is_closing:
                        raise QueueClosedError(
                            "The queue was closed, and everything in it was read."
                        )
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError(
                            f"Nothing was put into the queue within {timeout_s:g} s."
                        )
                    self._filled.wait(min(left_s, 10 * LOOK_AGAIN_S))
                # Python looks for signals after a call: none arrives between these two lines
                entry, is_out = self.values[0], True
                self.values.popleft()
                self._num_taken += 1
            self._let_in()
        except BaseException:  # Ctrl-C, or the task was cancelled
            self._let_in()
            if is_out:
                self._put_back(entry)
            raise
        return entry

    def _put_back(self, entry: Any) -> None:
        with self._lock:
            if len(self.values) != self.values.maxlen:
                self.values.appendleft(entry)
                self._filled.notify()

    def _let_in(self) -> None:
        """Let in those for whom there is room, and reject all once the queue is closed.

        If it is interrupted, the next call goes on: a worker that is not told waits forever.
        """
        with self._lock:
            while self._putters:
                putter = self._putters[0]
                if putter.outcome is None:
                    if self.is_closed:
                        putter.outcome = CLOSED
                    elif len(self.values) < self._capacity:
                        if self._listeners:
                            self._serve()  # first, as in `_append`
                        putter.outcome = TAKEN  # no signal arrives between this and the next line
                        self.values.append(putter.entry)
                        self._filled.notify()
                    else:
                        break
                if putter.answer is not None:
                    self._untold.append(putter)
                elif putter.bell.locked():
                    putter.bell.release()
                self._putters.popleft()
        for putter in list(self._untold):
            if putter.answer is not None and putter.outcome is not None:
                putter.answer(putter.outcome)
            with contextlib.suppress(ValueError):  # another thread has told it too
                self._untold.remove(putter)

    # --- listeners --------------------------------------------------------------------------------

    def listen(self, fn: Callable[[Any], object]) -> Listener:
        """Add a listener."""
        listener = Listener(fn, self._unlisten)
        with self._lock:
            self._listeners.append(listener)
            if self.values:
                self._serve()
            self._end_listening()
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

    def _end_listening(self) -> None:
        """Let go of the listeners and the queue if nothing more can come; the caller has the lock.

        The finalizer of the queue holds this object, so a listener that holds the queue would keep
        it as long as the process lives.
        """
        is_over = self.is_closed and not self._is_closing
        if is_over and not self.values and not self._is_handing_out:
            self._listeners.clear()
            kept.pop(self.key, None)

    def _serve(self) -> None:
        # a thread that is not alive was interrupted before it began
        if self._server is not None and self._server.is_alive():
            return
        self._server = threading.Thread(
            target=self._hand_out, name=f"raypool-queue-{self.key[:8]}", daemon=True
        )
        self._server.start()

    def _hand_out(self) -> None:
        """Give the listeners the values, one by one; end after a silence."""
        while True:
            with self._lock:
                if self._server is not threading.current_thread():
                    return  # it began late, and another has its place
                self._is_handing_out = False
                if not self.values:
                    self._emptied.notify_all()  # `close` may wait for that
                self._filled.wait_for(
                    lambda: self.values or not self._listeners or self.is_closed, LINGER_S
                )
                if not (self.values and self._listeners):
                    self._server = None
                    self._end_listening()
                    return
                self._is_handing_out = True
                listeners = tuple(self._listeners)
                entry = self.values.popleft()
                self._num_taken += 1
            self._let_in()
            self._hand_over(entry, listeners)
            del entry

    def _hand_over(self, entry: Any, listeners: tuple[Listener, ...]) -> None:
        try:
            value = opened(entry)
        except BaseException:
            # also what the user's code raises while it is unpickled: later values need the thread
            logger.exception("No listener receives this value.")
            return
        is_had = False
        for listener in listeners:
            if not listener.is_removed:
                is_had = True
                listener.call(value)
        if not is_had:  # they were removed in this instant: the value waits for others
            self._put_back(entry)

    # --- close ------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Wait for values of tasks that have ended; return whether there could be any."""
        if not self.has_travelled or not sources:
            return False
        for source in tuple(sources):
            # then nothing more comes from there
            with contextlib.suppress(PoolClosedError, WorkerLostError):
                source.catch_up({})
        return True

    def close(self) -> None:
        """Close it; return when all values have arrived, and the listeners have received them."""
        is_first = False
        try:
            try:
                with self._lock:
                    is_first = not self.is_closed
                    self.is_closed = True
                    self._is_closing |= is_first
                self._let_in()
            except BaseException:
                self._let_in()
                raise
            if is_first and self.has_travelled:
                for source in tuple(sources):
                    # then nothing more comes from there
                    with contextlib.suppress(PoolClosedError, WorkerLostError):
                        source.catch_up(source.ask("end_queue", self.key))
        finally:
            with self._lock:
                self._is_closing &= not is_first
                self._filled.notify_all()
                # a listener that closes the queue must not wait for itself
                is_own = threading.current_thread() is self._server
                while self._listeners and not is_own and (self.values or self._is_handing_out):
                    self._emptied.wait(LOOK_AGAIN_S)  # in pieces, as in `put`
                self._end_listening()

    def abandon(self) -> None:
        """Release those who wait for room in other processes: the queue is forgotten."""
        self._capacity = math.inf
        self._let_in()


def closed_error() -> QueueClosedError:
    """Return the error of `put` into a closed queue."""
    return QueueClosedError("The queue was closed, so nothing more can be put into it.")


# --- proxy: a queue in a worker -------------------------------------------------------------------


class QueueProxy:
    """A queue in any other process: its key, and a connection to its owner."""

    def __init__(self, key: str, maxsize: int | None, policy: str, is_of_task: bool) -> None:
        self.key = key
        self.is_of_task = is_of_task
        self.is_closed = False
        self._maxsize = maxsize
        self._policy = policy
        self._joined: WorkerLink | None = None

    def put(self, value: Any) -> None:
        """Send a value."""
        way = this_process.link
        if way is None or self.is_of_task:
            this_process.check_connected("DataQueue.put")
            raise InvalidValueError(
                "This process neither made the queue nor is a worker of a pool of the process that"
                " made it. Make the queue in the process that opens the pool, and call put() in"
                " its tasks."
            )
        if self.is_closed:
            raise closed_error()
        pickled = way.pack(value, "a value of a queue")
        if self._maxsize is not None and self._policy == "block":
            if way.ask("offer", self.key, pickled) == CLOSED:
                self.is_closed = True
        else:
            if self._joined is not way:  # once for each exchange, which tells of the queue's end
                _hear_of_ends(way)
                if way.ask("join_queue", self.key, way.worker_id):
                    self.is_closed = True  # never False: `_hear` may know more by now
                self._joined = way
            if self.is_closed:
                raise closed_error()
            if self._maxsize is None:
                way.send("queue", self.key, pickled)
            else:
                way.send_latest(self.key, self._maxsize, pickled)
        # It may have been closed in this instant. What was sent before this process has said that
        # it knows still counts.
        if self.is_closed:
            raise closed_error()


proxies_by_key: weakref.WeakValueDictionary[str, QueueProxy] = weakref.WeakValueDictionary()
_heard: WorkerLink | None = None


def _hear_of_ends(way: WorkerLink) -> None:
    """Start a thread that waits for the ends of queues, for as long as the exchange lives."""
    # until it is `_heard` there may be two, which does no harm
    if _heard is not way:
        threading.Thread(target=_hear, args=(way,), name="raypool-queue-ends", daemon=True).start()


def _hear(way: WorkerLink) -> None:
    global _heard
    _heard = way
    ended: list[str] = []
    number = 0
    while True:
        try:
            ended = way.ask("queue_ends", way.worker_id, ended, number)
            for key in ended:
                proxy = proxies_by_key.get(key)
                if proxy is not None:
                    proxy.is_closed = True
            number = way.flush()
        except Exception:
            # the exchange was lost, and the next `put` joins another; or the pool ends
            if _heard is way:
                _heard = None  # before `_joined`, which `put` looks at first
            for proxy in list(proxies_by_key.values()):
                if proxy._joined is way:
                    proxy._joined = None
            return
