"""What the tests of faults share: their loops, and the proof that a pool is as good as new."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raypool import ParallelPool
from raypool.gpus.devices import GpuDevice
from raypool.gpus.memory import TorchAllocator
from tests.leaks import GRACE_S


@pytest.fixture(scope="module", autouse=True)
def helpers_travel(by_value: None) -> None:
    """Let functions of this file travel as those of the tests do."""
    if "ray" in sys.modules:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])


class BreakingCards:
    """Knows nothing of any GPU. A worker that begins once `flag` exists fails, after so many
    seconds as are written there.
    """

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def find(self, device: str) -> GpuDevice | None:
        if self.flag.exists():
            time.sleep(float(self.flag.read_text() or 0))
            raise RuntimeError("the GPU has fallen off the bus")
        return None

    def devices(self) -> list[GpuDevice]:
        return []

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        return [GpuDevice(index=index) for index in indices]

    def memory_used(self, indices: Sequence[int]) -> int | None:
        return None

    def allocator(self) -> TorchAllocator:
        return TorchAllocator()


@pytest.fixture
def breaking_cards(tmp_path: Path) -> BreakingCards:
    """Give cards that break down between two processes, once their flag is there."""
    return BreakingCards(tmp_path / "broken")


@pytest.fixture
def pool(shared_pool: ParallelPool) -> ParallelPool:
    """Give the pool that tests on Ray share: three workers, each with a GPU that does not exist."""
    return shared_pool


@pytest.fixture
def patience(shared_pool: ParallelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of the shared pool have two minutes to end what is cancelled, for tests in
    which none may be replaced: one that imports something on a busy machine needs more than five
    seconds.
    """
    monkeypatch.setattr(shared_pool._engine.backend._agents, "_cancel_grace_s", GRACE_S)


@pytest.fixture
def two_workers(shared_pool: ParallelPool) -> Any:
    """Give two of its workers: each further rank of a training takes its time on a machine with two
    cores.
    """
    part, _ = shared_pool.partition(workers=[0, 1])
    return part


@pytest.fixture
def as_good_as_new(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, all workers answer to calls and loops, on the GPUs that they had, and
    nothing is left to do.
    """
    gpus = [worker.gpu for worker in pool.workers]
    yield
    visible = pool.parfeval_on_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).result(300)
    assert visible == [str(gpu) for gpu in gpus]
    assert [worker.gpu for worker in pool.workers] == gpus
    assert list(pool.parfor(abs, range(-4, 0))) == [4, 3, 2, 1]
    assert eventually(lambda: not pool.busy)
    statistics = pool.statistics()
    assert statistics.queued == statistics.running == 0


# --- loops of trainings ---------------------------------------------------------------------------


def count_ranks() -> int:
    import ray.train

    return ray.train.get_context().get_world_size()


def add_up(config: dict[str, Any]) -> list[float]:
    """Add 1 to a number with each epoch, on all ranks together; the number is all the state that
    there is.
    """
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
