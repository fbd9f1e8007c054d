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
        compute_mode: "default", "exclusive_process" or "prohibited"; "exclusive_thread" with drivers of long ago.
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

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return of each of these GPUs only how much of its memory is in use, and how busy it is: this is quick."""

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


def named(name: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    """Return the GPU that is named so: by its index, its UUID or what no other's begins with, or by an instance of it.

    Source:
        NVIDIA, CUDA Programming Guide, CUDA_VISIBLE_DEVICES: abbreviated UUIDs; NVIDIA, Multi-Instance GPU User Guide: instances
        are called MIG-<UUID>, by drivers before R470 MIG-<UUID of the GPU>/<GPU instance>/<compute instance>.

    Example:
        >>> cards = [GpuDevice(index=0, uuid="GPU-ab1", mig=("MIG-7",)), GpuDevice(index=1, uuid="GPU-ab2", mig=())]
        >>> [card and card.index for card in (named(name, cards) for name in ("1", "GPU-ab2", "GPU-ab", "MIG-7"))]
        [1, 1, None, 0]
    """
    if name.isdigit():
        return next((card for card in devices if card.index == int(name)), None)
    exact = next((card for card in devices if name == card.uuid or name in (card.mig or ())), None)
    if exact is not None:
        return exact
    if name.startswith("MIG-GPU-"):
        name = name.removeprefix("MIG-").partition("/")[0]
    alike = [card for card in devices if name.startswith("GPU-") and (card.uuid or "").startswith(name)]
    return alike[0] if len(alike) == 1 else None


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


def only_load(card: GpuDevice) -> GpuDevice:
    """Return of what is known of a GPU only what `Inventory.load` tells."""
    return GpuDevice(index=card.index, total_bytes=card.total_bytes, used_bytes=card.used_bytes, utilisation=card.utilisation)


def memory_of(cards: Sequence[GpuDevice]) -> int | None:
    """Return how much memory is in use of these GPUs together [bytes]; None if that is not known of one of them.

    Example:
        >>> memory_of([GpuDevice(index=0, used_bytes=3), GpuDevice(index=1, used_bytes=4)]), memory_of([GpuDevice(index=0)])
        (7, None)
    """
    used = [card.used_bytes for card in cards]
    return None if None in used else sum(filter(None, used))
