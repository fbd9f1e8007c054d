"""Shows the progress of a loop or training: live, as log lines, or by another package's bar."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from raypool.views.lines import LogLines, is_terminal
from raypool.views.notebook import NotebookView, in_notebook
from raypool.views.status import LoopStatus
from raypool.views.words import describe_error

SPARING = 200
"""The rest of a view, in durations of its last update: it takes half a percent of a core."""

LONGEST_REST_S = 5.0
"""The longest rest of a view [s]; one whose updates take over 25 ms takes more of a core."""

logger = logging.getLogger("raypool")


class View(Protocol):
    """Shows a loop, at most every `interval_s` [s]."""

    interval_s: float

    def show(self, status: LoopStatus) -> None:
        """Show the loop."""

    def end(self, status: LoopStatus) -> None:
        """Show its end; it may not have begun."""


class LoopWatch:
    """Updates a view of a loop; errors of the view do not end the loop.

    Args:
        view: The view.
        status: The state of the loop.
        clock: A monotonic clock [s].
    """

    def __init__(
        self, view: View, status: LoopStatus, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view = view
        self._status = status
        self._clock = clock
        self._next_at = clock()
        self._is_new = True
        self._is_broken = False

    def update(self, *state: Any) -> None:
        """Look at the loop (see `LoopStatus.look`), and show it if it is time."""
        self._status.look(*state)
        if self._clock() < self._next_at or self._is_broken:
            return
        started = time.thread_time()  # without pauses: `SPARING` is a share of a core
        self._try(self._view.show)
        # the first update is the slowest (imports, caches), so its time does not count
        took_s, self._is_new = 0.0 if self._is_new else time.thread_time() - started, False
        rest_s = max(self._view.interval_s, min(SPARING * took_s, LONGEST_REST_S))
        self._next_at = self._clock() + rest_s

    def close(self) -> None:
        """Show the end of the loop."""
        self._status.end()
        self._try(self._view.end)

    def _try(self, show: Callable[[LoopStatus], None]) -> None:
        try:
            show(self._status)
        except Exception as error:
            if not self._is_broken:
                self._is_broken = True
                text = "%s is no longer shown: %s. The loop itself continues."
                logger.warning(text, self._status.label, describe_error(error))


def watched(
    progress: bool | Callable[..., Any] | None, status: LoopStatus, is_serial: bool
) -> contextlib.AbstractContextManager[LoopWatch | None]:
    """Show a loop or a training within the context.

    Args:
        progress: True: from the start. None: as suits the output. Or a factory of progress bars.
        status: Its state, which `update` of the watch changes.
        is_serial: Whether it runs in the thread that waits for it.
    """
    view = _view(progress, is_serial)  # last: only its `end` releases the terminal
    return contextlib.nullcontext() if view is None else contextlib.closing(LoopWatch(view, status))


def _view(progress: bool | Callable[..., Any] | None, is_serial: bool) -> View | None:
    if callable(progress):
        return FactoryBar(progress)
    if in_notebook():
        return NotebookView()
    if sys.stderr is None:
        return None
    if is_terminal(sys.stderr) and not is_serial:  # a debugger needs the terminal
        from raypool.views.terminal import terminal_view

        view = terminal_view()
        if view is not None:
            return view
    return LogLines(is_asked_for=progress is True)


class FactoryBar:
    """Moves another package's bar; see `View`.

    Args:
        factory: Called as `factory(total=..., desc=...)`, with `total` None while unknown. Its bar
            has `update(n)` and optionally `set_postfix(failed=...)`, `total` and `close()`.
    """

    interval_s = 0.1

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        self._bar: Any = None
        self._is_asked = False
        self._total: int | None = None
        self._num_shown = self._num_failed = 0

    def show(self, status: LoopStatus) -> None:
        """Move the bar."""
        if not self._is_asked:
            self._is_asked, self._total = True, status.total
            self._bar = self._factory(total=status.total, desc=status.label)
        if status.total != self._total and hasattr(self._bar, "total"):  # a generator has ended
            self._bar.total = self._total = status.total
        if status.num_failed > self._num_failed and hasattr(self._bar, "set_postfix"):
            self._num_failed = status.num_failed
            self._bar.set_postfix(failed=status.num_failed)
        step, self._num_shown = status.num_settled - self._num_shown, status.num_settled
        if step:
            self._bar.update(step)

    def end(self, status: LoopStatus) -> None:
        """Close the bar."""
        is_refused = self._is_asked and self._bar is None  # the factory has failed
        try:
            if status.is_begun and not is_refused:
                self.show(status)
        finally:
            if hasattr(self._bar, "close"):
                self._bar.close()
