"""Global variables that a setup has set, for functions that run after it in a worker process.

A function of a script, a notebook or a test travels by value, and so does every lambda: with copies
of the global variables that it uses, which no other function shares. But after a setup with `global
model; model = load()` tasks should find the model. A function keeps a variable of its own if that
is not what the setup began with: the user has changed it since.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from raypool.worker.running import this_process

T = TypeVar("T")

CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
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
