"""How the ranks of a new group find each other.

Rank 0 listens at a port that the system has chosen, and publishes the address through the pool's exchange. Everything after that
goes through a store of torch's. What waits in native code is done when all ranks are known to be there, and in a thread.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from raypool.spmd.addresses import LOOPBACK, free_port, knock, listen, own_address
from raypool.spmd.lines import SLICE_S, distributed
from raypool.task import Way, current_task

STORE_TIMEOUT = timedelta(seconds=60)
"""How long one question to the store may take."""


class Assignment(NamedTuple):
    """Which rank of which group a worker is; plain data, made by the driver.

    `local_rank`, `local_world_size`: on its host. `number`: of the group, unique in the pool; the same again means the group of
    the call before. `is_one_host`: all ranks are on one machine, and everything listens on the loopback only. `has_process`: the
    rank has a process of its own, whose environment and default group may be set. `key`: that the rank's value is kept under.
    `stays_warm`: the worker keeps the group for the next call.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    number: int
    is_one_host: bool
    has_process: bool
    key: str
    stays_warm: bool = True


class Announcement(NamedTuple):
    """What a rank says of itself at first: that it is there, the address of its host with a free port, and which GPU it has."""

    address: tuple[str, int]
    gpu_uuid: str | None


class Found(NamedTuple):
    """What ranks that have found each other share: a store; and the address of this one, and that of rank 0 with a free port."""

    store: Any
    address: str
    master: tuple[str, int]
    has_nccl: bool


def find_others(assignment: Assignment, way: Way) -> Found:
    """Find the other ranks, and wait until all are there. Can be interrupted."""
    try:
        with ExitStack() as stack:
            store, address = _meet_at(assignment, way)
            port = stack.enter_context(free_port(address)) if assignment.rank == 0 else 0
            announcements = _announce(store, assignment, (address, port))
    finally:
        if assignment.rank == 0:
            way.ask("meet", "remove", assignment.number)
    uuids = [entry.gpu_uuid for entry in announcements]
    has_nccl = None not in uuids and len(set(uuids)) == len(uuids)  # NCCL wants a GPU of its own for each rank
    return Found(store, address, announcements[0].address, has_nccl)


def _announce(store: Any, assignment: Assignment, address: tuple[str, int]) -> Sequence[Announcement]:
    """Say that this rank is there, and wait for all others: what follows cannot be interrupted, so all must have come."""
    store.set(f"here/{assignment.rank}", pickle.dumps(tuple(Announcement(address, _gpu_uuid(assignment)))))
    keys = [f"here/{rank}" for rank in range(assignment.world_size)]
    pause_s = 0.001
    while not store.check(keys):
        time.sleep(pause_s)  # the store's own wait with a time limit says on stderr each time that it has run out
        pause_s = min(2 * pause_s, SLICE_S)
    return [Announcement(*pickle.loads(store.get(key))) for key in keys]


def _gpu_uuid(assignment: Assignment) -> str | None:
    import torch

    if not assignment.has_process or current_task().device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _meet_at(assignment: Assignment, way: Way) -> tuple[Any, str]:
    """Return the store through which the ranks find each other, and the address of this one."""
    dist = distributed()
    if not assignment.has_process:
        return _published(assignment, way, dist.HashStore), LOOPBACK
    if assignment.rank == 0:
        address = own_address(assignment.is_one_host)
        listener = listen(address)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        way.ask("meet", "put", assignment.number, (address, port))
        return store, address
    host, port = way.ask("meet", "wait", assignment.number, None)[1]
    knock((host, port))
    store = in_thread(lambda: dist.TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
    return store, own_address(assignment.is_one_host, (host, port))


def _published(assignment: Assignment, way: Way, make: Callable[[], Any]) -> Any:
    if assignment.rank == 0:
        store = make()
        way.ask("meet", "put", assignment.number, store)
        return store
    return way.ask("meet", "wait", assignment.number, None)[1]


def in_thread(make: Callable[[], Any], discard: Callable[[Any], object] = bool) -> Any:
    """Call something that waits in native code, in a way that can be interrupted: a rank may die just then.

    What it makes when nobody waits for it any more is given to `discard`.
    """
    done, lock = threading.Event(), threading.Lock()
    made: list[Any] = []
    problems: list[BaseException] = []
    is_wanted = True

    def run() -> None:
        try:
            result = make()
            with lock:
                made.append(result)
                is_late = not is_wanted
            if is_late:
                discard(result)
        except BaseException as problem:
            problems.append(problem)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        while not done.wait(SLICE_S):
            pass
    except BaseException:
        with lock:
            is_wanted = False
            is_made = bool(made)
        if is_made:
            discard(made[0])
        raise
    if problems:
        raise problems[0]
    return made.pop()
