"""An spmd call in the user's process: its task, its future, and the warm groups of a pool."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from raypool.channel.records import NOBODY, Function, Part, SliceResult, WorkerInfo
from raypool.core.model import Slice, TaskSpec, TaskState
from raypool.engine.driver import Driver
from raypool.engine.engine import Engine
from raypool.engine.in_flight import Call
from raypool.engine.work import Pack, described
from raypool.errors import (
    InvalidValueError,
    LossReason,
    PoolPreemptedError,
    ResourceError,
    TaskError,
    TaskTimeoutError,
    checked_count,
    reason_of,
    whole_number,
)
from raypool.futures import Future
from raypool.options import Options, worker_numbers
from raypool.spmd.composite import Composite, PartInfo, forget_on, marked
from raypool.spmd.failures import RankFailure, spmd_error
from raypool.spmd.group import Assignment
from raypool.worker.running import is_interrupt

if TYPE_CHECKING:
    import pandas as pd


# --- warm groups ----------------------------------------------------------------------------------


class WarmGroups:
    """The warm groups of a pool: a group is usable until a worker of it joins another.

    Example:
        >>> groups = WarmGroups()
        >>> first = groups.number_for([7, 8])
        >>> groups.number_for([7, 8]) == first
        True
        >>> groups.number_for([7]) == first, groups.number_for([7, 8]) == first
        (False, False)
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # by worker id: the group that it was in last, as its number and worker ids by rank
        self._last: dict[int, tuple[int, tuple[int, ...]]] = {}

    def number_for(self, worker_ids: Sequence[int]) -> int:
        """Return the number of the group with these ranks, or a new number."""
        wanted = tuple(worker_ids)
        before = {self._last.get(worker_id) for worker_id in wanted}
        group = before.pop()
        if before or group is None or group[1] != wanted:
            group = next(self._numbers), wanted
            self._last.update(dict.fromkeys(wanted, group))
        return group[0]

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Note that the group of these workers is gone."""
        for worker_id in worker_ids:
            self._last.pop(worker_id, None)


# --- future and work of a call --------------------------------------------------------------------


class SpmdFuture(Future[Any]):
    """The future of an spmd call: of a `Composite`, or of another result of its work.

    Attributes:
        members: The workers of its ranks, by rank; none before they are called.
    """

    members: Sequence[WorkerInfo] = ()

    @property
    def metrics(self) -> pd.DataFrame:
        """All metrics that the ranks have reported so far; complete once the ranks have ended.

        A row for each report, by rank, then in order: `time` (UTC), `rank`, `attempt`, then the
        metrics in the order of their first reports. A metric named like one of those is in
        "reported_NAME".
        """
        return self._caught_up().metrics("rank")


def _catch_up(catch_ups: Sequence[Callable[[], None]]) -> None:
    for catch_up in list(catch_ups):  # a copy: the driver's thread may add to it
        catch_up()


class SpmdWork:
    """All ranks of a call; its outcome is a future of a `Composite`."""

    def __init__(
        self, engine: Engine, function: Function, args: Sequence[Any], options: Options, size: int
    ) -> None:
        self.function = function
        self.future = SpmdFuture(options.name or function.name)
        self._timeout_s, self._mismatch_timeout_s = options.timeout_s, options.mismatch_timeout_s
        self._engine = engine
        self._open_args = engine.opener(
            [marked(arg) for arg in args], f"the arguments of {self.future.name}"
        )
        self._args: Sequence[Any] = args  # keeps a Composite alive until the ranks have its parts
        self._key = uuid.uuid4().hex
        self._size = size
        self._members: Sequence[tuple[int, WorkerInfo]] = ()
        self._assignments: list[Assignment] = []
        self._is_wanted = False
        self._is_late = False
        self._answers: dict[int, Any] = {}
        self._failures: list[RankFailure] = []
        self._catch_ups: list[Callable[[], None]] = []
        # not a method: the future's Composite would wait for the garbage collector
        self.future.catch_up = functools.partial(_catch_up, self._catch_ups)

    @property
    def holder(self) -> SpmdFuture:
        """The future."""
        return self.future

    def assemble(self, members: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Give each rank its assignment; the same ranks as in the last call keep their group."""
        future, driver, backend = self.future, self._engine.driver, self._engine.profile.backend
        self._members = members
        future.members = [worker for _, worker in members]
        self._is_wanted = future.start()
        future.attempts, future.started_at = 1, datetime.now(UTC)
        number = warm_groups_of(driver).number_for([worker_id for worker_id, _ in members])
        # Asked of the whole pool, not of this call: NCCL chooses its network once in a process.
        is_one_host = len({worker.host for worker in driver.infos.values()}) == 1
        num_there = Counter(worker.host for _, worker in members)
        num_seen: Counter[str] = Counter()
        for rank, (_, worker) in enumerate(members):
            host = worker.host
            self._assignments.append(
                Assignment(
                    rank,
                    world_size=self._size,
                    local_rank=num_seen[host],
                    local_world_size=num_there[host],
                    number=number,
                    is_one_host=is_one_host,
                    has_process=backend == "ray",
                    key=self._key,
                    stays_warm=backend != "inline",
                    mismatch_timeout_s=self._mismatch_timeout_s,
                )
            )
            num_seen[host] += 1

    def begin(self, piece: Slice, worker: WorkerInfo, call: Call) -> bool:
        """Return whether the call is still wanted."""
        return self._is_wanted

    def part(self, piece: Slice, pack: Pack) -> Part:
        """Return one rank, ready to travel."""
        name = self.future.name
        call = pack(
            [((self._assignments[piece.start], self._open_args), {})], f"the arguments of {name}"
        )
        return Part(
            piece.task_id,
            self.function.fn_id,
            call,
            1,
            piece.start,
            piece.attempt,
            is_call=True,
            name=name,
            should_stop=self.future.stop_requested,
            is_rank=True,
        )

    def wants_retry(self, error: BaseException) -> bool:
        """Return False: a rank cannot run again without the others."""
        return False

    def describe(self, piece: Slice) -> str:
        """Name these ranks and their call."""
        first, last = piece.start, piece.stop - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"{ranks} of {self.future.name}"

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Take the outcome of a rank."""
        rank = piece.start
        if result.catch_up is not None:
            self._catch_ups.append(result.catch_up)
        failure = result.failures.get(rank)
        if failure is None:
            self._answers[rank] = self.answer_of(result)
        else:
            error = described(failure, self.describe(piece), piece, worker)
            ended_at = result.started_at + result.durations_s[0]
            self._failures.append(RankFailure(rank, error, ended_at, worker))

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Do nothing: a rank never runs again."""

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Note that ranks were lost with their worker, or that the time was up."""
        if isinstance(error, TaskTimeoutError):  # of the call: each rank tells where it was
            self._is_late = True
            return
        for rank in range(piece.start, piece.stop):
            worker = self._members[rank][1] if self._members else NOBODY
            self._failures.append(RankFailure(rank, error, time.time(), worker))

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Resolve the future: with the result of the call, or with the error."""
        # not needed any more, and a finalizer of theirs may wait to run
        self._args, self._open_args = (), tuple
        future, members = self.future, self._members
        future.finished_at = datetime.now(UTC)
        is_complete = state is TaskState.FINISHED and len(self._answers) == self._size
        if is_complete and not future.cancelled():
            outcome = self.outcome(members, [self._answers[rank] for rank in range(self._size)])
            with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
                future.set_result(outcome)
            return
        # some ranks have left the group, and others keep values that nobody will read
        warm_groups_of(self._engine.driver).forget([worker_id for worker_id, _ in members])
        seats = [(worker_id, worker.index) for worker_id, worker in members]
        forget_on(self._engine, [self._key], seats)
        if future.cancelled() or (state is TaskState.CANCELLED and future.cancel()):
            future.notify_cancelled()
        elif future.running() or future.start():
            with contextlib.suppress(InvalidStateError):  # as above
                future.set_exception(self._error(state, error))

    def answer_of(self, result: SliceResult) -> Any:
        """Return what is kept of a rank's answer: a small description."""
        return result.values.get()[result.offset]

    def outcome(self, members: Sequence[tuple[int, WorkerInfo]], answers: Sequence[Any]) -> Any:
        """Return the result of the call, from its workers and their answers, by rank."""
        entries = [
            PartInfo(worker.index, worker_id, answer)
            for (worker_id, worker), answer in zip(members, answers, strict=True)
        ]
        return Composite(self._engine, self._key, entries)

    def _error(self, state: TaskState, error: BaseException | None) -> BaseException:
        name, size, failures = self.future.name, self._size, self._failures
        if self._engine.profile.backend == "inline":
            for failure in failures:
                if is_interrupt(failure.error):  # Ctrl-C in the user's thread: it means the call
                    return failure.error
        if isinstance(error, PoolPreemptedError):
            # ranks that were told have returned, and others were interrupted because of that
            told = (LossReason.PREEMPTED.value, LossReason.STOPPED.value)
            failures = [failure for failure in failures if reason_of(failure.error) not in told]
        if failures:
            return spmd_error(name, failures, self._timeout_s if self._is_late else None)
        if error is not None:
            return error
        if state is TaskState.CANCELLED:
            return TaskError(f"{name} was stopped while it ran: the pool was shut down.")
        available = self._engine.driver.scheduler.workers.size
        return ResourceError(
            f"{name} lost one of its workers before it began: requested {size}, available"
            f" {available}. Ask for fewer ranks, or open another pool.",
            requested=size,
            available=available,
        )


# --- submission -----------------------------------------------------------------------------------


def choose_ranks(
    workers: Any, numbers: Sequence[int], places: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...] | None]:
    """Return the number of ranks of a call, and their places, rank 0 first (None: any).

    Args:
        workers: How many, or which; None for all.
        numbers: The numbers of the pool's workers.
        places: The only places that the call may use; None for any.
    """
    if workers is None:
        return len(numbers), places
    if whole_number(workers) is None:
        chosen = worker_numbers(workers, numbers)
        if not chosen:
            raise InvalidValueError(
                "workers=[] has no workers. List those that are to be ranks, or leave it out for"
                " all."
            )
        return len(chosen), tuple(chosen)
    number = checked_count("workers", workers, least=0)
    if number > len(numbers):
        raise ResourceError(
            f"Each rank needs its own worker: requested {number}, available {len(numbers)}. Ask"
            " for fewer ranks, or open a larger pool.",
            requested=number,
            available=len(numbers),
        )
    return number, places


_warm_groups: weakref.WeakKeyDictionary[Driver, WarmGroups] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # drivers of several pools share the table, each with its own thread


def warm_groups_of(driver: Driver) -> WarmGroups:
    """Return the warm groups of a pool."""
    with _lock:
        return _warm_groups.setdefault(driver, WarmGroups())


def submit_gang(  # noqa: PLR0913, PLR0917 - a call, and how it is treated
    engine: Engine,
    function: Function,
    args: Sequence[Any],
    options: Options,
    size: int,
    places: tuple[int, ...] | None,
    is_loan: bool = False,
    kind: Callable[..., SpmdWork] = SpmdWork,
) -> SpmdFuture:
    """Submit a gang of ranks; each is given its assignment and a function that opens the arguments.

    With `is_loan` no rank is called: the caller has the workers' places until `Driver.end_loan`.
    `kind` makes the result from the answers.
    """
    work = kind(engine, function, args, options, size)
    spec = TaskSpec(  # not `options.spec`: a rank never runs again, so `retries` is not for it
        -1,
        function.fn_id,
        size,
        priority=options.priority,
        is_gang=True,
        places=places,
        timeout_s=options.timeout_s,
        is_loan=is_loan,
    )
    engine.driver.submit(work, spec, work.future)
    return work.future
