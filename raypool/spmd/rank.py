"""One rank of an spmd call, in its worker: the user's function, and its end."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raypool.channel.store import way_finder_here
from raypool.errors import RankInterrupted, TaskCancelled
from raypool.spmd import composite
from raypool.spmd.context import SpmdContext
from raypool.spmd.failures import is_disconnect
from raypool.spmd.group import Assignment, AtHand, Group, join, leave, leave_other
from raypool.worker.runner import finished
from raypool.worker.running import note_here

OURS = str(Path(__file__).parents[1])
"""Code in this folder is not the user's."""


class RankFunction:
    """A user's function, called by each rank; the return value stays in the worker."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        # called as in functools.partial, so that messages have its name
        self.func = self.__wrapped__ = fn

    def __call__(self, assignment: Assignment, open_args: Callable[[], Sequence[Any]]) -> Any:
        """Run one rank, and return its `answer`.

        Raises:
            RankInterrupted: It was ended because another rank had failed, or the time was up.
            Exception: Any error that the function raised.
        """
        group: Group | None = None
        has_returned = False
        try:
            # the ranks of the group that is left fail, and all are told to end: this must not hide
            # the first error
            _shield()
            leave_other(assignment)
            _shield(False)
            group = join(assignment, way_finder_here()())
            with group.visible(), group.watched():
                args = [
                    composite.find(arg.key, assignment.rank)
                    if isinstance(arg, composite.PartOf)
                    else arg
                    for arg in open_args()
                ]
                context = SpmdContext(group)
                try:
                    value = finished(self.func(context, *args))
                    del args
                    has_returned = True
                    group.end()
                finally:
                    _shield()  # what follows puts things back as they were
                    context._end()
        except BaseException as error:
            _shield()  # as above
            outcome: Exception | None = _interruption(error, group, has_returned)
            if group is not None and group.mismatch is not None:
                outcome = group.mismatch  # the watch closed the group: torch may raise anything
            _part(assignment, group)
            if outcome is None:
                raise
        else:
            if not assignment.stays_warm:
                _part(assignment, group)
            return self.answer(assignment, value)
        raise outcome

    def answer(self, assignment: Assignment, value: Any) -> Any:
        """Return the answer that travels back: a description, while the value stays."""
        return composite.keep(assignment.key, assignment.rank, value)


def _shield(is_on: bool = True) -> None:
    """Make this rank uninterruptible, or interruptible again."""
    note = note_here()
    if note is not None and note.interrupts is not None:
        (note.interrupts.pause if is_on else note.interrupts.resume)()


def _part(assignment: Assignment, group: Group | None) -> None:
    """Leave the group for good, and release all ranks that wait for this one."""
    if assignment.stays_warm:
        leave()
    elif group is not None:
        group.close()


def _interruption(
    error: BaseException, group: Group | None, has_returned: bool
) -> RankInterrupted | None:
    """Return the error of a rank that was ended from outside; None if it failed by itself."""
    # Also errors that were being handled, even if hidden by `from None`: an error in the cleanup
    # of a rank that was ended is not a failure of its own.
    story: dict[int, BaseException] = {}
    here: BaseException | None = error
    while here is not None and id(here) not in story:  # a chain of errors may be a circle
        story[id(here)] = here
        here = here.__context__
    is_cut_off = any(map(is_disconnect, story.values()))
    if group is None and isinstance(error, ConnectionError):
        looking = AtHand("while it looked for the others", 0, None)
        return RankInterrupted(
            f"It did not find the other ranks: {error}", at_hand=looking, place=""
        )
    if not is_cut_off and not any(isinstance(each, TaskCancelled) for each in story.values()):
        return None
    at_hand = None if group is None else group.at_hand
    if at_hand is None and has_returned:
        at_hand = AtHand("at the end of the call", 0, None)
    elif at_hand is None and is_cut_off and group is not None:  # it waited in native code
        at_hand = AtHand("in a collective of torch.distributed", 0, None)
    own = [  # the innermost line of the user's own tells most
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(OURS) and "/torch/" not in frame.filename
    ]
    place = own[-1] if own else ""
    if at_hand is None:
        where = f"at {place}" if place else "before it began"
    else:
        where = f"in {at_hand.operation}" if at_hand.number else at_hand.operation
    return RankInterrupted(
        f"It was interrupted {where}, because another rank had failed or the time was up.",
        at_hand=at_hand,
        place=place,
    )
