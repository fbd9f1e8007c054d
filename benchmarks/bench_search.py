"""Searches: what a trial costs that does nothing, also when there are many, and successive halving
beside Ray Tune's.

Optuna's samplers suggest the configurations of all parties but Ray Tune, with the same seed. Every
party has two workers. The halving is the same for all: 27 trials of at most 27 epochs of 50 ms, of
which a third continues after 1, 3 and 9 epochs.

Memory is what Python's objects take (`tracemalloc`) that a search of 10,000 trials returns; beside
it stands a study of Optuna's alone, with as many trials. The pause after a condemned trial is taken
on one worker, from the call of `report` to the first line of the next trial, by the same clock.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
import tracemalloc
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context

import optuna

from benchmarks.measuring import Line, in_turns
from benchmarks.own_ray import own_ray
from benchmarks.session import WORKERS
from raypool import current_task, load_checkpoint, parpool, report, save_checkpoint, search

TRIALS = 200
TUNE_TRIALS = 20
MANY, STRETCH = 10_000, 1_000
CONDEMNED = 21
EPOCHS = 27
EPOCH_S = 0.05
SPACE = {"x": search.uniform(0.0, 1.0)}


def run():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with (
        own_ray(num_cpus=2 * WORKERS),
        parpool(WORKERS, quiet=True) as pool,
        ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as executor,
    ):
        pool.parfor(warm, range(WORKERS))
        list(executor.map(nothing, [{"x": 0.0}] * WORKERS))
        return [*trivial(pool, executor), *many(pool), *condemned(pool), *halving(pool)]


# --- trials that do nothing -----------------------------------------------------------------------


def nothing(config):
    return config["x"]


def warm(_):
    import torch

    return torch.zeros(1).item()


def trivial(pool, executor):
    lines = []
    for name, kind, target in (
        ("TPE", optuna.samplers.TPESampler, 0.9),
        ("random", optuna.samplers.RandomSampler, 0.5),
    ):
        parties = {
            "raypool": lambda kind=kind: with_raypool(pool, kind),
            "ProcessPoolExecutor": lambda kind=kind: with_executor(executor, kind),
            "Optuna's threads": lambda kind=kind: with_threads(kind),
        }
        if name == "random":
            parties["Ray Tune, with actors reused"] = with_tune
        values = in_turns(parties)
        ours = values.pop("raypool")
        lines += [
            Line(
                f"a trial that does nothing, {name}",
                "a trial",
                against,
                "us",
                ours,
                theirs,
                30.0 if "Tune" in against else target,
                is_speedup=True,
            )
            for against, theirs in values.items()
        ]
    return lines


def with_raypool(pool, kind):
    start = time.perf_counter()
    found = pool.search(nothing, SPACE, num_trials=TRIALS, sampler=kind(seed=0), progress=False)
    assert len(found) == len(found.study.trials) == TRIALS
    return 1e6 * (time.perf_counter() - start) / TRIALS


def with_executor(executor, kind):
    start = time.perf_counter()
    study = optuna.create_study(direction="maximize", sampler=kind(seed=0))
    running, left = {}, TRIALS
    while left or running:
        while left and len(running) < WORKERS:
            trial = study.ask(SPACE)
            running[executor.submit(nothing, trial.params)] = trial
            left -= 1
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            study.tell(running.pop(future), future.result())
    assert len(study.trials) == TRIALS
    return 1e6 * (time.perf_counter() - start) / TRIALS


def with_threads(kind):
    start = time.perf_counter()
    study = optuna.create_study(direction="maximize", sampler=kind(seed=0))
    study.optimize(
        lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=TRIALS, n_jobs=WORKERS
    )
    assert len(study.trials) == TRIALS
    return 1e6 * (time.perf_counter() - start) / TRIALS


def with_tune():
    from ray import tune

    start = time.perf_counter()
    trainable = tune.with_resources(lambda config: {"score": config["x"]}, {"cpu": 1})
    results = tune.Tuner(
        trainable,
        param_space={"x": tune.uniform(0.0, 1.0)},
        tune_config=tune.TuneConfig(
            num_samples=TUNE_TRIALS, max_concurrent_trials=WORKERS, reuse_actors=True
        ),
        run_config=tune.RunConfig(verbose=0, storage_path=tempfile.mkdtemp()),
    ).fit()
    assert len(results) == TUNE_TRIALS
    return 1e6 * (time.perf_counter() - start) / TUNE_TRIALS


# --- many trials ----------------------------------------------------------------------------------


def many(pool):
    area = f"{MANY:,} trials, random"
    firsts, lasts = [], []
    for _ in range(3):
        ended_at = [trial.datetime_complete.timestamp() for trial in search_many(pool).study.trials]
        ended_at.sort()
        firsts.append(1e6 * (ended_at[STRETCH] - ended_at[0]) / STRETCH)
        lasts.append(1e6 * (ended_at[-1] - ended_at[-1 - STRETCH]) / STRETCH)
    ours, alone = bytes_of(lambda: search_many(pool)), bytes_of(study_alone)
    what = "memory of the driver, a trial"
    return [
        Line(area, f"the last {STRETCH:,}, each", "the first 1,000", "us", lasts, firsts, 1.1),
        Line(area, what, "2,048 bytes", "bytes", [ours], target=2048.0),
        Line(area, what, "Optuna's study alone", "bytes", [ours], [alone]),
    ]


def search_many(pool):
    sampler = optuna.samplers.RandomSampler(seed=0)
    found = pool.search(nothing, SPACE, num_trials=MANY, sampler=sampler, progress=False)
    assert len(found) == len(found.study.trials) == MANY
    return found


def study_alone():
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(MANY):
        trial = study.ask(SPACE)
        study.tell(trial, trial.params["x"])
    return study


def bytes_of(call):
    """Return how much memory the value of a call holds, for each trial [bytes]."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    value = call()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del value
    return (after - before) / MANY


def condemned(pool):
    found = pool.search(
        doomed,
        SPACE,
        metric="score",
        num_trials=CONDEMNED,
        stop=lambda metrics: metrics["score"] < 0,
        max_in_flight=1,
        progress=False,
    )
    times = sorted(found.results)
    assert [trial.state.name for trial in found.study.trials] == ["PRUNED"] * CONDEMNED
    pauses = [1e6 * (begins - reported) for (_, reported), (begins, _) in itertools.pairwise(times)]
    what = "from its report to the first line of the next"
    return [Line("a condemned trial", what, "50 ms", "us", pauses, target=50_000.0)]


def doomed(config):
    began = time.time()
    time.sleep(EPOCH_S)
    reported = time.time()
    report(score=-1.0)
    while not current_task().should_stop:
        time.sleep(0.0001)
    return began, reported


# --- successive halving ---------------------------------------------------------------------------


def loss(x, epoch):
    return (x - 0.3) ** 2 + 1 / (epoch + 1)


def train(config):
    first = (load_checkpoint() or {"epoch": -1})["epoch"] + 1
    for epoch in range(first, EPOCHS):
        time.sleep(EPOCH_S)
        report(epoch=epoch, loss=loss(config["x"], epoch))
        if current_task().should_stop:
            save_checkpoint({"epoch": epoch})
            break


def tune_train(config):
    from ray import tune

    for epoch in range(EPOCHS):
        time.sleep(EPOCH_S)
        tune.report({"loss": loss(config["x"], epoch)})


def halving(pool):
    busy, scores = [], {"raypool": [], "Ray Tune": []}

    def ours():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            found = pool.search(
                train,
                SPACE,
                metric="loss",
                mode="min",
                num_trials=27,
                run_dir=folder,
                stop=search.halving(max_epochs=EPOCHS),
                progress=False,
            )
            took = time.perf_counter() - start
        epochs = int(found.to_frame()["epochs"].sum())
        busy.append(epochs * EPOCH_S / WORKERS / took)
        scores["raypool"].append(found.best.score)
        return took

    def tune_asha(*, reuse_actors):
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler

        start = time.perf_counter()
        results = tune.Tuner(
            tune.with_resources(tune_train, {"cpu": 1}),
            param_space={"x": tune.uniform(0.0, 1.0)},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=27,
                max_concurrent_trials=WORKERS,
                reuse_actors=reuse_actors,
                scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3),
            ),
            run_config=tune.RunConfig(verbose=0, storage_path=tempfile.mkdtemp()),
        ).fit()
        took = time.perf_counter() - start
        if reuse_actors:
            scores["Ray Tune"].append(results.get_best_result().metrics["loss"])
        return took

    values = in_turns(
        {
            "raypool": ours,
            "reused": lambda: tune_asha(reuse_actors=True),
            "default": lambda: tune_asha(reuse_actors=False),
        },
        rounds=3,
    )
    area = "successive halving, 27 trials"
    return [
        Line(
            area,
            "all",
            "Tune's ASHA, actors reused",
            "s",
            values["raypool"],
            values["reused"],
            0.45,
        ),
        Line(area, "all", "Tune's ASHA", "s", values["raypool"], values["default"], 0.12),
        Line(
            area,
            "best loss",
            "Tune's ASHA, actors reused",
            "",
            scores["raypool"][-3:],
            scores["Ray Tune"][-3:],
        ),
        Line(
            area,
            "workers idle",
            "nothing",
            "",
            [1 - share for share in busy[-3:]],
            target=0.12,
            note="the part of the workers' time without an epoch",
        ),
    ]
