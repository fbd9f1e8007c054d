"""One long item among short ones: whether a worker waits behind it while another has nothing to do
(scenario 11).

Twelve items on two workers, one takes 1 s and each of the others 0.05 s: at best it is over after 1
s. If the long one is the first, nobody need know; if it is the last, only `cost=` helps. The other
systems are in `peers_long`.
"""

from __future__ import annotations

from benchmarks.contest import WrongAnswersError
from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import rest

SHORT = [0.05] * 11
LONG_FIRST, LONG_LAST = [1.0, *SHORT], [*SHORT, 1.0]
IDEAL_US = 1.0e6


def run(session):
    values = in_turns(
        {
            "raypool": timed(
                lambda: check(session.pool.parfor(rest, LONG_FIRST, progress=False), LONG_FIRST)
            ),
            "ray": timed(
                lambda: check(session.ray_pool.map(rest, LONG_FIRST, chunksize=1), LONG_FIRST)
            ),
            "cost": timed(
                lambda: check(
                    session.pool.parfor(rest, LONG_LAST, cost=LONG_LAST, progress=False), LONG_LAST
                )
            ),
            "no cost": timed(
                lambda: check(session.pool.parfor(rest, LONG_LAST, progress=False), LONG_LAST)
            ),
        },
        warm_ups=0,
    )
    ideal = [IDEAL_US] * 5
    first, last = "12 items, the first is long", "12 items, the last is long"
    return [
        Line(first, "parfor", "the ideal", "us", values["raypool"], ideal, 1.05),
        Line(
            first, "parfor", "Ray's Pool.map, chunks of 1", "us", values["raypool"], values["ray"]
        ),
        Line(last, "parfor with cost=", "the ideal", "us", values["cost"], ideal, 1.05),
        Line(last, "parfor with cost=", "without it", "us", values["cost"], values["no cost"]),
    ]


def check(found, items):
    """See that each item was run, in order: it returns how long it was to rest."""
    if list(found) != items:
        raise WrongAnswersError(f"{list(found)} of {items}")
