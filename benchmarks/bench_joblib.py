"""What a task costs that joblib hands in, when it does nothing: 10,000 on two workers; and an array
that all tasks take.

Each party gets joblib's own defaults (`batch_size="auto"`). Ray's backend opens a pool of actors
for every `Parallel`, and that time counts; loky and raypool keep their workers.
"""

from __future__ import annotations

import numpy as np
from joblib import Parallel, delayed, parallel_config

from benchmarks.contest import checked
from benchmarks.measuring import Line, in_turns
from benchmarks.session import WORKERS
from benchmarks.tasks import first_of, nothing
from raypool import register_joblib

TASKS = 10_000
ARRAY_TASKS = 100


def run(session):
    from ray.util.joblib import register_ray

    register_joblib()
    register_ray()
    array = np.random.default_rng(0).random(10_000_000) + 7
    nones, sevens = [None] * TASKS, [7] * ARRAY_TASKS

    def tasks(backend, **settings):
        with parallel_config(backend, n_jobs=WORKERS, **settings):
            return Parallel()(delayed(nothing)(number) for number in range(TASKS))

    def with_array(backend, **settings):
        with parallel_config(backend, n_jobs=WORKERS, **settings):
            return Parallel()(delayed(first_of)(array, number) for number in range(ARRAY_TASKS))

    values = in_turns(
        {
            "raypool": checked(
                "raypool", lambda: tasks("raypool", pool=session.pool), nones, TASKS
            ),
            "loky": checked("loky", lambda: tasks("loky"), nones, TASKS),
            "ray": checked("Ray's backend", lambda: tasks("ray"), nones, TASKS),
        }
    )
    arrays = in_turns(
        {
            "raypool": checked("raypool", lambda: with_array("raypool", pool=session.pool), sevens),
            "loky": checked("loky", lambda: with_array("loky"), sevens),
        }
    )
    area = "joblib, 10,000 no-ops"
    return [
        Line(
            area,
            "a task",
            "Ray's backend for joblib",
            "us",
            values["raypool"],
            values["ray"],
            3.0,
            is_speedup=True,
        ),
        Line(area, "a task", "loky, joblib's own", "us", values["raypool"], values["loky"], 1.5),
        Line(
            "joblib, 100 tasks with 80 MB",
            "all",
            "loky, joblib's own",
            "us",
            arrays["raypool"],
            arrays["loky"],
        ),
    ]
