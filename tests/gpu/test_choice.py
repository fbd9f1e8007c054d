"""On real GPUs: their free memory is what NVML says, and a card that is full is left out. `pytest
-m gpu`.
"""

from __future__ import annotations

import pytest

from raypool import ResourceError, WorkerResources, parpool
from raypool.gpus.nvml import NvmlInventory

pytestmark = [pytest.mark.gpu]

GIB = 2**30


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not NvmlInventory().devices():
        pytest.skip("no GPU")


def test_the_free_memory_of_a_card(by_value: None) -> None:
    """What a worker takes is missing on the card that it was given, and a card with too little is
    left out.
    """
    first, *_ = NvmlInventory().devices()
    assert first.total_bytes is not None
    assert first.free_bytes is not None

    def fill(num_bytes: int) -> int:
        import torch

        kept.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        return torch.cuda.device_count()

    kept: list[object] = []
    most = first.total_bytes
    with parpool(
        gpus=[0], min_free_memory_bytes=most // 2, max_leftover_bytes=most, quiet=True
    ) as pool:
        assert pool.parfeval(fill, first.total_bytes // 4).result() == 1
        now, *_ = NvmlInventory().devices()
        assert now.free_bytes is not None
        assert first.free_bytes - now.free_bytes >= first.total_bytes // 4
        assert [worker.gpu_uuid for worker in pool.workers] == [first.uuid]
    with pytest.raises(
        ResourceError, match=r"Left out, .* GPU 0 of \S+ \(\d+\.\d of \d+\.\d GiB free\)"
    ):
        parpool(gpus=[0], min_free_memory_bytes=first.total_bytes + 1, quiet=True)


def test_more_workers_than_the_card_has_memory_for(by_value: None) -> None:
    first, *_ = NvmlInventory().devices()
    assert first.total_bytes is not None
    share = first.total_bytes // (GIB // 4)
    with pytest.raises(ResourceError, match=f"{share} workers cannot share GPU 0 of"):
        parpool(gpus=[0], resources=WorkerResources(gpus=1 / share), quiet=True)
