"""Tasks that want a process of their own."""

import pytest

from raypool.core.messages import EndTask, RunTasks, SetTimer, Vacate
from raypool.core.model import Report, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


@pytest.fixture
def used(pool_of):
    """Return a pool of two workers, of which the first has run something; the next task is 1, the
    next worker 2.
    """
    pool = pool_of(2)
    pool.submit(0)
    pool.finish(0)
    return pool


def test_a_worker_that_has_run_nothing_takes_it_and_ends_after_it(pool_of):
    pool = pool_of(1)
    assert pool.submit(0, is_fresh=True) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.finish(0) == [
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
        *pool.starts(1, place=0),
    ]


def test_one_that_has_is_replaced_first(used):
    assert used.submit(1, is_fresh=True) == used.starts(2, place=0)
    assert used.ready(2) == [used.runs(2, 1, (1, 0, 1))]
    assert used.finish(1) == [
        used.settles(1, (1, 0, 1)),
        EndTask(1, FINISHED),
        *used.starts(3, place=0),
    ]


def test_what_comes_later_does_not_wait_for_that(used):
    used.submit(1, is_fresh=True)
    assert used.submit(2) == [used.runs(1, 2, (2, 0, 1))]
    used.submit(3, priority=9)
    assert used.ready(2) == [used.runs(2, 1, (1, 0, 1))], "it was started for this one"


def test_every_item_of_a_loop_has_a_process_of_its_own(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3, is_fresh=True, chunk_size=3)
    for item in range(3):
        assert pool.calls[item] == pool.runs(item, item, (0, item, item + 1))
        pool.finish(item)
        pool.ready(item + 1)


def test_its_time_begins_when_it_is_sent(used):
    used.submit(1, is_fresh=True, timeout_s=5.0)
    used.now = 20.0
    assert used.ready(2) == [used.runs(2, 1, (1, 0, 1)), SetTimer(25.0, "timeout", 2, 1)]


def test_a_worker_that_does_not_come_up_for_it_costs_it_nothing(used):
    used.submit(1, is_fresh=True, retries=0)
    assert used.lose(2, LossReason.START)[0] == used.runs(1, 2, (1, 0, 1))


def test_a_worker_that_dies_with_it_is_replaced_once(used):
    used.submit(1, is_fresh=True)
    used.ready(2)
    assert used.lose(2) == [used.runs(1, 2, (1, 0, 1, 2)), *used.starts(3, place=0)]


@pytest.mark.parametrize("report", [Report(0), Report(1, failed=1, retry=(0,))])
def test_what_has_to_run_again_does_so_in_another_process(pool_of, report):
    pool = pool_of(1)
    pool.submit(0, is_fresh=True)
    assert pool.finish(0, report) == pool.starts(1, place=0)
    assert [type(command) for command in pool.ready(1)] == [RunTasks]


def test_nobody_is_told_to_stop_what_was_not_begun(used):
    used.submit(1, is_fresh=True)
    assert used.stop(1) == []
    assert used.cancel(1) == [EndTask(1, CANCELLED)]
    assert used.ready(2) == []
    assert used.submit(2, is_fresh=True) == [used.runs(2, 2, (2, 0, 1))], (
        "nothing has run in that process"
    )


def test_what_runs_is_told_as_any_other(used):
    used.submit(1, is_fresh=True)
    used.ready(2)
    assert used.cancel(1) == [used.signals(2, 1, 1), EndTask(1, CANCELLED)]
    assert used.finish(1, Report(0)) == used.starts(3, place=0)


def test_what_was_bound_to_the_worker_has_lost_it(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, is_fresh=True)
    pool.submit(2, place=0)
    assert pool.finish(0)[-2:] == [pool.fails((2, 0, 1)), EndTask(2, FINISHED)]


def test_it_may_name_places_but_no_worker_that_it_would_end(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1)
    pool.submit(1, is_fresh=True, places=(1,))
    assert pool.finish(0)[:2] == pool.starts(2, place=1)
    assert pool.ready(2) == [pool.runs(2, 1, (1, 0, 1))]
    with pytest.raises(InternalError):
        pool.submit(2, is_fresh=True, place=0)


def test_nothing_is_queued_behind_it(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, is_fresh=True)
    pool.ready(1)
    assert pool.submit(2, size=100) == []


def test_a_pool_that_shrinks_lets_it_run(used):
    used.submit(1, size=2)
    used.submit(2, is_fresh=True)
    used.finish(1)
    used.submit(3, place=1)
    assert used.resize(remove=1) == []
    assert used.ready(2) == [used.runs(2, 3, (2, 0, 1))]
    assert used.finish(3)[-1] == Vacate(0)


def test_a_pool_that_shrinks_does_not_start_a_worker_for_what_was_cancelled(used):
    used.submit(1, size=2)
    used.submit(2, is_fresh=True)
    used.finish(1)
    used.submit(3, place=1)
    used.resize(remove=1)
    used.cancel(2)
    assert used.ready(2) == [Vacate(0)]


def test_a_pool_that_closes_with_it_starts_nobody(pool_of):
    pool = pool_of(1)
    pool.submit(0, is_fresh=True)
    pool.shutdown()
    assert pool.finish(0)[:3] == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED), Vacate(0)]
