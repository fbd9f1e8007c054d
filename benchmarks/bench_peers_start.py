"""From nothing to the first results of two workers, to the end of the process, and what stands in memory meanwhile.

Each system in a fresh process, in turns. The memory is that of all processes, shared pages in parts (PSS).
"""

from __future__ import annotations

import json

from benchmarks.measuring import Line, fresh_process, in_turns
from benchmarks.peers import installed
from benchmarks.session import WORKERS

ROUNDS = 5

PROGRAM = """
import json, sys, time

started = time.perf_counter()
from benchmarks.peers import PEERS, on_one_ray
from benchmarks.tasks import nothing

if __name__ == "__main__":
    import contextlib, psutil

    workers = int(sys.argv[2])
    package, opener = PEERS[sys.argv[1]]
    with on_one_ray(workers) if package == "ray" else contextlib.nullcontext():
        with opener(workers) as peer:
            way = peer.map or peer.submit
            way(nothing, list(range(workers)))
            first = time.perf_counter() - started
            tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
            memory = sum(process.memory_full_info().pss for process in tree)
            looked = time.perf_counter() - started - first
    print(json.dumps([first * 1e6, (time.perf_counter() - started - looked) * 1e6, memory / 1e6]))
"""


def run():
    names = installed()
    runs = in_turns({name: lambda name=name: json.loads(fresh_process(PROGRAM, name, WORKERS)) for name in names}, ROUNDS)
    ours = runs.pop("raypool")
    kinds = (("to the first results", "us"), ("until all is over", "us"), ("memory", "MB"))
    return [
        Line("a process", what, name, unit, [run[at] for run in ours], [run[at] for run in theirs], is_speedup=True)
        for at, (what, unit) in enumerate(kinds)
        for name, theirs in runs.items()
    ]
