"""What travels between ranks: tensors and arrays as their memory, everything else pickled."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from typing import Any

from raypool.errors import InvalidTypeError, SerializationError
from raypool.spmd.wire import Word, checked, signed
from raypool.worker.running import Way

PLAIN = frozenset({int, float, bool, str, type(None), complex})
"""Types of values that any pickle will do for."""

MAX_INLINE_BYTES = 512
"""The memory of a tensor or array that is no larger travels in its word: a loss, say, or a few metrics."""


class Packer:
    """Pickles values, in the way of the pool if there is one: what a worker has from a notebook has no module to be found in.

    It signs pickles with the group's secret, and opens only those.
    """

    def __init__(self, secret: bytes, way: Way | None = None) -> None:
        self.secret = secret
        self._way = way

    def pack(self, value: Any, operation: str) -> bytes:
        """Pickle a value.

        Raises:
            SerializationError: It cannot be pickled.
        """
        return signed(self._pickled(value, operation), self.secret)

    def _pickled(self, value: Any, operation: str) -> bytes:
        if type(value) in PLAIN:
            return pickle.dumps(value, protocol=5)
        if self._way is not None:
            return bytes(self._way.pack(value, f"the value for {operation}"))
        try:
            return _dump(value)
        except Exception as error:
            raise SerializationError(
                f"The {type(value).__name__} for {operation} cannot be sent to other ranks: {error}. "
                "Send what it is made of, or make it on each rank.",
                what=type(value).__name__,
            ) from error

    def unpack(self, packed: Any, rank: int, operation: str) -> Any:
        """Return the value of a rank.

        Raises:
            CollectiveError: No rank of the group has sent it.
            SerializationError: It cannot be read here.
        """
        pickled = checked(packed, self.secret)
        try:
            return pickle.loads(pickled)
        except Exception as error:
            raise SerializationError(
                f"What rank {rank} has sent in {operation} cannot be read here: {type(error).__name__}: {error}. "
                "Most likely a class of it cannot be made from what it pickles.",
                what=f"the value of rank {rank}",
            ) from error


def _dump(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        with contextlib.suppress(ImportError):  # no dependency of ours: where it is missing pickle has the last word
            return bytes(importlib.import_module("cloudpickle").dumps(value, protocol=5))
        raise


# --- kinds ------------------------------------------------------------------------------------------------------------


def describe(value: Any, operation: str) -> Word:
    """Return a word with the kind, dtype, shape and device of a value, and its memory if that is small."""
    if is_tensor(value):
        _check_tensor(value, operation)
        word = Word(0, operation, "tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), value.device.type)
        if word.device == "cpu" and value.nbytes <= MAX_INLINE_BYTES:
            word = word._replace(payload=as_tensor(value).numpy().tobytes())
        return word
    if is_array(value):
        payload = value.tobytes() if value.nbytes <= MAX_INLINE_BYTES else None
        return Word(0, operation, "array", dtype_name(value.dtype), value.shape, payload=payload)
    return Word(0, operation, "value")


def rebuild(word: Word) -> Any:
    """Return the tensor or array whose memory came with its word."""
    assert word.payload is not None
    if word.kind == "array":
        import numpy as np

        return np.frombuffer(bytearray(word.payload), np.dtype(word.dtype)).reshape(word.shape)
    import torch

    if not word.payload:
        return empty_like(word, None)
    return torch.frombuffer(bytearray(word.payload), dtype=getattr(torch, word.dtype)).reshape(word.shape)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor whose memory can be sent. Sparse ones, and those of strange layouts, are pickled."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


def is_array(value: Any) -> bool:
    """Whether a value is an array whose memory can be sent: not of objects, and not of a class that holds more than that."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) not in (numpy.ndarray, numpy.memmap):
        return False
    return not value.dtype.hasobject and value.dtype.kind != "V"


def dtype_name(dtype: Any) -> str:
    """Return a text from which NumPy makes the same dtype."""
    return str(dtype.name) if dtype.kind in "biufc" and dtype.isnative else str(dtype.str)


def _check_tensor(value: Any, operation: str) -> None:
    if value.device.type not in ("cpu", "cuda"):
        raise InvalidTypeError(
            f"{operation} takes tensors on CPUs and CUDA devices; this one is on {value.device}. Move it first."
        )
    if hasattr(value, "device_mesh"):
        raise InvalidTypeError(
            f"{operation} got a DTensor, which is spread over the ranks already. Use its own methods, or pass tensor.to_local()."
        )


# --- memory -----------------------------------------------------------------------------------------------------------


def as_tensor(value: Any) -> Any:
    """Return the memory of a tensor or array as a tensor of bytes: of the value itself, if it is contiguous and writable."""
    import torch

    if not isinstance(value, torch.Tensor):
        import numpy as np

        # From memory that cannot be written to torch makes tensors with a warning.
        return torch.from_numpy(np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8))
    flat = whole(value).reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one element or none the stride may be anything


def whole(x: Any) -> Any:
    """Return a tensor's values in one piece of memory, without history: the tensor's own memory, if it is in one piece."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def empty_like(word: Word, device: Any) -> Any:
    """Return an uninitialised tensor or array as a word describes it; on `device` where that one is on a GPU."""
    if word.kind == "array":
        import numpy as np

        return np.empty(word.shape, np.dtype(word.dtype))
    import torch

    place = device if word.device == "cuda" else torch.device("cpu")
    return torch.empty(word.shape, dtype=getattr(torch, word.dtype), device=place)


def as_bytes(packed: bytes) -> Any:
    """Return a tensor of bytes with what was pickled."""
    import torch

    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def copy_of(x: Any) -> Any:
    """Return a copy of an array in one piece of memory: also of a memory map, and of what is read-only."""
    import numpy as np

    return np.array(x, order="C")
