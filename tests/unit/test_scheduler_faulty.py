"""Places that fail every task while others do well are taken out; tasks that fail everywhere take
out none.
"""

import pytest

from raypool.core.messages import DropPlace, RunGang, Vacate
from raypool.core.model import PoolState, Report
from raypool.errors import LossReason

FAULTY = LossReason.FAULTY
FAILED = Report(1, failed=1, busy_s=1.0)


def call_of(pool, place):
    """Return the attempt that the worker in a place is at; None: it has none."""
    calls = pool.calls_of(pool.worker_in(place)) if place in pool.places else []
    return calls[0].attempt_id if calls else None


def outlast(pool):
    """Let calls elsewhere run for longer than those that have failed; return the commands."""
    pool.now += 60.0
    return pool.fire("hold")


def fail_all(pool, place, most=100):
    """Let a place fail whatever it gets; return how often, until it gets nothing more, and what is
    said of that when calls elsewhere have run for longer.
    """
    for number in range(most):
        attempt_id = call_of(pool, place)
        if attempt_id is None:
            commands = outlast(pool)
            return number, drop_among(commands, place)
        drop = drop_among(pool.finish(attempt_id, FAILED), place)
        if drop is not None:
            return number + 1, drop
    return most, None


def drop_among(commands, place):
    """Return the command that says why a place is given up; None: there is none."""
    for command in commands:
        if isinstance(command, DropPlace):
            assert Vacate(place) in commands
            return command
    return None


@pytest.fixture
def busy(pool_of):
    """Return a pool of four workers in a loop of many long items, each at its first."""
    pool = pool_of(4)
    pool.submit(0, size=1000)
    return pool


def test_a_place_that_fails_item_after_item_is_taken_out_while_others_work(busy):
    assert fail_all(busy, 2) == (9, DropPlace(2, FAULTY, failed=9, finished=0))
    assert busy.size == 3
    assert busy.state is PoolState.OPEN


def test_one_that_fails_first_is_not_taken_out_if_others_fail_later(busy):
    """All four import a library; the first to have it meets the error in the function ten times."""
    while (attempt_id := call_of(busy, 2)) is not None:
        busy.finish(attempt_id, Report(1, failed=1, busy_s=20.0))
    busy.now = 39.9
    assert busy.fire("hold") == [], "calls elsewhere have run for less than twice as long"
    busy.finish(call_of(busy, 0), FAILED)
    assert call_of(busy, 2) is not None
    assert outlast(busy) == []
    assert busy.size == 4


def test_a_held_place_goes_at_once_when_a_call_elsewhere_succeeds(busy):
    for _ in range(9):
        busy.finish(call_of(busy, 2), FAILED)
    assert call_of(busy, 2) is None
    commands = busy.finish(call_of(busy, 0))
    assert drop_among(commands, 2) == DropPlace(2, FAULTY, failed=9, finished=1)


def test_a_gang_takes_no_more_than_it_needs_of_those_that_are_free_at_once(pool_of):
    """One worker ends a call, by which the place of the other is found not to be faulty."""
    pool = pool_of(2)
    pool.submit(0, size=10)
    for _ in range(9):
        pool.finish(call_of(pool, 0), FAILED)
    pool.submit(1, is_gang=True)
    commands = pool.finish(call_of(pool, 1), FAILED)
    assert [command.runs[0].slices[0].task_id for command in commands if type(command) is RunGang]
    assert pool.tasks == [1]


def test_a_held_place_works_again_when_nobody_else_is_left(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=1000)
    for _ in range(9):
        pool.finish(call_of(pool, 0), FAILED)
    assert call_of(pool, 0) is None
    pool.lose(pool.worker_in(1), LossReason.NODE)
    assert call_of(pool, 0) is not None


def test_the_better_others_do_the_sooner(busy):
    for _ in range(5):
        busy.finish(call_of(busy, 2), FAILED)
        for place in (0, 1, 3):
            busy.finish(call_of(busy, place))
    assert call_of(busy, 2) is None
    assert busy.size == 3


def test_one_success_makes_up_for_all_failures(busy):
    for _ in range(5):
        assert fail_all(busy, 2, most=8) == (8, None)
        busy.finish(call_of(busy, 2))
    assert busy.size == 4


def test_what_was_handed_back_says_nothing(busy):
    assert fail_all(busy, 2, most=8) == (8, None)
    busy.finish(call_of(busy, 2), Report(0))
    assert fail_all(busy, 2) == (1, DropPlace(2, FAULTY, failed=9, finished=0))


def test_a_function_that_fails_everywhere_takes_out_nobody(busy):
    for _ in range(50):
        for place in range(4):
            busy.finish(call_of(busy, place), FAILED)
    assert busy.size == 4


def test_nor_does_one_that_fails_everywhere_from_some_item_on(busy):
    for is_good in [True] * 50 + [False] * 50:
        for place in range(4):
            busy.finish(call_of(busy, place), *(() if is_good else (FAILED,)))
    assert busy.size == 4


def test_nor_one_that_often_fails(busy):
    for number in range(100):
        for place in range(4):
            if number % 10 == place:
                busy.finish(call_of(busy, place))
            else:
                busy.finish(call_of(busy, place), FAILED)
    assert busy.size == 4


def test_every_fourth_item_may_fail_with_four_workers_in_step(busy):
    for _ in range(60):
        for place in range(4):
            attempt_id = call_of(busy, place)
            (piece,) = busy.calls[attempt_id].slices
            busy.finish(attempt_id, *((FAILED,) if piece.start % 4 == 3 else ()))
    assert busy.size == 4


def test_so_may_two_of_eight(pool_of):
    pool = pool_of(8)
    pool.submit(0, size=5000)
    for _ in range(100):
        for place in range(8):
            attempt_id = call_of(pool, place)
            (piece,) = pool.calls[attempt_id].slices
            pool.finish(attempt_id, *((FAILED,) if piece.start % 8 > 5 else ()))
    assert pool.size == 8


def test_calls_in_step_are_no_fault_of_their_worker(pool_of):
    pool = pool_of(4)
    for task_id in range(400):
        pool.submit(task_id)
    for _ in range(60):
        for place in range(4):
            attempt_id = call_of(pool, place)
            (piece,) = pool.calls[attempt_id].slices
            pool.finish(attempt_id, *((FAILED,) if piece.task_id % 4 == 3 else ()))
    assert pool.size == 4


def test_an_item_that_fails_in_a_place_again_and_again_goes_elsewhere(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=50, retries=50)
    again = Report(1, failed=1, retry=(0,), busy_s=1.0)
    for _ in range(3):
        pool.finish(call_of(pool, 0), again)
    assert pool.calls[call_of(pool, 0)].slices[0].start == 2
    assert pool.finish(call_of(pool, 1))[0] == pool.runs(1, 5, (0, 0, 1, 4))


def test_a_function_that_nobody_else_runs_says_nothing(pool_of):
    pool = pool_of(2)
    pool.submit(0, fn_id=1)
    for task_id in range(1, 60):
        pool.submit(task_id, fn_id=2)
        pool.finish(call_of(pool, 1), FAILED)
    assert pool.size == 2


def test_what_a_function_does_in_other_hands_counts_by_function(pool_of):
    """A part of the pool works on something that fails, and the other part on something that does
    not.
    """
    pool = pool_of(4)
    pool.submit(0, fn_id=1, size=1000, places=(0, 1))
    pool.submit(1, fn_id=2, size=1000, places=(2, 3))
    for _ in range(60):
        for place in range(4):
            pool.finish(call_of(pool, place), *(() if place < 2 else (FAILED,)))
    assert pool.size == 4


def test_calls_count_as_items_of_a_loop_do(pool_of):
    pool = pool_of(3)
    for task_id in range(50):
        pool.submit(task_id)
    assert fail_all(pool, 1) == (9, DropPlace(1, FAULTY, failed=9, finished=0))


def test_the_last_place_is_never_taken_out(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=1000)
    assert fail_all(pool, 0)[0] == 9
    for _ in range(20):
        pool.finish(call_of(pool, 1))
    assert fail_all(pool, 1, most=200) == (200, None)


def test_items_that_fail_one_after_the_other_do_not_take_out_place_after_place(busy):
    """A failing stretch of a loop looks like a broken place, once."""
    assert fail_all(busy, 2)[0] == 9
    assert fail_all(busy, 1, most=30) == (30, None)


def test_a_place_where_workers_die_is_taken_out_and_no_worker_follows(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=1000, retry_delay_s=300.0)
    for _ in range(7):
        pool.lose(pool.worker_in(1))
        pool.fire("start", pool.worker_in(1))
        pool.ready(pool.worker_in(1))
    pool.finish(call_of(pool, 2))
    commands = pool.lose(pool.worker_in(1))
    assert commands[:2] == [Vacate(1), DropPlace(1, FAULTY, failed=8, finished=1)]
    assert [command.kind for command in commands[2:]] == ["retry"], "what it lost runs elsewhere"
    assert pool.counts.failed == 0


def test_an_item_that_fails_again_and_again_counts_once(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=2, retries=50)
    for _ in range(50):
        pool.finish(call_of(pool, 0), Report(1, failed=1, retry=(0,), busy_s=1.0))
    assert pool.size == 2


def test_items_that_share_a_call_count_as_one(pool_of):
    pool = pool_of(2)
    pool.submit(0, size=1000, chunk_size=10)
    for _ in range(8):
        pool.finish(call_of(pool, 0), Report(10, failed=10, busy_s=10.0))
    assert pool.size == 2
    pool.finish(call_of(pool, 0), Report(10, failed=10, busy_s=10.0))
    assert DropPlace(0, FAULTY, failed=90, finished=0) in outlast(pool)


def test_items_that_time_out_count(pool_of):
    pool = pool_of(3)
    pool.submit(0, size=1000, timeout_s=5.0)
    for _ in range(9):
        attempt_id = call_of(pool, 1)
        pool.fire("timeout", 1, attempt_id)
        pool.finish(attempt_id, Report(0))
    assert DropPlace(1, FAULTY, failed=9, finished=0) in outlast(pool)


def test_ranks_do_not_count(pool_of):
    pool = pool_of(2)
    for number in range(30):
        pool.submit(number, fn_id=3, is_gang=True, places=(0,), size=1)
        pool.finish(call_of(pool, 0), FAILED)
    pool.submit(30, fn_id=3, places=(1,), size=2)
    for number in range(31, 60):
        pool.submit(number, fn_id=3, is_gang=True, places=(0,), size=1)
        pool.finish(call_of(pool, 0), FAILED)
    assert pool.size == 2


def test_what_is_bound_to_a_worker_does_not_count(pool_of):
    pool = pool_of(2)
    pool.submit(0, fn_id=3)
    for number in range(1, 30):
        pool.submit(number, fn_id=3, place=1)
        pool.finish(call_of(pool, 1), FAILED)
    assert pool.size == 2


@pytest.mark.parametrize("reason", [LossReason.STOPPED, LossReason.PREEMPTED])
def test_losses_that_are_nobodys_fault_do_not_count(pool_of, reason):
    pool = pool_of(2)
    pool.submit(0, size=1000)
    for _ in range(30):
        worker_id = pool.worker_in(1)
        pool.lose(worker_id, reason)
        pool.ready(pool.worker_in(1))
    assert pool.size == 2


def test_what_is_bound_to_a_faulty_place_fails_with_it(busy):
    busy.submit(1, place=2)
    fail_all(busy, 2, most=8)
    busy.finish(call_of(busy, 2), FAILED)
    assert busy.fails((1, 0, 1), FAULTY) in outlast(busy)


def test_a_call_sent_ahead_ends_first(pool_of):
    pool = pool_of(3)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, size=100_000)
    while (attempt_id := call_of(pool, 0)) is not None:
        count = sum(piece.stop - piece.start for piece in pool.calls[attempt_id].slices)
        pool.finish(attempt_id, Report(count, failed=count, busy_s=0.001 * count))
    assert [type(command) for command in outlast(pool)] == [Vacate, DropPlace]
    assert pool.size == 2


def test_what_is_left_to_others_lets_nothing_wait_that_runs_alone(pool_of):
    """The next call after the one that a suspected worker skips may have lost a worker before."""
    pool = pool_of(2)
    pool.get_used_to(0, task_id=0)
    pool.submit(1, priority=1)
    for task_id in (2, 3, 4):
        pool.submit(task_id)
        pool.finish(call_of(pool, 1), Report(1, failed=1, busy_s=0.001))
    pool.submit(5)
    pool.lose(pool.worker_in(0))  # task 1 is to run again, alone
    for task_id in range(6, 30):
        pool.submit(task_id)
    pool.submit(30, priority=2)
    first, *ahead = pool.calls_of(pool.worker_in(1))
    assert not any(piece.task_id == 1 for call in ahead for piece in call.slices)
    for call in (first, *ahead):
        pool.finish(call.attempt_id)
    assert pool.calls_of(pool.worker_in(1))


def test_a_place_that_comes_anew_begins_anew(busy):
    fail_all(busy, 2)
    busy.resize(add=[2])
    busy.ready(4)
    assert fail_all(busy, 2, most=8) == (8, None)
