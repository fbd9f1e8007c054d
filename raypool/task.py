"""What a user's function sees of the task that it is running."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CurrentTask:
    """The task that is running: which item, for which time, on which worker.

    Attributes:
        index: The item's number in its loop, from 0; 0 for a single call.
        attempt: For the how-many-th time the item runs, from 1; above 1 only after a worker was lost or by `retry_on`.
        seed: The item's own 64-bit seed, if the loop was given one; the same on any number of workers.
        worker: The worker's number in its pool, from 0.
        gpu: The GPU's index on its machine, None without one.
        name: What the caller named the work, None if nothing.
    """

    index: int = 0
    attempt: int = 1
    seed: int | None = None
    worker: int = 0
    gpu: int | None = None
    name: str | None = None
    _note: Running | None = field(default=None, repr=False, compare=False)

    @property
    def should_stop(self) -> bool:
        """Whether somebody has asked for an early end (`future.request_stop()`): return what you have.

        Looking costs next to nothing; a training loop may do it at every step.
        """
        return self._note is not None and self._note.should_stop

    @property
    def device(self) -> torch.device:
        """The `torch.device` to train on: the worker's GPU if it has one that CUDA can use, else the CPU."""
        import torch

        if (self.gpu is not None or not in_task()) and torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("cpu")


def _say_nothing(note: Running, kind: str, payload: Any) -> None:
    """Nobody listens."""


@dataclass(slots=True)
class Running:
    """The runner's own note of what it is running. One per slice; only `index` changes, so that an item costs nothing.

    `say(note, kind, payload)` hands something to whoever listens to this task outside.
    """

    index: int
    attempt: int
    seed: int | None
    worker: int
    gpu: int | None
    name: str | None
    task_id: int = -1
    should_stop: bool = False
    say: Callable[[Running, str, Any], None] = _say_nothing


running: ContextVar[Running | None] = ContextVar("raypool_running", default=None)
"""Set round every slice that runs in this thread."""

_running_in_process: Running | None = None


def note_in_process(note: Running | None) -> None:
    """Note what this whole process is running, for its other threads: a worker process runs one thing at a time."""
    global _running_in_process
    _running_in_process = note


def note_here() -> Running | None:
    """Return the runner's note of what is running in this thread, or in the worker process that it belongs to."""
    return running.get() or _running_in_process


class Link(Protocol):
    """A worker process's way to the rest of its pool."""

    def send(self, kind: str, key: Any, payload: Any) -> None:
        """Send something, in order, with what else is sent; returns at once, unless far too much is on its way."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the pool's `Exchange`, and wait for its answer."""


_link: Link | None = None


def link() -> Link | None:
    """Return the way from this worker process to its pool; None in any other process."""
    return _link


def set_link(way: Link) -> None:
    """Note the way from this worker process to its pool."""
    global _link
    _link = way


def current_task() -> CurrentTask:
    """Return what is known of the task that is running here.

    Outside a pool this is item 0, attempt 1, on the best device of this machine, so that a function runs unchanged by itself.

    Example:
        >>> current_task().index, current_task().attempt
        (0, 1)
    """
    note = note_here()
    if note is None:
        return CurrentTask()
    seed = None if note.seed is None else item_seed(note.seed, note.index)
    return CurrentTask(note.index, note.attempt, seed, note.worker, note.gpu, note.name, note)


def item_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of an item: the first word of the `index`-th child of `numpy.random.SeedSequence(seed)`.

    Source:
        NumPy reference, "Parallel random number generation", SeedSequence spawning.
    """
    import numpy as np

    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


_is_worker_process = False


def mark_worker_process() -> None:
    """Note that this whole process is a worker: whatever asks for a pool in it gets a serial one."""
    global _is_worker_process
    _is_worker_process = True


def in_task() -> bool:
    """Whether this code runs inside a task (or in a thread of a worker process)."""
    return _is_worker_process or running.get() is not None
