"""The pool's size, and its end."""

from raypool.core.messages import (
    BreakPool,
    ClosePool,
    DropPlace,
    EndTask,
    PlaceLost,
    ResizeRequested,
    RunTasks,
    Vacate,
)
from raypool.core.model import PoolState, Report, TaskState
from raypool.errors import LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


# --- size -----------------------------------------------------------------------------------------


def test_new_places_get_workers(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    assert pool.resize(add=[4, 5]) == [*pool.starts(1, place=4), *pool.starts(2, place=5)]
    assert pool.ready(2) == [pool.runs(2, 1, (1, 0, 1))]
    assert pool.size == 3


def test_free_workers_go_first_and_among_them_the_one_in_the_highest_place(pool_of):
    pool = pool_of(4)
    pool.submit(0, place=3)
    assert pool.resize(remove=2) == [Vacate(2), Vacate(1)]
    assert pool.size == 2


def test_a_free_worker_goes_before_a_busy_one_in_a_higher_place(pool_of):
    pool = pool_of(3)
    for task_id in range(3):
        pool.submit(task_id)
    pool.finish(1)
    assert pool.resize(remove=1) == [Vacate(1)]


def test_a_busy_worker_ends_what_it_is_running_and_takes_nothing_more(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4)
    assert pool.resize(remove=1) == []
    assert pool.size == 1
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), Vacate(1)]
    assert pool.finish(0)[0] == pool.runs(0, 2, (0, 2, 3))


def test_places_that_are_named_end_after_what_they_run_and_nobody_says_so(pool_of):
    pool = pool_of(4)
    pool.submit(0, size=2)
    assert pool.resize(leave=[1, 3, 9]) == [Vacate(3)]  # there is no place 9
    assert pool.size == 2
    assert pool.resize(leave=[1]) == []  # it goes anyway
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), Vacate(1)]


def test_of_the_places_that_are_named_those_stay_that_tasks_are_bound_to(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1)
    pool.submit(1, place=1)
    assert pool.resize(leave=[1]) == []
    assert pool.finish(0)[0] == pool.runs(1, 1, (1, 0, 1))
    assert pool.size == 2


def test_a_busy_worker_runs_what_was_sent_ahead_and_gets_no_more(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=200)
    pool.resize(add=[1])
    pool.ready(1)
    pool.resize(remove=2)
    assert not [
        command for command in pool.finish(1, busy_s=0.001) if isinstance(command, RunTasks)
    ]
    assert Vacate(0) in pool.finish(2, busy_s=0.001)


def test_a_worker_that_is_to_go_gets_nothing_ahead(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2)
    pool.resize(remove=1)
    commands = pool.submit(3, size=100)
    assert [command.worker_id for command in commands] == [0]


def test_a_worker_that_is_to_go_and_dies_is_not_replaced_but_what_it_ran_runs_again(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.resize(remove=1)
    assert pool.lose(1) == [Vacate(1)]
    assert pool.finish(0)[0] == pool.runs(0, 2, (0, 1, 2, 2))


def test_a_worker_that_is_starting_can_be_let_go(pool_of):
    pool = pool_of(0)
    pool.resize(add=[0, 1])
    assert pool.resize(remove=1) == [Vacate(1)]
    assert pool.ready(1) == []
    assert pool.fire("ready", 1) == []


def test_workers_that_tasks_are_bound_to_go_last(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, size=0, is_open=True)
    pool.submit(1, place=0, size=2)
    pool.submit(2, size=2)
    pool.finish(0)
    pool.cancel(1)
    assert pool.resize(remove=1) == []
    assert Vacate(0) in pool.finish(2)


def test_what_a_worker_that_is_to_go_had_not_begun_costs_no_attempt(pool_of):
    pool = pool_of(2)
    pool.submit(0, retries=0)
    pool.resize(leave=[0])
    assert pool.lose(0, was_idle=True)[0] == pool.runs(1, 1, (0, 0, 1))


def test_a_pool_without_workers_is_not_broken_until_something_waits_for_it(pool_of):
    pool = pool_of(1)
    assert pool.resize(remove=1) == [Vacate(0)]
    pool.resize(add=[3])
    assert pool.state is PoolState.OPEN
    pool.resize(remove=1)
    assert pool.submit(0) == [BreakPool(), EndTask(0, FAILED)]


def test_a_pool_is_not_broken_by_the_death_of_a_worker_that_was_to_go(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.cancel(0)
    pool.resize(remove=1)
    assert pool.lose(0) == [Vacate(0)]
    assert pool.resize(add=[1]) == pool.starts(1, place=1)


def test_what_waits_when_the_last_worker_goes_fails(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    pool.resize(remove=1)
    assert pool.finish(0) == [
        pool.settles(0, (0, 0, 1)),
        Vacate(0),
        BreakPool(),
        EndTask(0, FAILED),
    ]


def test_a_place_that_was_lost_meanwhile_is_not_given_back_once_more(pool_of):
    pool = pool_of(3)
    pool.tell(PlaceLost(0, LossReason.NODE))
    assert pool.tell(ResizeRequested(size=1)) == [Vacate(2)]
    assert pool.tell(ResizeRequested(size=1)) == []


def test_a_busy_worker_that_was_to_go_stays_if_the_pool_is_to_be_larger_again(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=3, chunk_size=1)
    pool.tell(ResizeRequested(size=1))
    assert pool.tell(ResizeRequested(size=2)) == []
    assert pool.size == 2
    pool.submit(1, places=(1, 2))  # one of these still goes
    (ended,) = (number for number in (0, 1, 2) if Vacate(number) in pool.finish(number))
    assert ended in (1, 2)
    assert pool.tell(ResizeRequested(size=3)) == []  # that one has ended
    assert pool.size == 2


def test_a_worker_whose_place_has_to_go_does_not_stay_when_the_pool_is_to_be_larger(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, chunk_size=1)
    pool.resize(leave=[1])
    pool.tell(ResizeRequested(size=2))
    assert Vacate(1) in pool.finish(1)


def test_a_place_can_be_given_back_and_added_again(pool_of):
    pool = pool_of(2)
    pool.resize(remove=1)
    assert pool.resize(add=[1]) == pool.starts(2, place=1)


# --- shutdown -------------------------------------------------------------------------------------


def test_an_idle_pool_closes_at_once(pool_of):
    pool = pool_of(2)
    assert pool.shutdown() == [Vacate(0), Vacate(1), ClosePool()]
    assert pool.state is PoolState.CLOSED


def test_without_cancelling_everything_is_run_and_told_before_the_pool_closes(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    assert pool.shutdown() == []
    assert pool.finish(0) == [
        pool.runs(0, 1, (1, 0, 1)),
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
    ]
    assert pool.finish(1) == [
        pool.settles(1, (1, 0, 1)),
        EndTask(1, FINISHED),
        Vacate(0),
        ClosePool(),
    ]


def test_what_is_queued_can_be_cancelled_and_what_runs_goes_on(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    pool.submit(2, size=0, is_open=True)
    assert pool.shutdown(cancel_queued=True) == [EndTask(1, CANCELLED), EndTask(2, CANCELLED)]
    assert pool.finish(0) == [
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
        Vacate(0),
        ClosePool(),
    ]


def test_a_loop_that_is_not_all_running_is_cancelled_with_what_is_queued(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    assert pool.shutdown(cancel_queued=True) == [EndTask(0, CANCELLED), Vacate(0), ClosePool()]


def test_what_runs_can_be_cancelled_too(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=3)
    pool.submit(1)
    pool.lose(1)
    commands = pool.shutdown(cancel_queued=True, cancel_running=True)
    assert commands == [
        EndTask(0, CANCELLED),
        EndTask(1, CANCELLED),
        Vacate(0),
        Vacate(1),
        ClosePool(),
    ]
    assert pool.finish(0) == []


def test_a_second_shutdown_can_be_more_severe(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    assert pool.shutdown() == []
    assert pool.shutdown(cancel_queued=True) == []
    assert pool.shutdown(cancel_running=True) == [EndTask(0, CANCELLED), Vacate(0), ClosePool()]
    assert pool.shutdown(cancel_running=True) == [], "and is told once"


def test_an_open_task_takes_items_while_the_pool_closes(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=0, is_open=True)
    pool.shutdown()
    assert pool.add_items(0, 1, is_open=False) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.finish(0)[-1] == ClosePool()


def test_no_task_and_no_place_is_taken_in_after_shutdown(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.shutdown()
    assert pool.submit(1, size=3) == [EndTask(1, CANCELLED)]
    assert pool.resize(add=[1], remove=1) == [Vacate(1)]
    pool.finish(0)
    assert pool.submit(2) == [EndTask(2, CANCELLED)]
    assert pool.resize(add=[2]) == [Vacate(2)]


def test_a_lost_worker_is_replaced_while_the_pool_closes_if_something_has_to_run_again(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.shutdown()
    assert pool.lose(0) == pool.starts(1, place=0)
    assert pool.ready(1) == [pool.runs(1, 1, (0, 0, 1, 2))]
    assert pool.finish(1)[-1] == ClosePool()


def test_the_loss_of_the_last_item_closes_the_pool(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=0)
    pool.shutdown()
    assert pool.lose(0) == [pool.fails((0, 0, 1)), EndTask(0, FINISHED), Vacate(0), ClosePool()]


def break_pool(pool):
    """Let the only place of a pool with one worker be given up."""
    pool.lose(0)
    for worker_id in (1, 2):
        pool.lose(worker_id)
        pool.fire("start", worker_id + 1)
    return pool.lose(3)


def test_a_broken_pool_closes_once(pool_of):
    pool = pool_of(1)
    break_pool(pool)
    assert pool.shutdown() == [ClosePool()]
    assert pool.shutdown() == []
    assert pool.state is PoolState.BROKEN


def test_a_pool_that_breaks_while_it_closes_is_closed_with_that(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.shutdown()
    assert break_pool(pool) == [
        Vacate(0),
        DropPlace(0, LossReason.EXIT),
        BreakPool(),
        EndTask(0, FAILED),
        ClosePool(),
    ]
    assert pool.shutdown() == []


def test_a_pool_whose_last_worker_goes_while_it_closes_is_broken_if_something_waits(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    pool.resize(remove=1)
    pool.shutdown()
    assert pool.finish(0)[-3:] == [BreakPool(), EndTask(0, FAILED), ClosePool()]


LATE = [
    lambda pool: pool.finish(0),
    lambda pool: pool.lose(0),
    lambda pool: pool.ready(0),
    lambda pool: pool.fire("ready", 0),
    lambda pool: pool.cancel(0),
    lambda pool: pool.add_items(0, 1, is_open=False),
]


def test_whatever_comes_after_the_end_is_ignored(pool_of):
    for late in LATE:
        pool = pool_of(1)
        pool.submit(0)
        pool.shutdown(cancel_running=True)
        assert late(pool) == []


def test_the_counts_tell_what_became_of_all_items(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3)
    pool.submit(1, size=2)
    pool.finish(0)
    pool.finish(1, Report(1, failed=1))
    pool.finish(2)
    pool.cancel(1)
    counts = pool.counts
    assert (counts.submitted, counts.finished, counts.failed, counts.cancelled) == (5, 2, 1, 2)
    assert (counts.attempts, counts.workers_lost) == (4, 0)
