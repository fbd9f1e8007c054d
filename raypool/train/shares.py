"""Shares of ranks and steps in the samples, and the course of the learning rate: numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


def split_batch(size: int, loads: Sequence[float]) -> list[int]:
    """Split samples in proportion to loads (at least one above 0), as evenly as can be.

    What is left over goes to the largest remainders, of equal ones to the first.

    Source:
        Hamilton's method of apportionment; MATLAB R2025b, "Train Network in Parallel with Custom
        Training Loop", for equal loads.

    Example:
        >>> split_batch(130, [1, 1, 1, 1]), split_batch(96, [2, 1])
        ([33, 33, 32, 32], [64, 32])
    """
    exact_loads = [Fraction(load) for load in loads]  # floats could make equal remainders differ
    total = sum(exact_loads)
    quotas = [size * load / total for load in exact_loads]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - quotas[rank])
    for rank in by_remainder[: size - sum(shares)]:
        shares[rank] += 1
    return shares


class Division(NamedTuple):
    """How a data set makes up an epoch: steps of `accumulate` mini-batches."""

    num_samples: int
    batch_size: int
    accumulate: int
    steps: int

    @property
    def dropped(self) -> int:
        """How many samples an epoch leaves out."""
        return self.num_samples - self.batch_size * self.accumulate * self.steps


def divide(num_samples: int, batch_size: int, accumulate: int) -> Division:
    """Divide a data set into steps; one that is too small for a step makes one all the same.

    Example:
        >>> divide(130, 32, accumulate=1)
        Division(num_samples=130, batch_size=32, accumulate=1, steps=4)
        >>> divide(20, 32, accumulate=2)
        Division(num_samples=20, batch_size=20, accumulate=1, steps=1)
    """
    batch_size = min(batch_size, num_samples)
    accumulate = min(accumulate, num_samples // batch_size)
    return Division(num_samples, batch_size, accumulate, num_samples // (batch_size * accumulate))


class Share(NamedTuple):
    """A rank's share of each mini-batch: `size` samples from the `start`-th on, of `batch_size`."""

    start: int
    size: int
    batch_size: int

    @property
    def weight(self) -> float:
        """Its part of the mini-batch."""
        return self.size / self.batch_size


def share_of(rank: int, batch_size: int, loads: Sequence[float]) -> Share:
    """Return the share of a rank in each mini-batch.

    Example:
        >>> share_of(1, 96, [2, 1])
        Share(start=64, size=32, batch_size=96)
    """
    sizes = split_batch(batch_size, loads)
    return Share(sum(sizes[:rank]), sizes[rank], batch_size)


# --- course of the learning rate ------------------------------------------------------------------


class LearningRates(NamedTuple):
    """The course of a learning rate: its factor at each step.

    `kind`: "none", "piecewise", "cosine" or "linear". `steps_per_epoch`, `num_steps`: of the whole
    training. `warmup_steps`: it rises over so many steps, from `warmup_from` of its value.
    `drop_every` epochs, "piecewise" leaves `drop_factor` of it.
    """

    kind: str
    steps_per_epoch: int
    num_steps: int
    warmup_steps: int = 0
    warmup_from: float = 0.0
    drop_every: int = 10
    drop_factor: float = 0.1

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step, from 0 on.

        Example:
            >>> course = LearningRates("linear", steps_per_epoch=10, num_steps=14, warmup_steps=4)
            >>> [course.factor(step) for step in (0, 3, 4, 9, 14)]
            [0.25, 1.0, 1.0, 0.5, 0.0]
        """
        if step < self.warmup_steps:
            return self.warmup_from + (1 - self.warmup_from) * (step + 1) / self.warmup_steps
        if self.kind == "piecewise":
            return float(self.drop_factor ** (step // self.steps_per_epoch // self.drop_every))
        if self.kind == "none":
            return 1.0
        progress = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress


def default_warmup(steps_per_epoch: int, num_steps: int) -> int:
    """Return the warm-up of a scaled learning rate [steps]: five epochs, at most a tenth of all."""
    return min(5 * steps_per_epoch, num_steps // 10)
