"""The same systems with large arguments and large results: arrays of 1 MB and of 80 MB, each of them another one."""

from __future__ import annotations

import numpy as np

from benchmarks.contest import Workload, contest
from benchmarks.peers import on_one_ray, peers
from benchmarks.session import WORKERS
from benchmarks.tasks import array_of, ends_of

MB = 1_000_000
SMALL, LARGE = MB, 80 * MB


def arrays(count, num_bytes):
    """Return arrays that differ."""
    return [np.full(num_bytes // 8, number, np.int64) for number in range(count)]


def workloads():
    """Return the workloads, made now: they are large."""
    numbers = {"small": [(number, SMALL) for number in range(40)], "large": [(number, LARGE) for number in range(3)]}
    return [
        Workload("arguments of 1 MB", ends_of, {"map": arrays(40, SMALL), "submit": arrays(40, SMALL)}),
        Workload("results of 1 MB", array_of, {"map": numbers["small"], "submit": numbers["small"]}, key=ends_of),
        Workload("arguments of 80 MB", ends_of, {"map": arrays(3, LARGE)}),
        Workload("results of 80 MB", array_of, {"map": numbers["large"]}, key=ends_of),
    ]


def run():
    with on_one_ray(WORKERS), peers(WORKERS) as opened:
        return contest(opened, workloads(), rounds=5)
