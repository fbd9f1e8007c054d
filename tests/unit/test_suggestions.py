"""Calls and names that users type from habit are answered with those that raypool has."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raypool
from raypool import (
    DataQueue,
    ParallelPool,
    Profile,
    Results,
    RunOptions,
    TrainingOptions,
    WorkerResources,
    after_all,
    after_each,
    gcp,
    parpool,
)
from raypool.equivalents import MATLAB
from raypool.testing import SimulatedGpus, sim_pool
from tests.documents import ROOT


def nothing() -> None: ...


def loop(*args: Any, **kwargs: Any) -> Any:
    with sim_pool(1) as pool:
        return pool.parfor(*args, progress=False, **kwargs)


def fit_like_torch() -> Any:
    x = torch.ones(4, 1)
    return sim_pool(1).fit(torch.nn.Linear(1, 1), x, x, torch.nn.functional.mse_loss)


TYPED: list[tuple[Callable[[], Any], str]] = [
    (lambda: parpool(workers=4), "has no argument .workers.. Did you mean num_wo"),
    (lambda: parpool(n_jobs=4), "Did you mean num_workers"),
    (lambda: parpool(gpus_per_worker=1), "Did you mean resources"),
    (lambda: parpool(timeout=5), "Did you mean start_timeout_s"),
    (lambda: parpool(num_gpus=2), r"num_workers or resources=WorkerResources\(gpus=...\)\?"),
    (lambda: parpool("Threads"), "'Threads' is not a number .* Did you mean profile='threads'"),
    (lambda: parpool("Processes", 2), "'Processes' is not .* Did you mean profile='local'"),
    (lambda: parpool("our-lab"), "Did you mean profile='our-lab'"),
    (lambda: parpool(2, "threads"), "Positional arguments: num_workers; pass the others by name"),
    (lambda: parpool(profile="Processes"), "no profile 'Processes'. Did you mean local"),
    (lambda: parpool(2, profile="Threads"), "no profile 'Threads'. Did you mean threads"),
    (lambda: gcp("nocreate"), r"gcp\(create=False\)"),  # type: ignore[arg-type]
    (lambda: after_each(DataQueue(), print), r"queue.after_each\(fn\)"),  # type: ignore[arg-type]
    (lambda: after_each([], print, 1), "take no number of outputs"),  # type: ignore[arg-type]
    (lambda: after_all([], max, 1), "take no number of outputs"),  # type: ignore[arg-type]
    (lambda: sim_pool(1).options(timeout=1), "no argument 'timeout'. Did you mean timeout_s"),
    (lambda: sim_pool(1).options(colour=1), "no argument 'colour'. Choose from: retries, retry_on"),
    (
        lambda: loop(abs, 1, progess=1),
        r"^parfor\(\) has no argument 'progess'. Did you mean progress",
    ),
    (lambda: loop(abs, 1, retries=1), r"Did you mean pool.options\(retries=...\)\?"),
    (lambda: loop(abs, 1, n_jobs=2), r"Did you mean max_workers or parpool\(num_workers=...\)\?"),
    (lambda: loop(abs, 1, colour=1), "Choose from: fn, items, on_error"),
    (lambda: raypool.parfor(abs, 1, rundir="x"), r"^parfor\(\) .* Did you mean run_dir"),
    (lambda: loop(abs), r"parfor\(\): missing .* 'items'. Positional arguments: fn, items; pass"),
    (lambda: loop([1, 2], abs), r"\[1, 2\] is not callable. The function comes first"),
    (lambda: loop(abs, "abc"), r"'abc' is a single str. Pass \[items\] .* list\(items\)"),
    (lambda: loop(abs, {"a": 1}), r"is a single dict. Pass \[items\] .* list\(items.items\(\)\)"),
    (lambda: loop(abs, 1e3), r"items must be an integer, not 1000\.0\. Pass items=1000"),
    (lambda: loop(abs, 3, reduce=sum), "reduce=sum does not fold two values"),
    (lambda: loop(abs, 3, reduce=len), "reduce=len does not fold two values"),
    (lambda: sim_pool(1).parfeval(sim_pool(1), abs, 1, -1), "The pool comes before the dot"),
    (lambda: raypool.parfor(sim_pool(1), abs, 3), "The pool comes before the dot"),
    (lambda: sim_pool(1).spmd(nothing), r"but its parameters are \(\).* The first is for the cont"),
    (fit_like_torch, r"one argument, a pair: fit\(model, \(x, y\), loss\)"),
    (
        lambda: sim_pool(1).fit(1, 2, abs, run_dir="x"),
        r"^fit\(\) has no argument 'run_dir'. Did you mean run_options=RunOptions\(run_dir=...\)\?",
    ),
    (
        lambda: sim_pool(1).fit(1, 2, abs, epochs=3),
        r"Did you mean options=TrainingOptions\(max_epochs=...\)\?",
    ),
    (lambda: sim_pool(1).train(nothing, run_dir="x"), r"run_options=RunOptions\(run_dir=...\)\?"),
    (lambda: sim_pool(1).train(nothing, options={}), r"Did you mean run_options=\?"),
    (lambda: SimulatedGpus(4), r"SimulatedGpus\(folder, 4\)"),
    (lambda: TrainingOptions(lr=0.1), r"^TrainingOptions\(\) .* 'lr'. Did you mean learning_rate"),
    (lambda: TrainingOptions("sgdm"), "Pass all arguments by name"),
    (lambda: TrainingOptions(MaxEpochs=3), "Did you mean max_epochs"),
    (lambda: TrainingOptions(InitialLearnRate=0.1), "Did you mean learning_rate"),
    (lambda: TrainingOptions(epochs=3), "Did you mean max_epochs"),
    (lambda: RunOptions(runs_dir="x"), "no argument 'runs_dir'. Did you mean run_dir"),
    (lambda: WorkerResources(num_gpus=1), "Did you mean gpus"),
    (lambda: Profile(retrys=1), "no argument 'retrys'. Did you mean retries"),
    (lambda: sim_pool(1).parfor(abs, [1])["loss"], r"results.to_frame\(\)\['loss'\]"),
    (
        lambda: sim_pool(1).parfor(lambda x: {"accuracy": x}, [1]).best("acuracy"),
        "no column 'acuracy'. Did you mean accuracy",
    ),
]


@pytest.mark.parametrize(("typed", "words"), TYPED, ids=[words for _, words in TYPED])
def test_the_name_that_was_meant(typed: Callable[[], Any], words: str) -> None:
    with (
        parpool(profile="inline", quiet=True),  # for the verbs of the current pool
        pytest.raises((TypeError, ValueError), match=words),
    ):
        typed()


def test_every_verb_says_that_it_has_no_such_argument() -> None:
    owners = [
        (raypool, raypool.__all__),
        (ParallelPool, dir(ParallelPool)),
        (Results, dir(Results)),
    ]
    verbs = [getattr(owner, name) for owner, names in owners for name in names if name[0] != "_"]
    answers = set()
    with parpool(profile="inline", quiet=True):  # for the verbs of the current pool
        for verb in filter(inspect.isfunction, verbs):
            parameters = inspect.signature(verb).parameters
            kinds = {each.kind for name, each in parameters.items() if name != "self"}
            is_ours = verb.__module__.startswith("raypool")
            if not kinds or inspect.Parameter.VAR_KEYWORD in kinds or not is_ours:
                continue
            with pytest.raises(TypeError) as caught:
                verb(colour=1)
            answers.add(f"{verb.__name__}: {caught.value}")
    assert len(answers) > 25
    assert not [each for each in answers if "() has no argument 'colour'. " not in each]


def test_names_of_other_libraries() -> None:
    with sim_pool(1) as pool:
        future = pool.parfeval(abs, -3)
        for owner, name, here in (
            (raypool, "spmdIndex", "context.rank in a function that pool.spmd calls"),
            (raypool, "parfeval_on_all", "pool.parfeval_on_all"),
            (pool, "NumWorkers", "pool.num_workers"),
            (future, "State", "f.state"),
            (future, "get", "f.result(timeout)"),
            (pool, "close", "pool.shutdown()"),
        ):
            with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{re.escape(here)}"):
                getattr(owner, name)
        assert not hasattr(future, "colour")


def test_the_page_on_matlab_says_the_same() -> None:
    table = (ROOT / "docs/matlab.md").read_text().partition("## All functions")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]

    def is_there(name: str) -> bool:
        words = re.findall(r"[A-Za-z]\w+", MATLAB[name])
        return any(
            re.search(rf"\b{name}\b", row[0])
            and all(re.search(rf"\b{word}\b", row[1]) for word in words)
            for row in rows
        )

    assert [name for name in MATLAB if not is_there(name)] == []
