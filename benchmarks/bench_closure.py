"""A large array in a closure: whether it is shipped once, and not once for each of the tasks that
use it (scenario 16).

Held against `ray.put` of the same array, which is the least that sharing it costs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import ray

from benchmarks.contest import checked
from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import first_of

NUM_BYTES = 80_000_000
TASKS = 8


def run(session):
    import torch

    array = np.random.default_rng(0).integers(0, 255, NUM_BYTES, np.uint8)
    tensor = torch.from_numpy(array.copy())
    of_array, of_tensor = (
        (partial(first_of, array), range(TASKS)),
        (
            partial(first_of, tensor),
            range(TASKS),
        ),
    )
    firsts = [int(array[0])] * TASKS

    def put():
        reference = ray.put(array)
        del reference

    def put_and_call():
        reference = ray.put(array)
        return ray.get(
            [session.actors[number % 2].first.remote(reference) for number in range(TASKS)]
        )

    values = in_turns(
        {
            "array": checked(
                "raypool, an array", lambda: session.pool.parfor(*of_array, progress=False), firsts
            ),
            "tensor": checked(
                "raypool, a tensor", lambda: session.pool.parfor(*of_tensor, progress=False), firsts
            ),
            "put": timed(put),
            "put and calls": checked("bare actors", put_and_call, firsts),
            "ray": checked(
                "Ray's Pool", lambda: session.ray_pool.map(*of_array, chunksize=1), firsts
            ),
        },
        rounds=7,
    )
    area = "80 MB in a closure, 8 tasks"
    return [
        Line(area, "parfor, an array", "one ray.put", "us", values["array"], values["put"], 1.2),
        Line(area, "parfor, a tensor", "one ray.put", "us", values["tensor"], values["put"]),
        Line(
            area,
            "parfor, an array",
            "one ray.put, and 8 bare calls with it",
            "us",
            values["array"],
            values["put and calls"],
            1.2,
        ),
        Line(
            area,
            "parfor, an array",
            "Ray's Pool.map",
            "us",
            values["array"],
            values["ray"],
            is_speedup=True,
        ),
    ]
