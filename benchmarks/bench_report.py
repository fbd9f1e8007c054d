"""What it costs a task to report, and what a million more reports cost the process that has opened
the pool.

A report is held against putting the same into a `queue.Queue` that nobody reads, and against
`ray.train.report` in Ray Train's local mode, which keeps the last one only. The memory is the
driver's, before and after the second million of reports from two workers, whose futures are all
still held (the first million makes the buffers); the tables are read after that, to see that
nothing is missing.
"""

from __future__ import annotations

import gc

import psutil

from benchmarks.measuring import Line, in_turns, percentile
from benchmarks.session import WORKERS
from benchmarks.tasks import puts, reports, steps_with_reports, train_reports

COUNT = 50_000
TRAIN_COUNT = 500
STEPS = 2_000
STEP_S = 0.001
REPORTS = 1_000_000
TASKS = 20


def run(session):
    return [*calls(session.pool), *memory(session.pool)]


def calls(pool):
    values = in_turns(
        {
            "report": lambda: pool.parfeval(reports, COUNT).result(),
            "put": lambda: pool.parfeval(puts, COUNT).result(),
            "train": lambda: pool.parfeval(train_reports, TRAIN_COUNT).result(),
            "steps": lambda: pool.parfeval(steps_with_reports, STEPS, STEP_S).result(),
        }
    )
    typical = [percentile(costs, 50) for costs in values["steps"]]
    slowest = [percentile(costs, 99) for costs in values["steps"]]
    return [
        Line(
            "report()", "a call, one after the other", "20 us", "us", values["report"], target=20.0
        ),
        Line(
            "report()",
            "a call, one after the other",
            "a bare queue.put",
            "us",
            values["report"],
            values["put"],
        ),
        Line(
            "report()",
            "a call, one after the other",
            "ray.train.report, local",
            "us",
            values["report"],
            values["train"],
            is_speedup=True,
        ),
        Line("report()", "a call after 1 ms of work, median", "20 us", "us", typical, target=20.0),
        Line("report()", "a call after 1 ms of work, 99th percentile", "20 us", "us", slowest),
    ]


def memory(pool):
    process = psutil.Process()
    futures = []

    def report_all():
        futures.extend(pool.parfeval(reports, REPORTS // TASKS) for _ in range(TASKS))
        for future in futures:
            future.result()
        gc.collect()
        return process.memory_info().rss / 1e6

    first, second = report_all(), report_all()
    missing = 2 * REPORTS - sum(len(future.metrics) for future in futures)
    note = f"{WORKERS} workers, {missing} missing"
    return [
        Line(
            "a second 1,000,000 reports",
            "memory of the driver grows by",
            "10 MB",
            "MB",
            [second - first],
            target=10.0,
            note=note,
        )
    ]
