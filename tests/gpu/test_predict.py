"""`pool.predict` on a GPU: the model is there while it predicts, and nothing of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raypool import parpool
from raypool.gpus.nvml import nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]


def held_bytes() -> int:
    """Return what torch holds on the GPU, once cuBLAS has its workspace, which stays."""
    import torch

    torch.nn.Linear(4, 2, device="cuda")(torch.ones(3, 4, device="cuda")).sum().item()
    return int(torch.cuda.memory_allocated())


@pytest.mark.usefixtures("by_value")
def test_the_model_is_on_the_gpu_while_it_predicts(eventually: Callable[..., bool]) -> None:
    import torch

    model = torch.nn.Linear(1000, 1000)
    x = np.random.default_rng(0).normal(size=(500, 1000)).astype(np.float32)
    with parpool(1, quiet=True) as pool:
        before = pool.parfeval(held_bytes).result(300)
        devices = pool.predict(model, x, mini_batch_size=100, output=lambda y: [str(y.device)])
        assert devices == ["cuda:0"] * 5
        outputs = pool.predict(model, torch.from_numpy(x))
        assert outputs.device.type == "cpu"
        assert torch.allclose(outputs, model(torch.from_numpy(x)).detach(), atol=1e-3)
        assert next(model.parameters()).device.type == "cpu"
        assert eventually(lambda: pool.parfeval(held_bytes).result(300) == before)
        assert pool.predict(model, x[:0]).shape == (0, 1000)
        assert eventually(lambda: pool.parfeval(held_bytes).result(300) == before)


def test_a_model_that_is_on_a_gpu_travels() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this process sees no GPU")
    model: Any = torch.nn.Linear(4, 2).cuda()
    with parpool(1, quiet=True) as pool:
        assert pool.predict(model, torch.ones(3, 4, device="cuda")).shape == (3, 2)
    assert next(model.parameters()).device.type == "cuda"


@pytest.mark.usefixtures("by_value")
def test_in_a_task_it_uses_the_gpu_of_the_worker() -> None:
    def task() -> Any:
        import torch

        from raypool import gcp

        before = held_bytes()
        where = gcp().predict(
            torch.nn.Linear(4, 2), torch.ones(3, 4), output=lambda y: [str(y.device)]
        )
        return where, held_bytes() - before

    with parpool(1, quiet=True) as pool:
        assert pool.parfeval(task).result(300) == (["cuda:0"], 0)
