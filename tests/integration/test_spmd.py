"""Every worker at once, on real Ray: collectives, rings, values that stay, other work beside it
(scenarios 28 to 30, 32, 33).
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raypool import (
    Composite,
    CompositeError,
    InvalidValueError,
    ParallelPool,
    WorkerResources,
    current_task,
    parpool,
    report,
)

pytest.importorskip("torch")


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


# --- collectives ----------------------------------------------------------------------------------


def test_collectives(pool: ParallelPool) -> None:
    """Scenario 28, with tensors, arrays and plain values."""

    def fn(context: Any) -> Any:
        import numpy as np
        import torch

        x = torch.full((2, 3), context.rank + 1.0)
        same = context.all_reduce(x) is x
        array = context.all_reduce(np.arange(3) + context.rank)
        first = context.reduce(context.rank + 1, dst=0)
        last = context.reduce(torch.tensor([context.rank + 1]), dst=2, op="max")
        return {
            "tensor": (same, x.tolist()),
            "array": array.tolist(),
            "value": context.all_reduce(context.rank + 1),
            "mean": context.all_reduce(float(context.rank), op="mean"),
            "joined": context.all_reduce((context.rank,), op=lambda a, b: a + b),
            "reduced": (first, None if last is None else last.tolist()),
            "gathered": (
                context.all_gather(context.rank),
                context.gather(str(context.rank), dst=1),
            ),
            "broadcast": context.broadcast({"from": context.rank}, src=2),
            "scattered": context.scatter(
                [10 * n for n in range(3)] if context.rank == 2 else None, src=2
            ),
        }

    for rank, seen in enumerate(pool.spmd(fn)):
        assert seen == {
            "tensor": (True, [[6.0] * 3] * 2),
            "array": [3, 6, 9],
            "value": 6,
            "mean": 1.0,
            "joined": (0, 1, 2),
            "reduced": (6 if rank == 0 else None, [3] if rank == 2 else None),
            "gathered": ([0, 1, 2], list("012") if rank == 1 else None),
            "broadcast": {"from": 2},
            "scattered": 10 * rank,
        }


@pytest.mark.quick
def test_a_rank_is_on_its_workers_gpu(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        return (
            current_task().gpu,
            os.environ["CUDA_VISIBLE_DEVICES"],
            context.device == current_task().device,
        )

    expected = [(worker.gpu, str(worker.gpu), True) for worker in pool.workers]
    assert list(pool.spmd(fn)) == expected
    assert len({gpu for gpu, _, _ in expected}) == 3


@pytest.mark.quick
def test_what_ranks_report_and_print_arrives(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    """While they run, too."""

    def fn(context: Any) -> None:
        for step in range(3):
            report(step=step, loss=10 * context.rank + step)
        print(f"rank {context.rank} of {context.world_size} was here")
        gate.wait()
        report(step=3, loss=0.0)

    future = pool.spmd_async(fn)
    assert eventually(lambda: len(future.metrics) == 9)
    assert eventually(lambda: future.diary.count("was here") == 3)
    assert future.state == "running"
    gate.open()
    future.result(300)
    metrics = future.metrics
    assert list(metrics.columns) == ["time", "rank", "attempt", "step", "loss"]
    assert metrics["rank"].tolist() == [rank for rank in range(3) for _ in range(4)]
    assert metrics["step"].tolist() == [0, 1, 2, 3] * 3
    assert metrics.query("rank == 2")["loss"].tolist() == [20, 21, 22, 0]
    assert [future.diary.count(f"rank {rank} of 3 was here") for rank in range(3)] == [1] * 3


def test_a_ring_of_large_tensors(pool: ParallelPool) -> None:
    """Scenario 29: 8 MB each, all at once; tensors, arrays and pickled values."""

    def fn(context: Any) -> Any:
        import numpy as np
        import torch

        right, left = (context.rank + 1) % 3, (context.rank - 1) % 3
        size = 1_000_000
        for turn in range(3):
            tensor = context.send_receive(
                torch.full((size,), 10.0 * turn + context.rank, dtype=torch.float64), right, left
            )
            array = context.send_receive(np.full(size, context.rank), right, left)
            text = context.send_receive(str(context.rank) * 8 * size, right, left)
            assert tensor.shape == (size,)
            assert bool((tensor == 10.0 * turn + left).all())
            assert bool((array == left).all())
            assert text == str(left) * 8 * size
        return left

    assert list(pool.spmd(fn)) == [2, 0, 1]


def test_an_open_chain(pool: ParallelPool) -> None:
    """Scenario 29: the ends have one neighbour only."""

    def fn(context: Any) -> Any:
        import torch

        last = context.world_size - 1
        right = None if context.rank == last else context.rank + 1
        left = None if context.rank == 0 else context.rank - 1
        got = context.send_receive(
            torch.full((1_000_000,), float(context.rank)), dst=right, src=left
        )
        return None if got is None else got.unique().tolist()

    assert list(pool.spmd(fn, workers=[2, 0, 1])) == [None, [0.0], [1.0]]


# --- values that stay -----------------------------------------------------------------------------


def load(context: Any) -> Any:
    import torch

    return torch.full((500, 500), float(context.rank))


def train(context: Any, weights: Any, step: float) -> float:
    weights += step
    return context.all_reduce(weights.mean().item())


def test_a_composite_from_its_making_to_its_end(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    """Scenario 30, with a worker that dies in between."""
    models = pool.spmd(load, workers=[0, 2])
    with pool.transfer_bytes() as moved:
        assert (
            repr(models)
            == "<Composite of 2 ranks>\n  0: Tensor (500, 500) float32\n  1: Tensor (500, 500)"
            " float32"
        )
        assert [pool.spmd(train, models, 1.0)[0] for _ in range(5)] == [3.0, 5.0, 7.0, 9.0, 11.0]
    assert max(moved.total) < 100_000, "a megabyte went by"
    assert models[1].unique().tolist() == [6.0]
    with pytest.raises(CompositeError, match="no rank 2"):
        models[2]

    os.kill(pool.workers[2].pid, signal.SIGKILL)
    check_lost(pool, models, eventually)
    models[1] = models[0]
    assert list(pool.spmd(train, models, 1.0)) == [12.0, 12.0]


def check_lost(pool: ParallelPool, models: Composite, eventually: Callable[..., bool]) -> None:
    """Rank 1 has lost its worker, which is told wherever its part is wanted; the other part is
    there.
    """
    assert eventually(lambda: not models.exists(1))
    assert models[0].unique().tolist() == [5.0]
    for use in (lambda: models[1], lambda: pool.spmd(train, models, 1.0)):
        with pytest.raises(CompositeError, match="Worker 2 was lost") as lost:
            use()
        assert lost.value.rank == 1
    assert "1: lost with worker 2" in repr(models)


# --- beside other work ----------------------------------------------------------------------------


def test_a_gang_gets_its_turn_in_a_stream_of_tasks(pool: ParallelPool) -> None:
    """Scenario 32: whoever keeps the pool busy all the time does not keep an spmd call from it."""
    stop = threading.Event()
    done = []

    def keep_busy() -> None:
        while not stop.is_set():
            done.append(len(pool.parfor(lambda x: x, 50)))

    threads = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert pool.spmd_async(add_up).result(300)[0] == 6
    finally:
        stop.set()
        for thread in threads:
            thread.join(300)
    assert set(done) == {50}


def test_calls_from_several_threads(pool: ParallelPool) -> None:
    """On overlapping workers, handed in at once: they take turns."""
    subsets = [None, [2, 1, 0], [2, 1], [0, 2]]
    expected = [6, 6, 3, 3]

    def call(number: int) -> list[int]:
        return [pool.spmd(add_up, workers=subsets[number])[0] for _ in range(5)]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(4))) == [[value] * 5 for value in expected]


@pytest.mark.quick
def test_a_call_from_the_callback_of_a_future(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    """It can be handed in there, but not waited for."""
    jobs: list[Any] = []
    problems: list[BaseException] = []

    def follow(_: Any) -> None:
        jobs.append(pool.spmd_async(add_up))
        try:
            pool.spmd(add_up)
        except InvalidValueError as error:
            problems.append(error)

    pool.parfeval(gate.wait).add_done_callback(follow)
    gate.open()
    assert eventually(lambda: problems)
    assert "spmd_async" in str(problems[0])
    assert list(jobs[0].result(300)) == [6] * 3


def test_a_part_that_is_busy_does_not_hold_up_the_other(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    """Scenario 33."""
    second, first = pool.partition(workers=[0, 1])
    holding = first.parfeval(gate.wait)
    assert eventually(lambda: holding.state == "running")
    waiting = first.spmd_async(add_up)
    assert list(second.spmd_async(add_up).result(300)) == [3] * 2
    assert second.parfor(abs, [-1, -2, -3])[:] == [1, 2, 3]
    assert waiting.state == "queued"
    gate.open()
    assert list(waiting.result(300)) == [1]


def test_two_parts_start_groups_at_the_same_time(shared_pool: ParallelPool) -> None:
    """Scenario 33: in each round both parts make a new group at once."""
    orders = [[0, 1], [1, 0]], [[2, 3], [3, 2]]

    def fn(context: Any) -> Any:
        import torch
        import torch.distributed as dist

        x = torch.tensor([1.0 + current_task().worker])
        dist.all_reduce(x)
        return x.item(), context.all_gather(current_task().worker), os.environ["MASTER_PORT"]

    with parpool(4, resources=WorkerResources(gpus=0, cpus=0.25), quiet=True) as pool:
        parts = pool.partition(workers=[0, 1])
        for turn in range(20):
            wanted = [order[turn % 2] for order in orders]
            jobs = [
                part.spmd_async(fn, workers=order)
                for part, order in zip(parts, wanted, strict=True)
            ]
            (first,), (second,) = [set(map(repr, job.result(300))) for job in jobs]
            assert first.startswith(f"(3.0, {wanted[0]}, ")
            assert second.startswith(f"(7.0, {wanted[1]}, ")
            assert first[-8:] != second[-8:]
