"""Progress of a loop as lines in a log file, where there is no terminal.

::

    raypool: train: 7 of 13 done, 1 failed, 35/min, after 12 s, about 10 s left
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from raypool.channel import capture
from raypool.views.status import LoopStatus
from raypool.views.words import rate

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
