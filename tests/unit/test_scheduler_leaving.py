"""Places whose machines go, announced or not: what runs there, what is bound to them, and what is
left of the pool.
"""

import pytest

from raypool.core.messages import (
    BreakPool,
    ClosePool,
    DropPlace,
    EndTask,
    PlaceLeaving,
    PlaceLost,
    PoolLeaving,
    PoolResumed,
    RunGang,
    SetTimer,
    Signal,
    Vacate,
)
from raypool.core.model import PoolState, Report, TaskState
from raypool.errors import LossReason

LEAVE = Signal.LEAVE
FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED
NODE, PREEMPTED, STOPPED = LossReason.NODE, LossReason.PREEMPTED, LossReason.STOPPED


def gone(place, reason=PREEMPTED):
    """Expect a place to be given back, and the pool to be smaller."""
    return [Vacate(place), DropPlace(place, reason)]


# --- announced ------------------------------------------------------------------------------------


def test_a_free_worker_goes_at_once(pool_of):
    pool = pool_of(2)
    assert pool.tell(PlaceLeaving(0, 30.0)) == gone(0)
    assert pool.size == 1
    assert pool.counts.workers_lost == 0
    assert pool.submit(0) == [pool.runs(1, 0, (0, 0, 1))]


def test_a_busy_one_ends_what_it_is_running_and_takes_nothing_more(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4)
    assert pool.tell(PlaceLeaving(1, 30.0)) == [
        pool.signals(1, 1, 0, LEAVE),
        SetTimer(30.0, "leave", 1),
    ]
    assert pool.size == 1
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), *gone(1)]
    assert pool.fire("leave", 1) == [], "it has gone by then"


def test_what_has_not_ended_in_time_is_interrupted_and_runs_elsewhere_uncharged(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.tell(PlaceLeaving(0, 30.0))
    pool.now = 30.0
    assert pool.fire("leave", 0) == [pool.signals(0, 0, 0)]
    assert pool.finish(0, Report(0)) == [pool.runs(1, 1, (0, 0, 1, 1)), *gone(0)]
    assert pool.finish(1)[-1] == EndTask(0, FINISHED)


def test_without_a_deadline_it_may_take_as_long_as_it_takes(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    assert pool.tell(PlaceLeaving(0)) == [pool.signals(0, 0, 0, LEAVE)]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED), *gone(0)]


def test_a_deadline_that_has_passed_interrupts_at_once(pool_of):
    pool = pool_of(2)
    pool.now = 50.0
    pool.submit(0)
    assert pool.tell(PlaceLeaving(0, 30.0)) == [pool.signals(0, 0, 0)]


def test_a_later_deadline_counts_instead_of_an_earlier_one(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.tell(PlaceLeaving(0, 30.0))
    assert pool.tell(PlaceLeaving(0, 60.0)) == [
        pool.signals(0, 0, 0, LEAVE),
        SetTimer(60.0, "leave", 0),
    ]
    pool.now = 30.0
    assert pool.fire("leave", 0) == []
    pool.now = 60.0
    assert pool.fire("leave", 0) == [pool.signals(0, 0, 0)]


def test_what_saves_what_it_has_and_comes_back_runs_elsewhere_uncharged(pool_of):
    """Also items that it had not begun; those that had ended count."""
    pool = pool_of(2)
    pool.submit(0, size=6, chunk_size=3, retries=1)
    assert pool.tell(PlaceLeaving(0, 30.0))[0] == pool.signals(0, 0, 0, LEAVE)
    assert pool.finish(0, Report(1)) == [pool.settles(0, (0, 0, 1)), *gone(0)]
    assert pool.finish(1)[0] == pool.runs(1, 2, (0, 1, 3, 1))


def test_what_may_run_once_only_is_told_nothing(pool_of):
    pool = pool_of(2)
    pool.submit(0, retries=0)
    assert pool.tell(PlaceLeaving(0, 30.0)) == [SetTimer(30.0, "leave", 0)]


def test_what_is_cancelled_already_is_told_nothing_more(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.cancel(0)
    assert pool.tell(PlaceLeaving(0, 30.0)) == [SetTimer(30.0, "leave", 0)]


def test_what_shares_its_call_with_one_that_was_cancelled_is_told(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2, chunk_size=1)
    pool.submit(2)
    pool.submit(3)
    assert pool.submit(4) == [pool.runs(0, 3, (2, 0, 1), (3, 0, 1), (4, 0, 1))]
    pool.finish(1, busy_s=0.001)
    pool.cancel(2)
    assert pool.tell(PlaceLeaving(0, 30.0))[:2] == [
        pool.signals(0, 3, 3, LEAVE),
        pool.signals(0, 3, 4, LEAVE),
    ]


def test_what_ends_although_it_was_interrupted_counts(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.tell(PlaceLeaving(0, 0.0))
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED), *gone(0)]


@pytest.mark.parametrize("reason", [STOPPED, NODE, PREEMPTED])
def test_what_does_not_stop_is_not_charged_when_its_worker_is_killed_or_its_machine_goes(
    pool_of, reason
):
    pool = pool_of(2)
    pool.submit(0, retries=1)
    pool.tell(PlaceLeaving(0, 0.0))
    assert pool.lose(0, reason) == [pool.runs(1, 1, (0, 0, 1, 1)), *gone(0)]


def test_what_kills_its_worker_there_is_charged(pool_of):
    pool = pool_of(2)
    pool.submit(0, retries=1)
    pool.tell(PlaceLeaving(0, 30.0))
    assert pool.lose(0) == [pool.runs(1, 1, (0, 0, 1, 2)), *gone(0)]


def test_what_may_run_once_only_goes_on_while_it_can_and_fails_with_the_machine(pool_of):
    pool = pool_of(2)
    pool.submit(0, retries=0)
    assert pool.tell(PlaceLeaving(0, 0.0)) == []
    assert pool.tell(PlaceLost(0, NODE)) == [
        *gone(0),
        pool.fails((0, 0, 1), PREEMPTED),
        EndTask(0, FINISHED),
    ]


def test_all_calls_of_a_worker_are_interrupted(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=5)
    pool.submit(2, size=5)
    pool.resize(add=[1])
    assert pool.tell(PlaceLeaving(0, 0.0)) == [pool.signals(0, 1, 1), pool.signals(0, 2, 2)]


def test_a_worker_that_is_starting_is_not_waited_for(pool_of):
    pool = pool_of(1)
    pool.resize(add=[1])
    assert pool.tell(PlaceLeaving(1, 30.0)) == gone(1)
    assert pool.ready(1) == []


def test_what_it_was_started_for_runs_elsewhere(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.finish(0)
    pool.submit(1, is_fresh=True, retries=0)
    assert pool.tell(PlaceLeaving(0, 30.0)) == [pool.runs(1, 2, (1, 0, 1, 1)), *gone(0)]


def test_a_parked_place_goes_too(pool_of):
    pool = pool_of(2, idle_timeout_s=5.0)
    pool.submit(0)
    pool.finish(0)
    pool.now = 5.0
    pool.fire("idle")
    assert pool.tell(PlaceLeaving(0, 30.0)) == gone(0)
    assert [command.place for command in pool.submit(1) if hasattr(command, "place")] == [1]


def test_what_is_bound_to_it_fails(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, place=0)
    pool.submit(2, places=(0,))
    failed = [
        pool.fails((1, 0, 1), PREEMPTED),
        EndTask(1, FINISHED),
        pool.fails((2, 0, 1), PREEMPTED),
        EndTask(2, FINISHED),
    ]
    assert pool.tell(PlaceLeaving(0, 30.0)) == [
        pool.signals(0, 0, 0, LEAVE),
        SetTimer(30.0, "leave", 0),
        *failed,
    ]


def test_what_may_run_in_other_places_as_well_does(pool_of):
    pool = pool_of(2)
    pool.submit(0, places=(0, 1))
    pool.tell(PlaceLeaving(0, 0.0))
    assert pool.finish(0, Report(0)) == [pool.runs(1, 1, (0, 0, 1, 1)), *gone(0)]


def test_it_can_go_although_the_pool_was_made_smaller_meanwhile(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.tell(PlaceLeaving(1, 30.0))
    assert pool.resize(remove=1) == []
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), *gone(1)]
    assert pool.finish(0)[-1] == Vacate(0), "nobody need be told of what was wished for"


def test_a_cancelled_task_does_not_run_again(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.tell(PlaceLeaving(0, 0.0))
    pool.cancel(0)
    assert pool.finish(0, Report(0)) == gone(0)


def test_an_item_whose_time_is_up_while_it_is_interrupted_has_timed_out(pool_of):
    pool = pool_of(2)
    pool.submit(0, timeout_s=5.0)
    pool.tell(PlaceLeaving(0, 3.0))
    pool.now = 3.0
    pool.fire("leave", 0)
    assert EndTask(0, FINISHED) in pool.fire("timeout", 0, 0)
    assert pool.finish(0, Report(0)) == gone(0)


def test_the_last_place_may_leave_a_pool_at_rest_and_another_come(pool_of):
    pool = pool_of(1)
    assert pool.tell(PlaceLeaving(0)) == gone(0)
    assert pool.state is PoolState.OPEN
    pool.resize(add=[7])
    pool.ready(1)
    assert pool.submit(0) == [pool.runs(1, 0, (0, 0, 1))]


def test_a_pool_whose_last_place_has_gone_breaks_if_anything_waits(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    pool.submit(1, size=0, is_open=True)
    pool.tell(PlaceLeaving(0, 0.0))
    assert pool.finish(0, Report(0)) == [
        *gone(0),
        BreakPool(),
        EndTask(0, FAILED),
        EndTask(1, FAILED),
    ]


def test_a_pool_that_closes_need_not_be_told_that_it_is_smaller(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.tell(PlaceLeaving(0, 30.0))
    pool.shutdown()
    assert pool.finish(0) == [
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
        Vacate(0),
        Vacate(1),
        ClosePool(),
    ]


def test_a_place_that_has_gone_is_no_news(pool_of):
    pool = pool_of(1)
    assert pool.tell(PlaceLeaving(5, 1.0)) == []
    assert pool.tell(PlaceLost(5, NODE)) == []


# --- all places -----------------------------------------------------------------------------------


WAITS = PoolLeaving(is_final=False)


def ends(at=25.0, gone_at=30.0):
    """Say that all places are about to go, and no other can come."""
    return PoolLeaving(True, at, gone_at)


def broken(*tasks):
    """Expect the pool to end, with its tasks, and to keep its places until it is closed."""
    return [BreakPool(), *(EndTask(task, FAILED) for task in tasks)]


def test_where_no_node_stays_nothing_starts_until_one_does(pool_of):
    """Neither what waits, nor what was told and came back, nor what is handed in or would run again
    after an error.
    """
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, retry_delay_s=7.0)
    pool.submit(2)
    assert pool.tell(WAITS) == [pool.signals(0, 0, 0, LEAVE), pool.signals(1, 1, 1, LEAVE)]
    assert pool.finish(0, Report(0)) == []
    pool.finish(1, Report(1, failed=1, retry=(0,)))
    pool.now = 7.0
    assert pool.fire("retry", task_id=1) == []
    assert pool.submit(3) == []
    assert pool.lose(0, PREEMPTED) == pool.starts(2, place=0), "Ray moves the place"
    assert pool.ready(2) == []
    resumed = pool.tell(PoolResumed())
    assert resumed == [pool.runs(2, 2, (0, 0, 1, 1)), pool.runs(1, 3, (1, 0, 1, 2))]


def test_where_no_other_can_come_the_pool_ends_when_the_last_has_come_back(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4)
    pool.tell(ends())
    assert pool.finish(0, Report(0)) == []
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), *broken(0)]
    assert pool.state is PoolState.BROKEN
    assert pool.places == [0, 1]
    assert pool.submit(1) == [EndTask(1, FAILED)]
    assert pool.shutdown() == [ClosePool()]


def test_a_pool_at_rest_ends_at_once(pool_of):
    assert pool_of(1).tell(ends())[-1:] == broken()


def test_what_left_another_node_before_does_not_start_either(pool_of):
    """Two nodes that go one after the other: what runs on the first is told again, and waits."""
    pool = pool_of(2)
    pool.submit(0, size=3)
    pool.tell(PlaceLeaving(0, 20.0))
    assert pool.tell(ends())[:2] == [pool.signals(0, 0, 0, LEAVE), pool.signals(1, 1, 0, LEAVE)]
    assert pool.finish(0, Report(0)) == gone(0)
    assert pool.finish(1, Report(0)) == broken(0)


def test_what_was_sent_and_has_not_begun_is_told_too(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=5)
    pool.submit(2, size=5)
    assert pool.tell(ends())[:2] == [pool.signals(0, 1, 1, LEAVE), pool.signals(0, 2, 2, LEAVE)]


def test_what_waits_for_a_process_of_its_own_is_taken_back(pool_of):
    pool = pool_of(2)
    for task_id in (0, 1):
        pool.submit(task_id)
        pool.finish(task_id)
    assert pool.submit(2, is_fresh=True) == pool.starts(2, place=0)
    pool.submit(3)
    pool.tell(WAITS)
    assert pool.ready(2) == []
    assert pool.tell(PoolResumed()) == [pool.runs(2, 4, (2, 0, 1))]


def test_what_still_runs_is_interrupted_and_then_ends_with_the_pool(pool_of):
    """What may run once only is told nothing, and has all the time that there is."""
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, retries=0)
    told = [pool.signals(0, 0, 0, LEAVE), SetTimer(25.0, "leave", -1), SetTimer(30.0, "gone", -1)]
    assert pool.tell(ends()) == told
    pool.now = 25.0
    assert pool.fire("leave") == [pool.signals(0, 0, 0)]
    assert pool.lose(0, STOPPED) == gone(0, STOPPED), "another worker starts there"
    pool.now = 30.0
    first, *others = pool.fire("gone")
    assert first == BreakPool()
    assert set(others) == {pool.signals(1, 1, 1), EndTask(0, FAILED), EndTask(1, FAILED)}


def test_a_later_end_of_all_counts_instead_of_an_earlier_one(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.tell(ends())
    pool.tell(ends(50.0, 60.0))
    pool.now = 30.0
    assert pool.fire("leave") == pool.fire("gone") == []
    pool.now = 50.0
    assert pool.fire("leave") == [pool.signals(0, 0, 0)]


def test_an_end_that_is_too_close_is_now(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    assert pool.tell(ends(0.0, 5.0)) == [pool.signals(0, 0, 0), SetTimer(5.0, "gone", -1)]
    assert pool.tell(ends(0.0, 0.0))[1:] == [BreakPool(), pool.signals(0, 0, 0), *broken(0)[1:]]


def test_what_is_bound_to_places_and_gangs_wait_and_end_with_the_pool(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, place=0)
    pool.submit(2, size=2, is_gang=True)
    assert pool.tell(ends())[0] == pool.signals(0, 0, 0, LEAVE)
    assert pool.finish(0, Report(0)) == broken(0, 1, 2)


def test_a_gang_whose_ranks_come_back_ends_before_the_pool(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    assert pool.tell(ends())[:2] == [pool.signals(0, 0, 0, LEAVE), pool.signals(1, 1, 0, LEAVE)]
    pool.finish(0, Report(0))
    failed = [pool.fails((0, 1, 2), STOPPED), EndTask(0, FAILED)]
    assert pool.finish(1, Report(0)) == [*failed, BreakPool()]


def test_a_node_that_stays_may_come_before_the_end(pool_of):
    """One that was not foreseen: where somebody adds it, the pool goes on."""
    pool = pool_of(1)
    pool.submit(0, size=2)
    pool.tell(ends())
    pool.resize(add=[1])
    assert pool.ready(1) == []
    assert pool.tell(PoolResumed()) == [pool.runs(1, 1, (0, 1, 2))]
    pool.now = 30.0
    assert pool.fire("leave") == pool.fire("gone") == []


# --- gangs ----------------------------------------------------------------------------------------


def test_a_gang_may_end_before_its_machine_goes(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    pool.tell(PlaceLeaving(1, 30.0))
    pool.finish(0)
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), EndTask(0, FINISHED), *gone(1)]


def test_all_ranks_of_a_gang_are_told_that_one_has_to_leave_once(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3, is_gang=True)
    told = [pool.signals(worker, worker, 0, LEAVE) for worker in range(3)]
    assert pool.tell(PlaceLeaving(1, 30.0)) == [*told, SetTimer(30.0, "leave", 1)]
    assert pool.tell(PlaceLeaving(2, 40.0)) == [SetTimer(40.0, "leave", 2)]


def test_a_gang_whose_ranks_come_back_for_it_has_lost_them(pool_of):
    """Also the one whose machine stays: the others have saved what there is by then."""
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    pool.tell(PlaceLeaving(1, 30.0))
    assert pool.finish(0, Report(0)) == [pool.fails((0, 0, 1), PREEMPTED), pool.signals(1, 1, 0)]
    assert pool.finish(1, Report(0))[:2] == [pool.fails((0, 1, 2), STOPPED), EndTask(0, FAILED)]


def test_a_rank_that_is_interrupted_for_it_breaks_up_its_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    assert pool.tell(PlaceLeaving(1, 0.0)) == [pool.signals(1, 1, 0)]
    assert pool.finish(1, Report(0)) == [
        pool.fails((0, 1, 2), PREEMPTED),
        pool.signals(0, 0, 0),
        *gone(1),
    ]
    assert pool.finish(0, Report(0)) == [pool.fails((0, 0, 1), STOPPED), EndTask(0, FAILED)]


def test_a_gang_that_waits_for_more_places_than_are_left_fails(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert EndTask(1, FAILED) in pool.tell(PlaceLeaving(1, 30.0))


def test_a_gang_takes_other_workers_instead(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=0)
    pool.submit(1, place=1)
    pool.submit(2, size=2, is_gang=True)
    pool.tell(PlaceLeaving(2, 30.0))
    pool.finish(0)
    assert pool.finish(1)[0] == RunGang((pool.runs(0, 2, (2, 0, 1)), pool.runs(1, 3, (2, 1, 2))))


# --- not announced --------------------------------------------------------------------------------


def test_a_lost_place_takes_its_worker_with_it_and_what_ran_there_runs_again(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    assert pool.tell(PlaceLost(0, NODE)) == [pool.runs(1, 1, (0, 0, 1, 2)), *gone(0, NODE)]
    assert pool.counts.workers_lost == 1
    assert pool.lose(0) == [], "it is known already"


def test_a_machine_that_was_taken_away_is_not_the_fault_of_what_ran_there(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    assert pool.tell(PlaceLost(0, PREEMPTED))[0] == pool.runs(1, 1, (0, 0, 1, 1))


def test_a_rank_that_is_lost_with_its_place_ends_the_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True)
    assert pool.tell(PlaceLost(0, NODE)) == [
        *gone(0, NODE),
        pool.fails((0, 0, 1), NODE),
        pool.signals(1, 1, 0),
    ]
    assert pool.finish(1, Report(0))[-1] == EndTask(0, FAILED)


@pytest.mark.parametrize("tasks", [0, 1])
def test_the_loss_of_the_last_place_breaks_the_pool(pool_of, tasks):
    pool = pool_of(1)
    for task_id in range(tasks):
        pool.submit(task_id)
    assert pool.tell(PlaceLost(0, NODE)) == [
        *gone(0, NODE),
        BreakPool(),
        *([EndTask(0, FAILED)] if tasks else []),
    ]
    assert pool.state is PoolState.BROKEN


def test_a_place_that_was_to_go_anyway_may_be_lost(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.resize(remove=1)
    assert pool.tell(PlaceLost(1, NODE)) == [Vacate(1)]
