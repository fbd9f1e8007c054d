"""How an spmd call fails on every kind of pool, how it is stopped, and how it goes with other
work.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raypool import (
    CollectiveError,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    SerializationError,
    SpmdError,
    TaskTimeoutError,
    current_task,
    wait,
)

pytest.importorskip("torch")

pytestmark = [pytest.mark.semantics]


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


class WordlessError(Exception):
    def __str__(self) -> str:
        return {404: "not found"}[500]


# --- its errors -----------------------------------------------------------------------------------


@pytest.mark.everywhere
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises(pool: ParallelPool, culprit: int) -> None:
    """It is named with its exception; the others are let go, and the next call works."""

    def fn(context: Any) -> None:
        if context.rank == culprit:
            raise KeyError("missing", culprit)
        context.all_reduce(1)

    for _ in range(3):
        with pytest.raises(SpmdError, match=f"^Rank {culprit} of .*KeyError") as caught:
            pool.spmd(fn)
        error = caught.value
        assert set(error.failures) == {culprit}
        assert error.first_rank == culprit
        assert error.__cause__ is error.failures[culprit]
        assert error.__cause__.args == ("missing", culprit)
        assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.semantics
@pytest.mark.processes
def test_all_ranks_raise(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        raise LookupError(context.rank)

    future = pool.spmd_async(fn)
    error = future.exception(300)
    assert isinstance(error, SpmdError)
    assert future.state == "failed"
    assert {rank: failure.args for rank, failure in error.failures.items()} == {
        rank: (rank,) for rank in error.failures
    }
    assert error.first_rank in error.failures


@pytest.mark.everywhere
@pytest.mark.parametrize("workers", [1, 2])
def test_a_connection_of_the_functions_own_that_breaks(pool: ParallelPool, workers: int) -> None:
    """Its rank has failed: a single one has no other to lose, and the text is not torch's."""

    def fn(context: Any) -> None:
        import torch.distributed as dist

        if context.rank == 0:
            kind = dist.DistNetworkError if context.world_size == 1 else RuntimeError
            raise kind("Connection refused by data server")
        context.barrier()

    text = "Rank 0 of .*: Connection refused by data server"
    with pytest.raises(SpmdError, match=text) as caught:
        pool.spmd(fn, workers=workers)
    assert set(caught.value.failures) == {0}
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.everywhere
def test_ranks_that_do_not_do_the_same(pool: ParallelPool) -> None:
    def skip(context: Any) -> Any:
        return None if context.rank == 1 else context.all_reduce(1)

    def mix(context: Any) -> Any:
        return context.barrier() if context.rank == 1 else context.all_reduce(1)

    def shapes(context: Any) -> Any:
        return context.all_reduce(np.zeros(context.rank + 1))

    def targets(context: Any) -> Any:
        return context.reduce(1, dst=context.rank)

    for fn, words in [
        (skip, "Rank 1 has ended, ranks 0 and 2 wait for it in all_reduce"),
        (mix, "anks 0 and 2 are in all_reduce, rank 1 is in barrier"),
        (shapes, r"array \(1,\).*array \(2,\).*array \(3,\)"),
        (targets, "same dst"),
    ]:
        with pytest.raises(SpmdError, match=words) as caught:
            pool.spmd(fn)
        assert isinstance(caught.value.__cause__, CollectiveError)
    assert list(pool.spmd(add_up)) == [6, 6, 6]


def test_a_rank_that_is_not_there(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        return context.reduce(1, dst=3)

    with pytest.raises(
        SpmdError, match=r"dst=3 is not a rank of this call: ranks are 0 to 2"
    ) as caught:
        pool.spmd(fn)
    assert isinstance(caught.value.__cause__, InvalidValueError)


def test_a_context_is_of_no_use_after_its_call(pool: ParallelPool) -> None:
    kept: list[Any] = []

    def fn(context: Any) -> None:
        kept.append(context)

    pool.spmd(fn, workers=0)
    with pytest.raises(InvalidValueError, match="has ended"):
        kept[0].all_reduce(1)


@pytest.mark.processes
def test_what_cannot_be_sent(pool: ParallelPool) -> None:
    door = threading.Lock()
    with pytest.raises(SerializationError, match="door"):
        pool.spmd(lambda context: door)
    with pytest.raises(SerializationError, match="lock"):
        pool.spmd(lambda context, lock: None, door)


@pytest.mark.arguments
def test_what_cannot_be_called(pool: ParallelPool) -> None:
    with pytest.raises(InvalidTypeError, match="not callable"):
        pool.spmd("train")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="fresh_process"):
        pool.options(fresh_process=True).spmd(add_up)
    with pytest.raises(InvalidTypeError, match=r"parameters are .* The first is for the context"):
        pool.spmd(lambda: None)
    assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.arguments
def test_a_pool_that_is_closed(make_pool: Any) -> None:
    with make_pool(2) as pool:
        assert list(pool.spmd(add_up)) == [3, 3]
    for verb in (pool.spmd, pool.spmd_async):
        with pytest.raises(PoolClosedError):
            verb(add_up)


# --- beside other work, and stopped ---------------------------------------------------------------


@pytest.mark.concurrent
def test_it_waits_for_its_workers(
    pool: ParallelPool, make_gate: Callable[[], Any], eventually: Callable[..., bool], marks: Any
) -> None:
    first, second = make_gate(), make_gate()
    holding = [
        pool.options(worker=0).parfeval(first.wait),
        pool.options(worker=2).parfeval(second.wait),
    ]
    assert eventually(lambda: {future.state for future in holding} == {"running"})

    def fn(context: Any) -> int:
        marks.add("rank")
        return context.all_reduce(1)

    gang = pool.spmd_async(fn)
    later = [pool.parfeval(marks.add, "later") for _ in range(50)]
    first.open()
    holding[0].result(300)
    assert gang.state == "queued"
    assert marks.all() == []
    second.open()
    assert list(gang.result(300)) == [3, 3, 3]
    assert wait(later, 300)
    assert marks.count("later") == 50


@pytest.mark.concurrent
def test_two_parts_at_once(pool: ParallelPool) -> None:
    parts = pool.partition(workers=[0, 2])
    for _ in range(20):
        jobs = [
            part.spmd_async(lambda context: context.all_gather(current_task().worker))
            for part in parts
        ]
        assert [job.result(300)[0] for job in jobs] == [[0, 2], [1]]


@pytest.mark.concurrent
def test_calls_from_several_threads(pool: ParallelPool) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(lambda: list(pool.spmd(add_up))) for _ in range(12)]
        assert [call.result(300) for call in calls] == [[6, 6, 6]] * 12


@pytest.mark.concurrent
@pytest.mark.parametrize("place", ["all_reduce", "receive", "sleep"])
def test_it_is_cancelled(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool], place: str
) -> None:
    def fn(context: Any) -> None:
        context.barrier()
        gate.open()
        if context.rank == 1 or place == "sleep":
            for _ in range(6000):
                time.sleep(0.01)
        elif place == "receive":
            context.receive(1)
        else:
            context.all_reduce(1)

    future = pool.spmd_async(fn)
    gate.wait()
    assert future.cancel()
    assert future.cancelled()
    assert eventually(lambda: not pool.busy)
    assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.concurrent
def test_its_future_cannot_be_waited_for_in_a_callback(
    pool: ParallelPool, call_back: Callable[..., Any]
) -> None:
    begun: list[Any] = []

    def wait(_: Any) -> None:
        begun.append(pool.spmd_async(lambda context: context.rank))
        begun[0].result()

    error = call_back(wait)
    assert type(error) is InvalidValueError
    assert "wait for itself" in str(error)
    assert begun[0].exception(300) is None, "it goes on"


@pytest.mark.arguments
@pytest.mark.processes
def test_its_time_is_up(pool: ParallelPool, make_pool: Any) -> None:
    timeout_s = 10 if make_pool.is_in_processes else 5  # the others have to be in the barrier

    def fn(context: Any) -> None:
        if context.rank == 2:
            for _ in range(6000):
                time.sleep(0.01)
        context.barrier()

    with pytest.raises(
        SpmdError,
        match=rf"had not ended after timeout_s={timeout_s}: rank 2 was at .*; ranks 0 and 1 waited in barrier",
    ) as late:
        pool.options(timeout_s=timeout_s).spmd(fn)
    assert set(late.value.failures) == {2}
    assert isinstance(late.value.__cause__, TaskTimeoutError)
    assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.concurrent
def test_the_wish_to_stop_reaches_all_ranks(pool: ParallelPool, gate: Any) -> None:
    def fn(context: Any) -> bool:
        gate.open()
        while not context.all_reduce(current_task().should_stop, op="max"):
            time.sleep(0.001)
        while not current_task().should_stop:  # another rank may have heard of it a little earlier
            time.sleep(0.001)
        return True

    future = pool.spmd_async(fn)
    gate.wait()
    future.request_stop()
    assert list(future.result(300)) == [True] * 3


@pytest.mark.threads
def test_the_pool_is_deleted_while_a_call_waits(
    make_pool: Any, gate: Any, eventually: Callable[..., bool]
) -> None:
    pool = make_pool(2)
    holding = pool.parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    gang = pool.spmd_async(add_up)
    ender = threading.Thread(target=pool.delete)
    ender.start()
    assert eventually(gang.cancelled)
    gate.open()
    ender.join(300)
    assert not ender.is_alive()
    assert holding.result(300) is None


@pytest.mark.threads
def test_ranks_that_are_threads_have_no_default_group(pool: ParallelPool) -> None:
    """Torch has one for a process: they say so, and their own collectives work."""

    def fn(context: Any) -> Any:
        with pytest.raises(InvalidValueError, match="threads of one process"):
            _ = context.process_group
        return context.all_reduce(1)

    assert list(pool.spmd(fn)) == [3, 3, 3]
    assert "MASTER_PORT" not in os.environ


def test_an_error_without_words_is_told_by_its_type(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        if context.rank == 1:
            raise WordlessError

    with pytest.raises(SpmdError, match=r"^Rank 1 of .*WordlessError"):
        pool.spmd(fn)
    assert list(pool.spmd(add_up)) == [6, 6, 6]
