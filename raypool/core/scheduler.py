"""The scheduler: told what has happened, it answers what to do. See `raypool.core.messages` for both vocabularies.

It has no clock, no thread and no lock: the driver calls `handle` from one thread and carries out the answer. The same
events at the same times give the same commands, always. An event that cannot happen raises `InternalError` and changes
nothing.

The `Backlog` knows what waits, the `Crew` who is there; this class lets the one act on the other.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

from raypool.core import messages as m
from raypool.core.answers import Answers
from raypool.core.backlog import Backlog
from raypool.core.crew import Crew
from raypool.core.dispatch import Dispatcher
from raypool.core.faults import Faults
from raypool.core.idleness import Idleness
from raypool.core.ledger import Ledger
from raypool.core.losses import Losses
from raypool.core.model import PoolState, Report, Task, TaskState, Worker, WorkerState
from raypool.errors import InternalError, LossReason

STORY_LENGTH = 200
"""So many of the last events are kept for the story that an `InternalError` tells."""

DEFAULT_START_TIMEOUT_S = 60.0

OPEN = PoolState.OPEN  # Python 3.11 takes its time to look these up


class Scheduler:
    """Which task runs where and when, and what becomes of it.

    Args:
        start_timeout_s: A worker that has not come up after this time [s] is lost.
        idle_timeout_s: After so long without a task [s] the workers end, until there is one; None: never.
    """

    def __init__(self, start_timeout_s: float = DEFAULT_START_TIMEOUT_S, idle_timeout_s: float | None = None) -> None:
        self.state = PoolState.OPEN
        self.backlog = Backlog()
        self.crew = Crew(start_timeout_s)
        self.ledger = Ledger(self.backlog, self.crew)
        self.counts = self.ledger.counts
        self._faults = Faults(self.crew)
        self._losses = Losses(self.backlog, self.crew, self.ledger, self._faults)
        self._answers = Answers(self.backlog, self.crew, self.ledger, self._faults, self._losses)
        self._dispatcher = Dispatcher(self.backlog, self.crew, self.ledger, self._faults)
        self._idleness = Idleness(idle_timeout_s) if idle_timeout_s is not None else None
        self._last_task_id = -1
        self._is_close_told = False
        self._story: deque[tuple[float, m.Event]] = deque(maxlen=STORY_LENGTH)
        self._now = 0.0
        self._out = self.ledger.out
        self._handlers: dict[type[Any], Any] = {
            m.TaskSubmitted: self._on_submitted,
            m.ItemsAdded: self._on_items_added,
            m.CancelRequested: self._on_cancel_requested,
            m.StopRequested: self._on_stop_requested,
            m.WorkerReady: self._on_worker_ready,
            m.WorkerLost: self._on_worker_lost,
            m.PlaceLeaving: self._on_place_leaving,
            m.PlaceLost: self._on_place_lost,
            m.AttemptFinished: self._on_attempt_finished,
            m.AttemptNarrowed: self._on_attempt_narrowed,
            m.TimerFired: self._on_timer_fired,
            m.ResizeRequested: self._on_resize_requested,
            m.ShutdownRequested: self._on_shutdown_requested,
        }

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take in what has happened at `now` [s, any steady clock]; return what to do, in this order.

        Raises:
            InternalError: The event cannot happen in this state; the error tells the story.
        """
        self._story.append((now, event))
        self._now = self.ledger.now = now
        self._out.clear()
        self._handlers[type(event)](event)
        if self.crew.spent:
            self._out += self.crew.renew_spent(now)
        work = self._dispatcher.give_out(now)
        if self.crew.deserted:
            self._fail_deserted()
        if not self.backlog.tasks or not self.crew.places:
            self._close_if_done()
        if self._idleness is not None:
            self._look_whether_idle(self._idleness)
        # Workers are fed before anybody is told about results: they need not wait for the driver's book-keeping.
        return work + self._out

    def story(self, task_id: int | None = None, worker_id: int | None = None) -> tuple[str, ...]:
        """Return the last events that name this task or worker (all, without either)."""
        wanted = [f"{name}={n}," for name, n in (("task_id", task_id), ("worker_id", worker_id)) if n is not None]
        lines = [(f"{now:.6f} {event!r}", f"{event!r},".replace(")", ",")) for now, event in self._story]
        return tuple(line for line, text in lines if not wanted or any(name in text for name in wanted))

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _on_submitted(self, event: m.TaskSubmitted) -> None:
        spec = event.spec
        if spec.task_id <= self._last_task_id or not spec.is_sound:
            self._impossible(event, task_id=spec.task_id)
        self._last_task_id = spec.task_id
        self.counts.submitted += spec.size
        task = self.backlog.admit(spec)
        if self.state is not OPEN:
            self.ledger.end(task, TaskState.FAILED if self.state is PoolState.BROKEN else TaskState.CANCELLED)
            return
        if spec.place is not None or spec.places is not None:
            task.lane = self.crew.lane_for(spec)
            task.lane.tasks[spec.task_id] = None
        if spec.is_gang and not self.crew.has_enough(task):
            self.ledger.end(task, TaskState.FAILED)
            return
        self.ledger.go_on(task)
        if self.crew.parked and self.backlog.tasks:
            self._out += self.crew.wake(self._now)

    def _on_items_added(self, event: m.ItemsAdded) -> None:
        task = self.backlog.tasks.get(event.task_id)
        if event.task_id > self._last_task_id or event.count < 0 or (task is not None and not task.is_open):
            self._impossible(event, task_id=event.task_id)
        if task is not None:  # else it has ended: cancelled, or failed
            self.counts.submitted += event.count
            self.backlog.extend(task, event.count)
            task.is_open = event.is_open
            self.ledger.go_on(task)

    def _on_cancel_requested(self, event: m.CancelRequested) -> None:
        task = self._task(event)
        if task is not None:
            self.ledger.end(task, TaskState.CANCELLED)

    def _on_stop_requested(self, event: m.StopRequested) -> None:
        task = self._task(event)
        if task is not None:
            self.ledger.signal(task, m.Signal.STOP)

    def _task(self, event: m.CancelRequested | m.StopRequested) -> Task | None:
        if event.task_id > self._last_task_id:
            self._impossible(event, task_id=event.task_id)
        return self.backlog.tasks.get(event.task_id)

    # --- what comes back ----------------------------------------------------------------------------------------------

    def _on_attempt_finished(self, event: m.AttemptFinished) -> None:
        worker_id, attempt_id, reports, is_spent = event
        crew = self.crew
        if worker_id >= crew.next_worker_id or attempt_id >= crew.next_attempt_id:
            self._impossible(event, worker_id=worker_id)
        worker = crew.workers.get(worker_id)
        if worker is None or attempt_id not in worker.attempts:
            return  # an answer from a worker that was given up
        attempt = worker.attempts[attempt_id]
        slices = attempt.slices
        if len(reports) != len(slices) or not all(map(Report.is_about, reports, slices)):
            self._impossible(event, worker_id=worker_id)
        self._answers.take(worker, attempt_id, reports)
        if attempt.is_loan:
            self._end_loan(worker)
            return
        if is_spent or crew.spent:
            crew.note_spent(worker, is_spent)
        self._freed(worker, is_over=attempt.is_fresh)

    def _on_attempt_narrowed(self, event: m.AttemptNarrowed) -> None:
        worker_id, attempt_id, reports, kept = event
        if attempt_id >= self.crew.next_attempt_id:
            self._impossible(event, worker_id=worker_id)
        worker = self._worker(event)
        if worker is None or attempt_id not in worker.attempts:
            return  # all of it has come back meanwhile, or the worker was given up
        slices = worker.attempts[attempt_id].slices
        if not len(slices) == len(reports) == len(kept) or not any(kept):
            self._impossible(event, worker_id=worker_id)
        if not all(map(Report.is_about, reports, slices)) or not all(map(Report.leaves, reports, slices, kept)):
            self._impossible(event, worker_id=worker_id)
        self._answers.take_part(worker, attempt_id, reports, kept)

    def _freed(self, worker: Worker, is_over: bool) -> None:
        """Note that a worker has one call less; one that is over may take no other."""
        if worker.attempts:
            self.crew.offer_ahead(worker, next(iter(worker.attempts.values())))
        elif worker.worker_id in self.crew.retiring:
            self._out += self.crew.stop(worker)
        elif is_over:
            self._out += self.crew.launch(self.crew.renew(worker), self._now)
        else:
            self.crew.free(worker)

    def _end_loan(self, worker: Worker) -> None:
        """Start the worker of a place that was lent; what was bound to it meanwhile has waited for that."""
        if worker.worker_id in self.crew.retiring:
            self._out += self.crew.stop(worker)
            return
        worker.state, worker.has_delivered = WorkerState.STARTING, False
        self._out += self.crew.launch(worker, self._now)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_ready(self, event: m.WorkerReady) -> None:
        worker = self._worker(event)
        if worker is None:
            return  # too late: another one was started in its place
        if worker.state is not WorkerState.STARTING:
            self._impossible(event, worker_id=event.worker_id)
        self.crew.places[worker.place].failed_starts = 0
        if self._idleness is not None:
            self._idleness.end()  # the time runs from where it could have done something
        if worker.attempts:  # it was started for this one
            self._out += self._dispatcher.begin(worker, self._now)
        if not worker.attempts:
            self._freed(worker, is_over=False)

    def _on_timer_fired(self, event: m.TimerFired) -> None:
        worker = self._worker(event)
        if worker is None:
            if event.kind == "idle":
                self._park_if_idle()
            elif event.kind == "retry":
                self._rouse(event.task_id)
        elif event.kind == "timeout":
            self._losses.time_out(worker, event.attempt_id)
        elif event.kind == "leave":
            self._losses.interrupt_if_due(worker)
        elif worker.state is not WorkerState.STARTING:
            pass  # ready in time
        elif event.kind == "start":
            self._out += self.crew.launch(worker, self._now)
        else:
            self._lose(worker, LossReason.START, was_idle=False)

    def _rouse(self, task_id: int) -> None:
        """Let something run again that has waited for that, unless its task has ended."""
        task = self.backlog.tasks.get(task_id)
        if task is not None:
            self.backlog.rouse(task)
            self.ledger.go_on(task)

    def _on_worker_lost(self, event: m.WorkerLost) -> None:
        worker = self._worker(event)
        if worker is not None:
            self.counts.workers_lost += worker.state is not WorkerState.STARTING
            self._lose(worker, event.reason, event.was_idle)

    def _worker(self, event: m.WorkerReady | m.WorkerLost | m.TimerFired | m.AttemptNarrowed) -> Worker | None:
        """Return the worker that an event is about, unless it was given up."""
        if event.worker_id >= self.crew.next_worker_id:
            self._impossible(event, worker_id=event.worker_id)
        return self.crew.workers.get(event.worker_id)

    def _lose(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        has_future = worker.worker_id not in self.crew.retiring
        self._losses.lose(worker, reason, was_idle)
        if has_future and not self.crew.places:
            self._break()

    def _on_place_leaving(self, event: m.PlaceLeaving) -> None:
        worker = self._worker_in(event.place)
        if worker is None:
            return  # it has gone before
        if event.is_kept:
            self.ledger.send_elsewhere(worker, m.Signal.LEAVE)
        else:
            self._losses.announce(worker, event.at)

    def _on_place_lost(self, event: m.PlaceLost) -> None:
        worker = self._worker_in(event.place)
        if worker is None:
            return
        has_future = worker.worker_id not in self.crew.retiring
        self.counts.workers_lost += worker.state in (WorkerState.IDLE, WorkerState.BUSY)
        self._losses.lose_place(worker, event.reason)
        if has_future and not self.crew.places:
            self._break()

    def _worker_in(self, place_id: int) -> Worker | None:
        place = self.crew.places.get(place_id)
        return None if place is None else self.crew.workers[place.worker_id]

    def _fail_deserted(self) -> None:
        """See to the tasks of which nobody is left who may run them."""
        for lane in self.crew.deserted:
            for task_id in list(lane.tasks):
                self.ledger.go_on(self.backlog.tasks[task_id])
        self.crew.deserted.clear()

    def _park_if_idle(self) -> None:
        """End the workers if there was nothing to do for long enough; those that are about to come up are waited for."""
        if self._idleness is None or not self._idleness.has_lasted(self._now):
            return
        self._idleness.end()
        if self.crew.is_at_rest:
            self._out += self.crew.park()

    def _look_whether_idle(self, idleness: Idleness) -> None:
        if self.backlog.tasks or not self.crew.is_awake:
            idleness.end()
        else:
            self._out += idleness.begin(self._now)

    # --- the size of the pool and its end -----------------------------------------------------------------------------

    def _on_resize_requested(self, event: m.ResizeRequested) -> None:
        is_new = self.crew.places.keys().isdisjoint(event.add) and len(set(event.add)) == len(event.add)
        if not is_new or event.remove < 0:
            self._impossible(event)
        if self.state is not PoolState.OPEN:
            self._out += [m.Vacate(place) for place in event.add]
            return
        for place in event.add:
            self._out += self.crew.open_place(place, self._now)
        named = [worker for place in event.leave if (worker := self._worker_in(place)) is not None]
        bound = (self.crew.retiring, self.crew.lanes)  # these go anyway; on those others depend
        self._let_go([worker for worker in named if not any(worker.worker_id in group for group in bound)])
        self._let_go(self.crew.least_needed(event.remove))

    def _let_go(self, workers: list[Worker]) -> None:
        for worker in workers:
            self.crew.retire(worker)
            if not worker.attempts:
                self._out += self.crew.stop(worker)

    def _on_shutdown_requested(self, event: m.ShutdownRequested) -> None:
        if self.state is PoolState.BROKEN:
            self._tell_closed()
        if self.state not in (PoolState.OPEN, PoolState.CLOSING):
            return
        self.state = PoolState.CLOSING
        for task in list(self.backlog.tasks.values()):
            is_queued = task.waiting or task.items_resting or task.is_open
            if event.cancel_running or (event.cancel_queued and is_queued):
                self.ledger.end(task, TaskState.CANCELLED)

    def _close_if_done(self) -> None:
        if self.backlog.tasks:
            if not self.crew.places:
                self._break()
        elif self.state is PoolState.CLOSING:
            self.state = PoolState.CLOSED
            for worker in list(self.crew.workers.values()):
                self._out += self.crew.stop(worker)
            in_vain = (m.SignalTask, m.StartWorker, m.SetTimer, m.DropPlace)
            self._out[:] = [command for command in self._out if not isinstance(command, in_vain)]
            self._tell_closed()

    def _break(self) -> None:
        is_closing = self.state is PoolState.CLOSING
        self.state = PoolState.BROKEN
        self._out.append(m.BreakPool())
        for task in list(self.backlog.tasks.values()):
            self.ledger.end(task, TaskState.FAILED)
        if is_closing:
            self._tell_closed()

    def _tell_closed(self) -> None:
        if not self._is_close_told:
            self._is_close_told = True
            self._out.append(m.ClosePool())

    def _impossible(self, event: m.Event, task_id: int | None = None, worker_id: int | None = None) -> NoReturn:
        story = self.story(task_id, worker_id)
        raise InternalError(
            f"The scheduler cannot take {event!r} in state {self.state.value}. "
            "This is a mistake in raypool; report it with the story below.\n" + "\n".join(story),
            story=story,
        )
