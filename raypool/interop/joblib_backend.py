"""The backend "raypool" of joblib: how what a `joblib.Parallel` hands in comes to the workers of a pool, and back.

joblib puts tasks together into batches. A batch is one call of the pool, which queues it, binds it to whoever is free, runs it
again after a loss and stops it. joblib's callbacks draw the next tasks from the user's generator, so they run in a thread of
their own and not in the pool's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from joblib.parallel import (
    BatchCompletionCallBack,
    BatchedCalls,
    FallbackToBackend,
    Parallel,
    ParallelBackendBase,
    SequentialBackend,
    get_active_backend,
)

from raypool.errors import InvalidValueError
from raypool.interop.joblib_batches import Batches
from raypool.interop.joblib_source import PoolSource
from raypool.interop.joblib_tasks import Manner
from raypool.task import in_task
from raypool.view import PoolView

LEAST_JOBS = 2
"""So many jobs a `Parallel` hears of at least, also where a single worker runs them: with one it runs all in turn where it is."""

BATCH_S = 0.2
"""What a batch should take [s]; joblib's own processes aim at the same."""

TASK_S = 10e-6
"""What a task costs here and on its way [s]."""

GROWTH = 64
"""A batch holds at most so many times the tasks of those before: what takes far too long is handed back, which costs a call."""

MOST_TASKS = 1024
"""A batch never holds more: what is to be sent of them would take longer than a call costs."""

LEAST_CHANGE = 2.0
"""Batches keep their size unless one that is so many times larger, or smaller, would take what it should."""


class RaypoolBackend(ParallelBackendBase):  # type: ignore[misc]
    """What joblib calls "raypool"; see `raypool.register_joblib`.

    The one that `parallel_config` makes serves all that runs in its block; each `Parallel` works with a copy of its own.

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
        self._origin: RaypoolBackend | None = None  # of a copy, while it is in use: with its origin goes what that has opened
        self._find_origin: Callable[[], RaypoolBackend | None] | None = None  # of a copy
        self._batch_size = BatchSize()
        self._make_batches: Callable[[], Batches]
        self._batches: Batches

    def __reduce__(self) -> Any:
        """Let a task that refers to it travel: on the worker, where joblib runs everything in turn, it needs no pool."""
        return RaypoolBackend, ()

    @property
    def supports_sharedmem(self) -> bool:
        """Whether tasks run in this process."""
        return not self._source.is_on_ray

    @property
    def supports_inner_max_num_threads(self) -> bool:
        """Whether workers are processes, each with native libraries of its own."""
        return self._source.is_on_ray

    # --- how many -----------------------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many workers `n_jobs` means; to a `Parallel` that uses a single one, see `LEAST_JOBS`.

        Raises:
            ValueError: It is 0, as with all backends of joblib.
            Exception: A pool that is needed could not be opened.
        """
        num_workers = self._num_workers(n_jobs)
        return max(num_workers, LEAST_JOBS if num_workers and self._find_origin is not None else 1)

    def _num_workers(self, n_jobs: int | None) -> int:
        """Return how many workers of the pool `n_jobs` means; 0: none, everything runs in turn where it is."""
        n_jobs = self.default_n_jobs if n_jobs is None else n_jobs
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        is_in_thread_of_task = (self.nesting_level or 0) > 1  # which does not know that: its task would wait for a worker
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

    def configure(self, n_jobs: int = 1, parallel: Parallel | None = None, max_nbytes: int | None = None, **settings: Any) -> int:
        """Make ready for what a `Parallel` hands in; return how many workers it gets, or `LEAST_JOBS`.

        Raises:
            FallbackToBackend: To a copy of this for that `Parallel` alone, or to no workers at all where it gets one.
            InvalidValueError: This is a callback of one of the pool's futures, which nothing can be waited for in.
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
                "A Parallel cannot run in the callback of a future: the pool would wait for itself. Use a thread."
            )
        self.parallel = parallel
        manner = Manner(self.get_nested_backend(), self.inner_max_num_threads)
        self._make_batches = functools.partial(Batches, pool, num_workers, max_nbytes, manner)
        return max(num_workers, LEAST_JOBS)

    def _copy_with(self, settings: dict[str, Any]) -> RaypoolBackend:
        """Return what a single `Parallel` works with; what it was given besides joblib's own is for us."""
        mine = {name: value for name, value in settings.items() if name not in JOBLIBS_OWN}
        origin = self._with(mine) if mine else self._of_block()
        own = RaypoolBackend.__new__(RaypoolBackend)  # and not made anew: the pool is its origin's, which ends it
        own.__dict__.update(vars(origin), nesting_level=self.nesting_level, _batch_size=BatchSize())
        own._origin, own._find_origin = origin, weakref.ref(origin)
        return own

    def _with(self, settings: dict[str, Any]) -> RaypoolBackend:
        return RaypoolBackend(**{"inner_max_num_threads": self.inner_max_num_threads, **settings})

    def _of_block(self) -> RaypoolBackend:
        """Return the backend of the `parallel_config` block here, if that is one of ours and this one was told no pool."""
        active, _ = get_active_backend()
        return active if type(active) is RaypoolBackend and not self._source.is_said else self

    # --- one call of a Parallel ---------------------------------------------------------------------------------------

    def start_call(self) -> None:
        """Begin with nothing handed in."""
        self._batches = self._make_batches()

    def submit(self, batch: BatchedCalls, callback: BatchCompletionCallBack) -> Batches:
        """Hand in a batch; `callback` is called when all of it is back, or something has failed."""
        self._batches.hand_in(batch.items, callback)
        return self._batches

    def stop_call(self) -> None:
        """Let go of what was handed in."""
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
        """Let go of the `Parallel`, which refers to this, and end a pool that was opened for it alone."""
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
        """Take note of a batch; those of another size were begun before the last change, or are what was left in the end."""
        if tasks != self.tasks:
            return
        self._mean_s = duration_s if self._mean_s is None else 0.8 * self._mean_s + 0.2 * duration_s
        better = min(max(int(tasks * min(BATCH_S / max(self._mean_s, 1e-6), GROWTH)), 1), MOST_TASKS)
        if not tasks / LEAST_CHANGE < better < tasks * LEAST_CHANGE:
            self.tasks, self._mean_s = better, None
