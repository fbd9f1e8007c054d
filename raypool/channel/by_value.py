"""Pickling by value what a script defines: additions to cloudpickle, and for multiprocessing."""

from __future__ import annotations

import copyreg
import functools
import io
import multiprocessing
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from raypool.worker.running import this_process
from raypool.worker.setup_globals import function_in

NAMED: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    functools._lru_cache_wrapper: lambda value: (
        _cached,
        (value.__wrapped__, value.cache_parameters()),
        vars(value),
    ),
    typing.NewType: lambda value: (
        typing.NewType,
        (value.__name__, value.__supertype__),
        vars(value),
    ),
    typing.ParamSpec: lambda value: (typing.ParamSpec, (value.__name__,)),
    typing.TypeVarTuple: lambda value: (typing.TypeVarTuple, (value.__name__,)),
}
"""Types that cloudpickle pickles by name, and how to make a value where nothing has its name."""


def reduced(value: Any) -> Any:
    """Return what a pickler's `reducer_override` does for a value, or `NotImplemented`."""
    kind = type(value)
    if kind in NAMED and not _is_importable(value):
        return NAMED[kind](value)
    if kind is weakref.WeakKeyDictionary:  # `functools.singledispatch` has one
        return weakref.WeakKeyDictionary, (dict(value),)
    if sys.version_info < (3, 12) and isinstance(value, functools.cached_property):  # it has a lock
        make, state = copyreg.__newobj__, vars(value) | {"lock": None}  # type: ignore[attr-defined]
        return make, (kind,), state, None, None, _set_with_lock
    if "multiprocessing.managers" in sys.modules and isinstance(
        value, multiprocessing.managers.BaseProxy
    ):
        make, arguments = value.__reduce__()
        # other proxies that are got from it have no key, and use that of the process
        key = {"authkey": bytes(value._authkey)}  # type: ignore[attr-defined]
        return _proxy, (make, *arguments[:-1], arguments[-1] | key)
    return NotImplemented


def _proxy(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return a proxy of a manager, with its key."""
    if this_process.is_worker:
        multiprocessing.current_process().authkey = arguments[-1]["authkey"]
    try:
        return make(*arguments)
    except OSError as error:
        error.add_note(
            "raypool: this worker cannot reach the multiprocessing.Manager() whose proxy was sent."
            " Without an address=, only processes on its own machine can reach it. Use a"
            " raypool.DataQueue or pool.store, which reach all machines."
        )
        raise


_globals: dict[str, dict[str, Any]] = {}
"""By module, the global variables of functions that multiprocessing has brought here."""

_last_run: dict[str, weakref.ref[types.FunctionType]] = {}
"""By module, the function that ran last here. Weak: its global variables may be large."""


def teach_multiprocessing() -> None:
    """Let a script's functions travel to and from children that `multiprocessing` starts here."""
    # in a worker the script is not `__main__`, so nothing in it is found by name
    ForkingPickler.reducer_override = _reduced_for_child  # type: ignore[method-assign]


def note_globals(fn: Callable[..., Any]) -> None:
    """Let functions sent to forked children share this one's global variables."""
    function = function_in(fn)
    if function is not None:
        _last_run[function.__module__] = weakref.ref(function)


def _reduced_for_child(pickler: Any, value: Any) -> Any:
    import cloudpickle  # imported late: only code that starts processes needs it

    by_value = reduced(value)
    if by_value is NotImplemented and isinstance(value, (type, types.FunctionType)):
        # one for the whole pickle: it knows which functions share their global variables
        own = vars(pickler).setdefault("by_value", cloudpickle.CloudPickler(io.BytesIO()))
        by_value = own.reducer_override(value)
        if by_value is not NotImplemented and len(by_value) == 6:  # not one of Python's own
            make, args, *state, set_state = by_value
            if isinstance(value, type):
                return _class_in_child, (make, *args), *state, set_state
            return (
                _function_in_child,
                (value.__module__, make, *args),
                *state,
                functools.partial(_set_in_child, set_state),
            )
    elif by_value is NotImplemented and type(value) not in pickler.dispatch_table:
        reduce = cloudpickle.CloudPickler.dispatch_table.get(type(value))
        return NotImplemented if reduce is None else reduce(value)
    return by_value


def _class_in_child(make: Callable[..., Any], *args: Any) -> Any:
    teach_multiprocessing()
    return make(*args)


def _function_in_child(
    module: str, make: Callable[..., Any], code: Any, variables: dict[str, Any], *args: Any
) -> Any:
    teach_multiprocessing()
    function = _last_run[module]() if module in _last_run else None
    shared = _globals.setdefault(module, variables) if function is None else function.__globals__
    return make(code, shared, *args)


def _set_in_child(
    set_state: Callable[..., None], function: Any, state: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Set a function's own state."""
    there = function.__globals__
    # without global variables that are there: what an initializer has set stays
    state[1]["__globals__"] = {
        name: value for name, value in state[1]["__globals__"].items() if name not in there
    }
    set_state(function, state)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Return a function with a new cache."""
    return functools.lru_cache(**parameters)(function)


def _set_with_lock(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state, lock=threading.RLock())


def _is_importable(value: Any) -> bool:
    """Whether other processes find a value by name, as cloudpickle judges of functions."""
    name = value.__module__
    if name == "__main__":
        return False
    # modules whose contents the user wants to travel by value
    for cloudpickle in filter(None, map(sys.modules.get, ("cloudpickle", "ray.cloudpickle"))):
        registered = cloudpickle.list_registry_pickle_by_value()
        if any(f"{name}.".startswith(f"{by_value}.") for by_value in registered):
            return False
    found: Any = sys.modules.get(name)
    for part in getattr(value, "__qualname__", value.__name__).split("."):
        found = getattr(found, part, None)
    return found is value
