"""The trials of a search: how each has ended, and which is the best; read from Optuna's study."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from raypool.results import RUN_COLUMNS
from raypool.views.words import describe_error

logger = logging.getLogger("raypool")

STUDY = "study.log"
"""The file of Optuna's study in the folder of a search."""

NAME = "raypool"
"""The name of the study in that file."""

METRIC = "raypool_metric"
"""The attribute of that study with the name of the score."""

WORKERS = "raypool_workers"
"""The attribute of that study with the number of workers of each trial, if it is a training."""

PARENT = "raypool_parent"
"""The attribute of a trial that took over from another: both, and the rung of the checkpoint."""

PART = "raypool_part"
"""The attribute of a trial that may wait at rungs with its newest part: how many reports came
before it, and after which epoch it ends; None: at the end of the trial."""

OWNER = "raypool_run_dir"
"""The attribute of a trial in a user's study that says which search it belongs to."""

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
"""The states of Optuna's trials that have ended."""

OTHER_COLUMNS = ("trial", "state", "epochs", "parent", *RUN_COLUMNS)
"""The columns of a search's table that always have these names."""


class Trials(NamedTuple):
    """The trials of a search, by the number of their item.

    `numbers`: their numbers in the study. `states`: "complete", "pruned" or "failed"; of a search
    in progress "running" or "waiting" at a rung; of one in a folder "unfinished". `parents`: in a
    population, the numbers of the trials that they took over from; else empty. `workers`: of each
    trial, if it is a training.
    """

    metric: str
    mode: Literal["max", "min"]
    numbers: Sequence[int]
    states: Sequence[str]
    scores: Sequence[float | None]
    epochs: Sequence[int]
    parents: Sequence[int | None] = ()
    workers: int | None = None

    @property
    def score_column(self) -> str:
        """The name of the scores in tables: the metric's, unless another column has that."""
        return f"score_{self.metric}" if self.metric in OTHER_COLUMNS else self.metric

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of the trials in tables."""
        columns: dict[str, Any] = {"trial": self.numbers, "state": self.states}
        columns |= {self.score_column: self.scores, "epochs": self.epochs}
        if self.parents:
            columns["parent"] = self.parents
        return {name: list(cells) for name, cells in columns.items()}

    def ranked(self) -> dict[int, float]:
        """Return the finite scores by item, the best first; those of complete trials come first.

        Example:
            >>> states, scores = ["pruned", "complete", "complete"], [0.9, 0.7, 0.8]
            >>> Trials("accuracy", "max", range(3), states, scores, [1, 9, 9]).ranked()
            {2: 0.8, 1: 0.7, 0: 0.9}
        """
        places = {"complete": 0, "failed": 2}
        sign = -1 if self.mode == "max" else 1
        scores = {
            item: score
            for item, score in enumerate(self.scores)
            if score is not None and math.isfinite(score)
        }

        # a score after a few epochs is no match for one after all of them; among equals, the trial
        # that has come farthest is better, then the first
        def place(item: int) -> tuple[float, ...]:
            state = places.get(self.states[item], 1)
            return state, sign * scores[item], -self.epochs[item], item

        return {item: scores[item] for item in sorted(scores, key=place)}

    @property
    def summary(self) -> str:
        """How many ended how, and the best score.

        Example:
            >>> Trials("loss", "min", [4, 7], ["pruned", "complete"], [2, 1], [1, 9]).summary
            '1 complete, 1 pruned; best loss 1 (trial 7)'
        """
        words = ", ".join(
            f"{count} {state}" for state, count in sorted(Counter(self.states).items())
        )
        for item, score in list(self.ranked().items())[:1]:
            words += f"; best {self.metric} {score:.6g} (trial {self.numbers[item]})"
        return words or "none"


def trials_in(folder: Path, num_items: int) -> Trials | None:
    """Return the trials of the search in a folder; None if there is none, or Optuna is missing."""
    path = folder / STUDY
    if not path.exists() or find_spec("optuna") is None:
        return None
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    try:
        study = optuna.load_study(
            study_name=NAME, storage=JournalStorage(JournalFileBackend(str(path)))
        )
        trials = study.get_trials(deepcopy=False)[:num_items]
        parents = [trial.user_attrs.get(PARENT, (None,))[0] for trial in trials]
    except Exception as error:  # a damaged file, or one of another version of Optuna
        logger.warning("%s cannot be read (%s).", path, describe_error(error))
        return None
    if len(trials) < num_items:
        return None
    return Trials(
        str(study.user_attrs.get(METRIC, "score")),
        "max" if study.direction.name == "MAXIMIZE" else "min",
        range(num_items),
        [STATES.get(trial.state.name, "unfinished") for trial in trials],
        [trial.values[0] if trial.values else None for trial in trials],
        [max(trial.intermediate_values, default=0) for trial in trials],
        parents if any(parent is not None for parent in parents) else (),
        study.user_attrs.get(WORKERS),
    )
