"""Detects faulty places: every task fails there, while the same function succeeds elsewhere.

Reasons are a broken GPU, a full disk, or a missing library. Such a place is free again at once, and
would empty the queue. If a function fails everywhere, the place is not at fault, so the failures
here are compared with the results elsewhere since they began. A function that runs nowhere else
proves nothing. One that still runs elsewhere may be about to fail there too: an error in its code
comes first on the worker that was first to import its libraries. So the place is held for a while,
without work, until a call elsewhere has ended or has outlasted those that failed here.
"""

from __future__ import annotations

from raypool.core import policy
from raypool.core.messages import SetTimer
from raypool.core.model import Attempt, Departure, FailureStreak, Task, Worker
from raypool.core.outcomes import Outcomes
from raypool.core.policy import Pace
from raypool.core.workers import Workers
from raypool.errors import LossReason

MOST_STREAKS = 8
"""The number of functions whose failures are counted in a place, the latest ones."""

SUSPECT_AFTER = 3
"""After this many failed calls in a row a place gets items from behind the head of the queue."""

MOST_SKIPPED = 16

TRIAL = 16
"""A place with more failures in a row is on trial no more: its functions fail elsewhere too."""


class FaultyPlaces:
    """Counts failures in a row by place and function, one for all items of a call."""

    def __init__(self, workers: Workers, outcomes: Outcomes) -> None:
        self._workers = workers
        self._outcomes = outcomes

    def note_answer(
        self, worker: Worker, attempt: Attempt, task: Task, done: int, failed: int, busy_s: float
    ) -> Departure | None:
        """Count the answer to a call; return why its place has to go, if it has to."""
        attempt.pace.failed += failed
        if failed < done:
            if _is_telling(task):
                self._workers.streaks.pop(worker.place, None)
            return None
        attempt.pace.spoilt += 1
        return self._note_failure(worker, attempt, busy_s) if _is_telling(task) else None

    def note_loss(self, worker: Worker, attempt: Attempt, task: Task | None) -> Departure | None:
        """Count a call that lost its worker or took too long; return like `note_answer`."""
        attempt.pace.lost += 1
        if task is None or not _is_telling(task):
            return None
        return self._note_failure(worker, attempt, self._outcomes.now - worker.since)

    def num_to_skip(self, worker: Worker) -> int:
        """Return how many items a worker leaves to others, to get items of various kinds."""
        # With four workers and every fourth item bad, one worker may get all bad items, in step,
        # and is not at fault.
        if self._workers.size < 2:
            return 0
        return min(max(self._in_a_row(worker) - SUSPECT_AFTER + 1, 0), MOST_SKIPPED)

    def is_on_trial(self, worker: Worker) -> bool:
        """Whether a worker gets one item at a time; items that fail at once only seem short."""
        return self._workers.size > 1 and 0 < self._in_a_row(worker) < TRIAL

    def _in_a_row(self, worker: Worker) -> int:
        streaks = self._workers.streaks.get(worker.place, ())
        return sum(streak.calls + streak.repeats for streak in streaks)

    def _note_failure(self, worker: Worker, attempt: Attempt, lasted_s: float) -> Departure | None:
        streak = self._streak(worker, attempt.pace)
        if attempt.slices[0].attempt == 1:
            streak.calls += 1
        else:
            streak.repeats += 1  # a repeat may be the item's own fault
        streak.items += sum(piece.stop - piece.start for piece in attempt.slices)
        streak.longest_s = max(streak.longest_s, lasted_s)
        return self.judge(worker)

    def judge(self, worker: Worker) -> Departure | None:
        """Return why a worker's place has to go, if it has to; hold or release the place."""
        workers, place, now = self._workers, worker.place, self._outcomes.now
        streaks = workers.streaks.get(place, [])
        is_leaving = worker.worker_id in workers.retiring or workers.size < 2
        if is_leaving or self._chance(worker, with_running=True) >= policy.FAULTY_BELOW:
            workers.holds.pop(place, None)
            return None
        if self._chance(worker, with_running=False) >= policy.FAULTY_BELOW:
            if place not in workers.holds:
                until = now + policy.hold_s(max(streak.longest_s for streak in streaks))
                workers.holds[place] = until
                self._outcomes.out.append(SetTimer(until, "hold", -1))
            if now < workers.holds[place]:
                return None
        workers.holds.pop(place, None)
        del workers.streaks[place]
        for streak in streaks:
            streak.pace.blamed += streak.calls
        finished = sum(streak.pace.finished - streak.finished for streak in streaks)
        failed = sum(streak.items for streak in streaks)
        return Departure(LossReason.FAULTY, failed=failed, finished=finished)

    def _streak(self, worker: Worker, pace: Pace) -> FailureStreak:
        """Return the streak of a function in the place of a worker."""
        streaks = self._workers.streaks.setdefault(worker.place, [])
        for streak in streaks:
            if streak.pace is pace:
                return streak
        if len(streaks) == MOST_STREAKS:
            del streaks[0]
        # bad - 1: the newest failure is counted there already
        streaks.append(FailureStreak(pace, pace.good, pace.bad - 1, pace.finished))
        return streaks[-1]

    def _chance(self, worker: Worker, with_running: bool) -> float:
        """Return the probability that all this has failed here by chance.

        `with_running`: functions count that run elsewhere, even if none of those calls has ended.
        """
        chance = 1.0
        for streak in self._workers.streaks.get(worker.place, ()):
            pace, here = streak.pace, streak.calls + streak.repeats
            running_here = sum(attempt.pace is pace for attempt in worker.attempts.values())
            good = pace.good - streak.good
            # else no other worker has finished or runs this function: it proves nothing
            if good or (with_running and pace.running > running_here):
                lately = policy.failure_rate(good, pace.bad - streak.bad - here + pace.blamed)
                ever = policy.failure_rate(pace.good, pace.bad - here)
                chance *= max(lately, ever) ** streak.calls
        return chance


def _is_telling(task: Task) -> bool:
    """Whether an outcome tells about the place; ranks fail together, and bound tasks must stay."""
    return not task.spec.is_gang and task.spec.place is None
