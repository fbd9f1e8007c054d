"""Items that run again after a while: how long they wait, and what becomes of them meanwhile."""

import pytest

from raypool.core.messages import (
    BreakPool,
    ClosePool,
    DropPlace,
    EndTask,
    PlaceLost,
    RunTasks,
    SetTimer,
    Vacate,
)
from raypool.core.model import Report, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED
AGAIN = Report(1, failed=1, retry=(0,), busy_s=1.0)


def rests(until, task_id=0):
    """Expect a task to be looked at again."""
    return SetTimer(until, "retry", -1, task_id=task_id)


def sent(commands):
    """Return the slices of the calls among commands."""
    return [
        tuple(piece)
        for command in commands
        if isinstance(command, RunTasks)
        for piece in command.slices
    ]


def test_an_item_that_may_run_again_waits_first(pool_of):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=10.0)
    pool.now = 5.0
    assert pool.finish(0, AGAIN) == [rests(15.0)]
    pool.now = 15.0
    assert pool.fire("retry", task_id=0) == [pool.runs(0, 1, (0, 0, 1, 2))]
    assert pool.finish(1) == [pool.settles(1, (0, 0, 1, 2)), EndTask(0, FINISHED)]


def test_it_waits_twice_as_long_each_time_and_never_longer_than_five_minutes(pool_of):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=100.0, retries=4)
    for attempt_id, delay_s in enumerate((100.0, 200.0, 300.0, 300.0)):
        assert pool.finish(attempt_id, AGAIN) == [rests(pool.now + delay_s)]
        pool.now += delay_s
        pool.fire("retry", task_id=0)
    assert pool.finish(4, AGAIN) == [
        pool.settles(4, (0, 0, 1, 5)),
        EndTask(0, FINISHED),
    ], "that was the last"


def test_an_item_that_has_lost_its_worker_waits_too(pool_of):
    pool = pool_of(2)
    pool.submit(0, retry_delay_s=1.0)
    assert pool.lose(0) == [*pool.starts(2, place=0), rests(1.0)]
    pool.now = 1.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 1, 2)]


@pytest.mark.parametrize("reason", [LossReason.STOPPED, LossReason.PREEMPTED])
def test_what_was_not_to_blame_need_not_wait(pool_of, reason):
    pool = pool_of(2)
    pool.submit(0, retry_delay_s=1.0)
    assert pool.lose(0, reason)[0] == pool.runs(1, 1, (0, 0, 1))


def test_what_was_handed_back_need_not_wait(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3, chunk_size=3, retry_delay_s=1.0)
    assert pool.finish(0, Report(2, failed=1, retry=(0,))) == [
        pool.runs(0, 1, (0, 2, 3)),
        pool.settles(0, (0, 1, 2)),
        rests(1.0),
    ]


def test_others_go_on_meanwhile(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, retry_delay_s=1.0)
    assert pool.finish(0, AGAIN) == [pool.runs(0, 1, (0, 1, 2)), rests(1.0)]
    pool.submit(1)
    assert pool.finish(1)[0] == pool.runs(0, 2, (1, 0, 1))
    pool.finish(2)
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 1, 2)]


def test_a_call_lost_with_many_items_rests_as_one(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=100, chunk_size=100, retry_delay_s=1.0)
    assert [command for command in pool.lose(0) if command == rests(1.0)] == [rests(1.0)]
    pool.ready(1)
    pool.now = 1.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 10, 2)]


def test_each_rest_has_its_own_end(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, retry_delay_s=4.0)
    pool.finish(0, AGAIN)
    pool.now = 1.0
    assert pool.finish(1, Report(1, failed=1, retry=(1,))) == [rests(5.0)]
    pool.now = 4.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 1, 2)]
    pool.now = 5.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 1, 2, 2)]


def test_a_longer_rest_may_begin_before_a_shorter_one(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, retry_delay_s=4.0)
    pool.finish(0, AGAIN)
    pool.now = 4.0
    pool.fire("retry", task_id=0)
    assert pool.finish(2, AGAIN) == [rests(12.0)]
    pool.now = 5.0
    assert pool.finish(1, Report(1, failed=1, retry=(1,))) == [rests(9.0)]
    pool.now = 9.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 1, 2, 2)]


def test_a_task_that_is_cancelled_meanwhile_does_not_run_again(pool_of):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.cancel(0) == [EndTask(0, CANCELLED)]
    assert pool.fire("retry", task_id=0) == []


@pytest.mark.parametrize("wish", ["cancel_queued", "cancel_running"])
def test_what_rests_is_cancelled_with_a_pool_that_takes_no_more(pool_of, wish):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.shutdown(**{wish: True}) == [EndTask(0, CANCELLED), Vacate(0), ClosePool()]


def test_a_pool_that_closes_waits_for_it(pool_of):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.shutdown() == []
    pool.fire("retry", task_id=0)
    assert pool.finish(1)[-1] == ClosePool()


def test_workers_do_not_go_to_rest_while_something_is_to_run_again(pool_of):
    pool = pool_of(1, idle_timeout_s=5.0)
    pool.submit(0, retry_delay_s=60.0)
    assert pool.finish(0, AGAIN) == [rests(60.0)]
    pool.now = 30.0
    assert pool.fire("idle") == []
    pool.now = 60.0
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 1, 2)]


def test_what_rests_fails_with_the_last_worker_that_could_run_it(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.lose(0)[2:] == [pool.fails((0, 0, 1, 2)), EndTask(0, FINISHED)]
    assert pool.fire("retry", task_id=0) == []


def test_what_rests_ends_with_the_pool(pool_of):
    pool = pool_of(1)
    pool.submit(0, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    node = LossReason.NODE
    assert pool.tell(PlaceLost(0, node)) == [
        Vacate(0),
        DropPlace(0, node),
        BreakPool(),
        EndTask(0, FAILED),
    ]


def test_a_first_failure_ends_a_task_with_what_rests(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, fail_fast=True, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.finish(1, Report(1, failed=1)) == [pool.settles(1, (0, 1, 2)), EndTask(0, FAILED)]
    assert pool.fire("retry", task_id=0) == []


def test_an_open_task_may_grow_while_something_rests(pool_of):
    pool = pool_of(1)
    pool.submit(0, is_open=True, retry_delay_s=1.0)
    pool.finish(0, AGAIN)
    assert pool.add_items(0, 1, is_open=False) == [pool.runs(0, 1, (0, 1, 2))]
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2))]
    assert sent(pool.fire("retry", task_id=0)) == [(0, 0, 1, 2)]


def test_what_rests_takes_no_room(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=3, max_workers=1, retry_delay_s=1.0)
    assert sent(pool.finish(0, AGAIN)) == [(0, 1, 2, 1)]
    assert sent(pool.fire("retry", task_id=0)) == []
    assert sent(pool.finish(1)) == [(0, 0, 1, 2)], "it comes before what has never run"


def test_a_delay_below_zero_cannot_be(pool_of):
    with pytest.raises(InternalError):
        pool_of(1).submit(0, retry_delay_s=-1.0)
