"""The collectives and messages of `SpmdContext`: first a meeting of the ranks, then the data.

In the meeting each rank says which operation it is in, and with which value. Small values travel
with the meeting. Larger ones follow, as their memory or pickled: tensors on GPUs through NCCL if
each rank has its own GPU, all else through gloo.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raypool.errors import InvalidTypeError, InvalidValueError, SerializationError
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

NATIVE = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}
)
"""Types that gloo and NCCL reduce. Others are gathered and folded, but for complex numbers, which
are pairs of floats."""


# --- reductions -----------------------------------------------------------------------------------


def all_reduce(group: Group, x: Any, op: Op) -> Any:
    """Combine the values of all ranks; the same result on every rank."""
    with group.operation("all_reduce"):
        x = _averageable(x, op)
        headers, packed = meet(group, x, "all_reduce", op=_op_name(op))
        if headers[0].kind == "value":
            return _fold(all_values(group, headers, packed), op, group.world_size)
        if not _is_native(headers[0], op) or _are_complete(headers):
            return _into(x, _fold(_all_gathered(group, headers, x), op, group.world_size))
        return _reduced(group, x, op)


def reduce(group: Group, x: Any, dst: int, op: Op) -> Any:
    """Combine the values of all ranks on dst."""
    with group.operation("reduce"):
        x = _averageable(x, op)
        headers, packed = meet(group, x, "reduce", peer=dst, op=_op_name(op))
        if headers[0].kind != "value" and _is_native(headers[0], op) and not _are_complete(headers):
            # gloo overwrites it on the other ranks, too
            spare = x if group.rank == dst or not is_tensor(x) else x.detach().clone()
            result = _reduced(group, spare, op, dst)
            return result if group.rank == dst else None
        values = _gathered(group, headers, x, packed, dst)
        if values is None:
            return None
        result = _fold(values, op, group.world_size)
        return result if headers[0].kind == "value" else _into(x, result)


def _reduced(group: Group, x: Any, op: Op, dst: int | None = None) -> Any:
    """Reduce a tensor in place, or a copy of an array: on all ranks, or on dst."""
    import torch

    assert isinstance(op, str)
    own = x if is_tensor(x) else torch.from_numpy(copy_of(x))
    part = whole(own)
    transport, here = transport_for(group, part, is_on_gpu=own.device.type == "cuda")
    if here.numel():
        reduce: Callable[..., None] = transport.all_reduce
        if dst is not None:
            reduce = functools.partial(transport.reduce, dst=dst)
        _reduce_memory(reduce, here, op, group.world_size)
    if here is not part:
        part.copy_(here)
    if part is not own and part.data_ptr() != own.data_ptr():
        with torch.no_grad():
            own.copy_(part)
    return x if is_tensor(x) else own.numpy()


def _reduce_memory(reduce: Callable[..., None], x: Any, op: str, world_size: int) -> None:
    """Reduce a tensor in place, to what NumPy has."""
    import torch

    if x.dtype == torch.bool:  # a sum is "or", a product is "and"
        reduce(x.view(torch.uint8), op={"sum": "max", "product": "min"}.get(op, op))
    elif op in ("min", "max") and x.is_floating_point():
        is_nan = x.isnan().view(torch.uint8)
        reduce(x, op=op)  # may drop NaN
        reduce(is_nan, op="max")
        x[is_nan.bool()] = torch.nan
    elif op == "mean" and x.dtype == torch.float16:  # whose greatest number a sum may exceed
        wide = x.float()
        reduce(wide, op="sum")
        x.copy_(wide / world_size)
    else:
        reduce(torch.view_as_real(x) if x.is_complex() else x, op="sum" if op == "mean" else op)
        if op == "mean":
            x /= world_size


def _is_native(header: Header, op: Op) -> bool:
    return isinstance(op, str) and (
        header.dtype in NATIVE
        or (header.dtype in ("complex64", "complex128") and op in ("sum", "mean"))
    )


def _averageable(x: Any, op: Op) -> Any:
    """Check the operation; return x, as floats if its mean is taken."""
    if not callable(op) and (not isinstance(op, str) or op not in OPS):
        raise InvalidValueError(
            f"op must be {', '.join(map(repr, OPS))} or a function of two values, not {op!r}."
        )
    is_complex = (is_tensor(x) and x.is_complex()) or (is_array(x) and x.dtype.kind == "c")
    if is_complex and op in ("min", "max"):
        raise InvalidTypeError(
            f"Complex numbers have no order, so op={op!r} does not apply to them. Use their abs()."
        )
    if op != "mean":
        return x
    if is_tensor(x) and not (x.is_floating_point() or x.is_complex()):
        raise InvalidTypeError(
            f"The mean of {x.dtype} tensors cannot be written into one, as it is not an integer."
            " Pass x.float(), or use op='sum'."
        )
    return x.astype("float64") if is_array(x) and x.dtype.kind in "biu" else x


def _are_complete(headers: Sequence[Header]) -> bool:
    """Whether all values arrived in their headers."""
    return all(header.payload is not None for header in headers)


def _op_name(op: Op) -> str:
    return op if isinstance(op, str) else "function"


def _fold(values: Sequence[Any], op: Op, world_size: int) -> Any:
    """Combine the values, in rank order."""
    if not isinstance(op, str):
        return functools.reduce(op, values)
    combine: Callable[[Any, Any], Any] = OPS[op]
    if is_tensor(values[0]):  # Python's own min and max compare tensors and arrays as a whole
        import torch

        combine = {"min": torch.minimum, "max": torch.maximum}.get(op, combine)
        if op == "mean" and values[0].dtype == torch.float16:
            return torch.stack(tuple(values)).mean(0, dtype=torch.float32).half()
    elif is_array(values[0]):
        import numpy as np

        combine = {"min": np.minimum, "max": np.maximum}.get(op, combine)
        if op == "mean" and values[0].dtype == np.float16:
            return np.mean(values, axis=0)  # adds float16 as float32
    result = functools.reduce(combine, values)
    return result / world_size if op == "mean" else result


def _into(x: Any, result: Any) -> Any:
    """Write a result into the tensor that was passed, if it fits."""
    if is_tensor(x) and is_tensor(result) and (x.shape, x.dtype) == (result.shape, result.dtype):
        import torch

        with torch.no_grad():
            return x.copy_(result)
    return result


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
            headers, packed = meet(group, x, "broadcast", peer=src)
        else:  # another rank's x matters only if it is a tensor: the values go into it
            headers, packed = group.meet(Header(0, "broadcast", peer=src)), None
        header = headers[src]
        if header.kind != "tensor" or not is_tensor(x):
            return _shared(group, header, x, packed, src)
        if is_source:
            _give(group, header, x, src)
            return x
        return _take(group, header, x, src) if header.payload is None else _into(x, rebuild(header))


def _give(group: Group, header: Header, x: Any, src: int) -> None:
    """Broadcast a tensor or array, unless it traveled in its header."""
    if header.payload is not None:
        return
    transport, here = transport_for(group, as_tensor(x), is_on_gpu=header.device == "cuda")
    if here.numel():
        transport.broadcast(here, src)


def _take(group: Group, header: Header, target: Any, src: int) -> Any:
    """Receive a broadcast into the memory of a tensor or array."""
    part = as_tensor(target)
    transport, here = transport_for(group, part, is_on_gpu=header.device == "cuda")
    if here.numel():
        transport.broadcast(here, src)
    write_back(target, part, here)
    return target


def all_gather(group: Group, x: Any) -> list[Any]:
    """Give every rank the values of all, in rank order."""
    with group.operation("all_gather"):
        headers, packed = meet(group, x, "all_gather")
        form = headers[0][2:6]  # kind, dtype, shape, device
        if form[0] != "value" and all(header[2:6] == form for header in headers):
            return _all_gathered(group, headers, x)
        return _of_each(headers, lambda header, rank: _shared(group, header, x, packed, rank))


def _of_each(headers: Sequence[Header], receive: Callable[[Header, int], Any]) -> list[Any]:
    """Return the values of all ranks.

    Raises:
        SerializationError: A value cannot be unpickled; all of them have been received.
    """
    values: list[Any] = []
    problem: SerializationError | None = None
    for rank, header in enumerate(headers):
        try:
            values.append(receive(header, rank))
        except SerializationError as error:
            problem = problem or error
    try:
        if problem is not None:
            raise problem
        return values
    finally:
        del problem  # its traceback holds this frame


def _all_gathered(group: Group, headers: Sequence[Header], x: Any) -> list[Any]:
    """Return the tensors or arrays of all ranks, which have one form."""
    if _are_complete(headers):
        return [rebuild(header) for header in headers]
    is_on_gpu = headers[0].device == "cuda"
    values = [empty_like(header, group.device) for header in headers]
    transport, here = transport_for(group, as_tensor(x), is_on_gpu)
    parts = [as_tensor(value) for value in values]
    arrived = [transport_for(group, part, is_on_gpu)[1] for part in parts]
    if here.numel():
        transport.all_gather(arrived, here)
    for value, part, entry in zip(values, parts, arrived, strict=True):
        write_back(value, part, entry)
    return values


def _shared(group: Group, header: Header, x: Any, packed: bytes | None, src: int) -> Any:
    """Return the value of one rank on every rank; a new one on that rank, too."""
    if header.kind == "value":
        pickled: Any = header.payload
        if pickled is None:
            own = packed if group.rank == src else None
            body = _empty_bytes(header.size) if own is None else as_bytes(own)
            group.transport.broadcast(body, src)
            pickled = body.numpy()
        return group.packer.unpack(pickled, src, header.operation)
    if group.rank == src:
        _give(group, header, x, src)
        return duplicate(group, x, None, header.operation)
    if header.payload is not None:
        return rebuild(header)
    return _take(group, header, empty_like(header, group.device), src)


def gather(group: Group, x: Any, dst: int) -> list[Any] | None:
    """Give dst the values of all, in rank order."""
    with group.operation("gather"):
        headers, packed = meet(group, x, "gather", peer=dst)
        return _gathered(group, headers, x, packed, dst)


def _gathered(
    group: Group, headers: Sequence[Header], x: Any, packed: bytes | None, dst: int
) -> list[Any] | None:
    if group.rank == dst:
        return _of_each(
            headers,
            lambda header, rank: (
                duplicate(group, x, packed, "gather")
                if rank == dst
                else receive_body(group, header, rank)
            ),
        )
    rest = body(headers[group.rank], x, packed)
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
        others = [(sent, rank) for rank, sent in enumerate(messages) if rank != src]
        works = [post_head(group, sent.slot, rank) for sent, rank in others]
        bodies = [(sent.body, rank) for sent, rank in others if sent.body is not None]
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
    """Send to one rank, and return the value that another one sends; None leaves out that side."""
    with group.operation("send_receive", src if src is not None else dst):
        if dst == src == group.rank:
            return duplicate(group, x, header_of(group, x, "send_receive")[1], "send_receive")
        works: list[Any] = []  # waited for after receiving, so no pattern of ranks blocks
        from_gpu: list[Post] = []
        if dst is not None:
            sent = message(group, x, "send_receive")
            works.append(post_head(group, sent.slot, dst))
            if sent.body is not None and goes_by_nccl(group, sent.body):
                from_gpu = [(sent.body, dst)]
            elif sent.body is not None:
                works += group.transport.post([(sent.body.cpu(), dst)], [], DATA_TAG)
        try:
            received = _receive_beside(group, src, from_gpu)
        except SerializationError:  # the other rank gets its message all the same
            group.finish(works, dst)
            raise
        group.finish(works, dst)
        return received


def _receive_beside(group: Group, src: int | None, from_gpu: list[Post]) -> Any:
    """Receive, and send from the GPU."""
    header = None if src is None else receive_head(group, src)
    if from_gpu and group.nccl is not None:
        if src is not None and header is not None and header.device == "cuda":
            # in one batch, so that neither direction waits for the other
            target = empty_like(header, group.device)
            part = as_tensor(target)
            group.nccl.exchange(from_gpu, [(part, src)] if part.numel() else [])
            return target
        group.nccl.exchange(from_gpu, [])
    return None if src is None or header is None else receive_body(group, header, src)


# --- messages: a header, and the memory that follows if it did not fit ----------------------------


class Message(NamedTuple):
    """A message to one rank: its header's slot, and the memory that did not fit there."""

    slot: bytes
    packed: bytes | None
    body: Any


def message(group: Group, x: Any, operation: str) -> Message:
    """Return the message that carries a value."""
    header, packed = header_of(group, x, operation)
    slot = header.write(group.packer.secret)
    return Message(slot, packed, body(Header.read(slot, group.packer.secret), x, packed))


def body(header: Header, x: Any, packed: bytes | None) -> Any:
    """Return the memory that follows a header, as bytes; None if nothing follows."""
    if header.payload is not None:
        return None
    memory = as_tensor(x) if packed is None else as_bytes(packed)
    return memory if memory.numel() else None


def post_head(group: Group, slot: bytes, dst: int) -> Any:
    """Begin to send a header."""
    return group.transport.post([(as_bytes(slot), dst)], [], HEAD_TAG)[0]


def receive_head(group: Group, src: int) -> Header:
    """Return the next header from a rank."""
    import torch

    slot = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    group.transport.finish(group.transport.post([], [(slot, src)], HEAD_TAG))
    return Header.read(slot.numpy().tobytes(), group.packer.secret)


def receive_body(group: Group, header: Header, src: int) -> Any:
    """Return the value of a header, or of the message after it."""
    if header.payload is not None:
        if header.kind != "value":
            return rebuild(header)
        return group.packer.unpack(header.payload, src, header.operation)
    if header.kind == "value":
        packed = _empty_bytes(header.size)
        group.transport.exchange([], [(packed, src)])
        return group.packer.unpack(packed.numpy(), src, header.operation)
    target = empty_like(header, group.device)
    part = as_tensor(target)
    if not part.numel():
        return target
    if header.device == "cuda" and group.nccl is not None:
        group.nccl.exchange([], [(part, src)])
        return target
    here = part.cpu()
    group.transport.exchange([], [(here, src)])
    write_back(target, part, here)
    return target


def exchange_bodies(group: Group, bodies: Sequence[Post], works: Sequence[Any]) -> None:
    """Send memory; wait until this and all works are done."""
    from_gpu = [post for post in bodies if goes_by_nccl(group, post[0])]
    others = [(body.cpu(), dst) for body, dst in bodies if not goes_by_nccl(group, body)]
    pending = [*works, *group.transport.post(others, [], DATA_TAG)]
    if from_gpu and group.nccl is not None:
        group.nccl.exchange(from_gpu, [])
    group.transport.finish(pending)


def goes_by_nccl(group: Group, memory: Any) -> bool:
    """Whether NCCL can send it from its GPU."""
    return group.nccl is not None and memory.device.type == "cuda"


# --- shared parts ---------------------------------------------------------------------------------


def header_of(
    group: Group, x: Any, operation: str, peer: int = -1, op: str = ""
) -> tuple[Header, bytes | None]:
    """Return the header of a value, and the pickle if the value has to be pickled."""
    header = describe(x, operation)._replace(peer=peer, op=op)
    if header.kind != "value":
        return header, None
    packed = group.packer.pack(x, operation)
    return header._replace(size=len(packed), payload=packed), packed


def meet(
    group: Group, x: Any, operation: str, peer: int = -1, op: str = ""
) -> tuple[list[Header], bytes | None]:
    """Meet the other ranks; return the headers of all, and the pickle of this rank's value."""
    header, packed = header_of(group, x, operation, peer, op)
    return group.meet(header), packed


def all_values(group: Group, headers: Sequence[Header], packed: bytes | None) -> list[Any]:
    """Return the values of all ranks that pickled theirs."""
    return _of_each(headers, lambda header, rank: _shared(group, header, None, packed, rank))


def duplicate(group: Group, x: Any, packed: bytes | None, operation: str) -> Any:
    """Return a copy of this rank's value, such as the other ranks get."""
    if packed is not None:
        return group.packer.unpack(packed, group.rank, operation)
    return x.detach().clone() if is_tensor(x) else copy_of(x)


def _empty_bytes(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8)


def transport_for(group: Group, part: Any, is_on_gpu: bool) -> tuple[Transport, Any]:
    """Return the transport for a tensor, and the tensor on a device that it can reach."""
    if is_on_gpu and group.nccl is not None:
        return group.nccl, part
    # without NCCL (ranks that share a GPU, or a process) tensors on a GPU go through the CPU
    return group.transport, part if isinstance(group.transport, NoTransport) else part.cpu()


def write_back(target: Any, part: Any, here: Any) -> None:
    """Copy values that arrived on another device to their target."""
    if here is not part:
        part.copy_(here)
    if is_tensor(target) and part.data_ptr() != target.data_ptr() and part.numel():
        import torch

        with torch.no_grad():
            target.copy_(part.view(target.dtype).reshape(target.shape))
