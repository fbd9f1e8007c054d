"""Tasks that may run in certain places only."""

import pytest

from raypool.core.messages import AttemptFinished, DropPlace, EndTask, RunTasks, Vacate
from raypool.core.model import Report, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def started(commands):
    """Return who is called, and for which tasks."""
    calls = [call for command in commands for call in getattr(command, "runs", [command])]
    return [
        (call.worker_id, *(p.task_id for p in call.slices))
        for call in calls
        if isinstance(call, RunTasks)
    ]


# --- who may run it -------------------------------------------------------------------------------


def test_it_runs_in_its_places_only(pool_of):
    pool = pool_of(4)
    assert started(pool.submit(0, size=4, places=(3, 1))) == [(1, 0), (3, 0)]
    assert started(pool.submit(1, size=4)) == [(0, 1), (2, 1)]
    assert started(pool.finish(1)) == [(3, 0)]


def test_all_its_workers_work_as_long_as_there_is_something(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    pool.submit(1, size=9, places=(0, 1))
    assert started(pool.finish(0)) == [(0, 1)]
    assert started(pool.finish(1)) == [(1, 1)]
    assert started(pool.finish(2)) == []
    assert started(pool.submit(2)) == [(2, 2)]


def test_a_worker_that_comes_up_in_one_of_its_places_takes_it(pool_of):
    pool = pool_of(2)
    pool.lose(1)
    assert pool.submit(0, places=(1,)) == []
    assert started(pool.ready(2)) == [(2, 0)]


def test_a_worker_that_was_free_before_there_was_more_for_it_takes_that(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=1, is_open=True, places=(0, 1))
    pool.submit(1)
    pool.finish(1)
    assert started(pool.add_items(0, 2, is_open=False)) == [(1, 0)]


def test_what_its_worker_lost_runs_again_in_its_places(pool_of):
    pool = pool_of(3)
    pool.submit(0, places=(0, 1))
    assert pool.lose(0)[0] == pool.runs(1, 1, (0, 0, 1, 2))


def test_it_can_be_cancelled(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, places=(0,))
    pool.submit(1, places=(0,))
    assert pool.cancel(0) == [pool.signals(0, 0, 0), EndTask(0, CANCELLED)]
    assert started(pool.finish(0)) == [(0, 1)]
    assert pool.finish(1)[-1] == EndTask(1, FINISHED)
    assert not pool.scheduler.workers.lanes, "nothing is left of it"


def test_it_names_places_or_one_place(pool_of):
    with pytest.raises(InternalError):
        pool_of(1).submit(0, place=0, places=(0,))


# --- whose turn it is -----------------------------------------------------------------------------


def test_a_worker_takes_the_oldest_of_all_that_it_may(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    for task_id, wish in enumerate(
        ({"places": (0, 7)}, {}, {"place": 0}, {"places": (0,)}, {"places": (0, 7)}, {}), start=1
    ):
        pool.submit(task_id, **wish)
    assert [started(pool.finish(attempt)) for attempt in range(6)] == [
        [(0, task_id)] for task_id in range(1, 7)
    ]


def test_priority_goes_before_age_here_too(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, places=(0,))
    pool.submit(2)
    pool.submit(3, places=(0,), priority=1)
    pool.submit(4, priority=2)
    assert [started(pool.finish(attempt)) for attempt in range(4)] == [
        [(0, 4)],
        [(0, 3)],
        [(0, 1)],
        [(0, 2)],
    ]


def test_of_two_lanes_and_one_worker_the_older_task_goes_first(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, priority=1)
    pool.submit(1, places=(1,))
    pool.submit(2, places=(1, 0))
    assert started(pool.finish(1)) == [(1, 1)]
    assert started(pool.finish(0)) == [(0, 2)]


def test_what_waits_in_a_lane_holds_up_nobody_else(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=9, places=(1,))
    assert started(pool.submit(1)) == [(0, 1)]
    assert started(pool.finish(1)) == []
    assert started(pool.submit(2, places=(0,))) == [(0, 2)]


def test_when_a_worker_takes_its_lanes_with_it_both_find_their_way_in_order(pool_of):
    pool = pool_of(3)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2, fn_id=1)  # workers 0 and 1
    pool.submit(2, fn_id=2)
    pool.submit(3, places=(0, 1), retries=5)
    pool.submit(4, fn_id=1)
    assert started(pool.finish(1)) == [(0, 3)]
    assert started(pool.finish(2)) == [(1, 4)]
    assert started(pool.lose(0)) == []
    assert started(pool.finish(5)) == [(1, 3)]


# --- calls ----------------------------------------------------------------------------------------


def test_short_items_go_in_chunks_by_the_number_of_workers_of_the_lane(pool_of):
    pool = pool_of(4)
    pool.get_used_to(0, task_id=0)
    assert pool.submit(1, size=48, places=(2, 3)) == [
        pool.runs(2, 1, (1, 0, 12)),
        pool.runs(3, 2, (1, 12, 21)),
    ]


def test_calls_are_shared_within_a_lane_only(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, places=(0,))
    pool.submit(3, places=(0,))
    pool.submit(4, place=0)
    pool.submit(5)
    pool.submit(6)
    assert started(pool.finish(1)) == [(0, 2, 3)]
    assert started(pool.finish(2, busy_s=0.001)) == [(0, 4)]
    assert started(pool.finish(3, busy_s=0.001)) == [(0, 5, 6)]


def test_no_call_takes_what_stands_behind_something_older_elsewhere(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, places=(0,))
    pool.submit(3)
    pool.submit(4, places=(0,))
    pool.submit(5)
    orders = [started(pool.finish(attempt, busy_s=0.001)) for attempt in range(1, 5)]
    assert orders == [[(0, task_id)] for task_id in (2, 3, 4, 5)]


def test_a_worker_in_a_lane_gets_nothing_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2)
    pool.submit(2, size=9, places=(0,))
    assert pool.submit(3, size=100) == []
    assert started(pool.finish(1, busy_s=0.001)) == [(0, 2)]


def test_when_the_lane_is_done_it_gets_its_calls_ahead_as_before(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, places=(0,))
    pool.submit(2, size=1000)
    assert started(pool.finish(1, busy_s=0.001)) == [(0, 2), (0, 2)]


# --- with gangs -----------------------------------------------------------------------------------


def test_a_gang_holds_workers_before_younger_tasks_of_their_lanes(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert pool.submit(2, places=(1,)) == []
    assert started(pool.finish(0)) == [(0, 1), (1, 1)]
    assert started(pool.tell(AttemptFinished(1, 2, (Report(1),)))) == [(1, 2)]


def test_older_tasks_of_the_lane_run_before_the_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.submit(1, places=(0,))
    pool.submit(2, size=2, is_gang=True)
    assert started(pool.finish(1)) == []
    assert started(pool.finish(0)) == [(0, 1)]
    assert started(pool.finish(2)) == [(0, 2), (1, 2)]


def test_a_worker_that_a_gang_lets_go_turns_to_its_lanes(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2, places=(1,))
    assert started(pool.cancel(1)) == [(1, 2)]


# --- places come and go ---------------------------------------------------------------------------


def test_a_lane_without_any_place_fails_what_comes(pool_of):
    pool = pool_of(1)
    assert pool.submit(0, size=2, places=(4, 5)) == [
        pool.fails((0, 0, 2), LossReason.UNKNOWN),
        EndTask(0, FINISHED),
    ]
    assert pool.submit(1, places=()) == [
        pool.fails((1, 0, 1), LossReason.UNKNOWN),
        EndTask(1, FINISHED),
    ]


def test_a_lane_goes_on_with_the_places_that_are_left(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=4, places=(1, 2))
    pool.submit(1, place=0)
    pool.resize(remove=1)
    assert started(pool.finish(1)) == []
    assert started(pool.finish(0)) == [(1, 0)]


def test_when_its_last_place_goes_what_waits_fails_and_what_runs_may_end(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=3, places=(1,))
    pool.submit(1, place=0)
    pool.submit(2, places=(1,), priority=-1)
    assert pool.resize(remove=1) == [
        pool.fails((0, 1, 3)),
        pool.fails((2, 0, 1)),
        EndTask(2, FINISHED),
    ]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED), Vacate(1)]


def test_an_open_task_ends_with_its_last_place(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=1, is_open=True, places=(1,))
    pool.submit(1, place=0)
    assert pool.resize(remove=1) == [pool.signals(1, 0, 0), EndTask(0, FAILED)]


def test_a_place_where_nothing_starts_any_more_leaves_the_lane(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, places=(1,), retries=9)
    pool.lose(1)
    pool.lose(2, LossReason.START)
    pool.fire("start", 3)
    pool.lose(3, LossReason.START)
    pool.fire("start", 4)
    assert pool.lose(4, LossReason.NODE) == [
        Vacate(1),
        DropPlace(1, LossReason.NODE),
        pool.fails((0, 0, 1, 2), LossReason.NODE),
        pool.fails((0, 1, 2), LossReason.NODE),
        EndTask(0, FINISHED),
    ]


def test_a_place_that_comes_later_joins_the_lane_that_named_it(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3, places=(0, 5))
    pool.resize(add=[5])
    assert started(pool.ready(1)) == [(1, 0)]


def test_places_that_come_after_the_last_one_went_serve_new_tasks_only(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, places=(1,))
    pool.submit(1, place=0)
    pool.resize(remove=1)
    pool.finish(0)
    pool.resize(add=[1])
    assert pool.submit(2, places=(1,)) == []
    assert started(pool.ready(2)) == [(2, 2)]


def test_a_pool_that_closes_finishes_its_lanes(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, places=(1,))
    pool.shutdown()
    assert started(pool.finish(0)) == [(1, 0)]
    assert pool.finish(1)[:2] == [pool.settles(1, (0, 1, 2)), EndTask(0, FINISHED)]
