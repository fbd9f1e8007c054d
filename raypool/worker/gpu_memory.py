"""A worker's GPU memory from task to task: the peak of each, and memory that it left allocated.

After each call, cached memory is given back. What is still in use then, beyond what is kept on
purpose (see `raypool.gpus.memory`), was left over by mistake; if that is too much, the process is
replaced.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import traceback
from collections import Counter
from typing import NamedTuple

import psutil

from raypool.channel.records import WorkerInfo, where
from raypool.errors import add_note, is_gpu_out_of_memory, is_out_of_memory
from raypool.gpus.devices import Allocator
from raypool.gpus.memory import kept

PART_LEFT = 10
"""By default, a tenth of a worker's memory on the GPU may be left over."""


class LeftoverMemory(NamedTuple):
    """Reports that a process left too much on its GPU.

    `name`: the function whose calls have left most. `words`: the warning, given once for each
    name; None if nothing was left, and a task has asked to replace the process. `is_spent`: the
    process is to be replaced.
    """

    name: str
    words: str | None
    is_spent: bool


class GpuMemoryCare:
    """Looks after a process's memory on its (first) GPU, once the process has used that.

    The GPU has `total_bytes` (None: not known). `max_leftover_bytes` may be left over; None: a
    tenth of what the process may have, anything if that is not known.
    """

    def __init__(
        self,
        allocator: Allocator,
        worker: WorkerInfo,
        total_bytes: int | None,
        max_leftover_bytes: int | None = None,
    ) -> None:
        self.share = 1.0  # which part of the GPU's memory this process may have
        self._allocator = allocator
        self._worker = worker
        self._total_bytes = total_bytes
        self._max_leftover_bytes = max_leftover_bytes
        self._floor_bytes = 0  # kept on purpose
        self._leftover_bytes = 0
        self._left_by: Counter[str] = Counter()
        kept.watch(allocator)

    def begin(self) -> None:
        """Note that a slice begins."""
        with contextlib.suppress(Exception):  # a GPU that fails; `settle` sees to that
            self._allocator.reset_peak()

    def peak(self) -> int | None:
        """Return the process's peak of GPU memory since then [bytes], None if it had nothing."""
        try:
            return self._allocator.peak() or None
        except Exception:  # a GPU that fails; `settle` sees to that
            return None

    def describe_peak(self) -> str:
        """Return in words the process's peak of GPU memory, and how much it may have."""
        peak = self.peak()
        text = (
            f"its process had {f'up to {gigabytes(peak)}' if peak else 'nothing'} of the memory of"
            f" {where(self._worker)}"
        )
        if self._total_bytes is None:
            return text
        text += f", which has {gigabytes(self._total_bytes)}"
        if self.share < 1:
            text += f", of which {gigabytes(int(self._total_bytes * self.share))} are its part"
        return text

    def empty_frames(self, error: BaseException) -> None:
        """Drop the local variables in an exception's traceback, which may hold tensors."""
        seen: set[int] = set()
        while self._allocator.is_in_use and error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__  # type: ignore[assignment]

    def begin_anew(self) -> None:
        """Count all memory in use after the setup as kept on purpose."""
        self._floor_bytes = self._allocator.allocated()
        kept.take()  # all of it is in the floor already

    @property
    def _label(self) -> str:
        return f"Worker {self._worker.index} ({where(self._worker)})"

    def settle(self, name: str) -> LeftoverMemory | None:
        """Release memory that a call no longer needs; report what it left, if that is too much."""
        if not self._allocator.is_in_use:
            return None
        try:
            return self._settled(name)
        except Exception as error:
            # an error on a GPU lasts as long as its process: all later calls would fail with it
            words = (
                f"{self._label} is replaced: its GPU has failed since {name} ran"
                f" ({type(error).__name__}: {error})."
            )
            return LeftoverMemory(name, words, is_spent=True)

    def _settled(self, name: str) -> LeftoverMemory | None:
        allocator, allowed = self._allocator, self._max_leftover_bytes
        if allowed is None and self._total_bytes is not None:
            # now: the share may have changed
            allowed = int(self._total_bytes * self.share) // PART_LEFT
        purposes = kept.take()
        floor = self._floor_bytes + purposes.num_bytes
        if allowed is not None and allocator.allocated() - floor > allowed:
            # Frees objects in reference cycles, which may hold tensors. Also where all that is left
            # is kept on purpose: this is not.
            gc.collect()
        allocator.empty_cache()
        allocated = allocator.allocated()
        self._floor_bytes = allocated if purposes.is_all else min(floor, allocated)
        leftover = allocated - self._floor_bytes
        self._left_by[name] += leftover - self._leftover_bytes
        self._leftover_bytes = leftover
        if allowed is None or leftover <= allowed:
            return None
        ((name, num_bytes),) = self._left_by.most_common(1)
        fact = (
            f"{gigabytes(leftover)} are left on its GPU, but max_leftover_bytes allows"
            f" {gigabytes(allowed)}"
        )
        culprit = f"{name} left {gigabytes(num_bytes)} of that"
        step = "Build objects that should stay on the GPU in the function of a pool.constant"
        if kept.treasures:  # they cannot be made again
            words = (
                f"{self._label} stays, because it keeps parts of Composites, but {fact}; {culprit}."
                f" {step}."
            )
        else:
            words = f"{self._label} is replaced: {fact}; {culprit}. {step}, or in setup."
        return LeftoverMemory(name, words, is_spent=not kept.treasures)


def note_shortage(error: BaseException, upkeep: GpuMemoryCare | None) -> None:
    """Note in an out-of-memory error how much the process had, and of how much."""
    if upkeep is not None:
        # else what its frames hold would stay on the GPU while later items run
        upkeep.empty_frames(error)
    if upkeep is not None and is_gpu_out_of_memory(error):
        note = upkeep.describe_peak()
    elif is_out_of_memory(error):
        machine = psutil.virtual_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        note = (
            f"its process had up to {gigabytes(peak)} of memory since it began; the machine has"
            f" {gigabytes(machine.total)}, of which {gigabytes(machine.available)} are available"
        )
    else:
        return
    add_note(error, f"raypool: {note}")


def gigabytes(num_bytes: int) -> str:
    """Return a number of bytes in words.

    Example:
        >>> gigabytes(14_200_000_000), gigabytes(3_000_000)
        ('14.20 GB', '0.003 GB')
    """
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes / 1e9:.3f} GB"
