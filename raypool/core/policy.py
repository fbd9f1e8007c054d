"""The scheduler's policy as pure functions: call sizes, look-ahead, delays, failure rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raypool.errors import LossReason

SHORT_S = 0.050
"""Items that take less than this on average share calls [s]."""

LOOK_AHEAD_S = 0.250
"""If no recent item took longer, the next call may wait at a busy worker [s]."""

FADING = 0.9
"""Decay of the longest recent time with each later call."""

PLENTY = 4
"""Calls are sent ahead while each worker has this many items left: one stuck behind a long item is
then not the last to run.
"""

EVEN_BELOW_S = 0.100
"""If no recent item took longer, one item left for each worker is enough for that [s]."""

CHUNK_S = 0.050
"""The intended time of a shared call [s]: a call costs a millisecond, and nobody notices 50."""

LEAST_CHUNK_S = 0.005
"""Calls shrink towards the end of a queue, but not below this [s]; they cost about 1 ms each."""

GROWTH = 16
"""A call has at most this many times the measured items: few measurements justify no long call."""

NEWEST_WEIGHT = 0.25
"""Weight of the newest call in the running mean, once there are four."""

MAX_IN_FLIGHT = 2
"""Calls of a worker: one that runs, and one of look-ahead."""

MAX_FAILED_STARTS = 3
"""A place is given up after this many failed starts in a row."""

FORGIVEN = (LossReason.STOPPED, LossReason.PREEMPTED)
"""Losses for these reasons count neither as retries nor against the place."""

FAULTY_BELOW = 1e-5
"""A place is removed if its failures in a row are less likely than this, given the rate at which
the same functions fail elsewhere.
"""

OUTLASTED = 2
"""A call elsewhere has outlasted the failed ones if it still runs when a place has been held for
this many times the longest of them.
"""

LEAST_HOLD_S = 10.0
"""The place may have imported in an earlier call what the others are still importing."""

MOST_HOLD_S = 60.0

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

LONGEST_RETRY_DELAY_S = 300.0
"""The longest delay before an item runs again [s]."""


@dataclass(slots=True)
class Pace:
    """Statistics of one function: how long its items take, how many wait, how many calls fail."""

    mean_s: float = math.inf  # of one item; unknown counts as long
    items: int = 0
    calls: int = 0
    waiting: int = 0
    num_tasks: int = 0
    running: int = 0  # calls in flight
    failed: int = 0  # of the items, with an error
    spoilt: int = 0  # calls in which no item has finished
    lost: int = 0  # calls that lost their worker or exceeded their time limit
    blamed: int = 0  # of these two, calls for which their place was removed
    longest_s: float = math.inf  # recently, on average in its call; fades

    @property
    def is_short(self) -> bool:
        """Whether its items should share calls."""
        return self.mean_s < SHORT_S

    @property
    def is_brief(self) -> bool:
        """Whether a call may wait behind one of its items."""
        return self.longest_s < LOOK_AHEAD_S

    @property
    def good(self) -> int:
        """Calls in which something has finished."""
        return self.calls - self.spoilt

    @property
    def bad(self) -> int:
        """Calls in which nothing has finished."""
        return self.spoilt + self.lost

    @property
    def finished(self) -> int:
        """Items that have come back without an error."""
        return self.items - self.failed

    def observe(self, items: int, busy_s: float) -> None:
        """Add a call that ran `items` items in `busy_s` seconds."""
        self.items += items
        self.calls += 1
        mean_s = busy_s / items
        if self.calls == 1:
            self.mean_s = self.longest_s = mean_s
        else:
            self.longest_s = max(mean_s, FADING * self.longest_s)
            self.mean_s += (mean_s - self.mean_s) * max(1 / self.calls, NEWEST_WEIGHT)


def chunk_size(pace: Pace, num_workers: int) -> int:
    """Return how many items the next call takes.

    One, while items are long or unknown. Else guided self-scheduling (Polychronopoulos and Kuck
    1987): an equal share of half of the waiting items, between `LEAST_CHUNK_S` and `CHUNK_S` of
    work; a rest of less than half of the former goes along.

    Example:
        >>> chunk_size(Pace(mean_s=2.0, items=10, waiting=100), num_workers=4)
        1
        >>> chunk_size(Pace(mean_s=0.001, items=1000, waiting=10_000), num_workers=4)
        50
        >>> chunk_size(Pace(mean_s=0.001, items=1000, waiting=80), num_workers=4)
        10
    """
    if not pace.is_short:
        return 1
    mean_s = max(pace.mean_s, 1e-9)
    share = -(-pace.waiting // (2 * max(num_workers, 1)))
    least = int(LEAST_CHUNK_S / mean_s)
    size = min(max(share, least), int(CHUNK_S / mean_s), GROWTH * pace.items)
    if 0 < pace.waiting - size < least // 2 and pace.waiting <= GROWTH * pace.items:
        size = pace.waiting  # no call for a rest that is not worth one
    return max(size, 1)


def should_look_ahead(pace: Pace, num_workers: int) -> bool:
    """Whether a worker that is busy with a short call gets its next call now.

    It then need not wait for the driver. Only while enough items wait for all workers, because a
    call behind a busy worker is handed back after half a second at best; longer and more varied
    items need more. For long items the one or two milliseconds between calls are less than 1 %.

    Example:
        >>> def decide(seconds, waiting):
        ...     pace = Pace(longest_s=seconds, mean_s=seconds, waiting=waiting)
        ...     return should_look_ahead(pace, num_workers=4)
        >>> [decide(seconds, waiting=16) for seconds in (0.01, 0.1, 1.0)]
        [True, False, False]
        >>> [decide(seconds, waiting=17) for seconds in (0.01, 0.1, 1.0)]
        [True, True, False]
    """
    if pace.is_short and pace.longest_s < EVEN_BELOW_S:
        return pace.waiting > num_workers
    return pace.is_brief and pace.waiting > PLENTY * num_workers


def piece_size(lost: int, attempts_left: int) -> int:
    """Return the size of the pieces into which a lost slice is cut before it runs again.

    Any of several items may have killed the worker. The pieces shrink geometrically to one item in
    the last attempt: finding the culprit costs few calls, and no innocent item fails.

    Example:
        >>> piece_size(10_000, attempts_left=2), piece_size(100, attempts_left=1)
        (100, 1)
    """
    # the small number keeps roundoff from turning 100.0 into 101
    return max(1, math.ceil(math.pow(lost, (attempts_left - 1) / attempts_left) - 1e-9))


def restart_delay_s(losses: int) -> float:
    """Return the delay before a worker starts again after `losses` losses in a row [s].

    Example:
        >>> [restart_delay_s(n) for n in (1, 2, 3, 20)]
        [0.0, 0.5, 1.0, 30.0]
    """
    if losses <= 1:
        return 0.0
    return float(min(FIRST_DELAY_S * 2 ** min(losses - 2, 10), LONGEST_DELAY_S))


def retry_delay_s(first_s: float, attempt: int) -> float:
    """Return the delay of an item before this attempt, counted from 1 [s].

    Example:
        >>> [retry_delay_s(10.0, attempt) for attempt in (2, 3, 4, 1000)]
        [10.0, 20.0, 40.0, 300.0]
    """
    return float(min(first_s * 2 ** min(attempt - 2, 64), LONGEST_RETRY_DELAY_S))


def hold_s(longest_s: float) -> float:
    """Return how long a place is held whose failed calls took up to `longest_s` seconds [s].

    Example:
        >>> [hold_s(longest_s) for longest_s in (0.001, 15.0, 3600.0)]
        [10.0, 30.0, 60.0]
    """
    return min(max(OUTLASTED * longest_s, LEAST_HOLD_S), MOST_HOLD_S)


def failure_rate(good: int, bad: int) -> float:
    """Return the probability that a call fails, given so many good and bad ones before.

    Without any it is 1/4: a failure is less likely than not, but no surprise.

    Example:
        >>> failure_rate(0, 0), failure_rate(96, 0), failure_rate(0, 96)
        (0.25, 0.01, 0.97)
    """
    return (bad + 1) / (good + bad + 4)
