"""Spmd calls that are stopped on real Ray: by their time limit, by whoever made them, with their
pool (scenario 31).
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import (
    ParallelPool,
    PoolClosedError,
    SpmdError,
    TaskTimeoutError,
    WorkerResources,
    current_task,
    parpool,
)

pytest.importorskip("torch")


CPU = WorkerResources(gpus=0, cpus=0.5)

long = pytest.mark.long


@pytest.fixture
def next_call_works(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, a call on all workers works, and nothing is queued or running."""
    yield
    assert list(pool.spmd(add_up)) == [6, 6, 6]
    assert eventually(lambda: not pool.busy)


on_shared_pool = pytest.mark.usefixtures("next_call_works")

patiently = pytest.mark.usefixtures("patience")


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


def pids(pool: ParallelPool) -> list[int]:
    return pool.parfeval_on_all(os.getpid).result(300)


def count_for_ever() -> None:
    number = 0
    while True:
        number += 1


def sleep_long() -> None:
    time.sleep(60)


def sum_in_c() -> None:
    """One call of native code, which holds Python's lock for hours."""
    sum(range(10**14))


def hash_in_c() -> None:
    """One call of native code, which gives Python's lock away for hours."""
    import hashlib

    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def swallow() -> None:
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def hang(context: Any, culprit: int, fn: Callable[[], None], way: str) -> None:
    """One rank never comes to what the others are in."""
    import torch
    import torch.distributed as dist

    if context.rank == culprit:
        fn()
    elif way == "torch":
        dist.all_reduce(torch.ones(4))
    else:
        context.barrier()
        context.all_reduce(torch.ones(4))


def late(pool: ParallelPool, *args: Any) -> SpmdError:
    with pytest.raises(SpmdError) as caught:
        pool.options(timeout_s=4).spmd(hang, *args)
    return caught.value


# --- its time is up -------------------------------------------------------------------------------


@patiently
@on_shared_pool
@pytest.mark.parametrize(
    ("fn", "way", "culprit"),
    [
        (count_for_ever, "torch", 0),
        (sleep_long, "context", 1),
        pytest.param(count_for_ever, "context", 1, marks=long),
        pytest.param(sleep_long, "torch", 0, marks=long),
    ],
)
def test_a_rank_that_does_not_come(pool: ParallelPool, fn: Any, way: str, culprit: int) -> None:
    """It is named, with what it does; nobody loses a process."""
    before, kept = pids(pool), pool.spmd(lambda context: [context.rank])
    error = late(pool, culprit, fn, way)
    assert set(error.failures) == {culprit}
    others = " and ".join(str(rank) for rank in range(3) if rank != culprit)
    what = (
        "barrier (the 1st operation of the call)"
        if way == "context"
        else "a collective of torch.distributed"
    )
    assert f"ranks {others} waited in {what}" in str(error)
    assert error.first_rank == culprit
    assert "hang had not ended after timeout_s=4: rank " in str(error)
    assert f"rank {culprit} was at " in str(error)
    assert f"in {fn.__name__}" in str(error)
    assert isinstance(error.__cause__, TaskTimeoutError)
    assert pids(pool) == before
    assert list(kept) == [[0], [1], [2]]


@on_shared_pool
@pytest.mark.parametrize(
    ("fn", "culprit"),
    [
        (sum_in_c, 0),
        (swallow, 2),
        *(
            pytest.param(*case, marks=long)
            for case in ((sum_in_c, 2), (hash_in_c, 0), (hash_in_c, 2), (swallow, 0))
        ),
    ],
)
def test_a_rank_that_hangs_in_native_code(pool: ParallelPool, fn: Any, culprit: int) -> None:
    """It is killed with its worker; the others keep their processes and their parts."""
    before, kept = pids(pool), pool.spmd(lambda context: [context.rank])
    error = late(pool, culprit, fn, "context")
    assert set(error.failures) == {culprit}
    assert f"rank {culprit} did not answer, and was killed with its worker" in str(error)
    assert isinstance(error.__cause__, TaskTimeoutError)
    assert [a == b for a, b in zip(pids(pool), before, strict=True)] == [
        rank != culprit for rank in range(3)
    ]
    assert [kept.exists(rank) for rank in range(3)] == [rank != culprit for rank in range(3)]


@patiently
@on_shared_pool
def test_those_that_have_ended_are_not_late(pool: ParallelPool) -> None:
    """They wait for the last one at the end."""
    with pytest.raises(
        SpmdError,
        match=r"rank 1 was at .* in sleep_long; ranks 0 and 2 waited at the end of the call",
    ) as caught:
        pool.options(timeout_s=3).spmd(lambda context: sleep_long() if context.rank == 1 else None)
    assert set(caught.value.failures) == {1}


@patiently
@on_shared_pool
def test_all_ranks_are_late(pool: ParallelPool) -> None:
    with pytest.raises(SpmdError, match=r"rank 0 was at .* in sleep_long; rank 1 was at") as caught:
        pool.options(timeout_s=3, name="slow").spmd(lambda context: sleep_long())
    assert set(caught.value.failures) == {0, 1, 2}
    assert str(caught.value).startswith("slow had not ended after timeout_s=3")


@pytest.mark.long
@on_shared_pool
def test_the_time_runs_from_the_beginning_not_from_the_call(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    """A call that has to wait for its workers is not late because of that."""
    assert list(pool.spmd(add_up)) == [6] * 3
    holding = pool.parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    future = pool.options(timeout_s=20).spmd_async(add_up)
    waited_from = time.monotonic()
    assert eventually(lambda: time.monotonic() > waited_from + 20.5)
    gate.open()
    assert list(future.result(300)) == [6] * 3


# --- somebody does not want it any more -----------------------------------------------------------


@patiently
@on_shared_pool
@pytest.mark.parametrize("way", ["context", "torch"])
def test_it_is_cancelled_while_it_runs(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool], way: str
) -> None:
    before = pids(pool)

    def fn(context: Any) -> None:
        context.barrier()
        gate.open()
        hang(context, 1, sleep_long, way)

    future = pool.spmd_async(fn)
    gate.wait()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)
    assert eventually(lambda: not pool.busy)
    assert pids(pool) == before
    assert future.worker_replaced is False


@on_shared_pool
def test_it_is_cancelled_while_it_waits(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Callable[..., bool]
) -> None:
    """What waits behind it goes on; no rank ever begins."""
    holding = pool.options(worker=2).parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    gang = pool.spmd_async(lambda context: marks.add("begun"))
    behind = [pool.parfeval(abs, -number) for number in range(20)]
    assert {future.state for future in [gang, *behind]} == {"queued"}
    assert gang.cancel()
    assert [future.result(300) for future in behind] == list(range(20))
    gate.open()
    assert marks.all() == []


@on_shared_pool
def test_every_rank_sees_the_wish_to_stop(pool: ParallelPool, gate: Any) -> None:
    def train(context: Any) -> int:
        steps = 0
        while True:
            steps += 1
            gate.open()
            if context.all_reduce(current_task().should_stop, op="min"):
                return steps

    future = pool.spmd_async(train)
    gate.wait()
    future.request_stop()
    steps = list(future.result(300))
    assert len(set(steps)) == 1
    assert future.state == "finished"


@on_shared_pool
def test_a_wish_to_stop_from_before_the_beginning(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    holding = pool.parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    future = pool.spmd_async(lambda context: current_task().should_stop)
    future.request_stop()
    gate.open()
    assert list(future.result(300)) == [True] * 3


# --- the pool ends --------------------------------------------------------------------------------


@pytest.mark.long
def test_the_pool_is_deleted_during_a_call(
    ray_session: None, make_gate: Callable[[], Any], eventually: Any
) -> None:
    """What runs goes on to its end, what waits does not begin."""
    inside, going_on = make_gate(), make_gate()

    def fn(context: Any) -> int:
        context.barrier()
        inside.open()
        going_on.wait()
        return context.all_reduce(1)

    pool = parpool(2, resources=CPU, quiet=True, start_timeout_s=300)
    running, queued = pool.spmd_async(fn), pool.spmd_async(add_up)
    inside.wait()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        deleting = thread.submit(pool.delete)
        assert eventually(queued.cancelled)
        assert running.state == "running"
        going_on.open()
        deleting.result(300)
    assert running.exception(0) is None
    with pytest.raises(PoolClosedError, match="parts of this Composite are gone"):
        running.result(0)[0]
    with pytest.raises(PoolClosedError):
        pool.spmd(add_up)


@pytest.mark.long
def test_an_error_leaves_the_pool_during_a_call(
    ray_session: None, make_gate: Callable[[], Any]
) -> None:
    """What waits is cancelled; what runs was told to end, and is waited for."""
    inside, at_the_end = make_gate(), make_gate()
    futures = []

    def fn(context: Any) -> None:
        context.barrier()
        inside.open()
        try:
            if context.rank == 0:
                sleep_long()
            context.barrier()
        finally:
            at_the_end.wait()

    def work() -> None:
        with parpool(2, resources=CPU, quiet=True, cancel_grace_s=300, start_timeout_s=300) as pool:
            futures.extend([pool.spmd_async(fn), pool.spmd_async(add_up)])
            inside.wait()
            futures[0].cancel()
            futures.append(
                pool.parfeval(sleep_long) if futures[1].cancel() else pool.spmd_async(add_up)
            )
            # so that it still waits when the error comes
            futures[2].add_done_callback(lambda _: at_the_end.open())
            raise LookupError("of the user's")

    with pytest.raises(LookupError, match="of the user's"):
        work()
    assert [future.state for future in futures] == ["cancelled"] * 3


@pytest.mark.long
def test_a_pool_that_ends_in_good_order_finishes_what_is_queued(
    ray_session: None, gate: Any
) -> None:
    with parpool(2, resources=CPU, quiet=True, start_timeout_s=300) as pool:
        holding = pool.parfeval(gate.wait)
        gangs = [pool.spmd_async(add_up) for _ in range(3)]
        holding.add_done_callback(lambda _: None)
        gate.open()
    assert [gang.done() for gang in gangs] == [True] * 3
    assert all(gang.exception(0) is None for gang in gangs)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_ends_all_ranks(
    start_python: Any, make_gate: Any, eventually: Callable[..., bool]
) -> None:
    """And the pool can be used further."""
    ready = make_gate()
    started = start_python(f"""
        import os, time
        from pathlib import Path
        from raypool import parpool

        def train(context):
            context.barrier()
            Path({str(ready.path)!r}).touch()
            if context.rank == 1:
                time.sleep(600)
            context.barrier()

        with parpool(2, quiet=True, cancel_grace_s=300, start_timeout_s=300) as pool:
            pids = pool.parfeval_on_all(os.getpid).result()
            try:
                pool.spmd(train)
            except KeyboardInterrupt:
                print("interrupted")
            print(list(pool.spmd(lambda context: context.all_reduce(1))), pool.parfeval_on_all(os.getpid).result() == pids)
        """)
    ready.wait()
    os.killpg(started.pid, signal.SIGINT)
    done = started.finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted", "[2, 2] True"]
    assert eventually(lambda: not started.family()), started.family()
