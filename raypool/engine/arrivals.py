"""Which workers are up, and why others are not; whoever has asked for them waits here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from raypool.channel.records import WorkerInfo


class Arrivals:
    """What is known of the workers by place. The driver's thread notes it; others wait.

    Args:
        is_closed: Whether there is nothing to wait for any more.
    """

    def __init__(self, is_closed: Callable[[], bool]) -> None:
        self.infos: dict[int, WorkerInfo] = {}  # of the newest worker in each place that was up
        self._is_closed = is_closed
        self._failed: dict[int, str] = {}  # place -> why
        self._awaited: Counter[int] = Counter()  # places that somebody waits for
        self.changed = threading.Condition()

    def note_ready(self, place: int, info: WorkerInfo) -> None:
        """Note that the worker in a place is up."""
        with self.changed:
            self.infos[place] = info
            self.changed.notify_all()

    def note_failed(self, place: int, why: str) -> bool:
        """Note that nobody need wait for the worker in a place; return whether somebody does, and so will be told."""
        with self.changed:
            self._failed.setdefault(place, why)
            self.changed.notify_all()
            return self._awaited[place] > 0

    def forget(self, place: int) -> None:
        """Note that a place is given back."""
        with self.changed:
            self.infos.pop(place, None)

    def expect(self, places: Sequence[int]) -> None:
        """Say that somebody is going to `wait` for the workers in these places."""
        with self.changed:
            self._awaited.update(places)

    def wait(self, places: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Wait until the workers in these places are up, at most so long; return those that are not, and why."""
        with self.changed:
            is_known = self.changed.wait_for(
                lambda: self._is_closed() or all(place in self.infos or place in self._failed for place in places),
                min(timeout_s, threading.TIMEOUT_MAX),
            )
            self._awaited.subtract(places)
            why = "the pool was closed" if is_known else f"it had not come up within start_timeout_s={timeout_s:g}"
            return {place: self._failed.get(place, why) for place in places if place not in self.infos}
