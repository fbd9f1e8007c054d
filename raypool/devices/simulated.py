"""GPUs that do not exist, for tests: a folder says what there is, and processes note there what they take of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from raypool.devices.gpus import GpuDevice, GpuProcess

CONTEXT_BYTES = 400 * 2**20
"""A process that uses a simulated GPU takes so much of it beside what it allocates [bytes]."""


class SimulatedGpus:
    """Cards whose state is in a folder, which all processes of this machine see; see `Inventory`.

    A worker's card is the first in its CUDA_VISIBLE_DEVICES. What a process has allocated goes when the process ends.

    Args:
        folder: Where their state is kept; made if it is not there.
        cards: What there is: a number of cards of 16 GiB, or what each is. None: what the folder says.

    Example:
        >>> import tempfile
        >>> gpus = SimulatedGpus(Path(tempfile.mkdtemp()), 2)
        >>> gpus.change(1, utilisation=0.5)
        >>> [(card.index, card.free_bytes // 2**30, card.utilisation) for card in gpus.devices()]
        [(0, 16, 0.0), (1, 16, 0.5)]
    """

    def __init__(self, folder: Path, cards: int | Sequence[GpuDevice] | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(cards, int):
            cards = [
                GpuDevice(
                    index=index,
                    name="Simulated GPU",
                    uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
                    total_bytes=16 * 2**30,
                    used_bytes=0,
                    utilisation=0.0,
                    temperature_c=30.0,
                    processes=(),
                    mig=(),
                    compute_mode="default",
                    compute_capability=(9, 0),
                )
                for index in range(cards)
            ]
        if cards is not None:
            self._write([dataclasses.asdict(card) for card in cards])

    # --- what a test does to them -------------------------------------------------------------------------------------

    def change(self, index: int, **fields: Any) -> None:
        """Let something be otherwise: `used_bytes` is what others use, outside of the pool; None stands for unknown."""
        cards = self._read()
        cards[index].update(fields)
        self._write(cards)

    def break_down(self, is_broken: bool = True) -> None:
        """Let nothing be known of any card any more, but its index; or let all be well again."""
        if is_broken:
            (self._folder / "broken").touch()
        else:
            (self._folder / "broken").unlink(missing_ok=True)

    def allocate(self, num_bytes: int) -> SimulatedTensor:
        """Take memory of this process's card.

        Raises:
            torch.OutOfMemoryError: There is not so much, or this process may not have so much.
        """
        return self.allocator().allocate(num_bytes)

    # --- what everybody sees ------------------------------------------------------------------------------------------

    def devices(self) -> list[GpuDevice]:
        """Return all cards."""
        if (self._folder / "broken").exists():
            return [GpuDevice(index=card["index"]) for card in self._read()]
        return [self._seen(card) for card in self._read()]

    def find(self, device: str) -> GpuDevice | None:
        """Return the card that is named so."""
        for card in self.devices():
            if device in (str(card.index), card.uuid, *(card.mig or ())):
                return card
        return None

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return how much memory of these cards is in use."""
        used = [card.used_bytes for card in self.devices() if card.index in indices]
        return None if len(used) < len(set(indices)) or None in used else sum(filter(None, used))

    def allocator(self) -> SimulatedAllocator:
        """Return this process's."""
        key = str(self._folder), os.getpid()
        if key not in _allocators:
            _allocators[key] = SimulatedAllocator(self)
        return _allocators[key]

    def held_by_process(self, index: int) -> dict[int, int]:
        """Return how much memory of a card each process has [bytes], by process."""
        held = {}
        for path in self._folder.glob(f"held-{index}-*"):
            _, _, pid, started = path.name.split("-")
            with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):  # it has just ended
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE and f"{process.create_time():.2f}" == started:
                    held[int(pid)] = int(path.read_text())
        return held

    def hold(self, index: int, num_bytes: int) -> None:
        """Note how much memory of a card this process has."""
        name = f"held-{index}-{os.getpid()}-{psutil.Process().create_time():.2f}"
        draft = self._folder / f".{name}"
        draft.write_text(str(num_bytes))
        draft.replace(self._folder / name)

    def _seen(self, card: dict[str, Any]) -> GpuDevice:
        held = self.held_by_process(card["index"])
        fields = dict(card)
        if card["used_bytes"] is not None:
            fields["used_bytes"] = card["used_bytes"] + sum(held.values())
        if card["processes"] is not None:
            others = [GpuProcess(**entry) for entry in card["processes"]]
            fields["processes"] = (*others, *(GpuProcess(pid=pid, used_bytes=used) for pid, used in held.items()))
        for name in ("mig", "compute_capability"):
            fields[name] = None if card[name] is None else tuple(card[name])
        return GpuDevice(**fields)

    def _read(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = json.loads((self._folder / "cards.json").read_text())
        return cards

    def _write(self, cards: Sequence[dict[str, Any]]) -> None:
        draft = self._folder / f".cards-{os.getpid()}"
        draft.write_text(json.dumps(cards))
        draft.replace(self._folder / "cards.json")


class SimulatedAllocator:
    """Takes memory of a simulated card for this process, and keeps for later what was given back; see `Allocator`."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus
        self._allocated = 0
        self._reserved = 0
        self._peak = 0
        self._is_in_use = False

    @property
    def is_in_use(self) -> bool:
        """Whether anything was ever allocated."""
        return self._is_in_use

    def allocated(self) -> int:
        """Return how much memory is in use."""
        return self._allocated

    def peak(self) -> int:
        """Return the most that was taken."""
        return self._peak

    def reset_peak(self) -> None:
        """Begin to measure `peak` from now."""
        self._peak = self._reserved

    def empty_cache(self) -> None:
        """Give back what is kept for later."""
        self._reserved = self._allocated
        if self._is_in_use:
            self._note()

    def allocate(self, num_bytes: int) -> SimulatedTensor:
        """Take memory; see `SimulatedGpus.allocate`."""
        import torch

        self._is_in_use = True
        more = max(self._allocated + num_bytes - self._reserved, 0)
        card = self._gpus.find(str(self._index()))
        free = None if card is None else card.free_bytes
        before = self._gpus.held_by_process(self._index()).get(os.getpid(), 0)
        needed = self._reserved + more + CONTEXT_BYTES - before
        if free is not None and needed > free:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes, {free} are free (simulated).")
        self._allocated += num_bytes
        self._reserved += more
        self._peak = max(self._peak, self._reserved)
        self._note()
        return SimulatedTensor(self, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Let memory be free for whatever this process allocates next."""
        self._allocated -= num_bytes

    def _index(self) -> int:
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        card = self._gpus.find(device)
        return card.index if card is not None else int(device)

    def _note(self) -> None:
        self._gpus.hold(self._index(), self._reserved + CONTEXT_BYTES)


class SimulatedTensor:
    """Memory of a simulated card, for as long as somebody refers to it."""

    def __init__(self, allocator: SimulatedAllocator, num_bytes: int) -> None:
        self._allocator = allocator
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        self._allocator.give_back(self.num_bytes)


_allocators: dict[tuple[str, int], SimulatedAllocator] = {}  # by folder and process
