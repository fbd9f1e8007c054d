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
from raypool.core import policy
from raypool.core.backlog import Backlog
from raypool.core.crew import Crew
from raypool.core.model import Attempt, Counts, PoolState, Report, Slice, Task, TaskState, Worker, WorkerState
from raypool.errors import InternalError, LossReason

STORY_LENGTH = 200
"""So many of the last events are kept for the story that an `InternalError` tells."""

DEFAULT_START_TIMEOUT_S = 60.0


class Scheduler:
    """Which task runs where and when, and what becomes of it.

    Args:
        start_timeout_s: A worker that has not come up after this time [s] is lost.
    """

    def __init__(self, start_timeout_s: float = DEFAULT_START_TIMEOUT_S) -> None:
        self.state = PoolState.OPEN
        self.counts = Counts()
        self.backlog = Backlog()
        self.crew = Crew(start_timeout_s)
        self._last_task_id = -1
        self._is_close_told = False
        self._story: deque[tuple[float, m.Event]] = deque(maxlen=STORY_LENGTH)
        self._now = 0.0
        self._out: list[m.Command] = []
        self._handlers: dict[type[Any], Any] = {
            m.TaskSubmitted: self._on_submitted,
            m.ItemsAdded: self._on_items_added,
            m.CancelRequested: self._on_cancel_requested,
            m.WorkerReady: self._on_worker_ready,
            m.WorkerLost: self._on_worker_lost,
            m.AttemptFinished: self._on_attempt_finished,
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
        self._now = now
        results = self._out = []
        self._handlers[type(event)](event)
        work: list[m.Command] = []
        self._out = work
        self._dispatch()
        self._out = results
        self._close_if_done()
        # Workers are fed before anybody is told about results: they need not wait for the driver's book-keeping.
        return work + results if work else results

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
        if self.state is not PoolState.OPEN:
            self._end(task, TaskState.FAILED if self.state is PoolState.BROKEN else TaskState.CANCELLED)
        elif spec.place is None:
            self._go_on(task)
        elif spec.place in self.crew.places:
            task.worker_id = self.crew.places[spec.place].worker_id
            self.crew.workers[task.worker_id].bound[spec.task_id] = None
            self._go_on(task)
        else:
            self._fail_waiting(task, LossReason.UNKNOWN)

    def _on_items_added(self, event: m.ItemsAdded) -> None:
        task = self.backlog.tasks.get(event.task_id)
        if event.task_id > self._last_task_id or event.count < 0 or (task is not None and not task.is_open):
            self._impossible(event, task_id=event.task_id)
        if task is not None:  # else it has ended: cancelled, or failed
            self.counts.submitted += event.count
            self.backlog.extend(task, event.count)
            task.is_open = event.is_open
            self._go_on(task)

    def _on_cancel_requested(self, event: m.CancelRequested) -> None:
        if event.task_id > self._last_task_id:
            self._impossible(event, task_id=event.task_id)
        task = self.backlog.tasks.get(event.task_id)
        if task is not None:
            self._end(task, TaskState.CANCELLED)

    def _go_on(self, task: Task) -> None:
        """Queue what a task still has to run, or end it."""
        if task.settled == task.size and not task.is_open:
            self._end(task, TaskState.FINISHED)
        elif task.worker_id is None:
            self.backlog.push(task, self.backlog.heap)
        else:
            worker = self.crew.workers[task.worker_id]
            self.backlog.push(task, worker.own)
            if worker.own:
                self.crew.claim(worker)

    def _end(self, task: Task, state: TaskState) -> None:
        self.backlog.discard(task)
        self.counts.cancelled += task.size - task.settled
        if task.worker_id in self.crew.workers:
            del self.crew.workers[task.worker_id].bound[task.spec.task_id]
        if self.crew.gang is task:
            self.crew.release_gang()
        self._out.append(m.EndTask(task.spec.task_id, state))

    def _fail_items(self, task: Task, items: Slice, reason: LossReason) -> None:
        count = items.stop - items.start
        self._count_settled(task, count, count)
        self._out.append(m.FailItems(items, reason))

    def _fail_waiting(self, task: Task, reason: LossReason) -> None:
        """Fail all that waits of a task that has nothing in flight, and so end it."""
        for piece in self.backlog.give_up(task):
            self._fail_items(task, piece, reason)
        self._end(task, TaskState.FAILED)

    def _count_settled(self, task: Task, settled: int, failed: int) -> None:
        task.settled += settled
        self.counts.finished += settled - failed
        self.counts.failed += failed

    # --- what comes back ----------------------------------------------------------------------------------------------

    def _on_attempt_finished(self, event: m.AttemptFinished) -> None:
        worker_id, attempt_id, reports = event
        crew = self.crew
        if worker_id >= crew.next_worker_id or attempt_id >= crew.next_attempt_id:
            self._impossible(event, worker_id=worker_id)
        worker = crew.workers.get(worker_id)
        if worker is None or attempt_id not in worker.attempts:
            return  # an answer from a worker that was given up
        slices, pace, _ = worker.attempts[attempt_id]
        if len(reports) != len(slices) or not all(map(Report.is_about, reports, slices)):
            self._impossible(event, worker_id=worker_id)
        del worker.attempts[attempt_id]
        worker.has_delivered = True
        done, busy_s = 0, 0.0
        for piece, report in zip(slices, reports, strict=True):
            done += report.done
            busy_s += report.busy_s
            task = self.backlog.land(piece)
            if task is not None:
                self._settle(task, piece, report, attempt_id)
        if done:
            pace.observe(done, busy_s)
        self._freed(worker)

    def _settle(self, task: Task, piece: Slice, report: Report, attempt_id: int) -> None:
        """Take in what a worker says of a slice; queue what it handed back, or what may run again."""
        done, failed, retry, _ = report
        stop = piece.start + done
        if stop == piece.stop and not retry:  # nearly always
            self._out.append(m.SettleItems(attempt_id, piece))
            self._count_settled(task, done, failed)
            self._after_landing(task, [], failed > 0)
            return
        if task.spec.is_gang or piece.attempt > task.spec.retries:
            retry = ()
        self._out += [m.SettleItems(attempt_id, run) for run in piece._replace(stop=stop).without(retry)]
        failed -= len(retry)
        self._count_settled(task, done - len(retry), failed)
        again = [Slice(piece.task_id, index, index + 1, piece.attempt + 1) for index in retry]
        if stop < piece.stop:
            again.append(piece._replace(start=stop))
        if again and task.spec.is_gang:  # the other ranks have begun: it can't follow them
            self._fail_items(task, again.pop(), LossReason.UNKNOWN)
            failed += 1
        self._after_landing(task, again, failed > 0)

    def _after_landing(self, task: Task, again: list[Slice], has_failed: bool) -> None:
        """Queue what has to run again, and end the task if that was all or if one failure is enough."""
        if again:
            self.backlog.run_again(task, again)
        if has_failed and task.spec.fail_fast:
            self._end(task, TaskState.FAILED)
        else:
            self._go_on(task)

    def _freed(self, worker: Worker) -> None:
        """Note that a call has come back from a worker."""
        if worker.attempts:
            self.crew.offer_ahead(worker, next(iter(worker.attempts.values())))
        elif worker.worker_id in self.crew.retiring:
            self._stop(worker)
        else:
            self.crew.free(worker)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_ready(self, event: m.WorkerReady) -> None:
        worker = self._worker(event)
        if worker is None:
            return  # too late: another one was started in its place
        if worker.state is not WorkerState.STARTING:
            self._impossible(event, worker_id=event.worker_id)
        self.crew.places[worker.place].failed_starts = 0
        self.crew.free(worker)

    def _on_timer_fired(self, event: m.TimerFired) -> None:
        worker = self._worker(event)
        if worker is None or worker.state is not WorkerState.STARTING:
            return  # ready in time, or given up
        if event.kind == "start":
            self._out += self.crew.launch(worker, self._now)
        else:
            self._lose(worker, LossReason.START, was_idle=False)

    def _on_worker_lost(self, event: m.WorkerLost) -> None:
        worker = self._worker(event)
        if worker is not None:
            self.counts.workers_lost += worker.state is not WorkerState.STARTING
            self._lose(worker, event.reason, event.was_idle)

    def _worker(self, event: m.WorkerReady | m.WorkerLost | m.TimerFired) -> Worker | None:
        if event.worker_id >= self.crew.next_worker_id:
            self._impossible(event, worker_id=event.worker_id)
        return self.crew.workers.get(event.worker_id)

    def _lose(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        """Replace a worker, and see to what it was running and to what was bound to it."""
        has_future = worker.worker_id not in self.crew.retiring
        self._out += self.crew.replace(worker, reason, self._now)
        # The first attempt was running, or it had ended, its answer died with the process, and the one behind it was running.
        # So both are charged: an innocent item has attempts left, alone, but a culprit never runs once too often.
        for attempt in worker.attempts.values():
            for piece in attempt.slices:
                task = self.backlog.land(piece)
                if task is not None:
                    self._lost(task, piece, reason, is_charged=not was_idle)
        self._fail_bound(worker, reason)
        if has_future and not self.crew.places:
            self._break()

    def _lost(self, task: Task, piece: Slice, reason: LossReason, is_charged: bool) -> None:
        retries = task.spec.retries
        if task.worker_id is not None:
            self._fail_items(task, piece, reason)  # `_fail_bound` ends it
        elif task.spec.is_gang or (is_charged and piece.attempt > retries):
            self._fail_items(task, piece, reason)
            self._after_landing(task, [], has_failed=True)
        elif is_charged:
            size = policy.piece_size(piece.stop - piece.start, attempts_left=retries + 1 - piece.attempt)
            self._after_landing(task, piece.for_next_attempt(size), has_failed=False)
        else:
            self._after_landing(task, [piece], has_failed=False)

    def _fail_bound(self, worker: Worker, reason: LossReason) -> None:
        """Fail the tasks that are bound to a worker that is gone: what they wanted there is gone too."""
        for task_id in worker.bound:
            self._fail_waiting(self.backlog.tasks[task_id], reason)

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
        for worker in self.crew.least_needed(event.remove):
            self.crew.retire(worker)
            if not worker.attempts:
                self._stop(worker)

    def _stop(self, worker: Worker) -> None:
        self._out.append(self.crew.stop(worker))
        self._fail_bound(worker, LossReason.EXIT)

    def _on_shutdown_requested(self, event: m.ShutdownRequested) -> None:
        if self.state is PoolState.BROKEN:
            self._tell_closed()
        if self.state not in (PoolState.OPEN, PoolState.CLOSING):
            return
        self.state = PoolState.CLOSING
        for task in list(self.backlog.tasks.values()):
            if event.cancel_running or (event.cancel_queued and (task.waiting or task.is_open)):
                self._end(task, TaskState.CANCELLED)

    def _close_if_done(self) -> None:
        if self.state is PoolState.CLOSING and not self.backlog.tasks:
            self.state = PoolState.CLOSED
            self._out += [self.crew.stop(worker) for worker in list(self.crew.workers.values())]
            self._tell_closed()
        elif not self.crew.places and self.backlog.tasks:
            self._break()

    def _break(self) -> None:
        is_closing = self.state is PoolState.CLOSING
        self.state = PoolState.BROKEN
        self._out.append(m.BreakPool())
        for task in list(self.backlog.tasks.values()):
            self._end(task, TaskState.FAILED)
        if is_closing:
            self._tell_closed()

    def _tell_closed(self) -> None:
        if not self._is_close_told:
            self._is_close_told = True
            self._out.append(m.ClosePool())

    # --- who gets what ------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give out work until nobody is free or nothing is left that may start.

        One gang collects at a time: two could each hold what the other needs. The next one holds up what stands behind it.
        """
        backlog, crew, heap = self.backlog, self.crew, self.backlog.heap
        while True:
            if crew.gang is not None:
                self._try_gang(crew.gang)
            head = backlog.head(heap)
            if head is not None and head.spec.is_gang:
                if crew.gang is None:
                    crew.collect(backlog.pop(heap))
                    continue
                head = None
            if head is not None and crew.idle:
                self._send(crew.first_idle(), backlog.take(heap, crew.size))
            elif crew.torn:
                self._offer_own(crew.workers[next(iter(crew.torn))], head)
            elif head is not None and crew.ahead and crew.gang is None and backlog.wants_look_ahead(head, crew.size):
                self._send(crew.workers[next(iter(crew.ahead))], backlog.take(heap, crew.size))
            else:
                return

    def _offer_own(self, worker: Worker, head: Task | None) -> None:
        """Let a free worker do what comes first: a task bound to it, the pool's next, or the gang that collects."""
        backlog, crew = self.backlog, self.crew
        own = backlog.head(worker.own)
        del crew.torn[worker.worker_id]
        if own is None:
            crew.free(worker)
        elif crew.gang is not None and crew.gang.order < own.order and crew.may_join(worker):
            crew.join(worker)
        else:
            is_first = head is None or own.order < head.order
            self._send(worker, backlog.take(worker.own if is_first else backlog.heap, crew.size))

    def _send(self, worker: Worker, attempt: Attempt) -> None:
        attempt_id = self.crew.engage(worker, attempt)
        self.counts.attempts += 1
        self._out.append(m.RunTasks(worker.worker_id, attempt_id, attempt.slices))

    def _try_gang(self, gang: Task) -> None:
        """Let a gang go if it has all its workers, and give it up if it never can."""
        if not self.crew.has_enough:
            self._end(gang, TaskState.FAILED)
        elif len(self.crew.members) == gang.size:
            for worker in self.crew.start_gang():
                self._send(worker, self.backlog.take_rank(gang))

    def _impossible(self, event: m.Event, task_id: int | None = None, worker_id: int | None = None) -> NoReturn:
        story = self.story(task_id, worker_id)
        raise InternalError(
            f"The scheduler cannot take {event!r} in state {self.state.value}. "
            "This is a mistake in raypool; report it with the story below.\n" + "\n".join(story),
            story=story,
        )
