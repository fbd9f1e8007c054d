"""A worker's memory on its GPU, from task to task: how much of it a task had."""

from __future__ import annotations

from raypool.devices.gpus import Allocator


class Upkeep:
    """Measures what a worker has of its GPU's memory. Of a process that has not used its GPU it says nothing, and does nothing.

    Args:
        allocator: Who manages this process's memory on its GPU.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def begin(self) -> None:
        """Note that a slice begins."""
        self._allocator.reset_peak()

    def peak(self) -> int | None:
        """Return the most that the process had of its GPU's memory since then [bytes], None if it had nothing."""
        return self._allocator.peak() or None
