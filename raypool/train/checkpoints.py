"""The folder of a run, its checkpoints, and how the ranks of a training commit one together.

All are plain files. A checkpoint is a folder, with a file `NAME.json` beside it for the metrics
that were reported with it. It is complete if both exist: the files are gathered in
`.NAME.TOKEN.partial`, the json is written, and then the folder gets its name in one step. A run
that was killed may leave `.*.partial` folders.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raypool.errors import InvalidTypeError, InvalidValueError, RankInterrupted
from raypool.worker.folders import sync_folder
from raypool.worker.running import note_here, unbroken

PARTIAL = ".partial"

Folder = str | os.PathLike[str]

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class CompleteCheckpoint(NamedTuple):
    """A complete checkpoint: its number in the run, its folder, and the metrics of rank 0."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    path: Path
    metrics: dict[str, Any]


class Partial(NamedTuple):
    """A checkpoint in the making: its future name, its number, and the folder of its files."""

    name: str
    number: int
    path: Path


# --- complete checkpoints -------------------------------------------------------------------------


def list_kept(run_dir: Folder) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a run, the oldest first; unreadable ones are left out."""
    files = (path for path in Path(run_dir).glob("*.json") if not path.name.startswith("."))
    return sorted(
        (kept for kept in map(_read, files) if kept is not None), key=lambda kept: kept.index
    )


def _read(file: Path) -> CompleteCheckpoint | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        index, metrics = record["index"], record["metrics"]
        path = Path(record.get("path") or file.with_suffix(""))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not isinstance(index, int) or not isinstance(metrics, dict) or not os.path.isdir(path):  # noqa: PTH112 - this one never raises
        return None
    return CompleteCheckpoint(index, path, metrics)


def latest(run_dir: Folder) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of a run, None without one."""
    return max(list_kept(run_dir), key=lambda kept: kept.index, default=None)


def best(run_dir: Folder, metric: str, mode: str) -> CompleteCheckpoint | None:
    """Return the checkpoint with the least ("min") or greatest ("max") value of a metric; of equal
    ones the newest.

    One without the metric, or for which it is no finite number, is never the best; None if there is
    no other.
    """
    top = ranked(run_dir, metric, mode)[-1:]
    return top[0] if top and _rating(top[0], metric, mode) is not None else None


def ranked(run_dir: Folder, metric: str | None, mode: str) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a run, the best last; without a metric, or where it is no
    number, by age.
    """
    return sorted(list_kept(run_dir), key=lambda kept: _order(kept, metric, mode))


def _rating(kept: CompleteCheckpoint, metric: str, mode: str) -> float | None:
    """Return the rating of a checkpoint, the higher the better; None without a usable metric."""
    value = kept.metrics.get(metric)
    # unlike isfinite, it takes huge integers
    if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        return None
    return -value if mode == "min" else value


def _order(kept: CompleteCheckpoint, metric: str | None, mode: str) -> tuple[bool, float, int]:
    rating = None if metric is None else _rating(kept, metric, mode)
    return rating is not None, rating or 0.0, kept.index


# --- creation of a checkpoint ---------------------------------------------------------------------


def check_name(name: str | None) -> None:
    """Raise the error for a name that a checkpoint's folder cannot have.

    Raises:
        InvalidTypeError: It is no text.
        InvalidValueError: It is a path, or a name that is reserved here.
    """
    if name is None:
        return
    if not isinstance(name, str):
        raise InvalidTypeError(
            f"checkpoint_dir_name={name!r} is a {type(name).__name__}, not the name of a folder."
        )
    if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
        raise InvalidValueError(
            f"checkpoint_dir_name={name!r} is not the name of a folder in the folder of the run. It"
            " is one name without a slash, and does not begin with a dot."
        )


def next_index(run_dir: Folder) -> int:
    """Return the number of the next checkpoint, from 1."""
    named = (_NUMBERED.fullmatch(path.name) for path in Path(run_dir).glob("checkpoint_*"))
    numbers = [int(match.group(1)) for match in named if match is not None]
    return max([0, *numbers, *(kept.index for kept in list_kept(run_dir))]) + 1


def free_name(run_dir: Folder, name: str, index: int) -> str:
    """Return the name for a checkpoint, with its number added if the name is taken."""
    folder = Path(run_dir)
    is_taken = (folder / name).exists() or _read(folder / f"{name}.json") is not None
    return f"{name}-{index:06d}" if is_taken else name


def open_partial(run_dir: Folder, name: str | None, token: str) -> Partial:
    """Make the folder for the files of a new checkpoint, under this name or a number.

    If the name is taken, the number is added to it: no checkpoint is ever replaced.

    Raises:
        OSError: It cannot be made.
    """
    folder = Path(run_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    index = next_index(folder)
    name = f"checkpoint_{index:06d}" if name is None else free_name(folder, name, index)
    partial = folder / f".{name}.{token}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return Partial(name, index, partial)


def copy_in(source: Folder, target: Path, rank: int) -> None:
    """Copy the content of a folder into one that ranks share; each file in one step.

    The files are on disk afterwards, so that a power cut does not damage a complete checkpoint.

    Raises:
        OSError: Something cannot be read, or does not fit.
    """
    spare = target / f".{rank}{PARTIAL}"
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_dir():
            (target / entry.name).mkdir(exist_ok=True)
            copy_in(entry.path, target / entry.name, rank)
        else:
            shutil.copyfile(entry.path, spare)
            _sync(spare)
            spare.replace(target / entry.name)
    sync_folder(target)


def _sync(file: Path) -> None:
    """Wait until the content of a file is on disk."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(
    partial: Partial, metrics: Mapping[str, Any], attempt: int, elsewhere: str | None = None
) -> Path:
    """Make a checkpoint of the files that were gathered; return its folder.

    Args:
        partial: The folder of the files, and the name of the checkpoint.
        metrics: The metrics reported with it; values that JSON cannot take are left out.
        attempt: In which attempt of the training.
        elsewhere: Where the files are if they were not gathered; the run only notes that.

    Raises:
        OSError: Something cannot be written.
    """
    name, index, folder = partial
    note_down(folder.with_name(name), index, metrics, attempt, elsewhere)
    if elsewhere is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return Path(elsewhere)
    path = folder.replace(folder.with_name(name))
    sync_folder(path.parent)
    return path


def note_down(
    folder: Path, index: int, metrics: Mapping[str, Any], attempt: int, elsewhere: str | None = None
) -> None:
    """Write the json file that completes a checkpoint; see `commit`."""
    record = {
        "index": index,
        "time": time.time(),
        "attempt": attempt,
        "metrics": _plain(metrics),
        "path": elsewhere,
    }
    _write(folder.with_name(f"{folder.name}.json"), json.dumps(record))


def _write(file: Path, text: str) -> None:
    """Write a file in one step, and wait until it is on disk."""
    spare = file.with_name(f".{file.name}{PARTIAL}")
    with spare.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    spare.replace(file)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return those metrics that JSON can take."""
    plain = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            plain[name] = json.loads(json.dumps(value, default=_as_list))
    return plain


def _as_list(value: Any) -> Any:
    """Return a NumPy array or number as Python's own.

    Raises:
        TypeError: It is something else.
    """
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"{type(value).__name__} is nothing for JSON")
    return to_list()


# --- cleanup --------------------------------------------------------------------------------------


def prune(run_dir: Folder, keep: int | None, metric: str | None, mode: str) -> list[Path]:
    """Delete all but the last and the `keep` best (or newest) checkpoints; return those."""
    there = ranked(run_dir, metric, mode)
    if keep is None or len(there) <= keep:
        return []
    last = max(there, key=lambda kept: kept.index)
    stay = [
        kept for number, kept in enumerate(there) if kept is last or number >= len(there) - keep
    ]
    gone = [kept for kept in there if kept not in stay]
    for kept in gone:
        _delete(Path(run_dir), kept, stay)
    return [kept.path for kept in gone]


def _delete(run_dir: Path, kept: CompleteCheckpoint, stay: Sequence[CompleteCheckpoint]) -> None:
    """Delete a checkpoint: first its json file, which ends it in one step, then its files.

    Files outside the folder of the run are the user's own, and stay. So do files in a checkpoint
    that stays: a loop may write into one folder again and again.
    """
    files = [
        file
        for file in run_dir.glob("*.json")
        if (read := _read(file)) is not None and read.index == kept.index
    ]
    path = kept.path.resolve()
    is_own = run_dir.resolve() in path.parents and not any(
        each.path.resolve().is_relative_to(path) for each in stay
    )
    aside = run_dir / f".{path.name}.deleted{PARTIAL}"
    if is_own and path.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        path.replace(aside)
    for file in files:
        file.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def forget_deleted(run_dir: Folder) -> None:
    """Delete the files beside checkpoints whose folders are gone: Ray Train deletes those
    itself.
    """
    for file in Path(run_dir).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(file.read_text(encoding="utf-8"))
            if (
                record["path"] is None
                and isinstance(record["index"], int)
                and not file.with_suffix("").is_dir()
            ):
                file.unlink()


def remove_partials(run_dir: Folder) -> None:
    """Delete the unfinished checkpoints of a run that was killed."""
    for path in Path(run_dir).glob(f".*{PARTIAL}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


# --- commit of a checkpoint by all ranks ----------------------------------------------------------
#
# All files are kept or none, and on a failure no rank goes on. Rank 0 makes the folder, all ranks
# put their files into it, and rank 0 makes it a checkpoint. After each step all ranks exchange how
# it went, so that all come to the same judgment.


logger = logging.getLogger("raypool")


class RankContribution(NamedTuple):
    """The contribution of one rank: a `ray.train.Checkpoint`, and the arguments of its report."""

    checkpoint: Any
    is_placed: bool
    is_deleted_after: bool
    upload_fn: Callable[[Any, str], Any] | None


class Fault(NamedTuple):
    """The failure of a rank: `kind` is "value" (an argument), "os" (the disk) or "user" (user
    code).
    """

    kind: str
    text: str
    number: int = 0

    def raise_here(self, rank: int, own: BaseException | None) -> None:
        """Raise the error: the same on every rank, but an exception of the user's is that of its
        rank.
        """
        if self.kind == "value":
            raise InvalidValueError(self.text)
        if self.kind == "os":
            raise OSError(self.number, self.text)
        if own is not None:
            raise own
        raise RankInterrupted(self.text, at_hand=("ray.train.report", 0, None), place="")


class RankOutcome(NamedTuple):
    """The outcome on a rank: its fault, and the place of its files if they stay elsewhere."""

    fault: Fault | None = None
    place: str | None = None
    has_copied: bool = False


class CheckpointCommit:
    """One rank's part in the commit of a checkpoint by all ranks."""

    def __init__(self, plan: TrainingAttempt, rank: int, tell: Callable[[Any], list[Any]]) -> None:
        self._plan = plan
        self._rank = rank
        self._tell = tell
        self._token = uuid.uuid4().hex[:8]

    def keep(
        self, delivery: RankContribution | None, name: str | None, metrics: Mapping[str, Any]
    ) -> str:
        """Keep a checkpoint, together with all ranks; return its folder.

        Raises:
            InvalidValueError: A rank has brought what is no checkpoint, or does not see the folder
                of the run.
            OSError: It could not be written, on some rank.
            RankInterrupted: The user's own upload function has failed on another rank.
        """
        partial: Partial | None = None
        try:
            partial, fault = self._tell(self._open(name) if self._rank == 0 else None)[0]
            _see([RankOutcome(fault)], None)
            assert partial is not None
            place = self._gather(delivery, partial)
            path, fault = self._tell(
                self._commit(partial, metrics, place) if self._rank == 0 else None
            )[0]
            _see([RankOutcome(fault)], None)
        except BaseException:
            # Rank 0 alone knows if the folder has its name: others might delete a complete
            # checkpoint.
            if partial is not None and self._rank == 0:
                with unbroken(note_here()):  # a failed rank interrupts the others
                    shutil.rmtree(partial.path, ignore_errors=True)
            raise
        if delivery is not None and delivery.is_deleted_after:
            _delete_local(delivery.checkpoint, path)
        return str(path)

    def _open(self, name: str | None) -> tuple[Partial | None, Fault | None]:
        try:
            return open_partial(self._plan.run_dir, name, self._token), None
        except OSError as error:
            return None, self._disk_fault(error, "the folder of the run")

    def _gather(self, delivery: RankContribution | None, partial: Partial) -> str | None:
        """Add this rank's files to the others'; return their place if they stay elsewhere."""
        own: Exception | None = None
        try:
            outcome = self._deliver(delivery, partial)
        except OSError as error:
            own, outcome = error, RankOutcome(self._disk_fault(error, "a checkpoint"))
        except InvalidValueError as error:
            own, outcome = error, RankOutcome(Fault("value", str(error)))
        except Exception as error:
            text = (
                f"checkpoint_upload_fn has failed on rank {self._rank}: {type(error).__name__}:"
                f" {error}"
            )
            own, outcome = error, RankOutcome(Fault("user", text))
        outcomes = self._tell(outcome)
        _see(outcomes, own)
        return _common_place(outcomes)

    def _deliver(self, delivery: RankContribution | None, partial: Partial) -> RankOutcome:
        if not partial.path.is_dir():
            raise InvalidValueError(
                f"Rank {self._rank}, on {platform.node()}, does not see the folder"
                f" {self._plan.run_dir} as rank 0 does. All machines have to see the folder of a"
                " run, in one place: name one that they share with RunOptions(run_dir=...)."
            )
        if delivery is None:
            return RankOutcome()
        if delivery.is_placed or delivery.upload_fn is not None:
            return RankOutcome(place=self._placed(delivery, partial.name))
        self._copy(delivery.checkpoint, partial.path)
        return RankOutcome(has_copied=True)

    def _copy(self, checkpoint: Any, partial: Path) -> None:
        if _is_local(checkpoint):
            source = self._local_folder(checkpoint)
            if partial.resolve().is_relative_to(source.resolve()):
                raise InvalidValueError(
                    f"The folder of the run, {self._plan.run_dir}, is in the checkpoint that rank"
                    f" {self._rank} has reported, {source}. Save the checkpoint to a folder of its"
                    " own."
                )
            copy_in(source, partial, self._rank)
            return
        with checkpoint.as_directory() as source:
            copy_in(source, partial, self._rank)

    def _local_folder(self, checkpoint: Any) -> Path:
        folder = Path(checkpoint.path)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "is not there"
            raise InvalidValueError(
                f"Rank {self._rank}, on {platform.node()}, has reported the checkpoint {folder},"
                f" which {what}. Report a folder, while it is there: in the block of the temporary"
                " directory, say."
            )
        return folder

    def _placed(self, delivery: RankContribution, name: str) -> str:
        """Return the folder of a checkpoint that stays, or that the user's function uploads."""
        checkpoint = delivery.checkpoint
        if delivery.upload_fn is not None and not delivery.is_placed:
            checkpoint = delivery.upload_fn(checkpoint, name)
        if not hasattr(checkpoint, "filesystem"):
            raise InvalidValueError(
                f"checkpoint_upload_fn has returned a {type(checkpoint).__name__} on rank"
                f" {self._rank}. It has to return the ray.train.Checkpoint that it has made."
            )
        if not _is_local(checkpoint):
            raise InvalidValueError(
                f"Rank {self._rank} has reported a checkpoint in remote storage"
                f" ({checkpoint.path}), to stay there. Here checkpoints are folders that all"
                " machines see: let it be copied (CheckpointUploadMode.SYNC), or use"
                ' lane="managed".'
            )
        return str(self._local_folder(checkpoint).absolute())

    def _commit(
        self, partial: Partial, metrics: Mapping[str, Any], place: str | None
    ) -> tuple[str | None, Fault | None]:
        plan = self._plan
        try:
            path = commit(partial, metrics, plan.attempt, place)
        except OSError as error:
            return None, self._disk_fault(error, "a checkpoint")
        try:
            prune(plan.run_dir, plan.keep, plan.best_metric, plan.best_mode)
        except OSError as error:
            logger.warning("An old checkpoint in %s could not be deleted: %s", plan.run_dir, error)
        return str(path), None

    def _disk_fault(self, error: OSError, what: str) -> Fault:
        file = f" ({error.filename})" if isinstance(error.filename, str | os.PathLike) else ""
        text = (
            f"Rank {self._rank}, on {platform.node()}, could not write {what} to"
            f" {self._plan.run_dir}: {error.strerror or error}{file}. Nothing is kept of this"
            " checkpoint; those before it are there. Make room or see to the permissions, then go"
            " on from the last one."
        )
        return Fault("os", text, error.errno or 0)


def _see(outcomes: Sequence[RankOutcome], own: BaseException | None) -> None:
    """Raise the error of the first rank that has one, on all ranks."""
    for rank, outcome in enumerate(outcomes):
        if outcome.fault is not None:
            outcome.fault.raise_here(rank, own)


def _common_place(outcomes: Sequence[RankOutcome]) -> str | None:
    """Return the common place of all ranks' files, None if they were copied.

    Raises:
        InvalidValueError: They are in more than one place.
    """
    places = {
        outcome.place: rank
        for rank, outcome in reversed(list(enumerate(outcomes)))
        if outcome.place is not None
    }
    copied = [rank for rank, outcome in enumerate(outcomes) if outcome.has_copied]
    if len(places) + bool(copied) > 1:
        parts = [f"rank {rank} {place}" for place, rank in places.items()] + [
            f"rank {rank} one to copy" for rank in copied[:1]
        ]
        raise InvalidValueError(
            "The ranks have reported parts of one checkpoint that stay in different places:"
            f" {', '.join(parts)}. Bring them to one folder, or let all be copied."
        )
    return next(iter(places), None)


def _is_local(checkpoint: Any) -> bool:
    return str(checkpoint.filesystem.type_name) == "local"


def _delete_local(checkpoint: Any, kept: str | None) -> None:
    """Delete a local checkpoint that was copied; one that is kept in place stays."""
    if _is_local(checkpoint) and str(Path(checkpoint.path).absolute()) != kept:
        with contextlib.suppress(OSError):
            shutil.rmtree(checkpoint.path)


# --- what travels to the ranks and back -----------------------------------------------------------


class TrainingAttempt(NamedTuple):
    """One attempt of a training, as its ranks see it.

    `name`: of the training. `attempt`: from 1. `run_dir`: the folder of the run, made with the
    first checkpoint. `start`: the folder of the checkpoint to begin with. `keep`, `best_metric`,
    `best_mode`: which checkpoints stay; see `RunOptions`.
    """

    name: str
    attempt: int
    run_dir: str
    start: str | None = None
    keep: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"


class RankEnd(NamedTuple):
    """The end of a rank: the return value of the loop, and its last report (None: nothing)."""

    value: Any
    metrics: dict[str, Any] | None = None
