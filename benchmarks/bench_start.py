"""How long it takes until something runs, and what a worker has in memory then.

`from raypool import parpool`, and from `parpool()` to the first result, each in fresh processes.

The import must not bring in Ray or torch, which take seconds. The start is held against the least
that Ray itself needs: its import, `ray.init` with the same settings, two actors and an answer from
each. (raypool leaves out some processes of Ray's that `ray.init` always starts; see
`raypool/backends/ray/session.py`.) Memory is that of the workers' processes, shared pages in parts
(PSS), divided by their number; both kinds have imported the module of the function that they have
called, and with it NumPy.

The fork server is held against plain processes (`fork_server=False`): eight workers until each has
had a first result of torch, in a new process and in one whose server is up; what a killed worker's
successor needs for its own; what `options(fresh_process=True)` adds to a call; and private memory.
"""

from __future__ import annotations

import json
from statistics import median

from benchmarks.measuring import Line, fresh_process, in_turns

IMPORT = """
import sys, time
started = time.perf_counter()
from raypool import parpool
took = time.perf_counter() - started
heavy = [name for name in ("ray", "torch", "numpy", "pandas") if name in sys.modules]
import json
print(json.dumps([took, heavy]))
"""
RAYPOOL = """
import json, os, time
from benchmarks.tasks import nothing
import raypool
started = time.perf_counter()
with raypool.parpool(2, quiet=True) as pool:
    pool.parfeval_on_all(nothing).result()
    took = time.perf_counter() - started
    pids = pool.parfeval_on_all(os.getpid).result()
    import psutil
    pss = [psutil.Process(pid).memory_full_info().pss for pid in pids]
print(json.dumps([took * 1e6, sum(pss) / len(pss) / 1e6]))
"""
RAY = """
import json, time
from benchmarks.tasks import Bare
started = time.perf_counter()
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
actors = [ray.remote(Bare).remote() for _ in range(2)]
ray.get([actor.call.remote() for actor in actors])
took = time.perf_counter() - started
pids = ray.get([actor.pid.remote() for actor in actors])
import psutil
pss = [psutil.Process(pid).memory_full_info().pss for pid in pids]
print(json.dumps([took * 1e6, sum(pss) / len(pss) / 1e6]))
"""
FORKS = """
import json, os, time
from benchmarks.tasks import nothing
import psutil, raypool

def first():
    import torch
    return torch.ones(2).sum().item()

def opened():
    return raypool.parpool(8, quiet=True, fork_server={is_forked}, resources=raypool.WorkerResources(cpus=0.25))

started = time.perf_counter()
with opened() as pool:
    pool.parfeval_on_all(first).result()
    cold = time.perf_counter() - started
started = time.perf_counter()
with opened() as pool:
    pool.parfeval_on_all(first).result()
    warm = time.perf_counter() - started
    memory = sum(psutil.Process(worker.pid).memory_full_info().uss for worker in pool.workers)
    started = time.perf_counter()
    pool.options(worker=0, retries=0).parfeval(os._exit, 1).exception()
    pool.options(worker=0).parfeval(first).result()
    killed = time.perf_counter() - started
    started = time.perf_counter()
    pool.parfeval(nothing).result()
    plain = time.perf_counter() - started
    started = time.perf_counter()
    pool.options(fresh_process=True).parfeval(nothing).result()
    fresh = time.perf_counter() - started - plain
print(json.dumps([cold * 1e6, warm * 1e6, killed * 1e6, fresh * 1e6, memory / 1e6]))
"""


def run():
    heavy = set()

    def import_us():
        took, names = json.loads(fresh_process(IMPORT))
        heavy.update(names)
        return took * 1e6

    imports = in_turns({"raypool": import_us}, rounds=7)
    starts = in_turns(
        {
            "raypool": lambda: json.loads(fresh_process(RAYPOOL)),
            "ray": lambda: json.loads(fresh_process(RAY)),
        },
        rounds=5,
        warm_ups=0,
    )
    (ours_us, ours_mb), (theirs_us, theirs_mb) = (
        zip(*starts[name], strict=True) for name in ("raypool", "ray")
    )
    forks = in_turns(
        {
            str(is_forked): lambda is_forked=is_forked: json.loads(
                fresh_process(FORKS.replace("{is_forked}", str(is_forked)))
            )
            for is_forked in (True, False)
        },
        rounds=3,
        warm_ups=0,
    )
    measured = zip(zip(*forks["True"], strict=True), zip(*forks["False"], strict=True), strict=True)
    (cold, warm, killed, (fresh_us, plain_us), memory) = measured
    brought = (
        f"brings in {', '.join(sorted(heavy))}" if heavy else "without ray, torch, numpy, pandas"
    )
    return [
        Line(
            "start",
            "from raypool import parpool",
            "100 ms",
            "us",
            imports["raypool"],
            target=100_000.0,
            note=brought,
        ),
        Line(
            "start",
            "heavy imports with it",
            "none",
            "",
            [float(len(heavy))],
            target=0.0,
            note=brought,
        ),
        Line(
            "start",
            "parpool() to first result",
            "bare Ray and 2 actors",
            "us",
            list(ours_us),
            list(theirs_us),
            target=1.15,
        ),
        Line("start", "memory of a worker", "a bare actor", "MB", list(ours_mb), list(theirs_mb)),
        *(
            Line("start", what, "fork_server=False", unit, *map(list, pair), target=target)
            for what, unit, pair, target in (
                ("8 workers to a first torch result, cold", "us", cold, 0.75),
                ("8 workers to a first torch result, server up", "us", warm, 0.2),
                ("killed worker to its next torch result", "us", killed, 0.4),
                ("private memory of 8 workers with torch", "MB", memory, 0.3),
            )
        ),
        Line(
            "start",
            "fresh_process=True, more than a plain call",
            "150 ms",
            "us",
            list(fresh_us),
            target=150_000.0,
            note=f"{median(plain_us) / 1000:.0f} ms with fork_server=False",
        ),
    ]
