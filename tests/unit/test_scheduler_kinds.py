"""A pool of fast and slow workers: with costs, who takes what."""

import pytest

from raypool.core.messages import EndTask, RunTasks, SetTimer, WorkerReady
from raypool.core.model import Report, TaskSpec, TaskState
from raypool.errors import InternalError, LossReason

FAST, SLOW = 0, 1  # workers, and their kinds; the slow one takes ten times as long


@pytest.fixture
def mixed(pool_of):
    """Return a pool with a fast and a slow worker whose speeds are known for function 0, and task 0 done."""
    pool = pool_of(0)
    pool.resize(add=(0, 1))
    for kind in (FAST, SLOW):
        pool.tell(WorkerReady(kind, kind))
    pool.submit(0, size=2, costs=(1.0, 1.0))
    pool.finish(0, busy_s=1.0)
    pool.finish(1, busy_s=10.0)
    return pool


def started(commands):
    """Return (worker, item) of each call."""
    return [(call.worker_id, piece.start) for call in commands if isinstance(call, RunTasks) for piece in call.slices]


def looks(commands):
    return [command for command in commands if isinstance(command, SetTimer) and command.kind == "look"]


def test_the_slow_one_leaves_the_rest_to_the_fast_one(mixed):
    commands = mixed.submit(1, size=3, costs=(3.0, 2.0, 2.0))
    assert started(commands) == [(FAST, 0)]
    assert [timer.at for timer in looks(commands)] == [4.5]
    assert started(mixed.finish(2, busy_s=3.0)) == [(FAST, 1)]


def test_it_takes_something_short_meanwhile(mixed):
    assert started(mixed.submit(1, size=4, costs=(9.0, 9.0, 9.0, 1.0))) == [(FAST, 0), (SLOW, 3)]


def test_without_costs_it_takes_what_comes(mixed):
    assert started(mixed.submit(1, size=3)) == [(FAST, 0), (SLOW, 1)]


def test_it_does_not_wait_while_something_else_does(mixed):
    mixed.submit(1, size=3, costs=(3.0, 2.0, 2.0))
    assert started(mixed.submit(2)) == [(SLOW, 2)], "the shortest, before what is behind it"


def test_with_a_kind_unknown_it_is_as_if_all_were_alike(mixed):
    assert started(mixed.submit(1, fn_id=7, size=3, costs=(3.0, 2.0, 2.0))) == [(FAST, 0), (SLOW, 1)]


def test_a_long_loop_begins_with_short_items_to_learn_from(mixed):
    costs = tuple(float(cost) for cost in range(16, 0, -1))
    assert started(mixed.submit(1, fn_id=7, size=16, costs=costs)) == [(FAST, 12), (SLOW, 13)]
    assert started(mixed.finish(2, busy_s=4.0)) == [(FAST, 0)]


def test_if_the_fast_one_does_not_come_back_it_takes_it_after_all(mixed):
    (timer,) = looks(mixed.submit(1, size=2, costs=(3.0, 2.0)))
    course = []
    for _ in range(20):
        mixed.now = timer.at
        commands = mixed.fire("look", task_id=1)
        course += started(commands)
        if course:
            break
        (timer,) = looks(commands)
    assert course == [(SLOW, 1)]
    assert mixed.now < 60


def test_if_the_fast_one_is_lost_the_slow_one_takes_it(mixed):
    mixed.submit(1, size=2, costs=(3.0, 2.0))
    assert started(mixed.lose(FAST, LossReason.NODE)) == [(SLOW, 0)]


def test_what_is_left_to_others_can_be_cancelled(mixed):
    mixed.submit(1, size=2, costs=(3.0, 2.0))
    assert mixed.cancel(1)[-1] == EndTask(1, TaskState.CANCELLED)
    assert mixed.fire("look", task_id=1) == []
    assert started(mixed.submit(2)) == [(SLOW, 0)]


def test_a_gang_takes_those_who_wait(mixed):
    mixed.submit(1, size=2, costs=(3.0, 2.0))
    mixed.submit(2, size=2, is_gang=True)
    assert started(mixed.finish(2, busy_s=3.0)) == [], "the slow one has taken the rest, for the gang waits"


def test_in_a_part_of_the_pool_it_is_the_same(mixed):
    assert started(mixed.submit(1, size=3, costs=(3.0, 2.0, 2.0), places=(0, 1))) == [(FAST, 0)]
    assert started(mixed.finish(2, busy_s=3.0)) == [(FAST, 1)]
    assert started(mixed.finish(3, busy_s=2.0)) == [(FAST, 2)]
    assert mixed.finish(4, busy_s=2.0)[-1] == EndTask(1, TaskState.FINISHED)
    assert started(mixed.submit(2, size=2, costs=(3.0, 2.0), places=(1,))) == [(SLOW, 0)]


def test_what_runs_again_goes_to_the_fast_one(mixed):
    mixed.submit(1, size=3, costs=(3.0, 2.0, 2.0))
    call = mixed.finish(2, Report(1, 1, (0,), 3.0))
    assert [piece for command in call if isinstance(command, RunTasks) for piece in command.slices] == [(1, 0, 1, 2)]
    assert started(call) == [(FAST, 0)]


def test_failures_teach_nothing(mixed):
    """What the slow one fails at once does not make it the faster one."""
    assert started(mixed.submit(1, size=4, costs=(9.0, 9.0, 9.0, 1.0))) == [(FAST, 0), (SLOW, 3)]
    mixed.finish(3, Report(1, 1, (), 0.001))
    for attempt_id in (2, 4, 5):
        mixed.finish(attempt_id, busy_s=9.0)
    assert started(mixed.submit(2, size=3, costs=(3.0, 2.0, 2.0))) == [(FAST, 0)]


def test_workers_of_one_kind_take_what_comes(pool_of):
    pool = pool_of(2)
    assert started(pool.submit(0, size=16, costs=(1.0,) * 16)) == [(0, 0), (1, 1)]


def test_a_pool_may_be_mixed_again_after_a_time_of_one_kind(mixed):
    mixed.lose(SLOW)
    mixed.tell(WorkerReady(2, SLOW))
    assert started(mixed.submit(1, size=3, costs=(3.0, 2.0, 2.0))) == [(FAST, 0)]
    assert started(mixed.finish(2, busy_s=3.0)) == [(FAST, 1)]


def test_costs_that_cannot_be(pool_of):
    for costs in [(1.0,), (1.0, 2.0), (-1.0, -2.0), (float("inf"), 1.0), (2.0, float("nan"))]:
        with pytest.raises(InternalError):
            pool_of(1).submit(0, size=2, costs=costs)


def test_a_task_with_costs_is_complete_and_no_gang():
    assert TaskSpec(0, 0, 1, costs=(1.0,)).is_sound
    assert not TaskSpec(0, 0, 1, is_open=True, costs=(1.0,)).is_sound
    assert not TaskSpec(0, 0, 1, is_gang=True, costs=(1.0,)).is_sound
