"""A loop through a progress bar of somebody else's: tqdm's, or any that is made and moved as tqdm's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypool.views.status import LoopStatus


class FactoryBar:
    """Moves a bar that a factory has made; see `View`.

    Args:
        factory: Called as `factory(total=..., desc=...)`; `total` is None while nobody knows it. What it returns has `update(n)`
            and, if it likes, `set_postfix(failed=...)`, `total` and `close()`.
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
