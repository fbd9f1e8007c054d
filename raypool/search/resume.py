"""Where the trials of an earlier call with the same folder were when it ended."""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Sequence

from raypool.channel.feed import MetricsReport
from raypool.results import Row
from raypool.search.rungs import Members, Rungs
from raypool.search.study import Trial, TrialStudy


def replay(
    trial: Trial, study: TrialStudy, reports: Sequence[MetricsReport], levels: Sequence[int]
) -> None:
    """Note earlier reports of a trial, and its scores at the rungs that it reached."""
    told = trial.score
    for report in reports:
        value = study.note_report(report)
        if value is not None:
            num_reached = bisect(levels, trial.epochs) - len(trial.at_rungs)
            trial.at_rungs += [study.good(value)] * num_reached
    if told is not None:  # a cancelled trial may have reported more after it was told
        trial.score, trial.epochs = told, trial.noted_epochs


def has_gone_on(trial: Trial, row: Row, reported_at: float, levels: Sequence[int]) -> bool:
    """Whether another part of a trial began after this outcome."""
    # its reports may be lost: those of a killed process are written a little later
    is_promoted = trial.rung > 0 and trial.state == "running"
    if is_promoted and levels and trial.epochs < levels[trial.rung]:
        return True
    if row.started_at is None or row.duration_s is None:
        return False
    return row.started_at + row.duration_s < reported_at


def place(trial: Trial, rungs: Rungs | Members, *, is_interrupted: bool) -> None:
    """Find the rung of a trial, and compare others with it at those below.

    An interrupted part ends at the next rung; it may have been about to end at this one.
    """
    levels, epochs = rungs.levels, trial.epochs
    rung = bisect_left(levels, epochs) if is_interrupted else bisect(levels, epochs) - 1
    trial.rung = max(trial.rung, min(rung, len(levels) - 1))
    trial.until = levels[trial.rung]
    last = trial.at_rungs[-1] if trial.at_rungs else -math.inf
    trial.at_rungs += [last] * (trial.rung - len(trial.at_rungs))  # whose reports are lost
    for rung, score in enumerate(trial.at_rungs):
        if trial.state != "running" or rung < trial.rung:
            rungs.reach(trial.index, rung, score, is_waiting=False)


def has_paused(trial: Trial, saved_at: float, reported_at: float, levels: Sequence[int]) -> bool:
    """Whether an interrupted trial saved a checkpoint after the last epoch before a rung."""
    if not levels or trial.score is None:
        return False
    return trial.until == trial.epochs < levels[-1] and saved_at > reported_at
