"""What the scheduler costs by itself, and how good its schedules are: up to 10,000 simulated
workers, up to 1,000,000 tasks.

All tasks are handed in first; an item takes a second or two. The loads: even; heavy tail (Pareto,
exponent 1.5, at most 100 s); stragglers (2 % of the workers are five times slower); faults (1 % of
the calls lose their worker, which is replaced); gangs (every hundredth task is one, of eight ranks
that start together); all of these at once. The sizes of one load run in processes of their own,
which take turns: a slice of events here, a slice there; each was run once. What counts is the time
of the processor, garbage collection and all. That each item has one outcome is checked. The bound
is what no schedule can beat: all work on all workers, or the longest item. List scheduling's
guarantee is what it never takes longer than, where workers are alike and no items start together: 2
- 1/m times the optimum at most (Graham 1969), here by the work and the longest item. `python -m
benchmarks.bench_scheduler short` takes some seconds, with fewer tasks.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

from benchmarks.measuring import ROOT, Line
from benchmarks.simulated import LOADS, Course

SIZES = (10_000, 1_000, 100, 10)
TASKS, FEW_TASKS = 100_000, 10_000
MANY_TASKS = 1_000_000
MANY = {"even": (10_000, 100, 10), "all at once": (10_000,)}
"""With most tasks, and not each size: all is to end in five minutes. The other loads have fewer
tasks, and all sizes.
"""

PER_SLICE = 20  # so many slices hand in all tasks
SMALL = 100


def run(tasks=TASKS, many_tasks=MANY_TASKS):
    lines = []
    for name, sizes in MANY.items():
        lines += lines_of(name, int(many_tasks), sizes)
    for name in LOADS:
        if name not in MANY:
            lines += lines_of(name, int(tasks))
    return lines


def lines_of(name, tasks=TASKS, sizes=SIZES):
    """Return what one load costs with each size of the pool, and how near its schedules come to the
    bound.
    """
    found = measure(name, sizes, tasks)
    area = f"{name}, {tasks:,} tasks"
    with_target = max(found) if name == "even" else None
    costs = _targets(area, with_target, found) if with_target else []
    costs += [_cost(area, size, found) for size in found if size not in (SMALL, with_target)]
    ends = [_held_against_bound(area, size, entries[-1]) for size, entries in found.items()]
    return (
        costs
        + ends
        + [
            _guarantee(area, size, entries[-1])
            for size, entries in found.items()
            if LOADS[name].is_alike
        ]
    )


def _cost(area, size, found):
    """Return what an event costs, over all; beside a small pool, if there is one."""
    what, values, said = f"an event, {size:,} workers", _us(found[size]), _said(found[size])
    if SMALL not in found:
        return Line(area, what, "", "us", values, note=said)
    return Line(area, what, f"{SMALL} workers", "us", values, _us(found[SMALL]), note=said)


def measure(name, sizes, tasks):
    """Simulate a load with each size in turns; return the slices of each."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        "env": {**os.environ},
    }
    commands = {
        size: [sys.executable, "-m", "benchmarks.bench_scheduler", name, str(size), str(tasks)]
        for size in sizes
    }
    processes = {size: subprocess.Popen(command, **pipes) for size, command in commands.items()}
    found = {size: [] for size in sizes}
    while going := [size for size in sizes if not found[size] or not found[size][-1]["is_last"]]:
        for size in going:
            print("go", file=processes[size].stdin, flush=True)
            found[size].append(json.loads(processes[size].stdout.readline()))
    for process in processes.values():
        process.communicate()
    return found


def _targets(area, largest, found):
    """Return what an event costs with the most workers: by itself, and of what it costs with few,
    slice by slice.
    """
    what = f"an event, {largest:,} workers"
    whole = Line(
        area, what, "10 us", "us", _us(found[largest]), target=10.0, note=_said(found[largest])
    )
    # the last slices are not whole
    pairs = list(zip(found[largest][:-1], found[SMALL][:-1], strict=False))
    values, others = ([pair[side]["us"] for pair in pairs] for side in (0, 1))
    return [
        whole,
        Line(area, f"{what}, slice by slice", f"{SMALL} workers", "us", values, others, 2.0),
    ]


def _us(entries):
    """Return what an event costs, over all."""
    return [
        sum(entry["us"] * entry["events"] for entry in entries)
        / sum(entry["events"] for entry in entries)
    ]


def _said(entries):
    num_events, last = sum(entry["events"] for entry in entries), entries[-1]
    a_second = 1e6 / _us(entries)[0]
    memory = f"{last['task_bytes']:,.0f} bytes a queued task, peak {last['peak_mb']:,.0f} MB"
    return f"{num_events:,} events, {a_second:,.0f} a second, {memory}"


def _held_against_bound(area, size, last):
    return Line(
        area, f"makespan, {size:,} workers", "the bound", "s", [last["end_s"]], [last["bound_s"]]
    )


def _guarantee(area, size, last):
    held = [last["end_s"]], [last["guarantee_s"]]
    return Line(
        area, f"makespan, {size:,} workers", "list scheduling's guarantee", "s", *held, target=1.0
    )


def show_short():
    """Print what can be said in some seconds; nothing is kept of it."""
    from rich.console import Console  # not in the processes whose memory is measured

    from benchmarks.page import table

    Console(width=None if sys.stdout.isatty() else 150).print(table(run(FEW_TASKS, 2 * FEW_TASKS)))


def main(name, num_workers, num_tasks):
    """Simulate, a slice for each line of input; print what it cost."""
    course = Course(num_workers, num_tasks, LOADS[name])
    size, num_events = num_tasks // PER_SLICE, 0
    slices = course.slices(size)
    for _ in sys.stdin:
        started, began, handled_s = time.perf_counter(), time.process_time(), course.handling_s
        next(slices)
        share = (course.handling_s - handled_s) / (time.perf_counter() - started)
        took = share * (time.process_time() - began)
        events, num_events = course.num_events - num_events, course.num_events
        entry = {
            "events": events,
            "us": took / max(events, 1) * 1e6,
            "is_last": events < size,
            "task_bytes": course.task_bytes,
        }
        entry |= {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}
        entry |= (
            {
                "end_s": course.end_s,
                "bound_s": course.bound_s(),
                "guarantee_s": course.guarantee_s(),
            }
            if events < size
            else {}
        )
        print(json.dumps(entry), flush=True)
        if events < size:
            return


if __name__ == "__main__":
    if sys.argv[1:] == ["short"]:
        show_short()
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
