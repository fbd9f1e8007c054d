"""What waits of a task can be taken from any rung, and is counted right."""

import random

import pytest

from raypool.core.ladder import Ladder

COSTS = (9.0, 7.0, 7.0, 4.0, 2.0, 0.0)


def test_items_come_in_order_from_where_it_starts():
    ladder = Ladder(COSTS, 1)
    assert (ladder.first, ladder.last, ladder.count, ladder.cost) == (1, 5, 5, 20.0)
    assert ladder.runs() == [(1, 6)]


def test_the_longest_that_costs_no_more():
    for cost, item in [(100.0, 0), (9.0, 0), (8.9, 1), (7.0, 1), (3.0, 4), (1.0, 5), (-1.0, None)]:
        assert Ladder(COSTS, 0).at_most(cost) == item


def test_what_is_taken_is_passed_over():
    ladder = Ladder(COSTS, 0)
    for item in (1, 5, 2):
        ladder.take(item)
    assert ladder.at_most(8.0) == 3
    assert ladder.last == 4
    assert ladder.runs() == [(0, 1), (3, 5)]
    assert ladder.take_run(4) == (0, 1), "only what is next to each other"
    assert ladder.take_run(1) == (3, 4)
    assert (ladder.count, ladder.cost) == (1, 2.0)


def test_it_agrees_with_a_list():
    for seed in range(20):
        chance = random.Random(seed)
        costs = tuple(sorted((chance.choice([0.0, 1.0, 2.5, 9.0]) for _ in range(60)), reverse=True))
        start = chance.randrange(60)
        ladder, waiting = Ladder(costs, start), list(range(start, 60))
        while waiting:
            limit = chance.uniform(0, 10)
            assert ladder.at_most(limit) == next((item for item in waiting if costs[item] <= limit), None)
            assert (ladder.first, ladder.last, list(ladder.waiting())) == (waiting[0], waiting[-1], waiting)
            item = chance.choice(waiting)
            ladder.take(item)
            waiting.remove(item)
            assert ladder.count == len(waiting)
            assert ladder.cost == pytest.approx(sum(costs[item] for item in waiting))
        assert ladder.at_most(99.0) is None
