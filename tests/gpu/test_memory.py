"""A GPU is free again before the next task begins on it (scenario 19)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from raypool import ParallelPool, parpool
from raypool.gpus.nvml import NvmlInventory, nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]

GIBIBYTE = 2**30


@pytest.fixture
def pool(by_value: None) -> Iterator[ParallelPool]:
    with parpool(1, cancel_grace_s=1.0, quiet=True) as pool:
        yield pool


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_memory_is_back_before_the_next_task(
    pool: ParallelPool, gate: Any, is_stubborn: bool
) -> None:
    """A task that stops gives back what it held but for PyTorch's cache; one that is killed gives
    back all.
    """
    (worker,) = pool.workers
    before = NvmlInventory().memory_used(worker.gpus)

    def hold() -> None:
        import torch

        held = torch.empty(8 * GIBIBYTE, dtype=torch.uint8, device="cuda")
        gate.open()
        while True:
            try:
                time.sleep(60)
            except BaseException:
                if not is_stubborn:
                    del held
                    torch.cuda.empty_cache()
                    raise

    future = pool.parfeval(hold)
    gate.wait(120)
    assert NvmlInventory().memory_used(worker.gpus) > before + 8 * GIBIBYTE
    assert future.cancel()
    used = pool.parfeval(NvmlInventory().memory_used, worker.gpus).result(300)
    assert future.worker_replaced is is_stubborn
    assert used < before + GIBIBYTE
