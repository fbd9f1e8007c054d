"""Workers of a pool that is not used end, and come back when it is."""

import pytest

from raypool.core.messages import EndTask, ParkWorker, RunGang, SetTimer, Vacate
from raypool.core.model import TaskState
from raypool.errors import LossReason

FINISHED = TaskState.FINISHED
IDLE_S = 100.0


@pytest.fixture
def pool(pool_of):
    """Return a pool of two workers that was opened at time 0."""
    return pool_of(2, idle_timeout_s=IDLE_S)


@pytest.fixture
def parked(pool):
    """Return one whose workers are parked."""
    pool.now = IDLE_S
    pool.fire("idle")
    return pool


def timer(at):
    """Expect the timer."""
    return SetTimer(at, "idle", -1)


def test_there_is_no_timer_unless_asked_for(pool_of):
    pool = pool_of(1)
    pool.submit(0)
    assert pool.finish(0)[-1] == EndTask(0, FINISHED)


def test_it_is_set_when_the_pool_opens_and_not_again_however_often_it_is_used(pool_of):
    pool = pool_of(0, idle_timeout_s=IDLE_S)
    assert pool.resize(add=[0]) == [*pool.starts(0, place=0), timer(IDLE_S)]
    assert pool.ready(0) == []
    pool.submit(0)
    assert pool.finish(0)[-1] == EndTask(0, FINISHED)
    pool.submit(1)
    assert pool.finish(1)[-1] == EndTask(1, FINISHED)


def test_when_it_fires_all_workers_end_and_their_places_stay(pool):
    pool.now = IDLE_S
    assert pool.fire("idle") == [ParkWorker(0), ParkWorker(1)]
    assert [pool.worker_in(place) for place in pool.places] == [2, 3]


def test_a_use_in_between_resets_the_time(pool):
    pool.now = 30.0
    pool.submit(0)
    pool.now = 40.0
    pool.finish(0)
    pool.now = IDLE_S
    assert pool.fire("idle") == [timer(140.0)]
    pool.now = 140.0
    assert pool.fire("idle") == [ParkWorker(0), ParkWorker(1)]


def test_a_pool_in_use_when_it_fires_sets_the_next_when_it_is_no_longer(pool):
    pool.submit(0)
    pool.now = IDLE_S
    assert pool.fire("idle") == []
    pool.now = 130.0
    assert pool.finish(0)[-1] == timer(230.0)


def test_a_worker_that_is_starting_then_is_waited_for(pool):
    pool.now = 90.0
    pool.lose(1)
    pool.now = IDLE_S
    assert pool.fire("idle") == [timer(200.0)]
    pool.ready(2)
    pool.now = 200.0
    assert pool.fire("idle") == [ParkWorker(0), ParkWorker(1)]


def test_the_time_runs_from_where_the_last_worker_was_ready(pool_of):
    """Who opens a pool finds it at work, however long its workers took to come up."""
    pool = pool_of(0, idle_timeout_s=IDLE_S)
    pool.resize(add=[0])
    pool.now = 90.0
    assert pool.ready(0) == []
    pool.now = IDLE_S
    assert pool.fire("idle") == [timer(190.0)]
    pool.now = 190.0
    assert pool.fire("idle") == [ParkWorker(0)]


def test_a_worker_that_has_not_come_back_from_a_cancelled_task_is_waited_for(pool):
    pool.submit(0)
    pool.cancel(0)
    pool.now = IDLE_S
    assert pool.fire("idle") == [timer(200.0)]


def test_a_task_that_arrives_starts_them_all_under_new_numbers(parked):
    assert parked.submit(0) == [*parked.starts(2, place=0), *parked.starts(3, place=1)]
    assert parked.submit(1) == []
    assert parked.ready(3) == [parked.runs(3, 0, (0, 0, 1))]
    assert parked.ready(2) == [parked.runs(2, 1, (1, 0, 1))]


def test_they_end_again_after_that(parked):
    parked.submit(0)
    parked.ready(2)
    parked.ready(3)
    parked.now = 150.0
    assert parked.finish(0)[-1] == timer(250.0)
    parked.now = 250.0
    assert parked.fire("idle") == [ParkWorker(0), ParkWorker(1)]


def test_a_task_that_has_nothing_to_run_starts_nobody(parked):
    assert parked.submit(0, size=0) == [EndTask(0, FINISHED)]


def test_a_loop_whose_items_are_still_to_come_starts_them(parked):
    assert parked.submit(0, size=0, is_open=True)[0] == parked.starts(2, place=0)[0]


def test_news_of_workers_that_were_ended_are_dropped(parked):
    assert parked.lose(0) == []
    assert parked.fire("ready", 1) == []


def test_a_worker_that_does_not_come_back_is_lost_as_any_other(parked):
    parked.submit(0)
    parked.now += 60.0
    assert parked.fire("ready", 2) == parked.starts(4, place=0)


def test_a_task_for_one_place_waits_for_the_worker_that_starts_there(parked):
    parked.submit(0, place=1)
    assert parked.ready(2) == []
    assert parked.ready(3) == [parked.runs(3, 0, (0, 0, 1))]


def test_tasks_for_some_places_and_gangs_wait_too(parked):
    parked.submit(0, places=(1,))
    parked.submit(1, size=2, is_gang=True)
    assert parked.ready(2) == []
    assert parked.ready(3) == [parked.runs(3, 0, (0, 0, 1))]
    assert parked.finish(0)[0] == RunGang(
        (parked.runs(2, 1, (1, 0, 1)), parked.runs(3, 2, (1, 1, 2)))
    )


def test_a_pool_may_shrink_meanwhile(parked):
    assert parked.resize(remove=1) == [Vacate(1)]
    assert parked.submit(0) == parked.starts(2, place=0)


def test_a_pool_may_grow_meanwhile_and_the_new_worker_ends_in_its_turn(parked):
    assert parked.resize(add=[5]) == [*parked.starts(4, place=5), timer(200.0)]
    parked.ready(4)
    parked.now = 200.0
    assert parked.fire("idle") == [ParkWorker(5)]
    assert [type(command).__name__ for command in parked.submit(0)] == [
        "StartWorker",
        "SetTimer",
    ] * 3


def test_a_pool_may_close_meanwhile(parked):
    assert parked.shutdown()[:2] == [Vacate(0), Vacate(1)]
    assert parked.fire("idle") == []


def test_a_pool_that_has_closed_before_the_time_parks_nobody(pool):
    pool.shutdown()
    assert pool.fire("idle") == []


def test_a_pool_that_is_about_to_close_parks_nobody(pool):
    pool.submit(0)
    pool.shutdown()
    pool.now = IDLE_S
    assert pool.fire("idle") == []


def test_a_broken_pool_parks_nobody(pool_of):
    pool = pool_of(1, idle_timeout_s=IDLE_S)
    pool.lose(0)
    for worker_id in (1, 2, 3):
        pool.fire("start", worker_id)
        pool.lose(worker_id, LossReason.START)
    pool.now = IDLE_S
    assert pool.fire("idle") == []
