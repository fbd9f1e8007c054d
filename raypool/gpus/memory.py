"""This process's GPU memory: torch's allocator, its limit, and memory that is kept on purpose."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from raypool.gpus.devices import Allocator

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that set up torch's allocator: only the first that is there is read."""

FRACTION = "per_process_memory_fraction"
"""The setting that says which part of a GPU's memory a process may have."""

FIRST_WITH_FRACTION = (2, 10)
"""The first torch that has this setting; those before refuse to start with it."""


class TorchAllocator:
    """Torch's caching allocator; see `Allocator`. A process that has not imported torch has not
    used its GPU by it.
    """

    @property
    def is_in_use(self) -> bool:
        """Whether torch has used CUDA in this process."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def allocated(self) -> int:
        """Return how much memory tensors take."""
        return int(_cuda().memory_allocated()) if self.is_in_use else 0

    def peak(self) -> int:
        """Return the most that torch had of the GPU's memory."""
        return int(_cuda().max_memory_reserved()) if self.is_in_use else 0

    def reset_peak(self) -> None:
        """Begin to measure `peak` from now."""
        if self.is_in_use:
            _cuda().reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """Give back what torch keeps for later."""
        if self.is_in_use:
            _cuda().empty_cache()

    def limit(self, fraction: float) -> None:
        """Let this process have no more than this part of its GPU's memory.

        A torch that has not used CUDA yet does so when it does; one that is not imported yet is
        told in the environment. One that is too old for that can be told only once it is imported.
        """
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.cuda._lazy_call(
                lambda: torch.cuda.set_per_process_memory_fraction(float(fraction))
            )
        elif _torch_version() >= FIRST_WITH_FRACTION:
            set_fraction(os.environ, fraction)


def fraction_of(environ: Mapping[str, str]) -> float:
    """Return which part of its GPU's memory the environment grants a process; all of it, if nothing
    is said.

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
    """Grant a process a part of its GPU's memory, and leave all else that is set as it is.

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


def _torch_version() -> tuple[int, ...]:
    # a fifth of the time of all that `parpool` imports
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("torch").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (0,)


def _cuda() -> Any:
    return sys.modules["torch"].cuda


# --- resident memory ------------------------------------------------------------------------------


class Purposes(NamedTuple):
    """Memory kept on purpose since the last `take`: so many more bytes, or all that is in use."""

    num_bytes: int
    is_all: bool


class ResidentMemory:
    """Measures memory that is kept on purpose, once `watch` was called; before that it does
    nothing.

    What cannot be made again, if this process ends, is in `treasures`, by whatever names it has. A
    finalizer may take something out of it at any moment.
    """

    def __init__(self) -> None:
        self.treasures: dict[str, None] = {}
        self._allocator: Allocator | None = None
        self._num_bytes = 0
        self._is_all = False
        self._is_counting = False
        self._lock = threading.Lock()

    def watch(self, allocator: Allocator) -> None:
        """Measure from now on, by this allocator."""
        self._allocator = allocator

    @contextlib.contextmanager
    def on_purpose(self) -> Iterator[None]:
        """Count what is allocated meanwhile, and is still there at the end; within another one,
        that counts it.
        """
        if self._allocator is None or not self._enter():
            yield
            return
        before = self._allocator.allocated()
        try:
            yield
        finally:
            with self._lock:
                self._is_counting = False
                self._num_bytes += max(self._allocator.allocated() - before, 0)

    def _enter(self) -> bool:
        """Begin to count, unless somebody does already."""
        with self._lock:
            was_counting, self._is_counting = self._is_counting, True
            return not was_counting

    def all(self) -> None:
        """Take it that all is on purpose which is there when the task ends."""
        with self._lock:
            self._is_all = True

    def take(self) -> Purposes:
        """Return what was kept since this was asked last."""
        with self._lock:
            purposes = Purposes(self._num_bytes, self._is_all)
            self._num_bytes, self._is_all = 0, False
            return purposes


kept = ResidentMemory()
"""Of this process."""
