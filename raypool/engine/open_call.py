"""A call while it runs, and what has become of its slices so far."""

from __future__ import annotations

import threading
import traceback
from array import array
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from raypool.engine.backend import Part
from raypool.engine.guard import NOW
from raypool.engine.upkeep import Upkeep


class RawResult:
    """What became of one slice, before it travels: values and failures as they are. It begins no item after its `deadline`.

    `is_cancelled`: nobody wants it any more. `is_interrupted`: an item was ended by Ctrl-C, which means all that would come
    after it.
    """

    __slots__ = (
        "deadline",
        "done",
        "durations_s",
        "errors",
        "is_cancelled",
        "is_interrupted",
        "peak_memory_bytes",
        "start",
        "started_at",
        "values",
    )

    def __init__(self, start: int) -> None:
        self.start = start
        self.done = 0
        self.values: list[Any] = []
        self.errors: dict[int, BaseException] = {}
        self.durations_s = array("d")
        self.started_at = 0.0
        self.deadline = inf
        self.peak_memory_bytes: int | None = None
        self.is_cancelled = False
        self.is_interrupted = False

    def take_back_last(self) -> None:
        """Let it be as if the last item that was begun had not been."""
        self.done -= 1
        self.values.pop()
        self.durations_s.pop()
        error = self.errors.pop(self.start + self.done, None)
        if error is not None:
            traceback.print_exception(error)  # nobody else hears of it

    def discard(self) -> None:
        """Let it be as if nothing had been begun."""
        self.done = 0
        self.values = []
        self.errors = {}
        self.durations_s = array("d")

    def so_far(self, done: int) -> RawResult:
        """Return a copy of what has become of the first items, without their values if they are cancelled in this instant.

        From any thread: whoever runs the items appends the value of each, then its duration.
        """
        copy = RawResult(self.start)
        copy.done, copy.values, copy.durations_s = done, self.values[:done], self.durations_s[:done]
        copy.errors = {index: error for index, error in list(self.errors.items()) if index < self.start + done}
        copy.started_at, copy.peak_memory_bytes = self.started_at, self.peak_memory_bytes
        return copy

    def let_go(self, done: int) -> None:
        """Hold nothing more of the first items; their outcomes are known elsewhere."""
        self.values[:done] = [None] * done
        for index in range(self.start, self.start + done):
            self.errors.pop(index, None)


class Narrowed(NamedTuple):
    """What is done of a call that goes on, part by part, and how many of the items after that its worker keeps."""

    attempt_id: int
    results: list[RawResult]
    kept: tuple[int, ...]

    def without_values(self) -> Narrowed:
        """Return the same, with what is done among what is kept: it comes with the answer to the call."""
        kept = tuple(count + result.done for count, result in zip(self.kept, self.results, strict=True))
        return Narrowed(self.attempt_id, [RawResult(result.start) for result in self.results], kept)


class OpenCall:
    """A call that a worker is at: its thread begins one part after the other, and another may narrow the call meanwhile.

    Args:
        attempt_id: Its number.
        parts: What it holds.
        upkeep: Measures the GPU's memory, if there is one.
    """

    __slots__ = ("_is_cut", "_is_over", "_lock", "_parts", "_upkeep", "attempt_id", "began_at", "results")

    def __init__(self, attempt_id: int, parts: Sequence[Part], upkeep: Upkeep | None = None) -> None:
        self.attempt_id = attempt_id
        self.began_at = monotonic()
        self.results: list[RawResult] = []  # of the parts that have begun or were passed over
        self._parts = parts
        self._upkeep = upkeep
        self._lock = threading.Lock()
        self._is_cut = False  # nothing more begins
        self._is_over = False

    def begin(self, result: RawResult) -> bool:
        """Note that the next part is about to begin; False if it must not."""
        with self._lock:
            self.results.append(result)
            return not self._is_cut

    def end(self) -> None:
        """Note that the call is over: from here on nothing is told of it but its answer."""
        with self._lock:
            self._is_over = True

    def narrow(self, tell: Callable[[Narrowed], object]) -> None:
        """Let the call begin nothing more, unless the user wants all of it in one call, and tell what is done.

        Nothing is told of a call that is about to end.
        """
        with self._lock:
            narrowed = None if self._is_over else self._narrowed()
            if narrowed is not None:
                tell(narrowed)

    def let_go(self, narrowed: Narrowed) -> None:
        """Hold nothing more of what was told."""
        for result, told in zip(self.results, narrowed.results, strict=False):
            result.let_go(told.done)

    def _narrowed(self) -> Narrowed | None:
        if not self.results or self.results[-1].deadline <= NOW:
            return None  # it was told to end
        number, last = len(self.results) - 1, self.results[-1]
        part = self._parts[number]
        if not part.is_fixed:
            last.deadline, self._is_cut = NOW, True  # first: then at most one more item begins, after those that are counted
        done = len(last.durations_s)
        if done >= part.num_items:
            return None
        told = [*(result.so_far(result.done) for result in self.results[:-1]), last.so_far(done)]
        if len(told[-1].values) < done:
            return None
        if self._upkeep is not None:
            told[-1].peak_memory_bytes = self._upkeep.peak()
        later = self._parts[number + 1 :]
        told += [RawResult(other.start) for other in later]
        rest = part.num_items - done if part.is_fixed else 1
        kept = [0] * number + [rest] + [other.num_items if part.is_fixed else 0 for other in later]
        return Narrowed(self.attempt_id, told, tuple(kept))
