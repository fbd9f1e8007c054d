"""What the agent of a node waits for. The rest of it needs processes: see
tests/integration/test_cancel.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from raypool.backends.ray import node_agent
from raypool.backends.ray.node_agent import memory_back
from raypool.gpus.nvml import NvmlInventory


def each(read: Callable[[], int | None]) -> Callable[[], Awaitable[int | None]]:
    """Let a reading be waited for."""

    async def wait() -> int | None:
        return read()

    return wait


def test_memory_that_comes_back_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "STEADY_S", 60.0)
    falling = iter([900, 500, 500, 120, 100])
    asyncio.run(memory_back(each(lambda: next(falling)), 100))
    assert list(falling) == []


def test_memory_that_somebody_else_uses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "STEADY_S", 2.5)
    # a second passes whenever somebody looks
    seconds = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(node_agent, "time", seconds)
    readings = []
    asyncio.run(memory_back(each(lambda: readings.append(300) or 300), 100))
    assert len(readings) == 3


def test_memory_that_is_back_already() -> None:
    readings = iter([100])
    asyncio.run(memory_back(each(lambda: next(readings)), 100))
    assert list(readings) == []


def test_a_worker_is_watched_once(run_python: Callable[..., object]) -> None:
    """Also if it is attached again, since another agent was lost."""
    run_python("""
        import asyncio, os
        from raypool.backends.ray.node_agent import NodeAgent, WorkerProcess
        from raypool.gpus.nvml import NvmlInventory
        async def watch():
            agent = NodeAgent(None, NvmlInventory(), "store")
            worker = WorkerProcess(os.getpid(), os.pipe()[1], os.memfd_create("board"), "")
            numbers = []
            for _ in range(2):
                await agent.watch(0, worker, (), None)
                numbers.append(len(os.listdir("/proc/self/fd")))
            assert numbers[0] == numbers[1], numbers
        asyncio.run(watch())
        """)


def test_without_a_gpu_nothing_is_used() -> None:
    assert NvmlInventory().memory_used([]) == 0
    assert NvmlInventory().memory_used([99]) is None


def test_memory_of_which_nothing_is_known_any_more_is_not_waited_for() -> None:
    readings = iter([900, None, 500])
    asyncio.run(memory_back(each(lambda: next(readings)), 100))
    assert list(readings) == [500]
