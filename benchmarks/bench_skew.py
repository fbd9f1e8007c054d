"""One long item among short ones: whether a worker waits behind it while another has nothing to do (scenario 11).

Twelve items on two workers, one takes 2 s and each of the others 0.1 s: at best it is over after 2 s. If the long one is the
first, nobody need know; if it is the last, only `cost=` helps.
"""

from __future__ import annotations

from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import rest

SHORT = [0.1] * 11
LONG_FIRST, LONG_LAST = [2.0, *SHORT], [*SHORT, 2.0]
IDEAL_US = 2.0e6


def run(session):
    values = in_turns(
        {
            "raypool": timed(lambda: session.pool.parfor(rest, LONG_FIRST, progress=False)),
            "ray": timed(lambda: session.ray_pool.map(rest, LONG_FIRST, chunksize=1)),
            "cost": timed(lambda: session.pool.parfor(rest, LONG_LAST, cost=LONG_LAST, progress=False)),
            "no cost": timed(lambda: session.pool.parfor(rest, LONG_LAST, progress=False)),
        },
        warm_ups=0,
    )
    ideal = [IDEAL_US] * 5
    first, last = "12 items, the first is long", "12 items, the last is long"
    return [
        Line(first, "parfor", "the ideal", "us", values["raypool"], ideal, 1.05),
        Line(first, "parfor", "Ray's Pool.map, chunks of 1", "us", values["raypool"], values["ray"]),
        Line(last, "parfor with cost=", "the ideal", "us", values["cost"], ideal, 1.05),
        Line(last, "parfor with cost=", "without it", "us", values["cost"], values["no cost"]),
    ]
