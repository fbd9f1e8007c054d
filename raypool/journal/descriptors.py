"""Keeps this process from letting go, by mistake, of the locks that SQLite has on a journal.

The kernel drops all (POSIX) locks of a process on a file as soon as that process closes any descriptor of it, also one that has
nothing to do with the locks. Another process would then take the writer for gone, and delete the log that it goes on writing to.
So a database that SQLite writes in this process is opened in no other way here.

Source:
    SQLite, "How To Corrupt An SQLite Database File", section 2.2.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Identity: TypeAlias = "tuple[int, int]"
"""By which the kernel knows a file, whatever it is called."""

_written: set[Identity] = set()
_mutex = threading.RLock()


def identity(path: Path) -> Identity | None:
    """Return by which a file is known; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def bare(path: Path) -> Iterator[bool]:
    """Say whether a database may be opened without SQLite's knowledge; within this nobody here begins to write it."""
    with _mutex:
        yield identity(path) not in _written


@contextlib.contextmanager
def opening(path: Path) -> Iterator[None]:
    """Note, if all goes well in here, that a database is written in this process from now on."""
    with _mutex:
        yield
        known = identity(path)
        if known is not None:
            _written.add(known)


def closed(known: Identity | None) -> None:
    """Note that a database is not written here any more."""
    with _mutex:
        if known is not None:
            _written.discard(known)


def _forget() -> None:
    """In a forked child, which has none of its parent's locks."""
    global _mutex
    _mutex = threading.RLock()
    _written.clear()


os.register_at_fork(after_in_child=_forget)
