"""Calls to actors: ways to wait for answers that Ray lacks, and the meaning of its exceptions."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import exceptions as rx
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypool.channel.exchange import POOL_ENDED
from raypool.errors import LossReason, PoolClosedError, WorkerLostError

UNRECORDED = {"enable_task_events": False}
"""An option of actors (it covers their methods) and tasks: else Ray's control store would keep
about 5 KB of each call.
"""

LOOK_AGAIN_S = 1.0
"""How soon a thread that waits for an answer notices that Ray has ended [s]."""


def when_done(ref: Any, callback: Callable[[Any], None]) -> None:
    """Call back, in a thread of Ray's, with the object or Ray's exception.

    `ObjectRef.future()` without the future, which is 4 % of a round trip. Private, checked on Ray
    2.60.
    """
    # `_ref` keeps the reference alive: without it Ray would forget the object and never call back
    ref._on_completed(lambda answer, _ref=ref: callback(answer))


@contextlib.contextmanager
def unless_ended(is_up: Callable[[], bool]) -> Iterator[None]:
    """Suppress the error of a call to a Ray that has ended since somebody looked."""
    try:
        yield
    except Exception:
        if is_up():
            raise


def aside(chore: Callable[[], object]) -> None:
    """Call something in its own thread, since Ray's control store may not answer for long."""
    threading.Thread(target=chore, name="raypool-aside", daemon=True).start()


def later(delay_s: float, chore: Callable[[], object]) -> threading.Timer:
    """Call something in its own thread after a while; return the timer, to cancel it."""
    timer = threading.Timer(min(delay_s, threading.TIMEOUT_MAX), chore)  # longer ones raise
    timer.daemon = True  # it must not keep this process from ending
    timer.start()
    return timer


def on_node(node_id: str) -> dict[str, Any]:
    """Return the options of an actor or task that runs on a node and claims nothing there."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": there, **UNRECORDED}


def ask_node(node_id: str, timeout_s: float, question: Callable[..., Any], *args: Any) -> Any:
    """Return the answer of a function on a node; None if there is none in time."""
    asked = ray.remote(question).options(**on_node(node_id)).remote(*args)
    try:
        return ray.get(asked, timeout=timeout_s)
    except (rx.RayError, TimeoutError):  # the node has gone, or is slow; callers can do without
        return None


def given_gpus() -> list[str]:
    """Return the GPUs that Ray has given to this worker or task, by index or UUID."""
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    # Ray splits CUDA_VISIBLE_DEVICES at its commas; CUDA ignores blanks there
    return [str(device).strip() for device in given]


def answered(ref: Any) -> Any:
    """Return the answer to a call; None if there is none yet, or it is an error."""
    try:
        return ray.get(ref, timeout=0)
    except rx.RayError:  # also of no answer yet: GetTimeoutError
        return None


def answer_to(ref: Any, is_up: Callable[[], bool] = ray.is_initialized) -> Any:
    """Wait for the answer of an agent, as long as `is_up` says that Ray is there.

    Raises:
        WorkerLostError: The agent's process has died. The pool starts another one.
        PoolClosedError: Ray, or the connection to it, has gone, and the pool with it.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # signals interrupt this queue at once; Ray's own `get` looks for them once a second
    when_done(ref, answers.put)
    while True:
        try:
            answer = answers.get(timeout=LOOK_AGAIN_S)
        except queue.Empty:
            if not is_up():
                raise PoolClosedError(POOL_ENDED) from None
            continue
        if isinstance(answer, rx.RayTaskError):
            raise answer.as_instanceof_cause()
        if isinstance(answer, rx.RayActorError) and is_up():
            raise WorkerLostError(
                "The pool's agent, through which its processes meet and share values, was lost:"
                f" {loss_text(answer)}. It is replaced, but the values in pool.store are lost. Run"
                " this call again.",
                reason=loss_reason(answer),
                attempts=1,
            ) from answer
        if isinstance(answer, rx.RayError):
            raise PoolClosedError(POOL_ENDED) from answer
        return answer


# --- meaning of Ray's exceptions ------------------------------------------------------------------


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
"""What an exception of Ray's means for a worker; the nearest base class counts. Workers never raise
through Ray, so any exception means that something other than the user's function has failed.
"""


NODE_HAS_DIED = "its node has died"
"""In Ray's text about an actor whose node was given up: the exception is that of a dead actor."""


def loss_reason(error: BaseException) -> LossReason:
    """Return the loss reason that an exception of Ray's stands for."""
    if getattr(error, "preempted", False):
        return LossReason.PREEMPTED
    if isinstance(error, rx.ActorDiedError) and NODE_HAS_DIED in getattr(error, "error_msg", ""):
        return LossReason.NODE
    return next(
        (RAY_FAILURES[cls] for cls in type(error).__mro__ if cls in RAY_FAILURES),
        LossReason.UNKNOWN,
    )


def loss_text(error: BaseException) -> str:
    """Return Ray's message about a lost worker, shortened."""
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
