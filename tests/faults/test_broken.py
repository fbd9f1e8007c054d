"""A GPU that fails for good: the pool goes on without it, and ends when it was the last."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raypool import (
    ParallelPool,
    PoolBrokenError,
    StartupError,
    WorkerLostError,
    current_task,
    parpool,
)

pytestmark = [pytest.mark.usefixtures("ray_session", "by_value")]


def kill_worker(pool: ParallelPool, index: int) -> None:
    assert isinstance(
        pool.options(worker=index).parfeval(os._exit, 1).exception(300), WorkerLostError
    )


@pytest.mark.parametrize(
    ("after_s", "words", "timeout_s"),
    [("", "fallen off the bus", 300), ("600", "start_timeout_s", 5)],
)
def test_workers_that_cannot_start(
    breaking_cards: Any, after_s: str, words: str, timeout_s: float
) -> None:
    """They fail, or say nothing at all: it is told why, in time, and nothing is kept."""
    breaking_cards.flag.write_text(after_s)
    with pytest.raises(StartupError, match=words) as caught:
        parpool(2, inventory=breaking_cards, start_timeout_s=timeout_s, quiet=True)
    assert "2 of 2 workers did not start" in str(caught.value)


def test_a_pool_that_loses_its_gpus_one_by_one(
    breaking_cards: Any, gate: Any, eventually: Any, caplog: Any
) -> None:
    with parpool(2, inventory=breaking_cards, quiet=True) as pool:
        assert pool.parfeval_on_all(lambda: current_task().gpu).result(300) == [0, 1]
        breaking_cards.flag.touch()

        kill_worker(pool, 0)
        assert eventually(lambda: pool.num_workers == 1)
        assert eventually(lambda: "fallen off the bus" in caplog.text)
        assert [worker.gpu for worker in pool.workers] == [1]
        assert list(pool.parfor(lambda i: (i, current_task().gpu), range(4))) == [
            (i, 1) for i in range(4)
        ]
        with parpool(1, quiet=True) as other:
            assert other.workers[0].gpu in (0, 2), "the place of the lost worker was not given back"

        running = pool.options(retries=1).parfeval(lambda: gate.wait() or os._exit(1))
        waiting = [pool.parfeval(abs, number) for number in range(3)]
        assert eventually(running.running)
        gate.open()
        errors = [future.exception(300) for future in (running, *waiting)]

        assert [type(error) for error in errors] == [PoolBrokenError] * 4
        assert "fallen off the bus" in str(errors[-1])
        assert "parpool()" in str(errors[-1])
        assert pool.is_closed
        for use in (lambda: pool.parfeval(abs, 1).result(300), lambda: pool.parfor(abs, [1])):
            with pytest.raises(PoolBrokenError):
                use()


def test_a_loop_in_a_pool_that_breaks(breaking_cards: Any, gate: Any, eventually: Any) -> None:
    """What had finished is not lost."""

    def fn(i: int) -> int:
        if i == 3:
            gate.wait()
            os._exit(1)
        return i

    with parpool(1, inventory=breaking_cards, quiet=True) as pool:
        assert pool.parfeval(abs, -1).result(300) == 1
        breaking_cards.flag.touch()
        with ThreadPoolExecutor(1) as thread:
            loop = thread.submit(pool.parfor, fn, range(6), chunk_size=1, on_error="collect")
            assert eventually(lambda: pool.statistics().finished == 4)
            gate.open()
            error: Any = loop.exception(300)
    assert isinstance(error, PoolBrokenError)
    assert "fallen off the bus" in str(error)
    assert error.results[:3] == [0, 1, 2]
    assert list(error.results.to_frame()["status"]) == ["finished"] * 3 + ["cancelled"] * 3
