"""Tables of GPUs, one row each, and the GPUs that Ray knows."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raypool.errors import InvalidValueError, explains_calls
from raypool.gpus.devices import GpuDevice, Inventory, visible_amd, visible_gpus
from raypool.gpus.nvml import NvmlInventory

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = {
    "index": "int64",
    "name": "string",
    "uuid": "string",
    "total_bytes": "Int64",
    "used_bytes": "Int64",
    "free_bytes": "Int64",
    "utilization": "Float64",
    "temperature_c": "Float64",
    "processes": "object",
    "mig": "object",
    "compute_mode": "string",
    "compute_capability": "object",
}
"""The columns for a GPU and their types; all but the index can have missing values."""


def row_of(card: GpuDevice) -> dict[str, Any]:
    """Return a GPU's row; `processes` is each one's memory by its number.

    Example:
        >>> row_of(GpuDevice(index=1, total_bytes=8, used_bytes=3))["free_bytes"]
        5
    """
    row = {name: getattr(card, name) for name in COLUMNS}
    if card.processes is not None:
        row["processes"] = {process.pid: process.used_bytes for process in card.processes}
    return row


def frame_of(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS
) -> pd.DataFrame:
    """Return a table with columns of these types, even without rows.

    Example:
        >>> frame = frame_of([row_of(GpuDevice(index=0, utilization=0.5))])
        >>> frame[["index", "utilization"]].to_dict("list")
        {'index': [0], 'utilization': [0.5]}
    """
    import pandas as pd

    rows = list(rows)
    # by column: pandas would guess the types of columns that are empty or have missing values
    return pd.DataFrame(
        {
            name: pd.Series([row.get(name) for row in rows], dtype=kind)
            for name, kind in columns.items()
        }
    )


NVIDIAS = NvmlInventory()


@explains_calls
def gpu_device_count(
    which: Literal["available", "all"] = "available", *, inventory: Inventory = NVIDIAS
) -> int:
    """Return how many GPUs this machine has; the process can still be forked afterwards.

    Args:
        which: "all": the machine's GPUs. "available": the devices that this process may use, by
            CUDA_VISIBLE_DEVICES and their compute modes; an instance of a divided GPU counts as
            one.
        inventory: The source of all facts about the GPUs.

    Raises:
        InvalidValueError: `which` has another value.

    Source:
        MATLAB R2025b, gpuDeviceCount.

    Example:
        >>> gpu_device_count() <= gpu_device_count("all")
        True
    """
    if which not in ("available", "all"):
        raise InvalidValueError(f"which must be 'available' or 'all', not {which!r}.")
    devices, seen = gpus_here(inventory)
    if which == "all":
        return len(devices)
    prohibited = {card.index for card in devices if card.compute_mode == "prohibited"}
    return sum(index not in prohibited for index in seen)


@explains_calls
def gpu_device_table(*, inventory: Inventory = NVIDIAS) -> pd.DataFrame:
    """Return a table of this machine's GPUs as they are now, a row for each.

    The columns are `index` (as nvidia-smi counts), `name`, `uuid`, `total_bytes`, `used_bytes` (by
    all processes), `free_bytes`, `utilization` (0 to 1), `temperature_c`, `processes` (each one's
    memory [bytes], by process number), `mig` (the UUIDs of its instances), `compute_mode`,
    `compute_capability` and `is_selected` (whether this process sees it, by CUDA_VISIBLE_DEVICES).
    Unknown values are missing; for GPUs that are not NVIDIA's, nearly all are. No CUDA context
    is made.

    Args:
        inventory: The source of all facts about the GPUs.

    Source:
        MATLAB R2025b, gpuDeviceTable.

    Example:
        >>> "free_bytes" in gpu_device_table()
        True
    """
    devices, seen = gpus_here(inventory)
    rows = [
        {
            **row_of(card),
            "is_selected": True if card.index in seen else None if None in seen else False,
        }
        for card in devices
    ]
    return frame_of(rows, {**COLUMNS, "is_selected": "boolean"})


def gpus_here(inventory: Inventory) -> tuple[list[GpuDevice], Sequence[int | None]]:
    """Return this machine's GPUs, and the indices of visible ones, None if unknown."""
    devices = inventory.devices()
    if devices or inventory != NVIDIAS:
        return devices, [gpu.index for gpu in visible_gpus(os.environ, devices)]
    # NVML knows only NVIDIA's cards; Ray knows other makers', too
    manager = manager_of_gpus()
    return ([], []) if manager is None else known_to_ray(manager, os.environ)


def manager_of_gpus() -> Any:
    """Return Ray's accelerator manager of this machine's GPUs; None if Ray cannot be asked."""
    try:
        import_ray()
        from raypool.ray_private import get_accelerator_manager_for_resource

        return get_accelerator_manager_for_resource("GPU")
    except Exception:  # it is private to Ray, and may be another one tomorrow
        return None


def known_to_ray(
    manager: Any, environ: Mapping[str, str]
) -> tuple[list[GpuDevice], Sequence[int | None]]:
    """Return the GPUs of Ray's accelerator manager, and the indices that a process sees."""
    maker = manager.__name__.removesuffix("GPUAcceleratorManager")
    count = _asked(manager.get_current_node_num_accelerators) or 0
    kind = _asked(manager.get_current_node_accelerator_type) if count else None
    names = [f"{maker} GPU"] * count
    if kind:  # Ray tells the type of the first one only
        names[0] = f"{maker} {kind.replace('-', ' ').removeprefix(f'{maker} ')}"
    devices = [GpuDevice(index=index, name=name) for index, name in enumerate(names)]
    seen: Sequence[int | None] | None
    if maker == "AMD":
        seen = visible_amd(environ, count)
    else:
        ids = _asked(manager.get_current_process_visible_accelerator_ids)
        seen = (
            list(range(count))
            if ids is None
            else [int(name) if str(name).isdigit() else None for name in ids]
        )
    return devices, [None] * count if seen is None else seen


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # a manager asks tools and drivers that may be missing
        return None


def import_ray() -> None:
    """Import Ray without its advice to install packages that are not needed."""
    # in a notebook, Ray asks for ipywidgets, and so does tqdm, which it imports
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import ray  # noqa: F401
