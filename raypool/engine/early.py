"""Calls that last: what is done of them is told before they end, and what they have not begun is handed back.

Short items share a call, and the next call waits at its worker. If one of them takes long after all, nothing may wait for it that
others could do, or that is done: somebody may wait for that, perhaps the long one itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from time import monotonic

from raypool.engine.open_call import Narrowed, OpenCall

LASTS_S = 0.5
"""A call lasts that has taken so long [s]: ten times what a shared one is meant to take, and hardly more than anybody notices."""

LOOK_S = 0.125
"""How often is looked for these [s]."""

logger = logging.getLogger("raypool")


class Early:
    """Tells of the calls of one worker that last, and knows what was sent behind them.

    Args:
        watch: Looks at the calls.
        tell: Takes what is done of one, while that goes on; in the watch's thread.
    """

    def __init__(self, watch: Watch, tell: Callable[[OpenCall, Narrowed], object]) -> None:
        self._watch = watch
        self._tell = tell
        self._told_of = -1  # the last call that was told of

    def begin(self, call: OpenCall) -> None:
        """Note that a call begins."""
        self._watch.add(call, self)

    def end(self, call: OpenCall) -> None:
        """Note that it is over; nothing is told of it after that."""
        call.end()
        self._watch.drop(call)

    def narrow(self, call: OpenCall) -> None:
        """Tell of a call that lasts."""

        def tell(narrowed: Narrowed) -> None:
            self._told_of = call.attempt_id
            self._tell(call, narrowed)

        call.narrow(tell)

    def is_behind(self, attempt_id: int | None) -> bool:
        """Whether what was sent to wait for this call was taken back, and so must not run: the call was told of."""
        return attempt_id is not None and attempt_id == self._told_of


class Watch:
    """Looks, in a thread of its own, which calls last; of each it is told once."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[OpenCall, Early]] = {}  # by attempt
        self._is_resting = False  # the thread waits for the bell
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="raypool-early", daemon=True).start()

    def add(self, call: OpenCall, early: Early) -> None:
        """Look at a call, until it has lasted or is dropped."""
        self._calls[call.attempt_id] = call, early
        if self._is_resting:
            self._is_resting = False
            self._bell.put(None)

    def drop(self, call: OpenCall) -> None:
        """Look at a call no more."""
        self._calls.pop(call.attempt_id, None)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._bell.put(None)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._is_resting = True
            if not self._calls:
                self._bell.get()
            self._is_resting = False
            self._closed.wait(LOOK_S)
            self._look()

    def _look(self) -> None:
        before = monotonic() - LASTS_S
        for call, early in list(self._calls.values()):
            if call.began_at <= before:
                self.drop(call)
                try:
                    early.narrow(call)
                except Exception:  # its answer has all that was to be told
                    logger.exception("raypool's mistake; the call goes on.")
