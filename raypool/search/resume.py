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
    trial: Trial,
    study: TrialStudy,
    reports: Sequence[tuple[int, MetricsReport]],
    levels: Sequence[int],
) -> None:
    """Note earlier reports of a trial, with their runs, and its scores at the rungs it reached."""
    told = trial.score
    attempt = (0, 0)
    for run, report in reports:
        if attempt != (run, report.attempt) and "epoch" not in report.metrics:
            trial.num_reports = trial.epochs = first_epoch(trial, levels)
            del trial.at_rungs[bisect(levels, trial.epochs) :]
        attempt = run, report.attempt
        value = study.note_report(report)
        if value is not None:
            num_reached = bisect(levels, trial.epochs) - len(trial.at_rungs)
            trial.at_rungs += [study.good(value)] * num_reached
    trial.peak = -math.inf  # it counts when it continues, or by the score that it was told with
    if told is not None:  # a cancelled trial may have reported more after it was told
        trial.score, trial.epochs = told, trial.noted_epochs


def first_epoch(trial: Trial, levels: Sequence[int]) -> int:
    """Return where another attempt of a trial, or another call, continues: its epochs at the last
    rung. What it trained after that is lost.
    """
    if trial.noted_part is not None and trial.num_reports >= trial.noted_part[0]:
        return trial.noted_part[0]
    num_reached = bisect(levels, trial.num_reports)
    if not num_reached:  # without rungs, it may have saved its checkpoint anywhere
        return 0 if levels else trial.num_reports
    return levels[num_reached - 1]


def has_gone_on(trial: Trial, row: Row, reported_at: float, levels: Sequence[int]) -> bool:
    """Whether another part of a trial began after this outcome."""
    if trial.state == "running":
        first, until = trial.noted_part or (trial.rung, levels[trial.rung] if levels else 0)
        # its reports may be lost: those of a killed process are written a little later
        if first > 0 and trial.epochs < until:
            return True
    if row.started_at is None or row.duration_s is None:
        return False
    return row.started_at + row.duration_s < reported_at


def reports_before(trial: Trial, levels: Sequence[int], *, has_waited: bool) -> int:
    """Return after how many reports an interrupted trial continues, if it does not report `epoch`.

    `has_waited`: it waited at a rung, at the end of the newest part that the study knows.
    """
    if trial.noted_part is not None:
        return int(trial.noted_part[has_waited])
    if levels:
        return levels[trial.rung - 1] if trial.rung else 0
    return trial.num_reports


def waited(trial: Trial) -> bool:
    """Whether the newest part of a trial that the study knows came to its end, at a rung."""
    return trial.noted_part is not None and trial.noted_part[1] <= trial.epochs


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
