"""State of this process: the context of each task, its connections to the pool, and flags."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from raypool.worker.checkpoint_folders import CheckpointFolders
    from raypool.worker.interrupts import Interrupts


def _say_nothing(note: TaskContext, kind: str, payload: Any) -> bool | None:
    """Nobody listens."""
    return None


@dataclass(slots=True)
class TaskContext:
    """The runner's own note of what it is running. One per slice; only `index` changes, so that an
    item costs nothing.

    `say(note, kind, payload)` hands something to whoever listens to this task outside: `kind`
    "metrics" with (Unix time [s],
    {name: value}), or "text" with what was printed; it returns whether the text is shown from
    there, in place of the stream that it was written to. `printed` is the newest of that, with the
    item's number.
    """

    index: int
    attempt: int
    seed: int | None
    worker: int
    gpu: int | None
    name: str | None
    task_id: int = -1
    should_stop: bool = False
    say: Callable[[TaskContext, str, Any], bool | None] = _say_nothing
    printed: deque[tuple[int, str]] | None = None
    outer: TaskContext | None = None  # the task in which this one was called for
    find_way: Callable[[], ExchangeClient] | None = (
        None  # to the pool's exchange, if that is in this process
    )
    shelter: Interrupts | None = None  # for what is not to be interrupted
    thread_id: int = field(default_factory=threading.get_ident)  # in which it runs
    # what the ranks of a training have agreed on, None in anything else
    agreed_stop: bool | None = None
    folders: CheckpointFolders | None = None  # of the pool, for checkpoints
    checkpoints: tuple[str, Mapping[int, str]] | None = (
        None  # where they are kept, if they are, and there each item's by its number
    )
    is_leaving: bool = False  # its machine is about to go
    has_heard: bool = False  # of that, so that it may end early
    # what to call then, and for which item
    on_leave: Sequence[tuple[int, Callable[[], object]]] = ()
    # of the call to the worker: an item that runs again, charged an attempt or not, is in a later
    # one
    call_id: int = 0

    def leave(self) -> None:
        """Note that its machine is about to go, and call what wants to be called for the item at
        hand.
        """
        self.is_leaving = True
        wanted, self.on_leave = self.on_leave, ()
        for index, fn in wanted:
            if index == self.index:
                self.has_heard = True
                try:
                    fn()
                except Exception:  # it is not the item that has failed: that runs again
                    traceback.print_exc()


@contextlib.contextmanager
def unbroken(note: TaskContext | None) -> Iterator[None]:
    """Call something that must not be interrupted; a cancellation meanwhile arrives at its end.

    Raises:
        TaskCancelled: The task was cancelled meanwhile.
    """
    shelter = None if note is None or threading.get_ident() != note.thread_id else note.shelter
    # in another thread than the task's nothing is interrupted
    if shelter is None or not shelter.shield():
        yield
        return
    try:
        yield
    finally:
        shelter.expose()


Say = Callable[[TaskContext, str, Any], "bool | None"]
"""How something gets out of a task: see `TaskContext`."""


running: ContextVar[TaskContext | None] = ContextVar("raypool_running", default=None)
"""Set round every slice that runs in this thread."""


_running_in_process: TaskContext | None = None


def note_in_process(note: TaskContext | None) -> None:
    """Note what this whole process is running, for threads of native libraries: a worker process
    runs one thing at a time.
    """
    global _running_in_process
    _running_in_process = note


def let_notes_travel() -> None:
    """Let threads, and calls submitted to thread pools, run in the context of the code that starts
    them.

    So what they report and print is about the task that they work for: also if they outlive it, or
    were there before it. From Python 3.14 on threads can do so by themselves
    (`thread_inherit_context`). For worker processes, which are raypool's own.
    """
    start, submit = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit

    def start_in_context(self: threading.Thread) -> None:
        self.run = functools.partial(copy_context().run, self.run)  # type: ignore[method-assign]
        start(self)

    def submit_in_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, copy_context().run, fn, *args, **kwargs)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    concurrent.futures.ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign]


def note_here() -> TaskContext | None:
    """Return the runner's note of what is running in this thread, or in the worker process that it
    belongs to.
    """
    return running.get() or _running_in_process


def notes_here() -> Iterator[TaskContext]:
    """Yield the note of what is running here, and those of what it runs in, from the inside out: a
    loop in a task, say.
    """
    note = note_here()
    while note is not None:
        yield note
        note = note.outer


class _Endings(threading.local):
    """Calls that have to be made before this thread ends."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []


_endings = _Endings()


def before_thread_ends(call: Callable[[], object]) -> None:
    """Register a call that a worker's thread makes before it ends.

    Objects that the thread keeps in a `threading.local` might otherwise be destroyed while the
    interpreter shuts down.
    """
    if call not in _endings.calls:
        _endings.calls.append(call)


def end_thread() -> None:
    """Make the calls that were registered in this thread."""
    while _endings.calls:
        _endings.calls.pop()()


def _fall_silent() -> None:
    """Turn off reports and output in a forked child (of a DataLoader, say): no thread is left that
    would send them.
    """
    global _link
    _link = None
    for note in (running.get(), _running_in_process):
        if note is not None:
            note.say, note.shelter = _say_nothing, None


os.register_at_fork(after_in_child=_fall_silent)


class ExchangeClient(Protocol):
    """A connection to a pool's `Exchange`."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of it, and wait for its answer."""

    def pack(self, value: Any, what: str) -> Any:
        """Make a value ready to travel, as it is now."""

    def unpack(self, packed: Any) -> Any:
        """Return the value that was packed."""


class PoolLink(ExchangeClient, Protocol):
    """A worker process's connection to the rest of its pool."""

    @property
    def worker_id(self) -> int:
        """What the pool calls this process."""

    def send(self, kind: str, key: Any, payload: Any) -> None:
        """Send something, in order, with what else is sent; returns at once, unless far too much is
        on its way.
        """

    def send_latest(self, key: str, maxsize: int, payload: bytes) -> None:
        """Send to a queue of which only the newest few values matter: those that wait are dropped
        for it; never waits.
        """

    def flush(self) -> int:
        """Send what waits to be sent, now; return the number of the newest batch."""


_link: PoolLink | None = None


def link() -> PoolLink | None:
    """Return the way from this worker process to its pool; None in any other process."""
    return _link


def set_link(way: PoolLink) -> None:
    """Note the way from this worker process to its pool."""
    global _link
    _link = way


def item_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of an item: the first word of the `index`-th child of
    `numpy.random.SeedSequence(seed)`.

    Source:
        NumPy reference, "Parallel random number generation", SeedSequence spawning.
    """
    import numpy as np

    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


_is_worker_process = False


def mark_worker_process() -> None:
    """Note that this whole process is a worker: whatever asks for a pool in it gets a serial
    one.
    """
    global _is_worker_process
    _is_worker_process = True


def in_worker_process() -> bool:
    """Whether this whole process is a worker."""
    return _is_worker_process


_is_retired = False


def retire_process() -> None:
    """Let the worker process that this code runs in be replaced before the next task; elsewhere
    this does nothing.
    """
    global _is_retired
    _is_retired = _is_worker_process


def is_retired() -> bool:
    """Whether this process is a worker that begins nothing more."""
    return _is_retired


def in_task() -> bool:
    """Whether this code runs inside a task (or in a thread of a worker process)."""
    return _is_worker_process or running.get() is not None
