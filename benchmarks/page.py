"""The page: tables of all that is on record, in words that only speak of ratios. And the same table for a terminal."""

from __future__ import annotations

from statistics import median

from rich.table import Table

from benchmarks.measuring import ROOT
from benchmarks.records import RESULTS, kept
from benchmarks.suite import MATRICES, SUITE

PAGE = ROOT / "benchmarks" / "RESULTS.md"
HEADINGS = ("What", "measured", "against", "measured", "ratio", "target", "")
DIGITS = 3

HEAD = """# How fast

`make bench` measures in ten minutes on two cores, `make bench-full` all that there is; both write this page, from the records
in `benchmarks/results`, which have every raw number. Whatever stands in a row was measured in turns in one run. Numbers are
medians (smallest to largest); a ratio is taken within each turn. Only the ratios mean something on another machine. A row in
which raypool loses stays.
"""


def write_page():
    """Write the page anew, from all that is on record."""
    named = {name: record for name in (*SUITE, *_cards()) if (record := kept(name)) is not None}
    sections = [_section(name, record) for name, record in named.items()]
    PAGE.write_text("\n".join([HEAD, *_verdicts(named), *sections]))


def _cards():
    """Return the names of what was measured on GPUs, by the kind of card."""
    return sorted(path.stem for path in RESULTS.glob("speed_on_*.json"))


def _verdicts(named):
    lines = [line for record in named.values() for line in record["lines"] if line.target is not None]
    missed = [line for line in lines if not line.is_met()]
    said = f"{len(lines) - len(missed)} of {len(lines)} targets are met."
    return [said + (" Missed:" if missed else ""), "", *(f"- {_verdict(line)}" for line in missed), *([""] if missed else [])]


def _verdict(line):
    return f"{line.area}: {line.what}, against {line.against}" + (f". {line.reason}" if line.reason else "")


def _section(name, record):
    shown = _matrices(record["lines"]) if name in MATRICES else _rows(record["lines"])
    picture = [f"![{record['title']}](results/{name}.svg)", ""] if (RESULTS / f"{name}.svg").is_file() else []
    raw = f"{said_of(record['machine'])} [All numbers](results/{name}.json)."
    return "\n".join([f"## {record['title']}", "", record["text"], "", *shown, "", *picture, raw, ""])


def _rows(lines):
    """Return a row for each line."""
    return _markdown(HEADINGS, [cells(line) for line in lines])


def _matrices(lines):
    """Return a table for each area: a row for each system, and in its columns how many times as long as raypool it takes."""
    parts = []
    for area in dict.fromkeys(line.area for line in lines):
        inside = [line for line in lines if line.area == area]
        whats = list(dict.fromkeys(line.what for line in inside))
        found = {(line.against, line.what): line for line in inside}
        against = list(dict.fromkeys(line.against for line in inside))
        ours = ["raypool", *(_spread(*_ours(inside, what)) for what in whats)]
        rows = [[name, *(_times(found.get((name, what))) for what in whats)] for name in against]
        parts += [*_markdown((area, *whats), [ours, *rows]), ""]
    return parts[:-1]


def _ours(lines, what):
    """Return raypool's own values, and their unit."""
    line = next(line for line in lines if line.what == what)
    return line.values, line.unit


def _times(line):
    """Return how many times as long as raypool a system takes."""
    if line is None:
        return ""
    ratios = [other / value for value, other in zip(line.values, line.others, strict=True)]
    return _spread(ratios, "x")


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
    target = ""
    if line.target is not None:
        bound = "at least" if line.is_speedup else "at most"
        target = f"{bound} {_number(line.target, line.unit) if line.others is None else f'{line.target:g} x'}"
    verdict = {None: "", True: "met", False: "MISSED"}[line.is_met()]
    return (
        f"{line.area}: {line.what}" + (f" ({line.note})" if line.note else ""),
        _spread(line.values, line.unit),
        line.against,
        "" if line.others is None else _spread(line.others, line.unit),
        "" if line.others is None else _spread(line.ratios(), "x faster" if line.is_speedup else "x"),
        target,
        verdict,
    )


def _spread(values, unit):
    """Return the median (smallest-largest), all in the unit that suits the median."""
    factor, name = _scale(median(values), unit)
    middle, least, most = (_rounded(value * factor) for value in (median(values), min(values), max(values)))
    return f"{middle} {name}".strip() if len(values) == 1 else f"{middle} {name} ({least}-{most})"


def _rounded(value):
    return f"{value:.{DIGITS}g}" if abs(value) < 10**DIGITS else f"{value:,.0f}"


def _number(value, unit):
    return _spread([value], unit)


def _scale(value, unit):
    if unit != "us" or abs(value) < 1e3:
        return 1, unit
    return (1e-3, "ms") if abs(value) < 1e6 else (1e-6, "s")


def said_of(described):
    """Return the machine that something was measured on, in words."""
    changed = " with changes" if described["is_changed"] else ""
    workers = f", {described['workers']} workers" if "workers" in described else ""
    gpus = "".join(f", {gpu['name']}" for gpu in described.get("gpus", ()))
    gpus += f", driver {described['driver']}, CUDA {described['cuda']}" if gpus else ""
    return (
        f"{described['date']}, commit {described['commit']}{changed}{gpus}, {described['cores']} cores{workers}, Python "
        f"{described['python']}, Ray {described['ray']}, torch {described['torch']}, {described['system']}; took "
        f"{described['took_s']} s, load {described['load'][0]:.1f}."
    )
