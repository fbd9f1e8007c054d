"""Shows the progress of a loop, by the view that suits this process's output.

A notebook and a terminal get a live display, a log file gets lines if the loop takes long. Or a
progress bar of another package, such as tqdm. A view takes at most half a percent of a core if one
update takes no more than 25 ms; a slower one takes more, as it is still updated every five seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from raypool.views.lines import LogLines, is_terminal
from raypool.views.notebook import NotebookView, in_notebook
from raypool.views.status import LoopStatus
from raypool.views.words import describe_error

if TYPE_CHECKING:
    from raypool.backends.base import Backend
    from raypool.engine.loop import LoopWork


SPARING = 200
"""A view rests this many times as long as its last update kept the waiting thread busy."""

LONGEST_REST_S = 5.0
"""The longest rest of a view [s], however slow its updates are."""

logger = logging.getLogger("raypool")


class View(Protocol):
    """Something that shows a loop, no more often than each `interval_s` [s]."""

    interval_s: float

    def show(self, status: LoopStatus) -> None:
        """Show the loop as it is."""

    def end(self, status: LoopStatus) -> None:
        """Show how it has ended; it may not even have begun."""


class LoopWatch:
    """Updates a view of a loop at a suitable rate. Errors of the view do not end the loop.

    Args:
        view: The view.
        status: The state of the loop.
        clock: Returns the time [s] on a clock that never goes back.
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

    def update(self, work: LoopWork, total: int | None) -> None:
        """Look at the loop, and show it if it is time; `total` is None while the number of its
        items is not known.
        """
        self._status.look(work, total)
        if self._clock() < self._next_at or self._is_broken:
            return
        started = time.thread_time()
        self._try(self._view.show)
        # The first update is the slowest (imports, caches), so its time does not count.
        took_s, self._is_new = 0.0 if self._is_new else time.thread_time() - started, False
        self._next_at = self._clock() + max(
            self._view.interval_s, min(SPARING * took_s, LONGEST_REST_S)
        )

    def end(self) -> None:
        """Show how the loop has ended."""
        self._status.end()
        self._try(self._view.end)

    def _try(self, show: Callable[[LoopStatus], None]) -> None:
        try:
            show(self._status)
        except Exception as error:
            if not self._is_broken:
                self._is_broken = True
                told = describe_error(error)
                logger.warning(
                    "%s is not shown any more: %s. The loop itself goes on.",
                    self._status.label,
                    told,
                )


@contextlib.contextmanager
def watched(
    progress: bool | Callable[..., Any] | None, label: str, backend: Backend, is_serial: bool
) -> Iterator[LoopWatch | None]:
    """Show a loop while the context lasts.

    Args:
        progress: True: from the start. None: as suits the output. Or a factory of progress bars.
        label: What to call the loop.
        backend: The backend, for the memory of the workers' GPUs.
        is_serial: Whether the loop runs in the thread that waits for it, where a debugger may stop.
    """
    status = LoopStatus(label, backend.gpu_memory)
    view = _view(progress, is_serial)  # last: only its `end` gives back the terminal
    if view is None:
        yield None
        return
    watch = LoopWatch(view, status)
    try:
        yield watch
    finally:
        watch.end()


def _view(progress: bool | Callable[..., Any] | None, is_serial: bool) -> View | None:
    if callable(progress):
        return FactoryBar(progress)
    if in_notebook():
        return NotebookView()
    if sys.stderr is None:
        return None
    if is_terminal(sys.stderr) and not is_serial:  # a debugger needs the terminal
        from raypool.views.terminal import terminal_view

        picture = terminal_view()
        if picture is not None:
            return picture
    return LogLines(is_asked_for=progress is True)


# --- progress bars of other packages: tqdm's, or any that is made and moved like tqdm's -----------


class FactoryBar:
    """Moves a bar that a factory has made; see `View`.

    Args:
        factory: Called as `factory(total=..., desc=...)`; `total` is None while unknown. What it
            returns has `update(n)` and, if it likes, `set_postfix(failed=...)`, `total` and
            `close()`.
    """

    interval_s = 0.1

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        self._bar: Any = None
        self._is_asked = False
        self._total: int | None = None
        self._num_shown = self._num_failed = 0

    def show(self, status: LoopStatus) -> None:
        """Move the bar as far as the loop is."""
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
