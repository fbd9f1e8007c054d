"""An item that may run only so long."""

import pytest

from raypool.core.messages import EndTask, RunTasks, SetTimer, TimeOutItems
from raypool.core.model import Report, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def timer(pool, worker_id, attempt_id, timeout_s=5.0):
    """Expect a timer for a call."""
    return SetTimer(pool.now + timeout_s, "timeout", worker_id, attempt_id)


def times_out(pool, worker_id, attempt_id, piece, timeout_s=5.0):
    """Expect an item to be stopped and failed."""
    call = pool.runs(worker_id, attempt_id, piece)
    return [pool.signals(worker_id, attempt_id, piece[0]), TimeOutItems(call.slices[0], timeout_s)]


def test_every_call_gets_its_timer(pool_of):
    pool = pool_of(2)
    pool.now = 7.0
    assert pool.submit(0, size=2, timeout_s=5.0) == [
        pool.runs(0, 0, (0, 0, 1)),
        timer(pool, 0, 0),
        pool.runs(1, 1, (0, 1, 2)),
        timer(pool, 1, 1),
    ]


def test_an_item_that_comes_back_in_time_is_as_any_other(pool_of):
    pool = pool_of(1)
    pool.submit(0, timeout_s=5.0)
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED)]
    assert pool.fire("timeout", 0, 0) == []


def test_an_item_that_takes_too_long_fails_and_is_stopped(pool_of):
    pool = pool_of(1)
    pool.submit(0, timeout_s=5.0)
    assert pool.fire("timeout", 0, 0) == [*times_out(pool, 0, 0, (0, 0, 1)), EndTask(0, FINISHED)]
    counts = pool.counts
    assert (counts.finished, counts.failed, counts.cancelled) == (0, 1, 0)


def test_whatever_comes_of_it_later_counts_no_more(pool_of):
    for report in [Report(1), Report(0), Report(1, failed=1), Report(1, failed=1, retry=(0,))]:
        pool = pool_of(1)
        pool.submit(0, size=2, timeout_s=5.0)
        assert pool.fire("timeout", 0, 0) == times_out(pool, 0, 0, (0, 0, 1))
        assert pool.submit(1, priority=1) == [], "its worker is busy until then"
        assert pool.finish(0, report) == [pool.runs(0, 1, (1, 0, 1))]
        assert pool.finish(1)[0] == pool.runs(0, 2, (0, 1, 2))
        assert pool.finish(2)[-1] == EndTask(0, FINISHED)


def test_there_is_no_retry_after_it_even_if_the_worker_had_to_be_ended(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, retries=5, timeout_s=5.0)
    pool.fire("timeout", 0, 0)
    assert pool.lose(0, LossReason.STOPPED) == pool.starts(1, place=0)
    assert pool.ready(1) == [pool.runs(1, 1, (0, 1, 2)), timer(pool, 1, 1)]


def test_a_lost_item_has_all_its_time_again(pool_of):
    pool = pool_of(2)
    pool.submit(0, timeout_s=5.0)
    pool.now = 4.0
    assert pool.lose(0)[:2] == [pool.runs(1, 1, (0, 0, 1, 2)), SetTimer(9.0, "timeout", 1, 1)]
    assert pool.fire("timeout", 0, 0) == [], "that was the first attempt's"
    assert pool.fire("timeout", 1, 1) == [
        *times_out(pool, 1, 1, (0, 0, 1, 2)),
        EndTask(0, FINISHED),
    ]


def test_a_cancelled_task_does_not_time_out(pool_of):
    pool = pool_of(1)
    pool.submit(0, timeout_s=5.0)
    pool.cancel(0)
    assert pool.fire("timeout", 0, 0) == []


def test_it_ends_a_task_that_fails_fast(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=3, fail_fast=True, timeout_s=5.0)
    assert pool.fire("timeout", 0, 0) == [
        *times_out(pool, 0, 0, (0, 0, 1)),
        pool.signals(1, 1, 0),
        EndTask(0, FAILED),
    ]


def test_what_was_stopped_leaves_room_for_the_next(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, max_workers=1, timeout_s=5.0)
    assert pool.fire("timeout", 0, 0)[:2] == [pool.runs(1, 1, (0, 1, 2)), timer(pool, 1, 1)]


def test_a_bound_task_can_time_out(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, timeout_s=5.0)
    assert pool.fire("timeout", 1, 0)[-1] == EndTask(0, FINISHED)
    assert pool.submit(1, place=1) == []
    assert pool.finish(0) == [pool.runs(1, 1, (1, 0, 1))]


def test_the_time_is_for_one_item_so_none_shares_a_call_or_is_sent_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=100, chunk_size=10, timeout_s=5.0)
    pool.submit(2, timeout_s=5.0)
    assert pool.submit(3, size=100, priority=1) == [], "nothing is queued behind it either"
    calls = [command for command in pool.finish(1, busy_s=0.001) if isinstance(command, RunTasks)]
    assert calls[0].slices[0].task_id == 3
    pool.cancel(3)
    for call in calls[:-1]:
        pool.finish(call.attempt_id, Report(0))
    assert pool.finish(calls[-1].attempt_id, Report(0)) == [
        pool.runs(0, calls[-1].attempt_id + 1, (1, 1, 2)),
        timer(pool, 0, calls[-1].attempt_id + 1),
    ]


def test_a_time_limit_is_more_than_nothing(pool_of):
    with pytest.raises(InternalError):
        pool_of(1).submit(0, timeout_s=0.0)
