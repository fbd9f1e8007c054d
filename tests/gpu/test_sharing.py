"""Several workers to a real GPU: each keeps to its part of the memory, and an auto pool finds how
many fit (scenario 49).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raypool import ParallelPool, SpmdContext, parpool
from raypool.gpus.nvml import NvmlInventory, nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]

GIBIBYTE = 2**30


@pytest.fixture
def gpu() -> int:
    """Return the index of a GPU that nobody else fills."""
    cards = NvmlInventory().devices()
    free = [
        card.index
        for card in cards
        if card.free_bytes is not None and card.free_bytes > 0.9 * (card.total_bytes or 0)
    ]
    if not free:
        pytest.skip("Every GPU is in use.")
    return free[0]


@pytest.fixture
def pair(by_value: None, gpu: int) -> Iterator[ParallelPool]:
    """Give two workers on one GPU."""
    with parpool(2, gpus=[gpu], workers_per_gpu=2, quiet=True) as pool:
        yield pool


def test_out_of_memory_in_one_leaves_the_other_alone(pair: ParallelPool) -> None:
    """One asks for more than its half while the other holds most of its own: only the first fails,
    and both go on.
    """
    total = NvmlInventory().devices()[pair.workers[0].gpus[0]].total_bytes
    assert total is not None

    def ask(context: SpmdContext) -> tuple[str, float]:
        import torch

        held = torch.full((int(0.4 * total) // 4,), 1.0, device="cuda")
        context.barrier()
        words = ""
        if context.rank == 0:
            try:
                torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                words = str(error)
        context.barrier()
        return words, held[:: len(held) // 7].sum().item()

    first, second = list(pair.spmd(ask))
    assert "out of memory" in first[0]
    assert second[0] == ""
    assert first[1] == second[1] >= 7


def test_an_auto_pool_fills_the_card_and_a_large_item_gets_it_whole(
    by_value: None, gpu: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Items that need a sixth of the card: it is shared by several. One that needs nearly all of it
    runs again, alone.
    """
    total = NvmlInventory().devices()[gpu].total_bytes
    assert total is not None

    def train(part: float) -> float:
        import torch

        held = torch.empty(int(part * total), dtype=torch.uint8, device="cuda")
        held.fill_(7)
        torch.cuda.synchronize()
        time.sleep(1.0)
        return float(held[-1])

    with parpool(1, gpus=[gpu], workers_per_gpu="auto", quiet=True) as pool:
        deadline = time.monotonic() + 200
        while pool.num_workers < 2 and time.monotonic() < deadline:
            assert list(pool.parfor(train, [1 / 6] * 4)) == [7.0] * 4
        assert 2 <= pool.num_workers <= 5
        results = pool.parfor(train, [1 / 6, 1 / 6, 0.8, 1 / 6, 1 / 6])
        assert list(results) == [7.0] * 5
    assert "Item 2 of train ran out of memory on a GPU that" in caplog.text
