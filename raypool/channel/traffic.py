"""Counts the bytes sent to the workers of a pool and received from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Bytes(NamedTuple):
    """How many bytes were sent to a worker, or to all workers, and received from there."""

    sent_bytes: int
    received_bytes: int


NONE = Bytes(0, 0)


class Traffic:
    """Counts, from any thread, the bytes to and from each worker since its pool was opened."""

    def __init__(self) -> None:
        self._counts: dict[int, Bytes] = {}  # by place
        self._lock = threading.Lock()  # no sum is lost when two threads add at once

    def add(self, place: int, sent_bytes: int, received_bytes: int) -> None:
        """Count bytes to and from the worker in a place."""
        with self._lock:
            sent, received = self._counts.get(place, NONE)
            self._counts[place] = Bytes(sent + sent_bytes, received + received_bytes)

    def counts(self) -> dict[int, Bytes]:
        """Return the bytes counted so far, by place."""
        with self._lock:
            return dict(self._counts)


class TransferBytes:
    """How many bytes were sent to and received from each worker during a `with` block.

    Within the block it has the numbers so far. See `ParallelPool.transfer_bytes`.
    """

    def __init__(self, traffic: Traffic, workers: Callable[[], Sequence[int]]) -> None:
        self._traffic = traffic
        self._workers = workers
        self._before: dict[int, Bytes] = {}
        self._after: dict[int, Bytes] | None = None
        self._present: Sequence[int] = ()

    def __enter__(self) -> TransferBytes:
        self._after = None
        self._present = self._workers()
        self._before = self._traffic.counts()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._present = self._there()
        self._after = self._traffic.counts()

    def _there(self) -> Sequence[int]:
        """Return the places that have workers now, or had some at the beginning."""
        return sorted({*self._present, *self._workers()})

    def _moved(self) -> dict[int, Bytes]:
        if self._after is None:
            after, places = self._traffic.counts(), self._there()
        else:
            after, places = self._after, self._present
        moved = {}
        for place in places:
            sent, received = after.get(place, NONE)
            sent_before, received_before = self._before.get(place, NONE)
            moved[place] = Bytes(sent - sent_before, received - received_before)
        return moved

    @property
    def total(self) -> Bytes:
        """The sums over all workers, a pair of numbers: `sent_bytes` and `received_bytes`."""
        return Bytes(*map(sum, zip(NONE, *self._moved().values(), strict=True)))

    def to_frame(self) -> pd.DataFrame:
        """Return a table: a row for each worker, columns `sent_bytes` and `received_bytes`."""
        import pandas as pd

        moved = self._moved()
        index = pd.Index(list(moved), dtype="int64", name="worker")
        return pd.DataFrame(
            list(moved.values()), index=index, columns=list(Bytes._fields), dtype="int64"
        )

    def __repr__(self) -> str:
        sent, received = self.total
        return f"<TransferBytes: {sent:,} sent, {received:,} received>"
