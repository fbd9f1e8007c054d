"""How busy GPUs were, as the agent of a node sees it: cards that do not exist, and an inventory
that hangs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from raypool.backends.ray.node_agent import KEPT, Reading, Telemetry
from raypool.gpus.devices import Allocator, GpuDevice
from raypool.gpus.simulated import SimulatedGpus

GIBIBYTE = 2**30


async def until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    """Wait, without holding up the loop, until something is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        await asyncio.sleep(0.005)


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path, 2)


def noted(readings: list[Reading]) -> Telemetry:
    telemetry = Telemetry(SimulatedGpus.__new__(SimulatedGpus))  # it is not asked
    for reading in readings:
        telemetry.note(0, reading)
    return telemetry


class Counted:
    """An inventory that counts how often it was asked, and for which GPUs."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self.gpus, self.num_looks, self.asked = gpus, 0, set[int]()

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        self.num_looks += 1
        self.asked.update(indices)
        return self.gpus.load(indices)

    def devices(self) -> list[GpuDevice]:
        return self.gpus.devices()


def test_how_busy_a_gpu_was_between_two_times() -> None:
    telemetry = noted(
        [
            Reading(10.0, 0.9, 9),
            Reading(11.0, 0.2, 4),
            Reading(11.5, None, 4),  # the driver may not say it, as of a GPU that is divided
            Reading(12.0, 0.6, 8),
            Reading(13.0, 1.0, 16),
        ]
    )
    assert telemetry.utilization(0, 10.5, 12.0) == 0.4
    assert telemetry.utilization(0, 11.1, 11.9) is None
    assert telemetry.utilization(0, 13.1, 20.0) is None
    assert telemetry.utilization(0, 20.0, 10.0) is None
    assert telemetry.utilization(1, 0.0, 20.0) is None


def test_only_the_last_hour_is_kept() -> None:
    telemetry = noted([Reading(float(second), second // KEPT, 1) for second in range(2 * KEPT)])
    assert telemetry.utilization(0, 0.0, 2.0 * KEPT) == 1.0


def test_watched_gpus_are_looked_at_until_nobody_has_them(gpus: SimulatedGpus) -> None:
    """Two workers share GPU 1; GPU 0 is nobody's. With the second worker's end the looking ends."""

    async def main() -> None:
        started = time.time()
        counted = Counted(gpus)
        telemetry = Telemetry(counted, look_s=0.01)  # type: ignore[arg-type]
        gpus.change(1, utilization=0.75, used_bytes=3 * GIBIBYTE)
        telemetry.watch([1])
        telemetry.watch([1])
        await until(lambda: counted.num_looks >= 2)
        telemetry.leave([1])
        before = counted.num_looks
        await until(lambda: counted.num_looks > before + 1)
        telemetry.leave([1])
        await telemetry.devices()  # in the same thread: no look is on its way any more
        last = counted.num_looks
        await asyncio.sleep(0.1)  # ten looks, if there were any
        assert counted.num_looks == last
        assert counted.asked == {1}
        assert telemetry.utilization(1, started, time.time()) == 0.75
        assert telemetry.newest()[1].used_bytes == 3 * GIBIBYTE
        assert telemetry.utilization(0, started, time.time()) is None

    asyncio.run(main())


def test_looking_begins_again_with_the_next_worker(gpus: SimulatedGpus) -> None:
    async def main() -> None:
        telemetry = Telemetry(gpus, look_s=0.01)
        telemetry.watch([0])
        telemetry.leave([0])
        since = time.time()
        telemetry.watch([1, -1])  # -1: a card that nobody knows
        await until(lambda: telemetry.utilization(1, since, time.time()) is not None)
        assert telemetry.utilization(-1, since, time.time()) is None

    asyncio.run(main())


def test_a_driver_that_fails_in_mid_run_is_looked_at_again(gpus: SimulatedGpus) -> None:
    """What it does not say is not known; when it is well again, it is known again."""

    async def main() -> None:
        telemetry = Telemetry(gpus, look_s=0.01)
        gpus.change(0, utilization=0.5)
        telemetry.watch([0])
        for is_broken, expected in [(False, 0.5), (True, None), (False, 0.5)]:
            gpus.break_down(is_broken)

            def shows(expected: float | None = expected) -> bool:
                newest = telemetry.newest().get(0)
                return (newest and newest.utilization) == expected

            await until(shows)

    asyncio.run(main())


class Hanging:
    """An inventory whose driver does not answer before the end of the test."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def devices(self) -> list[GpuDevice]:
        self.end.wait(300)
        return []

    def find(self, device: str) -> GpuDevice | None:
        self.end.wait(300)
        return None

    def load(self, indices: object) -> list[GpuDevice]:
        return self.devices()

    def memory_used(self, indices: object) -> int | None:
        return None

    def allocator(self) -> Allocator:
        raise AssertionError("nobody asks for it")


def test_a_driver_that_hangs_holds_up_nobody_else() -> None:
    async def main() -> None:
        hanging = Hanging()
        telemetry = Telemetry(hanging, look_s=0.01)
        telemetry.watch([0])
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(telemetry.devices(), 0.1)
            assert telemetry.utilization(0, 0.0, time.time()) is None  # at once
            assert await telemetry.memory_used([]) == 0  # of a worker without a GPU nobody is asked
        finally:
            hanging.end.set()

    asyncio.run(main())
