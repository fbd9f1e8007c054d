"""The process group of the ranks, on real Ray: warm from call to call, hidden in between, on the
loopback only; nothing leaks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from raypool import ParallelPool, SpmdContext

pytest.importorskip("torch")


SPARE = 4
"""Ray opens a connection or a thread of its own now and then."""


@pytest.fixture(autouse=True)
def next_call_works(pool: ParallelPool) -> Iterator[None]:
    yield
    assert list(pool.spmd(add_up)) == [(6, 6.0)] * 3


def add_up(context: Any) -> tuple[int, float]:
    """Through the context, and through torch's default group."""
    import torch
    import torch.distributed as dist

    x = torch.tensor(context.rank + 1.0)
    dist.all_reduce(x)
    return context.all_reduce(context.rank + 1), x.item()


def look_inside(context: Any) -> dict[str, Any]:
    from raypool.spmd.group import _here

    assert add_up(context)[0] == sum(range(context.world_size + 1))
    return {
        "number": _here.group.assignment.number,
        "port": os.environ["MASTER_PORT"],
        "pid": os.getpid(),
        "torch": id(context.process_group),
        **count(),
    }


def count() -> dict[str, int]:
    """Count what a process could leak."""
    process = psutil.Process()
    return {
        "sockets": len(process.net_connections("inet")),
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "pid": os.getpid(),
    }


# --- warm -----------------------------------------------------------------------------------------


def test_many_calls_use_one_group(pool: ParallelPool, eventually: Callable[..., bool]) -> None:
    seen = [list(pool.spmd(look_inside)) for _ in range(50)]
    for rank in range(3):
        for name in ("number", "port", "pid", "torch"):
            assert len({call[rank][name] for call in seen}) == 1, name

    def is_steady() -> bool:
        seen[10:] = [list(pool.spmd(look_inside))]
        return all(
            now[name] <= early[name] + SPARE
            for early, now in zip(seen[9], seen[-1], strict=True)
            for name in ("sockets", "files", "threads")
        )

    assert eventually(is_steady), (seen[9], seen[-1])


def test_groups_that_alternate_leave_nothing_behind(
    pool: ParallelPool, eventually: Callable[..., bool]
) -> None:
    """What a group that is of no use any more has left open is closed some seconds later, in the
    next call.
    """
    subsets = ([0, 1, 2], [2, 1], [1, 0], [2, 1, 0])
    before = pool.parfeval_on_all(count).result(300)
    numbers = [pool.spmd(look_inside, workers=subsets[turn % 4])[0]["number"] for turn in range(40)]
    assert len(set(numbers)) == 40

    def are_few() -> bool:
        pool.spmd(add_up)
        now = pool.parfeval_on_all(count).result(300)
        return all(
            each[name] <= start[name] + 20
            for start, each in zip(before, now, strict=True)
            for name in ("sockets", "threads")
        )

    assert eventually(are_few), pool.parfeval_on_all(count).result(300)


def test_failures_leave_nothing_behind(pool: ParallelPool, eventually: Callable[..., bool]) -> None:
    def fail(context: Any, culprit: int) -> None:
        import torch
        import torch.distributed as dist

        dist.new_group([0, 1])
        if context.rank == culprit:
            raise LookupError
        dist.all_reduce(torch.ones(3))

    def rounds(number: int) -> None:
        for turn in range(number):
            with pytest.raises(Exception, match="LookupError"):
                pool.spmd(fail, turn % 3)

    rounds(3)
    before = pool.parfeval_on_all(count).result(300)
    rounds(15)
    after: list[dict[str, int]] = []

    def is_as_before() -> bool:
        after[:] = pool.parfeval_on_all(count).result(300)
        return all(
            end[name] <= start[name] + SPARE
            for start, end in zip(before, after, strict=True)
            for name in ("sockets", "files", "threads")
        )

    assert eventually(is_as_before), (before, after)
    assert [end["pid"] for end in after] == [start["pid"] for start in before]


# --- hidden ---------------------------------------------------------------------------------------


@pytest.mark.quick
def test_between_calls_there_is_no_group(pool: ParallelPool) -> None:
    """Other work may make one of its own, and destroy it; the ranks' is not touched."""

    def alone(item: int) -> Any:
        import torch
        import torch.distributed as dist

        before = dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.tensor(float(item))
        dist.all_reduce(x)
        dist.destroy_process_group()
        return before, x.item(), "RANK" in os.environ, "MASTER_PORT" in os.environ

    first = list(pool.spmd(look_inside))
    assert list(pool.parfor(alone, 9)) == [(False, float(item), False, False) for item in range(9)]
    again = list(pool.spmd(look_inside))
    assert [rank["number"] for rank in again] == [rank["number"] for rank in first]


def test_a_group_that_a_task_leaves_open_is_its_own(pool: ParallelPool) -> None:
    def open_one() -> int:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist.get_world_size()

    def size_and_close() -> int:
        import torch.distributed as dist

        size = dist.get_world_size()
        dist.destroy_process_group()
        return size

    assert pool.parfeval_on_all(open_one).result(300) == [1, 1, 1]
    assert list(pool.spmd(add_up)) == [(6, 6.0)] * 3
    assert pool.parfeval_on_all(size_and_close).result(300) == [1, 1, 1]
    assert list(pool.spmd(add_up)) == [(6, 6.0)] * 3


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_group_that_one_worker_has_left(pool: ParallelPool, is_warm: bool) -> None:
    """Torch numbers the groups of a process, and ranks find each other by these numbers: they have
    to agree all the same.
    """

    def make_some() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(3):
            dist.new_group([0])

    def close_all() -> None:
        import torch.distributed as dist

        # torch closes all groups of a process with the ranks' own one, when that is replaced
        if dist.is_initialized():
            dist.destroy_process_group()

    def pair(context: Any) -> float:
        import torch
        import torch.distributed as dist

        x = torch.tensor(context.rank + 1.0)
        dist.all_reduce(x, group=dist.new_group([0, 1, 2]))
        return x.item()

    order = [0, 1, 2] if is_warm else [2, 1, 0]
    pool.spmd(add_up)
    pool.options(worker=1).parfeval(make_some).result(300)
    for _ in range(2):
        assert list(pool.options(timeout_s=120).spmd(pair, workers=order)) == [6.0] * 3
    pool.options(worker=1).parfeval(close_all).result(300)
    assert list(pool.options(timeout_s=120).spmd(pair, workers=order)) == [6.0] * 3


@pytest.mark.parametrize("who", [[0], [1, 2]])
def test_a_function_that_destroys_the_default_group(pool: ParallelPool, who: list[int]) -> None:
    """Scripts for torchrun end with that. The next call has a new one."""

    def fn(context: Any) -> int:
        import torch.distributed as dist

        total = context.all_reduce(1)
        if context.rank in who:
            dist.destroy_process_group()
        return total + context.all_reduce(1)

    for _ in range(3):
        assert list(pool.spmd(fn)) == [6] * 3
        assert list(pool.spmd(add_up)) == [(6, 6.0)] * 3


@pytest.mark.quick
def test_the_default_group_is_torchs_own(pool: ParallelPool) -> None:
    def fn(context: Any) -> Any:
        import torch
        import torch.distributed as dist

        pair = dist.new_group([0, 2])
        x = torch.tensor(context.rank + 1.0)
        if context.rank != 1:
            dist.all_reduce(x, group=pair)
        return (
            context.process_group is dist.group.WORLD,
            dist.get_rank() == context.rank,
            dist.get_world_size(),
            dist.get_backend(),
            x.item(),
        )

    assert [seen[:3] for seen in pool.spmd(fn)] == [(True, True, 3)] * 3
    assert [seen[3:] for seen in pool.spmd(fn)] == [("gloo", 4.0), ("gloo", 2.0), ("gloo", 4.0)]


# --- the environment ------------------------------------------------------------------------------

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.quick
def test_the_environment_is_that_of_torchrun(pool: ParallelPool) -> None:
    def fn(context: Any) -> dict[str, str]:
        return {name: os.environ[name] for name in NAMES}

    def look() -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    def set_own(value: str) -> None:
        os.environ["RANK"] = value

    def remove_own() -> None:
        del os.environ["RANK"]

    pool.parfeval_on_all(set_own, "mine").result(300)
    seen = list(pool.spmd(fn))
    for rank, names in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
        }
        assert {name: names[name] for name in expected} == expected
        assert names["MASTER_ADDR"] == "127.0.0.1"
    ports = {names["MASTER_PORT"] for names in seen}
    assert len(ports) == 1
    assert pool.parfeval_on_all(look).result(300) == [dict.fromkeys(NAMES) | {"RANK": "mine"}] * 3
    others = {
        pool.spmd(fn, workers=order)[0]["MASTER_PORT"] for order in ([2, 1, 0], [1, 0, 2], [0, 2])
    }
    # not four: a port that is free again may be drawn again
    assert len(others | ports) > 1, "the port is always the same"
    pool.parfeval_on_all(remove_own).result(300)


def test_what_is_in_the_environment_makes_a_group(pool: ParallelPool) -> None:
    """A script that is written for torchrun finds the others by it, beside the group that is there.

    The port is held for it: it must not be given to another process meanwhile.
    """

    def fn(context: Any) -> Any:
        import torch
        import torch.distributed as dist

        dist.destroy_process_group()
        if context.rank == 0:
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        dist.init_process_group("gloo")
        x = torch.tensor(context.rank + 1.0)
        dist.all_reduce(x)
        # gloo drops what a rank has not read yet when another one closes the connection
        context.barrier()
        dist.destroy_process_group()
        return x.item()

    assert list(pool.spmd(fn)) == [6.0] * 3


def test_nobody_outside_this_machine_can_connect(
    pool: ParallelPool, make_gate: Callable[[], Any]
) -> None:
    """Whatever the ranks listen at, they do on the loopback."""

    def fn(context: Any) -> int:
        import torch.distributed as dist

        dist.new_group([0, 1])
        context.barrier()
        if context.rank == 0:
            inside.open()
        going_on.wait()
        return os.getpid()

    inside, going_on = make_gate(), make_gate()
    before = {pid: listeners(pid) for pid in pool.parfeval_on_all(os.getpid).result(300)}
    future = pool.spmd_async(fn, workers=[2, 0])  # a new group
    inside.wait()
    during = {pid: listeners(pid) for pid in before}
    going_on.open()
    assert set(future.result(300)) < set(before)
    new = {
        address
        for pid in before
        for address in (*during[pid], *listeners(pid))
        if address not in before[pid]
    }
    assert new, "nobody listens at all"
    assert {ip for ip, _ in new} <= {"127.0.0.1", "::1"}


def listeners(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {
        (entry.laddr.ip, entry.laddr.port)
        for entry in connections
        if entry.status == psutil.CONN_LISTEN
    }


# --- by itself ------------------------------------------------------------------------------------


def test_a_function_runs_by_itself_as_on_one_rank(pool: ParallelPool) -> None:
    def train(context: Any, steps: int) -> Any:
        import numpy as np
        import torch

        torch.manual_seed(3 + context.rank)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(3, 1), process_group=context.process_group
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(context.all_reduce(loss.item(), op="mean"))
        context.barrier()
        return (
            losses,
            context.all_gather(np.arange(3))[0].tolist(),
            context.broadcast({"rank": context.rank}, src=0),
            context.scatter([7], src=0),
            context.gather("a", dst=0),
            context.send_receive(1, dst=None, src=None),
            (context.rank, context.world_size, context.local_rank),
        )

    (there,) = pool.spmd(train, 4, workers=1)
    import torch.distributed as dist

    try:
        here = train(SpmdContext(), 4)
    finally:
        dist.destroy_process_group()
    assert here == there
    assert here[0][-1] < here[0][0]
