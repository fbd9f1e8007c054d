"""Transfers on a real GPU: what is there stays there, pinned memory is pinned, and metrics wait on
the card.
"""

from __future__ import annotations

import pytest
import torch

from raypool import MetricBuffer, as_device, copy_to, cpu, gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]


def test_what_is_on_the_card_is_the_very_object() -> None:
    x = {"a": [torch.ones(3, device="cuda:0")], "model": torch.nn.Linear(2, 2).cuda()}
    for name in (gpu(), gpu(0), "cuda", "cuda:0"):
        assert as_device(x, name) is x
        assert as_device(x, name, pinned=True, non_blocking=True) is x
    copied = copy_to(x, gpu())
    assert copied["a"][0].data_ptr() != x["a"][0].data_ptr()
    assert copied["model"].weight.data_ptr() != x["model"].weight.data_ptr()


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("bring", [as_device, copy_to])
def test_there_and_back(bring: object, pinned: bool, non_blocking: bool) -> None:
    """A thousand random numbers come back as they were, by all ways; those that were to lie in
    pinned memory do.
    """
    x = {"x": torch.randn(1000), "n": torch.arange(10)}
    there = bring(x, gpu(), pinned=pinned, non_blocking=non_blocking)  # type: ignore[operator]
    assert {each.device for each in there.values()} == {gpu()}
    back = bring(there, cpu(), pinned=pinned, non_blocking=non_blocking)  # type: ignore[operator]
    torch.cuda.synchronize()
    assert all(back[name].equal(x[name]) for name in x)
    assert not pinned or all(each.is_pinned() for each in back.values())


def test_pinned_memory_is_pinned_once() -> None:
    pinned = as_device(torch.ones(1000), cpu(), pinned=True)
    assert pinned.is_pinned()
    assert as_device(pinned, cpu(), pinned=True) is pinned
    again = copy_to(pinned, cpu(), pinned=True)
    assert again.is_pinned()
    assert again.data_ptr() != pinned.data_ptr()


def test_gradients_flow_through_pinned_memory() -> None:
    x = torch.ones(3, device=gpu(), requires_grad=True)
    (as_device(x, cpu(), pinned=True) * torch.arange(3.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2]


def test_operands_on_two_devices_raise() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2, device=gpu())
    with pytest.raises(RuntimeError, match="device"):
        x @ y
    assert (as_device(x, y.device) @ y).sum() == 8


def test_a_buffer_brings_the_same_numbers_as_item() -> None:
    """Scenario 48: and nothing comes to the CPU before the flush."""
    torch.manual_seed(0)
    x = torch.randn(100, 100, device=gpu())
    buffer = MetricBuffer(size=1000)
    with torch.cuda.device(gpu()):
        torch.cuda.set_sync_debug_mode("error")  # whatever makes the CPU wait raises
        try:
            for step in range(200):
                buffer.add(norm=(x * step).norm(), step=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert buffer.flush() == [
        {"norm": (x * step).norm().item(), "step": step} for step in range(200)
    ]


def test_each_card_by_its_number() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("one GPU only")
    x = as_device(torch.ones(2), gpu(1))
    assert (x.device, as_device(x, gpu(0)).device) == (gpu(1), gpu(0))
    buffer = MetricBuffer()
    buffer.add(here=torch.ones((), device=gpu(0)), there=torch.zeros((), device=gpu(1)))
    assert buffer.flush() == [{"here": 1.0, "there": 0.0}]
