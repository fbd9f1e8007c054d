"""A loop with a `run_dir`: it records outcomes in that folder, and resumes from there.

`DurableLoop` is the loop, `Recorder` the thread that writes the journal, and `ItemFiles` the files
with the reports and output of each item.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import os
import pickle
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from raypool.channel.feed import (
    TEXT_BYTES,
    Feed,
    Last,
    LoopFeed,
    Row,
    column_name,
    fields_of,
    text_of_file,
)
from raypool.channel.gpu_usage import GPU_USAGE, GpuSample, line_of
from raypool.channel.records import Function, LocalValues, Missing, SliceResult, WorkerInfo
from raypool.core.model import Slice, TaskState
from raypool.engine.loop import LoopOptions, LoopWork, Lost, Restored, Segment, Tail
from raypool.errors import InternalError, JournalError, TaskError, add_note
from raypool.journal.files import DIARY, METRICS, Damaged, append, make_folder
from raypool.journal.fingerprints import source_of
from raypool.journal.journal import Journal
from raypool.journal.keys import FunctionSource
from raypool.journal.live import WatchedRun
from raypool.journal.opening import cannot_write
from raypool.journal.provenance import record
from raypool.journal.reading import calls_in, report_in, saved_items
from raypool.journal.rows import PARTS, Outcome, Stored, row_of
from raypool.views.words import short_repr
from raypool.worker.running import PLAIN

MOST_CHANGES = 3
"""At most this many changes of a function are named in a warning."""

logger = logging.getLogger("raypool")


class RunPart(os.PathLike[str]):
    """A folder for some items of a run that another process has begun: `run_dir` for `parfor`.

    Args:
        run_dir: The folder of that run.
        name: The name of the part.
        run: The number of the run.
        items: The numbers of the items.
    """

    def __init__(self, run_dir: Path, name: str, run: int, items: Sequence[int]) -> None:
        self.folder = run_dir / PARTS / name
        self.run = run
        self.items = items
        make_folder(self.folder)
        make_folder(run_dir / "items")
        # only the journal has one writer; what items keep, whoever runs them next finds
        for shared in ("items", GPU_USAGE):
            with contextlib.suppress(FileExistsError):  # a job that was requeued finds it
                (self.folder / shared).symlink_to(f"../../{shared}")

    def __fspath__(self) -> str:
        return str(self.folder)


class DurableLoop(LoopWork):
    """The items of one `parfor` with a `run_dir`.

    The driver passes outcomes to the recorder, whose thread opens them, writes them into the
    journal, and only then counts them: a result that was reported once is never lost.
    """

    @classmethod
    def open(
        cls,
        fn: Callable[[Any], Any],
        function: Function,
        options: LoopOptions,
        run_dir: Any,
        rerun: str,
    ) -> DurableLoop:
        """Open a folder for a loop of `fn`; `rerun` says which of its outcomes count.

        Raises:
            JournalError: It is in use, was made for something else, or cannot be written.
        """
        source = source_of(fn)
        run = 1
        if isinstance(run_dir, RunPart):
            options, run = options._replace(order=run_dir.items), run_dir.run
        folder = Path(run_dir).expanduser().absolute()
        takes_any = rerun == "all"
        journal = Journal.open(folder, source.function, options.seed, source, run, takes_any)
        try:
            return cls(function, options, journal, rerun, source)
        except BaseException:  # Ctrl-C: the folder must not stay locked
            journal.close()
            raise

    def __init__(
        self,
        function: Function,
        options: LoopOptions,
        journal: Journal,
        rerun: str,
        source: FunctionSource,
    ) -> None:
        super().__init__(function, (), options)
        self.run_dir = journal.run_dir
        self.run = journal.run
        feed = self.feed = ItemLogFeed()
        self._journal = journal
        # an item's checkpoint is beside its other files, unless the user has chosen another place
        self.home = self.home or str(journal.run_dir)
        self._rerun = rerun
        self._source: FunctionSource | None = source  # None: a change of it was warned of
        self._compared: set[int] = set()  # runs with the same function
        self._runs: dict[int, int] = {}  # in which run a restored item ran
        self._files = ItemFiles(feed, self.keys, self._folder, journal.run)
        watched = WatchedRun(
            journal.run_dir,
            lambda: {"run": journal.run, "rerun": rerun, **self.find_live()},
            lambda request: self.act(request),
        )
        self._recorder = Recorder(
            journal, self._files, options.label, self._give_up, source, watched
        )
        self._stored: dict[str, Stored] = {}

    # --- calls of the user's thread ---------------------------------------------------------------

    def take(self, items: Sequence[Any]) -> int:
        """Take the items, write them down, and return how many have to run."""
        self.items = items
        self.keys += [self._name(item, index) for index, item in enumerate(items)]
        numbers: Sequence[int] = range(len(items)) if self._order is None else self._order
        try:
            # sorted: items with consecutive positions share a row
            self._journal.note_items(
                (self.keys[index], index, items[index]) for index in sorted(numbers)
            )
            self._stored = {} if self._rerun == "all" else self._journal.stored()
        except OSError as error:
            raise cannot_write(self._journal.run_dir, error) from error
        self.num_saved = len(self._stored)
        if self._stored and items and self._stored.keys().isdisjoint(self.keys):
            logger.warning(
                "None of the %s items of %s is among the %s with a result in %s, so all of them"
                " run. %s",
                f"{len(items):,}",
                self.label,
                f"{len(self._stored):,}",
                self.run_dir,
                what_differs(items, saved_items(self._journal.run_dir, set(self.keys))),
            )
        order = [index for index in numbers if not self._restore(index)]
        self._order = None if items and order == list(range(len(items))) else order
        if self._options.seed is not None and self.restored:
            self._check_places()
        self._recorder.start(keeps_values=not isinstance(self.segments, Tail))
        return len(order)

    def _check_places(self) -> None:
        """Warn if items had another number, and so another seed, when they ran."""
        num_moved = 0
        for run in set(self._runs.values()):
            places = self._journal.positions(run)
            indices = (index for index, its_run in self._runs.items() if its_run == run)
            num_moved += sum(places.get(self.keys[index], index) != index for index in indices)
        if num_moved:
            logger.warning(
                "%s saved results of %s were computed at other positions in the list. With seed=%s,"
                " the random numbers of an item depend on its position: items that run now may"
                " repeat those of saved ones. Add new items at the end of the list, or compute all"
                " again with rerun='all'.",
                f"{num_moved:,}",
                self.label,
                self._options.seed,
            )

    def append(self, item: Any) -> int:
        """Take one more item, without queueing it; return its number."""
        index = len(self.items)
        item = copied(item)  # a generator may yield the same object again, changed
        kept = copied(item)  # a function that runs in this process may change its item
        self.keys.append(self._name(item, index))
        cast("list[Any]", self.items).append(item)
        entry = (self.keys[index], index, kept)
        self._recorder.put(lambda: Step(entries=[entry]))
        self._restore(index)
        return index

    def _folder(self, key: str) -> Path:
        if not self._journal.run_dir.is_dir():  # else another one, with no journal, would stay
            raise FileNotFoundError(
                errno.ENOENT, "the folder was removed, or moved", str(self._journal.run_dir)
            )
        folder = self._journal.folder(key)
        make_folder(folder)
        return folder

    def _restore(self, index: int) -> bool:
        """Take the saved outcome of an item, if that counts."""
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
        if self._source is not None and stored.run not in self._compared:
            self._compared.add(stored.run)
            self._compare(stored.run, self._source)
        if error is not None:
            self.errors[index] = error
        with self.lock:
            self.num_settled += 1
        return True

    def _compare(self, run: int, source: FunctionSource) -> None:
        """Warn, once, if the function has changed since a run whose results count."""
        changes = self._journal.changes(run, source)
        if changes:
            self._source = None
            more = f" and {len(changes) - MOST_CHANGES:,} more" if changes[MOST_CHANGES:] else ""
            logger.warning(
                "Results saved in %s are reused, but %s %s%s. Use another run_dir%s to compute them"
                " again.",
                self.run_dir,
                source.function,
                "; it ".join(changes[:MOST_CHANGES]),
                more,
                ", or rerun='all'," if self.can_rerun else "",
            )

    def caught_up(self) -> Feed:
        """Return the feed of all items, also restored ones."""
        # no wait: what items have sent has arrived before they count
        if not self.restored:
            return self.feed
        feed = Feed()
        for index in self.restored.copy():
            for _, row in rows_of(self.folder(index) / METRICS, index, self._runs[index]):
                feed.add_row(row)
        feed.add_all_of(self.feed)
        return feed

    def earlier_reports(self, index: int) -> Iterator[tuple[int, Row]]:
        """Yield what an item reported in earlier calls, also without an outcome."""
        return rows_of(self.folder(index) / METRICS, index)

    def folder(self, index: int) -> Path:
        """Return the folder of an item, which exists only if it has content."""
        return self._journal.folder(self.keys[index])

    def diary(self, index: int) -> str:
        """Return what an item printed; that of a restored one is in its file."""
        if index not in self.restored:
            return super().diary(index)
        return text_of_file(self.folder(index) / DIARY)

    def calls(self) -> list[dict[str, Any]]:
        """Return what is known about each call with this folder."""
        with contextlib.suppress(JournalError):  # it is gone
            return calls_in(self._journal.run_dir)
        return []

    def write_reports(self) -> None:
        """Have them written."""
        self._recorder.put(Step)

    def keep_gpus(self, sample: GpuSample) -> None:
        """Have it written."""
        self._recorder.put(partial(self._write_gpus, sample))

    def close(self) -> None:
        """Write the rest, and release the folder."""
        self._recorder.close()
        self.trouble = self._recorder.failure
        # the results hold the loop for as long as they live, but not what ran it
        self.find_live, self.act = dict, lambda _: None

    # --- calls of the driver's thread -------------------------------------------------------------

    def settle(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> None:
        """Have the outcomes written."""
        self._recorder.put(partial(self._settled, piece, result, worker))
        self._tell_settled()  # the recorder's thread, which counts them, shows nothing

    def fail(self, piece: Slice, error: TaskError) -> None:
        """Have the error written for each of these items."""
        self._recorder.put(partial(self._failed, Lost(piece, error, self._let_go(piece))))
        self._tell_settled()

    def miss(self, piece: Slice, worker: WorkerInfo, why: str | BaseException) -> None:
        """Have it written that these items run again."""
        where = self._where(piece, worker)
        self._note_missed(piece, why, where)
        how = (
            Outcome("", piece.attempt, "lost", words=why, **where)
            if isinstance(why, str)
            else Outcome("", piece.attempt, "retried", error=why, **where)
        )
        # one for each item: in the recorder's thread
        self._recorder.put(lambda: Step(self._each(piece, how)))

    def end(self, state: TaskState, error: BaseException | None) -> None:
        """Wake the waiting thread, when all is written."""
        del self.function
        self._note_cancelled(state)  # here: by then it may have come back
        self._recorder.end(partial(self._ended, state, error))

    # --- calls of the recorder's thread -----------------------------------------------------------

    def _settled(self, piece: Slice, result: SliceResult, worker: WorkerInfo) -> Step:
        if result.catch_up is not None:
            result.catch_up()
        before = piece.start - result.start
        try:  # here: opening them may take long
            values = result.values_of(piece.start, piece.stop)
        except BaseException as caught:  # the user's code may raise SystemExit when it is unpickled
            lost = TaskError(f"A value cannot be opened: {type(caught).__name__}: {caught}")
            values = [Missing(lost)] * (piece.stop - piece.start)
        opened = replace(result, values=LocalValues(values), offset=-before, catch_up=None)
        errors = self._errors_of(piece, result, worker)
        starts = islice(accumulate(result.durations_s, initial=result.started_at), before, None)
        outcomes = []
        for position, (index, value, started_at) in enumerate(
            zip(self.numbers(piece), values, starts, strict=False), before
        ):
            if type(value) is Missing:
                errors.setdefault(index, value.error)
            error = errors.get(index)
            if result.is_interrupt(error):
                continue
            status, value = ("finished", value) if error is None else ("failed", None)
            key, duration_s = self.keys[index], result.durations_s[position]
            how = key, piece.attempt, status, value, error, None, started_at, duration_s
            outcomes.append(Outcome(*how, worker.index, worker.gpu, worker.host))
        count = partial(self._keep, Segment(piece, opened, worker), errors)
        return Step(outcomes, count, unfit=partial(self._unfit, piece, values, errors))

    def _unfit(
        self,
        piece: Slice,
        values: list[Any],
        errors: dict[int, BaseException],
        outcome: Outcome,
        error: Exception,
    ) -> Outcome:
        # its value cannot be written anywhere, so that the item has failed
        for position, index in enumerate(self.numbers(piece)):
            if self.keys[index] == outcome.key:
                values[position], errors[index] = None, error
        return outcome._replace(status="failed", value=None, error=error)

    def _failed(self, lost: Lost) -> Step:
        where = {} if lost.span is None else lost.span._asdict()
        how = Outcome("", lost.items.attempt, "failed", error=lost.error, **where)
        return Step(self._each(lost.items, how), partial(self._keep_failed, lost))

    def _each(self, piece: Slice, how: Outcome) -> list[Outcome]:
        """Return this outcome for each of these items."""
        return [how._replace(key=self.keys[index]) for index in self.numbers(piece)]

    def _ended(
        self, state: TaskState, error: BaseException | None, trouble: JournalError | None
    ) -> None:
        if trouble is not None:
            if self.first_error is not None:
                add_note(self.first_error, f"raypool: {trouble}")
            state, error = TaskState.FAILED, error or trouble
        self._wake(state, error)

    def _write_gpus(self, sample: GpuSample) -> Step:
        with contextlib.suppress(OSError):  # a full disk: no result depends on it
            append(self._journal.run_dir / GPU_USAGE, line_of(sample), is_lines=True)
        return Step()

    def _give_up(self, error: BaseException) -> None:
        mistake = InternalError(
            "The journal's writer has failed. This is a bug in raypool; report it with the cause.",
        )
        mistake.__cause__ = error
        self._wake(TaskState.FAILED, mistake)


def copied(item: Any) -> Any:
    """Return a copy of an item that can change; one that cannot be copied stays what it is."""
    if type(item) not in PLAIN:
        with contextlib.suppress(Exception):
            return copy.deepcopy(item)
    return item


def what_differs(items: Iterable[Any], saved: Iterable[Any]) -> str:
    """Return how the fields of items differ from those of saved ones, and what to do about it.

    Example:
        >>> what_differs([{"lr": 0.1, "width": 16}], [{"lr": 0.1, "width": 8}]).split(". ")[0]
        'Differences from the saved items: width has new values (such as 16; saved: 8)'
    """
    now, then = values_by_field(items), values_by_field(saved)
    changes = [f"{name} is new" for name in now if name not in then]
    changes += [f"{name} is missing" for name in then if name not in now]
    for name in now:
        if not now[name].keys() & then.get(name, now[name]).keys():  # as text: 1 is not 1.0
            new, old = (f"{next(iter(values[name])):.40}" for values in (now, then))
            changes.append(f"{name} has new values (such as {new}; saved: {old})")
    if not (now and then and changes):
        return (
            "If you expected saved results to be reused, check whether the class of the items, or"
            " the type of a value in them (1 or 1.0), has changed."
        )
    return (
        f"Differences from the saved items: {', '.join(changes)}. If this is a different sweep, use"
        " a different run_dir."
    )


def values_by_field(items: Iterable[Any]) -> dict[str, dict[str, None]]:
    """Return the values of each field of some items, as texts in their order."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        for name, value in (fields_of(item) or {}).items():
            found.setdefault(column_name(name), {})[short_repr(value)] = None
    return found


# --- recorder -------------------------------------------------------------------------------------
#
# A thread of its own writes outcomes; they count once they are written. Where that fails (a full
# disk, say), the loop continues: outcomes wait in memory, and writing is tried again.


SAID_S = 1.0
"""How often reports and output of running items are written [s]."""

WATCHED_S = 0.25
"""How often the actions are looked for that somebody asks for who watches the run [s]."""

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
"""Delays before a failed write is tried again [s]: the first, which doubles each time, and the
longest.
"""

PATIENCE_S = 60.0
"""How long a loop that has ended waits for room on the disk for its results [s]."""

BATCH = 4096
"""How much is written at once."""


@dataclass(slots=True, eq=False)
class Step:
    """A step of the recorder: it counts as soon as it is written.

    Attributes:
        outcomes: The outcomes of items.
        count: Called once they are written.
        entries: New items: key, number, item.
        unfit: Returns the outcome to write instead of one that can never be written.
        was_refused: Whether some of it waits for room on the disk.
    """

    outcomes: Sequence[Outcome] = ()
    count: Callable[[], None] = lambda: None
    entries: Sequence[tuple[str, int, Any]] = ()
    unfit: Callable[[Outcome, Exception], Outcome] | None = None
    was_refused: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all of it is written."""
        return not self.outcomes and not self.entries

    def keep(self, refused: Mapping[int, Exception]) -> bool:
        """Keep the refused outcomes, by identity; return whether some can be written at once."""
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
    """The end: `tell` is called when all is written, or, with the error, when it cannot be."""

    tell: Callable[[BaseException | None], None]


class Recorder:
    """The thread that writes the journal and the items' files.

    Args:
        journal: Closed when all is written.
        files: Of the items.
        label: The name of the loop.
        give_up: Called with the error if the thread itself fails.
        source: The function of the loop.
        watched: Serves those who watch the run.
    """

    def __init__(
        self,
        journal: Journal,
        files: ItemFiles,
        label: str,
        give_up: Callable[[BaseException], None],
        source: FunctionSource,
        watched: WatchedRun,
    ) -> None:
        self._watched: WatchedRun | None = watched
        self._pause_s = SAID_S
        self._journal = journal
        self._files = files
        self._label = label
        self._give_up = give_up
        self._inbox: queue.SimpleQueue[Callable[[], Step] | End] = queue.SimpleQueue()
        self._waiting: list[Step] = []
        self._trouble: OSError | None = None  # what the journal could not be written for
        self._is_total = False  # not even a little of it
        self._delay_s = 0.0
        self._try_at = 0.0
        self._tell: Callable[[BaseException | None], None] | None = None
        self._deadline = 0.0
        self._is_hurried = False
        self._keeps_values = True
        self.failure: JournalError | None = None  # what could not be written in the end
        self._thread = threading.Thread(target=self._work, name="raypool-journal", daemon=True)
        # no outcome waits for git
        self._provenance = threading.Thread(
            target=record,
            args=(journal.run_dir, journal.run, source),
            name="raypool-provenance",
            daemon=True,
        )

    def start(self, keeps_values: bool) -> None:
        """Begin; `keeps_values`: whether the loop keeps its values, or `reduce=` folds them."""
        self._keeps_values = keeps_values
        self._provenance.start()  # first: the other one waits for its end
        self._thread.start()

    def put(self, prepare: Callable[[], Step]) -> None:
        """Write what this returns; it is called in the thread."""
        self._inbox.put(prepare)

    def end(self, tell: Callable[[BaseException | None], None]) -> None:
        """Write the rest, then call `tell`."""
        self._inbox.put(End(tell))

    def close(self) -> None:
        """Write the rest, without further tries, and wait for the thread's end."""
        is_first = not self._is_hurried
        self._is_hurried = True
        self._inbox.put(End(lambda error: None))
        if self._thread.ident is None:  # it was never started, and cannot be joined
            self._journal.close()
        elif is_first:  # after one Ctrl-C, the user does not want to wait
            self._thread.join()

    # --- work of the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_over():
                self._take()
                self._write()
                try:
                    is_watched = self._watched is not None and self._watched.look()
                except Exception:  # raypool's own mistake, which must not end the loop
                    logger.exception("%s cannot be watched any more; it continues.", self._label)
                    self._watched, is_watched = None, False
                self._pause_s = WATCHED_S if is_watched else SAID_S
        except BaseException as error:  # raypool's own mistake: nobody may be left waiting for it
            self._give_up(error)
        finally:
            with contextlib.suppress(Exception):  # the journal is to be closed in any case
                if self._watched is not None:
                    self._watched.close()
            # it writes into the folder, which is this run's only while the journal is open
            self._provenance.join()
            with contextlib.suppress(Exception):  # all that counts was written before, or given up
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
        # the time is up: nobody is to wait any longer, and the values are in memory
        self.failure = self._failed(num_left)
        for step in self._waiting:
            step.count()  # so that they are in the error's results
        self._tell(self.failure)
        return True

    def _failed(self, num_left: int) -> JournalError:
        tried = "" if self._is_hurried else f", even within {PATIENCE_S:g} s after its end"
        values = " This error's .results has all values." if self._keeps_values else ""
        error = JournalError(
            f"{self._said(num_left)} of {self._label} could not be written to"
            f" {self._journal.run_dir}{tried}: {self._trouble}.{values} {remedy(self._trouble)},"
            " then repeat the call: it runs the missing items.",
            run_dir=str(self._journal.run_dir),
        )
        if self._is_hurried:
            logger.warning("%s", error)
        return error

    def _said(self, num_left: int) -> str:
        if not num_left:
            return f"Reports and output of {self._files.num_unwritten:,} items"
        return f"{num_left:,} outcome{'s' if num_left != 1 else ''}"

    def _take(self) -> None:
        now = time.monotonic()
        pause = self._pause_s
        if self._trouble is not None:
            pause = max(min(self._try_at - now, pause), 0.0)
        if self._tell is not None and (self._trouble is None or self._is_hurried):
            pause = 0.0
        with contextlib.suppress(queue.Empty):  # all is taken
            for _ in range(BATCH):
                wish = self._inbox.get(timeout=pause)
                pause = 0.0
                if not isinstance(wish, End):
                    self._waiting.append(wish())
                elif self._tell is None:
                    self._tell = wish.tell
                    self._deadline = time.monotonic() + PATIENCE_S
                    if self._trouble is not None and not self._is_hurried:
                        logger.warning(
                            "%s has ended; writing its remaining results is retried for %g s.",
                            self._label,
                            PATIENCE_S,
                        )

    def _write(self) -> None:
        # those that have just been refused wait longer than others
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
        """Write as much as possible, and leave the rest in the steps; return why that failed."""
        try:
            entries = [entry for step in steps for entry in step.entries]
            if entries:
                self._journal.note_items(entries)
        except OSError as error:
            for step in steps:
                step.was_refused = True
            return error
        for step in steps:
            step.entries = ()  # written, even if the outcomes are refused now
        refusal = None
        left = [step for step in steps if step.outcomes]
        while left:
            refused = {
                id(outcome): error
                for outcome, error in self._journal.write(
                    [o for step in left for o in step.outcomes]
                )
            }
            refusal = next(
                (error for error in refused.values() if isinstance(error, OSError)), refusal
            )
            left = [step for step in left if step.keep(refused)]
        return refusal

    def _note_trouble(self, trouble: OSError | None, is_total: bool) -> None:
        if trouble is None and self._trouble is not None and not self._waiting:
            logger.warning(
                "%s can be written again: all waiting results are saved.", self._journal.run_dir
            )
        elif trouble is not None and self._trouble is None:
            num_left = sum(len(step.outcomes) for step in self._waiting)
            logger.warning(
                "%s cannot be written: %s. %s of %s wait in memory, and writing is retried; the"
                " loop continues. %s.",
                self._journal.run_dir,
                trouble,
                self._said(num_left),
                self._label,
                remedy(trouble),
            )
        self._trouble = trouble
        self._is_total = is_total
        self._delay_s = (
            0.0 if trouble is None else min(max(2 * self._delay_s, FIRST_DELAY_S), MAX_DELAY_S)
        )
        self._try_at = time.monotonic() + self._delay_s


def remedy(trouble: OSError | None) -> str:
    """Return what the user can do so that the folder of a run can be written again."""
    if isinstance(trouble, FileNotFoundError):
        return "Put the folder back where it was"
    return "Free some space on that disk, or make the folder writable"


# --- files of items -------------------------------------------------------------------------------


class ItemLogFeed(LoopFeed):
    """A feed that also queues reports and output of items, for `ItemFiles`."""

    __slots__ = ("_new",)

    def __init__(self) -> None:
        super().__init__()
        self._new: deque[Row | bytes | tuple[int, int, str]] = deque()  # needs no lock

    def add_row(self, row: Row) -> None:
        """Take what was reported in this process."""
        super().add_row(row)
        self._new.append(row)

    def add_rows(self, rows: bytes, last: Last) -> None:
        """Take what was reported elsewhere."""
        super().add_rows(rows, last)
        self._new.append(rows)

    def add_text(self, text: str, num_missing: int = 0, item: int = 0, call_id: int = 0) -> None:
        """Take what an item printed."""
        super().add_text(text, num_missing, item, call_id)
        self._new.append((item, call_id, text))

    def hand_on(self) -> Iterator[Row | tuple[int, int, str]]:
        """Yield what is new: rows of metrics, and texts with their item and call."""
        while self._new:
            new = self._new.popleft()
            if isinstance(new, bytes):
                yield from pickle.loads(new)
            else:
                yield new


class Unwritten(NamedTuple):
    """Reports and output of an item that are not in its files yet."""

    lines: list[str]
    texts: list[str]


class ItemFiles:
    """The files with reports and output of each item of a run.

    Args:
        feed: Where reports and output arrive.
        keys: The items' names in the run; grows for a generator.
        folder: Makes and returns the folder of an item.
        run: The number of the run, written in every line.
    """

    def __init__(
        self, feed: ItemLogFeed, keys: Sequence[str], folder: Callable[[str], Path], run: int
    ) -> None:
        self._feed = feed
        self._keys = keys
        self._folder = folder
        self._run = run
        self._unwritten: defaultdict[int, Unwritten] = defaultdict(lambda: Unwritten([], []))

    @property
    def num_unwritten(self) -> int:
        """How many items have reports or output that could not be written."""
        return len(self._unwritten)

    def write(self) -> OSError | None:
        """Add new entries to the files; return why some must wait."""
        for new in self._feed.hand_on():
            if len(new) == 4:
                time, item, attempt, metrics = new
                line = {"time": time, "run": self._run, "attempt": attempt, "metrics": metrics}
                self._unwritten[item].lines.append(json.dumps(line) + "\n")
            else:
                item, _, text = new
                self._unwritten[item].texts.append(text)
        error = None
        for item, (lines, texts) in list(self._unwritten.items()):
            try:
                folder = self._folder(self._keys[item])
                if lines:
                    append(folder / METRICS, "".join(lines).encode(), is_lines=True)
                    lines.clear()  # now: the texts may fail, and nothing is written twice
                if texts:
                    text = "".join(texts)[-TEXT_BYTES:]
                    append(folder / DIARY, text.encode("utf-8", "backslashreplace"))
            except OSError as caught:
                error = caught
            else:
                del self._unwritten[item]
        return error


def rows_of(path: Path, item: int, run: int | None = None) -> Iterator[tuple[int, Row]]:
    """Yield what an item has reported in a run, or in all, as far as can be read, and the runs."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # it has reported nothing
        return
    for line in lines:
        found = report_in(line, item)
        if found is not None and run in (None, found[0]):
            yield found
