"""What a user's function sees of the task that it is running."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Protocol

from raypool.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import torch

    from raypool.store import ValueStore

NUMBERS = frozenset({int, float, bool})
"""Types of metrics that need no closer look."""

MAX_METRIC_TEXT = 256
"""A metric that is a text has at most so many characters: it goes into a table, not into a log."""


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

        Looking costs next to nothing; a training loop may do it at every step. In a loop that `pool.train` runs it becomes true
        for all ranks at once, by a `ray.train.report`, so that none goes on without the others.
        """
        note = self._note
        if note is None:
            return False
        return note.should_stop if note.agreed_stop is None else note.agreed_stop

    @property
    def store(self) -> ValueStore:
        """The values that all tasks of the pool may put and read; outside a pool, a store of this process."""
        from raypool.store import store_here

        return store_here()

    @property
    def checkpoint_dir(self) -> Path:
        """The item's own folder for checkpoints, which is there: what one attempt has left in it, the next one finds.

        In a loop with a `run_dir` it is in that folder, and stays; with `options(checkpoints=...)` it is kept there. On a machine
        that does not see that place it is a copy, which is brought home by `save_checkpoint` and when the item ends. Without
        either it is a temporary folder of the machine, which goes with the pool; outside a pool, of this process.
        """
        from raypool.folders import folder_of_process

        note = self._note
        return folder_of_process() if note is None or note.folders is None else note.folders.folder(note, self.index)

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

    `say(note, kind, payload)` hands something to whoever listens to this task outside: `kind` "metrics" with (Unix time [s],
    {name: value}), or "text" with what was printed. `printed` is the newest of that, with the item's number.
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
    printed: deque[tuple[int, str]] | None = None
    outer: Running | None = None  # the task in which this one was called for
    find_way: Callable[[], Way] | None = None  # to the pool's exchange, if that is in this process
    shelter: Shelter | None = None  # for what is not to be interrupted
    thread_id: int = field(default_factory=threading.get_ident)  # in which it runs
    agreed_stop: bool | None = None  # what the ranks of a training have agreed on, None in anything else
    folders: Folders | None = None  # of the pool, for checkpoints
    checkpoints: tuple[str, Mapping[int, str]] | None = (
        None  # where they are kept, if they are, and there each item's by its number
    )


class Folders(Protocol):
    """Gives the items that a pool runs here their folders for checkpoints."""

    def temporary(self) -> Path:
        """Return a folder of the pool's on this machine, which goes with the pool."""

    def folder(self, note: Running, index: int) -> Path:
        """Return the folder of an item, made or fetched if it is not here."""

    def bring_home(self, note: Running, index: int) -> None:
        """See to it that what is in the folder now is where it is kept."""

    def end(self, note: Running, index: int) -> None:
        """Bring home what is in the folder of an item that has ended, if it has one, and let go of what is only a copy."""


class Shelter(Protocol):
    """Keeps what is running from being interrupted."""

    def shield(self) -> bool:
        """Interrupt nothing from here on; return whether `expose` has to follow: not where it was interrupted before."""

    def expose(self) -> None:
        """Interrupt it again; at once, if that was wanted meanwhile."""


@contextlib.contextmanager
def unbroken(note: Running | None) -> Iterator[None]:
    """Do something that is not to be interrupted in its midst; what was wanted meanwhile comes at the end.

    Raises:
        TaskCancelled: The task was cancelled meanwhile.
    """
    shelter = None if note is None or threading.get_ident() != note.thread_id else note.shelter
    if shelter is None or not shelter.shield():  # in another thread than the task's nothing is interrupted
        yield
        return
    try:
        yield
    finally:
        shelter.expose()


Say = Callable[[Running, str, Any], None]
"""How something gets out of a task: see `Running`."""

running: ContextVar[Running | None] = ContextVar("raypool_running", default=None)
"""Set round every slice that runs in this thread."""

_running_in_process: Running | None = None


def note_in_process(note: Running | None) -> None:
    """Note what this whole process is running, for threads of native libraries: a worker process runs one thing at a time."""
    global _running_in_process
    _running_in_process = note


def let_notes_travel() -> None:
    """Let threads, and what is handed to pools of threads, run in the context of whoever starts or submits them.

    So what they report and print is about the task that they work for: also if they outlive it, or were there before it. From
    Python 3.14 on threads can do so by themselves (`thread_inherit_context`). For worker processes, which are raypool's own.
    """
    start, submit = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit

    def start_in_context(self: threading.Thread) -> None:
        self.run = functools.partial(copy_context().run, self.run)  # type: ignore[method-assign]
        start(self)

    def submit_in_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, copy_context().run, fn, *args, **kwargs)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    concurrent.futures.ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign]


def note_here() -> Running | None:
    """Return the runner's note of what is running in this thread, or in the worker process that it belongs to."""
    return running.get() or _running_in_process


def notes_here() -> Iterator[Running]:
    """Yield the note of what is running here, and those of what it runs in, from the inside out: a loop in a task, say."""
    note = note_here()
    while note is not None:
        yield note
        note = note.outer


def _fall_silent() -> None:
    """In a forked child (of a DataLoader, say) nobody is left who would pass on what it says."""
    global _link
    _link = None
    for note in (running.get(), _running_in_process):
        if note is not None:
            note.say, note.shelter = _say_nothing, None


os.register_at_fork(after_in_child=_fall_silent)


class Way(Protocol):
    """A way to a pool's `Exchange`."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of it, and wait for its answer."""

    def pack(self, value: Any, what: str) -> Any:
        """Make a value ready to travel, as it is now."""

    def unpack(self, packed: Any) -> Any:
        """Return the value that was packed."""


class Link(Way, Protocol):
    """A worker process's way to the rest of its pool."""

    @property
    def worker_id(self) -> int:
        """What the pool calls this process."""

    def send(self, kind: str, key: Any, payload: Any) -> None:
        """Send something, in order, with what else is sent; returns at once, unless far too much is on its way."""

    def send_latest(self, key: str, maxsize: int, payload: bytes) -> None:
        """Send to a queue of which only the newest few values matter: those that wait are dropped for it; never waits."""

    def flush(self) -> int:
        """Send what waits to be sent, now; return the number of the newest batch."""


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


def report(**metrics: float | str) -> None:
    """Report how the task is doing: values by name, as often as you like.

    A moment later they are in the table `metrics` of the task's future, or of the loop's `Results`; the display of a loop shows
    the last ones. It takes some microseconds and waits for nobody. Outside a pool, and in the forked processes of a DataLoader,
    it checks the values and does nothing else, so that a function runs unchanged by itself.

    Args:
        metrics: Numbers (Python's or NumPy's) and short texts (at most 256 characters), in units of your own.

    Raises:
        InvalidTypeError: A value is neither. A tensor: give it to a `MetricBuffer`, or report `tensor.item()`, which waits
            for the GPU.
        InvalidValueError: A text is too long.

    Source:
        Ray 2.60, ray.train.report, without its barrier over the workers.

    Example:
        >>> from raypool import parpool
        >>> def train(epochs):
        ...     for epoch in range(epochs):
        ...         report(epoch=epoch, loss=1 / (epoch + 1))
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     future = pool.parfeval(train, 2)
        >>> future.metrics[["epoch", "loss"]].to_dict("list")
        {'epoch': [0, 1], 'loss': [1.0, 0.5]}
    """
    if not NUMBERS.issuperset(map(type, metrics.values())):
        metrics = {name: _checked_metric(name, value) for name, value in metrics.items()}
    report_of(time(), metrics)


def report_of(moment: float, metrics: Mapping[str, float | str]) -> None:
    """Report what was so at some moment [Unix time, s]; all of it has been checked."""
    note = next(notes_here(), None)
    if note is not None:
        note.say(note, "metrics", (moment, metrics))


def _checked_metric(name: str, value: Any) -> float | str:
    """Return a metric as a plain number or text."""
    if isinstance(value, str):
        if len(value) > MAX_METRIC_TEXT:
            raise InvalidValueError(
                f"report({name}=...) got a text of {len(value):,} characters; {MAX_METRIC_TEXT} fit. print() it."
            )
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return value if isinstance(value, bool) else int(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()  # type: ignore[no-any-return]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        step = f"Give it to a raypool.MetricBuffer, or report {name}.item(), which waits for the GPU if it is there."
    else:
        step = "Report single numbers or short texts."
    raise InvalidTypeError(f"report({name}=...) got a {type(value).__name__}, which is neither a number nor a text. {step}")


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
