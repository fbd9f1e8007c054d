"""How busy GPUs were, as the agent of a node sees it: cards that do not exist, and an inventory
that hangs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raypool.backends.ray.node_agent import KEPT, Reading, Telemetry, Usage
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


def test_mean_and_peak_of_what_was_seen_between_two_times() -> None:
    readings = [
        Reading(10.0, 0.9, 9),
        Reading(11.0, 0.2, 4),
        Reading(12.0, 0.6, 8),
        Reading(13.0, 1.0, 16),
    ]
    assert noted(readings).usage(0, 10.5, 12.0) == Usage(
        num_readings=2,
        mean_utilization=0.4,
        peak_utilization=0.6,
        mean_used_bytes=6.0,
        peak_used_bytes=8,
    )


def test_what_nobody_has_seen_is_not_known() -> None:
    telemetry = noted([Reading(10.0, 0.5, 1)])
    assert telemetry.usage(0, 10.1, 20.0) is None
    assert telemetry.usage(0, 20.0, 10.0) is None
    assert telemetry.usage(1, 0.0, 20.0) is None


def test_readings_of_which_a_part_is_not_known() -> None:
    """The driver may say how much memory is in use, and not how busy a card is (as of one that is
    divided).
    """
    telemetry = noted([Reading(1.0, None, 4), Reading(2.0, None, 6)])
    usage = telemetry.usage(0, 0.0, 5.0)
    assert usage == Usage(
        num_readings=2,
        mean_utilization=None,
        peak_utilization=None,
        mean_used_bytes=5.0,
        peak_used_bytes=6,
    )
    broken = noted([Reading(1.0, None, None)]).usage(0, 0.0, 5.0)
    assert broken is not None
    assert (broken.num_readings, broken.mean_used_bytes, broken.peak_used_bytes) == (1, None, None)


def test_only_the_last_hour_is_kept() -> None:
    telemetry = noted([Reading(float(second), 0.5, 1) for second in range(2 * KEPT)])
    usage = telemetry.usage(0, 0.0, 2.0 * KEPT)
    assert usage is not None
    assert usage.num_readings == KEPT


def test_watched_gpus_are_looked_at_until_nobody_has_them(gpus: SimulatedGpus) -> None:
    """Two workers share GPU 1; GPU 0 is nobody's. With the second worker's end the looking ends."""

    async def main() -> None:
        started = time.time()
        telemetry = Telemetry(gpus, look_s=0.01)
        gpus.change(1, utilization=0.75, used_bytes=3 * GIBIBYTE)
        telemetry.watch([1])
        telemetry.watch([1])

        def seen() -> Usage | None:
            return telemetry.usage(1, started, time.time())

        await until(lambda: (usage := seen()) is not None and usage.num_readings >= 2)
        telemetry.leave([1])
        before = seen()
        assert before is not None
        await until(
            lambda: (usage := seen()) is not None and usage.num_readings > before.num_readings + 1
        )
        telemetry.leave([1])
        last = seen()
        await asyncio.sleep(0.1)  # ten looks, if there were any
        assert seen() == last
        assert last is not None
        assert (last.mean_utilization, last.peak_used_bytes) == (0.75, 3 * GIBIBYTE)
        assert telemetry.usage(0, started, time.time()) is None

    asyncio.run(main())


def test_looking_begins_again_with_the_next_worker(gpus: SimulatedGpus) -> None:
    async def main() -> None:
        telemetry = Telemetry(gpus, look_s=0.01)
        telemetry.watch([0])
        telemetry.leave([0])
        since = time.time()
        telemetry.watch([1, -1])  # -1: a card that nobody knows
        await until(lambda: telemetry.usage(1, since, time.time()))
        assert telemetry.usage(-1, since, time.time()) is None

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
                usage = telemetry.usage(0, time.time() - 0.05, time.time())
                return (
                    usage is not None
                    and usage.mean_utilization == usage.peak_utilization == expected
                )

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
            assert telemetry.usage(0, 0.0, time.time()) is None  # at once
            assert await telemetry.memory_used([]) == 0  # of a worker without a GPU nobody is asked
        finally:
            hanging.end.set()

    asyncio.run(main())
