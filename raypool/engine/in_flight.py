"""The calls that were sent to workers and have not come back. A worker is at its first one; any other waits there until then."""

from __future__ import annotations

from time import time
from typing import NamedTuple

from raypool.core.model import Slice
from raypool.engine.backend import SliceResult


class Sent(NamedTuple):
    """A slice of an attempt; `known` is what became of it if it was not sent at all."""

    piece: Slice
    known: SliceResult | None


class Call:
    """An attempt that was sent to a worker. Only the driver's thread changes it; any may look.

    `began_at`: when the worker came to it, as far as is known here [Unix time, s]; None while it waits behind another one.
    `is_over`: it has come back, or its worker is lost.
    """

    __slots__ = ("attempt_id", "began_at", "is_over", "sent")

    def __init__(self, attempt_id: int, began_at: float | None = None) -> None:
        self.attempt_id = attempt_id
        self.began_at = began_at
        self.is_over = False
        self.sent: list[Sent] = []

    @property
    def is_running(self) -> bool:
        """Whether its worker is at it."""
        return self.began_at is not None and not self.is_over


class InFlight:
    """The calls of each worker, in the order in which they run there."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[int, Call]] = {}  # by worker, by attempt

    def send(self, worker_id: int, attempt_id: int) -> Call:
        """Return the next call of a worker."""
        calls = self._calls.setdefault(worker_id, {})
        call = calls[attempt_id] = Call(attempt_id, None if calls else time())
        return call

    def bring_back(self, worker_id: int, attempt_id: int) -> list[Sent]:
        """Return what a call held that has come back, nothing if its worker was given up; the next one has begun by now."""
        calls = self._calls.get(worker_id, {})
        call = calls.pop(attempt_id, None)
        if call is None:
            return []
        call.is_over = True
        following = next(iter(calls.values()), None)
        if following is None:
            del self._calls[worker_id]
        elif following.began_at is None:
            following.began_at = time()
        return call.sent

    def lose(self, worker_id: int) -> dict[int, Call]:
        """Return the calls of a worker that is lost, by attempt."""
        calls = self._calls.pop(worker_id, {})
        for call in calls.values():
            call.is_over = True
        return calls
