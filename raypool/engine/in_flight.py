"""The calls in flight: sent to workers, not yet answered. A worker runs its first; others wait."""

from __future__ import annotations

from time import time
from typing import NamedTuple

from raypool.channel.records import SliceResult
from raypool.core.model import Slice


class Sent(NamedTuple):
    """A slice of an attempt: the number of its part, or its outcome if it was not sent at all."""

    piece: Slice
    known: SliceResult | None
    number: int = 0


class Call:
    """An attempt that was sent to a worker. Only the driver's thread changes it; any may look.

    `began_at`: when the worker came to it, as far as is known here [Unix time, s]; None while it
        waits behind the call `behind`.
    `is_over`: it has come back, or its worker is lost.
    """

    __slots__ = ("attempt_id", "began_at", "behind", "is_over", "sent")

    def __init__(
        self, attempt_id: int, began_at: float | None = None, behind: int | None = None
    ) -> None:
        self.attempt_id = attempt_id
        self.began_at = began_at
        self.behind = behind
        self.is_over = False
        self.sent: list[Sent] = []

    @property
    def is_running(self) -> bool:
        """Whether its worker is at it."""
        return self.began_at is not None and not self.is_over


class InFlight:
    """The calls of each worker, in the order in which they run there."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[int, Call]] = {}  # by worker, by attempt: dicts keep the order

    def send(self, worker_id: int, attempt_id: int) -> Call:
        """Return the next call of a worker."""
        calls = self._calls.setdefault(worker_id, {})
        call = (
            Call(attempt_id, None, behind=next(reversed(calls)))
            if calls
            else Call(attempt_id, time())
        )
        calls[attempt_id] = call
        return call

    def find(self, worker_id: int, attempt_id: int) -> Call | None:
        """Return a call that has not come back."""
        return self._calls.get(worker_id, {}).get(attempt_id)

    def narrow(self, worker_id: int, attempt_id: int) -> tuple[Call, list[Call]]:
        """Replace a call that continues with fewer items; return the new one, and those behind."""
        calls = self._calls[worker_id]
        numbers = list(calls)
        behind = [calls.pop(number) for number in numbers[numbers.index(attempt_id) + 1 :]]
        before = calls[attempt_id]
        for call in (before, *behind):
            call.is_over = True
        rest = calls[attempt_id] = Call(attempt_id, before.began_at, before.behind)
        return rest, behind

    def bring_back(self, worker_id: int, attempt_id: int) -> list[Sent]:
        """Return the slices of a call that has come back; none if its worker was given up."""
        calls = self._calls.get(worker_id, {})
        call = calls.pop(attempt_id, None)
        if call is None:  # its worker was given up
            return []
        call.is_over = True
        following = next(iter(calls.values()), None)
        if following is None:
            del self._calls[worker_id]
        elif following.began_at is None:
            following.began_at = time()  # as far as is known: its worker took it by itself
        return call.sent

    def lose(self, worker_id: int) -> dict[int, Call]:
        """Return the calls of a worker that is lost, by attempt."""
        calls = self._calls.pop(worker_id, {})
        for call in calls.values():
            call.is_over = True
        return calls
