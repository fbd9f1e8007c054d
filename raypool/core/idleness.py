"""When a pool has had nothing to do for so long that its workers may go."""

from __future__ import annotations

from raypool.core.messages import SetTimer


class Idleness:
    """Measures how long a pool has had no task, with one timer at most, however often it is used in between.

    Args:
        timeout_s: How long is long enough [s].
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at: float | None = None  # when it will have been long enough; None: the pool is in use, or at rest already
        self._is_timer_set = False

    def begin(self, now: float) -> list[SetTimer]:
        """Note that there is no task; only the first time counts."""
        if self._ends_at is None:
            self._ends_at = now + self._timeout_s
        if self._is_timer_set:
            return []
        self._is_timer_set = True
        return [SetTimer(self._ends_at, "idle", -1)]

    def end(self) -> None:
        """Note that the pool is in use, or that the time has to begin anew."""
        self._ends_at = None

    def has_lasted(self, now: float) -> bool:
        """Whether it was long enough, when the timer fires; early, if the pool was used in between."""
        self._is_timer_set = False
        return self._ends_at is not None and now >= self._ends_at
