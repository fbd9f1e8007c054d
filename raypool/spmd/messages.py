"""What goes from one rank to another, or from one to all: a word about it, and the memory that follows if it did not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raypool.spmd.group import Group
from raypool.spmd.lines import DATA_TAG, HEAD_TAG, Alone, Lines, Post
from raypool.spmd.values import as_bytes, as_tensor, copy_of, describe, empty_like, is_tensor, rebuild
from raypool.spmd.wire import SLOT_BYTES, Word


class Message(NamedTuple):
    """What goes to one rank: a slot, and the memory that did not fit into it."""

    slot: bytes
    packed: bytes | None
    body: Any


def message(group: Group, x: Any, operation: str) -> Message:
    """Return what to send of a value."""
    word, packed = word_of(group, x, operation)
    slot = word.write(group.packer.secret)
    return Message(slot, packed, body(Word.read(slot, group.packer.secret), x, packed))


def body(word: Word, x: Any, packed: bytes | None) -> Any:
    """Return what has to follow a word, as a tensor of bytes; None if nothing has to."""
    if word.payload is not None:
        return None
    memory = as_tensor(x) if packed is None else as_bytes(packed)
    return memory if memory.numel() else None


def post_head(group: Group, slot: bytes, dst: int) -> Any:
    """Begin to send a word."""
    return group.lines.post([(as_bytes(slot), dst)], [], HEAD_TAG)[0]


def receive_head(group: Group, src: int) -> Word:
    """Return the next word from a rank."""
    import torch

    slot = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    group.lines.finish(group.lines.post([], [(slot, src)], HEAD_TAG))
    return Word.read(slot.numpy().tobytes(), group.packer.secret)


def receive_body(group: Group, word: Word, src: int) -> Any:
    """Return what a word announces: from the word itself, or from the message that follows it."""
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


def in_word(group: Group, word: Word, src: int) -> Any:
    """Return the value that came with its word."""
    return group.packer.unpack(word.payload, src, word.operation) if word.kind == "value" else rebuild(word)


def exchange_bodies(group: Group, bodies: Sequence[Post], works: Sequence[Any]) -> None:
    """Send memory, and wait until it is sent, and what else was posted."""
    from_gpu = [post for post in bodies if goes_by_nccl(group, post[0])]
    others = [(body.cpu(), dst) for body, dst in bodies if not goes_by_nccl(group, body)]
    pending = [*works, *group.lines.post(others, [], DATA_TAG)]
    if from_gpu and group.nccl is not None:
        group.nccl.exchange(from_gpu, [])
    group.lines.finish(pending)


def goes_by_nccl(group: Group, memory: Any) -> bool:
    """Whether it is on a GPU, from which NCCL can send it."""
    return group.nccl is not None and memory.device.type == "cuda"


# --- what they share --------------------------------------------------------------------------------------------------


def word_of(group: Group, x: Any, operation: str, peer: int = -1, op: str = "") -> tuple[Word, bytes | None]:
    """Return what to say of a value, and the pickled value if it is one that is pickled."""
    word = describe(x, operation)._replace(peer=peer, op=op)
    if word.kind != "value":
        return word, None
    packed = group.packer.pack(x, operation)
    return word._replace(size=len(packed), payload=packed), packed


def meet(group: Group, x: Any, operation: str, peer: int = -1, op: str = "") -> tuple[list[Word], bytes | None]:
    """Say what this rank brings, and hear what the others do."""
    word, packed = word_of(group, x, operation, peer, op)
    return group.meet(word), packed


def all_values(group: Group, words: Sequence[Word], packed: bytes | None) -> list[Any]:
    """Return the pickled values of all ranks that have one."""
    return [one_value(group, word, packed, rank) if word.kind == "value" else None for rank, word in enumerate(words)]


def one_value(group: Group, word: Word, packed: bytes | None, src: int) -> Any:
    """Return the pickled value of one rank, on every rank."""
    if word.payload is not None:
        return group.packer.unpack(word.payload, src, word.operation)
    body = as_bytes(packed) if group.rank == src and packed is not None else _empty_bytes(word.size)
    group.lines.broadcast(body, src)
    return group.packer.unpack(body.numpy(), src, word.operation)


def duplicate(group: Group, x: Any, packed: bytes | None, operation: str) -> Any:
    """Return a rank's own value as others get it: a new one."""
    if packed is not None:
        return group.packer.unpack(packed, group.rank, operation)
    return x.detach().clone() if is_tensor(x) else copy_of(x)


def _empty_bytes(size: int) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8)


def all_on_gpus(words: Sequence[Word]) -> bool:
    """Whether all bring tensors on GPUs."""
    return all(word.device == "cuda" for word in words)


def lines_for(group: Group, part: Any, is_on_gpu: bool) -> tuple[Lines, Any]:
    """Return the lines for a tensor, and the tensor where they can reach it.

    Without NCCL (ranks that share a GPU, or a process) tensors on a GPU go through the CPU.
    """
    if is_on_gpu and group.nccl is not None:
        return group.nccl, part
    return group.lines, part if isinstance(group.lines, Alone) else part.cpu()


def write_back(target: Any, part: Any, here: Any) -> None:
    """Copy what has arrived elsewhere to where it belongs."""
    if here is not part:
        part.copy_(here)
    if is_tensor(target) and part.data_ptr() != target.data_ptr() and part.numel():
        import torch

        with torch.no_grad():
            target.copy_(part.view(target.dtype).reshape(target.shape))
