"""What becomes of a gang of which a rank fails, is lost, takes too long, or is not wanted any
more.
"""

import pytest

from raypool.core.messages import (
    AttemptFinished,
    DropPlace,
    EndTask,
    RunGang,
    SetTimer,
    TimeOutItems,
    Vacate,
)
from raypool.core.model import Report, Slice, TaskState
from raypool.errors import LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def gang_of(pool_of, size, **spec):
    """Return a pool in which task 0 is a gang on all workers; rank, worker and attempt have the
    same number.
    """
    pool = pool_of(size)
    pool.submit(0, size=size, is_gang=True, **spec)
    return pool


def rank(number, task_id=0):
    """Return a rank as a piece of its task."""
    return task_id, number, number + 1


# --- failures -------------------------------------------------------------------------------------


def test_a_rank_that_fails_stops_the_others_and_is_not_retried(pool_of):
    pool = gang_of(pool_of, 3, retries=5)
    stops = [pool.signals(0, 0, 0), pool.signals(2, 2, 0)]
    assert pool.finish(1, Report(1, failed=1, retry=(1,))) == [pool.settles(1, rank(1)), *stops]


def test_a_gang_of_which_a_rank_failed_ends_when_the_last_has_come_back(pool_of):
    pool = gang_of(pool_of, 4)
    pool.finish(1, Report(1, failed=1))
    assert pool.finish(0) == [pool.settles(0, rank(0))], "as if nothing had happened"
    assert pool.finish(3, Report(1, failed=1)) == [pool.settles(3, rank(3))], "nobody is told twice"
    assert pool.finish(2, Report(0)) == [
        pool.fails(rank(2), LossReason.STOPPED),
        EndTask(0, FAILED),
    ]
    assert (pool.counts.finished, pool.counts.failed) == (1, 3)


def test_the_last_rank_to_come_back_may_be_the_one_that_failed(pool_of):
    pool = gang_of(pool_of, 2)
    pool.finish(0)
    assert pool.finish(1, Report(1, failed=1)) == [pool.settles(1, rank(1)), EndTask(0, FAILED)]


def test_a_rank_that_was_not_begun_has_failed(pool_of):
    pool = gang_of(pool_of, 2)
    assert pool.finish(0, Report(0)) == [
        pool.fails(rank(0), LossReason.UNKNOWN),
        pool.signals(1, 1, 0),
    ]


def test_a_worker_that_comes_back_takes_other_work_while_the_gang_is_broken_up(pool_of):
    pool = gang_of(pool_of, 2)
    pool.submit(1)
    assert pool.finish(1, Report(1, failed=1)) == [
        pool.runs(1, 2, (1, 0, 1)),
        pool.settles(1, rank(1)),
        pool.signals(0, 0, 0),
    ]
    assert pool.finish(0, Report(0))[-1] == EndTask(0, FAILED)


def test_the_next_gang_starts_when_all_are_back(pool_of):
    pool = gang_of(pool_of, 2)
    pool.submit(1, size=2, is_gang=True)
    pool.finish(1, Report(1, failed=1))
    assert pool.finish(0, Report(0))[0] == RunGang(
        (pool.runs(0, 2, rank(0, 1)), pool.runs(1, 3, rank(1, 1)))
    )


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_idle", [False, True])
def test_a_lost_rank_stops_the_others_and_is_never_run_by_itself(pool_of, was_idle):
    pool = gang_of(pool_of, 3)
    stops = [pool.signals(0, 0, 0), pool.signals(2, 2, 0)]
    assert pool.lose(1, was_idle=was_idle) == [
        *pool.starts(3, place=1),
        pool.fails(rank(1)),
        *stops,
    ]
    assert pool.ready(3) == []
    assert pool.finish(0, Report(0)) == [pool.fails(rank(0), LossReason.STOPPED)]
    assert pool.finish(2) == [pool.settles(2, rank(2)), EndTask(0, FAILED)]


def test_a_rank_that_does_not_stop_is_killed_with_its_worker(pool_of):
    pool = gang_of(pool_of, 2)
    pool.finish(1, Report(1, failed=1))
    end = [pool.fails(rank(0), LossReason.STOPPED), EndTask(0, FAILED)]
    assert pool.lose(0, LossReason.STOPPED) == [*pool.starts(2, place=0), *end]


def test_all_ranks_may_be_lost(pool_of):
    pool = gang_of(pool_of, 2)
    pool.lose(0, LossReason.NODE)
    assert pool.lose(1, LossReason.NODE)[-2:] == [
        pool.fails(rank(1), LossReason.NODE),
        EndTask(0, FAILED),
    ]


def test_a_gang_that_is_broken_up_ends_with_the_pool(pool_of):
    pool = gang_of(pool_of, 2)
    pool.finish(1, Report(1, failed=1))
    pool.resize(remove=2)
    assert pool.lose(0)[:2] == [Vacate(0), pool.fails(rank(0))]
    assert not pool.tasks


def test_a_place_may_be_given_up_under_a_gang(pool_of):
    pool = gang_of(pool_of, 2, places=(1, 0))
    pool.lose(0)  # it was in place 0: rank 1
    for worker_id in (2, 3):
        pool.lose(worker_id)
        pool.fire("start", worker_id + 1)
    assert DropPlace(0, LossReason.EXIT) in pool.lose(4)
    assert pool.tell(AttemptFinished(1, 0, (Report(1),))) == [
        pool.settles(0, rank(0)),
        EndTask(0, FAILED),
    ]


# --- time -----------------------------------------------------------------------------------------


def test_every_rank_has_its_timer_after_all_have_been_called(pool_of):
    pool = pool_of(2)
    ranks = RunGang((pool.runs(0, 0, rank(0)), pool.runs(1, 1, rank(1))))
    timers = [SetTimer(5.0, "timeout", 0, 0), SetTimer(5.0, "timeout", 1, 1)]
    assert pool.submit(0, size=2, is_gang=True, timeout_s=5.0) == [ranks, *timers]


def test_a_gang_that_takes_too_long_is_stopped_as_a_whole(pool_of):
    pool = gang_of(pool_of, 3, timeout_s=5.0)
    pool.finish(1)
    stops = [pool.signals(0, 0, 0), pool.signals(2, 2, 0)]
    assert pool.fire("timeout", 2, 2) == [TimeOutItems(Slice(0, 0, 3, 1), 5.0), *stops]
    assert pool.fire("timeout", 0, 0) == []
    assert pool.finish(2, Report(0)) == [pool.fails(rank(2), LossReason.STOPPED)]
    assert pool.finish(0) == [pool.settles(0, rank(0)), EndTask(0, FAILED)]


def test_the_timer_of_a_rank_that_has_come_back_means_nothing(pool_of):
    pool = gang_of(pool_of, 2, timeout_s=5.0)
    pool.finish(0)
    assert pool.fire("timeout", 0, 0) == []
    assert pool.finish(1) == [pool.settles(1, rank(1)), EndTask(0, FINISHED)]


def test_what_has_failed_before_its_time_was_over_is_not_said_to_be_late(pool_of):
    pool = gang_of(pool_of, 2, timeout_s=5.0)
    pool.finish(0, Report(1, failed=1))
    assert pool.fire("timeout", 1, 1) == []


# --- nobody wants it any more ---------------------------------------------------------------------


def test_a_gang_that_is_cancelled_ends_at_once(pool_of):
    pool = gang_of(pool_of, 2)
    assert pool.cancel(0) == [pool.signals(0, 0, 0), pool.signals(1, 1, 0), EndTask(0, CANCELLED)]
    assert pool.finish(0, Report(0)) == []


def test_ranks_that_were_told_to_stop_are_not_told_again_when_it_is_cancelled(pool_of):
    pool = gang_of(pool_of, 2)
    pool.finish(1, Report(1, failed=1))
    assert pool.cancel(0) == [EndTask(0, CANCELLED)]
    assert pool.finish(0, Report(0)) == []


def test_a_pool_that_closes_lets_a_gang_collect_and_run(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert pool.shutdown() == []
    assert isinstance(pool.finish(0)[0], RunGang)


def test_a_pool_that_closes_at_once_lets_go_what_a_gang_holds(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert pool.shutdown(cancel_queued=True) == [EndTask(1, CANCELLED)]
    assert pool.finish(0)[-3:-1] == [Vacate(0), Vacate(1)]
