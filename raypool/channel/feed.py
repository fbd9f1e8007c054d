"""Feeds: what a task, or the items of a loop, reported and printed.

A feed keeps little in memory, however much arrives: older data is in a file without a name, which
disappears with the process. Also here: tables of users' values (`table`, `fields_of`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import numbers
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import pandas as pd


RECENT_BYTES = 16 * 1024
"""How much of each record stays in memory [bytes]."""

SEGMENT_BYTES = 256 * 1024 * 1024
"""The size of a file of the spool; it goes with the last feed that has something in it."""

ROWS_AT_ONCE = 256
"""So many rows are pickled together: each by itself would bring its names along."""

TEXT_BYTES = 1024 * 1024
"""How much output is kept, the newest [bytes]."""

LOOP_TEXT_BYTES = 64 * TEXT_BYTES
"""How much output of a loop is kept [bytes]: items that printed longest ago lose theirs."""

PIECE_BYTES = 4096
"""The size of the pieces of an item's text [bytes]: a line as an object takes twice its size."""

AGAIN = b"\n[raypool: it runs again]\n"
"""The line between the output of one attempt and the next."""

MAX_EXACT = 2**53
"""The integer up to which floats, and JavaScript's numbers, have all integers."""

LAST_ITEMS = 1024
"""How many items' last values are known, of those that have reported last."""

Row: TypeAlias = "tuple[float, int, int, dict[str, Any]]"
"""A report: Unix time [s], item, attempt, values by name."""

Last: TypeAlias = "dict[int, tuple[int, dict[str, Any]]]"
"""The newest value of each metric: item -> attempt, values by name."""


class MetricsReport(NamedTuple):
    """The values of one call of `raypool.report`, for a function that gets reports as they arrive.

    Attributes:
        item: The number of the item in its loop; 0 for a single call, the rank for `spmd`.
        attempt: The attempt at it, from 1. The reports of a lost attempt are not taken back.
        time: The moment of the call, by the clock of the worker's machine.
        metrics: The values by name.
    """

    item: int
    attempt: int
    time: datetime
    metrics: dict[str, Any]


def report_of_row(row: Row) -> MetricsReport:
    """Return a row as users see it."""
    seconds, item, attempt, metrics = row
    return MetricsReport(item, attempt, datetime.fromtimestamp(seconds, UTC), metrics)


class TemporaryFile:
    """A file without a name, written at its end; it goes with the last piece that is held."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="raypool-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self.file.close)
        self.size = 0

    def add(self, data: bytes) -> FileBytes:
        """Append data."""
        start = self.size
        self.size += len(data)  # first: a half-written piece is never overwritten
        written = 0
        while written < len(data):  # one call may write less
            written += os.pwrite(self.file.fileno(), data[written:], start + written)
        return FileBytes(self, start, len(data))


class FileBytes:
    """Some bytes in a file."""

    __slots__ = ("_segment", "_size", "_start")

    def __init__(self, segment: TemporaryFile, start: int, size: int) -> None:
        self._segment = segment
        self._start = start
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read(self) -> bytes:
        """Return them."""
        data = b""
        while missing := self._size - len(data):
            more = os.pread(self._segment.file.fileno(), missing, self._start + len(data))
            if not more:
                raise OSError(f"A temporary file of raypool's is {missing} bytes too short.")
            data += more
        return data


class Spool:
    """The file for older data of all feeds."""

    def __init__(self) -> None:
        self._segment: TemporaryFile | None = None  # one open file for all
        # gives each piece its own place in the file; reentrant like the lock of `Feed`
        self._lock = threading.RLock()

    def add(self, data: bytes) -> FileBytes | bytes:
        """Put data into the file; return where it is, or itself if that is not possible."""
        with self._lock:
            try:
                if self._segment is None or self._segment.size >= SEGMENT_BYTES:
                    self._segment = TemporaryFile()
                return self._segment.add(data)
            except (OSError, ValueError):  # the disk is full; the process ends, the file is closed
                return data


_spool = Spool()


def _new_spool() -> None:
    # a forked child and its parent would write into the same file, at the same places
    global _spool, _making
    _spool, _making = Spool(), threading.RLock()


os.register_at_fork(after_in_child=_new_spool)


class Record:
    """Bytes that are added at the end, and forgotten at the beginning."""

    __slots__ = ("_pieces", "_recent_size", "recent", "size")

    def __init__(self) -> None:
        self.size = 0
        self._pieces: deque[FileBytes | bytes] = deque()
        self.recent: list[bytes] = []
        self._recent_size = 0

    def add(self, data: bytes) -> None:
        """Add bytes."""
        self.recent += (data,)
        self.note_added(len(data))

    def note_added(self, size: int) -> None:
        """Put recent bytes into the spool, if they have become many."""
        self.size += size
        self._recent_size += size
        if self._recent_size >= RECENT_BYTES:
            # A thread that adds some may be interrupted at any call (its task is cancelled): so the
            # assignments that move bytes follow each other without a call between them.
            piece = _spool.add(b"".join(self.recent))
            none: list[bytes] = []
            self._pieces += (piece,)
            self.recent = none
            self._recent_size = 0

    def forget(self, keep_bytes: int) -> int:
        """Drop old pieces, but keep at least this much; return how many bytes were dropped."""
        gone = 0
        while self._pieces and self.size - len(self._pieces[0]) >= keep_bytes:
            gone += len(self._pieces[0])
            self.size -= len(self._pieces.popleft())
        return gone

    def parts(self) -> list[FileBytes | bytes]:
        """Return all that is kept, in order, for `read`, which needs no lock."""
        return [*self._pieces, b"".join(self.recent)]


def read(parts: Iterable[FileBytes | bytes]) -> Iterator[bytes]:
    """Return the bytes of a record's parts."""
    return (part if isinstance(part, bytes) else part.read() for part in parts)


class Feed:
    """What a task, or all items of a loop, reported and printed so far; for any thread."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_last",
        "_listeners",
        "_lock",
        "_missing",
        "_new_rows",
        "_rows",
        "_text",
        "on_text",
    )

    def __init__(self) -> None:
        # called with an item's number and its new text
        self.on_text: Callable[[int, str], object] | None = None
        # reentrant: a finalizer that happens to run while it is locked may print
        self._lock = threading.RLock()
        self._rows = Record()
        self._new_rows: list[Row] = []
        self._text = Record()
        self._missing = 0  # bytes of text that are not kept
        self._calls: dict[int, int] = {}  # by item (or rank): the call that it printed in last
        self._last: Last = {}
        self._listeners: tuple[Callable[[list[Row]], object], ...] = ()

    def subscribe(self, listener: Callable[[list[Row]], object]) -> None:
        """Pass all reports to a function, in the order of their arrival, beginning with those here.

        It is called with the lock, by whatever thread brings them: it may only note them.
        """
        with self._lock:
            if rows := self.rows():
                listener(rows)
            self._listeners += (listener,)

    def listen(self, on_text: Callable[[int, str], object]) -> None:
        """Pass the printed text of a call to a function, as `subscribe` passes reports."""
        with self._lock:
            if text := self.text():
                on_text(0, text)
            self.on_text = on_text

    def add_row(self, row: Row) -> None:
        """Take a report of this process."""
        _, item, attempt, metrics = row
        with self._lock:
            self._new_rows.append(row)
            self._note_last({item: (attempt, metrics)})
            if len(self._new_rows) >= ROWS_AT_ONCE:
                self._pack_new_rows()
            for listener in self._listeners:
                listener([row])

    def add_rows(self, rows: bytes, last: Last) -> None:
        """Take reports of another process: a pickled list of rows, and the last values in them."""
        with self._lock:
            self._rows.add(rows)
            self._note_last(last)
            if self._listeners:
                opened = pickle.loads(rows)
                for listener in self._listeners:
                    listener(opened)

    def _pack_new_rows(self) -> None:
        if self._new_rows:
            # moved without a call between the assignments: see `Record.note_added`
            data = pickle.dumps(self._new_rows, protocol=5)
            none: list[Row] = []
            self._rows.recent += (data,)
            self._new_rows = none
            self._rows.note_added(len(data))

    def _note_last(self, last: Last) -> None:
        for item, (attempt, values) in last.items():
            known_attempt, known = self._last.pop(item, (attempt, None))
            values = {name: value for name, value in values.items() if value is not None}
            # a new dict, not an update: a reader may hold the old one
            self._last[item] = (
                attempt,
                {**known, **values} if known is not None and known_attempt == attempt else values,
            )
        while len(self._last) > LAST_ITEMS:
            del self._last[next(iter(self._last))]

    def add_text(self, text: str, num_missing: int = 0, item: int = 0, call_id: int = 0) -> None:
        """Take printed text; `num_missing` characters before it were not sent."""
        with self._lock:
            # without a line between two attempts, text that both print would look like a mistake
            if self._calls.setdefault(item, call_id) < call_id:
                self._calls[item] = call_id
                self._text.add(AGAIN)
            self._missing += num_missing
            self._text.add(text.encode("utf-8", "backslashreplace"))
            self._missing += self._text.forget(TEXT_BYTES)
            if self.on_text is not None:
                self.on_text(item, text)

    def add_all_of(self, other: Feed) -> None:
        """Take all that another feed has, without the last values."""
        with other._lock:
            other._pack_new_rows()
            rows, text, missing = other._rows.parts(), other._text.parts(), other._missing
        with self._lock:
            self._pack_new_rows()  # they came first
            for data in read(rows):
                self._rows.add(data)
            self._missing += missing
            for data in read(text):
                self._text.add(data)
            self._missing += self._text.forget(TEXT_BYTES)

    def last(self, item: int, attempt: int | None = None) -> dict[str, Any]:
        """Return the newest value of each metric of an item in this attempt (None: the newest)."""
        with self._lock:
            known_attempt, values = self._last.get(item, (attempt, {}))
        return values if attempt in {None, known_attempt} else {}

    def rows(self) -> list[Row]:
        """Return all reports, in the order of their arrival."""
        with self._lock:
            self._pack_new_rows()
            parts = self._rows.parts()
        rows: list[Row] = []
        for data in read(parts):
            file = io.BytesIO(data)
            while file.tell() < len(data):  # pickles, one behind the other
                rows += pickle.load(file)
        return rows

    def newest(self) -> Feed:
        """Return a feed with one report of each item: the last value of each metric, also NaN."""
        rows: dict[int, Row] = {}
        for time, item, attempt, metrics in in_order(self.rows()):
            values = rows[item][3] if item in rows else {}
            values |= {name: value for name, value in metrics.items() if value is not None}
            rows[item] = (time, item, attempt, values)
        feed = Feed()
        for row in rows.values():
            feed.add_row(row)
        return feed

    def metrics(self, column: str | None) -> pd.DataFrame:
        """Return the table of reports.

        Args:
            column: The name of the column with the numbers of items or ranks, by which the rows are
                sorted; None for a single call.

        Returns:
            A row for each report, in order: `time` (UTC), the number, `attempt`, then the metrics
            in the order in which they first appear. A metric with the name of one of the first
            columns is in "reported_NAME".
        """
        import numpy as np
        import pandas as pd

        rows = self.rows()
        if column is not None:
            rows = in_order(rows)
        times, items, attempts, metrics = zip(*rows, strict=True) if rows else ((), (), (), ())
        seconds = pd.to_datetime(np.array(times, float), unit="s", utc=True).as_unit("ns")
        numbers = {} if column is None else {column: np.array(items, int)}
        head = pd.DataFrame({"time": seconds, **numbers, "attempt": np.array(attempts, int)})
        try:
            values = pd.DataFrame(list(metrics), index=head.index)
        except UnicodeEncodeError:  # there are halves of characters
            names = dict.fromkeys(name for row in metrics for name in row)
            values = table(
                {column_name(name): [row.get(name, math.nan) for row in metrics] for name in names},
                head.index,
            )
        else:
            for name in values:  # with a gap, pandas has made floats of integers
                if values[name].dtype == float and (values[name].abs() >= MAX_EXACT).any():
                    values[name] = with_gaps([row.get(name) for row in metrics])
        return head.join(values.rename(columns={name: f"reported_{name}" for name in head}))

    def text(self) -> str:
        """Return the newest MiB of printed text; if more was printed, a first line says so."""
        with self._lock:
            missing, parts = self._missing, self._text.parts()
        return _as_text(b"".join(read(parts)), missing)

    def __reduce__(self) -> Any:
        with self._lock:
            self._pack_new_rows()
            rows, text, missing = self._rows.parts(), self._text.parts(), self._missing
        return _restored, (b"".join(read(rows)), b"".join(read(text)), missing)


def _as_text(data: bytes, missing: int) -> str:
    if len(data) > TEXT_BYTES:
        missing += len(data) - TEXT_BYTES
        data = data[-TEXT_BYTES:]
    text = data.decode("utf-8", "ignore")
    return f"[raypool: the first {missing:,} bytes are not kept]\n{text}" if missing else text


class Holder(Protocol):
    """A future or a loop: it has a feed as soon as something has arrived for it."""

    feed: Feed | None


# lets only one thread make the feed of a holder; reentrant like the lock of `Feed`
_making = threading.RLock()


def feed_of(holder: Holder) -> Feed:
    """Return the feed of a future or a loop, which is made for the first who asks."""
    if holder.feed is None:
        with _making:  # another thread may have made it meanwhile
            holder.feed = holder.feed or Feed()
    return holder.feed


class Printed:
    """The newest text that an item printed in one call."""

    __slots__ = ("call_id", "missing", "pieces", "size")

    def __init__(self, call_id: int, missing: int = 0) -> None:
        self.call_id = call_id
        self.missing = missing  # bytes before the first piece
        self.pieces: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> None:
        """Add text, and forget the oldest beyond `TEXT_BYTES`."""
        self.missing += max(len(data) - TEXT_BYTES, 0)
        data = data[-TEXT_BYTES:]
        if self.pieces and len(self.pieces[-1]) < PIECE_BYTES:
            self.pieces[-1] += data
        else:
            self.pieces.append(data)
        self.size += len(data)
        while self.size - len(self.pieces[0]) >= TEXT_BYTES:
            gone = len(self.pieces.pop(0))
            self.size -= gone
            self.missing += gone


class LoopFeed(Feed):
    """The feed of a loop; it keeps the output of each item's last run."""

    __slots__ = ("_forgotten", "_num_bytes", "_printed")

    def __init__(self) -> None:
        super().__init__()
        # by item; the one that printed longest ago comes first
        self._printed: dict[int, Printed] = {}
        self._forgotten: dict[int, Printed] = {}  # items whose text had to go, without a piece
        self._num_bytes = 0

    def add_text(self, text: str, num_missing: int = 0, item: int = 0, call_id: int = 0) -> None:
        """Take text that an item printed in a call."""
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            known = self._printed.get(item) or self._forgotten.pop(item, None)
            printed = known if known is not None and known.call_id >= call_id else Printed(call_id)
            before = 0 if known is None else known.size
            if printed.call_id == call_id:  # else it comes late, of a worker that was lost
                printed.missing += num_missing
                printed.add(data)
            self._printed.pop(item, None)
            self._printed[item] = printed
            self._num_bytes += printed.size - before
            while self._num_bytes > LOOP_TEXT_BYTES:
                oldest = next(iter(self._printed))
                gone = self._printed.pop(oldest)
                self._num_bytes -= gone.size
                self._forgotten[oldest] = Printed(gone.call_id, gone.missing + gone.size)
        if (tell := self.on_text) is not None:  # read once: `parfor` may take it away meanwhile
            tell(item, text)

    def diary(self, item: int) -> str:
        """Return the kept output of an item's last run."""
        with self._lock:
            printed = self._printed.get(item) or self._forgotten.get(item)
            if printed is None:
                return ""
            missing, data = printed.missing, b"".join(printed.pieces)
        return _as_text(data, missing)


def text_of_file(path: Path) -> str:
    """Return the newest text of an item's output in a file, "" without one."""
    try:
        with path.open("rb") as file:
            missing = max(file.seek(0, os.SEEK_END) - TEXT_BYTES, 0)
            file.seek(missing)
            return _as_text(file.read(TEXT_BYTES), missing)
    except OSError:
        return ""


def _restored(rows: bytes, text: bytes, missing: int) -> Feed:
    feed = Feed()
    feed._rows.add(rows)
    feed._text.add(text)
    feed._missing = missing
    return feed


# --- tables of users' values ----------------------------------------------------------------------


def table(columns: Mapping[str, Any], index: pd.Index[Any]) -> pd.DataFrame:
    r"""Return a table of columns, in which texts may have halves of characters.

    Example:
        >>> import pandas as pd
        >>> table({"name": ["a", "half: \ud83d"]}, pd.RangeIndex(2))["name"].tolist()
        ['a', 'half: \ud83d']
    """
    import pandas as pd

    try:
        return pd.DataFrame(columns, index=index)
    except UnicodeEncodeError:
        # pandas keeps texts as UTF-8 where Arrow is installed, which has no such halves
        texts = {
            name: pd.Series(column, dtype=object, index=index)
            for name, column in columns.items()
            if isinstance(column, list) and any(isinstance(entry, str) for entry in column)
        }
        return pd.DataFrame({**columns, **texts}, index=index)


def with_gaps(cells: list[Any]) -> Any:
    """Return integers among which some are missing as Int64, or as UInt64 if that holds them.

    pandas would make floats of them. Those of neither type stay objects.

    Example:
        >>> with_gaps([2**53 + 1, None]).tolist(), with_gaps([2**64 - 1, None]).dtype
        ([9007199254740993, <NA>], UInt64Dtype())
    """
    import numpy as np
    import pandas as pd

    kinds = set(map(type, cells)) - {type(None)}
    no_number = (bool, np.timedelta64)  # which are among the integers
    is_whole = all(
        issubclass(kind, numbers.Integral) and not issubclass(kind, no_number) for kind in kinds
    )
    if not (kinds and is_whole and None in cells):
        return cells
    for dtype in ("Int64", "UInt64"):
        with contextlib.suppress(OverflowError):  # too large for this type
            return pd.array(cells, dtype=dtype)
    return pd.array(cells, dtype=object)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return reports by item and attempt, as they came.

    The next part of a trial, and the next call with a run's folder, count attempts from 1 again:
    what they report is later than all of the attempts before, whose number it gets.

    Example:
        >>> rows = [(1.0, 0, 1, {}), (3.0, 0, 2, {}), (2.0, 0, 1, {}), (4.0, 0, 1, {})]
        >>> [row[:3] for row in in_order(rows)]
        [(1.0, 0, 1), (2.0, 0, 1), (3.0, 0, 2), (4.0, 0, 2)]
    """
    newest: dict[int, tuple[int, float]] = {}
    found = []
    for time, item, attempt, metrics in rows:
        most, last = newest.get(item, (attempt, time))
        at = max(attempt, most) if time > last else attempt
        if at >= most:
            newest[item] = at, max(time, last)
        found.append((time, item, at, metrics))
    found.sort(key=lambda row: row[1:3])
    return found


def as_html(title: str, frame: pd.DataFrame) -> str:
    """Return a table for a notebook, with a title; what has failed or is lost is red.

    Example:
        >>> import pandas as pd
        >>> as_html("<Results>", pd.DataFrame({"status": ["failed"]})).splitlines()[0]
        '<p>&lt;Results&gt;</p>'
    """
    import html

    is_named = any(name is not None for name in frame.index.names)
    frame = frame.apply(lambda cells: cells if cells.dtype != object else _readable(cells))
    rows = frame.to_html(border=0, na_rep="-", float_format="{:.4g}".format, index=is_named)
    for state in ("failed", "lost"):  # cells are escaped, so nothing else looks like this
        rows = rows.replace(f"<td>{state}</td>", f'<td style="color: #c62828">{state}</td>')
    return f"<p>{html.escape(title)}</p>\n{rows}"


def _readable(cells: pd.Series[Any]) -> pd.Series[Any]:
    """Replace the values of which pandas can make no text."""
    import pandas as pd

    texts = []
    for value in cells:
        try:
            str(value)
            texts.append(value)
        except Exception:  # the user's own class, or an integer of more than 4,300 digits
            texts.append(f"a {type(value).__name__}")
    return pd.Series(texts, cells.index, dtype=object)


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return a configuration's fields, by name; None if it is of no known kind.

    Known are mappings, dataclasses, named tuples, namespaces, attrs classes and pydantic models.

    Example:
        >>> fields_of(SimpleNamespace(lr=0.1, width=8)), fields_of([0.1, 8])
        ({'lr': 0.1, 'width': 8}, None)
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    # without these modules there is none of their objects
    argparse, pydantic = sys.modules.get("argparse"), sys.modules.get("pydantic.main")
    if argparse is not None and isinstance(value, argparse.Namespace):
        return dict(vars(value))
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return dict(pydantic.BaseModel.__iter__(value))  # its own __iter__ may give something else
    kind: Any = type(value)
    names: Iterable[str] | None = None
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
    if dataclasses.is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(kind))
    elif hasattr(kind, "__attrs_attrs__"):
        names = (field.name for field in kind.__attrs_attrs__)
    return None if names is None else {name: getattr(value, name, None) for name in names}


def column_name(key: Any) -> str:
    r"""Return the column name for a key, in which halves of characters are written out.

    Example:
        >>> column_name("lr"), column_name(3), column_name("half: \ud83d")
        ('lr', '3', 'half: \\ud83d')
    """
    return str(key).encode("utf-8", "backslashreplace").decode()  # a table's names are UTF-8
