"""Inboxes of a driver, with its clock: with a thread of its own, or without."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Any, Protocol

from raypool.core.messages import Event
from raypool.worker.interrupts import ctrl_c

BURST = 8
"""The number of waiting messages at which a posting thread lets the driver run."""

LONGEST_WAIT_S = 3600.0
"""Operating systems limit the length of a wait; a longer wait is repeated."""

Message = tuple[Event | None, Any]
"""An event, and what goes with it but not into the core. Without an event: something to call."""


class Inbox(Protocol):
    """Where messages for the driver arrive, and its clock."""

    is_threaded: bool

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be handled now."""

    def put(self, message: Message) -> None:
        """Take in a message, from any thread."""

    def give_way(self) -> None:
        """Let the driver begin, if the posting thread would else run on."""

    def get(self, until: float | None) -> Message | None:
        """Return the next message; None when `until` has come, or nothing more can come."""

    def now(self) -> float:
        """Return the time [s] on a clock that never goes back."""


class ThreadInbox:
    """For a driver with a thread of its own: it waits."""

    is_threaded = True

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.put = self._queue.put
        self.now = time.monotonic

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be handled now."""
        return self._queue.empty()

    def give_way(self) -> None:
        """Let the driver begin with a burst of messages, once."""
        if self._queue.qsize() == BURST:  # not >=: once for each burst
            # gives Python's lock to the driver, which else has it after `sys.getswitchinterval()`
            time.sleep(0)

    def get(self, until: float | None) -> Message | None:
        """Wait for a message, or until the time has come."""
        try:
            return self._queue.get(
                timeout=None if until is None else min(max(0.0, until - self.now()), LONGEST_WAIT_S)
            )
        except queue.Empty:
            return None


class InlineInbox:
    """For a driver that runs in whatever thread posts something."""

    is_threaded = False

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()  # needs no lock
        self.put = self._messages.append
        self.now = time.monotonic

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be handled now."""
        return not self._messages

    def give_way(self) -> None:
        """Do nothing: the posting thread itself is the driver."""

    def get(self, until: float | None) -> Message | None:
        """Return the next message; if only time can bring one, wait for that."""
        if self._messages:
            return self._messages.popleft()
        if until is not None:
            self._wait(until)
        return None

    @ctrl_c.enters
    def _wait(self, until: float) -> None:
        time.sleep(min(max(0.0, until - self.now()), LONGEST_WAIT_S))
