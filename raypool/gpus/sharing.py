"""Rules for sharing a GPU, as pure functions: how many workers, and how much memory each may
use.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CONTEXT_BYTES = 512 * 2**20
"""A process that uses CUDA takes about so much of a GPU beside what torch allocates, where nobody
has measured it [bytes].

Source:
    PyTorch, "Understanding CUDA Memory Usage": the context's memory is not counted by torch. It is
    0.3 to 0.6 GB on cards of today, more where many kernels are loaded.
"""

MOST = 16
"""The most workers on a GPU with "auto"."""

MARGIN = 0.1
"""The part of a GPU's memory that "auto" leaves free: items differ, and memory is fragmented."""

SATURATED = 0.9
"""When a GPU is busy for this part of the time, one more worker hardly helps."""


class Load(NamedTuple):
    """Measurements of a GPU and of what runs on it; None stands for what is not known.

    `total_bytes`: the GPU's memory. `others_bytes`: what others use of it, who are no workers of
    this pool. `peak_bytes`: the most that an item has taken through torch. `overhead_bytes`: what
    its process takes beside that. `utilisation`: the part of the time in which the GPU was
    computing while `seats` workers were on it.
    """

    seats: int
    total_bytes: int | None = None
    others_bytes: int = 0
    peak_bytes: int | None = None
    overhead_bytes: int = CONTEXT_BYTES
    utilisation: float | None = None


def fitting(load: Load) -> int | None:
    """Return how many workers fit on a GPU side by side, with a margin: one at least; None if that
    is not known.

    Example:
        >>> fitting(Load(1, total_bytes=16 * 2**30, peak_bytes=3 * 2**30))
        4
    """
    if load.total_bytes is None or load.peak_bytes is None:
        return None
    room = load.total_bytes * (1 - MARGIN) - load.others_bytes
    return max(1, min(int(room / max(load.peak_bytes + load.overhead_bytes, 1)), MOST))


def worthwhile(load: Load) -> int:
    """Return how many workers a GPU could keep busy, by how busy those that are there keep it; the
    most, if that is not known.

    Example:
        >>> [worthwhile(Load(1, utilisation=busy)) for busy in (0.95, 0.5, 0.1)]
        [1, 2, 9]
    """
    if not load.utilisation:
        return MOST
    return max(1, math.ceil(min(SATURATED * load.seats / load.utilisation, float(MOST)) - 1e-9))


def workers_for(load: Load) -> int:
    """Return how many workers a GPU should have from now on.

    Never more than fit. Otherwise it grows, twice as many at a time at most: what few items needed
    may not be all that many need. That they keep the GPU busy keeps others from it, but sends none
    away.

    Example:
        >>> small = Load(2, 16 * 2**30, peak_bytes=2**30)
        >>> large = Load(4, 16 * 2**30, peak_bytes=14 * 2**30)
        >>> workers_for(small), workers_for(large), workers_for(Load(1))
        (4, 1, 1)
    """
    fit = fitting(load)
    if fit is None:
        return load.seats
    return min(fit, max(load.seats, min(worthwhile(load), 2 * load.seats)))


def fraction_for(
    seats: int, total_bytes: int | None, others_bytes: int = 0, overhead_bytes: int = CONTEXT_BYTES
) -> float:
    """Return which part of a GPU's memory each of its workers may have through torch, so that all
    of them can have it at once.

    Of a GPU whose size is not known, a tenth is left for what their processes take beside that.

    Example:
        >>> fraction_for(1, None), fraction_for(2, None), fraction_for(4, 16 * 2**30)
        (1.0, 0.45, 0.21875)
    """
    if seats == 1:
        return 1.0
    if total_bytes is None:
        return (1 - MARGIN) / seats
    shared = total_bytes - others_bytes - seats * overhead_bytes
    return max(shared, 0) / seats / total_bytes
