"""How systems take a generator that never ends, and give its results one by one while they draw from it."""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings


class Drawn:
    """The negative numbers, one after the other without end, and how many were drawn; after `stop` there are no more."""

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


@contextlib.contextmanager
def raypool_stream(num_workers):
    """Use raypool's map, which keeps so many calls ahead of what was taken."""
    from raypool import parpool

    with parpool(num_workers, quiet=True) as pool:
        yield lambda fn, items: pool.map(fn, items, buffersize=16 * num_workers)


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
def joblib_stream(num_workers):
    """Use joblib's generator of results."""
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was begun and is not wanted any more is counted here anyway
            yield lambda fn, items: Parallel(num_workers, return_as="generator")(delayed(fn)(item) for item in items)
    finally:
        get_reusable_executor().shutdown(kill_workers=True)


STREAMS = {
    "raypool": raypool_stream,
    "Ray's Pool": ray_stream,
    "multiprocessing": process_stream,
    "joblib": joblib_stream,
}
