"""The HTML report of a loop: one self-contained file, made from the loop's tables."""

from __future__ import annotations

import base64
import html
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from raypool.errors import InvalidValueError, RemoteTraceback, notes_of, traceback_text
from raypool.journal.provenance import facts_of
from raypool.views.drawing import (
    COLORS,
    MAX_METRICS,
    MAX_TEXT,
    PALETTE,
    Cell,
    Timeline,
    at_once,
    columns,
    curves_of,
    evenly,
    is_numeric,
    last_of,
    merged,
    number_column,
    plan,
    reported_in,
    short,
    took,
    unit_of,
)
from raypool.views.importance import Importance, importance_of
from raypool.views.words import describe_error, printable
from raypool.worker.folders import write_file

if TYPE_CHECKING:
    import pandas as pd

    from raypool.channel.gpu_usage import GpuSample
    from raypool.journal.trials import Trials


PAGE = Path(__file__).with_name("page")

MARKS = {
    **COLORS,
    "complete": COLORS["finished"],
    "pruned": COLORS["retried"],
    **dict.fromkeys(("running", "waiting", "unfinished", "missing"), "#b0b0b0"),
}
"""The colors of items by status, and of trials by state."""

MAX_FAILURES = 50
"""The most failures in a report."""

MAX_TRACEBACK = 20_000
"""The length to which an error's text, or the end of its traceback, is cut [characters]."""

MAX_ERRORS = 2_000_000
"""About the most text of errors in the table; with many errors each is cut [characters]."""

MAX_NUMBERS = 200
"""The most items named for a failure."""

MAX_FIELDS = 12
"""The most fields whose importance is shown."""

logger = logging.getLogger("raypool")


class Story(NamedTuple):
    """The tables of a loop: `Results.to_frame`, `.attempts`, `.metrics`, `.errors`.

    `last` has the last value of each metric, by item. `configs` and `run` are columns of `frame`:
    those of configurations, and raypool's own. `scores` are the numbers of finished items in
    `metric`, the best first. `calls`: see `facts_of`. `trials`: of a search.
    """

    frame: pd.DataFrame
    attempts: pd.DataFrame
    metrics: pd.DataFrame
    last: pd.DataFrame
    configs: list[str]
    run: Sequence[str]
    errors: Mapping[int, BaseException]
    metric: str | None
    scores: Mapping[int, Any]
    gpus: Sequence[GpuSample]
    calls: Sequence[Mapping[str, Any]]
    trials: Trials | None

    @property
    def mark(self) -> str:
        """The column by whose cells the items are colored."""
        return "status" if self.trials is None else "state"

    @property
    def best_by(self) -> str | None:
        """The name under which the metric was reported, if it was."""
        if self.trials is not None:
            return self.trials.metric
        return None if self.metric is None else self.metric.removeprefix("last ")


Columns: TypeAlias = Mapping[str, Sequence[Cell]]
"""Columns of cells, by name."""


class FailureGroup(NamedTuple):
    """Items that failed in the same way; `text` is the error of the first one."""

    text: str
    items: list[int]
    traceback: str


def check_suffix(path: Path) -> None:
    """Raise InvalidValueError unless it is a path for HTML."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidValueError(
            f"path={str(path)!r} must end in .html or .htm: the report is an HTML page."
        )


def write(story: Story, path: Path, title: str) -> None:
    """Write the page; raise OSError if that fails."""
    write_file(path, page(story, title).encode("utf-8", "replace"))  # texts may have surrogates


def page(story: Story, title: str) -> str:
    """Return the page; without a title, it counts the items."""
    import itables
    import jinja2
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    num_items = len(story.frame)
    shown = plan(story.attempts)
    bundle = Path(itables.__file__).with_name("html") / "dt_bundle.js"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["took"] = took
    config = columns(story.frame, story.configs)
    importance = _importance(config, story.scores)
    data, notes = _data(story, shown, config)
    data["curves"]["color_by"] = [name for name, _ in importance.by_field] if importance else []
    unit_s, unit = unit_of(min(shown.wall_s, 1.0))  # seconds add up by eye, minutes do not
    # within the page, no `<` of the data can end the script
    json_data = json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return environment.get_template("report.html.j2").render(
        title=title or f"Results of {num_items:,} item{'s' if num_items != 1 else ''}",
        written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        num_items=num_items,
        noun="item" if story.trials is None else "trial",
        counts=story.frame[story.mark].value_counts().to_dict(),
        colors=MARKS,
        shown=shown,
        best=best_of(story, config),
        importance=importance,
        max_fields=MAX_FIELDS,
        unit_s=unit_s,
        unit=unit,
        timeline_height=data["timeline"]["layout"]["height"] if shown.lanes else 0,
        num_again=int(story.attempts["status"].isin(["lost", "retried"]).sum()),
        failures=list(_failures(story)),
        max_failures=MAX_FAILURES,
        max_numbers=MAX_NUMBERS,
        has_curves=bool(data["curves"]["metrics"]),
        has_coordinates=data["table"]["has_coordinates"],
        has_gpus="gpus" in data,
        calls={call["run"]: facts_of(call) for call in story.calls},
        best_so_far=list(data["best_so_far"]),
        notes=notes,
        data=json_data.replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        datatables=base64.b64encode(bundle.read_bytes()).decode(),
        datatables_css=bundle.with_suffix(".css").read_text(encoding="utf-8"),
    )


def best_of(story: Story, config: Columns) -> dict[str, Any] | None:
    """Return the page's text on the best item; None if no metric tells which it is."""
    if not story.scores:
        return None
    item, score = next(iter(story.scores.items()))
    there = {name: cells[item] for name, cells in config.items() if cells[item] is not None}
    return {
        "item": item,
        "metric": story.metric,
        "value": _written(short(score)),
        "config": {name: _written(value) for name, value in there.items()},
    }


def _written(value: Cell) -> str:
    """Return a cell as the table shows it."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _importance(config: Columns, scores: Mapping[int, Any]) -> Importance | None:
    """Return which fields affect the metric; None if unknown."""
    try:
        return importance_of(config, scores)
    except Exception as error:  # of a library: no reason to be without a report
        text = "The report has no hyperparameter importance: %s."
        logger.warning(text, describe_error(error))
        return None


def _data(story: Story, shown: Timeline, config: Columns) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data for the page's scripts, and notes on data left out."""
    curves, notes = curves_of(story.metrics, list(story.scores), story.best_by)
    curves["ranked_by"] = story.metric
    notes["table"] = note_on_table(story)
    data: dict[str, Any] = {
        "table": table_of(story, config),
        "best_first": list(story.scores),
        "curves": curves,
        "colors": MARKS,
        "palette": PALETTE,
    }
    data["best_so_far"] = best_so_far(story.trials, config, _ends(story, shown))
    if story.trials is not None and any(item is not None for item in story.trials.parents):
        data["best_so_far"] |= lineage(story.trials, story.metrics)
    if shown.lanes:
        data["timeline"], num_bars = timeline(shown)
        data["concurrency"] = concurrency(shown)
        if (gpus := gpu_usage(shown, story.gpus)) is not None:
            data["gpus"] = gpus
        if num_bars < len(shown.attempts):
            notes["timeline"] = (
                f"{len(shown.attempts):,} attempts are drawn as {num_bars:,} bars: "
                "consecutive short attempts on a worker share a bar."
            )
    return data, notes


def table_of(story: Story, config: Columns) -> dict[str, Any]:
    """Return the table of a page: columns of configurations, values, metrics and runs."""
    frame = story.frame
    values = [name for name in frame.columns if name not in story.configs and name not in story.run]
    value = columns(frame, values)
    reported = {
        f"last {name}": cells
        for name, cells in last_of(story.last, len(frame), story.best_by)
        if name not in value  # a metric that was also returned
    }
    started = frame["started_at"].dt.strftime("%Y-%m-%d %H:%M:%S")
    about = (
        frame[list(story.run)]
        .assign(started_at=started)
        .rename(columns={"started_at": "started_at (UTC)"})
        .drop(columns="error")
    )
    run = columns(about, about.columns)
    first = {story.mark: run.pop(story.mark)}
    if story.trials is not None:
        del run["status"]  # of the trial's last part
        if run["trial"] == frame.index.tolist():
            del run["trial"]
    run = {name: cells for name, cells in run.items() if set(cells) != {None}}
    if story.errors:  # beside the status, to be seen without scrolling sideways
        most = min(MAX_TRACEBACK, max(MAX_ERRORS // len(story.errors), MAX_TEXT))
        first["error"] = [_cut(text, most) for text in frame["error"]]
    kinds: list[tuple[str, Columns]] = [
        *(("run", first), ("config", config), ("value", value), ("reported", reported)),
        ("run", run),
    ]
    number = number_column(set[str]().union(*(named for _, named in kinds)))
    kinds.insert(0, ("run", {number: frame.index.tolist()}))
    entries = [(name, kind, cells) for kind, named in kinds for name, cells in named.items()]
    return {
        "columns": [
            {"name": name, "kind": kind, "is_numeric": is_numeric(cells)}
            for name, kind, cells in entries
        ],
        "cells": [cells for _, _, cells in entries],
        "number": number,
        "mark": story.mark,
        "has_coordinates": (
            len(frame) > 1 and any(len(set(cells)) > 1 for cells in config.values())
        ),
    }


def note_on_table(story: Story) -> str:
    """Return which columns the table leaves out; "" if none."""
    num_metrics = len(reported_in(story.metrics))
    if num_metrics <= MAX_METRICS:
        return ""
    return f"The table has columns for {MAX_METRICS} of {num_metrics:,} reported metrics."


def _cut(text: Any, most: int) -> str | None:
    """Return an error's text as the page shows it; None if a cell has none."""
    if not isinstance(text, str):
        return None
    shown = printable(text)
    return shown if len(shown) <= most else f"{shown[:most]}[...]"


def _failures(story: Story) -> Iterator[FailureGroup]:
    """Yield groups of failures, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for index, error in story.errors.items():
        groups.setdefault(describe_error(error), []).append(index)
    for items in sorted(groups.values(), key=lambda items: -len(items)):
        first = items[0]
        text = _cut(story.frame["error"].iloc[first], MAX_TRACEBACK) or ""
        yield FailureGroup(text, items, traceback_of(story.errors[first]))


def traceback_of(error: BaseException) -> str:
    """Return the end of an error's traceback, with its notes."""
    cause = error.__cause__
    try:
        text = cause.text if isinstance(cause, RemoteTraceback) else traceback_text(error)
    except Exception:  # the user's own __str__
        return ""
    # a worker's text has the notes that were added there
    whole = "\n".join([text.rstrip(), *(note for note in notes_of(error) if note not in text)])
    return whole if len(whole) <= MAX_TRACEBACK else f"[...]{whole[-MAX_TRACEBACK:]}"


# --- static charts: best so far, timeline, concurrency and GPUs -----------------------------------


MAX_BARS = 2000
"""About the most bars; more would be slow to draw, and could not be told apart."""

MAX_POINTS = 1500

LANE_PIXELS = 26

LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}


def best_so_far(
    trials: Trials | None, config: Columns, ends: Mapping[int, tuple[float, str]]
) -> dict[str, Any]:
    """Return the charts of a search: its scores and the best so far, over trials and over time.

    Args:
        trials: The trials; None: it is not a search.
        config: The columns of configurations.
        ends: When each trial had its score, on the time axis, with the axis' unit.
    """
    scores = {} if trials is None else trials.ranked()
    if trials is None or not scores:
        return {}
    charts = {"trials": _scores_over(trials, config, scores, trials.numbers, "trial")}
    if all(item in ends for item in scores):
        unit = next(iter(ends.values()))[1]
        times = {item: ends[item][0] for item in scores}
        charts["time"] = _scores_over(trials, config, scores, times, f"run time [{unit}]")
    return charts


def _scores_over(
    trials: Trials,
    config: Columns,
    scores: Mapping[int, float],
    places: Mapping[int, float] | Sequence[float],
    title: str,
) -> dict[str, Any]:
    """Return a chart of scores, and of the best so far, over the places of the trials."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for state, color in MARKS.items():
        items = evenly([item for item in scores if trials.states[item] == state], MAX_BARS)
        if not items:
            continue
        figure.add_scatter(
            x=[places[item] for item in items],
            y=[short(scores[item]) for item in items],
            mode="markers",
            marker={
                "color": color,
                "symbol": "circle" if state == "complete" else "circle-open",
            },
            name=f"{state} ({trials.states.count(state):,})",
            hovertext=[_about(trials, config, item) for item in items],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    sign = 1 if trials.mode == "max" else -1
    best, steps = (False, -math.inf), []
    for item in sorted(scores, key=places.__getitem__):
        # a score after a few epochs is no match for one after all of them
        found = trials.states[item] == "complete", sign * scores[item]
        if found > best:
            best = found
            steps.append((places[item], scores[item]))
    steps.append((max(places[item] for item in scores), steps[-1][1]))
    figure.add_scatter(
        x=[place for place, _ in steps],
        y=[short(score) for _, score in steps],
        mode="lines",
        line={"shape": "hv", "width": 2, "color": PALETTE[2]},
        name="best so far",
        hovertemplate="best so far: %{y:.5~g}<extra></extra>",
    )
    figure.update_layout(
        height=340,
        hovermode="closest",
        margin={"l": 10, "r": 10, "t": 20, "b": 70},
        legend=LEGEND,
        xaxis_title_text=title,
        yaxis_title_text=html.escape(trials.metric),
        yaxis_automargin=True,
    )
    chart: dict[str, Any] = figure.to_plotly_json()
    return chart


def lineage(trials: Trials, metrics: pd.DataFrame) -> dict[str, Any]:
    """Return the chart of a population, if its trials reported epochs: their scores over these.

    The line of a trial begins where it took over, on the line of the other trial.
    """
    import pandas as pd
    import plotly.graph_objects as go

    if not {"epoch", trials.metric} <= {*metrics.columns}:
        return {}
    rows = metrics[["item", "epoch", trials.metric]].apply(pd.to_numeric, errors="coerce").dropna()
    curves = {
        trials.numbers[int(item)]: dict(own[["epoch", trials.metric]].to_numpy().tolist())
        for item, own in rows.groupby("item")
    }
    figure = go.Figure()
    for number, state, parent in zip(trials.numbers, trials.states, trials.parents, strict=True):
        own = curves.get(number, {})
        before = {} if parent is None else curves.get(parent, {})
        began = [epoch for epoch in before if own and epoch < min(own)][-1:]
        epochs = evenly([*began, *own], MAX_POINTS)
        figure.add_scatter(
            x=epochs,
            y=[short(own.get(epoch, before.get(epoch))) for epoch in epochs],
            mode="lines",
            line={"color": MARKS[state], "width": 2 if state == "complete" else 1},
            name=f"trial {number}" + (f", from trial {parent}" if parent is not None else ""),
            hovertemplate="%{fullData.name}<br>epoch %{x}: %{y:.5~g}<extra></extra>",
        )
    figure.update_layout(
        height=340,
        showlegend=False,
        hovermode="closest",
        margin={"l": 10, "r": 10, "t": 20, "b": 70},
        xaxis_title_text="epoch",
        yaxis_title_text=html.escape(trials.metric),
        yaxis_automargin=True,
    )
    return {"epochs": figure.to_plotly_json()}


def _about(trials: Trials, config: Columns, item: int) -> str:
    """Return the hover text of a trial, as HTML."""
    epochs = trials.epochs[item]
    after = f" after {epochs:,} epoch{'s' if epochs != 1 else ''}" if epochs else ""
    there = {name: cells[item] for name, cells in config.items() if cells[item] is not None}
    given = ", ".join(f"{name}={_written(value)}" for name, value in there.items())[:MAX_TEXT]
    first = f"trial {trials.numbers[item]}, {trials.states[item]}{after}: {trials.scores[item]:.5g}"
    return f"{first}<br>{html.escape(given)}"


def _ends(story: Story, shown: Timeline) -> dict[int, tuple[float, str]]:
    """Return when each item had its last score, on the time axis, with the axis' unit."""
    unit_s, symbol = unit_of(shown.wall_s)
    ends: dict[Any, float] = shown.attempts.groupby("item")["end_s"].max().to_dict()
    # a trial that waited at a rung ran in several parts
    for item, time in story.metrics.groupby("item")["time"].max().items():
        for offset_s, first, last in shown.calls.values():
            if first <= time.timestamp() <= last:
                ends[item] = offset_s + time.timestamp() - first
    return {item: (at_s / unit_s, symbol) for item, at_s in ends.items()}


def timeline(shown: Timeline) -> tuple[dict[str, Any], int]:
    """Return the chart of the timeline, and its number of bars."""
    import plotly.graph_objects as go

    unit_s, symbol = unit_of(shown.wall_s)
    tick_s = 0.0 if len(shown.attempts) <= MAX_BARS else shown.wall_s * len(shown.lanes) / MAX_BARS
    bars = merged(shown.attempts, tick_s)
    labels = [html.escape(lane.label) for lane in shown.lanes]
    figure = go.Figure()
    for status, color in COLORS.items():
        rows = bars[bars["status"] == status]
        if rows.empty:
            continue
        figure.add_bar(
            orientation="h",
            name=f"{status} ({int(rows['count'].sum()):,})",
            y=[labels[lane] for lane in rows["lane"]],
            base=(rows["start_s"] / unit_s).to_numpy(),
            x=((rows["end_s"] - rows["start_s"]) / unit_s).to_numpy(),
            marker_color=color,
            marker_line_width=0 if tick_s else 0.5,
            marker_line_color="rgba(255,255,255,0.6)",
            hovertext=[_hover(row) for row in rows.itertuples()],
            hovertemplate="%{y}<br>%{hovertext}<extra></extra>",
        )
    for at_s in shown.breaks_s:
        figure.add_vline(x=at_s / unit_s, line={"dash": "dot", "width": 1, "color": "#888"})
    figure.update_layout(
        barmode="overlay",
        showlegend=True,
        bargap=0.25,
        height=120 + LANE_PIXELS * max(len(labels), 2),
        margin={"l": 10, "r": 10, "t": 30, "b": 70},
        legend={**LEGEND, "title": {"text": "attempts:"}},
        xaxis_title_text=f"run time [{symbol}]",
        xaxis_range=[0, shown.wall_s / unit_s or 1],
        yaxis_categoryorder="array",
        yaxis_categoryarray=labels[::-1],  # plotly's first one is at the bottom
        yaxis_automargin=True,
        yaxis_fixedrange=True,
        yaxis_type="category",
    )
    return figure.to_plotly_json(), len(bars)


def _hover(row: Any) -> str:
    """Return the hover text of a bar, as HTML."""
    length = took(row.end_s - row.start_s)
    if row.count > 1:
        return f"{row.count:,} items, {row.status}, from item {row.item}<br>{length} in all"
    lines = [f"item {row.item}, {row.status}, {length}"]
    if row.attempt > 1:
        lines[0] += f", attempt {row.attempt}"
    if isinstance(row.error, str):
        lines.append(html.escape(row.error[:120]))
    return "<br>".join(lines)


def concurrency(shown: Timeline) -> dict[str, Any]:
    """Return the chart of how many attempts ran at once."""
    import plotly.graph_objects as go

    unit_s, symbol = unit_of(shown.wall_s)
    times, counts = at_once(shown.attempts, MAX_POINTS)
    figure = go.Figure()
    figure.add_scatter(
        x=[at_s / unit_s for at_s in times],
        y=counts,
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": COLORS["finished"]},
        fill="tozeroy",
        name="running",
        hovertemplate="%{y:.3~g} running<extra></extra>",
    )
    figure.add_hline(y=len(shown.lanes), line={"dash": "dot", "width": 1, "color": "#888"})
    figure.update_layout(
        height=260,
        showlegend=False,
        margin={"l": 10, "r": 10, "t": 20, "b": 40},
        xaxis_title_text=f"run time [{symbol}]",
        xaxis_range=[0, shown.wall_s / unit_s or 1],
        yaxis_title_text="running items",
        yaxis_range=[0, len(shown.lanes) * 1.1],
        yaxis_automargin=True,
    )
    chart: dict[str, Any] = figure.to_plotly_json()
    return chart


MAX_GPU_POINTS = 400
"""The most points of a GPU's line."""


def gpu_usage(shown: Timeline, samples: Sequence[GpuSample]) -> dict[str, Any] | None:
    """Return the chart of the GPUs over time; None if too little is known for a line."""
    import plotly.graph_objects as go

    unit_s, symbol = unit_of(shown.wall_s)
    lines: dict[tuple[str, int], list[tuple[float, GpuSample]]] = {}
    for sample in samples:
        offset_s, first, last = shown.calls.get(sample.run, (0.0, math.inf, 0.0))
        if first <= sample.time <= last:  # before and after, no item ran
            at_s = float(offset_s + sample.time - first)
            lines.setdefault((sample.host, sample.gpu), []).append((at_s, sample))
    if max(map(len, lines.values()), default=0) < 2:
        return None
    is_one_host = len({host for host, _ in lines}) == 1
    most_bytes = max((sample.total_bytes or sample.used_bytes) for sample in samples)
    figure = go.Figure()
    for number, (title, field, unit, top) in enumerate(
        (
            ("utilization [%]", "utilization", 0.01, 1.0),
            ("memory [GiB]", "used_bytes", 2**30, most_bytes),
        )
    ):
        axis = "yaxis2" if number else "yaxis"
        for place, ((host, gpu), points) in enumerate(sorted(lines.items())):
            label = f"GPU {gpu}" if is_one_host else f"{html.escape(host)}: GPU {gpu}"
            kept = evenly(points, MAX_GPU_POINTS)
            values = [getattr(sample, field) for _, sample in kept]
            figure.add_scatter(
                x=[at_s / unit_s for at_s, _ in kept],
                y=[None if value is None else float(f"{value / unit:.4g}") for value in values],
                mode="lines",
                line={"color": PALETTE[place % len(PALETTE)], "width": 1.5},
                name=label,
                legendgroup=label,
                showlegend=number == 0,
                yaxis=axis.replace("axis", ""),
                hovertemplate=f"{label}: %{{y:.3~g}}<extra></extra>",
            )
        figure.layout[axis] = {
            "title": {"text": title},
            "range": [0, 1.05 * top / unit],
            "domain": [0.0, 0.44] if number else [0.56, 1.0],
            "automargin": True,
        }
    figure.update_layout(
        height=420,
        margin={"l": 10, "r": 10, "t": 20, "b": 70},
        legend=LEGEND,
        xaxis_title_text=f"run time [{symbol}]",
        xaxis_range=[0, shown.wall_s / unit_s or 1],
        xaxis_anchor="y2",
    )
    chart: dict[str, Any] = figure.to_plotly_json()
    return chart
