"""Libraries that take an executor, or a pool with a `map`, take this one: scipy, emcee, Optuna,
asyncio, dask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raypool import ParallelPool, SerializationError, current_task, report


@pytest.fixture
def with_a_lock() -> Callable[[Any], float]:
    """Give a function that cannot travel."""
    lock = threading.Lock()

    def score(x: Any) -> float:
        with lock:
            return float(np.sum(np.asarray(x) ** 2))

    return score


def refuse(x: Any) -> float:
    raise LookupError(f"nothing is known of {type(x).__name__}")


# --- scipy ----------------------------------------------------------------------------------------

BOUNDS = [(-2.0, 2.0)] * 3


def evolved(fn: Callable[[Any], float], **arguments: Any) -> Any:
    optimize = pytest.importorskip("scipy.optimize")
    return optimize.differential_evolution(
        fn, BOUNDS, rng=1, maxiter=8, popsize=6, updating="deferred", **arguments
    )


def valley(x: Any) -> float:
    return float(np.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2))


def test_scipy_finds_what_it_finds_serially(pool: ParallelPool) -> None:
    serial, parallel = evolved(valley), evolved(valley, workers=pool.map)
    assert np.array_equal(serial.x, parallel.x)
    assert (serial.fun, serial.nfev, serial.nit) == (parallel.fun, parallel.nfev, parallel.nit)


def test_scipy_gives_on_what_goes_wrong(pool: ParallelPool) -> None:
    with pytest.raises(LookupError, match="nothing is known of ndarray"):
        # on one worker: where another is slow to begin, the first to fail again and again may go
        evolved(refuse, workers=pool.options(worker=0).map)


def test_scipy_with_what_cannot_be_sent(pool: ParallelPool, with_a_lock: Any) -> None:
    with pytest.raises(SerializationError, match="lock"):
        evolved(with_a_lock, workers=pool.map)


# --- emcee ----------------------------------------------------------------------------------------


def bell(x: Any, width: float) -> float:
    return float(-0.5 * np.sum((x / width) ** 2))


def chain(fn: Callable[..., float], args: tuple[Any, ...], pool: ParallelPool | None) -> Any:
    emcee = pytest.importorskip("emcee")
    np.random.seed(5)
    sampler = emcee.EnsembleSampler(8, 2, fn, args=args, pool=pool)
    sampler.run_mcmc(np.random.default_rng(3).normal(size=(8, 2)), 10)
    return sampler.get_chain()


def test_emcee_draws_the_same_chain(pool: ParallelPool) -> None:
    assert np.array_equal(chain(bell, (2.0,), None), chain(bell, (2.0,), pool))


def test_emcee_gives_on_what_goes_wrong(pool: ParallelPool) -> None:
    with pytest.raises(LookupError, match="ndarray"):
        chain(refuse, (), pool.options(worker=0))


def test_emcee_with_what_cannot_be_sent(pool: ParallelPool, with_a_lock: Any) -> None:
    with pytest.raises(SerializationError, match="lock"):
        chain(with_a_lock, (), pool)


# --- Optuna ---------------------------------------------------------------------------------------


NUM_EPOCHS = 10


def train(rate: float) -> float:
    """Learn something in each epoch, or nothing: then somebody has to stop it."""
    loss = 1.0
    for epoch in range(NUM_EPOCHS):
        loss = loss / 2 if rate < 0.1 else 1.0 + rate
        report(epoch=epoch, loss=loss)
    deadline = time.monotonic() + 300
    while rate >= 0.1 and not current_task().should_stop and time.monotonic() < deadline:
        time.sleep(0.01)
    return loss


def tune(pool: Any, study: Any, num_trials: int, stop: Callable[[Any], object]) -> None:
    """Run trials side by side, one for each worker, and stop those that promise nothing."""
    from optuna.trial import TrialState

    running: dict[Any, Any] = {}
    told: Counter[Any] = Counter()
    while num_trials or running:
        while num_trials and len(running) < pool.num_workers:
            trial = study.ask()
            running[pool.parfeval(train, trial.suggest_float("rate", 1e-3, 1.0, log=True))] = trial
            num_trials -= 1
        concurrent.futures.wait(running, 0.05, concurrent.futures.FIRST_COMPLETED)
        for job, trial in list(running.items()):
            is_done, metrics = job.done(), job.metrics
            for row in metrics[told[job] :].itertuples():
                trial.report(row.loss, row.epoch)
            told[job] = len(metrics)
            if job.cancelled() or (is_done and job.stop_requested):
                study.tell(running.pop(job), state=TrialState.PRUNED)
            elif is_done:
                study.tell(running.pop(job), job.result())
            elif trial.should_prune():
                stop(job)


@pytest.mark.parametrize("stop", ["request_stop", "cancel"])
def test_optuna_prunes_by_live_metrics(two_workers: Any, eventually: Any, stop: str) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner)
    for rate in (0.01, 0.02, 0.5, 0.9, 0.03):
        study.enqueue_trial({"rate": rate})

    tune(two_workers, study, 5, lambda job: getattr(job, stop)())

    trials = study.get_trials()
    assert [trial.state.name for trial in trials] == [
        "COMPLETE",
        "COMPLETE",
        "PRUNED",
        "PRUNED",
        "COMPLETE",
    ]
    assert [len(trial.intermediate_values) for trial in trials[:2]] == [NUM_EPOCHS] * 2
    assert study.best_value == 0.5**NUM_EPOCHS
    assert eventually(lambda: not two_workers.busy)


# --- asyncio --------------------------------------------------------------------------------------


def test_asyncio_waits_for_calls(pool: ParallelPool) -> None:
    async def use() -> tuple[list[int], int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(squared(number)) for number in range(5)]
        return [task.result() for task in tasks], await asyncio.get_running_loop().run_in_executor(
            pool, pow, 2, 10
        )

    async def squared(number: int) -> int:
        return await asyncio.wrap_future(pool.submit(pow, number, 2))

    assert asyncio.run(use()) == ([0, 1, 4, 9, 16], 1024)


def test_a_task_group_that_fails_cancels_what_runs(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    async def use() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(awaited(pool.submit(gate.wait)))
            group.create_task(awaited(pool.submit(refuse, 1)))

    async def awaited(future: Any) -> Any:
        return await asyncio.wrap_future(future)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(use())
    assert [type(error) for error in caught.value.exceptions] == [LookupError]
    assert eventually(lambda: not pool.busy)


def test_a_wait_of_asyncio_that_runs_out_cancels_the_call(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    async def use() -> Any:
        future = pool.submit(gate.wait)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
        return future

    assert asyncio.run(use()).state == "cancelled"
    assert eventually(lambda: not pool.busy)


def test_asyncio_with_what_cannot_be_sent(pool: ParallelPool, with_a_lock: Any) -> None:
    async def use() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, with_a_lock, 1)

    with pytest.raises(SerializationError, match="lock"):
        asyncio.run(use())


# --- dask -----------------------------------------------------------------------------------------


def test_dask_computes_with_the_pool(pool: ParallelPool) -> None:
    dask = pytest.importorskip("dask")
    array = pytest.importorskip("dask.array")

    x = array.from_array(np.arange(10_000.0).reshape(100, 100), chunks=(25, 50))
    total, trace = dask.compute((x @ x.T).sum(), array.diag(x).sum(), scheduler=pool)

    expected = np.arange(10_000.0).reshape(100, 100)
    assert total == pytest.approx((expected @ expected.T).sum())
    assert trace == np.trace(expected)
    squares = [dask.delayed(pow)(number, 2) for number in range(10)]
    assert dask.delayed(sum)(squares).compute(scheduler=pool) == 285


def test_dask_runs_where_the_pool_is(pool: ParallelPool) -> None:
    dask = pytest.importorskip("dask")
    with dask.config.set(scheduler=pool):
        workers = dask.compute(
            *[
                dask.delayed(lambda _: (os.getpid(), current_task().worker), pure=False)(n)
                for n in range(8)
            ]
        )
    assert set(workers) <= {(worker.pid, worker.index) for worker in pool.workers}


def test_dask_gives_on_what_goes_wrong(pool: ParallelPool, eventually: Any) -> None:
    dask = pytest.importorskip("dask")
    with pytest.raises(LookupError, match="nothing is known of int"):
        dask.delayed(sum)([dask.delayed(refuse)(number) for number in range(4)]).compute(
            scheduler=pool
        )
    assert eventually(lambda: not pool.busy)


def test_dask_with_what_cannot_be_sent(pool: ParallelPool, with_a_lock: Any) -> None:
    dask = pytest.importorskip("dask")
    with pytest.raises(SerializationError, match="lock"):
        dask.delayed(with_a_lock)(1).compute(scheduler=pool)
