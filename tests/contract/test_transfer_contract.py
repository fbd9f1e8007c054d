"""How many bytes go to the workers and come from them (MATLAB's ticBytes and tocBytes)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raypool import ParallelPool, current_task, wait

pytestmark = pytest.mark.semantics

SMALL, LARGE = 10_000, 4_000_000
ON_TOP = 4_000
"""What a call costs besides its values, at most [bytes]."""


def nothing(*_: Any) -> None:
    return None


def zeros(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def count(pool: ParallelPool, use: Callable[[], Any]) -> tuple[int, int]:
    with pool.transfer_bytes() as moved:
        use()
    return moved.total


@pytest.mark.everywhere
def test_a_table_with_a_row_for_each_worker(pool: ParallelPool, make_pool: Any) -> None:
    with pool.transfer_bytes() as moved:
        pool.parfor(zeros, [SMALL] * 12, chunk_size=1)

    frame = moved.to_frame()
    assert frame.index.tolist() == [worker.index for worker in pool.workers]
    assert frame.index.name == "worker"
    assert frame.columns.tolist() == ["sent_bytes", "received_bytes"]
    assert set(frame.dtypes.astype(str)) == {"int64"}
    assert tuple(frame.sum()) == moved.total == (moved.total.sent_bytes, moved.total.received_bytes)
    if make_pool.is_in_processes:
        assert 12 * SMALL <= moved.total.received_bytes <= 12 * (SMALL + ON_TOP)
        assert 0 < moved.total.sent_bytes <= 12 * ON_TOP
    else:
        assert moved.total == (0, 0)


@pytest.mark.processes
def test_it_counts_for_the_worker_that_it_was(pool: ParallelPool) -> None:
    with pool.transfer_bytes() as moved:
        pool.options(worker=1).parfeval(nothing, bytes(SMALL)).result(300)
        pool.options(worker=2).parfeval(zeros, 2 * SMALL).result(300)

    frame = moved.to_frame()
    assert frame.loc[0].tolist() == [0, 0]
    assert SMALL <= frame.loc[1, "sent_bytes"] <= SMALL + ON_TOP
    assert 0 < frame.loc[1, "received_bytes"] <= ON_TOP
    assert 0 < frame.loc[2, "sent_bytes"] <= ON_TOP
    assert 2 * SMALL <= frame.loc[2, "received_bytes"] <= 2 * SMALL + ON_TOP


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        bytes,
        lambda size: np.zeros(size, np.uint8),
        lambda size: [bytes(size // 2), "x" * (size // 2)],
    ],
)
def test_large_arguments_count_by_what_is_shipped(
    pool: ParallelPool, make: Callable[[int], Any]
) -> None:
    value = make(LARGE)
    sent, received = count(pool, lambda: pool.parfeval(nothing, value).result(300))
    assert LARGE <= sent <= LARGE + ON_TOP
    assert received <= ON_TOP

    sent, _ = count(pool, lambda: pool.parfor(nothing, [value] * 3, chunk_size=1))
    assert 3 * LARGE <= sent <= 3 * (LARGE + ON_TOP), "each item takes its own"


@pytest.mark.processes
def test_a_large_result_counts_when_it_is_asked_for(pool: ParallelPool) -> None:
    with pool.transfer_bytes() as moved:
        future = pool.parfeval(np.zeros, LARGE // 8)
        assert wait([future], 300)
        before = moved.total.received_bytes
        future.result(300)
        future.result(300)
    assert before <= ON_TOP
    assert LARGE <= moved.total.received_bytes <= LARGE + 2 * ON_TOP
    assert LARGE <= count(pool, lambda: pool.parfor(np.zeros, [LARGE // 8]))[1] <= LARGE + ON_TOP


@pytest.mark.processes
def test_a_function_is_shipped_to_each_worker_once(pool: ParallelPool) -> None:
    """What MATLAB's page on ticBytes teaches: see what a closure drags along."""
    weights = np.ones(LARGE, np.uint8)

    def use(item: int) -> int:
        return int(weights[item]) + current_task().worker

    with pool.transfer_bytes() as moved:
        pool.parfor(use, 30, chunk_size=1)

    used = moved.to_frame().query("sent_bytes > @LARGE")
    assert len(used) >= 1
    assert (used["sent_bytes"] <= LARGE + 30 * ON_TOP).all()


@pytest.mark.processes
def test_a_constant_is_shipped_to_each_worker_once(pool: ParallelPool) -> None:
    table = pool.constant(np.ones(LARGE, np.uint8))
    first = count(pool, lambda: pool.parfeval_on_all(lambda: int(table.value[0])).result(300))
    again = count(pool, lambda: pool.parfeval_on_all(lambda: int(table.value[1])).result(300))

    assert 3 * LARGE <= first[0] <= 3 * (LARGE + ON_TOP)
    assert again[0] <= 3 * ON_TOP


@pytest.mark.processes
def test_exceptions_are_results_too(pool: ParallelPool) -> None:
    def fail() -> None:
        raise ValueError("x" * SMALL)

    _, received = count(pool, lambda: pool.parfeval(fail).exception(300))
    assert received >= SMALL


@pytest.mark.everywhere
def test_within_the_block_it_is_live_and_after_it_it_stays(
    pool: ParallelPool, make_pool: Any
) -> None:
    with pool.transfer_bytes() as outer:
        assert outer.total == (0, 0)
        pool.parfeval(zeros, SMALL).result(300)
        first = outer.total
        with pool.transfer_bytes() as inner:
            assert inner.total == (0, 0)
            pool.parfeval(zeros, SMALL).result(300)
    total, within = outer.total, inner.total
    pool.parfeval(zeros, SMALL).result(300)

    assert outer.total == total
    assert inner.total == within
    assert total == (
        first.sent_bytes + within.sent_bytes,
        first.received_bytes + within.received_bytes,
    )
    if make_pool.is_in_processes:
        assert within.received_bytes >= SMALL
        assert f"{total.received_bytes:,} received" in repr(outer)


@pytest.mark.processes
def test_a_part_of_a_pool_counts_its_own_workers(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[1])
    with part.transfer_bytes() as mine, rest.transfer_bytes() as theirs:
        part.parfeval(zeros, SMALL).result(300)
    assert mine.to_frame().index.tolist() == [1]
    assert theirs.to_frame().index.tolist() == [0, 2]
    assert mine.total.received_bytes >= SMALL
    assert theirs.total == (0, 0)


@pytest.mark.processes
def test_what_a_worker_and_the_one_that_replaces_it_have_moved_is_added(pool: ParallelPool) -> None:
    view = pool.options(worker=1)
    with pool.transfer_bytes() as moved:
        view.parfeval(nothing, bytes(SMALL)).result(300)
        pool.options(worker=1, retries=0).parfeval(sys.exit, 3).exception(300)
        view.parfeval(nothing, bytes(SMALL)).result(300)
    assert moved.to_frame()["sent_bytes"].tolist() == [0, moved.total.sent_bytes, 0]
    assert 2 * SMALL <= moved.total.sent_bytes <= 2 * SMALL + 3 * ON_TOP
