"""The printed output of a loop's items while it runs: whole lines with item numbers.

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
"""The most text waiting to be shown [characters]; older lines are dropped."""

OPEN_CHARS = 8192
"""The length at which an unfinished line is shown [characters]."""


class ItemLines:
    """Shows lines that items print on standard output; see `Watcher`.

    Args:
        prefix: The beginning of each line; "{}" stands for the number of its item.
        is_direct: Show them at once, as the items run in the thread that would show them later.
    """

    def __init__(self, prefix: str = "item {}: ", is_direct: bool = False) -> None:
        self._prefix = prefix
        self._is_direct = is_direct
        self._open: dict[int, str] = {}  # unfinished lines, by item
        self._waiting: deque[str] = deque()
        self._size = self._num_dropped = 0
        self._lock = threading.RLock()  # `add` comes from other threads

    def add(self, item: int, text: str) -> None:
        """Take text that an item has printed."""
        with self._lock:
            *lines, rest = (self._open.pop(item, "") + text).split("\n")
            rest = rest[rest.rfind("\r", 0, -1) + 1 :]  # a progress bar's newest state
            if len(rest) >= OPEN_CHARS:
                lines.append(rest)
            elif rest:
                self._open[item] = rest
            for line in lines:
                self._put(item, line)
        if self._is_direct:
            self.show()

    def _put(self, item: int, line: str) -> None:
        state = line.rstrip().rpartition("\r")[2]  # of a progress bar, the last one
        line = f"{self._prefix.format(item)}{state}\n"
        self._waiting.append(line)
        self._size += len(line)
        while self._size > WAITING_CHARS:
            self._size -= len(self._waiting.popleft())
            self._num_dropped += 1

    def update(self, work: LoopWork, total: int | None) -> None:
        """Show new lines."""
        self.show()

    def end(self) -> None:
        """Show the rest, including unfinished lines."""
        with self._lock:
            for item, line in self._open.items():
                self._put(item, line)
            self._open.clear()
        self.show()

    def show(self) -> None:
        """Show new lines."""
        with self._lock:
            text, num_dropped = "".join(self._waiting), self._num_dropped
            self._waiting.clear()
            self._size = self._num_dropped = 0
        if num_dropped:
            where = "; results.diary has them" if self._prefix else ""
            text = (
                f"raypool: {num_dropped:,} earlier lines were skipped, because they arrived too"
                f" fast to be shown{where}.\n{text}"
            )
        # the current stream, which prints above the live display, if there is one
        stream = capture.beneath(sys.stdout)
        if text and stream is not None:
            with contextlib.suppress(Exception):  # it is closed, or the user's, and raises anything
                try:
                    stream.write(text)
                except UnicodeEncodeError:  # its encoding lacks these characters
                    stream.write(text.encode("ascii", "backslashreplace").decode())
                stream.flush()
