"""A queue of tasks, ordered by priority, then submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

Order = tuple[int, int]
"""(-priority, task id): tasks start in ascending order of this."""


class Queue:
    """Tasks that could be dispatched, by their order.

    Nearly all tasks arrive in that order and go into a deque, which costs the same at any length.
    The others (of a higher priority, or queued again) go into a heap beside it.
    """

    __slots__ = ("_beside", "_line")

    def __init__(self) -> None:
        self._line: deque[Order] = deque()
        self._beside: list[Order] = []

    def push(self, order: Order) -> None:
        """Let a task wait."""
        if self._line and order < self._line[-1]:
            heappush(self._beside, order)
        else:
            self._line.append(order)

    def first(self) -> Order | None:
        """Return the head; None if nothing waits."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return self._beside[0]
        return self._line[0] if self._line else None

    def pop(self) -> Order:
        """Take the head out."""
        if self._beside and (not self._line or self._beside[0] < self._line[0]):
            return heappop(self._beside)
        return self._line.popleft()

    def __len__(self) -> int:
        return len(self._line) + len(self._beside)

    def __iter__(self) -> Iterator[Order]:
        yield from self._line
        yield from self._beside
