"""After a sweep of whatever kind and end, nothing of it is left in the object store."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raypool import ParallelPool

SIZE = 250_000  # numbers of 8 bytes: too large for a message

Sweep = Callable[[ParallelPool, Path], None]


def large_results(pool: ParallelPool, folder: Path) -> None:
    results = pool.parfor(lambda number: np.full(SIZE, number), range(20))
    assert [array[0] for array in results] == list(range(20))
    assert len(pool.parfeval(np.ones, SIZE).result(300)) == SIZE


def results_that_nobody_wants(pool: ParallelPool, folder: Path) -> None:
    futures = [pool.parfeval(np.ones, SIZE) for _ in range(10)]
    assert all(future.exception(300) is None for future in futures)
    for future in [pool.parfeval(np.ones, SIZE) for _ in range(10)]:
        del future


def large_arguments(pool: ParallelPool, folder: Path) -> None:
    assert (
        pool.parfor(len, [np.full(SIZE, number) for number in range(20)], reduce=operator.add)
        == 20 * SIZE
    )
    data = np.ones(SIZE)
    assert set(pool.parfor(lambda _: len(data), range(8))) == {SIZE}


def errors(pool: ParallelPool, folder: Path) -> None:
    def fail_now_and_then(number: int) -> Any:
        data = np.full(SIZE, number)
        if number % 3 == 0:
            raise ValueError(data)
        return data

    assert len(pool.parfor(fail_now_and_then, range(12), on_error="collect").errors) == 4
    with pytest.raises(ValueError, match="of fail_now_and_then"):
        pool.parfor(fail_now_and_then, range(12))


def a_cancellation(pool: ParallelPool, folder: Path) -> None:
    def wait(data: Any, is_long: bool) -> Any:
        import time

        time.sleep(600 if is_long else 0)
        return data

    futures = [pool.parfeval(wait, np.full(SIZE, number), number >= 4) for number in range(12)]
    assert len(futures[0].result(300)) == SIZE
    for future in futures:
        future.cancel()
    assert pool.parfeval_on_all(abs, -1).result(300) == [1, 1, 1]


def a_killed_worker(pool: ParallelPool, folder: Path) -> None:
    def die_once(number: int, data: Any) -> Any:
        if number == 3 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    futures = [pool.parfeval(die_once, number, np.full(SIZE, number)) for number in range(8)]
    assert [future.result(300)[0] for future in futures] == list(range(8))


@pytest.mark.parametrize(
    "sweep",
    [
        large_results,
        results_that_nobody_wants,
        large_arguments,
        errors,
        a_cancellation,
        a_killed_worker,
    ],
)
def test_nothing_is_left(
    pool: ParallelPool, sweep: Sweep, tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    def used_bytes() -> float:
        resource = "object_store_memory"
        return float(ray.cluster_resources()[resource] - ray.available_resources().get(resource, 0))

    before = used_bytes()
    sweep(pool, tmp_path)
    # Ray tells of its store now and then: what it says must be of after the sweep, and is more than
    # a test before this one may have left in `before`
    mark = ray.put(np.ones(40 * SIZE))
    assert eventually(lambda: used_bytes() >= before + 8 * 30 * SIZE)
    del mark
    assert eventually(lambda: used_bytes() <= before), (used_bytes(), before)
