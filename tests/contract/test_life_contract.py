"""What workers do when they begin and end, and that they rest when there is nothing to do, on every
kind of pool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from raypool import (
    ParallelPool,
    PoolClosedError,
    SerializationError,
    StartupError,
    TaskCancelled,
    current_task,
)
from raypool.backends.local import InlineBackend
from raypool.engine.driver import Arrivals

pytestmark = pytest.mark.semantics


IDLE_S = 0.3


def where(*_: object) -> int:
    """The number of the worker that runs this."""
    return current_task().worker


def end_worker() -> None:
    """End the worker, in a way that no teardown survives."""
    os.kill(os.getpid(), signal.SIGKILL)


def states_of(pool: ParallelPool) -> set[str]:
    return {worker.state for worker in pool.workers}


# --- setup ----------------------------------------------------------------------------------------


@pytest.mark.semantics
@pytest.mark.concurrent
def test_setup_runs_once_in_each_worker_before_anything_else_and_teardown_at_its_end(
    make_pool: Any, marks: Any
) -> None:
    """Teardown finds what setup has made."""

    def setup() -> None:
        marks.add(f"setup {where()}")
        sys.raypool_test_thing = "thing"  # type: ignore[attr-defined]

    large = bytes(2**17)  # it travels in another way

    def teardown() -> None:
        assert len(large) == 2**17
        marks.add(f"teardown {sys.raypool_test_thing}")  # type: ignore[attr-defined]

    with make_pool(2, setup=setup, teardown=teardown) as pool:
        assert marks.all() == ["setup 0", "setup 1"]
        assert list(pool.parfor(lambda _: marks.count(f"setup {where()}"), 10)) == [1] * 10
        pool.resize(3)
        assert pool.parfeval_on_all(lambda: marks.count(f"setup {where()}")).result(300) == [1] * 3
        assert marks.all() == ["setup 0", "setup 1", "setup 2"]
        pool.resize(2)
        pool.parfor(abs, 10)
    assert marks.all() == ["setup 0", "setup 1", "setup 2", *["teardown thing"] * 3]


@pytest.mark.processes
def test_a_worker_that_replaces_another_is_set_up_too(make_pool: Any, marks: Any) -> None:
    """One that dies cannot tear down."""
    with make_pool(
        1, setup=lambda: marks.add("setup"), teardown=lambda: marks.add("teardown")
    ) as pool:
        pool.options(retries=0).parfeval(end_worker).exception(300)
        assert pool.parfeval(lambda: marks.count("setup")).result(300) == 2
    assert marks.count("teardown") == 1


@pytest.mark.semantics
@pytest.mark.concurrent
def test_a_setup_that_fails(make_pool: Any, marks: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What was raised is said at once: trying again would not help. Nothing of the pool is left."""

    def fail() -> None:
        marks.add("tried")
        raise LookupError("no such data set")

    words = (
        r"(?s)1 of 1 workers did not start; worker 0: setup= or initializer= raised LookupError:"
        r" no such data set.*\. Call that function in this process to debug it\.$"
    )
    with pytest.raises(StartupError, match=words) as caught:
        make_pool(1, setup=fail, teardown=lambda: marks.add("teardown"))
    assert 1 <= marks.count("tried") <= 3, "the next may have begun"
    assert marks.count("teardown") == 0
    assert "/tmp/ray" not in str(caught.value)
    assert caplog.text == ""


@pytest.mark.threads
def test_a_setup_that_fails_is_told_of_once(
    make_pool: Any,
    eventually: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the pool has tried three times, and given up the place, before its end is asked
    for.
    """
    wait, note_failed, noted = Arrivals.wait, Arrivals.note_failed, []

    def note(*failure: Any) -> bool:
        noted.append(note_failed(*failure))
        return noted[-1]

    def wait_and_dawdle(*arguments: Any) -> dict[int, str]:
        failed = wait(*arguments)
        assert eventually(lambda: len(noted) == 4), "three failures, and the end of the place"
        return failed

    monkeypatch.setattr(Arrivals, "note_failed", note)
    monkeypatch.setattr(Arrivals, "wait", wait_and_dawdle)
    with pytest.raises(StartupError, match="setup= or initializer= raised ZeroDivisionError"):
        make_pool(1, setup=lambda: 1 // 0)
    assert caplog.text == ""


@pytest.mark.threads
def test_of_a_pool_whose_setup_cannot_be_sent_nothing_is_left(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SerializationError("a lock cannot be sent")

    before = threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(InlineBackend, "pack", refuse)
        with pytest.raises(SerializationError, match="a lock"):
            make_pool(1, setup=print)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(60)
        assert not thread.is_alive(), thread.name


@pytest.mark.processes
def test_of_a_pool_whose_teardown_cannot_be_sent_nothing_is_left(make_pool: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match="Cannot send the teardown"):
        make_pool(1, teardown=lambda: lock)


@pytest.mark.semantics
@pytest.mark.threads
def test_a_setup_that_exits(make_pool: Any) -> None:
    with pytest.raises(StartupError, match="initializer= raised SystemExit: 3"):
        make_pool(1, setup=lambda: sys.exit(3))


@pytest.mark.threads
def test_a_setup_in_a_thread_that_raises_what_ends_threads(make_pool: Any) -> None:
    def setup() -> None:
        raise KeyboardInterrupt("not from the keyboard")

    with pytest.raises(StartupError, match="raised KeyboardInterrupt: not from the keyboard"):
        make_pool(1, setup=setup)


@pytest.mark.concurrent
def test_a_setup_that_fails_in_some_workers_only(
    make_pool: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range of sizes is content with the others; that there are fewer is said."""
    if make_pool.backend == "ray":  # else it does without a claim that comes late
        monkeypatch.setattr("raypool.backends.ray.claims.SETTLE_S", 300.0)

    def fail() -> None:
        if current_task().worker == 1:
            raise LookupError("not here")

    with make_pool((1, 2), setup=fail) as pool:
        assert pool.parfeval(where).result(300) == 0
        assert "Worker 1 did not start: setup= or initializer= raised" in caplog.text


# --- teardown -------------------------------------------------------------------------------------


@pytest.mark.semantics
@pytest.mark.threads
def test_teardown_comes_after_what_runs(make_pool: Any, marks: Any) -> None:
    with make_pool(1, teardown=lambda: marks.add(f"teardown after {marks.count('task')}")) as pool:
        for _ in range(5):
            pool.parfeval(marks.add, "task")
    assert marks.all() == ["task"] * 5 + ["teardown after 5"]


@pytest.mark.semantics
@pytest.mark.threads
def test_a_teardown_that_fails_keeps_nobody_from_ending(
    make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with make_pool(2, teardown=lambda: 1 // 0) as pool:
        assert pool.parfeval(abs, -1).result(300) == 1
    assert pool.is_closed
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.threads
def test_closing_cancels_running_calls_and_drops_waiting_ones(
    make_pool: Any, gate: Any, marks: Any, eventually: Any, press_ctrl_c: Any
) -> None:
    """An item waits in the worker, behind the running one, when Ctrl-C leaves `with`."""

    def run(item: int) -> None:
        if item:
            marks.add("begun")
            press_ctrl_c()
            gate.wait()

    def interrupt() -> None:
        with make_pool(1, teardown=lambda: marks.add("teardown")) as pool:
            pool.parfor(run, [0] * 20 + [1] * 20, chunk_size=1)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert eventually(lambda: marks.all() == ["begun", "teardown"])


@pytest.mark.processes
def test_workers_whose_calls_were_cancelled_tear_down(
    make_pool: Any, gate: Any, marks: Any, eventually: Any
) -> None:
    def run() -> None:
        marks.add("begun")
        gate.wait()

    with make_pool(2, teardown=lambda: marks.add("teardown"), cancel_grace_s=300) as pool:
        futures = [pool.parfeval(run) for _ in range(2)]
        assert eventually(lambda: marks.count("begun") == 2)
        for future in futures:
            future.cancel()
    assert marks.all() == ["begun", "begun", "teardown", "teardown"]


@pytest.mark.processes
def test_a_cancelled_call_that_does_not_stop_costs_the_teardown(
    make_pool: Any, gate: Any, marks: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        marks.add("begun")
        with contextlib.suppress(TaskCancelled):
            gate.wait()
        gate.wait()

    def interrupt() -> None:
        with make_pool(1, teardown=lambda: marks.add("teardown"), cancel_grace_s=0.1) as pool:
            pool.parfeval(run)
            assert eventually(lambda: marks.count("begun") == 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert marks.all() == ["begun"]
    assert "worker 0 (with the cleanup of constants) is skipped: a cancelled call" in caplog.text


@pytest.mark.threads
def test_closing_waits_for_no_worker_that_waits_for_another(
    make_pool: Any, gate: Any, marks: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Items with a seed take turns."""

    def hold(_: int) -> None:
        marks.add("begun")
        gate.wait()

    def loop(worker: int, fn: Any) -> None:
        with contextlib.suppress(CancelledError):
            pool.options(worker=worker).parfor(fn, range(3), seed=0)

    pool = make_pool(2, teardown=lambda: marks.add("teardown"))
    holding = threading.Thread(target=loop, args=(1, hold))
    waiting = threading.Thread(target=loop, args=(0, abs))
    holding.start()
    assert eventually(lambda: marks.count("begun") == 1)
    waiting.start()
    assert eventually(lambda: pool.workers[0].state == "busy")
    pool.delete()
    holding.join(300)
    waiting.join(300)
    assert eventually(lambda: marks.all() == ["begun", "teardown", "teardown"])
    assert caplog.text == ""


@pytest.mark.concurrent
def test_a_teardown_that_hangs_is_given_up(
    make_pool: Any, gate: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.backends.local.TEARDOWN_TIMEOUT_S", 0.5)
    if make_pool.is_in_processes:
        monkeypatch.setattr("raypool.backends.ray.backend.WIND_UP_TIMEOUT_S", 0.5)
    with make_pool(1, teardown=gate.wait) as pool:
        assert pool.parfeval(abs, -1).result(300) == 1
    assert "worker 0" in caplog.text
    assert "did not end within 0.5 s" in caplog.text
    gate.open()


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.threads
def test_resizing_in_two_threads_at_once_does_not_add_up(make_pool: Any) -> None:
    at_once = threading.Barrier(2)

    def resize(pool: ParallelPool) -> None:
        at_once.wait()
        pool.resize(3)

    with make_pool(1) as pool, ThreadPoolExecutor(2) as threads:
        for _ in range(50):
            list(threads.map(resize, [pool, pool]))
            assert pool.num_workers == 3
            pool.resize(1)


@pytest.mark.threads
def test_resizing_twice_in_a_callback_does_not_add_up(make_pool: Any) -> None:
    is_done = threading.Event()

    def shrink(_: Any) -> None:
        pool.resize(2)
        pool.resize(2)
        is_done.set()

    with make_pool(4) as pool:
        pool.parfeval(abs, -3).add_done_callback(shrink)
        assert is_done.wait(300)
        assert pool.parfeval(abs, -4).result(300) == 4
        assert pool.num_workers == 2


# --- nothing to do --------------------------------------------------------------------------------


@pytest.mark.concurrent
def test_idle_workers_end_and_are_started_again(
    make_pool: Any, marks: Any, eventually: Any, capfd: Any
) -> None:
    """Scenario 6. A line says so, once, where that frees memory."""
    changes = {
        "setup": lambda: marks.add("setup"),
        "teardown": lambda: marks.add("teardown"),
        "idle_timeout_s": IDLE_S,
    }
    with make_pool(2, quiet=False, **changes) as pool:
        assert pool.parfeval_on_all(where).result(300) == [0, 1]
        pids = [worker.pid for worker in pool.workers]
        assert eventually(lambda: states_of(pool) == {"parked"})
        assert eventually(lambda: marks.count("teardown") == marks.count("setup"))
        if make_pool.is_in_processes:
            assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        assert (pool.num_workers, pool.idle_workers, pool.busy, pool.is_closed) == (
            2,
            0,
            False,
            False,
        )

        assert set(pool.parfor(where, 20)) <= {0, 1}
        assert pool.parfeval(where).result(300) in (0, 1)
        assert pool.parfeval_on_all(where).result(300) == [0, 1]
        assert marks.count("setup") >= 4, "as often as it was held up between two calls"
        assert eventually(lambda: states_of(pool) == {"parked"})
        assert pool.num_workers == 2
        assert eventually(lambda: marks.count("teardown") == marks.count("setup")), (
            "before the pool ends what still runs"
        )
    line = (
        "raypool: idle; 2 workers have exited and freed their memory; the next call starts them"
        " again"
    )
    assert capfd.readouterr().out.count(line) == (1 if make_pool.is_in_processes else 0)


@pytest.mark.threads
def test_what_runs_long_is_no_idling(make_pool: Any, gate: Any, eventually: Any) -> None:
    with make_pool(2, idle_timeout_s=IDLE_S) as pool:
        future = pool.parfeval(gate.wait)
        assert eventually(future.running)
        assert not eventually(lambda: "parked" in states_of(pool), 4 * IDLE_S)
        gate.open()
        future.result(300)
        assert eventually(lambda: states_of(pool) == {"parked"})


@pytest.mark.threads
@pytest.mark.parametrize(
    "what", ["resize", "shutdown", "delete", "on all", "part", "loop", "bound"]
)
def test_what_is_asked_of_a_pool_that_rests(make_pool: Any, eventually: Any, what: str) -> None:
    with make_pool(2, idle_timeout_s=IDLE_S) as pool:
        assert eventually(lambda: states_of(pool) == {"parked"})
        if what == "resize":
            pool.resize(1)
            assert pool.num_workers == 1
            pool.resize(3)
            assert pool.parfeval_on_all(lambda: 1).result(300) == [1, 1, 1]
        elif what in ("shutdown", "delete"):
            getattr(pool, what)()
            with pytest.raises(PoolClosedError):
                pool.parfeval(where)
        elif what == "on all":
            assert pool.parfeval_on_all(where).result(300) == [0, 1]
        elif what == "part":
            part, rest = pool.partition(workers=[1])
            assert set(part.parfor(where, 5)) == {1}
            assert rest.parfeval(where).result(300) == 0
        elif what == "loop":
            assert list(pool.parfor(lambda x: x + 1, iter(range(50)))) == list(range(1, 51))
        else:
            assert pool.options(worker=1).parfeval(where).result(300) == 1


@pytest.mark.threads
def test_a_pool_that_is_used_and_rests_again_and_again(make_pool: Any, eventually: Any) -> None:
    with make_pool(1, idle_timeout_s=0.05) as pool:
        for _ in range(4):
            assert eventually(lambda: states_of(pool) == {"parked"})
            assert list(pool.parfor(where, 3)) == [0] * 3
        assert pool.statistics().workers_lost == 0


@pytest.mark.threads
def test_many_threads_wake_a_pool_at_once(make_pool: Any, eventually: Any) -> None:
    with make_pool(2, idle_timeout_s=IDLE_S) as pool:
        assert eventually(lambda: states_of(pool) == {"parked"})
        values: list[int] = []
        threads = [
            threading.Thread(target=lambda: values.extend(pool.parfor(abs, 5))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(values) == sorted(list(range(5)) * 6)


def test_an_inline_pool_has_nothing_that_could_end(make_pool: Any) -> None:
    with make_pool(2, idle_timeout_s=0.001) as pool:
        time.sleep(0.01)
        assert pool.parfeval(where).result(300) == 0
        assert "parked" not in states_of(pool)


@pytest.mark.threads
def test_constants_are_made_anew_after_a_rest(
    make_pool: Any, marks: Any, eventually: Callable[..., bool]
) -> None:
    with make_pool(1, idle_timeout_s=IDLE_S) as pool:
        table = pool.constant(
            lambda: marks.add("built") or [1, 2], cleanup=lambda _: marks.add("cleaned")
        )
        assert pool.parfeval(lambda: table.value).result(300) == [1, 2]
        assert eventually(lambda: states_of(pool) == {"parked"})
        assert pool.parfeval(lambda: table.value).result(300) == [1, 2]
    assert marks.all() == ["built", "cleaned"], "one process, which goes on"


class WordlessError(Exception):
    def __str__(self) -> str:
        return {404: "not found"}[500]


@pytest.mark.semantics
@pytest.mark.threads
def test_a_setup_whose_error_has_no_words_is_told_by_its_type(make_pool: Any) -> None:
    def setup() -> None:
        raise WordlessError

    with pytest.raises(StartupError, match="raised WordlessError"):
        make_pool(1, setup=setup)


@pytest.mark.threads
def test_a_process_without_standard_output_can_open_a_pool(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with make_pool(2, quiet=False) as pool:
        assert list(pool.parfor(abs, [-1])) == [1]


class EmptyError(Exception):
    def __len__(self) -> int:
        return 0


@pytest.mark.threads
def test_no_later_worker_makes_a_sticky_call_that_has_failed(make_pool: Any) -> None:
    """Whatever the truth value of its error."""

    def fail() -> None:
        raise EmptyError

    with make_pool(1) as pool:
        with pytest.raises(EmptyError):
            pool.parfeval_on_all(fail, sticky=True).result(300)
        pool.resize(2)
        assert list(pool.parfor(abs, [-1, -2])) == [1, 2]
