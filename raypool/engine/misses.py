"""Which items run again after the event at hand, and why: for those works that keep a record of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raypool.channel.records import WorkerInfo
from raypool.core import messages as m
from raypool.core.model import Slice
from raypool.engine.work import Work

Why = str | BaseException
"""What is known of the loss of a worker, or what an item has raised that `retry_on` names."""


def tell_misses(
    works: Mapping[int, Work], missed: Iterable[tuple[Slice, Why]], commands: Sequence[m.Command], worker: WorkerInfo
) -> None:
    """Tell works what of theirs runs again: of what was missed, all that none of the commands settles.

    Args:
        works: Those that are not at their end, by task.
        missed: Slices that have no outcome of this attempt, and why.
        commands: The scheduler's answer.
        worker: Where they ran.
    """
    settled = [command.items for command in commands if isinstance(command, (m.SettleItems, m.FailItems, m.TimeOutItems))]
    for piece, why in missed:
        work = works.get(piece.task_id)
        if work is not None and not any(_overlap(piece, items) for items in settled):
            work.miss(piece, worker, why)


def _overlap(piece: Slice, items: Slice) -> bool:
    return piece.task_id == items.task_id and piece.start < items.stop and items.start < piece.stop
