"""How mini-batches are shared out among ranks, and data sets among iterations."""

from __future__ import annotations

import pytest

from raypool.train.shares import Share, divide, share_of, split_batch

BATCHES = [
    (130, [1, 1, 1, 1], [33, 33, 32, 32]),
    (96, [2, 1], [64, 32]),
    (37, [1, 1, 1, 0, 1], [10, 9, 9, 0, 9]),
    (10, [3, 1], [8, 2]),
    (1, [1, 1], [1, 0]),
    (100, [0.5, 0.25, 0.25], [50, 25, 25]),
    (3, [0.1, 0.1, 0.1], [1, 1, 1]),
    (10, [1e-9, 1e-9], [5, 5]),
    (7, [1e300, 1e300], [4, 3]),
    (5, [1], [5]),
]


def test_a_batch_is_split_by_loads() -> None:
    for size, loads, shares in BATCHES:
        assert split_batch(size, loads) == shares


def test_a_share_says_where_it_is() -> None:
    assert [share_of(rank, 130, (1,) * 4) for rank in range(4)] == [
        Share(0, 33, 130),
        Share(33, 33, 130),
        Share(66, 32, 130),
        Share(98, 32, 130),
    ]
    assert share_of(0, 96, (2, 1)).weight == pytest.approx(2 / 3)


EPOCHS = [
    (130, 32, 1, (32, 1, 4, 2)),
    (128, 32, 1, (32, 1, 4, 0)),
    (20, 32, 1, (20, 1, 1, 0)),
    (130, 32, 3, (32, 3, 1, 34)),
    (70, 32, 3, (32, 2, 1, 6)),
    (1, 1, 5, (1, 1, 1, 0)),
]


def test_an_epoch_is_whole_iterations() -> None:
    for num_samples, batch_size, accumulate, expected in EPOCHS:
        division = divide(num_samples, batch_size, accumulate)
        assert (
            division.batch_size,
            division.accumulate,
            division.steps,
            division.dropped,
        ) == expected
