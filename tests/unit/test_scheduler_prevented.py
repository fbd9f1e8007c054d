"""Items that were prevented by what was beside them: they run again, at no charge."""

import pytest

from raypool.core.messages import EndTask
from raypool.core.model import Report, TaskState


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_they_run_again_with_the_same_attempt_number_however_often_the_user_lets_items_run(
    pool_of, retries
):
    pool = pool_of(1)
    pool.submit(0, retries=retries)
    for attempt_id in range(3):
        assert pool.finish(attempt_id, Report(1, failed=1, again=(0,))) == [
            pool.runs(0, attempt_id + 1, (0, 0, 1))
        ]
    assert pool.finish(3) == [pool.settles(3, (0, 0, 1)), EndTask(0, TaskState.FINISHED)]
    assert (pool.counts.failed, pool.counts.finished) == (0, 1)


def test_what_is_beside_them_in_a_slice_counts_and_what_the_user_wants_again_is_charged(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=4, chunk_size=4, retries=1)
    commands = pool.finish(1, Report(4, failed=3, retry=(1,), again=(2,)))
    assert [command for command in commands if type(command).__name__ == "SettleItems"] == [
        pool.settles(1, (1, 0, 1)),
        pool.settles(1, (1, 3, 4)),
    ]
    assert pool.counts.failed == 1
    waiting = [
        (piece.start, piece.attempt)
        for call in pool.calls.values()
        for piece in call.slices
        if piece.task_id == 1
    ]
    while pool.tasks:
        pool.finish(max(pool.calls))
        waiting = [
            (piece.start, piece.attempt)
            for call in pool.calls.values()
            for piece in call.slices
            if piece.task_id == 1
        ]
    assert sorted(waiting) == [(0, 1), (1, 2), (2, 1)]


def test_one_failure_is_enough_for_a_loop_that_stops_then_but_this_is_none(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, fail_fast=True)
    assert pool.finish(0, Report(1, failed=1, again=(0,))) == [pool.runs(0, 1, (0, 0, 1))]


def test_ranks_have_failed(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    pool.finish(0, Report(1, failed=1, again=(0,)))
    assert pool.counts.failed == 1
    assert EndTask(0, TaskState.FAILED) in pool.finish(1)
