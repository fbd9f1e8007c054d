"""What cloudpickle leaves out of what a script defines: it would travel by a name that no other process finds, or not at all."""

from __future__ import annotations

import copyreg
import functools
import sys
import threading
import typing
import weakref
from collections.abc import Callable
from typing import Any

NAMED: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    functools._lru_cache_wrapper: lambda value: (_cached, (value.__wrapped__, value.cache_parameters()), vars(value)),
    typing.NewType: lambda value: (typing.NewType, (value.__name__, value.__supertype__), vars(value)),
    typing.ParamSpec: lambda value: (typing.ParamSpec, (value.__name__,)),
    typing.TypeVarTuple: lambda value: (typing.TypeVarTuple, (value.__name__,)),
}
"""What travels by its name only, and how it is made where nothing has that name."""


def reduced(value: Any) -> Any:
    """Return how to make a value elsewhere, as a pickler's `reducer_override` does; `NotImplemented` if it needs no help."""
    kind = type(value)
    if kind in NAMED and not _is_importable(value):
        return NAMED[kind](value)
    if kind is weakref.WeakKeyDictionary:  # `functools.singledispatch` has one
        return weakref.WeakKeyDictionary, (dict(value),)
    if sys.version_info < (3, 12) and isinstance(value, functools.cached_property):  # it has a lock
        return copyreg.__newobj__, (kind,), vars(value) | {"lock": None}, None, None, _set_with_lock  # type: ignore[attr-defined]
    return NotImplemented


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Return a function with a cache of its own."""
    return functools.lru_cache(**parameters)(function)


def _set_with_lock(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state, lock=threading.RLock())


def _is_importable(value: Any) -> bool:
    """Whether other processes find a value in its module, as cloudpickle judges of functions."""
    name = value.__module__
    if name == "__main__" or any(f"{name}.".startswith(f"{by_value}.") for by_value in _registered()):
        return False
    found: Any = sys.modules.get(name)
    for part in getattr(value, "__qualname__", value.__name__).split("."):
        found = getattr(found, part, None)
    return found is value


def _registered() -> set[str]:
    """Return the modules whose contents the user wants to travel by value."""
    cloudpickles = filter(None, map(sys.modules.get, ("cloudpickle", "ray.cloudpickle")))
    return set().union(*(cloudpickle.list_registry_pickle_by_value() for cloudpickle in cloudpickles))
