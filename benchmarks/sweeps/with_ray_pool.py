"""The sweep, by Ray's Pool."""

from ray.util.multiprocessing import Pool

from benchmarks.sweeps.digits import CONFIGS, show, train

with Pool() as pool:
    show(pool.map(train, CONFIGS, chunksize=1))
