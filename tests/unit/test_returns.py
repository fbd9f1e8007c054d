"""What comes back from workers reaches the scheduler in its words, and the works with their values."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypool.core import messages as m
from raypool.core.model import Report, Slice
from raypool.engine import in_flight
from raypool.engine.answers import pack_narrowed, unpack_narrowed
from raypool.engine.backend import Failure, Function, LocalValues, SliceResult, WorkerInfo, nothing_done
from raypool.engine.casualties import Casualties
from raypool.engine.in_flight import Call, Sent
from raypool.engine.loop_work import LoopOptions, LoopWork
from raypool.engine.open_call import Narrowed, RawResult
from raypool.engine.packing import ParcelKeeper
from raypool.engine.returns import Returns
from raypool.errors import TaskError

HERE = WorkerInfo(0, "here", 1)
WORKER = 3


class Stage:
    """What comes back to a driver that has two loops of ten items."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.works = {number: loop(f"loop {number}") for number in (0, 1)}
        self.tasks = {number: SimpleNamespace(flights={}) for number in self.works}
        scheduler = SimpleNamespace(backlog=SimpleNamespace(tasks=self.tasks))
        casualties = Casualties(cast("Any", scheduler))
        self.returns = Returns(self.works, casualties, self.cancelled.append)

    def send(self, attempt_id: int, *pieces: Slice, unsent: Slice | None = None) -> Call:
        """Send a call; a slice that was cancelled in that instant stands first in it, and does not travel."""
        call = self.returns.in_flight.send(WORKER, attempt_id)
        if unsent is not None:
            call.sent.append(Sent(unsent, nothing_done()))
        for number, piece in enumerate(pieces):
            self.tasks[piece.task_id].flights[attempt_id] = WORKER
            self.works[piece.task_id].begin(piece, HERE, call)
            call.sent.append(Sent(piece, None, number))
        return call

    def narrow(self, attempt_id: int, results: list[SliceResult], *kept: int) -> m.AttemptNarrowed:
        return self.returns.take_part(m.AttemptNarrowed(WORKER, attempt_id, (), kept), results, HERE)

    def finish(self, attempt_id: int, *results: SliceResult) -> tuple[Report, ...]:
        self.returns.turn_page()
        return self.returns.take(m.AttemptFinished(WORKER, attempt_id, ()), results).reports


def loop(name: str) -> LoopWork:
    return LoopWork(Function(0, None, name), range(10), LoopOptions(name))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(in_flight, "time", lambda: 100.0)
    return Stage()


def result(start: int, values: str, failures: dict[int, Failure] | None = None) -> SliceResult:
    """Return the result of items that have taken a second each, with a letter for each value, of a call that began at 200."""
    return SliceResult(start, len(values), LocalValues(list(values)), 0, failures or {}, array("d", [1.0] * len(values)), 200.0)


def test_what_is_told_twice_counts_once(stage: Stage) -> None:
    stage.send(0, Slice(0, 0, 5, 1), Slice(1, 2, 9, 1))
    event = stage.narrow(0, [result(0, "abcde"), result(2, "fg")], 0, 1)
    assert event.kept == (0, 1)
    assert event.reports == (Report(5, busy_s=5.0), Report(2, busy_s=2.0))
    assert stage.returns.result(Slice(1, 2, 4, 1)).values.get() == ["f", "g"]
    assert stage.finish(0, result(0, "abcde"), result(2, "fgh")) == (Report(1, busy_s=1.0),)
    last = stage.returns.result(Slice(1, 4, 5, 1))
    assert (last.start, last.values.get()[last.offset], last.started_at) == (4, "h", 202.0)


@pytest.mark.parametrize(("values", "done"), [("fg", 0), ("", 0), ("fgh", 1), ("fghij", 1)])
def test_what_is_kept_may_come_back_unbegun(stage: Stage, values: str, done: int) -> None:
    stage.send(0, Slice(1, 2, 9, 1))
    stage.narrow(0, [result(2, "fg")], 1)
    (report,) = stage.finish(0, result(2, values))
    assert report.done == done


def test_a_slice_that_could_not_be_opened_has_failed_as_far_as_it_was_kept(stage: Stage) -> None:
    """That may show only after it was told of, and is said of all its items then."""
    stage.send(0, Slice(1, 2, 9, 1))
    stage.narrow(0, [result(2, "")], 1)
    failure = Failure(ImportError("no module"), None)
    (report,) = stage.finish(0, result(2, "-------", dict.fromkeys(range(2, 9), failure)))
    assert (report.done, report.failed) == (1, 1)


def test_what_has_timed_out_before_it_was_told_of_is_not_begun_again(stage: Stage) -> None:
    """It would be called running, and cancelled if its loop ends before it."""
    stage.send(0, Slice(0, 0, 1, 1))
    stage.tasks[0].flights.clear()
    stage.works[0].fail(Slice(0, 0, 1, 1), TaskError("too slow"))
    stage.narrow(0, [result(0, "")], 1)
    assert stage.works[0].running == {}


def test_errors_go_to_where_they_belong(stage: Stage) -> None:
    stage.send(0, Slice(1, 2, 9, 1))
    first, second = (Failure(ValueError(word), None) for word in ("first", "second"))
    event = stage.narrow(0, [result(2, "-g", {2: first})], 1)
    assert event.reports[0].failed == 1
    (report,) = stage.finish(0, result(2, "-g-", {2: first, 4: second}))
    assert report.failed == 1
    assert stage.returns.result(Slice(1, 4, 5, 1)).failures == {4: second}


def test_slices_that_were_not_sent_are_not_mixed_up_with_those_that_were(stage: Stage) -> None:
    stage.send(0, Slice(0, 0, 3, 1), Slice(1, 0, 3, 1), unsent=Slice(9, 0, 1, 1))
    event = stage.narrow(0, [result(0, "abc"), result(0, "d")], 0, 1)
    assert event.kept == (0, 0, 1)
    assert [report.done for report in event.reports] == [0, 3, 1]
    assert [report.done for report in stage.finish(0, result(0, "abc"), result(0, "de"))] == [1]
    assert stage.returns.result(Slice(1, 1, 2, 1)).offset == 1


def test_what_waits_behind_is_over(stage: Stage) -> None:
    first, behind = stage.send(0, Slice(0, 0, 5, 1)), stage.send(1, Slice(0, 5, 9, 1))
    assert (first.behind, behind.behind) == (None, 0)
    stage.narrow(0, [result(0, "ab")], 1)
    assert first.is_over
    assert behind.is_over
    assert stage.finish(1, result(5, "")) == (), "whatever it answers"
    assert stage.finish(0, result(0, "abc")) == (Report(1, busy_s=1.0),)


def test_what_comes_after_the_answer_changes_nothing(stage: Stage) -> None:
    stage.send(0, Slice(0, 0, 5, 1))
    stage.send(1, Slice(0, 5, 9, 1))
    stage.finish(0, result(0, "abcde"))
    assert stage.narrow(0, [result(0, "ab")], 1).reports == ()
    assert stage.finish(1, result(5, "fghi")) == (Report(4, busy_s=4.0),)


def test_a_loop_knows_what_runs_of_it_now_and_since_when(stage: Stage) -> None:
    stage.send(0, Slice(0, 0, 5, 1))
    stage.send(1, Slice(0, 5, 9, 1))
    assert stage.works[0].running == {0: (Slice(0, 0, 5, 1), 100.0)}
    stage.narrow(0, [result(0, "ab")], 1)
    assert stage.works[0].running == {0: (Slice(0, 2, 3, 1), 202.0)}


def test_a_loop_that_has_ended_meanwhile_is_left_alone(stage: Stage) -> None:
    stage.send(0, Slice(0, 0, 5, 1))
    del stage.works[0], stage.tasks[0]
    assert stage.narrow(0, [result(0, "ab")], 1).kept == (1,)
    assert stage.finish(0, result(0, "abc")) == (Report(1, busy_s=1.0),)


# --- on its way -------------------------------------------------------------------------------------------------------


def raw(start: int, *values: Any) -> RawResult:
    keeper, made = ParcelKeeper(), RawResult(start)
    made.done, made.values, made.durations_s = (
        len(values),
        [keeper.keep(value) for value in values],
        array("d", [1.0] * len(values)),
    )
    return made


def test_what_is_told_travels_with_its_values() -> None:
    failed = raw(7, {"loss": 1.0}, None)
    failed.errors[8] = ValueError("no")
    attempt_id, kept, results = unpack_narrowed(pack_narrowed(Narrowed(5, [raw(0, 1, [2]), failed, raw(0)], (0, 1, 0))))
    assert (attempt_id, kept) == (5, (0, 1, 0))
    assert [part.values.get()[part.offset : part.offset + part.done] for part in results] == [[1, [2]], [{"loss": 1.0}, None], []]
    assert str(results[1].failures[8].error) == "no"


def test_large_values_come_with_the_answer() -> None:
    _, kept, results = unpack_narrowed(pack_narrowed(Narrowed(5, [raw(0, bytes(100_000)), raw(0, 1)], (0, 1))))
    assert (kept, [part.done for part in results]) == ((1, 2), [0, 0])
