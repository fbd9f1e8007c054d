"""Which variable of the user's is to blame for a value that cannot be pickled."""

from __future__ import annotations

import collections
import functools
import itertools
import pickle
import re
import reprlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

PATH_LENGTH = 60
"""A longer path is shown from here on, counted from its end."""

INSTALLED = ("site-packages", "dist-packages")

METHODS = (types.MethodType, types.BuiltinMethodType)


class Culprit(NamedTuple):
    """A part of a value: the path to it, where that begins, and the part itself."""

    path: str
    origin: str
    value: Any

    def __str__(self) -> str:
        kind, path = kind_of(self.value), re.sub(r"_modules\['(\w+)'\]", r"\1", self.path)  # as torch names parts of a model
        if len(path) > PATH_LENGTH:
            path = f"…{path[-PATH_LENGTH:]}"
        shown = f"{path!r} ({kind})" if path.isidentifier() else f"{path} ({kind})" if path else kind
        return f"{shown} {self.origin}" if path and self.origin else shown


class _Tracer(pickle._Pickler):
    """Pickles in Python, for nobody, and notes what it was at when that failed, from the whole value to the innermost part."""

    def __init__(self, pickler: Any) -> None:
        super().__init__(types.SimpleNamespace(write=len), protocol=5, buffer_callback=lambda _: False)
        self.dispatch_table = pickler.dispatch_table
        self._pickler = pickler
        self.chain: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Do what the other pickler does."""
        return self._pickler.reducer_override(obj)

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        """Note it if it fails."""
        try:
            super().save(obj, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.chain.insert(0, obj)
            raise


def find_culprit(value: Any, pickler: Any, error: BaseException) -> Culprit:
    """Return the part of a value that raised this error when this pickler had it: the innermost that the user has a name for.

    Private parts of objects of other packages (the lock of a `threading.Event`) are not named, but the object that has them.
    """
    tracer = _Tracer(pickler)
    try:
        tracer.dump(value)
    except Exception as again:
        if type(again) is type(error):
            return _walk(tracer.chain)
    return Culprit("", "", value)


def _walk(chain: list[Any]) -> Culprit:
    """Follow the names from each object to the next; what is between two of them the pickler has made."""
    here = named = _beginning(chain[0])
    is_own = True
    while len(chain := chain[1:]):
        steps = ((number, _step(here, part)) for number, part in enumerate(chain))
        functions = ((number, _beginning(part)) for number, part in enumerate(chain) if isinstance(part, types.FunctionType))
        number, step = next(((number, step) for number, step in itertools.chain(steps, functions) if step is not None), (0, None))
        if step is None:
            break
        is_own = _is_own(here.value, step, is_own)
        here, chain = step, chain[number:]
        if is_own:
            named = here
    return named


def _beginning(value: Any) -> Culprit:
    """Return a value from which a path begins anew."""
    if isinstance(value, types.FunctionType):
        return Culprit("", f"used by {_name(value)}", value)
    if isinstance(value, functools.partial):
        return Culprit("", f"of a partial of {_name(value.func)}", value)
    if isinstance(value, (list, tuple, dict, collections.deque, *METHODS)):
        return Culprit("", "", value)
    return Culprit("", f"of {_name(value if isinstance(value, type) else type(value))}", value)


def _step(here: Culprit, part: Any) -> Culprit | None:
    """Return a part of an object under its name; None if it is not known as one."""
    owner = here.value
    if isinstance(owner, (types.FunctionType, type)):
        here = _beginning(owner)
        names = _variables(owner) if isinstance(owner, types.FunctionType) else _attributes(owner)
    elif isinstance(owner, functools.partial):
        here = _beginning(owner)
        arguments = ((f"args[{number}]", value) for number, value in enumerate(owner.args))
        names = itertools.chain([("func", owner.func)], arguments, owner.keywords.items())
    elif isinstance(owner, dict):
        names = itertools.chain(
            ((f"[{reprlib.repr(key)}]", value) for key, value in owner.items()),
            ((f"[key {reprlib.repr(key)}]", key) for key in owner),
            _attributes(owner),
        )
    elif isinstance(owner, (list, tuple, collections.deque)):
        fields = getattr(owner, "_fields", None) or [f"[{number}]" for number in range(len(owner))]
        names = itertools.chain(zip(fields, owner, strict=True), _attributes(owner))
    else:
        names = _attributes(owner)
    for name, value in names:
        if value is part:
            if _is_raypools(owner) and not isinstance(owner, tuple):  # around a user's function; a call has names that help
                return _beginning(part)
            joint = "" if name.startswith("[") or not here.path else "."
            return here._replace(path=f"{here.path}{joint}{name}", value=part)
    if type(owner) is part or (isinstance(owner, METHODS) and part is owner.__self__):
        return _beginning(part)
    if isinstance(owner, (set, frozenset)) and any(part is value for value in owner):
        return here._replace(value=part)
    return None


def _is_raypools(owner: Any) -> bool:
    return _package(owner.func if isinstance(owner, functools.partial) else owner) == "raypool"


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function that travels by value brings along."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
    yield from function.__globals__.items()


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for base in type(owner).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, types.MemberDescriptorType) and not name.startswith("__"):
                try:
                    yield name, descriptor.__get__(owner)
                except AttributeError:  # it is not set
                    continue


def _is_own(owner: Any, step: Culprit, was_own: bool) -> bool:
    """Whether the user knows the name of a part: if they have made its owner's class, or if the name is public."""
    if isinstance(owner, (list, tuple, dict, set, frozenset, collections.deque, functools.partial, *METHODS)):
        return was_own
    package = _package(owner)
    if package in sys.stdlib_module_names:
        return type(owner).__name__.endswith("Namespace")  # those of `types` and `argparse` have the user's names
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = package == "raypool" or any(folder in file for folder in INSTALLED)
    return not is_installed or not step.path.rpartition(".")[2].startswith("_")


def _package(value: Any) -> str:
    """Return the name of the package that a function, a class or an object's class is from."""
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(getattr(named, "__module__", None) or "").partition(".")[0]


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.rpartition("<locals>.")[2]


def kind_of(value: Any) -> str:
    """Return what to call a value: "a threading.Event", "the function train"."""
    if isinstance(value, (type, types.FunctionType)):
        return f"the {'class' if isinstance(value, type) else 'function'} {_name(value)}"
    kind = type(value)
    package = kind.__module__
    is_library = package.partition(".")[0] in sys.stdlib_module_names and package != "builtins"
    name = f"{package}.{_name(kind)}" if is_library and not package.startswith("_") else _name(kind)
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
