"""GPUs, processor cores and fast networks of a machine.

`Inventory` lists the GPUs, `Allocator` manages a process's memory on one. `NvmlInventory` and
`TorchAllocator` ask NVIDIA's driver and torch; `SimulatedGpus` is for tests without a GPU.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU, with its memory there [bytes]; None for unknown."""

    pid: int  # on the GPU's machine; inside a container it may be another
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuDevice:
    """A GPU of a machine at the moment of asking; None stands for unknown.

    Attributes:
        index: Its number on its machine, from 0, in the order of nvidia-smi (PCI bus); CUDA may
            count differently.
        name: The driver's name, such as "NVIDIA H200".
        uuid: Its UUID, which never changes.
        total_bytes, used_bytes: Its memory, and the part in use by all processes [bytes].
        utilization: The share of the driver's interval (1/6 s to 1 s) in which it computed, 0 to 1.
        temperature_c: Its temperature [degrees Celsius].
        processes: The processes that use it.
        mig: The UUIDs of its instances; empty if it is not divided.
        compute_mode: "default", "exclusive_process" or "prohibited"; "exclusive_thread" with very
            old drivers.
        compute_capability: Of CUDA, such as (9, 0).
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: tuple[str, ...] | None = None
    compute_mode: str | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def free_bytes(self) -> int | None:
        """The memory that nobody uses [bytes]."""
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(self.total_bytes - self.used_bytes, 0)


class Inventory(Protocol):
    """Lists this machine's GPUs; it can be pickled and asked from any thread, and never raises."""

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine by index, even those hidden from this process."""

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU with this index, UUID or instance (then with its memory), or None."""

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return only the memory and utilization of these GPUs, which is quick."""

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return the memory in use on these GPUs [bytes]; None if one of them is unknown."""

    def allocator(self) -> Allocator:
        """Return the manager of this process's memory on its GPU."""


class Allocator(Protocol):
    """Manages this process's memory on its first visible GPU; never makes a process use it."""

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used its GPU; until then all sizes are 0."""

    def allocated(self) -> int:
        """Return the memory in use, without cached memory [bytes]."""

    def peak(self) -> int:
        """Return the most memory held since `reset_peak`, cached memory included [bytes]."""

    def reset_peak(self) -> None:
        """Restart the measurement of `peak`."""

    def empty_cache(self) -> None:
        """Release cached memory."""

    def limit(self, fraction: float) -> None:
        """Limit this process to a share of its GPU's memory, 0 to 1, also before its first use."""


def named(name: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    """Return the GPU with this index, UUID, unique beginning of a UUID, or instance.

    Source:
        NVIDIA, CUDA Programming Guide, CUDA_VISIBLE_DEVICES: abbreviated UUIDs; NVIDIA,
        Multi-Instance GPU User Guide: instances are called MIG-<UUID>, by drivers before R470
        MIG-<UUID of the GPU>/<GPU instance>/<compute instance>.

    Example:
        >>> divided = GpuDevice(index=0, uuid="GPU-ab1", mig=("MIG-7",))
        >>> cards = [divided, GpuDevice(index=1, uuid="GPU-ab2", mig=())]
        >>> found = [named(name, cards) for name in ("1", "GPU-ab2", "GPU-ab", "MIG-7")]
        >>> [card and card.index for card in found]
        [1, 1, None, 0]
    """
    if name.isdigit():
        return next((card for card in devices if card.index == int(name)), None)
    exact = next((card for card in devices if name == card.uuid or name in (card.mig or ())), None)
    if exact is not None:
        return exact
    if name.startswith("MIG-GPU-"):  # drivers before R470 name the GPU in its instances
        name = name.removeprefix("MIG-").partition("/")[0]
    alike = [
        card for card in devices if name.startswith("GPU-") and (card.uuid or "").startswith(name)
    ]
    return alike[0] if len(alike) == 1 else None


def index_of(device: str, known: GpuDevice | None) -> int:
    """Return the index of a GPU named by index or UUID; -1 for the UUID of an unknown one.

    Example:
        >>> index_of("3", None), index_of("GPU-1", None), index_of("GPU-1", GpuDevice(index=2))
        (3, -1, 2)
    """
    if known is not None:
        return known.index
    # An unknown index stands for itself: Ray can be told of GPUs that do not exist.
    return int(device) if device.isdigit() else -1


def uuid_of(device: str, known: GpuDevice | None) -> str | None:
    """Return the UUID of a GPU or instance named by index or UUID; None if unknown.

    Example:
        >>> card = GpuDevice(index=2, uuid="GPU-1a", mig=("MIG-7",))
        >>> uuid_of("2", card), uuid_of("GPU-1", card), uuid_of("MIG-7", card)
        ('GPU-1a', 'GPU-1a', 'MIG-7')
        >>> uuid_of("GPU-b", None), uuid_of("2", None)
        ('GPU-b', None)
    """
    if known is not None and known.uuid is not None and not device.startswith("MIG-"):
        return known.uuid
    # NVML does not answer, or it is AMD's: its name still tells it from others
    return device if device.startswith(("GPU-", "MIG-")) else None


def memory_of(cards: Sequence[GpuDevice]) -> int | None:
    """Return the memory in use on all these GPUs [bytes]; None if one of them is unknown.

    Example:
        >>> memory_of([GpuDevice(index=0, used_bytes=3), GpuDevice(index=1, used_bytes=4)])
        7
        >>> memory_of([GpuDevice(index=0)]) is None
        True
    """
    used = [card.used_bytes for card in cards]
    return None if None in used else sum(filter(None, used))


# --- visible GPUs ---------------------------------------------------------------------------------
#
# Source: NVIDIA, CUDA Programming Guide, CUDA Environment Variables: CUDA_VISIBLE_DEVICES has
# indices or UUIDs, which may be abbreviated; entries after an invalid one are not visible; an empty
# value hides all. CUDA_DEVICE_ORDER: the fastest first, or with PCI_BUS_ID the order of nvidia-smi.
# Where that says nothing, PyTorch (torch.cuda._parse_visible_devices) does as the driver: a device
# named twice hides all, the first entry decides between numbers and UUIDs, and a number ends with
# its digits. NVIDIA, Multi-Instance GPU User Guide, CUDA Device Enumeration: a process has only its
# first visible instance, and no undivided GPU beside it. AMD, ROCm documentation, GPU isolation
# techniques.


CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
"""Environment variables that choose devices: NVIDIA's, AMD's, and AMD's one level lower."""

ORDER = "CUDA_DEVICE_ORDER"
"""The environment variable with CUDA's way of counting."""


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A device that a process sees.

    `index`: its GPU on this machine, None if unknown. `mig`: its instance, None for all of it.
    """

    index: int | None
    mig: str | None = None


def visible_gpus(
    environ: Mapping[str, str], devices: Sequence[GpuDevice]
) -> tuple[VisibleGpu, ...]:
    """Return the devices that a process sees by its environment, in CUDA's order.

    Example:
        >>> l4 = {"name": "NVIDIA L4", "mig": ()}
        >>> cards = [GpuDevice(index=index, uuid=f"GPU-{index}ab", **l4) for index in range(3)]
        >>> [gpu.index for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0,-1,1"}, cards)]
        [2, 0]
        >>> [gpu.index for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, cards)]
        [1]
    """
    text = environ.get(CUDA)
    if text is None:
        seen: Sequence[VisibleGpu] = [VisibleGpu(card.index) for card in devices]
    elif text.startswith(("GPU-", "MIG-")):
        # the first entry decides between GPUs and instances
        names = (name if name.startswith(text[:4]) else None for name in text.split(","))
        seen = _by_uuid(_valid(names), devices)
    else:
        numbers = _numbers(text, len(devices))
        if len(numbers) < len(devices) and not is_order_known(environ, devices):
            seen = [VisibleGpu(None)] * len(numbers)  # a guess could name somebody else's GPU
        else:
            seen = [VisibleGpu(devices[number].index) for number in numbers]
    # A process has one instance of a divided GPU at most, and then no other device.
    instances = {card.index: card.mig[0] for card in devices if card.mig}
    for gpu in seen:
        if gpu.mig is not None:
            return (gpu,)
        if gpu.index in instances:
            return (VisibleGpu(gpu.index, instances[gpu.index]),)
    return tuple(seen)


def visible_amd(environ: Mapping[str, str], count: int) -> tuple[int, ...] | None:
    """Return the indices of visible ones of `count` AMD GPUs; None if UUIDs name them.

    Example:
        >>> visible_amd({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, 4)
        (1,)
        >>> visible_amd({"ROCR_VISIBLE_DEVICES": "GPU-DEADBEEF"}, 4) is None
        True
    """
    left: tuple[int, ...] = tuple(range(count))
    # HIP chooses among those that ROCR leaves, so its numbers are positions there.
    for text in (environ.get(ROCR), environ.get(HIP, environ.get(CUDA))):
        if text is None:
            continue
        if text.startswith("GPU-"):
            return None
        left = tuple(left[number] for number in _numbers(text, len(left)))
    return left


def _by_uuid(names: Sequence[str], devices: Sequence[GpuDevice]) -> list[VisibleGpu]:
    seen: list[VisibleGpu] = []
    is_all_known = all(card.uuid is not None and card.mig is not None for card in devices)
    for name in names:
        card = named(name, devices)
        if card is None and is_all_known:
            break  # there is no such device
        gpu = VisibleGpu(
            None if card is None else card.index, name if name.startswith("MIG-") else None
        )
        if gpu in seen and card is not None:
            return []  # a device named twice hides all
        seen.append(gpu)
    return seen


def is_order_known(environ: Mapping[str, str], devices: Sequence[GpuDevice]) -> bool:
    """Return whether CUDA counts these GPUs as nvidia-smi does: as told, or all are alike.

    Example:
        >>> cards = [GpuDevice(index=0, name="NVIDIA L4"), GpuDevice(index=1, name="NVIDIA H200")]
        >>> is_order_known({}, cards), is_order_known({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, cards)
        (False, True)
    """
    names = {card.name for card in devices}
    return (
        environ.get(ORDER) == "PCI_BUS_ID"
        or len(devices) < 2
        or (len(names) == 1 and None not in names)
    )


def _numbers(text: str, count: int) -> list[int]:
    """Return the numbers of devices before the first invalid entry."""
    numbers = _valid(map(_number, text.split(",")))
    return list(itertools.takewhile(lambda number: number < count, numbers))


def _number(entry: str) -> int | None:
    match = re.match(r"[+-]?[0-9]+", entry.strip())  # "1x" is 1, as for torch
    return int(match[0]) if match and int(match[0]) >= 0 else None


def _valid(entries: Iterable[T | None]) -> list[T]:
    """Return the entries before the first None; nothing if one occurs twice."""
    valid: list[T] = []
    for entry in entries:
        if entry in valid:
            return []
        if entry is None:
            break
        valid.append(entry)
    return valid


# --- processor cores ------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return how many physical cores this process may use, by its cgroup, affinity and SLURM."""
    import loky

    cores = int(loky.cpu_count(only_physical_cores=True))
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")  # loky knows the rest, but not SLURM
    return max(1, min(cores, int(slurm))) if slurm.isdigit() else max(1, cores)


def usable_cpus() -> int:
    """Return how many logical CPUs this process may use, by the same rules."""
    import loky

    cores = usable_cores()
    return cores if os.environ.get("SLURM_CPUS_PER_TASK") else max(cores, int(loky.cpu_count()))


# --- networks -------------------------------------------------------------------------------------


FAST_LINKS = "RAYPOOL_FAST_MULTINODE"
"""The environment variable of workers that should prefer fast links."""

INTERFACES = "NCCL_SOCKET_IFNAME"
"""The environment variable with NCCL's interfaces."""


def prefer_fast_links(environ: MutableMapping[str, str]) -> None:
    """Name InfiniBand interfaces to NCCL, if `FAST_LINKS` is set and no others are named.

    Source:
        NVIDIA NCCL, Environment Variables: NCCL_SOCKET_IFNAME, where "=" before a name means this
        very interface.
    """
    if environ.get(FAST_LINKS) != "1" or INTERFACES in environ:
        return
    import socket

    import psutil

    # NCCL prefers them by itself, but raypool's start of ranks, like others', names the interface
    # by which rank 0 is reached, and that may be a slow one.
    states = psutil.net_if_stats()
    names = [
        name
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name.startswith("ib")
        and name in states
        and states[name].isup
        and any(entry.family == socket.AF_INET for entry in entries)
    ]
    if names:
        environ[INTERFACES] = "=" + ",".join(names)
