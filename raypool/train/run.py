"""A training in progress: what whoever waits for it holds, and the attempts that it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.channel.feed import Feed
from raypool.futures import Future
from raypool.train.runs import RunOptions, TrainingResult

if TYPE_CHECKING:
    import pandas as pd

RUNS = "raypool_runs"
"""Below the user's home: the folders of runs that are given none."""


class TrainingRun(Future[TrainingResult]):
    """The handle of a training: a future of its `TrainingResult`, for `cancel`, `request_stop`, `metrics` and `diary` meanwhile.

    After `request_stop` the loop finds `current_task().should_stop` true: on all ranks from the same `ray.train.report` on.

    Attributes:
        path: The folder of the run; it is made with the first checkpoint.
        recipe: Of a training by `pool.fit`: what `scaling_report` needs; else None.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._tries: list[Future[Any]] = []
        super().__init__(name, on_ask=_pass_on)
        self.path = path
        self.recipe: Any = None
        self._adopting = threading.Lock()
        self.catch_up = self._joined

    def running(self) -> bool:
        """Whether an attempt runs, or has run, and the training has not ended."""
        return not self.done() and any(each.running() or each.done() for each in self._tries)

    @property
    def started_at(self) -> datetime | None:
        """When its first attempt began, None before."""
        return self._tries[0].started_at if self._tries else None

    @started_at.setter
    def started_at(self, value: datetime | None) -> None:
        """Take nothing: its attempts know."""

    @property
    def attempts(self) -> int:
        """How often it was started, by the pool or by Ray Train's controller."""
        return sum(max(1, each.attempts) for each in self._tries)

    @attempts.setter
    def attempts(self, value: int) -> None:
        """Take nothing: its attempts know."""

    @property
    def metrics(self) -> pd.DataFrame:
        """What was reported so far, all of it once the training has ended.

        A row for each report, by rank, then in order: `time` (UTC), `rank`, `attempt`, then the metrics in the order in which
        they first appear. What is reported by `ray.train.report` is in it once, as rank 0 says it; what is reported by
        `raypool.report`, as each rank says it. A metric that is called like one of those is in "reported_NAME".
        """
        return self._joined().metrics("rank")

    def __repr__(self) -> str:
        return f"<TrainingRun {self.name!r}: {self.state}>"

    def adopt(self, attempt: Future[Any]) -> None:
        """Take up an attempt: what was, and is, asked of the training is asked of it. For the pool."""
        attempt.whole = self
        with self._adopting:
            self._tries.append(attempt)
        _pass_on(self)

    @property
    def tries(self) -> Sequence[Future[Any]]:
        """The attempts so far, the last of which may still go on. For the pool."""
        with self._adopting:
            return tuple(self._tries)

    def _joined(self) -> Feed:
        feed = Feed()
        for each in self.tries:
            feed.add_all_of(each._caught_up())
        return feed


def _pass_on(run: Future[Any]) -> None:
    """Ask the attempt at hand what was asked of the training."""
    assert isinstance(run, TrainingRun)
    for attempt in run.tries[-1:]:
        if run.cancelled():
            attempt.cancel()
        elif run.stop_requested:
            attempt.request_stop()
    if run.cancelled():
        run.notify_cancelled()


def run_folder(kept: RunOptions, name: str) -> Path:
    """Return the folder of a run, which need not be there; a new one if none is named."""
    if kept.run_dir is not None:
        return Path(kept.run_dir)
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:40].strip("-")
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 16**6:06x}"
    return Path.home() / RUNS / f"{readable}-{stamp}"
