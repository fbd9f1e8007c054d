"""Who should take what, when workers differ in speed: two ways to go on are played through, and the better one is followed.

**In turn**: whoever is free takes the longest item that waits. That is what happens without any knowledge of speeds.
**By the end**: the items, the longest first, each go to the worker who would end it first, counted from when he is free
(Gonzalez, Ibarra and Sahni 1977). A slow worker is left without one if faster ones will be back in time.

Neither is always the better one. Playing both, every time that somebody is free, and following the better one is never worse than
either, as far as the costs are right: the end that was found before can still be had.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import NamedTuple


class Hand(NamedTuple):
    """A worker who is free in so many seconds (0: now), and does so much work a second."""

    free_in_s: float
    speed: float
    kind: int


def end_in_turn(works: list[float], hands: list[Hand]) -> float:
    """Return when the last of these is done, if whoever is free first takes the next [s].

    Example:
        >>> end_in_turn([4.0, 2.0], [Hand(0.0, 1.0, kind=0), Hand(1.0, 2.0, kind=1)])
        4.0
    """
    heap = [(hand.free_in_s, -hand.speed) for hand in hands]
    heapify(heap)
    end_s = max(hand.free_in_s for hand in hands)
    for work in works:
        free_in_s, speed = heap[0]
        done_in_s = free_in_s - work / speed
        end_s = max(end_s, done_in_s)
        heapreplace(heap, (done_in_s, speed))
    return end_s


def share_by_end(works: list[float], hands: list[Hand]) -> tuple[float, dict[int, int]]:
    """Return when the last of these is done, if each goes to whoever would end it first [s].

    And the first one that a free worker takes, by its number, for each kind of which there is a free one.

    Example:
        >>> share_by_end([4.0, 2.0], [Hand(0.0, 1.0, kind=0), Hand(1.0, 2.0, kind=1)])
        (3.0, {0: 1})
    """
    speeds = {hand.kind: hand.speed for hand in hands}
    heaps: dict[int, list[float]] = {kind: [hand.free_in_s for hand in hands if hand.kind == kind] for kind in speeds}
    for heap in heaps.values():
        heapify(heap)
    end_s, first = max(hand.free_in_s for hand in hands), dict[int, int]()
    for number, work in enumerate(works):
        done_in_s, kind = min((heap[0] + work / speeds[kind], kind) for kind, heap in heaps.items())
        if heaps[kind][0] == 0:
            first.setdefault(kind, number)
        end_s = max(end_s, done_in_s)
        heapreplace(heaps[kind], done_in_s)
    return end_s, first


def plan(works: list[float], hands: list[Hand]) -> dict[int, int] | None:
    """Return which of these, the longest first, a free worker of each kind takes; None: whatever comes first.

    A kind that is not named leaves all of it to others.
    """
    end_s, first = share_by_end(works, hands)
    return first if end_s <= end_in_turn(works, hands) else None


def soonest(hands: list[Hand]) -> float | None:
    """Return when the next worker will be free that is not so now [s]; None: all are."""
    return min((hand.free_in_s for hand in hands if hand.free_in_s > 0), default=None)
