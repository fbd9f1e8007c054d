"""How tensors are pickled as memory: large ones, and those of types that torch cannot unpickle."""

from __future__ import annotations

import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def reduced(value: Any) -> Any:
    """Return what a pickler's `reducer_override` does for a value, or `NotImplemented`.

    torch pickles tensors of float8, uint16 or complex32, say, but cannot unpickle them.
    """
    torch = sys.modules.get("torch")
    # a thread may just be importing it
    if torch is None or type(value) is not getattr(torch, "Tensor", None):
        return NotImplemented
    is_dense = value.device.type == "cpu" and value.layout is torch.strided
    if not is_dense or value.is_quantized or value.__dict__ or _returns(value.dtype):
        return NotImplemented
    return as_memory(value)


@functools.cache
def _returns(dtype: Any) -> bool:
    """Whether torch can unpickle tensors of a type; asked once for each."""
    import torch

    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype, device="cpu")))
    except Exception:  # of several kinds (torch 2.13)
        return False
    return True


def as_memory(tensor: Any) -> tuple[Any, ...]:
    """Return how to restore a dense CPU tensor from its memory."""
    import torch

    # contiguous: a column as `reshape` returns it has steps, and no bytes could be seen in it
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    memory = flat.view(torch.uint8).numpy()
    return _restored, (memory, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _restored(
    memory: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...], requires_grad: bool
) -> Any:
    import torch

    # a function may change its tensors, and torch knows no read-only ones
    own = memory if memory.flags.writeable else memory.copy()
    return torch.from_numpy(own).view(dtype).reshape(shape).requires_grad_(requires_grad)
