"""The state of a loop or a training for all views: progress, metrics, each worker's item."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raypool.channel.records import GpuReading, named
from raypool.core.model import TaskState
from raypool.views.words import (
    describe_error,
    describe_item,
    describe_values,
    duration,
    gibibytes,
    one_line,
    rate,
)

if TYPE_CHECKING:
    from raypool.channel.gpu_usage import AskGpus
    from raypool.channel.records import NodeGpus
    from raypool.core.model import Slice
    from raypool.engine.loop import LoopWork

MAX_ROWS = 16
"""The most lines of workers; further workers share one."""

FIT_METRICS = ("loss", "validation_loss", "learning_rate")
"""The metrics of a training that are shown, besides its speed."""

MEMORY_LOOK_S = 2.0
"""The interval of questions for GPU memory [s]."""

MEMORY_TRUE_S = 10.0
"""The age at which memory counts as unknown [s]."""

STEADY = 2
"""The number of items per worker from which their rate predicts better than their durations."""

LEAST_LEFT_S = 0.5
"""The least remaining time that is shown [s]."""


class WorkerRow(NamedTuple):
    """The line of a worker; `running_s` is None if it is idle."""

    worker: int
    num_done: int
    running_s: float | None
    items: str
    description: str
    values: str
    memory: str


class Rows(NamedTuple):
    """The lines of workers, and the line of other workers; empty without any."""

    shown: list[WorkerRow]
    others: str


class LoopStatus:
    """The state of a loop at the last look.

    `lines` are about the whole: metrics of a training, or the progress of a search.

    Args:
        label: The name of the loop.
        ask_memory: Asks for the memory of the workers' GPUs; None: it is not shown.
        clock: Returns the Unix time [s].
    """

    lines: Sequence[str] = ()

    def __init__(
        self,
        label: str,
        ask_memory: AskGpus | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
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
        """Update the state; `total` is the number of items, None if unknown."""
        if self._work is None or work.num_settled != self.num_settled:
            self._settled_at = self._clock()
        self._work, self.total = work, total
        self.lines = [one_line(text) for text in work.about]
        self.num_settled = work.num_settled
        self.num_restored, self.num_failed = len(work.restored), len(work.errors)
        self._tally.look_at(work)

    def end(self) -> None:
        """Note the end of the loop."""
        if self._work is not None:
            self.look(self._work, self.total)
            self.is_whole = self._work.state is TaskState.FINISHED
        self.is_over = True

    @property
    def is_begun(self) -> bool:
        """Whether there was a look."""
        return self._work is not None

    @property
    def elapsed_s(self) -> float:
        """The time since the start [s], at least 0 even if the clock is set back."""
        return max(self._clock() - self._started, 0.0)

    @property
    def num_new(self) -> int:
        """The number of settled items, without those of an earlier run."""
        return self.num_settled - self.num_restored

    def counts(self) -> list[tuple[str, str]]:
        """Return the progress as texts, each with a style of rich."""
        settled = f"{self.num_settled:,}"
        parts = [(f"{settled} done" if self.total is None else f"{settled} of {self.total:,}", "")]
        if self.num_restored:
            parts.append((f", {self.num_restored:,} restored", "dim"))
        if self.num_failed:
            parts.append((f", {self.num_failed:,} failed", "red"))
        if self.is_over and not self.is_whole:
            parts.append((", stopped", ""))
        return parts

    def left_s(self) -> float | None:
        """Return the estimated remaining time [s]; None if unknown."""
        if self.is_over or self.total is None or self.num_new <= 0 or self._work is None:
            return None
        running = self._work.running
        num_left = self.total - self.num_settled
        if self.num_new >= STEADY * len(running):
            left_s = self.elapsed_s / self.num_new * num_left
        else:
            now = self._clock()
            spent_s = [max(now - since, 0.0) for _, since in running.values()]
            left_s = (num_left * self._tally.mean_s(spent_s) - sum(spent_s)) / len(running)
        # no estimate if no item has ended for longer: running ones take longer than ended ones
        return left_s if left_s > max(self._clock() - self._settled_at, LEAST_LEFT_S) else None

    def times(self) -> str:
        """Return the time so far and the remaining time, if known."""
        left_s = self.left_s()
        left = "" if left_s is None else f", about {duration(left_s)} left"
        return duration(self.elapsed_s) + left

    def rows(self, most: int) -> Rows:
        """Return at most `most` lines for workers with work, one for all others included."""
        work = self._work
        if work is None:
            return Rows([], "")
        self._memory.look()
        running = work.running
        workers = sorted(self._tally.num_done.keys() | running.keys())
        most = max(min(most, MAX_ROWS), 1)
        shown = workers if len(workers) <= most else workers[: most - 1]
        others = workers[len(shown) :]
        rows = [self._row(work, index, running.get(index)) for index in shown]
        if not others:
            return Rows(rows, "")
        num_busy = sum(index in running for index in others)
        return Rows(rows, f"and {len(others):,} more workers, {num_busy:,} of them busy")

    def _row(self, work: LoopWork, worker: int, entry: tuple[Slice, float] | None) -> WorkerRow:
        num_done, memory = self._tally.num_done[worker], self._memory.of(worker)
        if entry is None:
            return WorkerRow(worker, num_done, None, "", "", "", memory)
        piece, since = entry
        running_s = max(self._clock() - since, 0.0)
        numbers, description, values = work.numbers(piece), "", ""
        items = named(numbers)
        if piece.attempt > 1:
            items += f", attempt {piece.attempt}"
        if len(numbers) == 1:  # several items have no common description or metrics
            description = self._tally.described(work, numbers[0])
            values = describe_values(work.feed.last(numbers[0], piece.attempt))
        return WorkerRow(worker, num_done, running_s, items, description, values, memory)

    @property
    def last_failure(self) -> str | None:
        """The last failed item with its error; None if none failed."""
        return self._tally.last_failure


class TrainingStatus(LoopStatus):
    """The state of a training by `fit` at the last look; it counts epochs.

    Args:
        label: The name of the training.
        num_epochs: The greatest number of epochs.
        num_steps: The steps of an epoch.
        started: When it was submitted (Unix time [s]).
        clock: Returns the Unix time [s].
    """

    def __init__(
        self,
        label: str,
        num_epochs: int,
        num_steps: int,
        started: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(label, clock=clock)
        self.total, self._num_steps, self._started = num_epochs, num_steps, started
        self.is_whole = True  # it may end before its last epoch

    @property
    def is_begun(self) -> bool:
        """True: it may be shown before its first report."""
        return True

    def look(self, last: Mapping[str, Any], first_step: int) -> None:  # type: ignore[override]
        """Update the state: the last metrics, and the step of the first report of this run."""
        done = (last.get("step", -1) + 1) // self._num_steps
        if done != self.num_settled:
            self.num_settled, self._settled_at = done, self._clock()
        self.num_restored = first_step // self._num_steps
        metrics = describe_values({name: last[name] for name in FIT_METRICS if name in last})
        if "samples_per_s" in last:
            metrics += f", {rate(last['samples_per_s'], 1).replace('/', ' samples/')}"
        self.lines = [metrics]

    def end(self) -> None:
        """Note the end of the training."""
        self.is_over = True

    def counts(self) -> list[tuple[str, str]]:
        """Return the progress as texts, each with a style of rich."""
        (settled, style), *others = super().counts()
        return [(f"{settled} epochs", style), *others]

    def left_s(self) -> float | None:
        """Return the estimated remaining time [s]; None if unknown."""
        if self.is_over or self.total is None or self.num_new <= 0:
            return None
        epoch_s = (self._settled_at - self._started) / self.num_new
        left_s = epoch_s * (self.total - self.num_settled) - (self._clock() - self._settled_at)
        return left_s if left_s > LEAST_LEFT_S else None


class Tally:
    """Counts of each worker's items, from the outcomes since the last look."""

    def __init__(self) -> None:
        self.num_done: Counter[int] = Counter()
        self.last_failure: str | None = None
        self._took_s = 0.0
        self._num_seen = self._num_seen_lost = 0
        self._descriptions: dict[int, str] = {}  # by item

    def mean_s(self, running_s: Sequence[float]) -> float:
        """Return the mean time of an item [s], from ended and running ones."""
        # running items tend to be longer than ended ones
        mean_s = self._took_s / max(self.num_done.total(), 1)
        return (self._took_s + sum(max(mean_s, spent_s) for spent_s in running_s)) / (
            self.num_done.total() + len(running_s)
        )

    def look_at(self, work: LoopWork) -> None:
        """Count new outcomes."""
        new = work.segments[self._num_seen :]
        self._num_seen += len(new)
        for piece, result, worker in new:
            size = piece.stop - piece.start
            self.num_done[worker.index] += size
            first = piece.start - result.start  # a result may have outcomes of several pieces
            self._took_s += sum(result.durations_s[first : first + size])
            failed = [at for at in result.failures if piece.start <= at < piece.stop]
            if failed:
                last = max(failed)
                number = work.numbers(piece)[last - piece.start]
                self._note_failed(number, result.failures[last].error)
        lost = work.lost[self._num_seen_lost :]
        self._num_seen_lost += len(lost)
        for piece, error, _ in lost:
            self._note_failed(work.numbers(piece)[-1], error)

    def _note_failed(self, item: int, error: BaseException) -> None:
        self.last_failure = f"item {item} failed: {describe_error(error)}"

    def described(self, work: LoopWork, item: int) -> str:
        """Return the description of an item; empty if it is its number."""
        if item not in self._descriptions:  # made once: a user's `repr` may be slow
            if len(self._descriptions) > 10 * MAX_ROWS:  # a loop may have millions of items
                self._descriptions.clear()
            text = describe_item(work.items[item])
            self._descriptions[item] = "" if text == str(item) else text
        return self._descriptions[item]


class MemoryBoard:
    """The last known memory of each worker's GPUs."""

    def __init__(self, ask: AskGpus | None, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_at = 0.0
        self._known: dict[int, tuple[float, GpuReading]] = {}

    def look(self) -> None:
        """Ask again, if it is time."""
        now = self._clock()
        if self._ask is not None and not 0 <= now - self._asked_at < MEMORY_LOOK_S:
            self._asked_at = now
            self._ask(self._take)  # answers arrive later, in another thread: no view waits

    def _take(self, node: NodeGpus) -> None:
        now = self._clock()
        known = {
            worker: (now, sum_of([node.readings[gpu] for gpu in gpus]))
            for worker, gpus in node.workers.items()
            if node.readings.keys() >= set(gpus)
        }
        self._known = self._known | known  # a new one: `of` looks from another thread

    def of(self, worker: int) -> str:
        """Return the memory in use on a worker's GPUs as text; empty if unknown."""
        said_at, memory = self._known.get(worker, (0.0, None))
        if memory is None or self._clock() - said_at > MEMORY_TRUE_S:
            return ""
        return gibibytes(memory.used_bytes, memory.total_bytes)


def sum_of(readings: Sequence[GpuReading]) -> GpuReading:
    """Return the memory of several GPUs together.

    Example:
        >>> sum_of([GpuReading(1, 8), GpuReading(2, 8)])[:2], sum_of([GpuReading(1, None)])[:2]
        ((3, 16), (1, None))
    """
    totals = [reading.total_bytes for reading in readings]
    total = None if None in totals else sum(filter(None, totals))
    return GpuReading(sum(reading.used_bytes for reading in readings), total)
