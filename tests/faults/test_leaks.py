"""Pools that come and go, whatever befell them: no descriptor, process, thread or file of theirs is
left.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import ParallelPool, WorkerLostError, WorkerResources, parpool, report
from tests.leaks import strays


def descriptors() -> int:
    """Return how many files, pipes and sockets this process has open."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def use(pool: ParallelPool) -> None:
    """Use all that a pool has, with an error and reports, so that everything is there that could be
    left.
    """

    def fn(i: int) -> int:
        print("item", i)
        report(loss=1 / (i + 1))
        if i == 3:
            raise ValueError(i)
        return i

    results = pool.parfor(fn, range(8), on_error="collect")
    assert list(results.errors) == [3]
    assert len(results.metrics) == 8
    pool.store["key"] = bytes(100_000)
    assert isinstance(pool.parfeval(fn, 3).exception(300), ValueError)
    assert pool.parfeval(abs, -1).result(300) == 1


@pytest.mark.parametrize("profile", ["inline", "threads"])
def test_pools_in_this_process(profile: str, eventually: Callable[..., bool]) -> None:
    def come_and_go() -> None:
        with parpool(2, profile=profile, quiet=True) as pool:
            use(pool)

    come_and_go()  # what the first one opens may stay: it serves all
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(20):
        come_and_go()
    assert eventually(lambda: descriptors() <= before), (descriptors(), before)
    assert eventually(lambda: not set(threading.enumerate()) - threads), (
        set(threading.enumerate()) - threads
    )


def test_pools_on_ray(ray_session: None, by_value: None, eventually: Callable[..., bool]) -> None:
    def come_and_go() -> None:
        with parpool(2, quiet=True, resources=WorkerResources(gpus=0, cpus=0.1)) as pool:
            use(pool)

    come_and_go()
    before = descriptors()
    for _ in range(3):
        come_and_go()
    # Ray keeps a connection to a worker for a moment, and opens one now and then itself: those of
    # three pools would be more.
    assert eventually(lambda: descriptors() <= before + 3), (descriptors(), before)


def test_children_of_workers_end_with_them(
    ray_session: None, by_value: None, eventually: Callable[..., bool]
) -> None:
    """Also those that have left the worker's group; and the check that stands round every file of
    tests sees them.
    """
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]

    def start_two() -> list[int]:
        import subprocess

        return [
            subprocess.Popen(sleeper, start_new_session=is_apart).pid for is_apart in (False, True)
        ]

    before = strays()
    with parpool(1, quiet=True, resources=WorkerResources(gpus=0)) as pool:
        pids = pool.parfeval(start_two).result(300)
        assert eventually(lambda: strays() - before == set(pids))
    assert eventually(lambda: strays() <= before)


def test_children_and_shared_memory_of_a_worker_that_crashes_go_with_it(
    ray_session: None, by_value: None, eventually: Callable[..., bool], marks: Any
) -> None:
    """A child that has left the worker's group is an orphan by then; `multiprocessing` removes
    shared memory that nobody has unlinked.
    """
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]

    def start_and_crash() -> None:
        import os
        import subprocess
        from multiprocessing.shared_memory import SharedMemory

        marks.add(SharedMemory(create=True, size=1000).name)
        subprocess.Popen(sleeper, start_new_session=True)
        os._exit(1)

    before = strays()
    with parpool(1, quiet=True, resources=WorkerResources(gpus=0)) as pool:
        with pytest.raises(WorkerLostError):
            pool.parfeval(start_and_crash).result(300)
        assert eventually(lambda: strays() <= before)
        assert eventually(lambda: not (Path("/dev/shm") / marks.all()[0]).exists())


def test_shared_memory_of_a_worker_goes_with_it(
    ray_session: None, by_value: None, eventually: Callable[..., bool]
) -> None:
    """Also while a child can still use it."""

    def make() -> str:
        import multiprocessing
        import time
        from multiprocessing.shared_memory import SharedMemory

        name = SharedMemory(create=True, size=1000).name
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        return name

    with parpool(1, quiet=True, resources=WorkerResources(gpus=0)) as pool:
        made = Path("/dev/shm") / pool.parfeval(make).result(300)
        assert made.exists()
    assert eventually(lambda: not made.exists())
