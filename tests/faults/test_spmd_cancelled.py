"""Calls that are cancelled at any moment, groups that come and go, contexts that are used too late:
the next call works.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import psutil
import pytest

from raypool import InvalidValueError, ParallelPool, SpmdError, parpool

SUBSETS = ([0, 1, 2], [1, 0], [1, 2])


def count(context: Any) -> int:
    return context.all_reduce(1)


def left_behind() -> tuple[bool, list[str]]:
    import torch.distributed

    return torch.distributed.is_initialized(), [
        name for name in ("RANK", "MASTER_PORT", "WORLD_SIZE") if name in os.environ
    ]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=pytest.mark.long)])
def test_a_call_that_is_cancelled_at_any_moment_leaves_nothing_behind(
    pool: ParallelPool, rounds: int
) -> None:
    chance = random.Random(7)
    pool.spmd(count)
    pids = pool.parfeval_on_all(os.getpid).result(300)
    for number in range(rounds):
        workers = SUBSETS[number % 3]
        job = pool.spmd_async(count, workers=workers)
        threading.Event().wait(chance.uniform(0, 0.06))
        job.cancel()
        other = SUBSETS[chance.randrange(3)]
        assert list(pool.options(timeout_s=300).spmd(count, workers=other)) == [len(other)] * len(
            other
        )
        assert pool.parfeval_on_all(left_behind).result(300) == [(False, [])] * 3
    assert pool.parfeval_on_all(os.getpid).result(300) == pids, (
        "a worker has not heard that it was cancelled, and was killed"
    )


def test_groups_that_come_and_go_take_a_limited_number_of_descriptors() -> None:
    process = psutil.Process()
    before = process.num_fds()
    most = 0
    with parpool(3, profile="threads", quiet=True) as pool:
        for number in range(60):
            workers = SUBSETS[number % 3]
            assert pool.spmd(count, workers=workers)[0] == len(workers)
            most = max(most, process.num_fds() - before)
    assert most < 400


def test_a_context_ends_with_its_call(pool: ParallelPool) -> None:
    kept = pool.spmd(lambda context: {"context": context})

    def use(context: Any, kept: dict[str, Any]) -> str:
        with pytest.raises(InvalidValueError, match="This call has ended"):
            kept["context"].all_reduce(1)
        return f"{context.rank} of {context.world_size}"

    assert list(pool.spmd(use, kept)) == ["0 of 3", "1 of 3", "2 of 3"]


def test_ctrl_c_in_a_rank_of_a_pool_in_processes_is_a_failure_of_that_rank(
    pool: ParallelPool,
) -> None:
    def interrupted(context: Any) -> None:
        if context.rank == 1:
            raise KeyboardInterrupt
        context.barrier()

    for _ in range(3):
        with pytest.raises(SpmdError, match="Rank 1"):
            pool.spmd(interrupted)


@pytest.mark.quick
def test_ctrl_c_inline_is_ctrl_c() -> None:
    def interrupted(context: Any) -> None:
        raise KeyboardInterrupt

    with parpool(1, profile="inline", quiet=True) as pool, pytest.raises(KeyboardInterrupt):
        pool.spmd(interrupted)
