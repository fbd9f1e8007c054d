"""Interrupts tasks from outside: only the slice that was meant, only while the user's code runs.

A request (a "wish" below) names an attempt and a task. The running slice is interrupted by raising
`TaskCancelled` in it. In a worker process a signal does that: its handler runs in the main thread,
where tasks run, and so also ends a `time.sleep`. In a thread it is an asynchronous exception, which
arrives when the thread runs Python code again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _weakrefset
import contextlib
import ctypes
import inspect
import itertools
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from raypool.core.messages import Signal
from raypool.errors import TaskCancelled
from raypool.worker.running import TaskContext, this_process

if TYPE_CHECKING:
    from raypool.worker.runner import RawResult

STOP_SIGNAL = signal.SIGRTMIN + 5
"""SIGUSR1 and SIGUSR2 belong to schedulers of clusters and to training frameworks."""

WISH = struct.Struct("=qqq")
"""A request in the pipe of a `ProcessGuard`: attempt, task, and number in `SIGNALS`."""

SIGNALS = (Signal.STOP, Signal.CANCEL, Signal.LEAVE)

AT_HAND = struct.Struct("=qq")
"""The board of a `ProcessGuard`: attempt and task of the slice at hand, or NOTHING."""

WHOLE = -1
"""The task while a call is taken apart and its answer packed: it may be any of its slices."""

NOTHING = (-1, WHOLE)

IMPORT_MACHINERY = "<frozen importlib._bootstrap>"

SWALLOWERS = frozenset({weakref.__file__, _weakrefset.__file__})
"""Code that runs when something is collected: Python drops exceptions that are raised there."""

THREAD_START = inspect.unwrap(threading.Thread.start).__code__
"""A thread in here is about to make another: see `_raise_in`."""

THREAD_START_S = 10.0
"""How long a thread that a task makes has to begin [s]."""

NOW = 0.0
"""A deadline that has passed."""

AGAIN_S = 0.05
"""The pause between two tries to interrupt [s]."""


class Terminated(SystemExit):
    """This worker process was told to end (SIGTERM); `sys.exit` in a task only fails its item."""


def terminate(*_: Any) -> NoReturn:
    """End this process: a handler of SIGTERM."""
    raise Terminated(1)  # Ray's own handler raises what `sys.exit(1)` does, as a task may


class Interrupts:
    """Knows which slice is running, and which requests are for it.

    The runner calls `begin_call`, `approach`, `begin` and `end`; requests come from elsewhere.
    """

    def __init__(self) -> None:
        self._attempt_id = -1
        self._at_hand = NOTHING
        self._is_armed = False  # the running slice may be interrupted
        self._note: TaskContext | None = None
        self._result: RawResult | None = None
        self._wishes: dict[tuple[int, int], Signal] = {}

    def begin_call(self, attempt_id: int) -> None:
        """Note which call the next slices belong to, and forget requests about earlier ones."""
        self._attempt_id = attempt_id
        for key in list(self._wishes):  # in place: another may be added at any moment
            if key[0] < attempt_id:
                self._wishes.pop(key, None)

    def approach(self, task_id: int) -> None:
        """Note that a slice is opened, which is not interrupted although it may run user code.

        Raises:
            TaskCancelled: It was cancelled before it began.
        """
        self._at_hand = (self._attempt_id, task_id)
        if self._wishes.get(self._at_hand) in (Signal.CANCEL, Signal.LEAVE):
            raise TaskCancelled

    def begin(self, note: TaskContext, result: RawResult) -> None:
        """Note that the user's code begins.

        Raises:
            TaskCancelled: It was cancelled. From here on this may be raised at any moment, until
                `end` has returned.
        """
        self._note, self._result = note, result
        wish = self._wishes.get(self._at_hand)
        if wish in (Signal.CANCEL, Signal.LEAVE):
            raise TaskCancelled
        if wish is Signal.STOP:
            note.should_stop = True
        self._is_armed = True

    def pause(self) -> bool:
        """Stop interrupting the running slice: what follows is not user code, and has to finish.

        Returns:
            Whether it could be interrupted until now, so that `resume` has to follow: a slice is
            interrupted only once.
        """
        was_armed, self._is_armed = self._is_armed, False
        return was_armed

    def resume(self) -> None:
        """Allow interrupting the running slice again.

        Raises:
            TaskCancelled: It was cancelled meanwhile.
        """
        wish = self._wishes.get(self._at_hand)
        if wish is not None and self._note is not None:
            # first: the task's own function for a departure may be interrupted
            self._is_armed = wish is not Signal.CANCEL
            if self._carry_out(wish):
                raise TaskCancelled
        self._is_armed = True

    @property
    def is_cancelled(self) -> bool:
        """Whether the running slice was cancelled."""
        return self._result is not None and self._result.is_cancelled

    def end(self) -> None:
        """Note that the user's code has ended.

        Raises:
            TaskCancelled: Once; then it has to be called again.
        """
        self._is_armed = False
        self._at_hand = NOTHING
        self._note = self._result = None  # with what the task has returned

    def take(self, wish: Signal, attempt_id: int, task_id: int) -> bool:
        """Take a request; return whether to interrupt the running slice for it, once."""
        key = (attempt_id, task_id)
        if attempt_id >= self._attempt_id and self._wishes.get(key) is not Signal.CANCEL:
            self._wishes[key] = wish
        if key != self._at_hand or not self._is_armed or not self._carry_out(wish):
            return False
        self._is_armed = False
        return True

    def _carry_out(self, wish: Signal) -> bool:
        """Tell the running slice of a request; return whether to interrupt it."""
        note, result = self._note, self._result
        assert note is not None
        assert result is not None
        if wish is Signal.CANCEL:
            # no further item begins, also if the user's code catches the exception
            note.should_stop = result.is_cancelled = True
            result.deadline = NOW
            return True
        if wish is Signal.STOP:
            note.should_stop = True
        else:
            result.deadline = NOW  # the next items run elsewhere
            note.leave()
        return False


class ProcessGuard(Interrupts):
    """Guards this process's main thread; the node agent sends requests: a signal, and a pipe.

    A board in shared memory names the running slice: the node agent reads it to decide whether to
    kill this process.
    """

    def __init__(self) -> None:
        super().__init__()
        # the node agent opens pipe and board through /proc
        self.pipe, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.board = os.memfd_create("raypool-board")
        os.ftruncate(self.board, AT_HAND.size)
        self._board = mmap.mmap(self.board, AT_HAND.size)
        AT_HAND.pack_into(self._board, 0, *NOTHING)
        signal.signal(STOP_SIGNAL, self._on_signal)

    def begin_call(self, attempt_id: int) -> None:
        """Note that a call begins: its slices are at hand until `end_call`."""
        super().begin_call(attempt_id)
        AT_HAND.pack_into(self._board, 0, attempt_id, WHOLE)

    def end_call(self) -> None:
        """Note that a call was answered."""
        AT_HAND.pack_into(self._board, 0, *NOTHING)

    def approach(self, task_id: int) -> None:
        """Note that a slice is opened."""
        AT_HAND.pack_into(self._board, 0, self._attempt_id, task_id)
        super().approach(task_id)

    def begin(self, note: TaskContext, result: RawResult) -> None:
        """Note that the user's code begins."""
        this_process.running = note  # first: `begin` may raise, and after it any line may
        super().begin(note, result)

    def end(self) -> None:
        """Note that the user's code has ended."""
        super().end()
        this_process.running = None
        AT_HAND.pack_into(self._board, 0, self._attempt_id, WHOLE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if _is_delicate(frame):
            return  # the request stays in the pipe, and is signalled again
        try:
            wishes = os.read(self.pipe, 1024 * WISH.size)
        except BlockingIOError:  # the handler of an earlier signal has read it
            return
        taken = [self.take(SIGNALS[number], *key) for *key, number in WISH.iter_unpack(wishes)]
        if any(taken):
            raise TaskCancelled


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether nothing should be raised here: in an import or a finalizer."""
    # a half-imported module would fail later imports; a finalizer swallows what is raised
    while frame is not None:
        code = frame.f_code
        if (
            code.co_filename == IMPORT_MACHINERY
            or code.co_name == "__del__"
            or code.co_filename in SWALLOWERS
        ):
            return True
        frame = frame.f_back
    return False


class ThreadGuard(Interrupts):
    """Guards a thread of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._thread_id = 0
        self._is_coming = False  # TaskCancelled was raised in the thread, and may not have arrived
        self._is_given_up = False
        # requests come from other threads, while this one begins or ends a slice
        self._lock = threading.Lock()

    def approach(self, task_id: int) -> None:
        """Note that a slice is opened."""
        super().approach(task_id)
        if self._is_given_up:
            raise TaskCancelled

    def begin(self, note: TaskContext, result: RawResult) -> None:
        """Note that the user's code begins, in this thread."""
        with self._lock:
            self._thread_id = threading.get_ident()
            super().begin(note, result)

    def pause(self) -> bool:
        """Stop interrupting the running slice."""
        was_armed = self._is_armed
        try:
            self._disarm(super().pause)
        except TaskCancelled:
            # it was on its way, and comes only once: `resume` raises it again
            self._disarm(super().pause)
            return True
        return was_armed

    def resume(self) -> None:
        """Allow interrupting the running slice again."""
        with self._lock:
            super().resume()

    def end(self) -> None:
        """Note that the user's code has ended."""
        self._disarm(super().end)

    def _disarm(self, note_end: Callable[[], object]) -> None:
        with self._lock:
            note_end()
            is_coming, self._is_coming = self._is_coming, False
        if is_coming:
            # A loop is where Python looks for an exception on its way. It could also be taken back,
            # but then Python 3.11 waits forever, in whichever thread is traced or profiled next.
            for _ in range(16):
                pass

    def interrupt_here(self, attempt_id: int, task_id: int, frame: FrameType | None) -> None:
        """Cancel a slice that runs in this thread, from the handler of a signal.

        Raises:
            TaskCancelled: It is interrupted, for the first time.
        """
        # the thread itself may hold the lock, so a handler must not wait for it
        if _is_delicate(frame) or not self._lock.acquire(blocking=False):
            return  # it is signalled again
        try:
            is_due = self.take(Signal.CANCEL, attempt_id, task_id)
        finally:
            self._lock.release()
        if is_due:
            raise TaskCancelled

    def give_up(self) -> None:
        """Cancel the running slice, and every later one, from any thread."""
        self._is_given_up = True  # first: a slice that is not seen below sees this
        self.request(Signal.CANCEL, *self._at_hand)

    def request(self, wish: Signal, attempt_id: int, task_id: int) -> None:
        """Take a request, from any thread."""
        with self._lock:
            if wish is Signal.CANCEL and self.is_at_hand(attempt_id, task_id) and self._is_delicate:
                again = threading.Timer(AGAIN_S, self.request, (wish, attempt_id, task_id))
                again.daemon = True
                again.start()
                return
            if not self.take(wish, attempt_id, task_id):
                return
            give_up = time.monotonic() + THREAD_START_S
            while (made := _raise_in(self._thread_id, TaskCancelled)) is not None:
                # the new thread would get the exception, and die of it
                if not made._started.wait(give_up - time.monotonic()):
                    return
            self._is_coming = True

    @property
    def is_free(self) -> bool:
        """Whether none of the user's code is running."""
        return self._at_hand == NOTHING

    @property
    def _is_delicate(self) -> bool:
        return self._is_armed and _is_delicate(sys._current_frames().get(self._thread_id))

    def is_at_hand(self, attempt_id: int, task_id: int) -> bool:
        """Whether this slice is running, interrupted or not."""
        return self._at_hand == (attempt_id, task_id)


_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = [ctypes.c_ulong, ctypes.py_object]


def _raise_in(thread_id: int, kind: type[BaseException]) -> Any:
    """Raise an exception in a thread, unless it is making another; return that one, or None."""
    # Up to Python 3.11 a thread that is being made goes by its maker's id until it runs. It would
    # get the exception in its maker's place and die of it, and its maker would wait forever for it
    # to begin.
    if sys.version_info < (3, 12):
        # until it has been raised, nothing here lets another thread run: no loop, and no call of
        # Python code
        [frames] = itertools.starmap(sys._current_frames, [()])
        # the innermost: `start` calls `Event.wait`, and that `Condition.wait`, and that its helpers
        a: Any = frames[thread_id]
        b = a.f_back
        c = b.f_back
        d = c.f_back
        start = None
        if a.f_code is THREAD_START:
            start = a
        elif b.f_code is THREAD_START:
            start = b
        elif c.f_code is THREAD_START:
            start = c
        elif d.f_code is THREAD_START:
            start = d
        if start is not None and not start.f_locals["self"]._started._flag:
            return start.f_locals["self"]
    _set_async_exc(thread_id, kind)
    return None


# --- time limits of the backend "inline" ----------------------------------------------------------


class TimeLimit:
    """A context in which code may run for a limited time.

    Args:
        timeout_s: The limit [s].
        grace_s: How long the code has to end then [s].
        on_over: Called when the time is up, to interrupt the code. Like the next one, in another
            thread.
        on_late: Called once if the code still runs after the grace.
        on_signal: Called in the main thread, if the code runs there, to interrupt it.
    """

    def __init__(
        self,
        timeout_s: float,
        grace_s: float,
        on_over: Callable[[], object],
        on_late: Callable[[], object],
        on_signal: Callable[[FrameType | None], object],
    ) -> None:
        self._grace_s = grace_s
        self._on_over = on_over
        self._on_late = on_late
        self._on_signal = on_signal
        self._is_over = False
        self._has_ended = threading.Event()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._thread_id = threading.get_ident()
        self._previous: Any = None  # handler of the signal
        self._timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        if self._is_main:
            self._previous = signal.signal(STOP_SIGNAL, self._take_signal)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._timer.cancel()
        self._timer.join()  # its last signal has come by then: the handler below may change
        if self._is_main:
            signal.signal(STOP_SIGNAL, self._previous or signal.SIG_DFL)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_over and not self._has_ended.is_set():
            self._on_signal(frame)
        if callable(self._previous):  # of the worker process around this task
            self._previous(number, frame)

    def _end(self) -> None:
        self._is_over = True
        self._on_over()
        late_at: float | None = time.monotonic() + self._grace_s
        while not self._has_ended.is_set():
            if self._is_main:  # a signal also ends a `time.sleep`
                signal.pthread_kill(self._thread_id, STOP_SIGNAL)
            if late_at is not None and time.monotonic() >= late_at:
                late_at = None
                self._on_late()
            # again and again, since a signal in an import or a finalizer does nothing
            self._has_ended.wait(AGAIN_S)


# --- Ctrl-C in the backend "inline" ---------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])

# those of `signal` take ten times longer, and each call of a pool needs both
_get_handler, _set_handler = _signal.getsignal, _signal.signal


class CtrlC:
    """Keeps Ctrl-C out of a driver that runs in the main thread, but not out of the user's code.

    A second Ctrl-C arrives wherever it comes, and so does every one if the user has set a handler.

    Attributes:
        is_due: One was held back.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._arrives: dict[CodeType, bool] = {}  # in a function, and what it calls
        self._handler = self._take  # one object, to be compared

    def holds(self, fn: F) -> F:
        """Mark a function in which Ctrl-C is held back: a decorator."""
        self._arrives[fn.__code__] = False
        return fn

    def enters(self, fn: F) -> F:
        """Mark a function in which it arrives, whatever has called it: a decorator."""
        self._arrives[fn.__code__] = True
        return fn

    def hold(self) -> Any:
        """Begin to hold it back; return the handler before, for `release`."""
        if threading.current_thread() is not threading.main_thread():
            return None
        before = _get_handler(signal.SIGINT)
        if before is signal.default_int_handler:
            self.is_due = False
            _set_handler(signal.SIGINT, self._handler)
        elif before is not self._handler:
            return None
        return before

    def release(self, before: Any) -> None:
        """Set the handler back.

        Raises:
            KeyboardInterrupt: Ctrl-C was held back.
        """
        if before is None:
            return
        if _get_handler(signal.SIGINT) is self._handler:  # else the user has set another meanwhile
            _set_handler(signal.SIGINT, before)
        if self.take():
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether Ctrl-C was held back for the caller, which then raises it."""
        if not self.is_due or threading.current_thread() is not threading.main_thread():
            return False
        self.is_due = False
        return True

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Have Python's own handler for a while: `asyncio` replaces no other."""
        is_held = (
            threading.current_thread() is threading.main_thread()
            and _get_handler(signal.SIGINT) is self._handler
        )
        if is_held:
            _set_handler(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            if is_held:
                _set_handler(signal.SIGINT, self._handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        arrives: bool | None = None
        while frame is not None and arrives is None:
            arrives, frame = self._arrives.get(frame.f_code), frame.f_back
        is_held, is_second = arrives is False, self.is_due
        self.is_due = is_held  # also a second one: a callback may drop it
        if is_second or not is_held:
            raise KeyboardInterrupt


ctrl_c = CtrlC()
