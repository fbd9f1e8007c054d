"""Learning curves: what items have reported, cut down to what a page can draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raypool.views.cells import Cell, cell, is_numeric, short

if TYPE_CHECKING:
    import pandas as pd

MAX_CURVES = 200
"""So many items have a curve; more could not be told apart."""

MAX_POINTS = 200
"""So many points of a curve are drawn."""

MAX_METRICS = 20
"""So many metrics can be chosen from: those that come first."""

STEPS = ("step", "global_step", "epoch", "iteration", "batch")
"""What reports are usually counted by."""


def curves_of(metrics: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """Return curves as the page draws them, and what is to be said of what is not drawn.

    The curves are in `items` (the number of each), `starts` (where each of them begins in the columns, and where the last one
    ends) and `columns` (by metric). Between two attempts at an item all columns have an empty cell.

    Example:
        >>> import pandas as pd
        >>> metrics = pd.DataFrame({"time": 0.0, "item": [0, 0, 1], "attempt": 1, "epoch": [0, 1, 0], "loss": [3.0, 2.0, 4.0]})
        >>> curves, _ = curves_of(metrics)
        >>> curves["items"], curves["starts"], curves["columns"]["loss"], curves["metrics"], curves["steps"]
        ([0, 1], [0, 2, 3], [3.0, 2.0, 4.0], ['loss'], ['epoch'])
    """
    names = [str(name) for name in metrics.columns if name not in ("time", "item", "attempt")]
    numeric = [name for name in names if _has_numbers(metrics[name])]
    there = {name: metrics[name].tolist() for name in numeric}
    attempts = metrics["attempt"].tolist()
    steps = [name for name in STEPS if name in numeric]
    chosen = [name for name in numeric if name not in steps]
    notes: list[str] = []
    if len(chosen) > MAX_METRICS:
        notes.append(f"The first {MAX_METRICS} of {len(chosen):,} metrics can be chosen.")
        chosen = chosen[:MAX_METRICS]
    columns: dict[str, list[Cell]] = {name: [] for name in [*steps, *chosen]}
    items, starts = [], [0]
    indices: dict[Any, Any] = metrics.groupby("item").indices if chosen else {}
    groups = {int(item): rows for item, rows in indices.items()}
    drawn = _evenly(sorted(groups), MAX_CURVES)
    is_thinned = False
    for item in drawn:
        rows = [int(row) for row in groups[item]]
        kept = _evenly(rows, MAX_POINTS)
        is_thinned = is_thinned or len(kept) < len(rows)
        _add_curve(columns, there, kept, attempts)
        items.append(item)
        starts.append(len(next(iter(columns.values()))))
    if len(drawn) < len(groups):
        notes.append(f"Curves of {len(drawn):,} of {len(groups):,} items are drawn, chosen evenly by number.")
    if is_thinned:
        notes.append(f"Of longer curves {MAX_POINTS} points are drawn, chosen evenly.")
    curves = {"items": items, "starts": starts, "columns": columns, "metrics": chosen, "steps": steps}
    return curves, ({"curves": " ".join(notes)} if notes else {})


def _has_numbers(column: pd.Series[Any]) -> bool:
    """Whether there are numbers, and nothing else, in a column: pandas knows that of most without a look at each."""
    if column.dtype.kind in "iuf":
        return bool(column.notna().any())
    return is_numeric([cell(value) for value in column.tolist()])


def _add_curve(columns: dict[str, list[Cell]], there: dict[str, list[Any]], rows: list[int], attempts: list[int]) -> None:
    for position, row in enumerate(rows):
        is_again = position > 0 and attempts[row] != attempts[rows[position - 1]]
        for name, column in columns.items():
            value = short(there[name][row])
            column += [None, value] if is_again else [value]


def _evenly(entries: list[int], most: int) -> list[int]:
    """Return at most so many entries, the first and the last among them.

    Example:
        >>> _evenly([1, 2, 3, 4, 5], 3)
        [1, 3, 5]
    """
    if len(entries) <= most:
        return entries
    return [entries[round(position * (len(entries) - 1) / (most - 1))] for position in range(most)]


def last_of(metrics: pd.DataFrame, num_items: int) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the metrics with a number, each with the last value of it that each item has reported."""
    names = [name for name in metrics.columns if name not in ("time", "item", "attempt")]
    if not names or not num_items:
        return
    last = metrics.groupby("item")[names].last().reindex(range(num_items))
    for name in names[:MAX_METRICS]:
        if _has_numbers(last[name]):
            yield str(name), [short(value) for value in last[name].tolist()]
