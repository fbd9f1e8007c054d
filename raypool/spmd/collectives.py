"""The collectives and messages of `SpmdContext`: first a meeting of the ranks, then the data.

In the meeting each rank says which operation it is in, and with which value.

Tensors and arrays travel as their memory: tensors on GPUs through NCCL where every rank has a GPU
of its own, everything else through gloo. What is pickled and small has travelled with the meeting
already.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.spmd.group import Group
from raypool.spmd.transport import DATA_TAG, HEAD_TAG, NoTransport, Post, Transport
from raypool.spmd.wire import (
    SLOT_BYTES,
    Header,
    as_bytes,
    as_tensor,
    copy_of,
    describe,
    empty_like,
    is_array,
    is_tensor,
    rebuild,
    whole,
)

Op = str | Callable[[Any, Any], Any]

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
    "mean": operator.add,
}
"""The functions that fold two plain values."""

NATIVE = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}
)
"""Types that gloo and NCCL reduce, besides complex numbers (pairs of floats). Others are gathered
and folded."""


# --- reductions -----------------------------------------------------------------------------------


def all_reduce(group: Group, x: Any, op: Op) -> Any:
    """Combine the values of all ranks; the same result on every rank."""
    with group.operation("all_reduce"):
        x = _averageable(x, op)
        words, packed = meet(group, x, "all_reduce", op=_op_name(op))
        if words[0].kind == "value":
            return _fold(all_values(group, words, packed), op, group.world_size)
        if not _is_native(words[0], op) or _are_complete(words):
            return _into(x, _fold(_all_gathered(group, words, x), op, group.world_size))
        return _reduced(group, x, op, lambda lines, part, native: lines.all_reduce(part, native))


def reduce(group: Group, x: Any, dst: int, op: Op) -> Any:
    """Combine the values of all ranks on dst."""
    with group.operation("reduce"):
        x = _averageable(x, op)
        words, packed = meet(group, x, "reduce", peer=dst, op=_op_name(op))
        if words[0].kind != "value" and _is_native(words[0], op) and not _are_complete(words):
            # gloo writes into it
            spare = x if group.rank == dst or not is_tensor(x) else x.detach().clone()
            result = _reduced(
                group, spare, op, lambda lines, part, native: lines.reduce(part, dst, native)
            )
            return result if group.rank == dst else None
        values = _gathered(group, words, x, packed, dst)
        if values is None:
            return None
        result = _fold(values, op, group.world_size)
        return result if words[0].kind == "value" else _into(x, result)


def _reduced(group: Group, x: Any, op: Op, run: Callable[[Transport, Any, str], None]) -> Any:
    """Reduce a tensor in place, or a copy of an array."""
    import torch

    own = x if is_tensor(x) else torch.from_numpy(copy_of(x))
    part = whole(own)
    lines, here = lines_for(group, part, is_on_gpu=own.device.type == "cuda")
    pieces, native = _as_native(here, op)
    if pieces.numel():
        run(lines, pieces, native)
    if here is not part:
        part.copy_(here)
    if op == "mean":
        part /= group.world_size
    if part is not own and part.data_ptr() != own.data_ptr():
        with torch.no_grad():
            own.copy_(part)
    return x if is_tensor(x) else own.numpy()


def _as_native(x: Any, op: Op) -> tuple[Any, str]:
    """Return the memory of a tensor as something that gloo and NCCL reduce, and the operation that
    does it.
    """
    import torch

    assert isinstance(op, str)
    if x.dtype == torch.bool:  # as NumPy has it: a sum is "or", a product is "and"
        return x.view(torch.uint8), {"sum": "max", "product": "min"}.get(op, op)
    if x.is_complex():
        x = torch.view_as_real(x)
    return x, "sum" if op == "mean" else op


def _is_native(word: Header, op: Op) -> bool:
    if not isinstance(op, str):
        return False
    return word.dtype in NATIVE or (
        word.dtype in ("complex64", "complex128") and op in ("sum", "mean")
    )


def _averageable(x: Any, op: Op) -> Any:
    """Check the operation, and return x in a form whose mean can be taken.

    Raises:
        InvalidValueError, InvalidTypeError: There is no such operation, or not for these values.
    """
    if not callable(op) and (not isinstance(op, str) or op not in OPS):
        raise InvalidValueError(
            f"op={op!r} is none of {', '.join(map(repr, OPS))}, nor a function of two values."
        )
    is_complex = (is_tensor(x) and x.is_complex()) or (is_array(x) and x.dtype.kind == "c")
    if is_complex and op in ("min", "max"):
        raise InvalidTypeError(
            f"Complex numbers have no order, so op={op!r} cannot be taken of them. Take it of their"
            " abs()."
        )
    if op != "mean":
        return x
    if is_tensor(x) and not (x.is_floating_point() or x.is_complex()):
        raise InvalidTypeError(
            f"The mean of {x.dtype} tensors does not fit into one, and it is taken in place. Pass"
            " x.float(), or use op='sum'."
        )
    return x.astype("float64") if is_array(x) and x.dtype.kind in "biu" else x


def _are_complete(words: Sequence[Header]) -> bool:
    """Whether all values have arrived inside their words."""
    return all(word.payload is not None for word in words)


def _op_name(op: Op) -> str:
    return op if isinstance(op, str) else "function"


def _fold(values: Sequence[Any], op: Op, world_size: int) -> Any:
    """Combine the values, in rank order."""
    if not isinstance(op, str):
        return functools.reduce(op, values)
    result = functools.reduce(_element_wise(values[0], op) or OPS[op], values)
    return result / world_size if op == "mean" else result


def _element_wise(value: Any, op: str) -> Callable[[Any, Any], Any] | None:
    """Return the function that combines two tensors or arrays, None for other values."""
    by_name: dict[str, Callable[[Any, Any], Any]]
    if is_tensor(value):
        import torch

        by_name = {
            "sum": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
            "mean": torch.add,
        }
        return by_name[op]
    if is_array(value):
        import numpy as np

        by_name = {
            "sum": np.add,
            "product": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
            "mean": np.add,
        }
        return by_name[op]
    return None


def _into(x: Any, result: Any) -> Any:
    """Put a folded result into the tensor that was passed, if it fits."""
    if not (
        is_tensor(x) and is_tensor(result) and x.shape == result.shape and x.dtype == result.dtype
    ):
        return result
    import torch

    with torch.no_grad():
        return x.copy_(result)


# --- one to all, all to one, all to all -----------------------------------------------------------


def barrier(group: Group) -> None:
    """Wait until all ranks have arrived."""
    with group.operation("barrier"):
        group.meet(Header(0, "barrier"))


def broadcast(group: Group, x: Any, src: int) -> Any:
    """Give every rank the value of src."""
    with group.operation("broadcast"):
        is_source = group.rank == src
        if is_source or is_tensor(x):
            words, packed = meet(group, x, "broadcast", peer=src)
        else:  # another rank's x matters only if it is a tensor: the values go into it
            words, packed = group.meet(Header(0, "broadcast", peer=src)), None
        word = words[src]
        if word.kind == "value":
            return one_value(group, word, packed, src)
        if is_source:
            _give(group, word, x, src)
            return x if word.kind == "tensor" else copy_of(x)
        if word.payload is not None:
            return _into(x, rebuild(word))
        return _take(group, word, x if is_tensor(x) else empty_like(word, group.device), src)


def _give(group: Group, word: Header, x: Any, src: int) -> None:
    """Send the memory of a tensor or array to all, unless it traveled in its word."""
    if word.payload is not None:
        return
    lines, here = lines_for(group, as_tensor(x), is_on_gpu=word.device == "cuda")
    if here.numel():
        lines.broadcast(here, src)


def _take(group: Group, word: Header, target: Any, src: int) -> Any:
    """Write the value that src broadcasts into the memory of a tensor or array."""
    part = as_tensor(target)
    lines, here = lines_for(group, part, is_on_gpu=word.device == "cuda")
    if here.numel():
        lines.broadcast(here, src)
    write_back(target, part, here)
    return target


def all_gather(group: Group, x: Any) -> list[Any]:
    """Give every rank the values of all, in rank order."""
    with group.operation("all_gather"):
        words, packed = meet(group, x, "all_gather")
        if any(word.kind == "value" for word in words):
            values = all_values(group, words, packed)
            return [
                value if word.kind == "value" else _from(group, words, x, rank)
                for rank, (value, word) in enumerate(zip(values, words, strict=True))
            ]
        return _all_gathered(group, words, x)


def _all_gathered(group: Group, words: Sequence[Header], x: Any) -> list[Any]:
    """Return the tensors or arrays of all ranks."""
    if _are_complete(words):
        return [rebuild(word) for word in words]
    if any(word[2:6] != words[0][2:6] for word in words):  # kind, dtype, shape, device
        return [_from(group, words, x, rank) for rank in range(group.world_size)]
    values = [empty_like(word, group.device) for word in words]
    lines, here = lines_for(group, as_tensor(x), is_on_gpu=all_on_gpus(words))
    parts = [as_tensor(value) for value in values]
    arrived = [lines_for(group, part, is_on_gpu=all_on_gpus(words))[1] for part in parts]
    if here.numel():
        lines.all_gather(arrived, here)
    for value, part, entry in zip(values, parts, arrived, strict=True):
        write_back(value, part, entry)
    return values


def _from(group: Group, words: Sequence[Header], x: Any, src: int) -> Any:
    """Return the tensor or array of one rank, on every rank; a new one also there."""
    if group.rank != src and words[src].payload is not None:
        return rebuild(words[src])
    if group.rank != src:
        return _take(group, words[src], empty_like(words[src], group.device), src)
    _give(group, words[src], x, src)
    return duplicate(group, x, None, "all_gather")


def gather(group: Group, x: Any, dst: int) -> list[Any] | None:
    """Give dst the values of all, in rank order."""
    with group.operation("gather"):
        words, packed = meet(group, x, "gather", peer=dst)
        return _gathered(group, words, x, packed, dst)


def _gathered(
    group: Group, words: Sequence[Header], x: Any, packed: bytes | None, dst: int
) -> list[Any] | None:
    if group.rank == dst:
        return [
            (
                duplicate(group, x, packed, "gather")
                if rank == dst
                else receive_body(group, word, rank)
            )
            for rank, word in enumerate(words)
        ]
    rest = body(words[group.rank], x, packed)
    if rest is not None:
        exchange_bodies(group, [(rest, dst)], [])
    return None


def scatter(group: Group, parts: Any, src: int) -> Any:
    """Give each rank its part of the values of src."""
    with group.operation("scatter"):
        is_source = group.rank == src
        has_parts = is_source and isinstance(parts, (list, tuple))
        messages = [message(group, part, "scatter") for part in parts] if has_parts else []
        group.meet(Header(0, "scatter", peer=src, shape=(len(messages),) if has_parts else ()))
        if not is_source:
            return receive_body(group, receive_head(group, src), src)
        works = [
            post_head(group, sent.slot, rank) for rank, sent in enumerate(messages) if rank != src
        ]
        bodies = [
            (sent.body, rank)
            for rank, sent in enumerate(messages)
            if rank != src and sent.body is not None
        ]
        exchange_bodies(group, bodies, works)
        return duplicate(group, parts[src], messages[src].packed, "scatter")


# --- one to one -----------------------------------------------------------------------------------


def send(group: Group, x: Any, dst: int) -> None:
    """Send a value to another rank."""
    with group.operation("send", dst):
        sent = message(group, x, "send")
        works = [post_head(group, sent.slot, dst)]
        exchange_bodies(group, [] if sent.body is None else [(sent.body, dst)], works)


def receive(group: Group, src: int) -> Any:
    """Return the next value that another rank sends."""
    with group.operation("receive", src):
        return receive_body(group, receive_head(group, src), src)


def send_receive(group: Group, x: Any, dst: int | None, src: int | None) -> Any:
    """Send to one rank, and return the value that another one sends; None leaves out that side.

    No rank waits for its own message to be sent before it receives: no pattern of ranks blocks.
    """
    with group.operation("send_receive", src if src is not None else dst):
        if dst == src == group.rank:
            return duplicate(group, x, word_of(group, x, "send_receive")[1], "send_receive")
        works: list[Any] = []
        from_gpu: list[Post] = []
        if dst is not None:
            sent = message(group, x, "send_receive")
            works.append(post_head(group, sent.slot, dst))
            if sent.body is not None and goes_by_nccl(group, sent.body):
                from_gpu = [(sent.body, dst)]
            elif sent.body is not None:
                works += group.lines.post([(sent.body.cpu(), dst)], [], DATA_TAG)
        received = _receive_beside(group, src, from_gpu)
        group.lines.finish(works)
        return received


def _receive_beside(group: Group, src: int | None, from_gpu: list[Post]) -> Any:
    """Receive, and send from the GPU: in one batch where both go from GPU to GPU, so that neither
    waits for the other.
    """
    word = None if src is None else receive_head(group, src)
    if not from_gpu or group.nccl is None:
        return None if word is None or src is None else receive_body(group, word, src)
    if word is not None and src is not None and word.kind == "tensor" and word.device == "cuda":
        target = empty_like(word, group.device)
        part = as_tensor(target)
        group.nccl.exchange(from_gpu, [(part, src)] if part.numel() else [])
        return target
    group.nccl.exchange(from_gpu, [])
    return None if word is None or src is None else receive_body(group, word, src)


# --- messages: a header, and the memory that follows if it did not fit ----------------------------


class Message(NamedTuple):
    """A message to one rank: a slot, and the memory that did not fit into it."""

    slot: bytes
    packed: bytes | None
    body: Any


def message(group: Group, x: Any, operation: str) -> Message:
    """Return the message that carries a value."""
    word, packed = word_of(group, x, operation)
    slot = word.write(group.packer.secret)
    return Message(slot, packed, body(Header.read(slot, group.packer.secret), x, packed))


def body(word: Header, x: Any, packed: bytes | None) -> Any:
    """Return the memory that follows a word, as a tensor of bytes; None if nothing follows."""
    if word.payload is not None:
        return None
    memory = as_tensor(x) if packed is None else as_bytes(packed)
    return memory if memory.numel() else None


def post_head(group: Group, slot: bytes, dst: int) -> Any:
    """Begin to send a word."""
    return group.lines.post([(as_bytes(slot), dst)], [], HEAD_TAG)[0]


def receive_head(group: Group, src: int) -> Header:
    """Return the next word from a rank."""
    import torch

    slot = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    group.lines.finish(group.lines.post([], [(slot, src)], HEAD_TAG))
    return Header.read(slot.numpy().tobytes(), group.packer.secret)


def receive_body(group: Group, word: Header, src: int) -> Any:
    """Return the value that a word announces, from the word or from the message after it."""
    if word.payload is not None:
        return in_word(group, word, src)
    if word.kind == "value":
        packed = _empty_bytes(word.size)
        group.lines.exchange([], [(packed, src)])
        return group.packer.unpack(packed.numpy(), src, word.operation)
    target = empty_like(word, group.device)
    part = as_tensor(target)
    if not part.numel():
        return target
    if word.device == "cuda" and group.nccl is not None:
        group.nccl.exchange([], [(part, src)])
        return target
    here = part.cpu()
    group.lines.exchange([], [(here, src)])
    write_back(target, part, here)
    return target


def in_word(group: Group, word: Header, src: int) -> Any:
    """Return the value that came with its word."""
    return (
        group.packer.unpack(word.payload, src, word.operation)
        if word.kind == "value"
        else rebuild(word)
    )


def exchange_bodies(group: Group, bodies: Sequence[Post], works: Sequence[Any]) -> None:
    """Send memory; wait until this, and everything else that was posted, has been sent."""
    from_gpu = [post for post in bodies if goes_by_nccl(group, post[0])]
    others = [(body.cpu(), dst) for body, dst in bodies if not goes_by_nccl(group, body)]
    pending = [*works, *group.lines.post(others, [], DATA_TAG)]
    if from_gpu and group.nccl is not None:
        group.nccl.exchange(from_gpu, [])
    group.lines.finish(pending)


def goes_by_nccl(group: Group, memory: Any) -> bool:
    """Whether it is on a GPU, from which NCCL can send it."""
    return group.nccl is not None and memory.device.type == "cuda"


# --- shared parts ---------------------------------------------------------------------------------


def word_of(
    group: Group, x: Any, operation: str, peer: int = -1, op: str = ""
) -> tuple[Header, bytes | None]:
    """Return the word for a value, and the pickled value if it has to be pickled."""
    word = describe(x, operation)._replace(peer=peer, op=op)
    if word.kind != "value":
        return word, None
    packed = group.packer.pack(x, operation)
    return word._replace(size=len(packed), payload=packed), packed


def meet(
    group: Group, x: Any, operation: str, peer: int = -1, op: str = ""
) -> tuple[list[Header], bytes | None]:
    """Meet the other ranks over a value; return the words of all, and the pickled value."""
    word, packed = word_of(group, x, operation, peer, op)
    return group.meet(word), packed


def all_values(group: Group, words: Sequence[Header], packed: bytes | None) -> list[Any]:
    """Return the pickled values of all ranks that have one."""
    return [
        one_value(group, word, packed, rank) if word.kind == "value" else None
        for rank, word in enumerate(words)
    ]


def one_value(group: Group, word: Header, packed: bytes | None, src: int) -> Any:
    """Return the pickled value of one rank, on every rank."""
    if word.payload is not None:
        return group.packer.unpack(word.payload, src, word.operation)
    body = as_bytes(packed) if group.rank == src and packed is not None else _empty_bytes(word.size)
    group.lines.broadcast(body, src)
    return group.packer.unpack(body.numpy(), src, word.operation)


def duplicate(group: Group, x: Any, packed: bytes | None, operation: str) -> Any:
    """Return a copy of a rank's own value, such as the other ranks get."""
    if packed is not None:
        return group.packer.unpack(packed, group.rank, operation)
    return x.detach().clone() if is_tensor(x) else copy_of(x)


def _empty_bytes(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8)


def all_on_gpus(words: Sequence[Header]) -> bool:
    """Whether all bring tensors on GPUs."""
    return all(word.device == "cuda" for word in words)


def lines_for(group: Group, part: Any, is_on_gpu: bool) -> tuple[Transport, Any]:
    """Return the transport for a tensor, and the tensor on a device that it can reach.

    Without NCCL (ranks that share a GPU, or a process) tensors on a GPU go through the CPU.
    """
    if is_on_gpu and group.nccl is not None:
        return group.nccl, part
    return group.lines, part if isinstance(group.lines, NoTransport) else part.cpu()


def write_back(target: Any, part: Any, here: Any) -> None:
    """Copy values that arrived on another device to their target."""
    if here is not part:
        part.copy_(here)
    if is_tensor(target) and part.data_ptr() != target.data_ptr() and part.numel():
        import torch

        with torch.no_grad():
            target.copy_(part.view(target.dtype).reshape(target.shape))
