"""The GPUs of a pool while a loop runs: samples of their memory and utilization, never too many."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from raypool.channel.records import NodeGpus

GPU_USAGE = "gpus.jsonl"
"""The file with the samples, in the folder of a run."""

FIRST_LOOK_S = 2.0
"""How soon, and at first how often, a loop looks at the GPUs [s]."""

MAX_LOOKS = 300
"""After as many looks they are half as frequent."""

AskGpus: TypeAlias = "Callable[[Callable[[NodeGpus], object]], object]"


class GpuSample(NamedTuple):
    """A GPU at a time (Unix time [s]), in the n-th call with a run's folder; None: not known."""

    time: float
    run: int
    host: str
    gpu: int
    used_bytes: int
    total_bytes: int | None
    utilization: float | None


class GpuLog:
    """Samples of one loop. They get rarer as it grows longer: 525 of a GPU in half an hour, 1,800
    in a week. In memory there are 300 at most, all as far apart as the newest ones.

    Args:
        ask: Asks the machines for their GPUs, without waiting for them.
        keep: Takes each sample at once, in another thread.
        run: The number of the run.
        clock: Tells the time [s since the epoch].
    """

    def __init__(
        self,
        ask: AskGpus,
        keep: Callable[[GpuSample], object],
        run: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ask = ask
        self._keep = keep
        self._run = run
        self._clock = clock
        self._interval_s = FIRST_LOOK_S
        self._next_at = clock() + FIRST_LOOK_S  # short loops ask nobody
        self._looks: list[list[GpuSample]] = [[]]

    @property
    def samples(self) -> list[GpuSample]:
        """The samples by time. From any thread."""
        return [sample for look in list(self._looks) for sample in list(look)]

    def look(self) -> None:
        """Ask again, if it is time."""
        now = self._clock()
        if now < self._next_at:
            return
        if len(self._looks) >= MAX_LOOKS:
            self._looks = self._looks[::2]
            self._interval_s *= 2
        self._next_at = now + self._interval_s
        self._looks.append([])
        self._ask(self._take)

    def _take(self, node: NodeGpus) -> None:
        now, look = self._clock(), self._looks[-1]
        for gpu, reading in node.readings.items():
            sample = GpuSample(now, self._run, node.host, gpu, *reading)
            look.append(sample)
            self._keep(sample)


def line_of(sample: GpuSample) -> bytes:
    """Return a sample as a line of the file."""
    return json.dumps(sample._asdict()).encode() + b"\n"


def samples_in(run_dir: Path) -> list[GpuSample]:
    """Return the samples in a run's folder, as far as they can be read."""
    try:
        lines = (run_dir / GPU_USAGE).read_bytes().splitlines()
    except OSError:  # a short loop has none
        return []
    samples = []
    for line in lines:
        with contextlib.suppress(TypeError, ValueError):  # cut off by a crash
            samples.append(GpuSample(**json.loads(line)))
    return samples
