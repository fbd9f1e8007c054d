"""Workers are killed at random moments (scenario 45): every result comes once, and is the right
one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from raypool import ParallelPool, Results, current_task, parpool, report

MANY = 200
FEW = 60
ENOUGH = 4
"""So many are killed at least, or nothing is shown."""

RETRIES = 100
"""More than anybody is killed: no item may ever fail because of it."""


def busy_and_idle(pool: ParallelPool) -> Callable[[], list[int]]:
    return lambda: [
        worker.pid
        for worker in pool.workers
        if worker.state in ("busy", "idle") and worker.pid is not None
    ]


def check_all_workers(pool: ParallelPool, gpus: list[int | None]) -> None:
    assert pool.parfeval_on_all(lambda: current_task().gpu).result(300) == gpus
    statistics = pool.statistics()
    assert statistics.queued == statistics.running == 0
    assert statistics.submitted == statistics.finished + statistics.failed + statistics.cancelled


def durations(chance: random.Random, count: int) -> list[float]:
    """Some of a millisecond, which share calls, and some that are long beside the pause between two
    kills.
    """
    longest = chance.choice([0.004, 0.02, 0.1])
    return [longest * chance.random() ** 3 for _ in range(count)]


def test_loops_survive_any_number_of_lost_workers(
    ray_session: None, by_value: None, seed: int, make_killer: Any, make_trace: Callable[[], Path]
) -> None:
    chance = random.Random(seed)
    seconds = durations(chance, MANY)
    bad = {item for item in range(MANY) if chance.random() < 0.05}

    def fn(item: int) -> int:
        report(item=item, half=1)
        threading.Event().wait(seconds[item])
        print(f"item {item}")
        report(item=item, half=2)
        if item in bad:
            raise ValueError(item)
        return item * item

    def check(results: Results) -> None:
        assert [value for item, value in enumerate(results) if item not in bad] == [
            i * i for i in range(MANY) if i not in bad
        ]
        errors = {item: (type(error), *error.args) for item, error in results.errors.items()}
        assert errors == {item: (ValueError, item) for item in bad}
        rows = results.to_frame()
        assert list(rows["status"]) == [
            "failed" if item in bad else "finished" for item in range(MANY)
        ]
        told = results.metrics
        last = told[told["attempt"] == told["item"].map(rows["attempts"])]
        assert sorted(zip(last["item"], last["half"], strict=True)) == [
            (i, half) for i in range(MANY) for half in (1, 2)
        ]

    with parpool(chance.choice([2, 3]), retries=RETRIES, quiet=True, trace=make_trace()) as pool:
        gpus = [worker.gpu for worker in pool.workers]
        with make_killer(chance, busy_and_idle(pool)) as killer:
            while len(killer.killed) < ENOUGH:
                items = (item for item in range(MANY)) if chance.random() < 0.3 else range(MANY)
                view = pool.options(retry_delay_s=chance.choice([0, 0, 0.05]))
                check(view.parfor(fn, items, on_error="collect", seed=seed))
        check_all_workers(pool, gpus)
        assert pool.statistics().workers_lost <= len(killer.killed)


@pytest.mark.seeds(1)
@pytest.mark.parametrize("also_agents", [False, True], ids=["workers", "agents"])
def test_futures_survive_any_number_of_lost_processes(
    ray_session: None,
    by_value: None,
    seed: int,
    also_agents: bool,
    make_killer: Any,
    make_trace: Callable[[], Path],
) -> None:
    chance = random.Random(seed)
    seconds = durations(chance, FEW)

    def fn(item: int) -> bytes:
        threading.Event().wait(seconds[item])
        # some go through the object store
        return bytes([item]) * (200_000 if item % 20 == 0 else 10)

    def play(pool: ParallelPool) -> None:
        futures = [pool.options(priority=item % 3).parfeval(fn, item) for item in range(FEW)]
        if chance.random() < 0.5:
            pool.resize(chance.choice([2, 3]))
        chosen = [item for item in range(FEW) if chance.random() < 0.15]
        cancelled = {item for item in chosen if futures[item].cancel()}
        for item, future in enumerate(futures):
            if item in cancelled:
                with pytest.raises(CancelledError):
                    future.result(300)
            else:
                assert future.result(300) == fn(item)

    with parpool(chance.choice([2, 3]), retries=RETRIES, quiet=True, trace=make_trace()) as pool:
        workers = busy_and_idle(pool)
        with make_killer(chance, lambda: workers() + (agents() if also_agents else [])) as killer:
            while len(killer.killed) < ENOUGH:
                play(pool)
        check_all_workers(pool, [worker.gpu for worker in pool.workers])


def agents() -> list[int]:
    """The processes of the pools' agents; whoever is told of the death of one starts another."""
    from ray._private import state

    return [
        actor["Pid"]
        for actor in state.actors().values()
        if actor["ActorClassName"] == "NodeAgent" and actor["State"] == "ALIVE"
    ]
