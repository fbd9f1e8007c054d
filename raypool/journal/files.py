"""Files of a run: written in one step, for the owner only, read only if unchanged; and pickles.

Opening a pickle can run code. So a pickle is opened only if no other user can have written to the
run, and its file has the size and hash that the journal says.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Any

from raypool.channel import tensors
from raypool.errors import SerializationError
from raypool.worker.folders import sync_folder

REPORTS = "training_reports.jsonl"
"""The file of a training with the reports of rank 0 up to the last checkpoint, a line each."""

METRICS, DIARY = "metrics.jsonl", "diary.txt"
"""The files of an item with its reports, a line each, and with its output."""

DIGEST_BYTES = 16

MAX_TWICE_BYTES = 16 * 1024 * 1024
"""A smaller pickle [bytes] that needs the user's script is stored twice, also without that need."""


class Damaged(Exception):
    """A stored value cannot be read back; the text says which and why."""


class Unopened(Damaged):
    """It is whole, but what it needs cannot be imported here."""


def make_folder(path: Path) -> None:
    """Make a folder and its parents, for the owner only; they are on disk when this returns."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # another process has just made it
        path.mkdir(mode=0o700)
        sync_folder(path.parent)


def append(path: Path, data: bytes, is_lines: bool = False) -> None:
    """Append to a file, all or nothing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        # after a line that was cut off by a crash, a new one begins
        if is_lines and size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            with contextlib.suppress(OSError):  # readers skip a line that is cut off
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def digest(data: bytes) -> bytes:
    """Return the hash of a file's content, as the journal has it."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def read_file(path: Path, size: int, known_digest: bytes) -> bytes:
    """Return the content of a file.

    Raises:
        Damaged: It does not exist, cannot be read, or has changed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
    if len(data) != size or digest(data) != known_digest:
        raise Damaged(f"{path} has changed since it was written ({len(data):,} of {size:,} bytes)")
    return data


JOURNAL = ("journal.sqlite", "journal.sqlite-wal", "journal.salvaged.sqlite")
"""The files that rows are read from."""


def distrust(path: Path) -> str | None:
    """Return why others may have written to a file or folder, and what to do, or None."""
    status = path.stat()
    if status.st_uid != os.getuid():
        return (
            f"{path} belongs to user {status.st_uid}, and a pickle in it could run code as you: if"
            " you trust it, chown it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"{path} can be changed by others, and a pickle in it could run code as you: if you"
            " trust it, chmod go-w it"
        )
    return None


def check_owner(path: Path) -> None:
    """Check that code in this file may be run here.

    Raises:
        Damaged: It belongs to somebody else, or others may write to it.
    """
    try:
        reason = distrust(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
    if reason is not None:
        raise Damaged(reason)


def check_run(run_dir: Path) -> None:
    """Check that no other user can have written to the journal in this folder.

    Raises:
        Damaged: The folder or a file of the journal is not yours alone to write.
    """
    check_owner(run_dir)
    for name in JOURNAL:
        with contextlib.suppress(FileNotFoundError):  # SQLite removes its log at the end
            (run_dir / name).lstat()
            check_owner(run_dir / name)


def is_trusted(run_dir: Path) -> bool:
    """Whether no other user can have written to the journal in this folder."""
    try:
        check_run(run_dir)
    except Damaged:
        return False
    return True


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return tensors.reduced(value)


@functools.cache
def cloud_pickler() -> Any:
    """Return the kind of pickler that takes code along which other processes cannot import."""
    import cloudpickle  # imported late: most values do without it

    class CloudPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            way = tensors.reduced(value)
            return super().reducer_override(value) if way is NotImplemented else way

    return CloudPickler


def _pickled(value: Any, pickler: Any) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=5).dump(value)
    return file.getvalue()


def cloudpickled(value: Any) -> bytes:
    """Pickle a value, including code that other processes cannot import.

    Raises:
        SerializationError: It cannot be pickled, whatever its code has raised.
    """
    try:
        return _pickled(value, cloud_pickler())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = type(value).__name__
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SerializationError(
            f"The value cannot be stored: a {kind} cannot be pickled ({reason}). Return the values"
            " that it is made from.",
            what=f"a {kind}",
        ) from error


def dump(value: Any) -> bytes:
    """Pickle a value. If it needs a class of the script, a second pickle that includes it follows.

    Raises:
        SerializationError: It cannot be pickled, whatever its code has raised.
    """
    try:
        data = _pickled(value, _Pickler)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the value's own code may raise anything
        return cloudpickled(value)
    if b"__main__" not in data or len(data) > MAX_TWICE_BYTES:
        return data
    try:
        return data + cloudpickled(value)
    except SerializationError:  # then it can be opened only where the script is
        return data


def load(data: bytes) -> Any:
    """Return a pickled value; without the script, from the second pickle.

    Raises:
        Unopened: It cannot be opened here, whatever its code has raised.
    """
    try:
        return pickle.loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        first_error = error
    try:
        # the second pickle is behind the first
        import pickletools

        file = io.BytesIO(data)
        for _ in pickletools.genops(file):
            pass
        return pickle.loads(data[file.tell() :])
    except KeyboardInterrupt:
        raise
    except BaseException:
        hint = ""
        if isinstance(first_error, ImportError):
            hint = "; do this in the folder of that module"
        raise Unopened(
            f"it cannot be opened here ({type(first_error).__name__}: {first_error}){hint}"
        ) from first_error
