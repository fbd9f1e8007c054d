"""The transport of tensors between ranks: through gloo, through NCCL, or none for a single rank.

Waits are cut into slices, so that a cancellation gets through. Gloo's own `abort` does not reach a
call that waits. A receive that times out at once does: it puts all connections of the group into an
error state, here and at every peer.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from raypool.spmd.wire import SLOT_BYTES

if TYPE_CHECKING:
    import torch


SLICE_S = 0.05
"""The length of a slice of a wait [s]: between slices a cancellation takes effect."""

FOR_EVER = timedelta(days=300)
"""The time limit of a group: none, in effect. Dead ranks break connections, `RankWatch` finds
ranks that cannot meet, and the call's own limit is for slow ranks."""

HEAD_TAG, DATA_TAG, SEVER_TAG = 1, 2, 3
"""Messages with one tag from one rank to another arrive in order."""

Post = tuple["torch.Tensor", int]
"""A tensor, and the rank that it goes to or comes from."""


class Transport(Protocol):
    """The transport of one rank to the others. Tensors are contiguous."""

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Reduce in place, the same on every rank."""

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst; elsewhere x is used up."""

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Give everybody what src has, in place."""

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Fill the parts with everybody's x, which are all alike."""

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Send and receive, all at once."""


class NoTransport:
    """The transport of a single rank: nothing has to move."""

    def meet(self, slot: bytes) -> list[bytes]:
        """Return everybody's slot."""
        return [slot]

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Leave x as it is."""

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Leave x as it is."""

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Leave x as it is."""

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Copy x."""
        parts[0].copy_(x)

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Do nothing: there is no other rank."""

    def post(self, sends: Sequence[Post], receives: Sequence[Post], tag: int) -> list[Any]:
        """Begin nothing: there is no other rank."""
        return []

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for nothing."""

    def sever(self) -> None:
        """Do nothing: there are no connections."""


class GlooTransport:
    """Transport through a gloo group that torch does not know, so user code cannot close it.

    `waiting` is called once in a slice, with the time waited so far [s]; an exception of it ends
    the wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int, address: str) -> None:
        dist = distributed()
        # Private names of torch's: the options of a group that is made by hand. Without them it
        # would wait for 30 minutes at most, and listen on every interface.
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOR_EVER
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        self._world_size = world_size
        self.waiting: Callable[[float], None] = _say_nothing
        _open.add(self)

    def meet(self, slot: bytes) -> list[bytes]:
        """Return everybody's slot."""
        import torch

        own = torch.frombuffer(bytearray(slot), dtype=torch.uint8)
        slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8) for _ in range(self._world_size)]
        self._wait(self._gloo.allgather([slots], [own]))
        return [entry.numpy().tobytes() for entry in slots]

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Reduce in place; every chunk is summed up in one place, so the result is the same on
        every rank.
        """
        dist = distributed()
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        self._wait(self._gloo.allreduce([x], options))

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst; on the other ranks gloo overwrites x."""
        dist = distributed()
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _reduce_op(op), dst
        self._wait(self._gloo.reduce([x], options))

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Give everybody what src has, in place."""
        dist = distributed()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._wait(self._gloo.broadcast([x], options))

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Fill the parts with everybody's x, which are all alike."""
        self._wait(self._gloo.allgather([parts], [x]))

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Send and receive, all at once."""
        self.finish(self.post(sends, receives, DATA_TAG))

    def post(self, sends: Sequence[Post], receives: Sequence[Post], tag: int) -> list[Any]:
        """Begin to send and to receive; return what `finish` waits for."""
        works = [self._gloo.recv([x], src, tag) for x, src in receives]
        return works + [self._gloo.send([x], dst, tag) for x, dst in sends]

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for messages, in a thread: a wait past its time limit breaks all connections."""
        if not works:
            return
        done = threading.Event()
        problems: list[Exception] = []

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except Exception as problem:
                problems.append(problem)
            finally:
                done.set()

        threading.Thread(target=wait, daemon=True).start()
        began = time.monotonic()
        while not done.wait(SLICE_S):
            self.waiting(time.monotonic() - began)
        if problems:
            raise problems[0]

    def _wait(self, work: Any) -> None:
        began = time.monotonic()
        while not _is_over(work):
            self.waiting(time.monotonic() - began)

    def sever(self) -> None:
        """Break all connections: every wait in this group, here or at a peer, fails at once."""
        sever(self._gloo)

    def drop(self) -> None:
        """Close the group for good."""
        self._gloo = None


_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


def _close_all() -> None:
    """Close every group left open: gloo's own threads must end before the process does."""
    for transport in list(_open):
        transport.sever()
        transport.drop()


atexit.register(_close_all)


def distributed() -> Any:
    """Return `torch.distributed`, most of whose names type checkers do not find."""
    import torch  # first: beside another thread's import the submodule may be half there
    import torch.distributed

    return torch.distributed


def sever(gloo: Any) -> None:
    """Break all connections of a gloo group.

    A receive that times out breaks all connections, but only if its own was whole until then. So
    each peer is tried; after the first whole one, the rest fail without a wait.
    """
    import torch

    for peer in range(0 if gloo is None else gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, SEVER_TAG).wait(timedelta(milliseconds=1))


def _is_over(work: Any) -> bool:
    """Wait for a slice; return whether the operation is done, or raise its error."""
    try:
        work.wait(timedelta(seconds=SLICE_S))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises its error; returns if it was done just after the slice
    return True


def _say_nothing(waited_s: float) -> None:
    """Ignore how long a wait has taken: the default for `waiting`."""


def _reduce_op(op: str) -> Any:
    dist = distributed()
    return {
        "sum": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }[op]


class NcclTransport:
    """Transport between GPUs, by torch's default group, once all ranks have met."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Reduce in place."""
        dist = distributed()
        dist.all_reduce(x, _reduce_op(op), self._world)

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst."""
        dist = distributed()
        dist.reduce(x, dst, _reduce_op(op), self._world)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Give everybody what src has, in place."""
        dist = distributed()
        dist.broadcast(x, src, self._world)

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Fill the parts with everybody's x, which are all alike."""
        dist = distributed()
        dist.all_gather(parts, x, self._world)

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Send and receive, all at once: NCCL runs what is in one batch together, so a ring cannot
        block.
        """
        dist = distributed()
        posts = [dist.P2POp(dist.irecv, x, src, self._world) for x, src in receives]
        posts += [dist.P2POp(dist.isend, x, dst, self._world) for x, dst in sends]
        if posts:
            for work in dist.batch_isend_irecv(posts):
                work.wait()
