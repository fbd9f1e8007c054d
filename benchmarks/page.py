"""The page: tables of all that is on record, and where raypool loses, in words that speak of
ratios; a table for a terminal.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from rich.table import Table

from benchmarks.losses import LEAST_ROUNDS, losses
from benchmarks.measuring import ROOT
from benchmarks.plots import draw, picture_of
from benchmarks.records import RESULTS, kept
from benchmarks.suite import MATRICES, SUITE

PAGE = ROOT / "benchmarks" / "RESULTS.md"
HEADINGS = ("What", "measured", "against", "measured", "ratio", "target", "")
DIGITS = 3
UNKNOWN = "Not explained yet."

HEAD = """# How fast

`make bench` measures in ten minutes on two cores, `make bench-full` measures everything. Both write this page from the records
in `benchmarks/results`, which have the numbers of every round. One benchmark by its name: `.venv/bin/python -m benchmarks futures`.

All systems in a row took turns in one run. Numbers are the median (smallest to largest) of at least five rounds, unless the row
gives their number. Ratios are computed within each round; only ratios carry over to other machines. `2 x`: raypool takes twice
as long, or as much. `2 x as fast`: it takes half as long. In tables with a row for each system, the number is that system's time
divided by raypool's, so raypool loses where it is below 1.
"""


def write_page():
    """Write the page and its pictures anew, from all that is on record."""
    named = {name: record for name in (*SUITE, *_cards()) if (record := kept(name)) is not None}
    described = [record["machine"] for record in named.values()]
    common = Counter(map(facts, described)).most_common(1)[0][0] if described else ""
    for name, record in named.items():
        draw(name, record["lines"])
    sections = [_section(name, record, common) for name, record in named.items()]
    parts = [
        HEAD,
        *_measured_on(described, common),
        *_targets(named),
        *_losses(named),
        *sections,
        *_missing(named),
    ]
    PAGE.write_text("\n".join(parts))


def _cards():
    """Return the names of what was measured on GPUs, by the kind of card."""
    return sorted(path.stem for path in RESULTS.glob("speed_on_*.json"))


def _measured_on(described, common):
    if not described:
        return []
    days = sorted({entry["date"][:10] for entry in described})
    between = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return [f"Measured {between}, where a section does not say otherwise: {common}.", ""]


def _targets(named):
    """Return a table of all targets."""
    aimed = [
        (record["title"], line)
        for record in named.values()
        for line in record["lines"]
        if line.target is not None
    ]
    met = sum(line.is_met() for _, line in aimed)
    rows = [
        (title, row[0], row[2], row[4] or row[1], *row[5:])
        for title, line in aimed
        for row in [cells(line)]
    ]
    headings = ("Section", "What", "against", "measured", "target", "")
    return ["## Targets", "", f"{met} of {len(aimed)} are met.", "", *_markdown(headings, rows), ""]


def _losses(named):
    """Return where raypool loses, by the reason."""
    by_reason = {}
    for name, record in named.items():
        for line, reason in losses(name, record["lines"]):
            by_reason.setdefault(reason, []).append(f"{record['title']}, {_verdict(line)}")
    if not by_reason:
        return ["## Where raypool loses", "", "Nowhere, in what is on record.", ""]
    said = (
        "Rows in which another system takes less, or a target is missed. `2 x`: raypool takes twice"
        " as much as the other system, or as its target allows."
    )
    told = [
        f"- **{reason or UNKNOWN}** " + "; ".join(rows) + "."
        for reason, rows in sorted(by_reason.items())
    ]
    return ["## Where raypool loses", "", said, "", *told, ""]


def _verdict(line):
    """Return in words what a line in which raypool loses is about."""
    named = f"{line.area}: {line.what}, against {line.against}"
    verdict = {None: "", True: ", within its target", False: ", target missed"}[line.is_met()]
    if line.others is not None:
        return f"{named}: {_spread(line.shares(), 'x')}{verdict}"
    if not line.target:  # nothing at all was allowed
        return f"{named}{verdict}"
    return f"{named}: {_spread([value / line.target for value in line.values], 'x')}{verdict}"


def _section(name, record, common):
    shown = _matrices(record["lines"]) if name in MATRICES else _rows(record["lines"])
    picture = (
        [f"![{record['title']}: the table as a picture](results/{name}.svg)", ""]
        if picture_of(name).is_file()
        else []
    )
    where = facts(record["machine"])
    raw = (
        f"{said_of(record)}{'' if where == common else f' On {where}.'} [All"
        f" numbers](results/{name}.json)."
    )
    return "\n".join(
        [f"## {record['title']}", "", record["text"], "", *shown, "", *picture, raw, ""]
    )


def _missing(named):
    """Return what is not on record."""
    missing = [f"{title} (`{name}`)" for name, title in SUITE.items() if name not in named]
    if not _cards():
        missing.append("all that needs a GPU (`make bench-gpu`, where there is one)")
    return [f"## Not measured\n\n{'; '.join(missing)}.\n"] if missing else []


def _rows(lines):
    """Return a row for each line."""
    return _markdown(HEADINGS, [cells(line) for line in lines])


def _matrices(lines):
    """Return a table for each area: a row for each system, and in its columns how many times as
    long as raypool it takes.
    """
    parts = []
    for area in dict.fromkeys(line.area for line in lines):
        inside = [line for line in lines if line.area == area]
        whats = list(dict.fromkeys(line.what for line in inside))
        found = {(line.against, line.what): line for line in inside}
        against = list(dict.fromkeys(line.against for line in inside))
        ours = ["raypool", *(_spread(*_ours(inside, what)) for what in whats)]
        notes = {line.against: f" ({line.note})" for line in inside if line.note}
        most = {
            what: max(len(line.values) for line in inside if line.what == what) for what in whats
        }
        rows = [
            [
                name + notes.get(name, ""),
                *(_times(found.get((name, what)), most[what]) for what in whats),
            ]
            for name in against
        ]
        heads = [what + _few(_ours(inside, what)[1], most[what]) for what in whats]
        parts += [*_markdown((area, *heads), [ours, *rows]), ""]
    return parts[:-1]


def _ours(lines, what):
    """Return raypool's own values, as many as there are, and their unit."""
    line = max((line for line in lines if line.what == what), key=lambda line: len(line.values))
    return line.values, line.unit


def _times(line, most):
    """Return how many times as long as raypool a system takes; and of how many rounds, if others
    have more.
    """
    if line is None:
        return ""
    ratios = [other / value for value, other in zip(line.values, line.others, strict=True)]
    return _spread(ratios, "x") + (_few(line.unit, len(ratios)) if len(ratios) < most else "")


def _few(unit, num_rounds):
    """Return in words how many rounds there were, if they are few; "" for what is counted, and has
    no unit.
    """
    if num_rounds >= LEAST_ROUNDS or not unit:
        return ""
    return f" ({num_rounds} round{'s' if num_rounds > 1 else ''})"


def _markdown(headings, rows):
    return ["| " + " | ".join(row) + " |" for row in (headings, ["---"] * len(headings), *rows)]


def table(lines):
    """Return the lines as a table for a terminal."""
    shown = Table(*HEADINGS, title="raypool against others; medians (smallest-largest)")
    area = None
    for line in lines:
        if area not in (None, line.area):
            shown.add_section()
        area = line.area
        color = {None: "", True: "green", False: "bold red"}[line.is_met()]
        *first, verdict = cells(line)
        shown.add_row(*first, f"[{color}]{verdict}[/]" if color else verdict)
    return shown


def cells(line):
    """Return what stands in a line of the table."""
    note = f" ({line.note})" if line.note else ""
    target = ""
    if line.target is not None:
        bound = "at least" if line.is_speedup else "at most"
        target = (
            f"{bound}"
            f" {_number(line.target, line.unit) if line.others is None else f'{line.target:g} x'}"
        )
    verdict = {None: "", True: "met", False: "MISSED"}[line.is_met()]
    return (
        f"{line.area}: {line.what}{note}{_few(line.unit, len(line.values))}",
        _spread(line.values, line.unit),
        line.against,
        "" if line.others is None else _spread(line.others, line.unit),
        (
            ""
            if line.others is None
            else _spread(line.ratios(), "x as fast" if line.is_speedup else "x")
        ),
        target,
        verdict,
    )


def _spread(values, unit):
    """Return the median (smallest-largest), all in the unit that suits the median."""
    factor, name = _scale(median(values), unit)
    middle, least, most = (
        _rounded(value * factor) for value in (median(values), min(values), max(values))
    )
    return f"{middle} {name}".strip() if len(values) == 1 else f"{middle} {name} ({least}-{most})"


def _rounded(value):
    return f"{value:.{DIGITS}g}" if abs(value) < 10**DIGITS else f"{value:,.0f}"


def _number(value, unit):
    return _spread([value], unit)


def _scale(value, unit):
    if unit != "us" or abs(value) < 1e3:
        return 1, unit
    return (1e-3, "ms") if abs(value) < 1e6 else (1e-6, "s")


def said_of(record):
    """Return when something was measured, in words."""
    described, took_s = record["machine"], record.get("duration_s")
    changed = " with changes" if described["is_changed"] else ""
    took = "" if took_s is None else f", took {took_s:.0f} s"
    return (
        f"{described['date']}, commit {described['commit']}{changed}{took}, load"
        f" {described['load'][0]:.1f}."
    )


def facts(described):
    """Return the machine that something was measured on and the versions of what is on it, in
    words.
    """
    gpus = "".join(f"{gpu['name']}, " for gpu in described.get("gpus", ()))
    gpus += f"driver {described['driver']}, CUDA {described['cuda']}, " if gpus else ""
    processor = f" ({described['processor']})" if described.get("processor") else ""
    memory = f", {described['memory_bytes'] / 1e9:.0f} GB" if "memory_bytes" in described else ""
    workers = f", {described['workers']} workers" if "workers" in described else ""
    versions = ", ".join(
        f"{name} {version}" for name, version in described.get("peers", {}).items()
    )
    return (
        f"{gpus}{described['cores']} cores{processor}{memory}{workers}, {described['system']},"
        f" Python {described['python']}, Ray {described['ray']}, torch {described['torch']}"
        + (f"; peers: {versions}" if versions else "")
    )
