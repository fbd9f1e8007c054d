"""Workers that last at an attempt: what they tell, keep and hand back."""

import pytest

from raypool.core.messages import AttemptFinished, AttemptNarrowed, EndTask, PlaceLeaving
from raypool.core.model import Report, TaskState
from raypool.errors import InternalError, LossReason

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
MS = 0.001


@pytest.fixture
def pool(pool_of):
    """Two workers; function 0 is known to be short. Each has ten items of task 1, and ten behind
    them.
    """
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0, item_s=MS)
    assert pool.submit(1, size=40, chunk_size=10) == [
        pool.runs(0, 1, (1, 0, 10)),
        pool.runs(1, 2, (1, 10, 20)),
        pool.runs(0, 3, (1, 20, 30)),
        pool.runs(1, 4, (1, 30, 40)),
    ]
    return pool


def test_what_is_done_counts_and_the_rest_goes_to_whoever_is_free_first(pool):
    assert pool.tell(AttemptNarrowed(0, 1, (Report(3, busy_s=3 * MS),), (1,))) == [
        pool.settles(1, (1, 0, 3))
    ]
    assert pool.finish(2, busy_s=MS)[0] == pool.runs(1, 5, (1, 4, 10)), "the rest of the call"
    assert pool.finish(4, busy_s=MS)[0] == pool.runs(1, 6, (1, 20, 30)), "what was behind it"
    commands = [
        pool.settles(1, (1, 3, 4)),
        pool.settles(5, (1, 4, 10)),
        pool.settles(6, (1, 20, 30)),
        EndTask(1, FINISHED),
    ]
    assert [*pool.finish(1, Report(1, busy_s=5.0)), *pool.finish(5), *pool.finish(6)] == commands


def test_an_answer_to_what_was_taken_back_means_nothing(pool):
    pool.tell(AttemptNarrowed(0, 1, (Report(3, busy_s=3 * MS),), (1,)))
    assert pool.tell(AttemptFinished(0, 3, (Report(0),))) == []
    assert pool.tell(AttemptNarrowed(0, 3, (Report(0),), (10,))) == []


def test_nothing_more_is_sent_to_wait_behind_it(pool):
    pool.tell(AttemptNarrowed(0, 1, (Report(3, busy_s=3 * MS),), (1,)))
    commands = pool.submit(2, size=100, chunk_size=10)
    assert [command for command in commands if command.worker_id == 0] == []


def test_nor_after_an_earlier_call_has_come_back_late(pool):
    pool.tell(AttemptNarrowed(0, 3, (Report(3, busy_s=3 * MS),), (1,)))
    pool.submit(2, size=100, chunk_size=10)
    assert [
        command for command in pool.finish(1, busy_s=MS) if getattr(command, "worker_id", None) == 0
    ] == []


def test_it_comes_too_late_for_what_has_come_back(pool):
    pool.finish(1, busy_s=MS)
    assert pool.tell(AttemptNarrowed(0, 1, (Report(3),), (1,))) == []


def test_several_tasks_in_one_call(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0, item_s=MS)
    pool.submit(1, fn_id=1)
    for task_id in range(2, 7):
        pool.submit(task_id)
    pool.finish(1)
    assert pool.calls[2] == pool.runs(0, 2, *((task_id, 0, 1) for task_id in range(2, 7)))
    reports = (Report(1, busy_s=MS), Report(1, busy_s=MS), Report(0), Report(0), Report(0))
    commands = pool.tell(AttemptNarrowed(0, 2, reports, (0, 0, 1, 0, 0)))
    assert commands == [
        *(
            command
            for task_id in (2, 3)
            for command in (pool.settles(2, (task_id, 0, 1)), EndTask(task_id, FINISHED))
        )
    ]
    assert pool.finish(2, Report(1, busy_s=9.0))[0] == pool.runs(0, 3, (5, 0, 1)), (
        "not with the last one: it may be long too"
    )


def test_a_failure_that_ends_the_task_stops_what_is_kept(pool_of):
    pool = pool_of(1)
    pool.get_used_to(0, task_id=0, item_s=MS)
    pool.submit(1, size=10, fail_fast=True)
    commands = pool.tell(AttemptNarrowed(0, 1, (Report(2, failed=1, busy_s=2 * MS),), (1,)))
    assert commands == [pool.settles(1, (1, 0, 2)), pool.signals(0, 1, 1), EndTask(1, FAILED)]
    assert pool.finish(1, Report(0)) == []


@pytest.mark.parametrize("done", [0, 2])
def test_what_nobody_may_run_any_more_fails(pool_of, done):
    pool = pool_of(1)
    pool.submit(1, size=5, chunk_size=5, places=(0,))
    pool.tell(PlaceLeaving(0))
    commands = pool.tell(AttemptNarrowed(0, 0, (Report(done, busy_s=done * MS),), (1,)))
    settled = [pool.settles(0, (1, 0, done))] if done else []
    assert commands == [*settled, pool.fails((1, done + 1, 5), LossReason.PREEMPTED)]
    assert EndTask(1, FINISHED) in pool.finish(0, Report(1, busy_s=5.0))


def test_a_worker_that_is_lost_after_it_is_charged_with_what_it_kept(pool):
    pool.tell(AttemptNarrowed(0, 1, (Report(3, busy_s=3 * MS),), (1,)))
    pool.lose(0)
    pool.ready(2)
    pool.finish(5, busy_s=MS)
    again = [piece for call in pool.calls.values() for piece in call.slices if piece.attempt == 2]
    assert [(piece.start, piece.stop) for piece in again] == [(3, 4)]


def test_all_may_be_kept(pool):
    """Values that are too large to be told early, say; only what waits behind them is handed
    back.
    """
    assert pool.tell(AttemptNarrowed(0, 1, (Report(0),), (10,))) == []
    assert pool.finish(2, busy_s=MS)[0] == pool.runs(1, 5, (1, 20, 30))


def test_what_cannot_be_is_refused(pool):
    one = (Report(3),)
    for reports, kept in [
        (one, (0,)),
        (one, (8,)),
        (one, (-1,)),
        (one, (1, 1)),
        ((), ()),
        ((Report(11),), (1,)),
    ]:
        with pytest.raises(InternalError, match="AttemptNarrowed"):
            pool.tell(AttemptNarrowed(0, 1, reports, kept))


def test_an_attempt_that_never_was_is_refused(pool):
    with pytest.raises(InternalError):
        pool.tell(AttemptNarrowed(0, 99, (Report(0),), (1,)))
