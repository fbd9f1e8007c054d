"""Memory of its own for each large array that comes out of Ray's object store: a private mapping of it.

The store is memory that all processes of a machine share, and torch writes to it even through an array that says it is read-only.
Of a private mapping the system copies the pages that somebody writes to, and only these: who reads pays for no copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray

FAILED = ctypes.c_void_p(-1).value
"""What `mmap` returns when it fails."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def own(buffer: Any) -> Any:
    """Return the content of a buffer as memory that can be changed and that nobody else sees."""
    shared = np.frombuffer(buffer, np.uint8)
    address: int = shared.__array_interface__["data"][0]
    with _looking:
        piece = _store.find(address, shared.nbytes)
        mapping = _Mapping.make(piece, address, shared) if piece is not None else None
    return bytearray(shared) if mapping is None else np.asarray(mapping)


class Piece(NamedTuple):
    """A part of this process's memory that is a part of a file; the descriptor is -1 where that cannot be opened."""

    start: int
    stop: int
    offset: int
    descriptor: int


class _Mapping:
    """A private mapping of a buffer. It ends with the last array on it, and keeps the buffer in the store until then."""

    def __init__(self, start: int, length: int, address: int, shared: np.ndarray[Any, Any]) -> None:
        self._start, self._length, self._shared = start, length, shared
        self.__array_interface__ = {"data": (address, False), "shape": shared.shape, "typestr": "|u1", "version": 3}

    @staticmethod
    def make(piece: Piece, address: int, shared: np.ndarray[Any, Any]) -> _Mapping | None:
        """Return it; None if the system gives no more mappings."""
        place = address - piece.start + piece.offset
        ahead = place % mmap.PAGESIZE
        length = shared.nbytes + ahead
        # Python's mmap would keep a descriptor for each.
        start = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, piece.descriptor, place - ahead)
        return None if start == FAILED else _Mapping(start, length, start + ahead, shared)

    def __del__(self, _unmap: Any = _libc.munmap) -> None:
        _unmap(self._start, self._length)


class _Store:
    """Knows which memory of this process is the object store's, and has it open."""

    def __init__(self) -> None:
        self._worker_id = b""
        self._pieces: list[Piece] = []

    def find(self, address: int, length: int) -> Piece | None:
        """Return the piece that this memory is in; None if it is not in the store, or that cannot be opened."""
        worker = ray._private.worker.global_worker  # private, checked on Ray 2.60; the public way would start a Ray
        if not worker.connected:  # so with Ray Client, which has no store here
            return None
        if worker.worker_id != self._worker_id:  # another Ray, whose store may be where that of the last one was
            self._forget()
            self._worker_id = worker.worker_id
        piece = self._known(address, length)
        if piece is None:
            self._look()
            piece = self._known(address, length)
        return piece

    def _known(self, address: int, length: int) -> Piece | None:
        return next((piece for piece in self._pieces if piece.start <= address and address + length <= piece.stop), None)

    def _forget(self) -> None:
        for descriptor in {piece.descriptor for piece in self._pieces} - {-1}:
            os.close(descriptor)
        self._pieces = []

    def _look(self) -> None:
        """Look at the memory of this process anew: a store that was full has grown by a file on disk."""
        self._forget()
        opened: dict[tuple[int, int], int] = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, offset, device, inode, *name = line.split(maxsplit=5)
            if "s" in access and name and Path(name[0].removesuffix(" (deleted)")).name.startswith("plasma"):
                major, minor = (int(number, 16) for number in device.split(":"))
                file = os.makedev(major, minor), int(inode)
                if file not in opened:
                    opened[file] = _open(*file)
                start, stop = (int(number, 16) for number in span.split("-"))
                self._pieces.append(Piece(start, stop, int(offset, 16), opened[file]))


def _open(device: int, inode: int) -> int:
    """Open a file that has no name any more, through the process of Ray's that holds it: the node's raylet; -1: in vain."""
    for process in _raylets():
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it may be closed meanwhile
                    found = path.stat()
                    if (found.st_dev, found.st_ino) == (device, inode):
                        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _raylets() -> Iterator[psutil.Process]:
    """Return the parent of a worker, or the child of a driver that has started Ray, and then all raylets of the machine."""
    here = psutil.Process()
    with contextlib.suppress(psutil.Error):
        yield from (process for process in [here.parent(), *here.children()] if process is not None)
    yield from (process for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet")


_store = _Store()
_looking = threading.Lock()
