"""How the learning rate goes on from step to step. Numbers only."""

from __future__ import annotations

import math
from typing import NamedTuple


class Course(NamedTuple):
    """The course of a learning rate: what it is multiplied by at each step.

    `kind`: "none", "piecewise", "cosine" or "linear". `steps_per_epoch`, `num_steps`: of the whole training. `warmup_steps`: it
    rises over so many steps, from `warmup_from` of its value. `drop_every` epochs, "piecewise" leaves `drop_factor` of it.
    """

    kind: str
    steps_per_epoch: int
    num_steps: int
    warmup_steps: int = 0
    warmup_from: float = 0.0
    drop_every: int = 10
    drop_factor: float = 0.1

    def factor(self, step: int) -> float:
        """Return what the learning rate is multiplied by at a step, from 0 on.

        Example:
            >>> course = Course("linear", steps_per_epoch=10, num_steps=14, warmup_steps=4)
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
    """Return over how many steps a scaled learning rate rises: five epochs, and at most a tenth of all."""
    return min(5 * steps_per_epoch, num_steps // 10)
