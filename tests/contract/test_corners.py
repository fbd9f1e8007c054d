"""Where one would expect a pool to hang, to lose something, or to mix things up."""

from __future__ import annotations

import concurrent.futures
import io
import math
import operator
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raypool import (
    DataQueue,
    Future,
    InvalidTypeError,
    MetricBuffer,
    ParallelPool,
    Profile,
    RunOptions,
    TrainingOptions,
    WorkerResources,
    gcp,
    parpool,
)
from raypool.interop.multiprocessing import Pool

pytestmark = [pytest.mark.semantics]


@pytest.mark.processes
def test_results_are_what_they_were_when_they_were_returned(pool: ParallelPool) -> None:
    """A function may reuse its buffer: each result is taken as it is then, also where items share a
    call.
    """
    buffer, record, many = np.zeros(3), {"i": -1}, np.zeros(10_000)

    def fn(i: int) -> Any:
        buffer[:] = i
        many[:] = i
        record["i"] = i
        return buffer, record, many

    results = pool.parfor(fn, range(300))
    assert [int(value[0][0]) for value in results] == list(range(300))
    assert [value[1]["i"] for value in results] == list(range(300))
    assert [int(value[2].sum()) for value in results] == [10_000 * i for i in range(300)]
    futures = [pool.parfeval(fn, i) for i in range(100)]
    assert [int(future.result(300)[2][5]) for future in futures] == list(range(100))


class Refusing:
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise RuntimeError("no room")


def print_and_break(how: str) -> str:
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{how} is written\n")
        stream.flush()
    for name in ("stderr", "stdout"):
        if how == "closed":
            getattr(sys, name).close()
        elif how == "deleted":
            delattr(sys, name)
        else:
            closed = io.StringIO()
            closed.close()
            setattr(
                sys,
                name,
                {"none": None, "a closed file": closed, "refusing": Refusing(), "no stream": 3}[
                    how
                ],
            )
    return how


@pytest.mark.everywhere
def test_a_task_that_breaks_the_standard_streams_breaks_them_for_itself_only(
    pool: ParallelPool,
) -> None:
    """The next item on the same worker prints, in the same call or another, and what it prints is
    in its diary.
    """
    ways = ["closed", "none", "a closed file", "refusing", "no stream", "deleted"]
    here = pool.options(worker=pool.workers[0].index)
    before = (sys.stdout, sys.stderr)

    assert list(here.parfor(print_and_break, 2 * ways, chunk_size=12)) == 2 * ways
    for how in ways:
        future = here.parfeval(print_and_break, how)
        assert future.result() == how
        assert future.diary == f"{how} is written\n" * 2
    assert (sys.stdout, sys.stderr) == before
    assert not sys.stdout.closed


@pytest.mark.arguments
def test_numpys_integers_are_counts() -> None:
    """Whatever Python takes for an index is a count, and arrives as Python's integer."""
    one, two = np.int64(1), np.uint8(2)
    with parpool(two, profile="threads", retries=one, quiet=True) as pool:
        pool.resize(one)
        pool.resize(two)
        view = pool.options(retries=one, worker=np.int64(pool.workers[1].index), priority=one)
        assert list(view.parfor(abs, np.array(3), max_workers=two, chunk_size=one, seed=one)) == [
            0,
            1,
            2,
        ]
        assert list(pool.map(abs, [-1, -2], chunksize=one, buffersize=one)) == [1, 2]
        assert pool.spmd(lambda context: context.world_size, workers=torch.tensor(2))[one] == 2
        assert pool.partition(workers=np.arange(1))[0].num_workers == 1
        assert pool.partition(per_host=one)[0].num_workers == 1
        assert len(pool.predict(torch.nn.Identity(), np.zeros(3), mini_batch_size=two)) == 3
        with Pool(pool=pool, maxtasksperchild=two) as other:
            assert list(other.imap(abs, [-1, -2], one, buffersize=two)) == other.map(
                abs, [1, 2], two
            )
    with parpool((one, two), profile="inline", quiet=True) as pool:
        assert pool.num_workers == 1
    DataQueue[int](one).put(1)
    assert len(MetricBuffer(one)) == 0
    resources = WorkerResources(gpus=one, cpus=two)
    profile = Profile(
        workers_per_gpu=two, gpus=np.array([0, 2]), retries=one, max_leftover_bytes=one
    )
    training = TrainingOptions(mini_batch_size=two, patience=two, validation_data=1)
    kept = RunOptions(keep_checkpoints=two)
    counts = [
        profile.workers_per_gpu,
        *profile.gpus,
        profile.retries,
        resources.gpus,
        training.patience,
        kept.keep_checkpoints,
    ]
    assert {type(count) for count in counts} == {int}


@pytest.mark.arguments
@pytest.mark.parametrize(
    "no_count", [True, np.True_, torch.tensor(True), np.array([2]), 2.0, "2"], ids=repr
)
def test_bools_lists_and_floats_are_no_counts(pool: ParallelPool, no_count: Any) -> None:
    with pytest.raises(InvalidTypeError, match="must be an integer, not"):
        parpool(no_count, profile="inline")
    with pytest.raises(InvalidTypeError, match="must be an integer, not"):
        pool.parfor(abs, [1], max_workers=no_count)
    with pytest.raises(InvalidTypeError, match="must be an integer, not"):
        pool.options(retries=no_count)
    with pytest.raises(InvalidTypeError, match="retries must be an integer, not"):
        Profile(retries=no_count)


@pytest.mark.semantics
@pytest.mark.concurrent
def test_a_pool_can_be_shut_down_in_a_callback(make_pool: Any) -> None:
    pool = make_pool(1)
    ended = threading.Event()

    def end(_: Any) -> None:
        pool.shutdown()
        ended.set()

    pool.parfeval(abs, -1).add_done_callback(end)
    assert ended.wait(300)
    assert pool.is_closed


@pytest.mark.semantics
@pytest.mark.threads
def test_a_callback_cannot_end_the_pool_by_an_exception(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Any) -> None:
        raise SystemExit(3)

    future = pool.parfeval(abs, -2)
    future.add_done_callback(leave)
    assert future.result(300) == 2
    assert pool.parfeval(abs, -3).result(300) == 3
    assert "has failed" in caplog.text
    assert "SystemExit: 3" in caplog.text


@pytest.mark.everywhere
def test_a_task_that_asks_for_the_current_pool_gets_a_serial_one(pool: ParallelPool) -> None:
    def fn(i: int) -> int:
        with gcp() as inner:
            assert inner.num_workers == 1
            return sum(inner.parfor(lambda x: x + i, range(3)))

    assert pool.parfor(fn, [1, 2]) == [6, 9]
    assert not pool.is_closed


@pytest.mark.semantics
@pytest.mark.threads
def test_a_task_that_shuts_its_pool_down_does_not_wait_for_itself(make_pool: Any) -> None:
    pool = make_pool(1)
    assert pool.parfeval(lambda: pool.shutdown() or "done").result(300) == "done"


@pytest.mark.parametrize("pass_as", [list, iter])
def test_a_fold_keeps_counts_and_failures(pool: ParallelPool, pass_as: Any) -> None:
    heard: list[Any] = []
    items = pass_as([2, 0, 1, 4])
    total = pool.parfor(
        lambda x: 1 / x, items, reduce=operator.add, on_error="collect", on_end=heard.append
    )
    assert total == 1.75
    assert repr(heard[0]) == "<Results of 4 items: 3 finished, 1 failed>"
    assert list(heard[0]) == [None] * 4
    assert heard[0].to_frame()["item"][1] == 0
    assert type(heard[0].errors[1]) is ZeroDivisionError


def test_a_fold_that_fails_keeps_counts(pool: ParallelPool) -> None:
    with pytest.raises(TypeError) as caught:
        pool.parfor(lambda i: str(i) if i else 0, range(4), reduce=operator.add)
    assert repr(caught.value.results) == "<Results of 4 items: 4 finished>"


@pytest.mark.concurrent
def test_a_cancelled_loop_that_collects_says_that_it_was_cancelled(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    def fn(i: int) -> int:
        if i == 0:
            raise ValueError(i)
        if i > 3:
            gate.wait()
        return i

    before = pool.statistics()
    with concurrent.futures.ThreadPoolExecutor(1) as driver:
        loop = driver.submit(pool.parfor, fn, range(50), on_error="collect", chunk_size=1)
        assert eventually(lambda: pool.statistics().finished >= before.finished + 3)
        assert eventually(lambda: pool.statistics().failed == before.failed + 1)
        pool.cancel_all()
        error: Any = loop.exception(300)
    assert type(error) is concurrent.futures.CancelledError
    assert error.results[1] == 1
    assert isinstance(error.results.errors[0], ValueError)


@pytest.mark.concurrent
def test_a_chunk_size_that_was_asked_for_is_kept(pool: ParallelPool) -> None:
    def fn(i: int) -> int:
        if i % 10 == 0:
            threading.Event().wait(0.25)  # longer than a call whose size the pool has chosen
        return i

    before = pool.statistics().attempts
    assert pool.parfor(fn, range(40), chunk_size=20) == list(range(40))
    assert pool.statistics().attempts - before == 2


@pytest.mark.threads
def test_any_time_to_start_is_enough(make_pool: Any) -> None:
    with make_pool(1, start_timeout_s=math.inf) as pool:
        assert pool.parfeval(abs, -1).result(300) == 1


@pytest.mark.concurrent
def test_cancelling_calls_back_before_anybody_else_is_held_up(
    pool: ParallelPool, gate: Any
) -> None:
    blockers = [pool.parfeval(gate.wait) for _ in range(pool.num_workers)]
    victim, later = pool.parfeval(abs, -1), pool.parfeval(abs, -2)
    seen: list[int] = []

    def wait_for_the_next(_: Future[int]) -> None:
        gate.open()
        seen.append(later.result(300))

    victim.add_done_callback(wait_for_the_next)
    assert victim.cancel()
    assert seen == [2]
    assert all(blocker.exception(300) is None for blocker in blockers)


@pytest.mark.everywhere
def test_pools_inside_pools(pool: ParallelPool) -> None:
    def fn(i: int) -> list[int]:
        with parpool(3) as inner:
            return list(inner.parfor(lambda x: x * i, range(3)))

    assert pool.parfor(fn, range(3)) == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]
