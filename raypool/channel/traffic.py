"""Counts the bytes sent to the workers of a pool and received from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Bytes(NamedTuple):
    """How many bytes have gone to a worker, or to all of them, and how many have come from
    there.
    """

    sent_bytes: int
    received_bytes: int


NONE = Bytes(0, 0)


class Traffic:
    """Counts what goes to each worker of a pool and what comes from there, since the pool was
    opened. From any thread.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Bytes] = {}  # by place
        self._lock = threading.Lock()

    def add(self, place: int, sent_bytes: int, received_bytes: int) -> None:
        """Note what has gone to the worker in a place, and what has come from it."""
        with self._lock:
            sent, received = self._counts.get(place, NONE)
            self._counts[place] = Bytes(sent + sent_bytes, received + received_bytes)

    def counts(self) -> dict[int, Bytes]:
        """Return what has been counted so far, by place."""
        with self._lock:
            return dict(self._counts)


class TransferBytes:
    """How many bytes have gone to each worker and come from it while a `with` block has run; see
    `ParallelPool.transfer_bytes`.

    It can be read within the block, too: what has gone so far.
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
        """Return the numbers of the workers that there are, or were at the beginning or the end."""
        return (
            self._present if self._after is not None else sorted({*self._present, *self._workers()})
        )

    def _moved(self) -> dict[int, Bytes]:
        after = self._traffic.counts() if self._after is None else self._after
        moved = {}
        for worker in self._there():
            (sent, received), (sent_before, received_before) = (
                after.get(worker, NONE),
                self._before.get(worker, NONE),
            )
            moved[worker] = Bytes(sent - sent_before, received - received_before)
        return moved

    @property
    def total(self) -> Bytes:
        """What has gone to all of them and come from there: a pair of numbers, `sent_bytes` and
        `received_bytes`.
        """
        moved = self._moved().values()
        return Bytes(
            sum(each.sent_bytes for each in moved), sum(each.received_bytes for each in moved)
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each worker, by its number, and the columns `sent_bytes`
        and `received_bytes`.
        """
        import pandas as pd

        moved = self._moved()
        index = pd.Index(list(moved), dtype="int64", name="worker")
        return pd.DataFrame(
            list(moved.values()), index=index, columns=list(Bytes._fields), dtype="int64"
        )

    def __repr__(self) -> str:
        sent, received = self.total
        return f"<TransferBytes: {sent:,} sent, {received:,} received>"
