"""GPUs as a table: a row each, what is not known is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from raypool.devices.gpus import GpuDevice

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "index": "int64",
    "name": "string",
    "uuid": "string",
    "total_bytes": "Int64",
    "used_bytes": "Int64",
    "free_bytes": "Int64",
    "utilisation": "Float64",
    "temperature_c": "Float64",
    "processes": "object",
    "mig": "object",
    "compute_mode": "string",
    "compute_capability": "object",
}
"""The columns that tell of a GPU, and their kinds; all but the index can be missing."""


def row_of(card: GpuDevice) -> dict[str, Any]:
    """Return what a table says of a GPU; of the processes, how much memory each has, by its number.

    Example:
        >>> row_of(GpuDevice(index=1, total_bytes=8, used_bytes=3))["free_bytes"]
        5
    """
    row = {name: getattr(card, name) for name in COLUMNS}
    if card.processes is not None:
        row["processes"] = {process.pid: process.used_bytes for process in card.processes}
    return row


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str] = COLUMNS) -> pd.DataFrame:
    """Return a table with these columns, of these kinds, also if it has no rows. What a row does not say is missing.

    Example:
        >>> frame_of([row_of(GpuDevice(index=0, utilisation=0.5))])[["index", "utilisation"]].to_dict("list")
        {'index': [0], 'utilisation': [0.5]}
    """
    import pandas as pd

    rows = list(rows)
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=kind) for name, kind in columns.items()})
