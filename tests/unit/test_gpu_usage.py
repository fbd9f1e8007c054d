"""Samples of GPUs while a loop runs: how many there are, and what can be read of their file."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypool.channel.gpu_usage import GPU_USAGE, GpuLog, GpuSample, line_of, samples_in
from raypool.channel.records import GpuReading, NodeGpus

NODE = NodeGpus("lab-3", {0: GpuReading(1, 8, 0.5), 1: GpuReading(2, None, None)}, {0: (0, 1)})


class Loop:
    """A loop that looks every two seconds, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_asked = 0
        self.kept: list[GpuSample] = []
        self.log = GpuLog(self._ask, self.kept.append, run=2, clock=lambda: self.now)

    def _ask(self, take: Callable[[NodeGpus], Any]) -> None:
        self.num_asked += 1
        take(NODE)

    def last(self, seconds: float) -> None:
        for _ in range(int(seconds / 2)):
            self.now += 2
            self.log.look()


def test_each_gpu_has_a_sample_and_a_short_loop_asks_nobody() -> None:
    loop = Loop()
    loop.now += 1.9
    loop.log.look()
    assert loop.num_asked == 0
    loop.now += 0.1
    loop.log.look()
    loop.log.look()
    assert loop.num_asked == 1
    assert loop.log.samples == loop.kept
    assert loop.kept == [
        GpuSample(1002.0, 2, "lab-3", 0, 1, 8, 0.5),
        GpuSample(1002.0, 2, "lab-3", 1, 2, None, None),
    ]


def test_a_week_has_few_samples_evenly_spread() -> None:
    loop = Loop()
    loop.last(7 * 86_400)
    times = sorted({sample.time for sample in loop.log.samples})
    assert 140 <= len(times) <= 300
    gaps = [later - before for before, later in itertools.pairwise(times)]
    assert max(gaps) <= 2 * min(gaps)
    assert times[-1] > loop.now - 2 * max(gaps)
    assert len(loop.kept) < 2 * 2000, "two GPUs"


def test_what_a_crash_has_cut_off_costs_one_line(tmp_path: Path) -> None:
    assert samples_in(tmp_path) == []
    first = GpuSample(1.5, 1, "lab-3", 0, 1, None, None)
    lines = [line_of(first), line_of(first)[:20] + b"\n", b"[1]\n", b'{"new": 1}\n', line_of(first)]
    (tmp_path / GPU_USAGE).write_bytes(b"".join(lines))
    assert samples_in(tmp_path) == [first, first]
