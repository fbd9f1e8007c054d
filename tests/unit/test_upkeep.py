"""What a worker measures of its GPU's memory, and when it gives something back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool.devices.simulated import SimulatedAllocator, SimulatedGpus
from raypool.engine.backend import Part, WorkerInfo
from raypool.engine.guard import Guard
from raypool.engine.runner import RawResult, Surroundings, run_parts
from raypool.engine.upkeep import Upkeep

MIB = 2**20


@pytest.fixture
def allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedAllocator:
    """Give what manages this process's memory on a simulated card of 16 GiB."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return SimulatedGpus(tmp_path / "gpus", 1).allocator()


def run(upkeep: Upkeep | None, *functions: Callable[[], Any]) -> list[RawResult]:
    """Run tasks, numbered from 0, in one call."""
    here = Surroundings(WorkerInfo(0, "here", 1), functions.__getitem__, list, Guard(), lambda *_: None, upkeep=upkeep)
    parts = [Part(task_id, task_id, [((), {})], 1, 0, 1, is_call=True) for task_id, _ in enumerate(functions)]
    return run_parts(7, parts, here)


def test_the_peak_is_that_of_the_task(allocator: SimulatedAllocator) -> None:
    """Two tensors at once count together, what came after them does not, and the task after that begins from nothing."""

    def two_at_once() -> None:
        held = allocator.allocate(300 * MIB), allocator.allocate(200 * MIB)
        del held
        allocator.allocate(100 * MIB)

    results = run(Upkeep(allocator), two_at_once, lambda: allocator.empty_cache(), lambda: allocator.allocate(50 * MIB))
    assert [result.peak_memory_bytes for result in results] == [500 * MIB, 500 * MIB, 50 * MIB]


def test_nothing_is_said_where_the_gpu_was_not_used(allocator: SimulatedAllocator) -> None:
    """Neither of a worker that has a GPU and leaves it alone, nor of one that has none."""
    assert run(Upkeep(allocator), lambda: None)[0].peak_memory_bytes is None
    assert run(None, lambda: allocator.allocate(MIB))[0].peak_memory_bytes is None
