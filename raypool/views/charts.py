"""The charts of the page that never change: what ran when, and how many ran at once. As what plotly draws in a browser."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from raypool.views.lanes import COLOURS, Plan, at_once, merged, took, unit_of

if TYPE_CHECKING:
    import pandas as pd

MAX_BARS = 2000
"""About so many bars are drawn; more would make the page slow, and none could be told from the next."""

MAX_POINTS = 1500

LANE_PIXELS = 26


def timeline(shown: Plan) -> tuple[dict[str, Any], int]:
    """Return the chart of what ran when, and how many bars it has.

    Attempts that are too short to be told apart share bars.
    """
    import plotly.graph_objects as go

    unit_s, symbol = unit_of(shown.wall_s)
    tick_s = 0.0 if len(shown.attempts) <= MAX_BARS else shown.wall_s * len(shown.lanes) / MAX_BARS
    bars = merged(shown.attempts, tick_s)
    labels = [html.escape(lane.label) for lane in shown.lanes]
    figure = go.Figure()
    for status, colour in COLOURS.items():
        rows = bars[bars["status"] == status]
        if rows.empty:
            continue
        figure.add_bar(
            orientation="h",
            name=f"{status} ({int(rows['count'].sum()):,})",
            y=[labels[lane] for lane in rows["lane"]],
            base=(rows["start_s"] / unit_s).to_numpy(),
            x=((rows["end_s"] - rows["start_s"]) / unit_s).to_numpy(),
            marker={"color": colour, "line": {"width": 0.5 if not tick_s else 0, "color": "rgba(255,255,255,0.6)"}},
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
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": f"time since the start [{symbol}]"}, "range": [0, shown.wall_s / unit_s or 1]},
        yaxis={
            "categoryorder": "array",
            "categoryarray": labels[::-1],
            "automargin": True,
            "fixedrange": True,
            "type": "category",
        },
    )
    return figure.to_plotly_json(), len(bars)


def _hover(row: Any) -> str:
    """Return what is known of a bar, where `<` and `&` are no markup."""
    length = took(row.end_s - row.start_s)
    if row.count > 1:
        return f"{row.count:,} items, {row.status}, from item {row.item}<br>{length} in all"
    lines = [f"item {row.item}, {row.status}, {length}"]
    if row.attempt > 1:
        lines[0] += f", attempt {row.attempt}"
    if isinstance(row.error, str):
        lines.append(html.escape(row.error[:120]))
    return "<br>".join(lines)


def concurrency(attempts: pd.DataFrame, wall_s: float, num_workers: int) -> dict[str, Any]:
    """Return the chart of how many attempts ran at once."""
    import plotly.graph_objects as go

    unit_s, symbol = unit_of(wall_s)
    times, counts = at_once(attempts, MAX_POINTS)
    figure = go.Figure()
    figure.add_scatter(
        x=[at_s / unit_s for at_s in times],
        y=counts,
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": COLOURS["finished"]},
        fill="tozeroy",
        name="running",
        hovertemplate="%{y:.3~g} at once<extra></extra>",
    )
    figure.add_hline(y=num_workers, line={"dash": "dot", "width": 1, "color": "#888"})
    figure.update_layout(
        height=260,
        showlegend=False,
        margin={"l": 10, "r": 10, "t": 20, "b": 40},
        xaxis={"title": {"text": f"time since the start [{symbol}]"}, "range": [0, wall_s / unit_s or 1]},
        yaxis={"title": {"text": "items at once"}, "range": [0, num_workers * 1.1], "automargin": True},
    )
    chart: dict[str, Any] = figure.to_plotly_json()
    return chart
