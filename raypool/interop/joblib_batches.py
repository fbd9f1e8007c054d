"""The batches of tasks that a `joblib.Parallel` has handed in, on their way to the workers and back.

A batch is a call of the pool, or becomes several: a worker that has begun one which takes long hands back what it has not begun.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from joblib.parallel import TASK_ERROR, BatchCompletionCallBack, Parallel

from raypool.engine.backend import function_name
from raypool.engine.runner import CALL_LIMIT_S
from raypool.errors import SerializationError
from raypool.futures import Future
from raypool.gathered import cancel_each
from raypool.interop.joblib_tasks import Manner, SharedArguments, Task, check_travels, run_tasks
from raypool.view import PoolView

AHEAD = 4
"""Of batches that are short, so many for each worker may be on their way, and share calls, ..."""

AHEAD_S = 0.006
"""... if they run for less than this [s]: of the two for each worker that joblib hands in, one always waits for the driver."""


class Batch:
    """A batch, and what of it is back."""

    def __init__(self, tasks: list[Task], callback: BatchCompletionCallBack) -> None:
        self.tasks = tasks
        self.callback = callback
        self.values: list[Any] = [None] * len(tasks)
        self.missing = len(tasks)
        self.run_s = 0.0


class Piece(NamedTuple):
    """Consecutive tasks of a batch: one call."""

    batch: Batch
    start: int
    stop: int

    @property
    def tasks(self) -> list[Task]:
        """The tasks."""
        return self.batch.tasks[self.start : self.stop]


class Batches:
    """What one call of a `Parallel` has handed in.

    Args:
        pool: Where it runs.
        most: So many calls run at once at most.
        max_nbytes: Arguments of this size [bytes] or more travel once for all tasks, and are not to be changed; None: none do.
        manner: How tasks are run.

    Attributes:
        newest_run_s: How long the batch ran that joblib was told of last [s].
    """

    def __init__(self, pool: PoolView, most: int, max_nbytes: int | None, manner: Manner) -> None:
        self._pool = pool
        self._num_workers = most
        self._most = most if most < len(pool._numbers()) else None  # None: the pool sees to it
        is_far = pool._engine.profile.backend == "ray"
        self._shared = SharedArguments(pool._engine, max_nbytes) if is_far and max_nbytes is not None else None
        self._manner = manner
        self._waiting: deque[Piece] = deque()
        self._running: dict[Future[Any], None] = {}  # in the order in which they were handed in
        self._num_begun = 0
        self._is_over = False
        self.newest_run_s = 0.0
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._end_thread = weakref.finalize(self, self._ended.put, None)
        self._end_thread.atexit = False
        threading.Thread(target=_call_each, args=(self._ended,), name="raypool-joblib", daemon=True).start()

    def hand_in(self, tasks: list[Task], callback: BatchCompletionCallBack) -> None:
        """Take a batch. Nothing is raised: `callback` is called with a function that gives the values, or raises."""
        self._take(Piece(Batch(tasks, callback), 0, len(tasks)))

    def _take(self, piece: Piece) -> None:
        with self._lock:
            if self._most is not None and self._num_begun >= self._most:
                self._waiting.append(piece)
                return
            self._num_begun += 1
        self._begin(piece)

    def _begin(self, piece: Piece) -> None:
        name = function_name(piece.batch.tasks[0][0])
        try:
            future = self._call(piece, name)
        except Exception as error:
            future = Future(name)
            future.set_exception(error)
        with self._lock:
            self._running[future] = None
        if self._is_over:
            future.cancel()
        future.add_done_callback(functools.partial(self._pass_on, piece))

    def _call(self, piece: Piece, name: str) -> Future[Any]:
        tasks = piece.tasks
        limit_s = CALL_LIMIT_S if piece.batch.callback.parallel.batch_size == "auto" else math.inf
        try:
            if self._shared is not None:
                self._shared.replace_in(tasks)
            return self._pool.options(name=name).parfeval(run_tasks, tasks, self._manner, limit_s)
        except SerializationError:
            check_travels(tasks, self._pool._engine)  # raises the error that names the argument
            raise

    def _pass_on(self, piece: Piece, future: Future[Any]) -> None:
        """Leave the pool's thread: joblib's callback draws from the user's generator."""
        if not self._is_over:  # else joblib wants no answer any more
            self._ended.put(functools.partial(self._answer, piece, future))

    def _answer(self, piece: Piece, future: Future[Any]) -> None:
        """Begin what has waited for this call, and let joblib have what is back."""
        callback = piece.batch.callback
        try:
            self._begin_next(future)
            outcome = self._outcome(piece, future)
            if outcome is not None:
                self.newest_run_s = piece.batch.run_s
                callback(outcome)
                if callback.parallel.batch_size == "auto" and (future.duration_s or AHEAD_S) < AHEAD_S:
                    self._draw_ahead(callback.parallel)
        except BaseException as error:
            _fail(callback, error)

    def _begin_next(self, ended: Future[Any]) -> None:
        with self._lock:
            self._running.pop(ended, None)
            next_one = self._waiting.popleft() if self._waiting else None
            if next_one is None:
                self._num_begun -= 1
        if next_one is not None:
            self._begin(next_one)

    def _outcome(self, piece: Piece, future: Future[Any]) -> Callable[[], list[Any]] | None:
        """Return what gives the values of a whole batch, or raises its error; None while something of it is missing."""
        if future.cancelled() or future.exception() is not None:
            return future.result
        batch, values = piece.batch, future.result()
        begun = piece.start + len(values)
        batch.values[piece.start : begun] = values
        batch.missing -= len(values)
        batch.run_s += future.duration_s or 0.0
        size = min(len(values), math.ceil((piece.stop - begun) / self._num_workers))
        for start in range(begun, piece.stop, max(size, 1)):
            self._take(Piece(batch, start, min(start + size, piece.stop)))
        return None if batch.missing else lambda: batch.values

    def _draw_ahead(self, parallel: Parallel) -> None:
        """Have joblib hand in more batches: what its callback does after each of them, as often as there is room."""
        while not self._is_over and len(self._running) + len(self._waiting) < AHEAD * self._num_workers:
            with parallel._lock:
                if parallel._original_iterator is None:
                    return
                parallel.dispatch_next()

    def end(self) -> None:
        """Cancel what waits and what runs, if anything does; joblib may still hand in what it was about to."""
        with self._lock:
            self._is_over = True
            self._waiting.clear()
            running = list(self._running)
        cancel_each(running)
        self._end_thread()
        if self._shared is not None:
            self._shared.forget()


def _call_each(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Call what comes, until None does; in a plain thread, since the interpreter closes executors before the last threads end."""
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the batches, whose end ends this


def _fail(callback: BatchCompletionCallBack, error: BaseException) -> None:
    """End a `Parallel` with an error that joblib does not expect in its callback, and after which it would wait for ever.

    `SystemExit` in the user's generator is one. What joblib does for an `Exception` there is done for it.
    """
    parallel = callback.parallel
    with parallel._lock:
        if parallel._call_id == callback.parallel_call_id:
            tracker = BatchCompletionCallBack(0, 1, parallel)
            parallel._register_new_job(tracker)
            tracker._register_outcome({"result": error, "status": TASK_ERROR})
