"""Calls that wait: how much memory each takes in the process that handed it in, and how long it
took to hand it in.

Each system in a fresh process, in turns: its two workers are busy, 100,000 no-ops are handed in
behind that, and the growth of this process is divided by their number (PSS). Then the workers go
on, and the first answers are looked at. Bare actors, MPIRE and dask.distributed get 5,000: with
100,000 five rounds of them would take longer than all else here.

Left out: Ray's Pool, which starts a thread for each call that waits; and joblib and Ray's
ActorPool, see `benchmarks/systems.py`.
"""

from __future__ import annotations

import json

from benchmarks.measuring import Line, fresh_process, in_turns
from benchmarks.peers import PEERS, installed
from benchmarks.session import WORKERS
from benchmarks.systems import SYSTEMS

ROUNDS = 5
MANY, FEW = 100_000, 5_000
QUEUED = {"bare actors of Ray": FEW, "MPIRE": FEW, "dask.distributed": FEW}
"""How many a system gets that does not get all."""

LIMIT_B = 1_000.0
LIMIT_MB = 150.0

PROGRAM = """
import contextlib, gc, json, sys, tempfile, time
from pathlib import Path

from benchmarks.session import prepare_environment

if __name__ == "__main__":
    name, is_on_ray, workers, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    prepare_environment()
    import psutil
    from benchmarks.peers import on_one_ray
    from benchmarks.systems import open_warm
    from benchmarks.tasks import nothing, wait_for

    with on_one_ray(workers) if is_on_ray else contextlib.nullcontext():
        system = open_warm(name, workers)
        for call in [system.submit(nothing, number) for number in range(200)]:
            system.result(call, 60)
        gate = Path(tempfile.mkdtemp(), "gate")
        busy = [system.submit(wait_for, str(gate)) for _ in range(workers)]
        this = psutil.Process()
        gc.collect()
        before, started = this.memory_full_info().pss, time.perf_counter()
        calls = [system.submit(abs, -number) for number in range(count)]
        took = time.perf_counter() - started
        grown = this.memory_full_info().pss - before
        gate.touch()
        assert [system.result(call, 60) for call in calls[:100]] == list(range(100))
        system.close()
        gate.unlink(), gate.parent.rmdir()
    print(json.dumps([grown, took * 1e6]))
"""


def run():
    names = [name for name in SYSTEMS if name in installed() and name != "Ray's Pool"]
    runs = in_turns(
        {name: lambda name=name: queued(name) for name in names}, warm_ups=0, rounds=ROUNDS
    )
    ours = runs.pop("raypool")
    area = "a queued no-op"
    lines = [
        Line(
            area,
            what,
            name,
            unit,
            [run[at] for run in ours],
            [run[at] for run in theirs],
            is_speedup=True,
            note=count_of(name),
        )
        for at, (what, unit) in enumerate((("memory", "B"), ("to hand it in", "us")))
        for name, theirs in runs.items()
    ]
    each = [memory for memory, _ in ours]
    all_mb = [memory * MANY / 1e6 for memory in each]
    return [
        *lines,
        Line("100,000 queued", "memory of one", "1 KB", "B", each, [LIMIT_B] * len(each), 1.0),
        Line(
            "100,000 queued", "memory of all", "150 MB", "MB", all_mb, [LIMIT_MB] * len(each), 1.0
        ),
    ]


def queued(name):
    """Return how much memory a call takes that waits [B], and how long it took to hand it in
    [us].
    """
    count = QUEUED.get(name, MANY)
    found = fresh_process(PROGRAM, name, int(PEERS[name][0] in ("ray", "raypool")), WORKERS, count)
    return [value / count for value in json.loads(found)]


def count_of(name):
    """Return how many a system got, where that is not all."""
    return f"{QUEUED[name]:,} calls" if name in QUEUED else ""
