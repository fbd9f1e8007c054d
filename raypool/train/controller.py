"""The controller of a training: its attempts, one after the other, and its result or error.

Also here: the warm lane, which makes attempts on the pool's own workers.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, InvalidStateError
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from raypool.channel.records import SliceResult, WorkerInfo
from raypool.engine.engine import Engine
from raypool.errors import (
    LossReason,
    PoolBrokenError,
    PoolClosedError,
    ResourceError,
    SpmdError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
)
from raypool.futures import Deferred, Future
from raypool.options import Options
from raypool.spmd.call import SpmdWork, submit_gang
from raypool.spmd.context import RankFunction
from raypool.spmd.group import Assignment
from raypool.train.checkpoints import (
    CompleteCheckpoint,
    RankEnd,
    TrainingAttempt,
    best,
    latest,
    ranked,
)
from raypool.train.runs import (
    RunOptions,
    TrainingResult,
    TrainingRun,
    has_kept,
    leave_folder,
    take_folder,
)
from raypool.worker.running import is_interrupt

if TYPE_CHECKING:
    from raypool.train.managed import ManagedLane


LOOK_S = 0.1
"""The time between two checks for new workers [s]."""

Finish = Callable[[TrainingResult], TrainingResult]
"""Turns the result of a training into the result that its caller wants."""


@dataclass(frozen=True)
class RankPlaces:
    """The workers that train: `size` ranks, in these places only (None: any)."""

    size: int
    places: tuple[int, ...] | None
    numbers: Callable[[], Sequence[int]]
    engine: Engine

    def now(self, least: int | None) -> RankPlaces:
        """Return the places that are left: all if none is missing, or if none may be missing."""
        left = self.left
        if least is None or not least <= len(left) < self.size:
            return self
        return replace(self, size=len(left), places=self.places and tuple(left))

    @property
    def left(self) -> list[int]:
        """The places whose workers exist, rank 0 first."""
        numbers = self.numbers()
        chosen = numbers if self.places is None else self.places
        return [place for place in chosen if place in numbers]


class Controller:
    """Makes the attempts of a training, one after the other, and resolves it."""

    def __init__(
        self,
        run: TrainingRun,
        lane: WarmLane | ManagedLane,
        ranks: RankPlaces,
        options: Options,
        kept: RunOptions,
        finish: Finish | None,
    ) -> None:
        self._run = run
        self._lane = lane
        self._ranks = ranks
        self._options = options
        self.kept = kept
        self._finish = finish
        self._ends: list[RankEnd] = []
        self._first_start: str | None = None
        self._failed: SpmdError | None = None  # the last attempt, if it is repeated
        self._has_waited = False  # for machines that were lost with it
        self._spent_s = 0.0  # of the time limit, used by attempts that have ended
        self._num_forgiven = 0  # attempts that ended with preempted machines, or had not begun

    def begin(self) -> Future[Any]:
        """Start the next attempt."""
        self._ranks = self._ranks.now(self.kept.min_workers)
        kept, run, ranks = self.kept, self._run, self._ranks
        last = latest(run.path)
        start = kept.start_from if last is None else last.path
        plan = TrainingAttempt(
            run.name,
            run.attempts + 1,
            str(run.path),
            None if start is None else str(start),
            kept.keep_checkpoints,
            kept.best_metric,
            kept.best_mode,
        )
        if plan.attempt == 1:
            self._first_start = plan.start
        options = replace(self._options, name=run.name)
        if options.timeout_s is not None:  # it covers all attempts; 0 is no valid one
            options = replace(options, timeout_s=max(options.timeout_s - self._spent_s, 0.001))
        attempt = self._lane.begin(plan, ranks.size, ranks.places, options)
        run.adopt(attempt)
        return attempt

    def follow(self, attempt: Future[Any]) -> None:
        """Follow the first attempt, and start others, until the training ends."""
        run = self._run
        try:
            while not self._has_ended_well(attempt):
                self._await_machines()
                if run.cancelled():
                    return
                attempt = self.begin()
            self._resolve(self._finished(self._result()), None)
        except CancelledError:
            run.cancel()  # the attempt was cancelled: by `pool.cancel_all`, or by the pool's end
        except PoolClosedError as error:  # no other attempt can be made
            self._resolve(None, self._described_if_possible(self._failed or error))
        except BaseException as error:
            if isinstance(error, SystemExit) or is_interrupt(error):  # "inline": the user's thread
                run.cancel()
                raise
            self._resolve(None, self._described_if_possible(error))

    def _finished(self, result: TrainingResult) -> TrainingResult:
        if self._finish is None:
            return result
        try:
            return self._finish(result)
        except Exception as error:
            raise TrainingError(
                f"{self._run.name} has finished, but its model cannot be rebuilt here:"
                f" {type(error).__name__}: {error}. This error's .result has the rest.",
                failures={},
                result=result,
            ) from error

    def _has_ended_well(self, attempt: Future[Any]) -> bool:
        """Wait for an attempt; return whether it need not be made again."""
        try:
            self._ends = list(attempt.result())
        except ResourceError:
            is_whole = self._await_machines()
            is_smaller = self._ranks.now(self.kept.min_workers).size < self._ranks.size
            if not is_smaller and (not is_whole or self._has_waited):
                raise
            self._has_waited = True  # what is missing now, the lost machines do not explain
            self._num_forgiven += 1  # it had not begun
            return False
        except SpmdError as error:
            if not self._is_worth_another(error):
                raise
            self._failed, self._has_waited = error, False
            return False
        finally:
            if attempt.started_at is not None:
                self._spent_s += (datetime.now(UTC) - attempt.started_at).total_seconds()
        return True

    def _await_machines(self) -> bool:
        """Wait for replacements of lost machines; return whether each rank has a worker."""
        # The loss of a worker is often known before that of its machine. An attempt made in between
        # would wait for workers that never come.
        if not _reasons(self._failed) & {LossReason.NODE, LossReason.PREEMPTED}:
            return False
        ranks, deadline = self._ranks, time.monotonic() + self._ranks.engine.profile.start_timeout_s
        while (
            ranks.places is None
            and len(ranks.left) < (self.kept.min_workers or ranks.size)
            and time.monotonic() < deadline
        ):
            ranks.engine.check_open()
            time.sleep(LOOK_S)
        return len(ranks.left) >= ranks.size

    def _is_worth_another(self, error: SpmdError) -> bool:
        """Whether an attempt is left, and a lost worker or a `retry_on` exception calls for it."""
        kinds: tuple[type[BaseException], ...] = (WorkerLostError, *self._options.retry_on)
        failures = error.failures.values()
        if self._run.cancelled() or not all(isinstance(each, kinds) for each in failures):
            return False
        if any(isinstance(each, TaskTimeoutError) for each in failures):
            return False  # whatever `retry_on` names: the time limit covers all attempts
        # a worker that was lost with a preempted machine, with notice, costs no attempt
        self._num_forgiven += LossReason.PREEMPTED in _reasons(error)
        return self._run.attempts - self._num_forgiven <= self._options.retries

    def _result(self) -> TrainingResult:
        from ray.train import Checkpoint

        def opened(there: CompleteCheckpoint | None) -> Any:
            return None if there is None else Checkpoint.from_directory(str(there.path))

        kept, folder, frame = self.kept, self._run.path, self._run.metrics
        last = latest(folder)
        top = None if kept.best_metric is None else best(folder, kept.best_metric, kept.best_mode)
        by_rating = ranked(folder, kept.best_metric, kept.best_mode)
        metrics = self._ends[0].metrics if self._ends else None
        if not metrics and not (own := frame[frame["rank"] == 0]).empty:
            # with "time" in it the row is of objects; without, integers could become floats
            row, others = own.iloc[-1].dropna(), ("time", "rank", "attempt")
            metrics = {str(name): value for name, value in row.items() if name not in others}
        if not metrics:
            # a training that had ended before reports nothing: its last checkpoint knows
            metrics = {} if last is None else last.metrics
        return TrainingResult(
            metrics=metrics,
            metrics_frame=frame,
            checkpoint=opened(last),
            best_checkpoint=opened(top),
            best_checkpoints=[(opened(each), each.metrics) for each in by_rating],
            values=[end.value for end in self._ends],
            path=folder if has_kept(folder) else None,
        )

    def _described_if_possible(self, error: BaseException) -> BaseException:
        try:
            return self._described(error)
        except Exception as why:
            error.add_note(
                f"raypool: the saved state of the training in {self._run.path} cannot be read:"
                f" {why}"
            )
            return error

    def _described(self, error: BaseException) -> BaseException:
        """Return the error to raise, with the result so far."""
        if isinstance(error, (PoolClosedError, PoolBrokenError)) or not isinstance(
            error, (SpmdError, ResourceError)
        ):
            return error
        run, ranks, result = self._run, self._ranks, self._result()
        text, failures, first_rank = str(error), {}, None
        if isinstance(error, SpmdError):
            failures, first_rank = error.failures, error.first_rank
        elif run.attempts > 1 and (left := len(ranks.left)) < ranks.size:
            text = (
                f"{run.name} has lost a worker for good: requested {ranks.size}, available {left}."
                f" With RunOptions(min_workers={max(left, 1)}) it continues with the remaining"
                " ones."
            )
        first = error if first_rank is None else failures[first_rank]
        if isinstance(first, TaskTimeoutError):
            limit = f"timeout_s={self._options.timeout_s:g}"  # the attempt had only the rest of it
            late = TaskTimeoutError(
                re.sub(r"timeout_s=[\d.e+-]+\d", limit, str(error)),
                result=result,
                failures=failures,
                first_rank=first_rank,
            )
            late.__cause__ = first
            return late
        if run.attempts > 1:
            text += f" It was attempt {run.attempts}."
        if result.checkpoint is not None and result.checkpoint.path != self._first_start:
            text += (
                f" Resume from its last checkpoint, {result.checkpoint.path}, with"
                f" RunOptions(run_dir={str(result.path)!r})."
            )
        made = TrainingError(text, failures=failures, first_rank=first_rank, result=result)
        made.__cause__ = first
        return made

    def _resolve(self, result: TrainingResult | None, error: BaseException | None) -> None:
        run = self._run
        leave_folder(run, run.path.resolve())  # before anybody hears of the end
        if not run.start():
            return
        run.finished_at = datetime.now(UTC)
        with contextlib.suppress(InvalidStateError):  # it was cancelled in this instant
            if error is not None:
                run.set_exception(error)
            else:
                assert result is not None
                run.set_result(result)


def _reasons(error: SpmdError | None) -> set[LossReason]:
    failures = error.failures.values() if error is not None else ()
    return {each.reason for each in failures if isinstance(each, WorkerLostError)}


def start_run(run: TrainingRun, controller: Controller, engine: Engine) -> TrainingRun:
    """Start a training in its own thread; "inline" in this one, for debuggers."""
    run.owners = (engine.driver,)
    is_named = controller.kept.run_dir is not None  # others may name it, too
    take_folder(run, is_named)
    try:
        first = controller.begin()  # here, so that an attempt that cannot begin fails at the call
    except BaseException:
        leave_folder(run, run.path.resolve())
        raise
    if engine.profile.backend == "inline":
        controller.follow(first)
        return run
    thread = threading.Thread(
        target=controller.follow, args=(first,), name=f"raypool-train-{run.name}", daemon=True
    )
    engine.helpers.add(thread)  # the end of the pool waits for it
    thread.start()
    return run


# --- the warm lane: loops for Ray Train on the pool's own workers, which run already --------------


class WarmLoop:
    """A loop as each rank calls it."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        # called as in functools.partial, so that messages have its name
        self.func = self.__wrapped__ = loop

    def __call__(
        self, context: Any, open_config: Callable[[], Any], plan: TrainingAttempt
    ) -> RankEnd:
        """Run the loop as Ray Train would."""
        from raypool.train.ray_train import run_loop

        return run_loop(context, self.func, open_config(), plan)


class WarmRank(RankFunction):
    """A rank whose value travels back: a training's result outlives the pool."""

    def answer(self, assignment: Assignment, value: Any) -> Any:
        """Return the value itself."""
        return value


class Ends:
    """The ends of the ranks, fetched when they are iterated over."""

    def __init__(self, ends: Sequence[Deferred]) -> None:
        self._ends = ends

    def __iter__(self) -> Iterator[RankEnd]:
        return (end.fetch() for end in self._ends)


class WarmWork(SpmdWork):
    """A call whose outcome is the ends of its ranks."""

    def answer_of(self, result: SliceResult) -> Deferred:
        """Note the place of a rank's value, which may be large."""
        return Deferred(result.values, result.offset)

    def outcome(self, members: Sequence[tuple[int, WorkerInfo]], answers: Sequence[Any]) -> Ends:
        """Return the ends, by rank."""
        return Ends(answers)


class WarmLane:
    """Runs a training's ranks as one call on all of them.

    Each attempt begins with the loop and the config as they were when the user called.
    """

    def __init__(self, engine: Engine, loop: Callable[..., Any], config: Any) -> None:
        engine.check_open()  # else packing could start a new Ray
        self._engine = engine
        self._function = engine.function(WarmRank(WarmLoop(loop)), loop)
        self._open_config = engine.opener(config, f"the config of {self._function.name}")

    def begin(
        self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options
    ) -> Future[Any]:
        """Start an attempt; its result has a `RankEnd` for each rank."""
        self._engine.check_open()  # else cancelled, which would hide the last attempt's error
        # a worker of the last attempt may have changed what the loop has captured
        function = self._function if plan.attempt == 1 else self._engine.anew(self._function)
        args = self._open_config, plan
        return submit_gang(self._engine, function, args, options, size, places, kind=WarmWork)
