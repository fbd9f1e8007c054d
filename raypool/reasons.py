"""Why a task has no value, in a word or two: what tables and programs go by."""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError

from raypool.errors import LossReason, RankInterrupted, SpmdError, TaskCancelled, TaskTimeoutError, TrainingError, WorkerLostError

GPU_OUT_OF_MEMORY = "gpu out of memory"
OUT_OF_MEMORY = LossReason.OUT_OF_MEMORY.value
TIMEOUT = "timeout"
CANCELLED = "cancelled"
ERROR = "error"

REASONS: dict[type[BaseException], str] = {
    TaskTimeoutError: TIMEOUT,
    CancelledError: CANCELLED,
    TaskCancelled: CANCELLED,
    RankInterrupted: LossReason.STOPPED.value,
}
"""Those that can be seen by the type."""

GPU_LIBRARIES = ("torch", "cupy")
"""Their OutOfMemoryError is about a GPU."""

GPU_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "HIP out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_ENOUGH",
)
"""What libraries of CUDA's and ROCm's say by other exceptions, when a GPU has no memory left for them."""

HOST_WORDS = ("DefaultCPUAllocator: ", "Cannot allocate memory")
"""What torch, and the operating system, say when the machine has no memory left for them."""


def reason_of(error: BaseException) -> str:
    """Return why a task has failed that has raised this.

    "gpu out of memory", "out of memory" (of the machine, or by `memory_bytes`), "timeout", "cancelled"; one of the values of
    `LossReason` for a worker that was lost ("process ended", "node lost" and so on); for anything else "error". A call on several
    ranks has the reason of the one that failed first.

    Example:
        >>> reason_of(MemoryError()), reason_of(RuntimeError("CUDA error: out of memory")), reason_of(KeyError("a"))
        ('out of memory', 'gpu out of memory', 'error')
    """
    if isinstance(error, (SpmdError, TrainingError)) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    if isinstance(error, WorkerLostError):
        return error.reason.value
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return reason
    if is_gpu_out_of_memory(error):
        return GPU_OUT_OF_MEMORY
    return OUT_OF_MEMORY if is_out_of_memory(error) else ERROR


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a GPU had no memory left; torch is not imported for that."""
    for kind in type(error).__mro__:
        if kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] in GPU_LIBRARIES:
            return True
    return isinstance(error, RuntimeError) and _says(error, GPU_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine had no memory left."""
    if isinstance(error, MemoryError):
        return not is_gpu_out_of_memory(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _says(error, HOST_WORDS)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    try:
        text = str(error)
    except Exception:  # the user's own __str__
        return False
    return any(word in text for word in words)
