"""The standard library's future without what it needs only once somebody waits for it: 100,000 may stand in a queue."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from concurrent.futures._base import PENDING  # the states have no public names
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Meeting:
    """Where those meet who wait for a future: its lock, and the lists of who is to be told.

    It stands for a `threading.Condition`, which takes ten times as much memory; it has one once a thread waits for this very
    future.
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
        """Wait to be notified; whoever calls this has the lock, and has it again then."""
        if self._awaited is None:
            self._awaited = threading.Condition(self._lock)
        return self._awaited.wait(timeout)

    def notify_all(self) -> None:
        """Wake up whoever waits; whoever calls this has the lock."""
        if self._awaited is not None:
            self._awaited.notify_all()


class _Making:
    """Held for an instant, by whoever is the first at a future: one lock for all of them."""

    lock = threading.RLock()

    @classmethod
    def renew(cls) -> None:
        """In a forked child: another thread of the parent may have held it."""
        cls.lock = threading.RLock()


os.register_at_fork(after_in_child=_Making.renew)


class LeanFuture(concurrent.futures.Future[T], Generic[T]):
    """A `concurrent.futures.Future` that makes its lock and its lists when they are needed."""

    __slots__ = ("_exception", "_meeting", "_result", "_state")

    def __init__(self) -> None:
        # Not the base's, which makes them now.
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._meeting: Meeting | None = None

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
        with _Making.lock:
            if self._meeting is None:  # nobody was quicker
                self._meeting = made
            return self._meeting
