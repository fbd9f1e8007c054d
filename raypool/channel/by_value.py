"""Functions of a script in other processes: they travel by value, each with its own variables.

Here are additions to cloudpickle, the same for multiprocessing, and global variables that a setup
has set, for functions that run after it.
"""

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
from typing import Any, NamedTuple, TypeVar

from raypool.worker.running import this_process

T = TypeVar("T")

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
    if kind in NAMED and not is_importable(value):
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
    there = function.__globals__
    # without global variables that are there: what an initializer has set stays
    state[1]["__globals__"] = {
        name: value for name, value in state[1]["__globals__"].items() if name not in there
    }
    set_state(function, state)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _set_with_lock(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state, lock=threading.RLock())  # of a `cached_property` of Python 3.11


def is_importable(value: Any) -> bool:
    """Whether other processes find a value by name, as cloudpickle judges of functions."""
    name = value.__module__
    if goes_by_value(name):
        return False
    found: Any = sys.modules.get(name)
    path = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    for part in str(path).split("."):
        found = getattr(found, part, None)
    return found is value


def goes_by_value(module: str | None) -> bool:
    """Whether functions of a module travel by value: it is the script, or the user wants it."""
    if module == "__main__":
        return True
    for place in ("cloudpickle", "ray.cloudpickle"):
        cloudpickle = sys.modules.get(place)
        for name in cloudpickle.list_registry_pickle_by_value() if cloudpickle else ():
            if f"{module}.".startswith(f"{name}."):
                return True
    return False


# --- global variables that a setup has set --------------------------------------------------------
#
# A function of a script, a notebook or a test travels by value, and so does every lambda: with
# copies of the global variables that it uses, which no other function shares. But after a setup
# with `global model; model = load()` tasks should find the model. A function keeps a variable of
# its own if that is not what the setup began with: the user has changed it since.

CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, type)
CONSTANTS = (int, float, complex, bool, str, bytes, type(None))


class Seen(NamedTuple):
    """A global variable as it was; `picture` tells whether its value was changed in place."""

    value: Any
    picture: bytes | None


class Left(NamedTuple):
    """A setup's value of a global variable, and the digest of the old one; None if it is new."""

    value: Any
    began_with: bytes | None


_left: dict[str, dict[str, Left]] = {}  # by the name of the module


def call_setup(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function; in a worker process, note the global variables that it sets."""
    function = function_in(fn) if this_process.is_worker else None
    if function is None:
        return fn(*args, **kwargs)
    before = {
        name: Seen(value, _picture(value, name, function)) for name, value in _variables(function)
    }
    try:
        return fn(*args, **kwargs)
    finally:  # also after an error: what it has set is set
        left = {}
        for name, value in _variables(function):
            began = before.get(name)
            if began is None:
                left[name] = Left(value, None)
            elif value is not began.value or _picture(value, name, function) != began.picture:
                left[name] = Left(value, began.picture or _digest(began.value))
        if left:
            _left.setdefault(function.__module__, {}).update(left)


def share_left(fn: Callable[..., Any]) -> None:
    """Give a function that came by value the variables that setups of its module have set."""
    function = function_in(fn) if _left else None
    if function is not None and _is_by_value(function):
        own = function.__globals__
        left = _left.get(function.__module__, {}).items()
        # only if it brings what they began with: else the user has set the variable since
        own |= {
            name: value
            for name, (value, began_with) in left
            if name not in own or _digest(own[name]) == began_with
        }


def function_in(fn: Any) -> types.FunctionType | None:
    """Return the function in a partial, bound method, decorated function or callable object."""
    # as `inspect.unwrap` has it: one may wrap itself, or answer every name
    for _ in range(sys.getrecursionlimit()):
        inner = _inner(fn)
        if inner is None:
            break
        fn = inner
    else:
        return None
    if not isinstance(fn, types.FunctionType):
        fn = type(fn).__call__
    return fn if isinstance(fn, types.FunctionType) else None


def _inner(fn: Any) -> Any:
    wrapped = getattr(fn, "__wrapped__", None)
    # not `or`: what can be called may be false
    if wrapped is not None:
        return wrapped
    return fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", None)


def _is_by_value(function: types.FunctionType) -> bool:
    """Whether a function has global variables of its own, not those of its module."""
    module = sys.modules.get(function.__module__)
    return module is None or function.__globals__ is not vars(module)


def _variables(function: types.FunctionType) -> list[tuple[str, Any]]:
    return [
        (name, value) for name, value in function.__globals__.items() if not name.startswith("__")
    ]


def _picture(value: Any, name: str, function: types.FunctionType) -> bytes | None:
    """Return a value's digest, if a function may change it in place."""
    # of a whole module only the variables that the function names
    if isinstance(value, CODE + CONSTANTS) or not (
        _is_by_value(function) or name in function.__code__.co_names
    ):
        return None
    return _digest(value)


def _digest(value: Any) -> bytes:
    """Return the digest of a value's pickle, the same for equal values; b"" if it has none."""
    import hashlib

    import cloudpickle

    try:
        digest = hashlib.sha256()
        pickler = cloudpickle.Pickler(  # into the digest: a model is there once, not twice
            types.SimpleNamespace(write=digest.update),
            # 5 would also tell whether an array is read-only, as those from the object store are
            protocol=4,
        )
        pickler.dump(getattr(value, "__code__", value))
        return digest.digest()
    except Exception:  # it runs the user's code
        return b""
