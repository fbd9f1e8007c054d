"""`pool.search(workers_per_trial=2)`: trials that are trainings, on every kind of pool.

On Ray a trial has two ranks; elsewhere it has one, as `pool.train` has.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from click.testing import CliRunner

from raypool import (
    InvalidValueError,
    ParallelPool,
    PoolPreemptedError,
    ResourceError,
    current_task,
    load_results,
    parpool,
    search,
)
from raypool.cli.main import main
from raypool.testing import sim_pool
from raypool.testing.simulation import FaultPlan
from tests.conftest import Gate, Marks

pytest.importorskip("torch")

pytestmark = pytest.mark.semantics

SPACE = {"x": search.uniform(0.0, 1.0), "kind": search.choice("a", "b")}
HALVING = search.halving(max_epochs=4, factor=2)
GANG: dict[str, Any] = {"metric": "accuracy", "workers_per_trial": 2, "seed": 2}


def loop_of(
    marks: Marks, *, is_careful: bool = True, at_epoch: Callable[[Any, int], Any] | None = None
) -> Callable[[dict[str, Any]], Any]:
    """Return a loop of 9 epochs for Ray Train; each rank notes each, and the first saves it."""

    def loop(config: dict[str, Any]) -> dict[str, float]:
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        last = ray.train.get_checkpoint()
        first = 0 if last is None else json.loads(Path(last.path, "epoch").read_text()) + 1
        epoch = first - 1  # a lost rank may have come to the end
        for epoch in range(first, 9):
            marks.add(f"{config['x']} {rank} {epoch}")
            if at_epoch is not None:
                at_epoch(config, epoch)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "epoch").write_text(json.dumps(epoch))
                ray.train.report(
                    {"epoch": epoch, "accuracy": config["x"] * (epoch + 1)},
                    checkpoint=None if rank else ray.train.Checkpoint.from_directory(folder),
                )
            if is_careful and current_task().should_stop:
                break
        return {"accuracy": config["x"] * (epoch + 1)}

    return loop


@pytest.mark.everywhere
def test_halving_continues_trainings_from_their_checkpoints(
    pool: ParallelPool, make_pool: Any, marks: Marks, tmp_path: Path
) -> None:
    found = pool.search(
        loop_of(marks), SPACE, num_trials=6, stop=HALVING, run_dir=tmp_path / "run", **GANG
    )
    frame = found.to_frame()
    assert set(frame["epochs"]) == {1, 2, 4}
    assert set(frame["state"]) == {"complete", "pruned"}
    best = found.best
    assert best.value == {"accuracy": best.score} == {"accuracy": 4 * best.config["x"]}
    assert best.number == frame.sort_values("x")["trial"].iloc[-1]
    num_ranks = 2 if make_pool.is_in_processes else 1
    assert set(Counter(marks.all()).values()) == {1}, "each epoch once"
    assert len(marks.all()) == num_ranks * frame["epochs"].sum(), "all ranks hear of the end"
    # the rows are those of plain trials
    plain = pool.search(lambda config: {"accuracy": 1.0}, SPACE, metric="accuracy", num_trials=2)
    assert {*plain.to_frame().columns} == {*frame.columns}
    assert frame["worker"].isin(range(3)).all()
    assert found.results.metrics["item"].value_counts().to_dict() == dict(
        zip(frame["trial"], frame["epochs"], strict=True)
    )
    assert len(load_results(tmp_path / "run")) == 6


def test_reports_may_have_arrays_and_no_score(pool: ParallelPool, tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> None:
        import ray.train

        for epoch in range(4):
            score = None if epoch == 1 else config["x"]
            ray.train.report({"epoch": epoch, "accuracy": score, "confusion": np.eye(2)})

    found = pool.search(loop, SPACE, num_trials=2, run_dir=tmp_path / "run", **GANG)
    assert found.to_frame()["state"].tolist() == ["complete"] * 2
    kept = load_results(tmp_path / "run").metrics
    assert kept["confusion"].tolist() == [[[1.0, 0.0], [0.0, 1.0]]] * 8


@pytest.mark.semantics
@pytest.mark.concurrent
@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_that_ignores_should_stop_ends_after_its_next_report(
    pool: ParallelPool, marks: Marks, tmp_path: Path, is_async: bool
) -> None:
    loop = loop_of(marks, is_careful=False)

    async def waiting(config: dict[str, Any]) -> Any:
        return loop(config)

    found = pool.search(
        waiting if is_async else loop,
        SPACE,
        num_trials=4,
        stop=HALVING,
        run_dir=tmp_path / "run",
        **GANG,
    )
    # that report has a checkpoint, so that a promoted trial repeats nothing
    assert set(found.to_frame()["epochs"]) == {2, 4}
    assert set(Counter(marks.all()).values()) == {1}
    assert found.to_frame()["error"].isna().all()


def test_a_training_takes_over_the_checkpoint_of_another(
    pool: ParallelPool, marks: Marks, tmp_path: Path
) -> None:
    stop = search.population(size=4, every=3, max_epochs=9)
    found = pool.search(loop_of(marks), SPACE, stop=stop, run_dir=tmp_path / "run", **GANG)
    frame = found.to_frame()
    taken = frame.dropna(subset="parent")
    assert set(frame["state"]) == {"complete", "pruned"}
    for x in taken["x"]:
        epochs = [int(mark.split()[-1]) for mark in marks.all() if mark.startswith(f"{x} ")]
        assert min(epochs) >= 3
    assert len(taken) >= 1


@pytest.mark.concurrent
def test_trials_run_at_once_on_workers_of_their_own(make_pool: Any, gate: Gate) -> None:
    def loop(config: dict[str, Any]) -> float:
        import ray.train

        if config["x"] == 0:
            gate.wait()
        else:
            gate.open()
        return float(ray.train.get_context().get_world_size())

    study = optuna.create_study(direction="maximize")
    for x in (0, 1):
        study.enqueue_trial({"x": x, "kind": "a"})
    with make_pool(4) as pool:
        found = pool.search(loop, SPACE, num_trials=2, study=study, workers_per_trial=2)
    assert found.best.score == (2 if make_pool.is_in_processes else 1)


@pytest.mark.processes
def test_each_rank_has_random_numbers_of_its_own(pool: ParallelPool) -> None:
    def loop(config: dict[str, Any]) -> tuple[float, ...]:
        import random

        import ray.train
        import torch

        numbers = [0.0, 0.0]
        torch.distributed.all_gather_object(numbers, random.random())
        ray.train.report({"accuracy": numbers[0]})
        return tuple(numbers)

    def call() -> list[Any]:
        return list(pool.search(loop, SPACE, num_trials=2, max_in_flight=1, **GANG).results)

    numbers = call()
    assert len({*numbers[0], *numbers[1]}) == 4
    assert call() == numbers


@pytest.mark.semantics
@pytest.mark.concurrent
def test_hopeless_trainings_stop(pool: ParallelPool, marks: Marks) -> None:
    def wait(config: dict[str, Any], epoch: int) -> None:
        note = current_task()._note
        while epoch == 8 and config["x"] < 0 and note and not note.should_stop:
            pass  # its report travels to the driver, and the answer back

    def stop(metrics: dict[str, Any]) -> bool:
        return metrics["accuracy"] < 0

    space = {**SPACE, "x": search.uniform(-1.0, 1.0)}
    loop = loop_of(marks, at_epoch=wait)
    found = pool.search(loop, space, num_trials=4, stop=stop, **GANG)
    frame = found.to_frame()
    assert set(frame["state"]) == {"complete", "pruned"}
    assert ((frame["x"] < 0) == (frame["state"] == "pruned")).all()


@pytest.mark.concurrent
def test_a_hopeless_training_that_does_not_stop_is_cancelled(
    pool: ParallelPool, marks: Marks
) -> None:
    def hang(config: dict[str, Any], epoch: int) -> None:
        while epoch == 1 and config["x"] < 0.5:
            pass

    found = pool.search(
        loop_of(marks, at_epoch=hang),
        SPACE,
        num_trials=4,
        stop=lambda metrics: metrics["accuracy"] < 0.5 and metrics["epoch"] == 0,
        cancel_grace_s=0.01,
        **GANG,
    )
    frame = found.to_frame().set_index("state")
    assert set(frame.index) == {"complete", "pruned"}
    assert (frame.loc["pruned", "accuracy"] == frame.loc["pruned", "x"]).all()
    assert (frame.loc["complete", "x"] >= 0.5).all()


def test_failures_are_those_of_the_loop(pool: ParallelPool, marks: Marks) -> None:
    def fail(config: dict[str, Any], epoch: int) -> None:
        if config["kind"] == "a" and epoch == 1:
            raise LookupError("no a")

    loop = loop_of(marks, at_epoch=fail)
    found = pool.search(loop, SPACE, num_trials=6, **GANG)
    frame = found.to_frame()
    assert frame.groupby("state")["kind"].unique().to_dict() == {"complete": ["b"], "failed": ["a"]}
    assert set(frame["error"].dropna()) == {"LookupError: no a"}
    with pytest.raises(LookupError) as caught:
        pool.search(loop, {**SPACE, "kind": "a"}, num_trials=2, **GANG)
    assert any("rank 0 of trial 0 of loop" in note for note in caught.value.__notes__)


def test_trainings_survive_lost_workers_and_a_pool_that_breaks(
    marks: Marks, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"run_dir": tmp_path / "run", **GANG}
    plan = FaultPlan(preempted_s=2.0, item_s=60.0)  # in the middle of a training
    with sim_pool(4, plan) as pool, pytest.raises(PoolPreemptedError):
        pool.search(loop_of(marks), SPACE, num_trials=99, **arguments)
    num_told = len(load_results(tmp_path / "run"))
    study = optuna.create_study(direction="maximize")
    with sim_pool(4, plan) as pool, pytest.raises(PoolPreemptedError):
        pool.search(lambda config: 0.0, SPACE, num_trials=99, study=study, **GANG)
    assert {trial.state.name for trial in study.trials} == {"RUNNING"}, "it has not failed"
    with sim_pool(4, FaultPlan(seed=3, p_loss=0.3)) as pool:
        found = pool.options(retries=50).search(
            loop_of(marks), SPACE, num_trials=num_told + 3, **arguments
        )
    frame = found.to_frame()
    assert set(frame["state"]) == {"complete"}
    assert frame["attempts"].max() > 1
    assert set(Counter(marks.all()).values()) == {1}, "nothing is repeated"


def test_an_interrupted_training_goes_on(marks: Marks, tmp_path: Path) -> None:
    def interrupt(config: dict[str, Any], epoch: int) -> None:
        if epoch == 4 and not (tmp_path / "again").exists():
            (tmp_path / "again").touch()
            raise KeyboardInterrupt

    def call() -> Any:
        loop = loop_of(marks, at_epoch=interrupt)
        with parpool(2, profile="inline", quiet=True) as pool:
            return pool.search(loop, SPACE, num_trials=2, run_dir=tmp_path / "run", **GANG)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert set(call().to_frame()["state"]) == {"complete"}
    assert len(marks.all()) == 2 * 9 + 1, "only the interrupted epoch is repeated"


@pytest.mark.arguments
def test_bad_arguments(pool: ParallelPool) -> None:
    for view, size, kind, words in [
        (pool, 0, InvalidValueError, "workers_per_trial"),
        (pool, 4, ResourceError, "workers_per_trial=4: requested 4 workers, available 3"),
        (pool.options(checkpoints="gs://b"), 2, InvalidValueError, "not checkpoints='gs://b'"),
    ]:
        with pytest.raises(kind, match=words):
            view.search(lambda config: 0.0, SPACE, num_trials=1, workers_per_trial=size)

    def loop(config: dict[str, Any]) -> None:
        import ray.train

        ray.train.get_dataset_shard("train")

    with pytest.raises(
        InvalidValueError, match=r"The loop loop uses ray\.train\.get_dataset_shard"
    ):
        pool.search(loop, SPACE, num_trials=1, workers_per_trial=1)


LOOP = """
import json
import tempfile
from pathlib import Path

import ray.train

def loop(config):
    last = ray.train.get_checkpoint()
    num_runs = 1 if last is None else json.loads(Path(last.path, "runs").read_text()) + 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "runs").write_text(json.dumps(num_runs))
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"accuracy": config["x"]}, checkpoint=checkpoint)
    if config["kind"] == "b":
        raise LookupError("no b")
    return num_runs
"""


@pytest.mark.arguments
def test_a_trial_is_replayed_from_a_copy_of_its_checkpoint(
    pool: ParallelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gang_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    loop = importlib.import_module("gang_loop").loop
    found = pool.search(loop, SPACE, num_trials=4, run_dir=tmp_path / "run", **GANG)
    monkeypatch.delitem(sys.modules, "gang_loop")
    assert set(found.to_frame()["kind"]) == {"a", "b"}
    for trial, kind in found.to_frame().set_index("trial")["kind"].items():
        for _ in range(2):
            done = CliRunner().invoke(main, ["replay", str(tmp_path / "run"), str(trial)])
            assert done.exit_code == (kind == "b"), done.output
            assert (done.stdout == "2\n") if kind == "a" else ("LookupError: no b" in done.stderr)
