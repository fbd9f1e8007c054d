"""Values on their way from tasks to whoever made the queue: each sender's in order, and none lost.

A queue lives in the process that has made it. It travels as a key; what is put elsewhere comes here::

    worker: put ──▶ link.send ──▶ the pool's agent ──▶ hub ──▶ deliver(key, payload)            without a limit, or "latest"
    worker: put ──▶ link.ask("offer") ──▶ Exchange ──▶ offer(key, payload, answer) ──▶ answer   with a limit: it waits for room

In pools of this process ("threads", "inline") it is the same object everywhere.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

from raypool.counts import whole_number
from raypool.errors import InvalidTypeError, InvalidValueError, QueueClosedError
from raypool.queue_away import Away, away_by_key
from raypool.queue_home import TAKEN, Answer, Home, Listener, Packed, Source, kept, opened, sources
from raypool.worker.running import in_task

T = TypeVar("T")


class DataQueue(Generic[T]):
    """A queue from tasks to here: they `put`, and whoever made it reads with `get`, in a loop, or by `after_each`.

    It goes to tasks like any value: in an argument, in a closure, in a list. What a task puts arrives while the task runs, in the
    order in which it was put there; nothing is lost, also not what was put just before a task ended or was cancelled. (A worker
    that is killed may take with it what it has put in its last tenth of a second.) On Ray, what is sent is what the value
    is at `put`; in pools of this process it is the value itself.

    A queue that nobody holds any more, and that has no listeners, is forgotten: what is still put is dropped.

    Args:
        maxsize: With "block", at most so many values wait to be read, put by whomever; `put` waits until there is room. With
            "latest", the newest so many are kept (one, if None). None: no limit.
        policy: What to do when it is full: "block" the one who puts, or keep the "latest" and drop the oldest.

    Raises:
        InvalidValueError, InvalidTypeError: An argument cannot work.

    Source:
        MATLAB R2025b, parallel.pool.DataQueue and PollableDataQueue; the limit is that of Python's `queue.Queue`.

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

    def __init__(self, maxsize: int | None = None, policy: Literal["block", "latest"] = "block") -> None:
        if policy not in ("block", "latest"):
            raise InvalidValueError(f"policy={policy!r} is neither 'block' nor 'latest'.")
        if maxsize is not None:
            number = whole_number(maxsize)
            if number is None:
                raise InvalidTypeError(f"maxsize={maxsize!r} is not a whole number.")
            if number < 1:
                raise InvalidValueError(f"maxsize={number} is less than 1. Leave it out for a queue without a limit.")
            maxsize = number
        if policy == "latest":
            maxsize = maxsize or 1
        key = uuid.uuid4().hex
        self._set_up(key, maxsize, policy, Home(key, maxsize, policy == "latest"))

    def _set_up(self, key: str, maxsize: int | None, policy: str, end: Home | Away) -> None:
        self._key, self._maxsize, self._policy = key, maxsize, policy
        self._end = end
        if isinstance(end, Home):
            _here[key] = self
            weakref.finalize(self, end.abandon).atexit = False

    # --- in tasks and here --------------------------------------------------------------------------------------------

    def put(self, value: T) -> None:
        """Put a value in. It waits only where the queue has a limit, is full, and is to "block".

        In a pool with profile "inline" the task runs in the thread that has asked for it: read in another, or by `after_each`.

        Raises:
            QueueClosedError: The queue was closed; also while it waited for room.
            SerializationError: The value cannot be sent; it names the variable.
            InvalidValueError: This process is neither the one that has made the queue nor a worker of its pools.
            PoolClosedError: The pool has ended meanwhile.
        """
        self._end.put(value)

    @property
    def backlog(self) -> int:
        """How many values wait to be read; 0 in workers, which cannot know."""
        home = self._end
        if isinstance(home, Away):
            return 0
        home.catch_up()
        return len(home.values)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, as far as is known here."""
        return self._end.is_closed

    # --- here ---------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> T:
        """Return the value that has waited longest, waiting for one if there is none.

        Args:
            timeout_s: How long to wait [s]; 0 only looks, None waits for ever.

        Raises:
            TimeoutError: Nothing came in this time.
            QueueClosedError: The queue was closed, and everything in it was read.
            SerializationError: The value has come and cannot be unpickled here; the next `get` goes on behind it.
            InvalidValueError: This is a task, or the queue has listeners, which get everything.

        Example:
            >>> queue = DataQueue()
            >>> queue.put("first")
            >>> queue.get(timeout_s=0)
            'first'
            >>> queue.get(timeout_s=0)
            Traceback (most recent call last):
            TimeoutError: Nothing was put into the queue within 0 s.
        """
        check_timeout(timeout_s)
        home = self._home("get")
        try:
            entry = home.take(timeout_s)
        except TimeoutError:
            if not home.catch_up():
                raise
            entry = home.take(0.0, timeout_s)
        return opened(entry)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[T]:
        """Yield what comes, until the queue is closed and everything in it was read.

        Example:
            >>> queue = DataQueue()
            >>> for number in range(3):
            ...     queue.put(number)
            >>> queue.close()
            >>> list(queue)
            [0, 1, 2]
        """
        with contextlib.suppress(QueueClosedError):
            while True:
                yield self.get()

    def after_each(self, fn: Callable[[T], object]) -> Listener:
        """Call `fn(value)` for each value: first for those that wait already, then for each that comes.

        It is called in a thread of the queue's, for one value after the other. What it raises is logged and stops nothing. Each
        of several listeners gets every value that is handed out while it is there. A queue with listeners lives until they
        are removed, or it is closed.

        Returns:
            The listener; call its `remove()` when it is to get no more. What comes when none is left waits in the queue.

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
            raise InvalidTypeError(f"{fn!r} is not callable. Give a function of one value.")
        home = self._home("after_each")
        kept[self._key] = self
        return home.listen(fn)

    def close(self) -> None:
        """Let nothing more in: from now on `put` raises `QueueClosedError`, in workers too. What is in it can still be read.

        Those who wait for room get that error now. It returns when everything that was put before is here, and
        the listeners have had it (unless a listener calls it). A closed queue cannot be opened again; twice does nothing.

        Raises:
            InvalidValueError: This is a task.

        Source:
            MATLAB R2025b, close (PollableDataQueue).
        """
        self._home("close").close()

    def _home(self, verb: str) -> Home:
        home = self._end
        if isinstance(home, Away) or (in_task() and not home.is_of_task):
            raise InvalidValueError(
                f"{verb}() was called in a task. A queue is read and closed where it was made; in tasks, call put()."
            )
        return home

    def __reduce__(self) -> Any:
        """Let it travel as a key."""
        home = self._end
        is_of_task = home.is_of_task
        if isinstance(home, Home):
            home.has_travelled = True
        return _arrived, (self._key, self._maxsize, self._policy, is_of_task, home.is_closed)

    def __repr__(self) -> str:
        limit = "" if self._maxsize is None else f" of at most {self._maxsize}"
        where = f"{len(self._end.values)} values wait" if isinstance(self._end, Home) else "made in another process"
        return f"<DataQueue{limit}: {where}{', closed' if self.is_closed else ''}>"


# --- who is here ------------------------------------------------------------------------------------------------------

_here: weakref.WeakValueDictionary[str, DataQueue[Any]] = weakref.WeakValueDictionary()  # by key


def deliver(key: str, pickled: bytes) -> None:
    """Take what a worker has put into a queue; if nobody holds that any more, drop it."""
    queue = _here.get(key)
    if queue is not None and isinstance(queue._end, Home):
        queue._end.accept(Packed(pickled))


def offer(key: str, pickled: bytes, answer: Answer) -> None:
    """Take what a worker wants to put into a queue as soon as there is room; `answer` is told "taken" or "closed" then."""
    queue = _here.get(key)
    if queue is not None and isinstance(queue._end, Home):
        queue._end.offer(Packed(pickled), answer)
    else:
        answer(TAKEN)


def add_source(source: Source) -> None:
    """Note a pool from whose workers values may come."""
    sources.append(source)


def drop_source(source: Source) -> None:
    """Note that nothing more will come from a pool."""
    with contextlib.suppress(ValueError):
        sources.remove(source)


def _arrived(key: str, maxsize: int | None, policy: str, is_of_task: bool, is_closed: bool) -> DataQueue[Any]:
    queue = _here.get(key)
    if queue is None:
        queue = DataQueue.__new__(DataQueue)
        away = away_by_key.get(key)
        if away is None:
            away = away_by_key[key] = Away(key, maxsize, policy, is_of_task)
        away.is_closed |= is_closed
        queue._set_up(key, maxsize, policy, away)
    return queue


def _leave_home() -> None:
    """In a forked child, queues of the parent's are elsewhere."""
    for queue in list(_here.values()):
        queue._end = Away(queue._key, queue._maxsize, queue._policy, is_of_task=False)
    _here.clear()
    kept.clear()
    sources.clear()


os.register_at_fork(after_in_child=_leave_home)


def check_timeout(timeout_s: Any) -> None:
    """Raise the error for a time to wait (or None) that is no number, or negative."""
    if timeout_s is None:
        return
    if not isinstance(timeout_s, numbers.Real) or isinstance(timeout_s, bool):
        raise InvalidTypeError(f"timeout_s={timeout_s!r} is not a number of seconds.")
    if not float(timeout_s) >= 0:
        raise InvalidValueError(f"timeout_s={timeout_s} is no time to wait. Give 0 to look only, None to wait for ever.")
