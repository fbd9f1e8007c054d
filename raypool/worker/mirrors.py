"""The folders in which the items that run here keep their checkpoints, and copies of those that are kept elsewhere."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from raypool.folders import TemporaryFolder, make_private
from raypool.worker.homes import PIECE_BYTES, Entry, Home, Listing, UrlHome, files_in
from raypool.worker.running import Running, in_task, note_here

JUST_NOW_NS = 100_000_000
"""A file that was written so short a time before it was looked at may be written again without looking different [ns]."""

FindHome = Callable[[str], Home | None]
"""Returns who brings files to and from a place that is no folder of this machine; None if it is one."""


def home_here(home: str) -> Home | None:
    """Return who brings files to and from a place, for a process whose folders are those that are meant."""
    return UrlHome(home) if "://" in home else None


def temporary_here(own: TemporaryFolder) -> Callable[[], Path]:
    """Return what gives a pool of this process its folder for temporary files: in a task it is in that of the task's pool."""
    note = note_here() if in_task() else None
    if note is None or note.folders is None:
        return own.path
    folders, name = note.folders, uuid.uuid4().hex
    return lambda: make_private(folders.temporary() / name)


class Look(NamedTuple):
    """How a file looked when it was sent; another look means that it has changed."""

    inode: int
    size: int
    changed_ns: int


class Mirror:
    """A copy of an item's checkpoint on this machine, and what of it is at home.

    Args:
        home: Where it is kept.
        name: Its name there.
        folder: For the copy; nothing is in it.

    Raises:
        OSError: It cannot be fetched.
    """

    def __init__(self, home: Home, name: str, folder: Path) -> None:
        self.folder = make_private(folder)
        self._home = home
        self._name = name
        self._kept = home.listing(name)
        self._looks: dict[str, Look] = {}
        for file, entry in self._kept.items():
            self._fetch(file, entry)

    def _fetch(self, file: str, entry: Entry) -> None:
        target = self.folder / file
        make_private(target.parent)
        with target.open("wb") as stream:
            for piece in self._home.read(self._name, file, entry):
                stream.write(piece)
        if target.stat().st_size != entry.size:
            raise OSError(f"{file} of the checkpoint {self._name} changed while it was fetched")
        look = _look_at(target)
        if look is not None:
            self._looks[file] = look

    def send(self) -> None:
        """Bring home what has changed; until all of it is there, what was there before counts.

        Raises:
            OSError: It cannot be brought there.
        """
        looks = {file: _look_at(self.folder / file) for file, _ in files_in(self.folder)}
        changed = [file for file, look in looks.items() if look is None or look != self._looks.get(file)]
        if not changed and looks.keys() == self._kept.keys():
            return
        version = self._home.begin(self._name)
        files: Listing = {file: self._kept[file] for file in looks if file not in changed}
        for file in changed:
            sent = Sent(self.folder / file)
            self._home.write(self._name, version, file, sent)
            files[file] = Entry(sent.size, version)
        self._home.publish(self._name, version, files)
        self._kept = files
        self._looks = {file: look for file, look in looks.items() if look is not None}


class Sent:
    """A file that is read in pieces, at least one; how much it was in the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.size = 0

    def __iter__(self) -> Iterator[bytes]:
        with self._file.open("rb") as stream:
            piece = stream.read(PIECE_BYTES)
            while True:
                self.size += len(piece)
                yield piece
                if not (piece := stream.read(PIECE_BYTES)):
                    return


def _look_at(file: Path) -> Look | None:
    """Return how a file looks; None if that will not tell whether it has changed."""
    found = file.stat()
    if abs(time.time_ns() - found.st_mtime_ns) < JUST_NOW_NS:
        return None
    return Look(found.st_ino, found.st_size, found.st_mtime_ns)


Key = tuple[int, int, int]
"""Which folder: of which task, item and attempt."""


class ItemFolders:
    """Gives the items that a pool runs in this process their folders; see `raypool.worker.running.Folders`.

    Args:
        temporary: Gives a folder for what is kept as long as the pool.
        find_home: Finds out who brings files home, if that is needed.
    """

    def __init__(self, temporary: Callable[[], Path], find_home: FindHome) -> None:
        self.temporary = temporary
        self._find_home = find_home
        self._homes: dict[str, Home | None] = {}
        self._mirrors: dict[Key, Mirror] = {}
        self._locks: dict[Key, threading.RLock] = {}  # of mirrors that threads of a task ask for
        self._pid = os.getpid()

    def folder(self, note: Running, index: int) -> Path:
        """Return the folder of an item.

        Raises:
            OSError: It cannot be made or fetched.
        """
        if note.checkpoints is None:
            return make_private(self.temporary() / f"{note.task_id}-{index}" / "checkpoint")
        place, names = note.checkpoints
        if place not in self._homes:
            self._homes[place] = self._find_home(place)
        home = self._homes[place]
        if home is None:
            return make_private(Path(place) / names[index])
        key = (note.task_id, index, note.attempt)
        with self._locks.setdefault(key, threading.RLock()):
            if key not in self._mirrors:
                copy = self.temporary() / "-".join(map(str, key))
                shutil.rmtree(copy, ignore_errors=True)  # of a fetch that was interrupted
                self._mirrors[key] = Mirror(home, names[index], copy / "checkpoint")
            return self._mirrors[key].folder

    def bring_home(self, note: Running, index: int) -> None:
        """See to it that what is in the folder now is where it is kept; in a forked child that is for its parent to do.

        Raises:
            OSError: It cannot be brought there.
        """
        key = (note.task_id, index, note.attempt)
        if key in self._mirrors and os.getpid() == self._pid:
            with self._locks[key]:
                self._mirrors[key].send()

    def end(self, note: Running, index: int) -> None:
        """Bring home what is in the folder of an item that has ended, and let go of the copy.

        Raises:
            OSError: It cannot be brought there.
        """
        key = (note.task_id, index, note.attempt)
        if key in self._mirrors:
            self.bring_home(note, index)
            mirror = self._mirrors.pop(key)
            del self._locks[key]
            shutil.rmtree(mirror.folder.parent, ignore_errors=True)
