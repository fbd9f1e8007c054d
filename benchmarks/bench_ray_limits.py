"""What one driver costs on Ray: the figures from which the simulation of two levels begins.

How fast actors start beyond those whose processes Ray has ready, how many calls one process makes
in a second (a no-op, to as many actors as there are workers, all at once), and the time of the
processor that each call takes in it: with bare actors, and with raypool, whose `retries=0` sends
each item in a separate call. Measured in turns. Then, on a Ray by itself: how fast its control
store makes placement groups of one bundle, asked for at once, and how much memory its process takes
more for each actor that lives (USS), a few at a time; what else it notes meanwhile is in that too.
"""

from __future__ import annotations

import time
from statistics import median

import psutil

from benchmarks.measuring import Line, in_turns
from benchmarks.own_ray import own_ray
from benchmarks.session import WORKERS, prepare_environment
from benchmarks.tasks import Bare, nothing
from raypool import parpool

CALLS = 1000
STARTS = 4
GROUPS = 100
BUNDLE_CPUS = 0.001
BATCH, BATCHES = 8, 5
WITHIN_S = 60.0
PROCESSOR = "a call, time of the processor"


def run():
    prepare_environment()
    return [*driver(), *control_store()]


def driver():
    """Return what a call and an actor's start cost one driver."""
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
    (wall, cpu), (ray_wall, ray_cpu) = (
        zip(*found[name], strict=True) for name in ("raypool", "bare")
    )
    area = "one driver"
    return [
        Line(area, "a call", "a call of a bare actor", "us", list(wall), list(ray_wall)),
        Line(area, PROCESSOR, "a call of a bare actor", "us", list(cpu), list(ray_cpu)),
        Line(area, "an actor's start", "", "us", found["start"], note=f"{STARTS} at a time"),
    ]


def control_store():
    """Return what placement groups and actors cost Ray's control store."""
    with own_ray(num_cpus=2 * WORKERS):
        took = in_turns({"groups": _groups})["groups"]
        grown = actors_memory()
    area = "the control store"
    note = f"{GROUPS} at a time: {1e6 / median(took):,.0f} a second"
    return [
        Line(area, "a placement group", "", "us", took, note=note),
        Line(area, "memory for each actor", "", "kB", grown, note=f"{BATCH} more each time"),
    ]


def _groups():
    """Return what a placement group takes until it is there [us]; all are removed again."""
    from ray.util import placement_group, remove_placement_group

    started = time.perf_counter()
    groups = [placement_group([{"CPU": BUNDLE_CPUS}]) for _ in range(GROUPS)]
    if not all(group.wait(WITHIN_S) for group in groups):
        raise TimeoutError(
            f"not all of {GROUPS} placement groups were there in {WITHIN_S:g} s each"
        )
    took = (time.perf_counter() - started) / GROUPS * 1e6
    for group in groups:
        remove_placement_group(group)
    return took


def actors_memory():
    """Return by how much the control store grows for each actor that lives [kB]: once for each
    batch of them.
    """
    import ray

    Actor, alive, grown = ray.remote(Bare), [], []
    store = control_store_process()
    before = store.memory_full_info().uss
    for _ in range(BATCHES):
        alive += [Actor.options(num_cpus=0).remote() for _ in range(BATCH)]
        ray.get([actor.call.remote() for actor in alive[-BATCH:]])
        now = store.memory_full_info().uss
        grown.append((now - before) / BATCH / 1e3)
        before = now
    return grown


def control_store_process():
    """Return the process of the control store that this process has started."""
    children = psutil.Process().children(recursive=True)
    found = [process for process in children if process.name() == "gcs_server"]
    if len(found) != 1:
        raise RuntimeError(
            f"{len(found)} processes named gcs_server among {len(children)} of this one's; one was"
            " to be there"
        )
    return found[0]


def _cost(call):
    """Return a function that measures what one of the calls takes, and of the processor in this
    process [us].
    """

    def measure():
        began, started = time.process_time(), time.perf_counter()
        call()
        return (time.perf_counter() - started) / CALLS * 1e6, (
            time.process_time() - began
        ) / CALLS * 1e6

    return measure
