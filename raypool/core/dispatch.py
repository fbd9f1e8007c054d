"""Gives each free worker its next call, and collects the workers of a gang."""

from __future__ import annotations

from raypool.core import messages as m
from raypool.core.backlog import Backlog
from raypool.core.faulty_places import FaultyPlaces
from raypool.core.model import (
    Attempt,
    Order,
    Queue,
    Task,
    TaskState,
    WaitingGang,
    Worker,
    WorkerState,
)
from raypool.core.outcomes import Outcomes
from raypool.core.workers import Workers

BUSY = WorkerState.BUSY  # looking up a member of an enum is slow in Python 3.11


class Dispatcher:
    """Gives each free worker the first task, by priority and submission, that it may run."""

    def __init__(
        self, backlog: Backlog, workers: Workers, outcomes: Outcomes, faults: FaultyPlaces
    ) -> None:
        self._backlog = backlog
        self._workers = workers
        self._outcomes = outcomes
        self._faults = faults
        self._now = 0.0
        self._out: list[m.Command] = []

    def give_out(self, now: float) -> list[m.Command]:
        """Give out work until no worker is free, or no task is left that may start."""
        backlog, workers = self._backlog, self._workers
        queue, waiting_gangs = backlog.queue, backlog.waiting_gangs
        self._now = now
        self._out = []
        if workers.wait_for_gang:
            workers.tear()
        while True:
            while waiting_gangs and self._see_to_gangs():
                pass
            if not (
                workers.idle or workers.check_lanes or workers.prefetch or workers.lanes_to_check
            ):
                return self._out
            head = backlog.head(queue)
            # it can't collect yet; the workers that it wants are not idle
            if head is not None and head.spec.is_gang:
                head = None
            called = self._first_called() if workers.lanes_to_check else None
            if called is not None and (head is None or called.order < head.order):
                self._give(called)
            elif head is not None and workers.idle:
                self._give(head)
            elif workers.check_lanes:
                self._offer(workers.by_id[next(iter(workers.check_lanes))])
            elif (
                head is not None
                and workers.prefetch
                and not workers.is_reserved
                and backlog.wants_look_ahead(head, workers.size)
            ):
                self._send(workers.by_id[next(iter(workers.prefetch))], head)
            else:
                return self._out

    def _first_called(self) -> Task | None:
        """Return the first task of the lanes that have both a task and an idle worker."""
        workers, heads = self._workers, []
        for lane in list(workers.lanes_to_check.values()):
            head = self._backlog.head(lane.queue)
            if head is not None and lane.idle_heap.first(workers.idle) is not None:
                heads.append(head)
            else:
                # a worker that becomes free there is put into `check_lanes`
                del workers.lanes_to_check[lane.key]
        return min(heads, key=lambda head: head.order, default=None)

    def _give(self, task: Task) -> None:
        heap = self._workers.idle_heap if task.lane is None else task.lane.idle_heap
        self._send(self._workers.first_idle(heap), task)

    def _offer(self, worker: Worker) -> None:
        """Give a free worker what comes first: a task of its lanes or the pool, or a gang."""
        workers, backlog = self._workers, self._backlog
        lanes = workers.places[worker.place].lanes.values()
        queues = [backlog.queue, *(lane.queue for lane in lanes)]
        heads = [head for queue in queues if (head := backlog.head(queue)) is not None]
        first = min(heads, key=lambda head: head.order, default=None)
        gathering = workers.gathering_for(worker) if workers.waiting_gangs else None
        if (
            first is not None
            and not first.spec.is_gang
            and (
                gathering is None or (first.lane is not None and first.order < gathering.gang.order)
            )
        ):
            self._send(worker, first)
        elif gathering is not None:
            workers.join(worker, gathering)
        elif first is not None:
            workers.move(worker, workers.wait_for_gang)
        else:
            workers.free(worker)

    def _send(self, worker: Worker, head: Task) -> None:
        """Send a worker the next call from the queue of this head."""
        backlog, workers = self._backlog, self._workers
        if head.lane is None:
            queue, num_workers = backlog.queue, workers.size
        else:
            queue, num_workers = head.lane.queue, len(head.lane.places)
        num_skipped, is_on_trial, aside = 0, False, None
        if workers.streaks:
            num_skipped = self._faults.num_to_skip(worker)
            is_on_trial = self._faults.is_on_trial(worker)
        if num_skipped:
            aside = backlog.set_aside(head, queue, num_skipped)
            head = backlog.head(queue) or head
            # what comes next may have to run alone
            if worker.attempts and not backlog.wants_look_ahead(head, num_workers):
                backlog.put_back(aside, queue)
                workers.move(worker, None)
                return
        if worker.has_delivered and head.spec.is_fresh:
            worker = workers.renew(worker)
            self._out += workers.launch(worker, self._now)
        before = self._first_elsewhere(worker, queue) if workers.lanes else None
        attempt_id = workers.next_attempt_id
        attempt = backlog.take(
            head, queue, (attempt_id, worker.worker_id), num_workers, before, is_on_trial
        )
        if aside is not None:
            backlog.put_back(aside, queue)
        workers.engage(worker, attempt)
        # else its own process is still starting: `begin` sends the call when that is ready
        if not attempt.is_fresh or worker.state is not WorkerState.STARTING:
            self._out.append(self._call(worker, attempt_id, attempt))
            if attempt.runs_alone:
                self._out += self._timer(worker, attempt_id, attempt)

    def _first_elsewhere(self, worker: Worker, queue: Queue) -> Order | None:
        """Return the order of what comes first for a worker, besides this queue."""
        workers = self._workers
        lanes = workers.places[worker.place].lanes.values()
        queues = [self._backlog.queue, *(lane.queue for lane in lanes)]
        heads = [self._backlog.head(other) for other in queues if other is not queue]
        orders = [head.order for head in heads if head is not None]
        gathering = workers.gathering_for(worker) if workers.waiting_gangs else None
        if gathering is not None:
            orders.append(gathering.gang.order)
        return min(orders, default=None)

    def _see_to_gangs(self) -> bool:
        """Start, fail, or begin to collect the first gang that can; False if none can.

        A gang that can't begin yet keeps later tasks from the workers that it wants.
        """
        workers = self._workers
        for gathering in workers.waiting_gangs.values():
            if gathering.is_complete:
                self._start_gang(gathering)
                return True
        first = self._backlog.head(self._backlog.queue)
        heads = [first, *(self._backlog.head(lane.queue) for lane in workers.lanes.values())]
        called = sorted(
            (head for head in heads if head is not None and head.spec.is_gang),
            key=lambda gang: gang.order,
        )
        collecting = [gathering.gang for gathering in workers.waiting_gangs.values()]
        for gang in [*called, *collecting]:
            if not workers.has_enough(gang):
                self._outcomes.end(gang, TaskState.FAILED)
                return True
        for number, gang in enumerate(called):
            # two gangs that want the same place could each hold what the other needs
            is_in_conflict = any(
                gang.spec.may_meet(other.spec) for other in (*called[:number], *collecting)
            )
            if not is_in_conflict and (first is None or first.order >= gang.order):
                self._backlog.pop(self._backlog.queue if gang.lane is None else gang.lane.queue)
                workers.collect(gang)
                return True
            workers.recall(gang)
        return False

    def _start_gang(self, gathering: WaitingGang) -> None:
        del self._backlog.waiting_gangs[gathering.gang.spec.task_id]
        runs, timers = [], []
        is_loan = gathering.gang.spec.is_loan
        for worker in self._workers.assemble(gathering):
            if is_loan:
                worker = self._workers.lend(worker)
            attempt_id = self._workers.next_attempt_id
            attempt = self._backlog.take_rank(gathering.gang, (attempt_id, worker.worker_id))
            self._workers.engage(worker, attempt)
            runs.append(self._call(worker, attempt_id, attempt))
            timers += self._timer(worker, attempt_id, attempt)
        self._out += [m.RunGang(tuple(runs), is_loan), *timers]

    def begin(self, worker: Worker, now: float) -> list[m.Command]:
        """Send a new worker the call that it was started for, unless that was cancelled."""
        ((attempt_id, attempt),) = worker.attempts.items()
        self._now, self._out = now, []
        task = self._backlog.tasks.get(attempt.slices[0].task_id)
        if task is not None and attempt_id in (task.flights or ()):
            self._out += [
                self._call(worker, attempt_id, attempt),
                *self._timer(worker, attempt_id, attempt),
            ]
        else:
            del worker.attempts[attempt_id]
            attempt.pace.running -= 1
        return self._out

    def _call(self, worker: Worker, attempt_id: int, attempt: Attempt) -> m.RunTasks:
        if worker.state is not BUSY:
            worker.state, worker.since = BUSY, self._now
        self._outcomes.counts.attempts += 1
        return m.RunTasks(worker.worker_id, attempt_id, attempt.slices)

    def _timer(self, worker: Worker, attempt_id: int, attempt: Attempt) -> list[m.Command]:
        task = self._backlog.tasks[attempt.slices[0].task_id]
        timeout_s = task.spec.timeout_s
        if timeout_s is None:
            return []
        return [m.SetTimer(self._now + timeout_s, "timeout", worker.worker_id, attempt_id)]
