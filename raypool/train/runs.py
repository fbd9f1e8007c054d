"""How a training is kept, and what it gives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.counts import optional_count
from raypool.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from ray.train import Checkpoint

MODES = ("min", "max")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is kept of a training, and from what it goes on; for `pool.train` and `pool.fit`.

    How often it is tried again, its time limit, name and priority are options of the pool's view: `pool.options(retries=1)`.

    Args:
        run_dir: The folder of this run, in a place that all nodes and this process see. A run in a folder that has checkpoints in
            it goes on from the last one. None: a new folder in `~/raypool_runs`, which is made with the first checkpoint.
        keep_checkpoints: So many checkpoints are kept: the best ones by `best_metric` (without one the newest), and always the
            last. None: all.
        best_metric: The reported metric that tells which checkpoint is the best.
        best_mode: "min" if lower is better, "max" if higher is.
        start_from: A checkpoint to begin with, a folder or a `ray.train.Checkpoint`; not used where `run_dir` has one.
        min_workers: The training goes on with so few workers if others are lost for good. None: it needs all.

    Raises:
        InvalidTypeError: A field is of a wrong kind.
        InvalidValueError: A field has a value that cannot work: a checkpoint that is not there, say.

    Source:
        Ray 2.60, ray.train.RunConfig, CheckpointConfig and FailureConfig.

    Example:
        >>> RunOptions(keep_checkpoints=2, best_metric="loss").best_mode
        'min'
    """

    run_dir: str | os.PathLike[str] | None = None
    keep_checkpoints: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"
    start_from: Any = None
    min_workers: int | None = None

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            if not isinstance(self.run_dir, (str, os.PathLike)):
                raise InvalidTypeError(f"run_dir={self.run_dir!r} is not the path of a folder.")
            if "://" in os.fspath(self.run_dir):
                raise InvalidValueError(
                    f"run_dir={self.run_dir!r} is a URL. A training is kept in a folder that all machines see: name one, and "
                    "copy checkpoints to the URL from there, or in the loop on rank 0."
                )
            folder = Path(self.run_dir).expanduser().absolute()
            if folder.exists() and not folder.is_dir():
                raise InvalidValueError(f"run_dir={folder} is a file. Name a folder, which need not be there yet.")
            object.__setattr__(self, "run_dir", folder)
        for name in ("keep_checkpoints", "min_workers"):
            object.__setattr__(self, name, optional_count(name, getattr(self, name), least=1))
        if self.best_metric is not None and not isinstance(self.best_metric, str):
            raise InvalidTypeError(f"best_metric={self.best_metric!r} is not the name of a metric.")
        if self.best_mode not in MODES:
            raise InvalidValueError(f"best_mode={self.best_mode!r} is neither 'min' nor 'max'.")
        if self.start_from is not None:
            object.__setattr__(self, "start_from", checkpoint_folder(self.start_from))


def checkpoint_folder(checkpoint: Any) -> Path:
    """Return the folder of a checkpoint on this machine.

    Raises:
        InvalidTypeError: It is neither a path nor a `ray.train.Checkpoint`.
        InvalidValueError: There is no such folder, or nothing in it.
    """
    path = getattr(checkpoint, "path", checkpoint)
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidTypeError(f"start_from={checkpoint!r} is neither the folder of a checkpoint nor a ray.train.Checkpoint.")
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise InvalidValueError(
            f"start_from={folder} is no checkpoint: {'it is a file' if folder.exists() else 'there is no such folder'}. "
            "Give the folder that a training has reported, result.checkpoint for one."
        )
    if not any(folder.iterdir()):
        raise InvalidValueError(
            f"start_from={folder} is no checkpoint: the folder is empty. Give one that a training has reported."
        )
    return folder


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training has given.

    Attributes:
        metrics: What rank 0 has reported last, by name; empty if it has reported nothing.
        metrics_frame: All that was reported, a row for each report: `time` (UTC), `rank`, `attempt`, then the metrics. What
            was reported by `ray.train.report` is in it once, as rank 0 said it.
        checkpoint: The last checkpoint, None without one.
        best_checkpoint: The one with the best `RunOptions.best_metric`; None without one, or if no metric was named.
        best_checkpoints: All that are kept, each with the metrics of rank 0, the best last; without a metric the newest.
        values: What the ranks have returned, by rank; empty if the training has not come to its end.
        path: The folder of the run; None if nothing was kept.
        model: The trained model, on the CPU, of a training by `pool.fit`; else None.
        ended_by: What has ended a training by `pool.fit`: "max_epochs", "patience", "request_stop", "output_fn", or
            "loss is nan"; else None.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_frame: pd.DataFrame = field(repr=False)
    checkpoint: Checkpoint | None = None
    best_checkpoint: Checkpoint | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list, repr=False)
    values: list[Any] = field(default_factory=list, repr=False)
    path: Path | None = None
    model: torch.nn.Module | None = field(default=None, repr=False)
    ended_by: str | None = None
