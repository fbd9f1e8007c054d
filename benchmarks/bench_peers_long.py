"""The same systems with longer items: 50 ms, 1 s, and a heavy tail, in which a few items take as long as all others together.

For the heavy tail the least that is possible is known: half of all the time, or the longest item. Where items are handed out
in large chunks before it is known how long they take, one worker is idle at the end.
"""

from __future__ import annotations

import random

from benchmarks.contest import Workload, contest
from benchmarks.peers import on_one_ray, peers
from benchmarks.session import WORKERS
from benchmarks.tasks import rest

SHORTEST_S = 0.02
NUM_HEAVY = 60


def heavy_tail():
    """Return how long items take [s], by a Pareto distribution with the exponent 1.2."""
    chance = random.Random(0)
    return [round(SHORTEST_S * chance.paretovariate(1.2), 4) for _ in range(NUM_HEAVY)]


HEAVY = heavy_tail()

WORKLOADS = [
    Workload("50 ms", rest, {way: [0.05] * 40 for way in ("map", "submit", "unordered")}),
    Workload("1 s", rest, {"map": [1.0] * 4}),
    Workload(
        "heavy tail",
        rest,
        {"map": HEAVY, "unordered": HEAVY},
        bound_s=max(sum(HEAVY) / WORKERS, max(HEAVY)),
        target=1.05,
    ),
]


def run():
    with on_one_ray(WORKERS), peers(WORKERS) as opened:
        return contest(opened, WORKLOADS)
