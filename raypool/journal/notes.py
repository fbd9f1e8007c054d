"""Stars and notes of items, which people write on the live page: a file in the run's folder."""

from __future__ import annotations

import fcntl
import json
import os
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


def write_note(run_dir: Path, key: str, note: Note) -> None:
    """Write the note of an item, in place of an earlier one.

    Raises:
        OSError: It cannot be written.
    """
    # two servers may write at once
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        write_file(run_dir / NOTES, json.dumps({**notes_in(run_dir), key: note}).encode())
    finally:
        os.close(descriptor)
