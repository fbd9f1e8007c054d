"""Records that pass between driver and backends: workers, functions, slices and their results."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from raypool.channel.users_code import Snapshot
from raypool.errors import TaskCancelled
from raypool.gpus.devices import GpuDevice


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker of a pool, as it was at the moment of asking.

    Attributes:
        index: Its number in the pool, from 0; a process that replaces it has the same.
        host: The name of its machine.
        pid: Its process.
        gpus: The indices of its GPUs on that machine.
        gpu_uuids: Their UUIDs, as far as they are known.
        gpu_name: The model of its (first) GPU, such as "NVIDIA H200"; None without one, or if NVML
            does not know it.
        state: "starting", "idle", "busy", "parked" or "lost".
    """

    index: int
    host: str
    pid: int
    gpus: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    gpu_name: str | None = None
    state: str = "starting"

    @property
    def gpu(self) -> int | None:
        """The index of its (first) GPU, None without one."""
        return self.gpus[0] if self.gpus else None

    @property
    def gpu_uuid(self) -> str | None:
        """The UUID of its (first) GPU; None without one, or if it is unknown."""
        return self.gpu_uuids[0] if self.gpu_uuids else None

    @property
    def devices(self) -> tuple[str | tuple[str, int], ...]:
        """A unique name of each of its GPUs: the UUID if known, else host and index.

        Example:
            >>> WorkerInfo(0, "lab-3", 7, gpus=(2,)).devices
            (('lab-3', 2),)
            >>> WorkerInfo(0, "lab-3", 7, gpus=(2,), gpu_uuids=("GPU-1",)).devices
            ('GPU-1',)
        """
        if len(self.gpu_uuids) == len(self.gpus):
            return self.gpu_uuids
        return tuple((self.host, gpu) for gpu in self.gpus)

    def with_state(self, state: str) -> WorkerInfo:
        """Return a copy in another state."""
        return replace(self, state=state)


NOBODY = WorkerInfo(-1, "unknown host", 0)
"""An unknown worker."""


class Refusal(str):
    """The reason why a worker can never start: the error of the user's `setup`."""

    __slots__ = ()


class NodeDevices(NamedTuple):
    """A machine's GPUs (None: it does not answer), and the pool's workers there."""

    host: str
    cards: Sequence[GpuDevice] | None
    workers: Sequence[WorkerInfo]


class GpuReading(NamedTuple):
    """A GPU's memory [bytes], in use by any process and in total; and the part of the time that it
    computes, from 0 to 1. None: not known.
    """

    used_bytes: int
    total_bytes: int | None
    utilization: float | None = None


class NodeGpus(NamedTuple):
    """The last readings of a machine's GPUs, and the GPUs of each worker of the pool there."""

    host: str
    readings: Mapping[int, GpuReading]
    workers: Mapping[int, Sequence[int]]


class Function:
    """A user's function: packed once, shipped to each worker once, known there by `fn_id`.

    `project`: the user's modules as they were when it was packed, if it leaves this process.
    `is_searched`: raypool has looked for random generators in it, before a call.
    """

    __slots__ = ("__weakref__", "fn_id", "is_searched", "name", "packed", "project")

    def __init__(self, fn_id: int, packed: Any, name: str, project: Snapshot | None = None) -> None:
        self.fn_id = fn_id
        self.packed = packed
        self.name = name
        self.project = project
        self.is_searched = False


def function_name(fn: Any) -> str:
    """Return the name of a function in messages."""
    inner = fn
    for _ in range(sys.getrecursionlimit()):
        if not hasattr(inner, "func"):  # functools.partial has it
            return getattr(inner, "__name__", None) or type(inner).__name__
        inner = inner.func
    return type(fn).__name__  # it wraps itself, or answers every name


class Part(NamedTuple):
    """One slice, ready to travel.

    `items`: a packed list with one entry for each item: `(args, kwargs)` with `is_call`, else the
    function's one argument. `start`: the number of the first. `seed`: of the loop.
    `stops_on_error`: items after one that fails are not wanted. `is_fixed`: the user has set
    `chunk_size`, so no item is handed back. `should_stop`: an early end was requested before it
    began. `numbers`: the user's numbers of the items, unless they count up from `start`. `is_rank`:
    others run beside it, and may wait for it. `checkpoints`: a path or URL, and the name there of
    each item's folder. `turn`: the part of its GPU's memory that the process may have meanwhile,
    and whether nothing else may run on that GPU; None if workers take no turns. `timeout_s`: the
    limit of its one item [s], for a backend whose calls hold up the driver, which could not end
    them in time.
    """

    task_id: int
    fn_id: int
    items: Any
    num_items: int
    start: int
    attempt: int
    is_call: bool
    seed: int | None = None
    name: str | None = None
    stops_on_error: bool = False
    is_fixed: bool = False
    should_stop: bool = False
    numbers: Sequence[int] | None = None
    is_rank: bool = False
    checkpoints: tuple[str, tuple[str, ...]] | None = None
    turn: tuple[float, bool] | None = None
    timeout_s: float | None = None


class SliceItems(list[Any]):
    """The items of a slice. Those that hold the same object get one each where they arrive."""


class Failure(NamedTuple):
    """An exception in a task, and its traceback as text (None: raised in this process)."""

    error: BaseException
    remote_traceback: str | None


@dataclass(slots=True)
class SliceResult:
    """The outcome of one slice.

    It begins with item number `start`, and `done` of its items have an outcome. Their values are
    `values.get()[offset : offset + done]`; `failures` maps numbers of failed items to what went
    wrong. `durations_s` has one entry for each; the first began at `started_at` (Unix time [s]).
    `catch_up` waits until all reports of that time have arrived; None if they have.
    `peak_memory_bytes`: the process's peak of GPU memory, None if it used none. `crowded_out`:
    failed items that had no room beside other workers on their GPU, and are to run again, alone.
    `is_unopened`: its items could not be unpickled together, so all have failed; each is to run
    again by itself, which shows the faulty ones.
    `is_interrupted`: it ran in the user's own thread, and Ctrl-C, or a cancellation of the task
    around it, ended it: see `is_interrupt`.
    """

    start: int
    done: int
    values: Values
    offset: int
    failures: dict[int, Failure]
    durations_s: array[float]
    started_at: float
    catch_up: Callable[[], None] | None = None
    peak_memory_bytes: int | None = None
    crowded_out: tuple[int, ...] = ()
    is_unopened: bool = False
    is_interrupted: bool = False

    @property
    def uncharged(self) -> tuple[int, ...]:
        """The failed items that are to run again, which does not count as a retry."""
        return tuple(self.failures) if self.is_unopened else self.crowded_out

    def is_interrupt(self, error: BaseException | None) -> bool:
        """Whether this failure means all of the work, not its item."""
        return self.is_interrupted and isinstance(error, (KeyboardInterrupt, TaskCancelled))

    def within(self, start: int, stop: int) -> SliceResult:
        """Return the outcome of these items only (itself, if that is all).

        Example:
            >>> values, durations_s = LocalValues(list("abc")), array("d", [1.0, 2.0, 4.0])
            >>> part = SliceResult(5, 3, values, 0, {}, durations_s, started_at=100.0).within(6, 9)
            >>> part.done, part.values.get()[part.offset], part.durations_s.tolist()
            (2, 'b', [2.0, 4.0])
            >>> part.started_at
            101.0
        """
        skipped = start - self.start
        # no copy for a whole slice, which is the rule
        if skipped == 0 and self.done <= stop - start:
            return self
        done = min(max(self.done - skipped, 0), stop - start)
        return replace(
            self,
            start=start,
            done=done,
            offset=self.offset + skipped,
            failures={
                index: failure for index, failure in self.failures.items() if start <= index < stop
            },
            durations_s=self.durations_s[skipped : skipped + done],
            started_at=self.started_at + sum(self.durations_s[:skipped]),
        )

    def values_of(self, start: int, stop: int) -> list[Any]:
        """Return the values of these items, all of them `Missing` if they are lost."""
        first = self.offset + start - self.start
        try:
            return self.values.get()[first : first + stop - start]
        except Exception as error:  # Ray has ended, say, or the node with large values has
            return [Missing(error)] * (stop - start)

    def to_retry(self, wants_retry: Callable[[BaseException], bool]) -> tuple[int, ...]:
        """Return the failed items whose exceptions the user wants to retry."""
        uncharged = self.uncharged
        return tuple(
            index
            for index, failure in sorted(self.failures.items())
            if index not in uncharged and wants_retry(failure.error)
        )


class LocalValues:
    """Values in this process."""

    __slots__ = ("_values",)

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def get(self) -> list[Any]:
        """Return them."""
        return self._values


def nothing_done() -> SliceResult:
    """Return the result of a slice that did not begin."""
    return SliceResult(0, 0, LocalValues([]), 0, {}, array("d"), 0.0)


def all_failed(start: int, stop: int, error: BaseException) -> SliceResult:
    """Return the result of a slice whose items have all failed with one error."""
    count = stop - start
    failures = dict.fromkeys(range(start, stop), Failure(error, None))
    return SliceResult(
        start,
        count,
        LocalValues([None] * count),
        0,
        failures,
        array("d", bytes(8 * count)),
        time.time(),
    )


class Values(Protocol):
    """The return values of a call, which may still be in another process."""

    def get(self) -> list[Any]:
        """Return one for each item: None if it failed, `Missing` if it can't be opened."""


class Missing(NamedTuple):
    """Stands for a value that was returned and is lost, or cannot be unpickled."""

    error: Exception


def where(worker: WorkerInfo) -> str:
    """Return in words the machine of a worker, and its GPU if it has one."""
    return f"{worker.host}, GPU {worker.gpu}" if worker.gpu is not None else worker.host


def who(worker: WorkerInfo) -> str:
    """Return in words a worker and its machine; only the machine if it has no number."""
    return where(worker) if worker.index < 0 else f"worker {worker.index}, {where(worker)}"


def named(numbers: Sequence[int]) -> str:
    """Return words for some items in messages.

    Example:
        >>> named([3]), named(range(3, 6)), named([9, 2]), named([9, 2, 7, 5, 1])
        ('item 3', 'items 3 to 5', 'items 9 and 2', 'items 9, 2 and 3 more')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"item {first}"
    if isinstance(numbers, range):
        return f"items {first} to {last}"
    if len(numbers) == 2:
        return f"items {first} and {last}"
    return f"items {first}, {numbers[1]} and {len(numbers) - 2:,} more"
