"""Counts cores and GPUs without touching a GPU: NVML is asked, no CUDA context is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any


def usable_cores() -> int:
    """Return how many physical cores this process may use.

    Affinity masks and cgroup limits are respected (by loky), and so is the share that SLURM gave to this task.
    """
    import loky

    cores = int(loky.cpu_count(only_physical_cores=True))
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min(cores, int(slurm))) if slurm.isdigit() else max(1, cores)


def usable_cpus() -> int:
    """Return how many logical CPUs this process may use, by the same rules."""
    import loky

    return max(usable_cores(), int(loky.cpu_count())) if not os.environ.get("SLURM_CPUS_PER_TASK") else usable_cores()


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Give the NVML module while it is initialized, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_identity(device: str) -> tuple[int, str | None]:
    """Return the index on this machine and the UUID of a GPU that is named by either, as far as NVML knows.

    Without NVML an index stands for itself (Ray can be told of GPUs that do not exist), and a UUID for index -1.
    """
    index = int(device) if device.isdigit() else -1
    with nvml() as library:
        if library is None:
            return index, None if index >= 0 else device
        try:
            by_index = library.nvmlDeviceGetHandleByIndex
            handle = by_index(index) if index >= 0 else library.nvmlDeviceGetHandleByUUID(device)
            return int(library.nvmlDeviceGetIndex(handle)), str(library.nvmlDeviceGetUUID(handle))
        except library.NVMLError:
            return index, None if index >= 0 else device


def gpu_memory_used(gpus: Iterable[int]) -> int:
    """Return how much memory of these GPUs is in use, by whomever [bytes]; 0 as far as NVML does not know them."""
    used = 0
    with nvml() as library:
        for index in gpus if library is not None else ():
            with contextlib.suppress(library.NVMLError):
                used += int(library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByIndex(index)).used)
    return used
