"""What is known of workers that are lost and of places that go, for the errors and warnings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypool.channel.records import NOBODY, WorkerInfo
from raypool.core import messages as m
from raypool.core import policy
from raypool.core.model import Slice
from raypool.core.scheduler import Scheduler
from raypool.engine import verdicts
from raypool.engine.in_flight import Call
from raypool.engine.misses import Why, tell_misses
from raypool.engine.work import Work
from raypool.errors import LossReason, WorkerLostError

ANSWERS = (m.AttemptFinished, m.AttemptNarrowed)
LOSSES = (m.WorkerLost, m.TimerFired, m.PlaceLeaving, m.PlaceLost)


class Casualties:
    """The driver's notes of what has gone wrong, by its own thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.words = ""  # what was said of the newest loss
        self.to_retry: list[tuple[Slice, BaseException]] = []  # what has raised something that `retry_on` names, just now
        self._fallen: list[Slice] = []  # what the worker was running that the event at hand is the loss of
        self._lost: list[Slice] = []  # of that, attempts: begun, or charged, as nobody knows whether they were
        self._leaving: dict[int, str] = {}  # by place: what was said of its end
        self._vacated = NOBODY  # who was in the place that was given back last
        self._scheduler = scheduler

    def turn_page(self) -> None:
        """Note that another event is at hand."""
        self.to_retry, self._fallen, self._lost = [], [], []

    def note_going(self, place: int, words: str) -> None:
        """Note why a place is gone, or will be."""
        self.words = self._leaving[place] = words

    def note_fallen(self, call: Call, reason: LossReason, was_idle: bool) -> None:
        """Note what a call held whose worker is lost, as far as it is still waited for."""
        is_attempt = not was_idle and (call.began_at is not None or reason not in policy.FORGIVEN)
        for piece, _, _ in call.sent:
            if self.is_awaited(piece, call.attempt_id):
                self._fallen.append(piece)
                if is_attempt:
                    self._lost.append(piece)

    def is_awaited(self, piece: Slice, attempt_id: int) -> bool:
        """Whether somebody still waits for a slice in flight: its task has not ended, nor is its time over."""
        task = self._scheduler.backlog.tasks.get(piece.task_id)
        return task is not None and attempt_id in (task.flights or ())

    def note_vacated(self, worker: WorkerInfo) -> None:
        """Note who was in a place that is given back."""
        self._vacated = worker

    def tell_misses(self, works: Mapping[int, Work], commands: Sequence[m.Command], speaker: WorkerInfo) -> None:
        """Tell works which of their items run again after the event at hand."""
        if self._lost or self.to_retry:
            missed: list[tuple[Slice, Why]] = [*((piece, self.words) for piece in self._lost), *self.to_retry]
            tell_misses(works, missed, commands, speaker)

    def error(self, items: Slice, what: str, reason: LossReason, at_hand: m.Event | None, speaker: WorkerInfo) -> WorkerLostError:
        """Return the error for items that have no worker any more; `what` is what to call them."""
        if any(piece.task_id == items.task_id and piece.start <= items.start < piece.stop for piece in self._fallen):
            return verdicts.lost(speaker, what, items.attempt, reason, self.words)
        if isinstance(at_hand, ANSWERS) and reason is LossReason.PREEMPTED:  # a rank that was interrupted, or what came back
            words = self._leaving.get(speaker.index, "the machine of another rank is about to go")
            return verdicts.lost(speaker, what, items.attempt, reason, words)
        words = self.words if isinstance(at_hand, LOSSES) else "the pool was made smaller"
        return verdicts.stranded(what, items.attempt, reason, verdicts.FAULTY if reason is LossReason.FAULTY else words)

    def farewell(self, command: m.DropPlace) -> tuple[str, str]:
        """Return what to say to the user of a place that is dropped, and to whoever waits for a worker there."""
        left, num_left = self._leaving.pop(command.place, None), self._scheduler.crew.size
        if command.reason is LossReason.FAULTY:
            return verdicts.faulty(self._vacated, command.failed, command.finished, num_left), verdicts.FAULTY
        if left is not None:
            return verdicts.left(self._vacated, left, num_left), left
        return verdicts.dropped(self.words, num_left), self.words
