"""What runs can be stopped: its worker is free at once, and goes on if it can (scenarios 18, 19,
22, 27).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypool import ParallelPool, TaskCancelled, TaskTimeoutError, current_task, fetch_next, wait
from tests.shared_pool import shared

pytestmark = [pytest.mark.quick]


def pid() -> int:
    import os

    return os.getpid()


def count_for_ever() -> None:
    number = 0
    while True:
        number += 1


def sleep_long() -> None:
    time.sleep(60)


def wait_for_event() -> None:
    threading.Event().wait(60)


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sum_in_c(gate: Any) -> int:
    """One call of native code, which holds Python's lock for hours; it opens the gate itself, so
    that no Python runs any more when that is open.
    """
    opened = map(os.open, [str(gate.path)], [os.O_CREAT])
    return sum(itertools.chain(opened, range(10**14)))


def hash_in_c(gate: Any) -> bytes:
    """One call of native code, which gives Python's lock away for hours; the gate is opened when it
    has computed for a while.
    """
    import hashlib

    clock = time.pthread_getcpuclockid(threading.get_ident())
    at_first = time.clock_gettime(clock)

    def watch() -> None:
        while time.clock_gettime(clock) < at_first + 0.3:
            time.sleep(0.01)
        gate.open()

    threading.Thread(target=watch, daemon=True).start()
    return hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def swallow(gate: Any) -> None:
    while True:
        try:
            gate.open()
            time.sleep(600)
        except BaseException:
            continue


def started(
    pool: ParallelPool, fn: Callable[..., Any], *args: Any, gate: Any, **options: Any
) -> Any:
    """Run a function, and return its future when it is running there."""

    def begin() -> Any:
        gate.open()
        return fn(*args)

    future = pool.options(**options).parfeval(begin)
    gate.wait()
    return future


def check_good(pool: ParallelPool) -> None:
    assert pool.parfeval_on_all(abs, -1).result(300) == [1, 1, 1]
    assert not pool.busy


@pytest.mark.parametrize("fn", [count_for_ever, sleep_long, wait_for_event, wait_for_lock])
def test_what_waits_or_runs_python_stops_and_its_worker_goes_on(
    pool: ParallelPool, gate: Any, fn: Any, eventually: Any
) -> None:
    pids = pool.parfeval_on_all(pid).result(300)
    future = started(pool, fn, gate=gate, worker=1)
    beside = pool.options(worker=0).parfeval(gate.path.exists)

    assert future.cancel()

    assert future.cancelled()
    assert future.state == "cancelled"
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)
    assert pool.options(worker=1).parfeval(pid).result(300) == pids[1], (
        "another process has taken its place"
    )
    assert eventually(lambda: future.worker_replaced is False)
    assert beside.result(300)
    assert pool.parfeval_on_all(pid).result(300) == pids
    assert not future.cancel() or future.cancelled()


@pytest.mark.parametrize(
    "fn", [sum_in_c, *(pytest.param(fn, marks=pytest.mark.ci) for fn in (hash_in_c, swallow))]
)
def test_what_does_not_stop_is_killed_and_its_worker_replaced_on_the_same_gpu(
    pool: ParallelPool, gate: Any, fn: Any, eventually: Any
) -> None:
    before = pool.workers
    old = before[1].pid
    known: list[bool | None] = []

    def look() -> tuple[int, bool]:
        return pid(), is_alive(old)

    future = pool.options(worker=1).parfeval(fn, gate)
    future.add_done_callback(lambda each: known.append(each.worker_replaced))
    gate.wait()

    assert future.cancel()
    assert known == [None]
    following = [pool.parfeval(look) for _ in range(4)]

    for each in following:
        where, is_there_still = each.result(300)
        assert where in (before[0].pid, before[2].pid) or not is_there_still, (
            "it ran beside what had to be killed"
        )
    assert eventually(lambda: future.worker_replaced is True)
    assert eventually(lambda: pool.idle_workers == 3)
    after = pool.workers
    assert [worker.gpu for worker in after] == [worker.gpu for worker in before]
    assert [after[other].pid for other in (0, 2)] == [before[other].pid for other in (0, 2)]
    assert after[1].pid != before[1].pid
    assert eventually(lambda: not psutil.pid_exists(before[1].pid))
    check_good(pool)


def test_clean_up_code_runs(pool: ParallelPool, gate: Any, marks: Any, eventually: Any) -> None:
    def train() -> None:
        try:
            gate.open()
            time.sleep(600)
        except TaskCancelled:
            marks.add("cancelled")
            raise
        finally:
            marks.add("tidied up")

    future = pool.parfeval(train)
    gate.wait()
    assert future.cancel()
    assert eventually(lambda: future.worker_replaced is False)
    assert marks.all() == ["cancelled", "tidied up"]


def test_an_exception_in_the_clean_up_changes_nothing(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    def train() -> None:
        try:
            gate.open()
            time.sleep(600)
        finally:
            raise LookupError("while tidying up")

    future = pool.parfeval(train)
    gate.wait()
    assert future.cancel()
    assert eventually(lambda: future.worker_replaced is False)
    assert future.cancelled()
    assert future.error is None


def test_an_import_is_not_torn(
    pool: ParallelPool, gate: Any, make_gate: Any, tmp_path: Path, eventually: Any
) -> None:
    """What was imported by half can't be imported again in many a package: the task ends when the
    import has.
    """
    inside, going_on = make_gate(), make_gate()
    (tmp_path / "slow_to_import.py").write_text(f"""
import time
from pathlib import Path
Path({str(inside.path)!r}).touch()
while not Path({str(going_on.path)!r}).exists():
    time.sleep(0.01)
whole = True
""")

    def use() -> bool:
        import sys

        sys.path.insert(0, str(tmp_path))
        import slow_to_import  # type: ignore[import-not-found]

        time.sleep(60)
        return bool(slow_to_import.whole)

    def look() -> bool:
        import sys

        return bool(sys.modules["slow_to_import"].whole)

    future = started(pool, use, gate=gate, worker=0)
    inside.wait()
    assert future.cancel()
    assert pool.workers[0].state == "busy"
    going_on.open()
    assert pool.options(worker=0).parfeval(look).result(300)
    assert eventually(lambda: future.worker_replaced is not None)
    assert future.worker_replaced is False


@pytest.mark.ci
def test_data_loaders_go_with_their_task(
    pool: ParallelPool,
    make_gate: Any,
    tmp_path: Path,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the task stops or has to be killed; torch may end it as its children are killed."""

    def train(is_stubborn: bool, name: str, running: Any) -> None:
        import psutil
        import torch

        def collate(batch: Any) -> Any:
            time.sleep(0.01)
            return batch

        loader = torch.utils.data.DataLoader(range(10**6), num_workers=2, collate_fn=collate)
        for _ in loader:
            children = [child.pid for child in psutil.Process().children(recursive=True)]
            (tmp_path / name).write_text(" ".join(map(str, children)))
            try:
                running.open()
                time.sleep(60)
            except BaseException:
                if is_stubborn:
                    time.sleep(60)
                raise

    for is_stubborn, grace_s in ((False, 60.0), (True, 5.0)):
        monkeypatch.setattr(pool._engine.backend._agents, "_cancel_grace_s", grace_s)
        running = make_gate()
        future = pool.parfeval(train, is_stubborn, f"children-{is_stubborn}", running)
        running.wait()
        children = [
            int(text) for text in (tmp_path / f"children-{is_stubborn}").read_text().split()
        ]
        assert len(children) >= 2
        assert future.cancel()
        assert eventually(lambda future=future: future.worker_replaced is not None)
        assert future.worker_replaced is is_stubborn
        assert eventually(lambda children=children: not any(map(is_alive, children))), (
            "a data loader is left"
        )
    assert eventually(lambda: pool.idle_workers == 3)


def is_alive(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_only_what_was_meant_is_hit(pool: ParallelPool) -> None:
    """Calls that end while they are cancelled, and the ones behind them in the same call: each has
    its value or is cancelled.
    """

    def work(number: int) -> int:
        deadline = time.perf_counter() + random.random() * 0.004
        while time.perf_counter() < deadline:
            pass
        return number

    generator, lost = random.Random(0), pool.statistics().workers_lost
    for _ in range(10):
        futures = [pool.parfeval(work, number) for number in range(40)]
        chosen = generator.sample(futures, 15)
        for future in chosen:
            future.cancel()
        assert wait(futures, 300)
        for number, future in enumerate(futures):
            if future.cancelled():
                assert future in chosen, "somebody else was hit"
            else:
                assert future.result() == number
    check_good(pool)
    assert pool.statistics().workers_lost <= lost + 1, "a worker was lost to it"


def test_five_futures_on_two_workers(two_workers: Any, make_gate: Any, eventually: Any) -> None:
    """Scenario 18."""
    gates = [make_gate() for _ in range(5)]
    futures = [two_workers.parfeval(gate.wait) for gate in gates]
    assert eventually(
        lambda: (
            [future.state for future in futures]
            == ["running", "running", "queued", "queued", "queued"]
        )
    )

    assert futures[1].cancel()

    assert eventually(
        lambda: (
            [future.state for future in futures]
            == ["running", "cancelled", "running", "queued", "queued"]
        )
    )
    gates[2].open()
    assert futures[2].result(300) is None
    assert eventually(
        lambda: (
            [f.state for f in futures] == ["running", "cancelled", "finished", "running", "queued"]
        )
    )
    two_workers.cancel_all()
    assert [future.state for future in futures] == [
        "cancelled",
        "cancelled",
        "finished",
        "cancelled",
        "cancelled",
    ]
    assert eventually(lambda: two_workers.idle_workers == 2)


def test_the_best_is_picked_early(two_workers: Any, eventually: Any) -> None:
    """Scenario 22."""

    def train(score: float) -> float:
        if score < 0.95:
            time.sleep(0.05 if score < 0.5 else 600)
        return score

    futures = [two_workers.parfeval(train, score) for score in (0.3, 0.9, 0.96, 0.9, 0.9)]
    best = 0.0
    while best < 0.95:
        _, value = fetch_next(futures, 300)
        best = max(best, value)
    two_workers.cancel_all()
    assert best == 0.96
    assert eventually(lambda: two_workers.idle_workers == 2)
    assert [future.state for future in futures].count("cancelled") == 3


def test_the_stop_button(pool: ParallelPool, gate: Any) -> None:
    """Scenario 27; also for a task that waits for its turn."""

    def train() -> list[bool]:
        seen = [current_task().should_stop]
        gate.open()
        while not seen[-1]:
            seen[1:] = [current_task().should_stop]
        return seen

    running = pool.options(worker=0).parfeval(train)
    gate.wait()
    waiting = pool.options(worker=0).parfeval(train)
    assert waiting.request_stop()
    assert running.request_stop()
    assert running.result(300) == [False, True]
    assert running.state == "finished"
    assert waiting.result(300) == [True]
    assert not running.request_stop()


@pytest.mark.ci
def test_a_time_limit(
    pool: ParallelPool, marks: Any, eventually: Any, let_time_pass: Callable[[float], None]
) -> None:
    pids = pool.parfeval_on_all(pid).result(300)
    limited = pool.options(timeout_s=0.5, name="slow one")
    future = limited.parfeval(sleep_long)
    error = future.exception(300)
    assert isinstance(error, TaskTimeoutError)
    assert "slow one had not ended after timeout_s=0.5" in str(error)
    assert future.state == "failed"
    assert future.attempts == 1
    with pytest.raises(TaskTimeoutError, match="item 0 of"):
        pool.options(timeout_s=0.5).parfor(time.sleep, [600.0])

    def work(seconds: float) -> float:
        if seconds:
            marks.add("hangs")
            time.sleep(seconds)
        return seconds

    def be_late() -> None:
        assert eventually(lambda: marks.count("hangs") == 2)
        # the others have ended, for the driver too
        assert eventually(lambda: (pool.statistics().running, pool.statistics().queued) == (2, 0))
        let_time_pass(400)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        late = thread.submit(be_late)
        results = pool.options(timeout_s=400).parfor(
            work, [0.0, 600.0, 0.0, 600.0, 0.0], on_error="collect"
        )
        late.result()
    assert list(results) == [0.0, None, 0.0, None, 0.0]
    assert {index: type(error) for index, error in results.errors.items()} == {
        1: TaskTimeoutError,
        3: TaskTimeoutError,
    }
    assert pool.parfeval_on_all(pid).result(300) == pids


def test_a_loop_that_fails_stops_what_runs(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any
) -> None:
    def work(number: int) -> int:
        if number == 0:
            gate.wait()
            raise LookupError("the first one fails")
        try:
            gate.open()
            time.sleep(60)
        finally:
            marks.add("stopped")
        return number

    with pytest.raises(LookupError, match="the first one fails") as caught:
        pool.parfor(work, [0, 1])
    assert list(caught.value.results) == [None, None]
    assert eventually(lambda: marks.count("stopped") == 1)
    assert eventually(lambda: pool.idle_workers == 3)
    check_good(pool)


def test_the_workers_of_a_cancelled_call_on_all(
    pool: ParallelPool, make_gate: Any, eventually: Any
) -> None:
    gate = make_gate()
    everywhere = pool.parfeval_on_all(gate.wait)
    assert eventually(lambda: pool.idle_workers == 0)
    assert everywhere.cancel()
    assert everywhere.cancelled()
    assert eventually(lambda: pool.idle_workers == 3)


def test_cancelling_from_many_threads(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    future = started(pool, sleep_long, gate=gate)
    called: list[Any] = []
    future.add_done_callback(called.append)
    threads = [threading.Thread(target=future.cancel) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert future.cancelled()
    assert called == [future]
    assert eventually(lambda: pool.idle_workers == 3)


@pytest.mark.ci
def test_an_agent_that_dies_takes_nothing_with_it(
    two_workers: Any, gate: Any, make_gate: Any, eventually: Any
) -> None:
    kill_agents()
    future = started(two_workers, sleep_long, gate=gate)
    assert future.cancel()
    assert two_workers.parfeval_on_all(abs, -2).result(300) == [2, 2]
    future = started(two_workers, sleep_long, gate=make_gate())
    assert future.cancel()
    assert two_workers.parfeval_on_all(abs, -3).result(300) == [3, 3]
    assert eventually(lambda: future.worker_replaced is False)
    shared.close()  # the next agent has another temporary folder


def kill_agents() -> None:
    from ray._private import state

    for actor in state.actors().values():
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == "NodeAgent":
            psutil.Process(actor["Pid"]).kill()
