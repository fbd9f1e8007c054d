"""More workers than one driver serves: where a pool of one level ends, and what one of two levels would make of it, simulated.

Each driver is a server whose time for a call is the processor's time that raypool's driver takes for one, as `ray_limits` has
measured it; a message takes a millisecond, and another one on its way (assumed). In the pool of two levels each driver has 250
workers at most, and half as many at most as it could keep busy; a root hands blocks of items to the drivers (`two_level.py`).
Ten items for each worker, of 0.1 to 0.2 s and of 1 to 2 s, and of a heavy tail (Pareto, exponent 1.5, from 1 s to 20 s). Each
item has one outcome, which is checked; where a driver is lost with its workers, what it had not reported runs again. The bound
is what no schedule can beat.
"""

from __future__ import annotations

from math import ceil
from random import Random
from statistics import median

from benchmarks import bench_ray_limits
from benchmarks.measuring import Line
from benchmarks.records import kept
from benchmarks.two_level import Costs, simulate

SIZES = (250, 1_000, 4_000, 10_000)
PER_DRIVER = 250
ITEMS = 10
LOADS = {
    "items of 0.1-0.2 s": lambda random: random.uniform(0.1, 0.2),
    "items of 1-2 s": lambda random: random.uniform(1, 2),
    "a heavy tail": lambda random: min(random.paretovariate(1.5), 20.0),
}


def run(sizes=SIZES):
    costs = Costs(call_s=_call_us() / 1e6)
    return [line for name, item_s in LOADS.items() for line in _lines(name, item_s, costs, sizes)]


def _call_us():
    """Return what a call costs the driver, as it is on record [us]; if it is not, it is measured."""
    record = kept("ray_limits")
    lines = record["lines"] if record is not None else bench_ray_limits.run()
    return median(next(line.values for line in lines if line.what == bench_ray_limits.PROCESSOR))


def _lines(name, item_s, costs, sizes):
    random, lines = Random(0), []
    for num_workers in sizes:
        durations = [item_s(random) for _ in range(ITEMS * num_workers)]
        served = sum(durations) / len(durations) / costs.call_s
        num_drivers = max(2, ceil(num_workers / min(PER_DRIVER, served / 2)))
        one, two = (_checked(simulate(durations, num_workers, drivers, costs)) for drivers in (1, num_drivers))
        for levels, outcome in (("one level", one), ("two levels", two)):
            what = f"makespan, {num_workers:,} workers, {levels}"
            lines.append(Line(name, what, "the bound", "s", [outcome.makespan_s], [outcome.bound_s], note=_said(outcome)))
    half_s = two.makespan_s / 2
    lamed = _checked(simulate(durations, num_workers, num_drivers, costs, lost=[(half_s, 1)]), most_runs=2)
    what = f"makespan, {num_workers:,} workers, two levels, a driver lost half way"
    lines.append(Line(name, what, "none lost", "s", [lamed.makespan_s], [two.makespan_s], note=_said(lamed)))
    return [
        *lines,
        Line(name, "workers that one driver keeps busy", "", "", [served], note=f"{costs.call_s * 1e6:.0f} us a call"),
    ]


def _checked(outcome, most_runs=1):
    """Make sure that each item has one outcome, and has not run too often."""
    assert set(outcome.ends) == {1}, "an item has no outcome, or several"
    assert max(outcome.runs) <= most_runs, "an item has run too often"
    return outcome


def _said(outcome):
    root, *drivers = outcome.busy
    num_again = sum(outcome.runs) - len(outcome.runs)
    again = f"; {num_again:,} items ran twice" if num_again else ""
    if len(drivers) == 1:
        return f"the driver is busy for {max(drivers):.0%} of the time"
    a_second = outcome.num_messages / outcome.makespan_s
    messages = f"with {a_second:.0f} messages a second{again}"
    return f"{len(drivers)} drivers, busy for {max(drivers):.0%}; the root for {root:.1%}, {messages}"
