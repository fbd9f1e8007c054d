"""The layout of a journal in SQLite: four tables of rows with numbers and checksums.

| table    | a row                                                                             |
|----------|-----------------------------------------------------------------------------------|
| runs     | one call with this folder: its function, its seed, when and where                 |
| items    | one item: its key, and the item itself                                            |
| orders   | consecutive items of a call: their numbers in `items`, from position `first` on   |
| attempts | one outcome of one attempt at an item                                             |

Rows are only added, so every copy of a row in the files is valid. A row fits into a page, so it is
in one piece. Rows have consecutive numbers, so gaps show. `salvage` depends on all three.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

SCHEMA = 1
"""The version of this layout, in `PRAGMA user_version` and in each row of `runs`."""

APPLICATION_ID = 0x7261_7970  # "rayp"

PAGE_BYTES = 8192

MAX_TEXT_BYTES = 4000
"""A longer text goes into a file, or is cut: a row must fit into a page."""

MAX_PICKLE_BYTES = 3000
"""A longer pickle goes into a file."""

CHECKSUM_BYTES = 8

Row: TypeAlias = "tuple[Any, ...]"
"""The number, then the columns of its table."""


class Table(NamedTuple):
    """A table's columns behind `n` and `checksum`, with types; each table has another number."""

    name: str
    columns: tuple[str, ...]

    @property
    def reals(self) -> list[int]:
        """The positions of real numbers in a row: SQLite writes 2.0 as 2."""
        return [number for number, text in enumerate(self.columns, 1) if text.endswith("REAL")]


STORED = ("body TEXT", "pickled BLOB", "file TEXT", "size INTEGER", "digest BLOB")
"""The place of a value: JSON, a pickle, or a file of this size and hash. File "" means: nowhere."""

TABLES = {
    table.name: table
    for table in (
        Table(
            "runs",
            (
                *("function TEXT", "seed TEXT", "source TEXT", "schema INTEGER"),
                *("started_at REAL", "host TEXT", "pid INTEGER", "version TEXT"),
            ),
        ),
        Table("items", ("key TEXT", "run INTEGER", *STORED)),
        Table("orders", ("run INTEGER", "first INTEGER", "items TEXT")),
        Table(
            "attempts",
            (
                *("key TEXT", "run INTEGER", "attempt INTEGER", "status TEXT", *STORED),
                *("started_at REAL", "duration_s REAL"),
                *("worker INTEGER", "gpu INTEGER", "host TEXT"),
            ),
        ),
    )
}


def checksum(table: str, row: Row) -> bytes:
    """Return the checksum of a row, with its number."""
    return blake2b(ascii(row).encode(), digest_size=CHECKSUM_BYTES, person=table.encode()).digest()


def insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    """Add rows, in the current transaction."""
    marks = ", ".join("?" * (2 + len(TABLES[table].columns)))
    connection.executemany(
        f"INSERT INTO {table} VALUES ({marks})",
        ((row[0], checksum(table, row), *row[1:]) for row in rows),
    )


class WrongRowError(Exception):
    """A row has changed since it was written."""


def read(connection: sqlite3.Connection, table: str, after: int = 0) -> list[Row]:
    """Return the rows of a table with numbers after this one, in order.

    Raises:
        WrongRowError: A row has changed.
        sqlite3.Error: The rows cannot be read.
    """
    names = ", ".join(column.split()[0] for column in TABLES[table].columns)
    rows = []
    person = table.encode()
    command = f"SELECT n, {names}, checksum FROM {table} WHERE n > ? ORDER BY n"
    for entry in connection.execute(command, (after,)):
        row = entry[:-1]
        found = blake2b(ascii(row).encode(), digest_size=CHECKSUM_BYTES, person=person).digest()
        if found != entry[-1]:
            raise WrongRowError(f"row {row[0]} of {table}")
        rows.append(row)
    return rows


def num_missing(rows: Sequence[Row]) -> int:
    """Return the count of missing numbers below the highest."""
    numbers = {row[0] for row in rows}
    return max(numbers, default=0) - len(numbers)


# --- versions -------------------------------------------------------------------------------------


def _first(connection: sqlite3.Connection) -> None:
    for table in TABLES.values():
        connection.execute(
            f"CREATE TABLE {table.name} (n INTEGER PRIMARY KEY, checksum BLOB,"
            f" {', '.join(table.columns)})"
        )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_first]
"""The steps from nothing to version 1, from 1 to 2, and so on. A released step is never changed."""


def migrate(
    connection: sqlite3.Connection,
    migrations: Sequence[Callable[[sqlite3.Connection], None]] = tuple(MIGRATIONS),
) -> None:
    """Bring a journal to the newest version, in one transaction, which is left open."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < len(migrations):
        connection.execute("BEGIN IMMEDIATE")
        for step in migrations[version:]:
            step(connection)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


# --- orders ---------------------------------------------------------------------------------------


def order_rows(run: int, entries: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Yield rows of `orders`, without `n`, for pairs of position and item number."""
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
