"""A part of a trial, in its worker: it trains until the trial pauses or ends."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raypool.views.words import is_real, number_in
from raypool.worker.running import TaskContext, note_here


class TrialEndedError(BaseException):
    """Raised in `report` if the function of a trial continues after it was asked to stop."""


class TrialPart(NamedTuple):
    """What a worker gets of a trial: it trains for `until` epochs, of which some came before.

    `num_reports` and `num_epochs` are known of those. `is_again`: whether the part began before,
    and may have come to its end.
    """

    config: dict[str, Any]
    until: float
    num_reports: int
    num_epochs: int
    is_again: bool


def run_part(fn: Callable[[Any], Any], metric: str | None, part: TrialPart) -> Any:
    """Run a trial until it has trained for this many epochs; return its function's value."""
    num_reports = part.num_reports
    note = note_here()
    assert note is not None
    say = note.say

    def count(note: TaskContext, kind: str, payload: Any) -> bool | None:
        nonlocal num_reports
        if kind == "metrics" and (metric is None or score_of(payload[1].get(metric)) is not None):
            if note.should_stop and not note.is_leaving:
                raise TrialEndedError
            if part.is_again and epochs_of(payload[1], 0) > part.until:
                # it was interrupted between its last epoch and its pause: it pauses now, with the
                # checkpoint of that epoch, whose report may be lost
                if part.num_epochs < part.until:
                    say(note, kind, (payload[0], {**payload[1], "epoch": part.until - 1}))
                raise TrialEndedError
            num_reports += 1
            if epochs_of(payload[1], num_reports) >= part.until:
                note.should_stop = True
        return say(note, kind, payload)

    note.say = count
    value = None
    try:
        with contextlib.suppress(TrialEndedError):  # raised by `count`
            value = fn(part.config)
    finally:
        if not inspect.iscoroutine(value):
            note.say = say
    if not inspect.iscoroutine(value):
        return value

    async def wait() -> Any:  # the worker runs it, in its own event loop
        try:
            with contextlib.suppress(TrialEndedError):
                return await value
        finally:
            note.say = say

    return wait()


def epochs_of(metrics: Mapping[str, Any], num_reports: int) -> int:
    """Return how many epochs a trial has behind it: by its `epoch`, else by its reports."""
    epoch = metrics.get("epoch")
    is_number = isinstance(epoch, (int, float)) and math.isfinite(epoch)
    return int(epoch) + 1 if is_number else num_reports  # type: ignore[arg-type]


def score_of(value: Any) -> float | None:
    """Return a value as a score; None: it is not a number."""
    value = number_in(value)
    try:
        return float(value) if is_real(value) else None
    except OverflowError:  # an integer that is greater than any float
        return math.inf if value > 0 else -math.inf
