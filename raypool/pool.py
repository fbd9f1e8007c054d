"""The pool: `parpool` opens a `ParallelPool`, whose verbs are those of `PoolView`.

Also here: parts of a pool (`PoolPart`), the current pool (`gcp`), and `fit` on it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raypool.channel.constants import Constant, call_once, content_of, new_constant
from raypool.channel.records import WorkerInfo, function_name
from raypool.channel.store import ValueStore
from raypool.channel.traffic import TransferBytes
from raypool.core.messages import CancelRequested
from raypool.engine.engine import (
    Engine,
    open_engine,
    serial_engine,
    submit_call,
    submit_function,
)
from raypool.engine.overview import device_table, running
from raypool.engine.work import Work
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    ResourceError,
    checked_count,
    optional_count,
)
from raypool.futures import (
    Future,
    MapResults,
    cancel_each,
    checked_buffersize,
    gather,
    unless_interrupted,
)
from raypool.options import Options, Where, check_callable, worker_numbers
from raypool.parfor import LoopVerbs, is_serial
from raypool.profile_files import resolve_profile
from raypool.profiles import Profile
from raypool.task import current_task
from raypool.train.verbs import TrainingVerbs
from raypool.worker.running import in_task

if TYPE_CHECKING:
    import pandas as pd

    from raypool.spmd.composite import Composite
    from raypool.train.runs import TrainingRun
    from raypool.train.training_options import TrainingOptions

T = TypeVar("T")


# --- verbs of a pool ------------------------------------------------------------------------------


class PoolView(LoopVerbs, TrainingVerbs, concurrent.futures.Executor):
    """The verbs of a pool, with given options. `ParallelPool` is one itself; `options` returns
    others of the same pool.
    """

    def __init__(
        self,
        engine: Engine,
        options: Options,
        pool: PoolView | None = None,
        places: tuple[int, ...] | None = None,
    ) -> None:
        self._engine = engine
        self._options = options
        self._pool = pool  # a reference, so that the pool is not collected, which would end it
        if places is None and pool is not None:
            places = pool._places
        self._places: tuple[int, ...] | None = places  # of its workers; None: of all

    def options(self, **changes: Any) -> PoolView:
        """Return a view of this pool whose verbs use other options.

        Args:
            **changes: `retries`: how often an item runs again after its worker was lost; 0 means
                that no item ever runs twice. `retry_on`: exception types of the user's own after
                which an item runs again too; without a delay that may be on the same worker, at
                once. `retry_delay_s`: it waits so long [s] before it runs for the second time,
                twice as long before each further one, at most 300 s. `timeout_s`: an item that runs
                longer [s] is stopped as by `Future.cancel`, and fails with `TaskTimeoutError`. With
                `workers_per_gpu="auto"` an item that found too little GPU memory beside others runs
                again whatever `retries` says, and its wait for the GPU is part of its time.
                `mismatch_timeout_s`: ranks (`spmd`, `train` and `fit` in the warm lane) that have
                waited for each other this long [s] in places where they can't meet fail with a
                `CollectiveError`; None: never. One has ended or is in `ray.train.report`, say, and
                another is in a collective of torch's. A rank that computes may take any time.
                `fresh_process`: an item runs in a process in which nothing has run before, and
                which ends after it, whatever it leaves behind there (it costs a worker's start; in
                pools of this process it means nothing). `priority`: higher goes first; equal ones
                go in the order in which they were submitted. `worker`: run on the worker with this
                number only; if that one is lost, so is the task. `name`: what to call the work in
                messages and displays. `checkpoints`: a folder that all machines of the pool see, or
                a URL ("gs://..."), in which `current_task().checkpoint_dir` of each item is kept,
                for whoever submits an equal one later too (of the same function, with equal
                arguments); equal calls that run at the same time share it.

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
            raise InvalidTypeError(
                f"There is no option {', '.join(unknown)}. There are: {', '.join(known)}."
            )
        return PoolView(self._engine, replace(self._options, **changes), pool=self)

    def __reduce__(self) -> Any:
        """Let a function that refers to its pool travel: on the worker it finds a serial one."""
        return _serial_view, ()

    def _engine_here(self) -> Engine:
        """Return the engine for work submitted here: in a task, a serial one."""
        if in_task():
            return serial_engine()
        self._check_open()
        if self._places is not None and not self._numbers():
            raise ResourceError(
                "This part of the pool has no workers: requested 1, available 0. Nothing fitted"
                " when it was made, or the pool has become smaller since; use the pool itself, or"
                " its other part.",
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
        """Return the numbers of the workers that this view is of, in order, without those that are
        to end.
        """
        workers = self._engine.driver.scheduler.workers
        there = [
            place.place
            for place in list(workers.places.values())
            if place.worker_id not in workers.retiring
        ]
        return sorted(there if self._places is None else set(there).intersection(self._places))

    def _workers(self) -> list[WorkerInfo]:
        """Return the workers that this view is of, in order."""
        workers = self._engine.workers()
        return (
            workers
            if self._places is None
            else [worker for worker in workers if worker.index in self._places]
        )

    def _where(self, engine: Engine) -> Where:
        """Return where work is to run; what runs serially, in a task, runs where it is, and has no
        process of its own.
        """
        number = self._options.worker
        is_fresh = self._options.fresh_process and engine.profile.backend == "ray"
        if engine is not self._engine:
            return Where()
        if number is None:
            return Where(None, self._places, is_fresh)
        numbers = self._numbers()
        if number not in numbers:
            raise InvalidValueError(
                f"There is no worker {number}. There are: {', '.join(map(str, numbers))}."
            )
        return Where(None, (number,), is_fresh) if is_fresh else Where(number)

    def device_table(self) -> pd.DataFrame:
        """Return the GPUs of the machines that the workers are on, as they are now, whoever uses
        them: a row for each.

        No CUDA context is made: the agents of the nodes ask the GPUs' driver. What that does not
        say is NA; and of a node that does not answer within 3 s all that changes is (memory,
        utilisation, temperature, processes). With "threads" and "inline", and in a task, it is the
        table of this machine.

        Returns:
            A table with the column `host`, those of `gpu_device_table` but for the last (`index`,
            `name`, `uuid`, `total_bytes`, `used_bytes`, `free_bytes`, `utilisation`,
            `temperature_c`, `processes`, ...), `workers` (the numbers of this pool's workers on the
            GPU, or of this part's) and `running` (what each of these runs, None for one that is
            idle). It is empty where there is no GPU.

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
        return device_table(
            self._engine.backend.devices(), running(self._engine.driver), self._numbers()
        )

    # --- single calls -----------------------------------------------------------------------------

    def parfeval(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn(*args, **kwargs)` on the next free worker; return a future at once.

        The arguments are sent as they are now: later changes to them have no effect. Inside a task
        the call runs at once. A coroutine that `fn` returns (`async def`) runs on the worker, in an
        event loop of its own.

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
        """Call `fn` with the first of each iterable, the second of each, and so on; return the
        results in this order, lazily.

        A call that fails raises its error where its result would be; the next result follows. When
        the iterator is dropped after its first result, at `close()`, or when the time is up, the
        other calls are cancelled, running ones included.

        Args:
            fn: Any function; it is shipped to each worker once.
            *iterables: The arguments. The shortest iterable sets the number of calls.
            timeout: How long to wait for a result, from now on [s]; then `TimeoutError` is raised.
                None: as long as it takes.
            chunksize: Changes nothing: short calls travel together by measured time.
            buffersize: At most so many calls are ahead of the results that were taken, so the
                iterables may be without end. None: all are submitted now.

        Returns:
            An iterator over the values, with a method `close`.

        Raises:
            InvalidValueError, InvalidTypeError: `chunksize` or `buffersize` is not a number above
                0.
            SerializationError: The function or an argument cannot be sent; it names the variable.
            PoolClosedError: The pool was shut down.

        Source:
            concurrent.futures.Executor.map of Python 3.14; it goes on after an error, as the
            built-in `map` does.

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
            # what is kept is known by the function itself
            if self._options.checkpoints is not None:
                return submit_call(engine, fn, args, {}, self._options, where)
            return submit_function(engine, function, args, {}, self._options, where)

        hand_in = unless_interrupted(submit) if is_serial(engine) else submit
        return MapResults(hand_in, zip(*iterables, strict=False), timeout, buffersize)

    @property
    def _max_workers(self) -> int:
        """How many workers there are; dask and others read it of an executor."""
        return len(self._numbers())

    def parfeval_on_all(
        self, fn: Callable[..., T], /, *args: Any, sticky: bool = False, **kwargs: Any
    ) -> Future[list[T]]:
        """Call `fn(*args, **kwargs)` once on every worker; return a future of the values in the
        order of the workers.

        Args:
            fn: Any function.
            *args: What to call it with.
            sticky: Also call it on every worker that comes later, before anything else runs there:
                one that replaces another, or is started again after `idle_timeout_s`, or makes the
                pool larger.
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
            # first: a worker that starts now gets both, and makes one
            self._begin_with(functools.partial(fn, *args, **kwargs))
        # Bound to the place, not to the worker that is there now: one that replaces it will do as
        # well.
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
        """Let every worker that comes later call a function before anything else; return what takes
        that back.
        """
        engine = self._engine_here()
        setup = engine.function(
            fn if self._places is None else functools.partial(_call_in, self._places, fn)
        )
        engine.driver.setups.append(setup)
        return functools.partial(engine.driver.setups.remove, setup)

    # --- spmd -------------------------------------------------------------------------------------

    def spmd(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        workers: int | Iterable[int | WorkerInfo] | None = None,
    ) -> Composite:
        """Call `fn(context, *args)` on all workers at the same time, each of which is a rank;
        return what they keep.

        The ranks are in one process group, through which `context` (an `SpmdContext`) lets them
        talk: `context.all_reduce(x)` and the like, and `torch.distributed` as it is, so that DDP,
        FSDP and tensor parallel work. The group stays warm for the next call. No rank begins before
        all their workers are free, and later work waits for them; no rank ever runs twice. Inside a
        task there is one rank, right there.

        Args:
            fn: Any function whose first argument is the context.
            *args: What else to call it with, the same for each rank; of a `Composite` each gets its
                own part, where it is.
            workers: Those that are to be ranks: how many, or which, by number or as they stand in
                `pool.workers`, rank 0 first. 0: a single rank, in this process. None: the workers
                of the first `Composite` among `args`; without one, all.

        Returns:
            A `Composite`: what each rank has returned, still on its worker. `composite[rank]`
            fetches one.

        Raises:
            SpmdError: A rank has failed or was lost, ranks have waited for each other in different
                places (`options(mismatch_timeout_s=...)`), or the time was up
                (`options(timeout_s=...)`). The other ranks were ended, and their workers go on.
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
                "An spmd call cannot be waited for in the callback of a future: the pool would wait"
                " for itself. Use spmd_async."
            )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C, say; one that has ended stays as it is
            raise

    def spmd_async(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        workers: int | Iterable[int | WorkerInfo] | None = None,
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
        from raypool.spmd.call import submit_spmd

        # imported late: it would add a fifth to the time of `import raypool`
        from raypool.spmd.composite import workers_of

        check_callable(fn)
        if self._options.fresh_process:
            raise InvalidValueError(
                "fresh_process=True does not go with spmd, whose ranks stay together from call to"
                " call."
            )
        engine, size, places = self._ranks(workers_of(args) if workers is None else workers)
        return submit_spmd(engine, fn, args, self._options, size, places)

    def _ranks(self, workers: Any) -> tuple[Engine, int, tuple[int, ...] | None]:
        """Return where ranks are to run, how many there are, and the only places that they may
        have, rank 0 first (None: any).
        """
        from raypool.spmd.call import choose_ranks

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


# --- workers, queue and parts of a pool -----------------------------------------------------------


Works = list[tuple[int, Work]]
"""Tasks by id, in the order of their submission."""


class TaskQueue:
    """The calls that have not ended (`parfeval`, `spmd_async`), of a pool or a part, as they are at
    the moment of asking.
    """

    def __init__(self, works: Callable[[], Works]) -> None:
        self._works = works

    @property
    def queued(self) -> list[Future[Any]]:
        """The calls that wait for a worker, in the order of their submission."""
        return self._in_state("queued")

    @property
    def running(self) -> list[Future[Any]]:
        """Those that run."""
        return self._in_state("running")

    def _in_state(self, state: str) -> list[Future[Any]]:
        futures = [work.holder for _, work in self._works() if isinstance(work.holder, Future)]
        shown = dict.fromkeys(map(_whole_of, futures))
        return [future for future in shown if future.state == state]


def _whole_of(future: Future[Any]) -> Future[Any]:
    """Return what a user holds of a call: of an attempt, the training."""
    while future.whole is not None:
        future = future.whole
    return future


class StaffedView(PoolView):
    """A view that shows its workers: all of the pool's (`ParallelPool`), or some of them
    (`PoolPart`).
    """

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers as they are now, in order."""
        return self._workers()

    @property
    def num_workers(self) -> int:
        """How many workers there are, those included that are being replaced."""
        return len(self._numbers())

    @property
    def idle_workers(self) -> int:
        """How many workers could begin something now."""
        return sum(worker.state == "idle" for worker in self.workers)

    @property
    def busy(self) -> bool:
        """Whether anything is queued or running, a cancelled task that has not stopped yet
        included.
        """
        return bool(self._works()) or any(worker.state == "busy" for worker in self.workers)

    @property
    def queue(self) -> TaskQueue:
        """The single calls that have not ended."""
        return TaskQueue(self._works)

    @property
    def is_closed(self) -> bool:
        """Whether no work is taken any more: it was shut down (or is broken beyond repair)."""
        return self._engine.is_over

    def _works(self) -> Works:
        """Return what has been submitted and has not ended, as far as it is bound to these
        workers.
        """
        self._engine.driver.barrier()
        works = list(self._engine.driver.works.items())
        if self._places is None:
            return works
        own, tasks = set(self._places), self._engine.driver.scheduler.backlog.tasks
        specs = {
            task_id: task.spec for task_id, _ in works if (task := tasks.get(task_id)) is not None
        }
        wanted = {
            task_id: spec.places if spec.place is None else (spec.place,)
            for task_id, spec in specs.items()
        }
        return [
            (task_id, work)
            for task_id, work in works
            if (places := wanted.get(task_id)) is not None and own.issuperset(places)
        ]

    @property
    def store(self) -> ValueStore:
        """The value store, shared by the process that opened the pool, its tasks and its parts."""
        return self._engine.store

    def constant(
        self, source: T | Callable[[], T], cleanup: Callable[[T], object] | None = None
    ) -> Constant[T]:
        """Return a value that every worker receives, or builds, once, however many tasks use it.

        Args:
            source: The value; or a function without arguments (or a class) that makes it, called on
                each worker at the first use there.
            cleanup: Called with the value when a worker that has used it ends: with the pool, when
                that gets smaller, or after `idle_timeout_s`. A process that dies can't call it.

        Raises:
            SerializationError: The value or the function cannot be sent.

        Source:
            MATLAB R2025b, parallel.pool.Constant.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     squares = pool.constant([0, 1, 4, 9])
            ...     list(pool.parfor(lambda i: squares.value[i], [3, 2]))
            [9, 4]
        """
        self._check_open()
        constant: Constant[T] = new_constant(
            self._engine.opener(content_of(source, cleanup), "the constant")
        )
        self._engine.constants.append(constant.key)
        return constant

    def transfer_bytes(self) -> TransferBytes:
        """Count what goes to each worker and what comes from it while a `with` block runs.

        What is counted are functions, arguments and results, as they travel (pickled). A large one
        (from 64 KiB on) goes through Ray's object store: it counts as sent when the worker has
        opened it, which for a function or a constant is once, and as received when somebody asks
        for the result, so one that nobody has asked for has not been moved yet. What tasks put into
        queues and the store goes other ways and is not counted; nor is what Ray itself says to its
        workers. With "threads" and "inline" nothing is moved.

        Returns:
            A context manager; what it gives has `to_frame()`, a table with the columns `sent_bytes`
            and `received_bytes` and a row for each worker, and `total`, the same two numbers for
            all of them. Both can be read at any time, and stay as they are from the end of the
            block on.

        Source:
            MATLAB R2025b, ticBytes, tocBytes.

        Example:
            >>> from raypool import parpool
            >>> with parpool(2, profile="threads", quiet=True) as pool:
            ...     with pool.transfer_bytes() as moved:
            ...         results = pool.parfor(abs, [-1, -2])
            >>> moved.total.sent_bytes
            0
            >>> moved.to_frame().shape
            (2, 2)
        """
        return TransferBytes(self._engine.traffic, self._numbers)

    def cancel_all(self) -> None:
        """Cancel everything that is queued or running, loops included.

        Source:
            MATLAB R2025b, cancelAll.
        """
        for task_id, work in reversed(self._works()):  # as `cancel_each` does
            self._cancel(task_id, work)

    def _cancel(self, task_id: int, work: Work) -> None:
        if isinstance(work.holder, Future):
            work.holder.cancel()
        else:
            self._engine.driver.post(CancelRequested(task_id))

    def delete(self) -> None:
        """Cancel queued calls and unfinished loops, wait for single calls that run, and release
        everything.

        Twice does nothing.
        """
        self.shutdown(cancel_futures=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def __repr__(self) -> str:
        count = f"{self.num_workers} worker" + ("s" if self.num_workers != 1 else "")
        return (
            f"<{type(self).__name__}:"
            f" {'closed' if self.is_closed else f'{count}, {self.idle_workers} idle'}>"
        )

    # --- partition --------------------------------------------------------------------------------

    def partition(
        self,
        *,
        per_gpu: int | None = None,
        per_host: int | None = None,
        workers: Iterable[int | WorkerInfo] | None = None,
    ) -> tuple[PoolPart, PoolPart]:
        """Choose some of the workers; return them as a part of the pool, and the others as another.

        Each part has the verbs of a pool, for its own workers, and both can be used at the same
        time; so can the pool, for all of them. The workers stay the pool's: one that is replaced
        stays in its part, those that `resize` adds are in neither. Parts can be parted further. If
        nothing fits, as where there is no GPU, the part is empty (`num_workers` is 0): that is no
        error until it is asked to do something.

        Args:
            per_gpu: So many workers for each GPU, as far as there are: 1 gives each GPU to a single
                worker.
            per_host: So many workers for each machine, as far as there are.
            workers: These ones, by number or as they stand in `workers`.

        Raises:
            InvalidTypeError: Not exactly one of the three was given, or it is of a wrong kind.
            InvalidValueError: A number is below 1, or there is no such worker here.

        Source:
            MATLAB R2025b, partition (MaxNumWorkersPerGPU, MaxNumWorkersPerHost, Workers).

        Example:
            >>> from raypool import parpool
            >>> with parpool(3, profile="threads", quiet=True) as pool:
            ...     part, rest = pool.partition(workers=[0])
            ...     slow = part.parfeval(pow, 2, 10)
            ...     list(rest.parfor(abs, [-1, -2])), slow.result()
            ...     pool.partition(per_gpu=1)[0].num_workers
            ([1, 2], 1024)
            0
        """
        given = {
            name: value
            for name, value in (("per_gpu", per_gpu), ("per_host", per_host), ("workers", workers))
            if value is not None
        }
        if len(given) != 1:
            raise InvalidTypeError(
                "partition() takes one of per_gpu=, per_host= and workers=, and was given"
                f" {' and '.join(given) or 'none'}."
            )
        per_gpu = optional_count("per_gpu", per_gpu, least=1)
        per_host = optional_count("per_host", per_host, least=1)
        self._check_open()
        numbers = self._numbers()
        there = [worker for worker in self.workers if worker.index in numbers]
        if workers is not None:
            chosen = worker_numbers(workers, numbers)
        elif per_gpu is not None:
            chosen = _picked(there, _gpu_names, per_gpu)
        else:
            chosen = _picked(there, lambda worker: [worker.host], per_host or 0)
        others = [number for number in numbers if number not in chosen]
        return PoolPart(self, sorted(chosen)), PoolPart(self, others)


class PoolPart(StaffedView):
    """Some of the workers of a pool, with the verbs of a pool. Made by `partition`, which says what
    it is for.

    Its `queue`, `busy` and `cancel_all` cover the work that may run only on its own workers,
    whoever submitted it.
    """

    def __init__(self, pool: StaffedView, places: Sequence[int]) -> None:
        super().__init__(pool._engine, pool._options, pool, tuple(places))
        self._is_over = False

    @property
    def is_closed(self) -> bool:
        """Whether no work is taken any more: this part or the pool was shut down."""
        return self._is_over or self._engine.is_over

    def _check_open(self) -> None:
        if self._is_over:
            raise PoolClosedError(
                "This part of the pool was shut down. Make another with partition()."
            )
        super()._check_open()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work here. The workers stay with the pool, which stays open.

        Args:
            wait: Return when the single calls that were submitted here have ended.
            cancel_futures: Cancel queued work. An unfinished loop counts as queued.
        """
        self._is_over = True
        works = self._works()
        for task_id, work in works:
            if cancel_futures and not (isinstance(work.holder, Future) and work.holder.running()):
                self._cancel(task_id, work)
        if wait and not in_task() and not self._engine.driver.is_own_thread:
            concurrent.futures.wait(
                [work.holder for _, work in works if isinstance(work.holder, Future)]
            )

    def __reduce__(self) -> Any:
        """Let a function that refers to it travel: on the worker it finds a pool that runs
        serially.
        """
        return _serial_part, ()


def _serial_part() -> StaffedView:
    return StaffedView(serial_engine(), Options())


def _gpu_names(worker: WorkerInfo) -> Sequence[Hashable]:
    return worker.gpu_uuids or [(worker.host, gpu) for gpu in worker.gpus]


def _picked(
    workers: Iterable[WorkerInfo], names: Callable[[WorkerInfo], Sequence[Hashable]], limit: int
) -> list[int]:
    """Return the first workers of which no more than `limit` have any one name; those without a
    name are left out.
    """
    counts: Counter[Hashable] = Counter()
    picked = []
    for worker in workers:
        own = names(worker)
        if own and all(counts[name] < limit for name in own):
            counts.update(own)
            picked.append(worker.index)
    return picked


# --- pool -----------------------------------------------------------------------------------------


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
    """Workers that each hold a GPU (or a core) for as long as the pool lives. Open one with
    `parpool`.

    A `concurrent.futures.Executor`, with MATLAB's verbs beside the standard ones. As a context
    manager it waits for its work at the end; if the block ends with an error, queued work is
    cancelled. Safe to use from several threads.
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

        New ones are up on return. Free ones are given back first; a busy one ends after what it is
        running.

        Raises:
            ResourceError: There are fewer; the pool stays as it is.
        """
        num_workers = checked_count("num_workers", num_workers, least=1)
        self._engine.check_open()
        self._engine.resize(num_workers)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and release everything when all work is done.

        Args:
            wait: Return only then.
            cancel_futures: Cancel queued work. An unfinished loop counts as queued: its running
                items are given up.
        """
        self._engine.shutdown(wait, cancel_queued=cancel_futures)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
    """Open a pool of workers, each with a GPU of its own (or a core), and print one line that says
    what was started.

    Inside a task there is one worker, the task's own thread. Of what is asked for, it takes what it
    begins and ends with: `initializer`, `setup` and `teardown`, also those of a `Profile`; not
    those of a name, whose file may not be there.

    Args:
        num_workers: Exactly so many, or `(least, most)` for as many as there are in that range.
            None: one for each GPU that this process may use; without a GPU, one for each physical
            core; where the profile's `resources` is a list, one for each entry.
        profile: "local" (Ray: the one that runs in this process, else a new one on this machine),
            "threads" or "inline" (in this process, without Ray); the name of one in a file
            raypool.toml (`[profiles.NAME]`) or pyproject.toml (`[tool.raypool.profiles.NAME]`) of
            this folder or the nearest one above; or a `Profile`.
        initializer: A function that runs once in each worker before anything else, with `initargs`:
            the standard library's way to say `setup=functools.partial(initializer, *initargs)`.
        initargs: What to call it with.
        **changes: Single fields of the profile, such as `gpus=[0, 2]` or
            `resources=WorkerResources(gpus=0.5)`.

    Raises:
        ResourceError: There is less than was asked for; it says what was requested, what is
            available and who holds the rest.
        StartupError: A worker did not come up, or its `setup` or `initializer` failed; it is a
            `BrokenExecutor` too.
        InvalidValueError, InvalidTypeError: An argument cannot work.

    Source:
        MATLAB R2025b, parpool; concurrent.futures.ProcessPoolExecutor for `initializer` and
        `initargs`.

    Example:
        >>> with parpool(2, profile="threads") as pool:
        ...     pool.num_workers
        raypool: 2 workers (threads of this process)
        2
    """
    pool = open_pool(
        num_workers, profile=profile, initializer=initializer, initargs=initargs, **changes
    )
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
    """Do as `parpool` does, for code that ends the pool itself: it never becomes the current one
    (`gcp`).
    """
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
    """Return a serial pool that begins and ends as was asked for; the file that a name stands in
    may not be here.
    """
    given = profile if isinstance(profile, Profile) else Profile()
    setup, teardown = (changes.get(name, getattr(given, name)) for name in ("setup", "teardown"))
    return ParallelPool(serial_engine(setup=setup, teardown=teardown))


def _with_setup(initializer: Any, initargs: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a profile with `setup` in the words of the standard library."""
    check_callable(initializer)
    if "setup" in changes:
        raise InvalidValueError(
            "setup and initializer are two names of one thing. Give one function that calls both."
        )
    if not isinstance(initargs, Iterable):
        raise InvalidTypeError(
            f"initargs={initargs!r} is not a list or tuple of arguments. Of one argument it is"
            " (argument,)."
        )
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
    _made_here = parpool()  # keeps the pool alive: nobody else holds it
    return _made_here


def fit(
    model: Any,
    data: Any,
    loss: Callable[..., Any],
    options: TrainingOptions | None = None,
    **arguments: Any,
) -> TrainingRun:
    """Train a model on all workers of the current pool, which is opened if there is none; see
    `PoolView.fit`.

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
        _opened[:] = [
            reference
            for reference in _opened
            if (other := reference()) is not None and not other.is_closed
        ]
        _opened.append(weakref.ref(pool))


def _serial_pool() -> ParallelPool:
    return ParallelPool(serial_engine())


def _described(engine: Engine) -> str:
    workers = engine.workers()
    count = f"{len(workers)} worker" + ("s" if len(workers) != 1 else "")
    if engine.profile.backend != "ray":
        where = (
            "threads of this process"
            if engine.profile.backend == "threads"
            else "inline in this process"
        )
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
    """Return the least and the most of a number of workers that may be a range; `name` is what the
    argument is called.

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
