"""What these tests share: a scheduler to whom events are told in short words, and the way to the
benchmarks.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.model import Counts, PoolState, Report, Slice, TaskSpec
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason

ROOT = Path(__file__).parents[2]

collect_ignore = ["user_scripts"]  # type checkers read them; nobody runs them


@pytest.fixture
def benchmark_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give `benchmark_of(name)`, which imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


class Pool:
    """A scheduler with places 0 to n - 1, in which the workers 0 to n - 1 are ready. Every word
    returns the commands.
    """

    def __init__(self, num_workers: int, idle_timeout_s: float | None = None) -> None:
        self.scheduler = Scheduler(start_timeout_s=60.0, idle_timeout_s=idle_timeout_s)
        self.now = 0.0
        self.calls: dict[int, m.RunTasks] = {}  # by attempt
        if num_workers:
            self.resize(add=range(num_workers))
        for worker_id in range(num_workers):
            self.ready(worker_id)

    def tell(self, event: m.Event) -> list[m.Command]:
        """Hand an event to the scheduler, and see that all is well after it."""
        commands = self.scheduler.handle(event, self.now)
        check_invariants(self.scheduler)
        for command in commands:
            calls = command.runs if isinstance(command, m.RunGang) else (command,)
            self.calls.update(
                (call.attempt_id, call) for call in calls if isinstance(call, m.RunTasks)
            )
        return commands

    def submit(self, task_id: int, fn_id: int = 0, **spec: Any) -> list[m.Command]:
        """Hand in a task."""
        return self.tell(m.TaskSubmitted(TaskSpec(task_id, fn_id, **spec)))

    def add_items(self, task_id: int, count: int, is_open: bool) -> list[m.Command]:
        """Hand in more items of an open task."""
        return self.tell(m.ItemsAdded(task_id, count, is_open))

    def cancel(self, task_id: int) -> list[m.Command]:
        """Give up a task."""
        return self.tell(m.CancelRequested(task_id))

    def finish(
        self, attempt_id: int, *reports: Report, busy_s: float = 1.0, is_spent: bool = False
    ) -> list[m.Command]:
        """Let a worker answer; without reports, all items of the call are done and took `busy_s`
        each.
        """
        call = self.calls[attempt_id]
        if not reports:
            counts = [piece.stop - piece.start for piece in call.slices]
            reports = tuple(Report(count, busy_s=count * busy_s) for count in counts)
        return self.tell(m.AttemptFinished(call.worker_id, attempt_id, reports, is_spent))

    def ready(self, worker_id: int) -> list[m.Command]:
        """Let a worker come up."""
        return self.tell(m.WorkerReady(worker_id))

    def lose(
        self, worker_id: int, reason: LossReason = LossReason.EXIT, was_idle: bool = False
    ) -> list[m.Command]:
        """Let a worker die."""
        return self.tell(m.WorkerLost(worker_id, reason, was_idle))

    def stop(self, task_id: int) -> list[m.Command]:
        """Ask a task to end by itself."""
        return self.tell(m.StopRequested(task_id))

    def fire(
        self, kind: str, worker_id: int = -1, attempt_id: int = -1, task_id: int = -1
    ) -> list[m.Command]:
        """Let a timer run out."""
        return self.tell(m.TimerFired(kind, worker_id, attempt_id, task_id))

    def resize(self, add: Any = (), remove: int = 0, leave: Any = ()) -> list[m.Command]:
        """Add places, take away workers, or those in some places."""
        size = self.size + len(add) - remove if remove else None
        return self.tell(m.ResizeRequested(tuple(add), size, tuple(leave)))

    def shutdown(
        self, cancel_queued: bool = False, cancel_running: bool = False
    ) -> list[m.Command]:
        """Take no more tasks."""
        return self.tell(m.ShutdownRequested(cancel_queued, cancel_running))

    def get_used_to(self, fn_id: int, task_id: int, item_s: float = 0.001) -> None:
        """Run a task of one item, so that the scheduler knows how long this function takes; every
        worker has to be free.
        """
        (call,) = self.submit(task_id, fn_id)
        assert isinstance(call, m.RunTasks)
        self.finish(call.attempt_id, busy_s=item_s)

    # --- what is known of it ----------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many places it has."""
        return self.scheduler.workers.size

    @property
    def state(self) -> PoolState:
        return self.scheduler.state

    @property
    def counts(self) -> Counts:
        """What has become of items, attempts and workers so far."""
        return self.scheduler.counts

    @property
    def tasks(self) -> list[int]:
        """The tasks that have not ended."""
        return list(self.scheduler.backlog.tasks)

    @property
    def workers(self) -> list[int]:
        """The workers that there are, ready or not."""
        return sorted(self.scheduler.workers.by_id)

    @property
    def places(self) -> list[int]:
        return sorted(self.scheduler.workers.places)

    def calls_of(self, worker_id: int) -> list[m.RunTasks]:
        """Return what a worker is at, and what it has behind that."""
        return [
            self.calls[attempt_id]
            for attempt_id in self.scheduler.workers.by_id[worker_id].attempts
        ]

    def worker_in(self, place: int) -> int:
        """Return the worker of a place, ready or not."""
        return self.scheduler.workers.places[place].worker_id

    # --- what is expected -------------------------------------------------------------------------

    @staticmethod
    def runs(worker_id: int, attempt_id: int, *pieces: tuple[int, ...]) -> m.RunTasks:
        """Expect a call; each piece is (task, start, stop) or (task, start, stop, attempt
        number).
        """
        return m.RunTasks(worker_id, attempt_id, tuple(map(as_slice, pieces)))

    @staticmethod
    def settles(attempt_id: int, piece: tuple[int, ...]) -> m.SettleItems:
        """Expect outcomes to count."""
        return m.SettleItems(attempt_id, as_slice(piece))

    @staticmethod
    def fails(piece: tuple[int, ...], reason: LossReason = LossReason.EXIT) -> m.FailItems:
        """Expect items to be given up."""
        return m.FailItems(as_slice(piece), reason)

    @staticmethod
    def signals(
        worker_id: int, attempt_id: int, task_id: int, signal: m.Signal = m.Signal.CANCEL
    ) -> m.SignalTask:
        """Expect a task to be told to stop."""
        return m.SignalTask(worker_id, attempt_id, task_id, signal)

    def starts(self, worker_id: int, place: int) -> list[m.Command]:
        """Expect a worker to be started."""
        return [m.StartWorker(worker_id, place), m.SetTimer(self.now + 60.0, "ready", worker_id)]


def as_slice(piece: tuple[int, ...]) -> Slice:
    """Return (task, start, stop) or (task, start, stop, attempt number) as a slice."""
    return Slice(*piece) if len(piece) == 4 else Slice(*piece, 1)


@pytest.fixture
def pool_of() -> type[Pool]:
    """Make a pool with so many workers."""
    return Pool
