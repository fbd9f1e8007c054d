"""What runs is asked to end, told to end, or killed because it does not."""

import pytest

from raypool.core.messages import (
    CancelItem,
    CancelRequested,
    DrainRequested,
    EndTask,
    FirstRequested,
    ItemsAdded,
    SetTimer,
    Signal,
    StopRequested,
    Vacate,
)
from raypool.core.model import PoolState, Report, Slice, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED
STOPPED = LossReason.STOPPED


# --- asked ----------------------------------------------------------------------------------------


def test_every_call_that_holds_something_of_the_task_is_asked_to_stop(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=2)
    pool.submit(1)
    assert pool.stop(0) == [pool.signals(0, 0, 0, Signal.STOP), pool.signals(1, 1, 0, Signal.STOP)]


def test_the_call_of_one_item_is_asked_to_stop(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    assert pool.tell(StopRequested(0, 1)) == [pool.signals(1, 1, 0, Signal.STOP)]


def test_a_task_that_is_asked_to_stop_goes_on_as_before(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    pool.stop(0)
    assert pool.finish(0) == [pool.runs(0, 1, (0, 1, 2)), pool.settles(0, (0, 0, 1))]
    assert pool.finish(1)[-1] == EndTask(0, FINISHED)


def test_what_waits_or_has_ended_is_asked_nothing(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    assert pool.stop(1) == []
    pool.finish(0)
    assert pool.stop(0) == []


def test_a_task_that_never_was_cannot_be_asked(pool_of):
    with pytest.raises(InternalError):
        pool_of(1).stop(0)


def test_a_call_that_holds_the_task_beside_others_is_asked_once_and_by_name(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2)
    pool.submit(3)
    pool.finish(1, busy_s=0.001)
    assert pool.stop(3) == [pool.signals(0, 2, 3, Signal.STOP)]


def test_what_has_come_back_or_was_lost_is_asked_no_more(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    pool.finish(0)
    pool.lose(1)
    assert pool.stop(0) == [pool.signals(2, 2, 0, Signal.STOP), pool.signals(0, 3, 0, Signal.STOP)]


# --- one item, and all that waits -----------------------------------------------------------------


def test_items_are_cancelled_and_put_first_alone(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=6, chunk_size=1)
    assert pool.tell(FirstRequested(0, 4)) == pool.tell(FirstRequested(0, 0)) == []
    assert pool.tell(CancelRequested(0, 2)) == [CancelItem(Slice(0, 2, 3, 1))]
    assert pool.tell(CancelRequested(0, 2)) == []
    assert pool.tell(CancelRequested(0, 0)) == [
        pool.signals(0, 0, 0, Signal.CANCEL),
        CancelItem(Slice(0, 0, 1, 1)),
    ]
    assert pool.finish(0) == [pool.runs(0, 1, (0, 4, 5))], "its late answer does not count"
    assert pool.finish(1)[0] == pool.runs(0, 2, (0, 1, 2))
    assert pool.finish(2)[0] == pool.runs(0, 3, (0, 3, 4))
    assert pool.tell(ItemsAdded(0, 1, None)) == []
    assert pool.finish(3)[0] == pool.runs(0, 4, (0, 5, 6))
    assert pool.finish(4)[0] == pool.runs(0, 5, (0, 6, 7))
    assert pool.finish(5)[-1] == EndTask(0, FINISHED)
    assert pool.tell(FirstRequested(0, 4)) == pool.tell(CancelRequested(0, 4)) == []
    assert pool.scheduler.counts.cancelled == 2


def test_an_item_is_cancelled_while_it_waits_for_its_next_attempt(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=5, chunk_size=3, retry_delay_s=5.0)
    pool.finish(0, Report(3, 3, (0, 1, 2)))
    assert pool.tell(CancelRequested(0, 1)) == [CancelItem(Slice(0, 1, 2, 2))]
    assert pool.tell(CancelRequested(0, 1)) == pool.tell(CancelRequested(0, 5)) == []
    assert pool.finish(1) == [pool.settles(1, (0, 3, 5))]
    assert pool.fire("retry", task_id=0) == [pool.runs(0, 2, (0, 0, 1, 2))]
    assert pool.finish(2)[0] == pool.runs(0, 3, (0, 2, 3, 2))
    assert pool.finish(3)[-1] == EndTask(0, FINISHED)
    assert pool.counts.cancelled == 1


def test_an_item_that_runs_again_leaves_an_open_task_open(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=0, is_open=True)
    assert pool.tell(ItemsAdded(0, 1, None)) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1))]
    assert pool.tell(ItemsAdded(0, 0, False)) == [EndTask(0, FINISHED)]


def test_the_first_item_of_those_that_run_again_is_cancelled(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=4, chunk_size=4)
    pool.lose(0, was_idle=True)
    assert pool.tell(CancelRequested(0, 4)) == []
    assert pool.tell(CancelRequested(0, 0)) == [CancelItem(Slice(0, 0, 1, 1))]
    assert pool.ready(1) == [pool.runs(1, 1, (0, 1, 4))]


def test_an_item_that_shares_its_call_is_not_cancelled(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, chunk_size=2)
    assert pool.tell(CancelRequested(0, 1)) == []
    assert pool.finish(0)[-1] == EndTask(0, FINISHED)


def test_of_a_task_that_is_drained_nothing_starts(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=5, chunk_size=1, retry_delay_s=5.0)
    pool.finish(1, Report(1, 1, (1,)))
    assert pool.tell(DrainRequested(0)) == []
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1))]
    assert pool.fire("retry", task_id=0) == []
    assert pool.tell(ItemsAdded(0, 1, None)) == []
    assert pool.finish(2) == [pool.settles(2, (0, 2, 3)), EndTask(0, CANCELLED)]
    assert pool.tell(DrainRequested(0)) == []
    assert pool.scheduler.counts.cancelled == 4


@pytest.mark.parametrize("places", [None, (0,)])
def test_tasks_that_wait_are_drained(pool_of, places):
    pool = pool_of(1)
    pool.submit(0)
    for task_id, priority in (1, 0), (2, 7), (3, 8), (4, 5):
        pool.submit(task_id, priority=priority, places=places)
    assert pool.tell(DrainRequested(3)) == [EndTask(3, CANCELLED)]
    assert pool.tell(DrainRequested(1)) == [EndTask(1, CANCELLED)]
    assert pool.finish(0)[0] == pool.runs(0, 1, (2, 0, 1))
    assert pool.finish(1)[0] == pool.runs(0, 2, (4, 0, 1))
    assert pool.finish(2)[-1] == EndTask(4, FINISHED)


def test_what_waits_for_a_process_of_its_own_does_not_start_after_that(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.finish(0)
    assert pool.submit(1, size=2, is_fresh=True) == [
        *pool.starts(2, place=0),
        pool.runs(1, 2, (1, 1, 2)),
    ]
    assert pool.tell(DrainRequested(1)) == []
    assert pool.finish(2)[:2] == [pool.settles(2, (1, 1, 2)), EndTask(1, CANCELLED)]
    assert pool.counts.cancelled == 1
    assert pool.ready(2) == []
    assert pool.submit(2) == [pool.runs(2, 3, (2, 0, 1))]


# --- told -----------------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_while_it_runs_is_told_so(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4)
    assert pool.cancel(0) == [pool.signals(0, 0, 0), pool.signals(1, 1, 0), EndTask(0, CANCELLED)]


def test_its_worker_is_busy_until_the_call_has_come_back(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.cancel(0)
    assert pool.submit(1) == []
    assert pool.finish(0, Report(0)) == [pool.runs(0, 1, (1, 0, 1))]


def test_the_first_failure_of_a_task_that_fails_fast_interrupts_the_rest(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3, fail_fast=True)
    answer = pool.finish(1, Report(1, failed=1))
    assert answer[1:] == [pool.signals(0, 0, 0), pool.signals(2, 2, 0), EndTask(0, FAILED)]


def test_the_others_in_a_call_are_not_meant(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2)
    pool.submit(3)
    pool.finish(1, busy_s=0.001)
    assert pool.cancel(2) == [pool.signals(0, 2, 2), EndTask(2, CANCELLED)]
    assert pool.finish(2, Report(0), Report(1))[-2:] == [
        pool.settles(2, (3, 0, 1)),
        EndTask(3, FINISHED),
    ]


def test_a_pool_that_ends_with_the_task_tells_nobody(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    assert pool.shutdown(cancel_running=True)[:2] == [EndTask(0, CANCELLED), Vacate(0)]


def test_a_pool_that_goes_on_tells_what_its_end_cancels(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=3)
    pool.submit(1, fn_id=1, priority=1)
    pool.finish(0)
    assert pool.shutdown(cancel_queued=True) == [pool.signals(1, 1, 0), EndTask(0, CANCELLED)]
    assert pool.state is PoolState.CLOSING


# --- killed ---------------------------------------------------------------------------------------


def test_a_worker_that_was_ended_because_its_task_did_not_stop_is_replaced_at_once(pool_of):
    pool = pool_of(1)
    for worker_id in range(4):
        pool.submit(worker_id)
        pool.cancel(worker_id)
        assert pool.lose(worker_id, STOPPED) == pool.starts(worker_id + 1, place=0)
        pool.ready(worker_id + 1)


def test_it_makes_up_for_earlier_losses(pool_of):
    pool = pool_of(1)
    for worker_id in range(3):
        pool.lose(worker_id)
        pool.fire("start", worker_id + 1)
        pool.ready(worker_id + 1)
    assert pool.lose(3, STOPPED) == pool.starts(4, place=0)
    pool.ready(4)
    assert pool.lose(4) == pool.starts(5, place=0)


def test_a_worker_that_was_stopped_while_it_started_has_failed_to_start(pool_of):
    pool = pool_of(1)
    pool.lose(0)
    assert pool.lose(1, STOPPED) == [SetTimer(0.5, "start", 2)]


def test_what_shared_the_call_of_a_stubborn_task_is_charged_nothing(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2, retries=1)
    pool.submit(3, retries=1)
    pool.finish(1, busy_s=0.001)
    pool.cancel(2)
    pool.lose(0, STOPPED)
    assert pool.ready(1) == [pool.runs(1, 3, (3, 0, 1))]


def test_what_may_never_run_twice_fails_even_so(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=0)
    assert pool.lose(0, STOPPED)[-2:] == [pool.fails((0, 0, 1), STOPPED), EndTask(0, FINISHED)]


def test_what_is_bound_to_it_fails(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, place=0)
    pool.cancel(0)
    assert pool.lose(0, STOPPED)[-2:] == [pool.fails((1, 0, 1), STOPPED), EndTask(1, FINISHED)]
