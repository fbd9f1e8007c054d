"""More workers than one driver serves: where a pool of one level ends, and what one of two levels
would make of it, simulated.

Each driver is a server whose time for a call is the processor's time that raypool's driver takes
for one, as `ray_limits` has measured it; a message takes a millisecond, and another one on its way
(assumed). In the pool of two levels each driver has 250 workers at most, and half as many at most
as it could keep busy; a root hands blocks of items to the drivers (`two_level.py`). Ten items for
each worker, with the loads of the scheduler by itself (`simulated.py`): even (1 to 2 s), heavy
tail, stragglers, faults (workers lost and replaced), gangs, all at once; and short items, of 0.1 to
0.2 s. Each item has one outcome, which is checked; where a driver is lost with its workers, what it
had not reported runs again. The bound is what no schedule can beat. Each simulation was run once,
in a process of its own. What an event costs a driver's scheduler, and a message the root, is the
processor's time of this code; memory is that of the process with all drivers in it, and with the
simulation.
"""

from __future__ import annotations

import json
import resource
import time
from math import ceil
from random import Random
from statistics import fmean, median

from benchmarks.measuring import Line, fresh_process
from benchmarks.records import kept
from benchmarks.simulated import LOADS as ALONE
from benchmarks.simulated import Load
from benchmarks.two_level import Costs, simulate

SIZES = (10, 100, 1_000, 10_000)
LAMED = 1_000
"""With so many workers a driver is lost."""

PER_DRIVER = 250
ITEMS = 10
MANY = {"even": 100}
"""So many items for each of the most workers, once more."""

LOADS = {**ALONE, "short items": Load("short items", least_s=0.1)}
WEIGHED = ("even", "all at once")
"""Loads of which it is told what the simulated parts themselves take."""
DRAWN = ("even", "short items")
"""Loads whose makespans are curves of the picture, for which the size has to come last; more could
not be told apart.
"""

PROGRAM = "import sys; from benchmarks.bench_two_level import main; main(*sys.argv[1:])"


def run(sizes=SIZES, lamed=LAMED, many=MANY):
    call_s = _call_us() / 1e6
    lines = [line for name in LOADS for line in lines_of(name, call_s, sizes, lamed)]
    for name, each in many.items():
        num_workers = max(sizes)
        two = _simulated(name, num_workers, drivers_of(name, num_workers, call_s), call_s, each)
        lines += _two(f"{name}, {each * num_workers:,} items", num_workers, two)
    return lines


def _call_us():
    """Return what a call costs the driver, as it is on record [us]; if it is not, it is
    measured.
    """
    from benchmarks import bench_ray_limits  # not in the processes whose memory is measured

    record = kept("ray_limits")
    lines = record["lines"] if record is not None else bench_ray_limits.run()
    return median(next(line.values for line in lines if line.what == bench_ray_limits.PROCESSOR))


def drivers_of(name, num_workers, call_s):
    """Return how many drivers a pool of two levels has."""
    return max(2, ceil(num_workers / min(PER_DRIVER, _served(name, num_workers, call_s) / 2)))


def lines_of(name, call_s, sizes, lamed):
    """Return how long one load takes in pools of one level and of two, with all sizes; in one size
    also if a driver is lost.
    """
    lines = []
    for num_workers in sizes:
        num_drivers = drivers_of(name, num_workers, call_s)
        one, two = (_simulated(name, num_workers, drivers, call_s) for drivers in (1, num_drivers))
        what = _what(name, "one level", num_workers)
        held = [one["makespan_s"]], [one["bound_s"]]
        lines.append(
            Line(
                name,
                what,
                "the bound",
                "s",
                *held,
                note=f"the driver is busy for {one['busy'][1]:.0%} of the time",
            )
        )
        lines += _two(name, num_workers, two)
        if num_workers == lamed:
            lame = _simulated(
                name, num_workers, num_drivers, call_s, lost_at_s=two["makespan_s"] / 2
            )
            what = f"{num_workers:,} workers, two levels, a driver lost half way: makespan"
            lines.append(
                Line(
                    name,
                    what,
                    "none lost",
                    "s",
                    [lame["makespan_s"]],
                    [two["makespan_s"]],
                    note=_said(lame),
                )
            )
    served = _served(name, max(sizes), call_s)
    return [
        *lines,
        Line(
            name,
            "workers that one driver keeps busy",
            "",
            "",
            [served],
            note=f"{call_s * 1e6:.0f} us a call",
        ),
    ]


def _two(area, num_workers, told):
    """Return how long two levels take, and for some loads what the parts themselves cost."""
    of = f"{num_workers:,} workers"
    held = [told["makespan_s"]], [told["bound_s"]]
    lines = [
        Line(
            area, _what(area, "two levels", num_workers), "the bound", "s", *held, note=_said(told)
        )
    ]
    if not area.startswith(WEIGHED):
        return lines
    busiest = max(told["events"]) / told["makespan_s"]
    event = (
        f"{1e6 / told['event_us']:,.0f} a second; in the busiest driver there are {busiest:,.0f}"
    )
    message = (
        f"{1e6 / told['message_us']:,.0f} a second; there are"
        f" {told['num_messages'] / told['makespan_s']:,.0f}"
    )
    return [
        *lines,
        Line(area, f"an event in a driver, {of}", "", "us", [told["event_us"]], note=event),
        Line(area, f"a message at the root, {of}", "", "us", [told["message_us"]], note=message),
        Line(area, f"{of}: peak memory of all", "", "MB", [told["peak_mb"]]),
    ]


def _what(area, levels, num_workers):
    of = f"{num_workers:,} workers"
    return f"makespan, {levels}, {of}" if area in DRAWN else f"{of}, {levels}: makespan"


def _said(told):
    root, *drivers = told["busy"]
    ends = [f"{told['num_again']:,} items ran twice"] if told["num_again"] else []
    ends += [f"{told['num_failed']:,} items failed"] if told["num_failed"] else []
    return "; ".join(
        [f"{len(drivers)} drivers, busy for {max(drivers):.0%}", f"the root for {root:.1%}", *ends]
    )


def _durations(name, num_workers, items=ITEMS):
    random = Random(0)
    return [LOADS[name].item_s(random) for _ in range(items * num_workers)]


def _served(name, num_workers, call_s):
    """Return how many workers one driver could keep busy."""
    return fmean(_durations(name, num_workers)) / call_s


def _simulated(name, num_workers, num_drivers, call_s, items=ITEMS, lost_at_s=0.0):
    """Simulate in a process of its own; return what `main` has printed."""
    return json.loads(
        fresh_process(PROGRAM, name, num_workers, num_drivers, call_s, items, lost_at_s)
    )


def main(name, num_workers, num_drivers, call_s, items, lost_at_s):
    """Simulate a load; print how it went, and what it cost. `lost_at_s`: when the second driver is
    lost [s], 0 if it is not.
    """
    durations, lost = (
        _durations(name, int(num_workers), int(items)),
        ([(float(lost_at_s), 1)] if float(lost_at_s) else []),
    )
    started, began = time.perf_counter(), time.process_time()
    outcome = simulate(
        durations,
        int(num_workers),
        int(num_drivers),
        Costs(call_s=float(call_s)),
        lost,
        LOADS[name],
    )
    # the rest of the time others had the processor
    share = (time.process_time() - began) / (time.perf_counter() - started)
    check(outcome, most_runs=1 + len(lost))
    told = {
        "makespan_s": outcome.makespan_s,
        "bound_s": outcome.bound_s,
        "busy": outcome.busy,
        "events": outcome.events,
        "num_messages": outcome.num_messages,
        "num_again": sum(runs > 1 for runs in outcome.runs),
        "num_failed": len(outcome.failed),
        "event_us": share * outcome.handling_s / sum(outcome.events) * 1e6,
        "message_us": share * outcome.root_s / outcome.num_messages * 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }
    print(json.dumps(told))


def check(outcome, most_runs):
    """Make sure that each item has one outcome, has run to its end if it has not failed, and has
    not run too often.
    """
    assert set(outcome.ends) == {1}, "an item has no outcome, or several"
    never = {item for item, runs in enumerate(outcome.runs) if not runs}
    assert never <= outcome.failed, "an item has not run, and has not failed"
    assert max(outcome.runs) <= most_runs, "an item has run too often"
    assert outcome.makespan_s >= outcome.bound_s, (
        "it was faster than it could be: a worker has done two things at a time"
    )
