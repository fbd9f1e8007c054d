"""Use of a node's GPUs, which its agent reads once a second while workers have them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from raypool.channel.records import GpuReading
from raypool.gpus.devices import GpuDevice, Inventory
from raypool.gpus.table import gpus_here

LOOK_S = 1.0
"""How often the GPUs are read [s]; the driver averages over the last 1/6 s to 1 s."""

ANSWER_S = 3.0
"""How long to wait for the memory in use [s]."""

STALE_S = 5.0
"""Readings older than this are out of date: the GPUs' driver has stopped answering [s]."""

KEPT = 3600
"""How many readings of each GPU are kept: an hour."""


class Reading(NamedTuple):
    """The state of a GPU at some time [s since the epoch]; None: unknown."""

    taken_at: float
    utilization: float | None
    used_bytes: int | None
    total_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How a GPU was used within some time, by anybody; None: unknown.

    Attributes:
        num_readings: How often it was read.
        mean_utilization, peak_utilization: The part of the time that it computed, from 0 to 1.
        mean_used_bytes, peak_used_bytes: Its memory in use [bytes].
    """

    num_readings: int
    mean_utilization: float | None
    peak_utilization: float | None
    mean_used_bytes: float | None
    peak_used_bytes: int | None


class Telemetry:
    """Reads the GPUs of a node every `look_s` seconds; for one event loop."""

    def __init__(self, inventory: Inventory, look_s: float = LOOK_S) -> None:
        self._inventory = inventory
        self._look_s = look_s
        # a GPU's driver in trouble may take long to answer, and must not hold up the agent
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
        """Return these GPUs' memory in use [bytes]; None if unknown, or not told in time."""
        if not gpus:
            return 0
        asked = asyncio.get_running_loop().run_in_executor(
            self._asking, self._inventory.memory_used, gpus
        )
        try:
            return await asyncio.wait_for(asked, ANSWER_S)
        except TimeoutError:  # its thread still waits for the GPU's driver
            return None

    def watch(self, gpus: Iterable[int]) -> None:
        """Read these GPUs from now on, until as many `leave` them."""
        self._users.update(gpu for gpu in gpus if gpu >= 0)
        if self._users and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    def leave(self, gpus: Iterable[int]) -> None:
        """Stop reading GPUs that nobody else watches; their readings are kept."""
        self._users -= Counter(gpu for gpu in gpus if gpu >= 0)
        if not self._users and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            gpus = list(self._users)
            for gpu, reading in await loop.run_in_executor(self._asking, self._read, gpus):
                self.note(gpu, reading)
            await asyncio.sleep(self._look_s)

    def _read(self, gpus: Sequence[int]) -> list[tuple[int, Reading]]:
        cards = self._inventory.load(gpus)
        now = time.time()
        return [
            (card.index, Reading(now, card.utilization, card.used_bytes, card.total_bytes))
            for card in cards
        ]

    def note(self, gpu: int, reading: Reading) -> None:
        """Add a reading of a GPU."""
        self._readings.setdefault(gpu, deque(maxlen=KEPT)).append(reading)

    def newest(self) -> dict[int, GpuReading]:
        """Return the last reading of each GPU, unless that is stale."""
        since = time.time() - STALE_S
        newest = {gpu: readings[-1] for gpu, readings in self._readings.items()}
        return {
            gpu: GpuReading(reading.used_bytes, reading.total_bytes, reading.utilization)
            for gpu, reading in newest.items()
            if reading.taken_at >= since and reading.used_bytes is not None
        }

    def usage(self, gpu: int, since: float, until: float) -> Usage | None:
        """Return how a GPU was used between two times [s since the epoch]; None: unknown."""
        readings = [
            reading for reading in self._readings.get(gpu, ()) if since <= reading.taken_at <= until
        ]
        if not readings:
            return None
        rates = [reading.utilization for reading in readings if reading.utilization is not None]
        used = [reading.used_bytes for reading in readings if reading.used_bytes is not None]
        return Usage(
            num_readings=len(readings),
            mean_utilization=fmean(rates) if rates else None,
            peak_utilization=max(rates, default=None),
            mean_used_bytes=fmean(used) if used else None,
            peak_used_bytes=max(used, default=None),
        )
