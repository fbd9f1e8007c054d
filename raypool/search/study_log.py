"""The file of a search's study, which survives a full disk and a process that dies while it writes.

Imported late: it needs Optuna.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

BLOCK = 65536


class StudyLog(JournalFileBackend):
    """Optuna's file of a study, of which every line is whole.

    A record that could not be written leaves nothing behind, so that it can be written again. What
    a process that died has left of its last record is removed: others would be appended to it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._mutex = path, JournalFileSymlinkLock(str(path))
        super().__init__(str(path), self._mutex)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, or none of them."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        self._mutex.acquire()  # so that no other process is in the middle of a line
        try:
            with self._path.open("r+b", buffering=0) as file:
                end = cut_last_line(file)
                try:
                    while lines:
                        lines = lines[file.write(lines) :]
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):  # the first error says what is wrong
                        file.truncate(end)
                    raise
        finally:
            self._mutex.release()


def cut_last_line(file: BinaryIO) -> int:
    """Remove a last line that has no end; go to the end of the file, and return its size.

    Example:
        >>> import io
        >>> cut_last_line(io.BytesIO(b"whole" + bytes([10]) + b"torn"))
        6
    """
    size = end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(end - BLOCK, 0) if end < size else end - 1  # nearly always, it is whole
        file.seek(begin)
        if (place := file.read(end - begin).rfind(b"\n")) >= 0:
            end = begin + place + 1
            break
        end = begin
    if end < size:
        file.truncate(end)
    return file.seek(end)
