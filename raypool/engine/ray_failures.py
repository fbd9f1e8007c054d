"""What Ray's exceptions say of a worker: one table, and the same in a few words."""

from __future__ import annotations

import re

from ray import exceptions as rx

from raypool.errors import LossReason

RAY_FAILURES: dict[type[BaseException], LossReason] = {
    rx.OutOfMemoryError: LossReason.OUT_OF_MEMORY,
    rx.NodeDiedError: LossReason.NODE,
    rx.LocalRayletDiedError: LossReason.NODE,
    rx.ActorDiedError: LossReason.EXIT,
    rx.ActorUnavailableError: LossReason.NODE,
    rx.RayActorError: LossReason.EXIT,
    rx.WorkerCrashedError: LossReason.EXIT,
    rx.AsyncioActorExit: LossReason.EXIT,
    rx.RuntimeEnvSetupError: LossReason.START,
    rx.ActorPlacementGroupRemoved: LossReason.START,
    rx.TaskPlacementGroupRemoved: LossReason.START,
    rx.ActorUnschedulableError: LossReason.START,
    rx.TaskUnschedulableError: LossReason.START,
    rx.ActorAlreadyExistsError: LossReason.START,
    rx.ActorHandleNotFoundError: LossReason.START,
    rx.AuthenticationError: LossReason.START,
    rx.OwnerDiedError: LossReason.NODE,
    rx.ObjectLostError: LossReason.NODE,
    rx.ObjectStoreFullError: LossReason.OUT_OF_MEMORY,
    rx.OutOfDiskError: LossReason.OUT_OF_MEMORY,
    rx.RpcError: LossReason.NODE,
    rx.RayError: LossReason.UNKNOWN,
}
"""What an exception of Ray's says of a worker; the nearest class above it counts. Workers never raise through Ray, so that any
exception means that something else than the user's function has failed."""


NODE_HAS_DIED = "its node has died"
"""In what Ray says of an actor whose node its control store has given up; the exception is that of an actor that has died."""


def loss_reason(error: BaseException) -> LossReason:
    """Return what an exception of Ray's means for the worker."""
    if getattr(error, "preempted", False):
        return LossReason.PREEMPTED
    if isinstance(error, rx.ActorDiedError) and NODE_HAS_DIED in getattr(error, "error_msg", ""):
        return LossReason.NODE
    return next((RAY_FAILURES[cls] for cls in type(error).__mro__ if cls in RAY_FAILURES), LossReason.UNKNOWN)


def loss_text(error: BaseException) -> str:
    """Return in a few words what Ray says of a lost worker."""
    cause = getattr(error, "cause", None)  # of a RayTaskError: what a worker has raised itself
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(error)
    if NODE_HAS_DIED in text:
        return NODE_HAS_DIED
    code = re.search(r"exit code (\d+)", text)
    if code:
        return f"its process ended with exit code {code[1]}"
    if "connection error code 2" in text:
        return "its process was killed or crashed"
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else type(error).__name__
