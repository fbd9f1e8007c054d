"""`Results`, which `parfor` returns: the values in order, and a table of how each item ran."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import gc
import itertools
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from raypool.channel.feed import (
    Feed,
    as_html,
    column_name,
    fields_of,
    in_order,
    table,
    with_gaps,
)
from raypool.errors import (
    CANCELLED,
    InvalidTypeError,
    InvalidValueError,
    WorkerLostError,
    check_installed,
    did_you_mean,
    explains_calls,
    reason_of,
    told,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from raypool.channel.gpu_usage import GpuSample
    from raypool.journal.trials import Trials
    from raypool.loggers import SweepLogger
    from raypool.views.report import Story

RUN_COLUMNS: tuple[str, ...] = (
    "status",
    "duration_s",
    "started_at",
    "worker",
    "gpu",
    "attempts",
    "peak_memory_bytes",
    "reason",
    "error",
)
"""The columns that `Results.to_frame` adds."""

STATUSES = ("finished", "failed", "cancelled", "missing")

ORDERED = (str, datetime.date, datetime.timedelta, numbers.Real, Decimal)
"""What a table can be sorted by."""


@dataclasses.dataclass(slots=True)
class Row:
    """One item's run.

    `status` is "finished", "failed", or "cancelled" if it never got an outcome; "missing" if a
    journal knows the item but has no readable outcome of it.
    """

    status: str = "cancelled"
    duration_s: float | None = None
    started_at: float | None = None
    worker: int | None = None
    gpu: int | None = None
    attempts: int = 0
    peak_memory_bytes: int | None = None
    host: str | None = None
    run: int = 1  # of a durable run: with which call


class Span(NamedTuple):
    """Where and when a call ran: from `started_at` (Unix time [s]) for `duration_s` [s]."""

    worker: int
    gpu: int | None
    host: str
    started_at: float
    duration_s: float


class Miss(NamedTuple):
    """An attempt without an outcome: "lost" with its worker, "retried", or "cancelled"."""

    item: int
    row: Row
    why: str | None = None


class FrameRows(list[dict[Any, Any]]):
    """The rows of a pandas DataFrame as items, with its index as `labels`.

    Raises:
        InvalidValueError: Two columns have the same name.
    """

    def __init__(self, frame: Any) -> None:
        twice = frame.columns[frame.columns.duplicated()]
        if len(twice):
            raise InvalidValueError(
                f"The DataFrame has several columns named {twice[0]!r}, but a row is passed as a"
                " dict, which holds one value per name: rename them."
            )
        super().__init__(frame.to_dict("records"))
        self.labels = frame.index


T_co = TypeVar("T_co", covariant=True)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while many objects are made that all stay.

    It would scan all of them again and again, which takes half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Results(Sequence[T_co]):
    """The return values of a loop in the order of its items, and a table of them.

    As a sequence it holds the values; None if an item failed (see `errors`) or never ran. Type
    checkers know it as `Results[T]`, where T is what the function of the loop returns.

    Example:
        >>> from raypool import parpool
        >>> configs = [{"x": 1}, {"x": 2}]
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     results = pool.parfor(lambda config: {"score": -config["x"]}, configs)
        >>> results[1]
        {'score': -2}
        >>> results.to_frame()[["x", "score", "status"]].to_dict("list")
        {'x': [1, 2], 'score': [-1, -2], 'status': ['finished', 'finished']}
        >>> int(results.best("score")["x"])
        1
    """

    def __init__(  # noqa: PLR0913, PLR0917 - most is asked for only when somebody looks
        self,
        items: Sequence[Any],
        values: list[T_co],
        make_rows: Callable[[], list[Row]],
        errors: dict[int, BaseException],
        get_feed: Callable[[], Feed] = Feed,
        get_misses: Callable[[], list[Miss]] = list,
        get_diary: Callable[[int], str] = lambda _: "",
        name: str = "",
        get_gpus: Callable[[], list[GpuSample]] = list,
        get_calls: Callable[[], list[dict[str, Any]]] = list,
        get_folder: Callable[[int], Path | None] = lambda _: None,
        get_trials: Callable[[], Trials | None] = lambda: None,
    ) -> None:
        self._items = items
        self._values = values
        self._make_rows = make_rows
        self._errors = errors
        self._get_feed = get_feed
        self._get_misses = get_misses
        self._get_diary = get_diary
        self._name = name
        self._get_gpus = get_gpus
        self._get_calls = get_calls
        self._get_folder = get_folder
        self._get_trials = get_trials

    @functools.cached_property
    def _trials(self) -> Trials | None:
        return self._get_trials()

    @property
    def _own_columns(self) -> set[str]:
        trials = self._trials
        return {*RUN_COLUMNS, *(() if trials is None else trials.columns)}

    @functools.cached_property
    def _rows(self) -> list[Row]:
        return self._make_rows()

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, str):
            raise InvalidTypeError(
                f"Results are numbered by item: results[0]. The column {index!r} is"
                f" results.to_frame()[{index!r}]."
            )
        return self._values[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Results):
            return self._values == other._values
        return self._values == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    # equal to lists, which have no hash
    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _restored, (
            self._items if isinstance(self._items, FrameRows) else list(self._items),
            self._values,
            self._rows,  # made now: what they are made of stays in this process
            self._errors,
            self._get_feed(),
            self._get_misses(),
            list(self.diary),
            self._name,
            self._get_gpus(),
            self._get_calls(),
            self._trials,
        )

    @property
    def _counts(self) -> dict[str, int]:
        """How many items there are of each status."""
        return {status: sum(row.status == status for row in self._rows) for status in STATUSES}

    def __repr__(self) -> str:
        counts = self._counts
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"<Results of {len(self)} items: {said or 'none'}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the best items, or the first ones, and some failures."""
        from raypool.views.tables import columns_of

        frame, metric = best_first(self)
        is_failed = frame["status"] == "failed"
        is_shown = (~is_failed & (~is_failed).cumsum().le(10)) | (
            is_failed & is_failed.cumsum().le(5)
        )
        columns = columns_of(frame, is_numbered=self._trials is not None)
        columns += ["error"] * bool(is_failed.any())
        by = "" if metric is None else f"; the best by {metric}"
        left = len(frame) - int(is_shown.sum())
        rest = f"; .to_frame() has {left:,} more" if left else ""
        return as_html(f"{self!r}{by}{rest}", frame[is_shown][columns])

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions of the items that failed, by item number."""
        return dict(sorted(self._errors.items()))

    @property
    def metrics(self) -> pd.DataFrame:
        """What the items have reported while they ran (`raypool.report`).

        A row for each report, in the order of the items and then of the reports: `time` (UTC),
        `item` (its number), `attempt`, then the metrics in the order in which they first appear. A
        metric with one of the first three names is in "reported_NAME". An item that ran again after
        its worker was lost has the rows of both attempts.

        Example:
            >>> from raypool import parpool, report
            >>> def train(lr):
            ...     for epoch in range(2):
            ...         report(epoch=epoch, loss=lr / (epoch + 1))
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(train, [0.1, 0.2])
            >>> results.metrics[["item", "epoch", "loss"]].to_dict("list")
            {'item': [0, 0, 1, 1], 'epoch': [0, 1, 0, 1], 'loss': [0.1, 0.05, 0.2, 0.1]}
        """
        return self._get_feed().metrics("item")

    def _last_reports(self) -> pd.DataFrame:
        """Return the last value of each metric: as in `metrics`, with a row for each item."""
        return self._get_feed().newest().metrics("item").set_index("item")

    @property
    def diary(self) -> Sequence[str]:
        r"""What each item has printed, to `sys.stdout` and `sys.stderr` alike, by item number.

        It is the output of the item's last attempt. The newest MiB of each item is kept, and the
        newest 64 MiB of the whole loop: beyond that, the items that printed longest ago lose
        theirs. A first line says how much is missing. With `run_dir`, an item that ran in an
        earlier call has its `diary.txt`, the text of all its attempts; so has every item in
        `load_results`. As in `Future.diary`, output of native code is missing.

        Source:
            MATLAB R2025b, Diary of a parallel.Future.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(lambda lr: print("training with", lr), [0.1, 0.2])
            training with 0.1
            training with 0.2
            >>> results.diary[1]
            'training with 0.2\n'
        """
        return Diaries(len(self), self._get_diary)

    @collector_paused()
    def to_frame(self) -> pd.DataFrame:
        """Return the table: one row per item, with its configuration, its values and how it ran.

        Each key of a dict, dataclass, named tuple, `argparse.Namespace`, `SimpleNamespace`, attrs
        class or pydantic model is a column; anything else is one column ("item", "value"). Cells of
        missing items and values are empty (a column of integers is Int64 or UInt64 then); before
        the first item has finished, the only column of values is "value". A key of both a
        configuration and a value appears as "result_KEY" for the value. Then come `status`,
        `duration_s` [s], `started_at` (a UTC time), `worker`, `gpu`, `attempts`,
        `peak_memory_bytes` (the most GPU memory of its worker while it ran, or while the short
        items of its call ran; empty if it had none), `reason` (None if it finished; see
        `raypool.errors.reason_of`) and `error` (the exception's type and text).

        The table of a search begins with the `trial`'s number, its `state`, its score and its
        `epochs`. The score has the name of the metric; where another of these columns has that, it
        is in "score_NAME".

        The index has the numbers of the items, or that of the pandas DataFrame whose rows were the
        items; `load_results` has only the numbers.

        Spreadsheets run cells that begin with = + - @ as formulas: before you open
        `to_frame().to_csv(path)` in one, check text that others can put there, errors included.
        """
        import pandas as pd

        taken, trials = self._own_columns, self._trials
        configs = self._configs()
        rows = self._rows if trials is None else self._whole_rows()
        finished = [row.status == "finished" for row in rows]
        values = _columns(self._values, "value", taken | set(configs), "result_", finished)
        run: dict[str, Any] = {
            name: list(map(operator.attrgetter(name), rows)) for name in RUN_COLUMNS[:-2]
        }
        run["started_at"] = _times(run["started_at"])
        for name in ("worker", "gpu", "peak_memory_bytes"):  # Int64 has missing values, int64 none
            run[name] = pd.array(run[name], dtype="Int64")
        run["reason"] = [
            reason_of(self._errors[index])
            if index in self._errors
            else CANCELLED
            if row.status == "cancelled"
            else None
            for index, row in enumerate(self._rows)
        ]
        run["error"] = [self._described(index) for index in range(len(self))]
        users = {name: with_gaps(cells) for name, cells in {**configs, **values}.items()}
        labels = self._items.labels if isinstance(self._items, FrameRows) else None
        if not isinstance(labels, pd.Index):
            labels = pd.RangeIndex(len(self))
        if list(labels.names) == [None]:
            labels = labels.rename("index")
        if trials is None:
            return table({**users, **run}, labels)
        users.pop(f"result_{trials.metric}", None)  # the score, or an earlier one
        about = {name: with_gaps(cells) for name, cells in trials.columns.items()}
        return table({**about, **users, **run}, labels)

    def _whole_rows(self) -> list[Row]:
        """Return the rows of trials, with the time of all their parts."""
        rows = list(self._rows)
        for index, part, _ in reversed(self._get_misses()):
            row = rows[index]
            if part.status == "finished" and row.duration_s is not None:
                duration_s = row.duration_s + (part.duration_s or 0.0)
                rows[index] = dataclasses.replace(
                    row, duration_s=duration_s, started_at=part.started_at
                )
        return rows

    def _described(self, index: int) -> str | None:
        error = self._errors.get(index)
        return None if error is None else told(error)

    @property
    def attempts(self) -> pd.DataFrame:
        """When and where each attempt of each item ran.

        A row for each attempt, in the order of the items and then of time: `item` (its number),
        `attempt`, `status` ("finished", "failed"; "lost" with its worker; "retried", since
        `retry_on` names its error; "cancelled" while it ran), `started_at` (a UTC time),
        `duration_s` [s], `worker`, `gpu`, `host`, `run` (the number of the call, of those with the
        same `run_dir`) and `error`. For an attempt without an outcome, only the time of its call is
        known: all items that shared the call have that time, even the last ones, which may not have
        begun. Cancelled items that were waiting in a worker have no row; if the worker was lost,
        they have one without a time, since that counts as an attempt. `started_at` is NaT if it is
        unknown.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(lambda x: 1 / x, [1, 0], on_error="collect")
            >>> results.attempts[["item", "attempt", "status", "error"]].values.tolist()
            [[0, 1, 'finished', None], [1, 1, 'failed', 'ZeroDivisionError: division by zero']]
        """
        import pandas as pd

        entries: list[Miss] = []
        for index, row in enumerate(self._rows):
            if row.attempts and row.status in ("finished", "failed"):
                is_lost = isinstance(self._errors.get(index), WorkerLostError)
                shown = dataclasses.replace(row, status="lost") if is_lost else row
                entries.append(Miss(index, shown, self._described(index)))
        entries += self._get_misses()
        # stable: of equal ones those with an outcome come first
        entries.sort(key=lambda entry: (entry.item, entry.row.run, entry.row.attempts))
        columns: dict[str, Any] = {"item": [entry.item for entry in entries]}
        columns["attempt"] = [entry.row.attempts for entry in entries]
        columns["status"] = [entry.row.status for entry in entries]
        # of missing values alone pandas would make columns of other types
        columns["started_at"] = _times([entry.row.started_at for entry in entries])
        columns["duration_s"] = pd.array(
            [entry.row.duration_s for entry in entries], dtype="float64"
        )
        for name in ("worker", "gpu"):
            columns[name] = pd.array([getattr(entry.row, name) for entry in entries], dtype="Int64")
        columns["host"] = [entry.row.host for entry in entries]
        columns["run"] = [entry.row.run for entry in entries]
        columns["error"] = pd.Series([entry.why for entry in entries], dtype=object)
        return table(columns, pd.RangeIndex(len(entries)))

    @explains_calls
    def timeline(
        self, path: str | os.PathLike[str] | None = None, *, title: str | None = None
    ) -> Figure:
        """Draw a timeline: a bar for each attempt, in the row of its worker. Gaps are idle time.

        Args:
            path: Write it to this file, too: an image by its suffix (".png", ".svg", ".pdf" and
                others of matplotlib); ".json": as a Chrome trace, for https://ui.perfetto.dev or
                chrome://tracing (a process for each host, a thread for each worker, times in
                microseconds).
            title: The title of the figure.

        Returns:
            The matplotlib figure.

        Raises:
            ModuleNotFoundError: matplotlib is missing; it comes with `raypool[plots]`.
            InvalidValueError: The suffix is unknown.
            OSError: The file cannot be written.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(abs, range(3))
            >>> results.timeline().axes[0].get_xlabel()
            'time since the start [ms]'
        """
        check_installed("plots", "A timeline", "matplotlib")
        from raypool.views import timeline

        if path is not None:
            timeline.check_suffix(Path(path))  # before anything is drawn
        attempts = self.attempts
        figure = timeline.draw(attempts, title)
        timeline.let_notebooks_show_it()
        if path is not None:
            timeline.write(figure, attempts, self._configs(), Path(path))
        return figure

    @explains_calls
    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Write an HTML report of the loop: one file that any browser opens, also offline.

        It has a summary, the best item, the importance of the fields for its metric, the table of
        the items (to sort, filter and search), the failures with their tracebacks, learning curves
        of the reported metrics (those of the ten best items until others are chosen), parallel
        coordinates of the configurations, a timeline of each worker with its idle time, how well
        the workers were used, the utilization and memory of their GPUs, and with `run_dir` the
        provenance of each call: code, command, packages. That of a search also has the best score
        so far, over trials and over time. It says what was left out if there is too much to draw.
        An old file stays until the new page is complete. Like the files of a
        `run_dir` it is for its owner only (mode 0600).

        The importance is that of a random forest if scikit-learn is installed, otherwise a rank
        correlation; it takes 20 finished items.

        Args:
            path: The file; it ends in ".html" or ".htm".
            title: Its title; None: the function and the run, such as "train in lr".

        Returns:
            The file.

        Raises:
            ModuleNotFoundError: plotly, itables or Jinja2 is missing; they come with
                `raypool[plots]`.
            InvalidValueError: The path does not end in ".html" or ".htm".
            OSError: The file cannot be written.

        Example:
            >>> from raypool import parpool
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(lambda x: {"score": x}, [1, 2])
            >>> results.report("sweep.html")  # doctest: +SKIP
            PosixPath('/home/me/sweep.html')
        """
        check_installed("plots", "A report", "plotly", "itables", "jinja2")
        from raypool.views import report

        target = Path(path).expanduser().absolute()
        report.check_suffix(target)  # before the tables are made
        if not target.parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, f"There is no folder {target.parent}", str(target)
            )
        report.write(self._story(), target, title or self._name)
        return target

    def _story(self) -> Story:
        from raypool.views.report import Story

        own, trials = RUN_COLUMNS, self._trials
        if trials is not None:
            own = (*(name for name in trials.columns if name != trials.score_column), *own)
        return Story(
            self.to_frame().reset_index(drop=True),
            self.attempts,
            self.metrics,
            self._last_reports(),
            list(self._configs()),
            own,
            self.errors,
            *scores_of(self),
            self._get_gpus(),
            self._get_calls(),
            trials,
        )

    @explains_calls
    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write event files for TensorBoard: curves and hyperparameters of each item.

        Numbers in return values are scalars named "result/NAME", here and in the other exports.

        Args:
            folder: The folder for `tensorboard --logdir`; see `raypool.loggers.TensorboardLogger`.

        Raises:
            ModuleNotFoundError: tensorboardX is missing; it comes with `raypool[tensorboard]`.
            OSError: The folder cannot be written.

        Example:
            >>> import tempfile
            >>> from raypool import parpool, report
            >>> with parpool(profile="inline", quiet=True) as pool:
            ...     results = pool.parfor(lambda lr: report(loss=lr / 2), [0.1, 0.2])
            >>> results.to_tensorboard(tempfile.mkdtemp())
        """
        from raypool.loggers import TensorboardLogger

        self._log_to(TensorboardLogger(folder))

    @explains_calls
    def to_mlflow(self, experiment: str) -> None:
        """Add a run to an experiment of MLflow, with a child run for each item.

        Args:
            experiment: The experiment's name; see `raypool.loggers.MlflowLogger`.

        Raises:
            ModuleNotFoundError: MLflow is missing; it comes with `raypool[mlflow]`.
            mlflow.exceptions.MlflowException: The server refuses it or cannot be reached.
        """
        from raypool.loggers import MlflowLogger

        self._log_to(MlflowLogger(experiment))

    @explains_calls
    def to_wandb(self, project: str, mode: Literal["offline", "online"] = "offline") -> None:
        """Write a run of Weights & Biases for each item.

        Args:
            project: The project's name; see `raypool.loggers.WandbLogger`.
            mode: "offline" writes files for `wandb sync`; "online" sends to the server.

        Raises:
            ModuleNotFoundError: wandb is missing; it comes with `raypool[wandb]`.
            wandb.Error: The server refuses it or cannot be reached.
        """
        from raypool.loggers import WandbLogger

        self._log_to(WandbLogger(project, mode))

    @explains_calls
    def to_trackio(self, project: str) -> None:
        """Add a run for each item to a project of Trackio on this machine.

        Args:
            project: The project's name; see `raypool.loggers.TrackioLogger`.

        Raises:
            ModuleNotFoundError: Trackio is missing; it comes with `raypool[trackio]`.
        """
        from raypool.loggers import TrackioLogger

        self._log_to(TrackioLogger(project))

    @explains_calls
    def to_optuna(
        self, storage: str, metric: str, mode: Literal["min", "max"] | None = None
    ) -> None:
        """Add a study with the name of the run to a storage of Optuna, with a trial for each item.

        Args:
            storage: The storage's URL, such as "sqlite:///study.db".
            metric: The name of the score; see `raypool.loggers.OptunaLogger`.
            mode: Whether a small ("min") or a large score ("max") is good. None: as the name says,
                as for `best`.

        Raises:
            ModuleNotFoundError: Optuna is missing; it comes with `raypool[search]`.
            InvalidValueError: The name does not tell the mode.
            optuna.exceptions.DuplicatedStudyError: The storage has a study with this name.
        """
        from raypool.loggers import OptunaLogger

        self._log_to(OptunaLogger(storage, metric, mode or direction(metric)))

    def _log_to(self, target: SweepLogger) -> None:
        """Feed a logger as the running loop would."""
        target.begin(self._name or "sweep", self._items.__getitem__)
        reports = in_order(self._get_feed().rows())
        by_item = {item: [*rows] for item, rows in itertools.groupby(reports, lambda row: row[1])}
        trials = self._trials
        rows = self._rows if trials is None else self._whole_rows()
        for index, (row, last) in enumerate(zip(rows, self._rows, strict=True)):
            for report in by_item.get(index, ()):
                target.report(report)
            target.end_item(
                index,
                self._get_folder(index),
                row.status,
                self._values[index],
                self._errors.get(index),
                row.started_at,
                last.started_at and last.started_at + (last.duration_s or 0.0),
                is_pruned=trials is not None and trials.states[index] == "pruned",
            )
        target.close()

    def _configs(self) -> dict[str, list[Any]]:
        """Return the items by columns, as `to_frame` names them."""
        # a damaged run may have lost some
        are_there = [item is not None for item in self._items]
        return _columns(self._items, "item", self._own_columns, "item_", are_there)

    @explains_calls
    def best(self, column: str, mode: Literal["min", "max"] | None = None) -> pd.Series[Any]:
        """Return the row of the best finished item by a column, as it is in `to_frame`.

        NaN, infinities and strings never win; of equal numbers the first does.

        Args:
            column: A column of `to_frame`, or a key of a column of dicts, as in the report:
                "acc.val".
            mode: Whether the smallest ("min") or the largest number ("max") is the best. None:
                "min" if a word of the column's name is loss, error, mse, rmse, mae or perplexity,
                "max" if one is accuracy (acc), auc or score.

        Raises:
            InvalidValueError: There is no such column, no finished item has a finite number in it,
                or its name does not tell the mode.
        """
        if mode not in (None, "min", "max"):
            raise InvalidValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        frame = self.to_frame()
        values = numbers_in(frame, column)
        is_best = {"min": min, "max": max}[mode or direction(column)]
        finished = {
            index: value
            for index, value in values.items()
            if self._rows[index].status == "finished"
        }
        if not finished:
            raise InvalidValueError(f"No item has finished with a finite number in {column!r}.")
        # of equal ones min and max take the first
        return frame.iloc[is_best(finished, key=finished.__getitem__)]


def _times(seconds: list[float | None]) -> Any:
    """Return Unix times [s] as pandas' UTC times; NaT for None."""
    import pandas as pd

    return pd.to_datetime(pd.Series(seconds, dtype="float64"), unit="s", utc=True).array


def numbers_in(frame: pd.DataFrame, column: str) -> dict[int, Any]:
    """Return the finite numbers in a column of a table of results, by the position of their row.

    Args:
        frame: The table.
        column: A column, or a key of a column of dicts, as in the report: "acc.val".

    Raises:
        InvalidValueError: There is no such column.
    """
    from raypool.views.words import number_in

    found = enumerate(map(number_in, _cells(frame, column)))
    return {index: value for index, value in found if _is_finite(value)}


def _cells(frame: pd.DataFrame, column: str) -> list[Any]:
    from raypool.views.drawing import spread

    # a column of objects may have fields; to look at all of them takes time
    if column in frame and frame[column].dtype != object:
        return frame[column].tolist()
    columns = spread(frame, map(str, frame))
    if column not in columns:
        raise InvalidValueError(f"There is no column {column!r}.{did_you_mean(column, columns)}")
    return columns[column]


def ranked(frame: pd.DataFrame, key: str) -> pd.DataFrame:
    """Return the rows by a column, the smallest or earliest first; after a "-", the largest.

    A column is sorted by its finite numbers; one without, by its strings, times or durations. Rows
    without any go last.

    Raises:
        InvalidValueError: There is no such column, or its cells have no order.
    """
    from raypool.views.drawing import cell

    column = key.removeprefix("-")
    values = numbers_in(frame, column)
    if not values:
        cells = _cells(frame, column)
        values = {row: value for row, value in enumerate(cells) if cell(value) is not None}
    kinds = {type(value) for value in values.values()}
    try:
        if not kinds or not all(issubclass(kind, ORDERED) for kind in kinds):
            raise TypeError
        order = sorted(values, key=values.__getitem__, reverse=key.startswith("-"))
    except TypeError:  # also where texts meet times
        found = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise InvalidValueError(
            f"The table cannot be sorted by {column!r}, which holds {found}. Choose a column of"
            " numbers, texts, times or durations."
        ) from None
    return frame.iloc[[*order, *(row for row in range(len(frame)) if row not in values)]]


def best_first(results: Results[Any]) -> tuple[pd.DataFrame, str | None]:
    """Return the table with the best rows first, and by which column; None: in item order."""
    frame = results.to_frame()
    if (trials := results._trials) is not None:
        order = trials.ranked()
        rest = (item for item in range(len(frame)) if item not in order)
        return frame.iloc[[*order, *rest]], trials.score_column
    metric = leading_metric(results)
    if metric is None:
        return frame, None
    return ranked(frame, f"-{metric}" if direction(metric) == "max" else metric), metric


def leading_metric(results: Results[Any]) -> str | None:
    """Return the first column of values with numbers in it whose name tells the direction."""
    from raypool.views.drawing import spread

    frame = results.to_frame()
    others = {*results._configs(), *RUN_COLUMNS}
    values = frame[[name for name in frame if name not in others]]
    for column in spread(values, map(str, values)):
        with contextlib.suppress(InvalidValueError):  # the name does not tell
            direction(column)
            if numbers_in(values, column):
                return column
    return None


def scores_of(results: Results[Any]) -> tuple[str | None, dict[int, Any]]:
    """Return a metric, and its finite numbers by finished item, the best first.

    The metric is that of the search, else the leading one; without one, the last report of the
    first whose name tells the direction.
    """
    if (trials := results._trials) is not None:
        return trials.score_column, trials.ranked()
    frame, name = results.to_frame(), leading_metric(results)
    metric, scores = name, {} if name is None else numbers_in(frame, name)
    if name is None:
        last = results._last_reports()
        items = list(map(int, last.index))
        for column in last.columns[2:]:  # after time and attempt
            with contextlib.suppress(InvalidValueError):  # the name does not tell
                direction(column)
                scores = {items[row]: value for row, value in numbers_in(last, column).items()}
                name, metric = column, f"last {column}"
            if scores:
                break
    is_finished = (frame["status"] == "finished").to_numpy()
    scores = {item: score for item, score in scores.items() if is_finished[item]}
    if name is None or not scores:
        return None, {}
    order = sorted(scores, key=scores.__getitem__, reverse=direction(name) == "max")
    return metric, {item: scores[item] for item in order}


def direction(column: str) -> Literal["min", "max"]:
    """Return, by a metric's name, whether small or large numbers are good.

    Raises:
        InvalidValueError: The name does not say.

    Example:
        >>> direction("val_loss"), direction("result_score"), direction("testAccuracy")
        ('min', 'max', 'max')
    """
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", column)}
    is_small = not words.isdisjoint({"loss", "error", "mse", "rmse", "mae", "perplexity"})
    is_large = not words.isdisjoint({"accuracy", "acc", "auc", "score"})
    # scikit-learn's neg_log_loss is the better the larger it is
    if is_small == is_large or "neg" in words:
        raise InvalidValueError(
            f"The name {column!r} does not say whether small or large numbers are good. Specify"
            " mode='min' or mode='max'."
        )
    return "min" if is_small else "max"


def _is_finite(value: Any) -> bool:
    """Whether this number can be the best of several."""
    from raypool.views.words import is_real

    if isinstance(value, Decimal):
        return value.is_finite()  # a Decimal is no Real
    return is_real(value) and -math.inf < value < math.inf  # not `isfinite`: a huge int is no float


def _restored(  # noqa: PLR0913, PLR0917 - a pickle has them by position
    items: list[Any],
    values: list[Any],
    rows: list[Row],
    errors: dict[int, BaseException],
    feed: Feed,
    misses: Sequence[Miss],
    diaries: Sequence[str],
    name: str,
    gpus: Sequence[GpuSample],
    calls: Sequence[dict[str, Any]],
    trials: Trials | None,
) -> Results[Any]:
    return Results(
        items,
        values,
        lambda: rows,
        errors,
        lambda: feed,
        lambda: list(misses),
        diaries.__getitem__,
        name,
        lambda: list(gpus),
        lambda: list(calls),
        lambda _: None,
        lambda: trials,
    )


def run_name(function: str, folder: Path | None) -> str:
    """Return the name of a run, for people: its function, and the folder that keeps it."""
    return function if folder is None else f"{function} in {folder.name}"


class Diaries(Sequence[str]):
    """The output of each item of a loop; joined when somebody reads it."""

    def __init__(self, size: int, get: Callable[[int], str]) -> None:
        self._numbers = range(size)
        self._get = get

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        number = self._numbers[index]
        return (
            self._get(number) if isinstance(number, int) else [self._get(each) for each in number]
        )

    def __repr__(self) -> str:
        return f"<Diaries of {len(self)} items>"


def _columns(
    entries: Sequence[Any], single: str, taken: set[str], prefix: str, are_there: Sequence[bool]
) -> dict[str, list[Any]]:
    """Spread entries over columns by key, with empty cells for those that are missing."""
    pairs = list(zip(entries, are_there, strict=True))
    rows = [fields_of(entry) if is_there else {} for entry, is_there in pairs]
    known = [row or {} for row in rows]
    columns: dict[str, list[Any]] = {}
    keys = dict.fromkeys(itertools.chain.from_iterable(known))
    renamed: dict[str, str] = {}
    for key in keys:
        own = column_name(key)
        if own in taken and own not in renamed:
            others = {*taken, *map(column_name, keys), *renamed.values()}
            renamed[own] = _free(own, others, prefix)
        name = renamed.get(own, own)
        earlier = columns.get(name, itertools.repeat(None))  # two keys, such as 1 and "1"
        columns[name] = [row.get(key, cell) for row, cell in zip(known, earlier, strict=False)]
    odd = [entry if row is None else None for entry, row in zip(entries, rows, strict=True)]
    is_plain = not keys and (None in rows or not any(are_there))
    if is_plain or any(entry is not None for entry in odd):
        columns[_free(single, {*taken, *columns}, prefix)] = odd
    return columns


def _free(name: str, taken: Collection[str], prefix: str) -> str:
    while name in taken:
        name = prefix + name
    return name
