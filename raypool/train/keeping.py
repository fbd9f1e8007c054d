"""How the ranks of a training keep a checkpoint together: all of it, or none, and then none of them goes on.

Rank 0 makes the folder, all put their files into it, rank 0 makes a checkpoint of it. After each step all tell each other how it
went, so that all come to the same judgement.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raypool.errors import InvalidValueError, RankInterrupted
from raypool.train.checkpoints import Partial, commit, copy_in, open_partial, prune
from raypool.train.plan import Plan
from raypool.worker.running import note_here, unbroken

logger = logging.getLogger("raypool")


class Delivery(NamedTuple):
    """What one rank brings: a `ray.train.Checkpoint`, and what `ray.train.report` was told to do with it."""

    checkpoint: Any
    is_placed: bool
    is_deleted_after: bool
    upload_fn: Callable[[Any, str], Any] | None


class Fault(NamedTuple):
    """What has gone wrong on a rank: `kind` is "value" (what it was given), "os" (the disk) or "user" (the user's own code)."""

    kind: str
    text: str
    number: int = 0

    def raise_here(self, rank: int, own: BaseException | None) -> None:
        """Raise the error: the same on every rank, but an exception of the user's is that of its rank."""
        if self.kind == "value":
            raise InvalidValueError(self.text)
        if self.kind == "os":
            raise OSError(self.number, self.text)
        if own is not None:
            raise own
        raise RankInterrupted(self.text, at_hand=("ray.train.report", 0, None), place="")


class Outcome(NamedTuple):
    """How it went on a rank: what has gone wrong, and where its files are if not in the folder of the checkpoint."""

    fault: Fault | None = None
    place: str | None = None
    has_copied: bool = False


class Keeper:
    """One rank's part in it."""

    def __init__(self, plan: Plan, rank: int, tell: Callable[[Any], list[Any]]) -> None:
        self._plan = plan
        self._rank = rank
        self._tell = tell
        self._token = uuid.uuid4().hex[:8]

    def keep(self, delivery: Delivery | None, name: str | None, metrics: Mapping[str, Any]) -> str:
        """Keep a checkpoint, of which this rank may have a part; return its folder. Together with all ranks.

        Raises:
            InvalidValueError: A rank has brought what is no checkpoint, or does not see the folder of the run.
            OSError: It could not be written, on some rank.
            RankInterrupted: The user's own function that brings a checkpoint away has failed on another rank.
        """
        partial: Partial | None = None
        try:
            partial, fault = self._tell(self._open(name) if self._rank == 0 else None)[0]
            _see([Outcome(fault)], None)
            assert partial is not None
            place = self._gather(delivery, partial)
            path, fault = self._tell(self._commit(partial, metrics, place) if self._rank == 0 else None)[0]
            _see([Outcome(fault)], None)
        except BaseException:
            # Rank 0 alone knows whether the folder has its name by now: what another deleted could be a checkpoint that counts.
            if partial is not None and self._rank == 0:
                with unbroken(note_here()):  # where a rank has failed, the others are interrupted
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

    def _gather(self, delivery: Delivery | None, partial: Partial) -> str | None:
        """Put this rank's files with those of the others; return where they are if they stay elsewhere."""
        own: Exception | None = None
        try:
            outcome = self._deliver(delivery, partial)
        except OSError as error:
            own, outcome = error, Outcome(self._disk_fault(error, "a checkpoint"))
        except InvalidValueError as error:
            own, outcome = error, Outcome(Fault("value", str(error)))
        except Exception as error:
            text = f"checkpoint_upload_fn has failed on rank {self._rank}: {type(error).__name__}: {error}"
            own, outcome = error, Outcome(Fault("user", text))
        outcomes = self._tell(outcome)
        _see(outcomes, own)
        return _common_place(outcomes)

    def _deliver(self, delivery: Delivery | None, partial: Partial) -> Outcome:
        if not partial.path.is_dir():
            raise InvalidValueError(
                f"Rank {self._rank}, on {platform.node()}, does not see the folder {self._plan.run_dir} as rank 0 does. All "
                "machines have to see the folder of a run, in one place: name one that they share with RunOptions(run_dir=...)."
            )
        if delivery is None:
            return Outcome()
        if delivery.is_placed or delivery.upload_fn is not None:
            return Outcome(place=self._placed(delivery, partial.name))
        self._copy(delivery.checkpoint, partial.path)
        return Outcome(has_copied=True)

    def _copy(self, checkpoint: Any, partial: Path) -> None:
        if _is_local(checkpoint):
            source = self._local_folder(checkpoint)
            if partial.resolve().is_relative_to(source.resolve()):
                raise InvalidValueError(
                    f"The folder of the run, {self._plan.run_dir}, is in the checkpoint that rank {self._rank} has reported, "
                    f"{source}. Save the checkpoint to a folder of its own."
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
                f"Rank {self._rank}, on {platform.node()}, has reported the checkpoint {folder}, which {what}. Report a folder, "
                "while it is there: in the block of the temporary directory, say."
            )
        return folder

    def _placed(self, delivery: Delivery, name: str) -> str:
        """Return the folder in which a checkpoint is already, or is brought by the user's own function."""
        checkpoint = delivery.checkpoint
        if delivery.upload_fn is not None and not delivery.is_placed:
            checkpoint = delivery.upload_fn(checkpoint, name)
        if not hasattr(checkpoint, "filesystem"):
            raise InvalidValueError(
                f"checkpoint_upload_fn has returned a {type(checkpoint).__name__} on rank {self._rank}. It has to return the "
                "ray.train.Checkpoint that it has made."
            )
        if not _is_local(checkpoint):
            raise InvalidValueError(
                f"Rank {self._rank} has reported a checkpoint in remote storage ({checkpoint.path}), to stay there. Here "
                "checkpoints are folders that all machines see: let it be copied (CheckpointUploadMode.SYNC), or use "
                'lane="managed".'
            )
        return str(self._local_folder(checkpoint).absolute())

    def _commit(self, partial: Partial, metrics: Mapping[str, Any], place: str | None) -> tuple[str | None, Fault | None]:
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
            f"Rank {self._rank}, on {platform.node()}, could not write {what} to {self._plan.run_dir}: {error.strerror or error}"
            f"{file}. Nothing is kept of this checkpoint; those before it are there. Make room or see to the permissions, then "
            "go on from the last one."
        )
        return Fault("os", text, error.errno or 0)


def _see(outcomes: Sequence[Outcome], own: BaseException | None) -> None:
    """Raise the error of the first rank that has one, on all ranks."""
    for rank, outcome in enumerate(outcomes):
        if outcome.fault is not None:
            outcome.fault.raise_here(rank, own)


def _common_place(outcomes: Sequence[Outcome]) -> str | None:
    """Return where the files of all ranks are, None if they were copied.

    Raises:
        InvalidValueError: In more than one place.
    """
    places = {outcome.place: rank for rank, outcome in reversed(list(enumerate(outcomes))) if outcome.place is not None}
    copied = [rank for rank, outcome in enumerate(outcomes) if outcome.has_copied]
    if len(places) + bool(copied) > 1:
        parts = [f"rank {rank} {place}" for place, rank in places.items()] + [f"rank {rank} one to copy" for rank in copied[:1]]
        raise InvalidValueError(
            f"The ranks have reported parts of one checkpoint that stay in different places: {', '.join(parts)}. Bring them to "
            "one folder, or let all be copied."
        )
    return next(iter(places), None)


def _is_local(checkpoint: Any) -> bool:
    return str(checkpoint.filesystem.type_name) == "local"


def _delete_local(checkpoint: Any, kept: str | None) -> None:
    """Delete what was copied; what is kept stays where it is."""
    if _is_local(checkpoint) and str(Path(checkpoint.path).absolute()) != kept:
        with contextlib.suppress(OSError):
            shutil.rmtree(checkpoint.path)
