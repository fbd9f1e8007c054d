"""What a future costs: many at once, where short tasks share calls, and one at a time, where
nothing can be shared.

Ray's `Pool.apply_async` starts a thread for each call, so it gets fewer of them: what is compared
is the cost of one. "new code" is a function that is made in the program itself and travels as code,
not as a name: it is pickled again at each call, since what it refers to may have changed.
"""

from __future__ import annotations

from itertools import chain
from statistics import median

import ray
from ray.util import ActorPool

from benchmarks.contest import checked
from benchmarks.measuring import Line, in_turns, percentile
from benchmarks.tasks import nothing

QUEUED = 10_000
QUEUED_SLOW = 1_000
TRIPS = 50
BLOCKS = 5


def run(session):
    return [*queued(session), *round_trips(session)]


def queued(session):
    pool, actors, ray_pool = session.pool, session.actors, session.ray_pool

    def parfeval(fn, count=QUEUED):
        futures = [pool.parfeval(fn, number) for number in range(count)]
        return [future.result() for future in futures]

    def bare():
        return ray.get(
            [actors[number % len(actors)].call.remote(number) for number in range(QUEUED)]
        )

    def apply_async():
        answers = [ray_pool.apply_async(nothing, (number,)) for number in range(QUEUED_SLOW)]
        return [answer.get() for answer in answers]

    def actor_pool():
        group = ActorPool(actors)
        for number in range(QUEUED_SLOW):
            group.submit(lambda actor, value: actor.call.remote(value), number)
        found = []
        while group.has_next():
            found.append(group.get_next_unordered())
        return found

    values = in_turns(
        {
            "raypool": checked("raypool", lambda: parfeval(nothing), [None] * QUEUED, QUEUED),
            "bare": checked("bare actors", bare, [None] * QUEUED, QUEUED),
            "apply_async": checked("Ray's Pool", apply_async, [None] * QUEUED_SLOW, QUEUED_SLOW),
            "actor pool": checked("ActorPool", actor_pool, [None] * QUEUED_SLOW, QUEUED_SLOW),
            "new code": checked(
                "raypool, new code", lambda: parfeval(lambda number: None), [None] * QUEUED, QUEUED
            ),
        }
    )
    area, ours = "parfeval, 10,000 queued", values["raypool"]
    return [
        Line(area, "a call", "bare actor calls, pipelined", "us", ours, values["bare"], 0.5),
        Line(
            area,
            "a call",
            "Ray's Pool.apply_async",
            "us",
            ours,
            values["apply_async"],
            10.0,
            is_speedup=True,
        ),
        Line(area, "a call", "ActorPool", "us", ours, values["actor pool"], is_speedup=True),
        Line(
            area,
            "a call, new code",
            "bare actor calls, pipelined",
            "us",
            values["new code"],
            values["bare"],
        ),
    ]


def round_trips(session):
    pool, actor = session.pool, session.actors[0]

    def trips(call):
        once = checked("one at a time", lambda: [call()], [None])
        return lambda: [once() for _ in range(TRIPS)]

    values = in_turns(
        {
            "raypool": trips(lambda: pool.parfeval(nothing, 1).result()),
            "bare": trips(lambda: ray.get(actor.call.remote(1))),
            "apply": trips(lambda: session.ray_pool.apply(nothing, (1,))),
        },
        rounds=4 * BLOCKS,
        warm_ups=2,
    )
    area = "parfeval, one at a time"
    medians = {name: [median(block) for block in blocks] for name, blocks in values.items()}
    tails = {
        name: [percentile(block, 99) for block in _merged(blocks)]
        for name, blocks in values.items()
    }
    return [
        Line(
            area,
            "round trip, median",
            "a bare actor's",
            "us",
            medians["raypool"],
            medians["bare"],
            1.3,
        ),
        Line(
            area,
            "round trip, 99th percentile",
            "a bare actor's",
            "us",
            tails["raypool"],
            tails["bare"],
        ),
        Line(
            area,
            "round trip, median",
            "Ray's Pool.apply",
            "us",
            medians["raypool"],
            medians["apply"],
        ),
    ]


def _merged(blocks):
    """Return the blocks in groups that are large enough for a percentile."""
    size = len(blocks) // BLOCKS
    return [list(chain(*blocks[start : start + size])) for start in range(0, len(blocks), size)]
