"""Outcomes of items, as the loop passes them and as rows of the journal; and errors as text."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from raypool.errors import (
    Portable,
    RemoteTraceback,
    SerializationError,
    TaskError,
    notes_of,
    traceback_text,
)
from raypool.journal.files import (
    Damaged,
    check_owner,
    check_run,
    digest,
    dump,
    load,
    make_folder,
    read_file,
)
from raypool.journal.plain import decode, encode
from raypool.journal.schema import MAX_PICKLE_BYTES, MAX_TEXT_BYTES
from raypool.results import Row
from raypool.worker.folders import write_file

logger = logging.getLogger("raypool")

DATABASE = "journal.sqlite"

PARTS = "parts"
"""The folder with parts of a run: journals of processes elsewhere that run some of its items."""


COUNTS = frozenset({"finished", "failed"})
"""Statuses that are outcomes of an item; others only describe attempts."""


class Outcome(NamedTuple):
    """The outcome of an attempt at an item.

    Attributes:
        key: The key of the item.
        attempt: The number of the attempt in this run, from 1.
        status: "finished", "failed", "lost" (it runs again, its worker was lost) or "retried" (it
            runs again, by `retry_on`).
        value: The return value.
        error: The exception.
        words: The description of a loss.
        started_at: The start, Unix time [s].
        duration_s: The duration [s].
        worker: The worker's number in its pool.
        gpu: The GPU's index on its machine.
        host: The name of the machine.
    """

    key: str
    attempt: int
    status: str
    value: Any = None
    error: BaseException | None = None
    words: str | None = None
    started_at: float | None = None
    duration_s: float | None = None
    worker: int | None = None
    gpu: int | None = None
    host: str | None = None


class Stored(NamedTuple):
    """An outcome in the journal: a row of `attempts`; the place of its value: `schema.STORED`."""

    n: int
    key: str
    run: int
    attempt: int
    status: str
    body: str | None
    pickled: bytes | None
    file: str | None
    size: int | None
    digest: bytes | None
    started_at: float | None
    duration_s: float | None
    worker: int | None
    gpu: int | None
    host: str | None


class StoredAt(NamedTuple):
    """The place of a value: the columns `schema.STORED`."""

    body: str | None = None
    pickled: bytes | None = None
    file: str | None = None
    size: int | None = None
    digest: bytes | None = None


NOWHERE = StoredAt(file="")
"""The place of a value that could not be stored."""


def put_away(value: Any, stem: str, folder: Path) -> StoredAt:
    """Store a value in a row if it is small, else in a file of this name; return its place.

    Raises:
        OSError: The file cannot be written.
        SerializationError: It cannot be pickled.
    """
    text = encode(value)
    if text is None:
        data, name = dump(value), f"{stem}.pkl"
        if len(data) <= MAX_PICKLE_BYTES:
            return StoredAt(pickled=data)
    else:
        data, name = text.encode(), f"{stem}.json"
        if len(data) <= MAX_TEXT_BYTES:
            return StoredAt(body=text)
    make_folder(folder)
    write_file(folder / name, data)
    return StoredAt(file=name, size=len(data), digest=digest(data))


def get_back(place: StoredAt, run_dir: Path, key: str) -> Any:
    """Return a value that was put away.

    Raises:
        Damaged: It is gone, has changed, or cannot be opened here.
    """
    try:
        if place.body is not None:
            return decode(place.body)
        if place.pickled is not None:
            check_run(run_dir)
            return load(place.pickled)
        if not place.file or place.digest is None:
            raise Damaged("it was never stored, since it cannot be pickled")
        path = run_dir / "items" / key / place.file
        data = read_file(path, place.size or 0, place.digest)
        if path.suffix == ".json":
            return decode(data.decode())
        check_run(run_dir)  # the journal names the file to open
        check_owner(path)
        return load(data)
    except Damaged as error:
        raise type(error)(f"The saved value of item {key} cannot be used: {error}.") from error


def to_row(outcome: Outcome, run: int, run_dir: Path) -> tuple[Any, ...]:
    """Return a row of `attempts` without its number; large values are in files then.

    Raises:
        OSError: The file cannot be written.
        SerializationError: The value cannot be pickled.
    """
    folder = run_dir / "items" / outcome.key
    stem = f"{run}-{outcome.attempt}"
    if outcome.status == "finished":
        place = put_away(outcome.value, f"value-{stem}", folder)
    elif outcome.error is not None:
        text, place = described(outcome.error), StoredAt()
        if outcome.status == "failed":
            with contextlib.suppress(SerializationError):  # its text has to do
                place = put_away(Portable(outcome.error), f"error-{stem}", folder)
        place = place._replace(body=text)
    else:
        place = StoredAt(body=_fitting({"text": outcome.words or ""}))
    host = None if outcome.host is None else _clean(outcome.host)[:255]
    times = (outcome.started_at, outcome.duration_s, outcome.worker, outcome.gpu, host)
    return (outcome.key, run, outcome.attempt, outcome.status, *place, *times)


def error_of(stored: Stored, run_dir: Path) -> BaseException:
    """Return the exception of a failed item: itself, or a `TaskError` with its text."""
    said = _said(stored.body)
    try:
        opened = get_back(StoredAt(None, *stored[6:10]), run_dir, stored.key)
    except Damaged:  # its text is in the row
        opened = None
    if isinstance(opened, BaseException):
        error = opened
    else:
        kind, text = said.get("type"), said.get("text")
        unknown = str(text or "It failed; nothing more is known.")
        error = TaskError(f"{kind}: {text}" if kind else unknown)
    with contextlib.suppress(Exception):  # the user's class may refuse attributes
        known = getattr(error, "__notes__", ())
        for note in said.get("notes", ()):
            if note not in known:
                error.add_note(note)
        if said.get("traceback") and error.__cause__ is None:
            error.__cause__ = RemoteTraceback(said["traceback"])
    return error


def row_of(stored: Stored) -> Row:
    """Return what a journal knows of an attempt at an item."""
    return Row(
        stored.status,
        stored.duration_s,
        stored.started_at,
        stored.worker,
        stored.gpu,
        stored.attempt,
        host=stored.host,
        run=stored.run,
    )


def words_of(stored: Stored) -> str | None:
    """Return the description of an attempt without a value, in a line, as in a loop's table."""
    said = _said(stored.body) if stored.status != "finished" else {}
    kind = str(said.get("type") or "").rpartition(".")[2]
    text = str(said.get("text") or "")
    return (f"{kind}: {text}" if kind else text) or None


def _said(body: str | None) -> dict[str, Any]:
    try:
        said = json.loads(body or "{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


# --- errors as text -------------------------------------------------------------------------------


def described(error: BaseException) -> str:
    """Describe an exception as JSON that fits into a row: type, text, notes and traceback."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        lines = cause.text
    elif error.__traceback__ is not None:
        lines = _safely(lambda: traceback_text(error))
    else:
        lines = ""
    kind = type(error)
    said = {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "text": _safely(lambda: str(error)),
        "notes": notes_of(error),
        "traceback": lines,
    }
    return _fitting(said)


def _safely(make: Any) -> str:
    """Return a text that user code makes, which may raise."""
    try:
        return str(make())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<its text cannot be made: {type(error).__name__}>"


def _fitting(said: dict[str, Any]) -> str:
    """Return JSON that fits into a row: of long messages the start, of tracebacks the end."""
    limit = MAX_TEXT_BYTES
    while True:
        cut = {
            name: (
                [_cut(note, limit // 4) for note in entry[:8]]
                if isinstance(entry, list)
                else _cut(entry, limit, name == "traceback")
            )
            for name, entry in said.items()
        }
        text = json.dumps(cut, ensure_ascii=False)
        if len(text.encode()) <= MAX_TEXT_BYTES:
            return text
        limit //= 2


def _cut(text: str, limit: int, keep_end: bool = False) -> str:
    text = _clean(text)
    if len(text) <= limit:
        return text
    return f"[...]{text[-limit:]}" if keep_end else f"{text[:limit]}[...]"


def _clean(text: str) -> str:
    """Return a text that can be written: surrogates become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
