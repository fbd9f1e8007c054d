"""The hub: delivers reports, output and log records of tasks to their feeds, queues and loggers.

It is in the process that opened the pool. A worker's batches arrive by themselves or with the
answers to calls, so the hub first puts them in order by their numbers.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

from raypool.channel import queues
from raypool.channel.capture import Records
from raypool.channel.feed import Feed, Holder, feed_of
from raypool.errors import InternalError
from raypool.worker.running import TaskContext

logger = logging.getLogger("raypool")

CATCH_UP_S = 5.0
"""How long a reader waits for messages that were sent before a task ended [s]."""

MAX_EARLY = 100
"""When this many batches wait for an earlier one, that one counts as lost."""


class Hub:
    """Delivers messages of tasks; those for a holder that is gone are dropped.

    `on_early` takes reports about calls that last: worker, message.
    """

    on_early: Callable[[int, bytes], object] | None = None

    def __init__(self) -> None:
        # by task
        self._holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
        # not the condition: a task that is cancelled while it takes that could leave it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # by worker: the newest batch before which none is missing
        self._arrived: dict[int, int] = {}
        # by worker and number: batches that wait for one before them
        self._early: dict[int, dict[int, bytes]] = {}
        self._awaited: dict[int, int] = {}  # by worker: the newest batch that somebody may wait for
        self._gone: set[int] = set()  # workers for which nobody waits
        self._is_closed = False
        self.records = Records()

    def watch(self, task_id: int, holder: Holder) -> None:
        """Note the holder of a task, which gets its messages."""
        self._holders[task_id] = holder

    def say(self, note: TaskContext, kind: str, payload: Any) -> bool:
        """Take "metrics" or "text" of a task in this process; see `TaskContext`."""
        feed = self._feed_of(note.task_id)
        if feed is None:
            return False
        if kind == "metrics":
            time_, values = payload
            feed.add_row((time_, note.index, note.attempt, values))
            return False
        feed.add_text(payload, 0, note.index, note.call_id)
        return feed.on_text is not None

    def deliver(self, worker_id: int, number: int, batch: bytes) -> None:
        """Take a batch of another process's `Outbox`; b"" is none."""
        with self._changed:
            if not batch or number <= self._arrived.get(worker_id, 0):
                return
            early = self._early.setdefault(worker_id, {})
            early[number] = batch
            if len(early) > MAX_EARLY:
                self._skip(worker_id)
            else:
                self._take_in_order(worker_id)

    def waiter(self, worker_id: int, number: int) -> Callable[[], None] | None:
        """Return a function that waits for a worker's batches up to this one; None if all came."""
        with self._changed:
            if self._has_come(worker_id, number):
                return None
            self._awaited[worker_id] = max(number, self._awaited.get(worker_id, 0))
        return functools.partial(self._wait, worker_id, number)

    def catch_up(self) -> None:
        """Wait for all messages of calls that have ended."""
        for worker_id, number in list(self._awaited.items()):
            self._wait(worker_id, number)

    def forget(self, worker_id: int) -> None:
        """Note that a worker has gone: no thread waits for it, but late messages count."""
        with self._changed:
            self._gone.add(worker_id)
            self._skip(worker_id)

    def close(self) -> None:
        """Note that no more messages will arrive."""
        with self._changed:
            self._is_closed = True
            for worker_id in self._early:
                self._skip(worker_id)
            self._changed.notify_all()
        self.records.wait()

    def _has_come(self, worker_id: int, number: int) -> bool:
        return (
            self._arrived.get(worker_id, 0) >= number or worker_id in self._gone or self._is_closed
        )

    def _wait(self, worker_id: int, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_come(worker_id, number), CATCH_UP_S):
                # else they would arrive out of order
                while any(early <= number for early in self._early.get(worker_id, ())):
                    self._skip(worker_id)
                self._arrived[worker_id] = max(self._arrived.get(worker_id, 0), number)
            if self._awaited.get(worker_id, 0) <= number:
                self._awaited.pop(worker_id, None)

    def _skip(self, worker_id: int) -> None:
        """Take the batches that are here, although some before them are lost."""
        early = self._early.get(worker_id)
        if early:
            self._arrived[worker_id] = min(early) - 1
        self._take_in_order(worker_id)

    def _take_in_order(self, worker_id: int) -> None:
        early = self._early.get(worker_id, {})
        number = self._arrived.get(worker_id, 0)
        try:
            while (batch := early.pop(number + 1, None)) is not None:
                number += 1
                for entry in pickle.loads(batch):
                    self._take(worker_id, *entry)
        finally:  # also after an error in a batch, which counts as arrived then
            self._arrived[worker_id] = number
            self._changed.notify_all()

    def _take(self, worker_id: int, kind: str, key: Any, *rest: Any) -> None:
        if kind == "queue":
            queues.deliver(key, *rest)
        elif kind == "log":
            self.records.put(rest[-1])
        elif kind == "warning":
            logger.warning("%s", *rest)
        elif kind == "early":
            if self.on_early is not None:
                self.on_early(worker_id, *rest)
        elif kind in ("metrics", "text"):
            feed = self._feed_of(key)
            if feed is not None:
                (feed.add_rows if kind == "metrics" else feed.add_text)(*rest)
        else:
            raise InternalError(f"A worker sent a message of an unknown kind: {kind!r}.", story=())

    def _feed_of(self, task_id: int) -> Feed | None:
        holder = self._holders.get(task_id)
        return None if holder is None else feed_of(holder)
