"""The pool of the standard library's `multiprocessing`, on raypool's workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import math
import multiprocessing
import multiprocessing.pool
import queue
import threading
import uuid
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from operator import itemgetter
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from raypool.channel.constants import call_once
from raypool.channel.records import WorkerInfo, function_name
from raypool.engine.driver import Driver
from raypool.engine.engine import submit_call
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    RemoteTraceback,
    SerializationError,
    checked_count,
    optional_count,
    whole_number,
)
from raypool.futures import Future, cancel_each, unless_interrupted, when_ended
from raypool.options import check_callable
from raypool.parallel_for import is_inline
from raypool.pool import ParallelPool, PoolView, open_pool
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile, WorkerResources
from raypool.worker.runner import finished
from raypool.worker.running import in_task, this_process

__all__ = ["AsyncResult", "IMapIterator", "Pool", "UnpicklableError"]

T = TypeVar("T")

CHUNKS_PER_WORKER = 32
"""The calls of `map` per worker: other workers wait for the last one by a 32nd of it at most."""

LOOK_AHEAD = 16
"""The number of items per worker that `imap` draws ahead from a generator."""

SHARED_CPUS = 0.01
"""The part of a core that Ray reserves for a worker: like processes, they share the cores."""


class Pool:
    """A `multiprocessing.Pool` on raypool's workers, each with its own GPU if there are any.

    A worker that dies is replaced and its calls run again, where the standard pool hangs; functions
    need not be importable; a value that cannot be sent fails at the call, with an error that names
    the variable; `terminate` and Ctrl-C stop running Python code and free the workers' GPUs.

    Differences: a call may run again after the loss of its worker (`pool=p.options(retries=0)`
    prevents it). A terminated call raises `CancelledError` in `get`. Functions of scripts and
    notebooks travel with their current global variables, but keep those that `initializer` sets
    unless the script has changed them since.

    Args:
        processes: The number of workers. None: one per GPU that this process may use, or else one
            per physical core.
        initializer: Called first in each worker, also in replacements.
        initargs: Its arguments.
        maxtasksperchild: The number of tasks (calls, or chunks of a map) after which a worker's
            process is replaced. No effect in pools of this process ("threads", "inline").
        context: A context of `multiprocessing`; no effect, as Ray starts the workers.
        pool: A pool, a part or a view of one, which stays open. None: open one, which ends with
            this one.
        profile: The profile of the pool that is opened; see `parpool`.
        **changes: Single fields of the profile.

    Raises:
        ResourceError: Too little is available.
        InvalidValueError, InvalidTypeError: An argument is invalid.
        Exception: The exception of the initializer.

    Source:
        Python 3.11 to 3.14, multiprocessing.pool.Pool; `buffersize` of `imap` as of 3.15.

    Example:
        >>> with Pool(2, profile="threads") as pool:
        ...     pool.map(abs, [-1, -2, 3])
        ...     pool.starmap(pow, [(2, 3), (3, 2)])
        ...     pool.apply(divmod, (7, 2))
        [1, 2, 3]
        [8, 9]
        (3, 1)
    """

    def __init__(  # noqa: PLR0913 - those of the standard pool, and ours
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | None = None,
        *,
        pool: PoolView | None = None,
        profile: str | Profile | None = None,
        **changes: Any,
    ) -> None:
        self._state = multiprocessing.pool.INIT  # first: `terminate` looks at it after any error
        if initializer is not None and not callable(initializer):
            raise InvalidTypeError(
                f"initializer={initializer!r} is not callable. Pass a function, and its arguments"
                " as initargs=."
            )
        processes = optional_count("processes", processes, least=1)
        if context is not None and not isinstance(context, BaseContext):
            raise InvalidTypeError(
                f"context={context!r} is not a multiprocessing context. Leave it out: it has no"
                " effect, since Ray starts the workers."
            )
        self._limit = task_limit(maxtasksperchild)
        if pool is not None and not isinstance(pool, PoolView):
            raise InvalidTypeError(
                "pool must be a pool, as parpool() returns it, or a part or view of one, not"
                f" {pool!r}."
            )
        if pool is not None and (processes is not None or profile is not None or changes):
            raise InvalidValueError(
                "pool= already has workers; processes=, profile= and other settings are for a new"
                " pool."
            )
        self._own = _opened(processes, profile, changes) if pool is None else None
        self._view: PoolView = self._own or pool  # type: ignore[assignment]
        self._forget: Callable[[], object] = lambda: None
        if initializer is not None:
            self._forget = self._initialize(initializer, initargs)
        self._collector = Collector(self._view._engine.driver)
        # nobody can close a pool that is gone, and its collector would run on
        weakref.finalize(self, self._collector.close, self._forget).atexit = False
        self._state = multiprocessing.pool.RUN

    def _initialize(
        self, initializer: Callable[..., object], initargs: Iterable[Any]
    ) -> Callable[[], None]:
        """Call it on every worker, including later ones; return a function that ends this."""
        begin = functools.partial(call_once, uuid.uuid4().hex, initializer, *initargs)
        with contextlib.ExitStack() as undo:
            if self._own is not None:
                undo.callback(self._own.shutdown, cancel_futures=True)
            forget = self._view._begin_with(begin)
            undo.callback(forget)
            calls: list[Future[Any]] = []
            undo.callback(cancel_each, calls)  # after Ctrl-C below, also running ones
            calls.append(self._view.options(name=function_name(initializer)).parfeval_on_all(begin))
            calls[0].result()
            undo.pop_all()  # it has worked
        return forget

    def apply(
        self, func: Callable[..., T], args: Iterable[Any] = (), kwds: Mapping[str, Any] = {}
    ) -> T:
        """Return `func(*args, **kwds)`, called on a worker."""
        result: T = waited_for(self._apply_async, func, args, kwds)
        return result

    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = {},
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[T]:
        """Call `func(*args, **kwds)` on a worker; return its future result.

        Args:
            func: Any function.
            args: Its arguments.
            kwds: Its keyword arguments.
            callback: Called here with the value, in a thread with one callback at a time.
            error_callback: Called with the error.

        Raises:
            UnpicklableError: The function or an argument cannot be sent; it names the variable.
            ValueError: The pool was closed.
        """
        return self._apply_async([], func, args, kwds, callback, error_callback)

    def _apply_async(
        self,
        futures: list[Future[Any]],
        func: Callable[..., T],
        args: Iterable[Any],
        kwds: Mapping[str, Any],
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[T]:
        self._check_running()
        submit = ready(self._view._target(), PoolCall(func, call, self._limit))
        futures.append(submit(*args, **kwds))
        return AsyncResult(
            CallGroup(self, self._collector, futures, itemgetter(0), callback, error_callback)
        )

    def map(
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[T]:
        """Return `[func(item) for item in iterable]`, run on all workers."""
        work = PoolCall(func, call_each, self._limit)
        return waited_for(self._map_async, work, iterable, chunksize)

    def map_async(
        self,
        func: Callable[[Any], T],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[T]]:
        """Do as `map`, but return the future result.

        All items run, except those after a failed one in its chunk. The error is the first failed
        item's.

        Args:
            func: Any function of one argument; it is shipped to each worker once.
            iterable: All of it is drawn now.
            chunksize: The number of items per call. None: each worker gets about 32 calls, if there
                are enough items.
            callback: Called with the list.
            error_callback: Called with the error.

        Raises:
            UnpicklableError: The function or an item cannot be sent; it names the variable.
            ValueError: The pool was closed.
        """
        work = PoolCall(func, call_each, self._limit)
        return self._map_async([], work, iterable, chunksize, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[T]:
        """Return `[func(*arguments) for arguments in iterable]`, run on all workers."""
        work = PoolCall(func, call_each_starred, self._limit)
        return waited_for(self._map_async, work, iterable, chunksize)

    def starmap_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[T]]:
        """Do as `map_async`, for a function of several arguments."""
        work = PoolCall(func, call_each_starred, self._limit)
        return self._map_async([], work, iterable, chunksize, callback, error_callback)

    def _map_async(
        self,
        futures: list[Future[Any]],
        work: PoolCall,
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[Any]]:
        self._check_running()
        submit = ready_for_many(self._view, work)
        items = list(iterable)
        self._check_running()  # drawing the items may have taken long
        if chunksize is None:
            chunksize = math.ceil(len(items) / (CHUNKS_PER_WORKER * self._view._capacity())) or 1
        chunksize = checked_count("chunksize", chunksize, least=1)
        try:
            # one by one, so that an error cancels those before it
            futures += (submit(chunk) for chunk in chunks(iter(items), chunksize))
        except BaseException:
            cancel_each(futures)
            raise
        return AsyncResult(
            CallGroup(self, self._collector, futures, joined, callback, error_callback)
        )

    def imap(
        self,
        func: Callable[[Any], T],
        iterable: Iterable[Any],
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> IMapIterator[T]:
        """Return an iterator over `func(item)` for each item, in order, while the workers go on.

        The iterable may be endless: a thread draws at most `buffersize` items ahead of the results
        that were taken, and the rest in `join` after `close`; nothing more if the iterator is
        dropped after its first result.

        Args:
            func: Any function of one argument; it is shipped to each worker once.
            iterable: Its exception is raised after the results of the items before.
            chunksize: The number of items per call.
            buffersize: None: 16 per worker and at least two calls, or any number if the iterable
                has a length.

        Raises:
            UnpicklableError: The function cannot be sent; it names the variable. For an item,
                `next` raises it.
            ValueError: The pool was closed, or `chunksize` or `buffersize` is less than 1.
        """
        return self._imap(func, iterable, chunksize, buffersize, is_ordered=True)

    def imap_unordered(
        self,
        func: Callable[[Any], T],
        iterable: Iterable[Any],
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> IMapIterator[T]:
        """Do as `imap`, but return each result as soon as it is available."""
        return self._imap(func, iterable, chunksize, buffersize, is_ordered=False)

    def _imap(
        self,
        func: Callable[[Any], T],
        iterable: Iterable[Any],
        chunksize: int,
        buffersize: int | None,
        is_ordered: bool,
    ) -> IMapIterator[T]:
        is_chunked = chunksize != 1  # a chunk of one item needs no list
        self._check_running()
        submit = ready_for_many(
            self._view, PoolCall(func, call_each if is_chunked else call, self._limit)
        )
        chunksize = checked_count("chunksize", chunksize, least=1)
        buffersize = optional_count("buffersize", buffersize, least=1)
        items = iter(iterable)
        if buffersize is not None:
            most_ahead: int | None = math.ceil(buffersize / chunksize)
        elif hasattr(iterable, "__len__"):
            most_ahead = None
        else:
            most_ahead = self._view._capacity() * max(2, LOOK_AHEAD // chunksize)
        calls = chunks(items, chunksize) if is_chunked else items
        return IMapIterator(
            Drawing(
                self,
                self._collector,
                submit,
                calls,
                is_chunked=is_chunked,
                is_ordered=is_ordered,
                most_ahead=most_ahead,
            )
        )

    def close(self) -> None:
        """Take no more work; the workers end after the current work."""
        if self._state == multiprocessing.pool.RUN:
            self._state = multiprocessing.pool.CLOSE
            self._collector.close(
                self._forget
                if self._own is None
                else functools.partial(self._own.shutdown, wait=False)
            )

    def terminate(self) -> None:
        """Cancel all calls, even running ones, and end the workers; a `pool=` stays open."""
        if self._state == multiprocessing.pool.INIT:  # `__init__` has failed
            return
        self._state = multiprocessing.pool.TERMINATE
        self._collector.close(self._forget)  # first: afterwards no new job can start
        jobs = self._collector.jobs()
        for job in jobs:  # first: cancelled calls make room, in which others would be drawn
            if isinstance(job, Drawing):
                job.stop()
        if self._own is None:
            for job in reversed(jobs):  # as `cancel_each` does
                job.cancel()
        elif not self._own.is_closed:
            self._own.cancel_all()
        if self._own is not None:
            self._own.shutdown(cancel_futures=True)

    def join(self) -> None:
        """Wait for the end of all work, after `close` or `terminate`.

        Raises:
            ValueError: The pool was not closed.
            InvalidValueError: This is a callback of this pool, which would wait for itself.
        """
        if self._state == multiprocessing.pool.RUN:
            raise ValueError("Pool is still running")
        self._collector.check_wait()
        self._collector.check_calls()
        for job in self._collector.jobs():
            if isinstance(job, Drawing):  # it would wait until its results are taken
                job.hurry()
        self._collector.thread.join()
        if self._own is not None:  # `close` lets it shut down, but does not wait for that
            self._own.shutdown()

    def __enter__(self) -> Pool:
        self._check_running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.terminate()

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _run: str = multiprocessing.pool.RUN
    ) -> None:
        if getattr(self, "_state", None) == _run:  # at the interpreter's end, modules may be gone
            _warn(
                f"unclosed running multiprocessing pool {self!r}",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def _check_running(self) -> None:
        if self._state != multiprocessing.pool.RUN:
            raise ValueError("Pool not running")

    @property
    def _pool(self) -> list[WorkerInfo]:
        return self._view._workers()  # libraries look for them under the standard pool's name

    def __repr__(self) -> str:
        kind = type(self)
        return (
            f"<{kind.__module__}.{kind.__qualname__} state={self._state}"
            f" pool_size={len(self._pool)}>"
        )

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")


def _opened(
    processes: int | None, profile: str | Profile | None, changes: dict[str, Any]
) -> ParallelPool:
    if in_task():
        return open_pool(processes)
    settings = resolve_profile(profile, {"quiet": True, **changes})
    each = settings.resources
    # Cores are shared if the size is given: there may be more of a standard pool's processes than
    # cores, and they take none from others. A cluster needs the cores to find room for workers.
    if (
        processes is not None
        and settings.address is None
        and isinstance(each, WorkerResources)
        and each.cpus is None
    ):
        settings = replace(settings, resources=replace(each, cpus=SHARED_CPUS))
    return open_pool(processes, profile=settings)


# --- calls on workers -----------------------------------------------------------------------------


class UnpicklableError(SerializationError, TypeError, AttributeError, RuntimeError):
    """Work cannot be sent to a worker; it names the variable. Has the standard errors' types."""


@dataclass(frozen=True)
class TaskLimit:
    """The number of a pool's tasks after which a worker's process is replaced."""

    max_tasks: int
    pool: str  # several pools may use the same workers

    def count(self) -> None:
        """Count a task that has ended."""
        if next(_tasks[self.pool]) >= self.max_tasks:
            this_process.retire()


# of this process, by pool
_tasks: defaultdict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))


def task_limit(maxtasksperchild: int | None) -> TaskLimit | None:
    """Return the limit of a new pool; raise InvalidValueError for no whole number from 1 on."""
    if maxtasksperchild is None:
        return None
    number = whole_number(maxtasksperchild)  # no InvalidTypeError: as the standard pool does
    if number is None or number < 1:
        raise InvalidValueError(
            f"maxtasksperchild must be an integer of at least 1 or None, not {maxtasksperchild!r}."
        )
    return TaskLimit(number, uuid.uuid4().hex)


def call(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function once."""
    return func(*args, **kwargs)


def call_each(func: Callable[..., Any], chunk: Iterable[Any]) -> list[Any]:
    """Call the function with each item of a chunk."""
    return [finished(func(item)) for item in chunk]


def call_each_starred(func: Callable[..., Any], chunk: Iterable[Iterable[Any]]) -> list[Any]:
    """Call the function with the arguments in each item of a chunk."""
    return [finished(func(*arguments)) for arguments in chunk]


@dataclass(frozen=True)
class PoolCall:
    """A user's function on a worker, the way to call it, and the limit of tasks."""

    func: Callable[..., Any]
    how: Callable[..., Any]
    limit: TaskLimit | None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.func

    @property
    def bare(self) -> Callable[..., Any]:
        """The function itself if this adds nothing: it may travel by its name alone."""
        return self.func if self.how is call and self.limit is None else self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and count the task."""
        try:
            return self.how(self.func, *args, **kwargs)
        finally:
            if self.limit is not None:
                self.limit.count()


def chunks(items: Iterator[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of `size` items; the last may be shorter."""
    while chunk := tuple(itertools.islice(items, size)):
        yield chunk


def waited_for(submit: Callable[..., AsyncResult[T]], *arguments: Any) -> T:
    """Submit calls and return their result."""
    futures: list[Future[Any]] = []
    try:
        return submit(futures, *arguments).get()
    except BaseException:  # Ctrl-C, too: nobody else can get the result
        cancel_each(futures)
        raise
    finally:
        del futures  # the traceback of the error would hold them


def ready_for_many(view: PoolView, work: PoolCall) -> Callable[..., Future[Any]]:
    """Do as `ready`, for the calls of a map."""
    target = view._target()
    submit = ready(target, work)
    target._engine.warn_of_generators(work.func)
    # inline calls run as they are submitted: Ctrl-C in one of them ends the map
    return unless_interrupted(submit) if is_inline(target._engine) else submit


def ready(target: PoolView, work: PoolCall) -> Callable[..., Future[Any]]:
    """Return a function that submits calls of this work, which is packed once."""
    check_callable(work.func)
    engine, options = target._engine, target._options
    try:
        function = engine.function(work.bare)
    except SerializationError as error:
        _raise_unpicklable(error)
    where = target._where()

    def submit(*args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return submit_call(engine, function, args, kwargs, options, where)
        except SerializationError as error:
            _raise_unpicklable(error)

    return submit


def _raise_unpicklable(error: SerializationError) -> NoReturn:
    raise UnpicklableError(str(error), what=error.what) from error.__cause__


# --- what its methods return ----------------------------------------------------------------------

Callback = Callable[[Any], object]
Job: TypeAlias = "CallGroup[Any] | Drawing[Any]"

logger = logging.getLogger("raypool")


class Collector:
    """Finishes jobs in its own thread, until it is closed and none is left.

    Args:
        driver: That of the pool, which ends the calls of the jobs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ended: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: dict[Job, None] = {}  # these alone keep their pool from being collected
        self._lock = threading.RLock()  # reentrant: a pool's finalizer closes it at any moment
        self._at_end: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._live, name="raypool-collector", daemon=True)
        self.thread.start()

    def open(self, job: Job) -> None:
        """Take a job; raise ValueError if closed."""
        with self._lock:
            if self._at_end is not None:  # nobody would finish the job
                raise ValueError("Pool not running")
            self._open[job] = None

    def note_ended(self, job: Job) -> None:
        """Finish a job, whose calls have ended, soon; from any thread."""
        self._ended.put(job)

    def jobs(self) -> list[Job]:
        """Return the unfinished jobs."""
        with self._lock:
            return list(self._open)

    def close(self, at_end: Callable[[], object]) -> None:
        """Take no more jobs; call `at_end` after the last one."""
        with self._lock:
            self._at_end = at_end
        self._ended.put(None)  # wakes the thread

    def check_wait(self, timeout: float | None = None) -> None:
        """Raise InvalidValueError in a callback of a result, which would wait for itself."""
        self._check(threading.current_thread() is self.thread, timeout)

    def check_calls(self, timeout: float | None = None) -> None:
        """Raise InvalidValueError in a callback of a future, which would wait for itself."""
        # in a task, the calls are those of a serial pool
        self._check(self._driver.is_own_thread and not in_task(), timeout)

    def _check(self, is_own_thread: bool, timeout: float | None) -> None:
        if is_own_thread and (timeout is None or timeout > 0):
            raise InvalidValueError(
                "A callback cannot wait for results of its pool, or join it: the pool would wait"
                " for itself. Use a callback of that result instead, or a thread."
            )

    def _live(self) -> None:
        while self._at_end is None or self._open:
            job = self._ended.get()
            if job is not None:
                job.finish()
                with self._lock:
                    self._open.pop(job, None)
            del job  # it holds the pool
        self._at_end()


standard: Any = multiprocessing.pool  # typeshed lacks two of its exceptions


def outcome_of(future: Future[Any]) -> Any:
    """Return an ended call's value, or raise its error as the standard pool's."""
    try:
        return future.result()
    except SerializationError as error:
        raise standard.MaybeEncodingError(error, error.what) from error
    except BaseException as error:
        if future.cancelled():  # else it is the function's own
            raise concurrent.futures.CancelledError(f"{future.name} was cancelled.") from None
        if type(error.__cause__) is RemoteTraceback:
            error.__cause__ = standard.RemoteTraceback(str(error.__cause__))
        raise
    finally:
        del future  # the traceback of its error would hold it


def joined(chunks: list[list[Any]]) -> list[Any]:
    """Return the values of all calls of a `map`."""
    return list(itertools.chain.from_iterable(chunks))


class CallGroup(Generic[T]):
    """The calls of one `apply_async` or `map_async`, whose values `assemble` joins."""

    def __init__(
        self,
        pool: Pool,
        collector: Collector,
        futures: Sequence[Future[Any]],
        assemble: Callable[[list[Any]], T],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        self._pool: Pool | None = pool  # not collected before all calls have ended
        self._collector = collector
        self._futures = futures
        self._assemble = assemble
        self._callbacks = (error_callback, callback)  # by `is_success`
        self.ended = threading.Event()  # set after the callback
        self.is_success = False
        self.value: Any = None  # the result or the error
        try:
            collector.open(self)
            when_ended(futures, functools.partial(collector.note_ended, self))
        except BaseException as error:
            self.cancel()
            # with a ValueError the pool was closed meanwhile; after Ctrl-C not all calls would tell
            # of their end
            if not isinstance(error, ValueError):
                collector.note_ended(self)
            raise

    def check_wait(self, timeout: float | None) -> None:
        """Raise InvalidValueError in a callback, which would wait for itself."""
        self._collector.check_wait(timeout)
        for future in self._futures:
            if not future.done():
                future.check_wait(timeout)

    def finish(self) -> None:
        """Fetch the values, and call back."""
        try:
            self.value = self._assemble([outcome_of(future) for future in self._futures])
            self.is_success = True
        except BaseException as error:
            self.value = error
        callback = self._callbacks[self.is_success]
        # a result that the user keeps must not keep these
        self._futures, self._callbacks = (), (None, None)
        if callback is not None:
            try:
                callback(self.value)
            except BaseException:
                logger.exception(
                    "The callback %r of a pool failed; nothing else is affected.", callback
                )
        self._pool = None  # first: then a waiter that drops the pool holds the last reference
        self.ended.set()

    def cancel(self) -> None:
        """Cancel all calls."""
        cancel_each(self._futures)


class AsyncResult(Generic[T]):
    """The future result of one call or of one `map`.

    Source:
        multiprocessing.pool.AsyncResult.

    Example:
        >>> from raypool.interop.multiprocessing import Pool
        >>> with Pool(2, profile="threads") as pool:
        ...     result = pool.map_async(abs, [-1, -2])
        ...     result.get(timeout=10)
        ...     result.ready(), result.successful()
        [1, 2]
        (True, True)
    """

    def __init__(self, gathering: CallGroup[T]) -> None:
        self._gathering = gathering

    def ready(self) -> bool:
        """Return whether all calls have ended."""
        return self._gathering.ended.is_set()

    def successful(self) -> bool:
        """Return whether all calls ended without an exception.

        Raises:
            ValueError: They have not ended.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._gathering.is_success

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all calls and the callback, at most `timeout` seconds.

        Raises:
            InvalidValueError: This is a callback of the same pool, which would wait for itself.
        """
        if not self.ready():
            self._gathering.check_wait(timeout)
        # set by the collector after the callback, as in the standard pool
        self._gathering.ended.wait(timeout)

    def get(self, timeout: float | None = None) -> T:
        """Return the result; wait for it at most `timeout` seconds.

        Raises:
            multiprocessing.TimeoutError: The time is over; the calls continue.
            concurrent.futures.CancelledError: A call was cancelled, by `terminate` for example.
            multiprocessing.pool.MaybeEncodingError: A value could not be sent back.
            Exception: The exception of the first failed call; its cause is the remote traceback.
        """
        self.wait(timeout)
        if not self.ready():
            raise multiprocessing.TimeoutError(
                f"There was no result after {timeout:g} s; the work continues."
            )
        if self._gathering.is_success:
            return self._gathering.value  # type: ignore[no-any-return]
        try:
            raise self._gathering.value
        finally:
            del self  # the traceback of the error would hold it


# --- results of `imap` and `imap_unordered`, and the thread that draws items ----------------------


class IMapIterator(Iterator[T], Generic[T]):
    """The results of `imap` or `imap_unordered`, while a thread draws from the iterable.

    Without the iterator, submitted calls still run, and their results are discarded. A generator is
    drawn no further if results were taken; otherwise all of it is drawn, like a list.

    Source:
        multiprocessing.pool.IMapIterator.

    Example:
        >>> import itertools
        >>> from raypool.interop.multiprocessing import Pool
        >>> with Pool(2, profile="threads") as pool:
        ...     results = pool.imap(abs, itertools.count(-2))
        ...     next(results), results.next(timeout=10)
        (2, 1)
    """

    def __init__(self, drawing: Drawing[T]) -> None:
        self._drawing = drawing
        self._has_begun = False

    def __next__(self) -> T:
        try:
            return self.next()
        finally:
            del self  # the traceback of an error would hold it

    def next(self, timeout: float | None = None) -> T:
        """Return the next result; wait for it at most `timeout` seconds.

        An exception of the iterable, or the `UnpicklableError` of an item, is raised after the
        results of the items before. After a failed call, the next results follow.

        Raises:
            StopIteration: There are no more.
            InvalidValueError: This is the callback of a future of the pool, which would wait for
                itself.
            multiprocessing.TimeoutError: The time is over; the calls continue.
            Exception: The exception of the call; its cause is the remote traceback.
        """
        self._has_begun = True
        try:
            return self._drawing.take(timeout)
        finally:
            del self  # the traceback of an error would hold it

    def __del__(self) -> None:
        self._drawing.forget(self._has_begun)


class Drawing(Generic[T]):
    """Draws entries of `calls` in its own thread, and submits a call for each.

    Args:
        is_chunked: Each call returns a list of results.
        is_ordered: Results come in the order of the calls, not as they end.
        most_ahead: The most submitted calls whose results were not taken; None: any number.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        pool: Pool,
        collector: Collector,
        submit: Callable[[Any], Future[Any]],
        calls: Iterator[Any],
        *,
        is_chunked: bool,
        is_ordered: bool,
        most_ahead: int | None,
    ) -> None:
        self._pool: Pool | None = pool  # not collected before all calls have ended
        self._collector = collector
        self._is_chunked = is_chunked
        self._is_ordered = is_ordered
        self._most_ahead = most_ahead
        self._is_as_taken = most_ahead is not None
        # Guards all below. Its lock is reentrant, as it has to be: garbage collection may call
        # `forget` in a thread that holds it.
        self._changed = threading.Condition()
        self._pending: OrderedDict[Future[Any], None] = OrderedDict()
        self._ready: deque[Future[Any]] = deque()
        self._values: deque[T] = deque()  # of the last call that was taken
        self._why: BaseException | None = None  # raised after the last result
        self._is_drawn = False  # no more calls are submitted
        self._is_forgotten = False  # the iterator is gone
        try:
            collector.open(self)
            threading.Thread(
                target=self._draw, args=(submit, calls), name="raypool-imap", daemon=True
            ).start()
        except BaseException:  # Ctrl-C, say: nobody draws
            self._end(None)
            raise

    # --- drawing thread ---------------------------------------------------------------------------

    def _draw(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> None:
        why = None
        try:
            while self._submit_next(submit, calls):
                pass
        except BaseException as error:  # of the user's iterable, or of an item that cannot be sent
            why = error
        try:
            self._end(why)
        finally:
            # the traceback of the error would hold them, and by them the pool
            del self, submit, calls, why

    def _submit_next(self, submit: Callable[[Any], Future[Any]], calls: Iterator[Any]) -> bool:
        """Submit the next call when there is room; return whether to continue."""
        try:
            with self._changed:
                self._changed.wait_for(self._has_room)
                if self._is_drawn:
                    return False
            # without the lock: both may take long, and results are taken meanwhile
            entry = next(calls, self)  # `self` for the end: no iterable of the user's yields it
            if entry is self:
                return False
            future = submit(entry)
            with self._changed:
                is_wanted = not self._is_drawn
                self._pending[future] = None
            future.add_done_callback(self._note)
            if not is_wanted:
                future.cancel()
            return is_wanted
        finally:
            del self, submit, calls  # as in `_draw`

    def _has_room(self) -> bool:
        num_ahead = len(self._pending) + len(self._ready)
        return self._is_drawn or self._most_ahead is None or num_ahead < self._most_ahead

    def _note(self, future: Any) -> None:
        with self._changed:
            if self._is_ordered:  # others may have waited for this one
                ended = list(itertools.takewhile(lambda one: one.done(), self._pending))
            else:
                ended = [future] if future in self._pending else []
            for one in ended:
                del self._pending[one]
            if not self._is_forgotten:
                self._ready += ended
            self._changed.notify_all()
            is_ended = self._is_drawn and not self._pending
        if is_ended:
            self._collector.note_ended(self)

    def _end(self, why: BaseException | None) -> None:
        """Submit nothing more, and raise `why` after the last result."""
        with self._changed:
            if not self._is_drawn:
                self._is_drawn, self._why = True, None if self._is_forgotten else why
            self._changed.notify_all()
            is_ended = not self._pending
        if is_ended:  # else the last call ends it: the drawing thread may wait forever
            self._collector.note_ended(self)

    # --- for the pool -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Release the pool."""
        self._pool = None

    def hurry(self) -> None:
        """Submit all other calls without waiting for results to be taken."""
        with self._changed:
            if not self._is_forgotten:
                self._most_ahead = None
            self._changed.notify_all()

    def stop(self) -> None:
        """Submit nothing more."""
        self._end(
            concurrent.futures.CancelledError(
                "The pool was terminated before all of the iterable was drawn."
            )
        )

    def cancel(self) -> None:
        """Submit nothing more, and cancel all calls."""
        self.stop()
        cancel_each(list(self._pending))

    # --- for the iterator -------------------------------------------------------------------------

    def take(self, timeout: float | None) -> T:
        """Return the next result; see `IMapIterator.next`."""
        with self._changed:
            if not self._has_news():
                self._collector.check_calls(timeout)
            if not self._changed.wait_for(self._has_news, timeout):
                raise multiprocessing.TimeoutError(
                    f"There was no next result after {timeout:g} s; the work continues."
                )
            if self._values:
                return self._values.popleft()
            if not self._ready:
                why, self._why = self._why, None
                try:
                    raise StopIteration if why is None else why
                finally:
                    del why  # it would hold itself, by its traceback
            future = self._ready.popleft()
            self._changed.notify_all()  # there is room for another call
        try:
            values = outcome_of(future) if self._is_chunked else [outcome_of(future)]
        except StopIteration as error:
            raise RuntimeError(
                "A call of imap raised StopIteration, which would end the loop over the results."
            ) from error
        finally:
            del future
        with self._changed:
            self._values.extend(values)
            return self._values.popleft()

    def _has_news(self) -> bool:
        return bool(self._values or self._ready or (self._is_drawn and not self._pending))

    def forget(self, has_begun: bool) -> None:
        """Discard the results; stop drawing from a generator if results were taken."""
        with self._changed:
            self._is_forgotten = True
            self._ready.clear()
            self._values.clear()
            self._why = None
            self._changed.notify_all()
        if has_begun and self._is_as_taken:
            self._end(None)
