"""One training by each launcher: how fast two workers train, what the second is worth, and the
whole of it from the prompt.

A step: raypool's workers and the ranks of all launchers stand ready, and in each round all have
their turn, on one batch that two workers share out, or one has alone; each with one thread, and
with what its documentation has a model prepared by. The loss has to be the same in the end. CPU
time is that of all threads of a rank, with what a launcher does there beside the training. What two
workers take of one's time is below 1 if the second is worth anything. "By hand" are two plain
processes with torch's `DistributedDataParallel`, without a launcher. An all_reduce goes through the
context of an spmd call in raypool, and is torch's own elsewhere; what raypool's ranks take by
torch's own stands beside it. Its sums are looked at. Accelerate starts several ranks on CPUs by MPI
only if it is told that they are CPUs, so it is not.

From the prompt: the scripts are in `benchmarks/launchers`, the same network of 7,000 weights on the
same data for 500 steps, with each launcher's own way to share data out. Each runs in a fresh
process, in turns, three rounds for want of time; the weights have to be the same in the end, each
time. Memory is the most that all processes had (PSS), lines of code are those of the script,
without its docstrings and empty lines.
"""

from __future__ import annotations

import contextlib
import functools
import os
from importlib.util import find_spec
from statistics import mean, median
from unittest import mock

from benchmarks import trainings
from benchmarks.contest import check_same, note_same
from benchmarks.measuring import Line, in_turns
from benchmarks.own_ray import own_ray
from benchmarks.ranks import (
    accelerate,
    by_hand,
    by_program,
    by_ray_train,
    plain,
    torchrun,
    waiting_ranks,
)
from benchmarks.scripts import lines_of, run_script
from benchmarks.session import WORKERS
from raypool import parpool

ROUNDS = 5
WHOLE_ROUNDS = 3
STEPS = {"small": 200, "big": 20}
REDUCED = {"1 MB": (1_000_000, 40), "80 MB": (80_000_000, 3)}  # bytes, and how often in a turn
TARGET = 0.98
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

LAUNCHERS = {
    "raypool": ("raypool", plain, "with_raypool"),
    "torchrun": ("torch", torchrun, "with_torchrun"),
    "TorchTrainer": ("ray", plain, "with_ray_train"),
    "Accelerate": ("accelerate", accelerate, "with_accelerate"),
    "Lightning Fabric": ("lightning_fabric", plain, "with_fabric"),
}
"""What each needs, how Python starts its ranks, and the module that trains by it."""

NO_MORE_WORK = (
    "Raypool's ranks spend no more CPU time on a step than its ranks do, in the same turns: they"
    " wait for longer."
)
BARE_REDUCE = "itself, by torch's own"
"""raypool's ranks, without the context: what that adds shows."""


def run():
    return [*ready(), *wholes()]


# --- ranks that stand ready -----------------------------------------------------------------------


def ready(rounds=ROUNDS, steps=STEPS, reduced=REDUCED):
    """Return what a step takes, and what adding up takes, with ranks that stand ready."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ONE_THREAD))
        stack.enter_context(own_ray(num_cpus=2 * WORKERS))
        ranks, by_torch = _ranks(stack)
        summing = {name: ranks[name, WORKERS] for name in ("raypool", "torchrun", "by hand")} | {
            BARE_REDUCE: by_torch
        }
        return [*step_lines(ranks, rounds, steps), *sum_lines(summing, rounds, reduced)]


def _ranks(stack):
    """Return all ranks, as functions that ask them something, by launcher and number of ranks; and
    raypool's with torch's own.
    """
    pool = stack.enter_context(parpool(WORKERS, quiet=True))
    starts = {
        "raypool": None,
        "torchrun": lambda size: by_program(torchrun, "torchrun", size),
        "TorchTrainer": by_ray_train,
        "Accelerate": lambda size: by_program(accelerate, "accelerate", size),
        "Lightning Fabric": lambda size: by_program(plain, "fabric", size),
        "by hand": by_hand,
    }
    ranks = {
        (name, size): (
            _of_pool(pool, size)
            if start is None
            else stack.enter_context(waiting_ranks(start(size), size))
        )
        for name, start in starts.items()
        if name == "by hand" or name in there()
        for size in (1, WORKERS)
    }
    return ranks, _of_pool(pool, WORKERS, trainings.reduced_by_torch)


def _of_pool(pool, size, reduced=trainings.reduced_in_context):
    """Return a function that asks so many workers what the other ranks are asked."""

    def ask(what, *words):
        if what == "reduce":
            return pool.spmd(reduced, *words, workers=size)
        name, num_steps = words
        return (
            pool.train(
                trainings.steady_in_ray, {"size": name, "num_steps": num_steps}, workers=size
            )
            .result()
            .values
        )

    return ask


def step_lines(ranks, rounds, steps):
    losses = {}
    turns = {
        (name, size, launcher): functools.partial(
            _step, ask, ("train", name, num), losses.setdefault((name, size), {}), launcher
        )
        for name, num in steps.items()
        for (launcher, size), ask in ranks.items()
    }
    times = in_turns(turns, rounds)
    for found in losses.values():
        check_same(found)
    launchers = list(dict.fromkeys(launcher for launcher, _ in ranks))
    lines = []
    for name, size in losses:
        took = {
            launcher: [wall for wall, _ in times[name, size, launcher]] for launcher in launchers
        }
        spent = {
            launcher: [cpu for _, cpu in times[name, size, launcher]] for launcher in launchers
        }
        what = f"{name} model, {size} worker{'s' if size > 1 else ''}"
        reasons = {
            launcher: NO_MORE_WORK
            for launcher in launchers
            if _is_no_more(spent["raypool"], spent[launcher])
        }
        lines += _lines("a step", what, "us", took, TARGET, reasons)
    for name, size in losses:
        if size == WORKERS:
            of_cores = {
                launcher: [cpu for _, cpu in times[name, size, launcher]] for launcher in launchers
            }
            lines += _lines(
                "CPU time of a step, each rank", f"{name} model, {size} workers", "us", of_cores
            )
    for name in steps:
        shares = {
            launcher: [
                two / one
                for (one, _), (two, _) in zip(
                    times[name, 1, launcher], times[name, WORKERS, launcher], strict=True
                )
            ]
            for launcher in launchers
        }
        lines += _lines(f"what {WORKERS} workers take of one's time", f"{name} model", "x", shares)
    return lines


def _is_no_more(ours, theirs):
    """Whether raypool takes no more, by the median of the rounds."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True)) <= 1


def _step(ask, words, losses, launcher):
    """Return what a step takes [us], by the clock and of a core, and note the loss in the end."""
    answers = ask(*words)
    note_same(losses, launcher, [loss for *_, loss in answers])
    return max(took for took, _, _ in answers), mean(of_cores for _, of_cores, _ in answers)


def sum_lines(ranks, rounds, reduced):
    lines = []
    for what, words in reduced.items():
        turns = {
            launcher: lambda ask=ask, words=words: max(took for (took,) in ask("reduce", *words))
            for launcher, ask in ranks.items()
        }
        lines += _lines(f"all_reduce, {WORKERS} workers", what, "us", in_turns(turns, rounds))
    return lines


# --- from the prompt ------------------------------------------------------------------------------


def wholes(rounds=WHOLE_ROUNDS):
    """Return what the whole of a training takes, from the prompt until all is over."""
    weights = {}
    runs = in_turns(
        {name: functools.partial(whole, name, weights) for name in there()}, rounds, warm_ups=0
    )
    check_same(weights)
    lines = []
    for at, (what, unit) in enumerate(
        (("to the first step", "us"), ("until all is over", "us"), ("most memory", "MB"))
    ):
        values = {name: [run[at] for run in its] for name, its in runs.items()}
        lines += _lines("from the prompt", what, unit, values)
    return [
        *lines,
        *_lines(
            "from the prompt", "lines", "", {name: [float(lines_of(script(name)))] for name in runs}
        ),
    ]


def whole(name, weights):
    """Run a script; return how long it took to its first step and to its end [us], and the most
    memory [MB].
    """
    _, launch, _ = LAUNCHERS[name]
    arguments = [*launch(WORKERS), "-m", f"benchmarks.{script(name)}"]
    try:
        done = run_script(name, arguments, ONE_THREAD)
    except RuntimeError:
        if name == "raypool":
            raise
        # with others a rank may abort in gloo's threads as it ends (SIGABRT, once in some dozens)
        done = run_script(name, arguments, ONE_THREAD)
    note_same(weights, name, done.said["weights"])
    return (done.said["first_step_at"] - done.started_at) * 1e6, done.took_us, done.peak_mb


def script(name):
    """Return the module that trains by a launcher."""
    return f"launchers.{LAUNCHERS[name][2]}"


# --- all of them ----------------------------------------------------------------------------------


def there():
    """Return the launchers that are installed."""
    return [name for name, (package, _, _) in LAUNCHERS.items() if find_spec(package) is not None]


def _lines(area, what, unit, values, target=None, reasons=None):
    """Return a line for each launcher but raypool, which all are held against; `reasons` why it
    loses, by launcher.
    """
    return [
        Line(
            area,
            what,
            name,
            unit,
            values["raypool"],
            others,
            target,
            is_speedup=True,
            reason=(reasons or {}).get(name, ""),
        )
        for name, others in values.items()
        if name != "raypool"
    ]
