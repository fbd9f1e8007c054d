"""The sweep, by the standard library's processes."""

from multiprocessing import get_context

from benchmarks.sweeps.digits import CONFIGS, show, train

if __name__ == "__main__":
    with get_context("spawn").Pool() as pool:
        show(pool.map(train, CONFIGS, chunksize=1))
