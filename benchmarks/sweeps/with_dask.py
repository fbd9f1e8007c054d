"""The sweep, by dask.distributed."""

from distributed import Client

from benchmarks.sweeps.digits import CONFIGS, show, train

if __name__ == "__main__":
    with Client(threads_per_worker=1) as client:
        show(client.gather(client.map(train, CONFIGS)))
