"""The live display of a loop on a terminal; its first line stays at the end.

::

    train ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━ 7 of 13, 1 failed  12 s, about 10 s left
      worker 0    4 done  31.2 of 80.0 GiB    2.1 s  item 7  width=8, lr=0.001  epoch=3, loss=0.412
      worker 1    3 done   1.4 of 80.0 GiB    0.4 s  item 8  width=8, lr=0.01  epoch=1, loss=2.07
      item 5 failed: ValueError: 36 channels cannot be divided into 8 groups
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style

from raypool.channel import capture
from raypool.views.console import SafeConsole
from raypool.views.lines import is_terminal
from raypool.views.status import LoopStatus, WorkerRow
from raypool.views.words import duration

MIN_BAR, MAX_BAR = 10, 40
MIN_DESCRIPTION = 12
MIN_WIDTH_FOR_MEMORY = 80
DONE_WIDTH = 3

Line = list[tuple[str, str]]
"""Texts, each with its style."""

_screen = threading.Lock()
"""Held by the loop on display: two displays would overwrite each other."""


def terminal_view() -> TerminalView | None:
    """Return a view on standard error; None without a terminal, or if another loop has it."""
    # a task that prints may draw the picture, too, and its text is no markup of rich's
    console = SafeConsole(
        file=capture.beneath(sys.stderr),
        markup=False,
        emoji=False,
        highlight=False,
    )
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    view = TerminalView(console, _screen.release)
    # last: a failure above leaves the lock free
    return view if _screen.acquire(blocking=False) else None


class TerminalView:
    """Draws a loop on a terminal; see `View`.

    Args:
        console: The terminal.
        leave: Called after the last drawing.
    """

    interval_s = 0.4

    def __init__(self, console: Console, leave: Callable[[], object] = lambda: None) -> None:
        self._console = console
        # Printed text goes above the display, but only if it goes to the same terminal.
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=is_terminal(sys.stdout)
        )
        self._leave = leave
        self._is_terminal_gone = False
        # handlers of log records, with their own streams
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def show(self, status: LoopStatus) -> None:
        """Draw the loop."""
        if self._is_terminal_gone:
            return
        picture = Picture(self._console, status)
        try:
            if not self._live.is_started:
                before = capture.streams()
                self._live.start()
                capture.put_on_top()  # rich has replaced the streams that separate tasks' output
                self._move_handlers(before)
            self._live.update(picture, refresh=True)
        except OSError:
            self._is_terminal_gone = True  # the loop goes on

    def end(self, status: LoopStatus) -> None:
        """Leave the first line, and restore the terminal."""
        # all run, the last one first, even if one fails: the next loop needs the terminal
        with contextlib.ExitStack() as after:
            after.callback(self._leave)
            after.callback(self._stop)
            after.callback(_flush_output)
            if status.is_begun:
                self.show(status)

    def _move_handlers(self, before: tuple[Any, ...]) -> None:
        """Let log records appear above the display: their handlers have kept the old streams."""
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        # by id: a user's handler need not be hashable
        handlers = {id(each): each for own in loggers for each in getattr(own, "handlers", ())}
        for old, new in zip(before, capture.streams(), strict=True):
            if capture.beneath(old) is capture.beneath(new):
                continue
            for handler in handlers.values():
                if not isinstance(handler, logging.StreamHandler):
                    continue
                if capture.beneath(handler.stream) is capture.beneath(old):
                    is_captured = handler.stream is not capture.beneath(handler.stream)
                    stream = handler.setStream(new if is_captured else capture.beneath(new))
                    self._moved.append((handler, stream))

    def _stop(self) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.stop()


def _flush_output() -> None:
    # a line that the user's code has not ended; the stream may be closed, or None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


class Picture:
    """The drawing of a loop."""

    def __init__(self, console: Console, status: LoopStatus) -> None:
        self._width, self._height = console.width, console.height
        self._head, self._bar = self._headline(status)
        shown = status.lines[:1] if status.is_over else status.lines
        self._lines: list[Line] = [[(fit(f"  {text}", self._width), "")] for text in shown if text]
        if status.is_over:
            return
        # besides the first line, one line of the terminal stays free
        height, failure = self._height - len(self._lines), status.last_failure
        rows = status.rows(height - (2 if failure is None else 3))
        lines = [self._row(row, rows.shown) for row in rows.shown]
        if rows.others:
            lines.append([(fit(f"  {rows.others}", self._width), "dim")])
        if failure is not None and len(lines) < height - 2:
            lines.append([(fit(f"  {failure}", self._width), "red")])
        self._lines += lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # segments, as rich's tables and texts take ten times as long
        label, *rest = self._head
        yield from _segments([label])
        if self._bar is not None:
            yield from console.render(self._bar, options)
            yield Segment(" ")
        yield from _segments(rest)
        for line in self._lines:
            yield Segment.line()
            yield from _segments(line)

    def _headline(self, status: LoopStatus) -> tuple[Line, ProgressBar | None]:
        # a narrow terminal has no room for the time left, a narrower one none for the bar
        label = fit(status.label, max(self._width // 3, MIN_BAR))
        counts = status.counts()
        room = self._width - cell_len(label) - sum(len(text) for text, _ in counts) - 3
        times = status.times()
        if len(times) > room:
            times = duration(status.elapsed_s)
        head = [(f"{label} ", "bold"), *counts, (f"  {times}", "dim")]
        room = min(room - len(times) - 1, MAX_BAR)
        if room < MIN_BAR:
            return head, None
        total, pulse = status.total, status.total is None and not status.is_over
        return head, ProgressBar(total or 1, status.num_settled if total else 1, room, pulse=pulse)

    def _row(self, row: WorkerRow, rows: list[WorkerRow]) -> Line:
        # without room, the item's description is cut first, and then its metrics
        digits, memory = len(str(rows[-1].worker)), max(len(row.memory) for row in rows)
        start = f"  worker {row.worker:<{digits}}  {row.num_done:>{DONE_WIDTH},} done"
        if memory and self._width >= MIN_WIDTH_FOR_MEMORY:
            start += f"  {row.memory:>{memory}}"
        if row.running_s is None:
            return [(fit(start, self._width), ""), ("     idle", "dim")]
        start += f"  {duration(row.running_s, 1):>7}  {row.items}"
        values = f"  {row.values}" if row.values else ""
        left = self._width
        room = max(left - cell_len(start) - cell_len(values), MIN_DESCRIPTION)
        description = fit(f"  {row.description}", room) if row.description else ""
        line = []
        for text, style in ((start, ""), (description, "dim"), (values, "")):
            line.append((fit(text, left), style))
            left -= cell_len(line[-1][0])
        return line


def _segments(line: Line) -> Iterator[Segment]:
    return (Segment(text, Style.parse(style)) for text, style in line)


def fit(text: str, width: int) -> str:
    """Return a text cut to this number of columns.

    Example:
        >>> fit("worker 0", 20), fit("worker 0", 5), fit("worker 0", 0)
        ('worker 0', 'work…', '')
    """
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""
