"""What the scheduler costs by itself: 1,000,000 tasks on 10,000 simulated workers, and on 100.

Nothing but `Scheduler` and a heap of events that lie ahead, which is not counted. All tasks are handed in first; each takes a
second or two. Both sizes run in processes of their own, which take turns: a slice of events here, a slice there. What counts is
the time of the processor, garbage collection and all, since nothing here ever waits.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from heapq import heappop, heappush
from random import Random

from benchmarks.measuring import ROOT, Line
from raypool.core import messages as m
from raypool.core.model import Report, TaskSpec
from raypool.core.scheduler import Scheduler

TASKS = 1_000_000
SLICE = 100_000
SIZES = (10_000, 100)
START_S = 0.1


def run():
    commands = {size: [sys.executable, "-m", "benchmarks.bench_scheduler", str(size)] for size in SIZES}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": {**os.environ}}
    processes = {size: subprocess.Popen(command, **pipes) for size, command in commands.items()}
    slices = {size: [] for size in SIZES}
    while all(process.poll() is None for process in processes.values()):
        for size, process in processes.items():
            print("go", file=process.stdin, flush=True)
            slices[size].append(json.loads(process.stdout.readline()))
        if any(entries[-1]["is_last"] for entries in slices.values()):
            break
    for process in processes.values():
        process.stdin.close()
        process.wait()
    large, small = ([entry["us"] for entry in slices[size] if entry["events"] == SLICE] for size in SIZES)
    pairs = list(zip(large, small, strict=False))
    whole = [_per_event(slices[size]) for size in SIZES]
    peak = slices[SIZES[0]][-1]["peak_mb"]
    num_events = sum(entry["events"] for entry in slices[SIZES[0]])
    note = f"{num_events:,} events, {1e6 / whole[0]:,.0f} a second, peak memory {peak:,.0f} MB"
    area = "scheduler, 1,000,000 tasks"
    running = pairs[TASKS // SLICE :]  # after the last task was handed in
    return [
        Line(area, "an event, 10,000 workers", "10 us", "us", [whole[0]], target=10.0, note=note),
        Line(area, "an event, 10,000 workers", "100 workers", "us", [whole[0]], [whole[1]], 2.0),
        Line(area, "a finished task", "100 workers", "us", [a for a, _ in running], [b for _, b in running]),
    ]


def _per_event(entries):
    return sum(entry["us"] * entry["events"] for entry in entries) / sum(entry["events"] for entry in entries)


def simulate(num_workers):
    """Yield after each slice how many events there were, and the time in the scheduler [s]; go on when asked for the next."""
    random, scheduler, clock = Random(0), Scheduler(), time.perf_counter
    ahead, count, handling_s = [], 0, 0.0

    def later(at, event):
        nonlocal count
        count += 1
        heappush(ahead, (at, count, event))

    later(0.0, m.ResizeRequested(add=tuple(range(num_workers))))
    submitted = (m.TaskSubmitted(TaskSpec(number, 0)) for number in range(TASKS))
    handled = 0
    while ahead:
        event = next(submitted, None) if len(scheduler.crew.idle) == num_workers or handled > num_workers + 1 else None
        now = START_S
        if event is None:
            now, _, event = heappop(ahead)
        before = clock()
        commands = scheduler.handle(event, now)
        handling_s += clock() - before
        for command in commands:
            if isinstance(command, m.RunTasks):
                took = 1 + random.random()
                reports = tuple(Report(piece.stop - piece.start, busy_s=took) for piece in command.slices)
                later(now + took, m.AttemptFinished(command.worker_id, command.attempt_id, reports))
            elif isinstance(command, m.StartWorker):
                later(now + START_S, m.WorkerReady(command.worker_id))
            elif isinstance(command, m.SetTimer):
                later(command.at, m.TimerFired(command.kind, command.worker_id))
        handled += 1
        if handled % SLICE == 0:
            yield SLICE, handling_s
            handling_s = 0.0
    assert scheduler.counts.finished == TASKS
    yield handled % SLICE, handling_s


def main(num_workers):
    """Simulate, a slice for each line of input; print what it cost."""
    simulation = simulate(num_workers)
    for _ in sys.stdin:
        started, began = time.perf_counter(), time.process_time()
        events, handling_s = next(simulation)
        share = handling_s / (time.perf_counter() - started)
        took = share * (time.process_time() - began)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        entry = {"events": events, "us": took / max(events, 1) * 1e6, "peak_mb": peak_mb, "is_last": events < SLICE}
        print(json.dumps(entry), flush=True)
        if events < SLICE:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
