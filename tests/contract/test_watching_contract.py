"""What tasks report and print is seen outside: while they run, and all of it when they have
ended.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from raypool import (
    InvalidTypeError,
    MetricsReport,
    ParallelPool,
    TaskError,
    current_task,
    parpool,
    report,
)
from raypool.testing import sim_pool
from raypool.testing.simulation import FaultPlan
from tests.conftest import Gate, Marks
from tests.contract.conftest import PoolMaker

pytestmark = pytest.mark.semantics


def train(epochs: int, name: str = "train") -> int:
    for epoch in range(epochs):
        report(epoch=epoch, loss=1 / (epoch + 1), phase=name)
    return epochs


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_future_has_what_its_task_has_reported(pool: ParallelPool) -> None:
    future = pool.parfeval(train, 5)
    assert future.result(300) == 5
    frame = future.metrics
    assert list(frame) == ["time", "attempt", "epoch", "loss", "phase"]
    assert frame["epoch"].tolist() == list(range(5))
    assert frame["loss"].tolist() == [1 / (epoch + 1) for epoch in range(5)]
    assert set(frame["attempt"]) == {1}
    assert frame["time"].is_monotonic_increasing
    assert str(frame["time"].dt.tz) == "UTC"
    assert future.submitted_at <= frame["time"].iloc[0] <= future.finished_at


def test_a_task_that_reports_nothing_has_an_empty_table(pool: ParallelPool) -> None:
    future = pool.parfeval(abs, -3)
    assert future.metrics.empty
    assert future.result(300) == 3
    assert list(future.metrics) == ["time", "attempt"]
    assert future.diary == ""
    assert pool.parfor(abs, [1, 2]).metrics.empty


@pytest.mark.everywhere
def test_all_of_it_is_there_at_once_when_the_result_is(pool: ParallelPool) -> None:
    for count in (1, 7, 20_000):
        future = pool.parfeval(train, count)
        future.result(300)
        assert future.metrics["epoch"].tolist() == list(range(count))


@pytest.mark.semantics
@pytest.mark.processes
def test_a_failed_task_has_what_it_had_reported(pool: ParallelPool) -> None:
    def fail() -> None:
        report(loss=math.nan)
        raise ValueError("diverged")

    future = pool.parfeval(fail)
    with pytest.raises(ValueError, match="diverged"):
        future.result(300)
    assert future.metrics["loss"].isna().tolist() == [True]


@pytest.mark.quick
@pytest.mark.concurrent
def test_metrics_and_diary_are_live(
    pool: ParallelPool, make_gate: Callable[[], Gate], eventually: Callable[..., bool]
) -> None:
    gates = [make_gate() for _ in range(3)]

    def work() -> None:
        for step, gate in enumerate(gates):
            report(step=step)
            print("at", step)
            print("err", step, file=sys.stderr)
            gate.wait()

    future = pool.parfeval(work)
    for step, gate in enumerate(gates):
        expected = "".join(f"at {i}\nerr {i}\n" for i in range(step + 1))
        assert eventually(lambda: len(future.metrics) == step + 1 and future.diary == expected)  # noqa: B023
        assert future.running()
        gate.open()
    future.result(300)
    assert future.metrics["step"].tolist() == [0, 1, 2]


@pytest.mark.quick
@pytest.mark.everywhere
def test_a_loop_passes_each_report_on_in_the_thread_that_called_it(pool: ParallelPool) -> None:
    got: list[Any] = []

    def take(new: MetricsReport) -> None:
        assert threading.current_thread() is threading.main_thread()
        got.append((new.item, new.attempt, new.metrics["epoch"]))

    results = pool.parfor(train, [3, 1, 2], on_report=take)
    assert list(results) == [3, 1, 2], "all reports came before the results"
    for item, count in enumerate([3, 1, 2]):
        assert [new for new in got if new[0] == item] == [(item, 1, i) for i in range(count)]


@pytest.mark.quick
@pytest.mark.concurrent
def test_reports_reach_the_driver_while_tasks_run(
    pool: ParallelPool, make_gate: Callable[[], Gate]
) -> None:
    item_gate, call_gate = make_gate(), make_gate()

    def work(gate: Gate) -> int:
        report(step=1)
        gate.wait()
        return 1

    results = pool.parfor(work, [item_gate], on_report=lambda new: item_gate.open())
    assert results == [1], "the report came while the item waited for it"
    job = pool.parfeval(work, call_gate)
    job.add_report_callback(lambda job, new: call_gate.open())
    assert job.result(300) == 1


@pytest.mark.everywhere
def test_an_error_in_on_report_ends_the_loop(
    pool: ParallelPool, make_pool: PoolMaker, gate: Gate
) -> None:
    is_concurrent = make_pool.is_concurrent

    def work(count: int) -> int:
        train(count)
        if is_concurrent:  # else `on_report` is called within the item
            gate.wait()
        return count

    def stop(new: MetricsReport) -> None:
        raise LookupError(f"seen {new.metrics}")

    with pytest.raises(LookupError, match=r"seen \{'epoch': 0") as caught:
        pool.parfor(work, [1] * 2000, on_report=stop, chunk_size=1)
    assert "cancelled" in set(caught.value.results.to_frame()["status"])  # type: ignore[attr-defined]
    assert pool.parfor(train, [1, 1]) == [1, 1]


def test_a_report_callback_gets_what_came_before_it(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    job = pool.parfeval(train, 2)
    job.result(300)
    got: list[Any] = []

    def take(future: Any, new: MetricsReport) -> None:
        got.append((future, new))
        raise (SystemExit, LookupError)[new.metrics["epoch"]]("a mistake in the callback")

    job.add_report_callback(take)
    assert [(future, new.metrics["epoch"]) for future, new in got] == [(job, 0), (job, 1)]
    assert got[0][1].time.tzinfo is not None
    failed = "A report callback of <Future 'train': finished on worker"
    assert caplog.text.count(failed) == caplog.text.count("a mistake in the callback\n") == 1
    with pytest.raises(InvalidTypeError, match="cannot be called with a future and a report"):
        job.add_report_callback(got.append)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="on_report=3 is not callable"):
        pool.parfor(train, [1], on_report=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("profile", ["inline", "threads"])
def test_report_callbacks_are_called_although_the_pool_ends(
    profile: str, eventually: Callable[..., bool]
) -> None:
    before: list[int] = []
    after: list[int] = []

    def end(job: Any) -> None:
        pool.shutdown(wait=False)
        # the pool ends first
        job.add_report_callback(lambda job, new: before.append(new.metrics["epoch"]))

    with parpool(1, profile=profile, quiet=True) as pool:
        job = pool.parfeval(train, 2)
        job.add_done_callback(end)
    job.add_report_callback(lambda job, new: after.append(new.metrics["epoch"]))
    assert eventually(lambda: before == after == [0, 1])


@pytest.mark.concurrent
def test_tasks_that_run_at_once_are_told_apart(
    pool: ParallelPool, marks: Marks, eventually: Callable[..., bool]
) -> None:
    def work(number: int) -> None:
        marks.add("begun")
        assert eventually(lambda: marks.count("begun") == 3)
        for step in range(300):
            report(number=number, step=step)
            print(number, step)

    futures = [pool.parfeval(work, number) for number in range(3)]
    for number, future in enumerate(futures):
        future.result(300)
        assert future.metrics[["number", "step"]].values.tolist() == [
            [number, step] for step in range(300)
        ]
        assert future.diary == "".join(f"{number} {step}\n" for step in range(300))


@pytest.mark.semantics
@pytest.mark.processes
def test_tasks_that_share_a_call_are_told_apart(pool: ParallelPool) -> None:
    def work(number: int) -> None:
        report(number=number)
        print(number)

    futures = [pool.parfeval(work, number) for number in range(200)]
    for number, future in enumerate(futures):
        future.result(300)
        assert future.metrics["number"].tolist() == [number]
        assert future.diary == f"{number}\n"


@pytest.mark.concurrent
def test_a_cancelled_task_has_what_it_had_said(
    pool: ParallelPool, gate: Gate, eventually: Callable[..., bool]
) -> None:
    def work() -> None:
        report(step=1)
        print("begun")
        gate.wait()

    future = pool.parfeval(work)
    assert eventually(lambda: not future.metrics.empty and future.diary == "begun\n")
    assert future.cancel()
    assert future.metrics["step"].tolist() == [1]
    assert future.diary == "begun\n"


@pytest.mark.concurrent
def test_cancelling_tasks_in_the_middle_of_a_report_breaks_nothing(
    pool: ParallelPool, eventually: Callable[..., bool], check_pool: Callable[[ParallelPool], None]
) -> None:
    def work() -> None:
        step = 0
        while True:
            report(step=step)
            print(step)
            step += 1

    for _ in range(10):
        futures = [pool.parfeval(work) for _ in range(3)]
        assert all(eventually(lambda: len(future.diary) > 0) for future in futures)  # noqa: B023
        assert all(future.cancel() for future in futures)
        for future in futures:
            steps = future.metrics["step"].tolist()
            assert steps == sorted(set(steps))
    future = pool.parfeval(train, 1000)
    future.result(300)
    assert len(future.metrics) == 1000
    check_pool(pool)


@pytest.mark.everywhere
def test_a_retried_task_has_the_rows_of_both_attempts(pool: ParallelPool) -> None:
    def work() -> str:
        report(attempt_was=current_task().attempt)
        if current_task().attempt == 1:
            raise ConnectionError
        return "done"

    future = pool.options(retries=2, retry_on=ConnectionError).parfeval(work)
    assert future.result(300) == "done"
    assert future.metrics[["attempt", "attempt_was"]].values.tolist() == [[1, 1], [2, 2]]


@pytest.mark.semantics
@pytest.mark.concurrent
def test_what_was_said_can_be_read_after_the_pool_has_gone(make_pool: PoolMaker) -> None:
    def work(x: int) -> None:
        report(x=x)
        print("x", x)

    with make_pool(1) as own:
        future = own.parfeval(work, 3)
        results = own.parfor(work, range(4))
    assert future.metrics["x"].tolist() == [3]
    assert future.diary == "x 3\n"
    assert results.metrics["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.semantics
@pytest.mark.processes
def test_a_callback_finds_all_of_it(pool: ParallelPool) -> None:
    seen: list[tuple[int, str]] = []
    is_seen = threading.Event()

    def look(future: Any) -> None:
        seen.append((len(future.metrics), future.diary))
        is_seen.set()

    def work() -> None:
        train(3000)
        print("end")

    pool.parfeval(work).add_done_callback(look)
    assert is_seen.wait(300)
    assert seen == [(3000, "end\n")]


@pytest.mark.everywhere
def test_a_call_on_all_workers_has_what_they_all_said(pool: ParallelPool) -> None:
    def work() -> None:
        report(worker=current_task().worker)
        print(current_task().worker)

    future = pool.parfeval_on_all(work)
    future.result(300)
    assert future.metrics["worker"].tolist() == [0, 1, 2]
    assert future.diary == "0\n1\n2\n"


# --- loops ----------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_loop_has_what_its_items_have_reported(pool: ParallelPool) -> None:
    for max_workers in (None, 0, 1):
        frame = pool.parfor(train, [3, 1, 0, 2], max_workers=max_workers, progress=False).metrics
        assert list(frame) == ["time", "item", "attempt", "epoch", "loss", "phase"]
        assert frame[["item", "epoch"]].values.tolist() == [
            [0, 0],
            [0, 1],
            [0, 2],
            [1, 0],
            [3, 0],
            [3, 1],
        ]
        assert set(frame["attempt"]) == {1}


@pytest.mark.semantics
@pytest.mark.processes
def test_a_long_loop_of_short_items_loses_no_report(pool: ParallelPool) -> None:
    results = pool.parfor(lambda x: report(x=x, square=x * x), range(5_000), progress=False)
    frame = results.metrics
    assert frame["item"].tolist() == frame["x"].tolist() == list(range(5_000))


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loop_that_fails_has_what_its_items_had_reported(pool: ParallelPool) -> None:
    def work(x: int) -> None:
        report(x=x)
        if x == 2:
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as raised:
        pool.parfor(work, range(5), max_workers=1, progress=False)
    assert raised.value.results.metrics["x"].tolist()[:3] == [0, 1, 2]  # type: ignore[attr-defined]


@pytest.mark.semantics
@pytest.mark.processes
def test_results_travel_with_their_metrics(pool: ParallelPool) -> None:
    results = pool.parfor(train, [2, 1], progress=False)
    again = pickle.loads(pickle.dumps(results))
    assert again.metrics.equals(results.metrics)
    assert len(again.metrics) == 3


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loop_in_a_task_keeps_its_reports_to_itself(pool: ParallelPool) -> None:
    def outer() -> tuple[int, list[int]]:
        report(outer=True)
        with parpool(1, profile="inline", quiet=True) as inner:
            results = inner.parfor(train, [2, 3], progress=False)
        report(outer=False)
        return len(results.metrics), results.metrics["item"].tolist()

    future = pool.parfeval(outer)
    assert future.result(300) == (5, [0, 0, 1, 1, 1])
    assert future.metrics["outer"].tolist() == [True, False]


@pytest.mark.everywhere
def test_a_loop_has_what_each_item_has_printed(pool: ParallelPool) -> None:
    """Of its last attempt; also after the results have travelled."""

    def work(x: int) -> None:
        print("attempt", current_task().attempt, "of", x)
        if x == 1:
            print("late", file=sys.stderr)
            if current_task().attempt == 1:
                raise ConnectionError

    results = pool.options(retries=1, retry_on=ConnectionError).parfor(work, 3, progress=False)
    assert list(results.diary) == ["attempt 1 of 0\n", "attempt 2 of 1\nlate\n", "attempt 1 of 2\n"]
    assert results.diary[-1] == "attempt 1 of 2\n"
    assert pickle.loads(pickle.dumps(results)).diary[1:] == list(results.diary)[1:]


@pytest.mark.everywhere
def test_echo_shows_the_lines_of_each_item(
    pool: ParallelPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a progress bar that draws over itself the last state, and a line without an end when the
    loop ends.
    """

    def work(x: int) -> int:
        print("first of", x)
        sys.stderr.write(f"10 %\r{x}0 %\n")
        print("open", end="")
        return x

    assert pool.parfor(work, [1, 2, 3], progress=False, echo=True) == [1, 2, 3]
    seen = capsys.readouterr().out.splitlines()
    for item in range(3):
        prefix = f"item {item}: "
        mine = [line.removeprefix(prefix) for line in seen if line.startswith(prefix)]
        assert mine == [f"first of {item + 1}", f"{item + 1}0 %", "open"]
    assert len(seen) == 9


class Window:
    """A user's stream without `flush`, whose widget is closed after the first text."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        if self.texts:
            raise RuntimeError("the widget is gone")
        self.texts.append(text)


def test_echo_bears_a_stream_that_raises(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window()
    monkeypatch.setattr(sys, "stdout", window)
    assert pool.parfor(print, range(3), progress=False, echo=True) == [None] * 3
    monkeypatch.undo()
    assert window.texts[0].startswith("item 0: 0\n")


@pytest.mark.quick
@pytest.mark.concurrent
def test_echo_comes_while_the_loop_runs(
    pool: ParallelPool, gate: Gate, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., bool]
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)

    def work(_: int) -> None:
        print("begun")
        gate.wait()

    loop = threading.Thread(
        target=pool.parfor, args=(work, 1), kwargs={"progress": False, "echo": True}
    )
    loop.start()
    try:
        assert eventually(lambda: shown.getvalue() == "item 0: begun\n")
    finally:
        gate.open()
        loop.join()


@pytest.mark.processes
def test_a_notebook_shows_what_items_print(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it is told not to. Elsewhere a loop on Ray shows nothing by itself."""
    pool.parfor(print, ["a"], progress=False)
    monkeypatch.setattr("raypool.views.notebook.in_notebook", lambda: True)
    pool.parfor(print, ["b"], progress=False)
    pool.parfor(print, ["c"], progress=False, echo=False)
    assert capsys.readouterr().out == "item 0: b\n"


# --- what is printed ------------------------------------------------------------------------------


@pytest.mark.semantics
@pytest.mark.processes
def test_what_is_printed_outside_of_tasks_is_nobodys(
    pool: ParallelPool, capsys: pytest.CaptureFixture[str]
) -> None:
    print("before")
    future = pool.parfeval(print, "in it", end="!\n")
    future.result(300)
    print("after")
    assert future.diary == "in it!\n"
    seen = capsys.readouterr().out.splitlines()
    assert [line for line in seen if line != "in it!"] == ["before", "after"]


def test_what_is_printed_in_this_process_is_printed(
    pool: ParallelPool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout, sys.stderr
    assert pool.parfeval(print, "once").result(300) is None
    assert capsys.readouterr().out == "once\n"
    assert (sys.stdout, sys.stderr) == before


class Wrapper:
    """A stream round another, as colorama puts it there, and Ray does by it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.mark.semantics
@pytest.mark.processes
def test_what_is_printed_through_a_stream_that_was_put_on_top_is_told_once(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where raypool listens again, for a loop in a task."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)

    def wrap() -> None:
        sys.stdout = Wrapper(sys.stdout)

    def speak() -> None:
        pool.parfor(abs, [1, 2])
        print("once")

    view = pool.options(worker=1)
    view.parfeval(wrap).result(300)
    future = view.parfeval(speak)
    future.result(300)
    assert future.diary == "once\n"


@pytest.mark.processes
def test_threads_of_a_task_speak_for_it(pool: ParallelPool) -> None:
    def work() -> None:
        def speak() -> None:
            print("from a thread")
            report(thread=True)

        thread = threading.Thread(target=speak)
        thread.start()
        thread.join()

    future = pool.parfeval(work)
    future.result(300)
    assert future.diary == "from a thread\n"
    assert future.metrics["thread"].tolist() == [True]


@pytest.mark.everywhere
def test_an_error_says_what_was_printed_last(pool: ParallelPool) -> None:
    def fail(x: int) -> None:
        print("loading", x)
        print("to standard error", file=sys.stderr)
        if x % 2:
            raise ValueError("bad")

    future = pool.parfeval(fail, 7)
    with pytest.raises(ValueError, match="bad") as raised:
        future.result(300)
    expected = "raypool: its last output:\n  loading {}\n  to standard error"
    assert expected.format(7) in raised.value.__notes__
    errors = pool.parfor(fail, range(4), on_error="collect", progress=False).errors
    assert sorted(errors) == [1, 3]
    for index, error in errors.items():
        assert expected.format(index) in error.__notes__


def test_an_error_after_nothing_printed_says_nothing_of_it(pool: ParallelPool) -> None:
    future = pool.parfeval(lambda: 1 / 0)
    assert isinstance(future.exception(300), ZeroDivisionError)
    assert "printed" not in str(future.exception().__notes__)


@pytest.mark.processes
def test_much_text_is_kept_from_its_end(pool: ParallelPool) -> None:
    def work() -> None:
        for number in range(200_000):
            print(f"line {number:06}")

    future = pool.parfeval(work)
    future.result(300)
    first, *lines = future.diary.splitlines()
    assert first == f"[raypool: the first {200_000 * 12 - 2**20:,} bytes are not kept]"
    assert lines[-1] == "line 199999"
    assert len("\n".join(lines)) + 1 == 2**20


# --- when workers die -----------------------------------------------------------------------------


@pytest.mark.processes
def test_what_a_lost_worker_had_said_is_kept(
    pool: ParallelPool, gate: Gate, eventually: Callable[..., bool]
) -> None:
    def work() -> Any:
        import os

        report(attempt_was=current_task().attempt)
        print("attempt", current_task().attempt)
        if current_task().attempt == 1:
            gate.wait()
            os._exit(1)
        return "done"

    future = pool.parfeval(work)
    assert eventually(lambda: future.diary == "attempt 1\n")
    gate.open()
    assert future.result(300) == "done"
    assert future.diary == "attempt 1\n\n[raypool: it runs again]\nattempt 2\n"
    assert future.metrics[["attempt", "attempt_was"]].values.tolist() == [[1, 1], [2, 2]]


def test_the_diary_says_where_a_task_ran_again() -> None:
    """It had ended, and its outcome was lost with its worker. Of an item of a loop there is only
    what it printed last.
    """
    num_runs: Counter[int] = Counter()

    def work(x: int) -> None:
        num_runs[x] += 1
        sys.stdout.write("out")

    with sim_pool(2, FaultPlan(seed=3, p_loss=0.5)) as pool:
        view = pool.options(retries=20)
        for x in range(20):
            assert view.parfeval(work, x).diary == "\n[raypool: it runs again]\n".join(
                ["out"] * num_runs[x]
            )
        assert max(num_runs.values()) > 1
        num_runs.clear()
        results = view.parfor(work, 20, progress=False)
        assert list(results.diary) == ["out"] * 20
        assert max(num_runs.values()) > 1


@pytest.mark.processes
def test_a_breakpoint_in_a_task_fails_at_once(pool: ParallelPool) -> None:
    """Nobody could type there, and Ray's debugger would wait without a word."""
    with pytest.raises(
        TaskError, match=r"breakpoint\(\) was reached.*profile='inline'.*raypool replay"
    ):
        pool.parfeval(lambda: breakpoint()).result(300)


@pytest.mark.processes
def test_the_error_of_a_lost_worker_says_what_was_printed_last(
    pool: ParallelPool, gate: Gate, eventually: Callable[..., bool]
) -> None:
    def work() -> None:
        import os

        print("loading the model")
        gate.wait()
        os._exit(1)

    future = pool.options(retries=0).parfeval(work)
    assert eventually(lambda: future.diary == "loading the model\n")
    gate.open()
    error = future.exception(300)
    assert "raypool: its last output:\n  loading the model" in getattr(error, "__notes__", ())


@pytest.mark.processes
def test_a_forked_child_of_a_task_may_report_and_print(pool: ParallelPool) -> None:
    def work() -> int:
        import os

        child = os.fork()
        if child == 0:
            report(child=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        report(child=False)
        return status

    future = pool.parfeval(work)
    assert future.result(300) == 0
    assert future.metrics["child"].tolist() == [False]
