"""From nothing to the first results of two workers, until the system has ended, and what stands in
memory meanwhile.

Each system in a fresh process, in turns, without a warm-up. "Until all is over": until the system
is closed, and its Ray with it; the interpreter's own end comes after that. The memory is that of
all processes, shared pages in parts (PSS). What is on Ray gets a Ray with a core for each worker;
raypool starts its own, which leaves out some processes of Ray's (see
`raypool/backends/ray/session.py`).
"""

from __future__ import annotations

import json

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, fresh_process, in_turns
from benchmarks.peers import installed
from benchmarks.session import WORKERS

ROUNDS = 5

PROGRAM = """
import json, sys, time

started = time.perf_counter()
from benchmarks.own_ray import own_ray
from benchmarks.peers import PEERS
from benchmarks.tasks import same

if __name__ == "__main__":
    import contextlib, psutil

    workers = int(sys.argv[2])
    package, opener = PEERS[sys.argv[1]]
    # Ray starts a process for each core at once: more cores than workers would cost the systems on it time and memory.
    with own_ray(num_cpus=workers) if package == "ray" else contextlib.nullcontext():
        with opener(workers) as peer:
            way = peer.map or peer.submit
            answers = way(same, list(range(workers)))
            first = time.perf_counter() - started
            tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
            memory = sum(process.memory_full_info().pss for process in tree)
            looked = time.perf_counter() - started - first
    print(json.dumps([first * 1e6, (time.perf_counter() - started - looked) * 1e6, memory / 1e6, answers]))
"""


def run():
    runs = in_turns(
        {name: lambda name=name: started(name) for name in installed()}, ROUNDS, warm_ups=0
    )
    ours = runs.pop("raypool")
    kinds = (("to the first results", "us"), ("until all is over", "us"), ("memory", "MB"))
    return [
        Line(
            "a process",
            what,
            name,
            unit,
            [run[at] for run in ours],
            [run[at] for run in theirs],
            is_speedup=True,
        )
        for at, (what, unit) in enumerate(kinds)
        for name, theirs in runs.items()
    ]


def started(name):
    """Return what a process with a system took until its first results, and until all was over
    [us], and its memory [MB].
    """
    first_us, over_us, memory_mb, answers = json.loads(fresh_process(PROGRAM, name, WORKERS))
    if answers != list(range(WORKERS)):
        raise WrongAnswersError(f"{name}: {answers} of the numbers below {WORKERS}")
    return first_us, over_us, memory_mb
