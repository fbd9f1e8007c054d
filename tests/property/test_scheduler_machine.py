"""Any events, in any order: the scheduler keeps its promises.

Hypothesis plays the world (users, workers, time) against the scheduler. A model beside it, which
knows nothing of how the scheduler works, checks every command; `check_invariants` looks inside
after every event. In the end everything is brought to a close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raypool.core import messages as m
from raypool.core.invariants import check_invariants
from raypool.core.model import PoolState, Report, Slice, TaskSpec, TaskState
from raypool.core.scheduler import Scheduler
from raypool.errors import LossReason

# it takes Hypothesis five minutes, at most, to make a failure small
pytestmark = pytest.mark.timeout(400)

PICK = st.integers(0, 1000)
PLACES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TIMEOUTS = st.sampled_from([None, None, None, 5.0])
DELAYS = st.sampled_from([0.0, 0.0, 7.0, 200.0])
IDLE_S = 40.0
# that one the scheduler finds by itself
LOSSES = [reason for reason in LossReason if reason is not LossReason.FAULTY]
MOVES = (
    m.PlaceLeaving,
    m.PoolLeaving,
    m.TimerFired,
)  # after these, what runs may be interrupted to run elsewhere


@dataclass
class Job:
    """What the model knows of a task."""

    spec: TaskSpec
    size: int
    is_open: bool
    worker_id: int | None
    outcomes: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # the last one of each item
    flying: Counter[int] = field(default_factory=Counter)  # items
    # items that are to run again, but not before this time
    rests: list[tuple[float, set[int]]] = field(default_factory=list)
    calls: int = 0  # slices in flight
    end: TaskState | None = None
    is_cancelled: bool = False
    is_draining: bool = False  # nothing more of it may start
    has_started: bool = False  # of a gang: with all its ranks
    is_broken_up: bool = False  # of a gang: a rank has failed, or its time was over

    @property
    def is_plain(self) -> bool:
        """Whether it waits in the pool's queue, and not for several workers."""
        return self.spec.place is None and self.spec.places is None and not self.spec.is_gang

    def may_run_on(self, worker_id: int, place: int) -> bool:
        """Whether a worker may run it."""
        return self.worker_id in (None, worker_id) and (
            self.spec.places is None or place in self.spec.places
        )

    @property
    def resting(self) -> set[int]:
        """Items that may not run yet."""
        return {item for _, items in self.rests for item in items}

    def lay_to_rest(self, items: Iterable[int], attempt: int, now: float) -> None:
        """Note that items run again after this attempt, but not at once, if the task wants that."""
        delay_s = min(self.spec.retry_delay_s * 2 ** (attempt - 1), 300.0)
        if delay_s and self.end is None and set(items):
            self.rests.append((now + delay_s, set(items)))

    @property
    def has_more(self) -> bool:
        """Whether one more slice of it could be sent."""
        limit = self.spec.max_workers
        is_left = len(self.outcomes) + self.flying.total() + len(self.resting) < self.size
        has_room = limit is None or self.calls < limit
        return self.end is None and is_left and has_room and not self.is_draining


@dataclass
class Hand:
    """What the model knows of a worker."""

    place: int
    is_launched: bool = False
    is_ready: bool = False
    is_used: bool = False
    is_spent: bool = False
    # it is to be replaced before it runs anything else, unless that is the end of something bound
    # to it
    leaks: bool = False
    calls: list[int] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """Users, workers and time."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.idle_timeout_s: float | None = None
        self.used_at = 0.0  # when there was a task for the last time
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.hands: dict[int, Hand] = {}  # workers that are there, or about to be
        self.places: dict[int, int | None] = {}  # place -> worker; None: it is parked
        self.calls: dict[int, m.RunTasks] = {}  # in flight, as far as anybody can tell
        # answers that nobody waits for any more
        self.past: list[tuple[int, int, tuple[Report, ...]]] = []
        self.numbers: set[int] = set()  # all workers that ever were
        # (attempt, task) that run on, although their time is over, or they were cancelled
        self.given_up: set[tuple[int, int]] = set()
        self.signals: set[tuple[int, int]] = set()  # (attempt, task) that were told to end
        # (attempt, task) that were interrupted to run elsewhere
        self.moved: set[tuple[int, int]] = set()
        # places that are to go, and when what is there is interrupted
        self.leaving: dict[int, float] = {}
        self.all_leaving: m.PoolLeaving | None = None  # nothing may start
        # (task, item) -> attempt, that was lost for no fault of its own
        self.pardoned: dict[tuple[int, int], int] = {}
        self.timers: list[m.SetTimer] = []
        self.shutdown_asked = False
        self.cancels_queued = False
        self.is_broken = False
        self.is_closed = False

    # --- what users do ----------------------------------------------------------------------------

    @initialize(
        num_places=st.integers(1, 4),
        num_ready=st.integers(0, 4),
        idle_timeout_s=st.sampled_from([None, IDLE_S]),
    )
    def open_pool(self, num_places: int, num_ready: int, idle_timeout_s: float | None) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.scheduler = Scheduler(start_timeout_s=60.0, idle_timeout_s=idle_timeout_s)
        self.tell(m.ResizeRequested(add=tuple(range(num_places))))
        for _ in range(min(num_ready, num_places)):
            self.come_up(0)

    @rule(
        fn_id=st.integers(0, 2),
        size=st.sampled_from([0, 1, 2, 5, 40, 100]),
        is_open=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        retries=st.integers(0, 3),
        max_workers=st.sampled_from([None, None, None, 1, 2]),
        chunk_size=st.sampled_from([None, None, None, None, 1, 7]),
        fail_fast=st.sampled_from([False, False, True]),
        places=st.none() | PLACES,
        timeout_s=TIMEOUTS,
        is_fresh=st.sampled_from([False, False, False, True]),
        retry_delay_s=DELAYS,
    )
    def submit(self, fn_id, size, is_open, priority, retries, max_workers, **wishes) -> None:
        is_open = is_open and size in (0, 2)
        self.submit_spec(
            TaskSpec(len(self.jobs), fn_id, size, is_open, priority, retries, max_workers, **wishes)
        )

    @rule(
        fn_id=st.integers(0, 2),
        size=st.sampled_from([0, 1, 1, 3, 20]),
        is_open=st.booleans(),
        place=st.integers(0, 5),
        max_workers=st.sampled_from([None, None, 1]),
        retries=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 1]),
        fail_fast=st.booleans(),
        timeout_s=TIMEOUTS,
        retry_delay_s=DELAYS,
    )
    def submit_bound(self, fn_id, size, is_open, priority, retries, max_workers, **wishes) -> None:
        self.submit_spec(
            TaskSpec(
                len(self.jobs),
                fn_id,
                size,
                is_open and size < 2,
                priority,
                retries,
                max_workers,
                **wishes,
            )
        )

    @rule(
        fn_id=st.integers(2, 3),
        size=st.integers(0, 4),
        places=st.none() | PLACES,
        priority=st.sampled_from([0, 0, 1]),
        timeout_s=TIMEOUTS,
        is_loan=st.sampled_from([False, False, True]),
    )
    def submit_gang(self, fn_id, size, places, priority, timeout_s, is_loan) -> None:
        wishes = {"places": places, "timeout_s": timeout_s, "is_loan": is_loan}
        self.submit_spec(
            TaskSpec(len(self.jobs), fn_id, size, False, priority, is_gang=True, **wishes)
        )

    @rule(
        fn_id=st.integers(0, 1),
        count=st.integers(1, 12),
        retries=st.sampled_from([0, 1, 2, 2, 2]),
        places=st.sampled_from([None, None, (0, 1), (1, 2, 3)]),
        is_fresh=st.sampled_from([False, False, False, False, True]),
    )
    def submit_calls(self, fn_id, count, retries, places, is_fresh) -> None:
        for _ in range(count):
            self.submit_spec(
                TaskSpec(len(self.jobs), fn_id, retries=retries, places=places, is_fresh=is_fresh)
            )

    def submit_spec(self, spec: TaskSpec) -> None:
        worker_id = self.places.get(spec.place) if spec.place is not None else None
        job = self.jobs[spec.task_id] = Job(spec, spec.size, spec.is_open, worker_id)
        self.tell(m.TaskSubmitted(spec))
        if spec.place is not None and worker_id is None:  # it was parked, and is starting now
            job.worker_id = self.places.get(spec.place)

    @precondition(lambda self: any(job.is_open for job in self.jobs.values()))
    @rule(pick=PICK, count=st.integers(0, 8), stays_open=st.booleans())
    def add_items(self, pick: int, count: int, stays_open: bool) -> None:
        task_id, job = picked(
            [(task_id, job) for task_id, job in self.jobs.items() if job.is_open], pick
        )
        job.is_open = stays_open
        job.size += count if job.end is None else 0
        self.tell(m.ItemsAdded(task_id, count, stays_open))

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        job = picked(list(self.jobs.values()), pick)
        job.is_cancelled = True
        self.tell(m.CancelRequested(job.spec.task_id))
        assert job.end is not None

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def drain(self, pick: int) -> None:
        """Let what runs of a task come back, and nothing more of it start."""
        job = picked(list(self.jobs.values()), pick)
        if not job.spec.is_gang:
            job.is_draining = job.is_cancelled = True
        self.tell(m.DrainRequested(job.spec.task_id))

    @precondition(lambda self: self.some_item(0) is not None)
    @rule(pick=PICK)
    def cancel_item(self, pick: int) -> None:
        """Cancel one item, unless it shares its call with others of its task."""
        job, item = self.some_item(pick)
        task_id = job.spec.task_id
        alone = [call for call in self.calls.values() if self.counts_alone(call, task_id, item)]
        is_due = job.end is None and item not in job.outcomes and not job.spec.is_gang
        commands = self.tell(m.CancelRequested(task_id, item))
        items = [each.item.start for each in commands if isinstance(each, m.CancelItem)]
        assert items == [item] * (is_due and (bool(alone) or job.flying[item] == 0))

    @precondition(lambda self: self.some_item(0) is not None)
    @rule(pick=PICK)
    def put_first(self, pick: int) -> None:
        """Let an item run next, also one that rests."""
        job, item = self.some_item(pick)
        if not job.spec.is_gang:
            for _, items in job.rests:
                items.discard(item)
        self.tell(m.FirstRequested(job.spec.task_id, item))

    def some_item(self, pick: int) -> tuple[Job, int] | None:
        jobs = [job for job in self.jobs.values() if job.size and job.end is None]
        return (job := picked(jobs, pick), pick // len(jobs) % job.size) if jobs else None

    def counts_alone(self, call: m.RunTasks, task_id: int, item: int) -> bool:
        return self.counts(call, task_id) and any(
            piece[:3] == (task_id, item, item + 1) for piece in call.slices
        )

    @precondition(lambda self: any(not job.spec.is_gang for job in self.jobs.values()))
    @rule(pick=PICK)
    def run_once_more(self, pick: int) -> None:
        """Add an item to a task that may take no others."""
        job = picked([job for job in self.jobs.values() if not job.spec.is_gang], pick)
        job.size += job.end is None
        self.tell(m.ItemsAdded(job.spec.task_id, 1, None))

    def is_due(self) -> bool:
        """Whether the announced end of all places has passed: whatever comes next ends the pool."""
        gone_at = None if self.all_leaving is None else self.all_leaving.gone_at
        return gone_at is not None and gone_at <= self.now

    @precondition(lambda self: self.jobs and not self.is_due())
    @rule(pick=PICK)
    def ask_to_stop(self, pick: int) -> None:
        task_id = picked(list(self.jobs), pick)
        running = [call for call in self.calls.values() if self.counts(call, task_id)]
        told = [
            m.SignalTask(call.worker_id, call.attempt_id, task_id, m.Signal.STOP)
            for call in running
        ]
        is_over = self.jobs[task_id].end is not None
        assert sorted(self.tell(m.StopRequested(task_id)), key=str) == (
            [] if is_over else sorted(told, key=str)
        )

    def counts(self, call: m.RunTasks, task_id: int) -> bool:
        """Whether a call has something of a task in it that was not given up."""
        return (call.attempt_id, task_id) not in self.given_up and any(
            piece.task_id == task_id for piece in call.slices
        )

    @rule(
        places=st.lists(st.integers(0, 5), max_size=2, unique=True),
        size=st.sampled_from([None, None, None, 0, 1, 2, 3]),
        leave=st.just([]) | st.lists(st.integers(0, 5), max_size=2, unique=True),
    )
    def resize(self, places: list[int], size: int | None, leave: list[int]) -> None:
        new = tuple(place for place in places if place not in self.places)
        self.tell(m.ResizeRequested(new, size, tuple(leave)))
        if size is not None and self.scheduler.state is PoolState.OPEN:
            assert self.scheduler.workers.size <= size

    @precondition(lambda self: len(self.jobs) > 25)
    @rule(cancel_queued=st.booleans(), cancel_running=st.booleans())
    def shutdown(self, cancel_queued: bool, cancel_running: bool) -> None:
        self.shutdown_asked = True
        self.cancels_queued |= cancel_queued or cancel_running
        self.tell(m.ShutdownRequested(cancel_queued, cancel_running))

    # --- what workers do --------------------------------------------------------------------------

    @precondition(lambda self: self.starting())
    @rule(pick=PICK)
    def come_up(self, pick: int) -> None:
        worker_id = picked(self.starting(), pick)
        hand = self.hands[worker_id]
        hand.is_ready = True
        self.tell(m.WorkerReady(worker_id))

    def starting(self) -> list[int]:
        return [
            worker_id
            for worker_id, hand in self.hands.items()
            if hand.is_launched and not hand.is_ready
        ]

    @precondition(lambda self: self.running())
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=6),
        item_s=st.sampled_from([0.001, 0.001, 1.0]),
        leaks=st.sampled_from([False, False, False, True]),
    )
    def finish(self, picks: list[int], item_s: float, leaks: bool) -> None:
        for pick in picks:
            if self.running():
                self.finish_one(picked(self.running(), pick), item_s, leaks)

    def finish_one(self, call: m.RunTasks, item_s: float, leaks: bool = False) -> None:
        is_short = self.jobs[call.slices[0].task_id].spec.fn_id == 0
        item_s = 0.001 if is_short else item_s * (1 + 9 * (self.hands[call.worker_id].place % 2))
        counts = [piece.stop - piece.start for piece in call.slices]
        reports = tuple(Report(count, busy_s=count * item_s) for count in counts)
        self.answer(call, reports, leaks)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, data=st.data())
    def finish_badly(self, pick: int, data: st.DataObject) -> None:
        """Some items fail, some may run again, some were not begun."""
        call = picked(self.running(), pick)
        reports = []
        for piece in call.slices:
            done = data.draw(st.integers(0, piece.stop - piece.start))
            failed = data.draw(st.sets(st.integers(0, done - 1))) if done else set()
            retry = [item for item in sorted(failed) if data.draw(st.booleans())]
            again = [item for item in sorted(failed - set(retry)) if data.draw(st.booleans())]
            numbers = [tuple(piece.start + item for item in items) for items in (retry, again)]
            reports.append(Report(done, len(failed), numbers[0], 0.001 * done, numbers[1]))
        self.answer(call, tuple(reports))

    @precondition(lambda self: any(not self.is_gang(call.slices[0]) for call in self.running()))
    @rule(pick=PICK, data=st.data())
    def go_on_with_some(self, pick: int, data: st.DataObject) -> None:
        """Tell what is done of a call that lasts, keep what is at hand, and hand the rest back with
        all that waits behind it.
        """
        calls = [call for call in self.running() if not self.is_gang(call.slices[0])]
        call = picked(
            [call for call in calls if len(self.hands[call.worker_id].calls) > 1] or calls, pick
        )
        at_hand = data.draw(st.integers(0, len(call.slices) - 1))
        reports, kept, left = [], [], []
        for number, piece in enumerate(call.slices):
            size = piece.stop - piece.start
            done = data.draw(st.integers(0, size - (number == at_hand))) if number <= at_hand else 0
            failed = data.draw(st.sets(st.integers(0, done - 1))) if done else set()
            retry = tuple(piece.start + item for item in sorted(failed) if data.draw(st.booleans()))
            reports.append(Report(done, len(failed), retry, 0.001 * done))
            kept.append(data.draw(st.integers(1, size - done)) if number == at_hand else 0)
            if kept[-1]:
                left.append(
                    piece._replace(start=piece.start + done, stop=piece.start + done + kept[-1])
                )
        hand = self.hands[call.worker_id]
        for behind in hand.calls[1:]:
            self.past.append(
                (call.worker_id, behind, tuple(Report(0) for _ in self.land(behind).slices))
            )
        hand.calls = [call.attempt_id]
        self.lay_failed_to_rest(call, tuple(reports))
        self.calls[call.attempt_id] = rest = call._replace(slices=tuple(left))
        self.take_out(call)
        for piece in rest.slices:
            if self.counts(call, piece.task_id):
                self.jobs[piece.task_id].calls += 1
                self.jobs[piece.task_id].flying.update(range(piece.start, piece.stop))
        self.tell(
            m.AttemptNarrowed(call.worker_id, call.attempt_id, tuple(reports), tuple(kept)),
            answered=call,
        )

    def lay_failed_to_rest(self, call: m.RunTasks, reports: tuple[Report, ...]) -> None:
        for piece, report in zip(call.slices, reports, strict=True):
            job = self.jobs[piece.task_id]
            if (
                self.counts(call, piece.task_id)
                and piece.attempt <= job.spec.retries
                and not job.spec.is_gang
            ):
                job.lay_to_rest(report.retry, piece.attempt, self.now)

    def running(self) -> list[m.RunTasks]:
        """Return the call that each worker is at."""
        return [self.calls[hand.calls[0]] for hand in self.hands.values() if hand.calls]

    def answer(self, call: m.RunTasks, reports: tuple[Report, ...], leaks: bool = False) -> None:
        self.land(call.attempt_id)
        self.hands[call.worker_id].leaks = leaks
        self.hands[call.worker_id].calls.remove(call.attempt_id)
        for piece, report in zip(call.slices, reports, strict=True):
            job = self.jobs[piece.task_id]
            job.is_broken_up |= job.spec.is_gang and job.end is None and report.failed > 0
        self.lay_failed_to_rest(call, reports)
        self.past.append((call.worker_id, call.attempt_id, reports))
        self.tell(m.AttemptFinished(call.worker_id, call.attempt_id, reports, leaks), answered=call)

    @precondition(lambda self: self.past and not self.is_due())
    @rule(pick=PICK)
    def answer_again(self, pick: int) -> None:
        worker_id, attempt_id, reports = picked(self.past, pick)
        assert (
            self.tell(m.AttemptNarrowed(worker_id, attempt_id, reports, (1,) * len(reports))) == []
        )
        assert self.tell(m.AttemptFinished(worker_id, attempt_id, reports)) == []

    @precondition(lambda self: self.hands)
    @rule(pick=PICK, reason=st.sampled_from(LOSSES), was_idle=st.booleans())
    def die(self, pick: int, reason: LossReason, was_idle: bool) -> None:
        worker_id = picked(list(self.hands), pick)
        is_ready = self.hands[worker_id].is_ready
        self.bury(
            worker_id,
            is_pardoned=was_idle or self.is_forgiven(worker_id, reason),
            was_idle=was_idle,
        )
        commands = self.tell(m.WorkerLost(worker_id, reason, was_idle))
        is_held_against_it = any(
            isinstance(command, m.SetTimer) and command.kind == "start" for command in commands
        )
        assert not (is_ready and reason is LossReason.STOPPED and is_held_against_it)

    def is_forgiven(self, worker_id: int, reason: LossReason) -> bool:
        """Whether nothing that a worker runs is to blame for its loss."""
        is_announced = reason is LossReason.NODE and self.hands[worker_id].place in self.leaving
        return is_announced or reason in (LossReason.STOPPED, LossReason.PREEMPTED)

    @precondition(lambda self: self.stubborn())
    @rule(pick=PICK)
    def be_killed(self, pick: int) -> None:
        """Not do what one is told."""
        worker_id = picked(self.stubborn(), pick)
        self.bury(worker_id, is_pardoned=True)
        self.tell(m.WorkerLost(worker_id, LossReason.STOPPED))
        if self.starting():
            self.come_up(-1)

    def stubborn(self) -> list[int]:
        told = {attempt_id for attempt_id, _ in self.signals | self.moved}
        return [call.worker_id for call in self.running() if call.attempt_id in told]

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        """Die while running something, and be replaced at once."""
        call = picked(self.running(), pick)
        self.bury(call.worker_id)
        self.tell(m.WorkerLost(call.worker_id, LossReason.EXIT))
        if self.starting():
            self.come_up(-1)

    def bury(self, worker_id: int, is_pardoned: bool = False, was_idle: bool = False) -> None:
        hand = self.hands.pop(worker_id)
        for attempt_id in hand.calls:
            call = self.calls[attempt_id]
            for piece in call.slices:
                job, items = self.jobs[piece.task_id], range(piece.start, piece.stop)
                if not self.counts(call, piece.task_id) or job.end is not None or job.spec.is_gang:
                    continue
                if is_pardoned and (was_idle or job.spec.retries > 0):
                    self.pardoned |= {(piece.task_id, item): piece.attempt for item in items}
                elif piece.attempt <= job.spec.retries:
                    job.lay_to_rest(items, piece.attempt, self.now)
            self.land(attempt_id)
            self.past.append(
                (worker_id, attempt_id, tuple(Report(p.stop - p.start) for p in call.slices))
            )

    def land(self, attempt_id: int) -> m.RunTasks:
        call = self.calls.pop(attempt_id)
        self.take_out(call)
        return call

    def take_out(self, call: m.RunTasks, task_id: int | None = None) -> None:
        """Take what still counts of a call, or only that of a task, out of flight."""
        for piece in call.slices:
            if task_id in (None, piece.task_id) and self.counts(call, piece.task_id):
                job = self.jobs[piece.task_id]
                job.calls -= 1
                job.flying.subtract(range(piece.start, piece.stop))

    # --- what machines do -------------------------------------------------------------------------

    @precondition(lambda self: self.places)
    @rule(pick=PICK, delay_s=st.sampled_from([None, -1.0, 15.0, 60.0]))
    def announce(self, pick: int, delay_s: float | None) -> None:
        """Say that a place will be gone soon."""
        place = picked(list(self.places), pick)
        hand = self.hands.get(self.places[place])
        self.leaving[place] = inf if delay_s is None else self.now + delay_s
        self.tell(m.PlaceLeaving(place, None if delay_s is None else self.now + delay_s))
        assert (place in self.places) == bool(hand and hand.calls), (
            "a place that nothing runs in goes at once"
        )

    @precondition(lambda self: not (self.is_broken or self.is_closed))
    @rule(
        is_final=st.sampled_from([False, False, False, True]),
        delay_s=st.sampled_from([None, -1.0, 15.0, 60.0]),
    )
    def announce_all(self, is_final: bool, delay_s: float | None) -> None:
        """Say that all places will be gone soon, and whether others can come."""
        at = None if delay_s is None else self.now + delay_s
        gone_at = None if at is None or not is_final else at + 5.0
        before, runs_something = dict(self.places), bool(self.running())
        self.all_leaving = m.PoolLeaving(is_final, at if is_final else None, gone_at)
        self.tell(self.all_leaving)
        assert self.places == before
        is_over = gone_at is not None and gone_at <= self.now
        assert self.is_broken == (is_final and (is_over or not runs_something))

    @rule()
    def resume(self) -> None:
        """Let a node come that stays."""
        if not self.is_broken:
            self.all_leaving = None
        self.tell(m.PoolResumed())

    @precondition(lambda self: self.places)
    @rule(pick=PICK, reason=st.sampled_from([LossReason.NODE, LossReason.PREEMPTED]))
    def lose_place(self, pick: int, reason: LossReason) -> None:
        """Lose a place with its worker."""
        place = picked(list(self.places), pick)
        worker_id = self.places[place]
        if worker_id in self.hands:
            self.bury(worker_id, is_pardoned=self.is_forgiven(worker_id, reason))
        self.tell(m.PlaceLost(place, reason))
        assert place not in self.places

    # --- what time does ---------------------------------------------------------------------------

    @precondition(lambda self: self.timers)
    @rule()
    def wait(self) -> None:
        timer = min(self.timers, key=lambda timer: timer.at)
        self.timers.remove(timer)
        self.now = max(self.now, timer.at)
        hand = self.hands.get(timer.worker_id)
        if hand is not None and timer.kind == "ready" and not hand.is_ready:
            del self.hands[timer.worker_id]
        if timer.kind == "retry" and (rests := self.jobs[timer.task_id].rests):
            assert min(until for until, _ in rests) == timer.at
            rests.remove(min(rests, key=lambda rest: rest[0]))
        self.tell(m.TimerFired(timer.kind, timer.worker_id, timer.attempt_id, timer.task_id))

    @rule()
    def pass_time(self) -> None:
        """Let nothing happen for a while, as long as no timer is due."""
        self.now = min([self.now + IDLE_S / 4, *(timer.at for timer in self.timers)])

    # --- what the scheduler says ------------------------------------------------------------------

    def tell(self, event: m.Event, answered: m.RunTasks | None = None) -> list[m.Command]:
        was_over = self.is_closed or self.is_broken
        new_spec = event.spec if isinstance(event, m.TaskSubmitted) else None
        was_used = any(job.end is None for job in self.jobs.values() if job.spec is not new_spec)
        commands = self.scheduler.handle(event, self.now)
        for command in commands:
            # makes room for what is sent in its place, before it is told
            if isinstance(command, m.TimeOutItems) and not self.is_gang(command.items):
                self.take_out(self.call_of(command.items))
            elif isinstance(command, m.CancelItem) and self.is_flying(command.item):
                self.take_out(self.call_of(command.item), command.item.task_id)
        for command in commands:
            if isinstance(command, m.SettleItems):
                self.on_settle(command, answered)
            elif isinstance(command, m.Vacate):
                self.on_vacate(command, event)
            elif isinstance(command, m.SignalTask):
                self.on_signal(
                    command,
                    event,
                    [other.task_id for other in commands if isinstance(other, m.EndTask)],
                )
            else:
                getattr(self, f"on_{type(command).__name__}")(command)
        runs = [call for command in commands for call in calls_in(command)]
        assert not (runs and was_over)
        assert not (runs and self.all_leaving), "started where nothing stays"
        self.check_order(runs)
        self.check_overtaking(runs)
        self.check_signals(commands)
        self.check_broken_up()
        if any(job.end is None for job in self.jobs.values()):
            self.used_at = self.now
            assert None not in self.places.values(), "workers are parked although there is work"
        elif was_used:
            self.used_at = self.now
        return commands

    def on_RunGang(self, gang: m.RunGang) -> None:
        """A gang starts whole, and once, each rank in a place of its own."""
        task_id = gang.runs[0].slices[0].task_id
        job = self.jobs[task_id]
        assert job.spec.is_gang
        assert not job.has_started
        job.has_started = True
        assert gang.is_loan == job.spec.is_loan
        for call in gang.runs:
            if gang.is_loan:
                self.lend(call.worker_id)
            self.on_RunTasks(call, is_rank=True)
        assert [call.slices for call in gang.runs] == [
            (Slice(task_id, rank, rank + 1, 1),) for rank in range(job.size)
        ]
        places = [self.hands[call.worker_id].place for call in gang.runs]
        assert len(set(places)) == len(places)
        order = (
            places
            if job.spec.places is None
            else [job.spec.places.index(place) for place in places]
        )
        assert order == sorted(order), "ranks are not in the order of their places"

    def lend(self, worker_id: int) -> None:
        """A worker that is free ends, and another has its place, and what is bound to it, without
        starting yet.
        """
        place = self.scheduler.workers.by_id[worker_id].place
        before = self.places[place]
        hand = self.hands.pop(before)
        assert hand.is_ready
        assert not hand.calls
        assert worker_id not in self.numbers, "a number is used twice"
        for job in self.jobs.values():
            job.worker_id = worker_id if job.worker_id == before else job.worker_id
        self.numbers.add(worker_id)
        self.places[place], self.hands[worker_id] = worker_id, Hand(place, is_ready=True)

    def is_gang(self, items: Slice) -> bool:
        return self.jobs[items.task_id].spec.is_gang

    def on_RunTasks(self, call: m.RunTasks, is_rank: bool = False) -> None:
        assert is_rank == self.is_gang(call.slices[0]), "a rank is called by itself"
        hand = self.hands[call.worker_id]
        assert hand.is_ready
        assert not hand.is_spent
        bound = [
            job for job in self.jobs.values() if job.worker_id == call.worker_id and job.end is None
        ]
        assert not hand.leaks or bound, (
            "a worker that should have been replaced has got something more"
        )
        assert hand.place not in self.leaving, "a place that is about to go has got something more"
        is_fresh = any(self.jobs[piece.task_id].spec.is_fresh for piece in call.slices)
        assert not (is_fresh and hand.is_used)
        hand.is_used, hand.is_spent = True, is_fresh
        assert len(hand.calls) < 2
        assert call.attempt_id not in self.calls
        assert len({self.jobs[piece.task_id].spec.fn_id for piece in call.slices}) == 1
        hand.calls.append(call.attempt_id)
        self.calls[call.attempt_id] = call
        for piece in call.slices:
            self.check_piece(piece, call, hand)
        pieces = [piece for attempt_id in hand.calls for piece in self.calls[attempt_id].slices]
        is_precious = [
            self.jobs[piece.task_id].spec.runs_alone() or piece.attempt > 1 for piece in pieces
        ]
        assert not any(is_precious) or len(is_precious) == 1, (
            "what can't run again shares its worker"
        )

    def check_piece(self, piece: Slice, call: m.RunTasks, hand: Hand) -> None:
        job = self.jobs[piece.task_id]
        items = range(piece.start, piece.stop)
        assert job.end is None
        assert not job.is_draining
        assert 0 <= piece.start < piece.stop <= job.size
        assert not any(item in job.outcomes or job.flying[item] > 0 for item in items), (
            "an item runs twice"
        )
        assert job.resting.isdisjoint(items), "too early"
        assert all(
            job.attempts.get(item, 1) <= piece.attempt <= job.spec.retries + 1 for item in items
        )
        assert piece.attempt <= job.spec.retries or len(items) == 1, (
            "the last attempt is made alone"
        )
        assert all(
            self.pardoned.pop((piece.task_id, item), piece.attempt) == piece.attempt
            for item in items
        ), "wrongly charged"
        assert not job.spec.runs_alone() or len(items) == 1
        assert job.may_run_on(call.worker_id, hand.place)
        job.attempts.update(dict.fromkeys(items, piece.attempt))
        job.flying.update(items)
        job.calls += 1
        assert job.spec.max_workers is None or job.calls <= job.spec.max_workers

    def check_gangs(self, runs: list[m.RunTasks]) -> None:
        for task_id in {
            piece.task_id
            for call in runs
            for piece in call.slices
            if self.jobs[piece.task_id].spec.is_gang
        }:
            ranks = [call for call in runs if call.slices[0].task_id == task_id]
            places = [self.hands[call.worker_id].place for call in ranks]
            assert [call.slices for call in ranks] == [
                (Slice(task_id, i, i + 1, 1),) for i in range(self.jobs[task_id].size)
            ]
            assert places == sorted(set(places)), (
                "ranks are not on distinct workers, in the order of their places"
            )

    def check_overtaking(self, runs: list[m.RunTasks]) -> None:
        """Nothing starts in a place that an older gang waits for; among gangs, that holds for those
        with the same wishes.
        """
        gangs = [
            job
            for job in self.jobs.values()
            if job.spec.is_gang and job.has_more and not job.has_started
        ]
        for call in runs:
            started = self.jobs[call.slices[0].task_id]
            place = self.hands[call.worker_id].place
            for gang in gangs:
                if started.spec.is_fresh or not gang.may_run_on(call.worker_id, place):
                    continue  # the first may have had its worker before, which was starting
                if not started.spec.is_gang or (started.spec.places, started.spec.priority) == (
                    gang.spec.places,
                    gang.spec.priority,
                ):
                    assert all(
                        order_of(self.jobs[piece.task_id]) < order_of(gang) for piece in call.slices
                    ), "overtaken"

    def check_broken_up(self) -> None:
        """The ranks in flight of a gang in which something has failed were all told to stop; no
        others were.
        """
        for task_id, job in self.jobs.items():
            if not job.spec.is_gang or job.end is not None:
                continue
            flying = {
                (call.attempt_id, task_id)
                for call in self.calls.values()
                if call.slices[0].task_id == task_id
            }
            assert flying & self.signals == (flying if job.is_broken_up else set())
            assert bool(flying) == job.has_started, "a gang has not ended with its last rank"
            assert job.has_started or not job.outcomes, "a rank has an outcome that has not begun"

    def check_order(self, runs: list[m.RunTasks]) -> None:
        """Nobody starts a task while an older one waits that he could take."""
        waiting = [job for job in self.jobs.values() if job.has_more]
        for call in runs:
            started, place = self.jobs[call.slices[0].task_id], self.hands[call.worker_id].place
            if place in self.scheduler.workers.streaks:
                continue  # it may leave something to others: what it gets fails
            for job in waiting:
                if job.spec.is_fresh or started.spec.is_fresh:
                    continue  # it may have its worker already, which is starting
                if (
                    job.spec.is_gang
                    or started.spec.is_gang
                    or not job.may_run_on(call.worker_id, place)
                ):
                    continue
                assert all(
                    order_of(self.jobs[piece.task_id]) <= order_of(job) for piece in call.slices
                ), "out of turn"

    def check_signals(self, commands: list[m.Command]) -> None:
        """What runs of a task that has ended, or was given up, was told so, unless its worker ends
        anyway.
        """
        late = {key for key in self.given_up if key[0] in self.calls}
        ended = {command.task_id for command in commands if isinstance(command, m.EndTask)}
        running = {
            (call.attempt_id, p.task_id)
            for call in self.calls.values()
            for p in call.slices
            if p.task_id in ended
        }
        assert running | late <= self.signals

    def on_signal(self, command: m.SignalTask, event: m.Event, ended: list[int]) -> None:
        call = self.calls[command.attempt_id]
        assert call.worker_id == command.worker_id
        assert self.counts(call, command.task_id)
        assert self.jobs[command.task_id].end is None
        if command.signal is m.Signal.STOP:
            assert isinstance(event, m.StopRequested)
        elif command.signal is m.Signal.LEAVE:
            assert isinstance(event, (m.PlaceLeaving, m.PoolLeaving))
            job, place = self.jobs[command.task_id], self.hands[call.worker_id].place
            assert job.spec.is_gang or (
                job.spec.retries > 0 and getattr(event, "place", place) == place
            )
            assert (call.attempt_id, command.task_id) not in self.signals, "it has to end anyway"
        elif (
            command.task_id not in ended
            and getattr(event, "kind", "leave") == "leave"
            and isinstance(event, MOVES)
        ):
            job = self.jobs[command.task_id]
            pool_at = self.all_leaving.at if self.all_leaving is not None else None
            at = min(self.leaving.get(self.hands[call.worker_id].place, inf), pool_at or inf)
            assert at <= self.now, "too early"
            assert job.spec.is_gang or job.spec.retries > 0, (
                "what may run once only was interrupted"
            )
            self.moved.add((call.attempt_id, command.task_id))
        else:
            is_news = (call.attempt_id, command.task_id) not in self.signals
            assert is_news or isinstance(event, MOVES), "told twice"
            self.signals.add((call.attempt_id, command.task_id))

    def is_flying(self, items: Slice) -> bool:
        return any(items in call.slices for call in self.calls.values())

    def call_of(self, items: Slice) -> m.RunTasks:
        (call,) = (
            call
            for call in self.calls.values()
            if items in call.slices and self.counts(call, items.task_id)
        )
        return call

    def on_TimeOutItems(self, command: m.TimeOutItems) -> None:
        job = self.jobs[command.items.task_id]
        assert command.timeout_s == job.spec.timeout_s
        if job.spec.is_gang:
            assert command.items == Slice(job.spec.task_id, 0, job.size, 1)
            assert not job.is_broken_up, "said twice, or too late"
            job.is_broken_up = True
            return
        self.given_up.add((self.call_of(command.items).attempt_id, command.items.task_id))
        self.note_outcome(command.items, "timed out")

    def on_CancelItem(self, command: m.CancelItem) -> None:
        item = command.item
        assert item.stop == item.start + 1
        if self.is_flying(item):
            self.given_up.add((self.call_of(item).attempt_id, item.task_id))
        self.note_outcome(item, "cancelled")

    def on_settle(self, command: m.SettleItems, answered: m.RunTasks | None) -> None:
        assert answered is not None
        assert command.attempt_id == answered.attempt_id
        items = command.items
        assert any(
            piece.task_id == items.task_id
            and piece.attempt == items.attempt
            and piece.start <= items.start < items.stop <= piece.stop
            for piece in answered.slices
        )
        self.note_outcome(items, "settled")

    def on_FailItems(self, command: m.FailItems) -> None:
        job = self.jobs[command.items.task_id]
        if job.spec.is_gang:
            assert job.has_started
            job.is_broken_up = True
        self.note_outcome(command.items, "failed")

    def note_outcome(self, items: Slice, outcome: str) -> None:
        job = self.jobs[items.task_id]
        assert job.end is None
        for item in range(items.start, items.stop):
            assert item not in job.outcomes, "an item counts twice"
            assert job.flying[item] <= 0
            for _, items_resting in job.rests:
                items_resting.discard(item)
            job.outcomes[item] = outcome

    def on_EndTask(self, command: m.EndTask) -> None:
        job = self.jobs[command.task_id]
        assert job.end is None, "a task ends twice"
        job.end = command.state
        if (
            job.has_started
            and not job.is_cancelled
            and not self.cancels_queued
            and not self.is_broken
        ):
            assert sorted(job.outcomes) == list(range(job.size)), (
                "a gang has ended before its ranks"
            )
            assert command.state is (TaskState.FAILED if job.is_broken_up else TaskState.FINISHED)
        if command.state is TaskState.FINISHED:
            assert not job.is_open
            assert sorted(job.outcomes) == list(range(job.size))
        elif command.state is TaskState.CANCELLED:
            assert job.is_cancelled or self.cancels_queued or self.shutdown_asked
        else:
            has_lost_its_places = job.is_open and not job.is_plain
            assert job.spec.fail_fast or job.spec.is_gang or has_lost_its_places or self.is_broken

    def on_StartWorker(self, command: m.StartWorker) -> None:
        place = self.places.get(command.place)
        assert command.worker_id not in self.places.values() or place == command.worker_id
        if place != command.worker_id:
            # it makes room for something that wants a process of its own, or has run that
            if place in self.hands:
                hand = self.hands.pop(place)
                assert hand.is_used
                assert not hand.calls
            assert command.worker_id not in self.numbers, "a number is used twice"
        self.places[command.place] = command.worker_id
        self.hands[command.worker_id] = Hand(command.place, is_launched=True)
        self.numbers.add(command.worker_id)

    def on_SetTimer(self, command: m.SetTimer) -> None:
        assert command.at > self.now
        assert command.kind != "idle" or all(timer.kind != "idle" for timer in self.timers), (
            "two idle timers"
        )
        self.timers.append(command)
        if command.kind == "timeout":
            (piece,) = self.calls[command.attempt_id].slices
            assert command.worker_id == self.calls[command.attempt_id].worker_id
            assert command.at == self.now + self.jobs[piece.task_id].spec.timeout_s
        if command.kind == "retry":
            assert command.at in [until for until, _ in self.jobs[command.task_id].rests]
        if command.kind == "start":
            place = next(
                place
                for place, worker_id in self.places.items()
                if worker_id not in (None, *self.hands)
            )
            self.places[place] = command.worker_id
            self.hands[command.worker_id] = Hand(place)

    def on_vacate(self, command: m.Vacate, event: m.Event) -> None:
        if (
            isinstance(event, m.ResizeRequested)
            and command.place in event.add
            and command.place not in self.places
        ):
            assert self.shutdown_asked or self.is_broken
            return
        worker_id = self.places.pop(command.place)
        self.leaving.pop(command.place, None)
        if worker_id in self.hands:
            self.bury(worker_id)

    def on_ParkWorker(self, command: m.ParkWorker) -> None:
        assert self.idle_timeout_s is not None
        assert self.now >= self.used_at + self.idle_timeout_s, "too early"
        worker_id = self.places[command.place]
        assert self.hands[worker_id].is_ready
        assert not self.hands.pop(worker_id).calls
        self.places[command.place] = None

    def on_DropPlace(self, command: m.DropPlace) -> None:
        assert command.place not in self.places
        assert command.reason is not LossReason.FAULTY or self.places, (
            "the last place was taken out"
        )

    def on_BreakPool(self, command: m.BreakPool) -> None:
        assert not self.places or self.is_left
        assert not self.is_broken
        assert not self.is_closed
        self.is_broken = True

    @property
    def is_left(self) -> bool:
        """Whether no other node can come for those that are about to go."""
        return self.all_leaving is not None and self.all_leaving.is_final

    def on_ClosePool(self, command: m.ClosePool) -> None:
        assert self.shutdown_asked
        assert not self.is_closed
        assert not self.places or (self.is_broken and self.is_left)
        assert all(job.end is not None for job in self.jobs.values())
        self.is_closed = True

    @invariant()
    def all_is_well_inside(self) -> None:
        check_invariants(self.scheduler)
        workers = self.scheduler.workers
        assert {
            number: w.place for number, w in workers.by_id.items() if number not in workers.parked
        } == {worker_id: hand.place for worker_id, hand in self.hands.items()}
        for worker_id, hand in self.hands.items():
            assert not hand.is_ready or list(workers.by_id[worker_id].attempts) == hand.calls
        counts = self.scheduler.counts
        assert counts.submitted == sum(job.size for job in self.jobs.values())
        assert counts.finished + counts.failed == sum(
            outcome != "cancelled"
            for job in self.jobs.values()
            for outcome in job.outcomes.values()
        )

    # --- the end ----------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Let everything go well from now on: every task must end, and the pool close."""
        if not self.is_left:
            self.resume()
        self.shutdown(cancel_queued=False, cancel_running=False)
        while any(job.is_open for job in self.jobs.values()):
            self.add_items(0, 1, stays_open=False)
        for _ in range(2 * sum(job.size for job in self.jobs.values()) + len(self.timers) + 100):
            if self.running():
                self.finish_one(self.running()[0], 1.0)
            elif self.starting():
                self.come_up(0)
            elif self.timers and not self.is_closed:
                self.wait()
            else:
                break
            self.all_is_well_inside()
        assert self.is_closed
        assert all(job.end is not None for job in self.jobs.values())
        assert not self.hands or self.is_broken


def calls_in(command: m.Command) -> tuple[m.RunTasks, ...]:
    """Return the calls that a command makes."""
    if isinstance(command, m.RunGang):
        return command.runs
    return (command,) if isinstance(command, m.RunTasks) else ()


def picked(options: list, pick: int):
    """Return one of several."""
    return options[pick % len(options)]


def wishes_of(gang: Job) -> tuple[tuple[int, ...] | None, int]:
    """Return where a gang may run, and how urgent it is."""
    return gang.spec.places, gang.spec.priority


def order_of(job: Job) -> tuple[int, int]:
    """Return what tasks start in the order of."""
    return -job.spec.priority, job.spec.task_id


OFTEN = settings(stateful_step_count=60, derandomize=True)


class TestScheduler(World.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(OFTEN, max_examples=150)


@pytest.mark.ci
class TestSchedulerOften(World.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(OFTEN, max_examples=500)
