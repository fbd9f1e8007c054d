"""The timeline of a loop, as a figure of matplotlib and as a Chrome trace, from the table of
attempts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.errors import InvalidValueError
from raypool.journal.files import write_file
from raypool.views.drawing import COLORS, Timeline, cell, plan, took, unit_of
from raypool.views.kernel import notebook_shell

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_HEIGHT = 0.7

MIN_LABEL = 0.03
"""The least width of a bar with its item's number in it, as a share of the axis."""

MICROSECONDS = 1e6


def check_suffix(path: Path) -> None:
    """Make sure that a file with this suffix can be written.

    Raises:
        InvalidValueError: It cannot.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = ["json", *FigureCanvasBase.get_supported_filetypes()]
    if path.suffix[1:].lower() not in known:
        raise InvalidValueError(
            f"path={str(path)!r} has none of the suffixes that can be written:"
            f" .{', .'.join(known)}."
        )


def draw(attempts: pd.DataFrame, title: str | None) -> Figure:
    """Return a figure: a line for each worker, a bar for each attempt."""
    from matplotlib.figure import Figure

    shown = plan(attempts)
    figure = Figure(
        figsize=(11, 1.8 + 0.32 * min(max(len(shown.lanes), 2), 64)), layout="constrained"
    )
    axes = figure.add_subplot()
    unit_s, symbol = unit_of(shown.wall_s)
    for position, lane in enumerate(shown.lanes):
        axes.broken_barh(
            [(0, shown.wall_s / unit_s)],
            (position - BAR_HEIGHT / 2, BAR_HEIGHT),
            color="0.93",
            zorder=0,
        )
        axes.text(
            1.01,
            position,
            f"{lane.idle_share:.0%} idle",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    _draw_bars(axes, shown, unit_s)
    _draw_legend(figure, shown)
    for at_s in shown.breaks_s:
        axes.axvline(at_s / unit_s, color="0.4", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(shown.lanes)), [_plain(lane.label) for lane in shown.lanes])
    axes.set_ylim(max(len(shown.lanes), 1) - 0.5, -0.5)
    axes.set_xlim(0, shown.wall_s / unit_s or 1)
    axes.set_xlabel(
        f"time since the start [{symbol}]"
        + (", pauses between calls left out" if shown.breaks_s else "")
    )
    axes.set_title(_plain(title) if title is not None else headline(shown), loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return figure


def let_notebooks_show_it() -> None:
    """Let the notebook of this process show figures, as it does by itself only with pyplot."""
    shell = notebook_shell()
    if shell is None:
        return
    from matplotlib.figure import Figure

    formatters = shell.display_formatter.formatters
    if not any(
        Figure in formatters[kind]
        for kind in ("image/png", "image/svg+xml", "image/jpeg", "application/pdf")
    ):
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
        for item, lane, start_s, end_s in zip(
            wide["item"], wide["lane"], wide["start_s"], wide["end_s"], strict=True
        ):
            axes.text(
                (start_s + end_s) / 2 / unit_s,
                lane,
                str(item),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )


def _draw_legend(figure: Figure, shown: Timeline) -> None:
    counts = shown.attempts["status"].value_counts()
    there = [status for status in COLORS if status in counts]
    if there:
        from matplotlib.patches import Patch

        patches = [
            Patch(color=COLORS[status], label=f"{status} ({counts[status]:,})") for status in there
        ]
        patches.append(Patch(color="0.93", label="idle"))
        figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)


def headline(shown: Timeline) -> str:
    """Return a timeline's main numbers in a line."""
    if not shown.lanes:
        return "Nothing has run of which the time is known"
    num_items = shown.attempts["item"].nunique()
    items = f"{num_items:,} item{'s' if num_items != 1 else ''}"
    workers = f"{len(shown.lanes):,} worker{'s' if len(shown.lanes) != 1 else ''}"
    return f"{items} on {workers} in {took(shown.wall_s)}, {shown.idle_share:.0%} idle"


def _plain(text: str) -> str:
    """Return a text without formulas for matplotlib, and without surrogates, which no font has."""
    return text.replace("$", r"\$").encode("utf-8", "replace").decode()


def write(
    figure: Figure, attempts: pd.DataFrame, configs: Mapping[str, Sequence[Any]], path: Path
) -> None:
    """Write the figure, or a trace of the attempts, as the suffix says.

    Raises:
        OSError: The file cannot be written.
    """
    path = path.expanduser().absolute()
    if path.suffix.lower() == ".json":
        data = json.dumps(
            chrome_trace(attempts, configs), ensure_ascii=False, allow_nan=False
        ).encode("utf-8", "replace")
    else:
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
        data = picture.getvalue()
    write_file(path, data)


def chrome_trace(attempts: pd.DataFrame, configs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return attempts in the Trace Event Format: a process for each host, a thread for each worker,
    times since the epoch [us].

    Source:
        Trace Event Format, complete events ("X") and metadata ("M").
    """
    shown = plan(attempts)
    hosts = {
        host: number
        for number, host in enumerate(dict.fromkeys(lane.host for lane in shown.lanes), 1)
    }
    events: list[dict[str, Any]] = []
    for host, number in hosts.items():
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": number,
                "tid": 0,
                "args": {"name": host or "unknown host"},
            }
        )
    for lane in shown.lanes:
        name = (
            f"worker {lane.worker}" if lane.gpu is None else f"worker {lane.worker}, GPU {lane.gpu}"
        )
        ids = {"pid": hosts[lane.host], "tid": lane.worker}
        events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": lane.worker}}
        )
    rows: Any = shown.attempts.itertuples()
    for row in rows:
        item = int(row.item)
        args = {"config": {name: cell(column[item]) for name, column in configs.items()}}
        said = {
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
                "args": {
                    **args,
                    **{name: value for name, value in said.items() if value is not None},
                },
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
