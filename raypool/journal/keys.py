"""Keys of items, by content, and of functions, by name; and where a function is defined.

A key is the hash of a value's canonical bytes: the same in every process. Values with the same
content have the same key. Values of different types differ, even if equal (1, 1.0 and True).
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import datetime
import functools
import io
import json
import math
import struct
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from raypool.errors import InvalidTypeError
from raypool.journal.files import cloud_pickler, digest
from raypool.journal.plain import encode

KEY_BYTES = 12
"""The length of a key's hash [bytes]: two of a billion items never share one by chance."""


def content_key(value: Any, what: str) -> str:
    """Return the key of a value: 24 hexadecimal digits.

    Args:
        value: Anything that can be pickled.
        what: The name of the value in messages.

    Raises:
        InvalidTypeError: It has no key; the message names the part that is the reason.

    Example:
        >>> one, other = {"lr": 0.1, "depth": 3}, {"depth": 3, "lr": 0.1}
        >>> content_key(one, "item 0") == content_key(other, "item 0")
        True
        >>> content_key(1, "item 0") == content_key(1.0, "item 0")
        False
    """
    try:
        data = _canonical(value, what, [])
    except RecursionError:
        raise InvalidTypeError(
            f"{what} is nested too deeply to be identified by its content. Pass a value from which"
            " the function can create it."
        ) from None
    return blake2b(data, digest_size=KEY_BYTES).hexdigest()


def function_key(fn: Any) -> str:
    """Return the name of a function from one run to the next: "module.qualname".

    A script's functions have the name of its file, a partial that of its function, and a callable
    object that of its type.

    Example:
        >>> function_key(functools.partial(content_key, []))
        'raypool.journal.keys.content_key'
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if isinstance(getattr(fn, "__qualname__", None), str) else type(fn)
    return f"{module_name(getattr(named, '__module__', None))}.{named.__qualname__}"


def module_name(name: str | None) -> str:
    """Return the name under which a module can be imported: a script's is that of its file."""
    if name != "__main__":
        return name or "builtins"
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


# --- canonical bytes ------------------------------------------------------------------------------


def _node(tag: str, *parts: bytes) -> bytes:
    """Put parts together so that no two lists of parts give the same bytes."""
    payload = parts[0] if len(parts) == 1 else b"".join(parts)
    return b"%b%d:%b" % (tag.encode(), len(payload), payload)


def _canonical(value: Any, path: str, outer: list[int]) -> bytes:
    """Return the bytes of a value; `outer` has the ids of the values that contain it."""
    simple = _SIMPLE.get(type(value))
    if simple is not None:
        return simple(value)
    # a child refers to its parent, which is the same number of levels above it in every process
    if id(value) in outer:
        return _node("up", b"%d" % (len(outer) - outer.index(id(value))))
    outer.append(id(value))
    try:
        if type(value) is dict:
            return _node("dict", *_sorted_pairs(value.items(), path, outer))
        if type(value) is list or type(value) is tuple:
            return _node(type(value).__name__, *_each(value, path, outer))
        return _compound(value, path, outer)
    finally:
        outer.pop()


def _compound(value: Any, path: str, outer: list[int]) -> bytes:
    for kind, write in _COMPOUND:
        if isinstance(value, kind):
            return write(value, path, outer)
    if isinstance(value, tuple) and hasattr(value, "_fields") and not _has_more(value):
        return _node("namedtuple", _name(type(value)), *_each(value, path, outer))
    if dataclasses.is_dataclass(value) and not isinstance(value, (list, dict, tuple)):
        names = {field.name for field in dataclasses.fields(value)}
        if not _has_more(value, names):
            parts = [
                _node("", _text(name), _canonical(getattr(value, name), f"{path}.{name}", outer))
                for name in sorted(names)
                if hasattr(value, name)
            ]
            return _node("dataclass", _name(type(value)), *parts)
    for of_library in (_of_numpy, _of_pandas, _of_torch, _of_omegaconf):
        if (data := of_library(value, path, outer)) is not None:
            return data
    return _reduced(value, path, outer)


def _has_more(value: Any, fields: Collection[str] = ()) -> bool:
    """Whether a value has attributes beside its fields, and not only derived ones."""
    return any(
        name not in fields
        and name != "__orig_class__"  # set by typing
        and not isinstance(getattr(type(value), name, None), functools.cached_property)
        for name in getattr(value, "__dict__", ())
    )


def _set(value: Any, path: str, outer: list[int]) -> bytes:
    extra = _canonical(getattr(value, "__dict__", None) or None, path, outer)
    return _node("set", _name(type(value)), extra, *sorted(_each(value, path, outer)))


def _each(values: Iterable[Any], path: str, outer: list[int]) -> list[bytes]:
    return [
        (
            simple(value)
            if (simple := _SIMPLE.get(type(value)))
            else _canonical(value, f"{path}[{index}]", outer)
        )
        for index, value in enumerate(values)
    ]


def _sorted_pairs(pairs: Iterable[tuple[Any, Any]], path: str, outer: list[int]) -> list[bytes]:
    return sorted(
        _canonical(key, f"a key of {path}", outer)
        + (
            simple(value)
            if (simple := _SIMPLE.get(type(value)))
            else _canonical(value, f"{path}[{key!r}]", outer)
        )
        for key, value in pairs
    )


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"str%d:%b" % (len(data), data)


def _name(cls: Any) -> bytes:
    """Return the name of a class or function, the same whether its script is run or imported."""
    return _text(
        f"{module_name(getattr(cls, '__module__', None))}.{getattr(cls, '__qualname__', repr(cls))}"
    )


def _number(value: float) -> bytes:
    return b"float8:nannannn" if math.isnan(value) else b"float8:" + struct.pack(">d", value)


_SIMPLE: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"None0:",
    type(...): lambda value: b"Ellipsis0:",
    bool: lambda value: b"bool1:1" if value else b"bool1:0",
    int: lambda value: _node("int", b"%x" % value),
    float: _number,
    complex: lambda value: _node("complex", _number(value.real), _number(value.imag)),
    str: _text,
    bytes: lambda value: _node("bytes", value),
    bytearray: lambda value: _node("bytearray", bytes(value)),
    Decimal: lambda value: _node("decimal", str(value).encode()),
    Fraction: lambda value: _node("fraction", str(value).encode()),
    uuid.UUID: lambda value: _node("uuid", value.bytes),
    datetime.date: lambda value: _node("date", value.isoformat().encode()),
    datetime.timedelta: lambda value: _node(
        "timedelta", b"%d %d %d" % (value.days, value.seconds, value.microseconds)
    ),
    range: lambda value: _node("range", b"%d %d %d" % (value.start, value.stop, value.step)),
    ModuleType: lambda value: _node("module", value.__name__.encode()),
}
"""How to write values that contain no others, by type."""


def _function(fn: FunctionType, path: str, outer: list[int]) -> bytes:
    """Write the name of a function; if that does not lead to it, also code and captured values."""
    module = sys.modules.get(fn.__module__)
    is_found = module is None or found(module, fn.__qualname__) is fn
    if is_found and "<" not in fn.__qualname__:
        return _node("function", _name(fn))
    held = _canonical(
        (captured(fn), fn.__defaults__, fn.__kwdefaults__), f"what {path} holds", outer
    )
    return _node("function", _name(fn), _code(fn.__code__, path, outer), held)


def captured(fn: FunctionType) -> list[Any]:
    """Return the values that a function captures, of variables that have one yet."""
    values = []
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has none
            values.append(cell.cell_contents)
    return values


def _code(code: CodeType, path: str, outer: list[int]) -> bytes:
    constants = [
        (_code if isinstance(constant, CodeType) else _canonical)(constant, path, outer)
        for constant in code.co_consts
    ]
    return _node("code", _node("", code.co_code), _text(" ".join(code.co_names)), *constants)


# --- values of other packages ---------------------------------------------------------------------
# A package that was never imported has made no values.


def _of_numpy(value: Any, path: str, outer: list[int]) -> bytes | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        plain = None if value.dtype.kind in "mM" else value.item()
        if type(plain) in _NUMBERS:
            return _canonical(plain, path, outer)
        return _array(numpy.asarray(value), path, outer)
    return _array(value, path, outer) if type(value) is numpy.ndarray else None


def _of_pandas(value: Any, path: str, outer: list[int]) -> bytes | None:
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return None
    if isinstance(value, pandas.Index):
        names = _canonical(list(value.names), path, outer)
        return _node("index", names, _column(value, path, outer))
    labels = _column(value.index, path, outer)
    if isinstance(value, pandas.Series):
        name = _canonical(value.name, f"the name of {path}", outer)
        return _node("series", name, _column(value, path, outer), labels)
    columns = [_column(value.iloc[:, number], path, outer) for number in range(value.shape[1])]
    return _node("frame", _name(type(value)), _column(value.columns, path, outer), labels, *columns)


def _array(array: Any, path: str, outer: list[int]) -> bytes:
    shape = repr(array.shape).encode()
    if array.dtype.hasobject:
        return _node("array", b"object", shape, *_each(array.ravel().tolist(), path, outer))
    memory = array if array.flags.c_contiguous else array.copy(order="C")
    data = blake2b(memory.reshape(-1).view("u1") if memory.nbytes else b"", digest_size=32).digest()
    return _node("array", repr(array.dtype.descr).encode(), shape, data)


def _column(column: Any, path: str, outer: list[int]) -> bytes:
    dtype = column.dtype
    categories = (list(dtype.categories), dtype.ordered) if hasattr(dtype, "categories") else None
    held = _canonical(categories, path, outer)
    return _node("column", _text(str(dtype)), held, _array(column.to_numpy(), path, outer))


def _of_omegaconf(value: Any, path: str, outer: list[int]) -> bytes | None:
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        return None
    # a Hydra configuration counts as its content, with interpolated values filled in
    return _canonical(omegaconf.OmegaConf.to_container(value, resolve=True), path, outer)


def _of_torch(value: Any, path: str, outer: list[int]) -> bytes | None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    plain = value.detach()
    plain = plain.as_subclass(torch.Tensor) if plain.layout is torch.strided else plain.to_dense()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    data = blake2b(plain.reshape(-1).view(torch.uint8).numpy(), digest_size=32).digest()
    form = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
    return _node("tensor", _name(type(value)), form, data)


# --- all other values -----------------------------------------------------------------------------


def _reduced(value: Any, path: str, outer: list[int]) -> bytes:
    """Return the bytes of the parts from which pickle would restore a value."""
    kind = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidTypeError(
            f"{path} is a {kind.__name__} that cannot be pickled ({reason}), so it cannot be"
            " identified by its content. Create it inside the function, or pass the values that it"
            " is made from."
        ) from error
    if isinstance(reduced, str):
        return _node("global", _name(kind), _text(reduced))
    function, args, state, entries, pairs = (*reduced, None, None, None)[:5]
    parts = [_canonical(part, path, outer) for part in (function, args)]
    if isinstance(state, dict):
        pieces = [
            _canonical(name, path, outer) + _canonical(part, f"{path}.{name}", outer)
            for name, part in state.items()
        ]
        parts.append(_node("state", *sorted(pieces)))
    else:
        parts.append(_canonical(state, path, outer))
    parts.append(_node("list", *_each(entries or (), path, outer)))
    if isinstance(value, OrderedDict):
        parts.append(_node("pairs", *_each(list(pairs or ()), path, outer)))
    else:
        parts.append(_node("dict", *_sorted_pairs(pairs or (), path, outer)))
    return _node("object", _name(kind), *parts)


def _as_args(tag: str, take: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], bytes]:
    return lambda value: _node(tag, _canonical(take(value), f"a {tag}", []))


_SIMPLE[datetime.time] = _as_args(
    "time", lambda value: (value.isoformat(), value.fold, value.tzinfo)
)
_SIMPLE[datetime.datetime] = _as_args(
    "datetime", lambda value: (value.isoformat(), value.fold, value.tzinfo)
)

_NUMBERS = frozenset({bool, int, float, complex, str, bytes})
"""Python's types of NumPy's numbers and texts."""

_COMPOUND: list[tuple[Any, Callable[[Any, str, list[int]], bytes]]] = [
    (
        Enum,
        lambda value, path, outer: _node(
            "enum",
            _name(type(value)),
            _canonical(value.value if isinstance(value, Flag) else value.name, path, outer),
        ),
    ),
    ((set, frozenset), _set),
    (PurePath, lambda value, path, outer: _node("path", _text(str(value)))),
    (type, lambda value, path, outer: _node("class", _name(value))),
    (FunctionType, _function),
    (
        functools.partial,
        lambda value, path, outer: _node(
            "partial", _canonical((value.func, value.args, dict(value.keywords)), path, outer)
        ),
    ),
]
"""How to write values that may contain others, by class or parent class."""


# --- function sources: definition and captured values ---------------------------------------------


MAX_WORDS = 300
"""The greatest length of a partial's arguments, as readable text [characters]."""

MAX_PICKLE_BYTES = 16 * 1024 * 1024
"""A function with a larger pickle [bytes] is not kept with the run."""


class FunctionSource(NamedTuple):
    """Where a function is defined: module, name and file; or its pickle, if no name leads to it.

    Attributes:
        function: Its key, by which runs are told apart.
        module: The module's name; a script's is that of its file.
        qualname: Its name there, None if it cannot be found by it.
        file: The module's file, if it has one.
        is_script: Whether that is a script, whose name alone does not lead to it.
        digest: The hash of `pickled`, in hexadecimal digits.
        given: The hash of the arguments from partials, if these are plain data.
        words: These arguments as readable text.
        held: The key of its captured values: closure, defaults, the object that it is a method of;
            None if that has no key.
        pickled: The pickled function, if no name leads to it.
        fingerprint: What else its results depend on (`fingerprints.Fingerprint`).
    """

    function: str
    module: str
    qualname: str | None
    file: str | None
    is_script: bool = False
    digest: str | None = None
    given: str | None = None
    words: str | None = None
    held: str | None = None
    pickled: bytes | None = None
    fingerprint: Sequence[Any] | None = None

    @staticmethod
    def of(fn: Any) -> FunctionSource:
        """Find out where a function is defined."""
        args: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        inner = fn
        while isinstance(inner, functools.partial):
            args, keywords = (*inner.args, *args), {**inner.keywords, **keywords}
            inner = inner.func
        named = getattr(inner, "__module__", None) or type(inner).__module__
        module = sys.modules.get(named)
        file = getattr(module, "__file__", None)
        is_script = named == "__main__" and getattr(module, "__spec__", None) is None
        qualname = getattr(fn, "__qualname__", None)
        if module is None or not isinstance(qualname, str) or found(module, qualname) is not fn:
            qualname = None
        if is_script and file is None:
            qualname = None  # the prompt or a notebook: no later process can import it
        path = None if file is None else str(Path(file).resolve())
        source = FunctionSource(function_key(fn), module_name(named), qualname, path, is_script)
        if qualname is None:
            pickled = _pickled(fn)
            hashed = None if pickled is None else digest(pickled).hex()
            source = source._replace(pickled=pickled, digest=hashed)
        keywords = dict(sorted(keywords.items()))
        plain = encode([list(args), keywords])
        if plain is None:
            return source._replace(
                held=_key_of(lambda: [*_held(inner), *args, *keywords, *keywords.values()])
            )
        named_args = (f"{name}={value!r}" for name, value in keywords.items())
        words = ", ".join([*map(repr, args), *named_args])[:MAX_WORDS] or None
        return source._replace(
            given=digest(plain.encode()).hex(),
            words=words,
            held=_key_of(lambda: _held(inner)),
        )

    @property
    def pickle_name(self) -> str:
        """The name of the file with the pickle: runs with other functions have others."""
        return f"function-{(self.digest or '')[:12]}.pkl"

    def to_text(self) -> str:
        """Return it as JSON, without the pickle."""
        return json.dumps(self._replace(pickled=None)._asdict())

    @staticmethod
    def from_text(text: str) -> FunctionSource:
        """Return the source that `to_text` has written."""
        return FunctionSource(**json.loads(text))


def found(module: ModuleType, qualname: str) -> Any:
    """Return the module's object of this name, None if there is none."""
    value: Any = module
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


class _Room(io.BytesIO):
    """A file with a limited size."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_PICKLE_BYTES:
            raise OverflowError("a large function")
        return super().write(data)


def _pickled(fn: Any) -> bytes | None:
    """Pickle a function with its captured values; None if that fails, or is too large."""
    file = _Room()
    try:
        cloud_pickler()(file, protocol=5).dump(fn)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the user's code may raise anything while it is pickled
        return None
    return file.getvalue()


def _held(fn: Any, *outer: Any) -> list[Any]:
    """Return the captured values of a function, and of functions among these.

    Not those functions: their code is compared by itself (`fingerprints`).
    """
    if isinstance(fn, FunctionType):
        values = [*captured(fn), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        held = []
        for value in values:
            if not isinstance(value, FunctionType):
                held.append(value)
            elif value not in (fn, *outer):  # one may call itself
                held += _held(value, fn, *outer)
        return held
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        return [] if isinstance(owner, ModuleType) else [owner]
    return [] if hasattr(fn, "__qualname__") else [fn]


def _key_of(find: Callable[[], list[Any]]) -> str | None:
    """Return the key of some values; None if one has none."""
    try:
        values = find()
        # raypool's own objects have a new key in each run
        if any(type(value).__module__.partition(".")[0] == "raypool" for value in values):
            return None
        return content_key(values, "it")
    except Exception:  # what the user's classes raise
        return None
