"""What a driver has been asked to remember for later."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush

from raypool.core.messages import SetTimer, TimerFired
from raypool.core.model import WorkerState
from raypool.core.scheduler import Scheduler


class Timers:
    """Timers by the time at which they are due.

    Args:
        is_of_use: Whether a timer still means something; one that does not is dropped when its turn comes.
    """

    def __init__(self, is_of_use: Callable[[TimerFired], bool]) -> None:
        self._is_of_use = is_of_use
        self._heap: list[tuple[float, int, TimerFired]] = []
        self._count = itertools.count()

    def set(self, command: SetTimer) -> None:
        """Remember something."""
        timer = TimerFired(*command[1:])
        heappush(self._heap, (command.at, next(self._count), timer))

    def next_at(self) -> float | None:
        """Return when the next timer is due; None if there is none."""
        while self._heap:
            at, _, timer = self._heap[0]
            if self._is_of_use(timer):
                return at
            heappop(self._heap)
        return None

    def pop(self) -> TimerFired:
        """Take out the next timer."""
        return heappop(self._heap)[2]


def is_of_use(timer: TimerFired, scheduler: Scheduler) -> bool:
    """Whether a timer still means something to a scheduler."""
    if timer.kind == "idle":
        return True
    if timer.kind in ("retry", "look"):
        return timer.task_id in scheduler.backlog.tasks
    worker = scheduler.crew.workers.get(timer.worker_id)
    if worker is None or timer.kind == "leave":
        return worker is not None
    return timer.attempt_id in worker.attempts if timer.kind == "timeout" else worker.state is WorkerState.STARTING
