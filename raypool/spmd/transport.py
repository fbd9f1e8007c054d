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
from typing import TYPE_CHECKING, Any

from raypool.spmd.wire import SLOT_BYTES

if TYPE_CHECKING:
    import torch


SLICE_S = 0.05
"""The length of a slice of a wait [s]: between slices a cancellation takes effect."""

FOR_EVER = timedelta(days=300)
"""The time limit of a group: none, in effect. Dead ranks break connections, `RankWatch` finds
ranks that cannot meet, and the call's own limit is for slow ranks."""

HEAD_TAG, DATA_TAG, SEVER_TAG = 1, 2, 3
"""Messages with one tag from one rank to another arrive in order; each call has its own tags."""

Post = tuple["torch.Tensor", int]
"""A tensor, and the rank that it goes to or comes from."""


class NoTransport:
    """The transport of a single rank: nothing has to move."""

    def meet(self, slot: bytes) -> list[bytes]:
        """Return the slots of all ranks."""
        return [slot]

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Keep x."""

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Keep x."""

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Keep x."""

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Copy x."""
        parts[0].copy_(x)

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Do nothing."""

    def post(self, sends: Sequence[Post], receives: Sequence[Post], tag: int) -> list[Any]:
        """Do nothing."""
        return []

    def finish(self, works: Sequence[Any]) -> None:
        """Do nothing."""

    def sever(self) -> None:
        """Do nothing."""


class GlooTransport:
    """Transport through a gloo group that torch does not know, so user code cannot close it.

    Tensors are contiguous. `waiting` is called once in a slice with the time waited so far [s]; its
    exceptions end the wait.
    """

    def __init__(self, store: Any, rank: int, world_size: int, address: str) -> None:
        dist = distributed()
        # private names of torch: without these options, gloo would wait for 30 minutes at most, and
        # listen on every interface
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOR_EVER
        options._threads = 2  # as many as torch's own groups have
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        self._world_size = world_size
        self.call = 0  # its number
        self.waiting: Callable[[float], None] = lambda waited_s: None
        _open.add(self)

    def meet(self, slot: bytes) -> list[bytes]:
        """Return the slots of all ranks."""
        import torch

        own = torch.frombuffer(bytearray(slot), dtype=torch.uint8)
        slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8) for _ in range(self._world_size)]
        self._wait(self._gloo.allgather([slots], [own]))
        return [entry.numpy().tobytes() for entry in slots]

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Reduce in place."""
        options = distributed().AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        # gloo sums up each chunk in one place: the result is the same on every rank
        self._wait(self._gloo.allreduce([x], options))

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst; on the other ranks gloo overwrites x."""
        options = distributed().ReduceOptions()
        options.reduceOp, options.rootRank = _reduce_op(op), dst
        self._wait(self._gloo.reduce([x], options))

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Write the x of src into every rank's x."""
        options = distributed().BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._wait(self._gloo.broadcast([x], options))

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Fill the parts with the x of all ranks, all of one form."""
        self._wait(self._gloo.allgather([parts], [x]))

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Send and receive at once."""
        self.finish(self.post(sends, receives, DATA_TAG))

    def post(self, sends: Sequence[Post], receives: Sequence[Post], tag: int) -> list[Any]:
        """Begin to send and to receive; return what `finish` waits for."""
        tag += 4 * self.call  # a message given up in one call must not meet one of the next
        works = [self._gloo.recv([x], src, tag) for x, src in receives]
        return works + [self._gloo.send([x], dst, tag) for x, dst in sends]

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for messages."""
        if works:
            # not as `_wait`: waiting for a message past a time limit breaks all connections
            in_thread(lambda: [work.wait() for work in works], waiting=self.waiting)

    def _wait(self, work: Any) -> None:
        began = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError:  # also at the end of a slice: then the work is not completed
                if work.is_completed():
                    break
            self.waiting(time.monotonic() - began)
        work.wait()  # raises its error; returns if it was done just after the slice

    def sever(self) -> None:
        """Make every wait in this group, here or at a peer, fail at once."""
        sever(self._gloo)


# weakly: it must not keep open what nobody uses any more
_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


@atexit.register  # gloo's own threads must end before the process does
def _close_all() -> None:
    for transport in list(_open):
        transport.sever()
        transport._gloo = None


def distributed() -> Any:
    """Return `torch.distributed`, most of whose names type checkers do not find."""
    import torch  # first: beside another thread's import the submodule may be half there
    import torch.distributed

    return torch.distributed


def in_thread(
    make: Callable[[], Any],
    discard: Callable[[Any], object] = bool,  # which does nothing
    waiting: Callable[[float], object] = bool,
) -> Any:
    """Call a function that waits in native code, in a thread: so the wait can be interrupted.

    `waiting` is called once in a slice with the time waited so far [s]; its exceptions end the
    wait. After an interruption, the late result is given to `discard`.
    """
    done, lock = threading.Event(), threading.Lock()
    made: list[Any] = []
    problems: list[BaseException] = []
    is_wanted = True

    def run() -> None:
        try:
            result = make()
            with lock:  # exactly one of the two threads discards a late result
                made.append(result)
                is_late = not is_wanted
            if is_late:
                discard(result)
        except BaseException as problem:
            problems.append(problem)
        finally:
            done.set()

    began = time.monotonic()
    try:
        # a daemon: after an interruption it may wait forever, and nothing can end it
        threading.Thread(target=run, daemon=True).start()
        while not done.wait(SLICE_S):  # in slices, so that an interruption gets through
            waiting(time.monotonic() - began)
    except BaseException:
        with lock:
            is_wanted = False
            is_made = bool(made)
        if is_made:
            discard(made[0])
        raise
    if problems:
        raise problems[0]
    return made.pop()


def sever(gloo: Any) -> None:
    """Break all connections of a gloo group."""
    import torch

    # A receive that times out breaks them all, but only if its own was whole until then. So each
    # peer is tried; after the first whole one, the rest fail without a wait.
    for peer in range(0 if gloo is None else gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):  # the timeout that is wanted, or broken already
                gloo.recv([torch.empty(1)], peer, SEVER_TAG).wait(timedelta(milliseconds=1))


def _reduce_op(op: str) -> Any:
    return getattr(distributed().ReduceOp, op.upper())  # SUM, PRODUCT, MIN, MAX


class NcclTransport:
    """Transport between GPUs, by torch's default group, once all ranks have met."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Reduce in place."""
        distributed().all_reduce(x, _reduce_op(op), self._world)

    def reduce(self, x: torch.Tensor, dst: int, op: str) -> None:
        """Reduce in place on dst."""
        distributed().reduce(x, dst, _reduce_op(op), self._world)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """Write the x of src into every rank's x."""
        distributed().broadcast(x, src, self._world)

    def all_gather(self, parts: list[torch.Tensor], x: torch.Tensor) -> None:
        """Fill the parts with the x of all ranks, all of one form."""
        distributed().all_gather(parts, x, self._world)

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Send and receive at once."""
        dist = distributed()
        # one batch, which NCCL runs together: a ring of ranks cannot block
        posts = [dist.P2POp(dist.irecv, x, src, self._world) for x, src in receives]
        posts += [dist.P2POp(dist.isend, x, dst, self._world) for x, dst in sends]
        if posts:
            for work in dist.batch_isend_irecv(posts):
                work.wait()  # only the GPU's stream waits: no slices are needed


Transport = NoTransport | GlooTransport | NcclTransport
