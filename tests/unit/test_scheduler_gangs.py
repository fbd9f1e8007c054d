"""A gang starts on all its workers together or not at all, and what comes after it does not keep it
waiting.
"""

import pytest

from raypool.core.messages import EndTask, PlaceLost, RunGang, RunTasks, Vacate
from raypool.core.model import TaskState
from raypool.errors import LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def calls(commands):
    """Return the calls that are made, for gangs or not."""
    runs = [command.runs if isinstance(command, RunGang) else (command,) for command in commands]
    return [call for run in runs for call in run if isinstance(call, RunTasks)]


def workers(commands):
    """Return the workers that are called."""
    return [call.worker_id for call in calls(commands)]


def test_a_gang_starts_on_free_workers_at_once_with_ranks_in_the_order_of_their_places(pool_of):
    pool = pool_of(3)
    ranks = tuple(pool.runs(rank, rank, (0, rank, rank + 1)) for rank in range(3))
    assert pool.submit(0, size=3, is_gang=True) == [RunGang(ranks)]
    assert pool.finish(2) == [pool.settles(2, (0, 2, 3))]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1))]
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), EndTask(0, FINISHED)]


def test_a_gang_takes_no_more_workers_than_it_needs(pool_of):
    pool = pool_of(4)
    assert workers(pool.submit(0, size=2, is_gang=True)) == [0, 1]
    assert workers(pool.submit(1, size=2)) == [2, 3]


def test_ranks_go_by_place_whatever_came_free_first(pool_of):
    pool = pool_of(3)
    for task_id in range(3):
        pool.submit(task_id)
    pool.submit(3, size=3, is_gang=True)
    pool.finish(2)
    pool.finish(0)
    assert pool.finish(1)[0] == RunGang(
        tuple(pool.runs(rank, 3 + rank, (3, rank, rank + 1)) for rank in range(3))
    )


def test_no_later_task_starts_on_the_workers_that_a_gang_collects(pool_of):
    pool = pool_of(3)
    pool.submit(0)
    pool.submit(1)
    pool.submit(2, size=2, is_gang=True)  # one worker is free: it waits for the second
    assert pool.submit(3) == []
    assert workers(pool.finish(0)) == [0, 2]
    assert workers(pool.finish(1)) == [1], "now it is the turn of what came later"


def test_even_a_task_of_higher_priority_does_not_take_back_what_is_held(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert pool.submit(2, priority=9) == []
    assert pool.finish(0)[0] == RunGang((pool.runs(0, 1, (1, 0, 1)), pool.runs(1, 2, (1, 1, 2))))
    assert workers(pool.finish(2)) == [1]


def test_a_gang_waits_for_what_stands_before_it(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4)
    assert pool.submit(1, size=2, is_gang=True) == []
    assert pool.finish(0)[0] == pool.runs(0, 2, (0, 2, 3))
    assert pool.finish(1)[0] == pool.runs(1, 3, (0, 3, 4))
    assert workers(pool.finish(2)) == []
    assert workers(pool.finish(3)) == [0, 1]


def test_two_gangs_start_one_after_the_other(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2, size=2, is_gang=True)
    assert pool.finish(0)[0] == RunGang((pool.runs(0, 1, (1, 0, 1)), pool.runs(1, 2, (1, 1, 2))))
    assert workers(pool.finish(1)) == []
    assert pool.finish(2)[0] == RunGang((pool.runs(0, 3, (2, 0, 1)), pool.runs(1, 4, (2, 1, 2))))


def test_while_one_gang_collects_the_next_holds_up_what_stands_behind_it(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=2)
    pool.submit(1, size=1, is_gang=True, places=(2,))
    pool.submit(2, size=2, is_gang=True)
    assert pool.submit(3) == []
    assert workers(pool.finish(0)) == [2, 0, 1], "both gangs"


def test_a_gang_frees_the_workers_that_it_holds_when_it_is_cancelled(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2)
    assert pool.cancel(1) == [pool.runs(1, 1, (2, 0, 1)), EndTask(1, CANCELLED)]


def test_a_gang_that_is_cancelled_in_the_queue_is_skipped(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    pool.submit(2, size=1, is_gang=True)
    assert pool.cancel(2) == [EndTask(2, CANCELLED)]
    assert workers(pool.finish(0)) == [0]


def test_a_worker_that_is_starting_again_is_waited_for(pool_of):
    pool = pool_of(2)
    pool.lose(0)
    assert pool.submit(0, size=2, is_gang=True) == []
    assert pool.ready(2) == [RunGang((pool.runs(2, 0, (0, 0, 1)), pool.runs(1, 1, (0, 1, 2))))]


def test_a_worker_that_dies_while_it_is_held_is_replaced_in_the_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    assert workers(pool.lose(1)) == []
    assert workers(pool.finish(0)) == []
    assert workers(pool.ready(2)) == [0, 2]


def test_nothing_short_is_queued_behind_a_rank(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=1, is_gang=True)
    assert pool.submit(2, size=100) == []


def test_while_a_gang_collects_no_busy_worker_gets_anything_ahead(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2, size=2, is_gang=True)
    assert pool.submit(3, size=100) == []


# --- too big --------------------------------------------------------------------------------------


def test_a_gang_too_big_for_the_pool_fails_at_once(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=20)
    assert pool.submit(1, size=3, is_gang=True) == [EndTask(1, FAILED)]
    assert pool.submit(2, size=3, is_gang=True, places=(0, 1, 2)) == [EndTask(2, FAILED)]
    assert pool.submit(3) == []


def test_a_gang_too_big_for_a_pool_that_is_parked_does_not_wake_it(pool_of):
    pool = pool_of(2, idle_timeout_s=10.0)
    pool.now = 10.0
    pool.fire("idle")
    assert pool.submit(0, size=3, is_gang=True) == [EndTask(0, FAILED)]
    assert pool.submit(1, size=2, is_gang=True) == [
        *pool.starts(2, place=0),
        *pool.starts(3, place=1),
    ]
    pool.ready(3)
    assert workers(pool.ready(2)) == [2, 3]


def test_a_gang_fails_when_the_pool_gets_too_small_for_it(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2)
    assert pool.resize(remove=1) == [Vacate(1), EndTask(1, FAILED)]
    assert workers(pool.finish(0)) == [0]


@pytest.mark.parametrize("places", [None, (0, 1)])
def test_a_gang_fails_when_a_place_that_it_needs_is_given_up(pool_of, places):
    pool = pool_of(0)
    pool.resize(add=[0, 1])
    pool.ready(0)
    pool.submit(0, size=2, is_gang=True, places=places)
    for worker_id in (1, 2):
        assert workers(pool.lose(worker_id, LossReason.START)) == []
        pool.fire("start", worker_id + 1)
    assert EndTask(0, FAILED) in pool.lose(3, LossReason.START)


def test_a_pool_that_has_grown_again_by_its_turn_can_run_a_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.submit(1, fn_id=1)
    pool.submit(2, size=2, is_gang=True)
    assert pool.resize(remove=1) == []
    pool.finish(1)
    pool.resize(add=[1])
    assert workers(pool.ready(2)) == [2]
    assert workers(pool.finish(0)) == []
    assert workers(pool.finish(2)) == [0, 2]


# --- places ---------------------------------------------------------------------------------------


def test_a_gang_with_places_uses_no_others_and_keeps_no_others_from_working(pool_of):
    pool = pool_of(4)
    pool.submit(0, place=3)
    assert pool.submit(1, size=2, is_gang=True, places=(3, 1)) == []
    assert workers(pool.submit(2, size=4)) == [0, 2], "worker 1 is held"
    assert pool.finish(0)[0] == RunGang((pool.runs(3, 3, (1, 0, 1)), pool.runs(1, 4, (1, 1, 2))))


def test_a_worker_that_becomes_free_and_is_not_wanted_by_the_gang_goes_on(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1)
    pool.submit(2, size=1, is_gang=True, places=(0,))
    pool.submit(3)
    assert pool.finish(1)[0] == pool.runs(1, 2, (3, 0, 1))


def test_a_gang_smaller_than_its_places_takes_those_that_are_free_in_the_order_in_which_they_are_named(
    pool_of,
):
    pool = pool_of(4)
    pool.submit(0, place=1)
    assert workers(pool.submit(1, size=2, is_gang=True, places=(1, 2, 3))) == [2, 3]
    pool.finish(2)
    pool.finish(1)
    assert workers(pool.submit(2, size=2, is_gang=True, places=(3, 1, 0))) == [3, 0]


def test_ranks_go_by_the_order_of_the_places_whatever_came_free_first(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    pool.submit(1, size=3, is_gang=True, places=(2, 0, 1))
    pool.finish(0)
    pool.finish(2)
    assert workers(pool.finish(1)) == [2, 0, 1]


@pytest.mark.parametrize("places", [(0, 7), (0, 0), ()])
def test_a_gang_whose_places_are_too_few_fails(pool_of, places):
    pool = pool_of(2)
    assert pool.submit(0, size=2, is_gang=True, places=places) == [EndTask(0, FAILED)]


def test_a_place_that_is_about_to_go_is_not_waited_for(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.resize(remove=1)
    assert pool.submit(1, size=1, is_gang=True, places=(1,)) == [EndTask(1, FAILED)]


def test_a_gang_fails_when_one_of_its_places_goes_while_it_collects(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=2)
    pool.submit(1, size=2, is_gang=True, places=(1, 2))
    assert pool.resize(remove=1) == [Vacate(2), EndTask(1, FAILED)]


def test_a_gang_fails_as_soon_as_one_of_its_places_is_to_go(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    pool.submit(1, size=2, is_gang=True, places=(1, 2))
    assert pool.resize(remove=1) == [EndTask(1, FAILED)]


# --- several at once ------------------------------------------------------------------------------


def test_a_gang_of_one_part_does_not_wait_for_one_of_another(pool_of):
    pool = pool_of(4)
    pool.submit(0, place=1)
    assert pool.submit(1, size=2, is_gang=True, places=(0, 1)) == []
    assert workers(pool.submit(2, size=2, is_gang=True, places=(2, 3))) == [2, 3]
    assert workers(pool.finish(0)) == [0, 1]


def test_two_gangs_of_two_parts_collect_at_the_same_time_and_keep_nobody_else_waiting(pool_of):
    pool = pool_of(5)
    for place in (1, 3):
        pool.submit(len(pool.calls), place=place)
    pool.submit(2, size=2, is_gang=True, places=(0, 1))
    pool.submit(3, size=2, is_gang=True, places=(2, 3))
    assert workers(pool.submit(4, size=9)) == [4]
    assert workers(pool.finish(1)) == [2, 3]
    assert workers(pool.finish(0)) == [0, 1]


def test_gangs_of_one_part_start_one_after_the_other_beside_those_of_another(pool_of):
    pool = pool_of(4)
    for task_id in range(3):
        pool.submit(task_id, size=2, is_gang=True, places=(0, 1))
    assert workers(pool.submit(3, size=2, is_gang=True, places=(2, 3))) == [2, 3]
    assert workers(pool.finish(0)) == []
    assert pool.calls.keys() == {0, 1, 2, 3}
    assert workers(pool.finish(1)) == [0, 1]


def test_nothing_overtakes_a_gang_that_has_to_wait_on_the_workers_that_it_wants(pool_of):
    pool = pool_of(4)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    assert pool.submit(2, size=2, is_gang=True, places=(1, 2)) == [], (
        "it waits for the first, and keeps worker 2"
    )
    assert pool.submit(3, place=2) == []
    assert pool.submit(4, places=(2,)) == []
    assert pool.submit(5, size=2, is_gang=True, places=(2, 3)) == [], (
        "so does this one with worker 3"
    )
    assert pool.submit(6) == []
    assert workers(pool.finish(0)) == [0, 1]
    assert workers(pool.finish(2)) == [1, 2]
    assert workers(pool.finish(1)) == [0], "what came last, where no gang is before it"
    assert workers(pool.finish(3)) == []
    assert workers(pool.finish(4)) == [2], "its own task is older than the last gang"


def test_nothing_overtakes_a_gang_for_any_workers_that_waits_for_one_of_a_part(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    assert pool.submit(2, size=3, is_gang=True) == []
    assert pool.submit(3, place=2) == []
    assert pool.submit(4, size=1, is_gang=True, places=(2,)) == []
    assert pool.submit(5) == []
    assert workers(pool.finish(0)) == [0, 1]
    assert workers(pool.finish(1)) == []
    assert workers(pool.finish(2)) == [0, 1, 2]


def test_what_is_urgent_comes_before_a_gang_that_has_to_wait(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    pool.submit(2, size=2, is_gang=True, places=(1, 2))
    assert workers(pool.submit(3, priority=1)) == [2]
    assert pool.submit(4, priority=1) == [], "but it takes back nothing that is held"


def test_of_two_gangs_that_wait_the_urgent_one_is_next(pool_of):
    pool = pool_of(2)
    for task_id, priority in enumerate((0, 0, 0, 1)):  # the first runs, the second collects
        pool.submit(task_id, size=2, is_gang=True, places=(0, 1), priority=priority)
    for attempt_id in range(4):
        pool.finish(attempt_id)
    assert [call.slices[0].task_id for call in pool.calls.values()] == [0, 0, 1, 1, 3, 3]


def test_a_gang_whose_way_is_free_because_another_was_cancelled_starts(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    pool.submit(2, size=2, is_gang=True, places=(1, 2))
    assert workers(pool.cancel(1)) == [1, 2]


def test_a_worker_that_waits_with_a_gang_may_be_lost(pool_of):
    pool = pool_of(3)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    pool.submit(2, size=2, is_gang=True, places=(1, 2))
    assert pool.lose(2) == pool.starts(3, place=2)
    pool.finish(0)
    pool.finish(2)
    assert workers(pool.ready(3)) == [1, 3]


def test_a_place_that_is_new_belongs_to_the_gang_that_has_named_it(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.submit(1, size=2, is_gang=True, places=(5, 0, 1))
    pool.resize(add=[5])
    assert workers(pool.ready(2)) == []
    assert workers(pool.finish(1)) == [2, 1]


def test_short_calls_that_share_a_worker_do_not_overtake_the_gang_that_collects_it(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=1, size=2)
    pool.submit(2, places=(0,))
    pool.submit(3, size=2, is_gang=True)
    pool.submit(4, places=(0,))
    assert pool.finish(1)[0] == pool.runs(0, 3, (2, 0, 1)), (
        "task 4 is of the same function, but younger than the gang"
    )
    assert workers(pool.finish(2)) == []
    assert workers(pool.finish(3)) == [0, 1]


# --- loans ----------------------------------------------------------------------------------------


def test_a_loan_ends_its_workers_and_others_start_there_when_it_is_over(pool_of):
    pool = pool_of(3)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True, is_loan=True, places=(0, 1))
    assert pool.submit(2, places=(1,)) == [], "it waits for the workers"
    lent = (pool.runs(3, 1, (1, 0, 1)), pool.runs(4, 2, (1, 1, 2)))
    assert pool.finish(0)[0] == RunGang(lent, is_loan=True)
    assert workers(pool.submit(3)) == [2], "others go on"
    assert pool.submit(4) == [], "nobody is in the places"
    assert pool.finish(1)[:2] == [pool.settles(1, (1, 0, 1)), *pool.starts(3, place=0)[:1]]
    assert pool.finish(2, is_spent=True)[1:] == [EndTask(1, FINISHED), *pool.starts(4, place=1)]
    assert workers(pool.ready(4)) == [4]
    assert workers(pool.ready(3)) == [3]


def test_what_is_bound_to_a_worker_waits_while_its_place_is_lent(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, is_gang=True, is_loan=True)
    assert pool.submit(2, place=0) == []
    assert pool.finish(0)[0] == RunGang((pool.runs(1, 1, (1, 0, 1)),), is_loan=True)
    assert pool.submit(3, place=0) == []
    pool.finish(1)
    assert pool.ready(1) == [pool.runs(1, 2, (2, 0, 1))]
    assert pool.finish(2)[0] == pool.runs(1, 3, (3, 0, 1))


def test_a_loan_that_is_cancelled_keeps_the_places_until_it_says_so(pool_of):
    pool = pool_of(1)
    pool.submit(0, is_gang=True, is_loan=True)
    pool.cancel(0)
    assert pool.submit(1) == []
    assert pool.finish(0) == pool.starts(1, place=0)
    assert workers(pool.ready(1)) == [1]


def test_a_place_that_does_not_come_back_from_a_loan_is_lost(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, is_gang=True, is_loan=True)
    pool.tell(PlaceLost(0, LossReason.UNKNOWN))
    assert pool.finish(1)[1:] == [EndTask(0, FAILED), *pool.starts(3, place=1)]
    assert pool.places == [1]


def test_a_pool_that_shrinks_gives_up_a_place_that_is_lent_when_it_is_back(pool_of):
    pool = pool_of(1)
    pool.submit(0, is_gang=True, is_loan=True)
    pool.resize(remove=1)
    assert pool.finish(0)[-2:] == [EndTask(0, FINISHED), Vacate(0)]


# --- several at once ------------------------------------------------------------------------------


def test_one_event_can_start_a_task_and_a_gang(pool_of):
    pool = pool_of(4)
    pool.submit(0)
    pool.submit(1, size=4, is_gang=True)
    pool.submit(2)
    pool.submit(3, size=2, is_gang=True)
    assert pool.cancel(1) == [
        pool.runs(1, 1, (2, 0, 1)),
        RunGang((pool.runs(2, 2, (3, 0, 1)), pool.runs(3, 3, (3, 1, 2)))),
        EndTask(1, CANCELLED),
    ]


def test_a_gang_that_waits_for_places_fails_when_one_of_them_is_lost(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3)
    pool.submit(1, size=2, is_gang=True, places=(0, 1))
    assert pool.tell(PlaceLost(0, LossReason.NODE))[-1] == EndTask(1, FAILED)
    pool.tell(PlaceLost(1, LossReason.NODE))
    assert pool.counts.workers_lost == 2
