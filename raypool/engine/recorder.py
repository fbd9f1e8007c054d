"""Writes what a durable loop brings back into its journal, in a thread of its own, and counts it when it is there.

Where that cannot be done (the disk is full, say), the loop goes on: what has come back waits in memory, and is tried again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raypool.engine.sayings import ItemFiles
from raypool.errors import JournalError
from raypool.journal.journal import Journal, Outcome

SAID_S = 1.0
"""So often is written what items say while they run [s]."""

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
"""Where that cannot be done, it is tried again after this time [s], then after twice as long each time, up to this."""

PATIENCE_S = 60.0
"""So long does a loop that has ended wait for room for what it has brought back [s]."""

BATCH = 4096
"""So much is written together."""

logger = logging.getLogger("raypool")


def _nothing() -> None:
    """Do nothing."""


class Step:
    """Something that counts as soon as it is written.

    Args:
        outcomes: Of items.
        count: Called then.
        entries: Items that are new: key, number, item.
        unfit: Returns the outcome to write instead of one that can never be written.
    """

    __slots__ = ("count", "entries", "outcomes", "unfit", "was_refused")

    def __init__(
        self,
        outcomes: Sequence[Outcome] = (),
        count: Callable[[], None] = _nothing,
        entries: Sequence[tuple[str, int, Any]] = (),
        unfit: Callable[[Outcome, Exception], Outcome] | None = None,
    ) -> None:
        self.outcomes = outcomes
        self.count = count
        self.entries = entries
        self.unfit = unfit
        self.was_refused = False

    @property
    def is_done(self) -> bool:
        """Whether all of it is written."""
        return not self.outcomes and not self.entries

    def keep(self, refused: Mapping[int, Exception]) -> bool:
        """Keep the outcomes that were refused, by identity, for later; return whether there are others to be written at once."""
        left: list[Outcome] = []
        others: list[Outcome] = []
        for outcome in self.outcomes:
            error = refused.get(id(outcome))
            if isinstance(error, OSError):
                left.append(outcome)
            elif error is not None:
                if self.unfit is None or outcome.status != "finished":
                    raise error
                others.append(self.unfit(outcome, error))
        self.was_refused = bool(left)
        self.outcomes = left + others
        return bool(others)


class End(NamedTuple):
    """Nothing more will come; `tell` is to be called when all is written, or with the error if that cannot be."""

    tell: Callable[[BaseException | None], None]


class Recorder:
    """The thread that writes.

    Args:
        journal: Closed when all is written.
        files: Of the items.
        label: What to call the loop.
        give_up: Called with the error if the thread itself fails.
    """

    def __init__(self, journal: Journal, files: ItemFiles, label: str, give_up: Callable[[BaseException], None]) -> None:
        self._journal = journal
        self._files = files
        self._label = label
        self._give_up = give_up
        self._inbox: queue.SimpleQueue[Callable[[], Step] | End | None] = queue.SimpleQueue()
        self._waiting: list[Step] = []
        self._trouble: OSError | None = None  # what the journal could not be written for
        self._is_total = False  # not even a little of it
        self._delay_s = 0.0
        self._try_at = 0.0
        self._tell: Callable[[BaseException | None], None] | None = None
        self._deadline = 0.0
        self._is_hurried = False
        self.failure: JournalError | None = None  # what could not be written in the end
        self._thread = threading.Thread(target=self._work, name="raypool-journal", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, prepare: Callable[[], Step]) -> None:
        """Write what this returns; it is called in the thread."""
        self._inbox.put(prepare)

    def end(self, tell: Callable[[BaseException | None], None]) -> None:
        """Write what is left, and then tell."""
        self._inbox.put(End(tell))

    def close(self) -> None:
        """Write what is there, now or never, and wait for the thread's end."""
        is_first = not self._is_hurried
        self._is_hurried = True
        self._inbox.put(End(lambda error: None))
        if self._thread.ident is None:
            self._journal.close()
        elif is_first:  # whoever was interrupted once waiting for it does not want to wait
            self._thread.join()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_over():
                self._take()
                self._write()
        except BaseException as error:  # raypool's own mistake: nobody may be left waiting for it
            self._give_up(error)
        finally:
            with contextlib.suppress(Exception):
                self._journal.close()

    def _is_over(self) -> bool:
        if self._tell is None:
            return False
        num_left = sum(len(step.outcomes) for step in self._waiting)
        if not self._waiting and not self._files.num_unwritten:
            self._tell(None)
            return True
        if time.monotonic() < self._deadline and not self._is_hurried:
            return False
        self.failure = self._failed(num_left)
        for step in self._waiting:
            step.count()
        self._tell(self.failure)
        return True

    def _failed(self, num_left: int) -> JournalError:
        tried = "" if self._is_hurried else f", also not within {PATIENCE_S:g} s after its end"
        error = JournalError(
            f"{self._said(num_left)} of {self._label} could not be written to {self._journal.run_dir}{tried}: {self._trouble}. "
            "All values are in .results of this error. Make room there, and the same call runs again what is missing.",
            run_dir=str(self._journal.run_dir),
        )
        if self._is_hurried:
            logger.warning("%s", error)
        return error

    def _said(self, num_left: int) -> str:
        if not num_left:
            return f"What {self._files.num_unwritten:,} items have reported and printed"
        return f"{num_left:,} outcome{'s' if num_left != 1 else ''}"

    def _take(self) -> None:
        """Wait for something to do, and take all there is."""
        now = time.monotonic()
        pause = SAID_S if self._trouble is None else max(min(self._try_at - now, SAID_S), 0.0)
        if self._tell is not None and (self._trouble is None or self._is_hurried):
            pause = 0.0
        with contextlib.suppress(queue.Empty):
            for _ in range(BATCH):
                self._note(self._inbox.get(timeout=pause))
                pause = 0.0

    def _note(self, wish: Callable[[], Step] | End | None) -> None:
        if isinstance(wish, End):
            if self._tell is None:
                self._tell = wish.tell
                self._deadline = time.monotonic() + PATIENCE_S
                if self._trouble is not None and not self._is_hurried:
                    logger.warning("%s has ended; what is not written yet is tried for %g s more.", self._label, PATIENCE_S)
        elif wish is not None:
            self._waiting.append(wish())

    def _write(self) -> None:
        """Write what waits; what has just been refused waits a while longer."""
        is_due = self._trouble is None or self._is_hurried or time.monotonic() >= self._try_at
        if not is_due and self._is_total:
            return
        steps = [step for step in self._waiting if is_due or not step.was_refused]
        unsaid = self._files.write()
        refusal = self._write_steps(steps)
        done = [step for step in steps if step.is_done]
        self._waiting = [step for step in self._waiting if not step.is_done]
        for step in done:
            step.count()
        if refusal is not None or unsaid is not None or is_due:
            self._note_trouble(refusal or unsaid, is_total=refusal is not None and not done)

    def _write_steps(self, steps: Sequence[Step]) -> OSError | None:
        """Write what can be, and leave the rest in the steps; return why that can't."""
        try:
            entries = [entry for step in steps for entry in step.entries]
            if entries:
                self._journal.note_items(entries)
        except OSError as error:
            for step in steps:
                step.was_refused = True
            return error
        for step in steps:
            step.entries = ()
        refusal = None
        left = [step for step in steps if step.outcomes]
        while left:
            refused = {id(outcome): error for outcome, error in self._journal.write([o for step in left for o in step.outcomes])}
            refusal = next((error for error in refused.values() if isinstance(error, OSError)), refusal)
            left = [step for step in left if step.keep(refused)]
        return refusal

    def _note_trouble(self, trouble: OSError | None, is_total: bool) -> None:
        if trouble is None and self._trouble is not None and not self._waiting:
            logger.warning("%s can be written again: everything that waited is there.", self._journal.run_dir)
        elif trouble is not None and self._trouble is None:
            num_left = sum(len(step.outcomes) for step in self._waiting)
            logger.warning(
                "%s cannot be written: %s. %s of %s wait in memory, and it is tried again; the loop goes on. "
                "Make room on that disk, or see that it can be written.",
                self._journal.run_dir,
                trouble,
                self._said(num_left),
                self._label,
            )
        self._trouble = trouble
        self._is_total = is_total
        self._delay_s = 0.0 if trouble is None else min(max(2 * self._delay_s, FIRST_DELAY_S), MAX_DELAY_S)
        self._try_at = time.monotonic() + self._delay_s
