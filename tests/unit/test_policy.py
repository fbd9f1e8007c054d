"""The choices of the scheduler, as tables."""

import itertools
import math

import pytest

from raypool.core import policy
from raypool.core.policy import Pace

CHUNKS = [
    (math.inf, 0, 1000, 4, 1),  # nothing is known
    (0.050, 10, 1000, 4, 1),  # long
    (0.049, 10, 1000, 4, 1),  # short, but a second one would take it over the 50 ms
    (0.025, 10, 1000, 4, 2),
    (0.001, 1000, 100_000, 4, 50),  # 50 ms of work
    (0.001, 1, 100_000, 4, 16),  # one measurement does not justify more
    (0.001, 2, 100_000, 4, 32),
    (0.001, 1000, 80, 4, 10),  # an equal share of half of what waits
    (0.001, 1000, 81, 4, 11),
    (0.001, 1000, 8, 4, 5),  # but not less than 5 ms of work
    (0.001, 1000, 0, 4, 5),
    (0.0001, 1000, 62, 2, 62),  # a rest of 1 ms is not worth a call
    (0.0001, 1000, 80, 2, 50),
    (0.0001, 4, 70, 2, 50),
    (0.020, 1000, 8, 4, 1),
    (0.0, 1000, 1_000_000, 1, 16_000),  # too short to be measured
    (0.001, 1000, 80, 0, 40),  # a pool without workers, for now
]


def test_chunk_size():
    for mean_s, items, waiting, num_workers, expected in CHUNKS:
        assert (
            policy.chunk_size(Pace(mean_s, items, calls=1, waiting=waiting), num_workers)
            == expected
        )


LOOKS_AHEAD = [
    (0.001, 0.001, 5, 4, True),
    (0.001, 0.001, 4, 4, False),  # everybody gets one as it is
    (0.049, 0.099, 5, 4, True),
    (0.049, 0.100, 16, 4, False),  # short ones that differ, and longer ones, if there are plenty
    (0.049, 0.100, 17, 4, True),
    (0.050, 0.050, 17, 4, True),
    (0.050, 0.050, 16, 4, False),
    (0.001, 2.000, 1000, 4, False),
    (0.100, 0.249, 1000, 4, True),
    (0.100, 0.250, 1000, 4, False),  # some are long
    (math.inf, math.inf, 1000, 4, False),
]


def test_should_look_ahead():
    for mean_s, longest_s, waiting, num_workers, expected in LOOKS_AHEAD:
        assert (
            policy.should_look_ahead(
                Pace(mean_s, longest_s=longest_s, waiting=waiting), num_workers
            )
            is expected
        )


def test_a_long_item_is_remembered_for_a_while():
    pace = Pace()
    assert not pace.is_brief
    pace.observe(1, 1.0)  # the first, which also imports a library, say
    for _ in range(13):
        pace.observe(1, 0.1)
        assert not pace.is_brief
    pace.observe(1, 0.1)
    assert pace.is_brief
    pace.observe(1, 0.3)
    assert not pace.is_brief


PIECES = [
    (1, 1, 1),
    (1, 3, 1),
    (100, 1, 1),  # the last attempt is made alone
    (2, 2, 2),
    (100, 2, 10),
    (101, 2, 11),
    (10_000, 2, 100),
    (1000, 3, 100),
    (1_000_000, 3, 10_000),
    (125, 3, 25),
]


def test_piece_size():
    for lost, attempts_left, expected in PIECES:
        assert policy.piece_size(lost, attempts_left) == expected


def test_pieces_shrink_until_the_culprit_is_alone():
    for first, retries in itertools.product([2, 3, 50, 4097, 100_000], [1, 2, 3, 7]):
        lost = first
        for attempts_left in range(retries, 0, -1):
            piece = policy.piece_size(lost, attempts_left)
            assert 1 <= piece <= lost
            lost = piece
        assert lost == 1, (first, retries)


def test_restart_delay():
    for losses, expected in [
        (0, 0.0),
        (1, 0.0),
        (2, 0.5),
        (3, 1.0),
        (4, 2.0),
        (7, 16.0),
        (8, 30.0),
        (9, 30.0),
        (10_000, 30.0),
    ]:
        assert policy.restart_delay_s(losses) == expected


PACES = [
    ([(1, 2.0)], 2.0),
    ([(10, 2.0)], 0.2),
    ([(1, 1.0), (1, 2.0)], 1.5),  # at first, the mean
    ([(1, 1.0), (1, 2.0), (1, 3.0)], 2.0),
    ([(1, 1.0)] * 100 + [(1, 5.0)], 2.0),  # later, a quarter of what is new
]


def test_pace_follows_what_is_measured():
    for calls, expected in PACES:
        pace = Pace()
        assert not pace.is_short
        for items, busy_s in calls:
            pace.observe(items, busy_s)
        assert pace.mean_s == pytest.approx(expected)
        assert pace.items == sum(items for items, _ in calls)
