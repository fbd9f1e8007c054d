"""Claims on GPUs that the user has chosen.

Ray gives out GPUs without being asked for a particular one. So, in rounds, all that are free are claimed, each claim is asked
which GPU it got, and those that were not meant are given back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import ray

from raypool.devices.gpus import Inventory, index_of
from raypool.engine.claims import POLL_S, Claim, Demand, Wanted, held_by, holders, is_ready, release_all, request
from raypool.errors import ResourceError

PROBE_TIMEOUT_S = 10.0

ROUND_S = 1.0
"""How long to hold on to GPUs that are not meant while the one that is might still turn up [s]."""

_choosing = threading.Lock()  # two pools of this process that choose at once would hold what the other wants


class Choice:
    """Certain GPUs of a node.

    Args:
        demand: What is claimed with each of them.
        indices: Which these are.
        inventory: Who knows the GPUs of a machine.
    """

    def __init__(self, demand: Demand, indices: Sequence[int], inventory: Inventory) -> None:
        self._demand = demand
        self._indices = indices
        self._inventory = inventory
        self._node_id = ray.get_runtime_context().get_node_id()
        self._total = int(next(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == self._node_id))
        self._found: dict[int, Claim] = {}
        self._seen: set[int] = set()  # those that were free

    def claim(self, wanted: Wanted, besides: Sequence[Claim] = ()) -> list[Claim]:
        """Claim them.

        Raises:
            ResourceError: One of them does not exist, or is not free in time; nothing is kept, nor what was claimed `besides`.
        """
        indices, found, seen, total = self._indices, self._found, self._seen, self._total
        try:
            if len(indices) > total:
                raise _no_such_gpus([index for index in indices if index >= total] or indices, range(total), total)
            while not self._is_complete and len(seen) < total:
                with _choosing:
                    self._go_round()
                if self._is_complete or wanted.is_over():
                    break
                time.sleep(random.uniform(0.01, 0.1))  # another process may be choosing too: let it
            missing = [index for index in indices if index not in found]
            if missing and len(seen) == total:
                raise _no_such_gpus([index for index in missing if index not in seen] or missing, sorted(seen), total)
            if missing:
                release_all([*found.values(), *besides])  # before it is said who holds any
                raise _gpus_in_use(indices, missing, sorted(seen))
        except BaseException:
            release_all([*found.values(), *besides])
            raise
        return [found[index] for index in indices]

    @property
    def _is_complete(self) -> bool:
        return set(self._indices) <= set(self._found)

    def _go_round(self) -> None:
        """Claim what is free, keep what is wanted of it, and note what was free."""
        claims: list[Claim] = []
        deadline = time.monotonic() + ROUND_S
        try:
            claims += (request(self._demand, self._node_id) for _ in range(self._total - len(self._found)))
            while claims and time.monotonic() < deadline and not self._is_complete:
                for claim in [claim for claim in claims if claim.gpu is None and is_ready(claim)]:
                    claim.gpu = _gpu_of(claim, self._inventory)
                    if claim.gpu is None:
                        return  # the machine is very busy; in the next round, with another claim
                    self._seen.add(claim.gpu)
                    if claim.gpu in self._indices and claim.gpu not in self._found:
                        claims.remove(claim)
                        self._found[claim.gpu] = claim
                if all(claim.gpu is not None for claim in claims):
                    break
                time.sleep(POLL_S)
        finally:
            for claim in claims:
                claim.release()


def _visible_gpu(inventory: Inventory) -> int:
    device = str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
    return index_of(device, inventory.find(device))


def _gpu_of(claim: Claim, inventory: Inventory) -> int | None:
    """Ask a claim which GPU it got; None if no answer comes."""
    probe = ray.remote(num_cpus=0, num_gpus=0.0001, scheduling_strategy=claim.strategy())(_visible_gpu)
    try:
        return int(ray.get(probe.remote(inventory), timeout=PROBE_TIMEOUT_S))
    except ray.exceptions.GetTimeoutError:
        return None


def _gpus_in_use(indices: Sequence[int], missing: Sequence[int], free: Sequence[int]) -> ResourceError:
    names = holders()
    there = len(indices) - len(missing)
    return ResourceError(
        f"GPU {', '.join(map(str, missing))} is in use: requested {len(indices)}, available {there} "
        f"(of this machine's GPUs, {list(free)} are free). {held_by(names)}",
        requested=len(indices),
        available=there,
        holders=names,
    )


def _no_such_gpus(missing: Sequence[int], known: Sequence[int], total: int) -> ResourceError:
    return ResourceError(
        f"GPU {', '.join(map(str, missing))} does not exist here: this machine has {total}"
        f"{', numbered ' + ', '.join(map(str, known)) if list(known) != list(missing) else ''}. "
        "GPUs are numbered from 0, as nvidia-smi shows them.",
        requested=len(missing),
        available=total,
        holders=(),
    )
