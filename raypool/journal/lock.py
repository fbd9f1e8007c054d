"""Locks on a run: one writer at a time per folder; and the protection of SQLite's own locks.

The kernel holds these locks, so they end with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from datetime import datetime
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import TypeAlias

import psutil

from raypool.errors import JournalError

TRAINING_LOCK = ".training.lock"

CLOCK_S = 60.0
"""By how much this machine's clock may have been set since a process began [s]."""

logger = logging.getLogger("raypool")


class RunLock:
    """A lock on an existing folder, held until `release` or the end of the process.

    Forked children do not hold it. Without references, as after a Ctrl-C, it is released. While it
    is held, its file names the holder, and the number of outcomes in the journal (`note_outcomes`);
    `outcomes_before` is the number left by a killed holder.

    Raises:
        JournalError: Another process has it (the message says which, where and since when), or the
            file cannot be written.

    Example:
        >>> import tempfile
        >>> lock = RunLock(Path(tempfile.mkdtemp()))
        >>> lock.release()
    """

    def __init__(self, folder: Path, name: str = "journal.lock") -> None:
        self._path = folder / name
        # not through a link: the file that it leads to would be overwritten
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise not_writable(folder, error) from error
        try:
            self._take(folder)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._end = weakref.finalize(self, _let_go, self._descriptor)
        self._end.atexit = False  # a run that is open at the end of the process was interrupted
        _held.add(self)

    def note_outcomes(self, count: int) -> None:
        """Note the number of outcomes in the journal, so that the loss of its log shows."""
        if self._end.alive:
            self._write({**self._note, "outcomes": count})

    def _write(self, note: dict[str, object]) -> None:
        data = json.dumps(note).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (EAGAIN, EACCES):
                try:
                    note = json.loads(os.pread(self._descriptor, 4096, 0))
                    holder = f"process {note['pid']} on {note['host']}, since {note['since']}"
                    if (note["pid"], note["host"]) == (os.getpid(), socket.gethostname()):
                        holder = f"another call in this process, since {note['since']}"
                except (OSError, ValueError, KeyError, TypeError):
                    holder = "another process"
                raise JournalError(
                    f"{folder} is in use by {holder}. Wait until it ends, or use another folder.",
                    run_dir=str(folder),
                ) from None
            # a file system without locks: that is no reason to refuse the run
            logger.warning(
                "%s cannot be locked (%s): make sure that no other process uses it.",
                folder,
                error.strerror,
            )
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        self.outcomes_before = noted_outcomes(folder, self._path.name)
        self._note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        # the old number: if this process is killed before it writes, the loss still shows
        self._write({**self._note, "outcomes": self.outcomes_before})

    def release(self) -> None:
        """Release the lock."""
        _held.discard(self)
        self._end()

    def _forget(self) -> None:
        if self._end.detach():
            os.close(self._descriptor)


def not_writable(folder: Path, error: OSError) -> JournalError:
    """Return the error for a folder that cannot be made, or in which no file can be made."""
    return JournalError(
        f"{folder} cannot be written ({error.strerror or error}). Use a folder that belongs to"
        " you.",
        run_dir=str(folder),
    )


def _let_go(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)  # empty: `is_in_use` says no
    os.close(descriptor)


def noted_outcomes(folder: Path, name: str = "journal.lock") -> int:
    """Return the number of outcomes that a folder's current or killed user noted, or 0."""
    try:
        return int(json.loads((folder / name).read_bytes())["outcomes"])
    # nobody has used it, or its last user has released it
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def is_in_use(folder: Path, name: str = "journal.lock") -> bool:
    """Whether a process uses a folder, or was killed while it did."""
    try:
        return (folder / name).stat().st_size > 0
    except OSError:  # nobody has ever locked it
        return False


def is_running(folder: Path, name: str = "journal.lock") -> bool:
    """Whether the process that a folder's lock names still uses it, as far as can be seen here."""
    try:
        note = json.loads((folder / name).read_bytes())
        if note["host"] != socket.gethostname():
            return True  # of another machine's process nothing is known
        pid, since = int(note["pid"]), datetime.fromisoformat(note["since"]).timestamp()
        # one that began later has its number, such as after the restart of a container
        return is_alive(pid) and psutil.Process(pid).create_time() <= since + CLOCK_S
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which nobody has waited for
    except psutil.Error:
        return False


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_all() -> None:
    # in a forked child: the lock is the parent's, and would otherwise outlive it
    for lock in list(_held):
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


# --- SQLite's locks -------------------------------------------------------------------------------
#
# The kernel drops all (POSIX) locks of a process on a file as soon as that process closes any
# descriptor of it, even one that has nothing to do with the locks. Another process would then take
# the writer for dead, and delete its log. So a database that SQLite writes in this process is
# opened in no other way here.
#
# Source:
#     SQLite, "How To Corrupt An SQLite Database File", section 2.2.


Identity: TypeAlias = "tuple[int, int]"
"""Device and inode, which identify a file under any name."""

_written: set[Identity] = set()
# for `_written`, also held while a file is read without SQLite, or opened with it
_mutex = threading.RLock()


def identity(path: Path) -> Identity | None:
    """Return the identity of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def bare(path: Path) -> Iterator[bool]:
    """Yield whether a file may be opened without SQLite; no writer here starts meanwhile."""
    with _mutex:
        yield identity(path) not in _written


@contextlib.contextmanager
def opening(path: Path) -> Iterator[None]:
    """Note, on success, that this process writes a database from now on."""
    with _mutex:
        yield
        known = identity(path)
        if known is not None:
            _written.add(known)


def closed(known: Identity | None) -> None:
    """Note that this process no longer writes a database."""
    with _mutex:
        if known is not None:
            _written.discard(known)


def _forget() -> None:
    # a forked child has none of its parent's locks; another thread may have held the mutex
    global _mutex
    _mutex = threading.RLock()
    _written.clear()


os.register_at_fork(after_in_child=_forget)
