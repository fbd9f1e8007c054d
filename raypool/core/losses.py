"""Workers that are lost, places that go, and calls that take too long: what follows for what ran there."""

from __future__ import annotations

from math import inf

from raypool.core import messages as m
from raypool.core import policy
from raypool.core.backlog import Backlog
from raypool.core.crew import Crew
from raypool.core.faults import Faults
from raypool.core.ledger import Ledger
from raypool.core.model import Leaving, Worker, WorkerState
from raypool.errors import LossReason


class Losses:
    """Takes workers and places out of the crew, and has the ledger say what becomes of what they ran."""

    def __init__(self, backlog: Backlog, crew: Crew, ledger: Ledger, faults: Faults) -> None:
        self._backlog = backlog
        self._crew = crew
        self._ledger = ledger
        self._faults = faults

    # --- workers ------------------------------------------------------------------------------------------------------

    def lose(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        """Replace a worker, and see to what it was running and to what was bound to it."""
        crew = self._crew
        reason = self._in_the_end(worker, reason)
        was_idle = was_idle or worker.state is not WorkerState.BUSY
        leaving = None if was_idle or reason in policy.FORGIVEN else self._why_faulty(worker)
        self._ledger.out += crew.replace(worker, reason, self._ledger.now) if leaving is None else crew.remove(worker, leaving)
        self._run_elsewhere(worker, reason, was_idle)

    def _why_faulty(self, worker: Worker) -> Leaving | None:
        """Return why the place of a worker that is lost has to go, if what it ran is one failure too many there."""
        attempt = next(iter(worker.attempts.values()))
        return self._faults.note_loss(worker, attempt, self._backlog.tasks.get(attempt.slices[0].task_id))

    def _run_elsewhere(self, worker: Worker, reason: LossReason, was_idle: bool) -> None:
        """See to what a worker was running that is no more."""
        # The first attempt was running, or it had ended, its answer died with the process, and the one behind it was running.
        # So both are charged: an innocent item has attempts left, alone, but a culprit never runs once too often.
        for attempt_id, attempt in worker.attempts.items():
            attempt.pace.running -= 1
            for piece in attempt.slices:
                task = self._backlog.land(piece, attempt_id)
                if task is not None:
                    self._ledger.lose(task, piece, reason, was_idle)

    def time_out(self, worker: Worker, attempt_id: int) -> None:
        """Fail what has run for too long. Its worker stays busy until the call has come back."""
        attempt = worker.attempts.get(attempt_id)
        if attempt is None:
            return
        for piece in attempt.slices:
            task = self._backlog.tasks.get(piece.task_id)
            if task is not None and task.spec.is_gang:
                self._ledger.time_out_gang(task)
            elif self._backlog.land(piece, attempt_id) is not None:
                assert task is not None
                self._ledger.time_out(task, piece, attempt_id, worker.worker_id)
                self.take_out(worker, self._faults.note_loss(worker, attempt, task))

    # --- places -------------------------------------------------------------------------------------------------------

    def take_out(self, worker: Worker, leaving: Leaving | None) -> None:
        """Let a place go when its worker has come to an end, if there is a reason for it."""
        if leaving is not None:
            self._crew.retire(worker, leaving)

    def announce(self, worker: Worker, at: float | None) -> None:
        """Let a place take nothing more, and tell what runs there; what still does at the time given is interrupted.

        If it is the last one, and nothing waits, the pool is not broken: another may come while there is time.
        """
        if worker.state is not WorkerState.BUSY:
            self.lose_place(worker, LossReason.PREEMPTED)
            return
        self._crew.retire(worker, Leaving(LossReason.PREEMPTED, inf if at is None else at))
        if at is not None and at <= self._ledger.now:
            self.interrupt_if_due(worker)
            return
        self._ledger.send_elsewhere(worker, m.Signal.LEAVE)
        if at is not None:
            self._ledger.out.append(m.SetTimer(at, "leave", worker.worker_id))

    def interrupt_if_due(self, worker: Worker) -> None:
        """Interrupt what still runs where a machine is about to go, unless it was given more time meanwhile."""
        leaving = self._crew.places[worker.place].leaving
        if leaving is not None and leaving.at <= self._ledger.now:
            self._ledger.send_elsewhere(worker, m.Signal.CANCEL)

    def lose_place(self, worker: Worker, reason: LossReason) -> None:
        """Take a worker out with its place."""
        was_idle = worker.state is not WorkerState.BUSY
        reason = self._in_the_end(worker, reason)
        self._ledger.out += self._crew.remove(worker, Leaving(reason))
        self._run_elsewhere(worker, reason, was_idle)

    def _in_the_end(self, worker: Worker, reason: LossReason) -> LossReason:
        """Return why a worker is lost: the end of a machine that was announced is nobody's fault."""
        leaving = self._crew.places[worker.place].leaving
        is_announced = leaving is not None and leaving.reason is LossReason.PREEMPTED
        return LossReason.PREEMPTED if is_announced and reason is LossReason.NODE else reason
