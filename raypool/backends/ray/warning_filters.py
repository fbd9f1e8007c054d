"""The script's filters for warnings, in its workers too; they travel with calls when changed."""

from __future__ import annotations

import contextlib
import pickle
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

from raypool.backends.ray import packing

Filter: TypeAlias = tuple[Any, ...]
"""An entry of `warnings.filters`."""

PYTHONS_OWN: tuple[Filter, ...] = (
    ("default", None, DeprecationWarning, "__main__", 0),
    ("ignore", None, DeprecationWarning, None, 0),
    ("ignore", None, PendingDeprecationWarning, None, 0),
    ("ignore", None, ImportWarning, None, 0),
    ("ignore", None, ResourceWarning, None, 0),
)

with warnings.catch_warnings():  # while this is imported: it must not happen in a thread
    warnings.resetwarnings()
    # there is no public way to read them
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    _begun_with = (*warnings.filters, *PYTHONS_OWN)
    # what nobody has set in the script: `python -W` is about one process, and workers have
    # PYTHONWARNINGS themselves

_seen: list[Filter] = []
_packed: tuple[bytes, ...] = ()


def filters_here() -> tuple[bytes, ...]:
    """Return the script's filters, pickled; the same object as long as none has changed."""
    global _seen, _packed
    if warnings.filters != _seen:
        _seen = list(warnings.filters)
        packed = []
        for each in _seen:
            if each not in _begun_with:
                with contextlib.suppress(Exception):  # only this process can make its category, say
                    packed.append(packing.snapshot(each, "a filter for warnings"))
        _packed = tuple(packed)
    return _packed


class WarningFilters:
    """Keeps this worker's filters up to date with the script's."""

    def __init__(self) -> None:
        self._begun_with = list(warnings.filters)
        self._taken: list[Filter] = []

    def follow(self, packed: Sequence[bytes]) -> None:
        """Take the script's filters; those that a setup or task has set here come first."""
        before, self._taken = self._taken, []
        for each in packed:
            with contextlib.suppress(Exception):  # a category of a module that is not here
                self._taken.append(pickle.loads(each))
        later = [
            each
            for each in warnings.filters
            if each not in (*before, *self._taken, *self._begun_with)
        ]
        warnings.resetwarnings()  # so that what has been warned of is looked at again
        filters: Any = warnings.filters
        filters.extend([*later, *self._taken, *self._begun_with])
