"""The GPUs of this machine, whoever made them: NVML knows NVIDIA's well, and of others Ray knows that they are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raypool.devices.gpus import GpuDevice, Inventory
from raypool.devices.nvml import NvmlInventory
from raypool.devices.table import COLUMNS, frame_of, row_of
from raypool.devices.visible import visible_amd, visible_gpus
from raypool.engine.quiet_import import import_ray
from raypool.errors import InvalidValueError

if TYPE_CHECKING:
    import pandas as pd

NVIDIAS = NvmlInventory()


def gpu_device_count(which: Literal["available", "all"] = "available", *, inventory: Inventory = NVIDIAS) -> int:
    """Return how many GPUs this machine has. No CUDA context is made, so the process can still be forked.

    Args:
        which: "all": those of the machine. "available": the devices that this process may use, by CUDA_VISIBLE_DEVICES and the
            compute mode of each; an instance of a divided GPU counts as one.
        inventory: Who knows them.

    Raises:
        InvalidValueError: `which` is something else.

    Source:
        MATLAB R2025b, gpuDeviceCount.

    Example:
        >>> gpu_device_count() <= gpu_device_count("all")
        True
    """
    if which not in ("available", "all"):
        raise InvalidValueError(f"which={which!r} is neither 'available' nor 'all'.")
    devices, seen = gpus_here(inventory)
    if which == "all":
        return len(devices)
    prohibited = {card.index for card in devices if card.compute_mode == "prohibited"}
    return sum(index not in prohibited for index in seen)


def gpu_device_table(*, inventory: Inventory = NVIDIAS) -> pd.DataFrame:
    """Return a table of the GPUs of this machine, as they are now: a row for each, none where there is no GPU.

    The columns are `index` (as nvidia-smi counts), `name`, `uuid`, `total_bytes`, `used_bytes` (by whomever), `free_bytes`,
    `utilisation` (from 0 to 1), `temperature_c`, `processes` (the memory of each [bytes], by process number), `mig` (the UUIDs of
    the instances that it is divided into), `compute_mode`, `compute_capability` and `is_selected`: whether this process sees it,
    by CUDA_VISIBLE_DEVICES. What is not known is missing: of GPUs that are not NVIDIA's, nearly all. No CUDA context is made.

    Args:
        inventory: Who knows them.

    Source:
        MATLAB R2025b, gpuDeviceTable.

    Example:
        >>> "free_bytes" in gpu_device_table()
        True
    """
    devices, seen = gpus_here(inventory)
    rows = [{**row_of(card), "is_selected": True if card.index in seen else None if None in seen else False} for card in devices]
    return frame_of(rows, {**COLUMNS, "is_selected": "boolean"})


def gpus_here(inventory: Inventory) -> tuple[list[GpuDevice], Sequence[int | None]]:
    """Return the GPUs of this machine, and the indices of those that this process sees, None for one that may be any."""
    devices = inventory.devices()
    if devices or inventory != NVIDIAS:
        return devices, [gpu.index for gpu in visible_gpus(os.environ, devices)]
    manager = manager_of_gpus()
    return ([], []) if manager is None else known_to_ray(manager, os.environ)


def manager_of_gpus() -> Any:
    """Return who knows this machine's GPUs for Ray; None if Ray cannot be asked."""
    try:
        import_ray()
        from ray._private.accelerators import get_accelerator_manager_for_resource

        return get_accelerator_manager_for_resource("GPU")
    except Exception:  # it is private to Ray, and may be another one tomorrow
        return None


def known_to_ray(manager: Any, environ: Mapping[str, str]) -> tuple[list[GpuDevice], Sequence[int | None]]:
    """Return the GPUs that Ray knows of, with the maker's name, and those that a process with this environment sees.

    Ray tells of what kind the first is; of the others it is not known.

    Args:
        manager: One of Ray's accelerator managers.
        environ: The process's environment.
    """
    maker = manager.__name__.removesuffix("GPUAcceleratorManager")
    count = _asked(manager.get_current_node_num_accelerators) or 0
    kind = _asked(manager.get_current_node_accelerator_type) if count else None
    names = [f"{maker} GPU"] * count
    if kind:
        names[0] = f"{maker} {kind.replace('-', ' ').removeprefix(f'{maker} ')}"
    devices = [GpuDevice(index=index, name=name) for index, name in enumerate(names)]
    seen: Sequence[int | None] | None
    if maker == "AMD":
        seen = visible_amd(environ, count)
    else:
        ids = _asked(manager.get_current_process_visible_accelerator_ids)
        seen = list(range(count)) if ids is None else [int(name) if str(name).isdigit() else None for name in ids]
    return devices, [None] * count if seen is None else seen


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # a manager asks tools and drivers that may be missing
        return None
