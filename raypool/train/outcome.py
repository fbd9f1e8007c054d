"""What is said of a training in the managed lane that has failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray import exceptions as rx
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError

from raypool.core.model import Slice
from raypool.engine import verdicts
from raypool.engine.answers import unpack_failure
from raypool.engine.backend import NOBODY, WorkerInfo
from raypool.engine.ray_failures import loss_reason, loss_text
from raypool.engine.work import described
from raypool.errors import (
    LossReason,
    RankInterrupted,
    ResourceError,
    SpmdError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
)
from raypool.spmd.blame import RankFailure, spmd_error


class Said(NamedTuple):
    """What a guest has said of its failure; see `Letterbox.fail`."""

    kind: str
    error: bytes
    at: float


class Case(NamedTuple):
    """A training that has failed: its name, how many ranks it has, who they are, which attempt it was."""

    name: str
    size: int
    workers: Mapping[int, WorkerInfo]
    attempt: int
    start_timeout_s: float

    def who(self, rank: int) -> WorkerInfo:
        """Return the worker whose guest a rank is."""
        return self.workers.get(rank, NOBODY)


def late(case: Case, timeout_s: float, ended: Sequence[int]) -> SpmdError:
    """Return the error for a training whose time was up."""
    failures: dict[int, BaseException] = {
        rank: TaskTimeoutError(f"{case.name}: rank {rank} had not ended after timeout_s={timeout_s:g}.")
        for rank in range(case.size)
        if rank not in ended
    }
    first = min(failures, default=None)
    error = SpmdError(
        f"{case.name} had not ended after timeout_s={timeout_s:g}. Give it more time, or see what it does.",
        failures=failures,
        first_rank=first,
    )
    error.__cause__ = None if first is None else failures[first]
    return error


def left(case: Case) -> SpmdError:
    """Return the error for a training whose ranks have come back since a machine is about to go."""
    loss = WorkerLostError(
        f"The ranks of {case.name} have come back in attempt {case.attempt}: a machine of theirs is about to go.",
        reason=LossReason.PREEMPTED,
        attempts=case.attempt,
    )
    return SpmdError(str(loss), failures=dict.fromkeys(range(case.size), loss), first_rank=0)


def failure(case: Case, error: BaseException, said: Mapping[int, Said]) -> BaseException:
    """Return the error for a training, by what `fit` has raised and what its guests have said."""
    ends = [_as_said(case, rank, words) for rank, words in said.items()]
    if isinstance(error, WorkerGroupError):
        for rank, reason in error.worker_failures.items():
            if rank not in said:
                ends.append(RankFailure(rank, _lost(case, rank, reason), 0.0, case.who(rank)))
    if any(not isinstance(each.error, RankInterrupted) for each in ends):
        return spmd_error(case.name, case.size, ends, None)
    if isinstance(error, ControllerError):
        return _of_controller(case, error.controller_failure)
    if isinstance(error, (rx.RayError, PreemptionError)):
        return _all_lost(case, error)
    return spmd_error(case.name, case.size, ends, None) if ends else _of_controller(case, error)


def _as_said(case: Case, rank: int, words: Said) -> RankFailure:
    worker = case.who(rank)
    if words.kind == "cut off":
        text = "It was interrupted, because the connection to another rank broke."
        return RankFailure(rank, RankInterrupted(text, at_hand=None, place=""), words.at, worker)
    piece = Slice(0, rank, rank + 1, case.attempt)
    error = described(unpack_failure(words.error), f"rank {rank} of {case.name}", piece, worker)
    return RankFailure(rank, error, words.at, worker)


def _lost(case: Case, rank: int, reason: BaseException) -> WorkerLostError:
    """Return the error for a rank whose process does not answer, or has ended without a word."""
    cause = getattr(reason, "health_check_failure", reason)
    worker = case.who(rank)
    why, words = (loss_reason(cause), loss_text(cause)) if isinstance(cause, rx.RayError) else (LossReason.UNKNOWN, str(cause))
    return WorkerLostError(
        f"The process of rank {rank} of {case.name}, for worker {worker.index} ({verdicts.where(worker)}), was lost in attempt "
        f"{case.attempt}: {_first_line(words)}. {verdicts.HINTS[why]}",
        reason=why,
        attempts=case.attempt,
    )


def _of_controller(case: Case, error: BaseException) -> BaseException:
    """Return the error for what has gone wrong in the controller itself."""
    kind = type(error).__name__  # private classes of Ray's
    if kind == "WorkerGroupStartupTimeoutError":
        return ResourceError(
            f"Ray has not started the {case.size} processes of {case.name} within start_timeout_s={case.start_timeout_s:g}, "
            "though they ask for no GPU and no core. Look for what keeps the nodes of the workers busy, or give it more time.",
            requested=case.size,
            available=0,
            holders=(),
        )
    if kind == "WorkerGroupStartupFailedError" or isinstance(error, rx.RayError):
        return _all_lost(case, error)
    made = TrainingError(
        f"{case.name} was ended by Ray Train itself: {type(error).__name__}: {_first_line(str(error))}. The cause of "
        "this error has it in full.",
        failures={},
        first_rank=None,
        result=None,
    )
    made.__cause__ = error
    return made


def _all_lost(case: Case, error: BaseException) -> SpmdError:
    """Return the error where nobody knows which rank was the first: a node was preempted, the controller has gone."""
    reason = LossReason.PREEMPTED if isinstance(error, PreemptionError) else loss_reason(error)
    loss = WorkerLostError(
        f"The processes of {case.name} were lost in attempt {case.attempt}: {_first_line(str(error))}. {verdicts.HINTS[reason]}",
        reason=reason,
        attempts=case.attempt,
    )
    loss.__cause__ = error
    made = SpmdError(str(loss), failures=dict.fromkeys(range(case.size), loss), first_rank=0)
    made.__cause__ = loss
    return made


def _first_line(text: Any) -> str:
    lines = str(text).strip().splitlines()
    return lines[0].rstrip(".") if lines else "nothing is known"
