"""Data for a loop's figure and report: workers' timeline, table cells and learning curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from raypool.channel.feed import MAX_EXACT, fields_of
from raypool.views.words import describe_item, duration, number_in, one_line

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

T = TypeVar("T")


# --- timeline of workers --------------------------------------------------------------------------
#
# It is made from the table of attempts (`Results.attempts`). The time axis begins with the first
# attempt; pauses between calls with one folder are left out.


COLORS = {
    "finished": "#2a9d8f",
    "failed": "#d1495b",
    "lost": "#8d5a97",
    "retried": "#edae49",
    "cancelled": "#8d99ae",
}
"""The statuses of attempts in legend order, with colors that color-blind people can tell apart."""

PALETTE = (
    *("#2a9d8f", "#d1495b", "#3d6fb6", "#edae49", "#8d5a97"),
    *("#6a994e", "#c2703d", "#1b9aaa", "#a44a7f", "#7f7f7f"),
)
"""The colors of lines that differ in what is not a number."""


class TimelineRow(NamedTuple):
    """A worker: `wall_s` is the duration of its calls, `busy_s` the part with work."""

    label: str
    worker: int
    gpu: int | None
    host: str
    num_items: int
    num_failed: int
    num_lost: int
    num_attempts: int
    wall_s: float
    busy_s: float

    @property
    def idle_s(self) -> float:
        """The time without work [s]."""
        return max(self.wall_s - self.busy_s, 0.0)

    @property
    def idle_share(self) -> float:
        """The share of the time without work, 0 to 1."""
        return self.idle_s / self.wall_s if self.wall_s > 0 else 0.0


class Timeline(NamedTuple):
    """The attempts of all workers on one time axis.

    `calls`: the start of each call with attempts on it, and its first and last time (Unix time
    [s]), by the number of the run. `lanes`: the workers, by host and number. `attempts`: those of
    known time, with the additional columns `lane` (a position in `lanes`), `start_s` and `end_s`
    (on the time axis). `num_untimed`: the number of others. `breaks_s`: the starts of further
    calls. `wall_s`: the length of the axis. `item_s`: the sum of the durations of attempts with an
    outcome.
    """

    calls: Mapping[int, tuple[float, float, float]]
    lanes: list[TimelineRow]
    attempts: pd.DataFrame
    num_untimed: int
    breaks_s: list[float]
    wall_s: float
    item_s: float

    @property
    def speed_up(self) -> float:
        """The work done, relative to one busy worker."""
        return self.item_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def efficiency(self) -> float:
        """The speed-up per worker, up to 1."""
        return self.speed_up / len(self.lanes) if self.lanes else 0.0

    @property
    def idle_s(self) -> float:
        """All workers' time without work [s]."""
        return sum(lane.idle_s for lane in self.lanes)

    @property
    def idle_share(self) -> float:
        """The share of all workers' time without work, 0 to 1."""
        wall_s = sum(lane.wall_s for lane in self.lanes)
        return self.idle_s / wall_s if wall_s > 0 else 0.0


def plan(attempts: pd.DataFrame) -> Timeline:
    """Return the timeline of a table of attempts.

    Example:
        >>> import pandas as pd
        >>> attempts = pd.DataFrame({
        ...     "item": [0, 1, 2], "status": ["finished"] * 3, "run": [1] * 3,
        ...     "started_at": pd.to_datetime([100, 100, 101], unit="s", utc=True),
        ...     "duration_s": [1.0, 2.0, 0.5],
        ...     "worker": [0, 1, 0], "gpu": [None] * 3, "host": ["lab-3"] * 3,
        ... })
        >>> shown = plan(attempts)
        >>> [(lane.label, lane.busy_s, lane.idle_s) for lane in shown.lanes]
        [('worker 0', 1.5, 0.5), ('worker 1', 2.0, 0.0)]
        >>> shown.wall_s, shown.speed_up
        (2.0, 1.75)
    """
    import pandas as pd

    is_timed = attempts[["started_at", "duration_s", "worker"]].notna().all(axis=1)
    timed = attempts[is_timed].copy()
    timed["host"] = timed["host"].fillna("")  # groups leave out missing keys
    epoch = pd.Timestamp(0, tz="UTC")
    timed["started_at"] = (timed["started_at"] - epoch).dt.total_seconds()
    timed["duration_s"] = timed["duration_s"].clip(lower=0.0)
    calls = (
        timed.assign(end=timed["started_at"] + timed["duration_s"])
        .groupby("run")
        .agg(first=("started_at", "min"), last=("end", "max"))
    )
    calls["wall_s"] = calls["last"] - calls["first"]
    calls["offset_s"] = calls["wall_s"].cumsum() - calls["wall_s"]
    shift = timed["run"].map(calls["offset_s"] - calls["first"])
    timed["start_s"] = (timed["started_at"] + shift).astype(float)
    timed = timed.sort_values(["host", "worker", "start_s"], kind="stable")
    ends_s = timed["start_s"] + timed["duration_s"]
    # A worker takes starts from the wall clock and durations from a steady one, which do not agree
    # to the microsecond, so an attempt ends no later than the worker's next one starts. Those
    # without an outcome have the driver's times, and others may lie within them.
    own = timed[timed["status"].isin(["finished", "failed"])]
    next_s = own.groupby(["host", "worker"], sort=False)["start_s"].shift(-1)
    timed["end_s"] = ends_s.where(~(ends_s > next_s.reindex(timed.index)), next_s)
    by_worker = timed.groupby(["host", "worker"], sort=False)
    groups: list[tuple[Any, pd.DataFrame]] = list(by_worker)
    is_one_host = len({host for (host, _), _ in groups}) <= 1
    timed["lane"] = by_worker.ngroup()
    lanes = [
        _lane(str(host), int(worker), rows, calls["wall_s"], is_one_host)
        for (host, worker), rows in groups
    ]
    breaks_s = calls["offset_s"].iloc[1:].astype(float).tolist()
    spans = dict(zip(calls.index, calls[["offset_s", "first", "last"]].to_numpy(), strict=True))
    wall_s, item_s = float(calls["wall_s"].sum()), float(own["duration_s"].sum())
    return Timeline(spans, lanes, timed, int((~is_timed).sum()), breaks_s, wall_s, item_s)


def _lane(
    host: str, worker: int, rows: pd.DataFrame, walls_s: pd.Series[float], is_one_host: bool
) -> TimelineRow:
    gpus = rows["gpu"].dropna()
    gpu = int(gpus.iloc[-1]) if len(gpus) else None
    label = f"worker {worker}" if gpu is None else f"worker {worker}, GPU {gpu}"
    return TimelineRow(
        label if is_one_host else f"{host}: {label}",
        worker,
        gpu,
        host,
        num_items=int(rows["item"].nunique()),
        num_failed=int((rows["status"] == "failed").sum()),
        num_lost=int((rows["status"] == "lost").sum()),
        num_attempts=len(rows),
        wall_s=float(walls_s[rows["run"].unique()].sum()),
        busy_s=covered_s(rows["start_s"].to_numpy(), rows["end_s"].to_numpy()),
    )


def covered_s(
    starts: np.ndarray[tuple[int], np.dtype[np.float64]],
    ends: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> float:
    """Return the time covered by intervals [s], which are sorted by their starts.

    Example:
        >>> import numpy as np
        >>> covered_s(np.array([0.0, 1.0, 5.0]), np.array([3.0, 2.0, 6.0]))
        4.0
    """
    import numpy as np

    if not len(starts):
        return 0.0
    before = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
    return float(np.clip(ends - np.maximum(starts, before), 0.0, None).sum())


def merged(attempts: pd.DataFrame, tick_s: float) -> pd.DataFrame:
    """Return bars for a plan's attempts: short ones of a worker in a row share one.

    A bar has the columns of its first attempt, `end_s` of the last, and `count`.

    Args:
        attempts: A plan's attempts.
        tick_s: The time below which attempts and gaps are short [s].

    Example:
        >>> import pandas as pd
        >>> bars = merged(pd.DataFrame({
        ...     "lane": 0, "status": "finished",
        ...     "start_s": [0.0, 0.1, 0.2, 5.0], "end_s": [0.1, 0.2, 0.3, 9.0],
        ... }), tick_s=1.0)
        >>> bars[["start_s", "end_s", "count"]].values.tolist()
        [[0.0, 0.3, 3.0], [5.0, 9.0, 1.0]]
    """
    is_short = (attempts["end_s"] - attempts["start_s"]) < tick_s
    follows = (
        is_short
        & is_short.shift(fill_value=False)
        & (attempts["lane"] == attempts["lane"].shift())
        & (attempts["status"] == attempts["status"].shift())
        & (attempts["start_s"] - attempts["end_s"].shift() < tick_s)
    )
    groups = attempts.groupby((~follows).cumsum().to_numpy())
    bars = attempts[~follows].copy()
    bars["end_s"] = groups["end_s"].max().to_numpy()
    bars["count"] = groups.size().to_numpy()
    return bars


def at_once(attempts: pd.DataFrame, num_points: int) -> tuple[list[float], list[float]]:
    """Return times [s], and from each on the number of a plan's attempts that run at once.

    With more changes than `num_points`, these are means over equal parts of the time.

    Example:
        >>> import pandas as pd
        >>> times = {"start_s": [0.0, 1.0, 0.0], "end_s": [1.0, 2.0, 2.0]}
        >>> at_once(pd.DataFrame({"lane": [0, 0, 1], **times}), num_points=100)
        ([0.0, 1.0, 2.0], [2.0, 2.0, 0.0])
    """
    import numpy as np

    # a worker counts once, also where a lost attempt lies over others
    before = attempts.groupby("lane")["end_s"].cummax().groupby(attempts["lane"]).shift()
    starts = attempts["start_s"].clip(lower=before.fillna(-np.inf)).to_numpy()
    ends = np.maximum(attempts["end_s"].to_numpy(), starts)
    times, positions = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    changes = np.zeros(len(times))
    np.add.at(changes, positions, np.repeat([1.0, -1.0], len(starts)))
    counts = changes.cumsum()
    if len(times) > num_points:
        edges = np.linspace(times[0], times[-1], num_points + 1)
        sums = np.concatenate([[0.0], (counts[:-1] * np.diff(times)).cumsum()])
        counts = np.append(np.diff(np.interp(edges, times, sums)) / np.diff(edges), 0.0)
        times = edges
    return times.tolist(), counts.tolist()


def unit_of(wall_s: float) -> tuple[float, str]:
    """Return the unit for a time axis of this length, as seconds and symbol.

    Example:
        >>> unit_of(0.2), unit_of(90), unit_of(1000), unit_of(20_000)
        ((0.001, 'ms'), (1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    units = ((1.0, 0.001, "ms"), (600.0, 1.0, "s"), (18_000.0, 60.0, "min"))
    for limit_s, seconds, symbol in units:
        if wall_s < limit_s:
            return seconds, symbol
    return 3600.0, "h"


def took(seconds: float) -> str:
    """Return a duration as text, however short.

    Example:
        >>> took(0.00042), took(0.25), took(8.26), took(75)
        ('0.42 ms', '250 ms', '8.3 s', '1:15')
    """
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.9995 else duration(seconds, 1)


# --- values as cells: plain numbers and short texts -----------------------------------------------


Cell: TypeAlias = "bool | int | float | str | None"

PLAIN = frozenset({int, float, str, bool, type(None)})
"""Types without fields."""

MISSING = ("NoneType", "NAType", "NaTType")
"""The types of missing values in Python and pandas."""

MAX_TEXT = 300
"""The length at which texts are cut [characters]."""

INFINITE = ("inf", "-inf")
"""The cells of infinite numbers."""

MAX_KEYS = 24
"""The most columns for the keys of nested configurations."""


def number_column(taken: Collection[str]) -> str:
    """Return a name for the column of item numbers: "index", if it is not taken.

    Example:
        >>> number_column(["lr"]), number_column(["lr", "index"])
        ('index', 'item number')
    """
    names = itertools.chain(
        ("index", "item number"), map("item number {}".format, itertools.count(2))
    )
    return next(name for name in names if name not in taken)


def cell(value: Any) -> Cell:
    """Return the cell for a value.

    Example:
        >>> import numpy as np
        >>> [cell(value) for value in (3, 0.5, np.float32(2), np.array(7), True, None)]
        [3, 0.5, 2.0, 7, True, None]
        >>> [cell(value) for value in (float("nan"), float("inf"), 10**30)]
        [None, 'inf', '1000000000000000000000000000000']
        >>> cell({"lr": 0.1}), cell([1, 2]), cell(b"raw")
        ('lr=0.1', '[1, 2]', "b'raw'")
    """
    if isinstance(value, str):
        text = one_line(value)
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}[...]"
    if type(value).__name__ in MISSING:  # by name: pandas need not be imported
        return None
    value = number_in(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= MAX_EXACT:
        return int(value)
    if isinstance(value, float):  # JSON has neither NaN nor infinity
        value = float(value)
        return None if math.isnan(value) else value if math.isfinite(value) else str(value)
    return describe_item(int(value) if isinstance(value, int) else value)


def short(value: Any) -> Cell:
    """Return a cell with eight digits at most: more would be most of a report.

    Example:
        >>> short(1 / 3), short(7), short("a")
        (0.33333333, 7, 'a')
    """
    if type(value) is float and value - value == 0:  # most values are: neither NaN nor infinite
        return float(f"{value:.8g}")
    shown = cell(value)
    return float(f"{shown:.8g}") if isinstance(shown, float) else shown


def columns(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Cell]]:
    """Return columns of a table as cells, spread as by `spread`.

    Example:
        >>> import pandas as pd
        >>> optimizers = [{"lr": 0.1}, {"lr": 0.2, "name": "adam"}]
        >>> columns(pd.DataFrame({"x": [1, 2], "optimizer": optimizers}), ["x", "optimizer"])
        {'x': [1, 2], 'optimizer.lr': [0.1, 0.2], 'optimizer.name': [None, 'adam']}
    """
    return {key: [short(value) for value in values] for key, values in spread(frame, names).items()}


def spread(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return columns of a table, with one for each field where all values have some.

    Example:
        >>> import pandas as pd
        >>> spread(pd.DataFrame({"acc": [{"train": 0.9, "val": 0.8}, None]}), ["acc"])
        {'acc.train': [0.9, None], 'acc.val': [0.8, None]}
    """
    columns: dict[str, list[Any]] = {}
    for name in names:
        for key, values in _spread(str(name), frame[name].tolist(), depth=3):
            columns.setdefault(key, values)
    return columns


def _spread(name: str, values: list[Any], depth: int) -> Iterable[tuple[str, list[Any]]]:
    fields = [None if type(value) in PLAIN else fields_of(value) for value in values]
    is_given = [field is not None for field in fields]
    if (
        depth
        and any(is_given)
        and all(given or cell(value) is None for given, value in zip(is_given, values, strict=True))
    ):
        rows = [{str(key): entry for key, entry in (field or {}).items()} for field in fields]
        keys = dict.fromkeys(key for row in rows for key in row)
        if keys and len(keys) <= MAX_KEYS:
            for key in keys:
                yield from _spread(f"{name}.{key}", [row.get(key) for row in rows], depth - 1)
            return
    yield name, values


def is_numeric(values: Iterable[Cell]) -> bool:
    """Whether a column has numbers, infinite ones among them, and nothing else.

    Example:
        >>> is_numeric([1, None, 0.5]), is_numeric([1, "inf", "-inf"])
        (True, True)
        >>> is_numeric([True]), is_numeric([1, "info"]), is_numeric(["inf"]), is_numeric([None])
        (False, False, False, False)
    """
    there = [value for value in values if value is not None and value not in INFINITE]
    return bool(there) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in there
    )


# --- learning curves, reduced for a report --------------------------------------------------------


MAX_CURVES = 200
"""The most curves in a report."""

MAX_BEST_CURVES = 100
"""How many of these are of the best items, if there is a choice."""

MAX_POINTS = 200
"""The most points of a curve."""

MAX_METRICS = 20
"""The most metrics to choose from."""

STEPS = ("step", "global_step", "epoch", "iteration", "batch")
"""Usual names of metrics that count reports."""


def curves_of(
    metrics: pd.DataFrame, best_first: Sequence[int] = (), best_by: str | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return curves as the report draws them, and notes on those left out.

    `items` has the number of each curve's item, `starts` its begin in the `columns` of all metrics
    (and the last one's end). An empty cell separates two attempts at an item. The first
    `num_ranked` curves are of items in `best_first`, in this order; the others follow by number.
    The metric `best_by` is not left out.

    Example:
        >>> import pandas as pd
        >>> steps = {"epoch": [0, 1, 0], "loss": [3.0, 2.0, 4.0]}
        >>> metrics = pd.DataFrame({"time": 0.0, "item": [0, 0, 1], "attempt": 1, **steps})
        >>> curves, _ = curves_of(metrics)
        >>> curves["items"], curves["starts"], curves["columns"]["loss"]
        ([0, 1], [0, 2, 3], [3.0, 2.0, 4.0])
        >>> curves["metrics"], curves["steps"]
        (['loss'], ['epoch'])
        >>> curves_of(metrics, best_first=[1, 0])[0]["items"]
        [1, 0]
    """
    numeric = [name for name in map(str, reported_in(metrics)) if _has_numbers(metrics[name])]
    there = {name: metrics[name].tolist() for name in numeric}
    attempts = metrics["attempt"].tolist()
    steps = [name for name in STEPS if name in numeric]
    chosen = [name for name in numeric if name not in steps]
    notes: list[str] = []
    if len(chosen) > MAX_METRICS:
        notes.append(f"{MAX_METRICS} of {len(chosen):,} metrics can be chosen.")
        chosen = _with_room(chosen, best_by)
    columns: dict[str, list[Cell]] = {name: [] for name in [*steps, *chosen]}
    items, starts = [], [0]
    indices: dict[Any, Any] = metrics.groupby("item").indices if chosen else {}
    groups = {int(item): rows for item, rows in indices.items()}
    ranked = [item for item in best_first if item in groups]
    order = list(dict.fromkeys([*ranked, *sorted(groups)]))
    num_best = min(MAX_BEST_CURVES, len(ranked)) if len(order) > MAX_CURVES else 0
    drawn = order[:num_best] + evenly(order[num_best:], MAX_CURVES - num_best)
    is_thinned = False
    for item in drawn:
        rows = [int(row) for row in groups[item]]
        kept = evenly(rows, MAX_POINTS)
        is_thinned = is_thinned or len(kept) < len(rows)
        previous = None
        for row in kept:
            is_again = previous is not None and attempts[row] != attempts[previous]
            previous = row
            for name, column in columns.items():
                value = short(there[name][row])
                column += [None, value] if is_again else [value]
        items.append(item)
        starts.append(len(next(iter(columns.values()))))
    if len(drawn) < len(groups):
        chosen_how = f"those of the {num_best} best, and others" if num_best else "they are"
        notes.append(
            f"This page has the curves of {len(drawn):,} of {len(groups):,} items: {chosen_how}"
            " chosen evenly."
        )
    if is_thinned:
        notes.append(f"Longer curves are thinned evenly to {MAX_POINTS} points.")
    num_ranked = len(set(ranked).intersection(drawn))
    curves: dict[str, Any] = {"items": items, "starts": starts, "columns": columns}
    curves |= {"metrics": chosen, "steps": steps, "num_ranked": num_ranked}
    return curves, ({"curves": " ".join(notes)} if notes else {})


def _has_numbers(column: pd.Series[Any]) -> bool:
    # of most columns, pandas knows it without a look at each value
    if column.dtype.kind in "iuf":
        return bool(column.notna().any())
    return is_numeric([cell(value) for value in column.tolist()])


def evenly(entries: list[T], most: int) -> list[T]:
    """Return at most `most` entries, with the first and the last.

    Example:
        >>> evenly([1, 2, 3, 4, 5], 3)
        [1, 3, 5]
    """
    if len(entries) <= most:
        return entries
    return [entries[round(position * (len(entries) - 1) / (most - 1))] for position in range(most)]


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return positions of values: the first, the last, and in equal parts the extremes.

    Args:
        values: The values.
        most: The greatest number of positions, at least 4.

    Example:
        >>> thinned([0, 9, 1, 1, -9, 1, 2], 4)
        [0, 1, 4, 6]
    """
    inner = len(values) - 2
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    num_parts = (most - 2) // 2
    for part in range(num_parts):
        places = range(1 + part * inner // num_parts, 1 + (part + 1) * inner // num_parts)
        kept |= {extreme(places, key=values.__getitem__) for extreme in (min, max)}
    return sorted(kept)


def reported_in(metrics: pd.DataFrame) -> list[str]:
    """Return the names of the metrics in a table of reports."""
    return [name for name in metrics.columns if name not in ("time", "item", "attempt")]


def _with_room(names: list[str], best_by: str | None) -> list[str]:
    """Return the metrics for which a page has room; if not for all, `best_by` is the first."""
    if len(names) > MAX_METRICS and best_by in names:
        names = [best_by, *(name for name in names if name != best_by)]
    return names[:MAX_METRICS]


def last_of(
    last: pd.DataFrame, num_items: int, best_by: str | None = None
) -> Iterator[tuple[str, list[Cell]]]:
    """Yield numeric metrics, each with the last value of each item; `best_by` is not left out."""
    names = reported_in(last)
    if not names or not num_items:
        return
    last = last.reindex(range(num_items))
    for name in _with_room(names, best_by):
        if _has_numbers(last[name]):
            yield str(name), [short(value) for value in last[name].tolist()]
