"""What ran when on which worker, worked out from the table of attempts (`Results.attempts`): for the figure and the page.

Workers are told apart by their host and number. The time axis begins with the first attempt; where several calls had one folder,
the pauses between them are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.views.words import duration

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

COLOURS = {
    "finished": "#2a9d8f",
    "failed": "#d1495b",
    "lost": "#8d5a97",
    "retried": "#edae49",
    "cancelled": "#8d99ae",
}
"""The statuses of attempts, in the order in which a legend has them, told apart also by those who see few colours."""


class Lane(NamedTuple):
    """A worker over the whole run.

    `wall_s`: how long the calls took that it took part in. `busy_s`: how much of that it had something to do.
    """

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
        """How long it had nothing to do [s]."""
        return max(self.wall_s - self.busy_s, 0.0)

    @property
    def idle_share(self) -> float:
        """Which part of the time it had nothing to do, from 0 to 1."""
        return self.idle_s / self.wall_s if self.wall_s > 0 else 0.0


class Plan(NamedTuple):
    """Who did what when.

    `lanes`: the workers, by host and number. `attempts`: those of which the time is known, with the columns `lane` (which of
    them), `start_s` and `end_s` (on the time axis) beside their own. `num_untimed`: how many others there are. `breaks_s`: where
    on the time axis another call begins. `wall_s`: how long all took [s]. `item_s`: the sum of the durations of what
    gave an outcome [s].
    """

    lanes: list[Lane]
    attempts: pd.DataFrame
    num_untimed: int
    breaks_s: list[float]
    wall_s: float
    item_s: float

    @property
    def speed_up(self) -> float:
        """How many times as much was done as one worker would have done in this time."""
        return self.item_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def efficiency(self) -> float:
        """The speed-up for each worker, 1 if all of them had something to do all the time."""
        return self.speed_up / len(self.lanes) if self.lanes else 0.0

    @property
    def idle_s(self) -> float:
        """How long workers had nothing to do, all together [s]."""
        return sum(lane.idle_s for lane in self.lanes)

    @property
    def idle_share(self) -> float:
        """Which part of their time workers had nothing to do, from 0 to 1."""
        wall_s = sum(lane.wall_s for lane in self.lanes)
        return self.idle_s / wall_s if wall_s > 0 else 0.0


def plan(attempts: pd.DataFrame) -> Plan:
    """Return who did what when.

    Example:
        >>> import pandas as pd
        >>> attempts = pd.DataFrame({
        ...     "item": [0, 1, 2], "status": ["finished"] * 3, "started_at": [100.0, 100.0, 101.0], "duration_s": [1.0, 2.0, 0.5],
        ...     "worker": [0, 1, 0], "gpu": [None] * 3, "host": ["lab-3"] * 3, "run": [1] * 3,
        ... })
        >>> shown = plan(attempts)
        >>> [(lane.label, lane.busy_s, lane.idle_s) for lane in shown.lanes], shown.wall_s, shown.speed_up
        ([('worker 0', 1.5, 0.5), ('worker 1', 2.0, 0.0)], 2.0, 1.75)
    """
    is_timed = attempts["started_at"].notna() & attempts["duration_s"].notna() & attempts["worker"].notna()
    timed = attempts[is_timed].copy()
    timed["host"] = timed["host"].fillna("")
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
    timed["end_s"] = _ends_s(timed)
    groups: list[tuple[Any, pd.DataFrame]] = list(timed.groupby(["host", "worker"], sort=False))
    is_one_host = len({host for (host, _), _ in groups}) <= 1
    timed["lane"] = timed.groupby(["host", "worker"], sort=False).ngroup()
    lanes = [_lane(str(host), int(worker), rows, calls["wall_s"], is_one_host) for (host, worker), rows in groups]
    wall_s = float(calls["wall_s"].sum())
    item_s = float(timed.loc[timed["status"].isin(["finished", "failed"]), "duration_s"].sum())
    return Plan(lanes, timed, int((~is_timed).sum()), calls["offset_s"].iloc[1:].astype(float).tolist(), wall_s, item_s)


def _ends_s(timed: pd.DataFrame) -> pd.Series[float]:
    """Return when attempts ended, on the time axis: with an outcome no later than the next one on its worker began.

    A worker takes starts from the wall clock and durations from a steady one, which do not agree to the microsecond. Times of
    attempts without an outcome are the driver's, and may have other attempts within them.
    """
    ends_s = timed["start_s"] + timed["duration_s"]
    own = timed[timed["status"].isin(["finished", "failed"])]
    next_s = own.groupby(["host", "worker"], sort=False)["start_s"].shift(-1)
    return ends_s.where(~(ends_s > next_s.reindex(timed.index)), next_s)


def _lane(host: str, worker: int, rows: pd.DataFrame, walls_s: pd.Series[float], is_one_host: bool) -> Lane:
    gpus = rows["gpu"].dropna()
    gpu = int(gpus.iloc[-1]) if len(gpus) else None
    label = f"worker {worker}" if gpu is None else f"worker {worker}, GPU {gpu}"
    return Lane(
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


def covered_s(starts: np.ndarray[tuple[int], np.dtype[np.float64]], ends: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return how much of the time axis intervals cover that may overlap; they are in the order of their starts [s].

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
    """Return bars for attempts of a plan: those of a worker that are shorter than a tick and follow each other share one.

    Columns: those of the first attempt that a bar is for, `end_s` of the last, and `count`.

    Args:
        attempts: Of a plan.
        tick_s: What is shorter cannot be told apart [s].

    Example:
        >>> import pandas as pd
        >>> bars = merged(pd.DataFrame({
        ...     "lane": 0, "status": "finished", "start_s": [0.0, 0.1, 0.2, 5.0], "end_s": [0.1, 0.2, 0.3, 9.0],
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
    """Return how many attempts of a plan ran at once over time, one on each worker: from when on [s], and how many.

    Where that changes more often than `num_points`, the mean of each part of the time.

    Example:
        >>> import pandas as pd
        >>> plan = pd.DataFrame({"lane": [0, 0, 1], "start_s": [0.0, 1.0, 0.0], "end_s": [1.0, 2.0, 2.0]})
        >>> at_once(plan, num_points=100)
        ([0.0, 1.0, 2.0], [2.0, 2.0, 0.0])
    """
    import numpy as np

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
    """Return the unit for a time axis of this length: how many seconds it has, and its symbol.

    Example:
        >>> unit_of(0.2), unit_of(90), unit_of(1000), unit_of(20_000)
        ((0.001, 'ms'), (1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    for limit_s, seconds, symbol in ((1.0, 0.001, "ms"), (600.0, 1.0, "s"), (18_000.0, 60.0, "min")):
        if wall_s < limit_s:
            return seconds, symbol
    return 3600.0, "h"


def took(seconds: float) -> str:
    """Return how long something took, as people write it, however short.

    Example:
        >>> took(0.00042), took(0.25), took(8.26), took(75)
        ('0.42 ms', '250 ms', '8.3 s', '1:15')
    """
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.9995 else duration(seconds, 1)
