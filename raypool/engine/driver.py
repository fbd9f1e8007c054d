"""The one thread that decides: messages from users and workers go in, and the scheduler's commands are carried out.

Everything that reaches a user (a resolved future, a finished loop) passes here, one after the other. Nothing in here waits for a
worker, and only this thread touches the scheduler.
"""

from __future__ import annotations

import functools
import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from time import time
from typing import Any, cast

from raypool.backends.base import Backend
from raypool.channel.hub import Hub
from raypool.channel.records import (
    NOBODY,
    Function,
    LocalValues,
    Part,
    Refusal,
    SliceResult,
    WorkerInfo,
    all_failed,
    nothing_done,
)
from raypool.core import messages as m
from raypool.core.model import PoolState, Slice, TaskSpec, TaskState, Worker, WorkerState
from raypool.core.scheduler import Scheduler
from raypool.engine import verdicts
from raypool.engine.arrivals import Arrivals
from raypool.engine.casualties import Casualties
from raypool.engine.in_flight import Sent
from raypool.engine.inbox import Inbox, Message
from raypool.engine.returns import Returns
from raypool.engine.timers import Timers, is_of_use
from raypool.engine.trace import TraceWriter
from raypool.engine.verdicts import Tell
from raypool.engine.work import GangWork, Work
from raypool.errors import LossReason, PoolBrokenError, PoolClosedError
from raypool.futures import Future

CLOSED = "The pool is closed. Open another with parpool()."


class Driver:
    """Runs the scheduler and carries out what it says.

    Args:
        scheduler: The core.
        inbox: Where everything arrives.
        hub: Where what tasks report and print comes together.
        tell: What the user and the rest of the pool are told.
        record: Writes down every event and its time, before it is handled.
    """

    def __init__(self, scheduler: Scheduler, inbox: Inbox, hub: Hub, tell: Tell, record: TraceWriter | None = None) -> None:
        self.scheduler = scheduler
        self.setups: list[Function] = []  # what every worker begins with
        self.works: dict[int, Work] = {}
        self.arrivals = Arrivals(lambda: self.closed.is_set())
        self.infos = self.arrivals.infos  # by place
        self.closed = threading.Event()
        self.crash: BaseException | None = None
        self._inbox = inbox
        self._hub = hub
        self._tell = tell
        self._record = record
        self._backend: Backend
        self._thread: threading.Thread | None = None
        self._task_ids = itertools.count()
        self._submit_lock = threading.Lock()
        self._drain_lock = threading.Lock()
        self._drainer: int | None = None  # the thread that has it
        self._timers = Timers(lambda timer: is_of_use(timer, scheduler))
        self.ask_call, self.as_owner = self._ask_call, (self,)  # made once: every queued future holds them
        self._speaker: WorkerInfo = NOBODY  # the worker that the event at hand is about
        self._at_hand: m.Event | None = None
        self._casualties = Casualties(scheduler)
        self._returns = Returns(self.works, self._casualties, self._cancel)
        self._notes: dict[type[Any], Callable[[Any, Any], m.Event | None]] = {m.TimerFired: self._note_late}
        self._notes |= {m.TaskSubmitted: self._note_submitted, m.WorkerReady: self._note_ready, m.WorkerLost: self._note_lost}
        self._notes |= {m.PlaceLeaving: self._note_going, m.PlaceLost: self._note_going, m.AttemptNarrowed: self._note_narrowed}

    # --- from any thread ----------------------------------------------------------------------------------------------

    def start(self, backend: Backend) -> None:
        """Begin to live, with this backend."""
        self._backend = backend
        if self._inbox.is_threaded:
            self._thread = threading.Thread(target=self._live, name="raypool-driver", daemon=True)
            self._thread.start()

    def post(self, event: m.Event, payload: Any = None) -> None:
        """Tell the driver that something has happened."""
        self._inbox.put((event, payload))
        if not self._inbox.is_threaded:
            self._drain()

    def submit(self, work: Work, make_spec: Callable[[int], TaskSpec]) -> int:
        """Hand in a task; return its number. If that is interrupted (Ctrl-C) the task is cancelled: nobody else knows of it."""
        task_id = -1
        try:
            with self._submit_lock:  # numbers arrive in order, and none arrives at a driver that has gone
                if self.closed.is_set():
                    raise self.crash_error() if self.crash else PoolClosedError(CLOSED)
                task_id = next(self._task_ids)
                self._inbox.put((m.TaskSubmitted(make_spec(task_id)), work))
            if self._inbox.is_threaded:
                self._inbox.give_way()
            else:
                self._drain()
        except BaseException:
            self.do(functools.partial(self._withdraw, task_id))
            raise
        return task_id

    def _withdraw(self, task_id: int) -> None:
        if task_id in self.works:  # it did come in
            self._cancel(task_id)

    @property
    def is_own_thread(self) -> bool:
        """Whether this code runs in the driver's thread (a callback of a future does): waiting here would be for ever."""
        return threading.current_thread() is self._thread or threading.get_ident() == self._drainer

    def _ask_call(self, future: Future[Any]) -> None:
        """Pass on what somebody wants of a call: that it ends, or that it ends early by itself."""
        self.post(m.CancelRequested(future.task_id) if future.cancelled() else m.StopRequested(future.task_id))

    def end_loan(self, worker_ids: Sequence[int]) -> None:
        """Say that the places of a loan are back: these workers, which have not started yet, start there."""
        self.do(functools.partial(self._end_loan, worker_ids))

    def _end_loan(self, worker_ids: Sequence[int]) -> None:
        workers = self.scheduler.crew.workers
        for worker_id in filter(workers.__contains__, worker_ids):  # the place of any other has gone meanwhile
            for attempt_id, attempt in workers[worker_id].attempts.items():
                rank = attempt.slices[0].start
                done = SliceResult(rank, 1, LocalValues([None]), 0, {}, array("d", [0.0]), time())
                self._inbox.put((m.AttemptFinished(worker_id, attempt_id, ()), [done]))

    def barrier(self) -> None:
        """Wait until everything that was posted before has been handled."""
        if self.is_own_thread:
            return
        handled = threading.Event()
        self.do(handled.set)
        while not self.closed.is_set() and not handled.wait(0.1):
            pass

    def do(self, chore: Callable[[], object]) -> None:
        """Call something short in the driver's thread, after all that was posted before. No lock: finalizers may call this."""
        self._inbox.put((None, chore))
        if not self._inbox.is_threaded:
            self._drain()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self.closed.is_set():
            self._step()

    def _drain(self) -> None:
        """Handle all there is, unless a call further up this stack (or another thread) is at it already."""
        while not self._inbox.is_empty and not self.closed.is_set() and self._drain_lock.acquire(blocking=False):
            self._drainer = threading.get_ident()
            try:
                while not self.closed.is_set() and self._step():
                    pass
            finally:
                self._drainer = None
                self._drain_lock.release()

    def _step(self) -> bool:
        """Handle the next message or timer; False if there is neither."""
        message: Message | None = None
        try:
            message = self._next_message()
            if message is not None:
                self._handle(*message)
            return message is not None
        except Exception as error:
            self._give_up(error)
        except BaseException as error:  # Ctrl-C, in a driver without a thread
            if message is not None:  # else it was only waiting for a timer
                self._give_up(error)
            raise
        return True

    def _next_message(self) -> Message | None:
        """Return the next message, or timer that is due; None if neither can come any more.

        What has come in goes before: a driver that is late itself would take an answer that came in time for one that did not.
        """
        while True:
            until = self._timers.next_at()
            if until is not None and self._inbox.now() >= until:
                self._inbox.put((self._timers.pop(), None))
            message = self._inbox.get(until)
            if message is not None or until is None:
                return message

    def crash_error(self) -> PoolBrokenError:
        """Return the error for those who still want something of a driver that has failed."""
        return verdicts.driver_failed(self.crash)

    def _give_up(self, error: BaseException) -> None:
        """Raypool's own mistake: nobody may be left waiting for it."""
        self.crash = error
        self._close()

    def _close(self) -> None:
        try:
            self._backend.close()
        finally:
            if self._record is not None:
                self._record.close()
            self._tell.closed()
            with self._submit_lock, self.arrivals.changed:
                self.closed.set()
                self.arrivals.changed.notify_all()
            self._end_leftovers()

    def _end_leftovers(self) -> None:
        """End what came too late, or all there is after a failure."""
        while not self._inbox.is_empty and (message := self._inbox.get(None)) is not None:
            event, payload = message
            if isinstance(event, m.TaskSubmitted):
                self.works[event.spec.task_id] = payload
        for work in list(self.works.values()):
            work.end(TaskState.FAILED if self.crash else TaskState.CANCELLED, self.crash_error() if self.crash else None)
        self.works.clear()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _handle(self, event: m.Event | None, payload: Any) -> None:
        if event is None:
            payload()
            return
        self._casualties.turn_page()
        if isinstance(event, m.AttemptFinished):
            event = self._returns.take(event, payload)
            self._speaker = self._info_of(event.worker_id)
        elif (note := self._notes.get(type(event))) is not None:
            event = note(event, payload) or event
        self._at_hand = event
        now = self._inbox.now()
        if self._record is not None:
            self._record(now, event)
        commands = self.scheduler.handle(event, now)
        if commands and isinstance(commands[0], m.ParkWorker):
            self._tell.note(verdicts.parked(len(commands)))
        for command in commands:
            self._carry_out(command)
        self._casualties.tell_misses(self.works, commands, self._speaker)
        self._returns.turn_page()

    def _note_submitted(self, event: m.TaskSubmitted, work: Work) -> None:
        self.works[event.spec.task_id] = work

    def _info_of(self, worker_id: int) -> WorkerInfo:
        worker = self.scheduler.crew.workers.get(worker_id)
        return NOBODY if worker is None else self.infos.get(worker.place, NOBODY)

    def _note_late(self, event: m.TimerFired, _: None) -> None:
        self._speaker = self._info_of(event.worker_id)
        if event.kind == "ready":
            self._casualties.words = (
                "it had not come up within start_timeout_s; raise that, or look for what keeps the machine busy"
            )

    def _note_lost(self, event: m.WorkerLost, words: str | None) -> None:
        worker = self.scheduler.crew.workers.get(event.worker_id)
        if worker is None:
            return  # it was given up before
        self._casualties.words = words or event.reason.value
        if isinstance(words, Refusal):
            self.arrivals.note_failed(worker.place, words)
        self._bury(worker, event.reason, event.was_idle)

    def _note_going(self, event: m.PlaceLeaving | m.PlaceLost, words: str | None) -> None:
        place = self.scheduler.crew.places.get(event.place)
        if place is None:
            return  # it has gone before
        worker = self.scheduler.crew.workers[place.worker_id]
        reason = event.reason if isinstance(event, m.PlaceLost) else LossReason.PREEMPTED
        self._speaker = self._info_of(worker.worker_id)
        self._casualties.note_going(event.place, words or reason.value)
        if isinstance(event, m.PlaceLost) or not (event.is_kept or worker.state is WorkerState.BUSY):  # else it has its time
            self._bury(worker, reason)

    def _bury(self, worker: Worker, reason: LossReason, was_idle: bool = False) -> None:
        """Let go of what is known of a worker that is lost."""
        self._speaker = self._info_of(worker.worker_id)
        self._hub.forget(worker.worker_id)
        calls = self._returns.in_flight.lose(worker.worker_id)
        for attempt_id in worker.attempts:
            if attempt_id in calls:
                self._casualties.note_fallen(calls[attempt_id], reason, was_idle)
            self._returns.note_stopped(attempt_id, is_replaced=True)

    def _note_ready(self, event: m.WorkerReady, info: WorkerInfo) -> m.WorkerReady:
        if (worker := self.scheduler.crew.workers.get(event.worker_id)) is not None:
            self.arrivals.note_ready(worker.place, info)
        return event

    def _note_narrowed(self, event: m.AttemptNarrowed, results: Sequence[SliceResult]) -> m.AttemptNarrowed:
        self._speaker = self._info_of(event.worker_id)
        return self._returns.take_part(event, results, self._speaker)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _carry_out(self, command: m.Command) -> None:  # noqa: C901, PLR0912 - one line for each command
        match command:
            case m.RunTasks():
                self._run(command)
            case m.RunGang(runs, is_loan):
                self._run_gang(runs, is_loan)
            case m.SettleItems(_, items):
                self._settle(items)
            case m.EndTask(task_id, state):
                self._end(task_id, state)
            case m.FailItems(items, reason):
                self._fail(items, reason)
            case m.TimeOutItems(items, timeout_s):
                self._time_out(items, timeout_s)
            case m.SignalTask():
                self._signal(command)
            case m.StartWorker(worker_id, place):
                self._backend.start_worker(worker_id, place, tuple(self.setups))
            case m.ParkWorker(place):
                self._backend.vacate(place, keep=True)
            case m.Vacate(place):
                self._vacate(place)
            case m.SetTimer():
                self._timers.set(command)
            case m.DropPlace():
                self._drop(command)
            case m.BreakPool():
                pass  # the tasks that end now say so
            case m.ClosePool():
                self._close()

    def _signal(self, command: m.SignalTask) -> None:
        holder = self.works[command.task_id].holder
        is_moving = getattr(self._at_hand, "kind", None) == "leave" or isinstance(self._at_hand, m.PlaceLeaving)
        if command.signal is m.Signal.CANCEL and isinstance(holder, Future) and not is_moving:
            self._returns.stopping.setdefault(command.attempt_id, []).append(holder)
        self._backend.signal(*command)

    def _vacate(self, place: int) -> None:
        self._casualties.note_vacated(self.infos.get(place, NOBODY))
        self.arrivals.forget(place)
        if isinstance(self._at_hand, (m.ResizeRequested, m.ShutdownRequested)):
            self.arrivals.note_failed(place, "the pool was made smaller meanwhile")
        self._backend.vacate(place)

    def _run(self, command: m.RunTasks) -> None:
        worker = self._info_of(command.worker_id)
        parts: list[Part] = []
        functions: dict[int, Function] = {}
        call = self._returns.in_flight.send(command.worker_id, command.attempt_id)
        for piece in command.slices:
            work = self.works[piece.task_id]
            known = None
            if not work.begin(piece, worker, call):
                # It was cancelled in this instant. Whoever does that will say so, but may be held up by a callback until then.
                known = nothing_done()
                self._cancel(piece.task_id)
            else:
                try:
                    part = work.part(piece, self._backend.pack)
                    timeout_s = self.scheduler.backlog.tasks[piece.task_id].spec.timeout_s
                    parts.append(part if timeout_s is None else part._replace(timeout_s=timeout_s))
                    self._hub.watch(piece.task_id, work.holder)  # not before: what waits says nothing, and is much
                    functions[work.function.fn_id] = work.function
                except Exception as error:  # also a full object store, or a Ray that has ended
                    known = all_failed(piece.start, piece.stop, verdicts.unsent(work.describe(piece), error))
            call.sent.append(Sent(piece, known, len(parts) - 1))
        if parts:
            self._backend.run(command.worker_id, command.attempt_id, parts, list(functions.values()), call.behind)
        else:
            self._inbox.put((m.AttemptFinished(command.worker_id, command.attempt_id, ()), []))

    def _cancel(self, task_id: int) -> None:
        self._inbox.put((m.CancelRequested(task_id), None))

    def _run_gang(self, runs: Sequence[m.RunTasks], is_loan: bool) -> None:
        """Call the ranks of a gang, which know of each other then. The first comes last: "inline" runs it in this very thread."""
        gang = cast("GangWork", self.works[runs[0].slices[0].task_id])
        for run in runs if is_loan else ():
            self._returns.in_flight.send(run.worker_id, run.attempt_id).sent.append(Sent(run.slices[0], None))
            self._backend.vacate(self.scheduler.crew.workers[run.worker_id].place, keep=True)
        gang.assemble([(run.worker_id, self._info_of(run.worker_id)) for run in runs])
        for run in reversed(runs) if not is_loan else ():
            self._run(run)

    def _settle(self, items: Slice) -> None:
        self.works[items.task_id].settle(items, self._returns.result(items), self._speaker)

    def _fail(self, items: Slice, reason: LossReason) -> None:
        work = self.works[items.task_id]
        work.fail(items, self._casualties.error(items, work.describe(items), reason, self._at_hand, self._speaker))

    def _time_out(self, items: Slice, timeout_s: float) -> None:
        work = self.works[items.task_id]
        work.fail(items, verdicts.timed_out(self._speaker, work.describe(items), timeout_s))

    def _end(self, task_id: int, state: TaskState) -> None:
        is_broken = state is TaskState.FAILED and self.scheduler.state is PoolState.BROKEN
        self.works.pop(task_id).end(state, verdicts.pool_broken(self._casualties.words) if is_broken else None)

    def _drop(self, command: m.DropPlace) -> None:
        text, why = self._casualties.farewell(command)
        if not self.arrivals.note_failed(command.place, why):
            self._tell.warn(text)
