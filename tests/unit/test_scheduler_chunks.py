"""Short items share calls, and a busy worker gets its next call ahead of time; long ones go one by
one.
"""

import pytest

from raypool.core.messages import EndTask, RunGang, RunTasks
from raypool.core.model import Report, TaskState

FINISHED = TaskState.FINISHED


def calls(commands):
    """Return the calls among commands as (worker, number of items)."""
    runs = [command for command in commands if isinstance(command, RunTasks)]
    return [(run.worker_id, sum(piece.stop - piece.start for piece in run.slices)) for run in runs]


# --- chunks ---------------------------------------------------------------------------------------


def test_a_loop_begins_with_single_items_and_goes_on_in_chunks_once_they_prove_short(pool_of):
    pool = pool_of(2)
    assert calls(pool.submit(0, size=1000)) == [(0, 1), (1, 1)]
    # 16 times what was measured; the other worker is not known to run something short, and gets
    # nothing ahead.
    assert calls(pool.finish(0, busy_s=0.001)) == [(0, 16), (0, 32 // 2)]
    assert calls(pool.finish(1, busy_s=0.001)) == [(1, 32), (1, 32)]
    assert calls(pool.finish(2, busy_s=0.001)) == [(0, 50)], "about 50 ms, however much waits"


def test_towards_the_end_calls_get_smaller(pool_of):
    pool = pool_of(2)
    for task_id in range(4):
        pool.get_used_to(0, task_id)
    sizes = [size for _, size in calls(pool.submit(4, size=60))]
    attempt = 4
    while attempt in pool.calls:
        sizes += [size for _, size in calls(pool.finish(attempt, busy_s=0.001))]
        attempt += 1
    assert sizes == [15, 12, 9, 6, 5, 5, 5, 3]


def test_short_futures_of_one_function_share_a_call(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)  # something else keeps the worker busy
    for task_id in range(2, 6):
        assert pool.submit(task_id) == []
    assert pool.finish(1)[:1] == [pool.runs(0, 2, (2, 0, 1), (3, 0, 1), (4, 0, 1), (5, 0, 1))]
    assert pool.finish(2) == [
        command
        for task_id in range(2, 6)
        for command in (pool.settles(2, (task_id, 0, 1)), EndTask(task_id, FINISHED))
    ]


def test_different_functions_never_share_a_call(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.get_used_to(1, task_id=1)
    pool.submit(2, fn_id=9)
    pool.submit(3, fn_id=0)
    pool.submit(4, fn_id=1)
    pool.submit(5, fn_id=0)
    assert pool.finish(2)[0] == pool.runs(0, 3, (3, 0, 1))
    assert pool.finish(3)[0] == pool.runs(0, 4, (4, 0, 1))


def test_a_loop_and_a_future_of_one_function_share_a_call(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, size=2)
    pool.submit(3)
    assert pool.finish(1)[0] == pool.runs(0, 2, (2, 0, 2), (3, 0, 1))


def test_a_task_without_retries_shares_no_call_and_nothing_queues_behind_it(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    assert pool.submit(1, retries=0) == [pool.runs(0, 1, (1, 0, 1))]
    assert pool.submit(2, size=50) == []
    assert pool.submit(3, retries=0, priority=1, size=2) == []
    assert calls(pool.finish(1, busy_s=0.001)) == [(0, 1)]


def test_a_task_without_retries_is_not_taken_into_the_call_of_another(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2)
    pool.submit(3, retries=0)
    assert pool.finish(1)[0] == pool.runs(0, 2, (2, 0, 1))


def test_a_task_with_few_retries_shares_calls(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, retries=1)
    pool.submit(3, retries=1)
    assert pool.finish(1)[0] == pool.runs(0, 2, (2, 0, 1), (3, 0, 1))


@pytest.mark.parametrize("other", [{"max_workers": 1}, {"is_gang": True}, {"chunk_size": 5}])
def test_what_has_wishes_of_its_own_is_not_taken_into_the_call_of_another(pool_of, other):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2)
    pool.submit(3, **other)
    assert pool.finish(1)[0] == pool.runs(0, 2, (2, 0, 1))
    call = pool.runs(0, 3, (3, 0, 1))
    assert pool.finish(2)[0] == (RunGang((call,)) if "is_gang" in other else call)


def test_tasks_with_a_limit_of_workers_share_no_call(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2, max_workers=1, size=3)
    pool.submit(3)
    assert pool.finish(1)[0] == pool.runs(0, 2, (2, 0, 3)), "but its own items do"
    assert pool.finish(2, busy_s=0.001)[0] == pool.runs(0, 3, (3, 0, 1))


def test_a_given_chunk_size_holds_from_the_first_call_on(pool_of):
    pool = pool_of(2)
    assert calls(pool.submit(0, size=25, chunk_size=10)) == [(0, 10), (1, 10)]
    assert calls(pool.finish(0, busy_s=100.0)) == [(0, 5)]


def test_tasks_with_different_chunk_sizes_share_no_call(pool_of):
    pool = pool_of(1)
    pool.submit(0, fn_id=9)
    pool.submit(1, chunk_size=8)
    pool.submit(2, chunk_size=8)
    pool.submit(3, chunk_size=4)
    assert pool.finish(0)[0] == pool.runs(0, 1, (1, 0, 1), (2, 0, 1))


# --- look-ahead -----------------------------------------------------------------------------------


def test_a_worker_that_runs_short_items_gets_one_more_call_while_there_is_enough_for_all(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    assert calls(pool.submit(1, size=40)) == [(0, 16), (0, 12)]
    assert pool.submit(2, size=100) == [], "but never a third"
    assert calls(pool.finish(1, busy_s=0.001)) == [(0, 50)]


def test_there_is_no_look_ahead_when_no_more_waits_than_there_are_workers(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2)
    assert pool.submit(3) == []
    assert pool.submit(4) == []
    assert calls(pool.submit(5)) == [(0, 3)]


def test_nothing_short_is_queued_behind_something_long(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=1)  # of unknown duration: an hour, perhaps
    assert [worker for worker, _ in calls(pool.submit(2, size=500))] == [1, 1]
    assert calls(pool.finish(2, busy_s=0.001)) == [(1, 50)]


def test_nothing_long_is_queued_behind_something_short(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    assert pool.submit(2, fn_id=1, size=10) == []


def test_nothing_is_queued_behind_short_items_of_which_one_was_long_of_late(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.get_used_to(1, task_id=1)
    pool.submit(2)
    pool.finish(2, busy_s=5.0)
    for task_id in range(3, 23):
        pool.get_used_to(0, task_id)
    pool.submit(23)
    assert pool.submit(24, fn_id=1, size=100) == []
    assert calls(pool.finish(23, busy_s=0.001)) != []


def test_a_loop_with_a_limit_of_workers_gets_no_look_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    assert len(calls(pool.submit(1, size=1000, max_workers=2))) == 1


def test_a_task_without_retries_is_not_sent_ahead(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    assert pool.submit(2, size=50, retries=0) == []


def test_what_has_lost_a_worker_is_not_sent_ahead(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1)
    pool.submit(2)
    assert calls(pool.lose(0)) == []
    assert pool.submit(3, size=50) == []


def test_a_worker_that_has_two_calls_goes_on_with_the_second(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=2)
    pool.submit(2, size=2)
    pool.submit(3, size=2)
    assert pool.finish(1, busy_s=0.001)[:-2] == [pool.runs(0, 3, (3, 0, 2))]
    assert pool.finish(2, busy_s=0.001) == [pool.settles(2, (2, 0, 2)), EndTask(2, FINISHED)]
    assert pool.finish(3, busy_s=0.001) == [pool.settles(3, (3, 0, 2)), EndTask(3, FINISHED)]


# --- what is handed back --------------------------------------------------------------------------


def test_items_that_were_not_begun_run_again_first_and_as_the_same_attempt(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=8, chunk_size=5)
    assert pool.finish(0, Report(2, busy_s=4.0)) == [
        pool.runs(0, 1, (0, 2, 5)),
        pool.settles(0, (0, 0, 2)),
    ]


def test_a_call_that_proves_long_after_all_hands_back_and_the_rest_goes_one_by_one(pool_of):
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=1)
    pool.submit(2, size=5)
    assert pool.calls[2] == pool.runs(1, 2, (2, 0, 5))
    assert pool.finish(2, Report(1, busy_s=60.0))[0] == pool.runs(1, 3, (2, 1, 2))
    assert pool.finish(1)[0] == pool.runs(0, 4, (2, 2, 3))


def test_a_slice_of_which_nothing_was_begun_runs_again(pool_of):
    pool = pool_of(1)
    pool.submit(0, fn_id=0)
    assert pool.finish(0, Report(0)) == [pool.runs(0, 1, (0, 0, 1))]
    assert pool.submit(1, fn_id=0, size=9) == [], "how long it takes is not known"


def test_of_a_shared_call_some_tasks_may_come_back_unbegun(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, fn_id=9)
    pool.submit(2)
    pool.submit(3)
    pool.finish(1)
    assert pool.finish(2, Report(1, busy_s=0.2), Report(0)) == [
        pool.runs(0, 3, (3, 0, 1)),
        pool.settles(2, (2, 0, 1)),
        EndTask(2, FINISHED),
    ]


def test_items_handed_back_by_a_cancelled_task_are_gone(pool_of):
    pool = pool_of(1)
    pool.submit(0, size=5, chunk_size=5)
    pool.cancel(0)
    assert pool.finish(0, Report(2)) == []


# --- measured times -------------------------------------------------------------------------------


def test_times_are_kept_while_a_function_has_no_task_but_not_for_ever(pool_of):
    pool = pool_of(1)
    # one that stays must not keep the others from being forgotten
    pool.submit(0, fn_id=-1, is_open=True, size=0)
    for fn_id in range(300):
        pool.get_used_to(fn_id, task_id=fn_id + 1)
    assert calls(pool.submit(301, fn_id=0, size=50)) == [(0, 1)]
    pool.cancel(301)
    pool.finish(300)
    assert calls(pool.submit(302, fn_id=299, size=50)) == [(0, 16), (0, 16)]
