"""The driver: one thread that feeds events to the scheduler and carries out its commands.

Everything that reaches a user (a resolved future, a finished loop) passes through this thread, in
order. It never waits for a worker, and no other thread touches the scheduler.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from time import time
from typing import TYPE_CHECKING, Any, cast

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
from raypool.core import policy
from raypool.core.messages import SetTimer, TimerFired
from raypool.core.model import PoolState, Report, Slice, TaskSpec, TaskState, Worker, WorkerState
from raypool.core.scheduler import Scheduler
from raypool.engine import explanations
from raypool.engine.explanations import Tell
from raypool.engine.in_flight import Call, InFlight, Sent
from raypool.engine.inbox import Inbox, Message
from raypool.engine.work import GangWork, Work
from raypool.errors import (
    LossReason,
    PoolBrokenError,
    PoolClosedError,
    PoolPreemptedError,
    TaskCancelled,
    WorkerLostError,
)
from raypool.futures import Future
from raypool.worker.interrupts import ctrl_c
from raypool.worker.running import is_interrupt

if TYPE_CHECKING:
    from raypool.engine.loop import LoopWork
    from raypool.engine.trace import TraceWriter

logger = logging.getLogger("raypool")

CLOSED = "The pool is closed. Open another with parpool()."


class Driver:
    """Runs the scheduler and carries out its commands.

    Args:
        scheduler: The core.
        inbox: Where events arrive.
        hub: Collects reports and output of tasks.
        tell: Callbacks for messages to the user and the pool.
        record: Writes down every event with its time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        hub: Hub,
        tell: Tell,
        record: TraceWriter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.setups: list[Function] = []  # what every worker begins with
        self.works: dict[int, Work] = {}
        self.arrivals = Arrivals(lambda: self.closed.is_set())
        self.infos = self.arrivals.infos  # by place
        self.closed = threading.Event()
        self.is_forked = False  # this process is a fork of the one that has opened the pool
        self.crash: BaseException | None = None
        self._inbox = inbox
        self._hub = hub
        self._tell = tell
        self._record = record  # before an event is handled: a trace shows what broke it
        self._backend: Backend
        self._thread: threading.Thread | None = None
        self._task_ids = itertools.count()
        self._submit_lock = threading.Lock()
        self._drain_lock = threading.Lock()  # without a thread, one of the callers is the driver
        self._drainer: int | None = None  # the thread that has it
        self._timers = Timers(scheduler)
        # made once: each of many queued futures would else have its own
        self._ask, self._owners = self._ask_call, (self,)
        self._losses = LossRecord(scheduler)
        self._returns = Returns(self.works, scheduler, self._info_of, self._cancel)
        self._notes: dict[type[Any], Callable[[Any, Any, Turn], m.Event | None]] = {
            m.TaskSubmitted: self._note_submitted,
            m.WorkerReady: self._note_ready,
            m.WorkerLost: self._note_lost,
            m.PlaceLeaving: self._note_going,
            m.PoolLeaving: self._note_all_going,
            m.PlaceLost: self._note_going,
            m.AttemptFinished: self._returns.take,
            m.AttemptNarrowed: self._returns.take_part,
            m.TimerFired: self._note_late,
        }

    # --- calls from any thread --------------------------------------------------------------------

    def start(self, backend: Backend) -> None:
        """Start, with this backend."""
        self._backend = backend
        if self._inbox.is_threaded:
            self._thread = threading.Thread(target=self._live, name="raypool-driver", daemon=True)
            self._thread.start()

    def post(self, event: m.Event, payload: Any = None) -> None:
        """Tell the driver that something has happened."""
        self._inbox.put((event, payload))
        if not self._inbox.is_threaded:
            self._drain()

    def submit(self, work: Work, spec: TaskSpec, future: Future[Any] | None = None) -> int:
        """Submit a task, whose `future` the driver serves from now on; return its number."""
        task_id = -1
        try:
            # numbers arrive in order, and none arrives at a driver that has gone
            with self._submit_lock:
                if self.closed.is_set():
                    raise self.crash_error() if self.crash else PoolClosedError(CLOSED)
                task_id = next(self._task_ids)
                if future is not None:
                    future.task_id, future.on_ask, future.owners = task_id, self._ask, self._owners
                self._inbox.put((m.TaskSubmitted(TaskSpec(task_id, *spec[1:])), work))
            if self._inbox.is_threaded:
                self._inbox.give_way()
            else:
                self._drain()
                error = future and future.error
                if isinstance(error, TaskCancelled) and is_interrupt(error):
                    raise TaskCancelled  # it means the task that submits this
        except BaseException:  # Ctrl-C, say: nobody else knows of the task
            self.do(lambda: self._cancel(task_id) if task_id in self.works else None)
            raise
        return task_id

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the driver's thread (of callbacks, say), which must not wait."""
        return threading.current_thread() is self._thread or threading.get_ident() == self._drainer

    def _ask_call(self, future: Future[Any]) -> None:
        self.post(
            m.CancelRequested(future.task_id)
            if future.cancelled()
            else m.StopRequested(future.task_id)
        )

    def end_loan(self, worker_ids: Sequence[int]) -> None:
        """Start these workers, which have not begun yet, in the places of a loan that has ended."""

        def end() -> None:
            workers = self.scheduler.workers.by_id
            # the place of any other has gone meanwhile
            for worker_id in filter(workers.__contains__, worker_ids):
                for attempt_id, attempt in workers[worker_id].attempts.items():
                    rank = attempt.slices[0].start
                    done = SliceResult(
                        rank, 1, LocalValues([None]), 0, {}, array("d", [0.0]), time()
                    )
                    self._inbox.put((m.AttemptFinished(worker_id, attempt_id, ()), [done]))

        self.do(end)

    def barrier(self) -> None:
        """Wait until everything that was posted before has been handled."""
        if self.is_own_thread:
            return
        handled = threading.Event()
        self.do(handled.set)
        # in turns: a driver that ends, or fails, leaves messages unhandled
        while not self.closed.is_set() and not handled.wait(0.1):
            pass

    def leave(self, event: m.Event) -> None:
        """Tell the driver that something has happened, without becoming the driver here.

        A driver without a thread hears of it as soon as it runs in its own.
        """
        self._inbox.put((event, None))

    def do(self, chore: Callable[[], object]) -> None:
        """Call something short in the driver's thread, after all that was posted before.

        After the end of the pool, this thread or another that does so calls it.
        """
        self._inbox.put((None, chore))  # without a lock: finalizers call this, at any moment
        if self.closed.is_set() or not self._inbox.is_threaded:
            self._drain()

    # --- event loop -------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self.closed.is_set():
            self._step()
        self._drain()

    @ctrl_c.holds
    def _drain(self) -> None:
        # not if a call further up this stack, or another thread, is doing so: that takes it too
        if self._drainer == threading.get_ident():
            return
        before = ctrl_c.hold()
        try:
            while not self._inbox.is_empty and self._drain_lock.acquire(blocking=False):
                self._drainer = threading.get_ident()
                try:
                    while self._step():
                        pass
                finally:
                    self._drainer = None
                    self._drain_lock.release()
        finally:
            ctrl_c.release(before)

    def _step(self) -> bool:
        """Handle the next message or timer; False if there is neither."""
        if self.closed.is_set():  # only chores are left
            message = self._inbox.get(self._inbox.now())
            if message is not None and message[0] is None:
                message[1]()
            return message is not None
        message = None
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
        """Return the next message, or due timer; None if neither can come any more."""
        while True:
            until = self._timers.next_at()
            # A timer goes behind the messages: a driver that is late itself would otherwise time
            # out an answer that came in time.
            if until is not None and self._inbox.now() >= until:
                self._inbox.put((self._timers.pop(), None))
            message = self._inbox.get(until)
            if message is not None or until is None:
                return message

    def crash_error(self) -> PoolBrokenError:
        """Return the error for those who still want something of a failed driver."""
        return explanations.driver_failed(self.crash)

    def preempted_error(self) -> PoolPreemptedError | None:
        """Return the error for a pool all of whose nodes are about to go for good."""
        leaving, now = self.scheduler.leaving, self._inbox.now()
        if leaving is None or not leaving.is_final:
            return None
        return explanations.pool_preempted(
            self._losses.all_leaving,
            None if leaving.gone_at is None else leaving.gone_at - now,
            self.scheduler.counts,
        )

    def _give_up(self, error: BaseException) -> None:
        self.crash = error  # a mistake of raypool's own: nobody may be left waiting
        try:
            self._close()
        except Exception:
            logger.exception("The end of a pool whose driver failed was not clean.")

    def _close(self) -> None:
        # works end last: threads that they wake must find the pool closed, without workers
        with contextlib.ExitStack() as steps:  # the last first, each whatever the others raise
            steps.callback(self._end_works)
            steps.callback(self._take_no_more)
            steps.callback(self._tell.closed)
            if self._record is not None:
                steps.callback(self._record.close)
            steps.callback(self._backend.close)

    def _take_no_more(self) -> None:
        # both locks: a thread that checks `closed` under either must not miss the end
        with self._submit_lock, self.arrivals.lock:
            chores = []
            while not self._inbox.is_empty and (message := self._inbox.get(None)) is not None:
                event, payload = message
                if isinstance(event, m.TaskSubmitted):  # too late
                    self.works[event.spec.task_id] = payload
                elif event is None:
                    chores.append(message)
            for message in chores:
                self._inbox.put(message)
            # from here on other threads take messages, too: see `do`
            self.closed.set()
            self.arrivals.changed.notify_all()

    def _end_works(self) -> None:
        state = TaskState.FAILED if self.crash else TaskState.CANCELLED
        with contextlib.ExitStack() as steps:
            # after a failure there are others too
            for work in reversed(self.works.values()):
                steps.callback(work.end, state, self.crash_error() if self.crash else None)
            self.works.clear()

    # --- incoming events --------------------------------------------------------------------------

    def _handle(self, event: m.Event | None, payload: Any) -> None:
        if event is None:
            payload()
            return
        turn = Turn()
        if (note := self._notes.get(type(event))) is not None:
            event = note(event, payload, turn) or event
        turn.event = event
        now = self._inbox.now()
        if self._record is not None:
            try:
                self._record(now, event)
            except OSError as error:  # a full disk, say
                with contextlib.suppress(OSError):
                    self._record.close()
                self._record = None
                self._tell.warn(f"The trace ends here: {error}. The pool continues without it.")
        commands = self.scheduler.handle(event, now)
        if commands and isinstance(commands[0], m.ParkWorker):
            self._tell.note(explanations.parked(len(commands)))
        for command in _in_order(commands):
            self._carry_out(command, turn)
        if turn.missed:
            # they run again, unless the scheduler has settled them just now
            settled = sorted(
                command.items
                for command in commands
                if isinstance(command, (m.SettleItems, m.FailItems, m.TimeOutItems))
            )
            for piece, why in turn.missed:
                work = self.works.get(piece.task_id)
                # the last that begins before its end: they do not overlap
                number = bisect_left(settled, piece._replace(start=piece.stop)) - 1
                before = settled[number] if number >= 0 else None
                if work is not None and not (
                    before is not None
                    and before.task_id == piece.task_id
                    and before.stop > piece.start
                ):
                    work.miss(piece, turn.worker, why)

    def _note_submitted(self, event: m.TaskSubmitted, work: Work, _: Turn) -> None:
        self.works[event.spec.task_id] = work

    def _info_of(self, worker_id: int) -> WorkerInfo:
        worker = self.scheduler.workers.by_id.get(worker_id)
        return NOBODY if worker is None else self.infos.get(worker.place, NOBODY)

    def _note_late(self, event: m.TimerFired, _: None, turn: Turn) -> None:
        turn.worker = self._info_of(event.worker_id)
        if event.kind == "ready":
            self._losses.words = (
                "it did not start within start_timeout_s; raise that, or check what keeps the"
                " machine busy"
            )

    def _note_lost(self, event: m.WorkerLost, words: str | None, turn: Turn) -> None:
        worker = self.scheduler.workers.by_id.get(event.worker_id)
        if worker is None:
            return  # it was given up before
        self._losses.words = words or event.reason.value
        if isinstance(words, Refusal):  # further tries would fail, too: nobody need wait for them
            self.arrivals.note_failed(worker.place, words)
        self._bury(worker, event.reason, turn, event.was_idle)

    def _note_going(
        self, event: m.PlaceLeaving | m.PlaceLost, words: str | None, turn: Turn
    ) -> None:
        place = self.scheduler.workers.places.get(event.place)
        if place is None:
            return  # it has gone before
        worker = self.scheduler.workers.by_id[place.worker_id]
        reason = event.reason if isinstance(event, m.PlaceLost) else LossReason.PREEMPTED
        turn.worker = self._info_of(worker.worker_id)
        self._losses.words = self._losses.leaving[event.place] = words or reason.value
        # else it has its time
        if isinstance(event, m.PlaceLost) or worker.state is not WorkerState.BUSY:
            self._bury(worker, reason, turn)

    def _note_all_going(self, _: m.PoolLeaving, words: str, __: Turn) -> None:
        self._losses.all_leaving = words

    def _bury(self, worker: Worker, reason: LossReason, turn: Turn, was_idle: bool = False) -> None:
        turn.worker = self._info_of(worker.worker_id)
        self._hub.forget(worker.worker_id)
        calls = self._returns.in_flight.lose(worker.worker_id)
        for attempt_id in worker.attempts:
            if attempt_id in calls:
                self._losses.note_fallen(calls[attempt_id], reason, was_idle, turn)
            self._returns.note_stopped(attempt_id, is_replaced=True)

    def _note_ready(self, event: m.WorkerReady, info: WorkerInfo, _: Turn) -> m.WorkerReady:
        if (worker := self.scheduler.workers.by_id.get(event.worker_id)) is not None:
            self.arrivals.note_ready(worker.place, info)
        return event

    # --- commands of the scheduler ----------------------------------------------------------------

    def _carry_out(self, command: m.Command, turn: Turn) -> None:  # noqa: C901, PLR0912
        match command:
            case m.RunTasks():
                self._run(command)
            case m.RunGang(runs, is_loan):
                self._run_gang(runs, is_loan)
            case m.SettleItems(_, items):
                self._settle(items, turn)
            case m.EndTask(task_id, state):
                self._end(task_id, state)
            case m.FailItems(items, reason):
                work = self.works[items.task_id]
                what = work.describe(items)
                work.fail(items, self._losses.error(items, what, reason, turn))
            case m.CancelItem(item):
                cast("LoopWork", self.works[item.task_id]).drop(item)
            case m.TimeOutItems(items, timeout_s):
                work = self.works[items.task_id]
                what = work.describe(items)
                work.fail(items, explanations.timed_out(turn.worker, what, timeout_s))
            case m.SignalTask():
                self._signal(command, turn)
            case m.StartWorker(worker_id, place):
                self._backend.start_worker(worker_id, place, tuple(self.setups))
            case m.ParkWorker(place):
                self._backend.vacate(place, keep=True)
            case m.Vacate(place):
                self._vacate(place, turn)
            case m.SetTimer():
                self._timers.set(command)
            case m.DropPlace():
                text, why = self._losses.farewell(command)
                if not self.arrivals.note_failed(command.place, why):
                    self._tell.warn(text)
            case m.BreakPool():
                pass  # the tasks that end now report it
            case m.ClosePool():
                self._close()

    def _signal(self, command: m.SignalTask, turn: Turn) -> None:
        holder = self.works[command.task_id].holder
        # one that has to leave its machine runs again: nobody has cancelled it
        is_moving = getattr(turn.event, "kind", None) == "leave" or isinstance(
            turn.event, (m.PlaceLeaving, m.PoolLeaving)
        )
        if command.signal is m.Signal.CANCEL and isinstance(holder, Future) and not is_moving:
            self._returns.stopping.setdefault(command.attempt_id, []).append(holder)
        self._backend.signal(*command)

    def _vacate(self, place: int, turn: Turn) -> None:
        self._losses.vacated = self.infos.get(place, NOBODY)
        self.arrivals.forget(place)
        if isinstance(turn.event, (m.ResizeRequested, m.ShutdownRequested)):
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
                # It was cancelled in this instant. The thread that does so will post it, but a
                # callback may hold that up.
                known = nothing_done()
                self._cancel(piece.task_id)
            else:
                try:
                    part = work.part(piece, self._backend.pack)
                    timeout_s = self.scheduler.backlog.tasks[piece.task_id].spec.timeout_s
                    parts.append(part if timeout_s is None else part._replace(timeout_s=timeout_s))
                    # not before: queued tasks say nothing, and are many
                    self._hub.watch(piece.task_id, work.holder)
                    functions[work.function.fn_id] = work.function
                except Exception as error:  # also a full object store, or a Ray that has ended
                    known = all_failed(
                        piece.start, piece.stop, explanations.unsent(work.describe(piece), error)
                    )
            call.sent.append(Sent(piece, known, len(parts) - 1))
        if parts:
            self._backend.run(
                command.worker_id, command.attempt_id, parts, list(functions.values()), call.behind
            )
        else:
            self._inbox.put((m.AttemptFinished(command.worker_id, command.attempt_id, ()), []))

    def _cancel(self, task_id: int) -> None:
        self._inbox.put((m.CancelRequested(task_id), None))

    def _run_gang(self, runs: Sequence[m.RunTasks], is_loan: bool) -> None:
        gang = cast("GangWork", self.works[runs[0].slices[0].task_id])
        for run in runs if is_loan else ():
            self._returns.in_flight.send(run.worker_id, run.attempt_id).sent.append(
                Sent(run.slices[0], None)
            )
            self._backend.vacate(self.scheduler.workers.by_id[run.worker_id].place, keep=True)
        # from here on they know each other
        gang.assemble([(run.worker_id, self._info_of(run.worker_id)) for run in runs])
        # The first comes last: "inline" runs it in this thread, and the others have to be there.
        for run in reversed(runs) if not is_loan else ():
            self._run(run)

    # the tour (docs/internals/first_ten_minutes.md) shows these two by name

    def _settle(self, items: Slice, turn: Turn) -> None:
        self.works[items.task_id].settle(items, turn.result(items), turn.worker)

    def _end(self, task_id: int, state: TaskState) -> None:
        error: PoolBrokenError | None = None
        if state is TaskState.FAILED:
            error = self.preempted_error()
            if error is None and self.scheduler.state is PoolState.BROKEN:
                error = explanations.pool_broken(self._losses.words)
        self.works[task_id].end(state, error)
        del self.works[task_id]  # not before: if that raises, `_end_works` ends it


# --- arrival of workers ---------------------------------------------------------------------------


class Arrivals:
    """Which workers have started, by place, and why others have not.

    Args:
        is_closed: Whether the pool has ended, so that waiting is pointless.
    """

    def __init__(self, is_closed: Callable[[], bool]) -> None:
        self.infos: dict[int, WorkerInfo] = {}  # of the newest worker in each place that was up
        self._is_closed = is_closed
        self._failed: dict[int, str] = {}  # place -> why
        self._awaited: Counter[int] = Counter()  # places that somebody waits for
        # Entered instead of the condition: Ctrl-C within Condition.__enter__ would leave it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # the driver's thread writes, others wait

    def note_ready(self, place: int, info: WorkerInfo) -> None:
        """Note that the worker in a place is up."""
        with self.lock:
            self.infos[place] = info
            del self._awaited[place]  # a failure after this is news
            self.changed.notify_all()

    def note_failed(self, place: int, why: str) -> bool:
        """Note why a worker will not come up; return whether a thread waits, or waited, to hear."""
        with self.lock:
            self._failed.setdefault(place, why)
            self.changed.notify_all()
            return self._awaited[place] > 0

    def forget(self, place: int) -> None:
        """Note that a place is given back."""
        with self.lock:
            self.infos.pop(place, None)  # else a later `wait` would find the old worker

    def expect(self, places: Sequence[int]) -> None:
        """Announce a later `wait` for the workers in these places."""
        with self.lock:
            self._awaited.update(places)

    def let_go(self, places: Iterable[int]) -> None:
        """Note that nobody waits for the workers in these places any more."""
        with self.lock:
            for place in places:
                del self._awaited[place]

    def wait(self, places: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Wait for the workers in these places; return those that are not up, and why.

        Those of them that have failed count as awaited until `let_go`.
        """
        with self.lock:
            is_known = self.changed.wait_for(
                lambda: (
                    self._is_closed()
                    or all(place in self.infos or place in self._failed for place in places)
                ),
                min(timeout_s, threading.TIMEOUT_MAX),  # above it, Python raises OverflowError
            )
            # of one that has failed the caller tells
            self.let_go([place for place in places if place not in self._failed])
            why = (
                "the pool was closed"
                if is_known
                else f"it did not start within start_timeout_s={timeout_s:g}"
            )
            return {
                place: self._failed.get(place, why) for place in places if place not in self.infos
            }


# --- one event ------------------------------------------------------------------------------------


Why = str | BaseException
"""What is known of the loss of a worker, or what an item has raised that `retry_on` names."""


class Turn:
    """An event, and what belongs to it until its commands are carried out.

    After that nothing holds the results that came with it: the user may want them freed.

    Attributes:
        event: The event.
        worker: The worker that it is about.
        results: The results that came with it, by task.
        fallen: The tasks that the worker was running, if the event is its loss.
        missed: Slices without an outcome of this attempt, and why: they run again, unless a command
            settles them.
    """

    __slots__ = ("event", "fallen", "missed", "results", "worker")

    def __init__(self) -> None:
        self.event: m.Event | None = None
        self.worker = NOBODY
        self.results: dict[int, list[tuple[Slice, SliceResult]]] = {}
        self.fallen: list[Slice] = []
        self.missed: list[tuple[Slice, Why]] = []

    def result(self, items: Slice) -> SliceResult:
        """Return the result that has these items."""
        return next(
            result
            for piece, result in self.results[items.task_id]
            if piece.start <= items.start < piece.stop
        )


def _in_order(commands: list[m.Command]) -> list[m.Command]:
    """Put a gang behind all else: one that has failed has to leave its warm group before that."""
    if m.RunGang in map(type, commands):
        commands.sort(key=lambda command: type(command) is m.RunGang)
    return commands


def is_awaited(piece: Slice, attempt_id: int, scheduler: Scheduler) -> bool:
    """Whether a slice in flight still counts: its task has not ended, nor is its time over."""
    task = scheduler.backlog.tasks.get(piece.task_id)
    return task is not None and attempt_id in (task.flights or ())


# --- lost workers and places ----------------------------------------------------------------------


ANSWERS = (m.AttemptFinished, m.AttemptNarrowed)
LOSSES = (m.WorkerLost, m.TimerFired, m.PlaceLeaving, m.PlaceLost)


class LossRecord:
    """Why workers and places were lost, for the errors that follow."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.words = ""  # the text about the newest loss
        self.leaving: dict[int, str] = {}  # by place: the text about its end
        self.all_leaving = ""  # the text about nodes that are about to go, if none stays
        self.vacated = NOBODY  # who was in the place that was given back last
        self._scheduler = scheduler

    def note_fallen(self, call: Call, reason: LossReason, was_idle: bool, turn: Turn) -> None:
        """Note the awaited items of a call whose worker is lost."""
        # also if nobody knows whether it was begun
        is_attempt = not was_idle and (call.began_at is not None or reason not in policy.FORGIVEN)
        for piece, _, _ in call.sent:
            if is_awaited(piece, call.attempt_id, self._scheduler):
                turn.fallen.append(piece)
                if is_attempt:
                    turn.missed.append((piece, self.words))

    def error(self, items: Slice, what: str, reason: LossReason, turn: Turn) -> WorkerLostError:
        """Return the error for items that have no worker any more; `what` names them."""
        if any(
            piece.task_id == items.task_id and piece.start <= items.start < piece.stop
            for piece in turn.fallen
        ):
            return explanations.lost(turn.worker, what, items.attempt, reason, self.words)
        words = self.words if isinstance(turn.event, LOSSES) else "the pool was made smaller"
        if isinstance(turn.event, ANSWERS):
            # a rank that was interrupted, or what came back
            if reason is LossReason.PREEMPTED:
                words = self.leaving.get(
                    turn.worker.index, "the machine of another rank is about to shut down"
                )
                return explanations.lost(turn.worker, what, items.attempt, reason, words)
            words = "a call with fresh_process=True has replaced the process of that worker"
        return explanations.stranded(
            what,
            items.attempt,
            reason,
            explanations.FAULTY if reason is LossReason.FAULTY else words,
        )

    def farewell(self, command: m.DropPlace) -> tuple[str, str]:
        """Return the message about a dropped place, for the user and for waiting threads."""
        left, num_left = self.leaving.pop(command.place, None), self._scheduler.workers.size
        if command.reason is LossReason.FAULTY:
            return (
                explanations.faulty(self.vacated, command.failed, command.finished, num_left),
                explanations.FAULTY,
            )
        if left is not None:
            return explanations.left(self.vacated, left, num_left), left
        return explanations.dropped(self.words, num_left), self.words


# --- results from workers -------------------------------------------------------------------------


class Returns:
    """Turns results that come back into reports for the scheduler, and keeps them for the `Turn`.

    Args:
        works: The tasks that have not ended.
        scheduler: Knows which tasks still wait.
        info_of: Returns what is known of a worker.
        cancel: Posts that a task is cancelled.
    """

    def __init__(
        self,
        works: Mapping[int, Work],
        scheduler: Scheduler,
        info_of: Callable[[int], WorkerInfo],
        cancel: Callable[[int], object],
    ) -> None:
        self.in_flight = InFlight()
        self.stopping: dict[int, list[Future[Any]]] = {}  # by attempt: cancelled while it ran
        self._works = works
        self._scheduler = scheduler
        self._info_of = info_of
        self._cancel = cancel

    def note_stopped(self, attempt_id: int, is_replaced: bool) -> None:
        """Tell futures that were cancelled while they ran what became of their worker."""
        for future in self.stopping.pop(attempt_id, ()):
            # of a gang, any of them
            future.worker_replaced = is_replaced or bool(future.worker_replaced)

    def take(
        self, event: m.AttemptFinished, results: Sequence[SliceResult], turn: Turn
    ) -> m.AttemptFinished:
        """Return the event of an attempt with a report of each slice."""
        turn.worker = self._info_of(event.worker_id)
        sent = self.in_flight.bring_back(event.worker_id, event.attempt_id)
        if self.stopping:
            self.note_stopped(event.attempt_id, is_replaced=False)
        reports = []
        for piece, known, number in sent:
            # of a call that was narrowed, it is about all
            result = known or results[number].within(piece.start, piece.stop)
            reports.append(self._report(piece, event.attempt_id, result, turn))
        return event._replace(reports=tuple(reports))

    def take_part(
        self, event: m.AttemptNarrowed, results: Sequence[SliceResult], turn: Turn
    ) -> m.AttemptNarrowed:
        """Do the same for the finished part of a long attempt."""
        turn.worker = self._info_of(event.worker_id)
        before = self.in_flight.find(event.worker_id, event.attempt_id)
        if before is None:
            return event  # it has come back meanwhile
        # the calls that waited behind it are taken back
        call, behind = self.in_flight.narrow(event.worker_id, event.attempt_id)
        for other in behind:
            self.note_stopped(other.attempt_id, is_replaced=False)
        reports, kept = [], []
        for piece, known, number in before.sent:
            result = results[number] if known is None else known
            kept.append(event.kept[number] if known is None else 0)
            reports.append(self._report(piece, event.attempt_id, result, turn))
            if kept[-1]:
                start = piece.start + result.done
                rest = piece._replace(start=start, stop=start + kept[-1])
                call.sent.append(Sent(rest, None, number))
                if is_awaited(piece, event.attempt_id, self._scheduler):
                    call.began_at = (
                        result.started_at + sum(result.durations_s)
                        if result.started_at
                        else call.began_at
                    )
                    self._works[piece.task_id].begin(rest, turn.worker, call)
        return event._replace(reports=tuple(reports), kept=tuple(kept))

    def _report(self, piece: Slice, attempt_id: int, result: SliceResult, turn: Turn) -> Report:
        turn.results.setdefault(piece.task_id, []).append((piece, result))
        work = self._works.get(piece.task_id)
        report = Report(
            result.done, len(result.failures), (), sum(result.durations_s), result.uncharged
        )
        if result.failures and work is not None:
            # it means the loop, not the item
            if result.is_interrupted and not isinstance(work, GangWork):
                self._cancel(piece.task_id)
            report = report._replace(retry=result.to_retry(work.wants_retry))
            if is_awaited(piece, attempt_id, self._scheduler):  # else it was settled before
                again = report.repeated(report.retry)
                turn.missed += [
                    (piece._replace(start=i, stop=i + 1), result.failures[i].error) for i in again
                ]
        return report


# --- timers ---------------------------------------------------------------------------------------


class Timers:
    """Timers, by the time at which they are due."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._heap: list[tuple[float, int, TimerFired]] = []
        self._count = itertools.count()  # of two for the same time, the first set comes first

    def set(self, command: SetTimer) -> None:
        """Add a timer."""
        timer = TimerFired(*command[1:])
        heappush(self._heap, (command.at, next(self._count), timer))

    def next_at(self) -> float | None:
        """Return when the next timer is due; None if there is none."""
        while self._heap:
            at, _, timer = self._heap[0]
            if self._is_of_use(timer):
                return at
            heappop(self._heap)  # only here: a heap has no quick way to find one
        return None

    def _is_of_use(self, timer: TimerFired) -> bool:
        scheduler = self._scheduler
        if timer.worker_id < 0:
            of_pool = {
                "idle": True,
                "retry": timer.task_id in scheduler.backlog.tasks,
                "hold": bool(scheduler.workers.holds),
            }
            return of_pool.get(timer.kind, scheduler.leaving is not None)
        worker = scheduler.workers.by_id.get(timer.worker_id)
        if worker is None or timer.kind == "leave":
            return worker is not None
        if timer.kind == "timeout":
            return timer.attempt_id in worker.attempts
        return worker.state is WorkerState.STARTING

    def pop(self) -> TimerFired:
        """Take out the next timer."""
        return heappop(self._heap)[2]
