"""What a queue is in a worker: a key, and a way to where it was made."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from raypool.errors import InvalidValueError
from raypool.queue_home import CLOSED, closed_error
from raypool.worker.running import Link, link


class Away:
    """What a queue is elsewhere: a key, and a way to where it was made."""

    def __init__(self, key: str, maxsize: int | None, policy: str, is_of_task: bool) -> None:
        self.key = key
        self.is_of_task = is_of_task
        self.is_closed = False
        self._maxsize = maxsize
        self._policy = policy
        self._joined: Link | None = None

    def put(self, value: Any) -> None:
        """Send a value."""
        way = link()
        if way is None or self.is_of_task:
            raise InvalidValueError(
                "This process is neither the one that has made the queue nor a worker of a pool of its own, so nothing can be "
                "put here. Make the queue where the pool is opened, and put into it in tasks."
            )
        if self.is_closed:
            raise closed_error()
        pickled = way.pack(value, "a value of a queue")
        if self._maxsize is not None and self._policy == "block":
            self.is_closed = way.ask("offer", self.key, pickled) == CLOSED
        else:
            self._join(way)
            self._send(way, pickled)
        # It may have been closed in this instant. What was sent before this process has said that it knows still counts.
        if self.is_closed:
            raise closed_error()

    def _send(self, way: Link, pickled: bytes) -> None:
        if self.is_closed:
            return
        if self._maxsize is None:
            way.send("queue", self.key, pickled)
        else:
            way.send_latest(self.key, self._maxsize, pickled)

    def _join(self, way: Link) -> None:
        """Make sure, once for each exchange, that this process hears of the queue's end."""
        if self._joined is not way:
            _hear_of_ends(way)
            self.is_closed = way.ask("join_queue", self.key, way.worker_id)
            self._joined = way


away_by_key: weakref.WeakValueDictionary[str, Away] = weakref.WeakValueDictionary()
"""Those in this process."""

_heard: Link | None = None


def _hear_of_ends(way: Link) -> None:
    """Let a thread wait for the ends of queues, for as long as the pool lives."""
    global _heard
    if _heard is not way:
        threading.Thread(target=_hear, args=(way,), name="raypool-queue-ends", daemon=True).start()
        _heard = way  # after it: if a signal interrupts here, there are two threads, which does no harm


def _hear(way: Link) -> None:
    ended: list[str] = []
    number = 0
    while True:
        try:
            ended = way.ask("queue_ends", way.worker_id, ended, number)
            for key in ended:
                away = away_by_key.get(key)
                if away is not None:
                    away.is_closed = True
            number = way.flush()
        except Exception:  # the pool has ended, and soon this process
            return
