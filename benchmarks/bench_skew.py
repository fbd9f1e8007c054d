"""One long item among short ones: whether a worker waits behind it while another has nothing to do (scenario 11).

Twelve items on two workers, the first takes 2 s and each of the others 0.1 s: at best it is over after 2 s.
"""

from __future__ import annotations

from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import rest

SECONDS = [2.0] + [0.1] * 11
IDEAL_US = 2.0e6


def run(session):
    values = in_turns(
        {
            "raypool": timed(lambda: session.pool.parfor(rest, SECONDS, progress=False)),
            "ray": timed(lambda: session.ray_pool.map(rest, SECONDS, chunksize=1)),
        },
        warm_ups=0,
    )
    area, ideal = "12 items, one of them long", [IDEAL_US] * 5
    return [
        Line(area, "parfor", "the ideal", "us", values["raypool"], ideal, 1.05),
        Line(area, "Ray's Pool.map, chunks of 1", "the ideal", "us", values["ray"], ideal),
    ]
