"""`Journal`, which writes outcomes; and checks that a call fits its folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from raypool.errors import JournalError, SerializationError
from raypool.journal.files import Damaged, check_run, make_folder
from raypool.journal.fingerprints import changes
from raypool.journal.keys import FunctionSource
from raypool.journal.lock import Identity, RunLock, closed, identity, opening
from raypool.journal.opening import Contents, cannot_write, connect, lost_with_log, open_database
from raypool.journal.reading import new_rows, parts_of, positions_of, rows_of_parts
from raypool.journal.rows import (
    COUNTS,
    DATABASE,
    NOWHERE,
    PARTS,
    Outcome,
    Stored,
    StoredAt,
    error_of,
    get_back,
    logger,
    put_away,
    to_row,
)
from raypool.journal.schema import MAX_TEXT_BYTES, SCHEMA, Row, insert, order_rows
from raypool.worker.folders import write_file

__all__ = ["Damaged", "Journal", "Outcome", "Stored"]

NO_LOG = (-1, -1)
"""The identity of a write-ahead log that has to be opened again."""


class Journal:
    """The outcomes of the items of a run, in its folder. Any thread may use it.

    Outcomes that `write` has accepted are on disk, and stay there. Make one by `open`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with Journal.open(folder, "sweeps.train", seed=None) as journal:
        ...     journal.note_items([("3f9c", 0, {"lr": 0.1})])
        ...     journal.write([Outcome("3f9c", 1, "finished", value=0.9)])
        []
        >>> with Journal.open(folder, "sweeps.train", seed=None) as journal:
        ...     journal.run, journal.value(journal.stored()["3f9c"])
        (2, 0.9)
    """

    def __init__(
        self,
        run_dir: Path,
        lock: RunLock,
        connection: sqlite3.Connection,
        contents: Contents,
        run: int,
    ) -> None:
        self.run_dir = run_dir
        self._lock = lock
        self._connection = connection
        self._database = run_dir / DATABASE
        self._opened = identity(self._database)
        self._log: Identity | None = None
        self._mutex = threading.Lock()  # readers may ask while the recorder writes
        self._next = {table: rows[-1][0] + 1 if rows else 1 for table, rows in contents.items()}
        self._numbers: dict[str, int] = {row[1]: row[0] for row in contents["items"]}
        self._orders = contents["orders"]
        self._sources = {row[0]: row[3] for row in contents["runs"]}
        self._newest: dict[str, Stored] = {}
        for row in sorted(contents["attempts"], key=lambda row: (row[2], row[0])):
            self._take(row)
        # of a damaged journal the row of the last run may be lost
        runs = [row[0] for row in contents["runs"]]
        runs += [row[2] for row in contents["attempts"]] + [row[1] for row in contents["orders"]]
        self.run = max([run - 1, *runs]) + 1

    @classmethod
    def open(
        cls,
        run_dir: str | os.PathLike[str],
        function: str,
        seed: int | None,
        source: FunctionSource | None = None,
        run: int = 1,
        takes_any: bool = False,
    ) -> Self:
        """Lock the folder, make or open its journal, and begin the next run in it.

        The outcomes in parts of the run are taken over, and the parts removed.

        Args:
            run_dir: The folder; it is made if it does not exist.
            function: The key of the function that runs (`keys.function_key`).
            seed: The seed of the run.
            source: Where the function is defined, for replays.
            run: The least number of the run: that of the run that this journal is a part of.
            takes_any: Whether a partial may pass other arguments than in the last run.

        Raises:
            JournalError: It or a part of it is in use, it is for another function or seed, or it is
                not writable by you alone.
        """
        folder = Path(os.path.abspath(run_dir))  # noqa: PTH100 (links stay what they are)
        try:
            make_folder(folder)
        except OSError as error:
            raise cannot_write(folder, error) from error
        try:
            check_run(folder)
        except Damaged as error:
            raise JournalError(f"The run is not opened: {error}.", run_dir=str(folder)) from error
        lock = RunLock(folder)
        try:
            with opening(folder / DATABASE):
                connection, contents = open_database(folder)
            known = identity(folder / DATABASE)
            try:
                if lost := lost_with_log(folder, lock.outcomes_before, contents):
                    logger.warning("%s", lost)
                check_same(folder, contents, function, seed)
                if not takes_any:
                    check_given(folder, contents, source)
                take_parts(folder, connection, contents)
                journal = cls(folder, lock, connection, contents, run)
                journal._begin(function, seed, source)
            except BaseException:
                connection.close()
                closed(known)
                raise
        except BaseException:
            lock.release()
            raise
        return journal

    def _begin(self, function: str, seed: int | None, source: FunctionSource | None) -> None:
        import raypool

        try:
            if source is not None and source.pickled is not None:
                path = self.run_dir / source.pickle_name
                if not path.exists():
                    write_file(path, source.pickled)
            where = None if source is None else source.to_text()
            process = (time.time(), socket.gethostname(), os.getpid(), raypool.__version__)
            row = (function[:MAX_TEXT_BYTES], json.dumps(seed), where, SCHEMA, *process)
            with self._mutex:
                self._insert({"runs": [(self.run, *row)]})
                self._lock.note_outcomes(self._next["attempts"] - 1)
                self._log = identity(self._log_path)  # a new log has an identity only now
        except OSError as error:
            raise cannot_write(self.run_dir, error) from error

    def note_items(self, entries: Iterable[tuple[str, int, Any]]) -> None:
        """Note which items this run has (key, position, item), and store those that are new.

        Raises:
            OSError: It cannot be written, and nothing is noted; it may be tried again.
        """
        with self._mutex:
            self._look_after_log()
            number = self._next["items"]
            new: dict[str, int] = {}
            items: list[Row] = []
            positions: list[tuple[int, int]] = []
            for key, position, item in entries:
                known = self._numbers.get(key) or new.get(key)
                if known is None:
                    known = new[key] = number + len(items)
                    try:
                        place = put_away(item, "item", self.folder(key))
                    except SerializationError as error:
                        logger.warning(
                            "Item %s cannot be saved, but its result can: %s", key, error
                        )
                        place = NOWHERE
                    items.append((known, key, self.run, *place))
                positions.append((position, known))
            first = self._next["orders"]
            orders = [(n, *row) for n, row in enumerate(order_rows(self.run, positions), first)]
            self._commit({"items": items, "orders": orders})
            self._numbers.update(new)

    def stored(self) -> dict[str, Stored]:
        """Return the newest outcome of each item that has one, by key."""
        with self._mutex:
            return dict(self._newest)

    def positions(self, run: int) -> dict[str, int]:
        """Return the position of each item in an earlier run, by key."""
        keys = {number: key for key, number in self._numbers.items()}
        return {
            keys[number]: position
            for position, number in positions_of({"orders": self._orders}, run).items()
            if number in keys  # its row may be lost
        }

    def changes(self, run: int, source: FunctionSource) -> list[str]:
        """Return how a function differs from that of an earlier run, each for a sentence."""
        text = self._sources.get(run)  # its row may be lost
        return changes(FunctionSource.from_text(text), source) if text else []

    def value(self, stored: Stored) -> Any:
        """Return the value of an item.

        Raises:
            Damaged: The value is gone or has changed: the item has to run again.
        """
        return get_back(StoredAt(*stored[5:10]), self.run_dir, stored.key)

    def error(self, stored: Stored) -> BaseException:
        """Return the exception of an item: itself if possible, else a `TaskError` with its text."""
        return error_of(stored, self.run_dir)

    def write(self, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Exception]]:
        """Write outcomes to disk; return those that failed, each with the reason.

        The reason is an `OSError` if the disk is full (a later try may succeed), or a
        `SerializationError` if the value cannot be pickled.
        """
        with self._mutex:
            ready: list[tuple[Outcome, tuple[Any, ...]]] = []
            failed: list[tuple[Outcome, Exception]] = []
            try:
                self._look_after_log()
            except OSError as error:  # there is no file to write to, for any of them
                return [(outcome, error) for outcome in outcomes]
            for outcome in outcomes:
                try:
                    ready.append((outcome, to_row(outcome, self.run, self.run_dir)))
                except (OSError, SerializationError) as error:
                    failed.append((outcome, error))
            try:
                self._write_rows([row for _, row in ready])
            except OSError as error:
                # one transaction writes all or nothing; smaller outcomes may still fit
                if len(ready) == 1:
                    failed.append((ready[0][0], error))
                else:
                    failed += self._write_singly(ready)
        return failed

    def _write_singly(
        self, ready: list[tuple[Outcome, tuple[Any, ...]]]
    ) -> list[tuple[Outcome, Exception]]:
        """Write the outcomes that still fit on the disk; stop if the first two fail."""
        failed: list[tuple[Outcome, Exception]] = []
        for position, (outcome, row) in enumerate(ready):
            if len(failed) >= 2 and len(failed) == position:
                failed.append((outcome, failed[0][1]))
                continue
            try:
                self._write_rows([row])
            except OSError as error:
                failed.append((outcome, error))
        return failed

    def _write_rows(self, rows: list[tuple[Any, ...]]) -> None:
        first = self._next["attempts"]
        numbered = [(n, *row) for n, row in enumerate(rows, first)]
        self._commit({"attempts": numbered})
        self._lock.note_outcomes(self._next["attempts"] - 1)
        for row in numbered:
            self._take(row)

    def _take(self, row: Row) -> None:
        if row[4] in COUNTS:
            self._newest[row[1]] = Stored._make(row)

    def _commit(self, rows: dict[str, list[Row]]) -> None:
        """Add rows in one transaction, to the files that other processes see.

        Raises:
            OSError: They cannot be written; none of them counts.
        """
        if not any(rows.values()):
            return
        self._insert(rows)
        if identity(self._log_path) != self._log:
            # the rows may have gone into the removed file
            self._renew()
            self._insert_missing(rows)

    def _insert_missing(self, rows: dict[str, list[Row]]) -> None:
        try:
            missing: dict[str, list[Row]] = {}
            for table, entries in rows.items():
                command = f"SELECT 1 FROM {table} WHERE n = ?"
                missing[table] = [
                    row
                    for row in entries
                    if self._connection.execute(command, row[:1]).fetchone() is None
                ]
        except sqlite3.Error as error:
            raise _as_os_error(error, self.run_dir) from error
        self._insert(missing)

    def _insert(self, rows: dict[str, list[Row]]) -> None:
        """Add rows in one transaction.

        Raises:
            OSError: They cannot be written; none of them was added.
        """
        connection = self._connection
        try:
            if not connection.in_transaction:  # the transaction that makes the tables may be open
                connection.execute("BEGIN IMMEDIATE")
            for table, entries in rows.items():
                insert(connection, table, entries)
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):  # the first error says what is wrong
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _as_os_error(error, self.run_dir) from error
            raise
        for table, entries in rows.items():
            if entries:
                self._next[table] = max(self._next[table], entries[-1][0] + 1)

    @property
    def _log_path(self) -> Path:
        return self.run_dir / f"{DATABASE}-wal"

    def _look_after_log(self) -> None:
        """Check that rows go into the files that other processes see.

        Raises:
            OSError: The journal is gone, or cannot be opened again.
        """
        if identity(self._database) != self._opened:
            raise OSError(
                errno.ENOENT,
                "the journal was removed, or replaced, while it was in use",
                str(self._database),
            )
        if identity(self._log_path) != self._log:
            self._renew()

    def _renew(self) -> None:
        """Open the database again.

        Raises:
            OSError: It cannot be opened.
        """
        # another program took this process for gone, and has merged and removed the log
        logger.warning(
            "Another program removed the log of %s, which is in use; the journal is reopened.",
            self._database,
        )
        self._log = NO_LOG  # until it is open: after an error here, the next write tries again
        try:
            self._connection.close()
            self._connection = connect(self._database)
            for table in self._next:
                (last,) = self._connection.execute(f"SELECT max(n) FROM {table}").fetchone()
                self._next[table] = max(self._next[table], (last or 0) + 1)
        except sqlite3.Error as error:
            raise _as_os_error(error, self.run_dir) from error
        self._log = identity(self._log_path)

    def folder(self, key: str) -> Path:
        """Return the folder of an item, which exists only if it has content."""
        return self.run_dir / "items" / key

    def close(self) -> None:
        """Close the files, and release the lock."""
        with self._mutex:
            with contextlib.suppress(sqlite3.Error):  # all rows are in the log, if not in the file
                self._connection.close()
            closed(self._opened)
            self._lock.release()  # last: from here on another process may open it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _as_os_error(error: sqlite3.Error, folder: Path) -> OSError:
    """Return SQLite's error of the disk as an `OSError`."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    numbers = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
    return OSError(numbers.get(code, errno.EIO), str(error), str(folder))


def take_parts(folder: Path, connection: sqlite3.Connection, contents: Contents) -> None:
    """Move the outcomes in the parts of a run into its journal, and remove the parts.

    Raises:
        JournalError: A part is in use, or the journal cannot be written.
    """
    if not (folder / PARTS).exists():
        return
    with contextlib.ExitStack() as locks:
        # nobody may write a part while its rows move
        for part in parts_of(folder):
            locks.callback(RunLock(part).release)
        rows = new_rows(rows_of_parts(folder), contents)
        try:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            insert(connection, "attempts", rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise cannot_write(folder, error) from error
        contents["attempts"] += rows
        # only now; parts that stay after a crash give no row twice: see `new_rows`
        shutil.rmtree(folder / PARTS, ignore_errors=True)


# --- checks that a call fits its folder -----------------------------------------------------------


def check_same(folder: Path, contents: Contents, function: str, seed: int | None) -> None:
    """Check that a folder was made for this function and seed.

    Raises:
        JournalError: It was not.
    """
    if not contents["runs"]:
        return
    _, known_function, known_seed, *_ = contents["runs"][-1]
    known_seed = json.loads(known_seed)
    if known_function != function[:MAX_TEXT_BYTES]:
        raise JournalError(
            f"{folder} belongs to {known_function}; this call runs {function}. Use a separate"
            " folder for each function.",
            run_dir=str(folder),
        )
    if known_seed != seed:
        raise JournalError(
            f"{folder} was made with seed={known_seed}; this call has seed={seed}, which gives"
            f" other results. Use seed={known_seed}, or another folder.",
            run_dir=str(folder),
        )


def check_given(folder: Path, contents: Contents, source: FunctionSource | None) -> None:
    """Compare a partial's arguments with those of the last run.

    Raises:
        JournalError: They are others, so that results would differ.
    """
    texts = [row[3] for row in contents["runs"] if row[3]]
    if not texts or source is None:
        return
    known = FunctionSource.from_text(texts[-1])
    if source.given and known.given not in (None, source.given):
        raise JournalError(
            f"{folder} was made by {source.function} with {known.words or 'no arguments'} from"
            f" functools.partial; this call passes {source.words or 'none'}. Use another folder;"
            " load_results still reads this one.",
            run_dir=str(folder),
        )
