"""What those who watch a run ask for happens, is recorded, and costs no outcome."""

from __future__ import annotations

import json
import operator
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from raypool import ParallelPool, Results, current_task, load_results, report, search
from raypool.cli.main import main
from raypool.journal.live import actions_in, ask, live_of, want
from tests.conftest import Gate, Marks
from tests.leaks import poll

pytestmark = [pytest.mark.threads, pytest.mark.quick]


class Watcher:
    """Somebody who watches a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def live(self) -> dict[str, Any]:
        """Return the live state, when there is one."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            if self.run_dir.exists():
                want(self.run_dir)
                found.extend(filter(None, [live_of(self.run_dir)]))
            return bool(found)

        assert poll(look, 300)
        return found[-1]

    def sees(self, condition: Callable[[dict[str, Any]], bool]) -> bool:
        return poll(lambda: condition(self.live()), 300)

    def runs(self, *items: int) -> bool:
        """Wait until these items are the running ones."""
        return self.sees(lambda live: sorted(each["item"] for each in live["running"]) == [*items])

    def ask(self, action: str, item: int | None = None) -> str:
        """Ask for an action, and return its outcome."""
        request_id = ask(self.run_dir, action, item)
        found: list[str] = []

        def look() -> bool:
            want(self.run_dir)
            entries = actions_in(self.run_dir)
            found.extend(each["outcome"] for each in entries if each["id"] == request_id)
            return bool(found)

        assert poll(look, 300)
        return found[0]


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    return Watcher(tmp_path / "run")


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Give what calls something in another thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit


def waiter(marks: Marks, gate: Gate) -> Callable[[int], int]:
    """Return a function that waits until it is told to stop, or at the gate; item 2 fails once."""

    def wait(item: int) -> int:
        marks.add(item)
        report(step=item)
        if item == 2 and marks.count(2) == 1:
            raise ValueError("once")
        poll(lambda: gate.path.exists() or current_task().should_stop, 300)
        return -item if current_task().should_stop else item

    return wait


def statuses(results: Results[Any]) -> list[str]:
    return list(results.to_frame()["status"])


@pytest.mark.concurrent
@pytest.mark.ci
def test_items_are_stopped_cancelled_put_first_and_run_again(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    alone = pool.options(retries=0)  # no worker has its next item already

    def call() -> Results[Any]:
        function = waiter(marks, gate)
        return alone.parfor(function, range(9), run_dir=watcher.run_dir, on_error="collect")

    loop = start(call)
    assert watcher.runs(0, 1, 3)
    live = watcher.live()
    assert (live["total"], live["waiting"], live["run"]) == (9, 5, 1)
    assert {each["worker"] for each in live["running"]} == {0, 1, 2}
    assert {each["state"] for each in live["workers"]} == {"busy"}
    assert watcher.sees(lambda live: live["running"][0]["last"] == {"step": 0})
    assert watcher.ask("first", 8) == "done"
    assert watcher.ask("cancel", 7) == "done"
    assert watcher.ask("stop", 0) == "done"
    assert watcher.runs(1, 3, 8)
    assert poll(lambda: marks.count(8), 300)  # it was sent, and now it has begun
    assert watcher.ask("cancel", 8) == "done"
    assert watcher.runs(1, 3, 4)
    assert watcher.ask("rerun", 2) == "done"
    refused = [("stop", 5), ("cancel", 0), ("rerun", 0), ("rerun", 3), ("first", 3), ("stop", 99)]
    assert [watcher.ask(*each) for each in refused] == [
        "not possible: item 5 waits",
        "not possible: item 0 has ended",
        "item 0 has not failed",
        "not possible: item 3 is running",
        "not possible: item 3 is running",
        "there is no item 99",
    ]
    gate.open()
    results = loop.result(300)
    assert list(results) == [0, 1, 2, 3, 4, 5, 6, None, None]
    assert statuses(results) == ["finished"] * 7 + ["cancelled"] * 2
    assert results.errors == {}
    assert marks.count(2) == 2
    assert live_of(watcher.run_dir) is None

    shown = CliRunner().invoke(main, ["show", str(watcher.run_dir)])
    assert "11 actions from `raypool watch`: ..., cancel 0 (" in shown.stderr
    saved = load_results(watcher.run_dir)
    assert statuses(saved)[7:] == ["missing", "missing"]
    for column in ("item", "attempt", "status", "error"):
        runs = [each.attempts[each.attempts["item"] == 2][column] for each in (results, saved)]
        assert [*runs[0]] == [*runs[1]]
        assert len(runs[0]) == 2
    for column in ("started_at", "duration_s"):  # of an item that ran again, those of its last run
        assert list(results.to_frame()[column][:7]) == list(saved.to_frame()[column][:7])
    assert list(call()) == list(range(9)), "what was cancelled runs in the next call"
    assert [marks.count(item) for item in range(9)] == [1, 1, 2, 1, 1, 1, 1, 1, 2]


def test_a_saved_failure_that_runs_again_is_replaced(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    def run(item: int) -> int:
        marks.add(item)
        report(run=marks.count(item))
        print(f"run {marks.count(item)} of {item}")
        if item == 0 and marks.count(0) == 1:
            raise ValueError("once")
        if item == 1:
            gate.wait()
        return item

    how = {"run_dir": watcher.run_dir, "on_error": "collect"}
    assert [*pool.parfor(run, [0], **how).errors] == [0]
    loop = start(lambda: pool.parfor(run, [0, 1], rerun="missing", **how))
    assert watcher.runs(1)
    assert watcher.ask("rerun", 0) == "done"
    gate.open()
    results = loop.result(300)
    assert list(results) == [0, 1]
    assert results.errors == {}
    assert [*results.metrics["run"]] == [2, 1]
    assert results.diary[0] == "run 2 of 0\n"


@pytest.mark.processes
@pytest.mark.ci
def test_an_item_that_fails_after_a_loss_has_the_row_of_its_last_run(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    def run(item: int) -> int:
        marks.add(item)
        if item == 0 and marks.count(0) == 1:
            os._exit(1)
        if item == 0:
            raise ValueError("again")
        gate.wait()
        return item

    how = {"run_dir": watcher.run_dir, "on_error": "collect"}
    loop = start(lambda: pool.options(retries=0).parfor(run, [0, 1], **how))
    assert watcher.sees(lambda live: len(live["running"]) == 1)
    assert poll(lambda: watcher.ask("rerun", 0) == "done", 300)
    gate.open()
    results = loop.result(300)
    assert isinstance(results.errors[0], ValueError)
    saved = load_results(watcher.run_dir)
    for column in ("started_at", "duration_s"):
        assert [*results.to_frame()[column]] == [*saved.to_frame()[column]]


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "generator"])
def test_a_loop_that_is_stopped_ends_with_what_runs(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate, kind: Any
) -> None:
    def call() -> Results[Any]:
        items = kind([0, 1, 3, 4, 5])
        return pool.parfor(waiter(marks, gate), items, run_dir=watcher.run_dir)

    loop = start(call)
    assert watcher.runs(0, 1, 2)
    assert watcher.ask("stop_all") == "done"
    assert watcher.ask("first", 4) == "the sweep is stopping"
    gate.open()
    with pytest.raises(
        CancelledError, match=r"was stopped by a watcher .* Call it again"
    ) as caught:
        loop.result(300)
    results = caught.value.results  # type: ignore[attr-defined]
    assert list(results)[:3] == [0, 1, 3]
    assert statuses(results)[:3] == ["finished"] * 3
    assert set(statuses(results)[3:]) <= {"cancelled"}
    assert list(call()) == [0, 1, 3, 4, 5]
    assert [marks.count(item) for item in (0, 1, 3, 4, 5)] == [1] * 5


def test_another_attempt_knows_that_its_item_was_stopped(
    pool: ParallelPool, watcher: Watcher, start: Any
) -> None:
    def run(item: int) -> bool:
        if current_task().attempt == 1:
            poll(lambda: current_task().should_stop, 300)
            raise OSError("the disk is away")
        return current_task().should_stop

    again = pool.options(retry_on=OSError)
    loop = start(lambda: again.parfor(run, [0], run_dir=watcher.run_dir))
    assert watcher.runs(0)
    assert watcher.ask("stop", 0) == "done"
    assert list(loop.result(300)) == [True]


def test_an_item_among_short_ones_is_cancelled_alone(
    pool: ParallelPool, watcher: Watcher, start: Any, gate: Gate
) -> None:
    def run(item: int) -> int:
        if item == 500:
            gate.wait()
        return item

    loop = start(lambda: pool.parfor(run, range(1000), run_dir=watcher.run_dir))
    assert watcher.runs(500), "in a call of several, which then keeps only this one"
    assert watcher.ask("cancel", 500) == "done"
    expected: list[int | None] = list(range(1000))
    expected[500] = None
    assert list(loop.result(300)) == expected


def test_an_item_in_a_call_of_a_fixed_size_is_not_cancelled_alone(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    function = waiter(marks, gate)
    loop = start(lambda: pool.parfor(function, [0, 1, 3, 4], run_dir=watcher.run_dir, chunk_size=2))
    assert watcher.runs(0, 1, 2, 3)
    assert "shares its call with others" in watcher.ask("cancel", 1)
    assert "shares its call with others" in watcher.ask("stop", 1)
    gate.open()
    assert list(loop.result(300)) == [0, 1, 3, 4]


def test_what_was_cancelled_is_not_reduced(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    function = waiter(marks, gate)
    loop = start(
        lambda: pool.parfor(function, [0, 1, 3, 4], run_dir=watcher.run_dir, reduce=operator.add)
    )
    assert watcher.runs(0, 1, 2)
    assert watcher.ask("cancel", 3) == "done"
    assert "reduce=" in watcher.ask("rerun", 3)
    gate.open()
    assert loop.result(300) == 4


def test_several_watchers_ask_while_outcomes_arrive(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks
) -> None:
    """Whatever they ask for at whatever moment: each item has one outcome, or was cancelled."""
    begun = threading.Event()

    def run(item: int) -> int:
        begun.wait(300)
        marks.add(item)
        if item % 5 == 0 and marks.count(item) == 1:
            raise ValueError(item)
        return item

    loop = start(
        lambda: pool.parfor(
            run, range(60), run_dir=watcher.run_dir, chunk_size=1, on_error="collect"
        )
    )
    watcher.live()
    for item in range(60):
        ask(watcher.run_dir, ("cancel", "rerun", "first")[item % 3], item)
        ask(watcher.run_dir, ("rerun", "cancel", "cancel")[item % 3], item)
        if item == 20:
            begun.set()
    results = loop.result(300)
    left = list((watcher.run_dir / "watch" / "requests").iterdir())  # asked after the loop's end
    assert len(actions_in(watcher.run_dir)) + len(left) == 120
    for item, (value, status) in enumerate(zip(results, statuses(results), strict=True)):
        expected = {"finished": item, "failed": None, "cancelled": None}
        assert value == expected[status]
        assert (item in results.errors) == (status == "failed")
    repeated = {
        entry["item"]
        for entry in actions_in(watcher.run_dir)
        if (entry["action"], entry["outcome"]) == ("rerun", "done")
    }
    assert all(marks.count(item) <= 1 + (item in repeated) for item in range(60))


def test_a_trial_is_stopped_cancelled_and_goes_on_later(
    pool: ParallelPool, watcher: Watcher, start: Any, marks: Marks, gate: Gate
) -> None:
    def train(config: dict[str, Any]) -> None:
        marks.add(current_task().index)
        report(epoch=0, score=config["x"])
        poll(lambda: gate.path.exists() or current_task().should_stop, 300)

    def call() -> Any:
        return pool.search(
            train,
            {"x": search.uniform(0, 1)},
            metric="score",
            mode="max",
            num_trials=6,
            run_dir=watcher.run_dir,
        )

    loop = start(call)
    assert watcher.runs(0, 1, 2)
    assert watcher.ask("stop", 0) == "done"
    assert watcher.runs(1, 2, 3)
    assert watcher.ask("cancel", 1) == "done"
    assert watcher.runs(2, 3, 4)
    assert "a search chooses by itself" in watcher.ask("rerun", 0)
    assert watcher.ask("stop_all") == "done"
    gate.open()
    with pytest.raises(CancelledError):
        loop.result(300)
    found = load_results(watcher.run_dir)._trials
    assert found is not None
    assert found.states == ["pruned", "unfinished", "complete", "complete", "complete"]
    assert call().results._trials.states == ["pruned", *["complete"] * 5]
    assert [marks.count(trial) for trial in range(6)] == [1, 2, 1, 1, 1, 1]


@pytest.mark.semantics
def test_items_cancel_others_and_end_the_loop(
    pool: ParallelPool, watcher: Watcher, marks: Marks
) -> None:
    """Without a thread of its own, the driver hears of it between two calls."""

    def run(item: int) -> int:
        marks.add(item)
        if item == 0:
            assert watcher.ask("first", 5) == "done"
            ask(watcher.run_dir, "cancel", 3)
            assert watcher.ask("cancel", 99) == "there is no item 99"  # it comes after the other
        if item == 5:
            assert watcher.ask("stop_all") == "done"
        return item

    def call() -> Results[Any]:
        return pool.parfor(run, range(9), run_dir=watcher.run_dir, max_workers=1, chunk_size=1)

    with pytest.raises(CancelledError) as caught:
        call()
    assert statuses(caught.value.results).count("finished") == 2  # type: ignore[attr-defined]
    assert marks.all() == ["0", "5"]
    outcomes = {entry["item"]: entry["outcome"] for entry in actions_in(watcher.run_dir)}
    assert outcomes[3] == "done"
    assert list(call()) == list(range(9))


@pytest.mark.arguments
def test_an_item_in_this_thread_is_told_to_stop(pool: ParallelPool, watcher: Watcher) -> None:
    def run(item: int) -> bool:
        assert item == 0 or watcher.ask("stop", item) == "done"
        return current_task().should_stop

    results = pool.parfor(run, range(2), run_dir=watcher.run_dir, chunk_size=1)
    assert list(results) == [False, True]


def test_a_mistake_in_the_watching_leaves_the_loop_alone(
    pool: ParallelPool,
    watcher: Watcher,
    start: Any,
    marks: Marks,
    gate: Gate,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = waiter(marks, gate)
    loop = start(lambda: pool.parfor(function, [0, 1, 3], run_dir=watcher.run_dir))
    assert watcher.runs(0, 1, 2)
    broken = SimpleNamespace(dumps=None, loads=json.loads)
    monkeypatch.setattr("raypool.journal.live.json", broken)
    assert poll(lambda: want(watcher.run_dir) or "cannot be watched" in caplog.text, 300)
    monkeypatch.undo()
    gate.open()
    assert list(loop.result(300)) == [0, 1, 3]
