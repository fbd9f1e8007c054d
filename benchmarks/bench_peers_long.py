"""The same systems with longer items: 50 ms, 1 s, one long item among short ones, and a heavy tail.

In the heavy tail the four longest of 24 items take as long as all others together. For it, and for
one long item before eleven short ones, the least that is possible is known: half of all the time,
or the longest item. Where items are handed out in large chunks, or to workers in turn, before it is
known how long they take, one worker is idle at the end. There is no warm-up but that every worker
of every system has run something.
"""

from __future__ import annotations

import random

from benchmarks.contest import WAYS, Workload, contest
from benchmarks.peers import on_one_ray, peers
from benchmarks.session import WORKERS
from benchmarks.tasks import rest

SHORTEST_S = 0.02
NUM_HEAVY = 24


def heavy_tail():
    """Return how long items take [s], by a Pareto distribution with the exponent 1.2."""
    chance = random.Random(0)
    return [round(SHORTEST_S * chance.paretovariate(1.2), 4) for _ in range(NUM_HEAVY)]


HEAVY = heavy_tail()
SKEWED = [0.6, *[0.03] * 11]


def least_s(items):
    """Return the least that these could take [s]."""
    return max(sum(items) / WORKERS, *items)


WORKLOADS = [
    Workload("50 ms", rest, {way: [0.05] * 12 for way in WAYS}, warm_ups=0),
    Workload("1 s", rest, {way: [1.0] * WORKERS for way in WAYS}, warm_ups=0),
    *(
        Workload(
            name, rest, dict.fromkeys(ways, items), bound_s=least_s(items), target=1.05, warm_ups=0
        )
        for name, items, ways in (
            ("the first of 12 is long", SKEWED, ("map", "submit")),
            ("heavy tail", HEAVY, ("map", "unordered")),
        )
    ),
]


def run():
    with on_one_ray(WORKERS), peers(WORKERS) as opened:
        return contest(opened, WORKLOADS)
