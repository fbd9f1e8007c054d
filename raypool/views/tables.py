"""Tables of sweeps, machines and GPUs, on a terminal or as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import isnan
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich import filesize
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from raypool.channel.feed import column_name, fields_of
from raypool.journal.plain import MAX_BITS
from raypool.profiles import PINNING
from raypool.views.console import SafeConsole
from raypool.views.drawing import number_column
from raypool.views.words import describe_item, describe_values, gibibytes, one_line

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from raypool.cluster.machines import Catalogue
    from raypool.journal.reading import RunSummary

# --- sweeps ---------------------------------------------------------------------------------------
#
#     index  network  width     lr  accuracy  status    duration_s  worker  gpu
#         0  mlp         32  0.001    0.9361  finished       1.204       0    0
#         1  cnn         36  0.001         -  failed       0.01181       1    1


MOST_LETTERS = 40
"""The length at which cells are cut, other than errors [characters]."""

LEFT_OUT = ("started_at", "peak_memory_bytes", "reason", "error")
"""Columns for JSON only."""


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of results whose first column is the item's number (see `number_column`)."""
    return frame.reset_index(names=number_column(list(map(str, frame))))


def sweep_as_json(frame: pd.DataFrame) -> str:
    """Return a table of results as a list in JSON, with an object for each item on its line.

    NaN, infinities and missing values are null. Other values that JSON lacks are texts.
    """
    names = list(map(str, frame))
    rows = zip(*(frame[name].tolist() for name in frame), strict=True)
    objects = (_plain(dict(zip(names, row, strict=True))) for row in rows)
    return "[" + ",\n ".join(map(json.dumps, objects)) + "]"


def as_file_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of results for a CSV or Parquet file: objects become JSON texts.

    Parquet has neither complex numbers, which become texts, nor floats longer than 64 bits.
    """
    import numpy as np
    import pandas as pd

    columns = {}
    for name in frame:
        column = frame[name]
        if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "boolean":
            column = column.astype("boolean")  # bool has no missing values
        elif column.dtype == object or isinstance(column.dtype, pd.StringDtype):
            column = column.map(_file_cell)
        elif column.dtype.kind == "c":
            column = column.map(str, na_action="ignore")
        elif column.dtype == np.longdouble:
            column = column.astype(float)
        columns[str(name)] = column
    return pd.DataFrame(columns)


def _file_cell(value: Any) -> str | None:
    plain = _plain(value)
    if plain is None:
        return None
    # texts with halves of characters are not UTF-8
    return column_name(plain if isinstance(plain, str) else json.dumps(plain))


def _plain(value: Any, parents: tuple[int, ...] = ()) -> Any:
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, torch's tensors
        with contextlib.suppress(Exception):  # a class of them, or a tensor without values
            value = value.tolist()
    if is_missing(value) or (isinstance(value, float) and math.isinf(value)):
        return None
    if isinstance(value, (str, int, float, bool)):
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            value = hex(value)  # Python writes no decimal of more than 4,300 digits
        return value
    if id(value) in parents:  # it contains itself
        return whole_text(value)
    parents = (*parents, id(value))
    if (fields := fields_of(value)) is not None:
        return {str(key): _plain(entry, parents) for key, entry in fields.items()}
    if isinstance(value, (set, frozenset)):
        with contextlib.suppress(TypeError):  # its entries have no order
            value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry, parents) for entry in value]
    return whole_text(value)


def whole_text(value: Any) -> str:
    """Return all of a value that is no plain data, as text."""
    if isinstance(value, datetime):  # pandas' times are that, too
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    try:
        return repr(value)
    except Exception:  # of the user's own class
        return f"a {type(value).__name__}"


def columns_of(frame: pd.DataFrame, *, is_numbered: bool = True) -> list[str]:
    """Return the columns of a table of results that a terminal shows unless others are named.

    If it `is_numbered`, its first column is no field of the user's.
    """
    left_out = {*LEFT_OUT, *(str(name) for name in frame if frame[name].isna().all())}
    first = frame.columns[0] if is_numbered else None
    is_training = first == "report"
    if is_training:
        left_out.add("time")
    if first == "trial":
        left_out.add("status")  # of its last part
    attempts = "attempt" if is_training else "attempts"
    if (frame[attempts] == 1).all():
        left_out.add(attempts)
    return [str(name) for name in frame if name not in left_out]


def show_sweep(frame: pd.DataFrame, leaving: Sequence[str] = ()) -> list[str]:
    """Print a table of results; return the columns of `leaving` that did not fit."""
    columns = []
    for name in frame:
        values = frame[name].tolist()
        is_number = all(
            is_missing(value) or (isinstance(value, Number) and not isinstance(value, bool))
            for value in values
        )
        most = WIDTH_OF_FILES if name == "error" else MOST_LETTERS
        cells = [_cell(value, most) for value in values]
        for cell in cells if name == "status" else ():
            cell.highlight_words(["failed"], "red")
        columns.append(TextColumn(str(name), cells, is_number, may_be_cut=not is_number))
    return _show_fitting(columns, leaving)


def _cell(value: Any, most: int) -> Text:
    if is_missing(value):
        return Text("-")
    if isinstance(value, float):
        text = Text(f"{value:.4g}")
    else:
        text = Text(one_line(value) if isinstance(value, str) else describe_item(value))
    text.truncate(most, overflow="ellipsis")
    return text


# --- tables on a narrow terminal ------------------------------------------------------------------


LEAST_LETTERS = 12
"""The width to which texts are cut where there is little room [columns]."""


class TextColumn(NamedTuple):
    """A column of a table on a terminal."""

    name: str
    cells: list[Text]
    is_right: bool = False
    may_be_cut: bool = False

    @property
    def least_width(self) -> int:
        """The least width [columns]."""
        widest = max(cell_len(one_line(self.name)), *(cell.cell_len for cell in self.cells), 0)
        return min(widest, LEAST_LETTERS) if self.may_be_cut else widest


def _show_fitting(columns: Sequence[TextColumn], leaving: Sequence[str]) -> list[str]:
    """Print a table; return the columns of `leaving` that did not fit."""
    console = SafeConsole(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    widths = {column.name: column.least_width + 2 for column in columns}
    left_out: list[str] = []
    for name in leaving:
        if sum(widths.values()) - 2 <= console.width:
            break
        del widths[name]
        left_out.append(name)
    shown = [column for column in columns if column.name in widths]
    table = Table(box=None, pad_edge=False)
    for column in shown:
        # rich narrows columns that may wrap first; their cells do not wrap, but are cut
        justify: Literal["left", "right"] = "right" if column.is_right else "left"
        table.add_column(
            Text(one_line(column.name)), justify=justify, no_wrap=not column.may_be_cut
        )
        for cell in column.cells:
            cell.no_wrap, cell.overflow = True, "ellipsis"
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    return left_out


# --- saved runs -----------------------------------------------------------------------------------
#
#     run       function    items  state                              started              size
#     digits/a  train.main     24  finished, 1 failed                 2026-11-26 09:12   1.2 MB
#     digits/b  train.main     24  stopped after 12 of 24, 2 failed   2026-11-25 18:40  590.1 kB


TRAINING_METRICS = ("epoch", "loss", "validation_loss")
"""The metrics of a training that are shown, if it has reported them; else all."""


def show_runs(summaries: Sequence[RunSummary], folder: Path) -> list[str]:
    """Print a table of saved runs, each by its path from a folder; return what had no room."""
    started = [datetime.fromtimestamp(run.started_at).astimezone() for run in summaries]
    paths = [os.path.relpath(run.folder, folder) for run in summaries]
    functions = [Text(one_line(run.function)) for run in summaries]
    columns = [
        TextColumn("run", [Text(one_line(path)) for path in paths], may_be_cut=True),
        TextColumn("function", functions, may_be_cut=True),
        TextColumn(
            "items",
            [Text(f"{run.items:,}" if run.last is None else "training") for run in summaries],
            is_right=True,
        ),
        TextColumn("state", list(map(_state, summaries))),
        TextColumn("started", [Text(f"{time:%Y-%m-%d %H:%M}") for time in started]),
        TextColumn(
            "size", [Text(filesize.decimal(run.num_bytes)) for run in summaries], is_right=True
        ),
    ]
    return _show_fitting(columns, leaving=("size", "items", "function", "started"))


def _state(run: RunSummary) -> Text:
    if run.last is not None:
        shown = {name: value for name, value in run.last.items() if name in TRAINING_METRICS}
        last = describe_values(shown or run.last)
        return Text(f"running, {last}" if run.is_running else last)
    done = run.finished + run.failed
    if run.search is not None:
        return Text(f"running, {run.search}" if run.is_running else one_line(run.search))
    if run.is_running:
        state = Text(f"running, {done:,} of {run.items:,} done")
    elif done == run.items:
        state = Text("finished")
    else:  # Ctrl-C, a crash, or the first failure: the journal does not say which
        state = Text(f"stopped after {done:,} of {run.items:,}")
    if run.failed:
        state.append(", ").append(f"{run.failed:,} failed", style="red")
    return state


def runs_as_json(summaries: Sequence[RunSummary]) -> str:
    """Return the same as JSON, each on a line; `started_at` is UTC."""
    objects = [
        _plain(
            {
                **run._asdict(),
                "folder": str(run.folder),
                "started_at": datetime.fromtimestamp(run.started_at, UTC).isoformat(),
            }
        )
        for run in summaries
    ]
    return "[" + ",\n ".join(map(json.dumps, objects)) + "]"


# --- machines for rent ----------------------------------------------------------------------------
#
#       machine         vCPUs  memory  GPUs
#       n1-standard-8       8   30 GB  1, 2 or 4 T4
#       a2-highgpu-1g      12   85 GB  1 A100


def machines_as_table(catalogue: Catalogue, gpu: str | None) -> Table:
    """Return a table of machines; `gpu` selects those that can have GPUs of this kind."""
    from raypool.cluster.machines import one_of  # here: tables of sweeps do not need its YAML

    table = Table(box=None, pad_edge=False)
    for heading in ("machine", "vCPUs", "memory", "GPUs"):
        table.add_column(heading, justify="right" if heading in ("vCPUs", "memory") else "left")
    for name, choices in _choices(catalogue, gpu).items():
        machine = catalogue.machine(name)
        gpus = "; ".join(f"{one_of(counts)} {kind}" for kind, counts in choices.items())
        table.add_row(*map(Text, (name, str(machine.vcpus), f"{machine.memory_gb:g} GB", gpus)))
    return table


def where(catalogue: Catalogue, gpu: str | None) -> str:
    """Return the note below the table: places of a kind of GPU, and the catalogue's date."""
    lines = [
        f"This is catalogue {catalogue.name} as of {catalogue.date}: providers change their"
        " machines."
    ]
    if gpu is not None:
        kind = catalogue.gpu(gpu)
        places = ", ".join(kind.zones or kind.regions) or "places that are not known here"
        lines.insert(0, f"{kind.name} GPUs are in {places}.")
    return "\n".join(lines)


def machines_as_json(catalogue: Catalogue, gpu: str | None) -> str:
    """Return the machines as JSON."""
    kinds = [catalogue.gpu(gpu)] if gpu is not None else list(catalogue.gpus.values())
    machines = [
        {"name": name, "vcpus": machine.vcpus, "memory_gb": machine.memory_gb, "gpus": choices}
        for name, choices in _choices(catalogue, gpu).items()
        for machine in [catalogue.machine(name)]
    ]
    fields = ("name", "accelerator", "zones", "regions")
    gpus = [
        {field: getattr(kind, field) for field in fields} for kind in kinds if kind.retired is None
    ]
    table = {
        "catalogue": catalogue.name,
        "date": str(catalogue.date),
        "sources": catalogue.sources,
        "machines": machines,
        "gpus": gpus,
    }
    return json.dumps(table, indent=2)


def _choices(catalogue: Catalogue, gpu: str | None) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the possible numbers of GPUs of each machine, by kind."""
    available = [kind.name for kind in catalogue.gpus.values() if kind.retired is None]
    kinds = available if gpu is None else [catalogue.gpu(gpu).name]
    choices = {
        name: {kind: counts for kind in kinds if (counts := catalogue.allowed(name, kind))}
        for name in catalogue.machines
    }
    return {name: counts for name, counts in choices.items() if counts or gpu is None}


# --- GPUs -----------------------------------------------------------------------------------------
#
#       GPU  name         memory            utilization  temperature  processes       compute mode
#     *   0  NVIDIA H200  2.0 of 140.0 GiB         25 %        41 °C  4711 (1.9 GiB)  default
#         1  NVIDIA H200  unknown               unknown      unknown  unknown         unknown
#
#     * is visible here: all are.


NO_GPU = (
    "No GPU found: no NVIDIA driver responds, and Ray knows no GPU of another vendor. Pools run"
    " on CPU cores. If this machine has a GPU, nvidia-smi says why its driver does not work."
)

UNKNOWN = "unknown"

WIDTH_OF_FILES = 1000
"""The width of a table in a file or a pipe [columns]."""


def gpus_as_json(frame: pd.DataFrame) -> str:
    """Return the rows of `raypool.gpu_device_table` as JSON, with null for unknown values."""
    return json.dumps(_rows(frame), indent=2)


def gpus_as_table(frame: pd.DataFrame) -> Table:
    """Return a table of GPUs for a terminal."""
    table = Table("", box=None, pad_edge=False)
    text = ("name", "memory", "processes", "compute mode")
    headings = ("GPU", "name", "memory", "utilization", "temperature", "processes", "compute mode")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right")
    for row in _rows(frame):
        selected, name, mig, memory = row["is_selected"], row["name"], row["mig"], UNKNOWN
        if row["free_bytes"] is not None:
            memory = gibibytes(row["used_bytes"], row["total_bytes"])
        cells = (
            "?" if selected is None else "*" if selected else "",
            str(row["index"]),
            "\n  ".join([UNKNOWN if name is None else name, *(mig or ())]),
            memory,
            _text(row["utilization"], lambda share: f"{share * 100:.0f} %"),
            _text(row["temperature_c"], lambda degrees: f"{degrees:.0f} °C"),
            _text(row["processes"], lambda used: "\n".join(map(_process, used.items())) or "none"),
            _text(row["compute_mode"], str),
        )
        table.add_row(*map(Text, cells))
    return table


def show(table: Table) -> None:
    """Print a table at the width of the terminal; into a file or a pipe, at full width."""
    SafeConsole(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def legend(frame: pd.DataFrame, environ: Mapping[str, str]) -> str:
    """Return the note below the table: the GPUs that a process started here sees, and why."""
    said = ", ".join(f"{name}={environ[name]!r}" for name in PINNING if name in environ)
    selected = frame["is_selected"]
    if selected.isna().any():
        return (
            f"? may be visible here or not: {said or 'the environment'} does not say which GPUs"
            " these are."
        )
    if not selected.any():
        return (
            f"None of them is visible here: {said or 'the environment'} hides them. Change that,"
            " and restart the programs that use GPUs."
        )
    if said:
        return f"* is visible here, because of {said}."
    return "* is visible here: " + (
        "all are." if selected.all() else "one instance of a divided GPU (MIG), and no other GPU."
    )


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows, with None for missing values."""
    columns = {
        str(name): [None if is_missing(value) else value for value in frame[name].tolist()]
        for name in frame
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def is_missing(value: Any) -> bool:
    """Whether a cell of a table is empty: None, pandas' NA or NaT, or NaN."""
    import pandas as pd

    is_nan = isinstance(value, float) and isnan(value)
    return value is None or value is pd.NA or value is pd.NaT or is_nan


def _text(value: Any, shown: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else shown(value)


def _process(entry: tuple[int, int | None]) -> str:
    pid, used = entry
    return str(pid) if used is None else f"{pid} ({gibibytes(used, None)})"
