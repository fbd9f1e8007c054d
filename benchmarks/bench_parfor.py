"""What an item of a loop costs when the function does nothing: 100,000 of them, on two workers.

The yardsticks cut the items into a few large chunks before they start (`Pool.map` without
`chunksize`), which is as cheap as it gets; raypool cuts them as it goes, so that it can balance
them. What it takes in eight chunks, as these have it with two workers, stands beside it. "First
time" is a function that the pool has never seen: nothing is known of its pace yet.
"""

from __future__ import annotations

import functools
import itertools

from benchmarks.contest import checked
from benchmarks.measuring import Line, in_turns
from benchmarks.tasks import nothing

ITEMS = 100_000


def run(session):
    numbers, answers = itertools.count(), [None] * ITEMS

    def first_time():
        return session.pool.parfor(
            functools.partial(_nothing_of, next(numbers)), ITEMS, progress=False
        )

    values = in_turns(
        {
            "raypool": checked(
                "raypool",
                lambda: session.pool.parfor(nothing, ITEMS, progress=False),
                answers,
                ITEMS,
            ),
            "eight": checked("raypool in 8 chunks", lambda: in_eight(session.pool), answers, ITEMS),
            "ray": checked(
                "Ray's Pool", lambda: session.ray_pool.map(nothing, range(ITEMS)), answers, ITEMS
            ),
            "processes": checked(
                "multiprocessing",
                lambda: session.process_pool.map(nothing, range(ITEMS)),
                answers,
                ITEMS,
            ),
            "first": checked("raypool, first time", first_time, answers, ITEMS),
        },
        rounds=7,
    )
    area, ours = "parfor, 100,000 no-ops", values["raypool"]
    return [
        Line(area, "an item", "1 us", "us", ours, target=1.0),
        Line(area, "an item", "Ray's Pool.map", "us", ours, values["ray"], 5.0, is_speedup=True),
        Line(area, "an item", "multiprocessing.Pool.map", "us", ours, values["processes"]),
        Line(area, "an item", "itself, in eight chunks", "us", ours, values["eight"]),
        Line(
            area,
            "an item, first time",
            "Ray's Pool.map",
            "us",
            values["first"],
            values["ray"],
            is_speedup=True,
        ),
    ]


def in_eight(pool):
    """Cut as the yardsticks do."""
    return pool.parfor(nothing, ITEMS, chunk_size=ITEMS // 8, progress=False)


def _nothing_of(_number, _item):
    return None
