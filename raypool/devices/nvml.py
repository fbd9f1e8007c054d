"""The GPUs of this machine, as NVIDIA's management library knows them. No CUDA context is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypool.devices.allocator import TorchAllocator
from raypool.devices.gpus import Allocator, GpuDevice, GpuProcess


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


@dataclass(frozen=True)
class NvmlInventory:
    """The real GPUs of this machine; see `Inventory`."""

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine; none where there is no driver."""
        with nvml() as library:
            if library is None:
                return []
            count = _asked(library, library.nvmlDeviceGetCount) or 0
            return [_described(library, index) for index in range(count)]

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU that is named so."""
        with nvml() as library:
            if library is None:
                return None
            if device.isdigit():
                handle = _asked(library, library.nvmlDeviceGetHandleByIndex, int(device))
            else:
                handle = _asked(library, library.nvmlDeviceGetHandleByUUID, device)
            index = None if handle is None else _asked(library, library.nvmlDeviceGetIndex, handle)
            return None if index is None else _described(library, int(index))

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return how much memory of these GPUs is in use."""
        used = 0
        with nvml() as library:
            for index in indices:
                handle = None if library is None else _asked(library, library.nvmlDeviceGetHandleByIndex, index)
                memory = None if handle is None else _asked(library, library.nvmlDeviceGetMemoryInfo, handle)
                if memory is None:
                    return None
                used += int(memory.used)
        return used

    def allocator(self) -> Allocator:
        """Return torch's."""
        return TorchAllocator()


def _asked(library: Any, question: Callable[..., Any], *args: Any) -> Any:
    """Return the answer to a question, None if there is none."""
    try:
        return question(*args)
    except library.NVMLError:
        return None


def _described(library: Any, index: int) -> GpuDevice:
    handle = _asked(library, library.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return GpuDevice(index=index)
    memory = _asked(library, library.nvmlDeviceGetMemoryInfo, handle)
    rates = _asked(library, library.nvmlDeviceGetUtilizationRates, handle)
    processes = _asked(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuDevice(
        index=index,
        name=_asked(library, library.nvmlDeviceGetName, handle),
        uuid=_asked(library, library.nvmlDeviceGetUUID, handle),
        total_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        utilisation=None if rates is None else rates.gpu / 100,
        temperature_c=_asked(library, library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
        processes=None
        if processes is None
        else tuple(GpuProcess(pid=entry.pid, used_bytes=entry.usedGpuMemory) for entry in processes),
    )
