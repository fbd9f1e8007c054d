"""Calls to actors whose answers are waited for in other ways than Ray's own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import exceptions as rx

from raypool.channel.exchange import POOL_ENDED
from raypool.engine.ray_failures import loss_reason, loss_text
from raypool.errors import PoolClosedError, WorkerLostError

UNRECORDED = {"enable_task_events": False}
"""An option of actors (it holds for their methods, too) and tasks: Ray's control store would keep about 5 KB of each call."""

LOOK_AGAIN_S = 1.0
"""How soon whoever waits for an answer notices that Ray has ended [s]."""


def when_done(ref: Any, callback: Callable[[Any], None]) -> None:
    """Call back, in a thread of Ray's, with the object or Ray's exception.

    What `ObjectRef.future()` is made of, without the future: 4 % of a round trip. Private, checked on Ray 2.60. The reference has
    to live until then, or Ray forgets the object that it is to call back about.
    """
    ref._on_completed(lambda answer, _ref=ref: callback(answer))


def aside(chore: Callable[[], object]) -> None:
    """Call something that asks Ray's control store, which may not answer for long, in a thread of its own."""
    threading.Thread(target=chore, name="raypool-aside", daemon=True).start()


def answered(ref: Any) -> Any:
    """Return what a call has returned; None if it has not, or something is wrong."""
    try:
        return ray.get(ref, timeout=0)
    except rx.RayError:
        return None


def ask(agent: Any, method: str, *args: Any) -> Any:
    """Call a method of the exchange in an agent, and wait for its answer; see `answer_to`."""
    return answer_to(agent.exchange.remote(method, *args))


def answer_to(ref: Any) -> Any:
    """Wait for the answer of an agent, at which signals can interrupt this.

    (Ray's own `get` looks for signals once a second.)

    Raises:
        WorkerLostError: The agent's process has died. The pool starts another one.
        PoolClosedError: Ray, or the connection to it, has gone, and the pool with it.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    when_done(ref, answers.put)
    while True:
        try:
            answer = answers.get(timeout=LOOK_AGAIN_S)
        except queue.Empty:
            if not ray.is_initialized():
                raise PoolClosedError(POOL_ENDED) from None
            continue
        if isinstance(answer, rx.RayTaskError):
            raise answer.as_instanceof_cause()
        if isinstance(answer, rx.RayActorError) and ray.is_initialized():
            raise WorkerLostError(
                f"The pool's agent, through which its processes meet and share values, was lost: {loss_text(answer)}. Another "
                "takes its place, without what was in pool.store. Run it again.",
                reason=loss_reason(answer),
                attempts=1,
            ) from answer
        if isinstance(answer, rx.RayError):
            raise PoolClosedError(POOL_ENDED) from answer
        return answer
