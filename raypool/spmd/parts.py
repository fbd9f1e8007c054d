"""The parts of Composites that live in this process, by key and rank, and what can be said of a value without sending it.

On Ray a process has one rank; with "threads" and "inline" it has them all. There is no lock: every change is a single step of a
dict's, so that a finalizer, which runs in the midst of anything, may drop a Composite too.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from raypool.engine.runner import UNCHANGEABLE
from raypool.errors import CompositeError
from raypool.gpus.memory import kept

PLAIN_BYTES = 1024
"""A value that cannot change and takes no more memory than this [bytes] also stays with whoever holds the Composite."""

MAX_TEXT = 100
"""A description has at most so many characters: it is one line of several."""

_parts: dict[str, dict[int, Any]] = {}


class Description(NamedTuple):
    """What whoever holds a Composite knows of a part.

    `text`: its type, and its shape or size. `plain`: empty, or the value itself if it is a small one that cannot change.
    """

    text: str
    plain: tuple[Any, ...] = ()


class Gone(NamedTuple):
    """The answer of a worker that does not have the part."""


class PartOf(NamedTuple):
    """Stands in the arguments of an spmd call for a Composite: each rank puts its own part in its place (`find`)."""

    key: str


def keep(key: str, rank: int, value: Any) -> Description:
    """Keep a value as the part of a rank; return what can be said of it."""
    _parts.setdefault(key, {})[rank] = value
    description = describe(value)
    if not description.plain:  # else whoever holds the Composite has the value too
        kept.treasures[key] = None
        kept.all()
    return description


def find(key: str, rank: int) -> Any:
    """Return the part itself.

    Raises:
        CompositeError: It is not in this process.
    """
    try:
        return _parts[key][rank]
    except KeyError:
        raise CompositeError(
            f"The part of rank {rank} of a Composite is not on this worker any more: it was replaced, or the part was deleted, "
            "after the call was handed in. Make it again in an spmd call, or assign it.",
            rank=rank,
        ) from None


def read(key: str, rank: int) -> Any:
    """Return the part as it is to travel, a tensor on a GPU as a copy on the CPU; `Gone` if it is not here."""
    try:
        value = _parts[key][rank]
    except KeyError:
        return Gone()
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(type(value), torch.Tensor) and value.is_cuda:
        return value.detach().cpu().requires_grad_(value.requires_grad)
    return value


def remove(key: str, rank: int) -> None:
    """Let go of the part of one rank, if it is here."""
    own = _parts.get(key, {})
    own.pop(rank, None)
    if not own:
        drop(key)
    _empty_cache()


def drop(key: str) -> None:
    """Let go of all parts that this process has of a Composite."""
    _parts.pop(key, None)
    kept.treasures.pop(key, None)


def forget(key: str) -> None:
    """Let go of them, in a process that belongs to a worker: the memory of its GPU is free for others then."""
    drop(key)
    _empty_cache()


def _empty_cache() -> None:
    """Give back what torch holds of the GPU for later: others on this GPU, also other processes, see it as taken."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# --- what can be said of a value ----------------------------------------------------------------------------------------


def describe(value: Any) -> Description:
    """Return what can be said of a value; it may be of any class of the user's, which may refuse to say anything."""
    try:
        text = _text_of(value)
    except Exception:
        text = type(value).__name__
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT - 3]}..."
    is_plain = type(value) in UNCHANGEABLE and sys.getsizeof(value) <= PLAIN_BYTES
    return Description(text, (value,) if is_plain else ())


def _text_of(value: Any) -> str:
    kind, name = type(value), type(value).__name__
    torch = sys.modules.get("torch")
    if value is None:
        return "None"
    if kind is str:
        return f"str of {_count(len(value), 'character')}"
    if issubclass(kind, (dict, list, tuple, set, frozenset, bytes, bytearray)):
        return f"{name} of {len(value)}"
    if torch is not None and issubclass(kind, torch.nn.Module):
        return _text_of_module(value)
    return _text_of_array(value) if hasattr(kind, "shape") else name


def _text_of_module(module: Any) -> str:
    parameters = list(module.parameters())
    count = _count(sum(parameter.numel() for parameter in parameters), "parameter")
    return f"{type(module).__name__}, {count}{_device_of(parameters[0]) if parameters else ''}"


def _text_of_array(array: Any) -> str:
    """Describe what has a shape: also tables, and whatever others call so."""
    kind, name = type(array), type(array).__name__
    if not isinstance(array.shape, tuple) or not all(type(size) is int for size in array.shape):
        return name
    dtype = str(array.dtype).removeprefix("torch.") if hasattr(kind, "dtype") else ""
    if dtype == name:  # a number of NumPy's
        return name
    torch = sys.modules.get("torch")
    device = _device_of(array) if torch is not None and issubclass(kind, torch.Tensor) else ""
    return f"{name} {tuple(array.shape)} {dtype}".rstrip() + device


def _device_of(tensor: Any) -> str:
    return "" if tensor.device.type == "cpu" else f" on {tensor.device}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
