"""Sharing of a GPU, the worker's side: its limit of memory and, in an "auto" pool, its turns.

In such a pool an item that did not fit beside others runs again alone: it holds its GPU's file lock
exclusively, all others hold it shared. The kernel releases the locks of a worker that dies. The
driver's side is `raypool.backends.ray.card_sharing`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raypool.channel.records import Part
from raypool.gpus.devices import Inventory

PATIENCE_S = 30.0
"""How long items that wait to run alone go first [s]: what they wait for may need a newcomer."""

POLL_S = 0.01
"""How often such a newcomer looks whether it may pass [s]."""

WEIGH_S = 0.5
"""The shortest pause between two looks at the GPU [s]."""


class Sharing(NamedTuple):
    """How many workers share a GPU, and whether they take turns (in an "auto" pool)."""

    num_workers: int
    takes_turns: bool = False


class GpuLoad(NamedTuple):
    """A worker's load on its GPU after a call; None for what is not known.

    Of the GPU's memory, `used_bytes` are in use by any process, `own_bytes` by this one, and
    `overhead_bytes` of these are not torch's. `utilization`: how busy the GPU was just now.
    """

    total_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    overhead_bytes: int | None = None
    utilization: float | None = None


class GpuTurns:
    """The turns of one worker on its GPU: `device`, by index or UUID.

    `limit` is the part of the GPU's memory that the process may have now. `find_folder` finds the
    pool's folder for temporary files on this machine.
    """

    def __init__(
        self,
        inventory: Inventory,
        device: str,
        limit: float,
        find_folder: Callable[[], Path],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._inventory = inventory
        self._allocator = inventory.allocator()
        self._device = device
        self._find_folder = find_folder
        self._patience_s = patience_s
        card = inventory.find(device)
        self._used_before = None if card is None else card.used_bytes
        self.limit = limit
        self._is_only = False  # no other worker of the pool is on the GPU
        self._door = self._lock = -1  # descriptors
        self._weigh_at = 0.0

    def begin(self, part: Part) -> None:
        """Wait for the turn of a part, which may be interrupted; `end` has to follow anyway."""
        if part.turn is None:
            return
        share, is_alone = part.turn
        self._is_only = share == 1.0 and not is_alone
        if share != self.limit:
            self._allocator.limit(share)
            self.limit = share
        if self._lock < 0:
            folder, flags = self._find_folder(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            name = f"gpu-{self._device}".replace("/", "-")  # an instance may be MIG-GPU-UUID/1/0
            self._door = os.open(folder / f"{name}.door", flags, 0o600)
            self._lock = os.open(folder / f"{name}.lock", flags, 0o600)
        if is_alone:
            # the door is closed while it waits: else newcomers could keep it waiting forever
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fcntl.flock(self._door, fcntl.LOCK_UN)
            return
        if not part.is_rank:  # others of its gang may be in there already, and wait for it
            self._pass_door()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def end(self) -> None:
        """Let others have their turns, with all the memory that is not held."""
        if self._lock < 0:
            return
        # a GPU in trouble: its next user gets the error
        with contextlib.suppress(Exception):
            self._allocator.empty_cache()
        fcntl.flock(self._door, fcntl.LOCK_UN)  # closed still, if `begin` was interrupted
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def weigh(self) -> GpuLoad | None:
        """Return this worker's load on its GPU; None if that was measured just now."""
        now = time.monotonic()
        if now < self._weigh_at:
            return None
        self._weigh_at = now + WEIGH_S
        card = self._inventory.find(self._device)
        if card is None:
            return GpuLoad()
        used, before = card.used_bytes, self._used_before
        pid, processes = os.getpid(), card.processes or ()
        own = next((process.used_bytes for process in processes if process.pid == pid), None)
        if own is None and self._is_only and used is not None and before is not None:
            # in a container, NVIDIA's driver knows this process by another number
            own = max(used - before, 0)
        overhead = None if own is None else max(own - self._allocator.allocated(), 0)
        return GpuLoad(card.total_bytes, used, own, overhead, card.utilization)

    def _pass_door(self) -> None:
        """Let items that wait to run alone go first."""
        until = time.monotonic() + self._patience_s
        # in small steps, since `flock` has no time limit
        while time.monotonic() < until:
            try:
                fcntl.flock(self._door, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                fcntl.flock(self._door, fcntl.LOCK_UN)
                return
