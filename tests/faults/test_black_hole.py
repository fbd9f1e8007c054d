"""A worker that fails every item while others do well is taken out; items that wait before they run again."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from raypool import ParallelPool, WorkerLostError, WorkerResources, current_task, parpool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("ray_session", "by_value")]

HOLE = 1
"""The worker whose card, disk or library is broken."""


def open_pool(profile: str) -> ParallelPool:
    changes: dict[str, Any] = {"resources": WorkerResources(cpus=0.1)} if profile == "local" else {}
    return parpool(3, profile=profile, quiet=True, **changes)


def break_down(how: str) -> None:
    if how == "die":
        os._exit(1)
    raise OSError("CUDA error: device is lost")


@pytest.mark.parametrize(
    ("profile", "how"),
    [("threads", "raise"), ("local", "raise"), pytest.param("local", "die", marks=pytest.mark.long)],
)
def test_a_worker_that_fails_item_after_item_is_taken_out(profile: str, how: str, caplog: Any) -> None:
    """Only what it had failed by then is an error; the others run all the rest."""

    def fn(i: int) -> int:
        if current_task().worker == HOLE:
            break_down(how)
        time.sleep(0.02)
        return i * i

    with open_pool(profile) as pool:
        gpus = [worker.gpu for worker in pool.workers]

        results = pool.options(retries=0).parfor(fn, range(100), chunk_size=1, on_error="collect")

        kind = OSError if how == "raise" else WorkerLostError
        assert 3 < len(results.errors) < 50
        assert all(type(error) is kind for error in results.errors.values())
        assert all(value == i * i for i, value in enumerate(results) if i not in results.errors)
        assert pool.num_workers == 2
        assert "Worker 1 (" in caplog.text
        assert "was taken out of the pool" in caplog.text
        assert "items there have all failed" in caplog.text
        if profile == "local":
            assert f"GPU {gpus[HOLE]}" in caplog.text
        assert pool.parfor(lambda i: i + 1, range(4)) == [1, 2, 3, 4]
        futures = [pool.parfeval(fn, i) for i in range(4)]
        assert [future.result(60) for future in futures] == [0, 1, 4, 9]


@pytest.mark.parametrize("profile", ["threads", "local"])
def test_a_function_that_fails_everywhere_takes_out_nobody(profile: str, caplog: Any) -> None:
    def fn(i: int) -> int:
        raise OSError(i)

    with open_pool(profile) as pool:
        results = pool.parfor(fn, range(60), chunk_size=1, on_error="collect")
        assert len(results.errors) == 60
        assert pool.num_workers == 3
        assert "taken out" not in caplog.text
        assert pool.parfeval(abs, -1).result(60) == 1


@pytest.mark.parametrize("profile", ["threads", "local"])
def test_an_item_that_runs_again_waits_first(profile: str) -> None:
    """Twice as long before the third attempt; the others go on meanwhile."""

    def fn(i: int) -> tuple[int, float]:
        if i == 2 and current_task().attempt < 3:
            raise OSError("a file server that is busy")
        return current_task().attempt, time.time()

    with open_pool(profile) as pool:
        patient = pool.options(retry_on=(OSError,), retries=2, retry_delay_s=0.3)
        began = time.time()
        results = patient.parfor(fn, range(6), chunk_size=1)
        future = patient.parfeval(fn, 2)
        attempt, ended = results[2]
        assert attempt == 3
        assert ended - began >= 0.9
        assert all(attempt == 1 and at < ended for i, (attempt, at) in enumerate(results) if i != 2)
        assert future.result(60)[0] == 3
        assert future.attempts == 3
