"""What ranks report: values that can travel, and whether all report the same."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.task import NUMBERS, checked_metric

MAX_NAMES = 8
"""An error has so many names of metrics at most."""


def checked(metrics: Any) -> dict[str, Any]:
    """Return metrics as they can travel, and as they are now.

    Raises:
        InvalidTypeError: They are no dict of names, or one is a tensor, or cannot be pickled.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise InvalidTypeError(
            f"report(metrics={metrics!r}) got a {type(metrics).__name__}. Metrics are a dict from names to values, "
            '{"loss": 0.5} for one.'
        )
    if NUMBERS.issuperset(map(type, metrics.values())):
        return dict(metrics)
    return {name: _checked_value(name, value) for name, value in metrics.items()}


def _checked_value(name: str, value: Any) -> Any:
    try:
        return checked_metric(name, value)
    except (InvalidTypeError, InvalidValueError):
        if _has_tensor(value):
            raise
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise InvalidTypeError(
            f"report({name}=...) got a {type(value).__name__}, which cannot be pickled ({error}). Report numbers, texts, or what "
            "is made of them."
        ) from error


def _has_tensor(value: Any) -> bool:
    import torch

    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def how_they_differ(names: Sequence[tuple[str, ...]]) -> str:
    """Return which rank is the first to report other metrics than rank 0, and which; nothing if none does."""
    first = set(names[0])
    for rank, own in enumerate(names):
        if set(own) == first or (rank and not own):
            continue
        missing, other = _listed(first.difference(own)), _listed(set(own) - first)
        facts = [f"{missing} is missing"] * bool(missing) + [f"{other} is not among those of rank 0"] * bool(other)
        return f"Rank {rank} has reported other metrics than rank 0: {', '.join(facts)}"
    return ""


def _listed(names: set[str]) -> str:
    shown = [repr(name) for name in sorted(names)]
    if len(shown) > MAX_NAMES:
        shown = [*shown[:MAX_NAMES], f"and {len(shown) - MAX_NAMES} more"]
    return ", ".join(shown)
