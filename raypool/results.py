"""What `parfor` returns: the values in order, and everything known of how they came about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from raypool.errors import InvalidValueError
from raypool.feed import Feed
from raypool.reasons import CANCELLED, reason_of

if TYPE_CHECKING:
    import pandas as pd

RUN_COLUMNS = ("status", "duration_s", "started_at", "worker", "gpu", "attempts", "peak_memory_bytes", "reason", "error")
"""Columns of `Results.to_frame` that raypool adds."""

STATUSES = ("finished", "failed", "cancelled", "missing")


@dataclasses.dataclass(slots=True)
class Row:
    """What is known of one item.

    `status` is "finished", "failed", or "cancelled" where it never got an outcome; "missing" where a journal knows the item and
    has no outcome of it that can be had back.
    """

    status: str = "cancelled"
    duration_s: float | None = None
    started_at: float | None = None
    worker: int | None = None
    gpu: int | None = None
    attempts: int = 0
    peak_memory_bytes: int | None = None


class Results(Sequence[Any]):
    """The return values of a loop in the order of its items, and a table of them.

    As a sequence it holds the values; None where an item failed (`errors` says why) or never ran.

    Example:
        >>> from raypool import parpool
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     results = pool.parfor(lambda config: {"score": -config["x"]}, [{"x": 1}, {"x": 2}])
        >>> results[1]
        {'score': -2}
        >>> results.to_frame()[["x", "score", "status"]].to_dict("list")
        {'x': [1, 2], 'score': [-1, -2], 'status': ['finished', 'finished']}
        >>> int(results.best("score")["x"])
        1
    """

    def __init__(
        self,
        items: Sequence[Any],
        values: list[Any],
        make_rows: Callable[[], list[Row]],
        errors: dict[int, BaseException],
        get_feed: Callable[[], Feed] = Feed,
    ) -> None:
        self._items = items
        self._values = values
        self._make_rows = make_rows
        self._errors = errors
        self._get_feed = get_feed

    @functools.cached_property
    def _rows(self) -> list[Row]:
        return self._make_rows()

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Results):
            return self._values == other._values
        return self._values == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _restored, (list(self._items), self._values, self._rows, self._errors, self._get_feed())

    def __repr__(self) -> str:
        counts = {status: sum(row.status == status for row in self._rows) for status in STATUSES}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"<Results of {len(self)} items: {said or 'none'}>"

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions of the items that failed, by item number."""
        return dict(sorted(self._errors.items()))

    @property
    def metrics(self) -> pd.DataFrame:
        """What the items have reported while they ran (`raypool.report`).

        A row for each report, in the order of the items and then of the reports: `time` (UTC), `item` (its number), `attempt`,
        then the metrics in the order in which they first appear. A metric that is called like one of the first three is in
        "reported_NAME". An item that ran again after its worker was lost has the rows of both attempts.

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

    def to_frame(self) -> pd.DataFrame:
        """Return the table: one row an item, with its configuration, its values and how it ran.

        A dict or dataclass gives a column a key, anything else one column ("item", "value"). A key that a configuration and a
        value share appears as "result_KEY" for the value. Then come `status`, `duration_s` [s], `started_at` (Unix time [s]),
        `worker`, `gpu`, `attempts`, `peak_memory_bytes` (the most that its worker had of its GPU's memory while it ran, or while
        the short items ran that shared a call with it; empty if it had none), `reason` (None of what has finished; see
        `raypool.reasons.reason_of`) and `error` (the exception's type and text).
        """
        import pandas as pd

        taken = set(RUN_COLUMNS)
        configs = _columns(self._items, "item", taken, "item_")
        finished = [row.status == "finished" for row in self._rows]
        values = _columns(self._values, "value", taken | set(configs), "result_", finished)
        run: dict[str, Any] = {name: [getattr(row, name) for row in self._rows] for name in RUN_COLUMNS[:-2]}
        for name in ("worker", "gpu", "peak_memory_bytes"):
            run[name] = pd.array(run[name], dtype="Int64")
        run["reason"] = [self._reason(index) for index in range(len(self))]
        run["error"] = [self._described(index) for index in range(len(self))]
        return pd.DataFrame({**configs, **values, **run}, index=pd.RangeIndex(len(self), name="index"))

    def _reason(self, index: int) -> str | None:
        error = self._errors.get(index)
        if error is not None:
            return reason_of(error)
        return CANCELLED if self._rows[index].status == "cancelled" else None

    def _described(self, index: int) -> str | None:
        error = self._errors.get(index)
        if error is None:
            return None
        try:
            return f"{type(error).__name__}: {error}"
        except Exception:  # the user's own __str__
            return type(error).__name__

    def best(self, column: str, mode: Literal["min", "max"] = "max") -> pd.Series[Any]:
        """Return the row of the finished item with the largest (or smallest) value in a column; its `name` is the item's number.

        Raises:
            InvalidValueError: There is no such column, or no finished item has a value in it.
        """
        if mode not in ("min", "max"):
            raise InvalidValueError(f"mode={mode!r} is neither 'min' nor 'max'.")
        frame = self.to_frame()
        if column not in frame:
            raise InvalidValueError(f"There is no column {column!r}. There are: {', '.join(map(str, frame))}.")
        scores = frame.loc[frame["status"] == "finished", column].dropna()
        if scores.empty:
            raise InvalidValueError(f"No item has finished with a value in {column!r}.")
        scores = scores.infer_objects()
        position = int(scores.argmax() if mode == "max" else scores.argmin())
        return frame.iloc[int(scores.index[position])]


def _restored(items: list[Any], values: list[Any], rows: list[Row], errors: dict[int, BaseException], feed: Feed) -> Results:
    return Results(items, values, lambda: rows, errors, lambda: feed)


def _columns(
    entries: Sequence[Any], single: str, taken: set[str], prefix: str, wanted: Sequence[bool] | None = None
) -> dict[str, list[Any]]:
    """Spread entries over columns by key; those that are not `wanted` give empty cells."""
    rows = [_as_mapping(entry) if wanted is None or wanted[i] else {} for i, entry in enumerate(entries)]
    if any(row is None for row in rows):
        name = single if single not in taken else prefix + single
        return {name: [entry if wanted is None or wanted[i] else None for i, entry in enumerate(entries)]}
    keys = dict.fromkeys(str(key) for row in rows for key in row or {})
    cells = [{str(key): value for key, value in (row or {}).items()} for row in rows]
    return {(prefix + key if key in taken else key): [row.get(key) for row in cells] for key in keys}


def _as_mapping(entry: Any) -> Mapping[Any, Any] | None:
    if isinstance(entry, Mapping):
        return entry
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        return {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    return None
