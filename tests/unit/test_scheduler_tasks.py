"""The life of a task: handed in, sent, answered, ended."""

import pytest

from raypool.core.messages import EndTask
from raypool.core.model import Report, TaskState

FINISHED, FAILED, CANCELLED = TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED


def test_a_single_task_runs_at_once_and_ends_with_its_answer(pool_of):
    pool = pool_of(1)
    assert pool.submit(0) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED)]
    assert pool.tasks == []


def test_tasks_wait_in_order_of_submission_and_bind_to_the_worker_that_is_free_first(pool_of):
    pool = pool_of(2)
    assert pool.submit(0) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.submit(1) == [pool.runs(1, 1, (1, 0, 1))]
    assert pool.submit(2) == []
    assert pool.submit(3) == []
    assert pool.finish(1) == [
        pool.runs(1, 2, (2, 0, 1)),
        pool.settles(1, (1, 0, 1)),
        EndTask(1, FINISHED),
    ]
    assert pool.finish(2) == [
        pool.runs(1, 3, (3, 0, 1)),
        pool.settles(2, (2, 0, 1)),
        EndTask(2, FINISHED),
    ]


def test_a_higher_priority_goes_first_and_equals_go_by_submission(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, priority=-1)
    pool.submit(2)
    pool.submit(3, priority=5)
    pool.submit(4, priority=5)
    order = []
    for attempt in range(4):
        order += [command.slices[0].task_id for command in pool.finish(attempt)[:1]]
    assert order == [3, 4, 2, 1]


def test_among_free_workers_the_one_in_the_lowest_place_is_taken(pool_of):
    pool = pool_of(3)
    for task_id in range(3):
        pool.submit(task_id)
    pool.finish(2)
    pool.finish(0)
    assert pool.submit(3) == [pool.runs(0, 3, (3, 0, 1))]
    assert pool.submit(4) == [pool.runs(2, 4, (4, 0, 1))]


def test_a_worker_that_is_starting_takes_nothing_until_it_is_ready(pool_of):
    pool = pool_of(0)
    pool.resize(add=[0])
    assert pool.submit(0) == []
    assert pool.ready(0) == [pool.runs(0, 0, (0, 0, 1))]


def test_a_loop_gives_each_free_worker_its_next_item(pool_of):
    pool = pool_of(2)
    assert pool.submit(0, size=4) == [pool.runs(0, 0, (0, 0, 1)), pool.runs(1, 1, (0, 1, 2))]
    assert pool.finish(1) == [pool.runs(1, 2, (0, 2, 3)), pool.settles(1, (0, 1, 2))]
    assert pool.finish(2) == [pool.runs(1, 3, (0, 3, 4)), pool.settles(2, (0, 2, 3))]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1))]
    assert pool.finish(3) == [pool.settles(3, (0, 3, 4)), EndTask(0, FINISHED)]


def test_items_of_unknown_or_long_duration_go_one_at_a_time_and_a_busy_worker_gets_no_second(
    pool_of,
):
    pool = pool_of(1)
    pool.submit(0, size=3)
    for attempt in range(2):
        commands = pool.finish(attempt, busy_s=3600.0)
        assert commands == [
            pool.runs(0, attempt + 1, (0, attempt + 1, attempt + 2)),
            pool.settles(attempt, (0, attempt, attempt + 1)),
        ]


def test_a_later_loop_starts_when_the_first_has_nothing_left_to_give(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=2)
    assert pool.submit(1, size=2) == [pool.runs(2, 2, (1, 0, 1))]


def test_max_workers_keeps_a_loop_to_so_many_workers(pool_of):
    pool = pool_of(3)
    assert pool.submit(0, size=5, max_workers=2) == [
        pool.runs(0, 0, (0, 0, 1)),
        pool.runs(1, 1, (0, 1, 2)),
    ]
    assert pool.submit(1) == [pool.runs(2, 2, (1, 0, 1))]
    assert pool.finish(2) == [pool.settles(2, (1, 0, 1)), EndTask(1, FINISHED)]
    assert pool.finish(0) == [pool.runs(0, 3, (0, 2, 3)), pool.settles(0, (0, 0, 1))]


def test_a_task_without_items_ends_as_it_is_handed_in(pool_of):
    pool = pool_of(1)
    assert pool.submit(0, size=0) == [EndTask(0, FINISHED)]
    assert pool.submit(1, size=0, is_gang=True) == [EndTask(1, FINISHED)]


def test_failures_do_not_stop_a_task_that_collects_them(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2)
    assert pool.finish(0, Report(1, failed=1)) == [
        pool.runs(0, 1, (0, 1, 2)),
        pool.settles(0, (0, 0, 1)),
    ]
    assert pool.finish(1) == [pool.settles(1, (0, 1, 2)), EndTask(0, FINISHED)]
    assert (pool.counts.finished, pool.counts.failed) == (1, 1)


def test_the_first_failure_ends_a_task_that_fails_fast(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=4, fail_fast=True)
    assert pool.finish(1, Report(1, failed=1)) == [
        pool.settles(1, (0, 1, 2)),
        pool.signals(0, 0, 0),
        EndTask(0, FAILED),
    ]
    assert pool.finish(0) == [], "what was running of it is dropped"
    assert pool.submit(1) == [pool.runs(0, 2, (1, 0, 1))], "and its workers are free"


# --- open tasks -----------------------------------------------------------------------------------


def test_an_open_task_takes_items_as_they_come_and_ends_once_it_is_closed(pool_of):
    pool = pool_of(2)
    assert pool.submit(0, size=0, is_open=True) == []
    assert pool.add_items(0, 1, is_open=True) == [pool.runs(0, 0, (0, 0, 1))]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1))]
    assert pool.add_items(0, 3, is_open=True) == [
        pool.runs(0, 1, (0, 1, 2)),
        pool.runs(1, 2, (0, 2, 3)),
    ]
    assert pool.add_items(0, 0, is_open=False) == []
    assert pool.finish(1) == [pool.runs(0, 3, (0, 3, 4)), pool.settles(1, (0, 1, 2))]
    assert pool.finish(2) == [pool.settles(2, (0, 2, 3))]
    assert pool.finish(3) == [pool.settles(3, (0, 3, 4)), EndTask(0, FINISHED)]


def test_closing_an_open_task_whose_items_are_done_ends_it(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=1, is_open=True)
    pool.finish(0)
    assert pool.add_items(0, 0, is_open=False) == [EndTask(0, FINISHED)]


def test_an_open_task_keeps_its_turn_before_later_ones(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=1, is_open=True)
    pool.submit(1)
    pool.add_items(0, 1, is_open=False)
    assert pool.finish(0)[0] == pool.runs(0, 1, (0, 1, 2))


def test_items_for_a_task_that_has_ended_meanwhile_are_ignored(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=0, is_open=True)
    pool.cancel(0)
    assert pool.add_items(0, 5, is_open=False) == []


# --- cancelling -----------------------------------------------------------------------------------


def test_a_queued_task_that_is_cancelled_never_runs(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    assert pool.cancel(1) == [EndTask(1, CANCELLED)]
    assert pool.finish(0) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED)]


def test_the_answer_of_a_cancelled_task_is_dropped_and_its_worker_is_busy_until_then(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    assert pool.cancel(0) == [pool.signals(0, 0, 0), EndTask(0, CANCELLED)]
    assert pool.submit(1) == []
    assert pool.finish(0) == [pool.runs(0, 1, (1, 0, 1))]


def test_a_half_finished_loop_can_be_cancelled(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=3)
    pool.finish(0)
    assert pool.cancel(0) == [pool.signals(0, 1, 0), EndTask(0, CANCELLED)]
    assert pool.finish(1) == []
    counts = pool.counts
    assert (counts.submitted, counts.finished, counts.failed, counts.cancelled) == (3, 1, 0, 2)


def test_cancelling_what_has_ended_does_nothing(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.finish(0)
    assert pool.cancel(0) == []


# --- retries of the user's errors -----------------------------------------------------------------


def test_an_error_that_may_be_retried_runs_again_before_the_rest_and_does_not_count(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=2, retries=1, fail_fast=True)
    assert pool.finish(0, Report(1, failed=1, retry=(0,))) == [pool.runs(0, 1, (0, 0, 1, 2))]
    assert pool.finish(1) == [pool.runs(0, 2, (0, 1, 2)), pool.settles(1, (0, 0, 1, 2))]
    assert pool.finish(2) == [pool.settles(2, (0, 1, 2)), EndTask(0, FINISHED)]


def test_the_last_retry_counts_whatever_it_brings(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=1)
    pool.finish(0, Report(1, failed=1, retry=(0,)))
    assert pool.finish(1, Report(1, failed=1, retry=(0,))) == [
        pool.settles(1, (0, 0, 1, 2)),
        EndTask(0, FINISHED),
    ]
    assert pool.counts.failed == 1


def test_without_retries_an_error_counts_at_once(pool_of):
    pool = pool_of(1)
    pool.submit(0, retries=0, fail_fast=True)
    assert pool.finish(0, Report(1, failed=1, retry=(0,))) == [
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FAILED),
    ]


def test_of_a_call_with_several_items_only_those_run_again_that_may(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=6, chunk_size=6)
    commands = pool.finish(0, Report(6, failed=3, retry=(1, 4)))
    assert commands == [
        pool.runs(0, 1, (0, 1, 2, 2)),
        pool.settles(0, (0, 0, 1)),
        pool.settles(0, (0, 2, 4)),
        pool.settles(0, (0, 5, 6)),
    ]
    assert pool.finish(1) == [pool.runs(0, 2, (0, 4, 5, 2)), pool.settles(1, (0, 1, 2, 2))]
    assert pool.finish(2) == [pool.settles(2, (0, 4, 5, 2)), EndTask(0, FINISHED)]


# --- work before words ----------------------------------------------------------------------------


def test_workers_are_fed_before_anybody_is_told_about_results(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    kinds = [type(command).__name__ for command in pool.finish(0)]
    assert kinds == ["RunTasks", "SettleItems", "EndTask"]


@pytest.mark.parametrize("answers", [["finish"], ["cancel", "finish"]])
def test_an_answer_that_comes_twice_counts_once(pool_of, answers):
    pool = pool_of(1)
    pool.submit(0)
    for answer in answers:
        getattr(pool, answer)(0)
    assert pool.finish(0) == []
