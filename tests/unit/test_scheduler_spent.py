"""Workers whose process has kept what it should not."""

import pytest

from raypool.core.messages import EndTask, Vacate
from raypool.core.model import Report, TaskState

FINISHED = TaskState.FINISHED


def test_a_worker_that_is_spent_is_replaced_before_the_next_task(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1)
    assert pool.finish(0, is_spent=True) == [
        pool.settles(0, (0, 0, 1)),
        EndTask(0, FINISHED),
        *pool.starts(1, place=0),
    ]
    assert pool.ready(1) == [pool.runs(1, 1, (1, 0, 1))]
    assert pool.finish(1) == [
        pool.settles(1, (1, 0, 1)),
        EndTask(1, FINISHED),
    ], "that was another process"


def test_what_waits_goes_to_others_meanwhile(pool_of):
    pool = pool_of(2)
    for task_id in range(3):
        pool.submit(task_id)
    assert pool.finish(0, is_spent=True)[-2:] == pool.starts(2, place=0)
    assert pool.finish(1)[0] == pool.runs(1, 2, (2, 0, 1))


def test_what_it_was_sent_ahead_comes_back_unharmed(pool_of):
    """It is handed back, costs no attempt, and nothing more is sent after it."""
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=100, chunk_size=10)
    first, ahead = 1, 2
    assert pool.finish(first, busy_s=0.001, is_spent=True) == [pool.settles(first, (1, 0, 10))]
    assert pool.finish(ahead, Report(0), is_spent=True) == pool.starts(1, place=0)
    again = pool.ready(1)
    assert again[0] == pool.runs(1, 3, (1, 10, 20)), "for the first time"


def test_what_is_bound_to_it_runs_there_first(pool_of):
    """A task that wants this very process would be lost with it; all else that comes later finds
    the next one.
    """
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, place=0)
    pool.submit(2)
    assert pool.finish(0, is_spent=True)[0] == pool.runs(0, 1, (1, 0, 1))
    assert pool.finish(1, is_spent=True)[-2:] == pool.starts(1, place=0)
    assert pool.ready(1) == [pool.runs(1, 2, (2, 0, 1))]


def test_what_it_says_last_counts(pool_of):
    """What was bound to it has freed the rest, or left something there that must not be lost: so
    the process stays.
    """
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, place=0)
    pool.submit(2)
    pool.finish(0, is_spent=True)
    assert pool.finish(1) == [
        pool.runs(0, 2, (2, 0, 1)),
        pool.settles(1, (1, 0, 1)),
        EndTask(1, FINISHED),
    ]


def test_it_is_replaced_also_if_that_is_cancelled(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    pool.submit(1, place=0, size=0, is_open=True)
    assert pool.finish(0, is_spent=True) == [pool.settles(0, (0, 0, 1)), EndTask(0, FINISHED)]
    assert pool.cancel(1)[-2:] == pool.starts(1, place=0)


def test_one_that_was_to_go_anyway_is_not_replaced(pool_of):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1)
    pool.resize(remove=1)
    assert Vacate(1) in pool.finish(1, is_spent=True)
    assert pool.size == 1


@pytest.mark.parametrize("is_spent", [False, True])
def test_a_gang_waits_for_the_worker_that_takes_its_place(pool_of, is_spent):
    pool = pool_of(2)
    pool.submit(0)
    pool.submit(1, size=2, is_gang=True)
    pool.finish(0, is_spent=is_spent)
    if is_spent:
        pool.ready(2)
    assert {call.worker_id for call in pool.calls.values() if call.slices[0].task_id == 1} == {
        2 if is_spent else 0,
        1,
    }
