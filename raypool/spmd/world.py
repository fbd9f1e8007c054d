"""Torch's default process group, and the environment, as a rank of an spmd call sees them while its function runs.

Between calls both are hidden, so that whatever else runs on the worker finds them as it has left them.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raypool.spmd.lines import FOR_EVER, distributed, sever

OWN_NAMES = ("TF_CONFIG",)
"""Variables that a context sets on request, and that are put back with the others."""


def make_world(store: Any, rank: int, world_size: int, has_nccl: bool) -> Any:
    """Make torch's default group. All ranks have to be known to come: this waits for them in native code."""
    import torch

    dist = distributed()
    store.set(f"names/{rank}", str(count_names()))
    let_names_begin_at(max(int(store.get(f"names/{other}")) for other in range(world_size)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=FOR_EVER,
        # With the device NCCL connects all ranks at once. Else it would connect pairs at their first message, each waiting
        # for the other, and ranks that send in a ring would wait for ever.
        device_id=torch.device("cuda", torch.cuda.current_device()) if has_nccl else None,
    )
    return dist.group.WORLD


def swap_default(group: Any) -> Any:
    """Make a group torch's default one, None for none; return the one before.

    Torch has no public way to hide its default group. The private one is what its own `init_process_group` uses.
    """
    from torch.distributed import distributed_c10d

    dist = distributed()
    before = dist.group.WORLD
    distributed_c10d._update_default_pg(group)
    return before


def count_names() -> int:
    """Return how many groups torch has named in this process. The next one has this number for its name."""
    from torch.distributed import distributed_c10d

    return int(distributed_c10d._world.group_count)


def let_names_begin_at(number: int) -> None:
    """Let torch name groups by numbers from here on, which have to be the same on all ranks: it finds the others by the name.

    They differ where one worker has made a group by itself, or was interrupted while it made one. Torch has no public way.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._world.group_count = number


def is_registered(world: Any) -> bool:
    """Whether torch still knows a group: `destroy_process_group`, called by the user, makes it forget them all.

    Torch has no public way to ask this for a group that is hidden.
    """
    from torch.distributed import distributed_c10d

    return world in distributed_c10d._world.pg_map


class Begun(NamedTuple):
    """What a rank has begun in one of torch's groups: the number of the newest collective, and what is under way.

    `ranks`: all ranks of the group. `pending`: the number of the oldest collective that is not done, 0 if all are. `operation`:
    its name. `since`: when it began (Unix time [s]).
    """

    ranks: tuple[int, ...]
    newest: int
    pending: int = 0
    operation: str = ""
    since: float = 0.0


def progress() -> str:
    """Return a text that changes when this process begins or ends a collective, in any group; "" if torch keeps no record."""
    return "".join(str(json.loads(dump).get("pg_status") or "") for dump in _flight_records(is_whole=False))


def begun_collectives(since: float) -> dict[str, Begun]:
    """Return what this process has begun in each of torch's groups since then (Unix time [s]), by backend and group name."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    ranks = {name: tuple(sorted(world.pg_group_ranks.get(group, ()))) for group, name in list(world.pg_names.items())}
    found: dict[str, Begun] = {}
    for dump in _flight_records(is_whole=True):
        for entry in json.loads(dump).get("entries", ()):
            name, at, number = entry["process_group"][0], entry["time_created_ns"] / 1e9, entry["collective_seq_id"]
            if entry["is_p2p"] or at < since or name not in ranks:
                continue
            backend, _, operation = entry["profiling_name"].partition(":")
            key = f"{backend} {name}"
            begun = found.get(key, Begun(ranks[name], 0))._replace(newest=number)
            if not begun.pending and not entry["retired"]:
                begun = begun._replace(pending=number, operation=operation, since=at)
            found[key] = begun
    return found


def _flight_records(is_whole: bool) -> Iterator[bytes]:
    """Yield what torch's flight recorders have: of gloo, of NCCL.

    Torch 2.13 writes each collective into a ring of some 2,000 entries. It has no public way to read that in the process itself.
    """
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield dump(includeCollectives=is_whole, onlyActive=False)


_closing = threading.Lock()


def close_world(world: Any) -> None:
    """Close torch's default group, and all that were made from it: whoever waits in one, here or elsewhere, fails at once.

    References to them may live on, in a model in the frames of a traceback, say: so dropping ours would not be enough.
    """
    from torch.distributed import distributed_c10d

    dist = distributed()
    with _closing:  # a rank that the thread of its watch cuts off closes the same group
        if not is_registered(world):
            return
        swap_default(world)
        try:
            for group in list(distributed_c10d._world.pg_map):
                _sever_gloo(group)
            if "nccl" in dist.get_backend_config(world):
                distributed_c10d._abort_process_group()  # destroying waits for what runs on the GPU, which waits for the others
            else:
                dist.destroy_process_group()
        finally:
            swap_default(None)


def _sever_gloo(group: Any) -> None:
    import torch

    dist = distributed()
    with contextlib.suppress(RuntimeError):  # it has nothing for CPUs
        gloo = group._get_backend(torch.device("cpu"))
        gloo = getattr(gloo, "wrapped_pg", gloo)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(gloo, dist.ProcessGroupGloo):
            sever(gloo)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in (*values, *OWN_NAMES)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_now_shown: Any = None


@contextlib.contextmanager
def shown(world: Any) -> Iterator[None]:
    """Make a group torch's default one for a while, None for none."""
    global _now_shown
    before, outer = swap_default(world), _now_shown
    _now_shown = world
    try:
        yield
    finally:
        swap_default(before)
        _now_shown = outer


def discard_world(world: Any) -> None:
    """Hide a group that has come when nobody waited for it any more: torch has made it the default one by itself."""
    if distributed().group.WORLD is world:
        swap_default(_now_shown)
    _sever_gloo(world)


def alone_in_torch() -> Any:
    """Return a group with this process only: torch's default one, which is made if there is none."""
    dist = distributed()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist.group.WORLD
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
