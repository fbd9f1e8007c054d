"""Failed ranks: errors that only mean a broken connection, and the error for the whole call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raypool.channel.records import WorkerInfo, who
from raypool.errors import (
    CollectiveError,
    LossReason,
    RankInterrupted,
    SpmdError,
    TaskTimeoutError,
    WorkerLostError,
    told,
)
from raypool.spmd.wire import list_ranks, ordinal

MARKS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    # a group that was closed here while another thread waited in it
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)
"""Messages of the plain RuntimeErrors that gloo and NCCL raise when a rank has gone."""

LIBRARIES = ("gloo/", "NCCL")
"""They also contain one of these (gloo names its source file), unlike errors of users' own."""


def is_disconnect(error: BaseException | None) -> bool:
    """Whether an error means that the connection to other ranks broke, or comes from such an error.

    The connection may be of raypool's collectives, or of the user's own with torch.
    """
    base = getattr(sys.modules.get("torch.distributed"), "DistError", None)
    seen: set[int] = set()  # a chain of errors may be a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if base is not None and isinstance(error, base):
            # a port of one's own that is taken is no other rank's fault
            if "failed to listen" not in told(error):
                return True
        elif type(error) is RuntimeError and all(
            any(mark in told(error) for mark in marks) for marks in (MARKS, LIBRARIES)
        ):
            return True
        error = (
            error.__cause__
            if error.__cause__ is not None or error.__suppress_context__
            else error.__context__
        )
    return False


# --- the error for a call: which rank failed first, and what the others did -----------------------


class RankFailure(NamedTuple):
    """How a rank has failed, and when (Unix time [s])."""

    rank: int
    error: BaseException
    at: float
    worker: WorkerInfo


def spmd_error(name: str, ends: Sequence[RankFailure], timeout_s: float | None) -> SpmdError:
    """Return the error for a call whose ranks have failed, or whose time was up (`timeout_s`)."""
    if timeout_s is not None:
        return _late(name, ends, timeout_s)
    ends = sorted(ends, key=lambda end: end.at)
    culprits = [end for end in ends if not _is_interrupted(end.error)]
    first = (culprits or ends)[0]
    failures = {end.rank: end.error for end in culprits or [first]}
    worker = who(first.worker)
    if isinstance(first.error, CollectiveError):
        fact = f"The ranks of {name} could not continue together: {first.error}"
    elif not culprits:
        fact = (
            f"The connections between the ranks of {name} broke, and no rank is known to have"
            f" failed. Rank {first.rank} ({worker}) was the first to notice: {first.error}"
            " The cause of this error has its traceback."
        )
    else:
        fact = f"Rank {first.rank} of {name} ({worker}) failed: {summary(first.error)}"
        cut = sum(_is_interrupted(end.error) for end in ends if end.rank not in failures)
        rest = [f"{len(culprits) - 1} more failed"] if len(culprits) > 1 else []
        if cut:
            rest.append(f"{cut} {'was' if cut == 1 else 'were'} interrupted because of it")
        others = f"{', and '.join(rest)}. " if rest else ""
        fact = f"{fact.rstrip('.')}. {others}The cause of this error has its traceback."
    return joint_error(fact, failures, first.rank)


def _late(name: str, ends: Sequence[RankFailure], timeout_s: float) -> SpmdError:
    # the ranks that only waited for others are not late
    waiting = {
        end.rank: end.error
        for end in ends
        if isinstance(end.error, RankInterrupted) and end.error.at_hand
    }
    ends = sorted(ends, key=lambda end: end.rank)
    # if all waited for each other, all are late
    late = [end for end in ends if end.rank not in waiting] or ends
    parts = [f"rank {end.rank} {_doing(end.error)}" for end in late]
    if late[0].rank not in waiting:
        by_operation: dict[str, list[int]] = {}
        for rank, error in sorted(waiting.items()):
            by_operation.setdefault(_operation(error), []).append(rank)
        parts += [
            f"{list_ranks(ranks, most=len(ranks))} waited {operation}"
            for operation, ranks in by_operation.items()
        ]
    fact = (
        f"{name} had not ended after timeout_s={timeout_s:g}: {'; '.join(parts)}. Raise timeout_s,"
        " or check what it does."
    )
    failures: dict[int, BaseException] = {
        end.rank: TaskTimeoutError(
            f"{name}: rank {end.rank} {_doing(end.error)} when the time was up."
        )
        for end in late
    }
    return joint_error(fact, failures, late[0].rank)


def joint_error(text: str, failures: Mapping[int, BaseException], first_rank: int) -> SpmdError:
    """Return the error of a call whose ranks have failed so; its cause is the first rank's."""
    error = SpmdError(text, failures=dict(failures), first_rank=first_rank)
    error.__cause__ = failures[first_rank]
    return error


def _is_interrupted(error: BaseException) -> bool:
    # a worker that did not answer was killed for the sake of the others
    return isinstance(error, RankInterrupted) or (
        isinstance(error, WorkerLostError) and error.reason is LossReason.STOPPED
    )


def _doing(error: BaseException) -> str:
    if isinstance(error, RankInterrupted):
        if error.at_hand:
            return f"was {_operation(error)}"
        return f"was at {error.place}" if error.place else "had not begun"
    if _is_interrupted(error):
        return "did not answer, and was killed with its worker"
    return f"failed: {summary(error).rstrip('.')}"


def _operation(error: RankInterrupted) -> str:
    assert error.at_hand is not None
    name, count, peer = error.at_hand
    if not count:  # not an operation of the context, but the end of the call, say
        return name
    whom = "" if peer is None else f" with rank {peer}"
    return f"in {name}{whom} (the {ordinal(count)} operation of the call)"


def summary(error: BaseException) -> str:
    """Return an error in one line of a traceback: its type and text."""
    if isinstance(error, WorkerLostError):  # a sentence about the worker, complete without its kind
        return str(error)
    return told(error).removesuffix(": ")
