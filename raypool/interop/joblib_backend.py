"""The backend "raypool" of joblib: carries the batches of a `joblib.Parallel` to a pool's workers
and back.

joblib groups tasks into batches. A batch is one call of the pool, which queues it, gives it to a
free worker, runs it again after a loss, and stops it. joblib's callbacks draw the next tasks from
the user's generator, so they run in a separate thread instead of the pool's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import queue
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from joblib.parallel import (
    TASK_ERROR,
    BatchCompletionCallBack,
    BatchedCalls,
    FallbackToBackend,
    Parallel,
    ParallelBackendBase,
    SequentialBackend,
    get_active_backend,
    parallel_config,
    register_parallel_backend,
)

from raypool.backends.ray.session import is_forked
from raypool.channel.records import function_name
from raypool.engine.engine import Engine
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError, SerializationError
from raypool.futures import Future, cancel_each
from raypool.parallel_for import PLAIN
from raypool.pool import ParallelPool, PoolView, gcp, open_pool
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.worker.runner import CALL_LIMIT_S, finished
from raypool.worker.running import in_task
from raypool.worker.setup_globals import share_left

LEAST_JOBS = 2
"""The least number of jobs that a `Parallel` is told: with one it would run all tasks here, in
turn.
"""

BATCH_S = 0.2
"""The target duration of a batch [s], as for joblib's own processes."""

TASK_S = 10e-6
"""The overhead of a task [s]."""

GROWTH = 64
"""A batch holds at most so many times the tasks of those before: what takes far too long is handed
back, which costs a call.
"""

MOST_TASKS = 1024
"""A batch never holds more: what is to be sent of them would take longer than a call costs."""

LEAST_CHANGE = 2.0
"""Batches keep their size unless one that is so many times larger, or smaller, would take what it
should.
"""


class RaypoolBackend(ParallelBackendBase):  # type: ignore[misc]
    """What joblib calls "raypool"; see `raypool.register_joblib`.

    The one that `parallel_config` makes serves all that runs in its block; each `Parallel` works
    with a copy of its own.

    Args:
        pool: The pool to use, or a part or view of one.
        nesting_level: joblib's own: how many others this one is used in.
        inner_max_num_threads: How many threads native libraries may use in a worker.
        **opening: What `parpool` takes: open such a pool, as soon as one is needed.

    Raises:
        InvalidTypeError: `pool` is none.
        InvalidValueError: There is a pool, and something to open another.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self,
        pool: PoolView | None = None,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **opening: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._source = PoolSource(pool, opening)
        weakref.finalize(self, self._source.close).atexit = False
        # of a copy, while it is in use: with its origin goes what that has opened
        self._origin: RaypoolBackend | None = None
        self._find_origin: Callable[[], RaypoolBackend | None] | None = None  # of a copy
        self._batch_size = BatchSize()
        self._make_batches: Callable[[], Batches]
        self._batches: Batches

    def __reduce__(self) -> Any:
        """Let a task that refers to it travel: on the worker, where joblib runs everything in turn,
        it needs no pool.
        """
        return RaypoolBackend, ()

    @property
    def supports_sharedmem(self) -> bool:
        """Whether tasks run in this process."""
        return not self._source.is_on_ray

    @property
    def supports_inner_max_num_threads(self) -> bool:
        """Whether workers are processes, each with native libraries of its own."""
        return self._source.is_on_ray

    # --- number of workers ------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many workers `n_jobs` means; to a `Parallel` that uses a single one, see
        `LEAST_JOBS`.

        Raises:
            ValueError: It is 0, as with all backends of joblib.
            Exception: A pool that is needed could not be opened.
        """
        num_workers = self._num_workers(n_jobs)
        return max(num_workers, LEAST_JOBS if num_workers and self._find_origin is not None else 1)

    def _num_workers(self, n_jobs: int | None) -> int:
        """Return how many workers of the pool `n_jobs` means; 0: none, everything runs in turn
        where it is.
        """
        n_jobs = self.default_n_jobs if n_jobs is None else n_jobs
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        # which does not know that: its task would wait for a worker
        is_in_thread_of_task = (self.nesting_level or 0) > 1
        if n_jobs == 1 or in_task() or is_in_thread_of_task:
            return 0
        if self._source.is_forked:
            self._source.note_forked()
            return 0
        size = max(len(self._source.find(n_jobs)._numbers()), 1)
        if n_jobs < 0:
            return max(size + 1 + n_jobs, 1)
        if n_jobs > size:
            self._source.note_too_many(n_jobs, size)
        return min(n_jobs, size)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Parallel | None = None,
        max_nbytes: int | None = None,
        **settings: Any,
    ) -> int:
        """Prepare for a `Parallel`; return the number of its workers, or `LEAST_JOBS`.

        Raises:
            FallbackToBackend: To a copy of this for that `Parallel` alone, or to no workers at all
                where it gets one.
            InvalidValueError: This is a callback of one of the pool's futures, which nothing can be
                waited for in.
        """
        if self._find_origin is None:
            raise FallbackToBackend(self._copy_with(settings))
        num_workers = self._num_workers(n_jobs)
        if num_workers == 0:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        pool = self._source.find(n_jobs)
        engine = pool._engine
        if engine.driver.is_own_thread:
            raise InvalidValueError(
                "A Parallel cannot run in the callback of a future: the pool would wait for itself."
                " Use a thread."
            )
        self.parallel = parallel
        manner = Manner(self.get_nested_backend(), self.inner_max_num_threads)
        self._make_batches = functools.partial(Batches, pool, num_workers, max_nbytes, manner)
        return max(num_workers, LEAST_JOBS)

    def _copy_with(self, settings: dict[str, Any]) -> RaypoolBackend:
        """Return what a single `Parallel` works with; what it was given besides joblib's own is for
        us.
        """
        mine = {name: value for name, value in settings.items() if name not in JOBLIBS_OWN}
        origin = self._with(mine) if mine else self._of_block()
        # and not made anew: the pool is its origin's, which ends it
        own = RaypoolBackend.__new__(RaypoolBackend)
        own.__dict__.update(vars(origin), nesting_level=self.nesting_level, _batch_size=BatchSize())
        own._origin, own._find_origin = origin, weakref.ref(origin)
        return own

    def _with(self, settings: dict[str, Any]) -> RaypoolBackend:
        return RaypoolBackend(**{"inner_max_num_threads": self.inner_max_num_threads, **settings})

    def _of_block(self) -> RaypoolBackend:
        """Return the backend of the `parallel_config` block here, if that is one of ours and this
        one was told no pool.
        """
        active, _ = get_active_backend()
        return active if type(active) is RaypoolBackend and not self._source.is_said else self

    # --- one call of a Parallel -------------------------------------------------------------------

    def start_call(self) -> None:
        """Begin a call without batches."""
        self._batches = self._make_batches()

    def submit(self, batch: BatchedCalls, callback: BatchCompletionCallBack) -> Batches:
        """Hand in a batch; `callback` is called when all of it is back, or something has failed."""
        self._batches.hand_in(batch.items, callback)
        return self._batches

    def stop_call(self) -> None:
        """Release the batches of the call."""
        self._batches.end()

    def retrieve_result_callback(self, out: Callable[[], list[Any]]) -> list[Any]:
        """Return the values of a batch, or raise what has ended it."""
        return out()

    def compute_batch_size(self) -> int:
        """Return how many tasks the next batch should hold."""
        return self._batch_size.tasks

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Take note of how long a batch ran; `duration` [s] has in it what it waited for."""
        self._batch_size.note(batch_size, self._batches.newest_run_s + batch_size * TASK_S)

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel what is queued and what runs; the workers take the next `Parallel` then."""
        self._batches.end()

    def terminate(self) -> None:
        """Let go of the `Parallel`, which refers to this, and end a pool that was opened for it
        alone.
        """
        self.parallel = self._origin = None
        self._batch_size = BatchSize()
        if self._find_origin is not None and self._find_origin() is None:
            self._source.close()


JOBLIBS_OWN = frozenset({"context", "mmap_mode", "prefer", "require", "temp_folder", "verbose"})
"""What joblib hands to every backend, and this one has no use for."""


class BatchSize:
    """How many tasks a batch should hold, by how long the last ones took.

    Example:
        >>> size = BatchSize()
        >>> for _ in range(3):
        ...     size.note(size.tasks, 0.001 * size.tasks)
        ...     size.tasks
        64
        200
        200
    """

    def __init__(self) -> None:
        self.tasks = 1
        self._mean_s: float | None = None  # of batches of this size

    def note(self, tasks: int, duration_s: float) -> None:
        """Take note of a batch; those of another size were begun before the last change, or are
        what was left in the end.
        """
        if tasks != self.tasks:
            return
        self._mean_s = duration_s if self._mean_s is None else 0.8 * self._mean_s + 0.2 * duration_s
        better = min(
            max(int(tasks * min(BATCH_S / max(self._mean_s, 1e-6), GROWTH)), 1), MOST_TASKS
        )
        if not tasks / LEAST_CHANGE < better < tasks * LEAST_CHANGE:
            self.tasks, self._mean_s = better, None


# --- batches on their way to the workers and back -------------------------------------------------
#
# A batch is a call of the pool, or becomes several: a worker that has begun a long one hands back
# what it has not begun.


AHEAD = 4
"""Of batches that are short, so many for each worker may be on their way, and share calls, ..."""

AHEAD_S = 0.006
"""... if they run for less than this [s]: of the two for each worker that joblib hands in, one
always waits for the driver.
"""


class Batch:
    """A batch, and the results so far."""

    def __init__(self, tasks: list[Task], callback: BatchCompletionCallBack) -> None:
        self.tasks = tasks
        self.callback = callback
        self.values: list[Any] = [None] * len(tasks)
        self.missing = len(tasks)
        self.run_s = 0.0


class BatchPart(NamedTuple):
    """Consecutive tasks of a batch: one call."""

    batch: Batch
    start: int
    stop: int

    @property
    def tasks(self) -> list[Task]:
        """The tasks."""
        return self.batch.tasks[self.start : self.stop]


class Batches:
    """The batches of one call of a `Parallel`.

    Args:
        pool: Where it runs.
        most: So many calls run at once at most.
        max_nbytes: Arguments of this size [bytes] or more travel once for all tasks, and are not to
            be changed; None: none do.
        manner: How tasks are run.

    Attributes:
        newest_run_s: How long the batch ran that joblib was told of last [s].
    """

    def __init__(self, pool: PoolView, most: int, max_nbytes: int | None, manner: Manner) -> None:
        self._pool = pool
        self._num_workers = most
        self._most = most if most < len(pool._numbers()) else None  # None: the pool sees to it
        is_far = pool._engine.profile.backend == "ray"
        self._shared = (
            SharedArguments(pool._engine, max_nbytes) if is_far and max_nbytes is not None else None
        )
        self._manner = manner
        self._waiting: deque[BatchPart] = deque()
        self._running: dict[Future[Any], None] = {}  # in the order in which they were handed in
        self._num_begun = 0
        self._is_over = False
        self.newest_run_s = 0.0
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._end_thread = weakref.finalize(self, self._ended.put, None)
        self._end_thread.atexit = False
        threading.Thread(
            target=_call_each, args=(self._ended,), name="raypool-joblib", daemon=True
        ).start()

    def hand_in(self, tasks: list[Task], callback: BatchCompletionCallBack) -> None:
        """Take a batch. Nothing is raised: `callback` is called with a function that gives the
        values, or raises.
        """
        self._take(BatchPart(Batch(tasks, callback), 0, len(tasks)))

    def _take(self, piece: BatchPart) -> None:
        with self._lock:
            if self._most is not None and self._num_begun >= self._most:
                self._waiting.append(piece)
                return
            self._num_begun += 1
        self._begin(piece)

    def _begin(self, piece: BatchPart) -> None:
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

    def _call(self, piece: BatchPart, name: str) -> Future[Any]:
        tasks = piece.tasks
        limit_s = CALL_LIMIT_S if piece.batch.callback.parallel.batch_size == "auto" else math.inf
        try:
            if self._shared is not None:
                self._shared.replace_in(tasks)
            return self._pool.options(name=name).parfeval(run_tasks, tasks, self._manner, limit_s)
        except SerializationError:
            check_travels(tasks, self._pool._engine)  # raises the error that names the argument
            raise

    def _pass_on(self, piece: BatchPart, future: Future[Any]) -> None:
        """Leave the pool's thread: joblib's callback draws from the user's generator."""
        if not self._is_over:  # else joblib expects no answer
            self._ended.put(functools.partial(self._answer, piece, future))

    def _answer(self, piece: BatchPart, future: Future[Any]) -> None:
        """Start a waiting call, and pass the results to joblib."""
        callback = piece.batch.callback
        try:
            self._begin_next(future)
            outcome = self._outcome(piece, future)
            if outcome is not None:
                self.newest_run_s = piece.batch.run_s
                callback(outcome)
                if (
                    callback.parallel.batch_size == "auto"
                    and (future.duration_s or AHEAD_S) < AHEAD_S
                ):
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

    def _outcome(self, piece: BatchPart, future: Future[Any]) -> Callable[[], list[Any]] | None:
        """Return what gives the values of a whole batch, or raises its error; None while something
        of it is missing.
        """
        if future.cancelled() or future.exception() is not None:
            return future.result
        batch, values = piece.batch, future.result()
        begun = piece.start + len(values)
        batch.values[piece.start : begun] = values
        batch.missing -= len(values)
        batch.run_s += future.duration_s or 0.0
        size = min(len(values), math.ceil((piece.stop - begun) / self._num_workers))
        for start in range(begun, piece.stop, max(size, 1)):
            self._take(BatchPart(batch, start, min(start + size, piece.stop)))
        return None if batch.missing else lambda: batch.values

    def _draw_ahead(self, parallel: Parallel) -> None:
        """Have joblib hand in more batches: what its callback does after each of them, as often as
        there is room.
        """
        while (
            not self._is_over
            and len(self._running) + len(self._waiting) < AHEAD * self._num_workers
        ):
            with parallel._lock:
                if parallel._original_iterator is None:
                    return
                parallel.dispatch_next()

    def end(self) -> None:
        """Cancel what waits and what runs, if anything does; joblib may still hand in what it was
        about to.
        """
        with self._lock:
            self._is_over = True
            self._waiting.clear()
            running = list(self._running)
        cancel_each(running)
        self._end_thread()
        if self._shared is not None:
            self._shared.forget()


def _call_each(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Call what comes, until None does; in a plain thread, since the interpreter closes executors
    before the last threads end.
    """
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the batches, whose end ends this


def _fail(callback: BatchCompletionCallBack, error: BaseException) -> None:
    """End a `Parallel` with an error that joblib does not expect in its callback: it would wait
    forever.

    `SystemExit` in the user's generator is one. What joblib does for an `Exception` there is done
    for it.
    """
    parallel = callback.parallel
    with parallel._lock:
        if parallel._call_id == callback.parallel_call_id:
            tracker = BatchCompletionCallBack(0, 1, parallel)
            parallel._register_new_job(tracker)
            tracker._register_outcome({"result": error, "status": TASK_ERROR})


# --- tasks: transport and execution ---------------------------------------------------------------


Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Manner(NamedTuple):
    """How the tasks of a `Parallel` are run.

    Attributes:
        nested: joblib's backend for a `Parallel` in one of them, and its `n_jobs`.
        max_threads: How many threads BLAS and OpenMP may use; None: as the worker has it.
    """

    nested: tuple[ParallelBackendBase, int | None]
    max_threads: int | None


def run_tasks(tasks: list[Task], manner: Manner, limit_s: float) -> list[Any]:
    """Run tasks on a worker, beginning none when the time is over [s]; return the values of those
    that ran.
    """
    register_parallel_backend("raypool", RaypoolBackend)  # a task may name the backend too
    for fn in {id(task[0]): task[0] for task in tasks}.values():
        share_left(fn)
    backend, n_jobs = manner.nested
    values: list[Any] = []
    until = perf_counter() + limit_s
    # one serves a single Parallel at a time, and with threads all workers have the same
    own = copy.copy(backend)
    with parallel_config(backend=own, n_jobs=n_jobs), _threads_limited(manner.max_threads):
        for fn, args, kwargs in tasks:
            values.append(finished(fn(*args, **kwargs)))
            if perf_counter() > until:
                break
    return values


@contextlib.contextmanager
def _threads_limited(most: int | None) -> Iterator[None]:
    """Limit the threads of native libraries, those that are loaded and those that a task loads."""
    if most is None:
        yield
        return
    from threadpoolctl import threadpool_limits

    before = {name: os.environ.get(name) for name in ParallelBackendBase.MAX_NUM_THREADS_VARS}
    os.environ.update(dict.fromkeys(before, str(most)))
    try:
        with threadpool_limits(most):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Shared:
    """Stands for an argument in the calls that take it; a worker gets the argument itself, once for
    a call.
    """

    __slots__ = ("_open",)

    def __init__(self, open_: Callable[[], Any]) -> None:
        self._open = open_

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open, ()


class SharedArguments:
    """The large arguments of one `Parallel` call: each travels once, however many tasks take it.

    An argument is known again by its identity, for as long as it lives; joblib's own processes
    share arrays in the same way.

    Args:
        engine: Whose workers they go to.
        least_bytes: What is smaller travels with each task.
    """

    def __init__(self, engine: Engine, least_bytes: int) -> None:
        self._engine = engine
        self._least_bytes = least_bytes
        self._known: dict[int, tuple[weakref.ref[Any], Shared]] = {}

    def replace_in(self, tasks: list[Task]) -> None:
        """Let tasks have stand-ins for large arguments.

        Raises:
            SerializationError: Such an argument cannot be sent.
        """
        for position, (fn, args, kwargs) in enumerate(tasks):
            if not kwargs and PLAIN.issuperset(map(type, args)):
                continue
            large = [
                value
                for value in (*args, *kwargs.values())
                if type(value) not in PLAIN and self._is_large(value)
            ]
            if not large:
                continue
            stand_ins = {id(value): self._stand_in(value, fn) for value in large}
            tasks[position] = (
                fn,
                tuple(stand_ins.get(id(value), value) for value in args),
                {name: stand_ins.get(id(value), value) for name, value in kwargs.items()},
            )

    def forget(self) -> None:
        """Release the arguments."""
        self._known.clear()

    def _is_large(self, value: Any) -> bool:
        return id(value) in self._known or _num_bytes(value) >= self._least_bytes

    def _stand_in(self, value: Any, fn: Callable[..., Any]) -> Shared:
        key = id(value)
        reference, shared = self._known.get(key, (None, None))
        if shared is None or reference is None or reference() is not value:
            shared = Shared(self._engine.opener(value, f"an argument of {function_name(fn)}"))
            self._known[key] = weakref.ref(value, lambda _: self._known.pop(key, None)), shared
        return shared


def _num_bytes(value: Any) -> float:
    """Return how large an array, a tensor, a table or a sparse matrix is [bytes], as far as that is
    known at once; else 0.
    """
    if isinstance(value, type) or type(value).__weakrefoffset__ == 0:
        return 0
    try:
        nbytes: Any = getattr(value, "nbytes", None)
        if nbytes is None and (measure := getattr(value, "memory_usage", None)) is not None:
            nbytes = measure().sum()
        if nbytes is None:
            nbytes = getattr(getattr(value, "data", None), "nbytes", 0)
        return float(nbytes)
    except Exception:  # another class with an attribute of this name
        return 0


def check_travels(tasks: list[Task], engine: Engine) -> None:
    """Raise the error that names the argument of a user's function which cannot be sent, if there
    is one.

    Raises:
        SerializationError: There is.
    """
    for fn, args, kwargs in tasks:
        name = function_name(fn)
        engine.backend.pack(fn, f"the function {name}", is_trial=True)
        for key, value in [*enumerate(args), *kwargs.items()]:
            engine.backend.pack(value, f"argument {key!r} of {name}", is_trial=True)


# --- source of the pool ---------------------------------------------------------------------------


BESIDE_THE_PROFILE = frozenset({"num_workers", "initializer", "initargs"})
"""What `parpool` takes that is no field of a profile."""


class PoolSource:
    """Where a backend's pool comes from: it is the one given, else the current one, else one that
    is opened, and kept.

    Attributes:
        is_said: Which pool is meant, or how to open one, was said; else the current one will do.
    """

    def __init__(self, pool: PoolView | None, opening: dict[str, Any]) -> None:
        if pool is not None and not isinstance(pool, PoolView):
            raise InvalidTypeError(
                f"pool={pool!r} is not a pool. Give what parpool() returns, or a part or view"
                " of it."
            )
        if pool is not None and opening:
            raise InvalidValueError(
                f"The backend raypool was given a pool, and {', '.join(opening)} to open another."
                " Give one or the other."
            )
        self.is_said = pool is not None or bool(opening)
        self._given = pool
        self._opening = opening
        self._opened: ParallelPool | None = None
        self._most_asked = 0  # the largest `n_jobs` for which workers were looked for
        self._has_noted = False
        self._lock = threading.Lock()

    def find(self, n_jobs: int) -> PoolView:
        """Return the pool; one that is opened here has as many workers as the largest `n_jobs` asks
        for, if there is room.

        Raises:
            PoolClosedError: The one given was shut down.
            ResourceError: It is a part without workers.
            Exception: What `parpool` raises, or `pool.resize`.
        """
        if self._given is not None:
            self._given._target()
            return self._given
        with self._lock:
            if not self._opening and (current := gcp(create=False)) is not None:
                return current
            if self._opened is None or self._opened.is_closed:
                self._opened = open_pool(**{"num_workers": self._wanted(n_jobs), **self._opening})
            elif n_jobs > self._most_asked and "num_workers" not in self._opening:
                _grow(self._opened, n_jobs)
            self._most_asked = max(n_jobs, self._most_asked)
            return self._opened

    def _wanted(self, n_jobs: int) -> int | tuple[int, int] | None:
        """Return how many workers a pool is to have that is opened: in this process there is room
        for any number.
        """
        settings = self._settings()
        if n_jobs <= 1 or settings.listed:
            return None
        return (1, n_jobs) if settings.backend == "ray" else n_jobs

    def _settings(self) -> Profile:
        """Return the profile of the pool that would be opened."""
        fields = {
            name: value for name, value in self._opening.items() if name not in BESIDE_THE_PROFILE
        }
        return resolve_profile(fields.pop("profile", None), fields)

    def close(self) -> None:
        """End the pool that was opened here, if one was; nobody waits for it, since this may be
        called by a finalizer.
        """
        pool, self._opened = self._opened, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one with the pool, or from one that uses Ray:
        there is no pool to be had.
        """
        if self._given is not None:
            return self._given._engine.is_forked
        if not self._opening and gcp(create=False) is not None:
            return False
        return self._settings().backend == "ray" and is_forked()

    @property
    def is_on_ray(self) -> bool:
        """Whether the workers are processes; nothing is opened to find out."""
        pool = self._given or self._opened or (None if self._opening else gcp(create=False))
        if pool is not None:
            return pool._engine.profile.backend == "ray"
        return self._settings().backend == "ray"

    def note_forked(self) -> None:
        """Say that everything runs in turn, as joblib's own backends do in such a process."""
        warnings.warn(
            "Loops on raypool cannot run in a process that was forked from one that uses Ray, or"
            " from the one with the pool: setting n_jobs=1. Start the process by spawn, or use"
            " joblib's threading backend in it.",
            stacklevel=_level_of_the_user(),
        )

    def note_too_many(self, n_jobs: int, size: int) -> None:
        """Say, once, that there are fewer workers than `n_jobs` asks for: no result depends on it,
        so it is no error.
        """
        if not self._has_noted:
            self._has_noted = True
            warnings.warn(
                f"n_jobs={n_jobs} is more than the number of workers that the pool has, {size}: all"
                " of them are used. Open the pool with more, or leave n_jobs out.",
                stacklevel=_level_of_the_user(),
            )


def _grow(pool: ParallelPool, num_workers: int) -> None:
    """Give a pool so many workers if it has fewer, or as many as there is room for; none where each
    was told what it gets.
    """
    if not pool._engine.profile.listed:
        with contextlib.suppress(ResourceError):
            pool._engine.grow(num_workers)


def _level_of_the_user() -> int:
    """Return the `stacklevel` for the caller's warnings that names the line which called joblib, or
    what is built on it.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "raypool",
        "joblib",
    ):
        frame, level = frame.f_back, level + 1
    return level
