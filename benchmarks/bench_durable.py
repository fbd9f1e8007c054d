"""What it costs that a loop is durable: an item of a loop that does nothing, with and without a
run_dir; going on; reading.

With a run_dir every outcome is on the disk before it counts. The yardstick for that is the least
that the same promise costs where each outcome is written by itself: a transaction of SQLite's, with
the same settings, for one row. Where the folders are depends on `TMPDIR`; a memory file system
there makes everything that waits for a disk look free.
"""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Line, fresh_process, in_turns, timed
from benchmarks.tasks import nothing

ITEMS = 2_000
RESUMED = 10_000
READ = 100_000
COMMITS = 200

LOAD = """
import sys, time
import raypool
started = time.perf_counter()
results = raypool.load_results(sys.argv[1])
took = time.perf_counter() - started
assert len(results) == int(sys.argv[2]), len(results)
started = time.perf_counter()
frame = results.to_frame()
assert len(frame) == len(results)
print(took, time.perf_counter() - started, "ray" in sys.modules)
"""


def run(session):
    with tempfile.TemporaryDirectory(prefix="raypool-benchmark-") as folder:
        return [
            *_an_item(session, Path(folder)),
            *_going_on(session, Path(folder)),
            *_reading(session, Path(folder)),
        ]


def _an_item(session, folder):
    numbers = itertools.count()

    def durable():
        session.pool.parfor(
            nothing, ITEMS, progress=False, run_dir=folder / f"item-{next(numbers)}"
        )

    values = in_turns(
        {
            "durable": timed(durable, ITEMS),
            "plain": timed(lambda: session.pool.parfor(nothing, ITEMS, progress=False), ITEMS),
            "commits": timed(lambda: _commit(folder / f"commits-{next(numbers)}.sqlite"), COMMITS),
        }
    )
    more = [
        durable - plain for durable, plain in zip(values["durable"], values["plain"], strict=True)
    ]
    area = f"run_dir, {ITEMS:,} no-ops"
    return [
        Line(area, "an item costs more", "1 ms", "us", more, target=1_000.0),
        Line(
            area,
            "an item, all in all",
            "without a run_dir",
            "us",
            values["durable"],
            values["plain"],
        ),
        Line(
            area,
            "an item, all in all",
            "a commit of SQLite's",
            "us",
            values["durable"],
            values["commits"],
        ),
    ]


def _commit(path):
    """Write some rows, each in a transaction of its own that is on the disk at its end."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")
    for number in range(COMMITS):
        connection.execute("INSERT INTO rows VALUES (?, ?)", (number, "x" * 200))
    connection.close()


def _going_on(session, folder):
    run_dir = folder / "resumed"
    session.pool.parfor(nothing, RESUMED, progress=False, run_dir=run_dir)

    def again():
        assert (
            len(session.pool.parfor(nothing, RESUMED, progress=False, run_dir=run_dir)) == RESUMED
        )

    took = in_turns({"again": timed(again)}, rounds=3, warm_ups=0)["again"]
    return [
        Line(
            "run_dir",
            f"the same call again, {RESUMED:,} items there already",
            "2 s",
            "us",
            took,
            target=2e6,
        )
    ]


def _reading(session, folder):
    run_dir = folder / "read"
    started = time.perf_counter()
    session.pool.parfor(nothing, READ, progress=False, run_dir=run_dir)
    wrote = (time.perf_counter() - started) / READ * 1e6
    size = sum(path.stat().st_size for path in run_dir.glob("journal*")) / READ

    loads, tables = [], []
    for _ in range(3):
        loaded, made, has_ray = fresh_process(LOAD, run_dir, READ).split()
        loads.append(float(loaded) * 1e6)
        tables.append(float(made) * 1e6)
    note = "which imports Ray" if has_ray == "True" else "without Ray"
    return [
        Line(
            "run_dir",
            f"an item of {READ:,}",
            "none",
            "us",
            [wrote],
            note=f"{size:.0f} B each in the journal",
        ),
        Line("run_dir", f"load_results, {READ:,} items", "2 s", "us", loads, target=2e6, note=note),
        Line("run_dir", "its table", "none", "us", tables),
    ]
