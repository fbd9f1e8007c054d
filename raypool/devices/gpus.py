"""The GPUs of a machine, and this process's memory on the one that it has: what is known of them, and who knows it.

Two know it. `NvmlInventory` and `TorchAllocator` ask the driver and torch; `SimulatedGpus` stands for cards that do not exist, so
that everything that is built on these can be tested on a machine without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU.

    Attributes:
        pid: Its number on the GPU's machine; in a container it may have another one inside.
        used_bytes: Its memory on the GPU [bytes], None where the driver does not say.
    """

    pid: int
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuDevice:
    """A GPU of a machine, as it was at the moment of asking; None stands for what is not known.

    Attributes:
        index: Its number on its machine, from 0, in the order of nvidia-smi (PCI bus), which CUDA need not follow.
        name: What the driver calls it, such as "NVIDIA H200".
        uuid: What it is called everywhere and always.
        total_bytes, used_bytes: Its memory, and what of that is in use, by whomever [bytes].
        utilisation: The part of the time in which it was computing, from 0 to 1, by the driver's own interval (1/6 s to 1 s).
        temperature_c: Its temperature [degrees Celsius].
        processes: Who uses it.
        mig: The UUIDs of the instances that it is divided into; empty if it is not divided.
        compute_mode: "default", "exclusive_process" or "prohibited".
        compute_capability: Of CUDA, such as (9, 0).
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilisation: float | None = None
    temperature_c: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: tuple[str, ...] | None = None
    compute_mode: str | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def free_bytes(self) -> int | None:
        """How much of its memory nobody uses [bytes]."""
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(self.total_bytes - self.used_bytes, 0)


class Inventory(Protocol):
    """Knows the GPUs of the machine that it is asked on. It can be pickled, and asked from any thread; it never raises."""

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine, by index, whatever this process may use of them."""

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU that is named so, by its index or its UUID (of a part of it, too); None if it is not known."""

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return how much memory of these GPUs is in use, by whomever [bytes]; None if that is not known of one of them."""

    def allocator(self) -> Allocator:
        """Return who manages this process's memory on its GPU."""


class Allocator(Protocol):
    """Manages this process's memory on its GPU, the first that it sees. Nothing here makes a process use its GPU."""

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used its GPU. Until then all that is asked below is 0, and all that is done is nothing."""

    def allocated(self) -> int:
        """Return how much memory is in use, without what is only kept for later [bytes]."""

    def peak(self) -> int:
        """Return the most that was in use, with what was kept for later, since `reset_peak` [bytes]."""

    def reset_peak(self) -> None:
        """Begin to measure `peak` from now."""

    def empty_cache(self) -> None:
        """Give back what is only kept for later."""

    def limit(self, fraction: float) -> None:
        """Let this process have no more than this part of its GPU's memory, from 0 to 1, from its first use of it on."""


def index_of(device: str, known: GpuDevice | None) -> int:
    """Return the index of a GPU that is named by its index or its UUID, given what is known of it.

    Of one that nothing is known of, an index stands for itself (Ray can be told of GPUs that do not exist), and a UUID for -1.

    Example:
        >>> index_of("3", None), index_of("GPU-1", None), index_of("GPU-1", GpuDevice(index=2))
        (3, -1, 2)
    """
    if known is not None:
        return known.index
    return int(device) if device.isdigit() else -1
