"""Calls that last: what is told of them, and when."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool.backends.ray.packing import ParcelKeeper, pack_narrowed, unpack_narrowed
from raypool.channel.records import Part, WorkerInfo
from raypool.core.messages import Signal
from raypool.worker import runner
from raypool.worker import runner as early_module
from raypool.worker.interrupts import Interrupts, ThreadGuard
from raypool.worker.runner import (
    HandBack,
    NarrowedCall,
    OpenCall,
    RawResult,
    Surroundings,
    Watch,
    run_parts,
)
from tests.conftest import poll


class Told:
    """Notes what is told early."""

    def __init__(self) -> None:
        self.all: list[NarrowedCall] = []
        self.changed = threading.Event()

    def wait(self) -> None:
        """Let the call that runs here last from now on, until it is told of."""
        early_module.LASTS_S = 0.0
        assert self.changed.wait(300)

    def __call__(self, call: OpenCall, narrowed: NarrowedCall) -> None:
        self.all.append(narrowed)
        self.changed.set()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    # none lasts before it waits for that, however slow the machine
    monkeypatch.setattr(early_module, "LASTS_S", math.inf)
    monkeypatch.setattr(early_module, "LOOK_S", 0.01)
    # a call takes all its items, however late the watch is
    monkeypatch.setattr(runner, "CALL_LIMIT_S", math.inf)
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture
def early(watch: Watch, told: Told) -> HandBack:
    return HandBack(watch, told)


def run(
    early: HandBack | None,
    *parts: Part,
    fn: Callable[[Any], Any],
    guard: Interrupts | None = None,
    attempt_id: int = 7,
) -> Any:
    here = Surroundings(
        WorkerInfo(0, "here", 1),
        lambda _: fn,
        list,
        guard or Interrupts(),
        lambda *_: None,
        early=early,
    )
    return run_parts(attempt_id, parts, here)


def part(start: int, stop: int, task_id: int = 0, **changes: Any) -> Part:
    return Part(task_id, 0, range(start, stop), stop - start, start, 1, is_call=False)._replace(
        **changes
    )


def outline(narrowed: NarrowedCall) -> list[tuple[list[Any], int]]:
    return [
        (result.values, kept) for result, kept in zip(narrowed.results, narrowed.kept, strict=True)
    ]


# --- what is told ---------------------------------------------------------------------------------


def waits_at(number: int, told: Told) -> Callable[[int], int]:
    """Return a function that waits, at this item, until something was told."""

    def fn(item: int) -> int:
        if item == number:
            told.wait()
        return -item

    return fn


def test_what_is_done_is_told_and_what_follows_is_not_begun(early: HandBack, told: Told) -> None:
    parts = [part(0, 2), part(10, 15, task_id=1), part(0, 2, task_id=2)]
    results = run(early, *parts, fn=waits_at(12, told))
    (narrowed,) = told.all
    assert narrowed.attempt_id == 7
    assert outline(narrowed) == [([0, -1], 0), ([-10, -11], 1), ([], 0)]
    assert [result.values for result in results] == [
        [0, -1],
        [-10, -11, -12],
        [],
    ], "the answer has all of it"
    assert [result.done for result in results] == [2, 3, 0]


def test_that_items_could_not_be_unpickled_is_told(early: HandBack, told: Told) -> None:
    fn = waits_at(5, told)
    here = Surroundings(
        WorkerInfo(0, "here", 1), lambda _: fn, pickle.loads, Interrupts(), print, early=early
    )
    parts = [part(0, 2), part(5, 6, task_id=1)._replace(items=pickle.dumps([5]))]
    parts[0] = parts[0]._replace(items=b"broken")
    run_parts(7, parts, here)
    assert [result.is_unopened for result in told.all[0].results] == [True, False]


def test_the_first_item_may_be_the_one_that_lasts(early: HandBack, told: Told) -> None:
    results = run(early, part(0, 5), fn=waits_at(0, told))
    assert outline(told.all[0]) == [([], 1)]
    assert results[0].values == [0]


def test_so_may_the_last(early: HandBack, told: Told) -> None:
    results = run(early, part(0, 5), fn=waits_at(4, told))
    assert outline(told.all[0]) == [([0, -1, -2, -3], 1)]
    assert results[0].done == 5


def test_a_call_that_the_user_has_cut_runs_to_its_end(early: HandBack, told: Told) -> None:
    results = run(early, part(0, 3, is_fixed=True), part(3, 6, is_fixed=True), fn=waits_at(1, told))
    assert outline(told.all[0]) == [([0], 2), ([], 3)]
    assert [result.done for result in results] == [3, 3]


def test_errors_are_told_with_the_items_that_raised_them(early: HandBack, told: Told) -> None:
    def fn(item: int) -> int:
        if item == 2:
            told.wait()
        raise ValueError(item)

    run(early, part(0, 4), fn=fn)
    (result,) = told.all[0].results
    assert sorted(result.errors) == [0, 1]
    assert len(result.durations_s) == 2


def test_each_call_is_told_of_once(early: HandBack, told: Told) -> None:
    def fn(item: int) -> int:
        told.wait()
        time.sleep(0.15)
        return item

    run(early, part(0, 2), fn=fn)
    assert len(told.all) == 1
    told.changed.clear()
    run(early, part(0, 2), fn=fn, attempt_id=8)
    assert [narrowed.attempt_id for narrowed in told.all] == [7, 8]


def test_short_calls_are_not_told_of(early: HandBack, told: Told) -> None:
    for attempt_id in range(50):
        run(early, part(0, 3), fn=abs, attempt_id=attempt_id)
    assert told.all == []


def test_ranks_are_not_told_of(
    early: HandBack, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_module, "LASTS_S", 0.0)
    run(early, part(0, 1, is_rank=True), fn=lambda _: time.sleep(0.2))
    assert told.all == []


def test_without_anybody_to_tell_it_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CALL_LIMIT_S", math.inf)
    assert run(None, part(0, 2), fn=lambda item: item)[0].values == [0, 1]


def test_what_was_told_to_leave_is_not_told_of(early: HandBack, told: Told) -> None:
    """It comes back soon, perhaps with less than seemed done."""
    call = OpenCall(7, [part(0, 3)])
    result = RawResult(0)
    result.deadline = 0.0
    call.begin(result)
    early.narrow(call)
    assert told.all == []


def test_what_has_nothing_left_to_run_is_not_told_of(early: HandBack, told: Told) -> None:
    call = OpenCall(7, [part(0, 1)])
    result = RawResult(0)
    call.begin(result)
    result.values.append("done")
    result.durations_s.append(0.1)
    early.narrow(call)
    assert told.all == []


def test_a_call_that_is_over_is_not_told_of(early: HandBack, told: Told) -> None:
    call = OpenCall(7, [part(0, 3)])
    call.begin(RawResult(0))
    early.end(call)
    early.narrow(call)
    assert told.all == []


def test_nothing_is_told_of_a_slice_that_is_cancelled_in_this_instant(
    early: HandBack, told: Told
) -> None:
    call = OpenCall(7, [part(0, 3)])
    result = RawResult(0)
    call.begin(result)
    result.durations_s.append(0.1)  # its value is gone already
    early.narrow(call)
    assert told.all == []


def test_a_worker_that_is_to_be_replaced_hands_back_what_it_keeps(
    early: HandBack, told: Told
) -> None:
    """It may promise an item that it then does not begin."""
    call = OpenCall(7, [part(0, 1), part(5, 9)])
    call.begin(RawResult(0))
    call.begin(RawResult(5))
    early.narrow(call)
    assert outline(told.all[0]) == [([], 0), ([], 1)]


def test_a_mistake_ends_neither_the_call_nor_the_watch(
    watch: Watch, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: OpenCall, narrowed: NarrowedCall) -> None:
        told(call, narrowed)
        raise OSError("the disk is full, say")

    assert run(HandBack(watch, fail), part(0, 2), fn=waits_at(0, told))[0].values == [0]
    assert poll(lambda: "the disk is full, say" in caplog.text)
    told.changed.clear()
    run(HandBack(watch, told), part(0, 2), fn=waits_at(1, told), attempt_id=8)
    assert [narrowed.attempt_id for narrowed in told.all] == [7, 8]


class Items(list[int]):
    """A list that can be referred to weakly."""


def test_the_watch_keeps_nothing_of_a_call(early: HandBack, told: Told) -> None:
    """Its arguments may be large, and in Ray's object store."""
    items = Items([0])
    kept = weakref.ref(items)
    run(early, part(0, 1, items=items), fn=waits_at(0, told))
    del items
    assert poll(lambda: kept() is None)


def test_what_was_told_can_be_freed() -> None:
    call = OpenCall(7, [part(0, 1), part(0, 3)])
    first, second = RawResult(0), RawResult(0)
    for result, values in ((first, ["a"]), (second, ["b", "c"])):
        call.begin(result)
        result.values += values
        result.durations_s.extend([0.1] * len(values))
    first.done = 1
    second.errors[1] = ValueError()
    told: list[NarrowedCall] = []
    call.narrow(told.append)
    call.let_go(told[0])
    assert (first.values, second.values, second.errors) == ([None], [None, None], {})
    assert [result.values for result in told[0].results] == [["a"], ["b", "c"]]


def test_large_values_are_kept_until_the_answer() -> None:
    done = RawResult(0)
    done.done, done.values = 2, ["large", "larger"]
    narrowed = NarrowedCall(7, [done, RawResult(5)], (1, 0)).without_values()
    assert (narrowed.kept, [result.done for result in narrowed.results]) == ((3, 0), [0, 0])


def told_of(*values: Any, start: int = 0) -> RawResult:
    """Return what is done of a slice, as a worker has it."""
    keeper, done = ParcelKeeper(), RawResult(start)
    done.done = len(values)
    done.values = [keeper.keep(value) for value in values]
    done.durations_s = array("d", [1.0] * len(values))
    return done


def test_what_is_told_travels_with_its_values() -> None:
    failed = told_of({"loss": 1.0}, None, start=7)
    failed.errors[8] = ValueError("no")
    narrowed = NarrowedCall(5, [told_of(1, [2]), failed, told_of()], (0, 1, 0))
    attempt_id, kept, results = unpack_narrowed(pack_narrowed(narrowed))
    assert (attempt_id, kept) == (5, (0, 1, 0))
    assert [part.values.get()[part.offset : part.offset + part.done] for part in results] == [
        [1, [2]],
        [{"loss": 1.0}, None],
        [],
    ]
    assert str(results[1].failures[8].error) == "no"


def test_large_values_come_with_the_answer() -> None:
    _, kept, results = unpack_narrowed(
        pack_narrowed(NarrowedCall(5, [told_of(bytes(100_000)), told_of(1)], (0, 1)))
    )
    assert (kept, [part.done for part in results]) == ((1, 2), [0, 0])


# --- what is behind it ----------------------------------------------------------------------------


def test_what_waits_behind_a_call_that_was_told_of_is_not_to_run(
    early: HandBack, told: Told
) -> None:
    run(early, part(0, 1), fn=abs, attempt_id=6)
    assert not early.is_behind(6)
    run(early, part(0, 1), fn=waits_at(0, told))
    assert early.is_behind(7)
    assert not early.is_behind(6)
    assert not early.is_behind(None)


# --- at any moment --------------------------------------------------------------------------------


class AtAnyMoment(HandBack):
    """Narrows a call in another thread when it is told to, and not by its time."""

    def begin(self, call: OpenCall) -> None:
        self.go = threading.Event()
        self.thread = threading.Thread(target=lambda: (self.go.wait(300), self.narrow(call)))
        self.thread.start()

    def end(self, call: OpenCall) -> None:
        call.end()
        self.go.set()
        self.thread.join()


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Let threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_is_told_and_what_is_left_make_up_the_call(
    watch: Watch, told: Told, busy_threads: None
) -> None:
    """Whenever it comes: no item is begun that was handed back, and none is told of that is not
    done.
    """
    num_told = 0
    for attempt_id in range(300):
        told.all.clear()
        begun: list[int] = []
        early = AtAnyMoment(watch, told)

        def fn(
            item: int, when: int = attempt_id, begun: list[int] = begun, early: AtAnyMoment = early
        ) -> int:
            begun.append(item)
            if item == when:
                early.go.set()
                if when % 10 == 0:  # of these it is sure
                    early.thread.join(300)
            return sum(range(100))

        results = run(early, part(0, 200), part(200, 400), fn=fn, attempt_id=attempt_id)
        assert len(begun) == sum(result.done for result in results)
        for narrowed in told.all:
            num_told += 1
            for known, kept, result in zip(narrowed.results, narrowed.kept, results, strict=True):
                assert known.values == [4950] * known.done
                assert known.done <= result.done <= known.done + kept
    assert num_told >= 30


def test_a_thread_that_is_cancelled_meanwhile_counts_for_nothing(
    early: HandBack, told: Told
) -> None:
    guard = ThreadGuard()

    def fn(item: int) -> int:
        if item == 3:
            told.wait()
            guard.request(Signal.CANCEL, 7, 0)
            poll(lambda: False, 5)
        return item

    (result,) = run(early, part(0, 5), fn=fn, guard=guard)
    assert outline(told.all[0]) == [([0, 1, 2], 1)]
    assert result.done == 0
