"""What the items of a loop print, shown while it runs: whole lines, each behind the number of its item.

::

    item 3: epoch 1, loss 0.41
    item 4: epoch 1, loss 0.52
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from raypool.channel import capture

if TYPE_CHECKING:
    from raypool.engine.loop import LoopWork

WAITING_CHARS = 1024 * 1024
"""So much waits to be shown, the newest: a tenth of a second later that is nearly always all."""

OPEN_CHARS = 8192
"""A line that has no end yet is shown when it is this long."""


class ItemLines:
    """Puts together the lines that items print, and shows them on standard output; see `Watcher`.

    Args:
        is_direct: Show each line at once: the items run in the thread that would show them later.
    """

    def __init__(self, is_direct: bool = False) -> None:
        self._is_direct = is_direct
        self._open: dict[int, str] = {}  # by item: a line without its end
        self._waiting: deque[str] = deque()
        self._size = self._num_dropped = 0
        self._lock = threading.RLock()

    def add(self, item: int, text: str) -> None:
        """Take what an item has printed."""
        with self._lock:
            *lines, rest = (self._open.pop(item, "") + text).split("\n")
            rest = rest[rest.rfind("\r", 0, -1) + 1 :]  # of a progress bar that draws over itself, the newest state
            if len(rest) >= OPEN_CHARS:
                lines.append(rest)
            elif rest:
                self._open[item] = rest
            for line in lines:
                self._put(item, line)
        if self._is_direct:
            self._show()

    def _put(self, item: int, line: str) -> None:
        said = line.rstrip().rpartition("\r")[2]
        line = f"item {item}: {said}\n"
        self._waiting.append(line)
        self._size += len(line)
        while self._size > WAITING_CHARS:
            self._size -= len(self._waiting.popleft())
            self._num_dropped += 1

    def update(self, work: LoopWork, total: int | None) -> None:
        """Show the lines that have come."""
        self._show()

    def end(self) -> None:
        """Show what is left, also lines without an end."""
        with self._lock:
            for item, line in self._open.items():
                self._put(item, line)
            self._open.clear()
        self._show()

    def _show(self) -> None:
        with self._lock:
            text, num_dropped = "".join(self._waiting), self._num_dropped
            self._waiting.clear()
            self._size = self._num_dropped = 0
        if num_dropped:
            text = f"raypool: {num_dropped:,} lines before these came too fast to be shown; results.diary has them.\n{text}"
        stream = capture.beneath(sys.stdout)  # as it is now: above the picture of the loop, if there is one
        if text and stream is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                try:
                    stream.write(text)
                except UnicodeEncodeError:  # it has no such letters
                    stream.write(text.encode("ascii", "backslashreplace").decode())
                stream.flush()
