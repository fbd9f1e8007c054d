"""Runs of trainings: options, result, the handle `TrainingRun`, and the folders in use."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel.feed import Row, as_html
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    explains_calls,
    optional_count,
)
from raypool.futures import Future, joined_feed
from raypool.journal.lock import TRAINING_LOCK as LOCK
from raypool.journal.lock import RunLock, not_writable
from raypool.parallel_for import check_run_dir
from raypool.worker.running import in_task

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from ray.train import Checkpoint


MODES = ("min", "max")

TICK_S = 0.1
"""How often the display of a training is updated [s]."""


@explains_calls
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The checkpoints of a training, and its starting point; for `pool.train` and `pool.fit`.

    Retries, time limit, name and priority are options of the pool's view:
    `pool.options(retries=1)`.

    Args:
        run_dir: The folder of this run, which all nodes and this process see. If it has
            checkpoints, the run resumes from the last one. None: a new folder in `~/raypool_runs`,
            which is made with the first checkpoint.
        keep_checkpoints: The number of checkpoints to keep: the best ones by `best_metric` (without
            one the newest), and always the last. None: all; in `fit` without `checkpoint_every` 1.
        best_metric: The reported metric that tells which checkpoint is the best. Until a checkpoint
            has it, none is deleted; with lane="managed" and `keep_checkpoints` each must have it.
        best_mode: "min" if lower is better, "max" if higher is.
        start_from: A checkpoint to begin with, a folder or a `ray.train.Checkpoint`; not used if
            `run_dir` has one. `fit` takes the model, the optimizer and the schedule from it, and
            its epochs count for `max_epochs`; patience and the best model start anew.
        min_workers: The training continues with at least this many workers if others are lost for
            good. None: it needs all.

    Raises:
        InvalidTypeError: A field has the wrong type.
        InvalidValueError: A field has an invalid value, such as a checkpoint that does not exist.

    Source:
        Ray 2.60, ray.train.RunConfig, CheckpointConfig and FailureConfig.

    Example:
        >>> RunOptions(keep_checkpoints=2, best_metric="loss").best_mode
        'min'
    """

    run_dir: str | os.PathLike[str] | None = None
    keep_checkpoints: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"
    start_from: Any = None
    min_workers: int | None = None

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            if "://" in str(self.run_dir):
                raise InvalidValueError(
                    f"run_dir={self.run_dir!r} is a URL. A training is kept in a folder that all"
                    " machines see: pass one, and copy checkpoints to the URL from there, or in"
                    " the loop on rank 0."
                )
            check_run_dir(self.run_dir)
            object.__setattr__(self, "run_dir", Path(self.run_dir).expanduser().absolute())
        for name in ("keep_checkpoints", "min_workers"):
            object.__setattr__(self, name, optional_count(name, getattr(self, name), least=1))
        if self.best_metric is not None and not isinstance(self.best_metric, str):
            raise InvalidTypeError(f"best_metric={self.best_metric!r} is not the name of a metric.")
        if self.best_mode not in MODES:
            raise InvalidValueError(f"best_mode must be 'min' or 'max', not {self.best_mode!r}.")
        if self.start_from is not None:
            object.__setattr__(self, "start_from", checkpoint_folder(self.start_from))


def checkpoint_folder(checkpoint: Any) -> Path:
    """Return the folder of a checkpoint on this machine.

    Raises:
        InvalidTypeError: It is neither a path nor a `ray.train.Checkpoint`.
        InvalidValueError: There is no such folder, or nothing in it.
    """
    path = getattr(checkpoint, "path", checkpoint)
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidTypeError(
            "start_from must be the folder of a checkpoint or a ray.train.Checkpoint, not"
            f" {checkpoint!r}."
        )
    filesystem = getattr(checkpoint, "filesystem", None)
    if "://" in str(path) or getattr(filesystem, "type_name", "local") != "local":
        raise InvalidValueError(
            f"start_from={path} is in remote storage, but a training begins with a folder that all"
            " machines see. Copy it to one first, with checkpoint.to_directory(folder) of a"
            " ray.train.Checkpoint, and pass that folder."
        )
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise InvalidValueError(
            f"start_from={folder} is not a checkpoint:"
            f" {'it is a file' if folder.exists() else 'there is no such folder'}. Pass the folder"
            " that a training has reported, such as result.checkpoint."
        )
    if not any(folder.iterdir()):
        raise InvalidValueError(
            f"start_from={folder} is not a checkpoint: the folder is empty. Pass one that a"
            " training has reported."
        )
    return folder


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        metrics: The last report of rank 0, by name; empty if there was none.
        metrics_frame: All reports, a row for each: `time` (UTC), `rank`, `attempt`, then the
            metrics. Those of `ray.train.report` appear once, from rank 0.
        checkpoint: The last checkpoint, None without one.
        best_checkpoint: The one with the best `RunOptions.best_metric`; None without one, or if no
            metric was named.
        best_checkpoints: All that are kept, each with the metrics of rank 0, the best (without a
            metric the newest) last.
        values: The return values of the ranks, by rank; empty if the training has not ended.
        path: The folder of the run; None if nothing was kept.
        model: The model trained by `pool.fit`, on the CPU; else None.
        ended_by: Why a training by `pool.fit` ended: "max_epochs", "patience", "request_stop",
            "output_fn", or "loss is nan"; else None.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_frame: pd.DataFrame = field(repr=False)
    checkpoint: Checkpoint | None = None
    best_checkpoint: Checkpoint | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(
        default_factory=list, repr=False
    )
    values: list[Any] = field(default_factory=list, repr=False)
    path: Path | None = None
    model: torch.nn.Module | None = field(default=None, repr=False)
    ended_by: str | None = None


# --- handle of a training in progress -------------------------------------------------------------


RUNS = "raypool_runs"
"""The folder in the user's home directory for runs without a `run_dir`."""


class TrainingRun(Future[TrainingResult]):
    """The handle of a training: a future of its `TrainingResult`.

    After `request_stop`, `current_task().should_stop` is true in the loop: on all ranks from the
    same `ray.train.report` on.

    Attributes:
        path: The folder of the run; it is made with the first checkpoint.
        recipe: For `scaling_report`, if this is a training by `pool.fit`; else None.
        progress: How `result` shows it; see `PoolView.fit`.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._tries: list[Future[Any]] = []  # first: the base sets what the properties read
        super().__init__(name, on_ask=_pass_on)
        self.path = path
        self.recipe: Any = None
        self.progress: bool | Callable[..., Any] | None = False
        # requests may come from any thread, and from a signal handler in this one
        self._adopting = threading.RLock()
        self._listeners: list[Callable[[list[Row]], object]] = []
        self.catch_up = lambda: joined_feed(self.tries)

    def result(self, timeout: float | None = None) -> TrainingResult:
        """Return the result, waiting for it at most `timeout` seconds; see `Future.result`.

        Meanwhile it shows the progress of a training by `pool.fit`.
        """
        __tracebackhide__ = True  # notebooks and pytest: only the user's own line
        if self.progress is not False and not self.done() and not in_task():
            deadline = time.monotonic() + (math.inf if timeout is None else timeout)
            self.check_wait(timeout)
            self._show(deadline)
            timeout = max(deadline - time.monotonic(), 0)
        return super().result(None if timeout == math.inf else timeout)

    def _show(self, deadline: float) -> None:
        from raypool.views.progress import watched
        from raypool.views.status import TrainingStatus

        job, first = self.recipe.config["fit"], None
        num_epochs, num_steps = job.options.max_epochs, job.division.steps
        status = TrainingStatus(self.name, num_epochs, num_steps, self._submitted_at)
        with watched(self.progress, status, is_serial=False) as watch:
            while watch is not None:
                is_over = self.done() or time.monotonic() >= deadline
                feeds = [each.feed for each in self.tries if each.feed is not None]
                last = feeds[-1].last(0) if feeds else {}
                if first is None and "step" in last:  # a loss may report, too, and before
                    first = int(self.metrics["step"].dropna().iloc[0])
                watch.update(last, first or 0)
                if is_over:
                    break
                wait([self], TICK_S)

    def running(self) -> bool:
        """Whether an attempt runs, or has run, and the training has not ended."""
        return not self.done() and any(each.running() or each.done() for each in self._tries)

    @property
    def started_at(self) -> datetime | None:
        """When its first attempt began, None before."""
        return self._tries[0].started_at if self._tries else None

    @started_at.setter
    def started_at(self, value: datetime | None) -> None:
        """Take nothing: its attempts know."""

    @property
    def attempts(self) -> int:
        """The number of attempts, without restarts by Ray Train itself (`failure_config`)."""
        return len(self._tries)

    @attempts.setter
    def attempts(self, value: int) -> None:
        """Take nothing: its attempts know."""

    @property
    def metrics(self) -> pd.DataFrame:
        """All metrics reported so far; complete once the training has ended.

        A row for each report, by rank, then in order: `time` (UTC), `rank`, `attempt`, then the
        metrics in the order in which they first appear. Those of `ray.train.report` appear once,
        from rank 0; those of `raypool.report`, from each rank. A metric with the name of one of
        those is in "reported_NAME".
        """
        return self._caught_up().metrics("rank")

    def __repr__(self) -> str:
        return f"<TrainingRun {self.name!r}: {self.state}>"

    def _repr_html_(self) -> str:
        return as_html(repr(self), self.metrics.tail(5))  # its last reports

    def adopt(self, attempt: Future[Any]) -> None:
        """Pass requests, past and future, on to this attempt. For the pool."""
        attempt.whole = self
        with self._adopting:
            self._tries.append(attempt)
            listeners = list(self._listeners)
        for listener in listeners:
            attempt._subscribe(listener)
        _pass_on(self)  # what was requested before this attempt

    def _subscribe(self, listener: Callable[[list[Row]], object]) -> None:
        with self._adopting:  # later attempts are subscribed by `adopt`
            self._listeners.append(listener)
            tries = list(self._tries)
        for attempt in tries:
            attempt._subscribe(listener)

    @property
    def tries(self) -> Sequence[Future[Any]]:
        """The attempts so far; the last one may still run. For the pool."""
        with self._adopting:
            return tuple(self._tries)


def _pass_on(run: Future[Any]) -> None:
    assert isinstance(run, TrainingRun)
    for attempt in run.tries[-1:]:  # those before it have ended
        if run.cancelled():
            attempt.cancel()
        elif run.stop_requested:
            attempt.request_stop()
    if run.cancelled():
        run.notify_cancelled()  # no driver knows the run itself, which would do so


def run_folder(kept: RunOptions, name: str) -> Path:
    """Return the folder of a run, which may not exist yet; a new one if none is named."""
    if kept.run_dir is not None:
        return Path(kept.run_dir)
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[
        :40
    ].strip("-")
    # two runs may begin in the same second
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 16**6:06x}"
    return Path.home() / RUNS / f"{readable}-{stamp}"


# --- folders in use: one training each ------------------------------------------------------------


_here: weakref.WeakSet[TrainingRun] = weakref.WeakSet()
"""The trainings of this process; each has its folder to itself."""


class Locked(NamedTuple):
    """A locked folder: its lock, its training, and whether it was made for that."""

    lock: RunLock
    run: TrainingRun
    is_new: bool


_locked: dict[Path, Locked] = {}
"""The folders that users named for trainings."""

_starting = threading.RLock()  # a signal handler may cancel another run meanwhile


def take_folder(run: TrainingRun, is_named: bool) -> None:
    """Note that a folder is in use, and lock one that the user named against other processes.

    Raises:
        InvalidValueError: It is in use already, here or in another process.
        JournalError: It cannot be written.
    """
    folder = run.path.resolve()
    with _starting:
        other = next(
            (each for each in _here if not each.done() and each.path.resolve() == folder), None
        )
        if other is not None:
            raise InvalidValueError(
                f"run_dir={run.path} is in use by the training {other.name!r}, which is"
                f" {other.state}. Use another folder, or wait for its end."
            )
        if is_named:
            _lock(folder, run)
        _here.add(run)
    run.add_done_callback(lambda _: leave_folder(run, folder))  # also if it is cancelled


def _lock(folder: Path, run: TrainingRun) -> None:
    if folder in _locked:  # of a training that has just ended, and has not left it yet
        _locked[folder] = _locked[folder]._replace(run=run)
        return
    try:
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = RunLock(folder, LOCK)
        while not (folder / LOCK).exists():  # the last holder removed the file in this instant
            lock.release()
            lock = RunLock(folder, LOCK)
        _locked[folder] = Locked(lock, run, is_new)
    except OSError as error:
        _refuse(not_writable(folder, error), error)
    except JournalError as error:
        if not isinstance(error.__cause__, OSError):
            raise InvalidValueError(f"run_dir={error}") from None
        _refuse(error, error.__cause__)


def _refuse(refusal: JournalError, cause: OSError) -> None:
    """Raise the error for a folder that cannot be written, unless only the workers need it."""
    from raypool.backends.ray.client import is_far  # imported late: it needs Ray

    if not is_far():  # else the workers' machines may have it
        raise refusal from cause


def leave_folder(run: TrainingRun, folder: Path) -> None:
    """Unlock a folder, and remove it if it was made for a training that kept nothing."""
    with _starting:
        _here.discard(run)
        if folder in _locked and _locked[folder].run is run:
            lock, _, is_new = _locked.pop(folder)
            with contextlib.suppress(OSError):  # somebody has deleted the folder
                (folder / LOCK).unlink()
                if is_new and not has_kept(folder):
                    folder.rmdir()
            lock.release()


def has_kept(folder: Path) -> bool:
    """Whether the folder of a run has any content."""
    return folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
