"""The headers that ranks exchange when they meet, and the forms in which values travel.

Every collective begins with a meeting: each rank writes one `Header` into a slot of fixed size, and
reads the headers of all. So all ranks come to the same judgment: either all go on, or all raise the
same error, and the group remains usable.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import pickle
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from raypool.errors import (
    CollectiveError,
    InvalidTypeError,
    InvalidValueError,
    SerializationError,
    whole_number,
)
from raypool.worker.running import ExchangeClient

SLOT_BYTES = 1024
"""The size of a slot. On one machine a meeting with 1024 bytes takes as long as one with 256, and
a value that fits needs no second message."""

SIGNATURE_BYTES = 16

MAX_NAMED = 8
"""The greatest number of ranks that an error names."""

END, BEGIN = "end", "begin"
"""Meetings outside the user's collectives: the function has returned; a call begins."""

AGREE = frozenset({"all_reduce", "reduce"})
"""Collectives in which all values must be of one kind, dtype, shape and device."""


def signed(data: bytes, secret: bytes) -> bytes:
    """Return the data behind a signature, which proves that a rank of the group has sent it."""
    return _signature(data, secret) + data


def checked(message: Any, secret: bytes) -> memoryview:
    """Return the data of a signed message, or raise a CollectiveError."""
    whole = memoryview(message)
    signature, rest = whole[:SIGNATURE_BYTES], whole[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(rest, secret)):
        raise CollectiveError(
            "A message arrived that no rank of this group has sent. It was not opened. Most likely"
            " another program has connected to a port of the group: see SECURITY.md.",
        )
    return rest


def _signature(data: Any, secret: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIGNATURE_BYTES, key=secret).digest()


class Header(NamedTuple):
    """A rank's announcement in a meeting: the number of the meeting, the operation, and a value.

    `kind`: "tensor", "array", "value" (anything that is pickled) or "" (nothing). `peer`: dst or
    src, -1 without. `op`: of a reduction. `size`: of a pickled value [bytes]. `payload`: that value
    itself, or the memory of a tensor or array on a CPU, if it fits into the slot.
    """

    number: int
    operation: str
    kind: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""
    peer: int = -1
    op: str = ""
    size: int = 0
    payload: bytes | None = None

    def write(self, secret: bytes) -> bytes:
        """Return the slot, without a payload that does not fit."""
        room = SLOT_BYTES - SIGNATURE_BYTES
        # a large payload is not pickled in vain
        header = self if self.size <= room else self._replace(payload=None)
        slot = pickle.dumps(tuple(header), protocol=5)
        if len(slot) > room:
            slot = pickle.dumps(tuple(header._replace(payload=None)), protocol=5)
        return signed(slot.ljust(room, b"\0"), secret)

    @staticmethod
    def read(slot: bytes, secret: bytes) -> Header:
        """Return the header in a slot, or raise a CollectiveError."""
        return Header(*pickle.loads(checked(slot, secret)))  # a pickle knows where it ends


class Disagreement(NamedTuple):
    """The fault of a meeting, as a text, and the ranks that did not join the others."""

    text: str
    missing: tuple[int, ...] = ()


def find_disagreement(headers: Sequence[Header]) -> Disagreement | None:
    """Judge the headers of all ranks; the judgment is the same on every rank."""
    first = headers[0]
    operation = first.operation
    if any(header.operation != operation or header.number != first.number for header in headers):
        return _of_operations(headers)
    if any(header.peer != first.peer for header in headers):
        way = "to" if operation in ("reduce", "gather") else "from"
        return Disagreement(
            _parties([f"{operation} {way} rank {header.peer}" for header in headers], first)
            + " All ranks must pass the same dst or src."
        )
    if operation in ("broadcast", "scatter"):
        return (_of_targets if operation == "broadcast" else _of_parts)(headers)
    if any(header.op != first.op for header in headers):
        ops = ("a function" if each.op == "function" else f"op={each.op!r}" for each in headers)
        return Disagreement(
            _parties([f"{operation} with {op}" for op in ops], first) + " All must use the same op."
        )
    if operation in AGREE and any(_form(header) != _form(first) for header in headers):
        return Disagreement(
            _parties([f"{operation} of {_what(header)}" for header in headers], first)
            + " All must pass the same kind, shape and dtype; all_gather accepts others."
        )
    return None


def _of_operations(headers: Sequence[Header]) -> Disagreement:
    ended = tuple(rank for rank, header in enumerate(headers) if header.operation == END)
    waits = [rank for rank, header in enumerate(headers) if header.operation != END]
    waiting = headers[waits[0] if waits else 0]
    if ended and len({headers[rank].operation for rank in waits}) == 1:
        return Disagreement(
            f"{list_ranks(ended).capitalize()} {_has(ended)} ended, {list_ranks(waits)}"
            f" {'waits' if len(waits) == 1 else 'wait'} for"
            f" {'it' if len(ended) == 1 else 'them'} in {waiting.operation}"
            f" (the {ordinal(waiting.number)} collective of this call). Every rank must call the"
            " same collectives: look for a return, a break or an if that not all ranks take, or"
            " for loops of different length.",
            ended,
        )
    differ = len({header.number for header in headers}) > 1 and not ended
    did = [
        f"{header.operation} (its {ordinal(header.number)} collective)"
        if differ
        else header.operation
        for header in headers
    ]
    return Disagreement(
        _parties(did, waiting)
        + " Every rank must call the same collectives in the same order: look for an if that not"
        " all ranks take, or an exception that one rank has caught.",
        ended,
    )


def _of_targets(headers: Sequence[Header]) -> Disagreement | None:
    source = headers[headers[0].peer]
    # only a tensor has to match: it is written into, and anything else is ignored
    odd = [
        rank
        for rank, header in enumerate(headers)
        if header.kind == "tensor" and _form(header) != _form(source)
    ]
    if not odd:
        return None
    forms: dict[str, list[int]] = {}
    for rank in odd:
        forms.setdefault(_what(headers[rank]), []).append(rank)
    passed = ", ".join(f"{list_ranks(ranks)} passed {form}" for form, ranks in forms.items())
    return Disagreement(
        f"Rank {source.peer} broadcasts {_what(source)}, but {passed} (the"
        f" {ordinal(source.number)} collective of this call). Pass a tensor like that of rank"
        f" {source.peer}, or None for a new one."
    )


def _of_parts(headers: Sequence[Header]) -> Disagreement | None:
    source = headers[headers[0].peer]  # its shape is the number of parts, () if it has no list
    if source.shape == (len(headers),):
        return None
    has = f"{source.shape[0]} parts" if source.shape else "no list of parts"
    return Disagreement(
        f"Rank {source.peer} scatters {has} to {len(headers)} ranks (the {ordinal(source.number)}"
        " collective of this call). Pass a list or tuple with one part for each rank, in rank"
        " order."
    )


def _form(header: Header) -> tuple[object, ...]:
    return header.kind, header.dtype, header.shape, header.device


def _what(header: Header) -> str:
    if header.kind in ("tensor", "array"):
        place = " on a GPU" if header.device == "cuda" else ""
        an = "an" if header.dtype[:1] in "aeiou" else "a"
        return f"{an} {header.dtype} {header.kind} {header.shape}{place}"
    return "a Python value" if header.kind else "nothing"


def _parties(did: Sequence[str], header: Header) -> str:
    ranks_by_deed: dict[str, list[int]] = {}
    for rank, deed in enumerate(did):
        ranks_by_deed.setdefault(deed, []).append(rank)
    text = ", ".join(
        f"{list_ranks(ranks)} {_has(ranks)} ended"
        if deed == END
        else f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {deed}"
        for deed, ranks in ranks_by_deed.items()
    )
    return f"{text[0].upper()}{text[1:]} (the {ordinal(header.number)} collective of this call)."


def list_ranks(ranks: Iterable[int], most: int = MAX_NAMED) -> str:
    """Return ranks as text, the first `most` by number.

    Example:
        >>> list_ranks([2]), list_ranks([0, 1, 3]), list_ranks([0, 1, 3, 4], most=2)
        ('rank 2', 'ranks 0, 1 and 3', 'ranks 0, 1 and 2 others')
    """
    named = [str(rank) for rank in ranks]
    if len(named) == 1:
        return f"rank {named[0]}"
    if len(named) > most:
        return f"ranks {', '.join(named[:most])} and {len(named) - most} others"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, ..."""
    is_teen = 10 <= number % 100 <= 20
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def check_rank(name: str, rank: Any, world_size: int) -> None:
    """Refuse an argument that is not a rank."""
    if whole_number(rank) is None:
        raise InvalidTypeError(f"{name}={rank!r} is a {type(rank).__name__}. Ranks are integers.")
    if not 0 <= rank < world_size:
        ranks = f"ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
        raise InvalidValueError(f"{name}={rank} is not a rank of this call: {ranks}.")


def check_other(name: str, rank: Any, own: int, world_size: int) -> None:
    """Refuse an argument that is not another rank."""
    check_rank(name, rank, world_size)
    if rank == own:
        raise InvalidValueError(
            f"{name}={rank} is this rank itself. Send to another one, or just keep the value."
        )


# --- values: tensors and arrays as their memory, everything else pickled --------------------------

PLAIN = frozenset({int, float, bool, str, type(None), complex})
"""Types that the plain pickle module suffices for."""

MAX_INLINE_BYTES = 512
"""A tensor or array up to this size travels in its header: a loss, say, or a few metrics."""


class Packer:
    """Pickles and signs values, and opens only signed pickles.

    With a pool it pickles as the pool does: classes of a notebook are in no module.
    """

    def __init__(self, secret: bytes, way: ExchangeClient | None = None) -> None:
        self.secret = secret
        self._way = way

    def pack(self, value: Any, operation: str) -> bytes:
        """Pickle a value, or raise a SerializationError."""
        if type(value) in PLAIN:
            pickled = pickle.dumps(value, protocol=5)
        elif self._way is not None:
            pickled = bytes(self._way.pack(value, f"the value for {operation}"))
        else:
            try:
                pickled = _dump(value)
            except Exception as error:
                raise SerializationError(
                    f"The {type(value).__name__} for {operation} cannot be sent to other ranks:"
                    f" {error}. Send the values that it is made of, or create it on each rank.",
                    what=type(value).__name__,
                ) from error
        return signed(pickled, self.secret)

    def unpack(self, packed: Any, rank: int, operation: str) -> Any:
        """Return the value of a rank, or raise a CollectiveError or SerializationError."""
        pickled = checked(packed, self.secret)
        try:
            return pickle.loads(pickled)
        except Exception as error:
            raise SerializationError(
                f"The value that rank {rank} sent in {operation} cannot be unpickled here:"
                f" {type(error).__name__}: {error}. Most likely its class cannot be restored from"
                " its pickle.",
                what=f"the value of rank {rank}",
            ) from error


def _dump(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        with contextlib.suppress(ImportError):  # without it the error of pickle counts
            return bytes(importlib.import_module("cloudpickle").dumps(value, protocol=5))
        raise


# --- kinds of values ------------------------------------------------------------------------------


def describe(value: Any, operation: str) -> Header:
    """Return the header of a value, with its memory if that is small."""
    if is_tensor(value):
        device = value.device.type
        if device not in ("cpu", "cuda"):
            raise InvalidTypeError(
                f"{operation} takes tensors on CPUs and CUDA devices; this one is on"
                f" {value.device}. Move it first."
            )
        if hasattr(value, "device_mesh"):
            raise InvalidTypeError(
                f"{operation} got a DTensor, which is already spread over the ranks. Use its own"
                " methods, or pass tensor.to_local()."
            )
        dtype = str(value.dtype).removeprefix("torch.")
        header = Header(0, operation, "tensor", dtype, tuple(value.shape), device)
        if device == "cpu" and value.nbytes <= MAX_INLINE_BYTES:
            header = header._replace(payload=as_tensor(value).numpy().tobytes())
        return header
    if is_array(value):
        payload = value.tobytes() if value.nbytes <= MAX_INLINE_BYTES else None
        dtype = value.dtype
        # a text from which NumPy makes the same dtype; for the usual ones, torch's name as well
        name = str(dtype.name) if dtype.kind in "biufc" and dtype.isnative else str(dtype.str)
        return Header(0, operation, "array", name, value.shape, payload=payload)
    return Header(0, operation, "value")


def rebuild(header: Header) -> Any:
    """Return the tensor or array whose memory came with its header."""
    assert header.payload is not None
    if header.kind == "array":
        import numpy as np

        array = np.frombuffer(bytearray(header.payload), np.dtype(header.dtype))
        return array.reshape(header.shape)
    import torch

    if not header.payload:
        return empty_like(header, None)  # torch.frombuffer refuses an empty buffer
    flat = torch.frombuffer(bytearray(header.payload), dtype=getattr(torch, header.dtype))
    return flat.reshape(header.shape)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor whose memory can be sent; sparse ones, say, are pickled."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported torch
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
    )


def is_array(value: Any) -> bool:
    """Whether a value is an array whose memory can be sent: not one of objects."""
    numpy = sys.modules.get("numpy")
    # no other class: it may hold more than its memory
    if numpy is None or type(value) not in (numpy.ndarray, numpy.memmap):
        return False
    return not value.dtype.hasobject and value.dtype.kind != "V"


# --- memory of values -----------------------------------------------------------------------------


def as_tensor(value: Any) -> Any:
    """Return the memory of a value, or of a contiguous and writable copy, as a tensor of bytes."""
    import torch

    if not isinstance(value, torch.Tensor):
        import numpy as np

        # torch warns about memory that cannot be written to
        flat = np.require(value, requirements=["C", "W"]).reshape(-1)
        return torch.from_numpy(flat.view(np.uint8))
    flat = whole(value).reshape(-1)
    # the stride of a single element is arbitrary, and `view` refuses some
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def whole(x: Any) -> Any:
    """Return a tensor without history in one piece of memory: its own, if that is in one piece."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def empty_like(header: Header, device: Any) -> Any:
    """Return an uninitialized tensor or array; on `device` if the sender's was on a GPU."""
    if header.kind == "array":
        import numpy as np

        return np.empty(header.shape, np.dtype(header.dtype))
    import torch

    place = device if header.device == "cuda" else torch.device("cpu")
    return torch.empty(header.shape, dtype=getattr(torch, header.dtype), device=place)


def as_bytes(packed: bytes) -> Any:
    """Return a tensor of bytes."""
    import torch

    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def copy_of(x: Any) -> Any:
    """Return a copy of an array, which may be mapped or read-only, in one piece of memory."""
    import numpy as np

    return np.array(x, order="C")
