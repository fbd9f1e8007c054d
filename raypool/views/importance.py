"""Hyperparameter importance: which fields of the items moved a metric, and how strongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.views.drawing import Cell, evenly, is_numeric

if TYPE_CHECKING:
    import pandas as pd

MIN_ITEMS = 20
"""With fewer finished items chance alone makes a field look important."""

MAX_ITEMS = 1000
"""The most items that are looked at; more take longer, and change little."""

NUM_FOLDS = 3
"""How often the forest is grown, each time on the items outside one of as many equal parts."""

NUM_TREES = 50

MIN_EXPLAINED = 0.1
"""A forest that explains less knows nothing of any field."""

MAX_FIELDS = 40
"""The most fields for a forest; each takes its time."""


class Importance(NamedTuple):
    """The importance of fields, the greatest first.

    `explained`: the share of the differences between items that a random forest predicts for items
    that it has not seen; `by_field` are then shares of what is lost when a field is shuffled. None:
    `by_field` are absolute rank correlations. If a forest explains next to nothing, it is empty.
    """

    by_field: list[tuple[str, float]]
    explained: float | None
    num_items: int


def importance_of(
    config: Mapping[str, Sequence[Cell]], scores: Mapping[int, Any]
) -> Importance | None:
    """Return the importance of fields for a metric; None if that would mean nothing.

    Both count by rank, so that one item that diverged does not outweigh all others. Fields with one
    value are left out, and texts that hardly two items share, such as names.

    Args:
        config: The fields, by name, with a cell for each item.
        scores: The finite numbers of items in the metric, by the item's number.

    Example:
        >>> config = {"seed": [0, 1] * 20, "gpu": [1] * 40, "lr": list(range(40))}
        >>> found = importance_of(config, {item: item**2 for item in range(40)})
        >>> [name for name, _ in found.by_field], found.num_items
        (['lr', 'seed'], 40)
    """
    import pandas as pd

    if len(scores) < MIN_ITEMS:
        return None
    items = evenly(sorted(scores), MAX_ITEMS)
    # ranked here: a number may be a huge integer or a Decimal
    ranks = {score: rank for rank, score in enumerate(sorted({scores[item] for item in items}))}
    target = pd.Series([ranks[scores[item]] for item in items]).rank()
    fields: dict[str, pd.Series[Any]] = {}
    texts: set[str] = set()
    for name, all_cells in config.items():
        cells = [all_cells[item] for item in items]
        if len(set(map(repr, cells))) < 2:
            continue
        if is_numeric(cells):
            fields[name] = pd.Series(cells, dtype=float).rank()  # trees ask for the order only
        elif len(set(map(str, cells))) <= len(items) / 2:
            fields[name] = pd.Series(pd.factorize(pd.Series(list(map(str, cells))))[0])
            texts.add(name)
    if not fields or target.nunique() < 2:
        return None
    table = pd.DataFrame(fields)
    explained = None
    if len(fields) <= MAX_FIELDS and find_spec("sklearn") is not None:
        weights, explained = _by_forest(table, target)
    else:
        # texts have no order: each counts as the mean rank of its items
        means = {name: target.groupby(table[name]).transform("mean") for name in texts}
        correlations = table.assign(**means).corrwith(target).abs()
        weights = correlations.fillna(0.0).tolist()  # NaN: one value is left
    if explained is not None and explained < MIN_EXPLAINED:
        return Importance([], explained, len(items))
    by_field = sorted(zip(fields, weights, strict=True), key=lambda entry: -entry[1])
    return Importance(by_field, explained, len(items))


def _by_forest(table: pd.DataFrame, target: pd.Series[float]) -> tuple[list[float], float]:
    """Return the shares of the fields in what a random forest explains, and how much that is."""
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import KFold

    x, y = table.to_numpy(float), target.to_numpy()
    explained, losses = [], []
    for seen, unseen in KFold(NUM_FOLDS, shuffle=True, random_state=0).split(x):
        forest = RandomForestRegressor(NUM_TREES, random_state=0).fit(x[seen], y[seen])
        explained.append(forest.score(x[unseen], y[unseen]))
        shuffled = permutation_importance(forest, x[unseen], y[unseen], n_repeats=3, random_state=0)
        losses.append(shuffled.importances_mean)
    loss = np.mean(losses, axis=0).clip(min=0.0)
    shares = loss / loss.sum() if loss.sum() > 0 else loss
    return shares.tolist(), max(float(np.mean(explained)), 0.0)
