"""Where the processes of a training in the managed lane leave word for each other: an actor without resources.

Guests (the workers of Ray Train's) say there what they report and print and how they end, and meet there at each report. Ray
Train's controller says who it is, and asks whether what has failed may be tried again. The pool's process takes all of it out.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

MAY_BE_LATE_S = 1.0
"""Where all ranks seem to have failed only because of others, one that has failed by itself may not have said so yet [s]."""


class Words(NamedTuple):
    """What a rank says at a report: which metrics, whether it has a checkpoint, and whether a machine is about to go."""

    names: tuple[str, ...]
    has_checkpoint: bool
    is_leaving: bool = False


class Verdict(NamedTuple):
    """What all ranks hear at a report.

    `should_stop`: somebody has asked for an early end. `words`: what each of them has said, by rank. `missing`: those that did
    not come, since they have ended; then there are no words.
    """

    should_stop: bool
    words: tuple[Words, ...]
    missing: tuple[int, ...] = ()


class Meeting:
    """The ranks at one report."""

    def __init__(self) -> None:
        self.words: dict[int, Words] = {}
        self.verdict: Verdict | None = None
        self.over = asyncio.Event()

    def close(self, verdict: Verdict) -> None:
        """Let all go on who wait."""
        if self.verdict is None:
            self.verdict = verdict
            self.over.set()


class Group:
    """What is known of the guests that Ray Train has started together."""

    def __init__(self, number: int, should_stop: bool) -> None:
        self.number = number
        self.should_stop = should_stop  # from the first line of the loop on
        self.meetings: dict[int, Meeting] = {}
        self.returned: set[int] = set()
        self.failures: dict[int, str] = {}


class Letterbox:
    """The actor. Its methods run in one thread, one at a time between two of their waits."""

    def __init__(self) -> None:
        self._letters: list[tuple[Any, ...]] = []
        self._news = asyncio.Condition()
        self._should_stop = False
        self._is_closed = False
        self._group = Group(0, False)

    # --- for the pool's process ---------------------------------------------------------------------------------------

    async def take(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Return what has come, in order, waiting for something."""
        async with self._news:
            if not self._letters and not self._is_closed:
                try:
                    await asyncio.wait_for(self._news.wait(), timeout_s)
                except TimeoutError:
                    return []
            letters, self._letters = self._letters, []
            return [*letters, ("closed",)] if self._is_closed else letters

    async def close(self) -> None:
        """Let whoever takes letters know that these are the last."""
        async with self._news:
            self._is_closed = True
            self._news.notify_all()

    async def ask_to_stop(self) -> None:
        """Let the ranks know, at their next report, that somebody wants an early end."""
        self._should_stop = True

    # --- for the controller -------------------------------------------------------------------------------------------

    async def put(self, *letter: Any) -> None:
        """Leave a letter."""
        async with self._news:
            self._letters.append(letter)
            self._news.notify_all()

    async def begin_group(self) -> None:
        """Note that guests are started; none of those before counts any more."""
        self._group = Group(self._group.number + 1, self._should_stop)
        await self.put("group", self._group.number)

    async def may_try_again(self) -> bool:
        """Return whether nobody has failed for good."""
        group = self._group
        for _ in range(10):
            if any(kind != "cut off" for kind in group.failures.values()):
                break
            await asyncio.sleep(MAY_BE_LATE_S / 10 if group.failures else 0)
        return "for good" not in group.failures.values()

    # --- for guests ---------------------------------------------------------------------------------------------------

    async def greet(self, host: str, pid: int) -> tuple[int, bool]:
        """Note where a guest is; return the how-many-th group this is, and whether an early end was wanted before it began."""
        await self.put("guest", host, pid)
        return self._group.number, self._group.should_stop

    async def push(self, group: int, rank: int, number: int, batch: bytes) -> None:
        """Take a batch of what a rank says, the how-many-th of it."""
        if batch:
            await self.put("batch", group, rank, number, batch)

    async def meet(self, group_number: int, number: int, rank: int, size: int, words: Words) -> Verdict:
        """Wait for all ranks at their how-many-th report; return what follows, the same for each."""
        group = self._group
        if group.number != group_number:
            await asyncio.Event().wait()  # a guest that is about to be ended
        meeting = group.meetings.setdefault(number, Meeting())
        meeting.words[rank] = words
        if len(meeting.words) == size:
            meeting.close(Verdict(self._should_stop, tuple(each for _, each in sorted(meeting.words.items()))))
            del group.meetings[number]
        elif group.returned:
            self._disappoint(group)
        await meeting.over.wait()
        assert meeting.verdict is not None
        return meeting.verdict

    async def end(self, group_number: int, rank: int, value: bytes | None, metrics: dict[str, Any] | None) -> None:
        """Take what a rank has returned; None: it has come back early, since a machine is about to go."""
        group = self._group
        if group.number == group_number:
            group.returned.add(rank)
            self._disappoint(group)
            await self.put("end", rank, value, metrics)

    async def fail(self, group_number: int, rank: int, kind: str, error: bytes, at: float) -> None:
        """Take what a rank has failed with.

        Args:
            group_number: The group that it is in.
            rank: Its number.
            kind: "for good"; "again", if the caller wants another try after such an error; "cut off", because of another rank.
            error: The exception, packed.
            at: When (Unix time [s]).
        """
        group = self._group
        if group.number == group_number:
            group.failures[rank] = kind
            await self.put("failure", rank, kind, error, at)

    def _disappoint(self, group: Group) -> None:
        """Let ranks know that wait for one that has ended."""
        for number, meeting in list(group.meetings.items()):
            missing = tuple(sorted(group.returned.difference(meeting.words)))
            if missing:
                meeting.close(Verdict(False, (), missing))
                del group.meetings[number]
