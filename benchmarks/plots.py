"""The page's pictures, made of the records, the same bytes each time: ratios beside many systems,
costs as pools grow, and scores over time.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from statistics import median

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmarks.losses import NO_SYSTEMS
from benchmarks.records import RESULTS
from benchmarks.suite import MATRICES

WIDTH = 9.0
"""As wide as a page on GitHub [inches of 96 pixels]."""
ROW = 0.36
# told apart by whoever sees fewer colours too
COLORS = ("#0072b2", "#d55e00", "#009e73", "#8e44ad", "#666666")
MARKERS = "osD^v"
LEGEND_COLUMNS = 4
TITLES = 80  # letters, all panels together
STYLE = {
    "figure.facecolor": "white",  # a sheet of its own: it looks the same on a dark page
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # of the same width
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "raypool",
}
SUBDIVISIONS = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 5, 7, 8, 9),
)
LEAST_TICKS = 3
LEAST_SIZES = 3
"""Curves of fewer points say no more than their table."""
WORKERS = re.compile(r",? ([\d,]+) workers$")
AFTER = re.compile(r"after ([\d.]+) s$")


def picture_of(name):
    """Return where the picture of a benchmark is."""
    return RESULTS / f"{name}.svg"


def draw(name, lines):
    """Draw the picture of a benchmark, if it has one; one from before goes."""
    figure = figure_of(name, lines)
    if figure is None:
        picture_of(name).unlink(missing_ok=True)
        return
    drawn = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    # a hundredth of a point cannot be seen
    short = re.sub(r"(\d\.\d\d)\d+", r"\1", drawn.getvalue())
    picture_of(name).write_text(re.sub(r"\s*\n\s*", "\n", short))


def figure_of(name, lines):
    """Return the figure of a benchmark; None if a picture says no more than the table."""
    with rc_context(STYLE):
        if all(AFTER.match(line.what) for line in lines):
            return over_time(lines)
        return ratios(lines) if name in MATRICES else growth(lines)


def ratios(lines):
    """Draw how many times as much as raypool each system takes: a dot for the median, a line from
    the least to the most.
    """
    lines = [line for line in lines if line.others is not None and line.against not in NO_SYSTEMS]
    areas, systems, whats = (
        list(dict.fromkeys(getattr(line, name) for line in lines))
        for name in ("area", "against", "what")
    )
    if not lines:
        return None
    most = max(len({line.what for line in lines if line.area == area}) for area in areas)
    row = max(ROW, 0.13 * most)
    legend_rows = math.ceil(len(whats) / LEGEND_COLUMNS)
    figure = Figure((WIDTH, 1.3 + 0.2 * legend_rows + row * len(systems)), layout="constrained")
    panels = figure.subplots(1, len(areas), sharex=True, sharey=True, squeeze=False)[0]
    for panel, area in zip(panels, areas, strict=True):
        panel.set_title(textwrap.fill(area, TITLES // len(areas)))
        panel.axvline(1, color="black", linewidth=1)
        inside = list(dict.fromkeys(line.what for line in lines if line.area == area))
        for at, what in enumerate(inside):
            shift = (at - (len(inside) - 1) / 2) * 0.8 / len(inside)
            rows = {
                systems.index(line.against) + shift: line
                for line in lines
                if (line.area, line.what) == (area, what)
            }
            _dots(panel, rows, *_look(whats.index(what)))
        panel.hlines(
            [position - 0.5 for position in range(1, len(systems))],
            0,
            1,
            "#e5e5e5",
            transform=panel.get_yaxis_transform(),
        )
    panels[0].set_xscale("log")
    panels[0].set_yticks(range(len(systems)), systems)
    panels[0].set_ylim(len(systems) - 0.5, -0.5)
    _mark(panels)
    figure.supxlabel(
        "times as much as raypool takes: raypool is ahead right of the line at 1, behind left"
        " of it",
        fontsize=10,
    )
    if len(whats) > 1:
        looks = map(_look, range(len(whats)))
        handles = [
            panels[0].plot([], [], look[0], color=look[1], label=what)[0]
            for what, look in zip(whats, looks, strict=True)
        ]
        figure.legend(
            handles=handles,
            loc="outside upper center",
            ncols=min(len(whats), LEGEND_COLUMNS),
            frameon=False,
        )
    return figure


def _look(number):
    """Return a marker and a colour: other ones for each of the first 25."""
    return MARKERS[number % len(MARKERS)], COLORS[(number + number // len(MARKERS)) % len(COLORS)]


def _dots(panel, rows, marker, color):
    """Draw what lines say, each at its height."""
    shares = {height: [1 / share for share in line.shares()] for height, line in rows.items()}
    spans = [
        (edge, height)
        for height, found in shares.items()
        for edge in (min(found), max(found), math.nan)
    ]
    # nan: the line is broken there
    panel.plot(*zip(*spans, strict=True), color=color, linewidth=1.5, alpha=0.6)
    panel.plot(
        [median(found) for found in shares.values()],
        list(shares),
        marker,
        color=color,
        markersize=5,
    )


def _mark(panels):
    """Put numbers on the logarithmic axis: as many as there is room for."""
    least, most = panels[0].get_xlim()
    for subs in SUBDIVISIONS:
        ticks = [
            sub * 10**power
            for power in range(-4, 8)
            for sub in subs
            if least <= sub * 10.0**power <= most
        ]
        if len(ticks) >= LEAST_TICKS:
            break
    for panel in panels:
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(axis="x", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)


def over_time(lines):
    """Draw what each party has reached after some seconds: the median, and from least to most."""
    curves = {}
    for line in lines:
        moment = float(AFTER.match(line.what)[1])
        curves.setdefault("raypool", {})[moment] = line.values
        curves.setdefault(line.against, {})[moment] = line.others
    figure = Figure((WIDTH, 4.2), layout="constrained")
    panel = figure.subplots()
    for at, (label, points) in enumerate(curves.items()):
        marker, color = _look(at)
        moments, found = zip(*sorted(points.items()), strict=True)
        panel.plot(moments, list(map(median, found)), "-" + marker, color=color, label=label)
        bounds = (list(map(edge, found)) for edge in (min, max))
        panel.fill_between(moments, *bounds, color=color, alpha=0.12, linewidth=0)
    panel.set_yscale("log")
    least, most = panel.get_ylim()
    ticks = [sub * 10.0**power for power in range(-6, 6) for sub in (1, 2, 5)]
    panel.yaxis.set_major_locator(FixedLocator([at for at in ticks if least <= at <= most]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("seconds since the first epoch")
    panel.set_ylabel(lines[0].area)
    panel.grid(color="#e5e5e5", linewidth=0.8)
    panel.legend(frameon=False)
    return figure


WIDE = 100
"""What spans so many times its least value is drawn on a logarithmic scale."""


def growth(lines):
    """Draw what something costs by how many workers there are: a panel for each unit; None if no
    cost is known at three sizes.
    """
    curves = {key: points for key, points in curves_of(lines).items() if len(points) > 1}
    units = list(
        dict.fromkeys(unit for (_, unit), points in curves.items() if len(points) >= LEAST_SIZES)
    )
    if not units:
        return None
    figure = Figure((WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(units), squeeze=False)[0]
    for panel, unit in zip(panels, units, strict=True):
        shown = {label: points for (label, its), points in curves.items() if its == unit}
        for at, (label, points) in enumerate(shown.items()):
            marker, color = _look(at)
            sizes = sorted(points)
            panel.plot(
                sizes,
                [median(points[size]) for size in sizes],
                "-" + marker,
                color=color,
                label=label,
            )
            panel.vlines(
                sizes,
                [min(points[size]) for size in sizes],
                [max(points[size]) for size in sizes],
                color=color,
                alpha=0.6,
            )
        panel.set_xscale("log")
        least, most = (
            edge(median(values) for points in shown.values() for values in points.values())
            for edge in (min, max)
        )
        if most > WIDE * least:
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set_ylabel(unit)
        panel.set_xlabel("workers")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(color="#e5e5e5", linewidth=0.8)
        panel.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def curves_of(lines):
    """Return what is known at several sizes: (what, unit) -> number of workers -> values.

    The size is read from the end of a line's words: "an event, 1,000 workers". What it is held
    against may be another size.
    """
    curves = {}
    for line in lines:
        mine, other = WORKERS.search(line.what), WORKERS.search(" " + line.against)
        if mine is None:
            continue
        points = curves.setdefault((f"{line.area}: {line.what[: mine.start()]}", line.unit), {})
        points.setdefault(_count(mine), line.values)
        if other is not None and other.start() == 0 and line.others is not None:
            points.setdefault(_count(other), line.others)
    return curves


def _count(match):
    return int(match[1].replace(",", ""))
