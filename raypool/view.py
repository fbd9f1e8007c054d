"""The verbs: what can be asked of a pool, under whatever options."""

from __future__ import annotations

import concurrent.futures
import functools
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raypool.engine.backend import WorkerInfo, function_name
from raypool.engine.calls import Where, submit_call, submit_function
from raypool.engine.engine import Engine, serial_engine
from raypool.engine.overview import device_table, running
from raypool.errors import InvalidTypeError, InvalidValueError, ResourceError
from raypool.futures import Future
from raypool.gathered import cancel_each, gather
from raypool.loop import is_serial
from raypool.mapping import MapResults, checked_buffersize, unless_interrupted
from raypool.options import Options, check_callable
from raypool.parfor import LoopVerbs
from raypool.shared import call_once
from raypool.task import current_task, in_task
from raypool.training import TrainingVerbs

if TYPE_CHECKING:
    import pandas as pd

    from raypool.spmd.composite import Composite

T = TypeVar("T")


class PoolView(LoopVerbs, TrainingVerbs, concurrent.futures.Executor):
    """The verbs of a pool, under certain options. `ParallelPool` is one itself; `options` gives others of the same pool."""

    def __init__(
        self, engine: Engine, options: Options, pool: PoolView | None = None, places: tuple[int, ...] | None = None
    ) -> None:
        self._engine = engine
        self._options = options
        self._pool = pool  # kept from being collected, which would end it
        if places is None and pool is not None:
            places = pool._places
        self._places: tuple[int, ...] | None = places  # of its workers; None: of all

    def options(self, **changes: Any) -> PoolView:
        """Return a view of this pool whose verbs use other options.

        Args:
            **changes: `retries`: how often an item runs again after its worker was lost; 0 means that no item ever runs twice.
                `retry_on`: exception types of the user's own after which an item runs again too; without a delay that may be on
                the same worker, at once. `retry_delay_s`: it waits so long [s] before it runs for the second time, twice as long
                before each further one, at most 300 s. `timeout_s`: an item that runs longer [s] is stopped as by
                `Future.cancel`, and fails with `TaskTimeoutError`. With `workers_per_gpu="auto"` an item that found too little
                GPU memory beside others runs again whatever `retries` says, and its wait for the GPU is part of its time.
                `mismatch_timeout_s`: ranks (`spmd`, `train` and `fit` in the warm lane) that have waited for each other this long
                [s] in places where they can't meet fail with a `CollectiveError`; None: never. One has ended or is in
                `ray.train.report`, say, and another is in a collective of torch's. A rank that computes may take any time.
                `fresh_process`: an item runs in a process in which nothing has run before, and which ends after it, whatever it
                leaves behind there (it costs a worker's start; in pools of this process it means nothing). `priority`: higher
                goes first; equal ones go in the order in which they were handed in. `worker`: run on the worker with this
                number only; if that one is lost, so is the task. `name`: what to call the work in messages and displays.
                `checkpoints`: a folder that all machines of the pool see, or a URL ("gs://..."), in which
                `current_task().checkpoint_dir` of each item is kept, for whoever hands in an equal one later too (of the same
                function, with equal arguments); equal calls that run at the same time share it.

        Raises:
            InvalidTypeError: There is no such option.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     pool.options(name="sum").parfeval(sum, [1, 2]).name
            'sum'
        """
        known = Options.__slots__
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise InvalidTypeError(f"There is no option {', '.join(unknown)}. There are: {', '.join(known)}.")
        return PoolView(self._engine, replace(self._options, **changes), pool=self)

    def __reduce__(self) -> Any:
        """Let a function that refers to its pool travel: on the worker it finds a serial one."""
        return _serial_view, ()

    def _engine_here(self) -> Engine:
        """Return the engine for work that is called for here: in a task, a serial one."""
        if in_task():
            return serial_engine()
        self._check_open()
        if self._places is not None and not self._numbers():
            raise ResourceError(
                "This part of the pool has no workers: requested 1, available 0. "
                "Nothing fitted when it was made, or the pool has become smaller since; use the pool itself, or its other part.",
                requested=1,
                available=0,
                holders=(),
            )
        return self._engine

    def _check_open(self) -> None:
        """Make sure that work is still taken here."""
        if self._pool is not None:
            self._pool._check_open()
        else:
            self._engine.check_open()

    def _numbers(self) -> list[int]:
        """Return the numbers of the workers that this view is of, in order, without those that are to end."""
        crew = self._engine.driver.scheduler.crew
        there = [place.place for place in list(crew.places.values()) if place.worker_id not in crew.retiring]
        return sorted(there if self._places is None else set(there).intersection(self._places))

    def _workers(self) -> list[WorkerInfo]:
        """Return the workers that this view is of, in order."""
        workers = self._engine.workers()
        return workers if self._places is None else [worker for worker in workers if worker.index in self._places]

    def _where(self, engine: Engine) -> Where:
        """Return where work is to run; what runs serially, in a task, runs where it is, and has no process of its own."""
        number = self._options.worker
        is_fresh = self._options.fresh_process and engine.profile.backend == "ray"
        if engine is not self._engine:
            return Where()
        if number is None:
            return Where(None, self._places, is_fresh)
        numbers = self._numbers()
        if number not in numbers:
            raise InvalidValueError(f"There is no worker {number}. There are: {', '.join(map(str, numbers))}.")
        return Where(None, (number,), is_fresh) if is_fresh else Where(number)

    def device_table(self) -> pd.DataFrame:
        """Return the GPUs of the machines that the workers are on, as they are now, whoever uses them: a row for each.

        No CUDA context is made: the agents of the nodes ask the GPUs' driver. What that does not say is NA; and of a node that
        does not answer within 3 s all that changes is (memory, utilisation, temperature, processes). With "threads" and
        "inline", and in a task, it is the table of this machine.

        Returns:
            A table with the column `host`, those of `gpu_device_table` but for the last (`index`, `name`, `uuid`, `total_bytes`,
            `used_bytes`, `free_bytes`, `utilisation`, `temperature_c`, `processes`, ...), `workers` (the numbers of this pool's
            workers on the GPU, or of this part's) and `running` (what each of these runs, None for one that is idle). It is
            empty where there is no GPU.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     list(pool.device_table().columns)[:3]
            ['host', 'index', 'name']
        """
        if in_task():
            engine = serial_engine()
            return device_table(engine.backend.devices(), {}, [0])
        self._check_open()
        return device_table(self._engine.backend.devices(), running(self._engine.driver), self._numbers())

    # --- one at a time ------------------------------------------------------------------------------------------------

    def parfeval(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn(*args, **kwargs)` on the next free worker; return a future at once.

        What is sent is what the arguments are now: changing them later changes nothing. Inside a task the call runs at once. A
        coroutine that `fn` returns, as functions with `async def` do, is run there, in an event loop of its own.

        Raises:
            InvalidTypeError: `fn` cannot be called, or is a generator function.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            MATLAB R2025b, parfeval; concurrent.futures.Executor.submit.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.parfeval(pow, 2, 10).result()
            1024
        """
        check_callable(fn)
        engine = self._engine_here()
        return submit_call(engine, fn, args, kwargs, self._options, self._where(engine))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Do as `parfeval` does; the name that `concurrent.futures` gives it."""
        return self.parfeval(fn, *args, **kwargs)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> MapResults[T]:
        """Call `fn` with the first of each iterable, the second of each, and so on; return the results in this order, lazily.

        A call that fails raises its error where its result would be; the next result follows. When nobody holds the results any
        more after the first, at `close()`, or when the time is up, what is left of the calls is cancelled, what runs included.

        Args:
            fn: Any function; it is shipped to each worker once.
            *iterables: What to call it with. The shortest says how many calls there are.
            timeout: From now on, so long a result is waited for [s]; then `TimeoutError` is raised. None: as long as it takes.
            chunksize: Changes nothing: short calls travel together by measured time.
            buffersize: At most so many calls are ahead of the results that were taken, so the iterables may be without end.
                None: all are handed in now.

        Returns:
            An iterator over the values, with a method `close`.

        Raises:
            InvalidValueError, InvalidTypeError: `chunksize` or `buffersize` is not a number above 0.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            concurrent.futures.Executor.map of Python 3.14; it goes on after an error, as the built-in `map` does.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     list(pool.map(pow, [2, 3, 4], [5, 2, 3]))
            [32, 9, 64]
        """
        buffersize = checked_buffersize(chunksize, buffersize)
        check_callable(fn)
        engine = self._engine_here()
        where = self._where(engine)
        function = engine.function(fn)
        engine.warn_of_generators(fn)

        def submit(args: tuple[Any, ...]) -> Future[T]:
            if engine is self._engine:
                self._check_open()
            if self._options.checkpoints is not None:  # what is kept is known by the function itself
                return submit_call(engine, fn, args, {}, self._options, where)
            return submit_function(engine, function, args, {}, self._options, where)

        hand_in = unless_interrupted(submit) if is_serial(engine) else submit
        return MapResults(hand_in, zip(*iterables, strict=False), timeout, buffersize)

    @property
    def _max_workers(self) -> int:
        """How many workers there are; dask and others read it of an executor."""
        return len(self._numbers())

    def parfeval_on_all(self, fn: Callable[..., T], /, *args: Any, sticky: bool = False, **kwargs: Any) -> Future[list[T]]:
        """Call `fn(*args, **kwargs)` once on every worker; return a future of the values in the order of the workers.

        Args:
            fn: Any function.
            *args: What to call it with.
            sticky: Also call it on every worker that comes later, before anything else runs there: one that replaces another,
                or is started again after `idle_timeout_s`, or makes the pool larger.
            **kwargs: What to call it with.

        Source:
            MATLAB R2025b, parfevalOnAll.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     pool.parfeval_on_all(pow, 2, 3).result()
            [8, 8]
        """
        check_callable(fn)
        engine = self._engine_here()
        name = self._options.name or function_name(fn)
        if sticky:
            fn = functools.partial(call_once, uuid.uuid4().hex, fn)
            self._begin_with(functools.partial(fn, *args, **kwargs))  # first: a worker that starts now gets both, and makes one
        # Bound to the place, not to the worker that is there now: one that replaces it will do as well.
        options = replace(self._options, worker=None, name=name, checkpoints=None)
        futures: list[Future[T]] = []
        try:
            futures.extend(
                PoolView(engine, options, self, (number,)).parfeval(fn, *args, **kwargs)
                for number in (self._numbers() if engine is self._engine else [0])
            )
            return gather(futures, name)
        except BaseException:  # Ctrl-C: nobody could cancel those that were handed in
            cancel_each(futures)
            raise

    def _begin_with(self, fn: Callable[[], object]) -> Callable[[], None]:
        """Let every worker that comes later call a function before anything else; return what takes that back."""
        engine = self._engine_here()
        setup = engine.function(fn if self._places is None else functools.partial(_call_in, self._places, fn))
        engine.driver.setups.append(setup)
        return functools.partial(engine.driver.setups.remove, setup)

    # --- every worker at once -----------------------------------------------------------------------------------------

    def spmd(self, fn: Callable[..., Any], /, *args: Any, workers: int | Iterable[int | WorkerInfo] | None = None) -> Composite:
        """Call `fn(context, *args)` on all workers at the same time, each of which is a rank; return what they keep.

        The ranks are in one process group, through which `context` (an `SpmdContext`) lets them talk: `context.all_reduce(x)` and
        the like, and `torch.distributed` as it is, so that DDP, FSDP and tensor parallel work. The group stays warm for the next
        call. No rank begins before all their workers are free, and what is handed in later waits for them; no rank ever runs
        twice. Inside a task there is one rank, right there.

        Args:
            fn: Any function whose first argument is the context.
            *args: What else to call it with, the same for each rank; of a `Composite` each gets its own part, where it is.
            workers: Those that are to be ranks: how many, or which, by number or as they stand in `pool.workers`, rank 0 first.
                0: a single rank, in this process. None: the workers of the first `Composite` among `args`; without one, all.

        Returns:
            A `Composite`: what each rank has returned, still on its worker. `composite[rank]` fetches one.

        Raises:
            SpmdError: A rank has failed or was lost, ranks have waited for each other in different places
                (`options(mismatch_timeout_s=...)`), or the time was up (`options(timeout_s=...)`). The other ranks were ended,
                and their workers go on.
            ResourceError: There are fewer workers than were asked for.
            InvalidValueError: A `Composite` is on other workers than the call.
            CompositeError: An argument is a `Composite` of which a part is not there.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            MATLAB R2025b, spmd; PyTorch 2.13, torch.distributed.

        Example:
            >>> from raypool import parpool
            >>> with parpool(3, profile="threads", quiet=True) as pool:
            ...     list(pool.spmd(lambda context, x: context.all_reduce(x + context.rank), 10))
            [33, 33, 33]
        """
        future = self.spmd_async(fn, *args, workers=workers)
        if self._engine.driver.is_own_thread and not future.done():
            future.cancel()
            raise InvalidValueError(
                "An spmd call cannot be waited for in the callback of a future: the pool would wait for itself. Use spmd_async."
            )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C, say; one that has ended stays as it is
            raise

    def spmd_async(
        self, fn: Callable[..., Any], /, *args: Any, workers: int | Iterable[int | WorkerInfo] | None = None
    ) -> Future[Composite]:
        """Do as `spmd` does, but return at once: a future of the `Composite`.

        Its `metrics` have a column `rank`; to cancel it ends all ranks.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     job = pool.spmd_async(lambda context: context.world_size)
            ...     job.result()[1]
            2
        """
        from raypool.spmd.composite import workers_of  # a fifth of what importing raypool would take
        from raypool.spmd.run import submit_spmd

        check_callable(fn)
        if self._options.fresh_process:
            raise InvalidValueError("fresh_process=True does not go with spmd, whose ranks stay together from call to call.")
        engine, size, places = self._ranks(workers_of(args) if workers is None else workers)
        return submit_spmd(engine, fn, args, self._options, size, places)

    def _ranks(self, workers: Any) -> tuple[Engine, int, tuple[int, ...] | None]:
        """Return where ranks are to run, how many there are, and the only places that they may have, rank 0 first (None: any)."""
        from raypool.spmd.run import choose_ranks

        engine = self._engine_here()
        if engine is not self._engine:
            return engine, 1, (0,)
        if workers is None and self._options.worker is not None:
            workers = [self._options.worker]
        size, places = choose_ranks(workers, self._numbers(), self._places)
        if size == 0:
            return serial_engine(self._engine.find_way), 1, (0,)
        return engine, size, places


def _call_in(places: tuple[int, ...], fn: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Call a function if this is the worker of one of these places."""
    return fn(*args, **kwargs) if current_task().worker in places else None


def _serial_view() -> PoolView:
    return PoolView(serial_engine(), Options())
