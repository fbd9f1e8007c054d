"""Stars and notes of items, which people write on the live page: a file in the run's folder."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from raypool.worker.folders import write_file

NOTES = "notes.json"


class Note(TypedDict):
    """What people noted of an item."""

    star: bool
    text: str


def notes_in(run_dir: Path) -> dict[str, Note]:
    """Return the notes in a run's folder by the keys of the items; {} if they cannot be read."""
    try:
        notes = json.loads((run_dir / NOTES).read_bytes())
        return {
            str(key): {"star": bool(note["star"]), "text": str(note["text"])}
            for key, note in notes.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_note(run_dir: Path, key: str, changed: Mapping[str, bool | str]) -> None:
    """Change fields of the note of an item; the others stay as they are.

    Raises:
        OSError: It cannot be written.
    """
    # two servers may write at once
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        notes = notes_in(run_dir)
        note = {"star": False, "text": "", **notes.get(key, {}), **changed}
        write_file(run_dir / NOTES, json.dumps({**notes, key: note}).encode())
    finally:
        os.close(descriptor)
