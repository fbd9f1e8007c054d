"""Use of the GPUs of a node: the agent reads them once a second while the pool's workers have them.

A GPU's driver that is in trouble may take long to answer: so a thread of its own asks it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from raypool.channel.records import GpuMemory
from raypool.gpus.devices import GpuDevice, Inventory
from raypool.gpus.table import gpus_here

LOOK_S = 1.0
"""How often the GPUs are looked at [s]; the driver says how busy one was in the last 1/6 s to 1
s.
"""

ANSWER_S = 3.0
"""How long to wait for the memory in use [s]."""

STALE_S = 5.0
"""Older readings are out of date: the GPUs' driver has not answered since [s]."""

KEPT = 3600
"""So many readings of each GPU are kept: an hour."""


class Reading(NamedTuple):
    """What a GPU was like at some time [s since the epoch]; None stands for what is not known."""

    taken_at: float
    utilisation: float | None
    used_bytes: int | None
    total_bytes: int | None = None


def sum_of(memories: Sequence[GpuMemory]) -> GpuMemory:
    """Return the memory of several GPUs together.

    Example:
        >>> sum_of([GpuMemory(1, 8), GpuMemory(2, 8)]), sum_of([GpuMemory(1, None)])
        (GpuMemory(used_bytes=3, total_bytes=16), GpuMemory(used_bytes=1, total_bytes=None))
    """
    totals = [memory.total_bytes for memory in memories]
    total = None if None in totals else sum(filter(None, totals))
    return GpuMemory(sum(memory.used_bytes for memory in memories), total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How a GPU was used within some time, by whomever, as it was seen once a second; None stands
    for what is not known.

    Attributes:
        num_readings: How often it was looked at.
        mean_utilisation, peak_utilisation: The part of the time in which it was computing, from 0
            to 1.
        mean_used_bytes, peak_used_bytes: Its memory that was in use [bytes].
    """

    num_readings: int
    mean_utilisation: float | None
    peak_utilisation: float | None
    mean_used_bytes: float | None
    peak_used_bytes: int | None


class Telemetry:
    """Looks at the GPUs of a node; for one event loop.

    Args:
        inventory: Who knows the GPUs of a machine.
        look_s: How often they are looked at [s].
    """

    def __init__(self, inventory: Inventory, look_s: float = LOOK_S) -> None:
        self._inventory = inventory
        self._look_s = look_s
        self._asking = ThreadPoolExecutor(1, "raypool-telemetry")
        self._users: Counter[int] = Counter()  # by GPU
        self._readings: dict[int, deque[Reading]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this node as they are now."""
        return await asyncio.get_running_loop().run_in_executor(
            self._asking, lambda: gpus_here(self._inventory)[0]
        )

    async def memory_used(self, gpus: Sequence[int]) -> int | None:
        """Return how much memory of these GPUs is in use [bytes]; None if that is not known, or
        takes too long.
        """
        if not gpus:
            return 0
        asked = asyncio.get_running_loop().run_in_executor(
            self._asking, self._inventory.memory_used, gpus
        )
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        except TimeoutError:
            return None

    def watch(self, gpus: Iterable[int]) -> None:
        """Look at these GPUs from now on, until as many `leave` them."""
        self._users.update(gpu for gpu in gpus if gpu >= 0)
        if self._users and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def leave(self, gpus: Iterable[int]) -> None:
        """Look no more at GPUs that nobody else watches; what was seen is kept."""
        self._users -= Counter(gpu for gpu in gpus if gpu >= 0)
        if not self._users and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for gpu, reading in await loop.run_in_executor(
                self._asking, self._read, list(self._users)
            ):
                self.note(gpu, reading)
            await asyncio.sleep(self._look_s)

    def _read(self, gpus: Sequence[int]) -> list[tuple[int, Reading]]:
        cards = self._inventory.load(gpus)
        now = time.time()
        return [
            (card.index, Reading(now, card.utilisation, card.used_bytes, card.total_bytes))
            for card in cards
        ]

    def note(self, gpu: int, reading: Reading) -> None:
        """Take note of what a GPU was like."""
        self._readings.setdefault(gpu, deque(maxlen=KEPT)).append(reading)

    def newest(self) -> dict[int, GpuMemory]:
        """Return the memory of each GPU as it was seen last, if that was lately; nobody is asked
        for it.
        """
        since = time.time() - STALE_S
        newest = {gpu: readings[-1] for gpu, readings in self._readings.items()}
        return {
            gpu: GpuMemory(reading.used_bytes, reading.total_bytes)
            for gpu, reading in newest.items()
            if reading.taken_at >= since and reading.used_bytes is not None
        }

    def usage(self, gpu: int, since: float, until: float) -> Usage | None:
        """Return how a GPU was used between two times [s since the epoch], None if it was not
        looked at between them.
        """
        readings = [
            reading for reading in self._readings.get(gpu, ()) if since <= reading.taken_at <= until
        ]
        if not readings:
            return None
        rates = [reading.utilisation for reading in readings if reading.utilisation is not None]
        used = [reading.used_bytes for reading in readings if reading.used_bytes is not None]
        return Usage(
            num_readings=len(readings),
            mean_utilisation=fmean(rates) if rates else None,
            peak_utilisation=max(rates, default=None),
            mean_used_bytes=fmean(used) if used else None,
            peak_used_bytes=max(used, default=None),
        )
