"""Ranks that fail, on real Ray (scenario 31): one error that names the rank, the others end, and
the next call works.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raypool import (
    CompositeError,
    LossReason,
    ParallelPool,
    RemoteTraceback,
    SpmdError,
    TaskError,
    WorkerLostError,
    current_task,
)
from raypool.errors import RankInterrupted

pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("patience")]

long = pytest.mark.long

RANKS = range(3)


@pytest.fixture(autouse=True)
def next_call_works(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, a call on all workers works, and nothing is queued or running."""
    yield
    assert list(pool.spmd(add_up)) == [6, 6, 6]
    assert list(pool.spmd(add_up_with_torch)) == [6.0, 6.0, 6.0]
    assert eventually(lambda: not pool.busy)


def pids(pool: ParallelPool) -> list[int]:
    return pool.parfeval_on_all(os.getpid).result(300)


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


def add_up_with_torch(context: Any) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor(context.rank + 1.0)
    dist.all_reduce(x)
    return x.item()


class Broken(Exception):
    """Of the user's own."""


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


# --- what a rank does to the others ---------------------------------------------------------------


def give_up(how: str) -> None:
    if how == "raise":
        raise Broken("no more memory", 7)
    if how == "os._exit":
        os._exit(4)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_in(context: Any, place: str, culprit: int) -> None:
    """Wait for the rank that will not come."""
    import torch
    import torch.distributed as dist

    if place == "all_reduce":
        context.all_reduce(torch.ones(4))
    elif place == "receive":
        context.receive(culprit)
    elif place == "torch":
        dist.all_reduce(torch.ones(4))
    elif place == "backward":
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(4, 4), process_group=context.process_group
        )
        model(torch.ones(2, 4)).sum().backward()
    elif place == "sleep":
        time.sleep(60)
    else:
        number = 0
        while True:
            number += 1


def come_to_grief(context: Any, how: str, culprit: int, place: str) -> None:
    import torch

    if context.rank == culprit:
        if place == "backward":
            # the others wait for all at that, too
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        give_up(how)
    wait_in(context, place, culprit)


def fail(pool: ParallelPool, fn: Any, *args: Any) -> SpmdError:
    """Make a call that fails, and return its error."""
    with pytest.raises(SpmdError) as caught:
        pool.spmd(fn, *args)
    return caught.value


def short(cases: set[tuple[Any, ...]], *values: Any) -> list[Any]:
    """Return all combinations of values; those that are not among these cases are for the long
    tests.
    """
    return [
        case if case in cases else pytest.param(*case, marks=long)
        for case in itertools.product(*values)
    ]


SHORT = {
    ("raise", 0, "torch"),
    ("raise", 1, "all_reduce"),
    ("os._exit", 1, "torch"),
    ("os._exit", 2, "all_reduce"),
    ("SIGKILL", 2, "torch"),
}


@pytest.mark.parametrize(
    ("how", "culprit", "place"),
    short(SHORT, ("raise", "os._exit", "SIGKILL"), RANKS, ("all_reduce", "torch")),
)
def test_one_rank_fails_while_others_wait_for_it(
    pool: ParallelPool, how: str, culprit: int, place: str
) -> None:
    """Rank 0 is like any other, though the ranks found each other through it."""
    before, kept = pids(pool), pool.spmd(lambda context: [context.rank])

    error = fail(pool, come_to_grief, how, culprit, place)

    assert set(error.failures) == {culprit}
    assert error.first_rank == culprit
    assert error.__cause__ is error.failures[culprit]
    assert str(error).startswith(f"Rank {culprit} of come_to_grief (worker {culprit}, ")
    assert "2 were interrupted because of it" in str(error)
    after = pids(pool)
    assert [a == b for a, b in zip(after, before, strict=True)] == [
        rank != culprit or how == "raise" for rank in RANKS
    ]
    if how == "raise":
        check_broken(error.__cause__)
        assert list(kept) == [[0], [1], [2]]
    else:
        check_lost(error.__cause__)
        assert [kept.exists(rank) for rank in RANKS] == [rank != culprit for rank in RANKS]
        assert [kept[rank] for rank in RANKS if rank != culprit] == [
            [rank] for rank in RANKS if rank != culprit
        ]
        with pytest.raises(CompositeError, match=f"Worker {culprit} was lost") as lost:
            kept[culprit]
        assert lost.value.rank == culprit


def check_broken(error: BaseException | None) -> None:
    assert type(error) is Broken
    assert error.args == ("no more memory", 7)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in come_to_grief" in str(error.__cause__)
    assert "in give_up" in str(error.__cause__)


def check_lost(error: BaseException | None) -> None:
    assert isinstance(error, WorkerLostError)
    assert error.reason is LossReason.EXIT


ELSEWHERE = {
    ("raise", 0, "backward"),
    ("raise", 2, "count"),
    ("SIGKILL", 2, "receive"),
    ("SIGKILL", 0, "sleep"),
}


@pytest.mark.parametrize(
    ("how", "culprit", "place"),
    short(ELSEWHERE, ("raise", "SIGKILL"), (0, 2), ("backward", "receive", "sleep", "count")),
)
def test_wherever_the_others_are(pool: ParallelPool, how: str, culprit: int, place: str) -> None:
    before = pids(pool)
    error = fail(pool, come_to_grief, how, culprit, place)
    assert set(error.failures) == {culprit}
    assert "2 were interrupted because of it" in str(error)
    (check_broken if how == "raise" else check_lost)(error.__cause__)
    assert [pid for rank, pid in enumerate(pids(pool)) if rank != culprit] == [
        pid for rank, pid in enumerate(before) if rank != culprit
    ]


@pytest.mark.parametrize("rounds", [12, pytest.param(40, marks=long)])
def test_the_one_that_failed_is_named_however_often(pool: ParallelPool, rounds: int) -> None:
    """The others are there with their broken connections at nearly the same moment, and may be
    taken for the first.
    """
    for number in range(rounds):
        error = fail(pool, come_to_grief, "raise", number % 3, ("all_reduce", "torch")[number % 2])
        assert set(error.failures) == {number % 3}, (number, str(error))


def test_two_ranks_fail(pool: ParallelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself: the first one is the cause, whatever its number, and the other one is
    counted.
    """
    # one of them is killed after that, and none of the others may be
    monkeypatch.setattr(pool._engine.backend._agents, "_cancel_grace_s", 15.0)

    def fn(context: Any) -> None:
        context.barrier()
        if context.rank == 0:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                pass
        while context.rank == 1:
            with contextlib.suppress(BaseException):  # it goes on all the same
                time.sleep(0.01)
        raise Broken(context.rank)

    error = fail(pool, fn)
    assert error.first_rank == 2
    assert error.__cause__ is error.failures[2]
    assert {rank: failure.args for rank, failure in error.failures.items()} == {0: (0,), 2: (2,)}
    assert "1 more failed, and 1 was interrupted because of it" in str(error)


def test_what_goes_wrong_while_a_rank_tidies_up(pool: ParallelPool) -> None:
    """It has not failed by itself."""

    def fn(context: Any) -> None:
        context.barrier()
        if context.rank == 2:
            raise Broken("first")
        try:
            time.sleep(60)
        finally:
            raise LookupError("while tidying up")

    error = fail(pool, fn)
    assert set(error.failures) == {2}
    assert "2 were interrupted because of it" in str(error)


def test_the_error_of_torch_is_told_where_its_group_cannot_be_made(pool: ParallelPool) -> None:
    """All ranks get one, and none of them is known to have failed: it is all that there is."""

    def break_torch() -> None:
        import torch.distributed as dist

        from raypool.spmd import group

        def make_world(*_: Any) -> None:
            raise dist.DistBackendError("NCCL error: unhandled system error")

        make_world.whole = group.make_world  # type: ignore[attr-defined]
        group.make_world = make_world

    def mend_torch() -> None:
        from raypool.spmd import group

        group.make_world = group.make_world.whole  # type: ignore[attr-defined]

    pool.parfeval_on_all(break_torch).result(300)
    try:
        workers = [worker.index for worker in pool.workers][:0:-1]
        with pytest.raises(SpmdError, match="no rank is known to have failed") as caught:
            pool.spmd(add_up, workers=workers)  # in this order: a group that is not there yet
    finally:
        pool.parfeval_on_all(mend_torch).result(300)
    text = "interrupted before it began, because .* broke: DistBackendError: NCCL error: unhandled"
    assert re.search(text, str(caught.value))
    interrupted = caught.value.__cause__
    assert isinstance(interrupted, RankInterrupted)
    assert "in make_world" in str(interrupted.__cause__), "its traceback on the worker"


@pytest.mark.quick
def test_all_ranks_fail_at_once(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        raise Broken(context.rank)

    error = fail(pool, fn)
    assert error.first_rank in error.failures
    assert {rank: failure.args for rank, failure in error.failures.items()} == {
        rank: (rank,) for rank in error.failures
    }


def test_a_rank_that_fails_in_an_except_clause_of_its_own(pool: ParallelPool) -> None:
    """Those who catch what the loss of another does to them, and raise something else, are not the
    first either.
    """

    def fn(context: Any) -> None:
        import torch
        import torch.distributed as dist

        if context.rank == 1:
            raise Broken("first")
        try:
            dist.all_reduce(torch.ones(4))
        except Exception:
            raise LookupError("of the others") from None

    error = fail(pool, fn)
    assert error.first_rank == 1
    assert type(error.__cause__) is Broken


@pytest.mark.quick
def test_an_exception_that_cannot_travel_arrives_as_text(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        if context.rank == 1:
            raise Unpicklable
        context.barrier()

    error = fail(pool, fn)
    assert set(error.failures) == {1}
    assert type(error.__cause__) is TaskError
    assert "Unpicklable" in str(error.__cause__)
    assert "in fn" in str(error.__cause__.__cause__)


@pytest.mark.quick
def test_what_a_rank_printed_last_stands_in_its_error(pool: ParallelPool) -> None:
    def fn(context: Any) -> None:
        print(f"epoch 3 on rank {context.rank}")
        if context.rank == 1:
            raise Broken("diverged")
        context.barrier()

    error = fail(pool, fn)
    notes = "\n".join(error.failures[1].__notes__)
    assert "epoch 3 on rank 1" in notes
    assert "rank 0" not in notes


# --- workers that are gone ------------------------------------------------------------------------


def test_a_worker_that_dies_while_it_is_idle(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    """The next call waits for the one that replaces it, and makes a new group."""
    before = pids(pool)
    os.kill(before[0], signal.SIGKILL)
    assert eventually(lambda: pool.workers[0].state != "idle" or pool.workers[0].pid != before[0])
    assert list(pool.spmd(lambda context: current_task().worker)) == [0, 1, 2]
    after = pids(pool)
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_a_worker_that_dies_before_anybody_knows(pool: ParallelPool) -> None:
    """The call may have it as a rank, and fail; or wait for the next one."""
    os.kill(pool.workers[2].pid, signal.SIGKILL)
    error = pool.spmd_async(add_up).exception(300)
    if error is not None:
        assert isinstance(error, SpmdError)
        assert error.first_rank == 2
        check_lost(error.__cause__)


@pytest.mark.quick
def test_a_rank_that_is_killed_in_a_collective(pool: ParallelPool) -> None:
    """The whole of it, with other ways and places, is
    `test_one_rank_fails_while_others_wait_for_it`.
    """
    error = fail(pool, come_to_grief, "SIGKILL", 0, "all_reduce")
    assert set(error.failures) == {0}
    check_lost(error.__cause__)


class Deadly:
    """Travels well, and kills whoever opens it on a certain rank."""

    def __init__(self, culprit: int) -> None:
        self.culprit = culprit

    def __reduce__(self) -> Any:
        return die_on, (self.culprit,)


def die_on(culprit: int) -> None:
    from raypool.worker.running import in_task

    if in_task() and current_task().index == culprit:
        os._exit(5)


def test_a_rank_that_dies_at_the_very_beginning(pool: ParallelPool) -> None:
    """When the group has just been made, and the function has not begun."""
    for culprit in RANKS:
        pool.spmd(lambda context: None, workers=[2, 1, 0])  # so that the group has to be made anew
        error = fail(pool, lambda context, arg: context.barrier(), Deadly(culprit))
        assert set(error.failures) == {culprit}
        check_lost(error.__cause__)


@pytest.mark.parametrize(
    "number", [1, *(pytest.param(number, marks=long) for number in (0, 2, 3, 4, 5))]
)
def test_a_worker_that_dies_at_some_moment(pool: ParallelPool, gate: Any, number: int) -> None:
    """While the ranks look for each other, meet, or end: groups are made anew all the time
    meanwhile.
    """
    culprit, before = number % 3, pool.workers

    def fall() -> None:
        gate.wait()
        time.sleep(0.02 * (number + 1))
        os._exit(6)

    def begin() -> None:
        threading.Thread(target=fall, daemon=True).start()

    pool.options(worker=culprit).parfeval(begin).result(300)
    gate.open()
    began, orders = time.monotonic(), itertools.cycle([[2, 1, 0], [0, 2, 1]])
    error = None
    while error is None and pool.workers[culprit].pid == before[culprit].pid:
        assert time.monotonic() < began + 300, "it has not died"
        order = next(orders)
        error = pool.spmd_async(add_up, workers=order).exception(300)
    if error is not None:
        assert isinstance(error, SpmdError)
        assert set(error.failures) == {order.index(culprit)}, str(error)
        check_lost(error.__cause__)
