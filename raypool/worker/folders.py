"""Folders on this machine for checkpoints and temporary files.

A temporary folder exists as long as a process holds a lock on a file in it. A small process waits
for that lock and then removes the folder, however its holders have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable
from errno import EPERM
from pathlib import Path

LOCK = ".lock"

# It forks the part that stays, so that `run_aside` need not wait for that.
_REMOVER = """
import fcntl, os, shutil, sys
if not os.fork():
    try:
        held = os.open(os.path.join(sys.argv[1], ".lock"), os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
    except FileNotFoundError:
        pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def make_private(folder: Path) -> Path:
    """Make a folder and its missing parents for this user only; return it.

    Raises:
        PermissionError: It belongs to another user, who could read and change its contents.
    """
    make_folders(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
            is_link = stat.S_ISLNK(status.st_mode)
            whose = "it is a link" if is_link else f"it belongs to user {status.st_uid}"
            raise PermissionError(
                EPERM, f"{whose}, and others could change its contents", str(folder)
            ) from None
    return folder


def make_folders(folder: Path) -> Path:
    """Make a folder and its missing parents for this user only; existing ones may be anyone's."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that files made or renamed in it are there after a crash too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TemporaryFolder:
    """A folder for temporary files, made at first use; it goes with this object or the process."""

    def __init__(self) -> None:
        self._path = _new_name()  # now, so that forked children have the same
        self._remove: Callable[[], object] | None = None

    def path(self) -> Path:
        """Return the folder, which exists."""
        if self._remove is None:
            held = hold(self._path)
            self._remove = weakref.finalize(self, _let_go, self._path, held, os.getpid())
            # after `hold`: else it would find no lock, and remove the folder at once
            run_aside(_REMOVER, self._path)
        return self._path

    def remove(self) -> None:
        """Remove it, if it was made; the next `path` is a new one."""
        remove, self._remove = self._remove, None
        if remove is not None:
            self._path = _new_name()  # somebody still waits for the end of the old one
            remove()


def run_aside(code: str, folder: Path) -> None:
    """Run Python code in a small process, with the name of a folder; it may fork one that stays."""
    # no open files of this process: a reader of its output would wait for the other's end
    none = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", code, str(folder)]
    subprocess.run(
        command, check=False, start_new_session=True, cwd="/", stdin=none, stdout=none, stderr=none
    )


def _new_name() -> Path:
    return Path(tempfile.gettempdir()) / f"raypool-{uuid.uuid4().hex}"


def hold(folder: Path) -> int:
    """Make a temporary folder, and keep it from being removed while this process is alive.

    Returns:
        A descriptor; once it is closed, this process does not need the folder any more.
    """
    while True:
        make_private(folder)
        try:
            held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # it has just been removed
            continue
        fcntl.flock(held, fcntl.LOCK_SH)
        if os.fstat(held).st_nlink:
            return held
        os.close(held)  # the file was removed while this waited for its lock


def remove_unheld(folder: Path) -> None:
    """Remove a temporary folder if no process holds it."""
    try:
        held = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # somebody is about to hold it
        return
    try:
        with contextlib.suppress(OSError):  # another process holds it
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _let_go(folder: Path, held: int, pid: int) -> None:
    # a forked child leaves that to its parent
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


_of_process = TemporaryFolder()


def folder_of_process() -> Path:
    """Return a folder for code outside a pool; it goes with the process."""
    return make_private(_of_process.path() / "checkpoint")
