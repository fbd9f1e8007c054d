"""Tables of sweeps, machines and GPUs, on a terminal or as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import isnan
from numbers import Number
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.table import Table
from rich.text import Text

from raypool.cluster.machines import Catalogue, Gpu, one_of
from raypool.views.console import SafeConsole
from raypool.views.drawing import number_column
from raypool.views.words import describe_item, one_line

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from raypool.journal.reading import RunSummary

# --- sweeps ---------------------------------------------------------------------------------------
#
#     item  network  width     lr  accuracy  status    duration_s  worker  gpu
#        0  mlp         32  0.001    0.9361  finished       1.204       0    0
#        1  cnn         36  0.001         -  failed       0.01181       1    1


MOST_LETTERS = 40
"""The greatest length of a cell [characters]; longer ones are cut."""

LEFT_OUT = ("started_at", "peak_memory_bytes", "reason", "error")
"""Columns that are only in JSON."""


def sweep_as_json(frame: pd.DataFrame) -> str:
    """Return a table of results as JSON: a list with an object for each item, each on a line.

    The first entry is the item's number, called "index" unless a column has this name (see
    `number_column`). NaN, infinities and missing values are null. Values that JSON lacks are texts.
    """
    names = list(map(str, frame))
    number = number_column(names)
    rows = zip(*(frame[name].tolist() for name in frame), strict=True)
    objects = (
        _plain({number: index, **dict(zip(names, row, strict=True))})
        for index, row in zip(frame.index.tolist(), rows, strict=True)
    )
    return "[" + ",\n ".join(map(json.dumps, objects)) + "]"


def as_file_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of results for a CSV or Parquet file: objects become JSON texts."""
    columns = {}
    for name in frame:
        is_plain = frame[name].dtype != object
        columns[str(name)] = frame[name] if is_plain else frame[name].map(_file_cell)
    import pandas as pd

    return pd.DataFrame(columns, index=frame.index)


def _file_cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    plain = _plain(value)
    return plain if plain is None or isinstance(plain, str) else json.dumps(plain)


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


def columns_of(frame: pd.DataFrame) -> list[str]:
    """Return the columns of a table of results that a terminal shows unless others are named."""
    left_out = {*LEFT_OUT}
    if frame["gpu"].isna().all():
        left_out.add("gpu")
    if (frame["attempts"] == 1).all():
        left_out.add("attempts")
    return [str(name) for name in frame if name not in left_out]


def sweep_as_table(frame: pd.DataFrame) -> Table:
    """Return the table for a terminal."""
    columns = {str(name): frame[name].tolist() for name in frame}
    table = Table(box=None, pad_edge=False)
    table.add_column("item", justify="right", no_wrap=True)
    for name, values in columns.items():
        table.add_column(
            Text(one_line(name)),
            justify="right" if all(map(_is_number, values)) else "left",
            no_wrap=True,
        )
    for index, row in zip(frame.index, zip(*columns.values(), strict=True), strict=True):
        table.add_row(str(index), *map(_cell, row))
    return table


def _is_number(value: Any) -> bool:
    return (isinstance(value, Number) and not isinstance(value, bool)) or is_missing(value)


def _cell(value: Any) -> Text:
    if is_missing(value):
        return Text("-")
    text = Text(
        f"{value:.4g}"
        if isinstance(value, float)
        else one_line(value)
        if isinstance(value, str)
        else describe_item(value)
    )
    text.truncate(MOST_LETTERS, overflow="ellipsis")
    return text


# --- saved runs -----------------------------------------------------------------------------------
#
#     run       function     items  finished  failed  state     started           size
#     digits/a  train.main      24        23       1  finished  2026-11-26 09:12  1.2 MiB


def runs_as_table(summaries: Sequence[RunSummary], folder: Path) -> Table:
    """Return a table of saved runs, each by its path from a folder."""
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "function", "items", "finished", "failed", "state", "started", "size"):
        is_right = heading in ("items", "finished", "failed", "size")
        table.add_column(heading, justify="right" if is_right else "left", no_wrap=True)
    for run in summaries:
        started = datetime.fromtimestamp(run.started_at).astimezone()
        table.add_row(
            Text(one_line(os.path.relpath(run.folder, folder))),
            Text(one_line(run.function)),
            f"{run.items:,}",
            f"{run.finished:,}",
            Text(f"{run.failed:,}", style="red" if run.failed else ""),
            _state(run),
            f"{started:%Y-%m-%d %H:%M}",
            filesize.decimal(run.num_bytes),
        )
    return table


def _state(run: RunSummary) -> str:
    if run.is_running:
        return "running"
    return "finished" if run.finished == run.items else "incomplete"


def runs_as_json(summaries: Sequence[RunSummary]) -> str:
    """Return the same as JSON, each on a line; `started_at` is UTC."""
    objects = [
        {
            **run._asdict(),
            "folder": str(run.folder),
            "started_at": datetime.fromtimestamp(run.started_at, UTC).isoformat(),
        }
        for run in summaries
    ]
    return "[" + ",\n ".join(map(json.dumps, objects)) + "]"


# --- machines for rent ----------------------------------------------------------------------------
#
#       machine         vCPUs  memory  GPUs
#       n1-standard-8       8   30 GB  1, 2 or 4 T4
#       a2-highgpu-1g      12   85 GB  1 A100


def machines_as_table(catalogue: Catalogue, gpu: str | None) -> Table:
    """Return a table of machines.

    Args:
        catalogue: The catalogue of machines.
        gpu: Only machines that may have GPUs of this kind, and how many of these; None: all.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("machine", "vCPUs", "memory", "GPUs"):
        table.add_column(heading, justify="right" if heading in ("vCPUs", "memory") else "left")
    for name, choices in _choices(catalogue, gpu).items():
        machine = catalogue.machine(name)
        gpus = "; ".join(f"{one_of(counts)} {kind}" for kind, counts in choices.items())
        table.add_row(*map(Text, (name, str(machine.vcpus), f"{machine.memory_gb:g} GB", gpus)))
    return table


def where(catalogue: Catalogue, gpu: str | None) -> str:
    """Return the note below the table: where a kind of GPU is available, and the catalogue's
    date.
    """
    lines = [
        f"This is catalogue {catalogue.name} as of {catalogue.date}: providers change what they"
        " have."
    ]
    if gpu is not None:
        kind = catalogue.gpu(gpu)
        places = ", ".join(kind.zones or kind.regions) or "places that are not known here"
        lines.insert(0, f"{kind.name} GPUs are in {places}.")
    return "\n".join(lines)


def machines_as_json(catalogue: Catalogue, gpu: str | None) -> str:
    """Return the same as JSON."""
    kinds = [catalogue.gpu(gpu)] if gpu is not None else list(catalogue.gpus.values())
    machines = [
        {"name": name, "vcpus": machine.vcpus, "memory_gb": machine.memory_gb, "gpus": choices}
        for name, choices in _choices(catalogue, gpu).items()
        for machine in [catalogue.machine(name)]
    ]
    said = {
        "catalogue": catalogue.name,
        "date": str(catalogue.date),
        "sources": catalogue.sources,
        "machines": machines,
    }
    return json.dumps(
        {**said, "gpus": [_gpu(kind) for kind in kinds if kind.retired is None]}, indent=2
    )


def _gpu(gpu: Gpu) -> dict[str, object]:
    return {
        "name": gpu.name,
        "accelerator": gpu.accelerator,
        "zones": gpu.zones,
        "regions": gpu.regions,
    }


def _choices(catalogue: Catalogue, gpu: str | None) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return which GPUs each machine may have, by kind."""
    if gpu is None:
        return {name: catalogue.choices(name) for name in catalogue.machines}
    kind = catalogue.gpu(gpu).name
    counts = {name: catalogue.allowed(name, kind) for name in catalogue.machines}
    return {name: {kind: allowed} for name, allowed in counts.items() if allowed}


# --- GPUs -----------------------------------------------------------------------------------------
#
# GPU  name          memory            utilisation  temperature  processes          compute mode *
# 0  NVIDIA H200   2.0 of 140.0 GiB         25 %        41 °C  4711 (1.9 GiB)     default 1  NVIDIA
# H200   unknown               unknown      unknown  unknown            unknown
#
#     * is visible here: all are.


NO_GPU = (
    "No GPU: no NVIDIA driver answers, and Ray knows of no other maker's. Pools run on this"
    " machine's cores. If there is a GPU in it, nvidia-smi says what keeps its driver from working."
)

UNKNOWN = "unknown"

WIDTH_OF_FILES = 1000
"""The width of a table in a file or a pipe [columns]."""


def gpus_as_json(frame: pd.DataFrame) -> str:
    """Return a table of GPUs as JSON: a list of what `raypool.gpu_device_table` says of each, null
    for what is not known.
    """
    rows = [
        {name: None if is_missing(value) else value for name, value in row.items()}
        for row in _rows(frame)
    ]
    return json.dumps(rows, indent=2)


def gpus_as_table(frame: pd.DataFrame) -> Table:
    """Return a table of GPUs for a terminal."""
    table = Table("", box=None, pad_edge=False)
    for heading in (
        "GPU",
        "name",
        "memory",
        "utilisation",
        "temperature",
        "processes",
        "compute mode",
    ):
        table.add_column(
            heading, justify="right" if heading in ("GPU", "utilisation", "temperature") else "left"
        )
    for row in _rows(frame):
        cells = (
            _said(row, "is_selected", lambda is_selected: "*" if is_selected else "", "?"),
            str(row["index"]),
            _said(row, "name", str)
            + _said(row, "mig", lambda instances: "".join(f"\n  {name}" for name in instances), ""),
            (
                f"{_gib(row['used_bytes'])} of {_gib(row['total_bytes'])} GiB"
                if not is_missing(row["free_bytes"])
                else UNKNOWN
            ),
            _said(row, "utilisation", lambda utilisation: f"{utilisation * 100:.0f} %"),
            _said(row, "temperature_c", lambda degrees: f"{degrees:.0f} °C"),
            _said(row, "processes", lambda used: "\n".join(map(_process, used.items())) or "none"),
            _said(row, "compute_mode", str),
        )
        table.add_row(*map(Text, cells))
    return table


def show(table: Table) -> None:
    """Print a table at the width of the terminal; into a file or a pipe, at its full width."""
    SafeConsole(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def legend(frame: pd.DataFrame, environ: Mapping[str, str]) -> str:
    """Return what is to be said below the table: which of the GPUs a process started from here
    would see, and why.
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    said = ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
    selected = frame["is_selected"]
    if selected.isna().any():
        return (
            f"? is not known to be visible here: {said or 'the environment'} does not say which"
            " these are."
        )
    if not selected.any():
        return (
            f"None of them is visible here, by {said or 'the environment'}: change it, and start"
            " anew whatever uses GPUs."
        )
    if said:
        return f"* is visible here, by {said}."
    return "* is visible here: " + (
        "all are."
        if selected.all()
        else "of a GPU that is divided, one instance, and then no other GPU."
    )


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    columns = {name: frame[name].tolist() for name in frame}
    return [
        {str(name): values[place] for name, values in columns.items()}
        for place in range(len(frame))
    ]


def is_missing(value: Any) -> bool:
    """Whether a cell of a table has nothing in it: None, pandas' NA or NaN."""
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and isnan(value))


def _said(
    row: Mapping[str, Any], name: str, say: Callable[[Any], str], unknown: str = UNKNOWN
) -> str:
    return unknown if is_missing(row[name]) else say(row[name])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _process(entry: tuple[int, int | None]) -> str:
    pid, used = entry
    return str(pid) if used is None else f"{pid} ({_gib(used)} GiB)"
