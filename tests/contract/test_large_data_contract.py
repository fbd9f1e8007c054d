"""Large arguments and results: each comes out as it went in, on whatever way, belongs to whoever
gets it, and is let go.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from raypool import ParallelPool, current_task

pytestmark = pytest.mark.processes

MIDDLE, LARGE = 1_000_000, 4_000_000
"""Bytes of an array that is copied on arrival, and of one that is mapped."""

ON_TOP = 4_000
"""What a call costs besides its values, at most [bytes]."""


WAYS: dict[str, Callable[[ParallelPool, Callable[[Any], Any], list[Any]], list[Any]]] = {
    "parfor": lambda pool, fn, items: list(pool.parfor(fn, items)),
    "parfor, one call": lambda pool, fn, items: list(pool.parfor(fn, items, chunk_size=len(items))),
    "parfor, a call each": lambda pool, fn, items: list(pool.parfor(fn, items, chunk_size=1)),
    "map": lambda pool, fn, items: list(pool.map(fn, items)),
    "submit": lambda pool, fn, items: [
        future.result(300) for future in [pool.submit(fn, item) for item in items]
    ],
}

by_all_ways = pytest.mark.parametrize(
    ("way", "num_bytes"),
    [
        (WAYS["parfor"], LARGE),
        (WAYS["parfor, one call"], MIDDLE),
        (WAYS["parfor, one call"], LARGE),
        (WAYS["parfor, a call each"], LARGE),
        (WAYS["map"], MIDDLE),
        (WAYS["submit"], LARGE),
    ],
)
by_some_ways = pytest.mark.parametrize("way", [WAYS["parfor, one call"], WAYS["submit"]])


def filled(number: int, num_bytes: int) -> Any:
    return np.full(num_bytes, number, np.uint8)


def ends(array: Any) -> tuple[int, int, int]:
    return len(array), int(array[0]), int(array[-1])


@by_all_ways
def test_arguments_come_whole(pool: ParallelPool, way: Any, num_bytes: int) -> None:
    found = way(pool, ends, [filled(number, num_bytes) for number in range(5)])
    assert found == [(num_bytes, number, number) for number in range(5)]


@by_all_ways
def test_results_come_whole(pool: ParallelPool, way: Any, num_bytes: int) -> None:
    found = way(
        pool, lambda number: {"array": filled(number, num_bytes), "number": number}, list(range(5))
    )
    assert [(*ends(value["array"]), value["number"]) for value in found] == [
        (num_bytes, number, number, number) for number in range(5)
    ]


@by_all_ways
def test_what_a_result_was_does_not_depend_on_what_ran_later(
    pool: ParallelPool, way: Any, num_bytes: int
) -> None:
    """Not even if the function gives out the same array again and again, with something else in
    it.
    """

    def fill_again(number: int) -> Any:
        import builtins

        array = builtins.__dict__.setdefault(
            f"raypool_test_{num_bytes}", np.zeros(num_bytes, np.uint8)
        )
        array[:] = number
        return array

    assert [ends(value) for value in way(pool, fill_again, list(range(5)))] == [
        (num_bytes, number, number) for number in range(5)
    ]


def is_mapped(array: Any) -> bool:
    """Whether the memory of an array is a private mapping of the object store."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < stop:
            return "rw-p" in line and "plasma" in line
    return False


@pytest.mark.parametrize("num_bytes", [MIDDLE, LARGE])
@by_some_ways
def test_whoever_gets_an_array_may_change_it_and_nobody_else_sees_that(
    pool: ParallelPool, way: Any, num_bytes: int
) -> None:
    """Also through torch, which heeds no read-only flag; a large one is not copied for that."""
    import torch

    def change(array: Any) -> tuple[int, bool]:
        before = is_mapped(array)
        torch.from_numpy(array).add_(1)
        array += 1
        return int(array.sum()) // len(array), before

    zeros = filled(0, num_bytes)
    constant = pool.constant(zeros)

    assert way(pool, change, [zeros] * 4) == [(2, num_bytes == LARGE)] * 4
    assert pool.options(worker=0).parfeval(lambda: change(constant.value)).result(300)[0] == 2
    assert pool.options(worker=1).parfeval(lambda: int(constant.value.max())).result(300) == 0
    assert zeros.max() == 0
    (result,) = way(pool, lambda _: zeros, [0])
    assert change(result) == (2, num_bytes == LARGE)


@pytest.mark.parametrize(
    "shared",
    [{"n": 0}, {"n": 0, "of": ([1], [2])}, {"n": 0, "of": filled(0, 100_000)}],
    ids=["plain", "nested", "array"],
)
def test_items_of_one_call_that_hold_the_same_object_get_one_each(
    pool: ParallelPool, shared: dict[str, Any]
) -> None:
    def change(item: Any) -> int:
        counts = item if isinstance(item, dict) else item[0]
        counts["n"] += 1
        return counts["n"]

    for items in ([shared] * 6, [(shared, number) for number in range(6)]):
        assert list(pool.parfor(change, items, chunk_size=6)) == [1] * 6


def raised(values: Any) -> int:
    """Add one to the first value; return what it was."""
    before = int(values[0])
    values[0] = before + 1
    return before


def column_raised(table: Any) -> int:
    before = int(table["n"].iloc[0])
    table["n"] += 1
    return before


NUMBERS = np.zeros((LARGE // 8, 2), np.int64)


@pytest.mark.parametrize(
    ("shared", "change"),
    [
        (NUMBERS[:, 0], raised),
        (NUMBERS[::-1, 0].astype("M8[s]"), lambda dates: raised(dates.view(np.int64))),
        (bytearray(LARGE), raised),
        ([str(number) for number in range(400_000)], raised),
        (pd.DataFrame({"name": [f"user {n}" for n in range(100_000)], "n": 0}), column_raised),
        (torch.zeros(LARGE // 8, 2)[:, 0], raised),
    ],
    ids=["column", "dates", "bytes", "list", "table", "tensor"],
)
def test_what_items_share_is_sent_once_and_each_may_change_its_own(
    pool: ParallelPool, shared: Any, change: Callable[[Any], int]
) -> None:
    def change_all(item: Any) -> list[int]:
        large, config, array = item[:3]
        config["n"] += 1
        return [change(large), config["n"], raised(array)]

    config, array = {"n": 0}, filled(0, 100_000)
    items = [(shared, config, array, [str(number)] * 50_000) for number in range(10)]
    with pool.transfer_bytes() as transfer:
        found = pool.parfor(change_all, items, chunk_size=10)
    assert list(found) == [[0, 1, 0]] * 10
    assert transfer.total.sent_bytes < 2 * LARGE + 10 * MIDDLE


def test_a_retry_gets_what_was_sent_and_not_what_the_last_attempt_has_made_of_it(
    pool: ParallelPool,
) -> None:
    def change(array: Any) -> int:
        array += 1
        if current_task().attempt == 1:
            raise OSError
        return int(array.max())

    assert pool.options(retries=1, retry_on=OSError).parfor(change, [filled(0, LARGE)])[0] == 1


def test_a_mapping_ends_with_the_array(pool: ParallelPool) -> None:
    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("plasma")

    held = pool.options(worker=0)
    before = held.parfeval(mappings).result(300)
    assert held.parfor(lambda array: int(array[0]), [filled(number, LARGE) for number in range(4)])[
        :
    ] == [0, 1, 2, 3]
    assert held.parfeval(mappings).result(300) <= max(before, 1)


@pytest.mark.parametrize("num_bytes", [MIDDLE, LARGE])
def test_values_that_share_a_call_travel_once(pool: ParallelPool, num_bytes: int) -> None:
    with pool.transfer_bytes() as moved:
        pool.parfor(ends, [filled(number, num_bytes) for number in range(3)], chunk_size=3)
    assert 3 * num_bytes <= moved.total.sent_bytes <= 3 * num_bytes + ON_TOP
    with pool.transfer_bytes() as moved:
        pool.parfor(lambda number: filled(number, num_bytes), range(3), chunk_size=3)
    assert 3 * num_bytes <= moved.total.received_bytes <= 3 * num_bytes + ON_TOP


def test_one_argument_for_many_items_travels_once_for_each_worker(pool: ParallelPool) -> None:
    """Not so in the items: each has its own (`test_transfer_contract`)."""
    table = filled(7, LARGE)
    constant = pool.constant(table)
    with pool.transfer_bytes() as moved:
        assert set(pool.parfor(lambda item: int(constant.value[item]), 30, chunk_size=1)) == {7}
        assert set(pool.parfor(lambda item: int(constant.value[item]), 30, chunk_size=1)) == {7}
    assert (moved.to_frame()["sent_bytes"] <= LARGE + 60 * ON_TOP).all()


@by_some_ways
def test_the_object_store_is_empty_afterwards(
    pool: ParallelPool, way: Any, eventually: Any
) -> None:
    """Twelve times 40 MB, there and back, pass through a store of 200 MB, and leave it as it
    was.
    """
    import ray

    def free_bytes() -> float:
        return float(ray.available_resources()["object_store_memory"])

    way(pool, abs, [1, 2, 3])
    before = free_bytes()
    for number in range(12):
        results = way(
            pool, lambda array: array + 1, [filled(number, 4 * LARGE // 2) for _ in range(5)]
        )
        assert {ends(value)[1] for value in results} == {number + 1}
        del results

    def is_as_before() -> bool:
        # a worker holds what it was given until it is called again
        pool.parfeval_on_all(abs, 1).result(300)
        return free_bytes() >= before - 5_000_000

    assert eventually(is_as_before)


def test_a_result_outlives_those_that_came_with_it(pool: ParallelPool) -> None:
    results = pool.parfor(lambda number: filled(number, LARGE), range(3), chunk_size=3)
    second = results[1]
    del results
    for _ in range(10):  # more than the store has room for, if it took that for free
        pool.parfor(lambda number: filled(9, LARGE), range(3), chunk_size=3)
    assert set(np.unique(second)) == {1}
