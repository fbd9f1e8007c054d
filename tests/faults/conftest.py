"""What the tests of faults share: their loops, and the proof that a pool is as good as new."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import ParallelPool, parpool


@pytest.fixture(scope="module", autouse=True)
def helpers_travel(by_value: None) -> None:
    """Let functions of this file travel as those of the tests do."""
    if "ray" in sys.modules:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def pool(ray_session: None, by_value: None) -> Iterator[ParallelPool]:
    """Two workers, each with a GPU that does not exist."""
    with parpool(2, quiet=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def training_pool(ray_session: None, by_value: None) -> Iterator[ParallelPool]:
    """The same, after a first training: what that starts stays as long as the pool."""
    with parpool(2, quiet=True) as pool:
        pool.train(lambda: None).result(120)
        yield pool


@pytest.fixture
def as_good_as_new(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, all workers answer to calls and loops, on the GPUs that they had, and nothing is left to do."""
    gpus = [worker.gpu for worker in pool.workers]
    yield
    visible = pool.parfeval_on_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).result(60)
    assert visible == [str(gpu) for gpu in gpus]
    assert [worker.gpu for worker in pool.workers] == gpus
    assert list(pool.parfor(abs, range(-4, 0))) == [4, 3, 2, 1]
    assert eventually(lambda: not pool.busy)
    statistics = pool.statistics()
    assert statistics.queued == statistics.running == 0


# --- loops of trainings ------------------------------------------------------------------------------------------------


def count_ranks() -> int:
    import ray.train

    return ray.train.get_context().get_world_size()


def add_up(config: dict[str, Any]) -> list[float]:
    """Add 1 to a number with each epoch, on all ranks together; the number is all the state that there is."""
    import tempfile
    from pathlib import Path

    import ray.train
    import torch
    import torch.distributed as dist

    total = torch.zeros(1)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        total += float((Path(checkpoint.path) / "total").read_text())
    start = int(total)
    hold = config.get("hold") or (lambda epoch: None)
    for epoch in range(start, config["epochs"]):
        one = torch.ones(1)
        dist.all_reduce(one)
        total += one / dist.get_world_size()
        hold(epoch)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                (Path(folder) / "total").write_text(str(total.item()))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "total": total.item()}, checkpoint)
    return [start, total.item()]
