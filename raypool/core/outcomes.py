"""Outcomes of tasks: which results count, which items run again or have failed, and when a task
ends.
"""

from __future__ import annotations

from raypool.core import messages as m
from raypool.core import policy
from raypool.core.backlog import Backlog
from raypool.core.model import Counts, Report, Slice, Task, TaskState, Worker, WorkerState
from raypool.core.workers import Workers
from raypool.errors import LossReason

# Python 3.11 takes its time to look these up
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
        # gangs whose ranks were told to stop, because one has failed
        self.broken_up: dict[int, None] = {}
        # gangs that were told that the machine of a rank is about to go
        self.thinned: dict[int, None] = {}

    def go_on(self, task: Task) -> None:
        """Queue what a task still has to run, or end it."""
        lane = task.lane
        if task.settled == task.size and not task.is_open:
            self.end(
                task, FAILED if self.broken_up and task.spec.task_id in self.broken_up else FINISHED
            )
        elif lane is None:
            self._backlog.push(task, self._backlog.queue)
        elif lane.lost is None:
            self._backlog.push(task, lane.queue)
            self._workers.lanes_to_check[lane.key] = lane
        else:
            self._fail_waiting(task, lane.lost)

    def end(self, task: Task, state: TaskState) -> None:
        """End a task; items of it that still run are told to stop, since nobody wants them."""
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

    def signal(self, task: Task, signal: m.Signal) -> None:
        """Tell whatever runs of a task now."""
        for attempt_id, worker_id in (task.flights or {}).items():
            # else it is about to be sent
            if self._workers.by_id[worker_id].state is WorkerState.BUSY:
                self.out.append(m.SignalTask(worker_id, attempt_id, task.spec.task_id, signal))

    def settle(self, task: Task, piece: Slice, report: Report, attempt_id: int) -> None:
        """Take in what a worker says of a slice; queue what it handed back, or what may run
        again.
        """
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
        if again and task.spec.is_gang:  # the other ranks have begun: it can't follow them
            self._fail_items(task, again.pop(), self._why_not_begun(task))
            failed += 1
        self._after_landing(task, again, failed > 0)

    def _after_a_rest(self, task: Task, pieces: list[Slice]) -> list[Slice]:
        """Let slices that run again wait first, if their task wants that; return those that need
        not.
        """
        if not pieces or task.spec.retry_delay_s == 0:
            return pieces
        until = self.now + policy.retry_delay_s(task.spec.retry_delay_s, pieces[0].attempt)
        self._backlog.rest(task, pieces, until)
        self.out.append(m.SetTimer(until, "retry", -1, task_id=task.spec.task_id))
        return []

    def _why_not_begun(self, gang: Task) -> LossReason:
        """Return why a rank of a gang has come back without an outcome."""
        if gang.spec.task_id in self.broken_up:
            return STOPPED
        return LossReason.PREEMPTED if gang.spec.task_id in self.thinned else LossReason.UNKNOWN

    def send_elsewhere(self, worker: Worker, signal: m.Signal) -> None:
        """Tell what a worker runs to come back, to run again elsewhere. Items that may run only
        once continue while they can.

        Of a gang all ranks are told that one has to leave: it goes as a whole, and may first save
        together what it has.
        """
        if worker.state is not WorkerState.BUSY:
            return  # what it is started for was not sent yet
        for attempt_id, attempt in worker.attempts.items():
            for piece in attempt.slices:
                task = self._backlog.tasks.get(piece.task_id)
                if (
                    task is None
                    or attempt_id not in (task.flights or ())
                    or task.spec.task_id in self.broken_up
                ):
                    continue
                if not task.spec.is_gang:
                    if task.spec.retries > 0:
                        self.out.append(
                            m.SignalTask(worker.worker_id, attempt_id, task.spec.task_id, signal)
                        )
                    continue
                is_news = task.spec.task_id not in self.thinned
                self.thinned[task.spec.task_id] = None
                if signal is m.Signal.CANCEL:
                    self.out.append(
                        m.SignalTask(worker.worker_id, attempt_id, task.spec.task_id, signal)
                    )
                elif is_news:
                    self.signal(task, signal)

    def lose(self, task: Task, piece: Slice, reason: LossReason, was_idle: bool) -> None:
        """Take in that a slice was lost with its worker; queue it for another try, or fail it.

        That counts as an attempt, unless it was not begun, or the worker was lost for another
        reason.
        """
        retries, lane = task.spec.retries, task.lane
        # with no retries an item never runs twice
        is_charged = not was_idle and (reason not in policy.FORGIVEN or retries == 0)
        is_last = is_charged and piece.attempt > retries
        if is_last or task.spec.is_gang or (lane is not None and lane.lost is not None):
            self._fail_items(task, piece, reason)
            self._after_landing(task, [], has_failed=True)
        elif is_charged:
            size = policy.piece_size(
                piece.stop - piece.start, attempts_left=retries + 1 - piece.attempt
            )
            self._after_landing(
                task, self._after_a_rest(task, piece.for_next_attempt(size)), has_failed=False
            )
        else:
            self._after_landing(task, [piece], has_failed=False)

    def time_out(self, task: Task, piece: Slice, attempt_id: int, worker_id: int) -> None:
        """Fail a slice that has taken too long; it was taken out of flight, but runs on until it is
        stopped.
        """
        assert task.spec.timeout_s is not None
        self.out.append(m.SignalTask(worker_id, attempt_id, piece.task_id, m.Signal.CANCEL))
        self.out.append(m.TimeOutItems(piece, task.spec.timeout_s))
        count = piece.stop - piece.start
        self._count_settled(task, count, count)
        self._after_landing(task, [], has_failed=True)

    def time_out_gang(self, gang: Task) -> None:
        """Stop all ranks of a gang whose time is over. They are waited for, so nothing is settled
        yet.
        """
        if gang.spec.task_id not in self.broken_up:
            assert gang.spec.timeout_s is not None
            self.out.append(
                m.TimeOutItems(Slice(gang.spec.task_id, 0, gang.size, 1), gang.spec.timeout_s)
            )
            self._break_up(gang)

    def _break_up(self, gang: Task) -> None:
        """Stop the other ranks of a gang, once: without the failed one they might wait forever."""
        if gang.spec.task_id not in self.broken_up:
            self.broken_up[gang.spec.task_id] = None
            self.signal(gang, m.Signal.CANCEL)

    def _after_landing(self, task: Task, again: list[Slice], has_failed: bool) -> None:
        """Queue what has to run again, and end the task if that was all or if one failure is
        enough.
        """
        if again:
            self._backlog.run_again(task, again)
        if has_failed and task.spec.is_gang:
            self._break_up(task)
        if has_failed and task.spec.fail_fast:
            self.end(task, TaskState.FAILED)
        else:
            self.go_on(task)

    def _fail_waiting(self, task: Task, reason: LossReason) -> None:
        """Fail all that waits of a task that nobody may run any more; what still runs of it may
        come back.
        """
        if task.spec.is_gang:
            if task.waiting:
                self.end(task, FAILED)
            return
        pieces = self._backlog.give_up(task)
        for piece in pieces:
            self._fail_items(task, piece, reason)
        if task.is_open or (pieces and task.spec.fail_fast):
            self.end(task, TaskState.FAILED)
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
