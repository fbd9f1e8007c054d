"""What cannot happen raises an error that tells the story, and changes nothing."""

import pytest

from raypool.core.messages import AttemptFinished, ResizeRequested, TimerFired, WorkerReady
from raypool.core.model import Report
from raypool.core.scheduler import STORY_LENGTH
from raypool.errors import InternalError

IMPOSSIBLE = {
    "a task id again": lambda pool: pool.submit(1),
    "an older task id": lambda pool: pool.submit(0),
    "a negative size": lambda pool: pool.submit(9, size=-1),
    "negative retries": lambda pool: pool.submit(9, retries=-1),
    "no workers allowed": lambda pool: pool.submit(9, max_workers=0),
    "empty chunks": lambda pool: pool.submit(9, chunk_size=0),
    "a gang without a size": lambda pool: pool.submit(9, is_gang=True, is_open=True),
    "a gang on one worker": lambda pool: pool.submit(9, is_gang=True, place=0),
    "a gang that does not wait for its ranks": lambda pool: pool.submit(
        9, is_gang=True, fail_fast=True
    ),
    "a gang of which less may run": lambda pool: pool.submit(
        9, is_gang=True, size=2, max_workers=1
    ),
    "items for a task to come": lambda pool: pool.add_items(2, 1, is_open=True),
    "items for a closed task": lambda pool: pool.add_items(0, 1, is_open=False),
    "fewer items": lambda pool: pool.add_items(1, -1, is_open=True),
    "a task to come is cancelled": lambda pool: pool.cancel(2),
    "a worker is ready twice": lambda pool: pool.ready(0),
    "a worker to come is ready": lambda pool: pool.ready(2),
    "a worker to come is lost": lambda pool: pool.lose(2),
    "a timer of a worker to come": lambda pool: pool.fire("ready", 2),
    "a place again": lambda pool: pool.resize(add=[5, 1]),
    "a place twice": lambda pool: pool.resize(add=[5, 5]),
    "fewer than none are to stay": lambda pool: pool.tell(ResizeRequested(size=-1)),
    "an attempt to come": lambda pool: pool.tell(AttemptFinished(0, 1, (Report(1),))),
    "an answer of a worker to come": lambda pool: pool.tell(AttemptFinished(2, 0, (Report(1),))),
    "too few reports": lambda pool: pool.tell(AttemptFinished(0, 0, ())),
    "too many reports": lambda pool: pool.finish(0, Report(1), Report(1)),
    "more done than sent": lambda pool: pool.finish(0, Report(4)),
    "less than nothing done": lambda pool: pool.finish(0, Report(-1)),
    "more failed than done": lambda pool: pool.finish(0, Report(1, failed=2)),
    "more to retry than failed": lambda pool: pool.finish(0, Report(3, failed=1, retry=(0, 1))),
    "retries out of order": lambda pool: pool.finish(0, Report(3, failed=2, retry=(1, 0))),
    "retries twice": lambda pool: pool.finish(0, Report(3, failed=2, retry=(1, 1))),
    "a retry of what was not begun": lambda pool: pool.finish(0, Report(1, failed=1, retry=(1,))),
    "a retry of what was not sent": lambda pool: pool.finish(0, Report(3, failed=1, retry=(3,))),
}


def test_impossible_events_raise_and_change_nothing(pool_of):
    for what, tell in IMPOSSIBLE.items():
        pool = pool_of(2)
        pool.submit(0, size=3, chunk_size=3)
        pool.submit(1, size=0, is_open=True)
        with pytest.raises(InternalError, match="bug in raypool"):
            tell(pool)
        assert pool.finish(0)[0] == pool.settles(0, (0, 0, 3)), what
        pool.add_items(1, 1, is_open=False)
        assert pool.submit(2) == [pool.runs(1, 2, (2, 0, 1))]
        assert pool.places == [0, 1]


def test_the_error_tells_the_story_of_the_worker(pool_of):
    pool = pool_of(2)
    pool.lose(1)
    pool.submit(0)
    pool.now = 2.5
    with pytest.raises(InternalError) as caught:
        pool.ready(0)
    assert caught.value.story == (
        "0.000000 WorkerReady(worker_id=0)",
        "2.500000 WorkerReady(worker_id=0)",
    )
    assert caught.value.story[-1] in str(caught.value)


def test_the_error_tells_the_story_of_the_task(pool_of):
    pool = pool_of(1)
    pool.submit(1, size=0, is_open=True)
    pool.submit(11)
    pool.cancel(1)
    with pytest.raises(InternalError) as caught:
        pool.submit(1)
    assert [line.split()[1].split("(")[0] for line in caught.value.story] == [
        "TaskSubmitted",
        "CancelRequested",
        "TaskSubmitted",
    ]
    assert not any("task_id=11" in line for line in caught.value.story)


def test_the_whole_story_is_kept_for_a_while(pool_of):
    pool = pool_of(1)
    assert [line.split()[1] for line in pool.scheduler.story()] == [
        "ResizeRequested(add=(0,),",
        "WorkerReady(worker_id=0)",
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
