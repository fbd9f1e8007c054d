"""Plain lines about a loop: its progress, where there is no terminal, and what its items print.

::

    raypool: train: 7 of 13 done, 1 failed, 35/min, after 12 s, about 10 s left
    item 3: epoch 1, loss 0.41
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from raypool.channel import capture
from raypool.views.status import LoopStatus
from raypool.views.words import rate

if TYPE_CHECKING:
    from raypool.engine.loop import LoopWork


# --- progress, where there is no terminal ---------------------------------------------------------


FIRST_S = 10.0
"""The time before the first line [s]; shorter loops have none."""

MOST_S = 600.0
"""The longest time between two lines [s]; up to this, it doubles."""


def is_terminal(stream: Any) -> bool:
    """Whether a stream goes to a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None, a user's object without it, or closed
        return False


class LogLines:
    """Writes lines about a loop; see `View`.

    Args:
        is_asked_for: Write from the start, and a last line even for a short loop.
    """

    interval_s = 0.1

    def __init__(self, is_asked_for: bool) -> None:
        self._is_asked_for = is_asked_for
        self._next_s = 0.0 if is_asked_for else FIRST_S
        self._has_lines = False

    def show(self, status: LoopStatus) -> None:
        """Write a line if it is time."""
        elapsed_s = status.elapsed_s
        # a settled loop has its line from `end`, which follows at once
        if elapsed_s >= self._next_s and status.num_settled != status.total:
            self._next_s = max(elapsed_s + min(elapsed_s, MOST_S), FIRST_S)
            self._write(status)

    def end(self, status: LoopStatus) -> None:
        """Write the end of the loop, if it has lines."""
        if self._has_lines or (self._is_asked_for and status.is_begun):
            self._write(status)

    def _write(self, status: LoopStatus) -> None:
        self._has_lines = True
        # as it is now: above the picture of another loop, if there is one
        stream = capture.beneath(sys.stderr)
        with contextlib.suppress(OSError, ValueError):  # it is closed, or has no such letters
            stream.write(f"raypool: {line(status)}\n")  # in one piece: others write there too
            stream.flush()


def line(status: LoopStatus) -> str:
    """Return the state of a loop in one line."""
    (settled, _), *others = status.counts()
    if status.total is not None:
        settled += " done"
    parts = [f"{status.label}: {settled}{''.join(text for text, _ in others)}"]
    parts += status.lines[:1]
    if status.num_new > 0:
        parts.append(rate(status.num_new, status.elapsed_s))
    parts.append(f"{'in' if status.is_over else 'after'} {status.times()}")
    return ", ".join(filter(None, parts))


# --- what items print ---------------------------------------------------------------------------


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
