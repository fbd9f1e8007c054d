"""What a small message costs on its way from four workers to here: from the first `put` until the
last one was read.

With four senders on few cores it is the whole machine that is measured, not one side of the queue.
A queue with a limit (here of 100) answers each `put`, so it is held against Ray's own queue, an
actor that answers each call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.queue import Queue as RayQueue

from benchmarks.measuring import Line, in_turns, timed
from benchmarks.tasks import Sender, put_many, send_many
from raypool import DataQueue, ParallelPool, WorkerResources, parpool

SENDERS = 4
MESSAGES = 5_000
FEWER = 250
LIMIT = 100


@dataclass
class Senders:
    """Four of each kind; only those that are being measured do anything."""

    pool: ParallelPool
    actors: list[Any]
    # their queue, and one each by which they are told how many messages to send
    processes: tuple[Any, list[Any]]

    def to_get(self, count, maxsize=None):
        """Read in a loop."""
        queue = DataQueue(maxsize)
        futures = [self.pool.parfeval(put_many, queue, count) for _ in range(SENDERS)]
        for _ in range(SENDERS * count):
            queue.get()
        for future in futures:
            future.result()

    def to_listener(self):
        """Let a listener have them."""
        queue, seen = DataQueue(), []
        queue.after_each(seen.append)
        for future in [self.pool.parfeval(put_many, queue, MESSAGES) for _ in range(SENDERS)]:
            future.result()
        queue.close()
        assert len(seen) == SENDERS * MESSAGES

    def to_ray(self, queue):
        """Read what actors put into a queue of Ray's."""
        refs = [actor.put_many.remote(queue, FEWER) for actor in self.actors]
        for _ in range(SENDERS * FEWER):
            queue.get()
        ray.get(refs)

    def to_multiprocessing(self):
        """Read what processes put into a queue of the standard library's."""
        queue, orders = self.processes
        for order in orders:
            order.put(MESSAGES)
        for _ in range(SENDERS * MESSAGES):
            queue.get()


def run(session):
    with _senders() as senders:
        free, limited = RayQueue(), RayQueue(LIMIT)
        values = in_turns(
            {
                "get": timed(lambda: senders.to_get(MESSAGES), SENDERS * MESSAGES),
                "after_each": timed(senders.to_listener, SENDERS * MESSAGES),
                "processes": timed(senders.to_multiprocessing, SENDERS * MESSAGES),
                "ray": timed(lambda: senders.to_ray(free), SENDERS * FEWER),
                "limited": timed(lambda: senders.to_get(FEWER, LIMIT), SENDERS * FEWER),
                "ray limited": timed(lambda: senders.to_ray(limited), SENDERS * FEWER),
            }
        )
        free.shutdown()
        limited.shutdown()
    area, ours, bounded = (
        f"DataQueue, {SENDERS} workers",
        values["get"],
        f"a message, maxsize={LIMIT}",
    )
    return [
        Line(area, "a message, by get", "20,000 a second", "us", ours, target=50.0),
        Line(
            area,
            "a message, by after_each",
            "20,000 a second",
            "us",
            values["after_each"],
            target=50.0,
        ),
        Line(area, "a message, by get", "multiprocessing.Queue", "us", ours, values["processes"]),
        Line(
            area,
            "a message, by get",
            "ray.util.queue.Queue",
            "us",
            ours,
            values["ray"],
            is_speedup=True,
        ),
        Line(
            area,
            bounded,
            f"ray.util.queue.Queue({LIMIT})",
            "us",
            values["limited"],
            values["ray limited"],
            is_speedup=True,
        ),
    ]


@contextlib.contextmanager
def _senders():
    share = WorkerResources(gpus=0, cpus=1 / SENDERS)
    with parpool(SENDERS, resources=share, quiet=True) as pool, _processes() as processes:
        actors = [ray.remote(Sender).options(num_cpus=0).remote() for _ in range(SENDERS)]
        try:
            yield Senders(pool, actors, processes)
        finally:
            for actor in actors:
                ray.kill(actor)


@contextlib.contextmanager
def _processes():
    context = multiprocessing.get_context("spawn")
    queue, orders = context.Queue(), [context.SimpleQueue() for _ in range(SENDERS)]
    processes = [
        context.Process(target=send_many, args=(order, queue), daemon=True) for order in orders
    ]
    for process in processes:
        process.start()
    try:
        yield queue, orders
    finally:
        for order, process in zip(orders, processes, strict=True):
            order.put(0)
            process.join()
