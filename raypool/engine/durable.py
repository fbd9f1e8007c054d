"""A loop that keeps what becomes of its items in a folder, and goes on from what is there."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

from raypool.channel.feed import Feed, text_of_file
from raypool.channel.records import Function, LocalValues, Missing, SliceResult, WorkerInfo
from raypool.core.model import Slice, TaskState
from raypool.engine.loop_work import LoopOptions, LoopWork, Lost, Restored, Segment
from raypool.engine.recorder import Recorder, Step
from raypool.engine.sayings import DIARY, METRICS, ItemFiles, SayingFeed, rows_of
from raypool.errors import InternalError, JournalError, TaskError
from raypool.journal.files import Damaged, make_folder
from raypool.journal.journal import Journal, Outcome, Stored
from raypool.journal.keys import Source
from raypool.journal.records import row_of

UNCHANGEABLE = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose values stay what they are."""

logger = logging.getLogger("raypool")


class DurableLoop(LoopWork):
    """The items of one `parfor` with a `run_dir`.

    What the driver hears of an item goes to the recorder, whose thread opens it, writes it into the journal and only then counts
    it. So what somebody was told of once is there for good.
    """

    @classmethod
    def open(cls, fn: Callable[[Any], Any], function: Function, options: LoopOptions, run_dir: Any, rerun: str) -> DurableLoop:
        """Open a folder for a loop of `fn`; `rerun` says what of it counts.

        Raises:
            JournalError: It is in use, was made for something else, or cannot be written.
        """
        source = Source.of(fn)
        if rerun == "all":
            source = source._replace(given=None)  # it may hold other values then
        journal = Journal.open(Path(run_dir).expanduser().absolute(), source.function, options.seed, source)
        return cls(function, options, journal, rerun)

    def __init__(self, function: Function, options: LoopOptions, journal: Journal, rerun: str) -> None:
        super().__init__(function, (), options)
        self.run_dir = journal.run_dir
        self.run = journal.run
        feed = self.feed = SayingFeed()
        self._journal = journal
        self._home = self._home or str(journal.run_dir)
        self._rerun = rerun
        self._runs: dict[int, int] = {}  # in which run a restored item ran
        self._files = ItemFiles(feed, self.keys, self._folder, journal.run)
        self._recorder = Recorder(journal, self._files, options.label, self._give_up)
        self._stored: dict[str, Stored] = {}

    # --- before and while it runs, in the thread of whoever called ----------------------------------------------------

    def take(self, items: Sequence[Any]) -> int:
        """Take the items, note them down, and find out which of them have to run."""
        self.items = items
        self.keys += [self._names.name(item, index) for index, item in enumerate(items)]
        try:
            self._journal.note_items((key, index, items[index]) for index, key in enumerate(self.keys))
            self._stored = {} if self._rerun == "all" else self._journal.stored()
        except OSError as error:
            raise JournalError(
                f"{self.run_dir} cannot be written: {error}. Make room on that disk, or give another folder.",
                run_dir=str(self.run_dir),
            ) from error
        if self._stored and items and self._stored.keys().isdisjoint(self.keys):
            logger.warning(
                "None of the %s items of %s is among the %s in %s that have an outcome, so all of them run. "
                "If they should be there: has their class, or the type of a value in them, changed?",
                f"{len(items):,}",
                self.label,
                f"{len(self._stored):,}",
                self.run_dir,
            )
        numbers: Sequence[int] = range(len(items)) if self._order is None else self._order
        order = [index for index in numbers if not self._restore(index)]
        self._order = None if items and order == list(range(len(items))) else order
        if self._options.seed is not None and self.restored:
            self._check_places()
        self._recorder.start()
        return len(order)

    def _check_places(self) -> None:
        """Say it if random numbers, which depend on an item's number, were given to another item before."""
        num_moved = 0
        for run in set(self._runs.values()):
            places = self._journal.positions(run)
            indices = (index for index, its_run in self._runs.items() if its_run == run)
            num_moved += sum(places.get(self.keys[index], index) != index for index in indices)
        if num_moved:
            logger.warning(
                "%s items of %s had another number when they ran, and with seed=%s the random numbers that belong to that: other "
                "items may get the same now. Put new items behind those that were there, or run all again with rerun='all'.",
                f"{num_moved:,}",
                self.label,
                self._options.seed,
            )

    def add(self, item: Any) -> int:
        """Take one more item, as it is now: a generator may yield the same object again, changed."""
        index = len(self.items)
        if type(item) not in UNCHANGEABLE:
            with contextlib.suppress(Exception):  # what cannot be copied stays what it is
                item = copy.deepcopy(item)
        self.keys.append(self._names.name(item, index))
        cast("list[Any]", self.items).append(item)
        entry = (self.keys[index], index, item)
        self._recorder.put(lambda: Step(entries=[entry]))
        if self._restore(index):
            return 0
        cast("list[int]", self._order).append(index)
        return 1

    def _folder(self, key: str) -> Path:
        folder = self._journal.folder(key)
        make_folder(folder)
        return folder

    def _restore(self, index: int) -> bool:
        """Take what is there of an item, if that counts."""
        stored = self._stored.get(self.keys[index])
        if stored is None or (stored.status == "failed" and self._rerun == "failed"):
            return False
        try:
            has_failed = stored.status == "failed"
            value = None if has_failed else self._journal.value(stored)
            error = self._journal.error(stored) if has_failed else None
        except Damaged as damage:
            logger.warning("%s Item %d of %s runs again.", damage, index, self.label)
            return False
        row = row_of(stored)
        self.restored[index] = Restored(value, error, row)
        self._runs[index] = stored.run
        if error is not None:
            self.errors[index] = error
        with self.changed:
            self.num_settled += 1
        return True

    def caught_up(self) -> Feed:
        """Return what all items have said, also those that need not run; what the others said was there before they counted."""
        if not self.restored:
            return self.feed
        feed = Feed()
        for index, run in self._runs.items():
            for row in rows_of(self._journal.run_dir / "items" / self.keys[index] / METRICS, index, run):
                feed.add_row(row)
        feed.add_all_of(self.feed)
        return feed

    def diary(self, index: int) -> str:
        """Return what an item printed: if it did not run in this call, what is in its file, which has all its attempts."""
        if index not in self.restored:
            return super().diary(index)
        return text_of_file(self._journal.run_dir / "items" / self.keys[index] / DIARY)

    def close(self) -> None:
        """Write what is there, and let others have the folder."""
        self._recorder.close()
        self.trouble = self._recorder.failure

    # --- in the driver's thread ---------------------------------------------------------------------------------------

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Have the outcomes written."""
        self._recorder.put(partial(self._settled, piece, result, worker))

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Have the error written for each of these items."""
        self._recorder.put(partial(self._failed, Lost(piece, error, self._let_go(piece))))

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Have it written that these items run again."""
        where = self._where(piece, worker)
        self._note_missed(piece, why, where)
        self._recorder.put(partial(self._missed, piece, why, where))

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Wake whoever waits, when all is written."""
        del self.function
        self._note_cancelled(state)  # here: by then it may have come back
        self._recorder.end(partial(self._ended, state, error))

    # --- in the recorder's thread -------------------------------------------------------------------------------------

    def _settled(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> Step:
        """Open what has come back."""
        if result.catch_up is not None:
            result.catch_up()
        before = piece.start - result.start
        values = _values_of(piece, result)
        opened = replace(result, values=LocalValues(values), offset=-before, catch_up=None)
        errors = self._errors_of(piece, result, worker)
        starts = islice(accumulate(result.durations_s, initial=result.started_at), before, None)
        outcomes = []
        for position, (index, value, started_at) in enumerate(zip(self.numbers(piece), values, starts, strict=False), before):
            if type(value) is Missing:
                errors.setdefault(index, value.error)
            error = errors.get(index)
            if result.is_interrupted and isinstance(error, KeyboardInterrupt):
                continue  # Ctrl-C, inline: it means the loop, not the item
            status, value = ("finished", value) if error is None else ("failed", None)
            duration_s = result.durations_s[position]
            outcomes.append(
                Outcome(
                    self.keys[index],
                    piece.attempt,
                    status,
                    value,
                    error,
                    None,
                    started_at,
                    duration_s,
                    worker.index,
                    worker.gpu,
                    worker.host,
                )
            )
        count = partial(self._keep, Segment(piece, opened, worker), errors)
        return Step(outcomes, count, unfit=partial(self._unfit, piece, values, errors))

    def _unfit(
        self, piece: Slice, values: list[Any], errors: dict[int, BaseException], outcome: Outcome, error: Exception
    ) -> Outcome:
        """Let an item have failed whose value cannot be written anywhere."""
        for position, index in enumerate(self.numbers(piece)):
            if self.keys[index] == outcome.key:
                values[position], errors[index] = None, error
        return outcome._replace(status="failed", value=None, error=error)

    def _failed(self, lost: Lost) -> Step:
        how = Outcome("", lost.items.attempt, "failed", error=lost.error, **({} if lost.span is None else lost.span._asdict()))
        return Step([how._replace(key=self.keys[index]) for index in self.numbers(lost.items)], partial(self._keep_failed, lost))

    def _missed(self, piece: Slice, why: str | BaseException, where: dict[str, Any]) -> Step:
        if isinstance(why, str):
            how = Outcome("", piece.attempt, "lost", words=why, **where)
        else:
            how = Outcome("", piece.attempt, "retried", error=why, **where)
        return Step([how._replace(key=self.keys[index]) for index in self.numbers(piece)])

    def _ended(self, state: TaskState, error: BaseException | None, trouble: JournalError | None) -> None:
        """Tell that all is written, or that it could not be."""
        if trouble is not None:
            if self.first_error is not None:
                with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
                    self.first_error.add_note(f"raypool: {trouble}")
            state, error = TaskState.FAILED, error or trouble
        self._wake(state, error)

    def _give_up(self, error: BaseException) -> None:
        mistake = InternalError(
            "What writes the journal has failed. This is a mistake in raypool; report it with the cause.", story=()
        )
        mistake.__cause__ = error
        self._wake(TaskState.FAILED, mistake)


def _values_of(piece: Slice, result: SliceResult) -> list[Any]:
    """Return the values of a slice; where they are lost, what stands for them."""
    first = result.offset + piece.start - result.start
    try:
        return result.values.get()[first : first + piece.stop - piece.start]
    except BaseException as error:  # also what code of the user's raises when it is unpickled
        lost = error if isinstance(error, Exception) else TaskError(f"A value cannot be opened: {type(error).__name__}: {error}")
        return [Missing(lost)] * (piece.stop - piece.start)
