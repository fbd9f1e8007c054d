"""A task that names a place runs on the worker that is there now, or fails with it."""

from raypool.core.messages import AttemptFinished, EndTask, RunGang, RunTasks, Vacate
from raypool.core.model import Report, TaskState
from raypool.errors import LossReason

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def first_piece(commands):
    """Return who is called first, and for which task."""
    call, *_ = (
        call
        for command in commands
        for call in getattr(command, "runs", [command])
        if isinstance(call, RunTasks)
    )
    return call.worker_id, call.slices[0].task_id


def test_a_bound_task_runs_on_its_worker_even_if_others_are_free(pool_of):
    pool = pool_of(3)
    assert pool.submit(0, place=1) == [pool.runs(1, 0, (0, 0, 1))]
    assert pool.submit(1, place=1) == []
    assert pool.finish(0) == [
        pool.runs(1, 1, (1, 0, 1)),
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
    ]


def test_its_worker_takes_the_older_of_its_own_next_task_and_the_pools(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    pool.submit(2, place=0)
    pool.submit(3, priority=1, place=0)
    order = [first_piece(pool.finish(attempt)) for attempt in range(3)]
    assert order == [(0, 3), (0, 1), (0, 2)]


def test_what_is_bound_to_one_worker_does_not_keep_others_waiting(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.submit(1, place=0)
    assert pool.submit(2) == []
    assert first_piece(pool.finish(1)) == (1, 2)
    assert first_piece(pool.finish(0)) == (0, 1)


def test_a_free_worker_without_tasks_of_its_own_takes_the_pools_task_first(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2)
    pool.submit(3, place=0)
    commands = pool.cancel(1)  # lets worker 1 go
    assert first_piece(commands) == (1, 2)
    assert first_piece(pool.finish(0)) == (0, 3)


def test_short_tasks_bound_to_one_worker_share_a_call_but_none_is_sent_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, place=0)
    for task_id in range(2, 6):
        assert pool.submit(task_id, place=0) == []
    assert pool.finish(1, busy_s=0.001)[0] == pool.runs(
        0, 2, *((task_id, 0, 1) for task_id in range(2, 6))
    )


def test_a_worker_with_tasks_of_its_own_gets_nothing_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2, fn_id=1, place=0)
    assert pool.submit(3, size=100, priority=-1) == []


def test_a_worker_that_has_more_of_its_own_to_do_gets_nothing_ahead_of_that(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, fn_id=0, place=0)
    pool.submit(3, fn_id=1, place=0)
    pool.submit(4, fn_id=0, size=100, priority=-1)
    assert pool.finish(1)[:-2] == [pool.runs(0, 2, (2, 0, 1))]


def test_when_its_worker_is_lost_the_running_and_the_waiting_fail(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0, size=3, retries=5)
    pool.submit(1, place=0)
    pool.submit(2, place=1)
    commands = pool.lose(0, LossReason.NODE)
    assert commands == [
        *pool.starts(2, place=0),
        pool.fails((0, 0, 1), LossReason.NODE),
        pool.fails((0, 1, 3), LossReason.NODE),
        EndTask(0, FINISHED),
        pool.fails((1, 0, 1), LossReason.NODE),
        EndTask(1, FINISHED),
    ]
    assert pool.finish(2 - 1) == [pool.settles(1, (2, 0, 1)), EndTask(2, FINISHED)]
    assert pool.ready(2) == []


def test_it_fails_even_if_nothing_of_it_was_begun(pool_of):
    pool = pool_of(1)
    pool.submit(0, place=0)
    assert pool.lose(0, was_idle=True)[-2:] == [pool.fails((0, 0, 1)), EndTask(0, FINISHED)]


def test_what_its_limit_of_workers_holds_back_fails_too(pool_of):
    pool = pool_of(1)
    pool.submit(0, place=0, size=4, max_workers=1)
    assert pool.lose(0)[-3:] == [pool.fails((0, 0, 1)), pool.fails((0, 1, 4)), EndTask(0, FINISHED)]


def test_what_it_has_handed_back_fails_too(pool_of):
    pool = pool_of(1)
    pool.submit(0, place=0, size=6, chunk_size=4)
    pool.submit(1, place=0, priority=1)
    assert pool.finish(0, Report(2, busy_s=2.0))[0] == pool.runs(0, 1, (1, 0, 1))
    assert pool.lose(0)[2:] == [
        pool.fails((1, 0, 1)),
        EndTask(1, FINISHED),
        pool.fails((0, 2, 4)),
        pool.fails((0, 4, 6)),
        EndTask(0, FINISHED),
    ]


def test_an_open_task_with_nothing_to_do_fails_with_its_worker(pool_of):
    pool = pool_of(1)
    pool.submit(0, place=0, size=0, is_open=True)
    assert pool.lose(0)[-1] == EndTask(0, FAILED)
    assert pool.add_items(0, 3, is_open=False) == []


def test_it_is_bound_to_the_worker_not_to_the_place(pool_of):
    pool = pool_of(1)
    pool.lose(0)
    assert pool.submit(0, place=0) == [], "for the one that is starting there now"
    assert pool.ready(1) == [pool.runs(1, 0, (0, 0, 1))]


def test_it_fails_if_its_worker_does_not_come_up(pool_of):
    pool = pool_of(0)
    pool.resize(add=[0])
    pool.submit(0, place=0)
    assert pool.fire("ready", 0)[-2:] == [
        pool.fails((0, 0, 1), LossReason.START),
        EndTask(0, FINISHED),
    ]


def test_a_place_that_the_pool_does_not_have_fails_it_at_once(pool_of):
    pool = pool_of(1)
    assert pool.submit(0, place=7, size=2) == [
        pool.fails((0, 0, 2), LossReason.UNKNOWN),
        EndTask(0, FINISHED),
    ]
    assert pool.submit(1, place=7, size=0) == [EndTask(1, FINISHED)]
    assert pool.submit(2, place=7, size=0, is_open=True) == [EndTask(2, FAILED)]


def test_items_handed_back_wait_for_the_same_worker(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, size=5, chunk_size=5)
    assert pool.finish(0, Report(2, busy_s=2.0))[0] == pool.runs(1, 1, (0, 2, 5))


def test_it_can_be_cancelled_while_it_waits(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, place=0)
    assert pool.cancel(1) == [EndTask(1, CANCELLED)]
    assert pool.finish(0)[-1] == EndTask(0, FINISHED)
    assert pool.submit(2) == [pool.runs(0, 1, (2, 0, 1))]


def test_a_worker_that_is_to_end_fails_what_still_waits_for_it_and_finishes_what_it_runs(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1)
    pool.submit(1, place=1)
    pool.submit(2, place=0)
    pool.submit(3, place=0)
    assert pool.resize(remove=1) == [pool.fails((1, 0, 1), LossReason.EXIT), EndTask(1, FINISHED)]
    assert pool.submit(4, place=1) == [
        pool.fails((4, 0, 1), LossReason.UNKNOWN),
        EndTask(4, FINISHED),
    ]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED), Vacate(1)]


def test_what_a_worker_that_is_to_end_hands_back_fails(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, size=3, chunk_size=3)
    pool.submit(1, place=0)
    pool.resize(remove=1)
    assert pool.finish(0, Report(2))[-3:] == [
        pool.fails((0, 2, 3)),
        EndTask(0, FINISHED),
        Vacate(1),
    ]


def test_what_a_worker_that_is_to_end_takes_with_it_fails(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, size=3, chunk_size=3)
    pool.submit(1, place=0)
    pool.resize(remove=1)
    assert pool.lose(1, LossReason.NODE) == [
        Vacate(1),
        pool.fails((0, 0, 3), LossReason.NODE),
        EndTask(0, FINISHED),
    ]


def test_a_failure_of_what_waits_is_enough_for_a_task_that_fails_fast(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=1, size=2, fail_fast=True)
    pool.submit(1, place=0)
    assert pool.resize(remove=1) == [
        pool.fails((0, 1, 2)),
        pool.signals(1, 0, 0),
        EndTask(0, FAILED),
    ]


# --- with gangs -----------------------------------------------------------------------------------


def test_a_gang_holds_a_worker_before_younger_tasks_bound_to_it(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2, place=0)
    assert pool.submit(3, place=1) == []
    assert pool.finish(0)[0] == RunGang((pool.runs(0, 1, (1, 0, 1)), pool.runs(1, 2, (1, 1, 2))))
    assert first_piece(pool.tell(AttemptFinished(0, 1, (Report(1),)))) == (0, 2)
    assert first_piece(pool.tell(AttemptFinished(1, 2, (Report(1),)))) == (1, 3)


def test_older_tasks_bound_to_a_worker_run_before_the_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, place=0)
    pool.submit(2, size=2, is_gang=True)
    assert first_piece(pool.finish(0)) == (0, 1)
    assert first_piece(pool.finish(1)) == (0, 2)


def test_a_worker_whose_own_tasks_were_cancelled_joins_the_gang(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, place=0)
    pool.submit(2, size=2, is_gang=True)
    pool.cancel(1)
    assert pool.finish(0)[0] == RunGang((pool.runs(0, 1, (2, 0, 1)), pool.runs(1, 2, (2, 1, 2))))


def test_a_worker_that_a_gang_lets_go_turns_to_its_own_tasks(pool_of):
    pool = pool_of(2)
    pool.submit(0, place=0)
    pool.submit(1, size=2, is_gang=True)
    pool.submit(2, place=1)
    assert pool.cancel(1) == [pool.runs(1, 1, (2, 0, 1)), EndTask(1, CANCELLED)]


def test_a_gang_that_can_not_use_the_worker_does_not_hold_up_its_own_tasks(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2)
    pool.submit(1, size=1, is_gang=True, places=(0,))
    pool.submit(2, place=1)
    assert first_piece(pool.finish(1)) == (1, 2)
