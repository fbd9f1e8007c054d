"""On real GPUs: tensors stay on their card, and go from card to card through NCCL. `pytest -m
gpu`.
"""

from __future__ import annotations

import pytest

from raypool import parpool
from raypool.gpus.nvml import nvml
from raypool.spmd.context import SpmdContext

pytestmark = [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    with nvml() as library:
        if library is None or library.nvmlDeviceGetCount() == 0:
            pytest.skip("no GPU")


def reduce_on_the_device(ctx: SpmdContext) -> tuple[str, str, float, list[str]]:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    x = torch.full((1 << 20,), float(ctx.rank + 1), device=ctx.device)
    ctx.all_reduce(torch.ones(1, device=ctx.device))  # NCCL connects at the first
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        assert ctx.all_reduce(x) is x
        torch.cuda.synchronize()
    copies = [event.key for event in profiler.key_averages() if "Memcpy" in event.key]
    backend = dist.get_backend(ctx.process_group)
    return str(x.device), str(backend), float(x[-1]), copies


def test_a_reduction_stays_on_the_device(by_value: None) -> None:
    with parpool(quiet=True) as pool:
        size = pool.num_workers
        seen = pool.spmd(reduce_on_the_device)
        for rank in range(size):
            device, backend, value, copies = seen[rank]
            assert device == "cuda:0"
            assert "nccl" in backend
            assert value == size * (size + 1) / 2
            assert copies == []


def every_collective(ctx: SpmdContext) -> None:
    import torch

    own = torch.full((3,), float(ctx.rank), device=ctx.device)
    everybody = [torch.full((3,), float(rank), device=ctx.device) for rank in range(ctx.world_size)]
    last = ctx.world_size - 1

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.device == b.device == ctx.device and torch.equal(a, b)

    assert all(map(same, ctx.all_gather(own), everybody))
    assert all(map(same, ctx.gather(own, dst=last) or everybody, everybody))
    assert same(ctx.broadcast(own.clone() if ctx.rank == last else None, src=last), everybody[last])
    assert same(ctx.scatter(everybody, src=0), own)
    reduced = ctx.reduce(own.clone(), dst=last, op="max")
    assert (reduced is None) == (ctx.rank != last)
    assert reduced is None or same(reduced, everybody[last])
    sizes = ctx.all_gather(torch.ones(ctx.rank + 1, device=ctx.device))
    assert [len(part) for part in sizes] == list(range(1, ctx.world_size + 1))
    if ctx.world_size > 1:
        right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
        assert same(ctx.send_receive(own, dst=right, src=left), everybody[left])


def test_every_collective_on_the_device(by_value: None) -> None:
    with parpool(quiet=True) as pool:
        pool.spmd(every_collective)


def shared_device(ctx: SpmdContext) -> float:
    import torch

    return float(ctx.all_reduce(torch.ones(3, device=ctx.device))[0])


def test_ranks_that_share_a_gpu_go_through_the_cpu(by_value: None) -> None:
    """NCCL refuses two ranks on one card."""
    from raypool import WorkerResources

    with parpool(2, resources=WorkerResources(gpus=0.5), gpus=[0], quiet=True) as pool:
        seen = pool.spmd(shared_device)
        assert [seen[0], seen[1]] == [2.0, 2.0]
