"""Run the short benchmarks, all (`full`), or those named on the command line; print a table, keep
the numbers, write the page.

If one fails, the others go on; it is named at the end, and the exit status is 1. Its last record
stays.

`python -m benchmarks gpu` measures what needs a GPU, by itself; it has a record for each kind of
card. `python -m benchmarks page` measures nothing, and writes the page anew.
"""

from __future__ import annotations

import sys

from rich.console import Console

from benchmarks.machine import cards, slug, why_not
from benchmarks.page import table, write_page
from benchmarks.running import Run
from benchmarks.session import prepare_environment
from benchmarks.suite import ON_GPU, SHORT, SUITE


def main(names):
    unknown = [name for name in names if name not in SUITE]
    if unknown:
        sys.exit(
            f"There is no benchmark {', '.join(unknown)}. There are: {', '.join(SUITE)}; by itself"
            f" {ON_GPU}; all: full."
        )
    prepare_environment()
    run = Run(names)
    run.measure_all()
    end(run)


def measure_gpu():
    """Measure what needs a GPU, and keep it: a run of its own, with a record for each kind of
    card.
    """
    reason = why_not()
    if reason is not None:
        sys.exit(f"{reason} Nothing was measured.")
    prepare_environment()
    described = cards()
    card = described["gpus"][0]["name"]
    run = Run([ON_GPU])
    run.measure(ON_GPU, f"On an {card}", described=described, kept_as=f"speed_on_{slug(card)}")
    end(run)


def end(run):
    """Write the page, show what this run has found, and exit with 1 if a part of it has failed."""
    write_page()
    Console(width=None if sys.stdout.isatty() else 150).print(table(run.found))
    if run.failed:
        sys.exit("\n".join(f"{name} has failed: {said}" for name, said in run.failed.items()))


if __name__ == "__main__":
    if sys.argv[1:] == [ON_GPU]:
        measure_gpu()
    elif sys.argv[1:] == ["page"]:
        write_page()
    else:
        main({"": SHORT, "full": tuple(SUITE)}.get(" ".join(sys.argv[1:]), sys.argv[1:]))
