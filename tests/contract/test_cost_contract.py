"""parfor(cost=): the longest items go first, and nothing else is any different."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raypool import ParallelPool, WorkerLostError, current_task, report

pytestmark = pytest.mark.semantics

COSTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
LONGEST_FIRST = [5, 11, 7, 4, 8, 10, 2, 0, 9, 6, 1, 3]


class Refused(Exception):
    """An exception of a user's."""


def begun_at(_: Any) -> int:
    return time.perf_counter_ns()  # the same clock for all processes


def order_of(moments: Any) -> list[int]:
    return sorted(range(len(moments)), key=moments.__getitem__)


@pytest.mark.everywhere
def test_the_longest_go_first(pool: ParallelPool) -> None:
    for max_workers, chunk_size in ((1, None), (0, 1), (1, 5)):
        moments = pool.parfor(
            begun_at, COSTS, cost=COSTS, max_workers=max_workers, chunk_size=chunk_size
        )
        assert order_of(moments) == LONGEST_FIRST, "equal ones as they stand"


def test_costs_come_in_many_forms(pool: ParallelPool) -> None:
    forms: dict[str, Any] = {
        "function": lambda item: item,
        "tuple": tuple(COSTS),
        "array": np.array(COSTS),
        "float32": np.array(COSTS, dtype=np.float32),
        "Series": pd.Series(COSTS, index=range(100, 112)),
        "mixed": [float(cost) for cost in COSTS[:-1]] + COSTS[-1:],
        "infinite": [float("inf") if cost == 9 else cost for cost in COSTS],
        "negative": [cost - 10 for cost in COSTS],
    }
    for name, costs in forms.items():
        assert order_of(pool.parfor(begun_at, COSTS, cost=costs, max_workers=1)) == LONGEST_FIRST, (
            name
        )


def test_rows_of_a_data_frame(pool: ParallelPool) -> None:
    frame = pd.DataFrame({"width": COSTS, "depth": 2})
    by_row = pool.parfor(
        lambda row: (row["width"], begun_at(row)),
        frame,
        cost=lambda row: row["width"],
        max_workers=1,
    )
    by_column = pool.parfor(begun_at, frame, cost=frame["width"], max_workers=1)

    assert [width for width, _ in by_row] == COSTS
    assert order_of([moment for _, moment in by_row]) == order_of(by_column) == LONGEST_FIRST


def test_without_items_and_with_one(pool: ParallelPool) -> None:
    assert list(pool.parfor(abs, [], cost=[])) == []
    assert list(pool.parfor(abs, [-1], cost=[7])) == [1]
    assert list(pool.parfor(abs, 3, cost=abs)) == [0, 1, 2]


# --- nothing else is any different ----------------------------------------------------------------


def look_around(item: int) -> dict[str, Any]:
    task = current_task()
    report(tenfold=10 * item, index=task.index)
    if item == 5:
        raise Refused(f"no {item}")
    draws = random.random(), float(np.random.random())
    return {"index": task.index, "seed": task.seed, "attempt": task.attempt, "draws": draws}


@pytest.mark.everywhere
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_items_keep_their_numbers_seeds_and_places(
    pool: ParallelPool, chunk_size: int | None
) -> None:
    def run(cost: Any) -> Any:
        return pool.parfor(
            look_around,
            COSTS,
            cost=cost,
            seed=7,
            chunk_size=chunk_size,
            on_error="collect",
            name="look",
        )

    plain, sorted_ = run(None), run(COSTS)

    assert sorted_ == plain
    assert [value and value["index"] for value in sorted_] == [
        None if cost == 5 else index for index, cost in enumerate(COSTS)
    ]
    columns = ["item", "index", "seed", "draws", "status", "attempts", "error"]
    assert sorted_.to_frame()[columns].equals(plain.to_frame()[columns])
    assert list(sorted_.errors) == list(plain.errors) == [4, 8, 10]
    for index, error in sorted_.errors.items():
        assert type(error) is Refused
        assert f"item {index} of look" in error.__notes__[0]
    frame = sorted_.metrics.sort_values("item")
    assert frame["item"].tolist() == frame["index"].tolist() == list(range(12))
    assert frame["tenfold"].tolist() == [10 * cost for cost in COSTS]


def test_a_reduction_goes_in_the_order_of_the_items(pool: ParallelPool) -> None:
    assert pool.parfor(str, COSTS, cost=COSTS, reduce=lambda a, b: a + b) == "314159265358"
    assert (
        pool.parfor(str, COSTS, cost=COSTS, reduce=lambda a, b: a + b, init=">") == ">314159265358"
    )


def test_a_failure_ends_the_loop(
    pool: ParallelPool, check_pool: Callable[[ParallelPool], None]
) -> None:
    def refuse_9(item: int) -> int:
        if item == 9:
            raise Refused("nine")
        return 10 * item

    with pytest.raises(Refused, match="nine") as caught:
        pool.parfor(refuse_9, COSTS, cost=lambda item: -item, max_workers=1, chunk_size=1)

    results = caught.value.results
    assert list(results) == [None if cost == 9 else 10 * cost for cost in COSTS], "it was the last"
    assert list(results.errors) == [5]
    assert "item 5 of refuse_9" in caught.value.__notes__[0]
    assert results.to_frame()["status"].tolist() == [
        "failed" if cost == 9 else "finished" for cost in COSTS
    ]
    check_pool(pool)


def test_what_never_ran_is_told_by_its_own_number(pool: ParallelPool) -> None:
    def refuse_4(item: int) -> int:
        if item == 4:
            raise Refused("four")
        return item

    with pytest.raises(Refused) as caught:
        pool.parfor(refuse_4, COSTS, cost=COSTS, max_workers=1, chunk_size=1)

    ran = LONGEST_FIRST[: LONGEST_FIRST.index(2)]
    states = caught.value.results.to_frame()["status"]
    assert states[states == "finished"].index.tolist() == sorted(ran)
    assert states[states == "failed"].index.tolist() == [2]


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_retries_are_those_of_the_item(
    pool: ParallelPool, marks: Any, chunk_size: int | None
) -> None:
    def fail_once(item: int) -> tuple[int, int]:
        task = current_task()
        marks.add(task.index)
        if item in (1, 5) and task.attempt == 1:
            raise Refused(item)
        return task.index, task.attempt

    results = pool.options(retry_on=Refused).parfor(
        fail_once, COSTS, cost=COSTS, chunk_size=chunk_size
    )

    assert list(results) == [
        (index, 2 if cost in (1, 5) else 1) for index, cost in enumerate(COSTS)
    ]
    assert [marks.count(index) for index in range(12)] == [
        2 if cost in (1, 5) else 1 for cost in COSTS
    ]
    assert results.to_frame()["attempts"].tolist() == [attempt for _, attempt in results]


@pytest.mark.processes
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_lost_worker_costs_the_item_that_lost_it(make_pool: Any, chunk_size: int | None) -> None:
    def leave_at_6(item: int) -> int:
        if item == 6:
            os._exit(3)
        return current_task().index

    with make_pool(2) as pool:
        results = pool.options(retries=2).parfor(
            leave_at_6, COSTS, cost=COSTS, chunk_size=chunk_size, on_error="collect", name="leave"
        )

    assert list(results) == [None if index == 7 else index for index in range(12)]
    (error,) = results.errors.values()
    assert type(error) is WorkerLostError
    assert "while it ran item 7 of leave, attempt 3" in str(error)
    assert results.to_frame()["status"].tolist() == [
        "failed" if index == 7 else "finished" for index in range(12)
    ]


def test_progress_is_shown(pool: ParallelPool) -> None:
    assert list(pool.parfor(abs, COSTS, cost=COSTS, progress=True)) == COSTS


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("cost", "kind", "text"),
    [
        ([1, 2], ValueError, "2 numbers for 3 items"),
        ([1, float("nan"), 2], ValueError, "item 1 is NaN"),
        ([1, 2, "3"], TypeError, "item 2 is '3'"),
        (lambda item: None, TypeError, "item 0 is None"),
        (5, TypeError, "cost must be a number for each item, .* not 5"),
        ("321", TypeError, "cost must be a number for each item, .* not '321'"),
        ({0: 1, 1: 2, 2: 3}, TypeError, "must be a number for each item, or a function"),
        (
            (number for number in (1, 2, 3)),
            TypeError,
            "must be a number for each item, or a function",
        ),
    ],
)
def test_costs_that_cannot_be_used(
    pool: ParallelPool, cost: Any, kind: type[Exception], text: str, check_pool: Any
) -> None:
    with pytest.raises(kind, match=text):
        pool.parfor(abs, [1, 2, 3], cost=cost)
    check_pool(pool)


@pytest.mark.arguments
def test_a_function_that_raises(pool: ParallelPool, check_pool: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pool.parfor(abs, [2, 1, 0], cost=lambda item: 1 / item)
    assert "item 2" in caught.value.__notes__[0]
    check_pool(pool)


@pytest.mark.arguments
def test_a_generator_has_no_order_yet(pool: ParallelPool) -> None:
    with pytest.raises(ValueError, match="list instead of a generator"):
        pool.parfor(abs, (item for item in (1, 2)), cost=abs)
