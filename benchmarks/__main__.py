"""Run all benchmarks (or those named on the command line), print one table, and keep it in `results/` and `RESULTS.md`.

`python -m benchmarks gpu` measures what needs a GPU, by itself; its record and its table are for each kind of card.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import cards, machine, slug, why_not
from benchmarks.measuring import ROOT
from benchmarks.session import WORKERS, prepare_environment, session

HERE = ROOT / "benchmarks"
ALONE = (
    "start",
    "scheduler",
    "kinds",
    "devices",
    "telemetry",
    "live_view",
    "cloud",
    "report_page",
)  # in processes of their own, before Ray
ON_RAY = ("parfor", "futures", "gap", "skew", "cancel", "closure", "report", "queue", "spmd", "train", "durable", "joblib")
ON_GPU = "gpu"  # by itself, on a machine that has one
HEADINGS = ("What", "measured", "against", "measured", "ratio", "target", "")
DIGITS = 3


def main(names):
    unknown = [name for name in names if name not in ALONE + ON_RAY]
    if unknown:
        sys.exit(f"There is no benchmark {', '.join(unknown)}. There are: {', '.join(ALONE + ON_RAY)}; and by itself {ON_GPU}.")
    wanted = [name for name in ALONE + ON_RAY if not names or name in names]
    started = time.perf_counter()
    prepare_environment()
    lines = []
    for name in wanted:
        if name in ALONE:
            lines += _run(name)
    if any(name in ON_RAY for name in wanted):
        with session() as parties:
            for name in wanted:
                if name in ON_RAY:
                    lines += _run(name, parties)
    described = {**machine(), "workers": WORKERS, "took_s": round(time.perf_counter() - started)}
    _show(lines, described)
    if not names:
        _keep("dispatch", lines, described, HERE / "RESULTS.md")


def measure_gpu():
    """Measure what needs a GPU, and keep it: a run of its own, with a record for each kind of card."""
    reason = why_not()
    if reason is not None:
        sys.exit(f"{reason} Nothing was measured.")
    started = time.perf_counter()
    prepare_environment()
    lines = _run(ON_GPU)
    described = {**machine(), **cards(), "took_s": round(time.perf_counter() - started)}
    _show(lines, described)
    name = f"speed_on_{slug(described['gpus'][0]['name'])}"
    _keep(name, lines, described, HERE / "results" / f"{name}.md")


def _show(lines, described):
    Console(width=None if sys.stdout.isatty() else 150).print(_table(lines))
    print(_said(described))


def _run(name, *arguments):
    print(f"{name} ...", file=sys.stderr, flush=True)
    return import_module(f"benchmarks.bench_{name}").run(*arguments)


def _keep(name, lines, described, path):
    """Keep the raw numbers under this name, and the table as a document at this path."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    record = {"machine": described, "lines": [line.record() for line in lines]}
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    missed = [line for line in lines if line.is_met() is False]
    command = "bench" if name == "dispatch" else "bench-gpu"
    raw = (results / f"{name}.json").relative_to(path.parent)
    text = [
        "# How fast" if name == "dispatch" else f"# How fast on an {described['gpus'][0]['name']}",
        "",
        f"Written by `make {command}`; the raw numbers are in [{raw}]({raw}). Everything in a row was",
        "measured in turns in one run. Numbers are medians (smallest to largest); a ratio is taken within each turn. Only the",
        "ratios mean something on another machine.",
        "",
        _said(described),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(_cells(line)) + " |" for line in lines),
        "",
        f"Missed: {'; '.join(f'{line.area}: {line.what} against {line.against}' for line in missed) or 'none'}.",
        "",
    ]
    path.write_text("\n".join(text))


def _table(lines):
    table = Table(*HEADINGS, title="raypool against others; medians (smallest-largest)")
    area = None
    for line in lines:
        if area not in (None, line.area):
            table.add_section()
        area = line.area
        color = {None: "", True: "green", False: "bold red"}[line.is_met()]
        *cells, verdict = _cells(line)
        table.add_row(*cells, f"[{color}]{verdict}[/]" if color else verdict)
    return table


def _cells(line):
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


def _said(described):
    changed = " with changes" if described["is_changed"] else ""
    workers = f", {described['workers']} workers" if "workers" in described else ""
    gpus = "".join(f", {gpu['name']}" for gpu in described.get("gpus", ()))
    gpus += f", driver {described['driver']}, CUDA {described['cuda']}" if gpus else ""
    return (
        f"{described['date']}, commit {described['commit']}{changed}{gpus}, {described['cores']} cores{workers}, Python "
        f"{described['python']}, Ray {described['ray']}, torch {described['torch']}, {described['system']}; took "
        f"{described['took_s']} s, load {described['load'][0]:.1f}."
    )


if __name__ == "__main__":
    if sys.argv[1:] == [ON_GPU]:
        measure_gpu()
    else:
        main(sys.argv[1:])
