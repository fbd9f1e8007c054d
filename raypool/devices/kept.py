"""What this process keeps on its GPU on purpose, so that it can be told from what tasks have left there by mistake."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from raypool.devices.gpus import Allocator


class Purposes(NamedTuple):
    """What has been kept on purpose for a while: so many bytes more, or all that is there."""

    num_bytes: int
    is_all: bool


class Kept:
    """Measures what is allocated on purpose, once somebody watches; before that it costs nothing and does nothing.

    What cannot be made again, if this process ends, is in `treasures`, by whatever names it has. A finalizer may take something
    out of it at any moment.
    """

    def __init__(self) -> None:
        self.treasures: dict[str, None] = {}
        self._allocator: Allocator | None = None
        self._num_bytes = 0
        self._is_all = False
        self._is_counting = False
        self._lock = threading.Lock()

    def watch(self, allocator: Allocator) -> None:
        """Measure from now on, by this allocator."""
        self._allocator = allocator

    @contextlib.contextmanager
    def on_purpose(self) -> Iterator[None]:
        """Count what is allocated meanwhile, and is still there at the end; within another one, that counts it."""
        if self._allocator is None or not self._enter():
            yield
            return
        before = self._allocator.allocated()
        try:
            yield
        finally:
            with self._lock:
                self._is_counting = False
                self._num_bytes += max(self._allocator.allocated() - before, 0)

    def _enter(self) -> bool:
        """Begin to count, unless somebody does already."""
        with self._lock:
            was_counting, self._is_counting = self._is_counting, True
            return not was_counting

    def all(self) -> None:
        """Take it that all is on purpose which is there when the task ends."""
        with self._lock:
            self._is_all = True

    def take(self) -> Purposes:
        """Return what was kept since this was asked last."""
        with self._lock:
            purposes = Purposes(self._num_bytes, self._is_all)
            self._num_bytes, self._is_all = 0, False
            return purposes


kept = Kept()
"""Of this process."""
