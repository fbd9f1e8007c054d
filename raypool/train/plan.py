"""What the ranks of a training are told, and what they bring back."""

from __future__ import annotations

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """One attempt of a training, as its ranks see it.

    `name`: of the training. `attempt`: from 1. `run_dir`: the folder of the run, made with the first checkpoint. `start`: the
    folder of the checkpoint to begin with. `keep`, `best_metric`, `best_mode`: which checkpoints stay; see `RunOptions`.
    """

    name: str
    attempt: int
    run_dir: str
    start: str | None = None
    keep: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"


class RankEnd(NamedTuple):
    """How a rank has come to its end: what the loop has returned, and what it has reported last (None: nothing)."""

    value: Any
    metrics: dict[str, Any] | None = None
