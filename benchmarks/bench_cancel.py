"""How soon a worker is free again after what it runs is cancelled: until the first line of the next
task there.

Ray itself cannot stop an actor's method without ending its process, so it is held against the only
way that there is: `ray.kill`, and another actor on the same resources.
"""

from __future__ import annotations

import time

import ray

from benchmarks.measuring import Line, in_turns
from benchmarks.tasks import Bare, count_for_ever, now, rest

ROUNDS = 30


def run(session):
    view = session.pool.options(worker=0)

    def until_next(fn, *args):
        future = view.parfeval(fn, *args)
        while not future.running():
            time.sleep(0.001)
        time.sleep(0.02)  # until it is well under way
        following = view.parfeval(now)
        started = time.time()
        future.cancel()
        return (following.result() - started) * 1e6

    def killed():
        actor = ray.remote(Bare).options(num_cpus=0).remote()
        ray.get(actor.call.remote())
        actor.rest.remote(60)
        started = time.time()
        ray.kill(actor)
        other = ray.remote(Bare).options(num_cpus=0).remote()
        ended = ray.get(other.rest.remote(0))[0]
        ray.kill(other)
        return (ended - started) * 1e6

    values = in_turns(
        {
            "loop": lambda: until_next(count_for_ever),
            "sleep": lambda: until_next(rest, 60),
            "killed": killed,
        },
        rounds=ROUNDS,
    )
    area = "cancel, until the next task runs there"
    return [
        Line(area, "a loop in Python", "20 ms", "us", values["loop"], target=20_000.0),
        Line(area, "time.sleep", "20 ms", "us", values["sleep"], target=20_000.0),
        Line(
            area,
            "a loop in Python",
            "ray.kill and another actor",
            "us",
            values["loop"],
            values["killed"],
        ),
    ]
