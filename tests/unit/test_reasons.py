"""Why something has failed, in a word or two."""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError

import numpy as np

from raypool.errors import (
    LossReason,
    RankInterrupted,
    SpmdError,
    TaskCancelled,
    TaskTimeoutError,
    WorkerLostError,
    is_gpu_out_of_memory,
    reason_of,
)
from raypool.results import Results, Row


def torch_error() -> BaseException:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def numpy_error() -> BaseException:
    try:
        np.empty(2**62, dtype=np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError


def caused(cause: BaseException) -> SpmdError:
    error = SpmdError("One rank of two has failed.", failures={1: cause}, first_rank=1)
    error.__cause__ = cause
    return error


class Unspeakable(RuntimeError):
    """It cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError


REASONS = [
    (torch_error(), "gpu out of memory"),
    (RuntimeError("CUDA error: out of memory"), "gpu out of memory"),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "gpu out of memory",
    ),
    (MemoryError(), "out of memory"),
    (numpy_error(), "out of memory"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
    (
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
            " bytes"
        ),
        "out of memory",
    ),
    (OSError(errno.ENOSPC, "No space left on device"), "error"),
    (RuntimeError("out of ideas"), "error"),
    (Unspeakable(), "error"),
    (TaskTimeoutError("It took too long."), "timeout"),
    (CancelledError(), "cancelled"),
    (TaskCancelled(), "cancelled"),
    (RankInterrupted("It was ended.", at_hand=None, place=""), "stopped"),
    (caused(MemoryError()), "out of memory"),
    *(
        (WorkerLostError("It died.", reason=reason, attempts=1), reason.value)
        for reason in LossReason
    ),
]


def test_the_reason() -> None:
    for error, reason in REASONS:
        assert reason_of(error) == reason
        assert is_gpu_out_of_memory(error) is (reason == "gpu out of memory")


def test_the_table_has_it_for_each_item() -> None:
    """What has finished has none, nor has what a journal knows and cannot give back."""
    statuses = ["finished", "failed", "cancelled", "missing"]
    results = Results(
        [0] * 4, [None] * 4, lambda: [Row(status) for status in statuses], {1: MemoryError()}
    )
    assert results.to_frame()["reason"].fillna("-").tolist() == [
        "-",
        "out of memory",
        "cancelled",
        "-",
    ]
