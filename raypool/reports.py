"""What tasks report of how they are doing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import time
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.task import notes_here

NUMBERS = frozenset({int, float, bool, type(None)})
"""Types of metrics that need no closer look."""

MAX_METRIC_TEXT = 256
"""A metric that is a text has at most so many characters: it goes into a table, not into a log."""


def report(**metrics: float | str | None) -> None:
    """Report how the task is doing: values by name, as often as you like.

    A moment later they are in the table `metrics` of the task's future, or of the loop's `Results`; the display of a loop shows
    the last ones. It takes some microseconds and waits for nobody. Outside a pool, and in the forked processes of a DataLoader,
    it checks the values and does nothing else, so that a function runs unchanged by itself.

    Args:
        metrics: Numbers (Python's or NumPy's) and short texts (at most 256 characters), in units of your own. None is a missing
            value.

    Raises:
        InvalidTypeError: A value is neither. A tensor: give it to a `MetricBuffer`, or report `tensor.item()`, which waits
            for the GPU.
        InvalidValueError: A text is too long.

    Source:
        Ray 2.60, ray.train.report, without its barrier over the workers.

    Example:
        >>> from raypool import parpool
        >>> def train(epochs):
        ...     for epoch in range(epochs):
        ...         report(epoch=epoch, loss=1 / (epoch + 1))
        >>> with parpool(profile="inline", quiet=True) as pool:
        ...     future = pool.parfeval(train, 2)
        >>> future.metrics[["epoch", "loss"]].to_dict("list")
        {'epoch': [0, 1], 'loss': [1.0, 0.5]}
    """
    if not NUMBERS.issuperset(map(type, metrics.values())):
        metrics = {name: checked_metric(name, value) for name, value in metrics.items()}
    report_of(time(), metrics)


def report_of(moment: float, metrics: Mapping[str, float | str | None]) -> None:
    """Report what was so at some moment [Unix time, s]; all of it has been checked."""
    note = next(notes_here(), None)
    if note is not None:
        note.say(note, "metrics", (moment, metrics))


def checked_metric(name: str, value: Any) -> float | str | None:
    """Return a metric as a plain number or text, or None for a missing value."""
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > MAX_METRIC_TEXT:
            raise InvalidValueError(
                f"report({name}=...) got a text of {len(value):,} characters; {MAX_METRIC_TEXT} fit. print() it."
            )
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return value if isinstance(value, bool) else int(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()  # type: ignore[no-any-return]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        step = f"Give it to a raypool.MetricBuffer, or report {name}.item(), which waits for the GPU if it is there."
    else:
        step = "Report single numbers or short texts."
    raise InvalidTypeError(f"report({name}=...) got a {type(value).__name__}, which is neither a number nor a text. {step}")
