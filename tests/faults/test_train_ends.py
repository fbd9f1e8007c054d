"""Trainings that are stopped, cancelled, late, or whose driver goes away, on real Ray (scenario
40).
"""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    ParallelPool,
    RunOptions,
    TaskTimeoutError,
    TrainingError,
    TrainingOptions,
    current_task,
)
from tests.faults.conftest import add_up, count_ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("patience")]

long = pytest.mark.long


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give the workers that train: two."""
    return two_workers


@pytest.fixture
def next_training_works(
    shared_pool: ParallelPool, pool: Any, eventually: Callable[..., bool]
) -> Iterator[None]:
    """After whatever it was, a training on all workers works, nothing is queued, and no worker was
    lost.
    """
    lost = shared_pool.statistics().workers_lost
    yield
    assert eventually(lambda: not pool.busy)
    assert eventually(lambda: pool.idle_workers == pool.num_workers == 2)
    assert shared_pool.statistics().workers_lost == lost
    assert pool.train(count_ranks).result(300).values == [2, 2]


on_shared_pool = pytest.mark.usefixtures("next_training_works")


def kept_epochs(run: Any) -> list[int]:
    """Return the epochs of the checkpoints that count."""
    from raypool.train.checkpoints import list_kept

    return [kept.metrics["epoch"] for kept in list_kept(run.path)]


# --- it is not wanted any more --------------------------------------------------------------------


@on_shared_pool
@pytest.mark.parametrize(
    "where",
    [
        "backward",
        "checkpoints",
        *(pytest.param(where, marks=long) for where in ("report", "sleep", "the beginning")),
    ],
)
def test_it_is_cancelled_in_mid_training(
    pool: Any, tmp_path: Path, gate: Any, eventually: Any, where: str
) -> None:
    pids = pool.parfeval_on_all(os.getpid).result(300)

    def loop() -> None:
        import ray.train

        if ray.train.get_context().get_world_rank():
            gate.open()
        elif where != "checkpoints":
            time.sleep(120)
        if where == "backward":
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
            model(torch.ones(2, 4)).sum().backward()
        elif where == "report":
            ray.train.report({"loss": 1.0})
        elif where == "checkpoints":
            add_up({"epochs": 10**6})
        time.sleep(120)

    run = pool.train(loop, run_options=RunOptions(run_dir=tmp_path / "run"))
    if where != "the beginning":
        gate.wait()
    if where == "checkpoints":
        assert eventually(lambda: not run.metrics.empty)
    assert run.cancel()
    assert (run.state, run.cancelled()) == ("cancelled", True)
    with pytest.raises(concurrent.futures.CancelledError):
        run.result(0)
    assert eventually(lambda: not pool.busy)
    assert pool.parfeval_on_all(os.getpid).result(300) == pids
    epochs = kept_epochs(run)
    assert epochs == list(range(len(epochs)))


@on_shared_pool
@pytest.mark.parametrize("rounds", [5, pytest.param(25, marks=long)])
def test_cancelled_at_any_moment(pool: Any, tmp_path: Path, rounds: int) -> None:
    """The pool works on with the same processes, and nothing piles up in them; each run's
    checkpoints are whole.
    """
    chance = random.Random(5)

    def look() -> tuple[int, int, int]:
        import psutil

        process = psutil.Process()
        return process.pid, process.num_fds(), threading.active_count()

    kept = RunOptions(run_dir=tmp_path / "warm")
    assert (
        pool.train(add_up, {"epochs": 20}, run_options=kept).result(300).values == [[0, 20.0]] * 2
    )
    before = pool.parfeval_on_all(look).result(300)
    for number in range(rounds):
        run = pool.train(
            add_up, {"epochs": 10**6}, run_options=RunOptions(run_dir=tmp_path / str(number))
        )
        threading.Event().wait(chance.uniform(0, 0.25))
        run.cancel()
        assert pool.options(timeout_s=300).train(count_ranks).result(300).values == [2, 2]
        epochs = kept_epochs(run)
        assert epochs == list(range(len(epochs)))
        if epochs:
            again = pool.train(
                add_up, {"epochs": len(epochs) + 1}, run_options=RunOptions(run_dir=run.path)
            ).result(300)
            assert again.values == [[len(epochs), len(epochs) + 1]] * 2
            assert not list(run.path.glob(".*"))
    after = pool.parfeval_on_all(look).result(300)
    for (pid, fds, threads), (pid_after, fds_after, threads_after) in zip(
        before, after, strict=True
    ):
        assert pid_after == pid
        assert fds_after <= fds + 20
        assert threads_after <= threads + 4


@on_shared_pool
@pytest.mark.parametrize(
    ("strategy", "rounds"),
    [("ddp", 3), pytest.param("ddp", 12, marks=long), pytest.param("fsdp", 12, marks=long)],
)
def test_fit_is_cancelled_at_any_moment(
    pool: Any, tmp_path: Path, eventually: Any, strategy: Any, rounds: int
) -> None:
    """And goes on from what it has kept, each time again, as if it had been one training."""
    chance = random.Random(6)
    x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data, model = (x, x.sum(1, keepdim=True)), torch.nn.Linear(4, 1).double()

    def fit(epochs: int, folder: str) -> Any:
        options = TrainingOptions(
            mini_batch_size=16,
            max_epochs=epochs,
            checkpoint_every=1,
            strategy=strategy,
            optimizer="adam",
            seed=3,
        )
        kept = RunOptions(run_dir=tmp_path / folder, keep_checkpoints=2)
        return pool.fit(model, data, torch.nn.functional.mse_loss, options, run_options=kept)

    # imports what a training needs, which no cancel interrupts: it would be a worker's end
    fit(1, "first").result(300)
    pids = pool.parfeval_on_all(os.getpid).result(300)
    for _ in range(rounds):
        run = fit(10**6, "run")
        threading.Event().wait(chance.uniform(0, 0.6))
        run.cancel()
    run = fit(10**6, "run")
    assert eventually(lambda: kept_epochs(run)), (
        "on a slow machine this is the first that comes so far"
    )
    run.cancel()
    # until its ranks have ended, there may be one more
    assert pool.parfeval_on_all(os.getpid).result(300) == pids
    done = max(kept_epochs(run)) + 1
    result = fit(done + 3, "run").result(300)
    assert result.values[0]["epochs"] == done + 3
    whole = fit(done + 3, "whole").result(300)
    torch.testing.assert_close(
        dict(result.model.state_dict()), dict(whole.model.state_dict()), rtol=0, atol=0
    )
    assert pool.parfeval_on_all(os.getpid).result(300) == pids
    assert not list((tmp_path / "run").glob(".*"))


@on_shared_pool
@pytest.mark.parametrize("is_queued", [False, True])
def test_fit_stops_at_the_same_step_everywhere(
    pool: Any, gate: Any, eventually: Any, is_queued: bool
) -> None:
    """And its model is the one of then: that of a training that was to be no longer."""
    x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data, model = (x, x.sum(1, keepdim=True)), torch.nn.Linear(4, 1).double()

    def fit(**options: Any) -> Any:
        options = {"mini_batch_size": 16, "report_every": 1, **options}
        return pool.fit(model, data, torch.nn.functional.mse_loss, TrainingOptions(**options))

    blockers = [pool.parfeval(gate.wait) for _ in range(2)] if is_queued else []
    run = fit(max_epochs=10**6)
    if is_queued:
        assert run.state == "queued"
    else:
        assert eventually(lambda: len(run.metrics) > 5)
    assert run.request_stop()
    gate.open()
    result = run.result(300)
    assert [blocker.result(300) for blocker in blockers] == [None] * len(blockers)
    steps = result.values[0]["steps"]
    assert steps == 1 if is_queued else steps > 5
    assert result.values == [{**result.values[0], "steps": steps, "ended_by": "request_stop"}] * 2
    same = fit(max_epochs=10**6, output_fn=lambda metrics: metrics["step"] == steps - 1).result(300)
    torch.testing.assert_close(
        dict(result.model.state_dict()), dict(same.model.state_dict()), rtol=0, atol=0
    )


# --- its time is up -------------------------------------------------------------------------------


@on_shared_pool
def test_a_training_that_is_late(
    pool: Any, tmp_path: Path, gate: Any, eventually: Any, let_time_pass: Callable[[float], None]
) -> None:
    """What there is goes with the error: the last checkpoint, the metrics."""

    def hold(epoch: int) -> None:
        if epoch == 3 and current_task().index == 1:
            gate.open()
            time.sleep(120)

    run = pool.options(timeout_s=400).train(
        add_up, {"epochs": 9, "hold": hold}, run_options=RunOptions(run_dir=tmp_path / "run")
    )
    gate.wait()
    assert eventually(lambda: kept_epochs(run) == [0, 1, 2])
    assert eventually(lambda: len(run.metrics) == 3)
    let_time_pass(400)
    error = run.exception(300)
    assert type(error) is TaskTimeoutError
    assert "add_up had not ended after timeout_s=400: rank 1 was at " in str(error)
    assert "in hold" in str(error)
    assert Path(error.result.checkpoint.path).name == "checkpoint_000003"
    assert error.result.metrics == {"epoch": 2, "total": 3.0}
    assert set(error.failures) == {1}


def report_with_uneven_batches(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch

    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    for epoch in range(2):
        for _ in range(2 + ray.train.get_context().get_world_rank()):
            model(torch.ones(4, 2)).mean().backward()
        ray.train.report({"epoch": epoch})


@on_shared_pool
def test_one_rank_has_more_batches_than_another(pool: Any, tmp_path: Path) -> None:
    run = pool.options(mismatch_timeout_s=1).train(
        report_with_uneven_batches, {}, run_options=RunOptions(run_dir=tmp_path)
    )
    with pytest.raises(
        TrainingError,
        match=(
            r"Rank 0 has been in ray\.train\.report .*rank 1 has been in torch\.distributed\.all_"
        ),
    ):
        run.result(300)


@on_shared_pool
def test_fit_that_is_late(
    pool: Any, tmp_path: Path, eventually: Any, let_time_pass: Callable[[float], None]
) -> None:
    x = torch.ones(8, 1)
    options = TrainingOptions(max_epochs=10**6, checkpoint_every=1)
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=1)
    run = pool.options(timeout_s=400).fit(
        torch.nn.Linear(1, 1), (x, x), torch.nn.functional.mse_loss, options, run_options=kept
    )
    assert eventually(lambda: len(run.metrics) and kept_epochs(run))
    let_time_pass(400)
    error = run.exception(300)
    assert type(error) is TaskTimeoutError
    assert error.result.checkpoint is not None
    assert error.result.model is None
    done = int(error.result.metrics["epoch"]) + 1
    options = TrainingOptions(max_epochs=done + 3, checkpoint_every=1)
    result = pool.fit(
        torch.nn.Linear(1, 1), (x, x), torch.nn.functional.mse_loss, options, run_options=kept
    ).result(300)
    assert result.values[0]["epochs"] == done + 3


# --- its driver is gone ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_driver_that_is_killed(
    pool: Any, tmp_path: Path, make_gate: Callable[[], Any], start_python: Any, eventually: Any
) -> None:
    """No process is left; another driver goes on from the last checkpoint."""
    inside = make_gate()
    started = start_python(f"""
        import time
        from pathlib import Path
        from typing import Any

        from raypool import RunOptions, parpool

        exec({inspect.getsource(add_up)!r})

        def hold(epoch):
            if epoch == 4:
                Path({str(inside.path)!r}).touch()
                time.sleep(600)

        with parpool(2, quiet=True) as pool:
            pool.train(add_up, {{"epochs": 9, "hold": hold}}, run_options=RunOptions(run_dir={str(tmp_path / "run")!r})).result()
        """)
    inside.wait()
    os.kill(started.pid, signal.SIGKILL)
    assert eventually(lambda: not started.family()), started.family()
    result = pool.train(
        add_up, {"epochs": 9}, run_options=RunOptions(run_dir=tmp_path / "run")
    ).result(300)
    assert result.values == [[4, 9.0]] * 2
    assert result.metrics_frame["epoch"].tolist() == [4, 5, 6, 7, 8]
    assert sum(path.is_dir() for path in (tmp_path / "run").iterdir()) == 9
