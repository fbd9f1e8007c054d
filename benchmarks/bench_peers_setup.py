"""The same systems where something expensive has to be there first: 50 MB that take a second to
make, once for each worker.

A pool of two workers is opened in a program that runs already (on Ray: with a Ray that runs), 20
items use what its workers have made at their start, and the pool is closed (joblib and Ray's
ActorPool have no workers of their own; see `benchmarks/systems.py`). How often it was made is
counted: once for each worker, not once for each item.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, in_turns, timed
from benchmarks.peers import installed, on_one_ray
from benchmarks.session import WORKERS
from benchmarks.systems import SYSTEMS
from benchmarks.tasks import build_model, use_model

ROUNDS = 5
BUILD_S, MODEL_BYTES, ITEMS = 1.0, 50_000_000, 20


def run():
    names = [name for name in SYSTEMS if name in installed()]
    with on_one_ray(WORKERS):
        values = in_turns(
            {name: timed(functools.partial(sweep, name)) for name in names},
            warm_ups=0,
            rounds=ROUNDS,
        )
    ours = values.pop("raypool")
    return [
        Line(
            "expensive set-up",
            "opened, 20 items, closed",
            name,
            "us",
            ours,
            theirs,
            is_speedup=True,
        )
        for name, theirs in values.items()
    ]


def sweep(name):
    """Open a system whose workers make a model first, and use that; make sure of the answers, and
    that each made one.
    """
    with tempfile.TemporaryDirectory() as folder:
        system = SYSTEMS[name](
            WORKERS, functools.partial(build_model, folder, BUILD_S, MODEL_BYTES)
        )
        try:
            found = [
                system.result(call, 60)
                for call in [system.submit(use_model, number) for number in range(ITEMS)]
            ]
        finally:
            system.close()
        built = len(list(Path(folder).iterdir()))
    if found != list(range(ITEMS)) or not 1 <= built <= WORKERS:
        raise WrongAnswersError(f"{name}: {found}, of {built} models")
