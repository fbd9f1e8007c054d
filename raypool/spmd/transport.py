"""How tensors get from rank to rank: through gloo, through NCCL, or not at all where there is one rank only.

Waiting is done in slices, so that a cancellation gets through. Gloo's own `abort` does not reach a call that waits; what does is
a receive that times out at once: it puts all connections of the group into an error state, here and at every peer.
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
"""How long a wait lasts before it looks round [s]: Python code, and so a cancellation, gets its turn this often."""

FOR_EVER = timedelta(days=300)
"""The time limit of a group. Connections tell of ranks that die, and `RankWatch` of ranks that can't meet. For slow ranks there
is the call's own limit."""

HEAD_TAG, DATA_TAG, SEVER_TAG = 1, 2, 3
"""Messages with one tag from one rank to another arrive in order."""

Post = tuple["torch.Tensor", int]
"""A tensor, and the rank that it goes to or comes from."""


class Lines(Protocol):
    """The ways of one rank to the others. Tensors are contiguous."""

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


class Alone:
    """One rank: everything is here already."""

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
        """Do nothing: there is nobody."""

    def post(self, sends: Sequence[Post], receives: Sequence[Post], tag: int) -> list[Any]:
        """Begin nothing: there is nobody."""
        return []

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for nothing."""

    def sever(self) -> None:
        """Do nothing: there are no connections."""


class GlooLines:
    """Through a gloo group of raypool's own, which torch has not registered: nothing of the user's can close it.

    `waiting` is called with how long something has been waited for [s], once in a slice; what it raises ends the wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int, address: str) -> None:
        dist = distributed()
        # Private names of torch's: the options of a group that is made by hand. Without them it would wait for 30 minutes at
        # most, and listen on every interface.
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
        """Reduce in place; every chunk is summed up in one place, so the result is the same on every rank."""
        dist = distributed()
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        self._wait(self._gloo.allreduce([x], options))

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst; elsewhere gloo leaves something in x."""
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
        """Wait for messages. In a thread: a wait with a time limit would, when that is reached, break all connections."""
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
        """Break all connections: whoever waits for anything in this group, here or at a peer, fails at once."""
        sever(self._gloo)

    def drop(self) -> None:
        """Close the group for good."""
        self._gloo = None


_open: weakref.WeakSet[GlooLines] = weakref.WeakSet()


def _close_all() -> None:
    """Close what threads that have ended, or never will, have left open: gloo's own threads must end before the process does."""
    for lines in list(_open):
        lines.sever()
        lines.drop()


atexit.register(_close_all)


def distributed() -> Any:
    """Return `torch.distributed`, most of whose names type checkers do not find."""
    import torch  # first: where another thread is importing it, Python would give one of them a half of the package
    import torch.distributed

    return torch.distributed


def sever(gloo: Any) -> None:
    """Break all connections of a gloo group.

    A receive that times out breaks all, but only if its own connection was whole until then. So each is tried; after the first
    that was, the rest fail without a wait.
    """
    import torch

    for peer in range(0 if gloo is None else gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, SEVER_TAG).wait(timedelta(milliseconds=1))


def _is_over(work: Any) -> bool:
    """Wait for a slice; return whether the operation is done. Raises what it has failed with."""
    try:
        work.wait(timedelta(seconds=SLICE_S))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it has failed; or was done just when the slice was over, and that was all
    return True


def _say_nothing(waited_s: float) -> None:
    """Nobody wants to know."""


def _reduce_op(op: str) -> Any:
    dist = distributed()
    return {"sum": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]


class NcclLines:
    """From GPU to GPU, through torch's default group. All ranks have met before, so all of them come."""

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
        """Send and receive, all at once: NCCL runs what is in one batch together, so a ring cannot block."""
        dist = distributed()
        posts = [dist.P2POp(dist.irecv, x, src, self._world) for x, src in receives]
        posts += [dist.P2POp(dist.isend, x, dst, self._world) for x, dst in sends]
        if posts:
            for work in dist.batch_isend_irecv(posts):
                work.wait()
