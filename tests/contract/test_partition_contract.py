"""Parts of a pool: each has its own workers and the verbs of a pool, on every kind of pool."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import raypool
from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    ResourceError,
    WorkerLostError,
    current_task,
    parpool,
)

pytestmark = pytest.mark.semantics


def where(*_: object) -> int:
    """The number of the worker that runs this."""
    return current_task().worker


def numbers_of(view: Any) -> list[int]:
    return [worker.index for worker in view.workers]


# --- which workers --------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_two_parts_have_all_workers_between_them(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[2, 0])
    assert (numbers_of(part), numbers_of(rest)) == ([0, 2], [1])
    assert (part.num_workers, rest.num_workers, pool.num_workers) == (2, 1, 3)
    assert part.workers == [pool.workers[0], pool.workers[2]]
    part, rest = pool.partition(workers=pool.workers[:1])
    assert (numbers_of(part), numbers_of(rest)) == ([0], [1, 2])


def test_so_many_for_each_host(pool: ParallelPool) -> None:
    for number, expected in [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (100, [0, 1, 2])]:
        part, rest = pool.partition(per_host=number)
        assert numbers_of(part) == expected
        assert numbers_of(rest) == [index for index in range(3) if index not in expected]


def test_nobody_has_a_gpu() -> None:
    with parpool(2, profile="inline", quiet=True) as pool:
        part, rest = pool.partition(per_gpu=1)
        assert (part.num_workers, rest.num_workers) == (0, 2)
        assert (
            part.workers,
            part.idle_workers,
            part.busy,
            part.queue.queued,
            part.queue.running,
        ) == ([], 0, False, [], [])
        assert rest.parfeval_on_all(where).result(300) == [0, 1]


@pytest.mark.arguments
def test_an_empty_part_says_so_at_the_call(pool: ParallelPool) -> None:
    empty, rest = pool.partition(workers=[])
    verbs: list[Callable[[], Any]] = [
        lambda: empty.parfor(abs, [1]),
        lambda: empty.parfor(abs, []),
        lambda: empty.parfeval(abs, 1),
        lambda: empty.submit(abs, 1),
        lambda: empty.map(abs, [1]),
        lambda: empty.parfeval_on_all(where),
        lambda: empty.options(retries=0).parfeval(abs, 1),
        lambda: empty.partition(per_host=1)[1].parfeval(abs, 1),
    ]
    for verb in verbs:
        with pytest.raises(ResourceError, match="has no workers: requested 1, available 0"):
            verb()
    assert not empty.busy
    assert numbers_of(rest) == [0, 1, 2]
    assert pool.partition(per_host=3)[1].num_workers == 0


def test_parts_of_parts(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[1, 2])
    first, second = part.partition(per_host=1)
    assert (numbers_of(first), numbers_of(second), numbers_of(rest)) == ([1], [2], [0])
    assert [view.parfeval(where).result(300) for view in (first, second, rest)] == [1, 2, 0]
    with pytest.raises(InvalidValueError, match=r"There is no worker 0 here, only 1, 2"):
        part.partition(workers=[0])


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, InvalidTypeError, "takes one of per_gpu=, per_host= and workers=, but got none"),
        ({"per_gpu": 1, "workers": [0]}, InvalidTypeError, "but got per_gpu and workers"),
        ({"per_gpu": 0}, InvalidValueError, "per_gpu must be at least 1, not 0"),
        ({"per_host": -1}, InvalidValueError, "per_host must be at least 1, not -1"),
        ({"per_gpu": True}, InvalidTypeError, "per_gpu must be an integer, not True"),
        ({"per_host": 0.5}, InvalidTypeError, "per_host must be an integer, not 0.5"),
        ({"workers": 1}, InvalidTypeError, "workers must be a list of workers, .* not 1"),
        (
            {"workers": ["0"]},
            InvalidTypeError,
            "contains '0', which is neither a worker nor a worker's number",
        ),
        ({"workers": [True]}, InvalidTypeError, "workers contains True"),
        ({"workers": [7]}, InvalidValueError, r"no worker 7 here, only 0, 1, 2"),
        ({"workers": [-1]}, InvalidValueError, "no worker -1 here"),
        ({"workers": [1, 1]}, InvalidValueError, "Worker 1 is listed twice"),
    ],
)
def test_what_cannot_be_parted(
    pool: ParallelPool, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pool.partition(**arguments)


# --- what runs where ------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_all_verbs_keep_to_the_parts_workers(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[0, 2])
    for view, own in [(part, {0, 2}), (rest, {1})]:
        assert set(view.parfor(where, 40)) <= own
        assert set(view.parfor(where, iter(range(40)), chunk_size=3)) <= own
        assert set(view.parfor(where, 5, max_workers=1)) <= own
        assert set(view.map(where, range(10))) <= own
        assert {view.submit(where).result(300) for _ in range(10)} <= own
        assert {
            view.options(name="x", retries=0).parfeval(where).result(300) for _ in range(5)
        } <= own
        assert view.parfeval_on_all(where).result(300) == sorted(own)
        assert view.options(worker=max(own)).parfeval(where).result(300) == max(own)
    with pytest.raises(InvalidValueError, match=r"There is no worker 1, only 0, 2"):
        part.options(worker=1).parfeval(where)
    assert part.parfor(abs, [-1], max_workers=0)[0] == 1


@pytest.mark.processes
def test_a_part_has_the_pools_options(make_pool: Any) -> None:
    with make_pool(2, retries=0) as pool:
        error = pool.partition(per_host=1)[0].parfeval(os._exit, 1).exception(300)
    assert isinstance(error, WorkerLostError)
    assert error.attempts == 1


@pytest.mark.concurrent
def test_parts_are_used_at_the_same_time(
    pool: ParallelPool, make_gate: Any, eventually: Any
) -> None:
    """Neither waits for the other; nor does the pool itself use up what one of them could use."""
    first, second = make_gate(), make_gate()
    part, rest = pool.partition(workers=[0])
    slow = [part.parfeval(first.wait) for _ in range(3)]
    assert eventually(slow[0].running)
    assert list(rest.parfor(lambda x: x * x, range(20))) == [x * x for x in range(20)]
    held = [rest.parfeval(second.wait) for _ in range(2)]
    assert eventually(lambda: all(future.running() for future in held))
    everywhere = pool.parfeval(where)
    assert [future.state for future in slow] == ["running", "queued", "queued"]
    assert (part.idle_workers, rest.idle_workers, pool.idle_workers) == (0, 0, 0)
    second.open()
    assert everywhere.result(300) in (1, 2)
    assert not slow[1].done()
    first.open()
    assert raypool.wait(slow, 300)


@pytest.mark.concurrent
def test_a_part_does_not_leave_its_workers_idle_nor_take_others(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    part, rest = pool.partition(workers=[0, 2])
    futures = [part.parfeval(lambda: (gate.wait(), current_task().worker)[1]) for _ in range(6)]
    assert eventually(lambda: sum(future.running() for future in futures) == 2)
    assert rest.idle_workers == 1
    assert part.idle_workers == 0
    gate.open()
    assert {future.result(300) for future in futures} == {0, 2}


@pytest.mark.semantics
@pytest.mark.concurrent
def test_many_threads_use_pool_and_parts(pool: ParallelPool) -> None:
    """Everything comes out right, and in its place, when all of them are asked at once."""
    before = pool.statistics().finished
    part, rest = pool.partition(workers=[1, 2])
    views: list[tuple[Any, set[int]]] = [(pool, {0, 1, 2}), (part, {1, 2}), (rest, {0})] * 2

    def use(view: Any, own: set[int]) -> None:
        for _ in range(5):
            futures = [view.parfeval(where) for _ in range(10)]
            values = [*view.parfor(where, 30), *(future.result(300) for future in futures)]
            assert len(values) == 40
            assert set(values) <= own

    with concurrent.futures.ThreadPoolExecutor(len(views)) as threads:
        for call in [threads.submit(use, *view) for view in views]:
            call.result(300)
    assert not pool.busy
    assert pool.statistics().finished == before + 6 * 5 * 40


@pytest.mark.semantics
@pytest.mark.processes
def test_a_part_inside_a_task_runs_serially(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[0])

    def nested(_: int) -> tuple[list[int], int, int]:
        return (
            list(rest.parfor(lambda x: x + 1, [1, 2])),
            rest.parfeval(abs, -3).result(),
            len(rest.workers) > 0,
        )

    assert list(part.parfor(nested, 2)) == [([2, 3], 3, True)] * 2


def test_constants_in_parts(pool: ParallelPool) -> None:
    part, rest = pool.partition(per_host=1)
    table = part.constant(lambda: {"a": 7})
    assert [
        part.parfeval(lambda: table.value["a"]).result(300),
        rest.parfeval(lambda: table.value["a"]).result(300),
    ] == [7, 7]


# --- what is asked of a part ----------------------------------------------------------------------


@pytest.mark.concurrent
def test_a_part_shows_its_own_work(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    part, rest = pool.partition(workers=[0, 1])[0].partition(workers=[0])
    own = [part.parfeval(gate.wait) for _ in range(3)]
    other = rest.parfeval(gate.wait)
    assert eventually(lambda: own[0].running() and other.running())
    assert (part.queue.running, part.queue.queued) == (own[:1], own[1:])
    assert (rest.queue.running, rest.queue.queued) == ([other], [])
    assert set(pool.queue.running) == {own[0], other}
    assert part.busy
    bound = pool.options(worker=1).parfeval(where)
    assert eventually(lambda: rest.queue.queued == [bound])
    nested, _ = part.partition(per_host=1)
    assert nested.queue.queued == own[1:]

    part.cancel_all()
    assert [future.cancelled() for future in own] == [True] * 3
    assert eventually(lambda: not part.busy)
    assert rest.busy
    gate.open()
    other.result(300)
    bound.result(300)


@pytest.mark.concurrent
def test_cancel_all_of_a_part_ends_its_loops(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as callers:
        part, rest = pool.partition(workers=[0])
        loop = callers.submit(part.parfor, lambda _: gate.wait(), 5)
        other = callers.submit(rest.parfor, lambda _: gate.wait(), 3)
        assert eventually(lambda: part.idle_workers == rest.idle_workers == 0)
        part.cancel_all()
        assert isinstance(loop.exception(300), concurrent.futures.CancelledError)
        gate.open()
        assert len(other.result(300)) == 3


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_part_that_is_shut_down_leaves_the_pool_as_it_is(pool: ParallelPool) -> None:
    with pool.partition(workers=[0])[0] as part:
        nested, view = part.partition(per_host=1)[0], part.options(name="x")
        future = part.parfeval(where)
    assert future.done()
    assert part.is_closed
    assert nested.is_closed
    for closed in (part, nested, view):
        with pytest.raises(PoolClosedError, match="This part of the pool was shut down"):
            closed.parfeval(where)
    part.delete()
    assert "closed" in repr(part)
    assert not pool.is_closed
    assert pool.parfeval_on_all(where).result(300) == [0, 1, 2]
    again, _ = pool.partition(workers=[0])
    assert again.parfeval(where).result(300) == 0


@pytest.mark.concurrent
def test_delete_of_a_part_cancels_what_waits(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    part, rest = pool.partition(workers=[0])
    running, waiting = part.parfeval(gate.wait), part.parfeval(where)
    assert eventually(running.running)
    ender = threading.Thread(target=part.delete)
    ender.start()
    assert eventually(waiting.cancelled)
    assert ender.is_alive()
    assert rest.parfeval(where).result(300) in (1, 2)
    gate.open()
    ender.join(300)
    assert running.exception(0) is None


@pytest.mark.semantics
@pytest.mark.threads
def test_a_pool_that_is_over_ends_its_parts(make_pool: Any) -> None:
    with make_pool(2) as pool:
        part, _ = pool.partition(per_host=1)
        assert not part.is_closed
    assert part.is_closed
    for verb in (
        lambda: part.parfeval(where),
        lambda: part.parfor(where, 1),
        lambda: part.partition(per_host=1),
    ):
        with pytest.raises(PoolClosedError):
            verb()


@pytest.mark.semantics
@pytest.mark.threads
def test_a_part_keeps_its_pool(make_pool: Any) -> None:
    """And nobody else does: the leak check sees that its workers are gone."""
    pool = make_pool(2)
    part, _ = pool.partition(per_host=1)
    del pool
    gc.collect()
    assert part.parfeval(where).result(300) == 0


@pytest.mark.threads
def test_a_part_that_has_lost_its_workers_to_resize(
    make_pool: Any, gate: Any, eventually: Any
) -> None:
    with make_pool(3) as pool:
        part, rest = pool.partition(workers=[0])
        pool.resize(1)
        assert eventually(lambda: pool.num_workers == 1)
        ((left, gone),) = [(a, b) for a, b in [(part, rest), (rest, part)] if a.num_workers]
        assert left.num_workers == 1
        assert left.parfeval(where).result(300) == pool.workers[0].index
        with pytest.raises(ResourceError, match="has no workers"):
            gone.parfeval(where)
        pool.resize(3)
        assert gone.num_workers == 0, "new workers are in neither part"
        assert pool.parfor(where, 30).errors == {}


@pytest.mark.threads
def test_what_waits_for_workers_that_go_fails(make_pool: Any, gate: Any, eventually: Any) -> None:
    with make_pool(2) as pool:
        part, rest = pool.partition(workers=[1])
        running = part.parfeval(gate.wait)
        assert eventually(running.running)
        waiting = [part.parfeval(where) for _ in range(3)]
        holder = rest.parfeval(gate.wait)
        assert eventually(holder.running)
        pool.resize(1)  # the last one goes, after what it runs
        outcomes = [future.exception(300) for future in waiting]
        assert all(
            isinstance(error, WorkerLostError) and error.attempts == 0 for error in outcomes
        ), outcomes
        assert "no worker is left on which it may run: the pool was made smaller" in str(
            outcomes[0]
        )
        assert (part.num_workers, rest.num_workers) == (0, 1)
        gate.open()
        assert running.exception(300) is None
        assert holder.exception(300) is None
