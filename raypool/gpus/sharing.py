"""Rules for sharing a GPU, as pure functions: the number of workers, and each one's memory."""

from __future__ import annotations

import math
from typing import NamedTuple

CONTEXT_BYTES = 512 * 2**20
"""The estimated memory of a CUDA process on a GPU beside torch's, if not measured [bytes].

Source:
    PyTorch, "Understanding CUDA Memory Usage": torch does not count the context's memory. It is 0.3
    to 0.6 GB on current cards, more with many kernels.
"""

MOST = 16
"""The most workers on a GPU with "auto"."""

MARGIN = 0.1
"""The share of a GPU's memory that "auto" leaves free: items differ, and memory is fragmented."""

SATURATED = 0.9
"""The utilization of a GPU from which one more worker hardly helps."""


class Load(NamedTuple):
    """Measurements of a GPU with `seats` workers; None stands for unknown.

    `total_bytes`: the GPU's memory. `others_bytes`: the memory of processes that are no workers of
    this pool. `peak_bytes`: the most that an item has taken through torch. `overhead_bytes`: the
    memory of its process beside that. `utilization`: the share of the time with computation.
    """

    seats: int
    total_bytes: int | None = None
    others_bytes: int = 0
    peak_bytes: int | None = None
    overhead_bytes: int = CONTEXT_BYTES
    utilization: float | None = None


def fitting(load: Load) -> int | None:
    """Return how many workers fit on a GPU with a margin, at least one; None if unknown.

    Example:
        >>> fitting(Load(1, total_bytes=16 * 2**30, peak_bytes=3 * 2**30))
        4
    """
    if load.total_bytes is None or load.peak_bytes is None:
        return None
    room = load.total_bytes * (1 - MARGIN) - load.others_bytes
    return max(1, min(int(room / max(load.peak_bytes + load.overhead_bytes, 1)), MOST))


def worthwhile(load: Load) -> int:
    """Return how many workers can use a GPU by its utilization; `MOST` if unknown.

    Example:
        >>> [worthwhile(Load(1, utilization=busy)) for busy in (0.95, 0.5, 0.1)]
        [1, 2, 9]
    """
    if not load.utilization:
        return MOST
    # 1e-9: a quotient that rounding has put just above a whole number is that number
    return max(1, math.ceil(min(SATURATED * load.seats / load.utilization, float(MOST)) - 1e-9))


def workers_for(load: Load) -> int:
    """Return how many workers a GPU should have from now on, never more than fit.

    Example:
        >>> small = Load(2, 16 * 2**30, peak_bytes=2**30)
        >>> large = Load(4, 16 * 2**30, peak_bytes=14 * 2**30)
        >>> workers_for(small), workers_for(large), workers_for(Load(1))
        (4, 1, 1)
    """
    fit = fitting(load)
    if fit is None:
        return load.seats
    # At most twice as many at a time: the first items may have needed less than later ones will. A
    # busy GPU gets no more workers, but keeps those that it has.
    return min(fit, max(load.seats, min(worthwhile(load), 2 * load.seats)))


def fraction_for(
    seats: int, total_bytes: int | None, others_bytes: int = 0, overhead_bytes: int = CONTEXT_BYTES
) -> float:
    """Return the share of a GPU's memory that each worker may have through torch at once.

    Example:
        >>> fraction_for(1, None), fraction_for(2, None), fraction_for(4, 16 * 2**30)
        (1.0, 0.45, 0.21875)
    """
    if seats == 1:
        return 1.0
    if total_bytes is None:
        return (1 - MARGIN) / seats  # the margin is for the memory beside torch's
    shared = total_bytes - others_bytes - seats * overhead_bytes
    return max(shared, 0) / seats / total_bytes
