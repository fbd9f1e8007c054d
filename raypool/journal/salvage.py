"""Finds the rows of a journal in the bytes of its damaged files.

SQLite gives up a table at a damaged page. Rows are in one piece and have checksums, so they can be
found without SQLite, by their first bytes, even in pages that no other page refers to.

Source:
    SQLite, "Database File Format", sections 1.6 (B-tree pages) and 2.1 (record format).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from raypool.journal.schema import CHECKSUM_BYTES, TABLES, Row, checksum

BEGINNING = bytes([0, 12 + 2 * CHECKSUM_BYTES])
"""The types of a row's first columns: the number, which is stored elsewhere, and the checksum."""

INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8)
"""The size of an integer of each type [bytes]."""

BY_WIDTH = {2 + len(table.columns): table for table in TABLES.values()}


def carve(data: bytes, known: frozenset[bytes] = frozenset()) -> Iterator[tuple[str, Row]]:
    """Yield each valid row in these bytes once, with its table, unless its checksum is known."""
    seen = set(known)
    position = data.find(BEGINNING, 1)
    while position >= 0:
        # the byte before has the length of the row's header
        found = _row_at(data, position - 1, seen)
        if found is not None:
            yield found
        position = data.find(BEGINNING, position + 1)


def _row_at(data: bytes, start: int, seen: set[bytes]) -> tuple[str, Row] | None:
    """Return the row whose record begins here; None if there is none, or it was seen before."""
    header = data[start]
    types = _types(data[start + 1 : start + header])
    table = BY_WIDTH.get(len(types))
    body = start + header
    known = data[body : body + CHECKSUM_BYTES]
    if table is None or known in seen:
        return None
    decoded = _columns(data, body + CHECKSUM_BYTES, types[2:])
    if decoded is None:
        return None
    columns, end = decoded
    for position in table.reals:  # SQLite writes 2.0 as 2
        if type(columns[position - 1]) is int:
            columns[position - 1] = float(columns[position - 1])
    for number in _numbers_before(data, start, end - start):
        row = (number, *columns)
        if checksum(table.name, row) == known:
            seen.add(known)
            return table.name, row
    return None


def _types(header: bytes) -> list[int]:
    types, value = [], 0
    for byte in header:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            types.append(value)
            value = 0
    return types if not value else []


def _columns(data: bytes, position: int, types: list[int]) -> tuple[list[Any], int] | None:
    """Return the columns of these types, and where they end."""
    columns: list[Any] = []
    for kind in types:
        size = INTEGER_BYTES[kind] if kind <= 6 else 8 if kind == 7 else max(kind - 12, 0) // 2
        raw = data[position : position + size]
        if kind in (10, 11) or len(raw) < size:
            return None
        position += size
        if kind == 0:
            columns.append(None)
        elif kind <= 6:
            columns.append(int.from_bytes(raw, "big", signed=True))
        elif kind == 7:
            columns.append(struct.unpack(">d", raw)[0])
        elif kind <= 9:
            columns.append(kind - 8)
        elif kind % 2 == 0:
            columns.append(raw)
        else:
            try:
                columns.append(raw.decode())
            except UnicodeDecodeError:  # other bytes, which only begin like a row
                return None
    return columns, position


def _numbers_before(data: bytes, start: int, size: int) -> Iterator[int]:
    """Yield the possible numbers of the record that begins here; size and number precede it."""
    # as SQLite writes it: seven bits a byte, the highest first
    written = bytes([size & 0x7F])
    while size := size >> 7:
        written = bytes([size & 0x7F | 0x80]) + written
    for length in range(1, 9):
        begin = start - length
        # all bytes of such a number except the last have the high bit
        if begin < len(written) or (length > 1 and data[begin] < 0x80):
            return
        if data[begin - len(written) : begin] == written and data[start - 1] < 0x80:
            value = 0
            for byte in data[begin:start]:
                value = value << 7 | byte & 0x7F
            yield value
