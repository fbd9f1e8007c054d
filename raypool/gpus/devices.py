"""GPUs of a machine (`GpuDevice`), and two protocols: `Inventory` tells the GPUs, `Allocator` their
memory.

`NvmlInventory` and `TorchAllocator` ask NVIDIA's driver and torch. `SimulatedGpus` simulates GPUs,
so that everything built on these can be tested on a machine without any. Also here: which GPUs the
environment lets a process see, processor cores, and InfiniBand interfaces.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
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
        index: Its number on its machine, from 0, in the order of nvidia-smi (PCI bus), which CUDA
            need not follow.
        name: What the driver calls it, such as "NVIDIA H200".
        uuid: What it is called everywhere and always.
        total_bytes, used_bytes: Its memory, and what of that is in use, by whomever [bytes].
        utilisation: The part of the time in which it was computing, from 0 to 1, by the driver's
            own interval (1/6 s to 1 s).
        temperature_c: Its temperature [degrees Celsius].
        processes: Who uses it.
        mig: The UUIDs of the instances that it is divided into; empty if it is not divided.
        compute_mode: "default", "exclusive_process" or "prohibited"; "exclusive_thread" with
            drivers of long ago.
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
    """Tells the GPUs of the machine that it is asked on. It can be pickled, and asked from any
    thread; it never raises.
    """

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine, by index, whatever this process may use of them."""

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU that is named so, by its index or its UUID (of a part of it, too); None if
        it is not known.
        """

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return of each of these GPUs only how much of its memory is in use, and how busy it is:
        this is quick.
        """

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return how much memory of these GPUs is in use, by whomever [bytes]; None if that is not
        known of one of them.
        """

    def allocator(self) -> Allocator:
        """Return who manages this process's memory on its GPU."""


class Allocator(Protocol):
    """Manages this process's memory on its GPU, the first that it sees. Nothing here makes a
    process use its GPU.
    """

    @property
    def is_in_use(self) -> bool:
        """Whether this process has used its GPU. Until then all that is asked below is 0, and all
        that is done is nothing.
        """

    def allocated(self) -> int:
        """Return how much memory is in use, without what is only kept for later [bytes]."""

    def peak(self) -> int:
        """Return the most that was in use, with what was kept for later, since `reset_peak`
        [bytes].
        """

    def reset_peak(self) -> None:
        """Begin to measure `peak` from now."""

    def empty_cache(self) -> None:
        """Give back what is only kept for later."""

    def limit(self, fraction: float) -> None:
        """Let this process have no more than this part of its GPU's memory, from 0 to 1, from its
        first use of it on.
        """


def named(name: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    """Return the GPU that is named so: by its index, its UUID or what no other's begins with, or by
    an instance of it.

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
    if name.startswith("MIG-GPU-"):
        name = name.removeprefix("MIG-").partition("/")[0]
    alike = [
        card for card in devices if name.startswith("GPU-") and (card.uuid or "").startswith(name)
    ]
    return alike[0] if len(alike) == 1 else None


def index_of(device: str, known: GpuDevice | None) -> int:
    """Return the index of a GPU that is named by its index or its UUID, given what is known of it.

    Of one that nothing is known of, an index stands for itself (Ray can be told of GPUs that do not
    exist), and a UUID for -1.

    Example:
        >>> index_of("3", None), index_of("GPU-1", None), index_of("GPU-1", GpuDevice(index=2))
        (3, -1, 2)
    """
    if known is not None:
        return known.index
    return int(device) if device.isdigit() else -1


def only_load(card: GpuDevice) -> GpuDevice:
    """Return of what is known of a GPU only what `Inventory.load` tells."""
    return GpuDevice(
        index=card.index,
        total_bytes=card.total_bytes,
        used_bytes=card.used_bytes,
        utilisation=card.utilisation,
    )


def memory_of(cards: Sequence[GpuDevice]) -> int | None:
    """Return how much memory is in use of these GPUs together [bytes]; None if that is not known of
    one of them.

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
# Source: NVIDIA, CUDA Programming Guide, CUDA Environment Variables: CUDA_VISIBLE_DEVICES names
# indices or UUIDs, which may be abbreviated; entries after an invalid one are not visible; an empty
# value hides all. CUDA_DEVICE_ORDER: by default the fastest comes first, with PCI_BUS_ID the order
# is that of nvidia-smi. PyTorch, torch.cuda._parse_visible_devices, does as the driver does where
# that says nothing: a device named twice hides all, the first entry decides whether all are numbers
# or UUIDs, and a number ends where its digits do. NVIDIA, Multi-Instance GPU User Guide, CUDA
# Device Enumeration: a process has only one instance, the first that it may see, and then no
# undivided GPU beside it. AMD, ROCm documentation, GPU isolation techniques: HIP_VISIBLE_DEVICES
# chooses among what ROCR_VISIBLE_DEVICES leaves.


CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
"""Environment variables that choose devices: of NVIDIA's, of AMD's, and of AMD's one level
lower.
"""

ORDER = "CUDA_DEVICE_ORDER"
"""Environment variable that says how CUDA counts."""


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A device that a process sees.

    Attributes:
        index: The index of its GPU on this machine; None if it is not known which one it is.
        mig: The instance of that GPU that it is; None if it is the whole GPU.
    """

    index: int | None
    mig: str | None = None


def visible_gpus(
    environ: Mapping[str, str], devices: Sequence[GpuDevice]
) -> tuple[VisibleGpu, ...]:
    """Return what CUDA lets a process with this environment see, in the order in which CUDA counts
    it.

    Args:
        environ: The process's environment, as it was when CUDA was first used.
        devices: The GPUs of this machine.

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
        seen = _by_uuid(_alike(text.split(","), text[:4]), devices)
    else:
        seen = _by_number(text, environ, devices)
    return _one_instance(seen, devices)


def visible_amd(environ: Mapping[str, str], count: int) -> tuple[int, ...] | None:
    """Return which of so many AMD GPUs a process sees, by index; None if that is not known, since
    they are named by UUIDs.

    Example:
        >>> visible_amd({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, 4)
        (1,)
        >>> visible_amd({"ROCR_VISIBLE_DEVICES": "GPU-DEADBEEF"}, 4) is None
        True
    """
    left: tuple[int, ...] = tuple(range(count))
    for text in (environ.get(ROCR), environ.get(HIP, environ.get(CUDA))):
        if text is None:
            continue
        if text.startswith("GPU-"):
            return None
        left = tuple(left[number] for number in _before_invalid(_numbers(text), len(left)))
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
            return []
        seen.append(gpu)
    return seen


def _by_number(
    text: str, environ: Mapping[str, str], devices: Sequence[GpuDevice]
) -> list[VisibleGpu]:
    numbers = _before_invalid(_numbers(text), len(devices))
    if len(numbers) < len(devices) and not is_order_known(environ, devices):
        return [VisibleGpu(None)] * len(numbers)
    return [VisibleGpu(devices[number].index) for number in numbers]


def is_order_known(environ: Mapping[str, str], devices: Sequence[GpuDevice]) -> bool:
    """Return whether CUDA counts these GPUs as nvidia-smi does: if it was told to, or all are
    alike.

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


def _one_instance(
    seen: Sequence[VisibleGpu], devices: Sequence[GpuDevice]
) -> tuple[VisibleGpu, ...]:
    """Return what is left of what could be seen, since a process has one instance at most and
    nothing beside it.
    """
    instances = {card.index: card.mig[0] for card in devices if card.mig}
    for gpu in seen:
        if gpu.mig is not None:
            return (gpu,)
        if gpu.index in instances:
            return (VisibleGpu(gpu.index, instances[gpu.index]),)
    return tuple(seen)


def _alike(names: Sequence[str], beginning: str) -> list[str]:
    """Return the names before the first with another prefix; none, if one occurs twice."""
    alike: list[str] = []
    for name in names:
        if name in alike:
            return []
        if not name.startswith(beginning):
            break
        alike.append(name)
    return alike


def _numbers(text: str) -> list[int]:
    """Return the numbers before the first entry that is none; none at all, if one occurs twice."""
    numbers: list[int] = []
    for entry in text.split(","):
        match = re.match(r"[+-]?[0-9]+", entry.strip())
        number = int(match[0]) if match else -1
        if number in numbers:
            return []
        if number < 0:
            break
        numbers.append(number)
    return numbers


def _before_invalid(numbers: Sequence[int], count: int) -> list[int]:
    """Return the numbers before the first that no device has."""
    end = next((place for place, number in enumerate(numbers) if number >= count), len(numbers))
    return list(numbers[:end])


# --- processor cores ------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return how many physical cores this process may use.

    Affinity masks and cgroup limits are respected (by loky), and so is the share that SLURM gave to
    this task.
    """
    import loky

    cores = int(loky.cpu_count(only_physical_cores=True))
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min(cores, int(slurm))) if slurm.isdigit() else max(1, cores)


def usable_cpus() -> int:
    """Return how many logical CPUs this process may use, by the same rules."""
    import loky

    return (
        max(usable_cores(), int(loky.cpu_count()))
        if not os.environ.get("SLURM_CPUS_PER_TASK")
        else usable_cores()
    )


# --- networks -------------------------------------------------------------------------------------


FAST_LINKS = "RAYPOOL_FAST_MULTINODE"
"""Environment variable of workers that are to prefer fast links."""

INTERFACES = "NCCL_SOCKET_IFNAME"
"""Environment variable that tells NCCL which interfaces to use."""


def infiniband_interfaces() -> list[str]:
    """Return the IP interfaces over InfiniBand that are up and have an IPv4 address: ib0, ibp1s0
    and the like.
    """
    import psutil

    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    return [
        name
        for name in sorted(addresses)
        if name.startswith("ib")
        and name in states
        and states[name].isup
        and any(entry.family == socket.AF_INET for entry in addresses[name])
    ]


def prefer_fast_links(environ: MutableMapping[str, str]) -> None:
    """Name the fast interfaces to NCCL, if that is wanted, and nobody has named others.

    By itself NCCL would choose such an interface too; but whoever starts ranks (raypool, for one)
    names it the one by which rank 0 is reached, which may be a slow one.

    Source:
        NVIDIA NCCL, Environment Variables: NCCL_SOCKET_IFNAME, where "=" before a name means this
        very interface.
    """
    if environ.get(FAST_LINKS) != "1" or INTERFACES in environ:
        return
    names = infiniband_interfaces()
    if names:
        environ[INTERFACES] = "=" + ",".join(names)
