"""What `parfor` returns: a sequence and a table, on every kind of pool."""

from __future__ import annotations

import argparse
import dataclasses
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, NamedTuple

import attr
import numpy as np
import pandas as pd
import pydantic
import pytest
import torch

from raypool import InvalidValueError, ParallelPool, Results, report

pytestmark = pytest.mark.semantics

RUN = [
    "status",
    "duration_s",
    "started_at",
    "worker",
    "gpu",
    "attempts",
    "peak_memory_bytes",
    "reason",
    "error",
]


@dataclasses.dataclass
class Config:
    """A configuration of a user's."""

    lr: float
    depth: int


class Point(NamedTuple):
    """A configuration as a named tuple."""

    lr: float
    depth: int


class Model(pydantic.BaseModel):
    """A configuration as a pydantic model."""

    lr: float
    depth: int


@attr.define
class Attrs:
    """A configuration as an attrs class."""

    lr: float
    depth: int


class PolarsFrame:
    """What a polars frame has of pandas' frame, and what it has instead."""

    columns = ("lr", "depth")

    def to_dict(self, *, as_series: bool = True) -> dict[str, list[float]]:
        """Return its columns."""
        return {"lr": [0.1, 0.2], "depth": [1, 2]}

    def to_dicts(self) -> list[dict[str, float]]:
        """Return its rows."""
        return [{"lr": 0.1, "depth": 1}, {"lr": 0.2, "depth": 2}]


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
    before = datetime.now(UTC)
    frame = pool.parfor(abs, range(300)).to_frame()
    after = datetime.now(UTC)

    second = timedelta(seconds=1)
    assert frame["started_at"].between(before - second, after + second).all()
    ends = frame["started_at"] + pd.to_timedelta(frame["duration_s"], unit="s")
    assert ends.max() <= after + second
    assert set(frame["worker"]) <= {worker.index for worker in pool.workers}
    for _, items in frame.sort_values("started_at").groupby("worker"):
        gaps = items["started_at"] - ends[items.index].shift()
        assert (gaps.dropna() >= timedelta(milliseconds=-1)).all(), "two ran at once on one worker"


def test_the_best(sweep: Results) -> None:
    best, worst = sweep.best("accuracy"), sweep.best("accuracy", mode="min")

    assert (best.name, best["lr"], best["depth"]) == (1, 0.1, 2)
    assert (worst.name, worst["lr"], worst["depth"]) == (3, 0.4, 1)
    with pytest.raises(InvalidValueError, match=r"speed.*accuracy"):
        sweep.best("speed")
    with pytest.raises(InvalidValueError, match="largest"):
        sweep.best("accuracy", mode="largest")  # type: ignore[arg-type]


def test_the_best_is_a_finite_number(pool: ParallelPool) -> None:
    """NaN, infinities and missing values never win, in whatever type a metric comes."""
    losses = [
        math.nan,
        -math.inf,
        0.5,
        np.float32(0.25),
        None,
        "diverged",
        torch.tensor(math.inf),
        Decimal("NaN"),
        Decimal("0.125"),
        10**400,
    ]
    results = pool.parfor(lambda loss: {"loss": loss}, losses)

    assert results.best("loss").name == 8
    assert results.best("loss", mode="max").name == 9
    assert results._repr_html_().index("0.125") < results._repr_html_().index("0.25")


def test_the_best_by_a_nested_metric(pool: ParallelPool) -> None:
    """It is called as in the report, and what holds it may be a dict or an object with fields."""
    results = pool.parfor(
        lambda x: {"acc": {"val": x % 3, "last": SimpleNamespace(score=-x)}}, range(4)
    )

    assert results.best("acc.val").name == 2
    assert results.best("acc.last.score").name == 0
    with pytest.raises(InvalidValueError, match=r"no column 'acc'. Did you mean acc\.val"):
        results.best("acc", mode="max")


@pytest.mark.parametrize(
    ("metric", "best"), [("val_loss", 0), ("test error", 0), ("valAccuracy", 1), ("z2-score", 1)]
)
def test_the_name_of_a_metric_says_what_is_best(pool: ParallelPool, metric: str, best: int) -> None:
    assert pool.parfor(lambda x: {metric: x}, [1, 2]).best(metric).name == best


@pytest.mark.parametrize("metric", ["quality", "neg_log_loss", "error_score", "glossary"])
def test_other_names_do_not(pool: ParallelPool, metric: str) -> None:
    with pytest.raises(InvalidValueError, match=f"'{metric}' does not say.*mode='min'.*mode='max'"):
        pool.parfor(lambda x: {metric: x}, [1, 2]).best(metric)


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

    classes = pool.parfor(
        lambda config: Config(config.lr * 2, 0), [Config(0.5, 1), Config(1.5, 2)]
    ).to_frame()
    assert list(classes.columns) == ["lr", "depth", "result_lr", "result_depth", *RUN]
    assert list(classes["result_lr"]) == [1.0, 3.0]

    for kind in (argparse.Namespace, SimpleNamespace, Point, Model, Attrs):
        frame = pool.parfor(
            lambda config: type(config)(lr=config.lr * 2, depth=0), [kind(lr=0.5, depth=1)]
        ).to_frame()
        assert list(frame.columns) == ["lr", "depth", "result_lr", "result_depth", *RUN], kind
        assert list(frame["result_lr"]) == [1.0], kind

    skipped = pool.parfor(lambda x: {"a": x} if x else None, [0, 1, 2]).to_frame()
    assert list(skipped.columns) == ["item", "a", *RUN]
    assert skipped["a"].fillna(0).tolist() == [0, 1, 2]

    mixed = pool.parfor(lambda x: {"a": x} if x else "none", [0, 1]).to_frame()
    assert list(mixed.columns) == ["item", "a", "value", *RUN]
    assert mixed["value"].fillna("").tolist() == ["none", ""]

    uneven = pool.parfor(lambda x: {"a": 1} if x else {"b": 2}, [0, 1]).to_frame()
    assert list(uneven.columns) == ["item", "b", "a", *RUN]
    assert uneven["a"].isna().tolist() == [True, False]


def test_the_rows_of_a_polars_frame_are_items(pool: ParallelPool) -> None:
    frame = pool.parfor(lambda config: config["lr"] / config["depth"], PolarsFrame()).to_frame()

    assert frame[["lr", "depth", "value"]].values.tolist() == [[0.1, 1, 0.1], [0.2, 2, 0.1]]


def test_a_metric_that_is_none_is_a_missing_value(pool: ParallelPool) -> None:
    def train(_: int) -> None:
        report(loss=1.0, val_loss=0.5)
        report(loss=0.5, val_loss=None)
        report(never=None)

    results = pool.parfor(train, [0])

    assert results.errors == {}
    assert results.metrics["val_loss"].isna().tolist() == [False, True, True]
    assert results.metrics["never"].isna().all()


def test_names_that_raypool_uses_itself_are_not_lost(pool: ParallelPool) -> None:
    frame = pool.parfor(
        lambda _: {"error": 0.25, "item": 1}, [{"worker": "mine", "status": "new"}]
    ).to_frame()

    assert frame["item_worker"][0] == "mine"
    assert frame["item_status"][0] == "new"
    assert frame["result_error"][0] == 0.25
    assert frame["status"][0] == "finished"
    assert frame.columns.is_unique


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ({"lr": 11, "result_lr": 12}, {"lr": 13}),
        ({"lr": 11}, {"lr": 12, "result_lr": 13}),
        ({"lr": 11, "result_lr": 12}, {"lr": 13, "result_lr": 14}),
        ({"status": 11, "item_status": 12}, 13),
        ({"value": 11, "result_value": 12}, 13),
    ],
)
def test_a_renamed_column_replaces_no_other(item: Any, value: Any, pool: ParallelPool) -> None:
    """The table of one sweep may be the items of the next."""
    frame = pool.parfor(lambda _: value, [item]).to_frame()
    values = value.values() if isinstance(value, dict) else [value]
    assert {*item.values(), *values} <= {*frame.iloc[0]}


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
    results = pool.parfor(lambda x: np.full(200_000, x), range(4))

    assert [int(value[-1]) for value in results] == [0, 1, 2, 3]
    assert all(value.shape == (200_000,) for value in results)
