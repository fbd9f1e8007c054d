"""A loop of which tests say how it goes on, and a clock: for whatever shows loops."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from raypool.channel.records import (
    Failure,
    Function,
    GpuReading,
    LocalValues,
    NodeGpus,
    SliceResult,
    WorkerInfo,
)
from raypool.core.model import Slice, TaskState
from raypool.engine.in_flight import Call
from raypool.engine.loop import LoopOptions, LoopWork
from raypool.views.status import LoopStatus


class FakeLoop:
    """A loop and what is known of it, `status`. `memory` is what the nodes say of the GPUs, by
    worker.
    """

    def __init__(self, items: Any = range(13), label: str = "train") -> None:
        self.now = 1000.0
        self.memory: dict[int, GpuReading] = {}
        self.num_asked = 0
        self.status = LoopStatus(label, self._ask_memory, clock=lambda: self.now)
        self.work = LoopWork(Function(0, None, label), items, LoopOptions(label))
        self.total: int | None = len(items)
        self._calls: dict[int, dict[Slice, Call]] = {}  # of each worker, in their order
        self._num_sent = 0

    def _ask_memory(self, take: Callable[[NodeGpus], object]) -> None:
        self.num_asked += 1
        take(NodeGpus("here", self.memory, {worker: (worker,) for worker in self.memory}))

    def run(self, worker: int, start: int, stop: int | None = None, attempt: int = 1) -> Slice:
        """Send a worker some items, which it begins when it has none."""
        piece = Slice(0, start, stop or start + 1, attempt)
        self._num_sent += 1
        calls = self._calls.setdefault(worker, {})
        call = calls[piece] = Call(self._num_sent, began_at=None if calls else self.now)
        self.work.begin(piece, WorkerInfo(worker, "here", 1), call)
        return piece

    def finish(
        self, worker: int, piece: Slice, error: Exception | None = None, took_s: float = 1.0
    ) -> None:
        """Let them come back."""
        count = piece.stop - piece.start
        failures = {} if error is None else {piece.start: Failure(error, None)}
        durations = array("d", [took_s] * count)
        result = SliceResult(
            piece.start, count, LocalValues([None] * count), 0, failures, durations, self.now
        )
        calls = self._calls[worker]
        calls.pop(piece).is_over = True
        for call in list(calls.values())[:1]:
            call.began_at = self.now
        self.work.settle(piece, result, WorkerInfo(worker, "here", 1))

    def report(self, item: int, attempt: int = 1, **metrics: Any) -> None:
        """Let an item report something."""
        self.work.feed.add_row((self.now, item, attempt, metrics))

    def look(self, seconds: float) -> LoopStatus:
        """Look at the loop so many seconds after its start."""
        self.now = 1000.0 + seconds
        self.status.look(self.work, self.total)
        return self.status

    def end(self, state: TaskState = TaskState.FINISHED) -> LoopStatus:
        """Let it end."""
        self.work.end(state, None)
        self.status.end()
        return self.status
