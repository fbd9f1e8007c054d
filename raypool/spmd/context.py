"""`SpmdContext`, the argument of a function in an spmd call; and how a worker calls it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.channel.store import way_finder_here
from raypool.errors import InvalidValueError, RankInterrupted, TaskCancelled
from raypool.spmd import collectives, composite
from raypool.spmd.collectives import Op
from raypool.spmd.failures import is_disconnect, summary
from raypool.spmd.group import (
    CALL_HAS_ENDED,
    Assignment,
    AtHand,
    Group,
    alone_in_torch,
    connect,
    hide_world,
    hold_port,
    join,
    leave,
    leave_other,
)
from raypool.spmd.wire import check_other, check_rank
from raypool.worker.runner import finished
from raypool.worker.running import is_interrupt, note_here

if TYPE_CHECKING:
    import torch


class SpmdContext:
    """One rank of an spmd call: its number, its device, and the collectives.

    Every function of an spmd call gets one. Created without arguments it has a single rank, so the
    function also runs without a pool.

    Collectives take tensors, NumPy arrays, and any value that can be pickled. Tensors are changed
    in place where that makes sense, stay on their device, and are never copied through the host:
    they go through NCCL between GPUs, through gloo between CPUs. Arrays and other values are never
    changed; a new one is returned. No gradients flow through a collective. All ranks have to call
    the same collectives in the same order; otherwise all get the same `CollectiveError`. Every
    method may raise that, and `SerializationError` for a value that cannot be pickled.

    Attributes:
        rank: The number of this rank, from 0.
        world_size: The number of ranks.
        local_rank: The number of this rank among those on its machine.
        local_world_size: The number of ranks on its machine.

    Source:
        MATLAB R2025b, spmdIndex, spmdSize and the spmd functions; torch.distributed; mpi4py, whose
        names are the same for arrays and any other value.

    Example:
        >>> from raypool import SpmdContext
        >>> def average(ctx, value):
        ...     return ctx.all_reduce(value, op="mean")
        >>> average(SpmdContext(), 3.0)
        3.0
    """

    def __init__(self, _group: Group | None = None) -> None:
        if _group is None:
            _group = connect(Assignment(0, 1, 0, 1, -1, True, False, ""), None)
        self._open_group: Group | None = _group
        place = _group.assignment
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.local_world_size = place.local_world_size
        self._own_world: Any = None

    @property
    def _group(self) -> Group:
        if self._open_group is None:
            raise InvalidValueError(CALL_HAS_ENDED)
        return self._open_group

    def _end(self) -> None:
        """Detach from the group when the call ends."""
        self._open_group = None  # the next call uses the group, and a kept context must not
        if self._own_world is not None:
            hide_world(self._own_world)

    def __repr__(self) -> str:
        return f"SpmdContext(rank={self.rank}, world_size={self.world_size})"

    @property
    def device(self) -> torch.device:
        """The `torch.device` of this rank: its worker's GPU if CUDA can use it, else the CPU."""
        device: torch.device = self._group.device
        return device

    # --- collectives of all ranks -----------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            CollectiveError: A rank has ended, or is in another collective.

        Source:
            MATLAB R2025b, spmdBarrier.

        Example:
            >>> SpmdContext().barrier()
        """
        collectives.barrier(self._group)

    def all_reduce(self, x: Any, op: Op = "sum") -> Any:
        """Combine the values of all ranks, and return the result on every rank.

        Args:
            x: A tensor, which is changed; or an array or other value. Of the same kind, shape and
                dtype on all ranks.
            op: "sum", "product", "min", "max", "mean", or a function of two values, called in rank
                order. For booleans the sum is "or" and the product "and", as in NumPy; the mean of
                integer arrays is one of floats.

        Returns:
            The tensor that was passed; or a new value. The same on every rank, to the last bit.

        Raises:
            InvalidValueError: There is no such operation.
            InvalidTypeError: It does not apply to these values: the mean of an integer tensor, the
                minimum of complex numbers.

        Source:
            torch.distributed.all_reduce; MATLAB R2025b, spmdPlus and spmdReduce.

        Example:
            >>> SpmdContext().all_reduce({"a"}, op=lambda left, right: left | right)
            {'a'}
        """
        return collectives.all_reduce(self._group, x, op)

    def reduce(self, x: Any, dst: int, op: Op = "sum") -> Any:
        """Combine the values of all ranks, and return the result on one of them.

        Args:
            x: As for `all_reduce`; a tensor is changed on dst only.
            dst: The rank that gets the result.
            op: As for `all_reduce`.

        Returns:
            The result on dst, None on the others.

        Raises:
            InvalidValueError: There is no such operation or rank.
            InvalidTypeError: As for `all_reduce`.

        Source:
            torch.distributed.reduce.

        Example:
            >>> SpmdContext().reduce(2, dst=0, op="max")
            2
        """
        check_rank("dst", dst, self.world_size)
        return collectives.reduce(self._group, x, dst, op)

    def broadcast(self, x: Any, src: int) -> Any:
        """Give every rank the value of one.

        Args:
            x: On src the value. On the others a tensor like it, to write it into; anything else is
                ignored.
            src: The rank that has the value.

        Returns:
            The value: the tensor that was passed, or a new value.

        Raises:
            InvalidValueError: There is no such rank.
            CollectiveError: A rank passed a tensor of another shape or dtype.

        Source:
            torch.distributed.broadcast; MATLAB R2025b, spmdBroadcast.

        Example:
            >>> SpmdContext().broadcast([1, 2], src=0)
            [1, 2]
        """
        check_rank("src", src, self.world_size)
        return collectives.broadcast(self._group, x, src)

    def all_gather(self, x: Any) -> list[Any]:
        """Give every rank the values of all.

        Args:
            x: A tensor, array or other value, of any kind and shape on each rank.

        Returns:
            New values, in rank order.

        Source:
            torch.distributed.all_gather and all_gather_object; MATLAB R2025b, spmdCat.

        Example:
            >>> SpmdContext().all_gather("a")
            ['a']
        """
        return collectives.all_gather(self._group, x)

    def gather(self, x: Any, dst: int) -> list[Any] | None:
        """Give one rank the values of all.

        Args:
            x: As for `all_gather`.
            dst: The rank that gets them.

        Returns:
            On dst new values, in rank order; None on the others.

        Raises:
            InvalidValueError: There is no such rank.

        Source:
            torch.distributed.gather and gather_object.

        Example:
            >>> SpmdContext().gather("a", dst=0)
            ['a']
        """
        check_rank("dst", dst, self.world_size)
        return collectives.gather(self._group, x, dst)

    def scatter(self, parts: Sequence[Any] | None, src: int) -> Any:
        """Give each rank its part of the values of one rank.

        Args:
            parts: On src a list or tuple with one part per rank, of any kind and shape; ignored on
                the others.
            src: The rank that has them.

        Returns:
            This rank's part, a new value.

        Raises:
            InvalidValueError: There is no such rank.
            CollectiveError: src did not pass one part for each rank.

        Source:
            torch.distributed.scatter and scatter_object_list.

        Example:
            >>> SpmdContext().scatter(["a"], src=0)
            'a'
        """
        check_rank("src", src, self.world_size)
        return collectives.scatter(self._group, parts, src)

    # --- messages between two ranks ---------------------------------------------------------------

    def send(self, x: Any, dst: int) -> None:
        """Send a value to another rank, which has to `receive` it.

        Args:
            x: A tensor, array or other value.
            dst: The rank that gets it.

        Raises:
            InvalidValueError: There is no such rank, or it is this one.

        Source:
            MATLAB R2025b, spmdSend.

        Example:
            >>> def hand_on(ctx):
            ...     if ctx.rank == 0:
            ...         ctx.send({"a": 1}, dst=1)
            ...     elif ctx.rank == 1:
            ...         return ctx.receive(src=0)
        """
        check_other("dst", dst, self.rank, self.world_size)
        collectives.send(self._group, x, dst)

    def receive(self, src: int) -> Any:
        """Return the next value from another rank.

        Args:
            src: The rank that sends it.

        Returns:
            A new value; a tensor that was on a GPU is on this rank's `device`.

        Raises:
            InvalidValueError: There is no such rank, or it is this one.
            CollectiveError: The rank has ended without sending anything.

        Source:
            MATLAB R2025b, spmdReceive.

        Example:
            See `send`.
        """
        check_other("src", src, self.rank, self.world_size)
        return collectives.receive(self._group, src)

    def send_receive(self, x: Any, dst: int | None, src: int | None) -> Any:
        """Send to one rank and receive from another at once, so that a ring of ranks cannot block.

        Args:
            x: A tensor, array or other value; ignored without dst.
            dst: The rank that gets it; None at the end of an open chain.
            src: The rank that sends to this one; None at the beginning of a chain.

        Returns:
            The value that src has sent, None without src.

        Raises:
            InvalidValueError: There is no such rank, or only one of the two is this one.
            CollectiveError: The rank has ended without sending anything.

        Source:
            MATLAB R2025b, spmdSendReceive.

        Example:
            >>> def shift(ctx, x):
            ...     right = ctx.rank + 1 if ctx.rank + 1 < ctx.world_size else None
            ...     left = ctx.rank - 1 if ctx.rank > 0 else None
            ...     return ctx.send_receive(x, dst=right, src=left)
            >>> shift(SpmdContext(), "a") is None
            True
        """
        own = -1 if dst == src else self.rank  # a ring of one rank may send to itself
        for name, rank in (("dst", dst), ("src", src)):
            if rank is not None:
                check_other(name, rank, own, self.world_size)
        return collectives.send_receive(self._group, x, dst, src)

    # --- setup of other libraries -----------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        """Torch's default process group, `torch.distributed.group.WORLD`.

        DDP, `fully_shard` and device meshes work inside.

        Raises:
            InvalidValueError: The ranks share a process, which has one default group.
        """
        if self._group.world is not None:
            return self._group.world
        self._check_process(
            "process_group is torch's default group", "the context's own collectives work here"
        )
        if self._own_world is None:
            self._own_world = alone_in_torch()
        return self._own_world

    def tf_config(self) -> dict[str, Any]:
        """Set TF_CONFIG for `tf.distribute.MultiWorkerMirroredStrategy`, on all ranks together.

        It is set until the function ends. Calls with the same ranks have the same addresses.

        Returns:
            The content of TF_CONFIG: the addresses of all ranks, and which one this is.

        Raises:
            InvalidValueError: The ranks share a process, and with it the environment.

        Source:
            TensorFlow guide, "Multi-worker training with Keras", TF_CONFIG.

        Example:
            >>> SpmdContext().tf_config()["task"]
            {'type': 'worker', 'index': 0}
        """
        self._check_process(
            "TF_CONFIG is in the environment", "TensorFlow works with a process for each rank"
        )
        group = self._group
        if not group.tf_addresses:  # kept, as TensorFlow cannot change them in a process's life
            holder, port = hold_port(group.address)
            with holder:  # so that no other rank finds this port
                group.tf_addresses = self.all_gather(f"{group.address}:{port}")
        config = {
            "cluster": {"worker": group.tf_addresses},
            "task": {"type": "worker", "index": self.rank},
        }
        if group.assignment.has_process:  # a single rank in a shared process needs none
            os.environ["TF_CONFIG"] = json.dumps(config)
        return config

    def jax_options(self) -> dict[str, Any]:
        """Return the arguments of `jax.distributed.initialize`, on all ranks together.

        Returns:
            `coordinator_address`, with a port that rank 0 has found free; `num_processes`;
            `process_id`.

        Raises:
            InvalidValueError: The ranks share a process.

        Source:
            JAX reference, jax.distributed.initialize.

        Example:
            >>> options = SpmdContext().jax_options()
            >>> options["num_processes"], options["process_id"]
            (1, 0)
        """
        self._check_process(
            "jax.distributed is set up once in a process", "JAX works with a process for each rank"
        )
        holder, port = hold_port(self._group.address)
        with holder:
            address = self.broadcast(f"{self._group.address}:{port}", src=0)
        return {
            "coordinator_address": address,
            "num_processes": self.world_size,
            "process_id": self.rank,
        }

    # --- checks -----------------------------------------------------------------------------------

    def _check_process(self, why: str, what_works: str) -> None:
        if self.world_size > 1 and not self._group.assignment.has_process:
            raise InvalidValueError(
                f"The {self.world_size} ranks of this call are threads of one process, and {why}."
                f' Use parpool(profile="local"), where each rank has a process; {what_works}.'
            )


# --- one rank of a call, in its worker: the user's function, and its end --------------------------

OURS = str(Path(__file__).parents[1])
"""Code in this folder is not the user's."""


class RankFunction:
    """A user's function, called by each rank; the return value stays in the worker."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        # called as in functools.partial, so that messages have its name
        self.func = self.__wrapped__ = fn

    def __call__(self, assignment: Assignment, open_args: Callable[[], Sequence[Any]]) -> Any:
        """Run one rank, and return its `answer`.

        Raises:
            RankInterrupted: It was ended because another rank had failed, or the time was up.
            Exception: Any error that the function raised.
        """
        group: Group | None = None
        has_returned = False
        try:
            # the ranks of the group that is left fail, and all are told to end: this must not hide
            # the first error
            _shield()
            leave_other(assignment)
            _shield(False)
            group = join(assignment, way_finder_here()())
            with group.visible(), group.watched():
                args = [
                    composite.find(arg.key, assignment.rank)
                    if isinstance(arg, composite.PartOf)
                    else arg
                    for arg in open_args()
                ]
                context = SpmdContext(group)
                try:
                    value = finished(self.func(context, *args))
                    del args
                    has_returned = True
                    group.end()
                finally:
                    _shield()  # what follows puts things back as they were
                    context._end()
        except BaseException as error:
            _shield()  # as above
            outcome: Exception | None = _interruption(error, assignment, group, has_returned)
            if group is not None and group.mismatch is not None:
                outcome = group.mismatch  # the watch closed the group: torch may raise anything
            _part(assignment, group)
            if outcome is None:
                raise
        else:
            if not assignment.stays_warm:
                _part(assignment, group)
            return self.answer(assignment, value)
        raise outcome  # out here, where the error that it replaces does not become its context

    def answer(self, assignment: Assignment, value: Any) -> Any:
        """Return the answer that travels back: a description, while the value stays."""
        return composite.keep(assignment.key, assignment.rank, value)


def _shield(is_on: bool = True) -> None:
    """Make this rank uninterruptible, or interruptible again."""
    note = note_here()
    if note is not None and note.interrupts is not None:
        (note.interrupts.pause if is_on else note.interrupts.resume)()


def _part(assignment: Assignment, group: Group | None) -> None:
    """Leave the group for good, and release all ranks that wait for this one."""
    if assignment.stays_warm:
        leave()
    elif group is not None:
        group.close()


def _interruption(
    error: BaseException, assignment: Assignment, group: Group | None, has_returned: bool
) -> RankInterrupted | None:
    """Return the error of a rank that was ended from outside; None if it failed by itself."""
    note = note_here()
    interrupts = note and note.interrupts
    if is_interrupt(error) and not (interrupts and interrupts.is_cancelled):
        return None  # it means the call
    # Also errors that were being handled, even if hidden by `from None`: an error in the cleanup
    # of a rank that was ended is not a failure of its own.
    story: dict[int, BaseException] = {}
    here: BaseException | None = error
    while here is not None and id(here) not in story:  # a chain of errors may be a circle
        story[id(here)] = here
        here = here.__context__
    # a single rank has no connection to lose
    cut_off = [each for each in story.values() if assignment.world_size > 1 and is_disconnect(each)]
    if group is None and isinstance(error, ConnectionError):
        looking = AtHand("while it looked for the others", 0, None)
        return RankInterrupted(f"It did not find the other ranks: {error}", at_hand=looking)
    is_told = any(isinstance(each, TaskCancelled) for each in story.values())
    if not cut_off and not is_told:
        return None
    at_hand = None if group is None else group.at_hand
    if at_hand is None and has_returned:
        at_hand = AtHand("at the end of the call", 0, None)
    elif at_hand is None and cut_off and group is not None:  # it waited in native code
        at_hand = AtHand("in a collective of torch.distributed", 0, None)
    own = [  # the innermost line of the user's own tells most
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(OURS) and "/torch/" not in frame.filename
    ]
    place = own[-1] if own and group is not None else ""
    if at_hand is None:
        where = f"at {place}" if place else "before it began"
    else:
        where = f"in {at_hand.operation}" if at_hand.number else at_hand.operation
    why = (
        "another rank had failed or the time was up"
        if is_told
        else f"the connection to another rank broke: {summary(cut_off[-1]).rstrip('.')}"
    )
    outcome = RankInterrupted(
        f"It was interrupted {where}, because {why}.", at_hand=at_hand, place=place
    )
    if not is_told:
        outcome.__cause__ = error  # perhaps nobody else knows more about what went wrong
    return outcome
