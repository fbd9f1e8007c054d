"""Every worker at once: what a call costs, what a collective costs through the context, and what
passing a Composite moves.

Ray Train is held against the first: it also runs a function on all workers with a process group,
but starts them each time, so it has three rounds, for want of time. The sums of each all_reduce are
looked at.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median

from benchmarks.measuring import Line, in_turns, timed

ROUNDS = 30
FITS = 3
CALLS = 10  # in a turn beside one of these
MB = 1_000_000


def nothing_of(context, *_):
    return None


def zeros(context, num_bytes):
    import torch

    return torch.zeros(num_bytes // 4)


def reduced(context, num_bytes, repeats):
    """Return how long all_reduce takes through the context and without it, in turns [us]."""
    import torch
    import torch.distributed as dist

    from benchmarks.trainings import sum_us

    x = torch.empty(num_bytes // 4)
    calls = {
        "context": lambda: sum_us(x, context.all_reduce),
        "torch": lambda: sum_us(x, dist.all_reduce),
    }
    return in_turns(calls, repeats, warm_ups=2)  # in the same order on all ranks


def fit():
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        # the cores are taken
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"memory": 1})
        TorchTrainer(
            lambda: None, scaling_config=scaling, run_config=RunConfig(storage_path=folder)
        ).fit()


def run(session):
    pool = session.pool
    started = time.perf_counter()
    pool.spmd(nothing_of)
    first = (time.perf_counter() - started) * 1e6
    calls = in_turns({"spmd": timed(lambda: pool.spmd(nothing_of))}, rounds=ROUNDS, warm_ups=3)[
        "spmd"
    ]
    call = timed(lambda: pool.spmd(nothing_of))
    beside = in_turns(
        {"spmd": lambda: median(call() for _ in range(CALLS)), "fit": timed(fit)},
        rounds=FITS,
        warm_ups=0,
    )
    large, small = (
        pool.spmd(reduced, num_bytes, repeats)[0]
        for num_bytes, repeats in ((100 * MB, 21), (16, 300))
    )
    parts = pool.spmd(zeros, 100 * MB)
    pool.spmd(nothing_of, parts)  # the function is there
    moved = []
    for _ in range(5):
        with pool.transfer_bytes() as counter:
            pool.spmd(nothing_of, parts)
        moved.append(counter.total.sent_bytes + counter.total.received_bytes)
    area = "spmd, 2 workers"
    return [
        Line(area, "a call that does nothing", "20 ms", "us", calls, target=20_000.0),
        Line(
            area,
            "a call that does nothing",
            "Ray Train's fit",
            "us",
            beside["spmd"],
            beside["fit"],
            is_speedup=True,
        ),
        Line(
            area, "the first call, which imports torch and makes the group", "none", "us", [first]
        ),
        Line(
            area,
            "all_reduce of 100 MB",
            "torch's own",
            "us",
            large["context"],
            large["torch"],
            target=0.95,
            is_speedup=True,
        ),
        Line(area, "all_reduce of 16 bytes", "torch's own", "us", small["context"], small["torch"]),
        Line(
            area,
            "passing back a Composite of 2 x 100 MB moves",
            "10 KB",
            "B",
            moved,
            target=10_000.0,
        ),
    ]
