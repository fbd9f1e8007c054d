"""A live picture of a loop on a terminal: how far it is, what each worker is at, and what was reported there last.

::

    train ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━ 7 of 13, 1 failed  12 s, about 10 s left
      worker 0   4 done    2.1 s  item 7   network=cnn, width=8, lr=0.001  epoch=3, loss=0.412
      worker 1   3 done    0.4 s  item 8   network=cnn, width=8, lr=0.01  epoch=1, loss=2.07

When the loop has ended, the first line stays.
"""

from __future__ import annotations

import contextlib
import reprlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from raypool.engine import diary
from raypool.engine.loop_work import named

if TYPE_CHECKING:
    from raypool.core.model import Slice
    from raypool.engine.loop_work import LoopWork

MAX_ROWS = 16
"""So many workers have a line each; the others share one."""

MIN_INTERVAL_S = 0.08
"""The picture is drawn no more often than this [s]: a loop over a generator asks for it after every few items."""

MIN_BAR, MAX_BAR = 10, 40
MIN_DESCRIPTION = 12
DONE_WIDTH = 3

_screen = threading.Lock()
"""Held by the loop that is shown. Two pictures would overwrite each other, so a second loop at the same time has none."""


class LiveProgress:
    """Shows a loop on the standard error stream while the context lasts.

    Args:
        label: What to call the loop.
        console: Draw there instead.
        clock: Returns the Unix time [s].
    """

    def __init__(self, label: str, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        self._label = label
        self._console = console or Console(file=diary.beneath(sys.stderr))  # a task that prints may draw the picture, too
        # What the user prints goes above the picture, but only if it was meant for the same terminal.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._clock = clock
        self._started = self._drawn_at = self._settled_at = 0.0
        self._num_settled = 0
        self._seen: tuple[LoopWork, int | None] | None = None
        self._tally = Tally()
        self._has_screen = False
        self._is_terminal_gone = False

    def __enter__(self) -> LiveProgress:
        self._started = self._clock()
        self._has_screen = _screen.acquire(blocking=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if self._seen is not None:
                self._draw(self._headline(*self._seen, is_over=True))
        finally:
            self._stop()
            if self._has_screen:
                _screen.release()

    def update(self, work: LoopWork, total: int | None) -> None:
        """Show how far the loop is.

        Args:
            work: The loop.
            total: How many items it has; None while that is not known.
        """
        if self._seen is None or work.num_settled != self._num_settled:
            self._num_settled, self._settled_at = work.num_settled, self._clock()
        self._seen = work, total
        now = self._clock()
        if not 0 <= now - self._drawn_at < MIN_INTERVAL_S:
            self._drawn_at = now
            self._draw(Group(self._headline(work, total), *self._rows(work)))

    def _draw(self, picture: RenderableType) -> None:
        if not self._has_screen or self._is_terminal_gone:
            return
        try:
            self._live.start()
            diary.put_on_top()  # it has its own streams in place of those that tell the tasks apart
            self._live.update(picture, refresh=True)
        except OSError:
            self._is_terminal_gone = True  # which is no reason for the loop to end

    def _stop(self) -> None:
        """Leave the picture as it is, and give the terminal back as it was."""
        for end in (sys.stdout.flush, self._live.stop):  # first, a line that the user has begun but not ended
            with contextlib.suppress(OSError):
                end()

    def _headline(self, work: LoopWork, total: int | None, is_over: bool = False) -> RenderableType:
        """Return the bar and the numbers in one line. Where they have no room, the time left goes first, then the bar."""
        width = self._console.width
        elapsed = max(self._clock() - self._started, 0.0)
        settled, num_failed = work.num_settled, len(work.errors)
        label = Text(self._label, style="bold")
        label.truncate(max(width // 3, MIN_BAR), overflow="ellipsis")
        num_there = len(work.restored)
        counts = Text(f"{settled:,} done" if total is None else f"{settled:,} of {total:,}")
        if num_there:
            counts.append(f", {num_there:,} there already", style="dim")
        if num_failed:
            counts.append(f", {num_failed:,} failed", style="red")
        room = width - label.cell_len - counts.cell_len - 3
        times = duration(elapsed)
        num_new = settled - num_there
        left_s = elapsed / num_new * (total - settled) if total is not None and num_new > 0 else 0.0
        if left_s > max(self._clock() - self._settled_at, 0.0) and not is_over:  # else what runs takes longer than what has ended
            longer = f"{times}, about {duration(left_s)} left"
            times = longer if len(longer) <= room else times
        cells: list[RenderableType] = [label, counts, Text(" " + times, style="dim")]
        room = min(room - len(times) - 1, MAX_BAR)
        if room >= MIN_BAR:
            is_going_on = total is None and not is_over
            cells.insert(1, ProgressBar(total or 1, settled if total else 1, room, pulse=is_going_on))
        line = Table.grid(*(Column(no_wrap=True) for _ in cells), padding=(0, 1, 0, 0))
        line.add_row(*cells)
        return line

    def _rows(self, work: LoopWork) -> list[Text]:
        """Return a line for each worker that has had something to do, as far as there is room."""
        self._tally.look_at(work)
        running = work.running.copy()  # at once: the driver's thread goes on
        workers = sorted(self._tally.num_done.keys() | running.keys())
        most = max(min(MAX_ROWS, self._console.height - 2), 1)
        shown = workers if len(workers) <= most else workers[: most - 1]
        rows = [self._row(work, index, running.get(index), len(str(workers[-1]))) for index in shown]
        others = workers[len(shown) :]
        if others:
            num_busy = sum(index in running for index in others)
            rows.append(_line(f"  and {len(others):,} more workers, {num_busy:,} of them busy", "dim"))
        return rows

    def _row(self, work: LoopWork, index: int, entry: tuple[Slice, float] | None, digits: int) -> Text:
        """Return the line of a worker: on a narrow one what the item is makes way for what it has reported, then that too."""
        row = _line(f"  worker {index:<{digits}}  {self._tally.num_done[index]:>{DONE_WIDTH},} done")
        if entry is None:
            return row.append("     idle", style="dim")
        piece, since = entry
        row.append(f"  {duration(self._clock() - since, 1):>7}  {_named(work, piece)}")
        values = Text(_reported(work, piece))
        description = Text(self._tally.described(work, piece), style="dim")
        description.truncate(max(self._console.width - row.cell_len - values.cell_len, MIN_DESCRIPTION), overflow="ellipsis")
        return row.append_text(description).append_text(values)


class Tally:
    """What each worker has done so far, counted from what has come back since the last look."""

    def __init__(self) -> None:
        self.num_done: Counter[int] = Counter()
        self._num_seen = 0
        self._descriptions: dict[int, str] = {}  # by item

    def look_at(self, work: LoopWork) -> None:
        """Count what is new."""
        new = work.segments[self._num_seen :]
        self._num_seen += len(new)
        for piece, _, worker in new:
            self.num_done[worker.index] += piece.stop - piece.start

    def described(self, work: LoopWork, piece: Slice) -> str:
        """Return what the item is, if it is one and more than its number. Made once only: it may take long."""
        if piece.stop - piece.start > 1:
            return ""
        (index,) = work.numbers(piece)
        if index not in self._descriptions:
            if len(self._descriptions) > 10 * MAX_ROWS:
                self._descriptions.clear()
            text = describe_item(work.items[index])
            self._descriptions[index] = "" if text == str(index) else f"  {text}"
        return self._descriptions[index]


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _named(work: LoopWork, piece: Slice) -> str:
    items = named(work.numbers(piece))
    return f"{items}, attempt {piece.attempt}" if piece.attempt > 1 else items


def _reported(work: LoopWork, piece: Slice) -> str:
    """Return the newest values of what is running, if it is one item and has reported any in this attempt."""
    if piece.stop - piece.start > 1:
        return ""
    (index,) = work.numbers(piece)
    values = work.feed.last(index, piece.attempt)
    return "  " + ", ".join(f"{_value(name)}={_number(value)}" for name, value in values.items()) if values else ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _value(value)


def duration(seconds: float, digits: int = 0) -> str:
    """Return a time as people write it; `digits` after the point, below a minute.

    Example:
        >>> duration(8.26), duration(8.26, 1), duration(75), duration(7265)
        ('8 s', '8.3 s', '1:15', '2:01:05')
    """
    if seconds < 59.5:
        return f"{max(seconds, 0.0):.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def describe_item(item: Any) -> str:
    """Return an item in one line, whatever it is and however large.

    Example:
        >>> describe_item({"network": "cnn", "lr": 0.001})
        'network=cnn, lr=0.001'
        >>> describe_item(list(range(1_000_000)))
        '[0, 1, 2, 3, 4, 5, ...]'
    """
    if isinstance(item, dict) and all(isinstance(key, str) for key in item):
        text = ", ".join(f"{key}={_value(value)}" for key, value in item.items())
    else:
        text = _repr(item)
    return " ".join(text.split())[:200]


def _value(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 60 and value.isprintable() else _repr(value)


def _repr(value: Any) -> str:
    try:
        return _short.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a {type(value).__name__}"
