"""Outcomes of tasks: which results count, which items run again or fail, when a task ends."""

from __future__ import annotations

from raypool.core import messages as m
from raypool.core import policy
from raypool.core.backlog import Backlog
from raypool.core.model import Counts, Report, Slice, Task, TaskState, Worker, WorkerState
from raypool.core.workers import Workers
from raypool.errors import LossReason

# looking up a member of an enum is slow in Python 3.11
FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
STOPPED = LossReason.STOPPED


class Outcomes:
    """Records the outcomes of items, and appends the commands that follow from them to `out`."""

    def __init__(self, backlog: Backlog, workers: Workers) -> None:
        self.counts = Counts()
        self.out: list[m.Command] = []
        self.now = 0.0
        self._backlog = backlog
        self._workers = workers
        # gangs whose ranks were cancelled because one has failed
        self.broken_up: dict[int, None] = {}
        # gangs with a rank whose machine is about to go
        self.thinned: dict[int, None] = {}

    def go_on(self, task: Task) -> None:
        """Queue what a task still has to run, or end it."""
        lane = task.lane
        if task.settled == task.size and not task.is_open:
            is_broken_up = self.broken_up and task.spec.task_id in self.broken_up
            self.end(task, FAILED if is_broken_up else FINISHED)
        elif task.is_draining and not task.flights:
            self.end(task, TaskState.CANCELLED)
        elif lane is None:
            self._backlog.push(task, self._backlog.queue)
        elif lane.lost is None:
            self._backlog.push(task, lane.queue)
            self._workers.lanes_to_check[lane.key] = lane
        else:
            self._fail_waiting(task, lane.lost)

    def end(self, task: Task, state: TaskState) -> None:
        """End a task, and cancel its running items."""
        if task.flights and task.spec.task_id not in self.broken_up:
            self.signal(task, m.Signal.CANCEL)
        self._backlog.discard(task)
        self.counts.cancelled += task.size - task.settled
        if task.lane is not None:
            self._workers.leave(task)
        if task.spec.is_gang:
            self._workers.give_up(task)
            self.broken_up.pop(task.spec.task_id, None)
            self.thinned.pop(task.spec.task_id, None)
        self.out.append(m.EndTask(task.spec.task_id, state))

    def drain(self, task: Task) -> None:
        """Start nothing more of a task, and end it when its calls have come back."""
        if not task.spec.is_gang:
            task.is_draining = True
            for attempt_id, worker_id in (task.flights or {}).copy().items():
                worker = self._workers.by_id[worker_id]
                if worker.state is not WorkerState.BUSY:  # its call was not sent
                    (piece,) = worker.attempts[attempt_id].slices
                    self._backlog.land(piece, attempt_id)
                    self._backlog.run_again(task, [piece])
            self._backlog.unqueue(task)
            self.go_on(task)

    def cancel_item(self, task: Task, item: int) -> None:
        """Cancel an item that waits, or runs in a call of its own."""
        if task.spec.is_gang:
            return
        piece = self._backlog.withdraw(task, item) or self._recall(task, item)
        if piece is not None:
            self.out.append(m.CancelItem(piece))
            task.settled += 1
            self.counts.cancelled += 1
            self._backlog.unqueue(task)
            self.go_on(task)

    def _recall(self, task: Task, item: int) -> Slice | None:
        """Cancel the call of an item, which is not in flight any more; None: it has none alone."""
        for attempt_id, worker_id in (task.flights or {}).items():
            worker = self._workers.by_id[worker_id]
            for piece in worker.attempts[attempt_id].slices:
                if piece[:3] == (task.spec.task_id, item, item + 1):
                    self._backlog.land(piece, attempt_id)
                    if worker.state is WorkerState.BUSY:  # else the call was not sent
                        self.out.append(
                            m.SignalTask(worker_id, attempt_id, piece.task_id, m.Signal.CANCEL)
                        )
                    return piece
        return None

    def signal(self, task: Task, signal: m.Signal, item: int | None = None) -> None:
        """Send a signal to all running items of a task, or to the slice with one of them."""
        flights = task.flights or {}
        for worker_id in dict.fromkeys(flights.values()):
            worker = self._workers.by_id[worker_id]
            if worker.state is not WorkerState.BUSY:  # it is starting, and the call was not sent
                continue
            # the last first: a worker whose call is interrupted would begin the one behind it
            for attempt_id in reversed(worker.attempts):
                if attempt_id in flights and (
                    item is None
                    or any(
                        piece.task_id == task.spec.task_id and piece.start <= item < piece.stop
                        for piece in worker.attempts[attempt_id].slices
                    )
                ):
                    call = m.SignalTask(worker_id, attempt_id, task.spec.task_id, signal)
                    self.out.append(call)

    def settle(self, task: Task, piece: Slice, report: Report, attempt_id: int) -> None:
        """Process a worker's report of a slice; queue the items that run again."""
        done, failed, retry, _, prevented = report
        stop = piece.start + done
        if stop == piece.stop and not retry and not prevented:  # nearly always
            self.out.append(m.SettleItems(attempt_id, piece))
            self._count_settled(task, done, failed)
            if failed:
                self._after_landing(task, [], has_failed=True)
            else:
                self.go_on(task)
            return
        if task.spec.is_gang or piece.attempt > task.spec.retries:
            retry = ()
        repeated = () if task.spec.is_gang else report.repeated(retry)
        self.out += [
            m.SettleItems(attempt_id, run) for run in piece._replace(stop=stop).without(repeated)
        ]
        failed -= len(repeated)
        self._count_settled(task, done - len(repeated), failed)
        again = self._after_a_rest(
            task, [Slice(piece.task_id, index, index + 1, piece.attempt + 1) for index in retry]
        )
        again += [
            Slice(piece.task_id, index, index + 1, piece.attempt) for index in prevented if repeated
        ]
        if stop < piece.stop:
            again.append(piece._replace(start=stop))
        if again and task.spec.is_gang:  # a rank not begun; the others have: it can't follow them
            reason = LossReason.PREEMPTED if piece.task_id in self.thinned else LossReason.UNKNOWN
            if piece.task_id in self.broken_up:
                reason = STOPPED
            self._fail_items(task, again.pop(), reason)
            failed += 1
        self._after_landing(task, again, failed > 0)

    def _after_a_rest(self, task: Task, pieces: list[Slice]) -> list[Slice]:
        """Delay slices that run again, if their task wants that; return the others."""
        if not pieces or task.spec.retry_delay_s == 0:
            return pieces
        until = self.now + policy.retry_delay_s(task.spec.retry_delay_s, pieces[0].attempt)
        self._backlog.rest(task, pieces, until)
        self.out.append(m.SetTimer(until, "retry", -1, task_id=task.spec.task_id))
        return []

    def send_elsewhere(self, worker: Worker, signal: m.Signal) -> None:
        """Signal the tasks of a worker to return and run elsewhere, if they may run again."""
        if worker.state is not WorkerState.BUSY:
            return  # its call was not sent yet
        for attempt_id, attempt in worker.attempts.items():
            for piece in attempt.slices:
                task_id = piece.task_id
                task = self._backlog.tasks.get(task_id)
                if task is None or attempt_id not in (task.flights or ()):
                    continue
                if task_id in self.broken_up:
                    continue
                is_gang, is_news = task.spec.is_gang, task_id not in self.thinned
                if is_gang:
                    self.thinned[task_id] = None
                # items that may run only once continue while they can
                if signal is m.Signal.CANCEL if is_gang else task.spec.retries > 0:
                    self.out.append(m.SignalTask(worker.worker_id, attempt_id, task_id, signal))
                elif is_gang and is_news:
                    # a gang leaves as a whole, and its ranks may first save together
                    self.signal(task, signal)

    def lose(self, task: Task, piece: Slice, reason: LossReason, was_idle: bool) -> None:
        """Run a slice again that was lost with its worker, or fail it."""
        retries, lane = task.spec.retries, task.lane
        # a loss is no retry if nothing had begun, or for a reason that is not the item's fault;
        # but without retries an item never runs twice
        is_charged = not was_idle and (reason not in policy.FORGIVEN or retries == 0)
        is_last = is_charged and piece.attempt > retries
        if is_last or task.spec.is_gang or (lane is not None and lane.lost is not None):
            self._fail_items(task, piece, reason)
            self._after_landing(task, [], has_failed=True)
            return
        again = [piece]
        if is_charged:
            size = policy.piece_size(piece.stop - piece.start, retries + 1 - piece.attempt)
            again = self._after_a_rest(task, piece.for_next_attempt(size))
        self._after_landing(task, again, has_failed=False)

    def time_out(self, task: Task, piece: Slice, attempt_id: int, worker_id: int) -> None:
        """Fail a slice that ran for too long, and cancel it; it is not in flight any more."""
        assert task.spec.timeout_s is not None
        self.out.append(m.SignalTask(worker_id, attempt_id, piece.task_id, m.Signal.CANCEL))
        self.out.append(m.TimeOutItems(piece, task.spec.timeout_s))
        count = piece.stop - piece.start
        self._count_settled(task, count, count)
        self._after_landing(task, [], has_failed=True)

    def time_out_gang(self, gang: Task) -> None:
        """Cancel all ranks of a gang that ran for too long; each settles when it returns."""
        if gang.spec.task_id not in self.broken_up:
            assert gang.spec.timeout_s is not None
            ranks = Slice(gang.spec.task_id, 0, gang.size, 1)
            self.out.append(m.TimeOutItems(ranks, gang.spec.timeout_s))
            self._break_up(gang)

    def _break_up(self, gang: Task) -> None:
        # once; without the failed rank the others might wait forever
        if gang.spec.task_id not in self.broken_up:
            self.broken_up[gang.spec.task_id] = None
            self.signal(gang, m.Signal.CANCEL)

    def _after_landing(self, task: Task, again: list[Slice], has_failed: bool) -> None:
        """Queue what runs again, and end the task if nothing is left or it must not fail."""
        if again:
            self._backlog.run_again(task, again)
        if has_failed and task.spec.is_gang:
            self._break_up(task)
        if has_failed and task.spec.fail_fast:
            self.end(task, FAILED)
        else:
            self.go_on(task)

    def _fail_waiting(self, task: Task, reason: LossReason) -> None:
        """Fail the waiting items of a task that no worker may run; running ones may return."""
        if task.spec.is_gang:
            if task.waiting:
                self.end(task, FAILED)
            return
        pieces = self._backlog.give_up(task)
        for piece in pieces:
            self._fail_items(task, piece, reason)
        if task.is_open or (pieces and task.spec.fail_fast):
            self.end(task, FAILED)
        elif task.settled == task.size:
            self.end(task, FINISHED)

    def _fail_items(self, task: Task, items: Slice, reason: LossReason) -> None:
        count = items.stop - items.start
        self._count_settled(task, count, count)
        self.out.append(m.FailItems(items, reason))

    def _count_settled(self, task: Task, settled: int, failed: int) -> None:
        task.settled += settled
        self.counts.finished += settled - failed
        self.counts.failed += failed
