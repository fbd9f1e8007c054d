"""Ends what runs in this very thread when its time is up: for the backend "inline", where the driver waits for the call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from raypool.engine.guard import STOP_SIGNAL

AGAIN_S = 0.05
"""What could not be interrupted where it was is tried again after this time [s]."""


class TimeLimit:
    """A context that has so much time.

    In the main thread a signal is sent, again and again, which also ends a `time.sleep`.

    Args:
        timeout_s: How much [s].
        grace_s: How long what runs has to end then [s].
        on_over: Called when the time is up, before anything is interrupted. Like the next two, in a thread of its own.
        interrupt: Interrupts what runs, if that is possible from another thread and just now; returns whether it was done.
        on_late: Called once if it still runs after the grace.
        on_signal: Interrupts what runs in the main thread, in which it is called.
    """

    def __init__(
        self,
        timeout_s: float,
        grace_s: float,
        on_over: Callable[[], object],
        interrupt: Callable[[], bool],
        on_late: Callable[[], object],
        on_signal: Callable[[FrameType | None], object],
    ) -> None:
        self._grace_s = grace_s
        self._on_over = on_over
        self._interrupt = interrupt
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
        self._timer.join()  # what it has sent has come by then
        if self._is_main:
            signal.signal(STOP_SIGNAL, self._previous or signal.SIG_DFL)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_over and not self._has_ended.is_set():
            self._on_signal(frame)
        if callable(self._previous):  # of the worker process in whose task this runs
            self._previous(number, frame)

    def _end(self) -> None:
        self._is_over = True
        self._on_over()
        late_at: float | None = time.monotonic() + self._grace_s
        is_done = False
        while not self._has_ended.is_set():
            is_done = is_done or self._interrupt()
            if self._is_main:
                signal.pthread_kill(self._thread_id, STOP_SIGNAL)
            if late_at is not None and time.monotonic() >= late_at:
                late_at = None
                self._on_late()
            self._has_ended.wait(AGAIN_S)
