"""What a pool and the parts of one have in common, and how a pool is parted."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from raypool.channel.constants import Constant, content_of, new_constant
from raypool.channel.records import WorkerInfo
from raypool.channel.store import ValueStore
from raypool.channel.traffic import TransferBytes
from raypool.core.messages import CancelRequested
from raypool.counts import optional_count
from raypool.engine.engine import serial_engine
from raypool.engine.work import Work
from raypool.errors import InvalidTypeError, PoolClosedError
from raypool.futures import Future
from raypool.options import Options, worker_numbers
from raypool.view import PoolView
from raypool.worker.running import in_task

T = TypeVar("T")

Works = list[tuple[int, Work]]
"""Tasks by id, in the order in which they were handed in."""


class TaskQueue:
    """The calls that have not ended (`parfeval`, `spmd_async`), of a pool or a part, as they are at the moment of asking."""

    def __init__(self, works: Callable[[], Works]) -> None:
        self._works = works

    @property
    def queued(self) -> list[Future[Any]]:
        """Those that wait for a worker, in the order in which they were handed in."""
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
    """A view with workers of its own to show: all of the pool's (`ParallelPool`), or some of them (`PoolPart`)."""

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
        """Whether anything is queued or running, a cancelled task that has not stopped yet included."""
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
        """Return what has been handed in and has not ended, as far as it is bound to these workers."""
        self._engine.driver.barrier()
        works = list(self._engine.driver.works.items())
        if self._places is None:
            return works
        own, tasks = set(self._places), self._engine.driver.scheduler.backlog.tasks
        specs = {task_id: task.spec for task_id, _ in works if (task := tasks.get(task_id)) is not None}
        wanted = {task_id: spec.places if spec.place is None else (spec.place,) for task_id, spec in specs.items()}
        return [
            (task_id, work) for task_id, work in works if (places := wanted.get(task_id)) is not None and own.issuperset(places)
        ]

    @property
    def store(self) -> ValueStore:
        """The values by name that whoever has opened the pool and all its tasks share; parts of it too."""
        return self._engine.store

    def constant(self, source: T | Callable[[], T], cleanup: Callable[[T], object] | None = None) -> Constant[T]:
        """Return a value that every worker receives, or builds, once, however many tasks use it.

        Args:
            source: The value; or a function without arguments (or a class) that makes it, called on each worker at the first
                use there.
            cleanup: Called with the value when a worker that has used it ends: with the pool, when that gets smaller, or after
                `idle_timeout_s`. A process that dies can't call it.

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
        constant: Constant[T] = new_constant(self._engine.opener(content_of(source, cleanup), "the constant"))
        self._engine.constants.append(constant.key)
        return constant

    def transfer_bytes(self) -> TransferBytes:
        """Count what goes to each worker and what comes from it while a `with` block runs.

        What is counted are functions, arguments and results, as they travel (pickled). A large one (from 64 KiB on) goes through
        Ray's object store: it counts as sent when the worker has opened it, which for a function or a constant is once, and as
        received when somebody asks for the result, so one that nobody has asked for has not been moved yet. What tasks put into
        queues and the store goes other ways and is not counted; nor is what Ray itself says to its workers. With "threads" and
        "inline" nothing is moved.

        Returns:
            A context manager; what it gives has `to_frame()`, a table with the columns `sent_bytes` and `received_bytes` and a
            row for each worker, and `total`, the same two numbers for all of them. Both can be read at any time, and stay as
            they are from the end of the block on.

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
        """Cancel what is queued and loops that are half done, wait for single calls that run, and give everything back.

        Twice does nothing.
        """
        self.shutdown(cancel_futures=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def __repr__(self) -> str:
        count = f"{self.num_workers} worker" + ("s" if self.num_workers != 1 else "")
        return f"<{type(self).__name__}: {'closed' if self.is_closed else f'{count}, {self.idle_workers} idle'}>"

    # --- parts --------------------------------------------------------------------------------------------------------

    def partition(
        self, *, per_gpu: int | None = None, per_host: int | None = None, workers: Iterable[int | WorkerInfo] | None = None
    ) -> tuple[PoolPart, PoolPart]:
        """Choose some of the workers; return them as a part of the pool, and the others as another.

        Each part has the verbs of a pool, for its own workers, and both can be used at the same time; so can the pool, for all of
        them. The workers stay the pool's: one that is replaced stays in its part, those that `resize` adds are in neither. Parts
        can be parted further. If nothing fits, as where there is no GPU, the part is empty (`num_workers` is 0): that is no error
        until it is asked to do something.

        Args:
            per_gpu: So many workers for each GPU, as far as there are: 1 gives each GPU to a single worker.
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
                f"partition() takes one of per_gpu=, per_host= and workers=, and was given {' and '.join(given) or 'none'}."
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
    """Some of the workers of a pool, with the verbs of a pool. Made by `partition`, which says what it is for.

    Its `queue`, `busy` and `cancel_all` are about what may run on its own workers only, whoever has handed that in.
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
            raise PoolClosedError("This part of the pool was shut down. Make another with partition().")
        super()._check_open()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work here. The workers stay with the pool, which goes on.

        Args:
            wait: Return when the single calls that were handed in here have ended.
            cancel_futures: Cancel what is queued. A loop that is half done counts as queued.
        """
        self._is_over = True
        works = self._works()
        for task_id, work in works:
            if cancel_futures and not (isinstance(work.holder, Future) and work.holder.running()):
                self._cancel(task_id, work)
        if wait and not in_task() and not self._engine.driver.is_own_thread:
            concurrent.futures.wait([work.holder for _, work in works if isinstance(work.holder, Future)])

    def __reduce__(self) -> Any:
        """Let a function that refers to it travel: on the worker it finds a pool that runs serially."""
        return _serial_part, ()


def _serial_part() -> StaffedView:
    return StaffedView(serial_engine(), Options())


def _gpu_names(worker: WorkerInfo) -> Sequence[Hashable]:
    return worker.gpu_uuids or [(worker.host, gpu) for gpu in worker.gpus]


def _picked(workers: Iterable[WorkerInfo], names: Callable[[WorkerInfo], Sequence[Hashable]], limit: int) -> list[int]:
    """Return the first workers of which no more than `limit` have any one name; those without a name are left out."""
    counts: Counter[Hashable] = Counter()
    picked = []
    for worker in workers:
        own = names(worker)
        if own and all(counts[name] < limit for name in own):
            counts.update(own)
            picked.append(worker.index)
    return picked
