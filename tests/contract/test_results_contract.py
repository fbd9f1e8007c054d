"""What `parfor` returns: a sequence and a table, on every kind of pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from raypool import InvalidValueError, ParallelPool, Results

pytestmark = pytest.mark.semantics

RUN = ["status", "duration_s", "started_at", "worker", "gpu", "attempts", "peak_memory_bytes", "reason", "error"]


@dataclasses.dataclass
class Config:
    """A configuration of a user's."""

    lr: float
    depth: int


def score(config: dict[str, Any]) -> dict[str, Any]:
    if config["depth"] == 3:
        raise ArithmeticError("the loss is not finite")
    return {"accuracy": 1 - config["lr"] / config["depth"], "depth": -config["depth"]}


@pytest.fixture
def sweep(pool: ParallelPool) -> Results:
    configs = [{"lr": lr, "depth": depth} for lr in (0.1, 0.4) for depth in (1, 2, 3)]
    return pool.parfor(score, configs, on_error="collect")


@pytest.mark.everywhere
def test_the_table_has_a_row_for_each_item(sweep: Results) -> None:
    frame = sweep.to_frame()

    assert list(frame.columns) == ["lr", "depth", "accuracy", "result_depth", *RUN]
    assert list(frame.index) == list(range(6))
    assert list(frame["lr"]) == [0.1] * 3 + [0.4] * 3
    assert list(frame["depth"]) == [1, 2, 3] * 2
    assert list(frame["status"]) == ["finished", "finished", "failed"] * 2
    assert frame["accuracy"].isna().tolist() == [False, False, True] * 2
    assert frame["result_depth"].dropna().tolist() == [-1, -2, -1, -2]
    assert frame["error"].dropna().tolist() == ["ArithmeticError: the loss is not finite"] * 2
    assert list(frame["attempts"]) == [1] * 6
    assert (frame["duration_s"] >= 0).all()
    assert frame["started_at"].is_monotonic_increasing or frame["worker"].nunique() > 1


@pytest.mark.concurrent
def test_the_timeline_is_plausible(pool: ParallelPool) -> None:
    import time

    before = time.time()
    frame = pool.parfor(abs, range(300)).to_frame()
    after = time.time()

    assert frame["started_at"].between(before - 1, after + 1).all()
    assert (frame["started_at"] + frame["duration_s"]).max() <= after + 1
    assert set(frame["worker"]) <= {worker.index for worker in pool.workers}
    for _, items in frame.sort_values("started_at").groupby("worker"):
        ends = (items["started_at"] + items["duration_s"]).to_numpy()[:-1]
        assert (items["started_at"].to_numpy()[1:] >= ends - 1e-3).all(), "two items ran at once on one worker"


def test_the_best(sweep: Results) -> None:
    best, worst = sweep.best("accuracy"), sweep.best("accuracy", mode="min")

    assert (best.name, best["lr"], best["depth"]) == (1, 0.1, 2)
    assert (worst.name, worst["lr"], worst["depth"]) == (3, 0.4, 1)
    with pytest.raises(InvalidValueError, match=r"speed.*accuracy"):
        sweep.best("speed")
    with pytest.raises(InvalidValueError, match="largest"):
        sweep.best("accuracy", mode="largest")  # type: ignore[arg-type]


def test_there_is_no_best_of_nothing(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match="accuracy"):
        pool.parfor(score, [{"lr": 1, "depth": 3}], on_error="collect").best("accuracy")
    with pytest.raises(InvalidValueError):
        pool.parfor(score, []).best("accuracy")


@pytest.mark.semantics
@pytest.mark.processes
def test_errors_stand_by_item(sweep: Results) -> None:
    assert list(sweep.errors) == [2, 5]
    assert {type(error) for error in sweep.errors.values()} == {ArithmeticError}
    sweep.errors.clear()
    assert list(sweep.errors) == [2, 5]
    assert "4 finished, 2 failed" in repr(sweep)


def test_results_are_a_sequence(pool: ParallelPool) -> None:
    results = pool.parfor(lambda x: x * x, range(6))

    assert results[2] == 4
    assert results[-1] == 25
    assert list(results[1:4]) == [1, 4, 9]
    assert results[::-2] == [25, 9, 1]
    assert 16 in results
    assert results.index(9) == 3
    assert results.count(4) == 1
    assert list(reversed(results)) == [25, 16, 9, 4, 1, 0]
    with pytest.raises(IndexError):
        results[6]
    assert results == [0, 1, 4, 9, 16, 25]
    assert results == (0, 1, 4, 9, 16, 25)
    assert results != [0, 1]
    assert results == pool.parfor(lambda x: x**2, range(6))
    assert results != pool.parfor(lambda x: x**3, range(6))


def test_configurations_and_values_of_other_kinds(pool: ParallelPool) -> None:
    plain = pool.parfor(lambda x: -x, [3, 4]).to_frame()
    assert list(plain.columns) == ["item", "value", *RUN]
    assert (list(plain["item"]), list(plain["value"])) == ([3, 4], [-3, -4])

    classes = pool.parfor(lambda config: Config(config.lr * 2, 0), [Config(0.5, 1), Config(1.5, 2)]).to_frame()
    assert list(classes.columns) == ["lr", "depth", "result_lr", "result_depth", *RUN]
    assert list(classes["result_lr"]) == [1.0, 3.0]

    mixed = pool.parfor(lambda x: {"a": x} if x else None, [0, 1]).to_frame()
    assert list(mixed["value"]) == [None, {"a": 1}]

    uneven = pool.parfor(lambda x: {"a": 1} if x else {"b": 2}, [0, 1]).to_frame()
    assert list(uneven.columns) == ["item", "b", "a", *RUN]
    assert uneven["a"].isna().tolist() == [True, False]


def test_names_that_raypool_uses_itself_are_not_lost(pool: ParallelPool) -> None:
    frame = pool.parfor(lambda _: {"error": 0.25, "item": 1}, [{"worker": "mine", "status": "new"}]).to_frame()

    assert frame["item_worker"][0] == "mine"
    assert frame["item_status"][0] == "new"
    assert frame["result_error"][0] == 0.25
    assert frame["status"][0] == "finished"
    assert frame.columns.is_unique


@pytest.mark.semantics
@pytest.mark.processes
def test_results_can_be_saved(sweep: Results) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(sweep))

    assert again == sweep
    pd.testing.assert_frame_equal(again.to_frame(), sweep.to_frame())
    assert [str(error) for error in again.errors.values()] == ["the loss is not finite"] * 2


def test_an_empty_table(pool: ParallelPool) -> None:
    frame = pool.parfor(abs, []).to_frame()

    assert len(frame) == 0
    assert set(RUN) <= set(frame.columns)
    assert isinstance(frame, pd.DataFrame)


@pytest.mark.everywhere
def test_large_values_are_all_there(pool: ParallelPool) -> None:
    import numpy as np

    results = pool.parfor(lambda x: np.full(200_000, x), range(4))

    assert [int(value[-1]) for value in results] == [0, 1, 2, 3]
    assert all(value.shape == (200_000,) for value in results)
