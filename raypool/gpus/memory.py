"""This process's GPU memory: torch's allocator, its limit, and memory kept on purpose."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from raypool.gpus.devices import Allocator

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables of torch's allocator, of which it reads the first that is set."""

FRACTION = "per_process_memory_fraction"
"""The setting for a process's share of a GPU's memory."""

FIRST_WITH_FRACTION = (2, 10)
"""The first torch with this setting; older ones refuse to start with it."""


class TorchAllocator:
    """Torch's caching allocator; see `Allocator`."""

    @property
    def is_in_use(self) -> bool:
        """Whether torch has used CUDA in this process."""
        torch = sys.modules.get("torch")  # an import would take seconds
        return torch is not None and bool(torch.cuda.is_initialized())

    def allocated(self) -> int:
        """Return the memory of tensors."""
        return int(_cuda().memory_allocated()) if self.is_in_use else 0

    def peak(self) -> int:
        """Return the most memory that torch has reserved."""
        return int(_cuda().max_memory_reserved()) if self.is_in_use else 0

    def reset_peak(self) -> None:
        """Restart the measurement of `peak`."""
        if self.is_in_use:
            _cuda().reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Release torch's cache."""
        if self.is_in_use:
            _cuda().empty_cache()

    def limit(self, fraction: float) -> None:
        """Limit this process to a share of its GPU's memory; old torch only once it is imported."""
        torch = sys.modules.get("torch")
        if torch is not None:
            # lazy: at once if torch has used CUDA, else when it does, so that nothing here begins
            torch.cuda._lazy_call(
                lambda: torch.cuda.set_per_process_memory_fraction(float(fraction))
            )
            return
        # torch's metadata, since an import of it takes seconds; and this import is a fifth of the
        # time of all that `parpool` imports
        from importlib.metadata import PackageNotFoundError, version

        with contextlib.suppress(PackageNotFoundError, ValueError):  # no torch, or an odd version
            if tuple(map(int, version("torch").split(".")[:2])) >= FIRST_WITH_FRACTION:
                set_fraction(os.environ, fraction)


def fraction_of(environ: Mapping[str, str]) -> float:
    """Return a process's share of its GPU's memory by its environment; 1 if nothing is set.

    Example:
        >>> settings = "backend:native,per_process_memory_fraction:0.5"
        >>> fraction_of({"PYTORCH_CUDA_ALLOC_CONF": settings}), fraction_of({})
        (0.5, 1.0)
    """
    for setting in next((environ[name] for name in SETTINGS if name in environ), "").split(","):
        name, _, value = setting.partition(":")
        if name.strip() == FRACTION:
            return float(value)
    return 1.0


def set_fraction(environ: MutableMapping[str, str], fraction: float) -> None:
    """Set a process's share of its GPU's memory, and leave other settings as they are.

    Source:
        PyTorch, CUDAAllocatorConfig.h: where PYTORCH_CUDA_ALLOC_CONF is set, PYTORCH_ALLOC_CONF is
            not read.

    Example:
        >>> environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        >>> set_fraction(environ, 0.25)
        >>> environ
        {'PYTORCH_ALLOC_CONF': 'expandable_segments:True,per_process_memory_fraction:0.25'}
    """
    name = next((name for name in SETTINGS if name in environ), SETTINGS[-1])
    others = [
        setting
        for setting in environ.get(name, "").split(",")
        if setting and setting.partition(":")[0].strip() != FRACTION
    ]
    environ[name] = ",".join([*others, f"{FRACTION}:{fraction:g}"])


def _cuda() -> Any:
    return sys.modules["torch"].cuda


# --- resident memory ------------------------------------------------------------------------------


class Purposes(NamedTuple):
    """Memory kept on purpose since the last `take`: more bytes, or all memory in use."""

    num_bytes: int
    is_all: bool


class ResidentMemory:
    """Measures memory kept on purpose, from the call of `watch` on.

    `treasures`: names of values that cannot be made again once this process has ended.
    """

    def __init__(self) -> None:
        self.treasures: dict[str, None] = {}  # a finalizer may remove one at any moment
        self._allocator: Allocator | None = None
        self._num_bytes = 0
        self._is_all = False
        self._is_counting = False
        self._lock = threading.Lock()  # threads of a task may count at the same time

    def watch(self, allocator: Allocator) -> None:
        """Measure from now on, by this allocator."""
        self._allocator = allocator

    @contextlib.contextmanager
    def on_purpose(self) -> Iterator[None]:
        """Count memory that is allocated in the context and still in use at its end."""
        if self._allocator is None:
            yield
            return
        with self._lock:  # a second thread, or one context within another, must not count twice
            is_nested, self._is_counting = self._is_counting, True
        if is_nested:
            yield
            return
        before = self._allocator.allocated()
        try:
            yield
        finally:
            with self._lock:
                self._is_counting = False
                self._num_bytes += max(self._allocator.allocated() - before, 0)

    def all(self) -> None:
        """Count all memory in use at the end of the task."""
        with self._lock:
            self._is_all = True

    def take(self) -> Purposes:
        """Return the memory kept since the last call."""
        with self._lock:
            purposes = Purposes(self._num_bytes, self._is_all)
            self._num_bytes, self._is_all = 0, False
            return purposes


kept = ResidentMemory()
"""The resident memory of this process."""
