"""Guests on real GPUs: each sees its host's card and no other, and Ray Train finds it. `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest

from raypool import parpool
from raypool.devices.nvml import nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),  # Ray warns of itself
]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    with nvml() as library:
        if library is None or library.nvmlDeviceGetCount() == 0:
            pytest.skip("no GPU")


def on_the_card(config: dict[str, Any]) -> dict[str, Any]:
    import ray.train.torch
    import torch
    import torch.distributed as dist

    device = ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    return {
        "device": str(device),
        "parameters": str(next(model.parameters()).device),
        "backend": dist.get_backend(),
        "uuid": str(torch.cuda.get_device_properties(0).uuid),
        "num_devices": torch.cuda.device_count(),
        "sum": x.item(),
    }


@pytest.mark.parametrize("release_workers", [False, True])
def test_guests_see_their_hosts_card(by_value: None, release_workers: bool) -> None:
    with parpool(quiet=True) as pool:
        result = pool.train(on_the_card, lane="managed", release_workers=release_workers).result(240)
        for worker, seen in zip(pool.workers, result.values, strict=True):
            assert seen["uuid"].removeprefix("GPU-") == (worker.gpu_uuid or "").removeprefix("GPU-")
            assert (seen["device"], seen["parameters"], seen["backend"]) == ("cuda:0", "cuda:0", "nccl")
            assert (seen["num_devices"], seen["sum"]) == (1, pool.num_workers)
