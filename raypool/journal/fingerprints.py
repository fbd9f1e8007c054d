"""What the results of a function depend on besides its item: the user's code, and global values."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from raypool.channel.users_code import is_users, variables_of
from raypool.journal.keys import FunctionSource, captured, content_key

PYTHON = f"{sys.implementation.cache_tag} -O{sys.flags.optimize}"
"""The compiler: another one makes other instructions of the same source."""

MAX_PARTS = 100
"""At most this many functions, classes and variables are looked at."""

MAX_VALUES = 1000
"""A value with more parts is data, and not compared."""

MAX_WORDS = 60
"""The greatest length of a value's text [characters]."""

MAX_BYTES = 2500
"""The greatest size of names, keys and texts, which are in a row of the journal [bytes]."""

SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
CONTAINERS = frozenset({list, tuple, dict, set, frozenset})

CHANGERS = frozenset({"sort", *vars(MutableSequence), *vars(MutableSet), *vars(MutableMapping)})
"""Methods that change a container: a function that calls one fills the variable itself."""


class Fingerprint(NamedTuple):
    """The code that a function consists of, and the plain global values that it reads.

    Attributes:
        python: The compiler of the code.
        code: Keys of code by name: of the function first, then of functions and classes it uses.
        values: Keys and texts of global variables and class attributes by name.
    """

    python: str
    code: dict[str, str]
    values: dict[str, list[str]]

    def changes(self, old: Fingerprint) -> Iterator[str]:
        """Yield what has changed since an earlier fingerprint, each for a sentence."""
        for number, (name, key) in enumerate(self.code.items()):
            if self.python == old.python and old.code.get(name, key) != key:
                yield (
                    f"uses {name}, whose code has changed since they were computed"
                    if number
                    else "has different code than when they were computed"
                )
        for name, (key, words) in self.values.items():
            old_key, old_words = old.values.get(name, (key, words))
            if old_key != key:
                yield f"reads the global {name}, which " + (
                    f"was {old_words} when they were computed and is {words} now"
                    if old_words != words
                    else "has changed since they were computed"
                )


def source_of(fn: Any) -> FunctionSource:
    """Return where a function is defined, with its fingerprint."""
    return FunctionSource.of(fn)._replace(fingerprint=fingerprint_of(fn))


def changes(old: FunctionSource, new: FunctionSource) -> list[str]:
    """Return how a function has changed since an earlier call, each for a sentence."""
    found: list[str] = []
    if old.fingerprint is not None and new.fingerprint is not None:
        found += Fingerprint(*new.fingerprint).changes(Fingerprint(*old.fingerprint))
    if None not in (old.given, new.given) and old.given != new.given:
        found.append(
            f"has {new.words or 'no arguments'} from functools.partial, and had"
            f" {old.words or 'none'} when they were computed"
        )
    if None not in (old.held, new.held) and old.held != new.held:
        found.append(
            "holds different values (in a partial, a closure, defaults, or its object) than when"
            " they were computed"
        )
    return found


def fingerprint_of(fn: Any) -> Fingerprint:
    """Return the fingerprint of a function: of its nearest parts, if there are too many."""
    root = _inner(fn)
    if not isinstance(root, (FunctionType, type)):
        root = type(root)  # it has a method __call__
    parts: list[Part] = []
    with contextlib.suppress(Exception):  # a proxy of something that is not there yet, say
        parts.extend(islice(_parts(root), MAX_PARTS))  # those before it stay
    changed = {name for name, entry in parts if entry is None}
    fingerprint = Fingerprint(PYTHON, {}, {})
    room = MAX_BYTES
    for name, entry in parts:
        room -= len(ascii((name, entry)))
        if room < 0:
            break
        if isinstance(entry, str):
            fingerprint.code.setdefault(name, entry)
        elif entry is not None and changed.isdisjoint((name, name.partition(".")[0])):
            fingerprint.values.setdefault(name, entry)
    return fingerprint


Part = tuple[str, str | list[str] | None]
"""A name with a key of code; with the key and text of a value; or None: the code sets it."""


def _parts(root: FunctionType | type) -> Iterator[Part]:
    """Yield the parts of a function's fingerprint, the nearest first."""
    seen: dict[int, Any] = {}
    left: deque[Any] = deque([root])
    while left:
        part = _inner(left.popleft())
        is_code = isinstance(part, (FunctionType, type))
        if id(part) in seen or not is_code or not is_users(part.__module__):
            continue
        seen[id(part)] = part
        prefix = "" if part.__module__ == root.__module__ else f"{part.__module__}."
        name = prefix + part.__qualname__
        own = vars(part) if isinstance(part, type) else {"": part}
        functions = {
            key: inner
            for key, each in own.items()
            if isinstance(inner := _inner(each), FunctionType)
        }
        # the defaults of the function itself are with the values that it holds
        defaults = {} if part is root else {key: _defaults(fn) for key, fn in functions.items()}
        code = {key: _instructions(fn.__code__) for key, fn in functions.items()}
        yield name, _key([code, defaults])
        if isinstance(part, type):
            left += part.__bases__
            for key, value in own.items():
                if not key.startswith("__") and (plain := _entry(value)):
                    yield f"{name}.{key}", plain
        for function in functions.values():
            left += captured(function)
            for variable, entry in _variables(function, left):
                yield prefix + variable, entry


def _variables(function: FunctionType, code: deque[Any]) -> Iterator[Part]:
    """Yield the global variables of a function that have plain values, and add others to `code`."""
    yield from ((variable, None) for variable in _set_by(function.__code__))
    for name, *others in variables_of(function.__code__):
        if name not in function.__globals__:
            continue  # a builtin
        value = function.__globals__[name]
        while others and isinstance(value, ModuleType) and is_users(value.__name__):
            name, value = f"{name}.{others[0]}", vars(value).get(others.pop(0))
        if not CHANGERS.isdisjoint(others):
            yield name, None
        elif (entry := _entry(value)) is None:
            code.append(value)
        elif not name.rpartition(".")[2].startswith("__"):
            yield name, entry


def _inner(value: Any) -> Any:
    """Return the function in a partial, method, property or decorated function."""
    for _ in range(100):  # one may wrap itself
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, FunctionType) or type(value).__module__ == "functools":
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is None:
                break
            value = wrapped
        else:
            break
    return value


@functools.lru_cache(1024)
def _set_by(code: CodeType) -> frozenset[str]:
    """Return the global variables that code sets, or of which it sets entries or attributes."""
    names: set[str] = set()
    starts: dict[Any, str] = {}
    for step in dis.get_instructions(code):
        # the target `cache[key]` of an assignment begins where `cache` does
        line, _, column, _ = step.positions or (None,) * 4
        start = step.offset if column is None else (line, column)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            names.add(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            starts[start] = step.argval
        elif step.opname.startswith(("STORE_", "DELETE_")) and start in starts:
            is_attribute = step.opname in ("STORE_ATTR", "DELETE_ATTR")
            names.add(f"{starts[start]}.{step.argval}" if is_attribute else starts[start])
        elif isinstance(step.argval, CodeType):
            names |= _set_by(step.argval)
    return frozenset(names)


NAMED = frozenset({*dis.hasconst, *dis.hasname})


def _instructions(code: CodeType) -> list[Any]:
    """Return what code does, without its place in the file, docstrings and names of variables."""
    return [
        (
            step.opname,
            _instructions(step.argval)
            if isinstance(step.argval, CodeType)
            else (step.argval if step.opcode in NAMED else step.arg),
        )
        for step in dis.get_instructions(code)
        if step.opname != "EXTENDED_ARG"
    ]


def _defaults(function: FunctionType) -> list[Any]:
    """Return default arguments that cannot change by themselves."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in defaults if type(value) in SCALARS]


def _entry(value: Any) -> list[str] | None:
    """Return the key and text of a plain value, None for another."""
    if not _is_plain(value):
        return None
    try:
        words = repr(value)
    except ValueError:  # a number of too many digits
        words = type(value).__name__
    return [_key(value), words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}..."]


def _is_plain(value: Any) -> bool:
    left, room = [value], MAX_VALUES
    while left and room > 0:
        value = left.pop()
        room -= 1
        if type(value) in CONTAINERS:
            if len(value) > room:
                return False
            left += [*value, *value.values()] if type(value) is dict else value
        elif type(value) not in SCALARS:
            return False
        elif isinstance(value, (str, bytes)):
            room -= len(value) // 100
    return room > 0


def _key(value: Any) -> str:
    return content_key(value, "it")[:12]
