"""The same systems with large arguments and large results: arrays of 1 MB and of 80 MB, each of
them another one.

Arrays are handed over as any argument is: none is put into an object store before, or scattered, as
one could with raypool, Ray and dask.distributed. Those of 80 MB go call by call to the systems on
Ray only: the others send them at once in the same way.

Two parties have no workers. They run the items one after the other in this process, and do what an
array on its way cannot do
without: one copies it within the memory of this process (a memcpy, into memory that is there
already), the other puts it into Ray's object store and gets it out again.
"""

from __future__ import annotations

import numpy as np

from benchmarks.contest import Workload, contest
from benchmarks.peers import PEERS, Peer, on_one_ray, peers
from benchmarks.session import WORKERS
from benchmarks.tasks import array_of, ends_of

MB = 1_000_000
SMALL, LARGE = MB, 80 * MB
MANY, FEW = 16, 2


def arrays(count, num_bytes):
    """Return arrays that differ."""
    return [np.full(num_bytes // 8, number, np.int64) for number in range(count)]


def workloads():
    """Return the workloads, made now: they are large."""
    small, numbers = arrays(MANY, SMALL), [(number, SMALL) for number in range(MANY)]
    return [
        Workload("arguments of 1 MB", ends_of, {"map": small, "submit": small}),
        Workload("results of 1 MB", array_of, {"map": numbers, "submit": numbers}, key=ends_of),
        *large_workloads("map"),
    ]


def large_workloads(way):
    """Return those with the largest arrays."""
    numbers = [(number, LARGE) for number in range(FEW)]
    return [
        Workload("arguments of 80 MB", ends_of, {way: arrays(FEW, LARGE)}),
        Workload("results of 80 MB", array_of, {way: numbers}, key=ends_of),
    ]


def alone(move):
    """Return a party without workers, which calls this with every array that another one would
    send.
    """

    def moved(value):
        return move(value) if isinstance(value, np.ndarray) else value

    def run(fn, items):
        return [moved(fn(moved(item))) for item in items]

    return Peer(map=run, submit=run)


def yardsticks():
    """Return the parties without workers."""
    import ray

    room = np.zeros(LARGE // 8, np.int64)

    def copied(array):
        np.copyto(room[: len(array)], array)
        return array

    return {
        "no workers, a memcpy": alone(copied),
        "no workers, ray.put and get": alone(lambda array: ray.get(ray.put(array))),
    }


def run():
    with on_one_ray(WORKERS), peers(WORKERS) as opened:
        parties = {**opened, **yardsticks()}
        lines = contest(parties, workloads(), rounds=5)
        # Call by call only on Ray: elsewhere it goes the same way as at once, and takes most of the
        # time of all this.
        on_ray = {
            name: party
            for name, party in parties.items()
            if PEERS.get(name, ("ray",))[0] in ("raypool", "ray")
        }
        return lines + contest(on_ray, large_workloads("submit"), rounds=5)
