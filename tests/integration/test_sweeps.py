"""Many models on few GPUs: who runs what when, and what travels (scenarios 10, 11, 12, 15, 16)."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray

from raypool import ParallelPool, current_task


def ends(frame: Any) -> Any:
    return frame["started_at"] + pd.to_timedelta(frame["duration_s"], unit="s")


# --- who runs what when ---------------------------------------------------------------------------


@pytest.mark.quick
def test_seven_models_on_three_gpus(
    pool: ParallelPool, most_at_once: Any, marks: Any, eventually: Any
) -> None:
    """Scenario 10: results in order, never two on one GPU at the same moment, and the GPUs are all
    used.
    """

    def train(config: dict[str, int]) -> dict[str, Any]:
        marks.add("begun")
        eventually(lambda: marks.count("begun") >= 3)  # the first ones, for each other
        started = time.perf_counter()
        while time.perf_counter() < started + 0.06:
            np.linalg.norm(np.ones((50, 50)))
        return {
            "model": config["width"],
            "on": os.environ["CUDA_VISIBLE_DEVICES"],
            "gpu_of_task": current_task().gpu,
        }

    frame = pool.parfor(train, [{"width": width} for width in range(7)]).to_frame()

    assert list(frame["model"]) == list(range(7))
    assert list(frame["on"].astype(int)) == list(frame["gpu"]) == list(frame["gpu_of_task"])
    assert set(frame["gpu"]) == {0, 1, 2}
    for _, models in frame.groupby("gpu"):
        assert most_at_once(models) == 1
    assert most_at_once(frame) >= 2


@pytest.mark.quick
def test_a_long_model_holds_up_nobody(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any
) -> None:
    """Scenario 10: while one model trains, the others keep all other GPUs busy."""

    def train(model: int) -> int | None:
        marks.add("begun")
        if model == 0:
            gate.wait()
        else:
            eventually(lambda: marks.count("begun") > model)  # so that no GPU can do it all alone
        if model == 10:
            gate.open()
        return current_task().gpu

    results = pool.parfor(train, range(11))

    others = set(results[1:])
    assert len(others) == 2
    assert results[0] not in others
    frame = results.to_frame()
    assert ends(frame)[0] >= frame["started_at"].max()


@pytest.mark.parametrize("position", [0, 4])
def test_a_skewed_load(two_workers: Any, marks: Any, eventually: Any, position: int) -> None:
    """Scenario 11: one long item and eleven short ones on two workers take as long as the long one
    alone.

    Ray's own Pool deals the items out in advance, six to each worker, and so takes a quarter
    longer.
    """

    def work(item: int) -> None:
        if item == position:
            assert eventually(lambda: marks.count("done") == 11), (
                "an item has waited for the long one"
            )
        else:
            time.sleep(0.06)
            marks.add("done")

    frame = two_workers.parfor(work, range(12)).to_frame()

    on_the_long_one = frame[frame["worker"] == frame["worker"][position]].drop(position)
    assert (on_the_long_one["started_at"] < frame["started_at"][position]).all(), (
        "an item has waited for the long one"
    )
    assert len(on_the_long_one) <= position
    assert frame["worker"].nunique() == 2


def test_a_long_item_among_many_that_share_calls(pool: ParallelPool) -> None:
    """Little waits behind it: what shares its call, and one more call that was sent ahead."""
    durations_s = [0.002] * 301
    pool.parfor(time.sleep, durations_s[:50])  # now it is known to be short
    durations_s[100] = 0.8

    frame = pool.parfor(time.sleep, durations_s).to_frame()

    long = frame.loc[100]
    behind = frame[(frame["worker"] == long["worker"]) & (frame["started_at"] > long["started_at"])]
    assert len(behind) < 125, "much has waited behind the long item"


def test_short_items_use_all_workers(pool: ParallelPool) -> None:
    frame = pool.parfor(time.sleep, [0.005] * 2000).to_frame()

    assert set(frame["worker"]) == {0, 1, 2}
    shares = frame.groupby("worker")["duration_s"].sum()
    assert shares.min() > 0.15 * shares.sum(), "the work was not spread"


@pytest.mark.quick
def test_an_endless_generator_is_drawn_lazily(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    """Scenario 15: while nothing finishes, at most workers x look-ahead items are drawn."""
    drawn = itertools.count()
    seen: list[int] = []

    def endless() -> Iterator[int]:
        for number in drawn:
            seen.append(number)
            yield number

    def hold(number: int) -> int:
        gate.wait()
        if number == 100:
            raise StopAsyncIteration
        return number

    with ThreadPoolExecutor(1) as thread:
        loop = thread.submit(pool.parfor, hold, endless(), chunk_size=1)
        assert eventually(lambda: pool.statistics().running == 3)
        before = len(seen)
        assert before <= 3 * 64
        gate.open()
        error = loop.exception(300)

    assert isinstance(error, StopAsyncIteration)
    assert len(seen) <= 101 + 3 * 64
    missing = [number for number in range(100) if error.results[number] != number]
    assert len(missing) < 2 * 3, (
        "more than what two calls for each worker held when item 100 failed"
    )
    assert eventually(lambda: not pool.busy)


@pytest.mark.quick
def test_a_failure_says_where_it_happened(pool: ParallelPool) -> None:
    """Scenario 12, on GPUs."""

    def diverge(config: dict[str, float]) -> float:
        losses = {"now": config["lr"] * 1e300 * 1e300}
        if losses["now"] == np.inf:
            raise FloatingPointError("the loss is infinite")
        return losses["now"]

    with pytest.raises(FloatingPointError, match="the loss is infinite") as caught:
        pool.parfor(
            diverge, [{"lr": 0.0}, {"lr": 0.0}, {"lr": 0.1}], name="learning rates", max_workers=1
        )

    (note,) = caught.value.__notes__
    row = caught.value.results.to_frame().loc[2]
    for words in (
        "item 2",
        "learning rates",
        "attempt 1",
        f"worker {row['worker']}",
        pool.workers[0].host,
        f"GPU {row['gpu']}",
    ):
        assert words in note
    assert 'raise FloatingPointError("the loss is infinite")' in str(caught.value.__cause__)
    assert list(caught.value.results.to_frame()["status"][:2]) == ["finished", "finished"]


# --- what travels ---------------------------------------------------------------------------------


class Traced:
    """A large thing that notes down whenever it is packed or unpacked."""

    def __init__(self, marks: Any, array: Any) -> None:
        self.marks = marks
        self.array = array

    def __reduce__(self) -> Any:
        self.marks.add("packed")
        return unpack_traced, (self.marks, self.array)


def unpack_traced(marks: Any, array: Any) -> Traced:
    marks.add(f"unpacked by {os.getpid()}")
    return Traced(marks, array)


def check_shipped_once(pool: ParallelPool, marks: Any) -> None:
    assert marks.count("packed") == 1
    unpacked = [note for note in marks.all() if note != "packed"]
    assert len(unpacked) == len(set(unpacked)) <= pool.num_workers


@pytest.mark.quick
def test_a_large_closure_is_shipped_once(pool: ParallelPool, marks: Any) -> None:
    """Scenario 16, in a closure: packed once, unpacked once per worker, the same array for all its
    items.
    """
    data = Traced(marks, np.arange(2_000_000.0))

    def use(item: int) -> tuple[int | None, int, float]:
        return current_task().gpu, id(data.array), float(data.array[item])

    results = pool.parfor(use, range(200), chunk_size=5)

    assert [value for _, _, value in results] == list(range(200))
    check_shipped_once(pool, marks)
    assert len({(gpu, where) for gpu, where, _ in results}) == len({gpu for gpu, _, _ in results})


@pytest.mark.quick
def test_a_large_partial_is_shipped_once(pool: ParallelPool, marks: Any) -> None:
    """Scenario 16, in a partial."""

    def use(data: Traced, item: int) -> float:
        return float(data.array[item])

    results = pool.parfor(
        functools.partial(use, Traced(marks, np.arange(2_000_000.0))), range(60), chunk_size=1
    )

    assert list(results) == list(range(60))
    check_shipped_once(pool, marks)


@pytest.mark.quick
def test_a_large_argument_is_packed_once(pool: ParallelPool, marks: Any) -> None:
    future = pool.parfeval(
        lambda data, factor: factor * float(data.array.sum()),
        Traced(marks, np.ones(1_000_000)),
        factor=2,
    )

    assert future.result(300) == 2_000_000
    check_shipped_once(pool, marks)


def test_what_a_loop_has_shipped_is_let_go(pool: ParallelPool, eventually: Any) -> None:
    """Twelve loops with 25 MB each pass through a store of 200 MB, and leave it as it was."""

    def free_bytes() -> float:
        return ray.available_resources()["object_store_memory"]

    pool.parfor(abs, range(30))
    before = free_bytes()
    for number in range(12):
        data = np.full(25_000_000 // 8, number)
        assert set(pool.parfor(lambda _, data=data: int(data[-1]), range(6))) == {number}
        del data

    def is_as_before() -> bool:
        pool.parfeval_on_all(abs, 1).result(300)
        return free_bytes() >= before - 5_000_000

    assert eventually(is_as_before)


@pytest.mark.quick
def test_large_values_stay_away_until_somebody_asks(pool: ParallelPool, eventually: Any) -> None:
    """They are in the store, not here; and outlive the process that made them."""
    worker = pool.options(worker=1)
    future = worker.parfeval(np.full, 3_000_000, 7.0)
    pid = pool.workers[1].pid
    assert future.exception(300) is None

    worker.parfeval(lambda: os.kill(os.getpid(), signal.SIGKILL)).exception(300)
    assert eventually(lambda: pool.workers[1].pid != pid)

    value = future.result(300)
    assert value.shape == (3_000_000,)
    assert value.sum() == 21_000_000
    assert future.result() is value


def test_arrays_and_tensors_come_back_whole(pool: ParallelPool) -> None:
    import torch

    def make(size: int) -> dict[str, Any]:
        return {
            "array": np.arange(size),
            "tensor": torch.arange(size),
            "text": "x" * size,
            "list": list(range(3)),
        }

    for result, size in zip(pool.parfor(make, [0, 10, 50_000]), [0, 10, 50_000], strict=True):
        assert result["array"].tolist() == result["tensor"].tolist() == list(range(size))
        assert result["text"] == "x" * size
        assert result["list"] == [0, 1, 2]
