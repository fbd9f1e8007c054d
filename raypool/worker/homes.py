"""Where checkpoints are kept that are made on machines which do not see that place: a folder of another machine, or a URL.

Both are used in the same way: the files that have changed are sent, as a new version, beside the one that counts; when all are
there, the new one counts, in one step; then what only the old one needed is removed. Whoever is killed before leaves the old one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raypool.errors import InvalidValueError
from raypool.folders import make_folders, sync_folder

PIECE_BYTES = 64 * 1024 * 1024
"""So much of a file travels at once."""

TOKEN = ".token"
"""A file in a folder by which a machine finds out whether it sees the same folder as another."""

PARTIAL = ".partial"

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


class Entry(NamedTuple):
    """A file of a checkpoint: how large it is, and which version it has come with ("": whichever counts now)."""

    size: int
    version: str = ""


Listing = dict[str, Entry]
"""The files of a checkpoint, by their paths in its folder."""


class Home(Protocol):
    """A place where checkpoints are kept, each under a name."""

    def listing(self, name: str) -> Listing:
        """Return the files of the version that counts; none, if there is no checkpoint yet."""

    def read(self, name: str, file: str, entry: Entry) -> Iterable[bytes]:
        """Return a file, in pieces."""

    def begin(self, name: str) -> str:
        """Begin a new version; what others have left unfinished there is given up."""

    def write(self, name: str, version: str, file: str, pieces: Iterable[bytes]) -> None:
        """Put a file into a version."""

    def publish(self, name: str, version: str, files: Listing) -> None:
        """Let a version count, when it is complete: the files that were put into it, and those of before that are in `files`."""


# --- folders ----------------------------------------------------------------------------------------------------------


class FolderHome:
    """A folder of this machine, for those that do not see it; for all others a checkpoint in it is a plain folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def token(self) -> str:
        """Return what only those know who see this folder."""
        file = make_folders(self._root) / TOKEN
        with contextlib.suppress(FileExistsError):
            spare = file.with_name(f"{TOKEN}.{uuid.uuid4().hex}{PARTIAL}")
            spare.write_text(uuid.uuid4().hex)
            try:
                os.link(spare, file)  # in one step, and only if there is none
            finally:
                spare.unlink()
        return file.read_text()

    def listing(self, name: str) -> Listing:
        """Return the files of a checkpoint."""
        folder = self._root / name
        previous = _previous(folder)
        if previous.is_dir() and not folder.exists():  # somebody was killed between two steps of `_exchange`
            previous.rename(folder)
        return {file: Entry(size) for file, size in files_in(folder)}

    def read_piece(self, name: str, file: str, offset: int) -> bytes:
        """Return a piece of a file."""
        with (self._root / name / file).open("rb") as stream:
            stream.seek(offset)
            return stream.read(PIECE_BYTES)

    def begin(self, name: str) -> str:
        """Begin a new version."""
        folder = self._root / name
        make_folders(folder.parent)
        for left in folder.parent.glob(f".{folder.name}.*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        version = uuid.uuid4().hex[:8]
        _partial(folder, version).mkdir(mode=0o700)
        return version

    def write_piece(self, name: str, version: str, file: str, piece: bytes) -> None:
        """Put the next piece of a file into a version."""
        target = _of_version(self._root / name, version) / file
        make_folders(target.parent)
        with open(target, "ab", opener=_private) as stream:
            stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, name: str, version: str, files: Listing) -> None:
        """Let a version count."""
        folder = self._root / name
        partial = _of_version(folder, version)
        for file, entry in files.items():
            if entry.version != version:
                _take_over(folder / file, partial / file)
        for path, _, _ in os.walk(partial):
            sync_folder(Path(path))
        _exchange(partial, folder)
        sync_folder(folder.parent)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(_previous(folder), ignore_errors=True)


def sees(root: str, token: str) -> bool:
    """Return whether this machine sees the folder of another one by that path, given the token there."""
    try:
        return (Path(root) / TOKEN).read_text() == token
    except OSError:
        return False


def files_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the files of a folder, but for those that are not finished: their paths in it and sizes [bytes]."""
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            if not name.endswith(PARTIAL) and file.is_file():
                yield str(file.relative_to(folder)), file.stat().st_size


def _partial(folder: Path, version: str) -> Path:
    return folder.with_name(f".{folder.name}.{version}{PARTIAL}")


def _of_version(folder: Path, version: str) -> Path:
    """Return where the files of a version are gathered, if it has not been given up."""
    partial = _partial(folder, version)
    if not partial.is_dir():
        raise FileNotFoundError(f"another attempt of this item has begun to save in {folder}")
    return partial


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _take_over(old: Path, new: Path) -> None:
    """Let a file that has not changed be in the new version too."""
    make_folders(new.parent)
    try:
        os.link(old, new)
    except OSError:  # a file system without links
        shutil.copyfile(old, new)


def _exchange(new: Path, old: Path) -> None:
    """Let a folder have the name of another, and the other the first one's if it can; at no moment is there none for good."""
    if not old.exists():
        new.rename(old)
        return
    if not _swap(new, old):
        previous = _previous(old)
        shutil.rmtree(previous, ignore_errors=True)
        old.rename(previous)  # if this is the last that happens, `listing` puts it back
        new.rename(old)


def _swap(one: Path, other: Path) -> bool:
    """Let two folders have each other's names, in one step; return False where the file system cannot do that."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    return bool(swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


class FarHome:
    """A folder of another machine, as its `FolderHome` there has it.

    Args:
        ask: Calls a method of that, and waits for its answer: verb, arguments.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def listing(self, name: str) -> Listing:
        """Return the files of a checkpoint."""
        return self._ask("listing", name)  # type: ignore[no-any-return]

    def read(self, name: str, file: str, entry: Entry) -> Iterator[bytes]:
        """Return a file."""
        for offset in range(0, max(entry.size, 1), PIECE_BYTES):
            yield self._ask("read_piece", name, file, offset)

    def begin(self, name: str) -> str:
        """Begin a new version."""
        return self._ask("begin", name)  # type: ignore[no-any-return]

    def write(self, name: str, version: str, file: str, pieces: Iterable[bytes]) -> None:
        """Put a file into a version."""
        for piece in pieces:
            self._ask("write_piece", name, version, file, piece)

    def publish(self, name: str, version: str, files: Listing) -> None:
        """Let a version count."""
        self._ask("publish", name, version, files)


# --- URLs -------------------------------------------------------------------------------------------------------------


class UrlHome:
    """A place that pyarrow or fsspec knows by its URL: "gs://...", "s3://...", "file://...".

    Each version is a folder there, NAME/VERSION/FILE; NAME/checkpoint.json says which files count, and of which version.

    Raises:
        InvalidValueError: There is nothing that knows such a URL, or it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = filesystem(url, "checkpoints")

    def listing(self, name: str) -> Listing:
        """Return the files of a checkpoint."""
        try:
            with self._files.open_input_stream(self._pointer(name)) as stream:
                record = json.loads(stream.read())
        except FileNotFoundError:
            return {}
        return {file: Entry(*entry) for file, entry in record["files"].items()}

    def read(self, name: str, file: str, entry: Entry) -> Iterator[bytes]:
        """Return a file."""
        with self._files.open_input_stream(self._place(name, file, entry)) as stream:
            yield stream.read(PIECE_BYTES)
            while piece := stream.read(PIECE_BYTES):
                yield piece

    def begin(self, name: str) -> str:
        """Begin a new version, and remove what others have left unfinished."""
        counted = {entry.version for entry in self.listing(name).values()}
        for left in self._versions(name) - counted:
            self._files.delete_dir(f"{self._root}/{name}/{left}")
        return uuid.uuid4().hex[:8]

    def _versions(self, name: str) -> set[str]:
        from pyarrow.fs import FileSelector, FileType

        found = self._files.get_file_info(FileSelector(f"{self._root}/{name}", allow_not_found=True))
        return {info.base_name for info in found if info.type == FileType.Directory}

    def write(self, name: str, version: str, file: str, pieces: Iterable[bytes]) -> None:
        """Put a file into a version."""
        with self._open(self._place(name, file, Entry(0, version))) as stream:
            for piece in pieces:
                stream.write(piece)

    def publish(self, name: str, version: str, files: Listing) -> None:
        """Let a version count."""
        places = [self._place(name, file, entry) for file, entry in files.items()]
        sizes = [info.size for info in self._files.get_file_info(places)] if places else []
        if sizes != [entry.size for entry in files.values()]:
            raise FileNotFoundError(f"another attempt of this item has begun to save in {self._url}/{name}")
        old = self.listing(name)
        spare = f"{self._pointer(name)}.{version}"
        with self._open(spare) as stream:
            stream.write(json.dumps({"files": files}).encode())
        self._files.move(spare, self._pointer(name))  # in one step, also where that is a copy
        for file, entry in old.items():
            if files.get(file) != entry:
                with contextlib.suppress(OSError):  # it is removed when the next version is begun
                    self._files.delete_file(self._place(name, file, entry))

    def _open(self, place: str) -> Any:
        try:
            return self._files.open_output_stream(place)
        except FileNotFoundError:  # where folders have to be made
            self._files.create_dir(place.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(place)

    def _pointer(self, name: str) -> str:
        return f"{self._root}/{name}/checkpoint.json"

    def _place(self, name: str, file: str, entry: Entry) -> str:
        return f"{self._root}/{name}/{entry.version}/{file}"


def filesystem(url: str, what: str) -> tuple[Any, str]:
    """Return who knows a URL, and what it calls it; `what` is what it is given for.

    Raises:
        InvalidValueError: There is nothing that knows such a URL, or it cannot be reached.
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
            f"{what}={url!r} cannot be used from here: {error}. {what.capitalize()} can be kept in a folder, or at a URL that "
            f"pyarrow or an installed fsspec package knows ({scheme}:// may need one, gcsfs or s3fs for instance)."
        ) from error
