"""The backend "threads": without Ray, in this process, each worker is a thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from raypool.backends.base import Post
from raypool.channel.records import Function, Part
from raypool.core.messages import AttemptFinished, AttemptNarrowed, Signal, WorkerLost
from raypool.engine.early import Early, Watch
from raypool.engine.inline import InlineBackend, result_of
from raypool.engine.open_call import Narrowed, OpenCall, RawResult
from raypool.errors import LossReason
from raypool.profiles import Profile
from raypool.worker.running import Say, end_thread

TEARDOWN_TIMEOUT_S = 10.0
"""What a worker ends with may take so long [s]."""

END_TIMEOUT_S = 1.0
"""A pool that closes waits this long for functions that are still running, after it has cancelled them [s]."""

logger = logging.getLogger("raypool")


class ThreadsBackend(InlineBackend):
    """Runs each worker as a thread of this process."""

    _is_users_thread = False

    def __init__(self, profile: Profile, post: Post, say: Say, default_workers: int) -> None:
        super().__init__(profile, post, say, default_workers)
        self._calls: dict[int, queue.SimpleQueue[Callable[[], bool] | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._seeding = threading.Lock()
        self._graces: dict[int, list[threading.Timer]] = {}  # by attempt: they give up what does not stop
        self._watch = Watch()

    def start_worker(self, worker_id: int, place: int, setups: Sequence[Function]) -> None:
        """Start a thread."""
        for other in self._workers_in(place):
            self._forget(other)
        calls = self._calls[worker_id] = queue.SimpleQueue()
        name = f"raypool-worker-{place}"
        thread = self._threads[worker_id] = threading.Thread(target=_work, args=(calls,), name=name, daemon=True)
        thread.start()
        self._early[worker_id] = Early(self._watch, functools.partial(self._tell_early, worker_id))
        info = self._note(worker_id, place)  # now, so that it can be ended from now on
        calls.put(lambda: self._set_up(worker_id, info, setups))

    def _forget(self, worker_id: int) -> None:
        """End a thread, after what it is running; wait for its teardown, if it is free to run it."""
        worker, guard, calls = self._workers.pop(worker_id), self._guards.pop(worker_id), self._calls.pop(worker_id)
        thread = self._threads.pop(worker_id)
        del self._early[worker_id]
        calls.put(lambda: self._tear_down(worker_id, worker))
        calls.put(None)
        if self._profile.teardown is not None and guard.is_free:
            thread.join(TEARDOWN_TIMEOUT_S)
            if thread.is_alive():
                logger.warning(
                    "The teardown of worker %d had not ended after %g s, and is not waited for.", worker.index, TEARDOWN_TIMEOUT_S
                )

    def signal(self, worker_id: int, attempt_id: int, task_id: int, wish: Signal) -> None:
        """Interrupt a thread, and give it up if that has not helped in time."""
        super().signal(worker_id, attempt_id, task_id, wish)
        guard = self._guards.get(worker_id)
        if guard is None or wish is not Signal.CANCEL or not guard.is_at_hand(attempt_id, task_id):
            return

        def give_up() -> None:
            if guard.is_at_hand(attempt_id, task_id) and worker_id in self._guards:
                self._post(WorkerLost(worker_id, LossReason.STOPPED), "a cancelled task did not stop")

        timer = threading.Timer(min(self._profile.cancel_grace_s, threading.TIMEOUT_MAX), give_up)
        timer.daemon = True
        self._graces.setdefault(attempt_id, []).append(timer)
        timer.start()

    def _call(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        guard: contextlib.AbstractContextManager[Any],
    ) -> bool:
        """Run a call; who was to give it up need not wait any more."""
        try:
            return super()._call(worker_id, attempt_id, parts, functions, guard)
        finally:
            for timer in self._graces.pop(attempt_id, ()):
                timer.cancel()

    def run(
        self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function], behind: int | None
    ) -> None:
        """Hand the call to the thread.

        The global random generators belong to the whole process, so items that want them seeded run one at a time.
        """
        is_seeded = any(part.seed is not None for part in parts)
        guard = self._seeding if is_seeded else contextlib.nullcontext()
        early = self._early[worker_id]

        def call() -> bool:
            if early.is_behind(behind):
                self._post(AttemptFinished(worker_id, attempt_id, ()), [result_of(RawResult(part.start)) for part in parts])
                return True
            return self._call(worker_id, attempt_id, parts, functions, guard)

        self._calls[worker_id].put(call)

    def _tell_early(self, worker_id: int, call: OpenCall, narrowed: Narrowed) -> None:
        """Tell what is done of a call that lasts, and hold it no more: somebody may want it freed."""
        kept, results = narrowed.kept, [result_of(result) for result in narrowed.results]
        self._post(AttemptNarrowed(worker_id, narrowed.attempt_id, (), kept), results)
        call.let_go(narrowed)

    def close(self) -> None:
        """Forget all workers, what is in the store, and temporary files."""
        self._watch.close()
        workers = [(thread, self._guards[worker_id]) for worker_id, thread in self._threads.items()]
        super().close()
        give_up_at = time.monotonic() + END_TIMEOUT_S
        for thread, guard in workers:  # a daemon thread in native code can abort the process when the interpreter shuts down
            is_free = guard.is_free
            thread.join(TEARDOWN_TIMEOUT_S if is_free else max(0.0, give_up_at - time.monotonic()))


def _work(calls: queue.SimpleQueue[Callable[[], bool] | None]) -> None:
    try:
        while (call := calls.get()) is not None:
            is_alive = call()
            del call  # while it waits for the next, it holds nothing
            if not is_alive:
                return
    finally:
        end_thread()
