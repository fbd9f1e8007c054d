"""A sweep that is watched while it runs, and processes that nobody has used before (scenarios 17,
25).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raypool import DataQueue, ParallelPool, WorkerResources, current_task, parpool, report


def pid() -> int:
    import os

    return os.getpid()


@pytest.mark.quick
def test_loss_curves_of_four_trainings(pool: ParallelPool) -> None:
    """Scenario 25: live, each sender's in order, and what was sent before anybody listened comes
    when somebody does.
    """
    losses: DataQueue[tuple[int, int]] = DataQueue()
    seen: dict[int, list[int]] = {number: [] for number in range(4)}

    def train(number: int) -> None:
        for epoch in range(500):
            losses.put((number, epoch))

    early = pool.parfeval(train, 0)
    early.result(300)
    losses.after_each(lambda value: seen[value[0]].append(value[1]))
    later = [pool.parfeval(train, number) for number in (1, 2, 3)]
    for future in later:
        future.result(300)
    losses.close()
    assert seen == {number: list(range(500)) for number in range(4)}


def test_a_fresh_process(pool: ParallelPool, tmp_path: Path, eventually: Any) -> None:
    """Nothing has run in it before, nothing runs in it after, and the worker stays on its GPU."""
    before = {worker.index: (worker.gpu, worker.pid) for worker in pool.workers}
    lost = pool.statistics().workers_lost
    assert pool.parfeval_on_all(pid).result(300) == [number for _, number in before.values()]

    fresh = pool.options(fresh_process=True)
    pids = [future.result(300) for future in [fresh.parfeval(pid) for _ in range(4)]]
    assert len(set(pids)) == 4, "a process was used twice"
    others = [future.result(300) for future in [pool.parfeval(pid) for _ in range(6)]]
    assert not set(others) & set(pids)
    assert {worker.index: worker.gpu for worker in pool.workers} == {
        index: gpu for index, (gpu, _) in before.items()
    }
    assert (
        pool.options(fresh_process=True, worker=1)
        .parfeval(lambda: current_task().worker)
        .result(300)
        == 1
    )
    results = fresh.parfor(lambda number: (number, pid()), range(3))
    assert [number for number, _ in results] == [0, 1, 2]
    assert len({number for _, number in results}) == 3
    assert eventually(lambda: pool.idle_workers == 3)
    assert pool.statistics().workers_lost == lost


def test_a_fresh_process_that_dies_and_one_that_is_cancelled(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    import os

    from raypool import WorkerLostError

    fresh = pool.options(fresh_process=True, retries=1)
    assert isinstance(fresh.parfeval(os._exit, 1).exception(300), WorkerLostError)

    def sleep() -> None:
        gate.open()
        time.sleep(600)

    future = fresh.parfeval(sleep)
    gate.wait()
    assert future.cancel()
    assert pool.parfeval_on_all(abs, -1).result(300) == [1, 1, 1]


@pytest.mark.quick
def test_threads_speak_for_the_task_that_has_started_them(
    pool: ParallelPool, make_gate: Any
) -> None:
    """Also when they outlive it; and a pool of threads for whichever task hands something in."""
    go_on, has_ended, may_end = make_gate(), make_gate(), make_gate()
    workers = pool.constant(lambda: concurrent.futures.ThreadPoolExecutor(1))

    def first() -> None:
        def go_on_reporting() -> None:
            go_on.wait()
            report(of="the first, late")
            print("late")
            has_ended.open()

        threading.Thread(target=go_on_reporting).start()
        workers.value.submit(report, of="the first").result()

    def second() -> None:
        workers.value.submit(report, of="the second").result()
        workers.value.submit(print, "by a pool of threads").result()
        may_end.wait()

    early = pool.options(worker=0).parfeval(first)
    early.result(300)
    later = pool.options(worker=0).parfeval(second)
    go_on.open()
    has_ended.wait()
    may_end.open()
    later.result(300)
    assert list(later.metrics["of"]) == ["the second"]
    assert later.diary == "by a pool of threads\n"
    assert list(early.metrics["of"]) == ["the first", "the first, late"]
    assert early.diary == "late\n"


@pytest.mark.quick
def test_a_call_on_all_runs_when_one_of_its_parts_does(
    pool: ParallelPool, make_gate: Any, eventually: Any
) -> None:
    blocker, gate = make_gate(), make_gate()
    blocking = pool.options(worker=1).parfeval(blocker.wait)
    everywhere = pool.parfeval_on_all(gate.wait)
    assert eventually(lambda: everywhere.state == "running")
    assert eventually(everywhere.running)
    gate.open()
    blocker.open()
    assert everywhere.result(300) == [None] * 3
    assert everywhere.state == "finished"
    assert everywhere.started_at <= everywhere.finished_at
    assert everywhere.attempts == 1
    assert blocking.result(300) is None
    assert eventually(lambda: not pool.busy)


def test_a_sweep_table_that_lives(
    shared_pool: ParallelPool, make_gate: Any, marks: Any, eventually: Any
) -> None:
    """Scenario 17: statuses change while it runs; one trial is stopped by itself; the setup ran
    once on each worker.
    """
    go_on = [make_gate() for _ in range(4)]

    def train(number: int) -> str:
        report(trial=number, worker=current_task().worker)
        while not current_task().should_stop and not go_on[number].path.exists():
            time.sleep(0.005)
        if number == 3:
            raise ValueError("diverged")
        return "stopped" if current_task().should_stop else "trained"

    def statuses() -> list[str]:
        return [trial.state for trial in trials]

    around = {"setup": lambda: marks.add("setup"), "teardown": lambda: marks.add("teardown")}
    setting = parpool(2, resources=WorkerResources(gpus=0), quiet=True, **around)
    with setting as pool, contextlib.ExitStack() as stack:
        stack.callback(pool.cancel_all)  # a failed assert is not to wait for what runs
        trials = [pool.parfeval(train, number) for number in range(4)]
        assert eventually(lambda: statuses() == ["running", "running", "queued", "queued"])
        assert eventually(
            lambda: (
                [trial.metrics.to_dict("list").get("trial") for trial in trials[:2]] == [[0], [1]]
            )
        )
        trials[1].request_stop()
        assert trials[1].result(300) == "stopped"
        assert eventually(lambda: statuses() == ["running", "finished", "running", "queued"])
        go_on[2].open()
        assert eventually(lambda: statuses() == ["running", "finished", "finished", "running"])
        go_on[3].open()
        go_on[0].open()
        assert isinstance(trials[3].exception(300), ValueError)
        assert trials[0].result(300) == "trained"
        assert statuses() == ["finished", "finished", "finished", "failed"]
        assert marks.count("setup") == 2
        assert marks.count("teardown") == 0
    assert marks.all() == ["setup", "setup", "teardown", "teardown"]
