"""Every worker at once: what a call costs, what a collective costs through the context, and what passing a Composite moves.

Ray Train is held against the first: it also runs a function on all workers with a process group, but starts them each time.
"""

from __future__ import annotations

import tempfile
import time

from benchmarks.measuring import Line, in_turns, timed

ROUNDS = 30
FITS = 3
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

    mine, bare = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    times = ([], [])
    for round_number in range(repeats + 2):
        for name, call in enumerate((lambda: context.all_reduce(mine), lambda: dist.all_reduce(bare))):
            context.barrier()
            started = time.perf_counter()
            call()
            if round_number >= 2:
                times[name].append((time.perf_counter() - started) * 1e6)
    return times


def fit():
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"memory": 1})  # the cores are taken
        TorchTrainer(lambda: None, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()


def run(session):
    pool = session.pool
    started = time.perf_counter()
    pool.spmd(nothing_of)
    first = (time.perf_counter() - started) * 1e6
    calls = in_turns({"spmd": timed(lambda: pool.spmd(nothing_of))}, rounds=ROUNDS, warm_ups=3)["spmd"]
    fits = in_turns({"fit": timed(fit)}, rounds=FITS, warm_ups=0)["fit"]
    large, bare_large = pool.spmd(reduced, 100 * MB, 21)[0]
    small, bare_small = pool.spmd(reduced, 16, 300)[0]
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
        Line(area, "a call that does nothing", "Ray Train's fit", "us", calls[:FITS], fits, is_speedup=True),
        Line(area, "the first call, which imports torch and makes the group", "none", "us", [first]),
        Line(area, "all_reduce of 100 MB", "torch's own", "us", large, bare_large, target=0.95, is_speedup=True),
        Line(area, "all_reduce of 16 bytes", "torch's own", "us", small, bare_small),
        Line(area, "passing back a Composite of 2 x 100 MB moves", "10 KB", "B", moved, target=10_000.0),
    ]
