"""raypool and its peers, two workers each, in one process tree: the same functions, the same items,
the same answers.

Each system is given work in its own words: all items at once, a call for each, or as they come. How
many items go together is left to it; as they come, where a system has to be told so, one by one
(Ray's Pool and MPIRE: chunks of 1). raypool shows no progress, dask.distributed has no dashboard
and reuses no result, MPIRE's workers stay, and processes are spawned. In each round all have their
turn, and every answer is compared with what a plain loop gives. A number says how many times as
long as raypool a system takes for an item; below 1 it is faster.
"""

from __future__ import annotations

from benchmarks.contest import Workload, contest
from benchmarks.peers import on_one_ray, peers
from benchmarks.session import WORKERS
from benchmarks.tasks import rest, same

WORKLOADS = [
    Workload(
        "nothing",
        same,
        {"map": list(range(1_000)), "submit": list(range(300)), "unordered": list(range(300))},
    ),
    Workload(
        "1 ms", rest, {"map": [0.001] * 500, "submit": [0.001] * 300, "unordered": [0.001] * 300}
    ),
]


def run():
    with on_one_ray(WORKERS), peers(WORKERS) as opened:
        return contest(opened, WORKLOADS)
