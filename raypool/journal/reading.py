"""Reads `Results` from a run's folder, without changing it: no pool, no Ray, no lock."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import pickle
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from raypool.channel.feed import Feed, text_of_file
from raypool.channel.feed import Row as Report
from raypool.channel.gpu_usage import samples_in
from raypool.errors import MAX_NAMES, JournalError, did_you_mean, explains_calls
from raypool.journal.files import DIARY, METRICS, REPORTS, Damaged, check_run, is_trusted
from raypool.journal.lock import TRAINING_LOCK, bare, is_in_use, is_running, noted_outcomes
from raypool.journal.opening import (
    SALVAGED,
    UNREADABLE,
    Contents,
    DamagedError,
    check_beginning,
    is_damage,
    log_of,
    lost_of,
    lost_with_log,
    read_all,
    rescued,
    what_is_left,
    with_found,
)
from raypool.journal.plain import decode
from raypool.journal.provenance import calls_of
from raypool.journal.rows import (
    COUNTS,
    DATABASE,
    PARTS,
    Stored,
    StoredAt,
    error_of,
    get_back,
    logger,
    row_of,
    words_of,
)
from raypool.journal.schema import TABLES, num_missing, numbers_of, read
from raypool.journal.schema import Row as Entry
from raypool.journal.trials import STUDY, trials_in
from raypool.results import Miss, Results, Row, collector_paused, run_name

if TYPE_CHECKING:
    import pandas as pd


Say: TypeAlias = "Callable[..., object]"


class ItemRecord(NamedTuple):
    """An item in a journal: its key, the place of its value, and its newest outcome."""

    key: str
    item: StoredAt | None
    stored: Stored | None

    @property
    def value(self) -> StoredAt | None:
        """The place of its value, if it has finished."""
        stored = self.stored
        is_there = stored is not None and stored.status == "finished"
        return StoredAt._make(stored[5:10]) if stored is not None and is_there else None


@explains_calls
def load_results(run_dir: str | os.PathLike[str]) -> Results[Any]:
    """Return the outcomes of the items of a durable run, which may still be running.

    Each item appears once: those of the newest call first, in its order, then those of older calls
    only. An item without an outcome, or whose value is lost, is "missing" in the table; a value of
    a class that cannot be imported here is None.
    The folder is not changed and may be read-only; Ray is not needed. Values other than plain data
    are pickles, which can run code when they are opened: only pickles in your own files are opened.

    Args:
        run_dir: The folder that was passed to `parfor`.

    Raises:
        JournalError: There is no run in it, or it cannot be read. From a damaged one the readable
            part is returned, and a warning is logged.

    Example:
        >>> import tempfile
        >>> from raypool import load_results, parpool
        >>> folder = tempfile.mkdtemp()
        >>> with parpool(2, profile="threads", quiet=True) as pool:
        ...     _ = pool.parfor(lambda x: x * x, [1, 2, 3], run_dir=folder)
        >>> load_results(folder)
        <Results of 3 items: 3 finished>
        >>> list(load_results(folder))
        [1, 4, 9]
    """
    folder = Path(os.path.abspath(Path(run_dir).expanduser()))  # noqa: PTH100 (links stay)
    with collector_paused():
        return _load(folder)


def _load(folder: Path) -> Results[Any]:
    contents = read_contents(folder)
    entries = entries_of(contents)
    items = opened(folder, [(entry.key, entry.item) for entry in entries])
    values = opened(folder, [(entry.key, entry.value) for entry in entries])
    unreadable = {index for index, value in enumerate(values) if isinstance(value, Damaged)}
    if unreadable:
        first = values[min(unreadable)]
        logger.warning(
            "%s of %s values cannot be read. %s",
            len(unreadable),
            len(values),
            first,
        )
    keys = [entry.key for entry in entries]
    # a trial may have run in several parts, each with its outcome
    runs = {} if (folder / STUDY).exists() else runs_of(contents)
    return results_of(
        folder,
        contents,
        entries,
        items,
        values,
        functools.cache(lambda: _feed_of(folder, keys, runs)),
    )


def results_of(
    folder: Path,
    contents: Contents,
    entries: Sequence[ItemRecord],
    items: Sequence[Any],
    values: Sequence[Any],
    get_feed: Callable[[], Feed],
) -> Results[Any]:
    """Return the results of a run, of which a `Damaged` item or value is missing."""
    keys = [entry.key for entry in entries]
    return Results(
        [None if isinstance(item, Damaged) else item for item in items],
        [None if isinstance(value, Damaged) else value for value in values],
        functools.partial(_rows, entries, values),
        {
            index: error_of(entry.stored, folder)
            for index, entry in enumerate(entries)
            if entry.stored is not None and entry.stored.status == "failed"
        },
        get_feed,
        lambda: _misses(contents, entries),
        lambda index: text_of_file(folder / "items" / keys[index] / DIARY),
        run_name(str(max(contents["runs"], default=(0, "run"))[1]).rpartition(".")[2], folder),
        functools.partial(samples_in, folder),
        functools.partial(calls_of, folder, contents["runs"]),
        lambda index: folder / "items" / keys[index],
        functools.partial(trials_in, folder, len(entries)),
    )


def _rows(entries: Sequence[ItemRecord], values: Sequence[Any]) -> list[Row]:
    return [
        (
            # not `isinstance`: an `Unopened` value is whole, only this process cannot open it
            row_of(entry.stored)
            if entry.stored is not None and type(value) is not Damaged  # else it runs again
            else Row("missing")
        )
        for entry, value in zip(entries, values, strict=True)
    ]


def calls_in(folder: Path) -> list[dict[str, Any]]:
    """Return what is known about each call with a run's folder: see `provenance`.

    Raises:
        JournalError: It cannot be read.
    """
    folder = folder.absolute()
    return calls_of(folder, read_contents(folder)["runs"])


def saved_items(folder: Path, others: Container[str]) -> list[Any]:
    """Return the readable items of a run whose keys are not among others."""
    try:
        entries = entries_of(read_contents(folder))
    except JournalError:  # they only make a warning clearer
        return []
    items = opened(folder, [(one.key, one.item) for one in entries if one.key not in others])
    return [item for item in items if not isinstance(item, Damaged)]


def _misses(contents: Contents, entries: Sequence[ItemRecord]) -> list[Miss]:
    """Return the attempts at the items that gave no final outcome."""
    numbers = {entry.key: index for index, entry in enumerate(entries)}
    counted = {entry.stored.n for entry in entries if entry.stored is not None}
    others = (Stored._make(row) for row in contents["attempts"] if row[0] not in counted)
    return [
        Miss(numbers[other.key], row_of(other), words_of(other))
        for other in others
        if other.key in numbers
    ]


def opened(folder: Path, places: Sequence[tuple[str, StoredAt | None]]) -> list[Any]:
    """Return the values in these places: None without a place, a `Damaged` if unreadable."""
    texts = [place.body for _, place in places if place is not None and place.body is not None]
    decoded = iter(decode(f"[{','.join(texts)}]"))  # all at once: much faster than one by one
    values: list[Any] = []
    for key, place in places:
        if place is None:
            values.append(None)
        elif place.body is not None:
            values.append(next(decoded))
        else:
            try:
                values.append(get_back(place, folder, key))
            except Damaged as error:
                values.append(error)
    return values


def entries_of(contents: Contents) -> list[ItemRecord]:
    """Return the items of the newest call in its order, then the others."""
    outcomes = map(Stored._make, sorted(contents["attempts"], key=operator.itemgetter(2, 0)))
    newest = {stored.key: stored for stored in outcomes if stored.status in COUNTS}
    items = {row[0]: row for row in contents["items"]}
    numbers = dict.fromkeys(positions_of(contents, newest_run(contents)).values())
    ordered = [
        items[number]
        for number in [*numbers, *(number for number in items if number not in numbers)]
        if number in items
    ]
    known = {row[1]: StoredAt._make(row[3:8]) for row in ordered}
    keys = list(dict.fromkeys([*known, *newest]))
    return list(map(ItemRecord, keys, map(known.get, keys), map(newest.get, keys)))


def newest_run(contents: Contents) -> int:
    """Return the number of the newest call that has recorded its items, 0 if none has."""
    return max((row[1] for row in contents["orders"]), default=0)


def positions_of(contents: Contents, run: int) -> dict[int, int]:
    """Return the items of a call: position -> number, in the order of the positions."""
    positions = {
        position: number
        for _, own, first, text in contents["orders"]
        if own == run
        for position, number in enumerate(numbers_of(text), first)
    }
    return dict(sorted(positions.items()))


# --- runs in a folder -----------------------------------------------------------------------------


class RunSummary(NamedTuple):
    """What `raypool ls` shows of a run; items of a training are its reports, `last` its metrics.

    `started_at` is when its newest call began (Unix time [s]), `num_bytes` the size of all its
    files. `search`: how the trials of a search ended.
    """

    folder: Path
    function: str
    items: int
    finished: int
    failed: int
    is_running: bool
    started_at: float
    num_bytes: int
    last: dict[str, Any] | None = None
    search: str | None = None


def runs_below(folder: Path) -> Iterator[Path]:
    """Find the folders of runs: this one, or those below it that are in no other run."""
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # two links, or one to a folder above
            folders.clear()
            continue
        seen.add(real)
        if not {DATABASE, SALVAGED, REPORTS}.isdisjoint(files):
            folders.clear()  # the folders of its items
            yield Path(place)
        folders.sort()


def summary_of(folder: Path) -> RunSummary:
    """Summarize the run in a folder.

    Raises:
        JournalError: It cannot be read.
    """
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a temporary file of a running loop
                size += Path(place, name).lstat().st_size
    if is_training(folder):
        name, rows = reports_in(folder)
        now = is_running(folder, TRAINING_LOCK)
        return RunSummary(folder, name, len(rows), len(rows), 0, now, rows[0][0], size, rows[-1][3])
    contents = read_contents(folder)
    entries = entries_of(contents)
    statuses = Counter(entry.stored.status for entry in entries if entry.stored is not None)
    newest: Any = max(contents["runs"], default=(0, "", None, None, 0, 0.0))
    trials = trials_in(folder, len(entries))
    return RunSummary(
        folder,
        str(newest[1]),
        len(entries),
        statuses["finished"],
        statuses["failed"],
        any(map(is_running, (folder, *parts_of(folder)))),
        float(newest[5]),
        size,
        search=None if trials is None else trials.summary,
    )


def is_training(folder: Path) -> bool:
    """Whether the run in a folder is a training, by `train` or `fit`."""
    with contextlib.suppress(OSError):  # a folder that may not be looked into
        return (folder / REPORTS).exists() and not (folder / DATABASE).exists()
    return False


def reports_in(folder: Path) -> tuple[str, list[Report]]:
    """Return the name of a training and the reports of its rank 0, up to the last checkpoint.

    Raises:
        JournalError: None can be read.
    """
    name, rows = "", []
    with contextlib.suppress(OSError):
        for line in (folder / REPORTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # cut off by a crash
                entry = json.loads(line)
                name, metrics = str(entry["name"]), dict(entry["metrics"])
                rows.append((float(entry["time"]), 0, int(entry["attempt"]), metrics))
    if not rows:
        raise JournalError(f"{folder / REPORTS} cannot be read.", run_dir=str(folder))
    return name, rows


def reports_of(folder: Path) -> pd.DataFrame:
    """Return the reports of a training as a table: their numbers, then as in `run.metrics`."""
    feed = Feed()
    for row in reports_in(folder)[1]:
        feed.add_row(row)
    reports = feed.metrics(None).rename(columns={"report": "reported_report"})
    return reports.reset_index(names="report")


# --- reading --------------------------------------------------------------------------------------


class NotBegunError(JournalError):
    """A journal has no tables yet. If its process was killed as it started, it never gets them."""


def read_contents(folder: Path, say: Say = logger.warning) -> Contents:
    """Return all rows of the journal in a folder, or the readable ones if it is damaged.

    Args:
        folder: The folder of the run.
        say: Called with a text on what is missing, in the manner of `logger.warning`.

    Raises:
        JournalError: There is no journal, or it cannot be read.
    """
    try:
        rows = rows_of_parts(folder)  # first: they may be moved into the journal meanwhile
        # before it is read: a running writer notes outcomes after it has written them
        noted = noted_outcomes(folder)
        path = folder / (DATABASE if not (folder / SALVAGED).exists() else SALVAGED)
        if not path.exists() or not (path.stat().st_size or log_of(path)):
            raise _no_run(folder, path, noted)
        contents = _read(path, say)
        if lost := lost_with_log(folder, noted, contents):
            say("%s", lost)
        contents["attempts"] += new_rows(rows, contents)
        return contents
    except (OSError, *UNREADABLE) as error:
        reason = getattr(error, "strerror", None) or error
        raise JournalError(
            f"The journal in {folder} cannot be read ({reason}).", run_dir=str(folder)
        ) from error


def _no_run(folder: Path, path: Path, noted: int) -> JournalError:
    """Return the error of a folder without a journal."""
    if noted or (folder / "items").exists():
        return JournalError(
            f"0 results could be read: {path} is missing or empty, but there was a run in this"
            " folder. If it is a copy, copy the journal too; otherwise call parfor with this"
            " run_dir again, which runs all items.",
            run_dir=str(folder),
        )
    if is_training(folder):
        return JournalError(
            f"{folder} is a training, which has no items. `raypool show` prints its reports.",
            run_dir=str(folder),
        )
    if folder.exists():
        why, runs = f"it has no {DATABASE}, or an empty one.", _runs_in(folder)
        hint = f" The runs below it are: {', '.join(runs)}." if 0 < len(runs) <= MAX_NAMES else ""
    else:
        why, hint = "it does not exist.", did_you_mean(folder.name, _runs_in(folder.parent))
    return JournalError(f"There is no run in {folder}: {why}{hint}", run_dir=str(folder))


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs that are folders of this one."""
    try:
        return sorted(path.name for path in folder.iterdir() if (path / DATABASE).exists())
    except OSError:  # the names are only a hint
        return []


def parts_of(folder: Path) -> list[Path]:
    """Return the folders of the parts of a run."""
    return sorted(path.parent for path in (folder / PARTS).glob(f"*/{DATABASE}"))


def rows_of_parts(folder: Path) -> list[Entry]:
    """Return the rows of `attempts` in the parts of a run, without their numbers.

    Raises:
        JournalError: A part cannot be read, or others may have written to it.
    """
    rows = []
    for part in parts_of(folder):
        try:
            if is_trusted(folder):  # so pickles will be opened
                check_run(part)
        except Damaged as error:
            raise JournalError(f"{part} is not read: {error}.", run_dir=str(folder)) from error
        if (part / DATABASE).stat().st_size or log_of(part / DATABASE):  # else it has just begun
            with contextlib.suppress(NotBegunError):
                rows += [row[1:] for row in read_contents(part)["attempts"]]
    return rows


def new_rows(rows: Sequence[Entry], contents: Contents) -> list[Entry]:
    """Return rows that a journal does not have, with numbers that follow its own."""
    own = contents["attempts"]
    known = {row[1:] for row in own}
    first = own[-1][0] + 1 if own else 1
    return [(n, *row) for n, row in enumerate((row for row in rows if row not in known), first)]


def _read(path: Path, say: Say) -> Contents:
    failure: Exception | None = None
    is_still = False  # whether nobody had it when it was last read
    # a run that just begins or ends moves files under the reader's hands
    for pause_s in (0.05, 0.2, 1.0, None):
        with bare(path) as is_bare:
            try:
                if is_bare:
                    return _read_once(path)
                # this process writes it: SQLite knows all rows, and opening the file in any
                # other way would drop its locks (see `lock`)
                with _open_beside(path) as connection:
                    return read_all(connection)
            except UNREADABLE as error:
                failure = error
            if not is_damage(failure) or not is_bare:
                raise failure
            if pause_s is None or is_still:
                return _left(path, say)
            is_still = not is_in_use(path.parent)
        time.sleep(0 if is_still else pause_s)
    raise AssertionError


def _left(path: Path, say: Say) -> Contents:
    """Return the readable rows of a damaged journal, and say so."""
    data, rest = path.read_bytes(), log_of(path)
    found = rescued(path, data, rest)
    if not any(found.values()) and data[:16] == b"SQLite format 3\0" and not any(data[68:72]):
        if lost := lost_with_log(path.parent, noted_outcomes(path.parent), found):
            raise JournalError(f"0 results could be read: {lost}", run_dir=str(path.parent))
        raise NotBegunError(
            f"There is no run in {path.parent} yet: its journal is empty.", run_dir=str(path.parent)
        )
    # the folder of a part is removed
    keeps = "" if path.parent.parent.name == PARTS else "keeps the damaged file and "
    said = what_is_left(path, data, found)
    say(f"%s Call parfor with this run_dir again: it {keeps}runs the missing items.", said)
    return found


def _read_once(path: Path) -> Contents:
    """Return all rows.

    Raises:
        DamagedError: Some are missing; or another error of `UNREADABLE`.
    """
    # first: a checkpoint may move its rows into the tables before these are read
    rest = log_of(path)
    check_beginning(path, rest)
    failure: Exception | None = None
    # Run by root, SQLite changes the owner of the log to that of the database: afterwards a
    # stranger's log would look like ours.
    changes_owner = os.geteuid() == 0 and not is_trusted(path.parent)
    for open_one in (_open_copy,) if changes_owner else (_open_still, _open_beside, _open_copy):
        try:
            with open_one(path) as connection:
                contents = read_all(connection)
                if rest:
                    contents = with_found(contents, rest)
        except UNREADABLE as error:
            failure = error
            continue
        # as in `opening`: a part of a run begins with the number of that run
        if any(count for table, count in lost_of(contents).items() if table != "runs"):
            raise DamagedError("rows are missing")
        return contents
    assert failure is not None
    raise failure


@contextlib.contextmanager
def _connected(uri: str) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(
        sqlite3.connect(uri, timeout=10.0, isolation_level=None, uri=True)
    ) as connection:
        connection.execute("BEGIN")  # all tables as they are at one moment
        yield connection


@contextlib.contextmanager
def _open_still(path: Path) -> Iterator[sqlite3.Connection]:
    """Read a journal that no process writes, without a file beside it."""
    if log_of(path):
        raise sqlite3.OperationalError("somebody writes it")
    with _connected(f"{path.as_uri()}?immutable=1") as connection:
        yield connection
    if log_of(path):
        raise sqlite3.OperationalError("somebody has begun to write it")


@contextlib.contextmanager
def _open_beside(path: Path) -> Iterator[sqlite3.Connection]:
    """Read a journal that another process may be writing."""
    with _connected(f"{path.as_uri()}?mode=ro") as connection:
        yield connection


@contextlib.contextmanager
def _open_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Read a journal that was left with a log, where nothing can be written."""
    with tempfile.TemporaryDirectory(prefix="raypool-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        (copy.with_name(f"{path.name}-wal")).write_bytes(log_of(path))
        with _connected(copy.as_uri()) as connection:
            yield connection


class JournalTail:
    """A journal that is read again and again; after the first time, only its new rows.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / DATABASE
        self._seen: object = None
        self.contents: Contents = {table: [] for table in TABLES}
        self.problem: str | None = None
        """What was wrong with the journal when all of it was read."""

    def read(self) -> bool:
        """Read new rows; return whether there may be any.

        Raises:
            JournalError: There is no journal, or it cannot be read.
        """
        files = [
            folder / name
            for folder in (self._folder, *parts_of(self._folder))
            for name in (DATABASE, f"{DATABASE}-wal", SALVAGED)
        ]
        # first: what is written meanwhile is read the next time
        seen = [version_of(file) for file in files]
        if seen == self._seen:
            return False
        # in parts and damaged files, rows have no numbers to go on from
        is_plain = not any(seen[2:]) and seen[0] is not None and self.problem is None
        if not (is_plain and self._seen is not None and self._add_new_rows()):
            problems: list[str] = []
            self.contents = read_contents(
                self._folder, lambda text, *gaps: problems.append(text % gaps)
            )
            self.problem = " ".join(problems) or None
        self._seen = seen
        return True

    def _add_new_rows(self) -> bool:
        """Add the rows behind the known ones; return False if some are missing or damaged.

        Also if the last known row has changed: the folder has a new run, or rows of parts have
        other numbers since a run took them over.
        """
        contents = self.contents
        is_still = not log_of(self._path)
        try:
            with (
                bare(self._path) as is_bare,
                (_open_still if is_still and is_bare else _open_beside)(self._path) as connection,
            ):
                # with the last known one, to see whether it is still the same
                new = {
                    table: read(connection, table, rows[-1][0] - 1 if rows else 0)
                    for table, rows in contents.items()
                }
        except (OSError, *UNREADABLE):  # the caller then reads all, which tells what is wrong
            return False
        if any(new[table][:1] != rows[-1:] for table, rows in contents.items() if rows):
            return False
        self.contents = {table: [*rows[:-1], *new[table]] for table, rows in contents.items()}
        return not any(map(num_missing, self.contents.values()))


def version_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes with each change of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# --- reports of items -----------------------------------------------------------------------------


def runs_of(contents: Contents) -> dict[str, range]:
    """Return the runs that led to the newest outcome of each item, by its key.

    That is the run with the outcome, and killed ones before it, from which the item may go on.
    """
    runs: dict[str, range] = {}
    for stored in sorted(map(Stored._make, contents["attempts"]), key=operator.attrgetter("run")):
        if stored.status in COUNTS:
            before = runs.get(stored.key, range(1))
            if stored.run not in before:
                runs[stored.key] = range(before.stop, stored.run + 1)
    return runs


def _feed_of(folder: Path, keys: Sequence[str], runs: Mapping[str, range]) -> Feed:
    """Return what the items reported in these runs; those without any, in all runs."""
    feed = Feed()
    lost: dict[Path, int] = {}
    try:
        there = {path.name for path in (folder / "items").iterdir()}
    except OSError:  # no item has kept anything
        return feed
    is_still_written = any(map(is_in_use, (folder, *parts_of(folder))))
    for index, key in enumerate(keys):
        if key in there:
            path = folder / "items" / key / METRICS
            reports, num_lost = _reports_of(path, index, runs.get(key), is_still_written)
            if reports:
                feed.add_rows(pickle.dumps(reports, protocol=5), {})
            if num_lost:
                lost[path] = num_lost
    if lost:
        count, first = sum(lost.values()), next(iter(lost))
        logger.warning(
            "Lines with reports of items are damaged and were left out: %s, the first in %s.",
            count,
            first,
        )
    return feed


def _reports_of(
    path: Path, index: int, runs: range | None, is_still_written: bool
) -> tuple[list[Report], int]:
    """Return the reports of an item, with this index, and the count of unreadable lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:  # it has reported nothing
        return [], 0
    if is_still_written:
        lines.pop()  # the end of the last line may follow
    lines = [line for line in lines if line]
    found = [report for line in lines if (report := report_in(line, index)) is not None]
    reports = [report for run, report in found if runs is None or run in runs]
    return reports, len(lines) - len(found)


def report_in(line: str | bytes, index: int) -> tuple[int, Report] | None:
    """Return the run and the report in a line of an item's file, or None if it is damaged."""
    try:
        said = json.loads(line)
        report = float(said["time"]), index, int(said["attempt"]), dict(said["metrics"])
        return int(said["run"]), report
    except (ValueError, KeyError, TypeError):
        return None
