"""Opens a journal for writing: makes it, migrates it to the newest version, and repairs it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from raypool.errors import JournalError
from raypool.journal.rows import COUNTS, DATABASE
from raypool.journal.salvage import carve
from raypool.journal.schema import (
    APPLICATION_ID,
    PAGE_BYTES,
    SCHEMA,
    TABLES,
    Row,
    WrongRowError,
    checksum,
    insert,
    migrate,
    num_missing,
    numbers_of,
    order_rows,
    read,
)
from raypool.worker.folders import sync_folder

logger = logging.getLogger("raypool")

Contents: TypeAlias = "dict[str, list[Row]]"
"""The rows of each table, in the order of their numbers."""

SALVAGED = "journal.salvaged.sqlite"
"""The name of a complete journal that is about to replace a damaged one."""

SURROUNDINGS = frozenset(
    [
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
    ]
)
"""Errors of SQLite that do not mean a damaged file."""


FIRST_BYTES = b"\2\5\n\rS"
"""What a page begins with: its kind, or "SQLite format 3"."""


class DamagedError(Exception):
    """A journal is not what was written."""


UNREADABLE = (sqlite3.Error, WrongRowError, DamagedError, UnicodeDecodeError)
"""Errors of reading a damaged journal; `is_damage` tells them from a full disk, say."""


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file is damaged, rather than that the disk is full, say."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in SURROUNDINGS or code == sqlite3.SQLITE_IOERR_SHORT_READ


def open_database(folder: Path) -> tuple[sqlite3.Connection, Contents]:
    """Return a connection to the journal in a locked folder, and its content.

    Raises:
        JournalError: It cannot be written, was made by a newer raypool, or is not a journal.
    """
    try:
        _finish_salvage(folder)
        rest = log_of(folder / DATABASE)  # before SQLite removes it
        # SQLite would make it readable by others
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / DATABASE, os.O_CREAT | os.O_EXCL, 0o600))
        try:
            check_beginning(folder / DATABASE, rest)
            connection = connect(folder / DATABASE)
        except UNREADABLE as error:
            if not is_damage(error):
                raise
            return _salvaged(folder, rest)
        try:
            return connection, _checked(connection, rest)
        except UNREADABLE as error:
            connection.close()
            if not is_damage(error):
                raise
            return _salvaged(folder, rest)
    except (OSError, sqlite3.Error) as error:
        raise cannot_write(folder, error) from error


def check_beginning(path: Path, rest: bytes) -> None:
    """Check that SQLite may open this file.

    Without a valid first page it would delete the log; an unknown format it would only read.

    Raises:
        DamagedError: SQLite must not open it.
    """
    with path.open("rb") as file:
        head = file.read(512)
    is_new = not head and not rest
    # bytes 18 and 19: the versions for writing and reading; 1 is a rollback journal, 2 is a WAL
    if not is_new and (len(head) < 512 or not {head[18], head[19]} <= {1, 2}):
        raise DamagedError("its first page is damaged")


def cannot_write(folder: Path, error: Exception) -> JournalError:
    """Return the error for a journal that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return JournalError(
        f"The journal in {folder} cannot be written ({reason}). Free some space, or use a folder"
        " that belongs to you.",
        run_dir=str(folder),
    )


def connect(path: Path) -> sqlite3.Connection:
    """Open a database so that committed rows survive crashes and power cuts."""
    # Transactions are begun by hand. The user's thread opens it, and the recorder's writes; another
    # program may hold SQLite's locks for a moment.
    connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        # with NORMAL, a power cut could undo the last transactions
        connection.execute("PRAGMA synchronous = FULL")
        # a prepared file must not call functions through its schema
        connection.execute("PRAGMA trusted_schema = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def log_of(path: Path) -> bytes:
    """Return the write-ahead log of a database; empty if there is none."""
    try:
        return path.with_name(f"{path.name}-wal").read_bytes()
    except FileNotFoundError:
        return b""


def _checked(connection: sqlite3.Connection, rest: bytes) -> Contents:
    """Return the rows of a journal, including further ones in its write-ahead log.

    Raises:
        DamagedError: The content has changed; or another error of `schema.read`.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables == 0 and application == 0 and version == 0:
        migrate(connection)  # makes the tables of a new one; on disk with the first row
        if rest:
            raise DamagedError("its first page is gone")
        return {table: [] for table in TABLES}
    if application != APPLICATION_ID or version > SCHEMA or version < 1:
        raise DamagedError("its first page is that of another kind of file")
    migrate(connection)
    if connection.in_transaction:
        connection.execute("COMMIT")
    contents = read_all(connection)
    if any(num_missing(rows) for table, rows in contents.items() if table != "runs"):
        raise DamagedError("rows are missing")
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise DamagedError("its pages contradict each other")
    if rest:
        _, num_frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        _append_found(connection, contents, rest)
        if is_cut(rest, num_frames):
            logger.warning(
                "The log of the journal is damaged near its end: the last results may be lost,"
                " and their items run again."
            )
    return contents


def is_cut(log: bytes, num_frames: int) -> bool:
    """Whether a transaction was lost behind the frames of a write-ahead log that SQLite accepted.

    Frames of earlier logs may follow: SQLite begins a new log at the start of the same file, and
    adds 1 to the first salt each time.

    Source:
        SQLite, "Database File Format", sections 1.6 (B-tree pages) and 4.1 (WAL file format).
    """
    frame = 24 + int.from_bytes(log[8:12], "big")
    newest = int.from_bytes(log[16:20], "big")
    for start in range(32 + num_frames * frame, len(log) - frame + 1, frame):
        head = log[start : start + 24]
        if head[8:16] == log[16:24]:  # a frame of this log: it may not end a transaction
            is_expected = not any(head[4:8])
        else:  # a frame of an earlier log, or an overwritten one
            age = newest - int.from_bytes(head[8:12], "big")
            is_expected = 0 < age % 2**32 < 2**16 and log[start + 24] in FIRST_BYTES
        if not is_expected:
            return True
    return False


def read_all(connection: sqlite3.Connection) -> Contents:
    """Return the rows of all tables."""
    return {table: read(connection, table) for table in TABLES}


def with_found(contents: Contents, rest: bytes) -> Contents:
    """Return these rows, and those of the log that are uncommitted, or behind a damaged page."""
    rows = [(table, row) for table, entries in contents.items() for row in entries]
    found = list(carve(rest, frozenset(checksum(table, row) for table, row in rows)))
    return gathered([*rows, *found]) if found else contents


def _append_found(connection: sqlite3.Connection, contents: Contents, rest: bytes) -> None:
    """Write those rows of the log into the tables."""
    both = with_found(contents, rest)
    if both is contents:
        return
    lost = lost_of(both)
    both = renumbered(both)
    if any(both[table][: len(rows)] != rows for table, rows in contents.items()):
        raise DamagedError("rows with other numbers are in its log")
    connection.execute("BEGIN IMMEDIATE")
    for table, rows in both.items():
        insert(connection, table, rows[len(contents[table]) :])
    connection.execute("COMMIT")
    contents.update(both)
    if sum(lost.values()):
        logger.warning(
            "The log of the journal is damaged: %s. Those items run again.",
            what_is_lost(lost),
        )


# --- salvage --------------------------------------------------------------------------------------


def gathered(rows: Iterable[tuple[str, Row]]) -> Contents:
    """Return rows by table, in the order of their numbers."""
    contents: Contents = {table: [] for table in TABLES}
    for table, row in rows:
        contents[table].append(row)
    for entries in contents.values():
        entries.sort(key=lambda row: row[0])
    return contents


def lost_of(contents: Contents) -> dict[str, int]:
    """Return the number of missing rows of each table; the loss of the last does not show."""
    return {table: max(num_missing(rows), 0) for table, rows in contents.items()}


def renumbered(contents: Contents) -> Contents:
    """Return the rows with consecutive numbers; the orders lose items that are gone."""
    numbers = {row[0]: number for number, row in enumerate(contents["items"], 1)}
    renewed = {
        table: [(number, *row[1:]) for number, row in enumerate(rows, 1)]
        for table, rows in contents.items()
    }
    renewed["runs"] = contents["runs"]
    if all(old == new for old, new in numbers.items()):
        return renewed
    orders: list[Row] = []
    for _, run, first, text in contents["orders"]:
        entries = enumerate(numbers_of(text), first)
        orders += order_rows(run, [(place, numbers[n]) for place, n in entries if n in numbers])
    renewed["orders"] = [(number, *row) for number, row in enumerate(orders, 1)]
    return renewed


def what_is_lost(lost: dict[str, int]) -> str:
    """Return the numbers of missing rows in words."""
    counts = [(lost["attempts"], "results"), (lost["items"], "items")]
    counts.append((lost["orders"] + lost["runs"], "other records"))
    said = " and ".join(f"{count:,} {name}" for count, name in counts if count)
    return f"at least {said} are lost" if said else "the number of lost ones is unknown"


def what_is_left(path: Path, data: bytes, contents: Contents) -> str:
    """Describe the damage of a journal's file, and the part that could be read."""
    count = len({row[1] for row in contents["attempts"] if row[4] in COUNTS})
    # in SQLite's header: the size of a page, and the number of pages
    page, pages = int.from_bytes(data[16:18], "big"), int.from_bytes(data[28:32], "big")
    if not data.startswith(b"SQLite format 3\0"):
        cause = "it does not begin like a journal"
    elif len(data) < page * pages:
        cause = f"it was cut off after {len(data):,} of {page * pages:,} bytes"
    else:
        cause = "parts of it have changed"
    return (
        f"{path} is damaged ({cause}): {count:,} results of {len(contents['items']):,} items could"
        f" be read, {what_is_lost(lost_of(contents))}."
    )


def lost_with_log(folder: Path, noted: int, contents: Contents) -> str | None:
    """Say how many noted outcomes are missing from a journal; None if none is."""
    lost = noted - len(contents["attempts"])
    if lost <= 0:
        return None
    return (
        f"{lost:,} of {noted:,} results of the run in {folder} are lost: the log of its journal,"
        f" {DATABASE}-wal, is missing or was cut off. If the folder is a copy, copy the log too;"
        " otherwise call parfor with this run_dir again to rerun their items."
    )


def rescued(path: Path, data: bytes, rest: bytes) -> Contents:
    """Return the readable rows of a damaged journal.

    Raises:
        JournalError: It was made by a newer raypool, or is not a journal at all.
    """
    # zeros between: the end of one file and the beginning of the other are no row
    contents = gathered(carve(data + bytes(16) + rest))
    newest = max((row[4] for row in contents["runs"]), default=None)
    # in SQLite's header: PRAGMA user_version, and PRAGMA application_id
    version = int.from_bytes(data[60:64], "big")
    is_ours = int.from_bytes(data[68:72], "big") == APPLICATION_ID
    # a greater number is damage
    if newest is None and is_ours and SCHEMA < version < 1000:
        newest = version
    if newest is not None and newest > SCHEMA:
        raise JournalError(
            f"{path} was made by a newer raypool (version {newest}, this one knows {SCHEMA})."
            " Update raypool.",
            run_dir=str(path.parent),
        )
    if not any(contents.values()) and not is_ours and _is_sound(data, path):
        raise JournalError(
            f"{path} is not a raypool journal. Use another folder.", run_dir=str(path.parent)
        )
    return contents


def _is_sound(data: bytes, path: Path) -> bool:
    """Whether this is a sound database, hence of another program."""
    if not data.startswith(b"SQLite format 3\0"):
        return False
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        try:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            return bool(tables) and answer == "ok"
        except UNREADABLE:
            return False


def _salvaged(folder: Path, rest: bytes) -> tuple[sqlite3.Connection, Contents]:
    """Replace a damaged journal by one with all readable rows; the damaged file is kept."""
    path = folder / DATABASE
    data = path.read_bytes()
    found = rescued(path, data, rest)
    said, contents = what_is_left(path, data, found), renumbered(found)
    temporary = folder / "journal.new.sqlite"
    for name in (temporary, folder / f"{temporary.name}-wal", folder / f"{temporary.name}-shm"):
        name.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))
    with contextlib.closing(connect(temporary)) as connection:
        migrate(connection)
        for table, rows in contents.items():
            insert(connection, table, rows)
        connection.execute("COMMIT")
        # its log is not renamed with it; on a full disk this raises, where closing would not
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    kept = _keep(folder, rest)
    # from here on readers take this one, and the next writer finishes if this process is killed
    temporary.replace(folder / SALVAGED)
    sync_folder(folder)
    _finish_salvage(folder)
    logger.warning("%s Missing items run again. The damaged file is kept as %s.", said, kept.name)
    return connect(path), contents


def _keep(folder: Path, rest: bytes) -> Path:
    """Keep a damaged journal under a second name."""
    for number in itertools.count(1):
        kept = folder / f"journal.damaged-{number}.sqlite"
        try:
            os.link(folder / DATABASE, kept)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            kept.write_bytes((folder / DATABASE).read_bytes())
        if rest:
            (folder / f"{kept.name}-wal").write_bytes(rest)
        return kept
    raise AssertionError


def _finish_salvage(folder: Path) -> None:
    """Put the salvaged journal in place, also one that a killed process has left."""
    if (folder / SALVAGED).exists():
        # first: SQLite would apply the log of the damaged journal to this one
        for suffix in ("-wal", "-shm"):
            (folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)
        (folder / SALVAGED).replace(folder / DATABASE)
        sync_folder(folder)
