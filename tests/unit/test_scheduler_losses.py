"""Workers die: who is to blame, what runs again, and what comes in their place."""

import pytest

from raypool.core.messages import (
    BreakPool,
    DropPlace,
    EndTask,
    RunTasks,
    SetTimer,
    StartWorker,
    Vacate,
)
from raypool.core.model import PoolState, TaskState
from raypool.errors import LossReason

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED


def pieces(commands):
    """Return the slices of the calls among commands."""
    return [
        tuple(piece)
        for command in commands
        if isinstance(command, RunTasks)
        for piece in command.slices
    ]


# --- what was running -----------------------------------------------------------------------------


def test_a_task_whose_worker_dies_runs_again_elsewhere_at_once(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    assert pool.lose(0) == [pool.runs(1, 1, (0, 0, 1, 2)), *pool.starts(2, place=0)]
    assert pool.finish(1) == [pool.settles(1, (0, 0, 1, 2)), EndTask(0, FINISHED)]


def test_a_task_that_has_killed_its_last_worker_fails_and_the_others_go_on(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=1)
    pool.submit(1)
    pool.lose(0)
    assert pool.ready(1) == [pool.runs(1, 1, (0, 0, 1, 2))]
    commands = pool.lose(1, LossReason.OUT_OF_MEMORY)
    assert commands[-2:] == [
        pool.fails((0, 0, 1, 2), LossReason.OUT_OF_MEMORY),
        EndTask(0, FINISHED),
    ]
    pool.fire("start", 2)
    assert pool.ready(2) == [pool.runs(2, 2, (1, 0, 1))]
    assert (pool.counts.failed, pool.counts.workers_lost) == (1, 2)


def test_a_lost_item_ends_a_task_that_fails_fast(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3, retries=0, fail_fast=True)
    assert pool.lose(0)[-2:] == [pool.fails((0, 0, 1)), EndTask(0, FAILED)]


@pytest.mark.parametrize("was_idle", [False, True])
def test_an_item_that_runs_again_is_no_failure(pool_of, was_idle):
    pool = pool_of(1)
    pool.submit(0, fail_fast=True)
    assert pool.lose(0, was_idle=was_idle) == pool.starts(1, place=0)
    assert pool.ready(1) == [pool.runs(1, 1, (0, 0, 1, 1 if was_idle else 2))]


def test_without_retries_a_lost_item_fails_and_the_rest_of_the_loop_goes_on(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, retries=0)
    assert pool.lose(0)[-1] == pool.fails((0, 0, 1))
    assert pool.ready(1) == [pool.runs(1, 1, (0, 1, 2))]
    assert pool.finish(1)[-1] == EndTask(0, FINISHED)


def test_a_worker_that_had_gone_before_it_could_begin_costs_nobody_an_attempt(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=0)
    pool.lose(0, was_idle=True)
    assert pool.ready(1) == [pool.runs(1, 1, (0, 0, 1))]


def test_the_loss_of_a_free_worker_hurts_nobody(pool_of):
    pool = pool_of(2)
    assert pool.lose(1) == pool.starts(2, place=1)
    assert pool.submit(0, size=2) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.ready(2) == [pool.runs(2, 1, (0, 1, 2))]


def test_the_call_behind_is_charged_too_since_the_answer_of_the_first_may_have_died_with_the_process(
    pool_of,
):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2)
    pool.submit(2, size=2)
    pool.lose(0)
    assert pieces(pool.ready(1)) == [(1, 0, 2, 2)]
    assert pieces(pool.finish(3)) == [(2, 0, 2, 2)]


def test_the_call_behind_one_that_has_come_back_is_running_and_can_be_to_blame(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2)
    pool.submit(2, size=2)
    pool.finish(1, busy_s=0.001)
    pool.lose(0)
    assert pieces(pool.ready(1)) == [(2, 0, 2, 2)]


def test_a_call_lost_with_many_items_comes_back_in_pieces_each_alone_the_last_time_item_by_item(
    pool_of,
):
    pool = pool_of(1)
    pool.submit(0, size=100, chunk_size=100)
    pool.lose(0)
    assert pieces(pool.ready(1)) == [(0, 0, 10, 2)]
    assert pieces(pool.finish(1)) == [(0, 10, 20, 2)]
    pool.lose(1)
    assert pieces(pool.ready(2)) == [(0, 10, 11, 3)]
    for attempt in range(3, 12):
        assert pieces(pool.finish(attempt)) == [(0, attempt + 8, attempt + 9, 3)]
    assert pieces(pool.finish(12)) == [(0, 20, 30, 2)]


def test_pieces_are_cut_from_where_the_lost_call_began(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=150, chunk_size=100)
    pool.finish(0)
    pool.lose(0)
    assert pieces(pool.ready(1)) == [(0, 100, 108, 2)]
    order = [pieces(pool.finish(attempt))[0] for attempt in range(2, 8)]
    assert [start for _, start, _, _ in order] == [108, 116, 124, 132, 140, 148]
    assert order[-1] == (0, 148, 150, 2)


def test_an_item_that_kills_its_workers_is_found_and_no_other_is_blamed(pool_of):
    pool, culprit, failed = pool_of(1), 37, []
    commands = pool.submit(0, size=100, chunk_size=100)
    while EndTask(0, FINISHED) not in commands:
        (worker_id,) = pool.workers
        if not pool.calls_of(worker_id):
            pool.fire("start", worker_id)
            commands = pool.ready(worker_id)
            continue
        (call,) = pool.calls_of(worker_id)
        is_deadly = any(piece.start <= culprit < piece.stop for piece in call.slices)
        commands = pool.lose(worker_id) if is_deadly else pool.finish(call.attempt_id)
        failed += [command for command in commands if type(command).__name__ == "FailItems"]
    assert failed == [pool.fails((0, culprit, culprit + 1, 3))]
    assert pool.counts.workers_lost == 3
    assert pool.counts.attempts < 40


def test_futures_that_were_lost_in_one_call_run_again_each_by_itself(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2)
    pool.submit(3)
    pool.finish(1)
    pool.lose(0)
    assert pool.ready(1) == [pool.runs(1, 3, (2, 0, 1, 2))]
    assert pool.submit(4, size=100) == [], "and nothing is queued behind them"
    assert pool.finish(3)[0] == pool.runs(1, 4, (3, 0, 1, 2))


def test_a_suspect_is_not_taken_into_the_call_of_another(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.lose(0)
    pool.submit(2, priority=1)
    assert pool.ready(1) == [pool.runs(1, 2, (2, 0, 1))]


def test_a_cancelled_task_is_not_run_again(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.cancel(0)
    assert pool.lose(0) == pool.starts(1, place=0)


# --- what comes too late --------------------------------------------------------------------------


def test_an_answer_from_a_lost_worker_is_dropped(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.lose(0)
    assert pool.finish(0) == []
    assert pool.finish(1) == [pool.settles(1, (0, 0, 1, 2)), EndTask(0, FINISHED)]


def test_news_of_a_lost_worker_are_dropped(pool_of):
    pool = pool_of(1)
    pool.lose(0)
    assert pool.lose(0) == []
    assert pool.ready(0) == []
    assert pool.fire("ready", 0) == []


def test_worker_ids_are_never_used_again(pool_of):
    pool = pool_of(2)
    pool.lose(1)
    pool.lose(0)
    pool.resize(remove=1)
    pool.resize(add=[5])
    assert pool.workers == [3, 4]


# --- who comes instead ----------------------------------------------------------------------------


def test_a_worker_that_dies_again_and_again_is_started_after_growing_delays(pool_of):
    pool = pool_of(1)
    assert pool.lose(0) == pool.starts(1, place=0)
    pool.ready(1)
    for worker_id, delay_s in ((1, 0.5), (2, 1.0), (3, 2.0)):
        assert pool.lose(worker_id) == [SetTimer(pool.now + delay_s, "start", worker_id + 1)]
        pool.now += delay_s
        assert pool.fire("start", worker_id + 1) == pool.starts(worker_id + 1, place=0)
        pool.ready(worker_id + 1)


def test_an_answer_makes_up_for_earlier_losses(pool_of):
    pool = pool_of(1)
    pool.lose(0)
    pool.ready(1)
    pool.submit(0)
    pool.finish(0)
    assert pool.lose(1) == pool.starts(2, place=0)


def test_a_worker_that_does_not_come_up_in_time_is_lost(pool_of):
    pool = pool_of(0)
    assert pool.resize(add=[7]) == pool.starts(0, place=7)
    pool.now = 60.0
    assert pool.fire("ready", 0) == pool.starts(1, place=7)
    assert pool.ready(0) == [], "it is too late now"
    assert pool.counts.workers_lost == 0, "it never was one"


def test_a_timer_is_of_no_effect_once_the_worker_is_ready(pool_of):
    pool = pool_of(1)
    assert pool.fire("ready", 0) == []
    pool.submit(0)
    assert pool.fire("ready", 0) == []


def test_three_failed_starts_in_a_row_drop_the_place(pool_of):
    pool = pool_of(2)
    pool.lose(1)
    assert pool.lose(2, LossReason.START) == [SetTimer(0.5, "start", 3)]
    assert pool.fire("start", 3) == pool.starts(3, place=1)
    assert pool.lose(3, LossReason.START) == [SetTimer(1.0, "start", 4)]
    pool.fire("start", 4)
    assert pool.lose(4, LossReason.START) == [Vacate(1), DropPlace(1, LossReason.START)]
    assert pool.size == 1
    assert pool.submit(0) == [pool.runs(0, 0, (0, 0, 1))]


def test_a_start_that_works_makes_up_for_those_that_failed(pool_of):
    pool = pool_of(0)
    pool.resize(add=[0])
    for worker_id in (0, 1):
        pool.lose(worker_id, LossReason.START)
        pool.fire("start", worker_id + 1)
    pool.ready(2)
    commands = pool.lose(2)
    assert [type(command) for command in commands] == [StartWorker, SetTimer]


def drop_last_place(pool):
    """Let the only place of a pool with one worker be given up; return the last answer."""
    pool.lose(0)
    for worker_id in (1, 2):
        pool.lose(worker_id)
        pool.fire("start", worker_id + 1)
    return pool.lose(3, LossReason.NODE)


def test_when_the_last_place_is_given_up_the_pool_breaks_and_every_task_ends(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, size=10)
    pool.submit(2, size=0, is_open=True)
    pool.submit(3, size=1, is_gang=True)
    assert drop_last_place(pool) == [
        Vacate(0),
        DropPlace(0, LossReason.NODE),
        BreakPool(),
        *(EndTask(task_id, FAILED) for task_id in range(4)),
    ]
    assert pool.state is PoolState.BROKEN


def test_a_pool_breaks_with_its_last_place_even_if_nothing_waits(pool_of):
    pool = pool_of(1)
    assert drop_last_place(pool)[-1] == BreakPool()


def test_a_broken_pool_fails_what_comes_after_and_gives_new_places_back(pool_of):
    pool = pool_of(1)
    drop_last_place(pool)
    assert pool.submit(0) == [EndTask(0, FAILED)]
    assert pool.submit(1, place=0) == [EndTask(1, FAILED)]
    assert pool.resize(add=[1, 2]) == [Vacate(1), Vacate(2)]
    assert pool.fire("ready", 3) == []
    assert pool.ready(3) == []
    assert pool.cancel(0) == []


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_pool_with_one_worker_left_is_not_broken(pool_of, is_busy):
    pool = pool_of(2)
    if is_busy:
        pool.submit(0)
    pool.lose(1)
    for worker_id in (2, 3):
        pool.lose(worker_id)
        pool.fire("start", worker_id + 1)
    assert pool.lose(4)[-1] == DropPlace(1, LossReason.EXIT)
    assert pool.state is PoolState.OPEN
