"""Several futures as one: a future of their results, and an end for all of them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Reversible, Sequence
from concurrent.futures import CancelledError, InvalidStateError
from datetime import UTC, datetime
from typing import Any

from raypool.channel.feed import Feed
from raypool.futures import Deferred, Future, owners_of


def _joined_feed(futures: Sequence[Future[Any]]) -> Feed:
    feed = Feed()
    for future in futures:
        feed.add_all_of(future._caught_up())
    return feed


class _Whole(Future[list[Any]]):
    """A future of the results of others, its parts; it runs when one of them does, and until the last has ended."""

    parts: Sequence[Future[Any]] = ()

    def running(self) -> bool:
        """Whether something of it runs, or has run, and it has not ended."""
        return not self.done() and any(part.running() or part.done() for part in self.parts)


class _Gathered:
    """The results of futures that have ended well, brought here when somebody asks, and not in the thread of the pool."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def get(self) -> list[Any]:
        """Return the list of them, as the only value."""
        return [[future.result() for future in self._futures]]


def _first_error(futures: Sequence[Future[Any]]) -> BaseException | None:
    """Return the first error of these, which have ended, as far as it is known without a look at their values."""
    for future in futures:
        error = CancelledError() if future.cancelled() else future.error
        if error is not None:
            return error
    return None


def cancel_each(futures: Reversible[Future[Any]]) -> None:
    """Cancel those that have not ended, the last first: a worker that becomes free would begin with the next that waits."""
    for future in reversed(futures):
        future.cancel()


def gather(futures: Sequence[Future[Any]], name: str) -> Future[list[Any]]:
    """Return a future of all their results, in this order; it fails with the first of their errors when all have ended.

    Its metrics and its diary are theirs, those of one after those of the other.
    """

    def ask_parts(whole: Future[list[Any]]) -> None:
        if whole.cancelled():
            cancel_each(futures)
            whole.notify_cancelled()
        else:
            for future in futures:
                future.request_stop()

    whole = _Whole(name, on_ask=ask_parts)
    whole.parts = futures
    whole.owners = owners_of(futures)
    whole.catch_up = functools.partial(_joined_feed, futures)
    lock = threading.Lock()
    missing = len(futures)

    def note(_: Any) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        if not whole.start():
            return
        whole.started_at = min((future.started_at for future in futures if future.started_at is not None), default=None)
        whole.finished_at = datetime.now(UTC)
        whole.attempts = max(future.attempts for future in futures)
        error = _first_error(futures)
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            if error is None:
                whole.set_result(Deferred(_Gathered(futures), 0))  # type: ignore[arg-type]
            else:
                whole.set_exception(error)

    if not futures:
        whole.set_result([])
    for future in futures:
        future.add_done_callback(note)
    return whole
