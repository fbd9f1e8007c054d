"""A search with real networks: the validation error of the best trial so far, over time.

Small convolutional networks learn scikit-learn's digits: an epoch takes about 50 ms on one core, a
trial has up to 27. Every party has two workers, the same training and the same space, and 6 s from
its first epoch on, so nobody's start counts. raypool's halving and Ray Tune's ASHA
(`reuse_actors=True`) compare trials after 1, 3 and 9 epochs; both suggest at random. Optuna's
Hyperband prunes between 1 and 27 epochs with Optuna's default sampler, in two threads. Random
search is raypool's without a stop. Each epoch notes its error in a file, for all alike; before the
first one the error is that of a guess. The rounds are five seeds, of the samplers and the weights.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from benchmarks.measuring import Line
from benchmarks.own_ray import own_ray
from benchmarks.session import WORKERS
from raypool import current_task, load_checkpoint, parpool, report, save_checkpoint, search

SEEDS = range(5)
BUDGET_S = 6.0
MOMENTS_S = (0.5, 1, 1.5, 2, 3, 4, 5, 6)
EPOCHS = 27
GUESS = 0.9
SPACE = {
    "lr": search.log_uniform(1e-4, 1.0),
    "momentum": search.uniform(0.0, 0.95),
    "channels": search.int_uniform(2, 16, log=True),
    "width": search.int_uniform(8, 128, log=True),
}


def run():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    errors = {}
    with own_ray(num_cpus=2 * WORKERS), parpool(WORKERS, quiet=True) as pool:
        parties = {
            "raypool": functools.partial(with_raypool, pool, search.halving(max_epochs=EPOCHS)),
            "Ray Tune's ASHA": with_tune,
            "Optuna's Hyperband": with_optuna,
            "random search": functools.partial(with_raypool, pool, None),
        }
        pool.parfeval_on_all(data).result()
        for seed in SEEDS:
            for name, party in parties.items():
                with tempfile.TemporaryDirectory() as folder:
                    party(seed, Path(folder))
                    errors.setdefault(name, []).append(errors_in(Path(folder)))
    ours = errors.pop("raypool")
    return [
        Line(
            "validation error of the best trial",
            f"after {moment} s",
            name,
            "",
            [found[at] for found in ours],
            [found[at] for found in theirs],
        )
        for name, theirs in errors.items()
        for at, moment in enumerate(MOMENTS_S)
    ]


# --- one training, for all ------------------------------------------------------------------------


@functools.cache
def data():
    images, digits = load_digits(return_X_y=True)
    x, valid_x, y, valid_y = train_test_split(images, digits, stratify=digits, random_state=0)
    as_images = [
        torch.tensor(part / 16, dtype=torch.float32).view(-1, 1, 8, 8) for part in (x, valid_x)
    ]
    return *as_images, torch.tensor(y), torch.tensor(valid_y)


def training(config, seed, folder, state=None):
    """Train a network; yield the epoch, its validation error, and the state to continue from."""
    torch.set_num_threads(1)
    x, valid_x, y, valid_y = data()
    generator = torch.Generator().manual_seed(seed)
    channels, width = config["channels"], config["width"]
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, channels, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(channels, 2 * channels, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * channels, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )
    for weights in net.parameters():  # threads share torch's own generator
        bound = weights[0].numel() ** -0.5
        torch.nn.init.uniform_(weights, -bound, bound, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), config["lr"], config["momentum"])
    first = 0
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    with (folder / f"{os.getpid()}.{time.time_ns()}").open("w", buffering=1) as notes:
        for epoch in range(first, EPOCHS):
            for batch in torch.randperm(len(x), generator=generator).split(64):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                error = (net(valid_x).argmax(1) != valid_y).float().mean().item()
            notes.write(f"{time.time()} {error}\n")
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            yield epoch, error, state


def errors_in(folder):
    """Return the least error that was noted until each moment after the first epoch."""
    notes = sorted(
        tuple(map(float, line.split()))
        for file in folder.glob("*.*")
        for line in file.read_text().splitlines()
    )
    began_at = notes[0][0]
    return [
        min([GUESS, *(error for at, error in notes if at <= began_at + moment)])
        for moment in MOMENTS_S
    ]


# --- the parties ----------------------------------------------------------------------------------


def with_raypool(pool, stop, seed, folder):
    def train(config):
        for epoch, error, state in training(config, seed, folder, load_checkpoint()):
            report(epoch=epoch, error=error)
            if current_task().should_stop:
                save_checkpoint(state)
                break

    pool.search(
        train,
        SPACE,
        metric="error",
        mode="min",
        num_trials=10_000,
        run_dir=folder / "run",
        stop=stop,
        stop_when=search.until(seconds=BUDGET_S),
        sampler=optuna.samplers.RandomSampler(seed=seed),
        progress=False,
    )


def with_tune(seed, folder):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    def train(config):
        for _, error, _ in training(config, seed, folder):
            tune.report({"error": error})

    tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={
            "lr": tune.loguniform(1e-4, 1.0),
            "momentum": tune.uniform(0.0, 0.95),
            "channels": tune.lograndint(2, 17),
            "width": tune.lograndint(8, 129),
        },
        tune_config=tune.TuneConfig(
            metric="error",
            mode="min",
            num_samples=-1,
            max_concurrent_trials=WORKERS,
            reuse_actors=True,
            search_alg=tune.search.BasicVariantGenerator(random_state=seed),
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3),
        ),
        run_config=tune.RunConfig(verbose=0, storage_path=str(folder), stop=after_budget()),
    ).fit()


def after_budget():
    from ray import tune

    class AfterBudget(tune.Stopper):
        """Stops all trials when the budget is used up, counted from the first report."""

        ends_at = None

        def __call__(self, trial_id, result):
            if self.ends_at is None:
                self.ends_at = time.monotonic() + BUDGET_S
            return False

        def stop_all(self):
            return self.ends_at is not None and time.monotonic() >= self.ends_at

    return AfterBudget()


def with_optuna(seed, folder):
    ends_at = time.monotonic() + BUDGET_S

    def objective(trial):
        config = {name: trial._suggest(name, each) for name, each in SPACE.items()}
        for epoch, error, _ in training(config, seed, folder):
            trial.report(error, epoch + 1)
            if trial.should_prune() or time.monotonic() >= ends_at:
                raise optuna.TrialPruned
        return error

    optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(1, EPOCHS, 3),
    ).optimize(objective, timeout=BUDGET_S, n_jobs=WORKERS)
