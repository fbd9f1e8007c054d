"""Pools in the user's process, which uses a GPU itself. `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest

from raypool.gpus.nvml import nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]


@pytest.mark.parametrize("profile", ["inline", "threads"])
@pytest.mark.parametrize("begin", ["", "torch.cuda.init()"])
def test_a_seed_leaves_the_generator_of_the_gpu_alone(
    run_python: Any, profile: str, begin: str
) -> None:
    """Whether the GPU was used before that, or is used by an item for the first time, or later."""
    for draw in ("torch.rand(1, device='cuda').item()", "None"):
        run_python(f"""
import torch
from raypool import parpool

{begin}
torch.manual_seed(1)
with parpool(1, profile="{profile}", quiet=True) as pool:
    pool.parfor(lambda _: {draw}, range(3), seed=9)
numbers = torch.rand(3, device="cuda")
torch.manual_seed(1)
assert torch.equal(numbers, torch.rand(3, device="cuda"))
""")


@pytest.mark.parametrize("profile", ["inline", "threads"])
def test_reading_a_composite_gives_the_tensor_itself(run_python: Any, profile: str) -> None:
    run_python(f"""
import torch
from raypool import parpool

tensor = torch.ones(3, device="cuda")
with parpool(1, profile="{profile}", quiet=True) as pool:
    composite = pool.spmd(lambda context: tensor)
    assert composite[0] is tensor
""")
