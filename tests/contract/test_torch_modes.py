"""What a cancelled task leaves of torch's modes: nothing, wherever it was interrupted."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from raypool import ParallelPool
from raypool.worker.runner import TorchModes, torch_modes

from .conftest import PoolMaker


def here() -> tuple[int, int, TorchModes]:
    assert torch, "it is imported"
    return os.getpid(), threading.get_ident(), torch_modes()


@pytest.mark.concurrent
def test_a_cancelled_task_leaves_no_mode_of_torchs_behind(
    pool: ParallelPool, patience: None, gate: Any, marks: Any, eventually: Any
) -> None:
    """As if it had been interrupted in `__exit__`, before that has switched anything back."""

    def hang() -> None:
        torch.no_grad().__enter__()
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
        marks.add("hangs")
        gate.wait()

    view = pool.options(worker=0)
    before = view.submit(here).result(300)
    future = view.submit(hang)
    assert eventually(lambda: marks.count("hangs"))
    assert future.cancel()
    assert view.submit(here).result(300) == before
    assert before[2].is_grad_enabled


@pytest.mark.threads
def test_what_a_task_has_left_without_being_cancelled_is_its_own(make_pool: PoolMaker) -> None:
    def switch_off() -> None:
        torch.set_grad_enabled(False)

    with make_pool(1) as pool:
        pool.submit(switch_off).result(300)
        assert not pool.submit(torch.is_grad_enabled).result(300)


def test_they_are_put_back_as_they_were() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        before = torch_modes()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            within = torch_modes()
            before.put_back()
            assert torch_modes() == before != within
            torch.autocast_increment_nesting()  # which leaving the block takes back
    TorchModes().put_back()
    assert torch_modes() == TorchModes(autocast=torch_modes().autocast)
    assert not any(is_enabled for is_enabled, _ in torch_modes().autocast)
