"""Calls on their way: which of them a worker is at, and what of a loop is running then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypool.core.model import Slice, TaskState
from raypool.engine import in_flight, loop_work
from raypool.engine.backend import Function, WorkerInfo
from raypool.engine.casualties import Casualties
from raypool.engine.in_flight import InFlight, Sent
from raypool.engine.loop_work import LoopOptions, LoopWork
from raypool.errors import LossReason, TaskError

HERE = WorkerInfo(0, "here", 1)
RUNS, WAITS = Slice(0, 0, 5, 1), Slice(0, 5, 9, 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(in_flight, "time", clock)
    monkeypatch.setattr(loop_work, "time", clock)
    return clock


def loop(size: int = 100) -> LoopWork:
    return LoopWork(Function(0, None, "train"), range(size), LoopOptions("train"))


def told(work: LoopWork) -> list[tuple[Any, ...]]:
    return [(miss.item, miss.row.status, miss.row.started_at, miss.row.duration_s) for miss in work.misses]


def test_a_worker_is_at_its_first_call(clock: Clock) -> None:
    calls = InFlight()
    first, second, elsewhere = calls.send(7, 1), calls.send(7, 2), calls.send(8, 3)
    assert (first.began_at, second.began_at, elsewhere.began_at) == (100.0, None, 100.0)
    first.sent.append(Sent(Slice(0, 0, 5, 1), None))
    clock.now = 103.0
    assert calls.bring_back(7, 1) == first.sent
    assert first.is_over
    assert second.began_at == 103.0
    assert calls.bring_back(7, 1) == []


def test_the_calls_of_a_worker_that_is_lost_are_over(clock: Clock) -> None:
    calls = InFlight()
    first, second = calls.send(7, 1), calls.send(7, 2)
    assert calls.lose(7) == {1: first, 2: second}
    assert (first.is_running, second.is_running) == (False, False)
    assert calls.lose(7) == {}
    assert calls.bring_back(7, 2) == []


def test_only_what_a_worker_is_at_is_cancelled(clock: Clock) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 2, 1), HERE, calls.send(7, 1))
    work.begin(Slice(0, 2, 4, 1), HERE, calls.send(7, 2))
    assert work.running == {0: (Slice(0, 0, 2, 1), 100.0)}
    clock.now = 105.0
    calls.bring_back(7, 1)
    work.begin(Slice(0, 4, 6, 1), HERE, calls.send(7, 3))
    assert work.running == {0: (Slice(0, 2, 4, 1), 105.0)}
    clock.now = 106.0
    work.end(TaskState.CANCELLED, None)
    assert told(work) == [(2, "cancelled", 105.0, 1.0), (3, "cancelled", 105.0, 1.0)]


def test_what_waits_behind_a_call_of_another_loop_does_not_run(clock: Clock) -> None:
    calls, work, other = InFlight(), loop(), loop()
    other.begin(Slice(0, 0, 2, 1), HERE, calls.send(7, 1))
    work.begin(Slice(1, 0, 2, 1), HERE, calls.send(7, 2))
    assert work.running == {}
    work.end(TaskState.CANCELLED, None)
    assert told(work) == []


def test_what_a_call_has_handed_back_does_not_run(clock: Clock) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 9, 1), HERE, calls.send(7, 1))
    calls.bring_back(7, 1)  # whatever of it was begun
    assert work.running == {}


def test_what_raises_is_told_of_after_the_next_calls_were_sent(clock: Clock) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 2, 1), HERE, calls.send(7, 1))
    clock.now = 104.0
    calls.bring_back(7, 1)
    work.begin(Slice(0, 2, 4, 1), HERE, calls.send(7, 2))
    work.begin(Slice(0, 4, 6, 1), HERE, calls.send(7, 3))
    work.miss(Slice(0, 1, 2, 1), HERE, KeyError("again"))
    assert told(work) == [(1, "retried", 100.0, 4.0)]


def test_what_was_charged_and_may_not_have_begun_has_no_time(clock: Clock) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 2, 1), HERE, calls.send(7, 1))
    work.begin(Slice(0, 2, 3, 1), HERE, calls.send(7, 2))
    calls.lose(7)
    work.miss(Slice(0, 2, 3, 1), HERE, "killed")
    assert told(work) == [(2, "lost", None, None)]
    assert work.misses[0].row.worker == 0


def test_what_has_timed_out_is_not_cancelled_too(clock: Clock) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 1, 1), HERE, calls.send(7, 1))
    clock.now = 102.0
    work.fail(Slice(0, 0, 1, 1), TaskError("too slow"))
    work.end(TaskState.CANCELLED, None)
    assert told(work) == []
    assert [(lost.span.started_at, lost.span.duration_s) for lost in work.lost if lost.span] == [(100.0, 2.0)]


class Noted:
    """A work that notes which of its items run again."""

    def __init__(self) -> None:
        self.missed: list[Slice] = []

    def miss(self, piece: Slice, worker: WorkerInfo, why: object) -> None:
        self.missed.append(piece)


@pytest.mark.parametrize(
    ("reason", "was_idle", "expected"),
    [
        (LossReason.EXIT, False, [RUNS, WAITS]),  # charged: nobody knows whether it had begun
        (LossReason.PREEMPTED, False, [RUNS]),
        (LossReason.STOPPED, False, [RUNS]),
        (LossReason.EXIT, True, []),  # it had gone before anything came
    ],
)
def test_what_waited_is_an_attempt_only_if_it_is_charged(reason: LossReason, was_idle: bool, expected: list[Slice]) -> None:
    calls = InFlight()
    calls.send(7, 1).sent.append(Sent(RUNS, None))
    calls.send(7, 2).sent.append(Sent(WAITS, None))
    tasks = {0: SimpleNamespace(flights={1: 7, 2: 7})}
    casualties = Casualties(cast("Any", SimpleNamespace(backlog=SimpleNamespace(tasks=tasks))))
    for call in calls.lose(7).values():
        casualties.note_fallen(call, reason, was_idle)
    work = Noted()
    casualties.tell_misses(cast("Any", {0: work}), [], HERE)
    assert work.missed == expected


@pytest.mark.parametrize("before", [0, 1])
def test_what_has_timed_out_after_it_was_told_that_it_lasts_is_not_cancelled_too(clock: Clock, before: int) -> None:
    calls, work = InFlight(), loop()
    work.begin(Slice(0, 0, 5, 1), HERE, calls.send(7, 1))
    call, _ = calls.narrow(7, 1)
    call.began_at = 101.0
    work.begin(Slice(0, before, before + 1, 1), HERE, call)
    clock.now = 102.0
    work.fail(Slice(0, before, before + 1, 1), TaskError("too slow"))
    work.end(TaskState.CANCELLED, None)
    assert told(work) == []
    assert [(lost.span.started_at, lost.span.duration_s) for lost in work.lost if lost.span] == [(101.0, 1.0)]
