"""The items of a task that were never dispatched, by what they cost: any of them can be taken, not just the first."""

from __future__ import annotations


class Ladder:
    """What waits of a task whose costs are known, and never rise from one item to the next.

    `_next` leads from an item that was taken to the next that may be there still (a union-find with path halving), so that every
    question costs next to nothing, however many items there are.

    Args:
        costs: Of all items of the task.
        start: The first of those that wait.
    """

    __slots__ = ("_costs", "_next", "_stop", "cost", "count")

    def __init__(self, costs: tuple[float, ...], start: int) -> None:
        self.count = len(costs) - start
        self.cost = float(sum(costs[start:]))
        self._costs = costs
        self._next = list(range(len(costs) + 1))
        self._next[:start] = [start] * start
        self._stop = len(costs)  # nothing waits from here on

    @property
    def first(self) -> int:
        """The item that costs most; what would follow the last if none is left."""
        return self._find(0)

    @property
    def last(self) -> int:
        """The item that costs least; there must be one."""
        while self._next[self._stop - 1] != self._stop - 1:
            self._stop -= 1
        return self._stop - 1

    def from_here(self, item: int) -> int | None:
        """Return this item, or the first after it that waits; None if there is none."""
        found = self._find(item)
        return found if found < len(self._costs) else None

    def at_most(self, cost: float) -> int | None:
        """Return the item that costs most of those that cost no more than this."""
        low, high = 0, len(self._costs)
        while low < high:
            middle = (low + high) // 2
            if self._costs[middle] <= cost:
                high = middle
            else:
                low = middle + 1
        return self.from_here(low)

    def waiting(self) -> list[int]:
        """Return all that wait, the one that costs most first."""
        items, item = [], self._find(0)
        while item < len(self._costs):
            items.append(item)
            item = self._find(item + 1)
        return items

    def runs(self) -> list[tuple[int, int]]:
        """Return all that wait, as (start, stop) of consecutive items."""
        runs: list[tuple[int, int]] = []
        for item in self.waiting():
            if runs and runs[-1][1] == item:
                runs[-1] = (runs[-1][0], item + 1)
            else:
                runs.append((item, item + 1))
        return runs

    def take(self, item: int) -> None:
        """Take an item out that waits."""
        self._next[item] = item + 1
        self.count -= 1
        self.cost = self.cost - self._costs[item] if self.count else 0.0

    def take_run(self, room: int) -> tuple[int, int]:
        """Take up to so many consecutive items out, from the first on; return (start, stop)."""
        start = stop = self.first
        while stop < len(self._costs) and stop - start < room and self._next[stop] == stop:
            self.take(stop)
            stop += 1
        return start, stop

    def _find(self, item: int) -> int:
        following = self._next
        while following[item] != item:
            following[item] = following[following[item]]
            item = following[item]
        return item
