"""How much work 64 workers are for one driver, on Ray and in the simulation.

The workers are processes on this machine, more of them than cores: their items sleep for 0.2 s, so
that only the driver and Ray need a processor. The driver's share is the processor's time of its
whole process, Ray's threads included, divided by the time of the loop. Each item of 0.2 s is sent in
a separate call, and each answer is one event. The simulation (`two_level.py`, one driver) uses the time
of a call that was measured here. What this means for more workers is in
docs/internals/benchmarks.md.
"""

from __future__ import annotations

import json
from statistics import median

from benchmarks.measuring import Line, fresh_process
from benchmarks.two_level import Costs, simulate

NUM_WORKERS = 64
ITEM_S = 0.2
ITEMS = 20
"""So many for each worker."""

ROUNDS = 5

PROGRAM = """
import json, sys, time

import psutil
from raypool import Profile, WorkerResources, parpool

if __name__ == "__main__":
    num_workers, items, rounds, item_s = *map(int, sys.argv[1:4]), float(sys.argv[4])
    this, found = psutil.Process(), []
    resources = WorkerResources(cpus=psutil.cpu_count() / num_workers)
    profile = Profile(resources=resources, fork_server=True, start_timeout_s=600, quiet=True)
    with parpool(num_workers, profile=profile) as pool:
        pool.parfor(time.sleep, [item_s] * num_workers, progress=False)
        for _ in range(rounds):
            before, calls = this.cpu_times(), pool.statistics().attempts
            started = time.perf_counter()
            pool.parfor(time.sleep, [item_s] * num_workers * items, progress=False)
            took_s, after = time.perf_counter() - started, this.cpu_times()
            cpu_s = after.user - before.user + after.system - before.system
            found.append((took_s, cpu_s, pool.statistics().attempts - calls))
    print(json.dumps(found))
"""


def run():
    found = json.loads(fresh_process(PROGRAM, NUM_WORKERS, ITEMS, ROUNDS, ITEM_S))
    call_s = median(cpu_s / calls for _, cpu_s, calls in found)
    durations = [ITEM_S] * (NUM_WORKERS * ITEMS)
    simulated = simulate(durations, NUM_WORKERS, 1, Costs(call_s=call_s))
    area, took = f"{NUM_WORKERS} workers, items of {ITEM_S:g} s", [each[0] for each in found]
    return [
        Line(
            area,
            "the driver's share of a core",
            "",
            "%",
            [cpu_s / took_s * 100 for took_s, cpu_s, _ in found],
            note=f"{median(calls / took_s for took_s, _, calls in found):,.0f} events a second",
        ),
        Line(
            area,
            "a call, time of the processor",
            "",
            "us",
            [cpu_s / calls * 1e6 for _, cpu_s, calls in found],
        ),
        Line(area, "the loop", "the ideal", "s", took, [ITEMS * ITEM_S] * ROUNDS),
        Line(
            area,
            "the loop",
            "the simulation",
            "s",
            took,
            [simulated.makespan_s] * ROUNDS,
            note=f"there the driver is busy for {simulated.busy[1]:.0%} of the time",
        ),
    ]
