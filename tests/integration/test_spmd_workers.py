"""Which workers an spmd call runs on, on real Ray: some, in any order, of pools that grow, shrink,
rest and lose workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from raypool import (
    Composite,
    CompositeError,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    ResourceError,
    SpmdError,
    WorkerResources,
    current_task,
    parpool,
)

pytest.importorskip("torch")


CPU = WorkerResources(gpus=0, cpus=0.25)


def who(context: Any) -> tuple[int, int, list[int]]:
    """Which worker this rank is on, and what all say."""
    worker = current_task().worker
    return context.rank, worker, context.all_gather(worker)


def workers_of(composite: Composite) -> list[int]:
    """Return where the ranks were, by what they say, and make sure that all say the same."""
    seen = list(composite)
    workers = [worker for _, worker, _ in seen]
    assert [rank for rank, _, _ in seen] == list(range(len(seen)))
    assert [all_of_them for _, _, all_of_them in seen] == [workers] * len(seen)
    assert composite.workers == tuple(workers)
    return workers


# --- some of them ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_ranks_are_those_that_are_named_in_their_order(pool: ParallelPool) -> None:
    for workers in ([0, 1, 2], [2, 0], [1], [2, 1, 0], (1, 2), range(2)):
        assert workers_of(pool.spmd(who, workers=workers)) == list(workers)
    assert workers_of(pool.spmd(who, workers=[pool.workers[2], pool.workers[1]])) == [2, 1]
    assert workers_of(pool.options(worker=1).spmd(who)) == [1]
    for count in (1, 2, 3):
        assert len(set(workers_of(pool.spmd(who, workers=count)))) == count


def test_so_many_take_those_that_are_free(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    holding = pool.options(worker=0).parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    assert set(pool.spmd_async(who, workers=2).result(300).workers) == {1, 2}
    gate.open()
    holding.result(300)


def test_no_worker_means_here(pool: ParallelPool) -> None:
    composite = pool.spmd(
        lambda context: (os.getpid(), context.world_size, context.all_reduce(5)), workers=0
    )
    assert list(composite) == [(os.getpid(), 1, 5)]


def test_the_workers_of_a_part(pool: ParallelPool) -> None:
    part, rest = pool.partition(workers=[2, 0])
    assert workers_of(part.spmd(who)) == [0, 2]
    assert workers_of(part.spmd(who, workers=[2])) == [2]
    assert workers_of(rest.spmd(who)) == [1]
    with pytest.raises(ResourceError, match="requested 2, available 1"):
        rest.spmd(who, workers=2)
    with pytest.raises(InvalidValueError, match="no worker 0 here"):
        rest.spmd(who, workers=[0])


def test_the_workers_of_a_composite(pool: ParallelPool) -> None:
    """A call goes where its argument is; one that goes elsewhere is refused."""
    parts = pool.spmd(lambda context: [context.rank], workers=[2, 0])
    assert [
        list(seen)
        for seen in pool.spmd(lambda context, part: [*part, current_task().worker], parts)
    ] == [[0, 2], [1, 0]]
    for workers in (None, [0, 2], 3, [1]):
        if workers is not None:
            with pytest.raises(InvalidValueError, match=r"workers=\[2, 0\]"):
                pool.spmd(lambda context, part: None, parts, workers=workers)


def test_a_wrong_choice_is_refused_at_the_call(pool: ParallelPool) -> None:
    """More of them are in tests/contract/test_spmd_contract.py."""
    cases: list[tuple[Any, type[Exception], str]] = [
        (4, ResourceError, "requested 4, available 3"),
        (2.0, InvalidTypeError, "workers must be a list of workers"),
        ("all", InvalidTypeError, "neither a worker nor a worker's number"),
        ([3], InvalidValueError, "no worker 3"),
        ([None], InvalidTypeError, "None"),
    ]
    for workers, kind, words in cases:
        for verb in (pool.spmd, pool.spmd_async):
            with pytest.raises(kind, match=words):
                verb(who, workers=workers)


def test_what_spmd_does_not_take(pool: ParallelPool) -> None:
    with pytest.raises(InvalidValueError, match="fresh_process"):
        pool.options(fresh_process=True).spmd(who)
    with pytest.raises(InvalidTypeError, match="not callable"):
        pool.spmd(3)  # type: ignore[arg-type]


# --- within each other ----------------------------------------------------------------------------


def test_a_call_within_a_task_has_one_rank(pool: ParallelPool) -> None:
    """Wherever it is: it cannot wait for workers that wait for it. And the group of the workers is
    none the worse for it.
    """

    def alone(item: int) -> tuple[int, int, int, int]:
        seen = pool.spmd(
            lambda context, x: (
                context.rank,
                context.world_size,
                context.all_reduce(x),
                os.getpid(),
            ),
            item,
        )
        assert seen[0][3] == os.getpid()
        return (*seen[0][:3], len(seen))

    def within(context: Any) -> Any:
        before = context.all_reduce(1)
        inner = alone(10 + context.rank)
        return before, inner, context.all_reduce(1)

    assert workers_of(pool.spmd(who)) == [0, 1, 2]
    assert list(pool.parfor(alone, 6)) == [(0, 1, item, 1) for item in range(6)]
    assert workers_of(pool.spmd(who)) == [0, 1, 2]
    assert list(pool.spmd(within)) == [(3, (0, 1, 10 + rank, 1), 3) for rank in range(3)]
    assert workers_of(pool.spmd(who)) == [0, 1, 2]


def test_a_loop_within_a_rank(pool: ParallelPool) -> None:
    """It runs serially, in the rank."""

    def fn(context: Any) -> Any:
        pids = pool.parfor(lambda _: os.getpid(), 4)
        assert set(pids) == {os.getpid()}
        return context.all_reduce(pool.parfor(abs, range(5), reduce=max))

    assert list(pool.spmd(fn)) == [12] * 3


# --- pools that change ----------------------------------------------------------------------------


def test_a_pool_that_has_lost_a_worker(pool: ParallelPool, eventually: Callable[..., bool]) -> None:
    assert workers_of(pool.spmd(who)) == [0, 1, 2]
    for index in (2, 0):
        before = pool.workers[index].pid
        os.kill(before, signal.SIGKILL)
        assert eventually(
            lambda before=before, index=index: pool.workers[index].pid not in (0, before)
        )
        assert workers_of(pool.spmd(who)) == [0, 1, 2]


def test_a_pool_that_rests(
    shared_pool: ParallelPool, marks: Any, eventually: Callable[..., bool]
) -> None:
    """The call starts its workers again; what they kept is gone, and says so."""
    with parpool(2, resources=CPU, idle_timeout_s=1.0, quiet=True) as pool:
        kept = pool.spmd(lambda context: [context.rank])
        assert eventually(lambda: {worker.state for worker in pool.workers} == {"parked"})
        assert not kept.exists(0)
        with pytest.raises(CompositeError, match="idle_timeout_s"):
            kept[0]
        # what this one has returned could be gone again before it is read
        pool.spmd(lambda context: marks.add(who(context)))
        assert marks.all() == ["(0, 0, [0, 1])", "(1, 1, [0, 1])"]


def test_a_pool_that_shrinks_and_grows(
    shared_pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    """A call that waits has its error at once, and does not wait for workers that will not come."""
    with parpool(2, resources=CPU, quiet=True) as pool:
        kept = pool.spmd(lambda context: [context.rank])
        holding = pool.options(worker=0).parfeval(gate.wait)
        assert eventually(lambda: holding.state == "running")
        gang = pool.spmd_async(who)
        pool.resize(1)
        with pytest.raises(ResourceError, match="requested 2, available 1"):
            gang.result(300)
        gate.open()
        (left,) = workers_of(pool.spmd(who))
        assert [kept.exists(rank) for rank in range(2)] == [rank == left for rank in range(2)]
        with pytest.raises(ResourceError, match="requested 2, available 1"):
            pool.spmd(who, workers=2)
        with pytest.raises(SpmdError, match=r"Rank 0 of .*KeyError"):
            pool.spmd(lambda context: {}["nothing"])
        pool.resize(2)
        assert len(workers_of(pool.spmd(who))) == 2
        assert kept[left] == [left]


@pytest.mark.long
def test_a_mixed_pool(ray_session: None) -> None:
    """Workers with a GPU and without are ranks of one group."""
    with parpool(resources=[CPU, WorkerResources(gpus=1, cpus=0.25), CPU], quiet=True) as pool:
        assert workers_of(pool.spmd(who)) == [0, 1, 2]
        gpus = pool.spmd(lambda context: current_task().gpu)
        assert list(gpus) == [worker.gpu for worker in pool.workers]
        training, rest = pool.partition(per_gpu=1)
        assert (workers_of(training.spmd(who)), workers_of(rest.spmd(who))) == ([1], [0, 2])
