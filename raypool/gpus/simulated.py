"""Simulated GPUs for tests, with their state in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from raypool.errors import InvalidTypeError
from raypool.gpus.devices import (
    ORDER,
    GpuDevice,
    GpuProcess,
    memory_of,
    named,
    visible_gpus,
)
from raypool.gpus.memory import fraction_of

CONTEXT_BYTES = 400 * 2**20
"""The memory of a process that uses a simulated GPU, beside its tensors [bytes]."""


class SimulatedGpus:
    """GPUs simulated in a folder that all processes of this machine see; see `Inventory`.

    A worker's GPU is the first in its CUDA_VISIBLE_DEVICES. A process that ends frees its memory.

    Args:
        folder: The folder of their state; created if missing.
        cards: A number of cards of 16 GiB, or the cards. None: those in the folder.

    Example:
        >>> import tempfile
        >>> gpus = SimulatedGpus(Path(tempfile.mkdtemp()), 2)
        >>> gpus.change(1, utilization=0.5)
        >>> [(card.index, card.free_bytes // 2**30, card.utilization) for card in gpus.devices()]
        [(0, 16, 0.0), (1, 16, 0.5)]
    """

    def __init__(
        self, folder: str | os.PathLike[str], cards: int | Sequence[GpuDevice] | None = None
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidTypeError(
                f"folder={folder!r} is not a path. The number of cards comes after the folder:"
                " SimulatedGpus(folder, 4)."
            )
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if isinstance(cards, int):
            cards = [
                GpuDevice(
                    index=index,
                    name="Simulated GPU",
                    uuid=f"GPU-00000000-0000-0000-0000-{index:012d}",
                    total_bytes=16 * 2**30,
                    used_bytes=0,
                    utilization=0.0,
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

    def change(self, index: int, **fields: Any) -> None:
        """Change properties of a GPU; `used_bytes` is others' memory, None stands for unknown."""
        with self.turn():
            cards = self._read()
            next(card for card in cards if card["index"] == index).update(fields)
            self._write(cards)

    def break_down(self, is_broken: bool = True) -> None:
        """Make everything but the index of all GPUs unknown, or known again."""
        if is_broken:
            (self._folder / "broken").touch()
        else:
            (self._folder / "broken").unlink(missing_ok=True)

    def allocate(self, num_bytes: int) -> SimulatedTensor:
        """Take memory of this process's card.

        Raises:
            RuntimeError: This process sees no card.
            torch.OutOfMemoryError: Too little is free, or this process may not have this much (see
                `Allocator.limit`, and "per_process_memory_fraction" in PYTORCH_CUDA_ALLOC_CONF).
        """
        return self.allocator().allocate(num_bytes)

    @contextlib.contextmanager
    def computing(self, utilization: float) -> Iterator[None]:
        """Add to the utilization of this process's GPU, from 0 to 1.

        Example:
            >>> import tempfile
            >>> gpus = SimulatedGpus(Path(tempfile.mkdtemp()), 1)
            >>> with gpus.computing(0.25):
            ...     gpus.devices()[0].utilization
            0.25
        """
        with self.allocator().computing(utilization):
            yield

    def devices(self) -> list[GpuDevice]:
        """Return all cards."""
        if (self._folder / "broken").exists():
            return [GpuDevice(index=card["index"]) for card in self._read()]
        return self.true_state()

    def true_state(self) -> list[GpuDevice]:
        """Return all cards as they are, even if broken down."""
        return [self._seen(card) for card in self._read()]

    def find(self, device: str) -> GpuDevice | None:
        """Return the card with this index or UUID."""
        return named(device, self.devices())

    def load(self, indices: Sequence[int]) -> list[GpuDevice]:
        """Return their memory and utilization."""
        cards = {card.index: card for card in self.devices()}
        found = [cards.get(index) or GpuDevice(index=index) for index in indices]
        # nothing else, as `Inventory` says: code that relies on more would fail on real GPUs
        names = ("index", "total_bytes", "used_bytes", "utilization")
        return [GpuDevice(**{name: getattr(card, name) for name in names}) for card in found]

    def memory_used(self, indices: Sequence[int]) -> int | None:
        """Return the memory in use on these cards."""
        return memory_of(self.load(indices))

    def allocator(self) -> SimulatedAllocator:
        """Return this process's allocator."""
        key = str(self._folder), os.getpid()  # a forked child has allocated nothing
        return _allocators.get(key) or _allocators.setdefault(key, SimulatedAllocator(self))

    def held_by_process(self, index: int) -> dict[int, Held]:
        """Return each process's part of a GPU."""
        held = {}
        for path in self._folder.glob(f"held-{index}-*"):
            _, _, pid, started = path.name.split("-")
            if _started(int(pid)) != int(started):
                # that process has ended; another may have its number by now
                path.unlink(missing_ok=True)
                continue
            # it has just ended, and somebody else has seen it
            with contextlib.suppress(FileNotFoundError):
                held[int(pid)] = Held(**json.loads(path.read_text()))
        return held

    def hold(self, index: int, held: Held) -> None:
        """Record this process's part of a GPU."""
        name = f"held-{index}-{os.getpid()}-{_started(os.getpid())}"
        _replace(self._folder / name, json.dumps(dataclasses.asdict(held)))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock of the state, against all other processes and threads."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file unlocks it, also if a process dies
            yield

    def _seen(self, card: dict[str, Any]) -> GpuDevice:
        held = self.held_by_process(card["index"])
        fields = dict(card)
        if card["used_bytes"] is not None:
            fields["used_bytes"] += sum(entry.num_bytes for entry in held.values())
        if card["utilization"] is not None:
            busy = sum(entry.utilization for entry in held.values())
            fields["utilization"] = min(card["utilization"] + busy, 1.0)
        if card["processes"] is not None:
            others = [GpuProcess(**entry) for entry in card["processes"]]
            ours = [GpuProcess(pid=pid, used_bytes=entry.num_bytes) for pid, entry in held.items()]
            fields["processes"] = (*others, *ours)
        for name in ("mig", "compute_capability"):  # JSON has lists only
            fields[name] = None if card[name] is None else tuple(card[name])
        return GpuDevice(**fields)

    def _read(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = []
        # on a machine that does not see the folder, there are none
        with contextlib.suppress(FileNotFoundError):
            cards = json.loads((self._folder / "cards.json").read_text())
        return cards

    def _write(self, cards: Sequence[dict[str, Any]]) -> None:
        _replace(self._folder / "cards.json", json.dumps(cards, default=dataclasses.asdict))


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A process's part of a GPU: memory [bytes] and utilization."""

    num_bytes: int
    utilization: float = 0.0


class SimulatedAllocator:
    """Takes memory of a simulated card for this process, with a cache; see `Allocator`."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus
        # The size of each tensor, by name. There is no sum: tensors end at any moment, in any
        # thread, and the end of one takes no lock.
        self._live: dict[int, int] = {}
        self._names = count()
        self._reserved = 0
        self._peak = 0
        self._utilization = 0.0
        self._fraction: float | None = None
        self._is_in_use = False

    @property
    def is_in_use(self) -> bool:
        """Whether anything was ever allocated."""
        return self._is_in_use

    def allocated(self) -> int:
        """Return the memory in use."""
        return sum(list(self._live.values()))  # a copy: a tensor may end during the sum

    def peak(self) -> int:
        """Return the most memory taken."""
        return self._peak

    def reset_peak(self) -> None:
        """Restart the measurement of `peak`."""
        self._peak = self._reserved

    def empty_cache(self) -> None:
        """Release cached memory."""
        if self._is_in_use:
            with self._gpus.turn():
                self._reserved = self.allocated()
                self._note()

    def limit(self, fraction: float) -> None:
        """Limit this process to a share of its card's memory."""
        self._fraction = fraction

    def allocate(self, num_bytes: int) -> SimulatedTensor:
        """Take memory; see `SimulatedGpus.allocate`."""
        with self._gpus.turn():  # another process could take the memory between check and record
            more = max(self.allocated() + num_bytes - self._reserved, 0)
            self._check(num_bytes, more)
            name = next(self._names)
            self._live[name] = num_bytes
            self._reserved += more
            self._peak = max(self._peak, self._reserved)
            self._note()
        return SimulatedTensor(self._live, name)

    @contextlib.contextmanager
    def computing(self, utilization: float) -> Iterator[None]:
        """Keep the card busy; see `SimulatedGpus.computing`."""
        before = self._utilization
        self._work(before + utilization)
        try:
            yield
        finally:
            self._work(before)

    def _check(self, num_bytes: int, more: int) -> None:
        """Begin to use the card, and raise an error unless it has so much more."""
        if not self._is_in_use:
            self._card()  # raises without a card; then the process has not used one
            self._is_in_use = True
            self._fraction = fraction_of(os.environ) if self._fraction is None else self._fraction
            self._note()
        card = self._card()
        if card.total_bytes is None or card.free_bytes is None:
            return
        allowed = int(card.total_bytes * (1.0 if self._fraction is None else self._fraction))
        if more > card.free_bytes or self._reserved + more > allowed:
            import torch  # takes seconds, and is not needed before

            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes} bytes. GPU 0 has"
                f" {card.total_bytes} bytes, of which {card.free_bytes} are free; {allowed} are"
                f" allowed to this process, which has {self._reserved}. (simulated)"
            )

    def _work(self, utilization: float) -> None:
        with self._gpus.turn():
            self._utilization = utilization
            self._note()
            self._is_in_use = True

    def _card(self) -> GpuDevice:
        """Return this process's card."""
        cards = self._gpus.true_state()  # a driver that answers no question still has its cards
        seen = visible_gpus({**os.environ, ORDER: "PCI_BUS_ID"}, cards)
        if not seen:
            raise RuntimeError("No CUDA GPUs are available (simulated)")
        return next(card for card in cards if card.index == seen[0].index)

    def _note(self) -> None:
        self._gpus.hold(self._card().index, Held(self._reserved + CONTEXT_BYTES, self._utilization))


class SimulatedTensor:
    """Memory of a simulated card, freed with its last reference."""

    def __init__(self, live: dict[int, int], name: int) -> None:
        self._live = live
        self._name = name
        self.num_bytes = live[name]

    def __del__(self) -> None:
        self._live.pop(self._name, None)


_allocators: dict[tuple[str, int], SimulatedAllocator] = {}  # by folder and process


def _started(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine did; None if it has ended."""
    try:
        # proc_pid_stat(5): the name, in parentheses, may contain anything, also blanks and
        # parentheses; behind it come the state and, as field 22 of the line, the start
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: others read it without the lock."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
