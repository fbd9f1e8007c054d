"""Backends without Ray, in this process: "inline" runs a task in the thread that asks for it, "threads" in one thread a worker.

They are the local mode: the same results as on Ray, milliseconds to start, and a debugger stops in the user's function.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from raypool.core.messages import AttemptFinished, WorkerLost, WorkerReady
from raypool.engine.backend import Failure, Function, LocalValues, Part, Post, SliceResult, WorkerInfo
from raypool.engine.runner import Surroundings, run_parts
from raypool.errors import LossReason


class InlineBackend:
    """Runs each call at once, in the calling thread."""

    def __init__(self, post: Post, default_workers: int = 1) -> None:
        self._post = post
        self._default_workers = default_workers
        self._next_place = 0
        self._workers: dict[int, WorkerInfo] = {}  # by worker id

    def claim(self, least: int | None, most: int | None) -> list[int]:
        """Claim as many places as wanted: there is no limit to workers in one process."""
        if least is None or most is None:
            count = self._default_workers
        else:
            count = most if least == most else max(least, min(most, self._default_workers))
        places = list(range(self._next_place, self._next_place + count))
        self._next_place += count
        return places

    def start_worker(self, worker_id: int, place: int) -> None:
        """Take note of a worker."""
        info = WorkerInfo(place, platform.node(), os.getpid())
        self._workers[worker_id] = info
        self._post(WorkerReady(worker_id), info)

    def vacate(self, place: int) -> None:
        """Forget the worker in this place."""
        for worker_id in [number for number, info in self._workers.items() if info.index == place]:
            del self._workers[worker_id]

    def pack(self, value: Any, what: str, *, is_trial: bool = False) -> Any:
        """Return the value: it does not travel."""
        return value

    def run(self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function]) -> None:
        """Run the call now."""
        self._call(worker_id, attempt_id, parts, functions, contextlib.nullcontext())

    def _call(
        self,
        worker_id: int,
        attempt_id: int,
        parts: Sequence[Part],
        functions: Sequence[Function],
        guard: contextlib.AbstractContextManager[Any],
    ) -> bool:
        """Run a call and post what became of it; False if the user's function has ended its worker."""
        known = {function.fn_id: function.packed for function in functions}
        try:
            with guard:
                raw = run_parts(parts, Surroundings(self._workers[worker_id], known.__getitem__, _as_is))
        except SystemExit as error:
            self._post(WorkerLost(worker_id, LossReason.EXIT), f"the function called sys.exit({error.code!r})")
            return False
        except Exception as error:  # not the user's function: raypool's own mistake, and nobody may wait for it
            self._post(WorkerLost(worker_id, LossReason.UNKNOWN), f"raypool failed in it, {type(error).__name__}: {error}")
            return False
        results = [
            SliceResult(
                part.start,
                part.done,
                LocalValues(part.values),
                0,
                {index: Failure(error, None) for index, error in part.errors.items()},
                part.durations_s,
                part.started_at,
            )
            for part in raw
        ]
        self._post(AttemptFinished(worker_id, attempt_id, ()), results)
        return True

    def close(self) -> None:
        """Forget all workers."""
        self._workers.clear()


def _as_is(items: Any) -> Any:
    return items


class ThreadsBackend(InlineBackend):
    """Runs each worker as a thread of this process."""

    def __init__(self, post: Post, default_workers: int) -> None:
        super().__init__(post, default_workers)
        self._calls: dict[int, queue.SimpleQueue[Callable[[], bool] | None]] = {}
        self._seeding = threading.Lock()

    def start_worker(self, worker_id: int, place: int) -> None:
        """Start a thread."""
        calls: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._calls[worker_id] = calls
        thread = threading.Thread(target=_work, args=(calls,), name=f"raypool-worker-{place}", daemon=True)
        thread.start()
        super().start_worker(worker_id, place)

    def vacate(self, place: int) -> None:
        """End the thread in this place, after what it is running: a thread can't be killed."""
        for worker_id, info in self._workers.items():
            if info.index == place:
                self._calls.pop(worker_id).put(None)
        super().vacate(place)

    def run(self, worker_id: int, attempt_id: int, parts: Sequence[Part], functions: Sequence[Function]) -> None:
        """Hand the call to the thread.

        The global random generators belong to the whole process, so items that want them seeded run one at a time.
        """
        is_seeded = any(part.seed is not None for part in parts)
        guard = self._seeding if is_seeded else contextlib.nullcontext()
        self._calls[worker_id].put(lambda: self._call(worker_id, attempt_id, parts, functions, guard))

    def close(self) -> None:
        """End all threads after what they are running."""
        for calls in self._calls.values():
            calls.put(None)
        self._calls.clear()
        super().close()


def _work(calls: queue.SimpleQueue[Callable[[], bool] | None]) -> None:
    while (call := calls.get()) is not None:
        if not call():
            return
