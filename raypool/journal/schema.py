"""How a journal lies in SQLite: four tables in which rows are only ever added, each with consecutive numbers and a checksum.

=========  =================================================================================================
runs       one row a call with this folder: for which function and seed, when and where
items      one row an item: its key, and the item itself
orders     which items a call had, in which order: their numbers in `items`, from position `first` on
attempts   one row for each time that an item ran: what became of it
=========  =================================================================================================

Since no row is ever changed, every copy of one that lies about in the files is as good as another; since a row fits into a page,
it lies in one piece; and since rows have numbers, one sees that some are missing. That is what `salvage` lives on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

SCHEMA = 1
"""The version of all this, in `PRAGMA user_version` and in each row of `runs`."""

APPLICATION_ID = 0x7261_7970  # "rayp"

PAGE_BYTES = 8192

MAX_TEXT_BYTES = 4000
"""A longer text goes into a file, or is cut: a row has one such text and one pickle at most, and must fit into a page."""

MAX_PICKLE_BYTES = 3000
"""A longer pickle goes into a file."""

CHECKSUM_BYTES = 8

Row: TypeAlias = "tuple[Any, ...]"
"""The number, then the columns of its table."""


class Table(NamedTuple):
    """The columns that follow `n` and `checksum`, each with its type for SQLite; no two tables have equally many."""

    name: str
    columns: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.split()[0] for column in self.columns]

    @property
    def reals(self) -> list[int]:
        """Where in a row numbers with a point stand: SQLite writes 2.0 as 2."""
        return [position for position, column in enumerate(self.columns, 1) if column.endswith("REAL")]


STORED = ("body TEXT", "pickled BLOB", "file TEXT", "size INTEGER", "digest BLOB")
"""Where a value is: as JSON, or as a pickle, or in a file of this size and hash. File "" stands for: nowhere."""

TABLES = {
    table.name: table
    for table in (
        Table(
            "runs",
            (
                "function TEXT",
                "seed TEXT",
                "source TEXT",
                "schema INTEGER",
                "started_at REAL",
                "host TEXT",
                "pid INTEGER",
                "version TEXT",
            ),
        ),
        Table("items", ("key TEXT", "run INTEGER", *STORED)),
        Table("orders", ("run INTEGER", "first INTEGER", "items TEXT")),
        Table(
            "attempts",
            (
                "key TEXT",
                "run INTEGER",
                "attempt INTEGER",
                "status TEXT",
                *STORED,
                "started_at REAL",
                "duration_s REAL",
                "worker INTEGER",
                "gpu INTEGER",
                "host TEXT",
            ),
        ),
    )
}


def checksum(table: str, row: Row) -> bytes:
    """Return the checksum of a row: of its number and what is in it."""
    return blake2b(ascii(row).encode(), digest_size=CHECKSUM_BYTES, person=table.encode()).digest()


def insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    """Add rows, in whatever transaction there is."""
    marks = ", ".join("?" * (2 + len(TABLES[table].columns)))
    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", ((row[0], checksum(table, row), *row[1:]) for row in rows))


class WrongRowError(Exception):
    """A row is not what was written."""


def read(connection: sqlite3.Connection, table: str) -> list[Row]:
    """Return all rows of a table in the order of their numbers.

    Raises:
        WrongRowError: One is not what was written.
        sqlite3.Error: They cannot be read.
    """
    names = ", ".join(TABLES[table].names)
    rows = []
    person = table.encode()
    for entry in connection.execute(f"SELECT n, {names}, checksum FROM {table} ORDER BY n"):
        row = entry[:-1]
        if blake2b(ascii(row).encode(), digest_size=CHECKSUM_BYTES, person=person).digest() != entry[-1]:
            raise WrongRowError(f"row {row[0]} of {table}")
        rows.append(row)
    return rows


def num_missing(rows: Sequence[Row]) -> int:
    """Return how many numbers are left out below the highest."""
    numbers = {row[0] for row in rows}
    return max(numbers, default=0) - len(numbers)


# --- which version ----------------------------------------------------------------------------------------------------


def _first(connection: sqlite3.Connection) -> None:
    for table in TABLES.values():
        connection.execute(f"CREATE TABLE {table.name} (n INTEGER PRIMARY KEY, checksum BLOB, {', '.join(table.columns)})")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_first]
"""What makes version 1 of nothing, version 2 of version 1, and so on. Each is run once, and is never changed."""


def migrate(
    connection: sqlite3.Connection, migrations: Sequence[Callable[[sqlite3.Connection], None]] = tuple(MIGRATIONS)
) -> None:
    """Bring a journal to the newest version, in one transaction, which is left open."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < len(migrations):
        connection.execute("BEGIN IMMEDIATE")
        for step in migrations[version:]:
            step(connection)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


# --- orders -----------------------------------------------------------------------------------------------------------


def order_rows(run: int, entries: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Yield what of `orders` follows the number: for pairs of a position and the item's number, as few rows as may be."""
    first, expected = 0, -1
    spans: list[list[int]] = []
    length = 0
    for position, number in entries:
        if spans and position == expected and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            if spans and (position != expected or length > MAX_TEXT_BYTES - 50):
                yield run, first, _written(spans)
                spans = []
            if not spans:
                first, length = position, 0
            spans.append([number, number])
            length += len(str(number)) + 12
        expected = position + 1
    if spans:
        yield run, first, _written(spans)


def _written(spans: list[list[int]]) -> str:
    return ",".join(str(start) if start == last else f"{start}-{last}" for start, last in spans)


def numbers_of(text: str) -> Iterator[int]:
    """Yield the numbers of items in a row of `orders`."""
    for span in text.split(","):
        start, _, last = span.partition("-")
        yield from range(int(start), int(last or start) + 1)
