"""Loggers: they pass a loop's items, reports and outcomes to other experiment trackers.

`parfor(loggers=[...])` feeds them while the loop runs, `Results.to_mlflow` and its siblings
afterwards, so both write the same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raypool.channel.feed import MAX_EXACT, Row, column_name, fields_of
from raypool.channel.records import Missing
from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_installed,
    did_you_mean,
    whole_number,
)
from raypool.views.words import describe_error, is_real, number_in

if TYPE_CHECKING:
    from raypool.engine.loop import LoopWork, Lost, Segment

logger = logging.getLogger("raypool")

MAX_TEXT = 500
"""The greatest length of a parameter that is not a number [characters]."""


class LoggedOutcome(NamedTuple):
    """How an item ended: `status` as in `Results.to_frame`, the numbers in its return value by name
    ("result/loss"), its error, when it ended (Unix time [s]), the folder of its files, and whether
    it is a trial that a search pruned.
    """

    status: str
    values: dict[str, float]
    error: str | None
    ended_at: float
    folder: Path | None
    is_pruned: bool = False


class SweepLogger:
    """The base of all loggers. `_begin` returns a target's own run, which its other methods get."""

    _begin: Callable[[int, dict[str, Any], float], Any]  # item, parameters, Unix time [s]
    _log: Callable[[Any, int, float, dict[str, float]], None]  # step, Unix time [s], metrics
    _end: Callable[[Any, LoggedOutcome], None]

    def begin(self, name: str, get_item: Callable[[int], Any]) -> None:
        """Begin a loop."""
        self._name, self._get_item = name, get_item
        self._runs: dict[int, Any] = {}
        self._num_reports: dict[int, int] = {}
        self._open()

    def report(self, row: Row) -> None:
        """Log a report; its step is its `step`, else its number among those of its item."""
        time_s, item, _, metrics = row
        self._begin_once(item, time_s)
        if item not in self._runs:  # of a lost attempt, and late
            return
        found, step = numbers_of(metrics), whole_number(metrics.get("step"))
        if step is None:
            step = self._num_reports[item]
        else:
            found.pop("step", None)
        self._log(self._runs[item], step, time_s, found)
        self._num_reports[item] += 1

    def end_item(  # noqa: PLR0913, PLR0917 - all that is known of it
        self,
        item: int,
        folder: Path | None,
        status: str,
        value: Any = None,
        error: BaseException | None = None,
        started_at: float | None = None,
        ended_at: float | None = None,
        is_pruned: bool = False,
    ) -> None:
        """End an item, which need not have reported anything; unknown times [s] are now."""
        now = time.time()
        self._begin_once(item, started_at or now)
        told = None if error is None else describe_error(error)
        values, ended_at = numbers_of(value, "result/"), ended_at or now
        outcome = LoggedOutcome(status, values, told, ended_at, folder, is_pruned)
        if item in self._runs:  # else Ctrl-C has interrupted the next logger
            self._end(self._runs[item], outcome)
            del self._runs[item]

    def _begin_once(self, item: int, started_at: float) -> None:
        if item not in self._num_reports:
            params = dict(_flat("item", self._get_item(item)))
            for name, value in params.items():
                if not (value is None or isinstance(value, (bool, int, float))):
                    text = value if isinstance(value, str) else repr(value)
                    params[name] = column_name(text)[:MAX_TEXT]
            self._runs[item] = self._begin(item, params, started_at)
            self._num_reports[item] = 0

    def pause(self, item: int) -> None:
        """Note that an item waits, perhaps for long, before it reports more."""
        if item in self._runs:
            self._pause(self._runs[item])

    def abandon(self) -> None:
        """Release what is open, after a failure."""
        for run in self._runs.values():
            self._pause(run)

    def close(self) -> None:
        """End the loop."""

    def _open(self) -> None:
        pass

    def _pause(self, run: Any) -> None:
        pass


class TensorboardLogger(SweepLogger):
    """Event files for TensorBoard: for each item its curves, and a row of hyperparameters.

    Args:
        folder: The folder for `tensorboard --logdir`. Item 3 writes to "item-3" in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_installed("tensorboard", "An export to TensorBoard", "tensorboardX")
        self._folder = Path(folder).expanduser().absolute()  # items may change the folder

    def _begin(self, item: int, params: dict[str, Any], started_at: float) -> Any:
        files = _EventFiles(self._folder / f"item-{item}")
        files.open()
        return files, params

    def _log(self, run: Any, step: int, time_s: float, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            run[0].open().add_scalar(name, value, step, time_s)

    def _pause(self, run: Any) -> None:
        run[0].close()

    def _end(self, run: Any, outcome: LoggedOutcome) -> None:
        from tensorboardX.summary import hparams

        files, params = run
        writer = files.open()
        for name, value in outcome.values.items():
            writer.add_scalar(name, value, 0, outcome.ended_at)
        shown = {
            name: str(value) if _is_inexact(value) else value for name, value in params.items()
        }
        for summary in hparams({**shown, "status": outcome.status}, outcome.values):
            writer.file_writer.add_summary(summary)
        files.close()


class _EventFiles:
    """The event files of an item: a new one after each pause, as an open one needs a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_files = 0
        self._writer: Any = None

    def open(self) -> Any:
        """Return the writer."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # without it, two files of the same second have the same name
            suffix = f".{self._num_files}" if self._num_files else ""
            self._writer = SummaryWriter(str(self._folder), flush_secs=10, filename_suffix=suffix)
            self._num_files += 1
        return self._writer

    def close(self) -> None:
        """Close the file until more comes."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class MlflowLogger(SweepLogger):
    """Runs of MLflow: one for the loop, with a child run for each item.

    They go where MLflow is set to write (`MLFLOW_TRACKING_URI`). A child has the parameters, the
    metrics with their steps, the tags "raypool.status" and "raypool.error", and as artifacts the
    files that the item has in `run_dir`.

    Args:
        experiment: The experiment's name; it is created if it does not exist.
    """

    def __init__(self, experiment: str) -> None:
        check_installed("mlflow", "An export to MLflow", "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._experiment = experiment
        self._sent_at = 0.0

    def _open(self) -> None:
        client, name = self._client, self._experiment
        found = client.get_experiment_by_name(name)
        self._id = client.create_experiment(name) if found is None else found.experiment_id
        self._parent = client.create_run(self._id, run_name=self._name).info.run_id

    def _begin(self, item: int, params: dict[str, Any], started_at: float) -> Any:
        from mlflow.entities import Param

        tags = {"mlflow.parentRunId": self._parent}
        run = self._client.create_run(self._id, int(started_at * 1000), tags, f"item-{item}")
        entries = [Param(_mlflow_name(name), str(value)) for name, value in params.items()]
        self._send(run.info.run_id, "params", 100, entries)
        return run.info.run_id, []

    def _log(self, run: Any, step: int, time_s: float, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        run[1].extend(
            Metric(_mlflow_name(name), value, int(time_s * 1000), step)
            for name, value in metrics.items()
        )
        if time.monotonic() >= self._sent_at + 1:  # a request for each report would be slow
            for run_id, waiting in self._runs.values():
                self._send(run_id, "metrics", 1000, waiting)
            self._sent_at = time.monotonic()

    def _end(self, run: Any, outcome: LoggedOutcome) -> None:
        run_id, waiting = run
        self._log(run, 0, outcome.ended_at, outcome.values)
        self._send(run_id, "metrics", 1000, waiting)
        self._client.set_tag(run_id, "raypool.status", outcome.status)
        if outcome.error is not None:
            self._client.set_tag(run_id, "raypool.error", outcome.error)
        if outcome.folder is not None and outcome.folder.is_dir():
            self._client.log_artifacts(run_id, str(outcome.folder))
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(outcome.status, "KILLED")
        self._client.set_terminated(run_id, status, int(outcome.ended_at * 1000))

    def _send(self, run_id: str, kind: str, most: int, entries: list[Any]) -> None:
        for first in range(0, len(entries), most):  # MLflow takes no more at once
            self._client.log_batch(run_id, **{kind: entries[first : first + most]})
        entries.clear()

    def close(self) -> None:
        """End the run of the loop."""
        self._client.set_terminated(self._parent)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


class WandbLogger(SweepLogger):
    """Runs of Weights & Biases: one for each item, in a group for the loop.

    Args:
        project: The project's name.
        mode: "offline" writes below `WANDB_DIR` (this folder by default), for `wandb sync`;
            "online" sends to the server at once.
    """

    def __init__(self, project: str, mode: Literal["offline", "online"] = "offline") -> None:
        check_installed("wandb", "An export to Weights & Biases", "wandb")
        self._project, self._mode = project, mode

    def _begin(self, item: int, params: dict[str, Any], started_at: float) -> Any:
        import wandb

        return wandb.init(
            project=self._project,
            group=self._name,
            name=f"item-{item}",
            config=params,
            mode=self._mode,
            reinit="create_new",
            # statistics of this process are not those of the item
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def _log(self, run: Any, step: int, time_s: float, metrics: dict[str, float]) -> None:
        # without the step: wandb drops reports whose step does not increase
        run.log({**metrics, "_timestamp": time_s})

    def _end(self, run: Any, outcome: LoggedOutcome) -> None:
        run.summary.update({**outcome.values, "status": outcome.status, "error": outcome.error})
        run.finish(exit_code=0 if outcome.status == "finished" else 1)


class TrackioLogger(SweepLogger):
    """Runs of Trackio on this machine: one for each item, in a group for the loop.

    Args:
        project: The project's name, for `trackio show --project`.
    """

    def __init__(self, project: str) -> None:
        check_installed("trackio", "An export to Trackio", "trackio")
        self._project = project

    def _begin(self, item: int, params: dict[str, Any], started_at: float) -> Any:
        import trackio

        # not `init`, which would end the run before it and print a screenful
        return trackio.Run(
            None, self._project, None, f"item-{item}", group=self._name, config=params
        )

    def _log(self, run: Any, step: int, time_s: float, metrics: dict[str, float]) -> None:
        run.log(metrics, step)

    def _end(self, run: Any, outcome: LoggedOutcome) -> None:
        run.log({**outcome.values, "status": outcome.status, "error": outcome.error})
        run.finish()


class OptunaLogger(SweepLogger):
    """A study of Optuna, with the name of the loop. Its trials are added when the loop ends.

    The score of a trial is `metric` in the item's return value, else what it reported last as
    `metric`. An item without a score is a failed trial, unless a search pruned it.

    Args:
        storage: The storage's URL, such as "sqlite:///study.db".
        metric: The name of the score; "value" if items return a number.
        mode: Whether a small ("min") or a large score ("max") is good.
    """

    def __init__(self, storage: str, metric: str, mode: Literal["min", "max"]) -> None:
        check_installed("search", "An export to Optuna", "optuna")
        self._storage, self._metric, self._mode = storage, metric, mode

    def _open(self) -> None:
        import optuna

        # here, so that nobody learns it only at the end; it is created with its trials
        self._opened = optuna.storages.get_storage(self._storage)
        if self._name in optuna.get_all_study_names(self._opened):
            raise optuna.exceptions.DuplicatedStudyError(
                f"Another study with the name {self._name!r} exists in this storage. Use another"
                " storage, or delete that study."
            )
        self._trials: list[Any] = []

    def _begin(self, item: int, params: dict[str, Any], started_at: float) -> Any:
        return item, params, started_at, {}

    def _log(self, run: Any, step: int, time_s: float, metrics: dict[str, float]) -> None:
        if self._metric in metrics:
            run[-1][step] = metrics[self._metric]

    def _end(self, run: Any, outcome: LoggedOutcome) -> None:
        self._trials.append((*run, outcome))

    def close(self) -> None:
        """Create the study: only now are the ranges of the trials' parameters known."""
        import optuna
        from optuna.trial import TrialState, create_trial

        direction: Any = f"{self._mode}imize"
        trials = []
        columns: dict[str, list[Any]] = {}
        for _, params, *_ in self._trials:
            for name, value in params.items():
                columns.setdefault(name, []).append(value)
        spaces = {name: _space_of(values) for name, values in columns.items()}
        for _, params, started_at, curve, outcome in sorted(self._trials):
            last = next(reversed(curve.values()), math.nan)
            score = outcome.values.get(f"result/{self._metric}", last)
            has_score = not math.isnan(score)
            state = TrialState.FAIL
            if outcome.is_pruned:
                state = TrialState.PRUNED
            elif outcome.status == "finished" and has_score:
                state = TrialState.COMPLETE
            frozen = create_trial(
                state=state,
                value=score if has_score and state is not TrialState.FAIL else None,
                params=params,
                distributions={name: spaces[name] for name in params},
                user_attrs={**outcome.values, "status": outcome.status, "error": outcome.error},
                intermediate_values=curve,
            )
            frozen.datetime_start = datetime.fromtimestamp(started_at)
            frozen.datetime_complete = datetime.fromtimestamp(outcome.ended_at)
            trials.append(frozen)
        finished = [outcome for *_, outcome in self._trials if outcome.status == "finished"]
        if finished and all(trial.state is TrialState.FAIL for trial in trials):
            names = {name.removeprefix("result/") for each in finished for name in each.values}
            raise InvalidValueError(
                f"No item has reported or returned {self._metric!r}, the score of the trials."
                + did_you_mean(self._metric, sorted(names))
            )
        study = optuna.create_study(
            storage=self._opened, study_name=self._name, direction=direction
        )
        study.add_trials(trials)


def _space_of(values: list[Any]) -> Any:
    """Return a distribution of Optuna's that has all of these values."""
    from optuna import distributions

    kinds = {*map(type, values)}
    is_exact = not any(map(_is_inexact, values))  # ranges compare values as floats
    if is_exact and kinds == {int}:
        return distributions.IntDistribution(min(values), max(values))
    if is_exact and kinds <= {int, float} and all(map(math.isfinite, values)):
        return distributions.FloatDistribution(min(values), max(values))
    return distributions.CategoricalDistribution([*dict.fromkeys(values)])


# --- names and numbers ----------------------------------------------------------------------------


def _is_inexact(value: Any) -> bool:
    """Whether a value is an integer that a float may round."""
    return isinstance(value, int) and abs(value) > MAX_EXACT


def _flat(single: str, value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a value, nested ones with dots; a value without fields has one name."""
    fields = fields_of(value)
    if fields is None:
        yield ".".join(path) or single, number_in(value)
    else:
        for key, entry in fields.items():
            yield from _flat(single, entry, (*path, column_name(key)))


def numbers_of(value: Any, prefix: str = "") -> dict[str, float]:
    """Return the numbers in the metrics of a report, or in a return value, by name.

    Example:
        >>> numbers_of({"loss": 1, "acc": {"val": 0.5}, "note": "good"}), numbers_of(3, "result/")
        ({'loss': 1.0, 'acc.val': 0.5}, {'result/value': 3.0})
    """
    found = {}
    for name, entry in _flat("value", value):
        if is_real(entry):
            with contextlib.suppress(OverflowError):  # an int beyond all floats
                found[prefix + name] = float(entry)
    return found


# --- a loop that runs -----------------------------------------------------------------------------


def check_loggers(loggers: Any) -> None:
    """Make sure that all of these are loggers.

    Raises:
        InvalidTypeError: They are not a list, or one is something else.
    """
    is_list = isinstance(loggers, (list, tuple))
    if not is_list or not all(isinstance(each, SweepLogger) for each in loggers):
        raise InvalidTypeError(
            f"loggers={loggers!r} is not a list of loggers. Pass those of raypool.loggers, such as"
            " [TensorboardLogger('tb')]."
        )


class LiveLog:
    """Feeds loggers while a loop runs; a logger that raises is dropped with a warning.

    Ctrl-C may interrupt any line, so what was passed on is noted afterwards. Items that `run_dir`
    restores are not logged: they do not run.
    """

    def __init__(self, loggers: Sequence[SweepLogger], work: LoopWork) -> None:
        self._work, self._loggers = work, [*loggers]
        self._new_rows: deque[Row] = deque()
        self._num_seen = self._num_lost = 0
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._outcomes: dict[int, Sequence[Any]] = {}  # the last ones of items that have not ended
        self._pass_on("begin", work.label, lambda item: work.items[item])
        work.feed.subscribe(self._new_rows.extend)

    def update(self, work: LoopWork, total: int | None = None) -> None:
        """Pass on what is new."""
        segments, lost = work.segments[self._num_seen :], work.lost[self._num_lost :]
        if segments:
            work.catch_up()  # their last reports may still be on their way
        while self._new_rows:
            row = self._new_rows.popleft()
            self._begun.add(row[1])
            self._pass_on("report", row)
        self._note_outcomes(segments, lost)
        self._num_seen, self._num_lost = self._num_seen + len(segments), self._num_lost + len(lost)
        for piece, *_ in (*segments, *lost) if work.may_run_again is not None else ():
            for index in work.numbers(piece):
                self._pass_on("pause", index)  # it may wait for long at a rung
        for index, outcome in [*self._outcomes.items()]:
            if work.may_run_again is None or not work.may_run_again(index):
                if index not in self._ended:  # else a watcher let it run again
                    self._end(index, *outcome)
                del self._outcomes[index]

    def _note_outcomes(self, segments: Sequence[Segment], lost: Sequence[Lost]) -> None:
        work = self._work
        for piece, result, _ in segments:
            # items of a call ran one after the other
            times = itertools.accumulate(result.durations_s, initial=result.started_at)
            spans = itertools.islice(itertools.pairwise(times), piece.start - result.start, None)
            values = result.values_of(piece.start, piece.stop)
            for index, value, span in zip(work.numbers(piece), values, spans, strict=False):
                unread = value.error if type(value) is Missing else None
                error = work.errors.get(index, unread)
                status, value = ("finished", value) if error is None else ("failed", None)
                self._outcomes[index] = status, value, error, *span
        for piece, failure, _ in lost:
            for index in work.numbers(piece):
                self._outcomes[index] = "failed", None, failure

    def close(self) -> None:
        """Pass on the rest; an item without an outcome was cancelled."""
        self._work.catch_up()
        self.update(self._work)
        unlogged = {*self._work.restored} - self._begun
        for index in {*range(len(self._work.items))} - self._ended - unlogged:
            self._end(index, *self._outcomes.get(index, ("cancelled",)))
        self._pass_on("close")

    def _end(self, index: int, *outcome: Any) -> None:
        folder, is_pruned = self._work.folder(index), self._work.is_pruned(index)
        self._pass_on("end_item", index, folder, *outcome, is_pruned=is_pruned)
        self._ended.add(index)

    def _pass_on(self, method: str, *arguments: Any, **more: Any) -> None:
        for each in [*self._loggers]:
            try:
                getattr(each, method)(*arguments, **more)
            except Exception as error:
                self._loggers.remove(each)
                with contextlib.suppress(Exception):  # it may fail again
                    each.abandon()
                logger.warning(
                    "%s failed: %s. It logs nothing more of %s, which continues; export its results"
                    " at the end.",
                    type(each).__name__,
                    describe_error(error),
                    self._work.label,
                )
