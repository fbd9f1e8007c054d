"""Which GPUs the environment lets a process see.

Source:
    NVIDIA, CUDA Programming Guide, CUDA Environment Variables: CUDA_VISIBLE_DEVICES names indices or UUIDs, which may be
    abbreviated; what stands behind something invalid is not visible; an empty value hides all. CUDA_DEVICE_ORDER: by default
    the fastest comes first, with PCI_BUS_ID the order is that of nvidia-smi.
    PyTorch, torch.cuda._parse_visible_devices, does as the driver does where that says nothing: a device named twice hides all,
    the first entry decides whether all are numbers or UUIDs, and a number ends where its digits do.
    NVIDIA, Multi-Instance GPU User Guide, CUDA Device Enumeration: a process has only one instance, the first that it may see,
    and then no undivided GPU beside it.
    AMD, ROCm documentation, GPU isolation techniques: HIP_VISIBLE_DEVICES chooses among what ROCR_VISIBLE_DEVICES leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypool.devices.gpus import GpuDevice, named

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
"""Environment variables that choose devices: of NVIDIA's, of AMD's, and of AMD's one level lower."""

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


def visible_gpus(environ: Mapping[str, str], devices: Sequence[GpuDevice]) -> tuple[VisibleGpu, ...]:
    """Return what CUDA lets a process with this environment see, in the order in which CUDA counts it.

    Args:
        environ: The process's environment, as it was when CUDA was first used.
        devices: The GPUs of this machine.

    Example:
        >>> cards = [GpuDevice(index=index, name="NVIDIA L4", uuid=f"GPU-{index}ab", mig=()) for index in range(3)]
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
    """Return which of so many AMD GPUs a process sees, by index; None if that is not known, since they are named by UUIDs.

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
        gpu = VisibleGpu(None if card is None else card.index, name if name.startswith("MIG-") else None)
        if gpu in seen and card is not None:
            return []
        seen.append(gpu)
    return seen


def _by_number(text: str, environ: Mapping[str, str], devices: Sequence[GpuDevice]) -> list[VisibleGpu]:
    numbers = _before_invalid(_numbers(text), len(devices))
    if len(numbers) < len(devices) and not is_order_known(environ, devices):
        return [VisibleGpu(None)] * len(numbers)
    return [VisibleGpu(devices[number].index) for number in numbers]


def is_order_known(environ: Mapping[str, str], devices: Sequence[GpuDevice]) -> bool:
    """Return whether CUDA counts these GPUs as nvidia-smi does: if it was told to, or all are alike.

    Example:
        >>> cards = [GpuDevice(index=0, name="NVIDIA L4"), GpuDevice(index=1, name="NVIDIA H200")]
        >>> is_order_known({}, cards), is_order_known({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, cards)
        (False, True)
    """
    names = {card.name for card in devices}
    return environ.get(ORDER) == "PCI_BUS_ID" or len(devices) < 2 or (len(names) == 1 and None not in names)


def _one_instance(seen: Sequence[VisibleGpu], devices: Sequence[GpuDevice]) -> tuple[VisibleGpu, ...]:
    """Return what is left of what could be seen, since a process has one instance at most and nothing beside it."""
    instances = {card.index: card.mig[0] for card in devices if card.mig}
    for gpu in seen:
        if gpu.mig is not None:
            return (gpu,)
        if gpu.index in instances:
            return (VisibleGpu(gpu.index, instances[gpu.index]),)
    return tuple(seen)


def _alike(names: Sequence[str], beginning: str) -> list[str]:
    """Return the names before the first that begins otherwise; none, if one stands there twice."""
    alike: list[str] = []
    for name in names:
        if name in alike:
            return []
        if not name.startswith(beginning):
            break
        alike.append(name)
    return alike


def _numbers(text: str) -> list[int]:
    """Return the numbers before the first that is none; none at all, if one stands there twice."""
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
