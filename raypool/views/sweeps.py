"""The table of a sweep on a terminal, or as JSON.

::

    item  network  width     lr  accuracy  status    duration_s  worker  gpu
       0  mlp         32  0.001    0.9361  finished       1.204       0    0
       1  cnn         36  0.001         -  failed       0.01181       1    1
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from raypool.views.cells import number_column
from raypool.views.devices import is_missing
from raypool.views.words import describe_item, one_line

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 50
"""A longer table is shown in part: nobody reads it, and there are other ways to look."""

MOST_LETTERS = 40
"""What is longer is shown in part [characters]."""

LEFT_OUT = ("started_at", "peak_memory_bytes", "reason", "error")
"""Columns that are only in JSON."""


def as_json(frame: pd.DataFrame) -> str:
    """Return a table of results as JSON: a list with an object for each item, each on a line.

    What stands first in an object is the item's number; it is called "index", unless a column is (see `number_column`). NaN and
    infinities, which JSON does not have, are null, as what is missing. What JSON cannot say otherwise is text.
    """
    names = list(map(str, frame))
    number = number_column(names)
    rows = zip(*(frame[name].tolist() for name in frame), strict=True)
    objects = (_plain({number: index, **dict(zip(names, row, strict=True))}) for index, row in enumerate(rows))
    return "[" + ",\n ".join(map(json.dumps, objects)) + "]"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, torch's tensors
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if is_missing(value) else describe_item(value)


def as_table(frame: pd.DataFrame) -> Table:
    """Return the table for a terminal, of no more than `MOST_ROWS` rows, without columns that say nothing."""
    shown = frame.drop(columns=list(LEFT_OUT)).head(MOST_ROWS)
    if frame["gpu"].isna().all():
        shown = shown.drop(columns="gpu")
    if (frame["attempts"] == 1).all():
        shown = shown.drop(columns="attempts")
    columns = {str(name): shown[name].tolist() for name in shown}
    table = Table(box=None, pad_edge=False)
    table.add_column("item", justify="right", no_wrap=True)
    for name, values in columns.items():
        table.add_column(Text(one_line(name)), justify="right" if all(map(_is_number, values)) else "left", no_wrap=True)
    for index, row in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(index), *map(_cell, row))
    return table


def _is_number(value: Any) -> bool:
    return (isinstance(value, Number) and not isinstance(value, bool)) or is_missing(value)


def _cell(value: Any) -> Text:
    if is_missing(value):
        return Text("-")
    text = Text(
        f"{value:.4g}" if isinstance(value, float) else one_line(value) if isinstance(value, str) else describe_item(value)
    )
    text.truncate(MOST_LETTERS, overflow="ellipsis")
    return text
