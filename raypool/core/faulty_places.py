"""Detects faulty places: every task fails there, while the same function succeeds elsewhere.

Reasons are a broken GPU, a full disk, or a machine that lacks a library. Such a place is free again
at once, and so would eat up the queue. Where a function fails everywhere, the place is not at
fault: so its failures here are compared with its results elsewhere since they began. A function
that runs nowhere else proves nothing.
"""

from __future__ import annotations

from raypool.core import policy
from raypool.core.model import Attempt, Departure, FailureStreak, Task, Worker
from raypool.core.policy import Pace
from raypool.core.workers import Workers
from raypool.errors import LossReason

MOST_STREAKS = 8
"""Of so many functions the failures in a place are remembered; those of the oldest are
forgotten.
"""


SUSPECT_AFTER = 3
"""After so many failed calls in a row, a place gets items from further behind in the queue, each
time further.
"""

MOST_SKIPPED = 16

TRIAL = 16
"""After so many failures it would have been taken out, if the same functions did not fail elsewhere
too.
"""


class FaultyPlaces:
    """Counts failures in a row, by place and function: the first failure of each item, whatever
    runs together as one.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def note_answer(
        self, worker: Worker, attempt: Attempt, task: Task, done: int, failed: int
    ) -> Departure | None:
        """Take in what has come back of a task; return why the place has to go, if it has to."""
        attempt.pace.failed += failed
        if failed < done:
            if _is_telling(task):
                self._workers.streaks.pop(worker.place, None)
            return None
        attempt.pace.spoilt += 1
        return self._note_failure(worker, attempt) if _is_telling(task) else None

    def note_loss(self, worker: Worker, attempt: Attempt, task: Task | None) -> Departure | None:
        """Take in that a call has taken its worker with it, or too long; return why the place has
        to go, if it has to.
        """
        attempt.pace.lost += 1
        return (
            self._note_failure(worker, attempt) if task is not None and _is_telling(task) else None
        )

    def num_to_skip(self, worker: Worker) -> int:
        """Return how many items a worker leaves to others, so that it is not always the same kind
        that it gets.

        With four workers and every fourth item bad, one of them may get all of these, step by step,
        and is at fault for none.
        """
        return (
            min(max(self._in_a_row(worker) - SUSPECT_AFTER + 1, 0), MOST_SKIPPED)
            if self._workers.size > 1
            else 0
        )

    def is_on_trial(self, worker: Worker) -> bool:
        """Whether a worker gets one item at a time: what fails at once would else be taken for what
        is short, and share calls.
        """
        return self._workers.size > 1 and 0 < self._in_a_row(worker) < TRIAL

    def _in_a_row(self, worker: Worker) -> int:
        return sum(
            streak.calls + streak.repeats for streak in self._workers.streaks.get(worker.place, ())
        )

    def _note_failure(self, worker: Worker, attempt: Attempt) -> Departure | None:
        streak = self._streak(worker, attempt.pace)
        if attempt.slices[0].attempt == 1:
            streak.calls += 1
        else:
            streak.repeats += 1  # a repeat may be the item's own fault
        streak.items += sum(piece.stop - piece.start for piece in attempt.slices)
        is_leaving = worker.worker_id in self._workers.retiring
        if is_leaving or self._workers.size < 2 or self._chance(worker) >= policy.FAULTY_BELOW:
            return None
        streaks = self._workers.streaks.pop(worker.place)
        for streak in streaks:
            streak.pace.blamed += streak.calls
        finished = sum(streak.pace.finished - streak.finished for streak in streaks)
        return Departure(
            LossReason.FAULTY, failed=sum(streak.items for streak in streaks), finished=finished
        )

    def _streak(self, worker: Worker, pace: Pace) -> FailureStreak:
        """Return what has failed in a row of a function where a worker is; the newest failure is in
        the books already.
        """
        streaks = self._workers.streaks.setdefault(worker.place, [])
        for streak in streaks:
            if streak.pace is pace:
                return streak
        if len(streaks) == MOST_STREAKS:
            del streaks[0]
        streaks.append(FailureStreak(pace, pace.good, pace.bad - 1, pace.finished))
        return streaks[-1]

    def _chance(self, worker: Worker) -> float:
        """Return how likely it is that all this has failed here by chance."""
        chance = 1.0
        for streak in self._workers.streaks[worker.place]:
            pace, here = streak.pace, streak.calls + streak.repeats
            running_here = sum(attempt.pace is pace for attempt in worker.attempts.values())
            good = pace.good - streak.good
            # else no other worker has shown that it can be done
            if good or pace.running > running_here:
                lately = policy.failure_rate(good, pace.bad - streak.bad - here + pace.blamed)
                ever = policy.failure_rate(pace.good, pace.bad - here)
                chance *= max(lately, ever) ** streak.calls
        return chance


def _is_telling(task: Task) -> bool:
    """Whether an outcome says something of the place: ranks fail with each other, and what is bound
    has no choice.
    """
    return not task.spec.is_gang and task.spec.place is None
