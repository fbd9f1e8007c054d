"""How the ranks of a new group find each other.

Torch makes groups through a store. Rank 0 opens one: a file that only this user can read if all ranks are on one machine,
otherwise a TCP port. The ranks learn its address through the pool's exchange, which requires Ray's token. Strangers can
write to a TCP store, so nothing from it is unpickled. Through the exchange the ranks also learn a secret, with which they
sign their messages. Calls that wait in native code run in a thread, and only after all ranks have arrived.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from raypool.folders import folder_of_process, make_private
from raypool.spmd.addresses import LOOPBACK, hold_port, knock, listen, own_address
from raypool.spmd.lines import SLICE_S, distributed
from raypool.task import current_task
from raypool.worker.running import Way, note_here

STORE_TIMEOUT = timedelta(seconds=60)
"""How long one question to the store may take."""


class Assignment(NamedTuple):
    """Which rank of which group a worker is; plain data, made by the driver.

    `local_rank`, `local_world_size`: on its host. `number`: of the group, unique in the pool; the same again means the group of
    the call before. `is_one_host`: all ranks are on one machine, and everything listens on the loopback only. `has_process`: the
    rank has a process of its own, whose environment and default group may be set. `key`: that the rank's value is kept under.
    `stays_warm`: the worker keeps the group for the next call. `mismatch_timeout_s`: of the call's `Options`.
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
    mismatch_timeout_s: float | None = None


class Invitation(NamedTuple):
    """What rank 0 tells the others.

    `store`: its address or file, or the store itself if ranks are threads. `master`: an address, and a port held for torch.
    `secret`: the ranks sign their messages with it.
    """

    store: Any
    master: tuple[str, int]
    secret: bytes


class Found(NamedTuple):
    """The store of a new group, the address of this rank, and what rank 0 has told."""

    store: Any
    address: str
    invitation: Invitation
    has_nccl: bool


def find_others(assignment: Assignment, way: Way, held: ExitStack) -> Found:
    """Find the other ranks, and wait until all are there. Can be interrupted. `held` keeps the port that torch may listen at."""
    store, address, invitation, port = None, "", None, 0
    if assignment.rank == 0:
        store, place, address = _open_store(assignment)
        if assignment.has_process:
            holder, port = hold_port(address)
            held.enter_context(holder)
        invitation = Invitation(place, (address, port), secrets.token_bytes(32))
    said = _gpu_uuid(assignment), None if invitation is None else tuple(invitation)  # plain data for the exchange
    met = way.ask("meet", assignment.number, assignment.rank, assignment.world_size, said)
    if invitation is None:
        invitation = Invitation(*met[0][1])
        store, address = _join_store(assignment, invitation.store)
    uuids = [gpu_uuid for gpu_uuid, _ in met]
    has_nccl = None not in uuids and len(set(uuids)) == len(uuids)  # NCCL wants a GPU of its own for each rank
    return Found(store, address, invitation, has_nccl)


def _gpu_uuid(assignment: Assignment) -> str | None:
    import torch

    if not assignment.has_process or current_task().device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _open_store(assignment: Assignment) -> tuple[Any, Any, str]:
    """Return a new store, its place for the other ranks, and the address of this rank."""
    dist = distributed()
    if not assignment.has_process:
        store = dist.HashStore()
        return store, store, LOOPBACK
    if assignment.is_one_host:
        file = _new_file()
        return _store_in(file), file, LOOPBACK
    address = own_address(is_one_host=False)
    listener = listen(address)
    port = listener.getsockname()[1]
    store = dist.TCPStore(address, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, (address, port), address


def _join_store(assignment: Assignment, place: Any) -> tuple[Any, str]:
    """Return the store that rank 0 has opened, and the address of this rank."""
    if not assignment.has_process:
        return place, LOOPBACK
    if assignment.is_one_host:
        return _store_in(place), LOOPBACK
    host, port = place
    knock((host, port))
    store = in_thread(lambda: distributed().TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
    return store, own_address(is_one_host=False, towards=(host, port))


def _new_file() -> str:
    """Return the name of a file that is removed with the pool. Removed earlier, it would hang native code that uses the store."""
    note = note_here()
    folder = folder_of_process() if note is None or note.folders is None else note.folders.temporary()
    return str(make_private(folder / "groups") / uuid.uuid4().hex)


def _store_in(file: str) -> Any:
    store = distributed().FileStore(file)
    store.set_timeout(STORE_TIMEOUT)
    return store


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
