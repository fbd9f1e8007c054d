"""Run the short benchmarks, all (`full`), or those named on the command line; print a table, keep the numbers, write the page.

`python -m benchmarks gpu` measures what needs a GPU, by itself; it has a record for each kind of card.
`python -m benchmarks page` measures nothing, and writes the page anew.
"""

from __future__ import annotations

import contextlib
import sys
import time
from importlib import import_module

from rich.console import Console

from benchmarks.machine import cards, machine, slug, why_not
from benchmarks.page import table, write_page
from benchmarks.records import described_by, keep
from benchmarks.session import WORKERS, prepare_environment, session
from benchmarks.suite import ON_GPU, ON_RAY, SHORT, SUITE


def main(names):
    unknown = [name for name in names if name not in SUITE]
    if unknown:
        sys.exit(f"There is no benchmark {', '.join(unknown)}. There are: {', '.join(SUITE)}; by itself {ON_GPU}; all: full.")
    prepare_environment()
    found = []
    for name in names:
        if name not in ON_RAY:
            found += measure(name, SUITE[name])
    with session() if ON_RAY.intersection(names) else contextlib.nullcontext() as parties:
        for name in names:
            if name in ON_RAY:
                found += measure(name, SUITE[name], parties)
    show(found)


def measure_gpu():
    """Measure what needs a GPU, and keep it: a run of its own, with a record for each kind of card."""
    reason = why_not()
    if reason is not None:
        sys.exit(f"{reason} Nothing was measured.")
    prepare_environment()
    described = cards()
    card = described["gpus"][0]["name"]
    show(measure(ON_GPU, f"On an {card}", described=described, kept_as=f"speed_on_{slug(card)}"))


def measure(name, title, *arguments, described=None, kept_as=None):
    """Run a benchmark and keep what it has found; return its lines."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    started, before = time.perf_counter(), machine()
    lines = import_module(f"benchmarks.bench_{name}").run(*arguments)
    took = {"workers": WORKERS, "took_s": round(time.perf_counter() - started)}
    keep(kept_as or name, title, described_by(name), lines, {**before, **(described or {}), **took})
    return lines


def show(lines):
    write_page()
    Console(width=None if sys.stdout.isatty() else 150).print(table(lines))


if __name__ == "__main__":
    if sys.argv[1:] == [ON_GPU]:
        measure_gpu()
    elif sys.argv[1:] == ["page"]:
        write_page()
    else:
        main({"": SHORT, "full": tuple(SUITE)}.get(" ".join(sys.argv[1:]), sys.argv[1:]))
