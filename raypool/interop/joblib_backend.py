"""The joblib backend "raypool": a batch of tasks of a `joblib.Parallel` is a call of a pool."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import platform
import queue
import sys
import threading
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter
from typing import Any, NamedTuple, TypeAlias

from joblib._memmapping_reducer import _get_backing_memmap, _reduce_memmap_backed
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
from raypool.channel.by_value import share_left
from raypool.channel.feed import feed_of
from raypool.channel.records import (
    Failure,
    Function,
    LocalValues,
    SliceResult,
    WorkerInfo,
    function_name,
)
from raypool.core.model import Slice, TaskState
from raypool.engine.engine import Engine
from raypool.engine.loop import LoopOptions, LoopWork, Segment
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError, SerializationError
from raypool.futures import Future, cancel_each
from raypool.parallel_for import TICK_S, is_unseen, watched
from raypool.pool import ParallelPool, PoolView, gcp, open_pool
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.views.lines import ItemLines, is_terminal
from raypool.views.notebook import in_notebook
from raypool.worker.runner import CALL_LIMIT_S, finished
from raypool.worker.running import PLAIN, environment, in_task

LEAST_JOBS = 2
"""The least number of jobs told to a `Parallel`: with one it would run all tasks here, in turn."""

BATCH_S = 0.2
"""The target duration of a batch [s], as for joblib's own processes."""

TASK_S = 10e-6
"""The overhead of a task [s]."""

GROWTH = 64
"""The greatest growth of batches at once: one that takes too long is handed back, for a call."""

MOST_TASKS = 1024
"""The most tasks of a batch: to send more would take longer than a call."""

LEAST_CHANGE = 2.0
"""The least factor by which the size of batches changes."""


class RaypoolBackend(ParallelBackendBase):  # type: ignore[misc]
    """joblib's backend "raypool"; see `raypool.register_joblib`.

    Args:
        pool: A pool, or a part or view of one.
        nesting_level, inner_max_num_threads: As for joblib's backends.
        **opening: Arguments of `parpool`, for a pool that is opened when needed.
    """

    supports_retrieve_callback = True  # joblib takes outcomes from its callback, and fetches none
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
        # not at exit, when all pools end by themselves
        weakref.finalize(self, self._source.close).atexit = False
        # A backend of `parallel_config` serves its whole block; each `Parallel` works with a copy.
        # A copy in use keeps its origin, with which the pool that it has opened would end.
        self._origin: RaypoolBackend | None = None
        self._find_origin: Callable[[], RaypoolBackend | None] | None = None  # None: no copy
        self._batch_size = BatchSize()
        self._make_batches: Callable[[], Batches]
        self._batches: Batches

    def __reduce__(self) -> Any:
        # a task may refer to it: on the worker, where joblib runs all in turn, it needs no pool
        return RaypoolBackend, ()

    @property
    def supports_sharedmem(self) -> bool:
        """Whether tasks run in this process."""
        return not self._source.is_on_ray

    @property
    def supports_inner_max_num_threads(self) -> bool:
        """Whether workers are processes, each with its own native libraries."""
        return self._source.is_on_ray

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers for `n_jobs`; for a `Parallel`, at least `LEAST_JOBS`."""
        num_workers = self._num_workers(n_jobs)
        return max(num_workers, LEAST_JOBS if num_workers and self._find_origin is not None else 1)

    def _num_workers(self, n_jobs: int | None) -> int:
        """Return the number of workers for `n_jobs`; 0: run all in turn, here."""
        n_jobs = self.default_n_jobs if n_jobs is None else n_jobs
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        # A thread of a task does not know that it is one; its task would wait for a worker.
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
        parallel: Any = None,
        max_nbytes: int | None = None,
        **settings: Any,
    ) -> int:
        """Prepare for a `Parallel`; return the number of its jobs, or raise FallbackToBackend."""
        if self._find_origin is None:
            # a FallbackToBackend would be the context of every error raised in there
            own = parallel._backend = self._copy_with(settings)
            return own.configure(n_jobs, parallel, max_nbytes, **settings)
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
        mine = {name: value for name, value in settings.items() if name not in JOBLIBS_OWN}
        origin = self
        if mine:
            mine.setdefault("inner_max_num_threads", self.inner_max_num_threads)
            origin = RaypoolBackend(**mine)
        elif not self._source.is_said:
            active, _ = get_active_backend()  # of the `parallel_config` block around it
            origin = active if type(active) is RaypoolBackend else self
        # not made by a call: the pool is its origin's, whose finalizer ends it
        own = RaypoolBackend.__new__(RaypoolBackend)
        own.__dict__.update(vars(origin), nesting_level=self.nesting_level, _batch_size=BatchSize())
        own._origin, own._find_origin = origin, weakref.ref(origin)
        return own

    # --- one call of a Parallel -------------------------------------------------------------------

    def start_call(self) -> None:
        """Begin a call without batches."""
        self._batches = self._make_batches()

    def submit(self, batch: BatchedCalls, callback: BatchCompletionCallBack) -> Batches:
        """Hand in a batch; `callback` is called when all of it has ended or a part has failed."""
        tasks = batch.items
        self._batches.show(callback.parallel, tasks)
        self._batches.take(BatchPart(Batch(tasks, callback), 0, len(tasks)))
        return self._batches

    def stop_call(self) -> None:
        """Release the batches of the call."""
        self._batches.end()

    def retrieve_result_callback(self, out: Callable[[], list[Any]]) -> list[Any]:
        """Return the values of a batch, or raise its error."""
        return out()

    def compute_batch_size(self) -> int:
        """Return the number of tasks for the next batch."""
        return self._batch_size.tasks

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Note the running time of a batch."""
        # not `duration`, in which the batch has also waited
        self._batch_size.note(batch_size, self._batches.newest_run_s + batch_size * TASK_S)

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all batches; the workers stay for the next `Parallel`."""
        self._batches.end()

    def terminate(self) -> None:
        """Release the `Parallel`, and end a pool that was opened for it alone."""
        self.parallel = self._origin = None  # the `Parallel` refers to this, too
        self._batch_size = BatchSize()  # the next call may have tasks of another length
        if self._find_origin is not None and self._find_origin() is None:
            self._source.close()


JOBLIBS_OWN = frozenset({"context", "mmap_mode", "prefer", "require", "temp_folder", "verbose"})
"""Settings that joblib passes to every backend, unused here."""


class BatchSize:
    """The number of tasks for a batch, by the durations of the last ones.

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
        """Note the duration of a batch."""
        if tasks != self.tasks:
            return  # begun before the last change, or the rest at the end
        self._mean_s = duration_s if self._mean_s is None else 0.8 * self._mean_s + 0.2 * duration_s
        growth = min(BATCH_S / max(self._mean_s, 1e-6), GROWTH)
        better = min(max(int(tasks * growth), 1), MOST_TASKS)
        if not tasks / LEAST_CHANGE < better < tasks * LEAST_CHANGE:
            self.tasks, self._mean_s = better, None


# --- batches on their way to the workers and back -------------------------------------------------
#
# A batch is a call of the pool, or becomes several: a worker in a long one hands back the tasks
# that it has not begun.


AHEAD = 4
"""The number of short batches on their way, per worker; they share calls."""

AHEAD_S = 0.006
"""A batch is short below this running time [s]: of joblib's two per worker, one always waits."""


class Batch:
    """A batch and its results so far."""

    def __init__(self, tasks: list[Task], callback: BatchCompletionCallBack) -> None:
        self.tasks = tasks
        self.callback = callback
        self.first = callback.parallel.n_dispatched_tasks - len(tasks)  # the number of the first
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

    def numbered(self, future: Future[Any]) -> Slice:
        """Return the numbers of the tasks in their `Parallel`, with the attempt at their call."""
        first = self.batch.first
        return Slice(0, first + self.start, first + self.stop, future.attempts)


class Batches:
    """The batches of one call of a `Parallel`; at most `most` calls run at once."""

    def __init__(self, pool: PoolView, most: int, max_nbytes: int | None, manner: Manner) -> None:
        self._pool = pool
        self._num_workers = most
        self._most = most if most < len(pool._numbers()) else None  # None: the pool queues calls
        self._shared: SharedArguments | None = None
        if pool._engine.profile.backend == "ray":  # elsewhere nothing travels
            least_bytes = math.inf if max_nbytes is None else max_nbytes
            self._shared = SharedArguments(pool._engine, least_bytes)
        self._manner = manner
        self._waiting: deque[BatchPart] = deque()
        self._running: dict[Future[Any], BatchPart] = {}  # ordered, as `cancel_each` needs
        self._display: Display | None = None
        self._lines = ItemLines("") if is_unseen(pool._engine) else None
        self._num_begun = 0
        self._is_begun = self._is_over = False
        self.newest_run_s = 0.0  # of the last batch passed to joblib
        # joblib's threads hand batches in, the one of `_call_each` answers them
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._end_thread = weakref.finalize(self, self._ended.put, None)
        self._end_thread.atexit = False

    def show(self, parallel: Parallel, tasks: list[Task]) -> None:
        """Begin, with the first tasks, to work and to show the progress, if somebody looks."""
        if self._is_begun:
            return
        self._is_begun = True
        if parallel.verbose or in_notebook() or is_terminal(sys.stderr):
            work = ParallelWork(function_name(tasks[0][0]), weakref.WeakMethod(self.calls))
            self._display = Display(work, parallel, self._pool._engine)
        # joblib's callbacks draw from the user's generator: not in the pool's thread
        call_all = functools.partial(_call_each, self._ended, self._display)
        threading.Thread(target=call_all, name="raypool-joblib", daemon=True).start()

    def calls(self) -> list[tuple[Future[Any], BatchPart]]:
        """Return the calls that have not been answered, in their order."""
        with self._lock:
            return list(self._running.items())

    def take(self, piece: BatchPart) -> None:
        """Take a part of a batch. Errors are not raised but passed to the batch's callback."""
        with self._lock:
            if self._most is not None and self._num_begun >= self._most:
                self._waiting.append(piece)
                return
            self._num_begun += 1
        self._begin(piece)

    def _begin(self, piece: BatchPart) -> None:
        name = function_name(piece.batch.tasks[0][0])
        tasks = piece.tasks
        limit_s = CALL_LIMIT_S if piece.batch.callback.parallel.batch_size == "auto" else math.inf
        try:
            try:
                if self._shared is not None:
                    self._shared.replace_in(tasks)
                submit = self._pool.options(name=name).parfeval
                future = submit(run_tasks, tasks, self._manner, limit_s)
                if self._lines is not None:
                    first = piece.batch.first + piece.start
                    show = functools.partial(_show_text, self._lines, self._ended, first)
                    feed_of(future).listen(show)
            except SerializationError:
                check_travels(tasks, self._pool._engine)  # raises the error that names the argument
                raise
        except Exception as error:
            future = Future(name)
            future.set_exception(error)
        with self._lock:
            self._running[future] = piece  # before the callback, after which it is removed
        if self._is_over:  # `end` may not have seen it
            future.cancel()
        future.add_done_callback(functools.partial(self._pass_on, piece))

    def _pass_on(self, piece: BatchPart, future: Future[Any]) -> None:
        if not self._is_over:  # else joblib expects no answer
            self._ended.put(functools.partial(self._answer, piece, future))

    def _answer(self, piece: BatchPart, future: Future[Any]) -> None:
        """Start a waiting call, and pass the results to joblib."""
        callback = piece.batch.callback
        try:
            with self._lock:
                self._running.pop(future, None)
                next_one = self._waiting.popleft() if self._waiting else None
                if next_one is None:
                    self._num_begun -= 1
            if next_one is not None:
                self._begin(next_one)
            if self._lines is not None:
                future._caught_up()  # its last lines may still be on their way
                self._lines.show()
            outcome = self._outcome(piece, future)
            if (display := self._display) is not None:
                display.work.note(piece, future)
            if outcome is not None:
                self.newest_run_s = piece.batch.run_s
                callback(outcome)
                is_short = (future.duration_s or AHEAD_S) < AHEAD_S
                if is_short and callback.parallel.batch_size == "auto":
                    self._draw_ahead(callback.parallel)
        except BaseException as error:  # `SystemExit` in the user's generator is one
            # joblib ends a `Parallel` like this after an `Exception` of the user's generator; for
            # others it would wait forever
            parallel = callback.parallel
            with parallel._lock:
                if parallel._call_id == callback.parallel_call_id:
                    tracker = BatchCompletionCallBack(0, 1, parallel)
                    parallel._register_new_job(tracker)
                    tracker._register_outcome({"result": error, "status": TASK_ERROR})

    def _outcome(self, piece: BatchPart, future: Future[Any]) -> Callable[[], list[Any]] | None:
        """Return a function for a whole batch's values or error; None while a part is missing."""
        if future.cancelled() or future.exception() is not None:
            return future.result
        batch, values = piece.batch, future.result()
        begun = piece.start + len(values)
        batch.values[piece.start : begun] = values
        batch.missing -= len(values)
        batch.run_s += future.duration_s or 0.0
        # spread over all workers, but no part longer than what this worker could do in time
        size = min(len(values), math.ceil((piece.stop - begun) / self._num_workers))
        for start in range(begun, piece.stop, max(size, 1)):
            self.take(BatchPart(batch, start, min(start + size, piece.stop)))
        return None if batch.missing else lambda: batch.values

    def _draw_ahead(self, parallel: Parallel) -> None:
        """Have joblib hand in batches as its callback does, while there is room."""
        most = AHEAD * self._num_workers
        while not self._is_over and len(self._running) + len(self._waiting) < most:
            with parallel._lock:
                if parallel._original_iterator is None:
                    return
                parallel.dispatch_next()

    def end(self) -> None:
        """Cancel all calls."""
        with self._lock:
            # first: joblib may still hand in a batch that it has drawn
            self._is_over = True
            self._waiting.clear()
            running = list(self._running)
        cancel_each(running)
        self._end_thread()
        display, self._display = self._display, None  # it has the errors, with their frames
        if display is not None:
            display.end()
        if self._lines is not None:
            self._lines.end()
        if self._shared is not None:
            self._shared.forget()


def _show_text(
    lines: ItemLines,
    calls: queue.SimpleQueue[Callable[[], None] | None],
    first: int,
    _: int,
    text: str,
) -> None:
    """Show what the call with this first task has printed, in the thread that shows the rest."""
    lines.add(first, text)
    calls.put(lines.show)


def _call_each(
    calls: queue.SimpleQueue[Callable[[], None] | None], display: Display | None
) -> None:
    # No executor: the interpreter closes these before the last threads end. No method: a thread
    # that holds the batches would keep them from being collected, which is what ends it.
    while True:
        with contextlib.suppress(queue.Empty):
            call = calls.get(timeout=None if display is None else TICK_S)
            if call is None:
                break
            call()
            del call  # it holds the batches
        if display is not None:
            display.update()
    if display is not None:
        display.end()


# --- progress -------------------------------------------------------------------------------------


PATIENCE_S = 1.0
"""The time before progress is shown [s]: libraries call joblib often, and mostly for less."""


class ParallelWork(LoopWork):
    """The tasks of one call of a `Parallel`, as displays of loops know items; no driver has it."""

    def __init__(
        self, label: str, find_calls: Callable[[], Callable[[], list[Any]] | None]
    ) -> None:
        # displays describe items that differ from their numbers
        super().__init__(Function(0, None, label), range(sys.maxsize), LoopOptions(label))
        self._find_calls = find_calls

    @property
    def running(self) -> dict[int, tuple[Slice, float]]:
        """What each worker runs, by its number, and since when."""
        find = self._find_calls()
        found: dict[int, tuple[Slice, float]] = {}
        for future, piece in [] if find is None else find():
            # the driver sets one after the other
            worker, began = future.worker, future.started_at
            if future.running() and worker is not None and began is not None:
                # a worker has the calls after the first only in its queue
                found.setdefault(worker, (piece.numbered(future), began.timestamp()))
        return found

    def note(self, piece: BatchPart, future: Future[Any]) -> None:
        """Note the outcome of a call."""
        if future.worker is None or future.cancelled():
            return
        error = future.exception()
        tasks = piece.numbered(future)
        if error is None:
            tasks = tasks._replace(stop=tasks.start + len(future.result()))
        count = tasks.stop - tasks.start
        result = SliceResult(
            tasks.start,
            count,
            LocalValues([]),
            0,
            {} if error is None else {tasks.start: Failure(error, None)},
            array("d", [(future.duration_s or 0.0) / count] * count),
            0.0,
        )
        errors = {} if error is None else {tasks.start: error}
        self._keep(Segment(tasks, result, WorkerInfo(future.worker, "", 0)), errors)


class Display:
    """Shows the progress of one call of a `Parallel` as `parfor` shows that of a loop."""

    def __init__(self, work: ParallelWork, parallel: Parallel, engine: Engine) -> None:
        self.work = work
        self._find_parallel = weakref.ref(parallel)
        self._total: int | None = None
        self._show_at = monotonic() + (0.0 if parallel.verbose else PATIENCE_S)
        self._context = contextlib.ExitStack()
        # True: also in a log file
        progress = True if parallel.verbose else None
        self._watch = self._context.enter_context(watched(progress, work.label, engine))
        # again in the same thread: the collector may end a call anywhere
        self._lock = threading.RLock()

    def update(self) -> None:
        """Show the progress, if it is time."""
        with self._lock:
            parallel = self._find_parallel()
            if parallel is not None:
                self._total = parallel.n_tasks
                if self._total is None and parallel._original_iterator is None:
                    self._total = parallel.n_dispatched_tasks  # all have been drawn
            if self._watch is not None and monotonic() >= self._show_at:
                self._watch.update(self.work, self._total)

    def end(self) -> None:
        """Show the end, once."""
        self.update()
        with self._lock:
            if self.work.num_settled == self._total and not self.work.errors:
                self.work.state = TaskState.FINISHED
            self._watch = None
            self._context.close()


# --- tasks: transport and execution ---------------------------------------------------------------


Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Manner(NamedTuple):
    """How the tasks of a `Parallel` are run."""

    nested: tuple[ParallelBackendBase, int | None]  # joblib's, for a `Parallel` in a task
    max_threads: int | None  # of BLAS and OpenMP; None: as many as the worker has


def run_tasks(tasks: list[Task], manner: Manner, limit_s: float) -> list[Any]:
    """Run tasks on a worker, and begin none after the limit [s]; return the first ones' values."""
    register_parallel_backend("raypool", RaypoolBackend)  # a task may name the backend, too
    for fn in {id(task[0]): task[0] for task in tasks}.values():
        share_left(fn)
    backend, n_jobs = manner.nested
    values: list[Any] = []
    until = perf_counter() + limit_s
    # a backend serves one Parallel at a time, and worker threads have the same one
    own = copy.copy(backend)
    with parallel_config(backend=own, n_jobs=n_jobs), _threads_limited(manner.max_threads):
        for fn, args, kwargs in tasks:
            values.append(finished(fn(*args, **kwargs)))
            if perf_counter() > until:  # after a task: every call runs one at least
                break
    return values


@contextlib.contextmanager
def _threads_limited(most: int | None) -> Iterator[None]:
    if most is None:
        yield
        return
    from threadpoolctl import threadpool_limits

    # the environment is for libraries that a task loads, `threadpool_limits` for loaded ones
    limits = dict.fromkeys(ParallelBackendBase.MAX_NUM_THREADS_VARS, str(most))
    with environment(limits), threadpool_limits(most):
        yield


class Shared:
    """Stands for an argument that travels once; unpickled, it is the argument."""

    __slots__ = ("_open",)

    def __init__(self, open_: Callable[[], Any]) -> None:
        self._open = open_

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open, ()


class SharedArguments:
    """The large arguments of one `Parallel` call, each of which travels once, and its memmaps."""

    def __init__(self, engine: Engine, least_bytes: float) -> None:
        self._engine = engine
        self._least_bytes = least_bytes
        # by id, while the argument lives; joblib's own processes share arrays in the same way
        self._known: dict[int, tuple[weakref.ref[Any], Shared]] = {}

    def replace_in(self, tasks: list[Task]) -> None:
        """Replace large arguments and memmaps by stand-ins."""
        for position, (fn, args, kwargs) in enumerate(tasks):
            if not kwargs and PLAIN.issuperset(map(type, args)):
                continue
            stand_ins = {
                id(value): stand_in
                for value in (*args, *kwargs.values())
                if type(value) not in PLAIN and (stand_in := self._stand_in(value, fn))
            }
            if stand_ins:
                tasks[position] = (
                    fn,
                    tuple(stand_ins.get(id(value), value) for value in args),
                    {name: stand_ins.get(id(value), value) for name, value in kwargs.items()},
                )

    def forget(self) -> None:
        """Release the arguments."""
        self._known.clear()

    def _stand_in(self, value: Any, fn: Callable[..., Any]) -> Shared | None:
        key = id(value)
        reference, shared = self._known.get(key, (None, None))
        if shared is None or reference is None or reference() is not value:  # an id can be reused
            if (opener := self._file_opener(value)) is None:
                if _num_bytes(value) < self._least_bytes:
                    return None
                opener = self._engine.opener(value, f"an argument of {function_name(fn)}")
            shared = Shared(opener)
            self._known[key] = weakref.ref(value, lambda _: self._known.pop(key, None)), shared
        return shared

    def _file_opener(self, value: Any) -> Callable[[], Any] | None:
        """Return what opens the file of a writable memmap, into which tasks may write."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray):
            return None
        memmap = _get_backing_memmap(value)
        if getattr(memmap, "mode", None) not in ("r+", "w+") or memmap.filename is None:
            return None
        workers = list(self._engine.driver.infos.values())
        if any(worker.host != platform.node() for worker in workers):
            warnings.warn(
                f"Tasks on other machines cannot write into the memmap of {memmap.filename}: each"
                " task gets a copy. Return the values instead.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        open_, args = _reduce_memmap_backed(value, memmap)
        return functools.partial(open_, *args)


def _num_bytes(value: Any) -> float:
    """Return the size of an array, tensor, table or sparse matrix [bytes]; else 0."""
    if isinstance(value, type) or type(value).__weakrefoffset__ == 0:
        return 0  # `SharedArguments` needs a weak reference to it
    try:
        nbytes: Any = getattr(value, "nbytes", None)
        if nbytes is None and (measure := getattr(value, "memory_usage", None)) is not None:
            nbytes = measure().sum()  # pandas
        if nbytes is None:
            nbytes = getattr(getattr(value, "data", None), "nbytes", 0)  # SciPy's sparse matrices
        return float(nbytes)
    except Exception:  # another class with an attribute of this name
        return 0


def check_travels(tasks: list[Task], engine: Engine) -> None:
    """Raise SerializationError with the argument's name, if one cannot be sent."""
    for fn, args, kwargs in tasks:
        name = function_name(fn)
        engine.backend.pack(fn, f"the function {name}", is_trial=True)
        for key, value in [*enumerate(args), *kwargs.items()]:
            engine.backend.pack(value, f"argument {key!r} of {name}", is_trial=True)


# --- source of the pool ---------------------------------------------------------------------------


BESIDE_THE_PROFILE = frozenset({"num_workers", "initializer", "initargs"})
"""Arguments of `parpool` that are no fields of a profile."""


class PoolSource:
    """Finds a backend's pool: the given one, else the current one, else one that it opens."""

    def __init__(self, pool: PoolView | None, opening: dict[str, Any]) -> None:
        if pool is not None and not isinstance(pool, PoolView):
            raise InvalidTypeError(
                f"pool={pool!r} is not a pool. Pass what parpool() returns, or a part or view"
                " of it."
            )
        if pool is not None and opening:
            raise InvalidValueError(
                f"The backend raypool was given a pool, and {', '.join(opening)} to open another."
                " Pass only one of them."
            )
        self.is_said = pool is not None or bool(opening)
        self._given = pool
        self._opening = opening
        if opening:
            self._settings()  # raises now if one is wrong, not in the first `Parallel`
        self._opened: ParallelPool | None = None
        self._most_asked = 0  # the greatest `n_jobs` so far
        self._has_noted = False
        self._lock = threading.Lock()  # two loops must not open two pools

    def find(self, n_jobs: int) -> PoolView:
        """Return the pool; one opened here has workers for the greatest `n_jobs`, if possible."""
        if self._given is not None:
            self._given._target()  # raises if it was shut down or has no workers
            return self._given
        with self._lock:
            if not self._opening and (current := gcp(create=False)) is not None:
                return current
            if self._opened is None or self._opened.is_closed:
                settings, wanted = self._settings(), None
                if n_jobs > 1 and not settings.listed:
                    # on Ray, as many as there is room for; this process has room for any number
                    wanted = (1, n_jobs) if settings.backend == "ray" else n_jobs
                self._opened = open_pool(**{"num_workers": wanted, **self._opening})
            elif (
                n_jobs > self._most_asked
                and "num_workers" not in self._opening
                and not self._opened._engine.profile.listed  # else each worker's share was given
            ):
                with contextlib.suppress(ResourceError):  # there is no room for more
                    self._opened._engine.grow(n_jobs)
            self._most_asked = max(n_jobs, self._most_asked)
            return self._opened

    def _settings(self) -> Profile:
        """Return the profile of the pool that would be opened."""
        fields = {
            name: value for name, value in self._opening.items() if name not in BESIDE_THE_PROFILE
        }
        return resolve_profile(fields.pop("profile", None), fields)

    def close(self) -> None:
        """End the pool that was opened here, if any."""
        pool, self._opened = self._opened, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)  # a finalizer must not wait

    @property
    def is_forked(self) -> bool:
        """Whether this process can have no pool, as it was forked from one with it or with Ray."""
        if self._given is not None:
            return self._given._engine.driver.is_forked
        if not self._opening and gcp(create=False) is not None:
            return False
        return self._settings().backend == "ray" and is_forked()

    @property
    def is_on_ray(self) -> bool:
        """Whether the workers are processes; opens nothing."""
        pool = self._given or self._opened or (None if self._opening else gcp(create=False))
        if pool is not None:
            return pool._engine.profile.backend == "ray"
        return self._settings().backend == "ray"

    def note_forked(self) -> None:
        """Warn that everything runs in turn, as joblib's own backends do in such a process."""
        warnings.warn(
            "raypool cannot run joblib's calls in a process that was forked from one that uses"
            " Ray or has the pool: setting n_jobs=1. Start the process with spawn, or use"
            " joblib's threading backend in it.",
            stacklevel=_level_of_the_user(),
        )

    def note_too_many(self, n_jobs: int, size: int) -> None:
        """Warn, once, that there are fewer workers than `n_jobs`."""
        if not self._has_noted:  # no error: no result depends on it
            self._has_noted = True
            warnings.warn(
                f"n_jobs={n_jobs} is more than the pool's number of workers, {size}: all of them"
                " are used. Open a larger pool, or leave out n_jobs.",
                stacklevel=_level_of_the_user(),
            )


def _level_of_the_user() -> int:
    """Return the `stacklevel` of the line that called joblib or a package built on it."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "raypool",
        "joblib",
    ):
        frame, level = frame.f_back, level + 1
    return level
