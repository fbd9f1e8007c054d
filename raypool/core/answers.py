"""What workers answer: all of an attempt, or, of one that lasts, a part."""

from __future__ import annotations

from collections.abc import Sequence

from raypool.core.backlog import Backlog
from raypool.core.crew import Crew
from raypool.core.faults import Faults
from raypool.core.ledger import Ledger
from raypool.core.losses import Losses
from raypool.core.model import Attempt, Report, Task, Worker


class Answers:
    """Has the ledger say what becomes of items that have come back, and learns from them how long their function takes."""

    def __init__(self, backlog: Backlog, crew: Crew, ledger: Ledger, faults: Faults, losses: Losses) -> None:
        self._backlog = backlog
        self._crew = crew
        self._ledger = ledger
        self._faults = faults
        self._losses = losses

    def take(self, worker: Worker, attempt_id: int, reports: Sequence[Report]) -> None:
        """Take in what has become of an attempt, one report for each slice."""
        attempt = worker.attempts.pop(attempt_id)
        worker.has_delivered = True
        attempt.pace.running -= 1
        wanted = None
        for piece, report in zip(attempt.slices, reports, strict=True):
            task = self._backlog.land(piece, attempt_id)
            if task is not None:
                wanted = task
                self._ledger.settle(task, piece, report, attempt_id)
        self._observe(worker, attempt, reports, wanted)

    def take_part(self, worker: Worker, attempt_id: int, reports: Sequence[Report], kept: Sequence[int]) -> None:
        """Take in what is done of an attempt that lasts; the worker keeps so many items of each slice, and nothing behind it."""
        attempt = worker.attempts[attempt_id]
        self._take_back_behind(worker, attempt_id)
        self._crew.ahead.pop(worker.worker_id, None)
        wanted, left = None, []
        for piece, report, count in zip(attempt.slices, reports, kept, strict=True):
            at_hand = piece._replace(start=piece.start + report.done, stop=piece.start + report.done + count)
            if count:
                left.append(at_hand)
            task = self._backlog.land(piece, attempt_id)
            if task is None:
                continue
            wanted = task
            if not count:
                self._ledger.settle(task, piece, report, attempt_id)
                continue
            self._backlog.fly(task, at_hand, (attempt_id, worker.worker_id))
            if at_hand.stop < piece.stop:
                self._backlog.run_again(task, [piece._replace(start=at_hand.stop)])
            if report.done:
                self._ledger.settle(task, piece._replace(stop=at_hand.start), report, attempt_id)
            else:
                self._ledger.go_on(task)
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
                    self._ledger.go_on(task)

    def _observe(self, worker: Worker, attempt: Attempt, reports: Sequence[Report], wanted: Task | None) -> None:
        """Learn from what was done; `wanted` is the last task of it that somebody waits for, if any."""
        done, failed, busy_s = 0, 0, 0.0
        for report in reports:
            done += report.done
            failed += report.failed - len(report.again)
            busy_s += report.busy_s
        if done:
            attempt.pace.observe(done, busy_s)
            if wanted is not None and (failed or self._crew.streaks):
                self._losses.take_out(worker, self._faults.note_answer(worker, attempt, wanted, done, failed))
