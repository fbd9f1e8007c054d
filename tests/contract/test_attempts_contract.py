"""`Results.attempts`: when and where items ran each time, on every kind of pool, and out of a
folder.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raypool import ParallelPool, Results, current_task, load_results
from raypool.core.model import Slice
from raypool.worker import runner
from raypool.worker import runner as early

from .conftest import PoolMaker

pytestmark = pytest.mark.semantics


def flaky(item: int) -> int:
    if item == 1 and current_task().attempt == 1:
        raise KeyError("the first time")
    if item == 2:
        raise ArithmeticError("always")
    return item


def told(results: Results) -> list[list[Any]]:
    return results.attempts[["item", "attempt", "status", "error"]].to_numpy().tolist()


EXPECTED = [
    [0, 1, "finished", None],
    [1, 1, "retried", "KeyError: 'the first time'"],
    [1, 2, "finished", None],
    [2, 1, "failed", "ArithmeticError: always"],
]


@pytest.mark.everywhere
def test_each_attempt_is_told(pool: ParallelPool, tmp_path: Path) -> None:
    results = pool.options(retry_on=(KeyError,)).parfor(
        flaky, 3, on_error="collect", run_dir=tmp_path / "run"
    )

    for loaded in (results, pickle.loads(pickle.dumps(results)), load_results(tmp_path / "run")):
        assert told(loaded) == EXPECTED
        attempts = loaded.attempts
        assert (attempts["duration_s"] >= 0).all()
        assert set(attempts["worker"]) <= {worker.index for worker in pool.workers}
        assert attempts["host"].notna().all()
        assert set(attempts["run"]) == {1}
        is_missed = attempts["status"] == "retried"
        assert attempts[is_missed].equals(results.attempts[is_missed]), (
            "memory and journal say the same"
        )
        loaded.timeline(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == 4


def test_calls_with_one_folder_are_told_apart(pool: ParallelPool, tmp_path: Path) -> None:
    pool.parfor(flaky, [0, 2], on_error="collect", run_dir=tmp_path)
    results = pool.parfor(flaky, [0, 2], on_error="collect", run_dir=tmp_path)

    assert results.attempts[["item", "status", "run"]].to_numpy().tolist() == [
        [0, "finished", 1],
        [1, "failed", 2],
    ]
    everything = load_results(tmp_path).attempts[["item", "status", "run"]].to_numpy().tolist()
    assert everything == [[0, "finished", 1], [1, "failed", 1], [1, "failed", 2]]


def wait_or_fail(folder: str, item: int) -> None:
    Path(folder, str(item)).touch()
    while item == 0:
        time.sleep(0.01)
    while not Path(folder, "0").exists():
        time.sleep(0.01)
    raise ArithmeticError("the other one runs")


@pytest.mark.concurrent
def test_what_ran_when_the_loop_ended_was_cancelled(pool: ParallelPool, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError) as caught:
        pool.parfor(lambda item: wait_or_fail(str(tmp_path), item), 2)

    attempts = caught.value.results.attempts  # type: ignore[attr-defined]
    assert attempts[["item", "status"]].to_numpy().tolist() == [[0, "cancelled"], [1, "failed"]]
    assert attempts["started_at"].notna().all()


@pytest.fixture
def patient_pool(make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParallelPool]:
    """Give a pool whose only worker keeps what was sent to it however long a call lasts, on a busy
    machine too.
    """
    with make_pool(1, retries=1) as pool:
        for module, name in ((early, "LASTS_S"), (runner, "CALL_LIMIT_S")):
            monkeypatch.setattr(module, name, math.inf)
            pool.parfeval_on_all(setattr, module, name, math.inf).result(300)
        yield pool


def when_held_at(item: int, pool: ParallelPool, eventually: Any) -> list[Slice]:
    """Return what the only worker has in its two calls, once the first of them does not get beyond
    this item.
    """
    (worker,) = pool._engine.driver.scheduler.workers.by_id.values()

    def pieces() -> list[Slice]:
        return [piece for attempt in list(worker.attempts.values()) for piece in attempt.slices]

    assert eventually(lambda: len(pieces()) == 2 and pieces()[0].start <= item < pieces()[0].stop)
    pool._engine.driver.barrier()
    return pieces()


@pytest.mark.threads
@pytest.mark.parametrize("is_durable", [False, True])
def test_what_waited_behind_a_call_was_not_cancelled(
    patient_pool: ParallelPool, is_durable: bool, gate: Any, eventually: Any, tmp_path: Path
) -> None:
    """A worker has its next call before it has ended the one before."""
    pool, folder = patient_pool, tmp_path / "run" if is_durable else None
    with ThreadPoolExecutor(1) as executor:
        loop = executor.submit(
            pool.parfor, lambda item: gate.wait() if item == 400 else item, 2000, run_dir=folder
        )
        at_400, behind = when_held_at(400, pool, eventually)
        (work,) = pool._engine.driver.works.values()
        running = [piece for piece, _ in work.running.values()]
        pool.cancel_all()
        with pytest.raises(CancelledError) as caught:
            loop.result(300)

    assert running == [at_400]
    attempts = caught.value.results.attempts  # type: ignore[attr-defined]
    assert attempts["item"].tolist() == list(range(at_400.stop))
    assert at_400.stop <= behind.start
    assert attempts["status"].tolist() == ["finished"] * at_400.start + ["cancelled"] * (
        at_400.stop - at_400.start
    )
    finished, cancelled = attempts[: at_400.start], attempts[at_400.start :]
    assert (cancelled["started_at"] >= finished["started_at"].max()).all(), (
        "its clock runs from when it began"
    )


@pytest.mark.processes
def test_what_waited_behind_a_call_that_ended_its_worker_has_no_time(
    patient_pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    def end_once(item: int) -> int:
        if item == 400 and current_task().attempt == 1:
            gate.wait()
            os._exit(3)
        return item

    with ThreadPoolExecutor(1) as executor:
        loop = executor.submit(patient_pool.parfor, end_once, 2000)
        at_400, behind = when_held_at(400, patient_pool, eventually)
        gate.open()
        results = loop.result(300)

    lost = results.attempts[results.attempts["status"] == "lost"]
    assert lost["item"].tolist() == [
        *range(at_400.start, at_400.stop),
        *range(behind.start, behind.stop),
    ]
    assert lost["started_at"].notna().tolist() == [item < at_400.stop for item in lost["item"]]
    assert lost["worker"].notna().all()
    assert results.attempts["item"].value_counts()[behind.start] == 2, "it was charged an attempt"


def die_once(item: int) -> int:
    if item == 1 and current_task().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.processes
def test_attempts_that_were_lost_with_their_worker(pool: ParallelPool, tmp_path: Path) -> None:
    results = pool.options(retries=1).parfor(
        die_once, 3, on_error="collect", chunk_size=1, run_dir=tmp_path / "run"
    )

    assert results.to_frame()["status"].tolist() == ["finished", "finished", "failed"]
    assert results.to_frame()["worker"].notna().all(), "it is known where the last attempt was lost"
    for loaded in (results, load_results(tmp_path / "run")):
        counts = loaded.attempts.groupby("item")["status"].agg(list).to_dict()
        assert counts[1] == ["lost", "finished"]
        assert counts[2] == ["lost", "lost"]
        assert loaded.attempts["started_at"].notna().all()
        assert (loaded.attempts["duration_s"] >= 0).all()
