"""This process's memory on its GPU, as torch manages it."""

from __future__ import annotations

import sys
from typing import Any


class TorchAllocator:
    """Torch's caching allocator; see `Allocator`. A process that has not imported torch has not used its GPU by it."""

    @property
    def is_in_use(self) -> bool:
        """Whether torch has used CUDA in this process."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def allocated(self) -> int:
        """Return how much memory tensors take."""
        return int(_cuda().memory_allocated()) if self.is_in_use else 0

    def peak(self) -> int:
        """Return the most that torch had of the GPU's memory."""
        return int(_cuda().max_memory_reserved()) if self.is_in_use else 0

    def reset_peak(self) -> None:
        """Begin to measure `peak` from now."""
        if self.is_in_use:
            _cuda().reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Give back what torch keeps for later."""
        if self.is_in_use:
            _cuda().empty_cache()


def _cuda() -> Any:
    return sys.modules["torch"].cuda
