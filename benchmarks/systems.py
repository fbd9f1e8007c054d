"""Systems that take calls one by one, each as it is opened and ended: what it does when a call is
stopped, or a worker killed.

`stop` ends a call that runs, and `renew` makes the system usable after a worker has died, each by
the best way that it has; None where it has none.

Two peers have no calls of their own to end or to lose, and no workers of their own either. Ray's
ActorPool is given actors that are there, and gives their results in order: see the bare actors.
joblib's calls belong to a loop: its workers are loky's, or on Ray those of Ray's Pool.
"""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from benchmarks.tasks import nothing


class RaypoolCalls:
    """raypool's own."""

    def __init__(self, num_workers, initializer=None):
        from raypool import parpool

        self._pool = parpool(num_workers, quiet=True, initializer=initializer)
        self.submit = self._pool.submit

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.result(timeout)

    def stop(self, call):
        """Cancel it."""
        call.cancel()

    def renew(self):
        """Do nothing: the worker is replaced."""

    def close(self):
        """End it, with what is queued."""
        self._pool.shutdown(cancel_futures=True)


class Executor:
    """The standard library's executor of processes."""

    stop = None  # from Python 3.14 on an executor can end its processes, all of them

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self.renew()

    def renew(self):
        """Open another: one with a dead process takes nothing more."""
        num_workers, initializer = self._opening
        self._pool = ProcessPoolExecutor(
            num_workers, multiprocessing.get_context("spawn"), initializer
        )
        self.submit = self._pool.submit

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.result(timeout)

    def close(self):
        """End it, with what is queued."""
        self._pool.shutdown(cancel_futures=True)


class Loky(Executor):
    """loky's executor."""

    def renew(self):
        """Open another: one with a dead process takes nothing more."""
        from loky import ProcessPoolExecutor as LokyExecutor

        num_workers, initializer = self._opening
        self._pool = LokyExecutor(num_workers, initializer=initializer)
        self.submit = self._pool.submit

    def stop(self, _call):
        """End all processes, and open another executor."""
        self.close()
        self.renew()

    def close(self):
        """End it, with its processes."""
        self._pool.shutdown(wait=True, kill_workers=True)


class Processes:
    """The standard library's pool of processes."""

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self._open()

    def _open(self):
        self._pool = multiprocessing.get_context("spawn").Pool(*self._opening)

    def submit(self, fn, *args):
        """Hand in a call."""
        return self._pool.apply_async(fn, args)

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.get(timeout)

    def stop(self, _call):
        """End all processes, and open another pool."""
        self.close()
        self._open()

    def renew(self):
        """Do nothing: the process is replaced."""

    def close(self):
        """End it, with what is queued."""
        self._pool.terminate()
        self._pool.join()


class Actor:
    """An actor that calls what it is given."""

    def __init__(self, initializer=None):
        if initializer is not None:
            initializer()

    def call(self, fn, *args):
        """Call it."""
        return fn(*args)


class Actors:
    """Bare actors of Ray, taken in turn."""

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self.renew()

    def renew(self):
        """Start others."""
        import ray

        num_workers, initializer = self._opening
        self._actors = [
            ray.remote(Actor).options(num_cpus=0).remote(initializer) for _ in range(num_workers)
        ]
        self._number = 0

    def submit(self, fn, *args):
        """Hand in a call."""
        self._number += 1
        return self._actors[self._number % len(self._actors)].call.remote(fn, *args)

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        import ray

        return ray.get(call, timeout=timeout)

    def stop(self, _call):
        """Kill the actors, and start others."""
        self.close()
        self.renew()

    def close(self):
        """Kill the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


class RayPool:
    """Ray's Pool."""

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self.renew()

    def renew(self):
        """Open another: its dead actors stay in it."""
        from ray.util.multiprocessing import Pool

        self._pool = Pool(*self._opening)

    def submit(self, fn, *args):
        """Hand in a call."""
        return self._pool.apply_async(fn, args)

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.get(timeout)

    def stop(self, _call):
        """Kill all actors, and open another pool."""
        self.close()
        self.renew()

    def close(self):
        """End it, with what is queued."""
        self._pool.terminate()


class Mpire:
    """MPIRE's pool."""

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self.renew()

    def renew(self):
        """Open another: one with a dead process runs nothing more."""
        from mpire import WorkerPool

        num_workers, self._initializer = self._opening
        self._pool = WorkerPool(num_workers, start_method="spawn", keep_alive=True)

    def submit(self, fn, *args):
        """Hand in a call."""
        return self._pool.apply_async(fn, args, worker_init=self._initializer)

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.get(timeout)

    def stop(self, _call):
        """End all processes, and open another pool."""
        self._pool.terminate()
        self.renew()

    def close(self):
        """End it after what is queued: that is sooner over than `terminate`, which waits longer for
        its processes.
        """
        self._pool.stop_and_join()


class Dask:
    """dask.distributed, on this machine."""

    def __init__(self, num_workers, initializer=None):
        self._opening = num_workers, initializer
        self._open(*self._opening)

    def _open(self, num_workers, initializer):
        from distributed import Client, LocalCluster

        settings = {
            "n_workers": num_workers,
            "threads_per_worker": 1,
            "dashboard_address": None,
            "silence_logs": "CRITICAL",
        }
        self._cluster = LocalCluster(**settings)
        self._client = Client(self._cluster)
        if initializer is not None:
            self._client.run(initializer)

    def submit(self, fn, *args):
        """Hand in a call."""
        return self._client.submit(fn, *args, pure=False)

    def result(self, call, timeout=None):
        """Return what a call has returned."""
        return call.result(timeout)

    def stop(self, _call):
        """End all processes, and open another cluster: its `restart` has left us without a worker
        at times (2026.8).
        """
        self.close()
        self._open(*self._opening)

    def renew(self):
        """Do nothing: the process is replaced."""

    def close(self):
        """End it; what waited then would be said to be lost, call by call."""
        logging.getLogger("distributed.scheduler").disabled = True
        self._client.close()
        self._cluster.close()


SYSTEMS = {
    "raypool": RaypoolCalls,
    "bare actors of Ray": Actors,
    "Ray's Pool": RayPool,
    "concurrent.futures": Executor,
    "multiprocessing": Processes,
    "loky": Loky,
    "MPIRE": Mpire,
    "dask.distributed": Dask,
}


def open_warm(name, num_workers, initializer=None):
    """Open a system of which each worker is up."""
    system = SYSTEMS[name](num_workers, initializer)
    for call in [system.submit(nothing) for _ in range(2 * num_workers)]:
        system.result(call, 60)
    return system
