"""The context of the task that runs here, and that of the whole process."""

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

from raypool.errors import InvalidValueError, TaskCancelled

if TYPE_CHECKING:
    from raypool.backends.ray.worker import WorkerLink
    from raypool.worker.folders import CheckpointFolders
    from raypool.worker.interrupts import Interrupts


PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose values cannot change, and whose pickles need no module."""

SECURE_TIMEOUT_S = 5.0
"""How long a checkpoint waits for reports that cannot be sent [s]."""


def _say_nothing(note: TaskContext, kind: str, payload: Any) -> bool | None:
    """Do nothing: there is no listener."""
    return None


@dataclass(slots=True)
class TaskContext:
    """The context of the slice that runs here; only `index` changes, so an item costs nothing.

    `say(note, kind, payload)` hands something to the listener outside: `kind` "metrics" with (Unix
    time [s], {name: value}), or "text" with what was printed; it returns whether the text is shown
    from there, and not by the stream that it was written to.
    """

    index: int
    attempt: int
    seed: int | None
    worker: int
    gpu: int | None
    name: str | None
    task_id: int = -1
    should_stop: bool = False
    say: Say = _say_nothing
    printed: deque[tuple[int, str]] | None = None  # the newest text, with its item's number
    outer: TaskContext | None = None  # the task in which this one was called for
    # finds the pool's exchange, if that is in this process
    find_way: Callable[[], ExchangeClient] | None = None
    interrupts: Interrupts | None = None  # which `uninterruptible` pauses
    thread_id: int = field(default_factory=threading.get_ident)  # in which it runs
    # what the ranks of a training have agreed on, None in anything else
    agreed_stop: bool | None = None
    folders: CheckpointFolders | None = None  # of the pool, for checkpoints
    # the folder that keeps checkpoints, if there is one, and in it each item's by its number
    checkpoints: tuple[str, Mapping[int, str]] | None = None
    is_leaving: bool = False  # its machine is about to go
    has_heard: bool = False  # of that, so that it may end early
    # functions to call then, each with its item
    on_leave: Sequence[tuple[int, Callable[[], object]]] = ()
    # of the call to the worker: an item that runs again, charged an attempt or not, is in a later
    # one
    call_id: int = 0

    def leave(self) -> None:
        """Note that its machine is about to shut down, and call the item's functions for that."""
        self.is_leaving = True
        wanted, self.on_leave = self.on_leave, ()
        for index, fn in wanted:
            if index == self.index:
                self.has_heard = True
                try:
                    fn()
                except Exception:  # it is not the item that has failed: that runs again
                    traceback.print_exc()


Say = Callable[[TaskContext, str, Any], "bool | None"]
"""Hands something of a task to its listener: see `TaskContext`."""

running: ContextVar[TaskContext | None] = ContextVar("raypool_running", default=None)
"""Set around every slice that runs in this thread."""


class ProcessContext:
    """The context of this whole process, in all of its threads.

    Attributes:
        running: The task that a worker process runs, for threads of native libraries, which have no
            context of their own.
        link: The connection of a worker process to its pool; None in any other process.
        is_worker: Whether this process is a worker: a pool that is opened in it is a serial one.
        is_managed: Whether it is a rank of the managed lane, which has no connection to the pool.
        is_retired: Whether this process is a worker that begins no more tasks.
        is_terminated: Whether SIGTERM ends this process, so that it waits for no unfinished work.
    """

    __slots__ = ("is_managed", "is_retired", "is_terminated", "is_worker", "link", "running")

    def __init__(self) -> None:
        self.running: TaskContext | None = None
        self.link: WorkerLink | None = None
        self.is_worker = False
        self.is_managed = False
        self.is_retired = False
        self.is_terminated = False

    def retire(self) -> None:
        """Let a worker process be replaced before the next task; elsewhere this has no effect."""
        self.is_retired = self.is_worker

    def check_connected(self, what: str) -> None:
        """Make sure that this process can reach its pool.

        Raises:
            InvalidValueError: It is a rank of the managed lane.
        """
        if self.is_managed:
            raise InvalidValueError(
                f'{what} is not available with lane="managed", whose ranks are processes of Ray'
                ' Train\'s, without a connection to the pool. Use lane="warm".'
            )

    def fall_silent(self) -> None:
        """Turn off reports and output: a forked child has no thread left that would send them."""
        self.link = None
        for note in (running.get(), self.running):
            if note is not None:
                note.say, note.interrupts = _say_nothing, None


this_process = ProcessContext()

# children are those of a DataLoader, say
os.register_at_fork(after_in_child=this_process.fall_silent)


def note_here() -> TaskContext | None:
    """Return the context of the task in this thread, or in the worker process around it."""
    return running.get() or this_process.running


def notes_here() -> Iterator[TaskContext]:
    """Yield the context of the task that runs here, then those around it (the task of a loop)."""
    note = note_here()
    while note is not None:
        yield note
        note = note.outer


def is_cancelled() -> bool:
    """Whether the task that runs here, or one around it, was cancelled."""
    return any(
        note.interrupts is not None and note.interrupts.is_cancelled for note in notes_here()
    )


def is_interrupt(error: BaseException) -> bool:
    """Whether it ends all that runs inline in this thread: Ctrl-C, or a cancellation around it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, TaskCancelled) and is_cancelled()
    )


def in_task() -> bool:
    """Whether this code runs inside a task (or in a thread of a worker process)."""
    return this_process.is_worker or running.get() is not None


@contextlib.contextmanager
def uninterruptible(note: TaskContext | None) -> Iterator[None]:
    """Call something that must not be interrupted; a cancellation meanwhile arrives at its end.

    Raises:
        TaskCancelled: The task, or one around it, was cancelled meanwhile.
    """
    paused: list[Interrupts] = []
    try:
        # The innermost first: a cancellation of a task around it may arrive between two.
        while note is not None:
            # in another thread than the task's nothing is interrupted
            is_its_thread = note.thread_id == threading.get_ident()
            if is_its_thread and note.interrupts is not None and note.interrupts.pause():
                paused.append(note.interrupts)
            note = note.outer
        yield
    finally:
        with contextlib.ExitStack() as resumed:  # the outermost first, each whatever it raises
            for interrupts in paused:
                resumed.callback(interrupts.resume)


def let_notes_travel() -> None:
    """Let threads, and calls submitted to thread pools, run in the context of their starter.

    So their reports and output belong to the task that they work for, even if they outlive it, or
    existed before it. From Python 3.14 on threads can do so by themselves
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


@contextlib.contextmanager
def environment(values: Mapping[str, str], *others: str) -> Iterator[None]:
    """Set environment variables for a while; `others` may be changed meanwhile."""
    names = (*values, *others)
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        os.environ.update(values)
        yield
    finally:
        for name in names:
            if name not in before:
                os.environ.pop(name, None)
        os.environ.update(before)


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


def item_seed(seed: int, index: int) -> int:
    """Return an item's 64-bit seed: of the `index`-th child of `numpy.random.SeedSequence(seed)`.

    Source:
        NumPy reference, "Parallel random number generation", SeedSequence spawning.
    """
    import numpy as np

    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def secure_reports(timeout_s: float = SECURE_TIMEOUT_S) -> None:
    """Send this process's reports at once, and wait this long for their arrival [s].

    A checkpoint written after that cannot outlive them.
    """
    if this_process.link is not None:
        this_process.link.drain(timeout_s)


class ExchangeClient(Protocol):
    """A connection to a pool's `Exchange`."""

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of it, and wait for its answer."""

    def pack(self, value: Any, what: str) -> Any:
        """Make a value ready to travel, as it is now."""

    def unpack(self, packed: Any) -> Any:
        """Return the value that was packed."""
