"""One Ray for everybody: the same workers' niceness and the same cores for raypool and for what it
is held against.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring import search_path
from benchmarks.own_ray import own_ray
from benchmarks.tasks import Bare, nothing
from raypool import ParallelPool, parpool
from raypool.backends.ray.session import ENVIRONMENT
from raypool.cluster.connect import make_token

WORKERS = 2


@dataclass(frozen=True)
class Session:
    """Two workers of each kind; only those that are being measured do anything."""

    pool: ParallelPool
    actors: list[Any]  # bare ones of Ray
    ray_pool: Any  # ray.util.multiprocessing.Pool
    process_pool: Any  # multiprocessing.Pool


def prepare_environment():
    """Set what Ray reads when it is imported; also for processes that are started from here."""
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = search_path()  # the workers import `benchmarks` too
    make_token()


@contextlib.contextmanager
def session():
    """Start Ray, and on it two workers of each kind."""
    spawned = multiprocessing.get_context("spawn").Pool
    with spawned(WORKERS) as process_pool, own_ray(num_cpus=2 * WORKERS):
        import ray
        from ray.util import multiprocessing as ray_multiprocessing

        actors = [ray.remote(Bare).options(num_cpus=0).remote() for _ in range(WORKERS)]
        ray_pool = ray_multiprocessing.Pool(WORKERS)
        try:
            with parpool(WORKERS, quiet=True) as pool:
                ray.get([actor.call.remote() for actor in actors])
                ray_pool.map(nothing, range(WORKERS))
                process_pool.map(nothing, range(WORKERS))
                yield Session(pool, actors, ray_pool, process_pool)
        finally:
            ray_pool.terminate()
