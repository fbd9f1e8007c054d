"""On real GPUs: one worker a card, seen by CUDA as the only one, and nothing left on it afterwards.
`pytest -m gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from raypool import current_task, parpool
from raypool.gpus.nvml import nvml

pytestmark = [pytest.mark.gpu]


def used_bytes() -> list[int]:
    with nvml() as library:
        handles = [
            library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())
        ]
        return [library.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    with nvml() as library:
        if library is None or library.nvmlDeviceGetCount() == 0:
            pytest.skip("no GPU")


def look(_: int) -> tuple[str, int, str, str, float]:
    import torch

    device = current_task().device
    x = torch.ones(1000, 1000, device=device)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return (
        os.environ["CUDA_VISIBLE_DEVICES"],
        torch.cuda.device_count(),
        str(device),
        uuid,
        float((x @ x).sum()),
    )


def test_each_worker_has_one_card_of_its_own(
    by_value: None, eventually: Callable[..., bool]
) -> None:
    before = used_bytes()
    with parpool(quiet=True) as pool:
        assert pool.num_workers == len(before)
        seen = pool.parfeval_on_all(look, 0).result()
        assert [visible for visible, *_ in seen] == [str(worker.gpu) for worker in pool.workers]
        assert {(count, device) for _, count, device, *_ in seen} == {(1, "cuda:0")}
        assert [f"GPU-{uuid}" for *_, uuid, _ in seen] == [
            worker.gpu_uuid for worker in pool.workers
        ]
        assert len({uuid for *_, uuid, _ in seen}) == len(seen)
        assert {total for *_, total in seen} == {1e9}
    assert eventually(
        lambda: all(now <= then + 2**26 for now, then in zip(used_bytes(), before, strict=True))
    )


def test_a_replaced_worker_is_on_the_same_card(by_value: None) -> None:
    with parpool(1, quiet=True) as pool:
        uuid = pool.workers[0].gpu_uuid
        assert pool.options(retries=0).parfor(lambda _: os._exit(1), [0], on_error="collect").errors
        assert pool.parfeval(look, 0).result()[3] in str(uuid)
        assert pool.workers[0].gpu_uuid == uuid


def test_seeds_reach_the_card(by_value: None) -> None:
    def draw(_: int) -> float:
        import torch

        return float(torch.rand((), device="cuda"))

    with parpool(1, quiet=True) as pool:
        assert pool.parfor(draw, 3, seed=5)[:] == pool.parfor(draw, 3, seed=5)[:]
