"""What the items of a durable loop say, on its way into the files of each of them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raypool.channel.feed import TEXT_BYTES, Last, LoopFeed, Row

METRICS = "metrics.jsonl"
DIARY = "diary.txt"


class SayingFeed(LoopFeed):
    """A feed that also hands on what is said, with the item that has said it."""

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
    """What an item has said that is not in its files yet."""

    lines: list[str]
    texts: list[str]


class ItemFiles:
    """The files of the items of a run: what each has reported, and what it has printed.

    Args:
        feed: Where what they say arrives.
        keys: The items' names in the run; grows for a generator.
        folder: Returns the folder of an item, which it makes if it is not there.
        run: The number of the run, which stands in every line.
    """

    def __init__(self, feed: SayingFeed, keys: Sequence[str], folder: Callable[[str], Path], run: int) -> None:
        self._feed = feed
        self._keys = keys
        self._folder = folder
        self._run = run
        self._unwritten: dict[int, Unwritten] = {}

    @property
    def num_unwritten(self) -> int:
        """How many items have said something that could not be written."""
        return len(self._unwritten)

    def write(self) -> OSError | None:
        """Add what is new to the files; what cannot be written waits for the next time. Returns why, if anything does."""
        self._collect()
        error = None
        for item, (lines, texts) in list(self._unwritten.items()):
            try:
                folder = self._folder(self._keys[item])
                if lines:
                    append(folder / METRICS, "".join(lines).encode(), is_lines=True)
                    lines.clear()
                if texts:
                    append(folder / DIARY, "".join(texts)[-TEXT_BYTES:].encode("utf-8", "backslashreplace"))
            except OSError as caught:
                error = caught
            else:
                del self._unwritten[item]
        return error

    def _collect(self) -> None:
        for new in self._feed.hand_on():
            if len(new) == 4:
                time, item, attempt, metrics = new
                line = {"time": time, "run": self._run, "attempt": attempt, "metrics": metrics}
                self._of(item).lines.append(json.dumps(line) + "\n")
            else:
                item, _, text = new
                self._of(item).texts.append(text)

    def _of(self, item: int) -> Unwritten:
        if item not in self._unwritten:
            self._unwritten[item] = Unwritten([], [])
        return self._unwritten[item]


def append(path: Path, data: bytes, is_lines: bool = False) -> None:
    """Add something to a file, all of it or nothing; behind a line that somebody was killed in the midst of, a new one begins."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        if is_lines and size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def rows_of(path: Path, item: int, run: int) -> Iterator[Row]:
    """Yield what an item has reported in a run, as far as it can be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        row = _row(line)
        if row is not None and row.get("run") == run:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                yield float(row["time"]), item, int(row["attempt"]), dict(row["metrics"])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # torn
        return None
    return row if isinstance(row, dict) else None
