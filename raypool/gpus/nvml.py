"""GPUs of this machine by NVIDIA's management library (NVML), which makes no CUDA context."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypool.gpus.devices import Allocator, GpuDevice, GpuProcess, memory_of, named
from raypool.gpus.memory import TorchAllocator

COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
"""The names of NVML's compute modes; the second is not used any more."""

NOT_SUPPORTED = 3
"""NVML's error for a question that a GPU does not know (NVML_ERROR_NOT_SUPPORTED)."""

TEMPERATURE_OF_GPU = 0
"""The sensor on the GPU itself (NVML_TEMPERATURE_GPU)."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Give the initialized NVML module, or None without an NVIDIA driver.

    It is for facts that `NvmlInventory` lacks, such as the driver's version.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()  # NVML counts its users: it stays up for the inventory


def load_pynvml() -> Any:
    """Return Python's module for NVML."""
    import pynvml

    return pynvml


@dataclass(frozen=True)
class NvmlInventory:
    """The real GPUs of this machine; see `Inventory`. Unanswered questions mean unknown.

    Args:
        load_library: Returns pynvml or a module like it, in each process; to be pickled, it must be
            a function of a module.
    """

    load_library: Callable[[], Any] = load_pynvml

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine; none without a driver."""
        return self._nvml.devices()

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU with this index or UUID."""
        return self._nvml.find(device)

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return their memory and utilization."""
        return [self._nvml.load(index) for index in indices]

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return the memory in use on these GPUs."""
        return memory_of(self.load(indices))

    def allocator(self) -> Allocator:
        """Return torch's allocator."""
        return TorchAllocator()

    @property
    def _nvml(self) -> Nvml:
        # A child does not inherit what was initialized before a fork. NVML then stays up: to
        # initialize it takes longer than all questions together, and much longer where no other
        # process keeps the driver up.
        key = self.load_library, os.getpid()
        # two threads may both open it, which does no harm: NVML counts its users
        if key not in _opened:
            _opened[key] = Nvml(self.load_library)
        return _opened[key]


class Nvml:
    """NVML in this process, and the lasting facts about its GPUs."""

    def __init__(self, load_library: Callable[[], Any]) -> None:
        self._load_library = load_library
        self._library: Any = None  # while it works
        self._lasting: dict[int, GpuDevice] = {}  # name, UUID and capability never change
        self._handles: dict[int, Any] = {}

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs; if NVML has just failed, the last known ones with lasting facts."""
        return [self._describe(index) for index in self._indices()]

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU with this index or UUID; for an instance, with its memory only."""
        known = [self._last(index) for index in self._indices()]
        if device.startswith("MIG-"):  # a GPU may be divided at any time
            known = [replace(card, mig=self._mig(card.index)) for card in known]
        card = named(device, known)
        if card is None:
            return None
        card = self._describe(card.index)
        if device.startswith("MIG-"):
            memory = None
            with contextlib.suppress(Exception):  # any question may fail, at any time
                handle = self._library.nvmlDeviceGetHandleByUUID(device)
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            total, used = _sizes(memory)
            card = replace(card, total_bytes=total, used_bytes=used, utilization=None)
        return card

    def load(self, index: int) -> GpuDevice:
        """Return a GPU's memory and utilization."""
        if self._library is None:
            self._indices()
        memory = self._ask(index, "nvmlDeviceGetMemoryInfo")
        rates = self._ask(index, "nvmlDeviceGetUtilizationRates")
        total, used = _sizes(memory)
        utilization = None if rates is None else rates.gpu / 100
        return GpuDevice(index=index, total_bytes=total, used_bytes=used, utilization=utilization)

    def _indices(self) -> list[int]:
        """Return the GPUs' indices. If NVML fails, the next question initializes it again."""
        library = self._library
        try:
            if library is None:
                library = self._load_library()
                library.nvmlInit()
            count = int(library.nvmlDeviceGetCount())
        except Exception:  # whatever it is: an inventory never raises
            self._library = None
            return sorted(self._lasting)
        if self._library is None:
            # after a failure, the handles and the cards may be others
            self._library, self._handles, self._lasting = library, {}, {}
        return list(range(count))

    def _ask(self, index: int, question: str, *args: Any, if_unsupported: Any = None) -> Any:
        """Return the answer to a question about a GPU; None if there is none."""
        library = self._library
        try:
            if index not in self._handles:
                self._handles[index] = library.nvmlDeviceGetHandleByIndex(index)
            return getattr(library, question)(self._handles[index], *args)
        except Exception as error:  # any question may fail, at any time
            if getattr(error, "value", None) == NOT_SUPPORTED:
                return if_unsupported
            self._handles.pop(index, None)  # it may be invalid now
            return None

    def _last(self, index: int) -> GpuDevice:
        """Return the lasting facts about a GPU."""
        known = self._lasting.get(index)
        if known is None or known.uuid is None:  # a question that failed is asked again
            capability = self._ask(index, "nvmlDeviceGetCudaComputeCapability")
            known = self._lasting[index] = GpuDevice(
                index=index,
                name=_text(self._ask(index, "nvmlDeviceGetName")),
                uuid=_text(self._ask(index, "nvmlDeviceGetUUID")),
                compute_capability=(
                    None if capability is None else (int(capability[0]), int(capability[1]))
                ),
            )
        return known

    def _describe(self, index: int) -> GpuDevice:
        lasting, load = self._last(index), self.load(index)
        return replace(
            lasting,
            total_bytes=load.total_bytes,
            used_bytes=load.used_bytes,
            utilization=load.utilization,
            temperature_c=self._ask(index, "nvmlDeviceGetTemperature", TEMPERATURE_OF_GPU),
            processes=self._processes(index),
            mig=self._mig(index),
            compute_mode=COMPUTE_MODES.get(self._ask(index, "nvmlDeviceGetComputeMode")),
        )

    def _processes(self, index: int) -> tuple[GpuProcess, ...] | None:
        entries = self._ask(index, "nvmlDeviceGetComputeRunningProcesses")
        if entries is None:
            return None
        for question in (
            "nvmlDeviceGetMPSComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            entries = [*entries, *(self._ask(index, question) or [])]
        used: dict[int, int | None] = {}
        for entry in entries:  # a process that computes and draws is in two of the lists
            if used.get(entry.pid) is None:
                used[entry.pid] = entry.usedGpuMemory
        return tuple(GpuProcess(pid=pid, used_bytes=num_bytes) for pid, num_bytes in used.items())

    def _mig(self, index: int) -> tuple[str, ...] | None:
        """Return the UUIDs of a GPU's instances."""
        # a GPU that cannot be divided is not: that is known, unlike a failure
        mode = self._ask(index, "nvmlDeviceGetMigMode", if_unsupported=(0, 0))
        if mode is None or not mode[0]:
            return None if mode is None else ()
        most = self._ask(index, "nvmlDeviceGetMaxMigDeviceCount")
        if most is None:
            return None
        instances = []
        for number in range(most):
            with contextlib.suppress(Exception):  # the numbers of instances have gaps
                handle = self._library.nvmlDeviceGetMigDeviceHandleByIndex(
                    self._handles[index], number
                )
                instances.append(_text(self._library.nvmlDeviceGetUUID(handle)))
        return tuple(filter(None, instances))


def _sizes(memory: Any) -> tuple[int | None, int | None]:
    return (None, None) if memory is None else (int(memory.total), int(memory.used))


def _text(answer: Any) -> str | None:
    # older modules for NVML return bytes
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


_opened: dict[tuple[Callable[[], Any], int], Nvml] = {}  # by `load_library` and process
