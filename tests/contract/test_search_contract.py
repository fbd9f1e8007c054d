"""`pool.search`: every trial is told once, the best continue, and nothing is lost."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    MetricsReport,
    ParallelPool,
    PoolPreemptedError,
    current_task,
    load_checkpoint,
    load_results,
    parpool,
    report,
    save_checkpoint,
    search,
)
from raypool.core.messages import WorkerLost
from raypool.errors import LossReason
from raypool.search.run import SearchResults
from raypool.testing import sim_pool
from raypool.testing.simulation import FaultPlan
from raypool.worker.folders import copy_checkpoint
from tests.conftest import Gate, Marks

pytestmark = pytest.mark.semantics

SPACE = {"x": search.uniform(0.0, 1.0), "kind": search.choice("a", "b"), "width": 3}
HALVING = search.halving(max_epochs=9)


def score(config: dict[str, Any]) -> float:
    return (config["x"] - 0.5) ** 2


def trainer(marks: Marks, *, is_careful: bool = True) -> Callable[[dict[str, Any]], Any]:
    """Return a training of 9 epochs that notes each; a careful one looks at `should_stop`."""

    def train(config: dict[str, Any]) -> dict[str, float]:
        file = current_task().checkpoint_dir / "epoch.json"
        last = epoch = json.loads(file.read_text()) if file.exists() else -1
        for epoch in range(last + 1, 9):  # none, if it was interrupted after its last one
            marks.add(f"{config['x']} {epoch}")
            report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
            file.write_text(json.dumps(epoch))
            if is_careful and current_task().should_stop:
                break
        return {"accuracy": config["x"] * (epoch + 1)}

    return train


def gain(rate: float, epoch: int) -> float:
    """What an epoch gains; the best rate falls from 1 to 0.1."""
    return -((math.log10(rate) + epoch / 40) ** 2)


def gather(config: dict[str, Any]) -> dict[str, float]:
    """Gain for 40 epochs, each at the rate of the configuration; continue from a checkpoint."""
    file = current_task().checkpoint_dir / "state.json"
    state = json.loads(file.read_text()) if file.exists() else {"epoch": 0, "total": 0.0}
    first = state["epoch"]
    while state["epoch"] < 40 and not current_task().should_stop:
        state["total"] += gain(config["rate"], state["epoch"])
        report(epoch=state["epoch"], total=state["total"])
        state["epoch"] += 1
    assert state["epoch"] == first + config["every"], "it pauses there, and not before"
    file.write_text(json.dumps(state))
    return {"total": state["total"]}


RATES = {"rate": search.log_uniform(0.01, 10), "width": search.int_uniform(1, 4), "every": 2}
POPULATION = search.population(size=8, every=2, max_epochs=40)


def states(study: optuna.Study) -> Counter[str]:
    return Counter(trial.state.name for trial in study.trials)


@pytest.mark.everywhere
def test_a_search_finds_the_best_and_tells_each_trial_once(pool: ParallelPool) -> None:
    found = pool.search(score, SPACE, mode="min", num_trials=25, seed=0)
    assert states(found.study) == {"COMPLETE": 25}
    assert found.best.score == found.study.best_value == found.best.value
    assert found.best.config == {**found.study.best_params, "width": 3}
    frame = found.to_frame()
    assert list(frame.columns[:6]) == ["trial", "state", "score", "epochs", "x", "kind"]
    assert frame["score"].is_monotonic_increasing
    assert sorted(frame["trial"]) == list(range(25))
    assert repr(found).startswith("<SearchResults of 25 trials: 25 complete; best score ")
    assert "25 complete" in found._repr_html_()


@pytest.mark.everywhere
def test_halving_continues_the_best_from_their_checkpoints(
    pool: ParallelPool, marks: Marks, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"metric": "accuracy", "stop": HALVING, "run_dir": tmp_path}
    found = pool.search(trainer(marks), SPACE, num_trials=9, seed=2, **arguments)
    told = states(found.study)
    assert told["COMPLETE"] >= 1
    assert told["COMPLETE"] + told["PRUNED"] == 9
    frame = found.to_frame()
    assert set(frame.loc[frame["state"] == "complete", "epochs"]) == {9}
    num_marks = len(marks.all())
    assert num_marks == len(set(marks.all())) >= frame["epochs"].sum(), "each epoch once"
    if len(pool.workers) == 1:  # else others continue while a worker would be idle
        assert set(frame["epochs"]) == {1, 3, 9}
        assert num_marks == frame["epochs"].sum()
    # whoever got furthest was among the best third of the first rung
    best = frame.sort_values("x", ascending=False)["trial"].iloc[0]
    assert found.best.number == best
    assert found.best.value == {"accuracy": found.best.config["x"] * 9}
    kept, now = load_results(tmp_path).to_frame(), found.results.to_frame()
    columns = ["trial", "state", "accuracy", "epochs", "x"]
    assert kept[columns].equals(now[columns]), "the folder is a run like any other"
    assert list(kept["duration_s"]) == pytest.approx(list(now["duration_s"])), "all parts count"
    assert kept["started_at"].equals(now["started_at"])


@pytest.mark.parametrize("stop", [HALVING, search.population(size=9, every=3, max_epochs=9)])
def test_a_report_without_a_score_is_no_epoch_of_a_trial(
    pool: ParallelPool, tmp_path: Path, stop: Any
) -> None:
    """As of a training that validates after every other epoch, and says None after the others."""

    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, accuracy=None if epoch % 2 else np.array(config["x"] * epoch))
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return

    found = pool.search(
        train, SPACE, metric="accuracy", num_trials=9, stop=stop, run_dir=tmp_path, seed=2
    )
    done = found.to_frame().query("state == 'complete'")
    assert set(done["epochs"]) == {9}


def test_the_timeline_has_the_parts_of_trials_live_and_loaded(tmp_path: Path) -> None:
    """One worker never does two things at once, and only what it has done counts."""
    with parpool(profile="inline", quiet=True) as pool:
        given: dict[str, Any] = {"metric": "accuracy", "stop": HALVING, "run_dir": tmp_path}
        found = pool.search(gather_marks, SPACE, num_trials=9, seed=2, **given)
    tables = [found.results.attempts, load_results(tmp_path).attempts]
    for attempts in tables:
        assert len(attempts) == 9 + 3 + 1, "each trial, the best third again, and the best of those"
        assert set(attempts["status"]) == {"finished"}
        times = attempts.sort_values("started_at")
        ends = times["started_at"] + pd.to_timedelta(times["duration_s"], unit="s")
        assert (times["started_at"].iloc[1:].array >= ends.iloc[:-1].array).all()
    assert tables[0]["item"].equals(tables[1]["item"])


def gather_marks(config: dict[str, Any]) -> None:
    for epoch in range(load_checkpoint() or 0, 9):
        report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
        if current_task().should_stop:
            save_checkpoint(epoch + 1)
            return


def test_reports_of_a_trial_stay_in_order_if_a_part_of_it_runs_twice(
    pool: ParallelPool, tmp_path: Path
) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
            if current_task().attempt == 1 and epoch == 0:
                raise ConnectionError
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return

    found = pool.options(retry_on=ConnectionError).search(
        train, SPACE, metric="accuracy", num_trials=9, stop=HALVING, run_dir=tmp_path
    )
    for results in (found.results, load_results(tmp_path)):
        epochs = results.metrics.groupby("item")["epoch"].agg(list)
        best = int(found.to_frame()["trial"].iloc[0])
        assert epochs[best] == [0, *range(9)]


def test_halving_with_too_few_trials_says_so(
    pool: ParallelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.search(
        gather_marks, SPACE, metric="accuracy", num_trials=8, stop=HALVING, run_dir=tmp_path
    )
    assert "none of 8 trials to the end: it compares them 2 times, and 1 of 3" in caplog.text
    assert "at least 9 trials" in caplog.text


def test_a_search_that_has_ended_has_no_running_trial(pool: ParallelPool, tmp_path: Path) -> None:
    """One that ended early in an earlier call, and whose end has come before it continues."""

    def train(config: dict[str, Any]) -> float:
        if current_task().index == 1 and not (tmp_path / "again").exists():
            (tmp_path / "again").touch()
            raise KeyboardInterrupt
        return 1.0

    call = {"num_trials": 3, "mode": "max", "run_dir": tmp_path / "run"}
    with parpool(profile="inline", quiet=True) as inline:
        with pytest.raises(KeyboardInterrupt):
            inline.search(train, SPACE, **call)
        found = inline.search(train, SPACE, stop_when=search.until(score=1.0), **call)
    assert "running" not in repr(found)
    assert "unfinished" in set(found.to_frame()["state"])


def test_items_of_a_loop_do_not_mix_with_the_trials_of_a_search(
    pool: ParallelPool, tmp_path: Path
) -> None:
    found = pool.search(score, SPACE, mode="min", num_trials=4, seed=0, run_dir=tmp_path)
    with pytest.raises(JournalError, match="has a search, whose items are its trials"):
        pool.parfor(score, [found.best.config], run_dir=tmp_path)
    assert load_results(tmp_path).best("score", "min")["x"] == found.best.config["x"]


@pytest.mark.threads
def test_a_trial_with_a_seed_does_not_wait_in_a_worker(
    make_pool: Any, gate: Gate, marks: Marks, eventually: Callable[..., bool]
) -> None:
    """There, the wait for its turn would use up its time limit."""
    pool = make_pool(2)

    def train(config: dict[str, Any]) -> float:
        marks.add("begun")
        gate.wait()
        return float(config["x"])

    call = threading.Thread(target=pool.search, args=(train, SPACE), kwargs=SEEDED)
    call.start()
    assert eventually(lambda: marks.count("begun") == 1)
    assert "1 idle" in repr(pool)
    gate.open()
    call.join(300)


SEEDED: dict[str, Any] = {"num_trials": 3, "seed": 0, "mode": "max"}


@pytest.mark.parametrize("saves", [True, False])
def test_a_trial_that_pauses_without_a_checkpoint_causes_one_warning(
    pool: ParallelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, saves: bool
) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, accuracy=config["x"])
            if current_task().should_stop:
                if saves:
                    save_checkpoint(epoch + 1)
                return

    caplog.set_level("WARNING", "raypool")
    pool.search(train, SPACE, metric="accuracy", num_trials=9, stop=HALVING, run_dir=tmp_path)
    if saves:
        assert not caplog.messages
    else:
        (warning,) = caplog.messages
        assert (
            "paused after epoch 0 and now reports epoch 0: it trains these epochs again" in warning
        )
        assert "save_checkpoint" in warning


@pytest.mark.concurrent
def test_a_waiting_trial_continues_where_a_worker_would_be_idle(
    pool: ParallelPool, tmp_path: Path, make_gate: Callable[[], Gate]
) -> None:
    """One of three is to be trained to the end. The next best goes on beside it, without end here,
    and the search does not wait for it. What it reported counts, also in a later call.
    """
    gate = make_gate()

    def train(config: dict[str, Any]) -> dict[str, float]:
        if load_checkpoint() is None:
            report(epoch=0, accuracy=config["x"])
            save_checkpoint(1)
            return {"accuracy": config["x"]}
        if config["x"] == 0.9:
            gate.wait()
        report(epoch=2, accuracy=config["x"] + 0.05)
        while config["x"] == 0.5:
            pass
        return {"accuracy": config["x"] + 0.05}

    def follow(report: MetricsReport) -> None:
        if report.metrics["accuracy"] == 0.55:
            gate.open()

    study = optuna.create_study(direction="maximize")
    for x in (0.9, 0.5, 0.1):
        study.enqueue_trial({"x": x})

    def call() -> SearchResults:
        return pool.search(
            train,
            {"x": SPACE["x"]},
            metric="accuracy",
            num_trials=3,
            max_in_flight=2,
            study=study,
            stop=search.halving(max_epochs=3),
            run_dir=tmp_path,
            on_report=follow,
        )

    found = call()
    again = call()
    columns = ["trial", "state", "accuracy", "epochs", "x"]
    told, kept = (each.to_frame()[columns] for each in (found, again))
    assert kept.equals(told)
    assert again.summary == found.summary
    frame = found.to_frame().set_index("x")
    assert frame["state"].to_dict() == {0.9: "complete", 0.5: "pruned", 0.1: "pruned"}
    assert frame["accuracy"].to_dict() == {0.9: 0.9 + 0.05, 0.5: 0.55, 0.1: 0.1}
    assert frame["epochs"].to_dict() == {0.9: 3, 0.5: 3, 0.1: 1}


@pytest.mark.concurrent
def test_a_halving_that_has_ended_is_the_same_when_it_is_called_again(
    pool: ParallelPool, tmp_path: Path
) -> None:
    """A trial that is cancelled at the end may report more after Optuna was told of it."""

    def train(config: dict[str, Any]) -> dict[str, float]:
        accuracy = 0.0
        for epoch in range(load_checkpoint() or 0, 9):
            time.sleep(0.001)  # an epoch
            accuracy = config["x"] * (epoch + 1)
            report(epoch=epoch, accuracy=accuracy)
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break
        return {"accuracy": accuracy}

    def call(number: int) -> SearchResults:
        return pool.search(
            train,
            {"x": SPACE["x"]},
            metric="accuracy",
            num_trials=9,
            stop=HALVING,
            run_dir=tmp_path / str(number),
        )

    for number in range(3):
        found, again = call(number), call(number)
        assert again.best == found.best
        assert again.best.value == {"accuracy": again.best.score}
        columns = ["trial", "state", "accuracy", "epochs", "x"]
        kept = load_results(tmp_path / str(number)).to_frame()[columns]
        assert kept.equals(found.results.to_frame()[columns])
        assert kept.equals(again.results.to_frame()[columns])


def test_a_sampler_learns_from_trials_that_wait(pool: ParallelPool, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, accuracy=config["x"])
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break

    found = pool.search(
        train,
        SPACE,
        metric="accuracy",
        num_trials=30,
        sampler=optuna.samplers.TPESampler(seed=0),
        stop=HALVING,
        max_in_flight=1,
        run_dir=tmp_path,
    )
    assert sum(trial.params["x"] for trial in found.study.trials[-10:]) > 8
    assert all(trial.intermediate_values for trial in found.study.trials)


def test_a_function_that_ignores_should_stop_ends_at_its_next_report(
    pool: ParallelPool, marks: Marks, tmp_path: Path
) -> None:
    train = trainer(marks, is_careful=False)
    found = pool.search(
        train, SPACE, metric="accuracy", num_trials=9, seed=2, stop=HALVING, run_dir=tmp_path
    )
    assert set(found.to_frame()["epochs"]) == {1, 3, 9}
    begun = Counter(mark.split()[0] for mark in marks.all())
    assert sorted(Counter(begun.values())) == [2, 5, 11], (
        "it ends in the next epoch, which is repeated"
    )


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_population_beats_every_fixed_configuration(
    pool: ParallelPool, tmp_path: Path, scheme: str
) -> None:
    kept = pool.options(checkpoints=f"{scheme}{tmp_path}/kept")
    found = kept.search(gather, RATES, metric="total", mode="max", stop=POPULATION, seed=0)
    fixed = [sum(gain(10 ** (-i / 50), epoch) for epoch in range(40)) for i in range(51)]
    assert found.best.score > max(fixed)
    frame = found.to_frame().set_index("trial")
    told = states(found.study)
    assert told == {"COMPLETE": 8, "PRUNED": len(frame) - 8}
    assert set(frame.loc[frame["state"] == "complete", "epochs"]) == {40}
    children = frame[frame["parent"].notna()]
    assert len(children) == told["PRUNED"], "each of them took the place of another"
    metrics = found.results.metrics.set_index(["item", "epoch"])["total"]
    for trial, child in children.iterrows():
        first = metrics[trial].index[0]
        before = metrics[child["parent"], first - 1]
        assert metrics[trial, first] == pytest.approx(before + gain(child["rate"], first))
        changes = child["rate"] / frame.loc[child["parent"], "rate"]
        assert changes == pytest.approx(0.8) or changes == pytest.approx(1.2)
        assert abs(child["width"] - frame.loc[child["parent"], "width"]) <= 1
    assert set(frame["width"]) <= {1, 2, 3, 4}
    assert not [*tmp_path.rglob("*-kept*")]


def test_members_continue_while_a_checkpoint_is_copied(
    marks: Marks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., bool],
) -> None:
    copies: list[bool] = []

    def copied(*names: str) -> None:
        if not copies:  # of the best one; the second best continues
            copies.append(eventually(lambda: marks.count("begun") > 4))
        copy_checkpoint(*names)

    def train(config: dict[str, Any]) -> None:
        marks.add("begun")
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, total=config["x"] * (epoch + 1))
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break

    monkeypatch.setattr("raypool.search.run.copy_checkpoint", copied)
    study = optuna.create_study(direction="maximize")
    for x in (0.9, 0.5, 0.4, 0.1):
        study.enqueue_trial({"x": x})
    with parpool(1, profile="threads", quiet=True) as pool:
        pool.search(
            train,
            {"x": SPACE["x"]},
            metric="total",
            mode="max",
            stop=search.population(size=4, every=2, max_epochs=6),
            study=study,
            run_dir=tmp_path,
            max_in_flight=2,
        )
    assert copies == [True]


def test_a_population_is_repeatable_with_one_worker(pool: ParallelPool, tmp_path: Path) -> None:
    first, second = (
        pool.search(
            gather,
            RATES,
            metric="total",
            mode="max",
            stop=POPULATION,
            seed=1,
            max_in_flight=1,
            run_dir=tmp_path / name,
        ).to_frame()
        for name in "ab"
    )
    names = ["trial", "state", "total", "epochs", "parent", *RATES]
    assert first[names].equals(second[names])
    assert len(first) == 8 + 2 * 19, "a quarter of them is replaced at each pause"


def test_members_that_fail_leave_a_population(pool: ParallelPool, tmp_path: Path) -> None:
    def fragile(config: dict[str, Any]) -> dict[str, float]:
        if current_task().index in (3, 12):  # a first member, and one that took over
            raise LookupError("no luck")
        return gather(config)

    found = pool.search(
        fragile,
        RATES,
        metric="total",
        mode="max",
        stop=POPULATION,
        seed=1,
        run_dir=tmp_path,
        max_in_flight=1,
    )
    assert states(found.study)["FAIL"] == 2
    assert states(found.study)["COMPLETE"] == 6
    assert not {3, 12} & set(found.to_frame()["parent"].dropna())


def test_a_population_perturbs_as_the_user_says(pool: ParallelPool, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def perturb(config: dict[str, Any], random: Random) -> dict[str, Any]:
        given.append(dict(config))
        return {"rate": config["rate"] * random.choice([1e-9, 1e9]), "width": 2.4}

    stop = search.population(size=4, every=20, max_epochs=40, perturb=perturb)
    space = {**RATES, "every": 20}
    arguments: dict[str, Any] = {"metric": "total", "mode": "max", "seed": 0, "max_in_flight": 1}
    found = pool.search(gather, space, stop=stop, run_dir=tmp_path / "ends", **arguments)
    child = found.study.trials[4]
    assert child.params["rate"] in (0.01, 10)
    assert child.params["width"] == 2
    parent, replaced, _ = child.user_attrs["raypool_parent"]
    assert parent < replaced, "so that the parent had ended by then"
    assert states(found.study) == {"COMPLETE": 4, "PRUNED": 1}
    assert [config.keys() for config in given] == [{"rate", "width"}]
    for wrong, words in [
        ({"rate": 0.1}, "Return a dict with rate, width"),
        ({"rate": "a", "width": 2}, "rate='a', which is not in FloatDistribution"),
    ]:
        stop = stop._replace(perturb=lambda config, random: wrong)  # noqa: B023
        with pytest.raises(InvalidValueError, match=words):
            pool.search(gather, space, stop=stop, run_dir=tmp_path / words[:8], **arguments)


def test_a_population_needs_checkpoints(pool: ParallelPool, tmp_path: Path) -> None:
    def forgetful(config: dict[str, Any]) -> None:
        for epoch in range(40):
            report(epoch=epoch, total=config["rate"])
            if current_task().should_stop:
                break

    with pytest.raises(InvalidValueError, match=r"left no checkpoint after 2 epochs"):
        pool.search(forgetful, RATES, metric="total", mode="max", stop=POPULATION, run_dir=tmp_path)


def test_trials_of_lost_workers_continue_and_are_told_once(marks: Marks, tmp_path: Path) -> None:
    plan = FaultPlan(seed=3, p_loss=0.2)
    with sim_pool(3, plan) as pool:
        found = pool.options(retries=50).search(
            trainer(marks), SPACE, metric="accuracy", num_trials=9, stop=HALVING, run_dir=tmp_path
        )
    assert sum(states(found.study).values()) == 9
    assert states(found.study)["COMPLETE"] >= 1
    assert "lost" in set(found.results.attempts["status"])


def test_a_pool_that_breaks_ends_the_search(marks: Marks, tmp_path: Path) -> None:
    plan = FaultPlan(preempted_s=2.0)
    with sim_pool(2, plan) as pool, pytest.raises(PoolPreemptedError) as caught:
        pool.search(trainer(marks), SPACE, metric="accuracy", num_trials=99, run_dir=tmp_path)
    num_told = len(caught.value.results)  # type: ignore[attr-defined]
    with sim_pool(2) as pool:
        found = pool.search(
            trainer(marks), SPACE, metric="accuracy", num_trials=num_told + 1, run_dir=tmp_path
        )
    assert states(found.study) == {"COMPLETE": num_told + 1}


def test_a_later_call_continues_as_if_it_had_never_ended(
    pool: ParallelPool, marks: Marks, tmp_path: Path
) -> None:
    def call(num_trials: int, folder: str) -> SearchResults:
        return pool.search(
            trainer(marks),
            SPACE,
            metric="accuracy",
            seed=1,
            num_trials=num_trials,
            run_dir=tmp_path / folder,
        )

    whole = call(8, "whole")
    call(3, "parts")
    parts = call(8, "parts")
    assert [t.params for t in parts.study.trials[:3]] == [t.params for t in whole.study.trials[:3]]
    assert states(parts.study) == {"COMPLETE": 8}
    num_marks = len(marks.all())
    again = call(8, "parts")
    assert len(marks.all()) == num_marks, "nothing ran again"
    assert again.best == parts.best
    assert again.to_frame().equals(parts.to_frame())


def test_with_a_seed_one_worker_finds_the_same_trials(tmp_path: Path) -> None:
    def call(**options: Any) -> list[dict[str, Any]]:
        with parpool(1, profile="threads", quiet=True) as pool:
            found = pool.search(score, SPACE, mode="min", num_trials=25, seed=3, **options)
        return [trial.params for trial in found.study.trials]

    # TPE has begun to learn by then, and short trials do not run ahead of it
    assert call() == call() == call(max_in_flight=1)


@pytest.mark.parametrize(
    "stop", [lambda metrics: metrics["accuracy"] < 0.5, search.median(num_startup_trials=1)]
)
def test_hopeless_trials_stop(pool: ParallelPool, marks: Marks, tmp_path: Path, stop: Any) -> None:
    found = pool.search(
        trainer(marks), SPACE, metric="accuracy", num_trials=8, seed=0, stop=stop, run_dir=tmp_path
    )
    frame = found.to_frame().set_index("state")
    assert (frame.loc["complete", "epochs"] == 9).all()
    assert (frame.loc["pruned", "epochs"] < 9).all()
    assert states(found.study) == {
        "COMPLETE": 8 - len(frame.loc["pruned"]),
        "PRUNED": len(frame.loc["pruned"]),
    }


def test_a_hopeless_trial_that_fails_stops_in_its_next_attempt(pool: ParallelPool) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(9):
            report(epoch=epoch, accuracy=config["x"])
            if current_task().should_stop and current_task().attempt == 1:
                raise OSError("the disk is away")

    found = pool.options(retry_on=OSError, retries=1).search(
        train,
        SPACE,
        metric="accuracy",
        num_trials=8,
        seed=0,
        stop=lambda metrics: metrics["accuracy"] < 0.5,
    )
    num_reports = Counter(found.results.metrics["item"])
    seen = {(each.state, num_reports[each.trial]) for each in found.to_frame().itertuples()}
    assert seen == {("complete", 9), ("pruned", 1)}


@pytest.mark.concurrent
def test_a_hopeless_trial_that_does_not_stop_is_cancelled(pool: ParallelPool) -> None:
    def train(config: dict[str, Any]) -> None:
        report(epoch=3, accuracy=config["x"])
        while config["x"] < 0.5:
            pass

    found = pool.search(
        train,
        SPACE,
        metric="accuracy",
        num_trials=8,
        seed=0,
        stop=lambda metrics: metrics["accuracy"] < 0.5,
        cancel_grace_s=0.01,
    )
    frame = found.to_frame()
    assert set(frame["state"]) == {"complete", "pruned"}
    assert ((frame["x"] < 0.5) == (frame["state"] == "pruned")).all()
    assert (frame["accuracy"] == frame["x"]).all()
    assert (frame["epochs"] == 4).all()


def test_a_search_ends_early(pool: ParallelPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raypool")

    def climbing(config: dict[str, Any]) -> float:
        return float(min(current_task().index, 4))

    for until, fewest, why in [
        (search.until(score=2), 3, "score 2 is reached"),
        (search.until(patience=3), 8, "3 trials without a new best score"),
    ]:
        found = pool.search(climbing, SPACE, num_trials=40, stop_when=until, max_in_flight=1)
        assert len(found) == fewest
        assert states(found.study) == {"COMPLETE": fewest}
        assert f"ended early by stop_when: {why}" in repr(found)
        assert caplog.messages[-1] == f"climbing ends after {fewest} trials: {why}."
        found = pool.search(climbing, SPACE, num_trials=fewest, stop_when=until, max_in_flight=1)
        assert not found.ended_by, "all trials have run"
    over = search.until(seconds=1e-9)
    assert not pool.search(climbing, SPACE, num_trials=40, stop_when=over)


@pytest.mark.parametrize("stop", [None, HALVING])
def test_the_trial_that_reached_the_score_is_the_best(
    pool: ParallelPool, tmp_path: Path, stop: Any
) -> None:
    """It counts as soon as it is reported, whatever comes after it."""

    def train(config: dict[str, Any]) -> dict[str, float]:
        index, accuracy = current_task().index, 0.0
        for epoch in range(load_checkpoint() or 0, 9):
            accuracy = 0.99 if (index, epoch) == (8, 0) else 0.5 + index / 100
            report(epoch=epoch, accuracy=accuracy)
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return {"accuracy": accuracy if index < 8 else 0.1}
        return {"accuracy": accuracy}

    def call() -> SearchResults:
        return pool.search(
            train,
            SPACE,
            metric="accuracy",
            num_trials=30,
            stop=stop,
            stop_when=search.until(score=0.95),
            max_in_flight=1,
            run_dir=tmp_path,
        )

    for found in (call(), call()):
        assert len(found) == 9
        assert found.ended_by == "score 0.95 is reached"
        assert (found.best.number, found.best.score) == (8, 0.99)
        assert found.to_frame().set_index("trial").loc[8, "epochs"] <= 2
    assert load_results(tmp_path).to_frame()["trial"].iloc[8] == 8


def test_patience_counts_trials_and_not_their_parts(pool: ParallelPool, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            report(epoch=epoch, accuracy=1 - current_task().index / 100)
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return

    found = pool.search(
        train,
        SPACE,
        metric="accuracy",
        num_trials=30,
        stop=HALVING,
        stop_when=search.until(patience=9),
        max_in_flight=1,
        run_dir=tmp_path,
    )
    assert len(found) == 10


@pytest.mark.threads
@pytest.mark.quick
def test_a_stopped_trial_without_a_metric_ends_at_its_next_report(
    pool: ParallelPool, marks: Marks
) -> None:
    def train(config: dict[str, Any]) -> float:
        marks.add("begun")
        if current_task().index == 0:
            while marks.count("begun") < 2:
                pass
            return 1.0
        while not current_task().should_stop:
            pass
        report(step=1)
        marks.add("gone on")
        return 0.5

    over = search.until(score=1)
    pool.search(train, SPACE, num_trials=2, max_in_flight=2, stop_when=over)
    assert not marks.count("gone on")


@pytest.mark.concurrent
def test_running_trials_stop_when_a_search_ends_early(pool: ParallelPool, marks: Marks) -> None:
    # each worker may have the next trial already, and that of the first trial yet another
    most = 2 * pool.num_workers + 1

    def train(config: dict[str, Any]) -> float | None:
        marks.add("begun")
        if current_task().index == 0:
            while marks.count("begun") < 3:
                pass
            return 1.0
        while not current_task().should_stop and marks.count("begun") <= most:
            pass
        return None if current_task().index == 1 else 0.5  # asked before it has a score

    over = search.until(score=1)
    found = pool.search(train, SPACE, num_trials=40, max_in_flight=20, stop_when=over)
    assert marks.count("begun") <= most, "those in the queue do not start"
    assert states(found.study)["COMPLETE"] == 1
    assert states(found.study)["PRUNED"] == len(found) - 1 < 39
    assert found.best.score == 1
    values = [trial.value for trial in found.study.trials]
    assert (values[1], values[2]) == (None, 0.5)


@pytest.mark.concurrent
def test_a_free_worker_gets_the_next_trial_at_once(
    pool: ParallelPool, marks: Marks, make_gate: Callable[[], Gate]
) -> None:
    gate = make_gate()

    def train(config: dict[str, Any]) -> float:
        marks.add("begun")
        if marks.count("begun") == 9:
            gate.open()
        if current_task().index == 0:
            gate.wait()  # until all others went by
        return 1.0

    found = pool.search(train, SPACE, num_trials=9)
    assert states(found.study) == {"COMPLETE": 9}


@pytest.mark.threads
@pytest.mark.quick
@pytest.mark.parametrize("kind", ["part", "worker"])
def test_a_search_on_one_worker_of_three_has_one_trial_at_a_time(
    pool: ParallelPool, gate: Gate, kind: str
) -> None:
    study = optuna.create_study()
    running: list[int] = []

    def train(config: dict[str, Any]) -> None:
        report(loss=config["x"])
        gate.wait()

    def note(report: MetricsReport) -> None:
        running.append(states(study)["RUNNING"])
        gate.open()

    view = pool.partition(workers=[0])[0] if kind == "part" else pool.options(worker=0)
    # with a seed no short trial runs ahead
    view.search(train, SPACE, metric="loss", num_trials=3, seed=0, study=study, on_report=note)
    assert running == [1, 1, 1]


def test_failures_are_recorded_and_the_search_goes_on(pool: ParallelPool) -> None:
    def fragile(config: dict[str, Any]) -> float:
        if config["kind"] == "a":
            raise LookupError("no a")
        return config["x"]

    found = pool.search(fragile, SPACE, num_trials=10, seed=0)
    counts = states(found.study)
    assert set(counts) == {"COMPLETE", "FAIL"}
    assert sum(counts.values()) == 10
    assert set(found.to_frame().query("state == 'failed'")["error"]) == {"LookupError: no a"}
    with pytest.raises(LookupError) as caught:
        pool.search(fragile, SPACE, num_trials=10, seed=0, max_failures=0)
    assert "more than max_failures=0" in str(caught.value.__notes__)
    with pytest.raises(LookupError) as caught:
        pool.search(fragile, {**SPACE, "kind": "a"}, num_trials=3)
    assert "all 3 trials failed" in str(caught.value.__notes__)


def test_failures_of_earlier_calls_count(
    pool: ParallelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def call(fn: Any, folder: str, **options: Any) -> SearchResults:
        return pool.search(fn, SPACE, run_dir=tmp_path / folder, max_in_flight=1, **options)

    def fail(config: dict[str, Any]) -> float:
        report(epoch=0, accuracy=0.5)
        raise LookupError(f"no data for trial {current_task().index}")

    for _ in range(2):
        with pytest.raises(LookupError, match="trial 0") as caught:
            call(fail, "a", metric="accuracy", num_trials=2)
        assert "all 2 trials failed" in str(caught.value.__notes__)
    assert "do not run again. Pass a larger num_trials" in str(caught.value.__notes__)
    for num_failed in (2, 3):
        with pytest.raises(LookupError) as caught:
            call(fail, "b", metric="accuracy", num_trials=9, max_failures=1)
        assert f"{num_failed} trials failed, more than" in str(caught.value.__notes__)
    for _ in range(2):
        with pytest.raises(InvalidValueError, match="Trial 0 of dict neither reported"):
            call(dict, "c", metric="accuracy", num_trials=1)

    def fail(config: dict[str, Any]) -> float:  # type: ignore[no-redef]
        return {"accuracy": 1.0}

    call(fail, "a", metric="accuracy", num_trials=3)
    (warning,) = [each for each in caplog.messages if "are reused" in each]
    assert "Use another run_dir to compute them again." in warning


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses notes and other attributes."""

    code: int = 5


@pytest.mark.parametrize("max_failures", [None, 0])
def test_an_error_that_refuses_notes_is_raised(
    pool: ParallelPool, max_failures: int | None
) -> None:
    def fail(item: Any) -> float:
        raise Frozen

    with pytest.raises(Frozen):
        pool.search(fail, SPACE, num_trials=3, max_failures=max_failures, progress=True)
    with pytest.raises(Frozen):
        pool.parfor(score, [1], cost=fail)


def test_scores_that_are_none(pool: ParallelPool, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidValueError, match="Trial 0 of dict neither reported nor returned"):
        pool.search(dict, SPACE, metric="loss", num_trials=3)
    with pytest.raises(InvalidValueError, match="returned 'a', which is not a number"):
        pool.search(lambda config: "a", SPACE, num_trials=3)
    with pytest.raises(InvalidValueError, match="returned 'low' as 'loss', which is not a number"):
        pool.search(lambda config: {"loss": "low"}, SPACE, metric="loss", num_trials=3)

    with pytest.raises(InvalidValueError, match="None of the 2 trials has a finite score"):
        _ = pool.search(lambda config: math.nan, SPACE, num_trials=2).best

    def sometimes(config: dict[str, Any]) -> dict[str, float]:
        index = current_task().index
        return {} if index == 1 else {"loss": {2: math.nan, 4: 10**400}.get(index, config["x"])}

    found = pool.search(sometimes, SPACE, metric="loss", mode="min", num_trials=5, seed=0)
    assert states(found.study) == {"COMPLETE": 4, "FAIL": 1}
    assert found.study.trials[2].value == found.study.trials[4].value == math.inf
    assert "Trial 1 of sometimes neither reported nor returned 'loss'" in caplog.text
    assert "Trial 2 has the score nan, which counts as the worst." in caplog.text
    assert found.best.number in (0, 3)


def test_a_sampler_may_end_the_search(pool: ParallelPool) -> None:
    sampler = optuna.samplers.GridSampler({"x": [0.0, 0.5], "kind": ["a", "b"]}, seed=0)
    found = pool.search(score, SPACE, mode="min", num_trials=9, sampler=sampler)
    assert states(found.study) == {"COMPLETE": 4}  # and none twice while others run
    assert found.best.config["x"] == 0.5


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("kind", ["GridSampler", "BruteForceSampler"])
def test_an_exhausted_sampler_starts_no_trial_in_a_later_call(
    pool: ParallelPool, tmp_path: Path, kind: str
) -> None:
    given = [{"x": [0, 1, 2]}] if kind == "GridSampler" else []
    for _ in range(3):
        sampler = getattr(optuna.samplers, kind)(*given, seed=0)
        found = pool.search(
            lambda config: config["x"],
            {"x": search.choice(0, 1, 2)},
            num_trials=9,
            sampler=sampler,
            run_dir=tmp_path,
        )
        assert sorted(found.to_frame()["x"]) == [0, 1, 2]


def test_the_name_of_the_metric_says_what_is_good(pool: ParallelPool) -> None:
    found = pool.search(
        lambda config: {"val_loss": config["x"]}, SPACE, metric="val_loss", num_trials=5
    )
    assert (found.mode, found.best.score) == ("min", min(found.to_frame()["x"]))


def test_another_space_in_a_run_dir_is_named_as_it_is_written(
    pool: ParallelPool, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"mode": "min", "num_trials": 1, "run_dir": tmp_path}
    same = search.uniform(0, 1)
    pool.search(lambda config: 0, {"x": same, "y": same}, **arguments)
    for space, said in (
        (search.uniform(0, 1, step=1.0), "uniform(0.0, 1.0, step=1.0)"),
        (search.log_uniform(0.5, 1), "log_uniform(0.5, 1.0)"),
        (search.int_uniform(1, 9, log=True), "int_uniform(1, 9, log=True)"),
        (search.choice("a", 2), "choice('a', 2)"),
        (0.5, "0.5"),
    ):
        words = f"'x' was uniform(0.0, 1.0) there, and is {said} in this call."
        with pytest.raises(JournalError, match=re.escape(words)):
            pool.search(lambda config: 0, {"x": space, "y": same}, **arguments)


def test_a_study_of_the_users_goes_on(pool: ParallelPool) -> None:
    study = optuna.create_study(direction="minimize")
    study.enqueue_trial({"x": 0.5, "kind": "b"})
    found = pool.search(score, SPACE, num_trials=4, study=study)
    assert found.study is study
    assert found.best.score == 0
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 4
    with pytest.raises(InvalidValueError, match=r"mode='max', but the study .* mode='min'"):
        pool.search(score, SPACE, mode="max", num_trials=4, study=study)
    both = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InvalidValueError, match="needs a study with one direction, not 2"):
        pool.search(score, SPACE, num_trials=4, study=both)


def test_a_pruner_prunes_a_study_of_the_users(pool: ParallelPool) -> None:
    class Later(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.number >= 1

    def train(config: dict[str, Any]) -> None:
        for epoch in range(9):
            report(epoch=epoch, accuracy=config["x"])
            if current_task().should_stop:
                return

    own = optuna.pruners.NopPruner()
    study = optuna.create_study(direction="maximize", pruner=own)
    found = pool.search(train, SPACE, metric="accuracy", num_trials=4, study=study, stop=Later())
    assert states(found.study) == {"COMPLETE": 1, "PRUNED": 3}
    assert study.pruner is own


def test_a_trial_enqueued_in_a_folder_runs(pool: ParallelPool, tmp_path: Path) -> None:
    def call(num_trials: int) -> SearchResults:
        return pool.search(score, SPACE, num_trials=num_trials, run_dir=tmp_path)

    call(2).study.enqueue_trial({"x": 0.25, "kind": "a"})
    assert len(call(2)) == 2
    assert 0.25 in set(call(4).to_frame()["x"])
    assert states(call(4).study) == {"COMPLETE": 4}


def test_a_folder_that_was_moved_is_not_that_of_the_study(
    pool: ParallelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(direction="maximize")

    def call(folder: str) -> int:
        pool.search(score, SPACE, num_trials=2, study=study, run_dir=tmp_path / folder)
        return len(study.trials)

    call("a")
    caplog.clear()
    (tmp_path / "link").symlink_to("a")
    assert call("link") == 2
    assert not caplog.messages
    (tmp_path / "a").rename(tmp_path / "b")
    assert call("b") == 4
    assert "has the results of 2 trials, but study" in caplog.text


def test_a_study_of_the_users_has_other_trials_too(pool: ParallelPool, tmp_path: Path) -> None:
    study = optuna.create_study(direction="minimize")
    study.optimize(lambda trial: trial.suggest_float("other", 0, 1), 2)

    def call(num_trials: int) -> SearchResults:
        return pool.search(
            score, SPACE, mode="min", num_trials=num_trials, study=study, run_dir=tmp_path
        )

    call(2)
    found = call(3)
    assert found.to_frame()["trial"].sort_values().tolist() == [2, 3, 4]
    assert len(study.trials) == 5


@pytest.mark.arguments
def test_a_storage_that_is_locked(
    pool: ParallelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.db"
    impatient = {"connect_args": {"timeout": 0}}
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs=impatient)
    study = optuna.create_study(storage=storage, study_name="mine", direction="minimize")
    other = sqlite3.connect(file)
    warnings = []

    def unlock(record: logging.LogRecord) -> bool:
        warnings.append(record.getMessage())
        other.rollback()
        return True

    def train(config: dict[str, Any]) -> float:
        other.execute("BEGIN EXCLUSIVE")
        return score(config)

    def call(num_trials: int) -> SearchResults:
        return pool.search(
            train, SPACE, mode="min", num_trials=num_trials, study=study, run_dir=tmp_path / "run"
        )

    with monkeypatch.context() as patched:
        logger = logging.getLogger("raypool")
        patched.setattr(logger, "filters", [unlock])
        call(2)
        assert len(warnings) == 2
        assert "study 'mine' cannot be used (database is locked)" in warnings[0]
    assert states(study) == {"COMPLETE": 2}, "it has waited"
    with monkeypatch.context() as patched:
        patched.setattr("raypool.search.study.WAIT_S", 0)
        with pytest.raises(JournalError, match="same run_dir: no finished trial is lost") as caught:
            call(3)
    assert len(caught.value.results) == 3  # type: ignore[attr-defined]
    other.close()
    call(3)  # `train` would fail
    assert states(study) == {"COMPLETE": 3}


@pytest.mark.arguments
def test_a_folder_of_another_search(pool: ParallelPool, tmp_path: Path) -> None:
    space = {"x": search.uniform(0, 1), "epochs": 3}
    pool.search(score, space, num_trials=2, run_dir=tmp_path)
    with pytest.raises(JournalError, match=r"belongs to .*score; this call runs builtins\.len"):
        pool.search(len, space, num_trials=3, run_dir=tmp_path)
    for other, words in [
        ({**space, "epochs": 9}, "'epochs' was 3 there, and is 9 in this call"),
        ({**space, "x": search.uniform(0, 2)}, r"'x' was uniform.*1\.0\) there, and is .*2\.0\)"),
        ({"x": space["x"]}, "'epochs' was 3 there, and is missing"),
    ]:
        with pytest.raises(JournalError, match=words):
            pool.search(score, other, num_trials=3, run_dir=tmp_path)
    assert len(pool.search(score, space, num_trials=3, run_dir=tmp_path)) == 3


def test_another_metric_is_another_search(pool: ParallelPool, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        report(epoch=0, accuracy=0.9 + config["x"], f1=config["x"])

    def call(metric: str, study: optuna.Study | None, folder: str) -> SearchResults:
        return pool.search(
            train,
            SPACE,
            metric=metric,
            mode="max",
            num_trials=3,
            study=study,
            run_dir=tmp_path / folder,
        )

    for study, folder in [(None, "own"), (optuna.create_study(direction="maximize"), "mine")]:
        with pytest.raises(InvalidValueError, match="neither reported nor returned"):
            call("acuracy", study, folder)
        assert call("accuracy", study, folder).best.score > 0.9, "no trial had the wrong score"
        with pytest.raises(JournalError, match="it was 'accuracy' there, and is 'f1' in this call"):
            call("f1", study, folder)
        assert len(call("accuracy", study, folder)) == 3


def test_a_full_disk_and_a_torn_line_do_not_destroy_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, sync, num_full = tmp_path / "study.log", os.fsync, []

    def fail_at_times(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").resolve() == log.resolve():
            num_full.append(file)
            if len(num_full) % 5 == 0:
                os.truncate(log, log.stat().st_size - 20)  # the disk had no room for them
                raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    def call(num_trials: int) -> SearchResults:
        with parpool(profile="inline", quiet=True) as pool:
            return pool.search(score, SPACE, num_trials=num_trials, run_dir=tmp_path)

    with monkeypatch.context() as patched:
        patched.setattr("raypool.search.study.PAUSE_S", 0)
        patched.setattr(os, "fsync", fail_at_times)
        call(4)
    assert len(num_full) > 10
    for num_trials in (4, 5, 6):
        os.truncate(log, log.stat().st_size - 20)  # its process was killed
        assert states(call(num_trials).study) == {"COMPLETE": num_trials}
    log.write_text(log.read_text().replace("}", "", 1))
    with pytest.raises(JournalError, match=r"study\.log is damaged"):
        call(7)
    assert len(load_results(tmp_path)) == 6


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HALVING, None),
        (HALVING, search.median()),
        (HALVING, search.halving(min_epochs=2, max_epochs=9)),
        (search.population(size=4, every=2, max_epochs=9), None),
        (
            search.population(size=4, every=2, max_epochs=9),
            search.population(size=4, every=4, max_epochs=9),
        ),
    ],
)
@pytest.mark.parametrize("has_epochs", [True, False])
def test_waiting_trials_continue_under_another_rule(
    marks: Marks, tmp_path: Path, before: Any, after: Any, has_epochs: bool
) -> None:
    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            marks.add(f"{config['x']} {epoch}")
            if len(marks.all()) in (5, 11):
                raise KeyboardInterrupt
            words = {"epoch": epoch} if has_epochs else {}
            report(**words, accuracy=config["x"] + epoch / 100)
            if has_epochs or current_task().should_stop:
                save_checkpoint(epoch + 1)
            if current_task().should_stop:
                return

    def call(stop: Any) -> SearchResults:
        with parpool(profile="inline", quiet=True) as pool:
            return pool.search(
                train,
                SPACE,
                metric="accuracy",
                num_trials=None if isinstance(stop, search.Population) else 4,
                seed=0,
                stop=stop,
                run_dir=tmp_path,
            )

    with pytest.raises(KeyboardInterrupt):
        call(before)
    with pytest.raises(KeyboardInterrupt):
        call(after)
    frame = call(after).to_frame()
    complete = frame[frame["state"] == "complete"]
    assert set(complete["epochs"]) <= {9}
    assert len(complete) == 4 or isinstance(after, search.Halving)
    if isinstance(after, search.Halving):
        assert set(frame["epochs"]) <= set(after.levels)
    if not isinstance(after, search.Population):  # else some began with others' checkpoints
        for x, epochs in zip(frame["x"], frame["epochs"], strict=True):
            trained = {int(mark.split()[1]) for mark in marks.all() if mark.split()[0] == str(x)}
            assert trained == set(range(epochs))


@pytest.mark.parametrize("moment", ["unsaved", "saved", "saved by a slow clock", "unreported"])
def test_trials_that_were_interrupted_at_a_rung_continue_there(tmp_path: Path, moment: str) -> None:
    (tmp_path / "run").mkdir()
    # what a killed process leaves behind while it writes to the study
    (tmp_path / "run" / "study.log.lock").symlink_to(tmp_path)
    begun: dict[int, list[int]] = {}

    def interrupted(config: dict[str, Any]) -> None:
        checkpoint = load_checkpoint() or {"epochs": 0}
        begun.setdefault(current_task().index, []).append(checkpoint["epochs"])
        mark = tmp_path / f"{current_task().index}"
        for epoch in range(checkpoint["epochs"], 9):
            report(epoch=epoch, accuracy=config["x"] * (epoch + 1))
            is_last = epoch == 2 and not mark.exists()
            if not (is_last and moment == "unsaved"):
                save_checkpoint({"epochs": epoch + 1})
            if is_last:
                mark.touch()
                if moment == "saved by a slow clock":
                    for file in current_task().checkpoint_dir.iterdir():
                        os.utime(file, (0, 0))
                raise KeyboardInterrupt
            if current_task().should_stop:
                break

    for _ in range(9):
        try:
            with parpool(profile="inline", quiet=True) as pool:
                found = pool.search(
                    interrupted,
                    SPACE,
                    metric="accuracy",
                    num_trials=9,
                    seed=0,
                    stop=HALVING,
                    run_dir=tmp_path / "run",
                )
            break
        except KeyboardInterrupt:
            for file in (
                tmp_path.glob("run/items/*/metrics.jsonl") if moment == "unreported" else ()
            ):
                file.write_text(file.read_text().partition("\n")[0])  # those of its last second
    assert found.best.config["x"] == found.to_frame()["x"].max()
    assert found.best.score == 9 * found.best.config["x"]
    # the interrupted part is called again, except if it is sure to have saved
    first, second, *again, last = begun[found.best.number]
    assert (first, second, last) == (0, 1, 3)
    assert set(again) <= ({2} if moment == "unsaved" else {3})
    for _, reports in found.results.metrics.groupby("item"):
        assert reports["epoch"].is_monotonic_increasing, "those of earlier calls come first"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_epochs_are_counted_from_where_an_attempt_began(
    pool: ParallelPool, tmp_path: Path, is_preempted: bool
) -> None:
    """Of a function that reports none: those of a lost attempt do not count, nor those of one that
    a preemption has ended, which has the same number as the next.
    """
    driver = pool._engine.driver
    trained: dict[float, int] = {}
    failed = set()

    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 9):
            trained[config["x"]] = epoch + 1
            report(accuracy=config["x"] * (epoch + 1))
            if epoch == 5 and config["x"] not in failed:
                failed.add(config["x"])
                if not is_preempted:
                    raise OSError("the disk is away")
                place = driver.scheduler.workers.places[current_task().worker]
                driver.leave(WorkerLost(place.worker_id, LossReason.PREEMPTED))
                return  # to nobody
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return

    found = pool.options(retry_on=OSError, retries=1).search(
        train, SPACE, metric="accuracy", num_trials=9, seed=0, stop=HALVING, run_dir=tmp_path
    )
    assert failed
    frame = found.to_frame()
    assert frame["epochs"].tolist() == [trained[x] for x in frame["x"]]


def test_epochs_are_counted_from_where_a_call_began(marks: Marks, tmp_path: Path) -> None:
    """Of a function that reports none, and saves a checkpoint only where it pauses."""
    dies_after = iter([3, 4])
    left = [3]

    def train(config: dict[str, Any]) -> None:
        for epoch in range(load_checkpoint() or 0, 27):
            marks.add(f"{config['x']} {epoch}")
            report(accuracy=config["x"] + epoch / 100)
            if current_task().index == 1 and epoch >= 3:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                return

    def call() -> SearchResults:
        left[0] = next(dies_after, -1)
        with parpool(profile="inline", quiet=True) as pool:
            return pool.search(
                train,
                SPACE,
                metric="accuracy",
                num_trials=3,
                seed=0,
                stop=search.halving(min_epochs=3, max_epochs=27),
                run_dir=tmp_path,
            )

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call()
    frame = call().to_frame()
    for x, epochs in zip(frame["x"], frame["epochs"], strict=True):
        trained = {int(mark.split()[1]) for mark in marks.all() if mark.split()[0] == str(x)}
        assert trained == set(range(epochs))
    assert set(frame["epochs"]) == {3, 9}


def test_a_search_continues_with_fewer_rungs(
    pool: ParallelPool, marks: Marks, tmp_path: Path
) -> None:
    train = trainer(marks)
    pool.search(train, SPACE, metric="accuracy", num_trials=9, stop=HALVING, run_dir=tmp_path / "h")
    fewer = search.halving(max_epochs=3)
    found = pool.search(
        train, SPACE, metric="accuracy", num_trials=12, stop=fewer, run_dir=tmp_path / "h"
    )
    assert len(found) == 12

    def grow(stop: search.Population) -> SearchResults:
        return pool.search(
            gather, RATES, metric="total", mode="max", stop=stop, run_dir=tmp_path / "p", seed=0
        )

    grow(POPULATION)
    with pytest.raises(InvalidValueError, match="pauses at other epochs"):
        grow(search.population(size=8, every=20, max_epochs=40))


def test_another_sampler_continues_a_search(pool: ParallelPool, tmp_path: Path) -> None:
    pool.search(score, SPACE, num_trials=2, run_dir=tmp_path)
    grid = optuna.samplers.GridSampler({"x": [0.1, 0.2, 0.3], "kind": ["a"]}, seed=0)
    found = pool.search(score, SPACE, num_trials=4, run_dir=tmp_path, sampler=grid)
    assert states(found.study) == {"COMPLETE": 4}


def test_a_wrong_worker_leaves_no_folder_in_use(pool: ParallelPool, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="no worker 7"):
        pool.options(worker=7).search(score, SPACE, num_trials=2, run_dir=tmp_path)
    assert len(pool.search(score, SPACE, num_trials=2, run_dir=tmp_path)) == 2


@pytest.mark.parametrize("dies_at", ["x", "kind"])
def test_ctrl_c_in_a_trial_and_a_death_between_suggestions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    """The values are those of the seed, unless some of them had been drawn."""

    def interrupted(config: dict[str, Any]) -> float:
        if current_task().index == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return float(config["x"])

    def call() -> SearchResults:
        with parpool(profile="inline", quiet=True) as pool:
            return pool.search(interrupted, SPACE, num_trials=3, run_dir=tmp_path / "run", seed=0)

    with pytest.raises(KeyboardInterrupt):
        call()
    (tmp_path / "again").touch()
    suggest = optuna.trial.Trial._suggest

    def die(trial: Any, name: str, distribution: Any) -> Any:
        if trial.number == 2 and name == dies_at:
            raise SystemError("the process dies here")
        return suggest(trial, name, distribution)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.trial.Trial, "_suggest", die)
        with pytest.raises(SystemError):
            call()
    found = call()
    assert states(found.study) == {"COMPLETE": 3}
    with parpool(profile="inline", quiet=True) as pool:
        whole = pool.search(interrupted, SPACE, num_trials=3, seed=0)
    columns = ["trial", "x"] + ["kind"] * (dies_at == "x")
    assert found.to_frame()[columns].equals(whole.to_frame()[columns])
    assert found.to_frame()["kind"].notna().all()


@pytest.mark.arguments
@pytest.mark.filterwarnings("ignore:Choices for a categorical")  # Optuna's words for the same
def test_bad_arguments(pool: ParallelPool) -> None:
    for changes, kind, words in [
        ({"space": [1]}, InvalidTypeError, "must be a dict of names and ranges"),
        ({"space": {"x": 1}}, InvalidValueError, "nothing to search"),
        ({"space": {"x": [1, 2]}}, InvalidTypeError, r"search\.choice"),
        (
            {"space": {"x": optuna.distributions.CategoricalDistribution([len, max])}},
            InvalidValueError,
            "A choice cannot store <built-in function len>",
        ),
        (
            {"space": SPACE, "metric": "x", "mode": "max"},
            InvalidValueError,
            "both the metric and a name",
        ),
        ({"mode": "best"}, InvalidValueError, "must be 'max' or 'min'"),
        ({"metric": "fps"}, InvalidValueError, "does not say whether small or large"),
        ({"num_trials": 0}, InvalidValueError, "num_trials"),
        ({"stop": HALVING, "metric": "accuracy"}, InvalidValueError, r"halving\(\) needs run_dir"),
        (
            {"stop": POPULATION, "metric": "accuracy"},
            InvalidValueError,
            r"num_trials=1 does not fit",
        ),
        (
            {"stop": POPULATION, "metric": "accuracy", "num_trials": None},
            InvalidValueError,
            r"population\(\) needs run_dir",
        ),
        ({"stop": search.median()}, InvalidValueError, "stop= needs metric"),
        ({"cancel_grace_s": 0}, InvalidValueError, "cancel_grace_s=0 leaves no time"),
        ({"stop_when": 3}, InvalidTypeError, r"must be made by search\.until"),
        *(
            ({"stop": stop, "metric": "accuracy"}, InvalidTypeError, r"must be search\.median\(\)")
            for stop in (search.median, "median", search.until(score=1), optuna.pruners.NopPruner)
        ),
        (
            {"sampler": optuna.samplers.TPESampler},
            InvalidTypeError,
            "must be a sampler of Optuna's",
        ),
        ({"study": "mine"}, InvalidTypeError, "must be a study of Optuna's"),
    ]:
        with pytest.raises(kind, match=words):
            pool.search(score, **{"space": SPACE, "num_trials": 1, **changes})  # type: ignore[arg-type]
    for wrong, words in [
        (lambda: search.uniform(1, 1), "range from 1 to 1 is empty"),
        (lambda: search.log_uniform(0, 1), "must begin above 0"),
        (lambda: search.uniform(0, math.inf), "is not finite"),
        (lambda: search.choice([1, 2]), r"Use choice\(\*values\)"),
        (lambda: search.choice((1, 2), (3, 4)), "cannot store"),
        (lambda: search.choice(), "no values"),
        (lambda: search.until(), r"until\(\) needs seconds="),
        (lambda: search.until(seconds=0), "must be more than 0"),
        (lambda: search.until(score=math.inf), "is not finite"),
        (lambda: search.halving(max_epochs=1), "must be more than min_epochs=1"),
        (lambda: search.population(size=3, every=1, max_epochs=9), "size must be at least 4"),
        (lambda: search.population(size=4, every=9, max_epochs=9), "must be more than every=9"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            wrong()
    with pytest.raises(InvalidTypeError, match="must begin and end at integers"):
        search.int_uniform(0.5, 3.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="must have numbers at both ends"):
        search.uniform("0", "1")  # type: ignore[arg-type]
