"""The folder of a run, its checkpoints, and how the ranks of a training commit one together.

A checkpoint is a folder, with a file `NAME.json` beside it for the metrics that were reported with
it. It is complete if both exist: the files are gathered in `.NAME.TOKEN.partial`, the json is
written, and then the folder gets its name in one step. A run that was killed may leave
`.*.partial` folders.
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

from raypool.errors import InvalidTypeError, InvalidValueError, RankInterrupted, did_you_mean
from raypool.journal.files import REPORTS
from raypool.worker.folders import sync_folder
from raypool.worker.running import note_here, secure_reports, uninterruptible

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
    return sorted(filter(None, map(_read, files)), key=lambda kept: kept.index)


def _noted(file: Path) -> CompleteCheckpoint | None:
    """Return the checkpoint that a file notes; its folder may be gone. None: no file of ours."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        index, metrics = record["index"], record["metrics"]
        path = file.parent / (record.get("path") or file.stem)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # it has just gone, or is any other JSON file that the user keeps there
    is_ours = isinstance(index, int) and isinstance(metrics, dict)
    return CompleteCheckpoint(index, path, metrics) if is_ours else None


def _read(file: Path) -> CompleteCheckpoint | None:
    noted = _noted(file)
    is_there = noted is not None and os.path.isdir(noted.path)  # noqa: PTH112 - it never raises
    return noted if is_there else None


def latest(run_dir: Folder) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of a run, None without one."""
    return max(list_kept(run_dir), key=lambda kept: kept.index, default=None)


def best(run_dir: Folder, metric: str, mode: str) -> CompleteCheckpoint | None:
    """Return the newest checkpoint with the least or greatest value of a metric, if one has it."""
    top = ranked(run_dir, metric, mode)[-1:]
    return top[0] if top and _rating(top[0], metric, mode) is not None else None


def ranked(run_dir: Folder, metric: str | None, mode: str) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a run, the best last; without a metric by age."""

    def order(kept: CompleteCheckpoint) -> tuple[bool, float, int]:
        rating = None if metric is None else _rating(kept, metric, mode)
        return rating is not None, rating or 0.0, kept.index

    return sorted(list_kept(run_dir), key=order)


def _rating(kept: CompleteCheckpoint, metric: str, mode: str) -> float | None:
    value = kept.metrics.get(metric)
    # unlike isfinite, it takes huge integers
    if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        return None
    return -value if mode == "min" else value


# --- creation of a checkpoint ---------------------------------------------------------------------


def check_name(name: str | None) -> None:
    """Raise the error for a name that the folder of a checkpoint cannot have."""
    if name is None:
        return
    if not isinstance(name, str):
        raise InvalidTypeError(
            f"checkpoint_dir_name={name!r} is a {type(name).__name__}, not the name of a folder."
        )
    if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
        raise InvalidValueError(
            f"checkpoint_dir_name={name!r} is not a valid folder name: it must be one name without"
            " a slash that does not begin with a dot."
        )


def next_index(run_dir: Folder) -> int:
    """Return the number of the next checkpoint, from 1."""
    named = (_NUMBERED.fullmatch(path.name) for path in Path(run_dir).glob("checkpoint_*"))
    numbers = (int(match[1]) for match in named if match)  # also of incomplete ones
    return max([0, *numbers, *(kept.index for kept in list_kept(run_dir))]) + 1


def free_name(run_dir: Folder, name: str, index: int) -> str:
    """Return the name for a checkpoint, with its number added if the name is taken."""
    folder, file = Path(run_dir), Path(run_dir, f"{name}.json")
    is_users = file.exists() and _noted(file) is None
    is_taken = is_users or (folder / name).exists() or _read(file) is not None
    return f"{name}-{index:06d}" if is_taken else name


def open_partial(run_dir: Folder, name: str | None, token: str) -> Partial:
    """Make the folder for the files of a new checkpoint, under this name or a number."""
    folder = Path(run_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    index = next_index(folder)
    # a taken name gets the number: no checkpoint is ever replaced
    name = f"checkpoint_{index:06d}" if name is None else free_name(folder, name, index)
    partial = folder / f".{name}.{token}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return Partial(name, index, partial)


def copy_in(source: Folder, target: Path, rank: int) -> None:
    """Copy the content of a folder into one that ranks share; each file in one step."""
    spare = target / f".{rank}{PARTIAL}"
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_dir():
            (target / entry.name).mkdir(exist_ok=True)
            copy_in(entry.path, target / entry.name, rank)
        else:
            shutil.copyfile(entry.path, spare)
            with spare.open("rb") as stream:
                # on disk before it gets its name: a power cut damages no complete checkpoint
                os.fsync(stream.fileno())
            spare.replace(target / entry.name)
    sync_folder(target)


def commit(
    partial: Partial, metrics: Mapping[str, Any], attempt: int, elsewhere: str | None = None
) -> Path:
    """Make a checkpoint of the files that were gathered; return its folder.

    `elsewhere`: where the files are if they were not gathered; the run only notes that.
    """
    name, index, folder = partial
    note_down(folder.with_name(name), index, metrics, attempt, elsewhere)
    if elsewhere is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return Path(elsewhere)
    path = folder.replace(folder.with_name(name))
    sync_folder(path.parent)
    return path


def add_reports(run_dir: Folder, name: str, rows: Sequence[tuple[float, int, Any]]) -> None:
    """Add what rank 0 of a training has reported: times (Unix [s]), attempts, metrics."""
    lines = [
        json.dumps(
            {"name": name, "time": moment, "attempt": attempt, "metrics": plain_metrics(metrics)}
        )
        for moment, attempt, metrics in rows
    ]
    with (Path(run_dir) / REPORTS).open("a", encoding="utf-8") as stream:
        stream.write("\n".join(["", *lines]))  # a line that a crash has cut off ends here


def note_down(
    folder: Path, index: int, metrics: Mapping[str, Any], attempt: int, elsewhere: str | None = None
) -> None:
    """Write the json file that completes a checkpoint; see `commit`."""
    place = None if elsewhere is None else Path(elsewhere)
    # the folder of the run may be moved, with what is in it
    if place is not None and ".." not in place.parts and place.is_relative_to(folder.parent):
        place = place.relative_to(folder.parent)
    record = {
        "index": index,
        "time": time.time(),
        "attempt": attempt,
        "metrics": plain_metrics(metrics),
        "path": None if place is None else str(place),
    }
    file = folder.with_name(f"{folder.name}.json")
    spare = file.with_name(f".{file.name}{PARTIAL}")
    with spare.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(record))
        stream.flush()
        os.fsync(stream.fileno())
    spare.replace(file)  # in one step, once it is on disk


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return those metrics that JSON can take."""
    plain = {}
    for name, value in metrics.items():
        # the others are left out: they have no `tolist` (as NumPy's have), or contain themselves
        with contextlib.suppress(TypeError, ValueError, RecursionError, AttributeError):
            plain[name] = json.loads(json.dumps(value, default=lambda each: each.tolist()))
    return plain


# --- cleanup --------------------------------------------------------------------------------------


def prune(run_dir: Folder, keep: int | None, metric: str | None, mode: str) -> list[Path]:
    """Delete all but the last and the `keep` best (or newest) checkpoints; return those deleted.

    None is deleted as long as no checkpoint has the metric.
    """
    folder, there = Path(run_dir), ranked(run_dir, metric, mode)
    if keep is None or len(there) <= keep:
        return []
    # its name may be misspelled
    if metric is not None and not any(metric in kept.metrics for kept in there):
        return []
    last = max(there, key=lambda kept: kept.index)
    stay = [
        kept for number, kept in enumerate(there) if kept is last or number >= len(there) - keep
    ]
    gone = [kept for kept in there if kept not in stay]
    for kept in gone:
        read = ((file, _read(file)) for file in folder.glob("*.json"))
        files = [file for file, found in read if found is not None and found.index == kept.index]
        path = kept.path.resolve()
        # Files outside the folder of the run are the user's own, and stay. So do files in a
        # checkpoint that stays: a loop may write into one folder again and again.
        is_own = folder.resolve() in path.parents and not any(
            each.path.resolve().is_relative_to(path) for each in stay
        )
        aside = folder / f".{path.name}.deleted{PARTIAL}"
        if is_own and path.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            path.replace(aside)  # this ends the checkpoint in one step
        for file in files:
            file.unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    return [kept.path for kept in gone]


def forget_deleted(run_dir: Folder) -> None:
    """Delete the json files of checkpoints whose folders Ray Train has deleted."""
    for file in Path(run_dir).glob("*.json"):
        # it has just gone, or is no record of a checkpoint
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
            with contextlib.suppress(OSError):  # it takes space, but counts for nothing
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
    """The failure of a rank: of an argument ("value"), the disk ("os"), or user code ("user")."""

    kind: str
    text: str
    number: int = 0


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
        self._has_warned = False

    def keep(
        self,
        delivery: RankContribution | None,
        name: str | None,
        metrics: Mapping[str, Any],
        reports: Sequence[tuple[float, int, Any]],
    ) -> str:
        """Keep a checkpoint, together with all ranks; return its folder.

        `reports`: those of rank 0 since the last one, for `add_reports`.
        """
        partial: Partial | None = None
        try:
            opened: tuple[Partial | None, Fault | None] | None = None
            if self._rank == 0:
                try:
                    opened = open_partial(self._plan.run_dir, name, self._token), None
                except OSError as error:
                    opened = None, self._disk_fault(error, "the folder of the run")
            partial, fault = self._tell(opened)[0]
            _see([RankOutcome(fault)], None)
            assert partial is not None
            place = self._gather(delivery, partial)
            path, fault = self._tell(
                self._commit(partial, metrics, place, reports) if self._rank == 0 else None
            )[0]
            _see([RankOutcome(fault)], None)
        except BaseException:
            # Rank 0 alone knows if the folder has its name: others might delete a complete
            # checkpoint.
            if partial is not None and self._rank == 0:
                with uninterruptible(note_here()):  # a failed rank interrupts the others
                    shutil.rmtree(partial.path, ignore_errors=True)
            raise
        if delivery is not None and delivery.is_deleted_after and _is_local(delivery.checkpoint):
            own = Path(delivery.checkpoint.path)
            if str(own.absolute()) != path:  # one that is kept in place stays
                with contextlib.suppress(OSError):  # the checkpoint is complete without that
                    shutil.rmtree(own)
        return str(path)

    def _gather(self, delivery: RankContribution | None, partial: Partial) -> str | None:
        """Add this rank's files to the others'; return their place if they stay elsewhere."""
        own: Exception | None = None
        try:
            outcome = self._deliver(delivery, partial)
        except Exception as error:
            own = error
            if isinstance(error, InvalidValueError):
                fault = Fault("value", str(error))
            else:
                why = f"{type(error).__name__}: {error}"
                fault = Fault("user", f"Rank {self._rank} could not deliver its checkpoint: {why}")
            outcome = RankOutcome(fault)
        outcomes = self._tell(outcome)
        _see(outcomes, own)
        return _common_place(outcomes)

    def _deliver(self, delivery: RankContribution | None, partial: Partial) -> RankOutcome:
        if not partial.path.is_dir():
            raise InvalidValueError(
                f"Rank {self._rank}, on {platform.node()}, does not see the folder"
                f" {self._plan.run_dir} as rank 0 does. All machines must see the run's folder at"
                " the same path: pass a shared one with RunOptions(run_dir=...)."
            )
        if delivery is None:
            return RankOutcome()
        if delivery.is_placed or delivery.upload_fn is not None:
            return RankOutcome(place=self._placed(delivery, partial.name))
        if not _is_local(delivery.checkpoint):
            with delivery.checkpoint.as_directory() as folder:
                return self._copied(folder, partial)
        source = self._local_folder(delivery.checkpoint)
        # it would copy itself, forever
        if partial.path.resolve().is_relative_to(source.resolve()):
            raise InvalidValueError(
                f"The folder of the run, {self._plan.run_dir}, is in the checkpoint that rank"
                f" {self._rank} has reported, {source}. Save the checkpoint to a separate folder."
            )
        return self._copied(source, partial)

    def _copied(self, folder: Folder, partial: Partial) -> RankOutcome:
        try:
            copy_in(folder, partial.path, self._rank)
        except OSError as error:  # of the copy; one that `upload_fn` raises stays the user's own
            return RankOutcome(self._disk_fault(error, "a checkpoint"))
        return RankOutcome(has_copied=True)

    def _local_folder(self, checkpoint: Any) -> Path:
        folder = Path(checkpoint.path)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise InvalidValueError(
                f"Rank {self._rank}, on {platform.node()}, has reported the checkpoint {folder},"
                f" which {what}. Report a folder while it exists, for example inside the block of"
                " the temporary directory."
            )
        return folder

    def _placed(self, delivery: RankContribution, name: str) -> str:
        """Return the folder of a checkpoint that stays, or that the user uploads."""
        checkpoint = delivery.checkpoint
        if delivery.upload_fn is not None and not delivery.is_placed:
            checkpoint = delivery.upload_fn(checkpoint, name)
        if not hasattr(checkpoint, "filesystem"):
            raise InvalidValueError(
                f"checkpoint_upload_fn has returned a {type(checkpoint).__name__} on rank"
                f" {self._rank}. It must return the ray.train.Checkpoint that it made."
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
        self,
        partial: Partial,
        metrics: Mapping[str, Any],
        place: str | None,
        reports: Sequence[tuple[float, int, Any]],
    ) -> tuple[str | None, Fault | None]:
        plan = self._plan
        try:
            # first: what a run reported before the checkpoint is not reported again after it
            secure_reports()
            add_reports(plan.run_dir, plan.name, reports)
            path = commit(partial, metrics, plan.attempt, place)
        except OSError as error:
            return None, self._disk_fault(error, "a checkpoint")
        # one without any metric is only to resume from
        is_rated = not metrics or plan.best_metric in {None, *plain_metrics(metrics)}
        if not is_rated and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s was reported without best_metric=%r.%s No checkpoint is deleted until one has"
                " it.",
                path.name,
                plan.best_metric,
                did_you_mean(str(plan.best_metric), metrics),
            )
        try:
            prune(plan.run_dir, plan.keep, plan.best_metric, plan.best_mode)
        except OSError as error:
            # the new one is complete, so the training goes on
            logger.warning("An old checkpoint in %s could not be deleted: %s", plan.run_dir, error)
        return str(path), None

    def _disk_fault(self, error: OSError, what: str) -> Fault:
        file = f" ({error.filename})" if isinstance(error.filename, str | os.PathLike) else ""
        text = (
            f"Rank {self._rank}, on {platform.node()}, could not write {what} to"
            f" {self._plan.run_dir}: {error.strerror or error}{file}. This checkpoint is lost;"
            " earlier ones are kept. Free some space or fix the permissions, then resume from the"
            " last one."
        )
        return Fault("os", text, error.errno or 0)


def _see(outcomes: Sequence[RankOutcome], own: BaseException | None) -> None:
    """Raise the error of the first rank that has one: the same on all, but for the user's own."""
    fault = next((each.fault for each in outcomes if each.fault is not None), None)
    if fault is None:
        return
    if fault.kind == "value":
        raise InvalidValueError(fault.text)
    if fault.kind == "os":
        raise OSError(fault.number, fault.text)
    if own is not None:
        raise own
    raise RankInterrupted(fault.text, at_hand=("ray.train.report", 0, None))


def _common_place(outcomes: Sequence[RankOutcome]) -> str | None:
    """Return the common place of all ranks' files, None if they were copied."""
    places = {
        outcome.place: rank
        for rank, outcome in reversed(list(enumerate(outcomes)))  # the first rank is named
        if outcome.place is not None
    }
    copied = [rank for rank, outcome in enumerate(outcomes) if outcome.has_copied]
    if len(places) + bool(copied) > 1:
        parts = [f"rank {rank} {place}" for place, rank in places.items()] + [
            f"rank {rank} one to copy" for rank in copied[:1]
        ]
        raise InvalidValueError(
            "The ranks have reported parts of one checkpoint that stay in different places:"
            f" {', '.join(parts)}. Put them into one folder, or let all be copied."
        )
    return next(iter(places), None)


def _is_local(checkpoint: Any) -> bool:
    return str(checkpoint.filesystem.type_name) == "local"


# --- what travels to the ranks and back -----------------------------------------------------------


class TrainingAttempt(NamedTuple):
    """One attempt of a training, as its ranks see it.

    `name`: of the training. `attempt`: from 1. `run_dir`: made with the first checkpoint. `start`:
    the checkpoint to begin with. The rest: which checkpoints stay; see `RunOptions`.
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
