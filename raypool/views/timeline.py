"""The timeline of a loop's attempts, as a figure of matplotlib and as a Chrome trace."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.errors import InvalidValueError
from raypool.views.drawing import COLORS, Timeline, cell, plan, took, unit_of
from raypool.views.notebook import notebook_shell
from raypool.worker.folders import write_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_HEIGHT = 0.7

MIN_LABEL = 0.03
"""The least width of a bar with its item's number, as a share of the axis."""

MICROSECONDS = 1e6


def check_suffix(path: Path) -> None:
    """Raise InvalidValueError unless a file with this suffix can be written."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = ["json", *FigureCanvasBase.get_supported_filetypes()]
    if path.suffix[1:].lower() not in known:
        raise InvalidValueError(f"path={str(path)!r} must end in .{', .'.join(known)}.")


def draw(attempts: pd.DataFrame, title: str | None) -> Figure:
    """Return a figure: a line for each worker, a bar for each attempt."""
    from matplotlib.figure import Figure  # not pyplot, which would keep it and choose a backend

    shown = plan(attempts)
    height = 1.8 + 0.32 * min(max(len(shown.lanes), 2), 64)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.add_subplot()
    unit_s, symbol = unit_of(shown.wall_s)
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    for position, lane in enumerate(shown.lanes):
        span = (position - BAR_HEIGHT / 2, BAR_HEIGHT)
        axes.broken_barh([(0, shown.wall_s / unit_s)], span, color="0.93", zorder=0)
        axes.text(1.01, position, f"{lane.idle_share:.0%} idle", **style, fontsize=8)
    _draw_bars(axes, shown, unit_s)
    counts = shown.attempts["status"].value_counts()
    if there := [status for status in COLORS if status in counts]:
        from matplotlib.patches import Patch

        patches = [
            Patch(color=COLORS[status], label=f"{status} ({counts[status]:,})") for status in there
        ]
        patches.append(Patch(color="0.93", label="idle"))
        figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)
    for at_s in shown.breaks_s:
        axes.axvline(at_s / unit_s, color="0.4", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(shown.lanes)), [_plain(lane.label) for lane in shown.lanes])
    axes.set_ylim(max(len(shown.lanes), 1) - 0.5, -0.5)  # the first worker is at the top
    axes.set_xlim(0, shown.wall_s / unit_s or 1)
    pauses = ", pauses between sessions left out" if shown.breaks_s else ""
    axes.set_xlabel(f"time since the start [{symbol}]{pauses}")
    axes.set_title(_plain(title) if title is not None else headline(shown), loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return figure


def let_notebooks_show_it() -> None:
    """Let the notebook of this process show figures."""
    shell = notebook_shell()  # by itself it shows them only with pyplot
    if shell is None:
        return
    from matplotlib.figure import Figure

    formatters = shell.display_formatter.formatters
    kinds = ("image/png", "image/svg+xml", "image/jpeg", "application/pdf")
    if not any(Figure in formatters[kind] for kind in kinds):  # else the user has chosen
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]


def _draw_bars(axes: Axes, shown: Timeline, unit_s: float) -> None:
    for status, rows in shown.attempts.groupby("status"):
        starts, ends = rows["start_s"] / unit_s, rows["end_s"] / unit_s
        for lane in rows["lane"].unique():
            own = rows["lane"] == lane
            spans = list(zip(starts[own], (ends - starts)[own], strict=True))
            heights = (lane - BAR_HEIGHT / 2, BAR_HEIGHT)
            axes.broken_barh(
                spans, heights, facecolor=COLORS[str(status)], edgecolor="white", linewidth=0.4
            )
        wide = rows[(rows["end_s"] - rows["start_s"]) > MIN_LABEL * shown.wall_s]
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
        bars: Any = wide.itertuples()
        for bar in bars:
            axes.text((bar.start_s + bar.end_s) / 2 / unit_s, bar.lane, str(bar.item), **style)


def headline(shown: Timeline) -> str:
    """Return a timeline's main numbers as text."""
    if not shown.lanes:
        return "No attempt has a known time"
    num_items = shown.attempts["item"].nunique()
    items = f"{num_items:,} item{'s' if num_items != 1 else ''}"
    workers = f"{len(shown.lanes):,} worker{'s' if len(shown.lanes) != 1 else ''}"
    return f"{items} on {workers} in {took(shown.wall_s)}, {shown.idle_share:.0%} idle"


def _plain(text: str) -> str:
    # no formulas for matplotlib, and no surrogates, which no font has
    return text.replace("$", r"\$").encode("utf-8", "replace").decode()


def write(
    figure: Figure, attempts: pd.DataFrame, configs: Mapping[str, Sequence[Any]], path: Path
) -> None:
    """Write the figure, or a trace, by the suffix; raise OSError if that fails."""
    path = path.expanduser().absolute()
    if path.suffix.lower() == ".json":
        trace = chrome_trace(attempts, configs)
        text = json.dumps(trace, ensure_ascii=False, allow_nan=False)
        data = text.encode("utf-8", "replace")
    else:
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
        data = picture.getvalue()
    write_file(path, data)


def chrome_trace(attempts: pd.DataFrame, configs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return attempts in the Trace Event Format, with a process per host and a thread per worker.

    Source:
        Trace Event Format, complete events ("X") and metadata ("M").
    """
    shown = plan(attempts)
    hosts: dict[str, int] = {}
    events: list[dict[str, Any]] = []

    def describe(kind: str, ids: dict[str, int], **args: Any) -> None:
        events.append({"ph": "M", "name": kind, **ids, "args": args})

    for host in dict.fromkeys(lane.host for lane in shown.lanes):
        hosts[host] = len(hosts) + 1
        describe("process_name", {"pid": hosts[host], "tid": 0}, name=host or "unknown host")
    for lane in shown.lanes:
        gpu = "" if lane.gpu is None else f", GPU {lane.gpu}"
        ids = {"pid": hosts[lane.host], "tid": lane.worker}
        describe("thread_name", ids, name=f"worker {lane.worker}{gpu}")
        describe("thread_sort_index", ids, sort_index=lane.worker)
    rows: Any = shown.attempts.itertuples()
    for row in rows:
        item = int(row.item)
        args: dict[str, Any] = {
            "config": {name: cell(column[item]) for name, column in configs.items()},
            "attempt": int(row.attempt),
            "status": row.status,
            "gpu": cell(row.gpu),
            "error": cell(row.error),
        }
        events.append(
            {
                "ph": "X",
                "name": f"item {item}",
                "cat": row.status,
                "ts": round(row.started_at * MICROSECONDS),
                # cut: rounded, it could reach into the next one
                "dur": int((row.end_s - row.start_s) * MICROSECONDS),
                "pid": hosts[row.host],
                "tid": int(row.worker),
                "args": {name: value for name, value in args.items() if value is not None},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
