"""One model on two workers: how soon it trains, how fast `fit` is, what a report costs, what two
workers are worth to `predict`.

Bare Ray Train runs on the same Ray, with its default settings. What a rank computes is the same for
all parties, with as many threads; `fit` and the loop by hand have to come to the same weights. What
Ray Train starts each time has three rounds, for want of time. How fast a loop of one's own is
stands under "One training by each launcher".

A killed rank: rank 1 of two gets SIGKILL after 50 steps, which take 0.1 s each, in a fresh process
whose pool, or Ray, has trained before; until the next report of rank 0.
"""

from __future__ import annotations

import json
import os
import tempfile
import time

from benchmarks import trainings
from benchmarks.contest import check_same, note_same
from benchmarks.measuring import Line, fresh_process, in_turns, timed
from benchmarks.session import WORKERS

FITS = 3
ROUNDS = 9
REPORTS = 3
PREDICTIONS = 7
WARM_REPORTS, WARM_CHECKPOINTS = 100, 20
MB = 1_000_000
PREDICTED = 1536
BATCH = 64
AREA = f"training, {WORKERS} workers"

RECOVERY = """
import json, tempfile
import raypool
from benchmarks import trainings
with raypool.parpool(2, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
    pool.train(trainings.first_step).result()
    run = pool.train(trainings.killed_once, {"killed_at": folder + "/killed_at"})
    print(json.dumps(run.result().values[0]))
"""
BARE_RECOVERY = """
import json, tempfile
from ray.train import FailureConfig
from benchmarks import trainings
from benchmarks.bench_train import bare_fit
from benchmarks.own_ray import own_ray
with own_ray(num_cpus=2), tempfile.TemporaryDirectory() as folder:
    bare_fit(trainings.first_step)
    config = {"killed_at": folder + "/killed_at"}
    took = bare_fit(trainings.killed_once, config, failure_config=FailureConfig(max_failures=1))
    print(json.dumps(took))
"""


def run(session):
    return [
        *starts(session.pool),
        *recoveries(),
        *fits(session.pool),
        *costs(session.pool),
        *predictions(session.pool),
    ]


def starts(pool):
    """Return how long it takes to the first step, and to the result."""

    def train():
        return pool.train(trainings.first_step).result().values[0]

    def warm_again():
        train()  # the managed lane has replaced the workers
        return until(train)

    first, _ = until(train)
    values = in_turns(
        {
            "bare": lambda: until(lambda: bare_fit(trainings.first_step)),
            "warm": warm_again,
            "managed": lambda: until(
                lambda: pool.train(trainings.first_step, lane="managed").result().values[0]
            ),
        },
        rounds=FITS,
    )
    (bare, bare_whole), (warm, warm_whole), (managed, managed_whole) = (
        zip(*values[name], strict=True) for name in ("bare", "warm", "managed")
    )
    return [
        Line(
            AREA,
            "to the first step, warm lane",
            "TorchTrainer.fit",
            "us",
            list(warm),
            list(bare),
            target=0.03,
        ),
        Line(
            AREA,
            "to the result, warm lane",
            "TorchTrainer.fit",
            "us",
            list(warm_whole),
            list(bare_whole),
        ),
        Line(AREA, "to the first step, the first of all, warm lane", "none", "us", [first]),
        Line(
            AREA,
            "to the first step, managed lane",
            "TorchTrainer.fit",
            "us",
            list(managed),
            list(bare),
        ),
        Line(
            AREA,
            "to the result, managed lane",
            "TorchTrainer.fit",
            "us",
            list(managed_whole),
            list(bare_whole),
            target=1.1,
        ),
    ]


def until(train):
    """Return how long it took until the moment that a call returns, and until it returned [us]."""
    started = time.time()
    moment = train()
    return (moment - started) * 1e6, (time.time() - started) * 1e6


def recoveries():
    """Return how long it takes from the end of a killed rank to the next report."""
    values = in_turns(
        {
            "raypool": lambda: json.loads(fresh_process(RECOVERY)),
            "bare": lambda: json.loads(fresh_process(BARE_RECOVERY)),
        },
        rounds=FITS,
        warm_ups=0,
    )
    what, ours = "a killed rank, until the next report", values["raypool"]
    return [
        Line(AREA, what, "TorchTrainer", "us", ours, values["bare"], target=0.25),
        Line(AREA, what, "1 s", "us", ours, target=1_000_000.0),
    ]


def bare_fit(loop, config=None, **more):
    """Train by Ray Train alone; return what rank 0 has returned. `more` is for the `RunConfig`."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        # the cores are taken
        scaling = ScalingConfig(num_workers=WORKERS, resources_per_worker={"memory": 1})
        run_config = RunConfig(storage_path=folder, **more)
        trainer = TorchTrainer(
            loop, train_loop_config=config, scaling_config=scaling, run_config=run_config
        )
        return trainer.fit().return_value


def fits(pool):
    """Return what a step takes in `pool.fit`, and in loops of one's own, without the first
    epoch.
    """
    import torch

    from raypool import TrainingOptions

    lines = []
    for name, size in trainings.SIZES.items():
        options = TrainingOptions(
            optimizer="sgdm",
            learning_rate=trainings.LEARNING_RATE,
            momentum=trainings.MOMENTUM,
            mini_batch_size=size.batch,
            max_epochs=size.epochs + 1,
        )
        network, samples, loss = (
            trainings.network_of(size),
            size.samples(),
            torch.nn.functional.cross_entropy,
        )
        weights = {}

        def fit(size=size, given=(network, samples, loss, options), weights=weights):
            result = pool.fit(*given).result()
            note_same(weights, "raypool", trainings.weights_of(result.model))
            return step_us(result, size)

        def hand(size=size, name=name, weights=weights):
            result = pool.train(trainings.by_hand, {"size": name}).result()
            note_same(weights, "by hand", result.values[0])
            return step_us(result, size)

        def loader(size=size, name=name):
            return step_us(pool.train(trainings.by_loader, {"size": name}).result(), size)

        values = in_turns({"fit": fit, "hand": hand, "loader": loader}, rounds=ROUNDS)
        check_same(weights)
        what, mine = f"a step of a {name} model, pool.fit", values["fit"]
        lines += [
            Line(
                AREA,
                what,
                "a loop by hand, warm lane",
                "us",
                mine,
                values["hand"],
                target=0.95,
                is_speedup=True,
            ),
            Line(
                AREA, what, "one with a DataLoader", "us", mine, values["loader"], is_speedup=True
            ),
        ]
    return lines


def step_us(result, size):
    """Return what a step took, from the report at the end of the first epoch to that of the last
    [us].
    """
    times = result.metrics_frame["time"]
    seconds = (times.iloc[-1] - times.iloc[0]).total_seconds()
    return seconds / (size.epochs * size.steps_per_epoch) * 1e6


def costs(pool):
    """Return what a report costs, without a checkpoint and with one."""
    few, many = [(0, REPORTS), (10 * MB, REPORTS)], [(0, WARM_REPORTS), (10 * MB, WARM_CHECKPOINTS)]
    values = in_turns(
        {
            "bare": lambda: bare_fit(trainings.reports, {"counts": few}),
            "warm": lambda: reported(pool, many),
            "managed": lambda: reported(pool, few, lane="managed"),
        },
        rounds=FITS,
        warm_ups=0,
    )
    lines = []
    for at, what in enumerate(("a report", "a report with a checkpoint of 10 MB")):
        bare, warm, managed = (
            [run[at] for run in values[name]] for name in ("bare", "warm", "managed")
        )
        lines += [
            Line(AREA, f"{what}, warm lane", "TorchTrainer's", "us", warm, bare),
            Line(AREA, f"{what}, managed lane", "TorchTrainer's", "us", managed, bare),
        ]
    return lines


def reported(pool, counts, lane="warm"):
    """Return what the reports of a training cost rank 0 [us]."""
    from raypool import RunOptions

    with tempfile.TemporaryDirectory() as folder:
        run = pool.train(
            trainings.reports, {"counts": counts}, lane=lane, run_options=RunOptions(run_dir=folder)
        )
        return run.result().values[0]


def predictions(pool):
    """Return what two workers are worth to `predict`, and to the same work by hand: no more than
    the cores have.
    """
    model, inputs = trainings.heavy(), trainings.images(PREDICTED)
    alone = pool.options(worker=0)
    values = in_turns(
        {
            "one": timed(lambda: alone.predict(model, inputs, mini_batch_size=BATCH)),
            "two": timed(lambda: pool.predict(model, inputs, mini_batch_size=BATCH)),
            "one by hand": lambda: pool.spmd(trainings.forwards, PREDICTED, BATCH, workers=1)[0],
            "two by hand": lambda: pool.spmd(trainings.forwards, PREDICTED, BATCH)[0],
        },
        rounds=PREDICTIONS,
    )
    note = f"{len(os.sched_getaffinity(0))} cores"
    what, hand = f"predict, {WORKERS} workers", f"the same by hand, {WORKERS} workers"
    return [
        Line(
            AREA,
            what,
            "1 worker",
            "us",
            values["two"],
            values["one"],
            target=1.7,
            is_speedup=True,
            note=note,
        ),
        Line(
            AREA,
            hand,
            "1 worker",
            "us",
            values["two by hand"],
            values["one by hand"],
            is_speedup=True,
            note=note,
        ),
        Line(AREA, what, f"by hand, {WORKERS} workers", "us", values["two"], values["two by hand"]),
    ]
