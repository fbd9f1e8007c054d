"""What it costs to look at the GPUs of a machine.

With NVML's own answers where there is a GPU. Everywhere else what raypool adds to them is measured,
on eight cards of a library that answers at once (tests/unit/fake_nvml.py): how long the driver
takes to answer cannot be known there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measuring import Line, fresh_process, in_turns, timed
from raypool import gpu_device_table
from raypool.gpus.nvml import NvmlInventory
from raypool.gpus.simulated import SimulatedGpus
from tests.unit.fake_nvml import FakeCard, FakeNvml

CARDS = 8
CALLS = 20
TARGET_US = 50_000
SOON_US = 1_000
FIRST = """
import time
from raypool.gpus.nvml import NvmlInventory
started = time.perf_counter()
NvmlInventory().devices()
print((time.perf_counter() - started) * 1e6)
"""


def run():
    nvml = FakeNvml(
        *(FakeCard(uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000") for index in range(CARDS))
    )
    fake, real = NvmlInventory(nvml), NvmlInventory()
    count = len(real.devices())
    with tempfile.TemporaryDirectory() as folder:
        simulated = SimulatedGpus(Path(folder) / "gpus", CARDS)
        looks = {
            "inventory": lambda: fake.devices(),
            "table": lambda: gpu_device_table(inventory=fake),
            "load": lambda: fake.load([3]),
            "simulated": lambda: simulated.devices(),
            "here": lambda: real.devices(),
        }
        measures = {
            name: timed(lambda look=look: [look() for _ in range(CALLS)], per=CALLS)
            for name, look in looks.items()
        }
        us = in_turns(measures)
        us["first"] = [float(fresh_process(FIRST)) for _ in range(5)]
    nvml.asked.clear()
    fake.devices()
    area = "devices"
    asked = f"{len(nvml.asked)} questions, answered at once"
    here = f"{count} GPUs here" if count else "no GPU here"
    return [
        Line(
            area,
            f"inventory of {CARDS} cards",
            "50 ms",
            "us",
            us["inventory"],
            target=TARGET_US,
            note=asked,
        ),
        Line(
            area,
            f"gpu_device_table of {CARDS} cards",
            "50 ms",
            "us",
            us["table"],
            target=TARGET_US,
            note="the same library",
        ),
        Line(
            area,
            "memory and utilization of a card",
            "1 ms",
            "us",
            us["load"],
            target=SOON_US,
            note="once a second a card",
        ),
        Line(
            area,
            f"inventory of {CARDS} simulated cards",
            "50 ms",
            "us",
            us["simulated"],
            target=TARGET_US,
        ),
        Line(
            area,
            "inventory of this machine",
            "50 ms",
            "us",
            us["here"],
            target=TARGET_US,
            note=here,
        ),
        Line(
            area,
            "the first inventory of a process",
            "",
            "us",
            us["first"],
            note=f"NVML begins; {here}",
        ),
    ]
