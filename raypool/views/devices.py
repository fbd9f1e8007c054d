"""A table of GPUs on a terminal, or as JSON.

::

      GPU  name          memory            utilisation  temperature  processes          compute mode
    *   0  NVIDIA H200   2.0 of 140.0 GiB         25 %        41 °C  4711 (1.9 GiB)     default
        1  NVIDIA H200   unknown               unknown      unknown  unknown            unknown

    * is visible here: all are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from raypool.views.console import SafeConsole

if TYPE_CHECKING:
    import pandas as pd

NO_GPU = (
    "No GPU: no NVIDIA driver answers, and Ray knows of no other maker's. Pools run on this machine's cores. "
    "If there is a GPU in it, nvidia-smi says what keeps its driver from working."
)

UNKNOWN = "unknown"

WIDTH_OF_FILES = 1000
"""Columns of a table that does not go to a terminal."""


def as_json(frame: pd.DataFrame) -> str:
    """Return a table of GPUs as JSON: a list of what `raypool.gpu_device_table` says of each, null for what is not known."""
    rows = [{name: None if is_missing(value) else value for name, value in row.items()} for row in _rows(frame)]
    return json.dumps(rows, indent=2)


def as_table(frame: pd.DataFrame) -> Table:
    """Return a table of GPUs for a terminal."""
    table = Table("", box=None, pad_edge=False)
    for heading in ("GPU", "name", "memory", "utilisation", "temperature", "processes", "compute mode"):
        table.add_column(heading, justify="right" if heading in ("GPU", "utilisation", "temperature") else "left")
    for row in _rows(frame):
        cells = (
            _said(row, "is_selected", lambda is_selected: "*" if is_selected else "", "?"),
            str(row["index"]),
            _said(row, "name", str) + _said(row, "mig", lambda instances: "".join(f"\n  {name}" for name in instances), ""),
            f"{_gib(row['used_bytes'])} of {_gib(row['total_bytes'])} GiB" if not is_missing(row["free_bytes"]) else UNKNOWN,
            _said(row, "utilisation", lambda utilisation: f"{utilisation * 100:.0f} %"),
            _said(row, "temperature_c", lambda degrees: f"{degrees:.0f} °C"),
            _said(row, "processes", lambda used: "\n".join(map(_process, used.items())) or "none"),
            _said(row, "compute_mode", str),
        )
        table.add_row(*map(Text, cells))
    return table


def show(table: Table) -> None:
    """Print a table, as wide as the terminal is; into a file or a pipe, as wide as it wants to be."""
    SafeConsole(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def legend(frame: pd.DataFrame, environ: Mapping[str, str]) -> str:
    """Return what is to be said below the table: which of the GPUs a process started from here would see, and why."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    said = ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
    selected = frame["is_selected"]
    if selected.isna().any():
        return f"? is not known to be visible here: {said or 'the environment'} does not say which these are."
    if not selected.any():
        return f"None of them is visible here, by {said or 'the environment'}: change it, and start anew whatever uses GPUs."
    if said:
        return f"* is visible here, by {said}."
    return "* is visible here: " + (
        "all are." if selected.all() else "of a GPU that is divided, one instance, and then no other GPU."
    )


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    columns = {name: frame[name].tolist() for name in frame}
    return [{str(name): values[place] for name, values in columns.items()} for place in range(len(frame))]


def is_missing(value: Any) -> bool:
    """Whether a cell of a table has nothing in it: None, pandas' NA or NaN."""
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and isnan(value))


def _said(row: Mapping[str, Any], name: str, say: Callable[[Any], str], unknown: str = UNKNOWN) -> str:
    return unknown if is_missing(row[name]) else say(row[name])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _process(entry: tuple[int, int | None]) -> str:
    pid, used = entry
    return str(pid) if used is None else f"{pid} ({_gib(used)} GiB)"
