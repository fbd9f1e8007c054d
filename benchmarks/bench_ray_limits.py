"""What one driver costs on Ray: the figures from which the simulation of two levels begins.

How fast actors start beyond those whose processes Ray has ready, how many calls one process makes in a second (a no-op, to as
many actors as there are workers, all at once), and the time of the processor that each call takes in it: with bare actors, and
with raypool, whose `retries=0` sends each item in a call of its own. Measured in turns.
"""

from __future__ import annotations

import time

from benchmarks.measuring import Line, in_turns
from benchmarks.own_ray import own_ray
from benchmarks.session import WORKERS, prepare_environment
from benchmarks.tasks import Bare, nothing
from raypool import parpool

CALLS = 1000
STARTS = 4
PROCESSOR = "a call, time of the processor"


def run():
    prepare_environment()
    with own_ray(num_cpus=2 * WORKERS), parpool(WORKERS, quiet=True) as pool:
        import ray

        Actor = ray.remote(Bare)
        actors = [Actor.options(num_cpus=0).remote() for _ in range(WORKERS)]
        ray.get([actor.call.remote() for actor in actors])
        alone = pool.options(retries=0)

        def bare():
            ray.get([actors[number % WORKERS].call.remote() for number in range(CALLS)])

        def ours():
            alone.parfor(nothing, range(CALLS))

        def start():
            started = time.perf_counter()
            news = [Actor.options(num_cpus=0).remote() for _ in range(STARTS)]
            ray.get([actor.call.remote() for actor in news])
            took = (time.perf_counter() - started) / STARTS * 1e6
            for actor in news:
                ray.kill(actor)
            return took

        found = in_turns({"bare": _cost(bare), "raypool": _cost(ours), "start": start})
    (wall, cpu), (ray_wall, ray_cpu) = (zip(*found[name], strict=True) for name in ("raypool", "bare"))
    area = "one driver"
    return [
        Line(area, "a call", "a call of a bare actor", "us", list(wall), list(ray_wall)),
        Line(area, PROCESSOR, "a call of a bare actor", "us", list(cpu), list(ray_cpu)),
        Line(area, "an actor's start", "", "us", found["start"], note=f"{STARTS} at a time"),
    ]


def _cost(call):
    """Return a function that measures what one of the calls takes, and of the processor in this process [us]."""

    def measure():
        began, started = time.process_time(), time.perf_counter()
        call()
        return (time.perf_counter() - started) / CALLS * 1e6, (time.process_time() - began) / CALLS * 1e6

    return measure
