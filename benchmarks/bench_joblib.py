"""What a task costs that joblib hands in, when it does nothing: 10,000 on two workers; and an array that all tasks take.

Each party gets joblib's own defaults (`batch_size="auto"`). Ray's backend makes a pool of actors for every `Parallel`, which is
part of what it costs; loky and raypool keep their workers. Against loky single turns are
beyond the target, and on a machine with a load of 6 to 8 medians of 1.33 to 1.52 were seen.
"""

from __future__ import annotations

import numpy as np
from joblib import Parallel, delayed, parallel_config

from benchmarks.measuring import Line, in_turns, timed
from benchmarks.session import WORKERS
from benchmarks.tasks import first_of, nothing
from raypool import register_joblib

TASKS = 10_000
ARRAY_TASKS = 100


def run(session):
    from ray.util.joblib import register_ray

    register_joblib()
    register_ray()
    array = np.random.default_rng(0).random(10_000_000)

    def tasks(backend, **settings):
        with parallel_config(backend, n_jobs=WORKERS, **settings):
            Parallel()(delayed(nothing)(number) for number in range(TASKS))

    def with_array(backend, **settings):
        with parallel_config(backend, n_jobs=WORKERS, **settings):
            Parallel()(delayed(first_of)(array, number) for number in range(ARRAY_TASKS))

    values = in_turns(
        {
            "raypool": timed(lambda: tasks("raypool", pool=session.pool), TASKS),
            "loky": timed(lambda: tasks("loky"), TASKS),
            "ray": timed(lambda: tasks("ray"), TASKS),
        }
    )
    arrays = in_turns(
        {
            "raypool": timed(lambda: with_array("raypool", pool=session.pool)),
            "loky": timed(lambda: with_array("loky")),
        }
    )
    area = "joblib, 10,000 no-ops"
    return [
        Line(area, "a task", "Ray's backend for joblib", "us", values["raypool"], values["ray"], 3.0, is_speedup=True),
        Line(area, "a task", "loky, joblib's own", "us", values["raypool"], values["loky"], 1.5),
        Line("joblib, 100 tasks with 80 MB", "all", "loky, joblib's own", "us", arrays["raypool"], arrays["loky"]),
    ]
