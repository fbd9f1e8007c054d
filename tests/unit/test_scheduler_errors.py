"""What cannot happen raises an error that tells the story, and changes nothing."""

import pytest

from raypool.core.messages import AttemptFinished, TimerFired, WorkerReady
from raypool.core.model import Report
from raypool.core.scheduler import STORY_LENGTH
from raypool.errors import InternalError


@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param(lambda pool: pool.submit(1), id="a task id again"),
        pytest.param(lambda pool: pool.submit(0), id="an older task id"),
        pytest.param(lambda pool: pool.submit(9, size=-1), id="a negative size"),
        pytest.param(lambda pool: pool.submit(9, retries=-1), id="negative retries"),
        pytest.param(lambda pool: pool.submit(9, max_workers=0), id="no workers allowed"),
        pytest.param(lambda pool: pool.submit(9, chunk_size=0), id="empty chunks"),
        pytest.param(lambda pool: pool.submit(9, is_gang=True, is_open=True), id="a gang without a size"),
        pytest.param(lambda pool: pool.submit(9, is_gang=True, place=0), id="a gang on one worker"),
        pytest.param(lambda pool: pool.submit(9, is_gang=True, fail_fast=True), id="a gang that does not wait for its ranks"),
        pytest.param(lambda pool: pool.submit(9, is_gang=True, size=2, max_workers=1), id="a gang of which less may run"),
        pytest.param(lambda pool: pool.add_items(2, 1, is_open=True), id="items for a task to come"),
        pytest.param(lambda pool: pool.add_items(0, 1, is_open=False), id="items for a closed task"),
        pytest.param(lambda pool: pool.add_items(1, -1, is_open=True), id="fewer items"),
        pytest.param(lambda pool: pool.cancel(2), id="a task to come is cancelled"),
        pytest.param(lambda pool: pool.ready(0), id="a worker is ready twice"),
        pytest.param(lambda pool: pool.ready(2), id="a worker to come is ready"),
        pytest.param(lambda pool: pool.lose(2), id="a worker to come is lost"),
        pytest.param(lambda pool: pool.fire("ready", 2), id="a timer of a worker to come"),
        pytest.param(lambda pool: pool.resize(add=[5, 1]), id="a place again"),
        pytest.param(lambda pool: pool.resize(add=[5, 5]), id="a place twice"),
        pytest.param(lambda pool: pool.resize(remove=-1), id="fewer than none are to go"),
        pytest.param(lambda pool: pool.tell(AttemptFinished(0, 1, (Report(1),))), id="an attempt to come"),
        pytest.param(lambda pool: pool.tell(AttemptFinished(2, 0, (Report(1),))), id="an answer of a worker to come"),
        pytest.param(lambda pool: pool.tell(AttemptFinished(0, 0, ())), id="too few reports"),
        pytest.param(lambda pool: pool.finish(0, Report(1), Report(1)), id="too many reports"),
        pytest.param(lambda pool: pool.finish(0, Report(4)), id="more done than sent"),
        pytest.param(lambda pool: pool.finish(0, Report(-1)), id="less than nothing done"),
        pytest.param(lambda pool: pool.finish(0, Report(1, failed=2)), id="more failed than done"),
        pytest.param(lambda pool: pool.finish(0, Report(3, failed=1, retry=(0, 1))), id="more to retry than failed"),
        pytest.param(lambda pool: pool.finish(0, Report(3, failed=2, retry=(1, 0))), id="retries out of order"),
        pytest.param(lambda pool: pool.finish(0, Report(3, failed=2, retry=(1, 1))), id="retries twice"),
        pytest.param(lambda pool: pool.finish(0, Report(1, failed=1, retry=(1,))), id="a retry of what was not begun"),
        pytest.param(lambda pool: pool.finish(0, Report(3, failed=1, retry=(3,))), id="a retry of what was not sent"),
    ],
)
def test_impossible_events_raise_and_change_nothing(pool_of, impossible):
    pool = pool_of(2)
    pool.submit(0, size=3, chunk_size=3)
    pool.submit(1, size=0, is_open=True)
    with pytest.raises(InternalError, match="mistake in raypool"):
        impossible(pool)
    assert pool.finish(0)[0] == pool.settles(0, (0, 0, 3))
    pool.add_items(1, 1, is_open=False)
    assert pool.submit(2) == [pool.runs(1, 2, (2, 0, 1))]
    assert sorted(pool.scheduler.crew.places) == [0, 1]


def test_the_error_tells_the_story_of_the_worker(pool_of):
    pool = pool_of(2)
    pool.lose(1)
    pool.submit(0)
    pool.now = 2.5
    with pytest.raises(InternalError) as caught:
        pool.ready(0)
    assert caught.value.story == ("0.000000 WorkerReady(worker_id=0, kind=0)", "2.500000 WorkerReady(worker_id=0, kind=0)")
    assert caught.value.story[-1] in str(caught.value)


def test_the_error_tells_the_story_of_the_task(pool_of):
    pool = pool_of(1)
    pool.submit(1, size=0, is_open=True)
    pool.submit(11)
    pool.cancel(1)
    with pytest.raises(InternalError) as caught:
        pool.submit(1)
    assert [line.split()[1].split("(")[0] for line in caught.value.story] == ["TaskSubmitted", "CancelRequested", "TaskSubmitted"]
    assert not any("task_id=11" in line for line in caught.value.story)


def test_the_whole_story_is_kept_for_a_while(pool_of):
    pool = pool_of(1)
    assert [line.split()[1] for line in pool.scheduler.story()] == [
        "ResizeRequested(add=(0,),",
        "WorkerReady(worker_id=0,",
    ]
    for task_id in range(STORY_LENGTH + 50):
        pool.submit(task_id)
    assert len(pool.scheduler.story()) == STORY_LENGTH


def test_the_driver_may_send_a_timer_of_no_worker_through(pool_of):
    pool = pool_of(1)
    assert pool.tell(TimerFired("barrier", -1)) == []


def test_an_event_of_an_unknown_kind_is_an_error(pool_of):
    with pytest.raises(KeyError):
        pool_of(1).tell(("WorkerReady", 0))
    assert pool_of(1).scheduler.story(worker_id=0)[0].endswith(repr(WorkerReady(0)))
