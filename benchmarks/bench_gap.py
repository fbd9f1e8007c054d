"""How long a worker idles between two tasks of 60 ms: too long to share a call, so that each waits
for the driver.

The gap is what a bare actor's round trip is, seen from the other end. It is held against such a
round trip in a row of them; against one after 60 ms of rest, since a machine that has slept is slow
(caches, clocks, sleeping cores); and against the gap of a loop over bare actors that sends the next
call when `ray.wait` reports the last.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import ray

from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import rest

TASK_S = 0.060
TASKS = 32
TRIPS = 100


def run(session):
    pool, actors = session.pool, session.actors

    def loop():
        frame = pool.parfor(rest, [TASK_S] * TASKS, progress=False).to_frame()
        return median(
            gap
            for _, rows in frame.groupby("worker")
            for gap in _gaps(
                [
                    (start.timestamp(), start.timestamp() + duration)
                    for start, duration in zip(rows["started_at"], rows["duration_s"], strict=True)
                ]
            )
        )

    def futures():
        done = [pool.parfeval(rest, TASK_S) for _ in range(TASKS)]
        pairs = {}
        for future in done:
            future.result()
            started = future.started_at.timestamp()
            pairs.setdefault(future.worker, []).append((started, started + future.duration_s))
        return median(gap for times in pairs.values() for gap in _gaps(times))

    def bare_loop():
        running = {actor.rest.remote(TASK_S): actor for actor in actors}
        times = {actor: [] for actor in actors}
        left = TASKS - len(running)
        while running:
            (ref,), _ = ray.wait(list(running))
            actor = running.pop(ref)
            if left:
                running[actor.rest.remote(TASK_S)] = actor
                left -= 1
            times[actor].append(ray.get(ref))
        return median(gap for entries in times.values() for gap in _gaps(entries))

    once = timed(lambda: ray.get(actors[0].call.remote(1)))

    def rested():
        time.sleep(TASK_S)
        return once()

    values = in_turns(
        {
            "parfor": loop,
            "trip": lambda: median(once() for _ in range(TRIPS)),
            "rested": lambda: median(rested() for _ in range(TASKS // 2)),
            "futures": futures,
            "bare loop": bare_loop,
        }
    )
    area = "gap between 60 ms tasks"
    return [
        Line(
            area, "parfor", "a bare actor's round trip", "us", values["parfor"], values["trip"], 1.3
        ),
        Line(
            area,
            "parfeval",
            "a bare actor's round trip",
            "us",
            values["futures"],
            values["trip"],
            1.3,
        ),
        Line(
            area,
            "parfor",
            "such a trip after 60 ms of rest",
            "us",
            values["parfor"],
            values["rested"],
        ),
        Line(
            area,
            "parfeval",
            "such a trip after 60 ms of rest",
            "us",
            values["futures"],
            values["rested"],
        ),
        Line(
            area, "parfor", "a loop over bare actors", "us", values["parfor"], values["bare loop"]
        ),
        Line(
            area,
            "parfeval",
            "a loop over bare actors",
            "us",
            values["futures"],
            values["bare loop"],
        ),
    ]


def _gaps(times):
    """Return the idle times [us] between tasks, given when each began and ended [s]."""
    return [(after[0] - before[1]) * 1e6 for before, after in pairwise(sorted(times))]
