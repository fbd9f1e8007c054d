"""The scheduler's policy as pure functions: sizes of calls, prefetching, delays and failure
rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raypool.errors import LossReason

SHORT_S = 0.050
"""An item that takes less than this on average shares its call with others [s]."""

LOOK_AHEAD_S = 0.250
"""If no recent item took longer than this, the next call may wait at a busy worker [s]."""

FADING = 0.9
"""Decay of the longest recent time with each later call."""

PLENTY = 4
"""With so many items left for each worker, calls are sent ahead: an item stuck behind a long one is
not the last to run.
"""

EVEN_BELOW_S = 0.100
"""If no recent item took longer than this, one item left for each worker is enough for that [s]."""

CHUNK_S = 0.050
"""How long a shared call should take [s]: much longer than the millisecond that a call costs, too
short to notice.
"""

LEAST_CHUNK_S = 0.005
"""Towards the end of a queue, calls get smaller, but not below this [s]: they would cost more than
they balance.
"""

GROWTH = 16
"""A call holds at most so many times the items that have been measured: few measurements do not
justify a long call.
"""

NEWEST_WEIGHT = 0.25
"""Weight of the newest call in the running mean, once there are four."""

MAX_IN_FLIGHT = 2
"""A worker has at most so many calls: one that runs, and one of look-ahead."""

MAX_FAILED_STARTS = 3
"""A place where so many starts in a row have failed is given up."""

FORGIVEN = (LossReason.STOPPED, LossReason.PREEMPTED)
"""Losses for these reasons count neither against what the worker ran nor against its place."""

FAULTY_BELOW = 1e-5
"""A place is taken out if its consecutive failures are less likely than this, judged by the same
functions elsewhere.
"""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

LONGEST_RETRY_DELAY_S = 300.0
"""The longest delay before an item runs again [s]."""


@dataclass(slots=True)
class Pace:
    """Statistics of one function: how long its items take, how many wait, and how many calls
    fail.
    """

    mean_s: float = math.inf  # of one item; unknown is taken for long
    items: int = 0
    calls: int = 0
    waiting: int = 0
    num_tasks: int = 0
    running: int = 0  # calls in flight
    failed: int = 0  # of the items, with an error
    spoilt: int = 0  # of the calls: nothing in them has finished
    lost: int = 0  # calls that have taken their worker with them, or too long
    blamed: int = 0  # of these two, calls for which their place was taken out
    longest_s: float = math.inf  # an item has taken so long of late, on average in its call

    @property
    def is_short(self) -> bool:
        """Whether its items should share calls."""
        return self.mean_s < SHORT_S

    @property
    def is_brief(self) -> bool:
        """Whether something may wait behind one of its items."""
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
        """Take in a call that ran `items` items in `busy_s` seconds."""
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
    1987): an equal share of half of what waits, at most `CHUNK_S` of work, at least `LEAST_CHUNK_S`
    of it; a rest of less than half of that goes along.

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
    """Whether a worker that is busy with something short gets its next call now: it need not wait
    for the driver then.

    Only while enough waits for every worker, since what waits behind a busy worker comes back after
    half a second at best; the longer an item, and the less alike they are, the more there has to
    be. Of what takes longer than that, the millisecond or two until the next call are not one part
    in a hundred.

    Example:
        >>> [should_look_ahead(Pace(longest_s=mean_s, mean_s=mean_s, waiting=16), num_workers=4) for mean_s in (0.01, 0.1, 1.0)]
        [True, False, False]
        >>> [should_look_ahead(Pace(longest_s=mean_s, mean_s=mean_s, waiting=17), num_workers=4) for mean_s in (0.01, 0.1, 1.0)]
        [True, True, False]
    """
    if pace.is_short and pace.longest_s < EVEN_BELOW_S:
        return pace.waiting > num_workers
    return pace.is_brief and pace.waiting > PLENTY * num_workers


def piece_size(lost: int, attempts_left: int) -> int:
    """Return the size of the pieces into which a lost slice is cut before it runs again.

    With several items in a call nobody knows which one killed the worker. The last attempt is made
    alone; before that the pieces shrink geometrically, so that finding the culprit costs few calls
    and no innocent item fails in the end.

    Example:
        >>> piece_size(10_000, attempts_left=2), piece_size(100, attempts_left=1)
        (100, 1)
    """
    size = math.ceil(math.pow(lost, (attempts_left - 1) / attempts_left) - 1e-9)
    return max(1, size)


def restart_delay_s(losses: int) -> float:
    """Return how long to wait before a worker is started again after `losses` losses in a row [s].

    Example:
        >>> [restart_delay_s(n) for n in (1, 2, 3, 20)]
        [0.0, 0.5, 1.0, 30.0]
    """
    if losses <= 1:
        return 0.0
    return float(min(FIRST_DELAY_S * 2 ** min(losses - 2, 10), LONGEST_DELAY_S))


def retry_delay_s(first_s: float, attempt: int) -> float:
    """Return how long an item waits before this attempt, the first again being its second [s].

    Example:
        >>> [retry_delay_s(10.0, attempt) for attempt in (2, 3, 4, 1000)]
        [10.0, 20.0, 40.0, 300.0]
    """
    return float(min(first_s * 2 ** min(attempt - 2, 64), LONGEST_RETRY_DELAY_S))


def failure_rate(good: int, bad: int) -> float:
    """Return how likely a call is to fail, of which so many others went well and so many did not.

    With nothing known it is one in four: a failure is less likely than not, but no surprise.

    Example:
        >>> failure_rate(0, 0), failure_rate(96, 0), failure_rate(0, 96)
        (0.25, 0.01, 0.97)
    """
    return (bad + 1) / (good + bad + 4)
