"""Values of the user's as cells of a table on a page: plain numbers and short texts, whatever they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from raypool.tables import fields_of
from raypool.views.words import describe_item, number_in, one_line

if TYPE_CHECKING:
    import pandas as pd

Cell: TypeAlias = "bool | int | float | str | None"

PLAIN = frozenset({int, float, str, bool, type(None)})
"""Types of which it is known at once that they are no mappings."""

MISSING = ("NoneType", "NAType", "NaTType")
"""Types whose values say that there is none: Python's and pandas'."""

MAX_TEXT = 300
"""A longer text is cut."""

MAX_EXACT = 2**53
"""Beyond this, JavaScript's numbers leave whole ones out."""

MAX_KEYS = 24
"""Configurations within a configuration are spread over columns of their own up to so many keys."""


def number_column(taken: Collection[str]) -> str:
    """Return what to call the column with the numbers of items: "index", unless that is one of the names that are taken.

    Example:
        >>> number_column(["lr"]), number_column(["lr", "index"])
        ('index', 'item number')
    """
    names = itertools.chain(("index", "item number"), map("item number {}".format, itertools.count(2)))
    return next(name for name in names if name not in taken)


def cell(value: Any) -> Cell:
    """Return what to show of a value.

    Example:
        >>> import numpy as np
        >>> [cell(value) for value in (3, 0.5, np.float32(2), np.array(7), True, None, float("nan"), float("inf"), 10**30)]
        [3, 0.5, 2.0, 7, True, None, None, 'inf', '1000000000000000000000000000000']
        >>> cell({"lr": 0.1}), cell([1, 2]), cell(b"raw")
        ('lr=0.1', '[1, 2]', "b'raw'")
    """
    if isinstance(value, str):
        return _cut(value)
    if type(value).__name__ in MISSING:
        return None
    value = number_in(value)
    if isinstance(value, bool):
        return value
    return _number(value) if isinstance(value, (int, float)) else describe_item(value)


def short(value: Any) -> Cell:
    """Return a cell whose number has eight digits: nobody reads more, and they would be most of a page.

    Example:
        >>> short(1 / 3), short(7), short("a")
        (0.33333333, 7, 'a')
    """
    if type(value) is float and value - value == 0:  # most values are: neither NaN nor infinite
        return float(f"{value:.8g}")
    shown = cell(value)
    return float(f"{shown:.8g}") if isinstance(shown, float) else shown


def _number(value: int | float) -> Cell:
    if isinstance(value, int):
        return int(value) if abs(value) <= MAX_EXACT else describe_item(int(value))
    if math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else str(float(value))


def _cut(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}[...]"


def columns(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Cell]]:
    """Return columns of a table as cells, spread as by `spread`.

    Example:
        >>> import pandas as pd
        >>> columns(pd.DataFrame({"x": [1, 2], "optimizer": [{"lr": 0.1}, {"lr": 0.2, "name": "adam"}]}), ["x", "optimizer"])
        {'x': [1, 2], 'optimizer.lr': [0.1, 0.2], 'optimizer.name': [None, 'adam']}
    """
    return {key: [short(value) for value in values] for key, values in spread(frame, names).items()}


def spread(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of columns of a table; where all of one have fields (see `fields_of`), a column for each field.

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
    if depth and any(is_given) and all(given or cell(value) is None for given, value in zip(is_given, values, strict=True)):
        rows = [{str(key): entry for key, entry in (field or {}).items()} for field in fields]
        keys = dict.fromkeys(key for row in rows for key in row)
        if keys and len(keys) <= MAX_KEYS:
            for key in keys:
                yield from _spread(f"{name}.{key}", [row.get(key) for row in rows], depth - 1)
            return
    yield name, values


def is_numeric(values: Iterable[Cell]) -> bool:
    """Whether there are numbers, and nothing else, in a column.

    Example:
        >>> is_numeric([1, None, 0.5]), is_numeric([True]), is_numeric([1, "inf"]), is_numeric([None])
        (True, False, False, False)
    """
    there = [value for value in values if value is not None]
    return bool(there) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in there)
