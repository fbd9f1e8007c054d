"""What an spmd call does on every kind of pool: its ranks, their collectives, its future."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from raypool import (
    Composite,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    ResourceError,
    SpmdContext,
    current_task,
    fetch_next,
    report,
    wait,
)

pytest.importorskip("torch")

pytestmark = [pytest.mark.semantics]


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


# --- its ranks ------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_each_worker_is_a_rank(pool: ParallelPool) -> None:
    def fn(context: Any, *args: Any) -> Any:
        task = current_task()
        return context.rank, context.world_size, task.index, task.worker, task.attempt, args

    composite = pool.spmd(fn, "a", 2)
    assert type(composite) is Composite
    assert list(composite) == [(rank, 3, rank, rank, 1, ("a", 2)) for rank in range(3)]


@pytest.mark.everywhere
def test_the_ranks_are_there_at_the_same_time(pool: ParallelPool) -> None:
    """Also on a pool whose tasks run one after the other."""

    def fn(context: Any) -> Any:
        right, left = (context.rank + 1) % 3, (context.rank - 1) % 3
        got = [
            context.send_receive(10 * turn + context.rank, dst=right, src=left) for turn in range(3)
        ]
        context.barrier()
        return got

    assert list(pool.spmd(fn)) == [[2, 12, 22], [0, 10, 20], [1, 11, 21]]


@pytest.mark.everywhere
def test_all_collectives(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        import torch

        rank = context.rank
        x = torch.tensor([rank + 1.0, 1.0])
        return (
            context.all_reduce(x) is x,
            x.tolist(),
            context.all_reduce(np.array([rank, 5]), op="max").tolist(),
            context.all_reduce(rank, op="mean"),
            context.reduce([rank], dst=1),
            [None if y is None else y.tolist() for y in context.all_gather(torch.tensor(rank))],
            context.gather(rank, dst=2),
            context.broadcast("from 1" if rank == 1 else None, src=1),
            context.scatter([[0], [1], [2]] if rank == 0 else None, src=0),
        )

    for rank, seen in enumerate(pool.spmd(fn)):
        assert seen == (
            True,
            [6.0, 3.0],
            [2, 5],
            1.0,
            [0, 1, 2] if rank == 1 else None,
            [0, 1, 2],
            [0, 1, 2] if rank == 2 else None,
            "from 1",
            [rank],
        )


@pytest.mark.everywhere
def test_one_to_one(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        import torch

        if context.rank == 0:
            context.send({"a": 1}, dst=2)
            context.send(torch.arange(3), dst=2)
            return context.receive(src=2)
        if context.rank == 2:
            got = context.receive(src=0), context.receive(src=0).tolist()
            context.send(got, dst=0)
        return None

    assert list(pool.spmd(fn)) == [({"a": 1}, [0, 1, 2]), None, None]


@pytest.mark.everywhere
def test_calls_one_after_the_other(pool: ParallelPool) -> None:
    for _ in range(10):
        assert list(pool.spmd(add_up)) == [6, 6, 6]
    assert list(pool.parfor(abs, [-1, -2])) == [1, 2]
    assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.everywhere
def test_some_workers(pool: ParallelPool) -> None:
    def look(context: Any) -> tuple[int, int, int]:
        return current_task().worker, context.world_size, context.all_reduce(1)

    for workers in ([2, 0], [1], (0, 1, 2), [2, 1, 0], 2, 1):
        composite = pool.spmd(look, workers=workers)
        count = workers if isinstance(workers, int) else len(workers)
        assert [seen[1:] for seen in composite] == [(count, count)] * count
        assert tuple(seen[0] for seen in composite) == composite.workers
        if not isinstance(workers, int):
            assert composite.workers == tuple(workers)


def test_no_workers_means_this_process(pool: ParallelPool) -> None:
    composite = pool.spmd(
        lambda context, x: (os.getpid(), context.world_size, context.all_reduce(x)), 3, workers=0
    )
    assert list(composite) == [(os.getpid(), 1, 3)]


@pytest.mark.arguments
@pytest.mark.parametrize(
    ("workers", "kind", "words"),
    [
        (4, ResourceError, "requested 4, available 3"),
        (-1, InvalidValueError, "must be at least 0, not -1"),
        ([], InvalidValueError, "has no workers"),
        ([5], InvalidValueError, "no worker 5"),
        ([1, 1], InvalidValueError, "listed twice"),
        (1.5, InvalidTypeError, "workers must be a list of workers"),
    ],
)
def test_a_wrong_choice_of_workers(
    pool: ParallelPool, workers: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        pool.spmd(add_up, workers=workers)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_call_within_a_task_has_one_rank(pool: ParallelPool) -> None:
    def alone(item: int) -> list[Any]:
        return list(
            pool.spmd(lambda context: (context.rank, context.world_size, context.all_reduce(item)))
        )

    def within(context: Any) -> Any:
        return context.all_reduce(1), alone(context.rank), context.all_reduce(1)

    assert list(pool.spmd(add_up)) == [6, 6, 6]
    assert list(pool.parfor(alone, 4)) == [[(0, 1, item)] for item in range(4)]
    assert list(pool.spmd(within)) == [(3, [(0, 1, rank)], 3) for rank in range(3)]
    assert list(pool.spmd(add_up)) == [6, 6, 6]


@pytest.mark.semantics
@pytest.mark.processes
def test_a_function_runs_by_itself(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        import torch

        return [
            context.all_reduce(torch.ones(2)).tolist(),
            context.all_gather("a"),
            context.scatter([5], src=0),
            context.broadcast(np.arange(2), src=0).tolist(),
            (context.rank, context.world_size),
        ]

    (there,) = pool.spmd(fn, workers=[0])
    assert fn(SpmdContext()) == there == [[1.0, 1.0], ["a"], 5, [0, 1], (0, 1)]


@pytest.mark.semantics
@pytest.mark.threads
def test_a_single_rank_shows_a_default_group_while_it_runs(pool: ParallelPool) -> None:
    """Always the same one, to which a model of DDP's belongs; calls at the same time share it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def make(context: Any) -> Any:
        assert context.process_group is dist.group.WORLD
        pool.spmd(lambda inner: inner.process_group, workers=0)
        assert dist.get_world_size() == 1
        return DistributedDataParallel(torch.nn.Linear(2, 2))

    def use(context: Any, model: Any) -> bool:
        model(torch.ones(1, 2)).sum().backward()
        return model.process_group is context.process_group

    models = pool.spmd(make, workers=1)
    assert not dist.is_initialized()
    assert list(pool.spmd(use, models)) == [True]
    assert not dist.is_initialized()


@pytest.mark.semantics
@pytest.mark.processes
def test_arguments_are_those_of_the_time_of_the_call(pool: ParallelPool, make_pool: Any) -> None:
    """On Ray each rank has its own; in this process they are objects of the caller's."""
    items = [1]
    composite = pool.spmd(lambda context, items: items, items)
    assert (composite[0] is items) is not make_pool.is_in_processes
    assert list(composite) == [[1]] * 3


# --- its future -----------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_future_of_it_is_like_any_other(pool: ParallelPool) -> None:
    future = pool.options(name="sum").spmd_async(add_up)
    assert wait([future], 300)
    assert (future.name, future.state, future.attempts) == ("sum", "finished", 1)
    assert list(future.result()) == [6, 6, 6]
    assert future.submitted_at <= future.started_at <= future.finished_at
    index, composite = fetch_next([future])
    assert (index, list(composite)) == (0, [6, 6, 6])
    assert not future.cancel()


@pytest.mark.everywhere
def test_reports_have_the_rank(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        for step in range(2):
            report(step=step, loss=context.rank)
        print(f"rank {context.rank} says")

    future = pool.spmd_async(fn)
    future.result(300)
    assert list(future.metrics.columns) == ["time", "rank", "attempt", "step", "loss"]
    assert future.metrics["rank"].tolist() == [0, 0, 1, 1, 2, 2]
    assert future.metrics["loss"].tolist() == [0, 0, 1, 1, 2, 2]
    assert all(f"rank {rank} says" in future.diary for rank in range(3))
