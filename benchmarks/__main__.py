"""Run all benchmarks (or those named on the command line), print one table, and keep it in `results/` and `RESULTS.md`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import ROOT
from benchmarks.session import WORKERS, prepare_environment, session

HERE = ROOT / "benchmarks"
ALONE = ("start", "scheduler")  # in processes of their own, before Ray runs here
ON_RAY = ("parfor", "futures", "gap", "skew", "cancel", "closure", "report", "queue", "spmd", "train", "durable")
HEADINGS = ("What", "measured", "against", "measured", "ratio", "target", "")
DIGITS = 3


def main(names):
    unknown = [name for name in names if name not in ALONE + ON_RAY]
    if unknown:
        sys.exit(f"There is no benchmark {', '.join(unknown)}. There are: {', '.join(ALONE + ON_RAY)}.")
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
    machine = {**_machine(), "took_s": round(time.perf_counter() - started)}
    Console(width=None if sys.stdout.isatty() else 150).print(_table(lines))
    print(_said(machine))
    if not names:
        _keep(lines, machine)


def _run(name, *arguments):
    print(f"{name} ...", file=sys.stderr, flush=True)
    return import_module(f"benchmarks.bench_{name}").run(*arguments)


def _keep(lines, machine):
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    record = {"machine": machine, "lines": [line.record() for line in lines]}
    (results / "dispatch.json").write_text(json.dumps(record, indent=1) + "\n")
    missed = [line for line in lines if line.is_met() is False]
    text = [
        "# How fast",
        "",
        "Written by `make bench`; the raw numbers are in [results/dispatch.json](results/dispatch.json). Everything in a row was",
        "measured in turns in one run. Numbers are medians (smallest to largest); a ratio is taken within each turn. Only the",
        "ratios mean something on another machine.",
        "",
        _said(machine),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(_cells(line)) + " |" for line in lines),
        "",
        f"Missed: {'; '.join(f'{line.area}: {line.what} against {line.against}' for line in missed) or 'none'}.",
        "",
    ]
    (HERE / "RESULTS.md").write_text("\n".join(text))


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


def _machine():
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=False).stdout.strip()

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "is_changed": bool(git("status", "--porcelain", "raypool")),
        "cores": len(os.sched_getaffinity(0)),
        "workers": WORKERS,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("raypool", "ray", "torch", "numpy", "pandas")},
        "load": os.getloadavg(),
    }


def _said(machine):
    changed = " with changes" if machine["is_changed"] else ""
    return (
        f"{machine['date']}, commit {machine['commit']}{changed}, {machine['cores']} cores, {machine['workers']} workers, Python "
        f"{machine['python']}, Ray {machine['ray']}, torch {machine['torch']}, {machine['system']}; took {machine['took_s']} s, "
        f"load {machine['load'][0]:.1f}."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
