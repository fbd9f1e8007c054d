"""The systems that raypool is held against, behind one interface: so many workers each, and the
ways they have to be given work.

`map` gives all items at once and returns the results in order, cut into chunks as the system cuts
them if nobody says how. `submit` makes a call for each item, and waits for all. `unordered` returns
the results as they came. A way that a system does not have is None; those whose package is not
installed are left out, and named.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.own_ray import own_ray
from benchmarks.tasks import nothing

Way = Callable[[Callable[[Any], Any], list[Any]], list[Any]]


@dataclass(frozen=True)
class Peer:
    """A system with its workers."""

    map: Way | None = None
    submit: Way | None = None
    unordered: Way | None = None


def _submit(pool):
    """Return how an executor is given call by call."""
    return lambda fn, items: [
        future.result() for future in [pool.submit(fn, item) for item in items]
    ]


def _as_completed(pool):
    """Return how an executor gives results as they come."""
    completed = concurrent.futures.as_completed
    return lambda fn, items: [
        future.result() for future in completed([pool.submit(fn, item) for item in items])
    ]


@contextlib.contextmanager
def raypool_peer(num_workers):
    """Open raypool's own."""
    from raypool import parpool

    with parpool(num_workers, quiet=True) as pool:
        yield Peer(
            map=lambda fn, items: list(pool.parfor(fn, items, progress=False)),
            submit=_submit(pool),
            unordered=_as_completed(pool),
        )


@contextlib.contextmanager
def ray_pool(num_workers):
    """Open Ray's multiprocessing.Pool."""
    from ray.util.multiprocessing import Pool

    pool = Pool(num_workers)
    try:
        yield Peer(
            map=pool.map,
            submit=lambda fn, items: [
                answer.get() for answer in [pool.apply_async(fn, (item,)) for item in items]
            ],
            unordered=lambda fn, items: list(pool.imap_unordered(fn, items, chunksize=1)),
        )
    finally:
        pool.terminate()


class _Any:
    """An actor that calls what it is given."""

    def call(self, fn, item):
        """Call it."""
        return fn(item)


@contextlib.contextmanager
def bare_actors(num_workers):
    """Start actors of Ray, with a loop round them as its documentation has it."""
    import ray

    actors = [ray.remote(_Any).options(num_cpus=0).remote() for _ in range(num_workers)]

    def in_turn(fn, items):
        return ray.get(
            [
                actors[number % num_workers].call.remote(fn, item)
                for number, item in enumerate(items)
            ]
        )

    def as_they_come(fn, items):
        left, running, results = iter(items), {}, []
        for actor, item in zip(actors, left, strict=False):
            running[actor.call.remote(fn, item)] = actor
        while running:
            (ref,), _ = ray.wait(list(running))
            actor = running.pop(ref)
            for item in left:
                running[actor.call.remote(fn, item)] = actor
                break
            results.append(ray.get(ref))
        return results

    yield Peer(submit=in_turn, unordered=as_they_come)


@contextlib.contextmanager
def actor_pool(num_workers):
    """Start actors in Ray's ActorPool."""
    import ray
    from ray.util import ActorPool

    pool = ActorPool([ray.remote(_Any).options(num_cpus=0).remote() for _ in range(num_workers)])
    yield Peer(
        submit=lambda fn, items: list(
            pool.map(lambda actor, item: actor.call.remote(fn, item), items)
        ),
        unordered=lambda fn, items: list(
            pool.map_unordered(lambda actor, item: actor.call.remote(fn, item), items)
        ),
    )


@contextlib.contextmanager
def executor(num_workers):
    """Open the standard library's executor of processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        yield Peer(
            map=lambda fn, items: list(pool.map(fn, items)),
            submit=_submit(pool),
            unordered=_as_completed(pool),
        )


@contextlib.contextmanager
def processes(num_workers):
    """Open the standard library's pool of processes."""
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        yield Peer(
            map=pool.map,
            submit=lambda fn, items: [
                answer.get() for answer in [pool.apply_async(fn, (item,)) for item in items]
            ],
            unordered=lambda fn, items: list(pool.imap_unordered(fn, items)),
        )


@contextlib.contextmanager
def joblib_processes(num_workers):
    """Use joblib, with its own processes."""
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    def parallel(**settings):
        return lambda fn, items: list(
            Parallel(num_workers, backend="loky", **settings)(delayed(fn)(item) for item in items)
        )

    try:
        yield Peer(map=parallel(), unordered=parallel(return_as="generator_unordered"))
    finally:
        get_reusable_executor().shutdown()


@contextlib.contextmanager
def loky_executor(num_workers):
    """Open loky's executor, as it is without joblib."""
    from loky import ProcessPoolExecutor

    with ProcessPoolExecutor(num_workers) as pool:
        yield Peer(
            map=lambda fn, items: list(pool.map(fn, items)),
            submit=_submit(pool),
            unordered=_as_completed(pool),
        )


@contextlib.contextmanager
def ray_joblib(num_workers):
    """Use joblib, on Ray's backend."""
    from joblib import Parallel, delayed
    from ray.util.joblib import register_ray

    register_ray()
    yield Peer(
        map=lambda fn, items: Parallel(num_workers, backend="ray")(
            delayed(fn)(item) for item in items
        )
    )


@contextlib.contextmanager
def mpire(num_workers):
    """Open MPIRE's pool, with workers that stay: one for each way, since its workers do not change
    from one to another.
    """
    from mpire import WorkerPool

    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(WorkerPool(num_workers, start_method="spawn", keep_alive=True))
            for _ in range(3)
        )
        yield Peer(
            # one result for each item
            map=lambda fn, items: first.map(fn, _wrapped(items), concatenate_numpy_output=False),
            submit=lambda fn, items: [
                answer.get() for answer in [second.apply_async(fn, (item,)) for item in items]
            ],
            unordered=lambda fn, items: list(
                third.imap_unordered(fn, _wrapped(items), chunk_size=1)
            ),
        )


def _wrapped(items):
    """Return the items as MPIRE wants them: it would take a dict or a tuple apart."""
    return [(item,) for item in items]


@contextlib.contextmanager
def dask(num_workers):
    """Start dask.distributed, on this machine."""
    from distributed import Client, LocalCluster, as_completed

    settings = {"n_workers": num_workers, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        yield Peer(
            map=lambda fn, items: client.gather(client.map(fn, items, pure=False)),
            submit=lambda fn, items: client.gather(
                [client.submit(fn, item, pure=False) for item in items]
            ),
            unordered=lambda fn, items: [
                future.result() for future in as_completed(client.map(fn, items, pure=False))
            ],
        )


PEERS = {
    "raypool": ("raypool", raypool_peer),
    "bare actors of Ray": ("ray", bare_actors),
    "Ray's ActorPool": ("ray", actor_pool),
    "Ray's Pool": ("ray", ray_pool),
    "joblib on Ray": ("ray", ray_joblib),
    "concurrent.futures": ("concurrent", executor),
    "multiprocessing": ("multiprocessing", processes),
    "loky": ("loky", loky_executor),
    "joblib": ("joblib", joblib_processes),
    "MPIRE": ("mpire", mpire),
    "dask.distributed": ("distributed", dask),
}
"""The package that each comes from, and how it is opened with so many workers."""


def installed():
    """Return the names of those that are installed; say of the others that they are not."""
    missing = [name for name, (package, _) in PEERS.items() if find_spec(package) is None]
    if missing:
        print(
            f"Not installed, and left out: {', '.join(missing)}. See the extra `bench`.",
            file=sys.stderr,
            flush=True,
        )
    return [name for name in PEERS if name not in missing]


@contextlib.contextmanager
def peers(num_workers: int) -> Iterator[dict[str, Peer]]:
    """Open all that are installed, each warm: its workers have run something by every way."""
    with contextlib.ExitStack() as stack:
        opened = {}
        for name in installed():
            _, opener = PEERS[name]
            peer = opened[name] = stack.enter_context(opener(num_workers))
            for way in filter(None, (peer.map, peer.submit, peer.unordered)):
                way(nothing, list(range(4 * num_workers)))
        yield opened


def on_one_ray(num_workers):
    """Start a Ray with room for all that use it, each with so many workers."""
    return own_ray(1_500_000_000, num_cpus=4 * num_workers)
