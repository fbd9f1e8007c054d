"""What a rank is to measure of a training by `pool.fit`."""

from __future__ import annotations

from typing import NamedTuple


class Measure(NamedTuple):
    """How to measure steps: so many, after so many that do not count.

    `is_synchronised`: with the gradients of all ranks put together, as in the training; else each rank goes its own way.
    """

    num_steps: int
    num_warm_up: int
    is_synchronised: bool
