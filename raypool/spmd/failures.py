"""Failed ranks: errors that only mean a broken connection, and the error for the whole call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raypool.channel.records import WorkerInfo, where
from raypool.errors import (
    CollectiveError,
    LossReason,
    RankInterrupted,
    SpmdError,
    TaskTimeoutError,
    WorkerLostError,
)
from raypool.spmd.wire import ordinal

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


def is_disconnect(error: BaseException | None) -> bool:
    """Whether an error means that the connection to other ranks broke: in raypool's collectives, or
    in the user's own of torch.

    An error that such an error caused, or that was raised while one was handled, counts too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _is_itself(error):
            return True
        error = (
            error.__cause__
            if error.__cause__ is not None or error.__suppress_context__
            else error.__context__
        )
    return False


def _is_itself(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    base = getattr(distributed, "DistError", None)
    if base is not None and isinstance(error, base):
        # its own port is taken, which is no other rank's fault
        return "failed to listen" not in str(error)
    return type(error) is RuntimeError and any(mark in str(error) for mark in MARKS)


# --- the error for a call: which rank failed first, and what the others did -----------------------


class RankFailure(NamedTuple):
    """How a rank has failed, and when (Unix time [s])."""

    rank: int
    error: BaseException
    at: float
    worker: WorkerInfo


def spmd_error(
    name: str, world_size: int, ends: Sequence[RankFailure], timeout_s: float | None
) -> SpmdError:
    """Return the error for a call in which these ranks have failed, or were interrupted because its
    time was up (`timeout_s`).
    """
    if timeout_s is not None:
        return _late(name, ends, timeout_s)
    culprits = sorted(
        (end for end in ends if not _is_interrupted(end.error)), key=lambda end: end.at
    )
    if not culprits:  # the connections broke, for an unknown reason
        culprits = sorted(ends, key=lambda end: end.at)[:1]
    first = culprits[0]
    failures = {end.rank: end.error for end in culprits}
    if isinstance(first.error, CollectiveError):
        fact = f"The ranks of {name} could not go on together: {first.error}"
    else:
        fact = (
            f"Rank {first.rank} of {name} (worker {first.worker.index}, {where(first.worker)})"
            f" failed: {_summary(first.error)}"
        )
        rest = _rest(
            len(culprits) - 1,
            sum(_is_interrupted(end.error) for end in ends if end.rank not in failures),
        )
        fact = f"{fact.rstrip('.')}. {rest}The cause of this error has its traceback."
    return _made(fact, failures, first.rank)


def _late(name: str, ends: Sequence[RankFailure], timeout_s: float) -> SpmdError:
    """Return the error that says which ranks were late, and which only waited."""
    waiting = {
        end.rank: end.error
        for end in ends
        if isinstance(end.error, RankInterrupted) and end.error.at_hand
    }
    ends = sorted(ends, key=lambda end: end.rank)
    late = [end for end in ends if end.rank not in waiting] or ends
    parts = [f"rank {end.rank} {_doing(end.error)}" for end in late]
    if late[0].rank not in waiting:
        parts += _waits(waiting)
    fact = (
        f"{name} had not ended after timeout_s={timeout_s:g}: {'; '.join(parts)}. Give it more"
        " time, or see what it does."
    )
    failures: dict[int, BaseException] = {}
    for end in late:
        failures[end.rank] = TaskTimeoutError(
            f"{name}: rank {end.rank} {_doing(end.error)} when the time was up."
        )
    return _made(fact, failures, late[0].rank)


def _made(text: str, failures: Mapping[int, BaseException], first_rank: int) -> SpmdError:
    error = SpmdError(text, failures=dict(failures), first_rank=first_rank)
    error.__cause__ = failures[first_rank]
    return error


def _is_interrupted(error: BaseException) -> bool:
    is_killed_for_others = isinstance(error, WorkerLostError) and error.reason is LossReason.STOPPED
    return isinstance(error, RankInterrupted) or is_killed_for_others


def _doing(error: BaseException) -> str:
    """Say where a rank was when it was interrupted."""
    if isinstance(error, RankInterrupted):
        if error.at_hand:
            return f"was {_operation(error)}"
        return f"was at {error.place}" if error.place else "had not begun"
    if isinstance(error, WorkerLostError) and error.reason is LossReason.STOPPED:
        return "did not answer, and was killed with its worker"
    return f"failed: {_summary(error).rstrip('.')}"


def _waits(waiting: Mapping[int, RankInterrupted]) -> list[str]:
    """Say which ranks waited in which collective."""
    by_operation: dict[str, list[int]] = {}
    for rank, error in sorted(waiting.items()):
        by_operation.setdefault(_operation(error), []).append(rank)
    return [f"{_ranks(ranks)} waited {operation}" for operation, ranks in by_operation.items()]


def _operation(error: RankInterrupted) -> str:
    """Name the wait of a rank; not every wait is an operation of the context."""
    assert error.at_hand is not None
    name, count, peer = error.at_hand
    if not count:
        return name
    whom = "" if peer is None else f" with rank {peer}"
    return f"in {name}{whom} (the {ordinal(count)} operation of the call)"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    Example:
        >>> _ranks([2]), _ranks([0, 1, 3])
        ('rank 2', 'ranks 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _rest(num_failed: int, num_interrupted: int) -> str:
    """Count the other ranks.

    Example:
        >>> _rest(1, 2)
        '1 more failed, and 2 were interrupted because of it. '
    """
    parts = []
    if num_failed:
        parts.append(f"{num_failed} more failed")
    if num_interrupted:
        parts.append(
            f"{num_interrupted} {'was' if num_interrupted == 1 else 'were'} interrupted because"
            " of it"
        )
    return f"{', and '.join(parts)}. " if parts else ""


def _summary(error: BaseException) -> str:
    if isinstance(error, WorkerLostError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
