"""A future of the results of several futures, its parts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from raypool.feed import Feed
from raypool.futures import Future, owners_of


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


def gather(futures: Sequence[Future[Any]], name: str) -> Future[list[Any]]:
    """Return a future of all their results, in this order; it fails with the first of their errors when all have ended.

    Its metrics and its diary are theirs, those of one after those of the other.
    """

    def ask_parts(whole: Future[list[Any]]) -> None:
        for future in futures:
            future.cancel() if whole.cancelled() else future.request_stop()
        if whole.cancelled():
            whole.notify_cancelled()

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
        try:
            whole.set_result([future.result() for future in futures])
        except BaseException as error:
            whole.set_exception(error)

    if not futures:
        whole.set_result([])
    for future in futures:
        future.add_done_callback(note)
    return whole
