"""GPUs of this machine by NVIDIA's management library (NVML). It makes no CUDA context."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypool.gpus.devices import Allocator, GpuDevice, GpuProcess, memory_of, named
from raypool.gpus.memory import TorchAllocator

COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
"""What NVML calls them, by number; the second is not given any more."""

NOT_SUPPORTED = 3
"""The number of NVML's error that says that a GPU does not know the question
(NVML_ERROR_NOT_SUPPORTED).
"""

TEMPERATURE_OF_GPU = 0
"""The number of the sensor on the GPU itself (NVML_TEMPERATURE_GPU)."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Give the NVML module while it is initialized, or None where there is no NVIDIA driver.

    For what `NvmlInventory` does not tell, such as the driver's version. NVML counts who has
    initialized it, so it stays up for the inventory.
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
        pynvml.nvmlShutdown()


def load_pynvml() -> Any:
    """Return the module that speaks to NVML."""
    import pynvml

    return pynvml


@dataclass(frozen=True)
class NvmlInventory:
    """The real GPUs of this machine; see `Inventory`.

    NVML may be missing, and any question may fail at any time: what cannot be asked is not known.
    Once asked it stays up: to begin anew each time would take longer than the questions, and much
    longer where nobody else keeps the driver up.

    Args:
        load_library: Returns the module that speaks to NVML, pynvml or one like it. It is called in
            each process; to be pickled, it must be a function of a module.
    """

    load_library: Callable[[], Any] = load_pynvml

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs of this machine; none where there is no driver."""
        return self._nvml.devices()

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU that is named so."""
        return self._nvml.find(device)

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return how much of their memory is in use, and how busy they are."""
        return [self._nvml.load(index) for index in indices]

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return how much memory of these GPUs is in use."""
        return memory_of(self.load(indices))

    def allocator(self) -> Allocator:
        """Return torch's."""
        return TorchAllocator()

    @property
    def _nvml(self) -> Nvml:
        # what was initialized before a fork is not in the child
        key = self.load_library, os.getpid()
        if key not in _opened:
            _opened[key] = Nvml(self.load_library)
        return _opened[key]


class Nvml:
    """NVML in this process, and what never changes of its GPUs.

    Args:
        load_library: See `NvmlInventory`.
    """

    def __init__(self, load_library: Callable[[], Any]) -> None:
        self._load_library = load_library
        self._library: Any = None  # while it works
        # what is true of each GPU for as long as it is there
        self._lasting: dict[int, GpuDevice] = {}
        self._handles: dict[int, Any] = {}

    def devices(self) -> list[GpuDevice]:
        """Return all GPUs; if NVML has just failed, those that there were, with what is still true
        of them.
        """
        return [self._describe(index) for index in self._indices()]

    def find(self, device: str) -> GpuDevice | None:
        """Return the GPU that is named so."""
        known = [self._last(index) for index in self._indices()]
        if device.startswith("MIG-"):  # a GPU may be divided at any time
            known = [replace(card, mig=self._mig(card.index)) for card in known]
        card = named(device, known)
        return None if card is None else self._describe(card.index)

    def load(self, index: int) -> GpuDevice:
        """Return how much of a GPU's memory is in use, and how busy it is."""
        if self._library is None:
            self._indices()
        memory = self._ask(index, "nvmlDeviceGetMemoryInfo")
        rates = self._ask(index, "nvmlDeviceGetUtilizationRates")
        return GpuDevice(
            index=index,
            total_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            utilisation=None if rates is None else rates.gpu / 100,
        )

    # --- questions to NVML ------------------------------------------------------------------------

    def _indices(self) -> list[int]:
        """Return which GPUs there are. If NVML fails, it begins anew with the next question."""
        try:
            library = self._library or self._begin()
            count = int(library.nvmlDeviceGetCount())
        except Exception:  # whatever it is: who asks for GPUs must not fail
            self._library = None
            return sorted(self._lasting)
        if self._library is None:
            self._library, self._handles, self._lasting = library, {}, {}
        return list(range(count))

    def _begin(self) -> Any:
        library = self._load_library()
        library.nvmlInit()
        return library

    def _ask(self, index: int, question: str, *args: Any, if_unsupported: Any = None) -> Any:
        """Return the answer to a question on a GPU; None if there is none."""
        library = self._library
        try:
            if index not in self._handles:
                self._handles[index] = library.nvmlDeviceGetHandleByIndex(index)
            return getattr(library, question)(self._handles[index], *args)
        except Exception as error:
            if getattr(error, "value", None) == NOT_SUPPORTED:
                return if_unsupported
            self._handles.pop(index, None)
            return None

    def _last(self, index: int) -> GpuDevice:
        """Return what lasts of a GPU."""
        known = self._lasting.get(index)
        if known is None or known.uuid is None:
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
            utilisation=load.utilisation,
            temperature_c=self._ask(index, "nvmlDeviceGetTemperature", TEMPERATURE_OF_GPU),
            processes=self._processes(index),
            mig=self._mig(index),
            compute_mode=COMPUTE_MODES.get(self._ask(index, "nvmlDeviceGetComputeMode")),
        )

    def _processes(self, index: int) -> tuple[GpuProcess, ...] | None:
        """Return the processes that use a GPU, to compute or to draw; those that do both occur
        once.
        """
        computing = self._ask(index, "nvmlDeviceGetComputeRunningProcesses")
        if computing is None:
            return None
        others = [
            self._ask(index, question) or []
            for question in (
                "nvmlDeviceGetMPSComputeRunningProcesses",
                "nvmlDeviceGetGraphicsRunningProcesses",
            )
        ]
        used: dict[int, int | None] = {}
        for entry in (*computing, *others[0], *others[1]):
            if used.get(entry.pid) is None:
                used[entry.pid] = entry.usedGpuMemory
        return tuple(GpuProcess(pid=pid, used_bytes=num_bytes) for pid, num_bytes in used.items())

    def _mig(self, index: int) -> tuple[str, ...] | None:
        """Return the instances of a GPU. Those that can have none, have none."""
        mode = self._ask(index, "nvmlDeviceGetMigMode", if_unsupported=(0, 0))
        if mode is None or not mode[0]:
            return None if mode is None else ()
        most = self._ask(index, "nvmlDeviceGetMaxMigDeviceCount")
        return (
            None
            if most is None
            else tuple(filter(None, (self._instance(index, number) for number in range(most))))
        )

    def _instance(self, index: int, number: int) -> str | None:
        """Return the UUID of an instance; None where there is none, for their numbers have gaps."""
        try:
            handle = self._library.nvmlDeviceGetMigDeviceHandleByIndex(self._handles[index], number)
            return _text(self._library.nvmlDeviceGetUUID(handle))
        except Exception:
            return None


def _text(answer: Any) -> str | None:
    """Return what a call answers that gives text; older modules give bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


_opened: dict[tuple[Callable[[], Any], int], Nvml] = {}  # by how it is loaded, and process
