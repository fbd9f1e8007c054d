"""A queue of tasks, ordered by priority, then submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

Order = tuple[int, int]
"""(-priority, task id): tasks start in ascending order of this."""


class Queue:
    """Tasks that could be dispatched, by their order."""

    __slots__ = ("_beside", "_line")

    def __init__(self) -> None:
        # nearly all tasks arrive in order, and a deque costs the same at any length
        self._line: deque[Order] = deque()
        # a heap of the others: those with a higher priority, and those queued again
        self._beside: list[Order] = []

    def push(self, order: Order) -> None:
        """Add a task."""
        if self._line and order < self._line[-1]:
            heappush(self._beside, order)
        else:
            self._line.append(order)

    def first(self) -> Order | None:
        """Return the head, or None."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return self._beside[0]
        return self._line[0] if self._line else None

    def pop(self) -> Order:
        """Remove the head."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return heappop(self._beside)
        return self._line.popleft()

    def remove(self, order: Order) -> None:
        """Remove a task from anywhere in the queue."""
        if order in self._beside:
            self._beside.remove(order)
            heapify(self._beside)
        else:
            self._line.remove(order)

    def __len__(self) -> int:
        return len(self._line) + len(self._beside)

    def __iter__(self) -> Iterator[Order]:
        yield from self._line
        yield from self._beside
