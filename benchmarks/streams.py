"""How systems take a generator that never ends, and give its results one by one while they draw
from it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import warnings
from collections import deque

AHEAD = 16
"""How many calls for each worker are on their way, where one can say it."""


class Drawn:
    """The negative numbers, one after the other without end, and how many were drawn; after `stop`
    there are no more.
    """

    def __init__(self):
        self.count = 0
        self._is_over = False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_over:
            raise StopIteration
        self.count += 1
        return 1 - self.count

    def stop(self):
        """Let it end."""
        self._is_over = True


def _closable(results):
    """Return results as a generator, which can be closed."""
    yield from results


def in_order(submit, result, items, count):
    """Yield the results of calls in order, of which so many are on their way."""
    waiting = deque(submit(item) for item in itertools.islice(items, count))
    while waiting:
        yield result(waiting.popleft())
        waiting.extend(submit(item) for item in itertools.islice(items, 1))


@contextlib.contextmanager
def raypool_stream(num_workers):
    """Use raypool's map, which keeps so many calls ahead of what was taken."""
    from raypool import parpool

    with parpool(num_workers, quiet=True) as pool:
        yield lambda fn, items: pool.map(fn, items, buffersize=AHEAD * num_workers)


@contextlib.contextmanager
def actor_stream(num_workers):
    """Call bare actors of Ray in turn, with as many calls on their way as raypool's map has."""
    import ray

    from benchmarks.systems import Actor

    actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(num_workers)]
    turns = itertools.cycle(actors)
    try:
        yield lambda fn, items: in_order(
            lambda item: next(turns).call.remote(fn, item), ray.get, items, AHEAD * num_workers
        )
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def ray_stream(num_workers):
    """Use the imap of Ray's Pool."""
    from ray.util.multiprocessing import Pool

    pool = Pool(num_workers)
    try:
        yield lambda fn, items: _closable(pool.imap(fn, items))
    finally:
        pool.terminate()


@contextlib.contextmanager
def process_stream(num_workers):
    """Use the imap of the standard library's pool."""
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        yield lambda fn, items: _closable(pool.imap(fn, items))


@contextlib.contextmanager
def mpire_stream(num_workers):
    """Use MPIRE's imap, with workers that stay."""
    from mpire import WorkerPool

    with WorkerPool(num_workers, start_method="spawn", keep_alive=True) as pool:
        # it could not cut a list without end itself
        yield lambda fn, items: pool.imap(fn, items, chunk_size=1)


@contextlib.contextmanager
def joblib_stream(num_workers):
    """Use joblib's generator of results."""
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    try:
        with warnings.catch_warnings():
            # what was begun and is not wanted any more is counted here anyway
            warnings.simplefilter("ignore")
            yield lambda fn, items: Parallel(num_workers, return_as="generator")(
                delayed(fn)(item) for item in items
            )
    finally:
        get_reusable_executor().shutdown(kill_workers=True)


STREAMS = {
    "raypool": raypool_stream,
    "bare actors of Ray": actor_stream,
    "Ray's Pool": ray_stream,
    "multiprocessing": process_stream,
    "joblib": joblib_stream,
    "MPIRE": mpire_stream,
}
