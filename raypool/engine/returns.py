"""What comes back from workers, for the scheduler and for the works: all of a call, or a part of one that lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raypool.channel.records import SliceResult, WorkerInfo
from raypool.core import messages as m
from raypool.core.model import Report, Slice
from raypool.engine.casualties import Casualties
from raypool.engine.in_flight import InFlight, Sent
from raypool.engine.work import GangWork, Work
from raypool.futures import Future


class Returns:
    """Says of each slice that comes back what the scheduler has to know, and keeps what has come for whoever is told then.

    Args:
        works: The tasks that have not ended.
        casualties: Takes note of what has raised something that runs again.
        cancel: Posts that nobody wants a task any more.
    """

    def __init__(self, works: Mapping[int, Work], casualties: Casualties, cancel: Callable[[int], object]) -> None:
        self.in_flight = InFlight()
        self.stopping: dict[int, list[Future[Any]]] = {}  # by attempt: cancelled while it ran
        self._works = works
        self._casualties = casualties
        self._cancel = cancel
        self._at_hand: dict[int, list[tuple[Slice, SliceResult]]] = {}  # of the answer at hand, by task

    def turn_page(self) -> None:
        """Let go of what has come: it is the user's now, who may want it freed."""
        if self._at_hand:
            self._at_hand = {}

    def result(self, items: Slice) -> SliceResult:
        """Return what has come of these items just now."""
        return next(result for piece, result in self._at_hand[items.task_id] if piece.start <= items.start < piece.stop)

    def note_stopped(self, attempt_id: int, is_replaced: bool) -> None:
        """Let futures that were cancelled while they ran say what has become of their worker."""
        for future in self.stopping.pop(attempt_id, ()):
            future.worker_replaced = is_replaced or bool(future.worker_replaced)  # of a gang, any of them

    def take(self, event: m.AttemptFinished, results: Sequence[SliceResult]) -> m.AttemptFinished:
        """Say of each slice of an attempt what the scheduler has to know."""
        sent = self.in_flight.bring_back(event.worker_id, event.attempt_id)
        if self.stopping:
            self.note_stopped(event.attempt_id, is_replaced=False)
        reports = []
        for piece, known, number in sent:
            result = known or results[number].within(piece.start, piece.stop)  # of a call that was narrowed, it is about all
            reports.append(self._report(piece, result))
        return event._replace(reports=tuple(reports))

    def take_part(self, event: m.AttemptNarrowed, results: Sequence[SliceResult], worker: WorkerInfo) -> m.AttemptNarrowed:
        """Say the same of what is done of an attempt that goes on, and take back what waits behind it."""
        before = self.in_flight.find(event.worker_id, event.attempt_id)
        if before is None:
            return event  # it has come back meanwhile
        call, behind = self.in_flight.narrow(event.worker_id, event.attempt_id)
        for other in behind:
            self.note_stopped(other.attempt_id, is_replaced=False)
        reports, kept = [], []
        for piece, known, number in before.sent:
            result = results[number] if known is None else known
            kept.append(event.kept[number] if known is None else 0)
            reports.append(self._report(piece, result))
            if kept[-1]:
                start = piece.start + result.done
                rest = piece._replace(start=start, stop=start + kept[-1])
                call.sent.append(Sent(rest, None, number))
                if self._casualties.is_awaited(piece, event.attempt_id):
                    call.began_at = result.started_at + sum(result.durations_s) if result.started_at else call.began_at
                    self._works[piece.task_id].begin(rest, worker, call)
        return event._replace(reports=tuple(reports), kept=tuple(kept))

    def _report(self, piece: Slice, result: SliceResult) -> Report:
        self._at_hand.setdefault(piece.task_id, []).append((piece, result))
        work = self._works.get(piece.task_id)
        report = Report(result.done, len(result.failures), (), sum(result.durations_s), result.crowded_out)
        if result.failures and work is not None:
            if result.is_interrupted and not isinstance(work, GangWork):  # Ctrl-C, inline: it means the loop, not the item
                self._cancel(piece.task_id)
            report = report._replace(retry=result.to_retry(work.wants_retry))
            again = report.repeated(report.retry)
            self._casualties.to_retry += [(piece._replace(start=i, stop=i + 1), result.failures[i].error) for i in again]
        return report
