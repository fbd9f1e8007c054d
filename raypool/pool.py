"""The pool: what a user holds."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raypool.counts import checked_count
from raypool.engine.engine import Engine, open_engine, serial_engine
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.options import Options, check_callable
from raypool.partition import StaffedView
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.worker.running import in_task

if TYPE_CHECKING:
    from raypool.train.options import TrainingOptions
    from raypool.train.runs import TrainingRun


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a pool has done so far; see `ParallelPool.statistics`.

    Attributes:
        submitted, finished, failed, cancelled: Items (a single call is one).
        queued, running: Items right now.
        attempts: Calls to workers; fewer than items where short ones share a call.
        workers_lost: Processes that died and were replaced.
    """

    submitted: int
    finished: int
    failed: int
    cancelled: int
    queued: int
    running: int
    attempts: int
    workers_lost: int


class ParallelPool(StaffedView):
    """Workers that each hold a GPU (or a core) for as long as the pool lives. Open one with `parpool`.

    A `concurrent.futures.Executor`, with MATLAB's verbs beside the standard ones. As a context manager it waits for its work at
    the end; if the block ends with an error, what is queued is cancelled. Safe to use from several threads.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Options(retries=engine.profile.retries))
        weakref.finalize(self, engine.shutdown, wait=False).atexit = False

    def statistics(self) -> Statistics:
        """Return what the pool has done so far.

        Example:
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     values = pool.parfor(abs, [-1, -2])
            ...     pool.statistics().finished
            2
        """
        scheduler = self._engine.driver.scheduler
        counts = scheduler.counts
        tasks = list(scheduler.backlog.tasks.values())
        return Statistics(
            counts.submitted,
            counts.finished,
            counts.failed,
            counts.cancelled,
            sum(task.waiting for task in tasks),
            sum(task.items_in_flight for task in tasks),
            counts.attempts,
            counts.workers_lost,
        )

    def resize(self, num_workers: int) -> None:
        """Give the pool this many workers.

        New ones are up on return. Free ones are given back first; a busy one ends after what it is running.

        Raises:
            ResourceError: There are not so many; the pool stays as it is.
        """
        num_workers = checked_count("num_workers", num_workers, least=1)
        self._engine.check_open()
        self._engine.resize(num_workers)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and give everything back when what is left is done.

        Args:
            wait: Return only then.
            cancel_futures: Cancel what is queued. A loop that is half done counts as queued: what runs of it is given up.
        """
        self._engine.shutdown(wait, cancel_queued=cancel_futures)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        is_interrupted = kind is not None and not issubclass(kind, Exception)
        if is_interrupted:
            self._engine.shutdown(wait=True, cancel_queued=True, cancel_running=True)
        else:
            super().__exit__(kind, error, traceback)

    def __reduce__(self) -> Any:
        """Let a function that refers to its pool travel: on the worker it finds a serial one."""
        return _serial_pool, ()


def parpool(
    num_workers: int | tuple[int, int] | None = None,
    *,
    profile: str | Profile = "local",
    initializer: Callable[..., object] | None = None,
    initargs: Iterable[Any] = (),
    **changes: Any,
) -> ParallelPool:
    """Open a pool of workers, each with a GPU of its own (or a core), and print one line that says what was started.

    Inside a task there is one worker, the task's own thread. Of what is asked for, it takes what it begins and ends with:
    `initializer`, `setup` and `teardown`, also those of a `Profile`; not those of a name, whose file may not be there.

    Args:
        num_workers: Exactly so many, or `(least, most)` for as many as there are in that range. None: one for each GPU that this
            process may use; without a GPU, one for each physical core; where the profile's `resources` is a list, one for each
            entry.
        profile: "local" (Ray: the one that runs in this process, else a new one on this machine), "threads" or "inline" (in this
            process, without Ray); the name of one in a file raypool.toml (`[profiles.NAME]`) or pyproject.toml
            (`[tool.raypool.profiles.NAME]`) of this folder or the nearest one above; or a `Profile`.
        initializer: A function that runs once in each worker before anything else, with `initargs`: the standard library's way to
            say `setup=functools.partial(initializer, *initargs)`.
        initargs: What to call it with.
        **changes: Single fields of the profile, such as `gpus=[0, 2]` or `resources=WorkerResources(gpus=0.5)`.

    Raises:
        ResourceError: There is less than was asked for; it says what was requested, what is available and who holds the rest.
        StartupError: A worker did not come up, or its `setup` or `initializer` failed; it is a `BrokenExecutor` too.
        InvalidValueError, InvalidTypeError: An argument cannot work.

    Source:
        MATLAB R2025b, parpool; concurrent.futures.ProcessPoolExecutor for `initializer` and `initargs`.

    Example:
        >>> with parpool(2, profile="threads") as pool:
        ...     pool.num_workers
        raypool: 2 workers (threads of this process)
        2
    """
    pool = open_pool(num_workers, profile=profile, initializer=initializer, initargs=initargs, **changes)
    if not in_task():
        _note_current(pool)
    return pool


def open_pool(
    num_workers: int | tuple[int, int] | None = None,
    *,
    profile: str | Profile = "local",
    initializer: Callable[..., object] | None = None,
    initargs: Iterable[Any] = (),
    **changes: Any,
) -> ParallelPool:
    """Do as `parpool` does, but for whoever opens a pool for itself and ends it: it never becomes the current one (`gcp`)."""
    asked = checked_range(num_workers)
    if initializer is not None:
        changes = _with_setup(initializer, initargs, changes)
    if in_task():
        return _pool_in_task(profile, changes)
    settings = resolve_profile(profile, changes)
    least, most = settings.sized(*asked)
    started = time.monotonic()
    engine = open_engine(settings)
    try:
        engine.add_workers(least, most)
    except BaseException:
        engine.shutdown(wait=True, cancel_queued=True, cancel_running=True)
        raise
    pool = ParallelPool(engine)
    if not settings.quiet:
        sys.stdout.write(f"raypool: {_described(engine)}{_duration(settings, started)}\n")
        sys.stdout.flush()
    return pool


def _pool_in_task(profile: str | Profile, changes: dict[str, Any]) -> ParallelPool:
    """Return a serial pool that begins and ends as was asked for; the file that a name stands in may not be here."""
    given = profile if isinstance(profile, Profile) else Profile()
    setup, teardown = (changes.get(name, getattr(given, name)) for name in ("setup", "teardown"))
    return ParallelPool(serial_engine(setup=setup, teardown=teardown))


def _with_setup(initializer: Any, initargs: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a profile with `setup` in the words of the standard library."""
    check_callable(initializer)
    if "setup" in changes:
        raise InvalidValueError("setup and initializer are two names of one thing. Give one function that calls both.")
    if not isinstance(initargs, Iterable):
        raise InvalidTypeError(f"initargs={initargs!r} is not a list or tuple of arguments. Of one argument it is (argument,).")
    return {**changes, "setup": functools.partial(initializer, *initargs)}


def gcp(create: bool = True) -> ParallelPool | None:
    """Return the current pool: the one that was opened last and is still open.

    Args:
        create: Open one with `parpool()` if there is none; else None is returned then.

    Source:
        MATLAB R2025b, gcp.

    Example:
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     gcp() is pool
        True
    """
    if in_task():
        return _serial_pool()
    with _current_lock:
        for reference in reversed(_opened):
            pool = reference()
            if pool is not None and not pool.is_closed:
                return pool
    if not create:
        return None
    global _made_here
    _made_here = parpool()  # nobody else holds it
    return _made_here


def fit(model: Any, data: Any, loss: Callable[..., Any], options: TrainingOptions | None = None, **arguments: Any) -> TrainingRun:
    """Train a model on all workers of the current pool, which is opened if there is none; see `PoolView.fit`.

    Example:
        >>> import torch
        >>> from raypool import fit
        >>> with parpool(1, profile="threads", quiet=True):
        ...     run = fit(torch.nn.Linear(2, 1), (torch.rand(256, 2), torch.rand(256, 1)), torch.nn.functional.mse_loss)
        ...     run.result().model
        Linear(in_features=2, out_features=1, bias=True)
    """
    pool = gcp()
    assert pool is not None
    return pool.fit(model, data, loss, options, **arguments)


_made_here: ParallelPool | None = None
_opened: list[weakref.ref[ParallelPool]] = []
_current_lock = threading.Lock()


def _note_current(pool: ParallelPool) -> None:
    with _current_lock:
        _opened[:] = [reference for reference in _opened if (other := reference()) is not None and not other.is_closed]
        _opened.append(weakref.ref(pool))


def _serial_pool() -> ParallelPool:
    return ParallelPool(serial_engine())


def _described(engine: Engine) -> str:
    workers = engine.workers()
    count = f"{len(workers)} worker" + ("s" if len(workers) != 1 else "")
    if engine.profile.backend != "ray":
        where = "threads of this process" if engine.profile.backend == "threads" else "inline in this process"
        return f"{count} ({where})"
    hosts = []
    for host in dict.fromkeys(worker.host for worker in workers):
        gpus_of = [worker.gpus for worker in workers if worker.host == host]
        names = ", ".join(dict.fromkeys(str(gpu) for gpus in gpus_of for gpu in gpus))
        num_without = sum(not gpus for gpus in gpus_of)
        beside = f" and {num_without} without" if names and num_without else ""
        hosts.append(f"{host}: GPU {names}{beside}" if names else f"{host}: CPU")
    return f"{count} on {'; '.join(hosts)}"


def _duration(settings: Profile, started: float) -> str:
    return f", ready in {time.monotonic() - started:.1f} s" if settings.backend == "ray" else ""


def checked_range(num_workers: Any, name: str = "num_workers") -> tuple[int | None, int | None]:
    """Return the least and the most of a number of workers that may be a range; `name` is what the argument is called.

    Raises:
        InvalidValueError, InvalidTypeError: It is neither.
    """
    if num_workers is None:
        return None, None
    if isinstance(num_workers, (tuple, list)):
        if len(num_workers) != 2:
            raise InvalidValueError(f"{name}={num_workers!r} is not a pair (least, most).")
        least, most = (checked_count(name, value, least=1) for value in num_workers)
        if least > most:
            raise InvalidValueError(f"{name}={num_workers!r}: the least is more than the most.")
        return least, most
    number = checked_count(name, num_workers, least=1)
    return number, number
