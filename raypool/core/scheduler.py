"""The scheduler: takes an event, returns commands (both in `raypool.core.messages`).

It has no clock, no thread and no lock: the driver calls `handle` from one thread and carries out
the commands. The same events at the same times always give the same commands.

`Backlog` holds the waiting tasks, `Workers` the workers, and `Dispatcher` brings them together.
Also here: `Answers` settles what workers return, `Losses` handles lost workers and places, and
`Idleness` measures how long a pool has had no task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NoReturn

from raypool.core import messages as m
from raypool.core import policy
from raypool.core.backlog import Backlog
from raypool.core.dispatch import Dispatcher
from raypool.core.faulty_places import FaultyPlaces
from raypool.core.messages import SetTimer
from raypool.core.model import (
    Attempt,
    Departure,
    PoolState,
    Report,
    Task,
    TaskState,
    Worker,
    WorkerState,
)
from raypool.core.outcomes import Outcomes
from raypool.core.workers import Workers
from raypool.errors import InternalError, LossReason

STORY_LENGTH = 200
"""The number of events kept for the story in an `InternalError`."""

DEFAULT_START_TIMEOUT_S = 60.0

OPEN = PoolState.OPEN  # looking up a member of an enum is slow in Python 3.11
GOING_ON = (PoolState.OPEN, PoolState.CLOSING)


class Scheduler:
    """Decides which task runs where and when, and which outcomes count.

    Args:
        start_timeout_s: A worker that is not ready after this time [s] is lost.
        idle_timeout_s: After this time without a task [s] the workers end until the next task;
            None: never.
    """

    def __init__(
        self, start_timeout_s: float = DEFAULT_START_TIMEOUT_S, idle_timeout_s: float | None = None
    ) -> None:
        self.state = PoolState.OPEN
        self.leaving: m.PoolLeaving | None = None  # while no node of the pool stays
        self.backlog = Backlog()
        self.workers = Workers(start_timeout_s)
        self.outcomes = Outcomes(self.backlog, self.workers)
        self.counts = self.outcomes.counts
        self._faults = FaultyPlaces(self.workers, self.outcomes)
        self._losses = Losses(self.backlog, self.workers, self.outcomes, self._faults)
        self._answers = Answers(
            self.backlog, self.workers, self.outcomes, self._faults, self._losses
        )
        self._dispatcher = Dispatcher(self.backlog, self.workers, self.outcomes, self._faults)
        self._idleness = Idleness(idle_timeout_s) if idle_timeout_s is not None else None
        self._last_task_id = -1
        self._is_close_told = False
        self._story: deque[tuple[float, m.Event]] = deque(maxlen=STORY_LENGTH)
        self._now = 0.0
        self._out = self.outcomes.out
        self._handlers: dict[type[Any], Any] = {
            m.TaskSubmitted: self._on_submitted,
            m.ItemsAdded: self._on_items_added,
            m.CancelRequested: self._on_cancel_requested,
            m.DrainRequested: self._on_drain_requested,
            m.FirstRequested: self._on_first_requested,
            m.StopRequested: self._on_stop_requested,
            m.WorkerReady: self._on_worker_ready,
            m.WorkerLost: self._on_worker_lost,
            m.PlaceLeaving: self._on_place_leaving,
            m.PoolLeaving: self._on_pool_leaving,
            m.PoolResumed: self._on_pool_resumed,
            m.PlaceLost: self._on_place_lost,
            m.AttemptFinished: self._on_attempt_finished,
            m.AttemptNarrowed: self._on_attempt_narrowed,
            m.TimerFired: self._on_timer_fired,
            m.ResizeRequested: self._on_resize_requested,
            m.ShutdownRequested: self._on_shutdown_requested,
        }

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Process an event of the time `now` [s, any steady clock]; return commands, in order.

        Raises:
            InternalError: The event cannot happen in this state. Nothing has changed.
        """
        self._story.append((now, event))
        self._now = self.outcomes.now = now
        self._out.clear()
        self._handlers[type(event)](event)
        if self.workers.holds:
            self._losses.review_holds()
        if self.workers.spent:
            self._out += self.workers.renew_spent(now)
        work = self._dispatcher.give_out(now) if self.leaving is None else []
        if self.workers.lanes_lost:
            # no remaining worker may run what waits there
            for lane in self.workers.lanes_lost:
                for task_id in list(lane.tasks):  # a task that ends leaves the lane
                    self.outcomes.go_on(self.backlog.tasks[task_id])
            self.workers.lanes_lost.clear()
        if not self.backlog.tasks or not self.workers.places:
            self._close_if_done()
        if self.leaving is not None and self.leaving.is_final:
            self._break_if_left(self.leaving)
        if self._idleness is not None:
            if self.backlog.tasks or not self.workers.is_awake:
                self._idleness.end()
            else:
                self._out += self._idleness.begin(now)
        # Workers get their next calls before results are reported: they need not wait for the
        # driver's book-keeping.
        return work + self._out

    def story(self, task_id: int | None = None, worker_id: int | None = None) -> tuple[str, ...]:
        """Return the last events that name this task or worker; without either, all."""
        wanted = [
            f"{name}={n},"
            for name, n in (("task_id", task_id), ("worker_id", worker_id))
            if n is not None
        ]
        lines = [
            (f"{now:.6f} {event!r}", f"{event!r},".replace(")", ",")) for now, event in self._story
        ]
        return tuple(
            line for line, text in lines if not wanted or any(name in text for name in wanted)
        )

    # --- tasks ------------------------------------------------------------------------------------

    def _on_submitted(self, event: m.TaskSubmitted) -> None:
        spec = event.spec
        if spec.task_id <= self._last_task_id or not spec.is_sound:
            self._impossible(event, task_id=spec.task_id)
        self._last_task_id = spec.task_id
        self.counts.submitted += spec.size
        task = self.backlog.admit(spec)
        if self.state is not OPEN:
            self.outcomes.end(
                task, TaskState.FAILED if self.state is PoolState.BROKEN else TaskState.CANCELLED
            )
            return
        if spec.place is not None or spec.places is not None:
            task.lane = self.workers.lane_for(spec)
            task.lane.tasks[spec.task_id] = None
        if spec.is_gang and not self.workers.has_enough(task):
            self.outcomes.end(task, TaskState.FAILED)
            return
        self.outcomes.go_on(task)
        if self.workers.parked and self.backlog.tasks:
            self._out += self.workers.wake(self._now)

    def _on_items_added(self, event: m.ItemsAdded) -> None:
        task = self.backlog.tasks.get(event.task_id)
        if (
            event.task_id > self._last_task_id
            or event.count < 0
            or (task is not None and event.is_open is not None and not task.is_open)
        ):
            self._impossible(event, task_id=event.task_id)
        if task is not None:  # else it has ended: cancelled, or failed
            self.counts.submitted += event.count
            self.backlog.extend(task, event.count)
            task.is_open = task.is_open if event.is_open is None else event.is_open
            self.outcomes.go_on(task)

    def _on_cancel_requested(self, event: m.CancelRequested) -> None:
        if (task := self._task(event)) is None:
            return
        if event.item is None:
            self.outcomes.end(task, TaskState.CANCELLED)
        else:
            self.outcomes.cancel_item(task, event.item)

    def _on_drain_requested(self, event: m.DrainRequested) -> None:
        if (task := self._task(event)) is not None:
            self.outcomes.drain(task)

    def _on_first_requested(self, event: m.FirstRequested) -> None:
        task = self._task(event)
        if task is None or task.spec.is_gang:
            return
        if (piece := self.backlog.withdraw(task, event.item)) is not None:
            self.backlog.run_again(task, [piece])
            self.outcomes.go_on(task)

    def _on_stop_requested(self, event: m.StopRequested) -> None:
        if (task := self._task(event)) is not None:
            self.outcomes.signal(task, m.Signal.STOP, event.item)

    def _task(
        self, event: m.CancelRequested | m.DrainRequested | m.FirstRequested | m.StopRequested
    ) -> Task | None:
        if event.task_id > self._last_task_id:
            self._impossible(event, task_id=event.task_id)
        return self.backlog.tasks.get(event.task_id)

    # --- answers ----------------------------------------------------------------------------------

    def _on_attempt_finished(self, event: m.AttemptFinished) -> None:
        worker_id, attempt_id, reports, is_spent = event
        workers = self.workers
        if worker_id >= workers.next_worker_id or attempt_id >= workers.next_attempt_id:
            self._impossible(event, worker_id=worker_id)
        worker = workers.by_id.get(worker_id)
        if worker is None or attempt_id not in worker.attempts:
            return  # an answer from a worker that was given up
        attempt = worker.attempts[attempt_id]
        slices = attempt.slices
        if len(reports) != len(slices) or not all(map(Report.is_about, reports, slices)):
            self._impossible(event, worker_id=worker_id)
        self._answers.take(worker, attempt_id, reports)
        if attempt.is_loan:
            if worker_id in workers.retiring:
                self._out += workers.stop(worker)
            else:  # tasks bound to this worker meanwhile have waited for its start
                worker.state, worker.has_delivered = WorkerState.STARTING, False
                self._out += workers.launch(worker, self._now)
            return
        if is_spent or workers.spent:
            workers.note_spent(worker, is_spent)
        self._freed(worker, is_over=attempt.is_fresh)

    def _on_attempt_narrowed(self, event: m.AttemptNarrowed) -> None:
        worker_id, attempt_id, reports, kept = event
        if attempt_id >= self.workers.next_attempt_id:
            self._impossible(event, worker_id=worker_id)
        worker = self._worker(event)
        if worker is None or attempt_id not in worker.attempts:
            return  # all of it has come back meanwhile, or the worker was given up
        slices = worker.attempts[attempt_id].slices
        if not len(slices) == len(reports) == len(kept) or not any(kept):
            self._impossible(event, worker_id=worker_id)
        fits = all(map(Report.is_about, reports, slices))
        if not fits or not all(map(Report.leaves, reports, slices, kept)):
            self._impossible(event, worker_id=worker_id)
        self._answers.take_part(worker, attempt_id, reports, kept)

    def _freed(self, worker: Worker, is_over: bool) -> None:
        """Note that a worker has one call less; `is_over`: its process takes no other."""
        if worker.attempts:
            self.workers.offer_ahead(worker, next(iter(worker.attempts.values())))
        elif worker.worker_id in self.workers.retiring:
            self._out += self.workers.stop(worker)
        elif is_over:
            self._out += self.workers.launch(self.workers.renew(worker), self._now)
        else:
            self.workers.free(worker)

    # --- workers ----------------------------------------------------------------------------------

    def _on_worker_ready(self, event: m.WorkerReady) -> None:
        worker = self._worker(event)
        if worker is None:
            return  # too late: another one was started in its place
        if worker.state is not WorkerState.STARTING:
            self._impossible(event, worker_id=event.worker_id)
        self.workers.places[worker.place].failed_starts = 0
        if self._idleness is not None:
            self._idleness.end()  # a worker that was still starting could not have run anything
        if worker.attempts:  # it was started for this one
            self._out += self._dispatcher.begin(worker, self._now)
        if not worker.attempts:
            self._freed(worker, is_over=False)

    def _on_timer_fired(self, event: m.TimerFired) -> None:
        worker = self._worker(event)
        if worker is None:
            self._on_pool_timer(event)
        elif event.kind == "timeout":
            self._losses.time_out(worker, event.attempt_id)
        elif event.kind == "leave":
            self._losses.interrupt_if_due(worker)
        elif worker.state is not WorkerState.STARTING:
            pass  # ready in time
        elif event.kind == "start":
            self._out += self.workers.launch(worker, self._now)
        else:
            self._lose(worker, LossReason.START, was_idle=False)

    def _on_pool_timer(self, event: m.TimerFired) -> None:
        idleness, task = self._idleness, self.backlog.tasks.get(event.task_id)
        if event.kind == "idle" and idleness is not None and idleness.has_lasted(self._now):
            idleness.end()
            if self.workers.is_at_rest:  # else wait for those that are starting
                self._out += self.workers.park()
        elif event.kind == "retry" and task is not None:
            self.backlog.rouse(task)
            self.outcomes.go_on(task)
        elif event.kind == "leave" and event.worker_id < 0 and self.leaving is not None:
            at = self.leaving.at
            if at is not None and at <= self._now:  # else they were given more time
                self._tell_all(m.Signal.CANCEL)

    def _on_worker_lost(self, event: m.WorkerLost) -> None:
        worker = self._worker(event)
        if worker is not None:
            self.counts.workers_lost += worker.state is not WorkerState.STARTING
            self._lose(worker, event.reason, event.was_idle)

    def _worker(
        self, event: m.WorkerReady | m.WorkerLost | m.TimerFired | m.AttemptNarrowed
    ) -> Worker | None:
        """Return the worker of an event; None if it was replaced meanwhile."""
        if event.worker_id >= self.workers.next_worker_id:
            self._impossible(event, worker_id=event.worker_id)
        return self.workers.by_id.get(event.worker_id)

    def _lose(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        has_future = worker.worker_id not in self.workers.retiring
        if self.leaving is not None and self.leaving.is_final:  # no other worker starts there
            self._losses.lose_place(worker, reason, was_idle)
        else:
            self._losses.lose(worker, reason, was_idle)
        if has_future and not self.workers.places:
            self._break()

    def _on_place_leaving(self, event: m.PlaceLeaving) -> None:
        worker = self._worker_in(event.place)
        if worker is not None:
            self._losses.announce(worker, event.at)

    def _on_pool_leaving(self, event: m.PoolLeaving) -> None:
        if self.state not in GOING_ON:
            return
        self.leaving = event
        self._losses.take_back_unsent()
        is_due = event.at is not None and event.at <= self._now
        self._tell_all(m.Signal.CANCEL if is_due else m.Signal.LEAVE)
        for kind, at in (("leave", event.at), ("gone", event.gone_at)):
            if at is not None and at > self._now:
                self._out.append(SetTimer(at, kind, -1))

    def _on_pool_resumed(self, _: m.PoolResumed) -> None:
        if self.state in GOING_ON:
            self.leaving = None

    def _tell_all(self, signal: m.Signal) -> None:
        for worker in self.workers.by_id.values():
            self.outcomes.send_elsewhere(worker, signal)

    def _break_if_left(self, leaving: m.PoolLeaving) -> None:
        """End the pool once nothing runs any more, or what runs has no time left."""
        is_over = leaving.gone_at is not None and leaving.gone_at <= self._now
        if is_over or all(w.state is not WorkerState.BUSY for w in self.workers.by_id.values()):
            self._break()

    def _on_place_lost(self, event: m.PlaceLost) -> None:
        worker = self._worker_in(event.place)
        if worker is None:
            return
        has_future = worker.worker_id not in self.workers.retiring
        self.counts.workers_lost += worker.state in (WorkerState.IDLE, WorkerState.BUSY)
        self._losses.lose_place(worker, event.reason)
        if has_future and not self.workers.places:
            self._break()

    def _worker_in(self, place_id: int) -> Worker | None:
        place = self.workers.places.get(place_id)
        return None if place is None else self.workers.by_id[place.worker_id]

    # --- resizing and shutdown --------------------------------------------------------------------

    def _on_resize_requested(self, event: m.ResizeRequested) -> None:
        is_known = not self.workers.places.keys().isdisjoint(event.add)
        if is_known or len(set(event.add)) < len(event.add) or (event.size or 0) < 0:
            self._impossible(event)
        if self.state is not PoolState.OPEN:
            self._out += [m.Vacate(place) for place in event.add]
            return
        for place in event.add:
            self._out += self.workers.open_place(place, self._now)
        named = [worker for place in event.leave if (worker := self._worker_in(place)) is not None]
        # retiring workers go anyway, and tasks are bound to the workers that have a lane
        staying = self.workers.retiring.keys() | self.workers.lanes.keys()
        self._let_go([worker for worker in named if worker.worker_id not in staying])
        if event.size is not None:
            # counted here: workers may have gone since the request
            excess = self.workers.size - event.size
            self._let_go(self.workers.least_needed(max(excess, 0)), may_stay=True)
            self.workers.keep(max(-excess, 0))

    def _let_go(self, workers: list[Worker], *, may_stay: bool = False) -> None:
        for worker in workers:
            self.workers.retire(worker, may_stay=may_stay)
            if not worker.attempts:
                self._out += self.workers.stop(worker)

    def _on_shutdown_requested(self, event: m.ShutdownRequested) -> None:
        if self.state is PoolState.BROKEN:
            self._tell_closed()
        if self.state not in GOING_ON:
            return
        self.state = PoolState.CLOSING
        for task in list(self.backlog.tasks.values()):
            if event.cancel_running or (event.cancel_queued and task.has_more):
                self.outcomes.end(task, TaskState.CANCELLED)

    def _close_if_done(self) -> None:
        if self.backlog.tasks:
            if not self.workers.places:
                self._break()
        elif self.state is PoolState.CLOSING:
            self.state = PoolState.CLOSED
            for worker in list(self.workers.by_id.values()):
                self._out += self.workers.stop(worker)
            # all workers have ended: what would still be done to them has no effect
            in_vain = (m.SignalTask, m.StartWorker, m.SetTimer, m.DropPlace)
            self._out[:] = [command for command in self._out if not isinstance(command, in_vain)]
            self._tell_closed()

    def _break(self) -> None:
        if self.state not in GOING_ON:
            return
        is_closing = self.state is PoolState.CLOSING
        self.state = PoolState.BROKEN
        self._out.append(m.BreakPool())
        for task in list(self.backlog.tasks.values()):
            self.outcomes.end(task, TaskState.FAILED)
        self.workers.spent.clear()  # nobody needs others in their places
        if is_closing:
            self._tell_closed()

    def _tell_closed(self) -> None:
        if not self._is_close_told:
            self._is_close_told = True
            self._out.append(m.ClosePool())

    def _impossible(
        self, event: m.Event, task_id: int | None = None, worker_id: int | None = None
    ) -> NoReturn:
        story = self.story(task_id, worker_id)
        raise InternalError(
            f"The scheduler cannot take {event!r} in state {self.state.value}. "
            "This is a bug in raypool; report it with the story below.\n" + "\n".join(story),
            story=story,
        )


# --- answers of workers ---------------------------------------------------------------------------


class Answers:
    """Settles returned items, by `Outcomes`, and learns how long their function takes."""

    def __init__(
        self,
        backlog: Backlog,
        workers: Workers,
        outcomes: Outcomes,
        faults: FaultyPlaces,
        losses: Losses,
    ) -> None:
        self._backlog = backlog
        self._workers = workers
        self._outcomes = outcomes
        self._faults = faults
        self._losses = losses

    def take(self, worker: Worker, attempt_id: int, reports: Sequence[Report]) -> None:
        """Process the answer to an attempt, one report for each slice."""
        attempt = worker.attempts.pop(attempt_id)
        worker.has_delivered = True
        attempt.pace.running -= 1
        wanted = None
        for piece, report in zip(attempt.slices, reports, strict=True):
            task = self._backlog.land(piece, attempt_id)
            if task is not None:
                wanted = task
                self._outcomes.settle(task, piece, report, attempt_id)
        self._observe(worker, attempt, reports, wanted)

    def take_part(
        self, worker: Worker, attempt_id: int, reports: Sequence[Report], kept: Sequence[int]
    ) -> None:
        """Process the finished part of a long attempt.

        The worker keeps `kept` items of each slice, and no call that is queued behind them.
        """
        attempt = worker.attempts[attempt_id]
        self._take_back_behind(worker, attempt_id)
        self._workers.move(worker, None)
        wanted, left = None, []
        for piece, report, count in zip(attempt.slices, reports, kept, strict=True):
            at_hand = piece._replace(
                start=piece.start + report.done, stop=piece.start + report.done + count
            )
            if count:
                left.append(at_hand)
            task = self._backlog.land(piece, attempt_id)
            if task is None:
                continue
            wanted = task
            if not count:
                self._outcomes.settle(task, piece, report, attempt_id)
                continue
            self._backlog.fly(task, at_hand, (attempt_id, worker.worker_id))
            if at_hand.stop < piece.stop:
                self._backlog.run_again(task, [piece._replace(start=at_hand.stop)])
            if report.done:
                self._outcomes.settle(task, piece._replace(stop=at_hand.start), report, attempt_id)
            else:
                self._outcomes.go_on(task)
        worker.attempts[attempt_id] = attempt._replace(slices=tuple(left), lasts=True)
        self._observe(worker, attempt, reports, wanted)

    def _take_back_behind(self, worker: Worker, attempt_id: int) -> None:
        """Queue again what was sent to a worker behind this attempt."""
        numbers = list(worker.attempts)
        for number in numbers[numbers.index(attempt_id) + 1 :]:
            attempt = worker.attempts.pop(number)
            attempt.pace.running -= 1
            for piece in reversed(attempt.slices):
                task = self._backlog.land(piece, number)
                if task is not None:
                    self._backlog.run_again(task, [piece])
                    self._outcomes.go_on(task)

    def _observe(
        self, worker: Worker, attempt: Attempt, reports: Sequence[Report], wanted: Task | None
    ) -> None:
        """Update the pace of a function; `wanted`: the call's last task that has not ended."""
        done, failed, busy_s = 0, 0, 0.0
        for report in reports:
            done += report.done
            failed += report.failed - len(report.again)
            busy_s += report.busy_s
        if done:
            attempt.pace.observe(done, busy_s)
            if wanted is not None and (failed or self._workers.streaks):
                self._losses.take_out(
                    worker,
                    self._faults.note_answer(worker, attempt, wanted, done, failed, busy_s),
                )


# --- lost workers and places ----------------------------------------------------------------------


class Losses:
    """Removes lost workers and places, and settles what they ran, by `Outcomes`."""

    def __init__(
        self, backlog: Backlog, workers: Workers, outcomes: Outcomes, faults: FaultyPlaces
    ) -> None:
        self._backlog = backlog
        self._workers = workers
        self._outcomes = outcomes
        self._faults = faults

    # --- workers ----------------------------------------------------------------------------------

    def lose(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        """Replace a lost worker, and run its items elsewhere or fail them."""
        workers = self._workers
        reason = self._in_the_end(worker, reason)
        was_idle = was_idle or worker.state is not WorkerState.BUSY
        leaving = None
        if not was_idle and reason not in policy.FORGIVEN:
            attempt = next(iter(worker.attempts.values()))
            leaving = self._faults.note_loss(
                worker, attempt, self._backlog.tasks.get(attempt.slices[0].task_id)
            )
        self._outcomes.out += (
            workers.replace(worker, reason, self._outcomes.now)
            if leaving is None
            else workers.remove(worker, leaving)
        )
        self._run_elsewhere(worker, reason, was_idle)

    def _run_elsewhere(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        # Either the first attempt was running, or it had ended, its answer was lost, and the next
        # one was running. So both count as retries: an innocent item has attempts left, alone,
        # but a culprit never runs too often.
        for attempt_id, attempt in worker.attempts.items():
            attempt.pace.running -= 1
            for piece in attempt.slices:
                task = self._backlog.land(piece, attempt_id)
                if task is not None:
                    self._outcomes.lose(task, piece, reason, was_idle)

    def time_out(self, worker: Worker, attempt_id: int) -> None:
        """Fail items that run for too long. Their worker is busy until it has answered."""
        attempt = worker.attempts.get(attempt_id)
        if attempt is None:
            return
        for piece in attempt.slices:
            task = self._backlog.tasks.get(piece.task_id)
            if task is not None and task.spec.is_gang:
                self._outcomes.time_out_gang(task)
            elif self._backlog.land(piece, attempt_id) is not None:
                assert task is not None
                self._outcomes.time_out(task, piece, attempt_id, worker.worker_id)
                self.take_out(worker, self._faults.note_loss(worker, attempt, task))

    # --- places -----------------------------------------------------------------------------------

    def take_out(self, worker: Worker, leaving: Departure | None) -> None:
        """Give up a place as soon as its worker has ended, if there is a reason."""
        if leaving is not None:
            self._workers.retire(worker, leaving)

    def review_holds(self) -> None:
        """Take out or release the places that are held, if something has become known."""
        workers = self._workers
        for place in list(workers.holds):
            worker = workers.by_id[workers.places[place].worker_id]
            leaving = self._faults.judge(worker)
            self.take_out(worker, leaving)
            if leaving is not None and not worker.attempts:
                self._outcomes.out += workers.stop(worker)
            elif worker.state is WorkerState.IDLE and place not in workers.holds:
                workers.free(worker)

    def announce(self, worker: Worker, at: float | None) -> None:
        """Give a place no more calls, and signal its tasks; at `at` they are interrupted.

        A pool whose last place is announced is not broken: another place may come in time.
        """
        if worker.state is not WorkerState.BUSY:
            self.lose_place(worker, LossReason.PREEMPTED)
            return
        self._workers.retire(worker, Departure(LossReason.PREEMPTED, inf if at is None else at))
        if at is not None and at <= self._outcomes.now:
            self.interrupt_if_due(worker)
            return
        self._outcomes.send_elsewhere(worker, m.Signal.LEAVE)
        if at is not None:
            self._outcomes.out.append(m.SetTimer(at, "leave", worker.worker_id))

    def interrupt_if_due(self, worker: Worker) -> None:
        """Interrupt a worker whose machine is about to go, unless it was given more time."""
        leaving = self._workers.places[worker.place].leaving
        if leaving is not None and leaving.at <= self._outcomes.now:
            self._outcomes.send_elsewhere(worker, m.Signal.CANCEL)

    def take_back_unsent(self) -> None:
        """Queue again what was to be sent to workers that are still starting."""
        for worker in self._workers.by_id.values():
            if worker.state is not WorkerState.BUSY:
                self._run_elsewhere(worker, LossReason.PREEMPTED, was_idle=True)
                worker.attempts.clear()

    def lose_place(self, worker: Worker, reason: LossReason, was_idle: bool = False) -> None:
        """Remove a worker and its place."""
        was_idle = was_idle or worker.state is not WorkerState.BUSY
        reason = self._in_the_end(worker, reason)
        self._outcomes.out += self._workers.remove(worker, Departure(reason))
        self._run_elsewhere(worker, reason, was_idle)

    def _in_the_end(self, worker: Worker, reason: LossReason) -> LossReason:
        # the announced end of a machine does not count against what ran there
        leaving = self._workers.places[worker.place].leaving
        is_announced = leaving is not None and leaving.reason is LossReason.PREEMPTED
        return LossReason.PREEMPTED if is_announced and reason is LossReason.NODE else reason


# --- idle time ------------------------------------------------------------------------------------


class Idleness:
    """Measures how long a pool has had no task, with one timer at most, however often it is used.

    Args:
        timeout_s: The time without a task after which the workers end [s].
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # None: the pool is in use, or parked already
        self._ends_at: float | None = None
        self._is_timer_set = False

    def begin(self, now: float) -> list[SetTimer]:
        """Note that there is no task; only the first call counts."""
        if self._ends_at is None:
            self._ends_at = now + self._timeout_s
        if self._is_timer_set:
            return []
        self._is_timer_set = True
        return [SetTimer(self._ends_at, "idle", -1)]

    def end(self) -> None:
        """Note that the pool is in use, or restart the time."""
        self._ends_at = None

    def has_lasted(self, now: float) -> bool:
        """Whether the time is over, when the timer fires."""
        # the timer is early if the pool was used in between; `begin` then sets the next one
        self._is_timer_set = False
        return self._ends_at is not None and now >= self._ends_at
