"""Ray Train on the pool's real GPUs: each rank has one of them, also by LOCAL_RANK. `pytest -m
gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest

from raypool import current_task, parpool
from raypool.gpus.nvml import nvml

pytestmark = [
    pytest.mark.gpu,
    # Ray warns of itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    with nvml() as library:
        if library is None or library.nvmlDeviceGetCount() == 0:
            pytest.skip("no GPU")


def on_the_card(config: dict[str, Any]) -> dict[str, Any]:
    import os

    import ray.train.torch
    import torch
    import torch.distributed as dist

    device = ray.train.torch.get_device()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # as in most loops for torchrun
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    return {
        "devices": {str(device), str(current_task().device), str(next(model.parameters()).device)},
        "backend": dist.get_backend(),
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "sum": x.item(),
    }


def test_ranks_have_the_cards_of_the_workers(by_value: None) -> None:
    with parpool(quiet=True) as pool:
        before = [worker.gpu_uuid for worker in pool.workers]
        result = pool.train(on_the_card, lane="managed").result(300)
        assert {seen["uuid"].removeprefix("GPU-") for seen in result.values} == {
            (uuid or "").removeprefix("GPU-") for uuid in before
        }
        for seen in result.values:
            assert (len(seen["devices"]), seen["backend"], seen["sum"]) == (
                1,
                "nccl",
                pool.num_workers,
            )
        assert pool.parfeval_on_all(pow, 2, 3).result(300) == [8] * pool.num_workers
        assert [worker.gpu_uuid for worker in pool.workers] == before
