"""Whatever is handed in, in whatever order, the queue's head comes first."""

from __future__ import annotations

from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from raypool.core.model import Order, Queue


@given(st.lists(st.none() | st.integers(-2, 2)))
def test_the_head_is_what_comes_first(steps: list[int | None]) -> None:
    """A step hands in a task of some priority, or takes the head out (None)."""
    queue, expected = Queue(), list[Order]()
    for number, priority in enumerate(steps):
        if priority is not None:
            queue.push((-priority, number))
            heappush(expected, (-priority, number))
        elif expected:
            assert queue.pop() == heappop(expected)
        assert queue.first() == (expected[0] if expected else None)
        assert sorted(queue) == sorted(expected)
        assert len(queue) == len(expected)


@given(st.permutations(range(12)))
def test_what_was_taken_out_comes_back_where_it_stood(numbers: list[int]) -> None:
    queue = Queue()
    for number in numbers:
        queue.push((0, number))
    again = [queue.pop() for _ in range(6)]
    for order in reversed(again):
        queue.push(order)
    assert [queue.pop() for _ in numbers] == [(0, number) for number in range(12)]
