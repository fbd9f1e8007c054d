"""Folders on this machine: temporary ones, and the checkpoint folders of items.

A temporary folder exists as long as a process holds a lock on a file in it. A small process waits
for that lock and then removes the folder, however its holders have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from errno import EPERM
from pathlib import Path
from typing import Any, NamedTuple

from raypool.errors import InvalidValueError
from raypool.worker.running import TaskContext, in_task, note_here

LOCK = ".lock"

# It forks the part that stays, so that `run_aside` need not wait for that.
_REMOVER = """
import fcntl, os, shutil, sys
if not os.fork():
    try:
        held = os.open(os.path.join(sys.argv[1], ".lock"), os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
    except FileNotFoundError:  # no lock any more, so nobody holds it
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
        with contextlib.suppress(OSError):  # not every file system supports it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, is_lasting: bool = True) -> None:
    """Write a file for the owner only, in one step; if it is to last, it is on disk on return."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            file.write(data)
            if is_lasting:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            temporary.unlink()
        raise
    if is_lasting:
        sync_folder(path.parent)


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


# --- checkpoint folders of items that run in this process -----------------------------------------
#
# They are in a folder of this machine, which other machines may share, or are local copies
# (`LocalCopy`) of checkpoints behind a URL (`UrlStorage`).

PIECE_BYTES = 64 * 1024 * 1024
"""How much of a file is copied at once."""

JUST_NOW_NS = 100_000_000
"""A file written so shortly before a look at it may change again and look the same [ns]."""

TOKEN = ".token"
"""A file by which a machine finds out whether it sees the same folder as another."""

PARTIAL = ".partial"

Key = tuple[int, int, int]
"""The task, item and attempt of a folder."""


class CheckpointFolders:
    """Gives the items that a pool runs in this process their folders.

    `temporary` finds a folder on this machine that lasts as long as the pool.
    """

    def __init__(self, temporary: Callable[[], Path]) -> None:
        self.temporary = temporary
        self._storages: dict[str, UrlStorage | None] = {}  # by URL or folder; a folder needs none
        self._copies: dict[Key, LocalCopy] = {}
        self._locks: dict[Key, threading.RLock] = {}  # of copies that threads of a task ask for
        self._pid = os.getpid()

    def check_shared(self, folder: str) -> None:
        """Raise an error if this process does not see the driver's folder; the driver's does."""

    def folder(self, note: TaskContext, index: int) -> Path:
        """Return the folder of an item.

        Raises:
            OSError: It cannot be made or fetched.
            InvalidValueError: This machine does not see the folder for checkpoints.
        """
        if note.checkpoints is None:
            return make_private(self.temporary() / f"{note.task_id}-{index}" / "checkpoint")
        place, names = note.checkpoints
        if place not in self._storages:
            if "://" in place:
                self._storages[place] = UrlStorage(place)
            else:
                self.check_shared(place)
                self._storages[place] = None
        storage = self._storages[place]
        if storage is None:
            return make_private(Path(place) / names[index])
        key = (note.task_id, index, note.attempt)
        # One thread fetches. Reentrant, since a task's function for a departure may interrupt it
        # here, and ask for the folder, too.
        with self._locks.setdefault(key, threading.RLock()):
            if key not in self._copies:
                folder = self._folder_of_copy(key)
                shutil.rmtree(folder, ignore_errors=True)  # of a fetch that was interrupted
                self._copies[key] = LocalCopy(storage, names[index], folder / "checkpoint")
            return self._copies[key].folder

    def upload(self, note: TaskContext, index: int) -> None:
        """Upload what is in an item's folder now, if it is a copy.

        Raises:
            OSError: It cannot be uploaded.
        """
        key = (note.task_id, index, note.attempt)
        # a forked child leaves that to its parent
        if key in self._copies and os.getpid() == self._pid:
            with self._locks[key]:
                self._copies[key].upload()

    def end(self, note: TaskContext, index: int) -> None:
        """Upload the folder of an item that has ended, and remove the local copy.

        Raises:
            OSError: It cannot be uploaded.
        """
        key = (note.task_id, index, note.attempt)
        if key in self._locks:  # perhaps without a copy: it could not be fetched
            try:
                self.upload(note, index)
            finally:
                self._copies.pop(key, None)
                del self._locks[key]
                shutil.rmtree(self._folder_of_copy(key), ignore_errors=True)

    def _folder_of_copy(self, key: Key) -> Path:
        return self.temporary() / "-".join(map(str, key))


def temporary_here(own: TemporaryFolder) -> Callable[[], Path]:
    """Return what finds the temporary folder of a pool of this process; in a task, within its."""
    note = note_here() if in_task() else None
    if note is None or note.folders is None:
        return own.path
    folders, name = note.folders, uuid.uuid4().hex
    return lambda: make_private(folders.temporary() / name)


# --- copies for other items -----------------------------------------------------------------------


def checkpoint_time(place: str, name: str) -> float | None:
    """Return when a checkpoint in a folder or at a URL was written (Unix time [s]); None: never."""
    if "://" in place:
        return UrlStorage(place).record(name).get("time")
    folder = Path(place) / name
    return max(((folder / file).stat().st_mtime for file in files_in(folder)), default=None)


def copy_checkpoint(place: str, name: str, copy: str) -> None:
    """Copy a checkpoint in a folder or at a URL, whole or not at all.

    Raises:
        OSError: It cannot be copied.
    """
    if "://" in place:
        UrlStorage(place).copy(name, copy)
        return
    source, target = Path(place) / name, Path(place) / copy
    spare = make_folders(target.parent) / f"{target.name}{PARTIAL}"
    shutil.rmtree(spare, ignore_errors=True)
    shutil.copytree(source, spare, ignore=shutil.ignore_patterns(f"*{PARTIAL}"))
    shutil.rmtree(target, ignore_errors=True)
    spare.replace(target)


def remove_checkpoint(place: str, name: str) -> None:
    """Remove a checkpoint in a folder or at a URL, and what an interrupted copy left."""
    if "://" in place:
        UrlStorage(place).remove(name)
        return
    for folder in (name, f"{name}{PARTIAL}"):
        shutil.rmtree(Path(place) / folder, ignore_errors=True)


# --- shared folders -------------------------------------------------------------------------------


def token_of(folder: str) -> str:
    """Return a token that only machines that see this folder know; make both if necessary.

    Raises:
        OSError: The folder cannot be written.
    """
    file = make_folders(Path(folder)) / TOKEN
    with contextlib.suppress(FileExistsError):  # another process has made it: its token counts
        spare = file.with_name(f"{TOKEN}.{uuid.uuid4().hex}{PARTIAL}")
        spare.write_text(uuid.uuid4().hex)
        try:
            os.link(spare, file)  # atomic, and fails if another process was first
        finally:
            spare.unlink()
    return file.read_text()


def sees(folder: str, token: str) -> bool:
    """Return whether this machine sees the folder in which another one has found this token."""
    try:
        return (Path(folder) / TOKEN).read_text() == token
    except OSError:  # not there, or not readable: no place for its checkpoints either
        return False


# --- URLs -----------------------------------------------------------------------------------------


class StoredFile(NamedTuple):
    """A file of a checkpoint: its size [bytes], and the version that it has come with."""

    size: int
    version: str


Listing = dict[str, StoredFile]
"""The files of a checkpoint, by path in its folder."""


class UrlStorage:
    """Checkpoints by name at a URL that pyarrow or fsspec knows, such as "gs://..." or "s3://...".

    Changed files are written as a new version beside the one that counts. When all are there, the
    new version counts, in one step; then files that only the old one needed are removed. A process
    that is killed before leaves the old one. Each version is a folder, NAME/VERSION/FILE;
    NAME/checkpoint.json says which files count, and of which version.

    Raises:
        InvalidValueError: Such URLs are unknown, or this one cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = filesystem(url, "checkpoints")

    def record(self, name: str) -> dict[str, Any]:
        """Return the files of the current version, and its time; nothing before the first."""
        try:
            with self._files.open_input_stream(self._pointer(name)) as stream:
                known: dict[str, Any] = json.loads(stream.read())
                return known
        except FileNotFoundError:
            return {}

    def listing(self, name: str) -> Listing:
        """Return the files of the current version; none before the first."""
        files = self.record(name).get("files", {})
        return {file: StoredFile(*entry) for file, entry in files.items()}

    def read(self, name: str, file: str, version: str) -> Iterator[bytes]:
        """Yield a file in pieces."""
        with self._files.open_input_stream(self._place(name, file, version)) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece

    def copy(self, name: str, copy: str) -> None:
        """Copy the current version, as the version of another name."""
        version = self.begin(copy)
        files: Listing = {}
        for file, entry in self.listing(name).items():
            size = self.write(copy, version, file, self.read(name, file, entry.version))
            files[file] = StoredFile(size, version)
        self.publish(copy, version, files)

    def remove(self, name: str) -> None:
        """Remove all versions."""
        with contextlib.suppress(FileNotFoundError):  # there is none
            self._files.delete_dir(f"{self._root}/{name}")

    def begin(self, name: str) -> str:
        """Begin a new version, and remove versions that others have left unfinished."""
        from pyarrow.fs import FileSelector, FileType

        counted = {entry.version for entry in self.listing(name).values()}
        folder = FileSelector(f"{self._root}/{name}", allow_not_found=True)
        for info in self._files.get_file_info(folder):
            if info.type == FileType.Directory and info.base_name not in counted:
                self._files.delete_dir(info.path)
        return uuid.uuid4().hex[:8]

    def write(self, name: str, version: str, file: str, pieces: Iterable[bytes]) -> int:
        """Write a file into a version; return its size."""
        size = 0
        with self._open(self._place(name, file, version)) as stream:
            for piece in pieces:
                stream.write(piece)
                size += len(piece)
        return size

    def publish(self, name: str, version: str, files: Listing) -> None:
        """Let a complete version count; `files` are its own and those that have not changed."""
        places = [self._place(name, file, entry.version) for file, entry in files.items()]
        # another attempt may have begun a version since, and so removed this one
        sizes = [info.size for info in self._files.get_file_info(places)] if places else []
        if sizes != [entry.size for entry in files.values()]:
            raise FileNotFoundError(
                f"another attempt of this item has begun to save in {self._url}/{name}"
            )
        old = self.listing(name)
        spare = f"{self._pointer(name)}.{version}"
        with self._open(spare) as stream:
            stream.write(json.dumps({"files": files, "time": time.time()}).encode())
        # one step for readers, also where a move is a copy
        self._files.move(spare, self._pointer(name))
        for file, entry in old.items():
            if files.get(file) != entry:
                # what fails here is removed when the next version is begun
                with contextlib.suppress(OSError):
                    self._files.delete_file(self._place(name, file, entry.version))

    def _open(self, place: str) -> Any:
        try:
            return self._files.open_output_stream(place)
        except FileNotFoundError:  # where folders have to be made
            self._files.create_dir(place.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(place)

    def _pointer(self, name: str) -> str:
        return f"{self._root}/{name}/checkpoint.json"

    def _place(self, name: str, file: str, version: str) -> str:
        return f"{self._root}/{name}/{version}/{file}"


def filesystem(url: str, what: str) -> tuple[Any, str]:
    """Return the file system and path of a URL; `what` names the argument that it was given for.

    Raises:
        InvalidValueError: Such URLs are unknown, or this one cannot be reached.
    """
    from pyarrow import fs

    try:
        try:
            return fs.FileSystem.from_uri(url)  # type: ignore[no-any-return]
        except ValueError:  # pyarrow.lib.ArrowInvalid: it does not know this kind
            from fsspec.core import url_to_fs

            files, root = url_to_fs(url)
            return fs.PyFileSystem(fs.FSSpecHandler(files)), root
    except (ValueError, ImportError, OSError) as error:
        scheme = url.partition("://")[0]
        raise InvalidValueError(
            f"{what}={url!r} cannot be used from here: {error}. {what.capitalize()} can be kept in"
            f" a folder, or at a URL that pyarrow or an installed fsspec package knows ({scheme}://"
            " may need one, gcsfs or s3fs for instance)."
        ) from error


# --- local copies ---------------------------------------------------------------------------------


class Look(NamedTuple):
    """How a file looked when it was uploaded, to tell whether it has changed since."""

    inode: int
    size: int
    changed_ns: int


class LocalCopy:
    """A copy, in an empty folder of this machine, of an item's checkpoint in a storage.

    Raises:
        OSError: The checkpoint cannot be fetched.
    """

    def __init__(self, storage: UrlStorage, name: str, folder: Path) -> None:
        self.folder = make_private(folder)
        self._storage = storage
        self._name = name
        self._kept = storage.listing(name)
        for file, entry in self._kept.items():
            target = self.folder / file
            make_private(target.parent)
            with target.open("wb") as stream:
                stream.writelines(storage.read(name, file, entry.version))
            if target.stat().st_size != entry.size:
                raise OSError(f"{file} of the checkpoint {name} changed while it was fetched")
            before = time.time_ns() - JUST_NOW_NS  # then every later change looks different
            os.utime(target, ns=(before, before))
        self._looks = {file: _look_at(self.folder / file) for file in self._kept}

    def upload(self) -> None:
        """Upload what has changed; until all of it has arrived, the old version counts.

        Raises:
            OSError: It cannot be uploaded.
        """
        looks = {file: _look_at(self.folder / file) for file in files_in(self.folder)}
        changed = [file for file, look in looks.items() if look != self._looks.get(file)]
        if not changed and looks.keys() == self._kept.keys():
            return
        version = self._storage.begin(self._name)
        files: Listing = {file: self._kept[file] for file in looks if file not in changed}
        for file in changed:
            with (self.folder / file).open("rb") as stream:
                pieces = iter(functools.partial(stream.read, PIECE_BYTES), b"")
                size = self._storage.write(self._name, version, file, pieces)
            files[file] = StoredFile(size, version)
        self._storage.publish(self._name, version, files)
        self._kept = files
        self._looks = looks


def files_in(folder: Path) -> Iterator[str]:
    """Yield the paths in a folder of its files, except unfinished ones."""
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            if not name.endswith(PARTIAL) and file.is_file():
                yield str(file.relative_to(folder))


def _look_at(file: Path) -> Look:
    """Return how a file looks, once no change after this can look the same."""
    found = file.stat()
    wait_ns = found.st_mtime_ns + JUST_NOW_NS - time.time_ns()
    if 0 < wait_ns < 2 * JUST_NOW_NS:  # else it is old, or its time is of a clock that was set
        time.sleep(wait_ns / 1e9)
    return Look(found.st_ino, found.st_size, found.st_mtime_ns)
