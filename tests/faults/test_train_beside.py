"""Trainings beside other work of their pool, on real Ray, and what their handle is to whoever waits
for it (scenario 41).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    InvalidValueError,
    ParallelPool,
    RunOptions,
    TrainingError,
    TrainingOptions,
    after_each,
    current_task,
    fetch_next,
    fetch_outputs,
    wait,
)

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("patience")]

mse_loss = torch.nn.functional.mse_loss


@pytest.fixture(autouse=True)
def all_is_free_afterwards(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, all workers are idle, and none was lost."""
    lost = pool.statistics().workers_lost
    yield
    assert eventually(lambda: not pool.busy)
    assert eventually(lambda: pool.idle_workers == pool.num_workers == 3)
    assert pool.statistics().workers_lost == lost


@pytest.fixture
def waits(gate: Any) -> Callable[[], list[int]]:
    """Give a loop that waits at the gate after its first report, and returns which worker and GPU
    it is on.
    """

    def loop() -> list[int]:
        import ray.train

        ray.train.report({"loss": 1.0})
        gate.wait()
        ray.train.report({"loss": 0.5})
        task = current_task()
        return [task.worker, task.gpu, ray.train.get_context().get_world_rank()]

    return loop


def begun(eventually: Any, *runs: Any) -> None:
    """Wait until trainings have reported something."""
    assert eventually(lambda: all(not run.metrics.empty for run in runs))


# --- other work -----------------------------------------------------------------------------------


def test_what_waits_runs_when_it_is_done(
    pool: ParallelPool, gate: Any, waits: Any, eventually: Any
) -> None:
    """And a training that waits begins when the workers are free, however much else is handed
    in.
    """
    run = pool.train(waits)
    begun(eventually, run)
    futures = [pool.parfeval(abs, -number) for number in range(20)]
    second = pool.train(lambda: current_task().worker)
    behind = [pool.parfeval(abs, -number) for number in range(20)]
    assert {future.state for future in (*futures, second, *behind)} == {"queued"}
    assert pool.queue.running == [run]
    assert second in pool.queue.queued
    gate.open()
    assert run.result(300).values == [[number] * 3 for number in range(3)]
    assert [future.result(300) for future in futures + behind] == [*range(20), *range(20)]
    assert second.result(300).values == [0, 1, 2]


@pytest.mark.quick
def test_a_loop_is_not_starved(pool: ParallelPool) -> None:
    """Trainings that come one after the other, and a parfor with many items: both come to their
    end.
    """
    runs = []

    def follow(run: Any) -> None:
        if len(runs) < 5:
            runs.append(pool.train(lambda: 1))
            runs[-1].add_done_callback(follow)

    follow(None)
    assert list(pool.parfor(lambda number: number * 2, range(300), chunk_size=1)) == [
        2 * number for number in range(300)
    ]
    for number in range(5):
        while len(runs) <= number:
            threading.Event().wait(0.01)
        assert runs[number].result(300).values == [1] * 3


def test_priorities(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    blockers = [pool.parfeval(gate.wait) for _ in range(3)]
    assert eventually(lambda: {blocker.state for blocker in blockers} == {"running"})
    first, low, high = (pool.options(priority=priority).train(lambda: 1) for priority in (0, 0, 5))
    gate.open()
    assert [run.result(300).values for run in (first, low, high)] == [[1] * 3] * 3
    assert first.started_at < high.started_at < low.started_at, (
        "who is at the head of the queue stays there"
    )


@pytest.mark.quick
def test_some_workers_train_and_the_others_work(
    pool: ParallelPool, gate: Any, waits: Any, eventually: Any
) -> None:
    run = pool.train(waits, workers=[2, 0])
    begun(eventually, run)
    assert list(pool.parfor(lambda _: current_task().worker, 6)) == [1] * 6
    assert pool.train(lambda: current_task().worker, workers=[1]).result(300).values == [1]
    assert run.state == "running"
    gate.open()
    assert run.result(300).values == [[2, 2, 0], [0, 0, 1]]


def test_two_trainings_on_two_parts(
    pool: ParallelPool, gate: Any, waits: Any, eventually: Any
) -> None:
    """At the same time, and a fit beside a loop."""
    part, rest = pool.partition(workers=[1])
    runs = [part.train(waits), rest.train(waits)]
    begun(eventually, *runs)
    assert {run.state for run in runs} == {"running"}
    assert part.queue.running == [runs[0]]
    assert rest.queue.running == [runs[1]]
    gate.open()
    assert [run.result(300).values for run in runs] == [[[1, 1, 0]], [[0, 0, 0], [2, 2, 1]]]
    # two ranks add in another order than one
    x, model = torch.ones(12, 1).double(), torch.nn.Linear(1, 1).double()
    fits = [
        each.fit(model, (x, x), mse_loss, TrainingOptions(max_epochs=2)) for each in (part, rest)
    ]
    assert [len(fit.result(300).values) for fit in fits] == [1, 2]
    torch.testing.assert_close(*[fit.result().metrics["loss"] for fit in fits])


def test_a_fit_on_chosen_workers(pool: ParallelPool) -> None:
    x = torch.ones(12, 1)
    options = TrainingOptions(max_epochs=1, worker_load=[2, 1])
    assert (
        len(
            pool.fit(torch.nn.Linear(1, 1), (x, x), mse_loss, options, workers=[2, 1])
            .result(300)
            .values
        )
        == 2
    )


def test_two_trainings_in_one_folder(
    pool: ParallelPool, tmp_path: Path, waits: Any, gate: Any, eventually: Any
) -> None:
    """The second one is refused while the first one is not done: they would mix their
    checkpoints.
    """
    kept = RunOptions(run_dir=tmp_path / "run")
    run = pool.train(waits, workers=[0], run_options=kept)
    begun(eventually, run)
    with pytest.raises(InvalidValueError, match="run_dir"):
        pool.train(lambda: 1, workers=[1], run_options=RunOptions(run_dir=tmp_path / "." / "run"))
    gate.open()
    assert run.result(300).values == [[0, 0, 0]]
    assert pool.train(lambda: 1, workers=[1], run_options=kept).result(300).values == [1]


# --- the handle -----------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_handle_is_a_future_like_any_other(pool: ParallelPool) -> None:
    runs = [
        pool.train(lambda config: config["n"], {"n": number}, workers=[number])
        for number in range(3)
    ]
    failing = pool.train(lambda: 1 / 0)
    called: list[Any] = []
    for run in (*runs, failing):
        run.add_done_callback(called.append)
    assert {run.result().values[0] for run in concurrent.futures.as_completed(runs, 300)} == {
        0,
        1,
        2,
    }
    assert wait([*runs, failing], 300)
    number, first = fetch_next(runs, 300)
    assert first.values == [number]
    doubled = after_each(runs, lambda result: result.values[0] * 2)
    assert [each.result(300) for each in doubled] == [0, 2, 4]
    assert [result.values[0] for result in fetch_outputs(runs)] == [0, 1, 2]
    assert isinstance(failing.error, TrainingError)
    assert isinstance(failing.error.__cause__, ZeroDivisionError)
    assert failing.state == "failed"
    while len(called) < 4:
        threading.Event().wait(0.01)
    assert set(called) == {*runs, failing}


def test_it_can_be_awaited(pool: ParallelPool, waits: Any, eventually: Any) -> None:
    """And whoever awaits it can cancel it."""
    long = pool.train(waits)
    # a new worker that still imports torch may need longer than `cancel_grace_s` to end
    begun(eventually, long)
    behind = [pool.train(lambda config: config["n"], {"n": number}) for number in range(3)]

    async def main() -> list[int]:
        waiting = asyncio.wrap_future(long)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        results = await asyncio.gather(*map(asyncio.wrap_future, behind))
        return [result.values[0] for result in results]

    assert asyncio.run(main()) == [0, 1, 2]
    assert long.cancelled()


def test_all_that_runs_is_cancelled(pool: ParallelPool, waits: Any, eventually: Any) -> None:
    """The training too, of which there is no other attempt."""
    runs = [pool.train(waits) for _ in range(3)]
    begun(eventually, runs[0])
    pool.cancel_all()
    for run in runs:
        with pytest.raises(concurrent.futures.CancelledError):
            run.result(300)
        assert run.state == "cancelled"
    assert eventually(lambda: pool.queue.queued == pool.queue.running == [])


def test_what_is_asked_of_one_that_has_ended(pool: ParallelPool) -> None:
    run = pool.train(lambda: 1)
    assert run.result(300).values == [1] * 3
    assert not run.cancel()
    assert not run.request_stop()
    assert run.state == "finished"
    assert run.started_at <= run.finished_at


def test_a_callback_that_raises_harms_nobody(
    pool: ParallelPool, caplog: Any, eventually: Callable[..., bool]
) -> None:
    run = pool.train(lambda: 1)
    later: list[int] = []
    run.add_done_callback(lambda _: 1 / 0)
    run.add_done_callback(lambda _: later.append(1))
    assert run.result(300).values == [1] * 3
    assert eventually(lambda: later == [1])


def test_what_it_prints(pool: ParallelPool) -> None:
    def loop() -> None:
        import ray.train

        print(f"rank {ray.train.get_context().get_world_rank()} is here")

    run = pool.train(loop)
    run.result(300)
    for rank in range(3):
        assert f"rank {rank} is here" in run.diary
    assert "local mode" not in run.diary
