"""The folders in which the items that run here keep their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypool.folders import make_private
from raypool.task import Running


def home_here(home: str) -> Any:
    """Return who brings files to and from a place that is no folder of this machine; None if it is one."""
    return None


class ItemFolders:
    """Gives the items that a pool runs in this process their folders; see `raypool.task.Folders`.

    Args:
        temporary: Gives a folder for what is kept as long as the pool.
        find_home: Gives who brings files to and from a place that is no folder of this machine; None if it is one.
    """

    def __init__(self, temporary: Callable[[], Path], find_home: Callable[[str], Any]) -> None:
        self._temporary = temporary
        self._find_home = find_home

    def folder(self, note: Running, index: int) -> Path:
        """Return the folder of an item."""
        if note.checkpoints is None:
            return make_private(self._temporary() / f"{note.task_id}-{index}" / "checkpoint")
        home, names = note.checkpoints
        return make_private(Path(home) / names[index])

    def bring_home(self, note: Running, index: int) -> None:
        """See to it that what is in the folder now is where it is kept."""

    def end(self, note: Running, index: int) -> None:
        """Bring home what is in the folder of an item that has ended."""
