"""The folders of trainings in progress: each has its own to itself."""

from __future__ import annotations

import contextlib
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

from raypool.errors import InvalidValueError, JournalError
from raypool.journal.lock import RunLock
from raypool.train.run import TrainingRun

_here: weakref.WeakSet[TrainingRun] = weakref.WeakSet()
"""The trainings of this process; each has its folder to itself."""


class Locked(NamedTuple):
    """A folder that is kept from other processes: how, for which training, and whether it was made for that."""

    lock: RunLock
    run: TrainingRun
    is_new: bool


_locked: dict[Path, Locked] = {}
"""The folders that were named for them."""

_starting = threading.Lock()

LOCK = ".training.lock"


def take_folder(run: TrainingRun, is_named: bool) -> None:
    """Note that a folder is in use; a new one, with a name of its own, nobody else knows.

    Raises:
        InvalidValueError: It is already, here or in another process.
    """
    folder = run.path.resolve()
    with _starting:
        other = next((each for each in _here if not each.done() and each.path.resolve() == folder), None)
        if other is not None:
            raise InvalidValueError(
                f"run_dir={run.path} is in use by the training {other.name!r}, which is {other.state}. Name another folder, or "
                "wait for its end."
            )
        if is_named:
            _lock(folder, run)
        _here.add(run)
    run.add_done_callback(lambda _: leave_folder(run, folder))


def _lock(folder: Path, run: TrainingRun) -> None:
    """Keep other processes out of a folder. One that cannot be written is left as it is: the first checkpoint will say so.

    Raises:
        InvalidValueError: Another process has it.
    """
    if folder in _locked:  # of a training that has just ended
        _locked[folder] = _locked[folder]._replace(run=run)
        return
    is_new = not folder.exists()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = RunLock(folder, LOCK)
        while not (folder / LOCK).exists():  # whoever had it has removed it in this instant
            lock.release()
            lock = RunLock(folder, LOCK)
        _locked[folder] = Locked(lock, run, is_new)
    except OSError:
        return
    except JournalError as error:
        if not isinstance(error.__cause__, OSError):
            raise InvalidValueError(f"run_dir={error}") from None


def leave_folder(run: TrainingRun, folder: Path) -> None:
    """Let others have a folder; one that was made for a training which has kept nothing goes."""
    with _starting:
        _here.discard(run)
        if folder in _locked and _locked[folder].run is run:
            lock, _, is_new = _locked.pop(folder)
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
                if is_new and not has_kept(folder):
                    folder.rmdir()
            lock.release()


def has_kept(folder: Path) -> bool:
    """Whether there is anything in the folder of a run."""
    return folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
