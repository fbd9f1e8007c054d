"""Faults in the managed lane, on real Ray: what the warm lane promises holds there too (scenario
40).

More of them, of the lane's own, are in tests/integration/test_train_managed.py.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import RunOptions, TrainingError, TrainingOptions, WorkerLostError, current_task
from raypool.train.checkpoints import list_kept

torch = pytest.importorskip("torch")

pytestmark = [
    # Ray warns of itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")
]

LONG_S = 300.0


@pytest.fixture(scope="module")
def coordinator(ray_session: None) -> Iterator[None]:
    """Have Ray's autoscaling coordinator now: the first training in the managed lane makes it, and
    then it stays.
    """
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    handle = get_or_create_autoscaling_coordinator()
    yield
    del handle


@pytest.fixture
def pool(coordinator: None, two_workers: Any) -> Any:
    """Give the workers that train: two."""
    return two_workers


@pytest.fixture(autouse=True)
def all_is_free_afterwards(pool: Any, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, the pool's workers are on the same GPUs, idle, and a warm training
    works.
    """
    before = [worker.gpu for worker in pool.workers]
    yield
    assert eventually(lambda: not pool.busy)
    assert pool.train(lambda: current_task().gpu).result(300).values == before
    assert [worker.gpu for worker in pool.workers] == before


def count_up(config: dict[str, Any]) -> list[int]:
    """Count epochs, with a checkpoint after each; what happens is in the configuration."""
    import tempfile
    from pathlib import Path

    import ray.train
    import torch
    import torch.distributed as dist

    rank = ray.train.get_context().get_world_rank()
    start = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        start = int((Path(checkpoint.path) / "epoch").read_text()) + 1
    for epoch in range(start, config["epochs"]):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        loss = model(torch.ones(2, 4)).sum()
        if "strike" in config:
            loss.register_hook(lambda grad, epoch=epoch: config["strike"](rank, epoch))
        loss.backward()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                (Path(folder) / "epoch").write_text(str(epoch))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint)
    dist.barrier()
    return [start, rank]


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_raises_in_its_backward_pass(pool: Any, tmp_path: Path, culprit: int) -> None:
    def strike(rank: int, epoch: int) -> None:
        if (rank, epoch) == (culprit, 2):
            raise KeyError("of the user's")

    kept = RunOptions(run_dir=tmp_path / "run")
    error = pool.train(
        count_up, {"epochs": 5, "strike": strike}, lane="managed", run_options=kept
    ).exception(LONG_S)
    assert isinstance(error, TrainingError), error
    assert error.first_rank == culprit, str(error)
    assert set(error.failures) == {culprit}
    assert type(error.__cause__) is KeyError
    assert str(error).startswith(f"Rank {culprit} of count_up (")
    assert error.result.metrics == {"epoch": 1}
    assert error.result.metrics_frame["epoch"].tolist() == [0, 1]
    again = pool.train(count_up, {"epochs": 5}, lane="managed", run_options=kept).result(LONG_S)
    assert again.values == [[2, 0], [2, 1]]


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_killed_in_its_backward_pass(
    pool: Any, tmp_path: Path, culprit: int
) -> None:
    """Not again without retries; with the same folder the warm lane goes on from where it was."""
    mark = tmp_path / "mark"

    def strike(rank: int, epoch: int) -> None:
        if (rank, epoch) == (culprit, 2) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    kept = RunOptions(run_dir=tmp_path / "run")
    run = pool.options(retries=0).train(
        count_up, {"epochs": 5, "strike": strike}, lane="managed", run_options=kept
    )
    error = run.exception(LONG_S)
    assert isinstance(error, TrainingError), error
    assert error.first_rank == culprit, str(error)
    assert set(error.failures) == {culprit}
    assert isinstance(error.__cause__, WorkerLostError)
    assert "1 was interrupted because of it" in str(error)
    start = int((Path(error.result.checkpoint.path) / "epoch").read_text()) + 1
    assert start in (1, 2), (
        "Ray Train's controller looks after checkpoints from time to time: the last one may be"
        " missing"
    )
    assert pool.train(count_up, {"epochs": 5}, run_options=kept).result(300).values == [
        [start, 0],
        [start, 1],
    ]
    assert [each.metrics["epoch"] for each in list_kept(tmp_path / "run")] == [0, 1, 2, 3, 4]


class Fatal(torch.nn.Module):
    """A model that takes its process with it, once, in mid-training."""

    def __init__(self, mark: Path, at_call: int) -> None:
        super().__init__()
        self.mark, self.at_call, self.calls = mark, at_call, 0
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        ).double()

    def forward(self, x: Any) -> Any:
        self.calls += self.training
        if self.calls == self.at_call and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)


def test_fit_ends_as_if_nothing_had_happened(pool: Any, tmp_path: Path) -> None:
    """To the last bit, and as in the warm lane."""
    x = torch.randn(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = x, x.sum(1, keepdim=True).sin()
    options = TrainingOptions(
        optimizer="adam", mini_batch_size=20, max_epochs=6, checkpoint_every=2
    )
    torch.manual_seed(1)
    model = Fatal(tmp_path / "mark", 10**9)
    whole = pool.fit(
        model,
        data,
        torch.nn.functional.mse_loss,
        options,
        run_options=RunOptions(run_dir=tmp_path / "whole"),
    )
    expected = dict(whole.result(300).model.state_dict())
    model.at_call = 12
    kept = RunOptions(run_dir=tmp_path / "run")
    run = pool.fit(
        model, data, torch.nn.functional.mse_loss, options, lane="managed", run_options=kept
    )
    result = run.result(LONG_S)
    assert (tmp_path / "mark").exists()
    assert run.attempts == 2
    torch.testing.assert_close(dict(result.model.state_dict()), expected, rtol=0, atol=0)
    assert result.metrics["epoch"] == 5


@pytest.mark.long
def test_a_driver_that_is_killed(
    pool: Any, tmp_path: Path, make_gate: Callable[[], Any], start_python: Any, eventually: Any
) -> None:
    """No process is left, of Ray Train's neither; another driver goes on from the last
    checkpoint.
    """
    inside = make_gate()
    started = start_python(f"""
        import time
        from pathlib import Path
        from typing import Any

        import warnings
        warnings.simplefilter("default")
        from raypool import RunOptions, parpool

        exec({inspect.getsource(count_up)!r})

        def strike(rank, epoch):
            if epoch == 3:
                Path({str(inside.path)!r}).touch()
                time.sleep(600)

        with parpool(2, quiet=True) as pool:
            config = {{"epochs": 5, "strike": strike}}
            pool.train(count_up, config, lane="managed", run_options=RunOptions(run_dir={str(tmp_path / "run")!r})).result()
        """)
    inside.wait()
    os.kill(started.pid, signal.SIGKILL)
    assert eventually(lambda: not started.family()), started.family()
    result = pool.train(
        count_up, {"epochs": 5}, lane="managed", run_options=RunOptions(run_dir=tmp_path / "run")
    ).result(LONG_S)
    assert result.values in ([[3, 0], [3, 1]], [[2, 0], [2, 1]])
