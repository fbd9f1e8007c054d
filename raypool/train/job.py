"""What travels to the ranks of a training by `pool.fit`. It imports torch, by what it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from raypool.train.data import Samples
from raypool.train.options import TrainingOptions
from raypool.train.schedule import Course
from raypool.train.shares import Division, Share, share_of


class FitJob(NamedTuple):
    """A training, as it was prepared.

    `loads`: of the ranks, by rank. `division`: of an epoch. `course`: of the learning rate, which is multiplied by `rate_scale`
    before. `is_on_cpu`: on the CPU, also where a worker has a GPU.
    """

    model: Any
    samples: Samples
    validation: Samples | None
    loss: Callable[..., Any]
    options: TrainingOptions
    loads: tuple[float, ...]
    division: Division
    course: Course
    rate_scale: float
    is_on_cpu: bool

    def share(self, rank: int, size: int) -> Share:
        """Return what a rank takes of each mini-batch. Where there are fewer ranks than planned, all take the same.

        So it is in pools of this process, which train with one, and after workers were lost for good: the mini-batch stays.
        """
        loads = self.loads if size == len(self.loads) else (1,) * size
        return share_of(rank, self.division.batch_size, loads)

    def pieces(self, share: Share) -> list[tuple[int, int]]:
        """Return where in the order of an epoch's samples a rank's part of each mini-batch is."""
        size, count = self.division.batch_size, self.division.steps * self.division.accumulate
        return [(number * size + share.start, number * size + share.start + share.size) for number in range(count)]
