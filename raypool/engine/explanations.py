"""Errors and messages of the engine: lost workers, failed starts, timeouts and broken pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from raypool.channel.records import Refusal, WorkerInfo, where
from raypool.channel.users_code import folder_of, is_installed
from raypool.core.model import Counts
from raypool.errors import (
    LossReason,
    PoolBrokenError,
    PoolPreemptedError,
    SerializationError,
    TaskError,
    TaskTimeoutError,
    WorkerLostError,
)

HINTS = {
    LossReason.OUT_OF_MEMORY: (
        "Use smaller batches, fewer workers on this machine, or a larger memory_bytes if one is"
        " set."
    ),
    LossReason.EXIT: (
        "The function crashed in native code or called os._exit(), or something killed the process"
        " (dmesg shows whether the kernel did, for lack of memory). To debug the function, call it"
        " in a script (python -X faulthandler), or replay the item of a saved run (raypool replay"
        " RUN_DIR ITEM)."
    ),
    LossReason.NODE: "Check the node, or raise retries.",
    LossReason.PREEMPTED: (
        "With retries=1, an item moves to another node automatically. Repeat calls of pool.spmd and"
        " pool.train; a training with run_dir resumes from its last checkpoint."
    ),
    LossReason.START: "Check the function passed as setup=, and the logs of Ray on that machine.",
    LossReason.FAULTY: "Check that machine and its GPU.",
    LossReason.STOPPED: (
        "A cancelled task in the same worker did not stop, so the worker was killed. Submit this"
        " task again, or allow a retry (retries=1)."
    ),
    LossReason.UNKNOWN: "Call the function in a script to see whether it fails there, too.",
}
"""The next step, by what happened."""


FAULTY = "every task failed there, but not on other workers"


class Tell(NamedTuple):
    """Callbacks of the driver, for messages to the user and the pool."""

    warn: Callable[[str], None]  # that the pool is smaller for good
    note: Callable[[str], None]  # that its workers were parked
    closed: Callable[[], None]  # that the pool has ended


def lost(
    worker: WorkerInfo, what: str, attempt: int, reason: LossReason, words: str
) -> WorkerLostError:
    """Return the error for items that lost their worker for the last time; `words` say how."""
    return WorkerLostError(
        f"Worker {worker.index} ({where(worker)}) was lost while it ran {what}, attempt {attempt}:"
        f" {words}. {HINTS[reason]}",
        reason=reason,
        attempts=attempt,
    )


def stranded(what: str, attempt: int, reason: LossReason, words: str) -> WorkerLostError:
    """Return the error for items that wait for workers that are gone; `words` say how."""
    return WorkerLostError(
        f"{what} was queued (attempt {attempt}), but no worker is left on which it may run:"
        f" {words}. Submit it to the whole pool, or to a part that has workers.",
        reason=reason,
        attempts=attempt - 1,
    )


def parked(num_workers: int) -> str:
    """Return the message that idle workers have ended."""
    count = f"{num_workers} worker" + ("s have" if num_workers != 1 else " has")
    return f"idle; {count} exited and freed their memory; the next call starts them again"


def not_started(num_failed: int, num_places: int, place: int, why: str, logs: str | None) -> str:
    """Return the message about workers that did not start: why that place, and the logs."""
    step = ""
    if isinstance(why, Refusal):
        step = " Call that function in this process to debug it."
    elif logs is not None:
        step = f" See {logs}."
    return f"{num_failed} of {num_places} workers did not start; worker {place}: {why}.{step}"


def dropped(words: str, num_left: int) -> str:
    """Return the message that a worker is not started again; `words` say why."""
    return (
        f"A worker could not be restarted: {words}. {_number(num_left)} pool.resize() can start"
        " another."
    )


def left(worker: WorkerInfo, words: str, num_left: int) -> str:
    """Return the message that a worker has gone with its machine; `words` say why."""
    return f"Worker {worker.index} ({where(worker)}) was removed: {words}. {_number(num_left)}"


def faulty(worker: WorkerInfo, failed: int, finished: int, num_left: int) -> str:
    """Return the message that a worker was taken out: it failed items that ran elsewhere."""
    elsewhere = (
        f"{finished:,} finished on other workers in that time"
        if finished
        else "calls of the same function still run on other workers"
    )
    return (
        f"Worker {worker.index} ({where(worker)}) was removed from the pool: its last {failed:,}"
        f" items all failed, and {elsewhere}. Check that machine and its GPU; resize the pool to"
        f" get another worker. {_number(num_left)}"
    )


def _number(num_left: int) -> str:
    return f"The pool now has {num_left} worker{'s' * (num_left != 1)}."


def unsent(what: str, error: Exception) -> TaskError:
    """Return the error for items that could not be sent because of another."""
    return (
        error
        if isinstance(error, SerializationError)
        else TaskError(f"{what} could not be sent: {error}")
    )


def timed_out(worker: WorkerInfo, what: str, timeout_s: float) -> TaskTimeoutError:
    """Return the error for items that have run too long."""
    return TaskTimeoutError(
        f"{what} had not ended after timeout_s={timeout_s:g}, and was stopped on worker"
        f" {worker.index} ({where(worker)}). Raise timeout_s, or check what it printed and"
        " reported."
    )


def pool_broken(words: str) -> PoolBrokenError:
    """Return the error for tasks of a pool without workers; `words` are about the last one."""
    return PoolBrokenError(
        f"No worker is left, and none could be restarted; the last error: {words}. Open a new pool"
        " with parpool()."
    )


def pool_preempted(words: str, left_s: float | None, counts: Counts) -> PoolPreemptedError:
    """Return the error for tasks of a pool whose nodes go; `words` say which, `left_s` how soon."""
    until = "" if left_s is None else f" in {max(left_s, 0):.0f} s"
    return PoolPreemptedError(
        f"The pool has ended: {words}{until}, and no other node can come. {counts.finished:,} of"
        f" {counts.submitted:,} items have finished. Make the same call with the same run_dir on"
        " other nodes to continue."
    )


def driver_failed(cause: BaseException | None) -> PoolBrokenError:
    """Return the error for calls that still wait for a failed driver."""
    # Ray Client's, before anybody has noticed that nothing comes any more
    if isinstance(cause, ConnectionError):
        ended = PoolBrokenError(
            f"The connection to the cluster has ended: {str(cause).rstrip('.')}. Connect again, and"
            " open a new pool."
        )
        ended.__cause__ = cause
        return ended
    broken = PoolBrokenError(
        "Ctrl-C has ended the pool, whose driver ran in this thread. Open another with parpool()."
        if isinstance(cause, KeyboardInterrupt)
        else "The pool's driver has failed. This is a bug in raypool; report it with the cause"
        " below."
    )
    broken.__cause__ = cause
    return broken


def missing_module(name: str, host: str) -> str | None:
    """Return the advice for a module that a worker did not find; None if it is not here either."""
    folder = folder_of(name)
    if folder is None:
        return None
    if is_installed(str(folder)):
        return (
            f"raypool: {name} is installed here, but not on {host}. Install the same version there,"
            " or add it to packages=."
        )
    return (
        f"raypool: this process finds {name} in {folder}, workers on {host} do not. parpool(...,"
        f" working_dir={str(folder)!r}) sends that folder to all machines."
    )
