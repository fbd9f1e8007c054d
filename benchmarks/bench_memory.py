"""What stays in memory: of the driver while a million small tasks go through it, and in the object
store after a sweep.

The million comes from a generator: through `map(buffersize=)`, call by call with 1,000 in flight,
and through `parfor(reduce=)`, each on Ray and with "threads", in processes of their own. Memory is
looked at after each 100,000 (private to the process, USS), and growth counts from the second look
on. Of sweeps on Ray with large results, errors, a cancellation and a killed worker, what is left in
the object store is counted when nobody holds the results any more. Each was measured once.
"""

from __future__ import annotations

import gc
import json
import operator
import os
import signal
import time

import numpy as np

from benchmarks.measuring import Line, fresh_process
from benchmarks.own_ray import own_ray
from benchmarks.session import WORKERS
from benchmarks.tasks import array_of

TASKS, LOOK_EVERY = 1_000_000, 100_000
IN_FLIGHT = 1_000
FLAT_MB = 10.0

WAYS = {
    "map": "map with 1,000 ahead",
    "submit": "submit, 1,000 in flight",
    "parfor": "parfor(reduce=)",
}

WITHIN_S = 20.0
"""So long Ray may take to say what is in the object store, and so long again to free what nobody
holds.
"""

SIZE = 2_000_000

PROGRAM = """
import contextlib, gc, json, operator, sys
from collections import deque
from itertools import islice

from benchmarks.session import prepare_environment

if __name__ == "__main__":
    way, profile, count, look_every, in_flight, workers = *sys.argv[1:3], *map(int, sys.argv[3:])
    prepare_environment()
    import psutil
    from benchmarks.own_ray import own_ray
    from raypool import parpool

    this, looks = psutil.Process(), []

    def items():
        for number in range(count):
            if number % look_every == 0 and number:
                gc.collect()
                looks.append(this.memory_full_info().uss)
            yield -number

    def calls(pool):
        waiting, total, left = deque(), 0, items()
        for item in left:
            waiting.append(pool.submit(abs, item))
            if len(waiting) >= in_flight:
                total += waiting.popleft().result()
        return total + sum(call.result() for call in waiting)

    with own_ray(100_000_000, num_cpus=workers) if profile == "local" else contextlib.nullcontext():
        with parpool(workers, profile=profile, quiet=True) as pool:
            if way == "map":
                total = sum(pool.map(abs, items(), buffersize=in_flight))
            else:
                total = calls(pool) if way == "submit" else pool.parfor(abs, items(), reduce=operator.add, progress=False)
    assert total == count * (count - 1) // 2, total
    print(json.dumps(looks))
"""


class StaleFiguresError(Exception):
    """What Ray says of its object store is of a time before what was asked."""


def run():
    return [*drivers(), *stores()]


def drivers():
    """Return how much the driver grows."""
    lines = []
    for profile, where in (("local", "on Ray"), ("threads", "with threads")):
        for way, said in WAYS.items():
            numbers = (TASKS, LOOK_EVERY, IN_FLIGHT, WORKERS)
            looks = [
                uss / 1e6 for uss in json.loads(fresh_process(PROGRAM, way, profile, *numbers))
            ]
            area, what = f"the driver, {TASKS:,} tasks", f"{said}, {where}"
            lines.append(
                Line(
                    area,
                    f"{what}: growth",
                    "10 MB",
                    "MB",
                    [looks[-1] - looks[1]],
                    target=FLAT_MB,
                )
            )
            lines.append(Line(area, what, "", "MB", looks))
    return lines


def stores():
    """Return how much is left in the object store after each kind of sweep [bytes]."""
    from raypool import parpool

    with own_ray(500_000_000, num_cpus=WORKERS), parpool(WORKERS, quiet=True) as pool:
        for _ in range(2):
            pool.parfor(abs, range(10))
        before = used_bytes()
        left = {}
        for name, sweep in SWEEPS.items():
            sweep(pool)
            left[name] = until_empty(before)
    return [
        Line("left in the object store", name, "nothing", "B", [float(count)], target=0.0)
        for name, count in left.items()
    ]


def used_bytes():
    """Return how much of Ray's object store is in use."""
    import ray

    resource = "object_store_memory"
    return ray.cluster_resources()[resource] - ray.available_resources().get(resource, 0)


def until_empty(before):
    """Return what is in use beyond that, once it is nothing or the time is up: Ray frees, and says
    so, some moments later.
    """
    import ray

    deadline = time.monotonic() + WITHIN_S
    mark = ray.put(np.ones(SIZE // 8))  # what Ray says must be of after the sweep
    while used_bytes() - before < SIZE:
        if time.monotonic() > deadline:
            raise StaleFiguresError(
                f"Ray has told nothing of the object store for {WITHIN_S:g} s: what is left is not"
                " known"
            )
        time.sleep(0.1)
    del mark
    deadline = time.monotonic() + WITHIN_S
    while (count := used_bytes() - before) > 0 and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    return max(0, count)


def large_results(pool):
    """Return 20 arrays from the workers, one of them as a future's value."""
    assert (
        sum(len(array) for array in pool.parfor(array_of, [(number, SIZE) for number in range(20)]))
        == 20 * SIZE // 8
    )
    assert len(pool.submit(array_of, (1, SIZE)).result()) == SIZE // 8


def large_arguments(pool):
    """Send arrays, and one with a function."""
    arrays = [np.full(SIZE // 8, number) for number in range(20)]
    assert pool.parfor(len, arrays, reduce=operator.add) == 20 * SIZE // 8
    data = np.ones(SIZE // 8)
    assert set(pool.parfor(lambda _: len(data), range(8))) == {SIZE // 8}


def errors(pool):
    """Let some items fail, with arrays in their errors, beside arrays as results."""

    def fails_now_and_then(number):
        data = np.full(SIZE // 8, number)
        if number % 3 == 0:
            raise ValueError(data)
        return data

    assert len(pool.parfor(fails_now_and_then, range(12), on_error="collect").errors) == 4


def cancelled(pool):
    """Give up calls that wait, run and have ended, with arrays in them and from them."""
    calls = [
        pool.submit(_rest_with, np.full(SIZE // 8, number), 0.05 if number < 4 else 60)
        for number in range(12)
    ]
    assert len(calls[0].result()) == SIZE // 8
    for call in calls:
        call.cancel()
    assert pool.submit(abs, -1).result() == 1


def killed(pool):
    """Kill a worker among items with arrays; they run again."""
    dead = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"raypool-killed-{os.getpid()}")  # noqa: PTH118
    try:
        arrays = [(dead, np.full(SIZE // 8, number), number) for number in range(8)]
        assert [array[0] for array in pool.parfor(_die_once, arrays)] == list(range(8))
    finally:
        os.unlink(dead)  # noqa: PTH108


def _rest_with(data, seconds):
    time.sleep(seconds)
    return data


def _die_once(item):
    path, data, number = item
    if number == 3 and not os.path.exists(path):  # noqa: PTH110
        open(path, "x").close()  # noqa: PTH123
        os.kill(os.getpid(), signal.SIGKILL)
    return data


SWEEPS = {
    "large results": large_results,
    "large arguments": large_arguments,
    "errors": errors,
    "cancelled": cancelled,
    "a worker killed": killed,
}
