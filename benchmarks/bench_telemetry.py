"""What it costs to look at the GPUs of a node once a second, as its agent does while workers of a
pool have them.

Where there is no GPU: of eight simulated cards, and of NVML with a library that answers at once
(tests/unit/fake_nvml.py). How long a driver takes to answer is not in it, but that is waiting, in
the kernel or on the card. The time is that of all threads.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks.measuring import Line, in_turns
from raypool.backends.ray.node_agent import LOOK_S, Telemetry
from raypool.gpus.nvml import NvmlInventory
from raypool.gpus.simulated import SimulatedGpus
from tests.unit.fake_nvml import FakeCard, FakeNvml

CARDS = 8
LOOKS = 200
TARGET_PERCENT = 1.0


def run():
    nvml = NvmlInventory(
        FakeNvml(
            *(
                FakeCard(uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000")
                for index in range(CARDS)
            )
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        simulated = SimulatedGpus(Path(folder) / "gpus", CARDS)
        shares = in_turns(
            {"nvml": lambda: share_of_a_core(nvml), "simulated": lambda: share_of_a_core(simulated)}
        )
    real = NvmlInventory()
    count = len(real.devices())
    lines = [
        Line(
            "telemetry",
            f"{CARDS} cards, {name}",
            "1 % of a core",
            "%",
            shares[key],
            target=TARGET_PERCENT,
        )
        for key, name in (("nvml", "NVML that answers at once"), ("simulated", "simulated"))
    ]
    if count:
        here = in_turns({"here": lambda: share_of_a_core(real, range(count))})["here"]
        lines.append(
            Line(
                "telemetry",
                f"the {count} GPUs here",
                "1 % of a core",
                "%",
                here,
                target=TARGET_PERCENT,
            )
        )
    return lines


def share_of_a_core(inventory, gpus=range(CARDS)):
    """Return what part of a core it takes to look once in LOOK_S [%], by the mean of many looks."""
    num_looks = 0

    def load(gpus):
        nonlocal num_looks
        num_looks += 1
        return inventory.load(gpus)

    async def main():
        telemetry = Telemetry(SimpleNamespace(load=load), look_s=0)
        telemetry.watch(gpus)
        started = time.process_time()
        while num_looks < LOOKS:
            await asyncio.sleep(0.05)
        spent_s = time.process_time() - started
        telemetry.leave(gpus)
        return spent_s / num_looks

    return 100 * asyncio.run(main()) / LOOK_S
