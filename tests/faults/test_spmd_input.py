"""What ranks bring that does not fit together, or cannot travel, on real Ray: each its error, and
no worker is lost by it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import CollectiveError, ParallelPool, SerializationError, SpmdError

pytest.importorskip("torch")

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("patience")]


@pytest.fixture(autouse=True)
def next_call_works(pool: ParallelPool) -> Iterator[None]:
    """After whatever it was, all workers are the same, and a call on them works."""
    before = pids(pool)
    yield
    assert list(pool.spmd(lambda context: context.all_reduce(context.rank + 1))) == [6, 6, 6]
    assert pids(pool) == before


def pids(pool: ParallelPool) -> list[int]:
    return pool.parfeval_on_all(os.getpid).result(300)


def fail(pool: ParallelPool, fn: Any, *args: Any) -> SpmdError:
    with pytest.raises(SpmdError) as caught:
        pool.options(timeout_s=300).spmd(fn, *args)
    return caught.value


# --- collectives that do not match ----------------------------------------------------------------


def test_a_rank_that_skips_the_collective_and_returns(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        return None if context.rank == 1 else context.all_reduce(1)

    error = fail(pool, fn)
    assert isinstance(error.__cause__, CollectiveError)
    assert error.__cause__.missing == (1,)
    assert "Rank 1 has ended, ranks 0 and 2 wait for it in all_reduce" in str(error)


def test_a_rank_that_joins_another_collective(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        return context.all_gather(1) if context.rank == 2 else context.all_reduce(1)

    error = fail(pool, fn)
    assert isinstance(error.__cause__, CollectiveError)
    assert "anks 0 and 1 are in all_reduce, rank 2 is in all_gather" in str(error)


@pytest.mark.ci
def test_a_rank_that_never_sends(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        return context.receive(src=1) if context.rank == 0 else None

    error = fail(pool, fn)
    assert isinstance(error.__cause__, CollectiveError)
    assert error.__cause__.missing == (1,)
    assert "Rank 1 has ended" in str(error)


def one_batch_more(context: Any) -> None:
    """Train with DDP; the last rank has a batch more than the others."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(3 if context.rank == 2 else 2):
        model(torch.ones(2, 4)).mean().backward()


def barrier_on_one_rank(context: Any) -> None:
    import torch
    import torch.distributed as dist

    if context.rank == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(2))


def barriers_of_two_kinds(context: Any) -> None:
    import torch.distributed as dist

    if context.rank == 1:
        dist.barrier()
    else:
        context.barrier()


@pytest.mark.parametrize(
    ("fn", "places"),
    [
        (
            one_batch_more,
            [
                "Ranks 0 and 1 have ended at",
                "rank 2 has been in torch.distributed.all_reduce since",
            ],
        ),
        (
            barrier_on_one_rank,
            [
                "Rank 0 has been in torch.distributed.barrier",
                "been in torch.distributed.all_reduce since",
            ],
        ),
        (
            barriers_of_two_kinds,
            [
                "in barrier (the 1st operation of this call)",
                "rank 1 has been in torch.distributed.barrier",
            ],
        ),
    ],
)
def test_ranks_that_wait_for_each_other_in_different_places(
    pool: ParallelPool,
    fn: Any,
    places: list[str],
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    """Torch's collectives have no time limit; the driver is warned, and the call fails, naming who
    waits where.
    """
    with pytest.raises(SpmdError) as caught:
        pool.options(mismatch_timeout_s=2).spmd(fn)
    assert isinstance(caught.value.__cause__, CollectiveError)
    # it comes by another way than the error
    assert eventually(lambda: "They wait for each other" in caplog.text)
    (warning,) = (text for text in caplog.messages if "They wait for each other" in text)
    for place in [*places, "drop_last=True", "mismatch_timeout_s=2"]:
        assert place in warning
        assert place in str(caught.value)


# --- what cannot travel ---------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent(pool: ParallelPool) -> None:
    with pytest.raises(SerializationError, match="lock"):
        pool.spmd(lambda context, lock: None, threading.Lock())


def test_a_function_that_cannot_be_sent(pool: ParallelPool) -> None:
    door = threading.Lock()
    with pytest.raises(SerializationError, match="door"):
        pool.spmd(lambda context: door.locked())


def test_an_argument_that_cannot_be_opened_there(pool: ParallelPool) -> None:
    """All ranks fail in it, and none of them has to be killed for it."""
    home = os.getpid()

    class FailsToOpen:
        def __reduce__(self) -> Any:
            return explode, (home,)

    def explode(home: int) -> str:
        if os.getpid() != home:
            raise OSError("cannot be opened here")
        return "at home"

    error = fail(pool, lambda context, arg: None, FailsToOpen())
    assert isinstance(error.__cause__, OSError)


def test_a_result_that_cannot_be_sent_stays_and_says_so_when_read(pool: ParallelPool) -> None:
    composite = pool.spmd(lambda context: threading.Lock())
    with pytest.raises(SerializationError, match="lock"):
        composite[1]
    assert (
        list(pool.spmd(lambda context, lock: lock.acquire(blocking=False), composite)) == [True] * 3
    )
