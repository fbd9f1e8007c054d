"""A GPU is clean between tasks: caches are given back, a leak costs its worker, and a full GPU is
told from other failures.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator

import pytest

from raypool import ParallelPool, parpool
from raypool.gpus.nvml import NvmlInventory, nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]

GIBIBYTE = 2**30


@pytest.fixture(scope="module")
def pool(by_value: None) -> Iterator[ParallelPool]:
    """Give a pool of one worker, which may leave over 1 GiB."""
    with parpool(1, max_leftover_bytes=GIBIBYTE, quiet=True) as pool:
        yield pool


def fill(num_bytes: int) -> int:
    import torch

    return int(torch.ones(num_bytes, dtype=torch.uint8, device="cuda")[-1].item())


def leave(num_bytes: int) -> int:
    import torch

    builtins.__dict__.setdefault("left_over", []).append(
        torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    )
    return os.getpid()


def test_the_cache_is_given_back_between_tasks(pool: ParallelPool) -> None:
    """What a task had is in the table; when it has ended, others see all but the context as free,
    and its process goes on.
    """
    (worker,) = pool.workers
    assert pool.parfeval(fill, 1).result() == 1
    before = NvmlInventory().memory_used(worker.gpus)
    pid = pool.parfeval(os.getpid).result()
    future = pool.parfeval(fill, 4 * GIBIBYTE)
    assert future.result() == 1
    assert future.peak_memory_bytes is not None
    assert 4 * GIBIBYTE <= future.peak_memory_bytes < 4.2 * GIBIBYTE
    after = NvmlInventory().memory_used(worker.gpus)
    assert before is not None
    assert after is not None
    assert after < before + GIBIBYTE // 4
    assert pool.parfeval(os.getpid).result() == pid


def test_a_leak_costs_its_worker(pool: ParallelPool) -> None:
    """The next task finds another process, and the GPU as it was before any."""
    (worker,) = pool.workers
    leaving, looking = (
        pool.parfeval(leave, 3 * GIBIBYTE),
        pool.parfeval(NvmlInventory().memory_used, worker.gpus),
    )
    pid = leaving.result()
    used = looking.result()
    assert pool.parfeval(os.getpid).result() != pid
    assert used is not None
    assert used < 2 * GIBIBYTE


def test_a_full_gpu_is_told_from_other_failures(pool: ParallelPool) -> None:
    """The exception is torch's own, with a note of what the process had; what comes next on that
    worker succeeds.
    """
    card = NvmlInventory().find(str(pool.workers[0].gpus[0]))
    assert card is not None
    assert card.total_bytes is not None
    results = pool.parfor(fill, [1, 2 * card.total_bytes, 1], on_error="collect", chunk_size=1)
    assert type(results.errors[1]).__name__ == "OutOfMemoryError"
    assert "raypool: its process had " in str(results.errors[1].__notes__)
    assert results.to_frame()["reason"].fillna("").tolist() == ["", "gpu out of memory", ""]


def test_a_gpu_that_fails_takes_its_process_with_it(pool: ParallelPool) -> None:
    """After a failed assertion on the device nothing works any more in that process: the next task
    runs in another.
    """

    def trip() -> None:
        import torch

        torch.zeros(4, device="cuda")[torch.tensor([10], device="cuda")].sum().item()

    future = pool.parfeval(trip)
    assert "CUDA" in str(future.exception())
    assert pool.parfeval(fill, 1).result() == 1
