"""What is to be said of a loop, whoever shows it: how far it is, what each worker is at, and what was reported there last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel.records import named
from raypool.core.model import TaskState
from raypool.views.words import describe_error, describe_item, describe_values, gibibytes, one_line

if TYPE_CHECKING:
    from raypool.channel.records import GpuMemory
    from raypool.core.model import Slice
    from raypool.engine.loop import LoopWork

    AskMemory = Callable[[Callable[[dict[int, GpuMemory]], object]], object]

MAX_ROWS = 16
"""So many workers have a line each; the others share one."""

MEMORY_LOOK_S = 2.0
"""How often the agents of the nodes are asked for the memory of the GPUs, while somebody looks [s]."""

MEMORY_TRUE_S = 10.0
"""What has not been said again for so long is not known any more [s]."""

STEADY = 2
"""When each worker has done so many items, how fast they come back says more of the rest than how long each has taken."""

LEAST_LEFT_S = 0.5
"""Of less time than this nobody need be told [s]."""


class WorkerRow(NamedTuple):
    """What a worker is at: `running_s` is None for one that is idle; texts are empty where there is nothing to say."""

    worker: int
    num_done: int
    running_s: float | None
    items: str
    description: str
    values: str
    memory: str


class Rows(NamedTuple):
    """The workers that have a line of their own, and how many others there are and are busy."""

    shown: list[WorkerRow]
    num_others: int
    num_others_busy: int


class LoopStatus:
    """A loop as it was when somebody looked last.

    Args:
        label: What to call the loop.
        ask_memory: How to ask for the memory of the workers' GPUs; None: nobody wants to know.
        clock: Returns the Unix time [s].
    """

    def __init__(self, label: str, ask_memory: AskMemory | None = None, clock: Callable[[], float] = time.time) -> None:
        self.label = one_line(label)
        self.total: int | None = None
        self.num_settled = self.num_restored = self.num_failed = 0
        self.is_over = self.is_whole = False
        self._clock = clock
        self._started = clock()
        self._settled_at = self._started
        self._work: LoopWork | None = None
        self._tally = Tally()
        self._memory = MemoryBoard(ask_memory, clock)

    def look(self, work: LoopWork, total: int | None) -> None:
        """Note how far the loop is.

        Args:
            work: The loop.
            total: How many items it has; None while that is not known.
        """
        if self._work is None or work.num_settled != self.num_settled:
            self._settled_at = self._clock()
        self._work, self.total = work, total
        self.num_settled, self.num_restored, self.num_failed = work.num_settled, len(work.restored), len(work.errors)

    def end(self) -> None:
        """Note that nothing more will come."""
        if self._work is not None:
            self.look(self._work, self.total)
            self.is_whole = self._work.state is TaskState.FINISHED
        self.is_over = True

    @property
    def is_begun(self) -> bool:
        """Whether anything is known of the loop."""
        return self._work is not None

    @property
    def elapsed_s(self) -> float:
        """How long it has run [s]; not less than 0, whatever the clock does."""
        return max(self._clock() - self._started, 0.0)

    @property
    def num_new(self) -> int:
        """How many items have an outcome that an earlier run had not left."""
        return self.num_settled - self.num_restored

    def counts(self) -> list[tuple[str, str]]:
        """Return how far it is: texts to stand behind each other, each with a style that rich knows."""
        settled = f"{self.num_settled:,}"
        parts = [(f"{settled} done" if self.total is None else f"{settled} of {self.total:,}", "")]
        if self.num_restored:
            parts.append((f", {self.num_restored:,} there already", "dim"))
        if self.num_failed:
            parts.append((f", {self.num_failed:,} failed", "red"))
        if self.is_over and not self.is_whole:
            parts.append((", stopped", ""))
        return parts

    def left_s(self) -> float | None:
        """Return how long the rest will take, about [s]; None if nobody knows."""
        if self.is_over or self.total is None or self.num_new <= 0 or self._work is None:
            return None
        running = self._work.running
        self._tally.look_at(self._work)
        num_left = self.total - self.num_settled
        if self.num_new >= STEADY * len(running):
            left_s = self.elapsed_s / self.num_new * num_left
        else:
            now = self._clock()
            spent_s = [max(now - since, 0.0) for _, since in running.values()]
            left_s = (num_left * self._tally.mean_s(spent_s) - sum(spent_s)) / len(running)
        # Else what runs takes longer than what has ended.
        return left_s if left_s > max(self._clock() - self._settled_at, LEAST_LEFT_S) else None

    def rows(self, most: int) -> Rows:
        """Return what each worker is at that has had something to do: no more lines than this, one for all others included."""
        work = self._work
        if work is None:
            return Rows([], 0, 0)
        self._tally.look_at(work)
        self._memory.look()
        running = work.running
        workers = sorted(self._tally.num_done.keys() | running.keys())
        most = max(min(most, MAX_ROWS), 1)
        shown = workers if len(workers) <= most else workers[: most - 1]
        others = workers[len(shown) :]
        rows = [self._row(work, index, running.get(index)) for index in shown]
        return Rows(rows, len(others), sum(index in running for index in others))

    def _row(self, work: LoopWork, index: int, entry: tuple[Slice, float] | None) -> WorkerRow:
        num_done, memory = self._tally.num_done[index], self._memory.of(index)
        if entry is None:
            return WorkerRow(index, num_done, None, "", "", "", memory)
        piece, since = entry
        items = _named(work, piece)
        description, values = self._tally.described(work, piece), _reported(work, piece)
        return WorkerRow(index, num_done, max(self._clock() - since, 0.0), items, description, values, memory)

    @property
    def last_failure(self) -> str | None:
        """Which item has failed last, and why; None if none has."""
        if self._work is not None:
            self._tally.look_at(self._work)
        return self._tally.last_failure


class Tally:
    """What each worker has done so far, counted from what has come back since the last look."""

    def __init__(self) -> None:
        self.num_done: Counter[int] = Counter()
        self.last_failure: str | None = None
        self._took_s = 0.0
        self._num_seen = self._num_seen_lost = 0
        self._descriptions: dict[int, str] = {}  # by item

    def mean_s(self, running_s: Sequence[float]) -> float:
        """Return how long an item takes [s]: those that have ended, and at least so those that run, who are the longer ones."""
        mean_s = self._took_s / max(self.num_done.total(), 1)
        return (self._took_s + sum(max(mean_s, spent_s) for spent_s in running_s)) / (self.num_done.total() + len(running_s))

    def look_at(self, work: LoopWork) -> None:
        """Count what is new."""
        new = work.segments[self._num_seen :]
        self._num_seen += len(new)
        for piece, result, worker in new:
            self.num_done[worker.index] += piece.stop - piece.start
            first = piece.start - result.start
            self._took_s += sum(result.durations_s[first : first + piece.stop - piece.start])
            failed = [position for position in result.failures if piece.start <= position < piece.stop]
            if failed:
                self._note_failed(work.numbers(piece)[max(failed) - piece.start], result.failures[max(failed)].error)
        lost = work.lost[self._num_seen_lost :]
        self._num_seen_lost += len(lost)
        for piece, error, _ in lost:
            self._note_failed(work.numbers(piece)[-1], error)

    def _note_failed(self, index: int, error: BaseException) -> None:
        self.last_failure = f"item {index} failed: {describe_error(error)}"

    def described(self, work: LoopWork, piece: Slice) -> str:
        """Return what the item is, if it is one and more than its number. Made once only: it may take long."""
        if piece.stop - piece.start > 1:
            return ""
        (index,) = work.numbers(piece)
        if index not in self._descriptions:
            if len(self._descriptions) > 10 * MAX_ROWS:
                self._descriptions.clear()
            text = describe_item(work.items[index])
            self._descriptions[index] = "" if text == str(index) else text
        return self._descriptions[index]


class MemoryBoard:
    """What was said last of the memory of each worker's GPUs. Nobody waits for it: it comes when it comes."""

    def __init__(self, ask: AskMemory | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_at = 0.0
        self._known: dict[int, tuple[float, GpuMemory]] = {}

    def look(self) -> None:
        """Ask again, if it is time."""
        now = self._clock()
        if self._ask is not None and not 0 <= now - self._asked_at < MEMORY_LOOK_S:
            self._asked_at = now
            self._ask(self._take)

    def _take(self, found: dict[int, GpuMemory]) -> None:
        now = self._clock()
        self._known = self._known | {index: (now, memory) for index, memory in found.items()}

    def of(self, worker: int) -> str:
        """Return how much is in use on the GPUs of a worker; empty if that is not known."""
        said_at, memory = self._known.get(worker, (0.0, None))
        if memory is None or self._clock() - said_at > MEMORY_TRUE_S:
            return ""
        return gibibytes(memory.used_bytes, memory.total_bytes)


def _named(work: LoopWork, piece: Slice) -> str:
    items = named(work.numbers(piece))
    return f"{items}, attempt {piece.attempt}" if piece.attempt > 1 else items


def _reported(work: LoopWork, piece: Slice) -> str:
    """Return the newest values of what is running, if it is one item and has reported any in this attempt."""
    if piece.stop - piece.start > 1:
        return ""
    (index,) = work.numbers(piece)
    values: dict[str, Any] = work.feed.last(index, piece.attempt)
    return describe_values(values)
