"""Which workers belong together in a process group that is still warm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Roll(NamedTuple):
    """A group: its number, and the ids of its workers by rank."""

    number: int
    worker_ids: tuple[int, ...]


class Roster:
    """The groups of a pool. A worker is in one at a time; a group is of use as long as all its workers have been in no other.

    Example:
        >>> roster = Roster()
        >>> first = roster.number_for([7, 8])
        >>> roster.number_for([7, 8]) == first
        True
        >>> roster.number_for([7]) == first, roster.number_for([7, 8]) == first
        (False, False)
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._rolls: dict[int, Roll] = {}  # by worker id: the group that it was in last

    def number_for(self, worker_ids: Sequence[int]) -> int:
        """Return the number of the group that has these ranks, or the next number if there is none."""
        wanted = tuple(worker_ids)
        rolls = {self._rolls.get(worker_id) for worker_id in wanted}
        roll = rolls.pop()
        if rolls or roll is None or roll.worker_ids != wanted:
            roll = Roll(next(self._numbers), wanted)
            self._rolls.update(dict.fromkeys(wanted, roll))
        return roll.number

    def forget(self, worker_ids: Sequence[int]) -> None:
        """Note that the group of these workers is of no use any more."""
        for worker_id in worker_ids:
            self._rolls.pop(worker_id, None)
