"""The controller of a training: its attempts, one after the other, and its result or error."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, InvalidStateError
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

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
from raypool.futures import Future
from raypool.options import Options
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

if TYPE_CHECKING:
    import pandas as pd


LOOK_S = 0.1
"""The time between two checks for new workers [s]."""

Finish = Callable[[TrainingResult], TrainingResult]
"""Turns the result of a training into the result that its caller wants."""


class TrainingBackend(Protocol):
    """A way to run the ranks of a training."""

    def begin(
        self, plan: TrainingAttempt, size: int, places: tuple[int, ...] | None, options: Options
    ) -> Future[Any]:
        """Start an attempt; its result, iterated, is a `RankEnd` for each rank, and its failure an
        `SpmdError`.
        """


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
        return replace(self, size=len(left), places=None if self.places is None else tuple(left))

    def await_others(self, least: int | None) -> None:
        """Wait until the pool has replaced lost machines, but no longer than `start_timeout_s`.

        Raises:
            PoolClosedError, PoolBrokenError: The pool has ended.
        """
        deadline = time.monotonic() + self.engine.profile.start_timeout_s
        while (
            self.places is None
            and len(self.left) < (least or self.size)
            and time.monotonic() < deadline
        ):
            self.engine.check_open()
            time.sleep(LOOK_S)

    @property
    def left(self) -> list[int]:
        """The places whose workers exist, rank 0 first."""
        numbers = self.numbers()
        return (
            list(numbers)
            if self.places is None
            else [place for place in self.places if place in numbers]
        )


class Controller:
    """Makes the attempts of a training, one after the other, and resolves it."""

    def __init__(
        self,
        run: TrainingRun,
        lane: TrainingBackend,
        crew: RankPlaces,
        options: Options,
        kept: RunOptions,
        finish: Finish | None,
    ) -> None:
        self._run = run
        self._lane = lane
        self._crew = crew
        self._options = options
        self._kept = kept
        self._finish = finish
        self._ends: list[RankEnd] = []
        self._first_start: str | None = None
        self._failed: SpmdError | None = None  # the last attempt, if it is repeated
        self._spent_s = 0.0  # of the time limit, used by attempts that have ended
        self._num_forgiven = 0  # attempts that ended with preempted machines, or had not begun

    @property
    def has_named_folder(self) -> bool:
        """Whether the user has named the folder of the run, so that others may name it too."""
        return self._kept.run_dir is not None

    def begin(self) -> Future[Any]:
        """Start the next attempt.

        Raises:
            ResourceError: There are too few workers.
            SerializationError: The loop or its configuration cannot be sent.
            PoolClosedError: The pool was shut down.
        """
        self._crew = self._crew.now(self._kept.min_workers)
        plan = self._plan(self._run.attempts + 1)
        attempt = self._lane.begin(plan, self._crew.size, self._crew.places, self._left())
        self._run.adopt(attempt)
        return attempt

    def conduct(self, attempt: Future[Any]) -> None:
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
        except (KeyboardInterrupt, SystemExit):  # "inline" runs in the user's own thread
            run.cancel()
            raise
        except BaseException as error:
            self._resolve(None, self._described_if_possible(error))

    def _finished(self, result: TrainingResult) -> TrainingResult:
        if self._finish is None:
            return result
        try:
            return self._finish(result)
        except Exception as error:
            raise TrainingError(
                f"{self._run.name} has come to its end, but its model cannot be made here:"
                f" {type(error).__name__}: {error}. What there is is in this error's .result.",
                failures={},
                first_rank=None,
                result=result,
            ) from error

    def _has_ended_well(self, attempt: Future[Any]) -> bool:
        """Wait for an attempt; return whether it has, and need not be made again.

        Raises:
            SpmdError, ResourceError: It has failed, and is not to be repeated.
        """
        try:
            self._ends = list(attempt.result())
        except ResourceError:
            is_whole = self._await_machines()
            if not is_whole and self._crew.now(self._kept.min_workers).size == self._crew.size:
                raise
            self._num_forgiven += 1  # it had not begun
            return False
        except SpmdError as error:
            if not self._is_worth_another(error):
                raise
            self._failed = error
            return False
        finally:
            if attempt.started_at is not None:
                self._spent_s += (datetime.now(UTC) - attempt.started_at).total_seconds()
        return True

    def _await_machines(self) -> bool:
        """Wait for replacements of lost machines; return whether each rank has a worker.

        The loss of a worker is often known before that of its machine. An attempt made in between
        would wait for workers that never come.
        """
        if not _reasons(self._failed) & {LossReason.NODE, LossReason.PREEMPTED}:
            return False
        self._crew.await_others(self._kept.min_workers)
        return len(self._crew.left) >= self._crew.size

    def _plan(self, number: int) -> TrainingAttempt:
        kept, folder = self._kept, self._run.path
        last = latest(folder)
        start = kept.start_from if last is None else last.path
        if number == 1:
            self._first_start = None if start is None else str(start)
        return TrainingAttempt(
            self._run.name,
            number,
            str(folder),
            None if start is None else str(start),
            kept.keep_checkpoints,
            kept.best_metric,
            kept.best_mode,
        )

    def _left(self) -> Options:
        """Return the options of the next attempt, with the rest of the time limit."""
        options = replace(
            self._options, name=self._run.name, retries=self._options.retries + self._num_forgiven
        )
        if options.timeout_s is None:
            return options
        return replace(options, timeout_s=max(options.timeout_s - self._spent_s, 0.001))

    def _is_worth_another(self, error: SpmdError) -> bool:
        """Whether a lost worker or a `retry_on` exception calls for another attempt, and one is
        left.

        A worker lost with a preempted machine, with notice, does not count as an attempt.
        """
        kinds: tuple[type[BaseException], ...] = (WorkerLostError, *self._options.retry_on)
        if self._run.cancelled() or not all(
            isinstance(each, kinds) for each in error.failures.values()
        ):
            return False
        self._num_forgiven += LossReason.PREEMPTED in _reasons(error)
        return self._run.attempts - self._num_forgiven <= self._options.retries

    def _result(self) -> TrainingResult:
        """Return the result from the checkpoints and reports so far."""
        from ray.train import Checkpoint

        kept, folder, frame = self._kept, self._run.path, self._run.metrics
        last = latest(folder)
        top = None if kept.best_metric is None else best(folder, kept.best_metric, kept.best_mode)
        return TrainingResult(
            metrics=(
                self._ends[0].metrics
                if self._ends and self._ends[0].metrics
                else _last_of(frame) or _of(last)
            ),
            metrics_frame=frame,
            checkpoint=None if last is None else Checkpoint.from_directory(str(last.path)),
            best_checkpoint=None if top is None else Checkpoint.from_directory(str(top.path)),
            best_checkpoints=[
                (Checkpoint.from_directory(str(each.path)), each.metrics)
                for each in ranked(folder, kept.best_metric, kept.best_mode)
            ],
            values=[end.value for end in self._ends],
            path=folder if has_kept(folder) else None,
        )

    def _described_if_possible(self, error: BaseException) -> BaseException:
        """Return the error to raise; unchanged if the result cannot be read."""
        try:
            return self._described(error)
        except Exception as why:
            error.add_note(
                f"raypool: what was kept of the training in {self._run.path} cannot be read: {why}"
            )
            return error

    def _described(self, error: BaseException) -> BaseException:
        """Return the error to raise, with the result so far."""
        if isinstance(error, (PoolClosedError, PoolBrokenError)) or not isinstance(
            error, (SpmdError, ResourceError)
        ):
            return error
        failures = error.failures if isinstance(error, SpmdError) else {}
        first_rank = error.first_rank if isinstance(error, SpmdError) else None
        first = error if first_rank is None else failures[first_rank]
        result = self._result()
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
        text = str(error) if isinstance(error, SpmdError) else self._too_few(error)
        if (number := self._run.attempts) > 1:
            text += f" It was attempt {number}."
        if result.checkpoint is not None and result.checkpoint.path != self._first_start:
            text += (
                f" It goes on from its last checkpoint, {result.checkpoint.path}, with"
                f" RunOptions(run_dir={str(result.path)!r})."
            )
        made = TrainingError(text, failures=failures, first_rank=first_rank, result=result)
        made.__cause__ = first
        return made

    def _too_few(self, error: BaseException) -> str:
        left = len(self._crew.left)
        if self._run.attempts == 1:
            return str(error)
        return (
            f"{self._run.name} has lost a worker for good: requested {self._crew.size}, available"
            f" {left}. With RunOptions(min_workers={max(left, 1)}) it goes on with those that are"
            " left."
        )

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
    """Return the reasons for which workers were lost."""
    failures = error.failures.values() if error is not None else ()
    return {each.reason for each in failures if isinstance(each, WorkerLostError)}


def _last_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the last report of rank 0, from the table of all reports."""
    own = frame[frame["rank"] == 0]
    if own.empty:
        return {}
    return {
        str(name): value
        for name, value in own.iloc[-1].dropna().items()
        if name not in ("time", "rank", "attempt")
    }


def _of(last: CompleteCheckpoint | None) -> dict[str, Any]:
    """Return the metrics of the last checkpoint, for a training that had ended before."""
    return {} if last is None else last.metrics


def start_run(run: TrainingRun, conductor: Controller, engine: Engine) -> TrainingRun:
    """Start a training in its own thread; "inline" in this one, for debuggers.

    Raises:
        InvalidValueError: Another training has its folder, here or in another process.
    """
    run.owners = (engine.driver,)
    take_folder(run, conductor.has_named_folder)
    try:
        first = conductor.begin()  # here, so that an attempt that cannot begin fails at the call
    except BaseException:
        leave_folder(run, run.path.resolve())
        raise
    if engine.profile.backend == "inline":
        conductor.conduct(first)
        return run
    thread = threading.Thread(
        target=conductor.conduct, args=(first,), name=f"raypool-train-{run.name}", daemon=True
    )
    engine.helpers.add(thread)
    thread.start()
    return run
