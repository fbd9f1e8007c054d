"""A recorded pool says what its scheduler was told, and how that was set."""

import json
import os

import pytest

from raypool import PoolBrokenError, Profile, parpool
from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.engine.trace import TraceWriter, decode, encode, read_settings, read_trace
from raypool.errors import LossReason
from raypool.testing import replay

EVENTS = [
    m.TaskSubmitted(TaskSpec(3, 1, 4, places=(0, 2), timeout_s=1.5, is_fresh=True)),
    m.ItemsAdded(3, 2, is_open=True),
    m.CancelRequested(3),
    m.CancelRequested(3, 1),
    m.DrainRequested(3),
    m.FirstRequested(3, 1),
    m.ItemsAdded(3, 1, is_open=None),
    m.StopRequested(3),
    m.WorkerReady(1),
    m.TaskSubmitted(TaskSpec(4, 1, 2)),
    m.WorkerLost(1, LossReason.STOPPED),
    m.PlaceLeaving(2, 12.5),
    m.PlaceLost(2, LossReason.NODE),
    m.AttemptFinished(1, 7, (Report(2, 2, (5,), 0.5, (6,)), Report(0)), is_spent=True),
    m.AttemptNarrowed(1, 7, (Report(2, 1, (5,), 0.5), Report(0)), (1, 0)),
    m.TimerFired("timeout", 1, 7),
    m.ResizeRequested((1, 2), 3, (4, 5)),
    m.ShutdownRequested(cancel_queued=True),
]


def test_every_event_comes_back_as_it_was():
    for event in EVENTS:
        assert decode(encode(2.5, event)) == (2.5, event)
        json.loads(encode(2.5, event))


@pytest.fixture
def path(tmp_path):
    """Return a trace of a pool of one worker that was parked, and used again."""
    path = tmp_path / "trace.jsonl"
    trace = TraceWriter(path, start_timeout_s=60.0, idle_timeout_s=10.0)
    trace(0.0, m.ResizeRequested(add=(0,)))
    trace(1.0, m.WorkerReady(0))
    trace(11.0, m.TimerFired("idle", -1))
    trace(12.0, m.TaskSubmitted(TaskSpec(0, 0)))
    trace(13.0, m.WorkerReady(1))
    trace.close()
    return path


def test_the_settings_stand_at_the_beginning(path):
    assert read_settings(path) == {"start_timeout_s": 60.0, "idle_timeout_s": 10.0}
    assert len(list(read_trace(path))) == 5


def test_what_is_replayed_has_the_same_settings(path):
    course = replay(path)
    assert course[2][1] == [m.ParkWorker(0)]
    assert type(course[-1][1][0]).__name__ == "RunTasks"


def test_a_trace_without_settings_can_be_replayed(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(encode(0.0, m.ResizeRequested(add=(0,))) + "\n")
    assert len(replay(path)) == 1


@pytest.mark.parametrize("left", ["", '{"settings": {"start_time'])
def test_a_trace_that_was_cut_off_at_its_beginning_is_empty(tmp_path, left):
    """Its driver was killed just then."""
    trace = tmp_path / "events.jsonl"
    trace.write_text(left)
    assert replay(trace) == []


def test_a_trace_that_can_no_longer_be_written_does_not_end_the_pool(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with parpool(profile=Profile(backend="inline", trace=tmp_path / "pipe"), quiet=True) as pool:
        os.close(reader)
        assert pool.parfeval(abs, -3).result(0) == 3
    assert "The trace ends here" in caplog.text


def test_a_driver_that_fails_again_as_it_closes_ends_all_futures(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("a mistake of raypool's own")

    pool = parpool(profile=Profile(backend="inline", trace=tmp_path / "trace"), quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "__call__", fail)
        patch.setattr(TraceWriter, "close", fail)
        future = pool.parfeval(abs, -3)
    with pytest.raises(PoolBrokenError, match="driver has failed"):
        future.result(0)
    pool.shutdown()
    assert "was not clean" in caplog.text
    pool._engine._trace.close()
