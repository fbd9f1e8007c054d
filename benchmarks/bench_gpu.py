"""On one GPU: several small trainings at once against one after another, a log that stays on the
card, and pinned memory.

Each number of workers needs a pool of its own, as a pool holds its GPU; they are opened in turns,
round by round. What is timed begins when all workers are up and have trained for some steps, so
that starting them and CUDA is no part of it.
"""

from __future__ import annotations

import os
from functools import partial
from statistics import median

from benchmarks import small_trainings
from benchmarks.measuring import Line, in_turns, timed
from benchmarks.own_ray import own_ray
from raypool import parpool

ROUNDS = 2
JOBS = 8
TOGETHER = (1, 2, 4, 8)
MEGABYTE = 2**20
FIRST_GPU = {"gpus": (0,)}


def run():
    with own_ray():
        lines = fillings(FIRST_GPU, TOGETHER)
        with parpool(1, **FIRST_GPU, quiet=True) as pool:
            return [*lines, *logs(pool), *transfers(pool)]


def fillings(where, together, rounds=ROUNDS, steps=None):
    """Return how long so many trainings take, by how many of them are on the card at once."""
    ways = [(k, mps) for k in together for mps in ((False, True) if k > 1 else (False,))]
    # (k, mps, name) -> what it took, round by round, and the memory that a training took
    measured = {}
    without_mps = set()
    for _ in range(rounds):
        for k, mps in ways:
            if (k, mps) in without_mps:
                continue
            sharing = {"workers_per_gpu": k, "mps": mps} if k > 1 else {}
            with parpool(k, **where, **sharing, quiet=True) as pool:
                if mps and not all(pool.parfeval_on_all(small_trainings.has_mps).result()):
                    without_mps.add((k, mps))
                    continue
                for name in small_trainings.TRAININGS:
                    measured.setdefault((k, mps, name), []).append(filling(pool, name, steps))
    return [
        line for name in small_trainings.TRAININGS for line in told(name, measured, together[0])
    ]


def filling(pool, name, steps):
    """Return what all trainings took [us], and the most memory that one of them had [bytes]."""
    warm_up = small_trainings.WARM_UP if steps is None else min(small_trainings.WARM_UP, steps)
    pool.parfeval_on_all(small_trainings.train, 0, name, warm_up).result()
    peaks = []

    def all_of_them():
        results = pool.parfor(
            partial(small_trainings.train, name=name, steps=steps), range(JOBS), chunk_size=1
        )
        peaks.extend(peak for _, _, peak in results)

    return timed(all_of_them)(), max(peaks)


def told(name, measured, alone):
    """Return the lines about one kind of training."""
    area = f"{JOBS} small trainings on one GPU, {os.cpu_count()} cores"
    times = {
        key[:2]: [took for took, _ in values] for key, values in measured.items() if key[2] == name
    }
    others = {way: values for way, values in times.items() if way[0] > alone}
    lines = [Line(area, f"{name}, one after another", "none", "us", times[alone, False])]
    for (k, mps), values in others.items():
        peak = max(peak for _, peak in measured[k, mps, name])
        note = f"{peak / MEGABYTE:.0f} MiB each" if peak else ""
        what = f"{name}, {k} at a time{', MPS' if mps else ''}"
        lines.append(
            Line(
                area,
                what,
                "one after another",
                "us",
                values,
                times[alone, False],
                is_speedup=True,
                note=note,
            )
        )
    k, mps = min(others, key=lambda way: median(others[way]))
    what = f"{name}, the best of these: {k} at a time{', MPS' if mps else ''}"
    best = Line(
        area,
        what,
        "one after another",
        "us",
        others[k, mps],
        times[alone, False],
        target=2,
        is_speedup=True,
    )
    return [*lines, best]


def logs(pool, steps=1000, rounds=5):
    """Return what a step takes with each kind of log."""
    area, lines = "a log of each step's loss", []
    for name in small_trainings.TRAININGS:
        values = in_turns(
            {
                kind.__name__: (
                    lambda kind=kind, name=name: pool.parfeval(kind, name, steps).result()
                )
                for kind in (
                    small_trainings.nothing,
                    small_trainings.by_item,
                    small_trainings.by_buffer,
                )
            },
            rounds,
        )
        what, mine = f"a step of an {name}, MetricBuffer", values["by_buffer"]
        lines += [
            Line(
                area, what, ".item() in each step", "us", mine, values["by_item"], is_speedup=True
            ),
            Line(area, what, "no log", "us", mine, values["nothing"]),
        ]
    return lines


def transfers(pool, sizes=(MEGABYTE, 16 * MEGABYTE, 256 * MEGABYTE), rounds=5):
    """Return what it takes to bring memory to the card."""
    lines = []
    for num_bytes in sizes:
        values = in_turns(
            {
                kind: (
                    lambda kind=kind, num_bytes=num_bytes: pool.parfeval(
                        small_trainings.transfer_us, num_bytes, kind
                    ).result()
                )
                for kind in ("pageable", "pinned", "through pinned")
            },
            rounds,
        )
        rates = {
            kind: f"{num_bytes / median(took) / 1e3:.1f} GB/s" for kind, took in values.items()
        }
        for kind, how in (
            ("pinned", "from pinned memory"),
            ("through pinned", "through pinned memory"),
        ):
            what, note = (
                f"{num_bytes // MEGABYTE} MiB {how}",
                f"{rates[kind]}, pageable {rates['pageable']}",
            )
            lines.append(
                Line(
                    "to the GPU",
                    what,
                    "pageable",
                    "us",
                    values[kind],
                    values["pageable"],
                    is_speedup=True,
                    note=note,
                )
            )
    return lines
