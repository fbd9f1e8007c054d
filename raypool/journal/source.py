"""Where a run's function can be found again, and what it holds."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from raypool.journal.files import digest
from raypool.journal.keys import code_key, content_key, function_key, module_name
from raypool.journal.plain import encode

MAX_WORDS = 300
"""So much of a partial's arguments is kept to be read."""

MAX_PICKLE_BYTES = 16 * 1024 * 1024
"""A function that holds more than this is not kept with the run."""


class Source(NamedTuple):
    """Where a function stands: the module to import, its name there, the file; or the function pickled, if no name leads to it.

    Attributes:
        function: Its key, by which runs are told apart.
        module: The module's name; a script's is that of its file.
        qualname: Its name there, None if it cannot be found by it.
        file: The module's file, if it has one.
        is_script: Whether that is a script, which is not to be found by its name only.
        digest: The hash of `pickled`, in hexadecimal digits.
        given: The hash of what partials give it, if that is plain data.
        words: That, to be read.
        held: The key of what it holds: closure, defaults, the object that it is a method of; None if that has no key.
        pickled: The function, where it has no name to be found by.
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

    @staticmethod
    def of(fn: Any) -> Source:
        """Note where a function stands."""
        named = getattr(fn, "__module__", None) or type(fn).__module__
        module = sys.modules.get(named)
        file = getattr(module, "__file__", None)
        is_script = named == "__main__" and getattr(module, "__spec__", None) is None
        qualname = getattr(fn, "__qualname__", None)
        is_found = module is not None and isinstance(qualname, str) and found(module, qualname) is fn
        if not is_found or (is_script and file is None):
            qualname = None
        path = None if file is None else str(Path(file).resolve())
        source = Source(function_key(fn), module_name(named), qualname, path, is_script)
        if qualname is None:
            pickled = _pickled(fn)
            source = source._replace(pickled=pickled, digest=None if pickled is None else digest(pickled).hex())
        (args, keywords), inner = _arguments(fn)
        plain = encode([list(args), keywords])
        if plain is None:
            return source._replace(held=_key_of(lambda: [*_held(inner), *args, *keywords, *keywords.values()]))
        words = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in keywords.items())])
        given = digest(plain.encode()).hex()
        return source._replace(given=given, words=words[:MAX_WORDS] or None, held=_key_of(lambda: _held(inner)))

    @property
    def pickle_name(self) -> str:
        """The name of the file with the pickle: runs with other functions have others."""
        return f"function-{(self.digest or '')[:12]}.pkl"

    def to_text(self) -> str:
        """Return it as JSON, without the pickle."""
        return json.dumps(self._replace(pickled=None)._asdict())

    @staticmethod
    def from_text(text: str) -> Source:
        """Return what `to_text` has written."""
        return Source(**json.loads(text))


def found(module: ModuleType, qualname: str) -> Any:
    """Return what a module has under this name, None if nothing."""
    value: Any = module
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


class _Room(io.BytesIO):
    """A file that takes so much and no more."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_PICKLE_BYTES:
            raise OverflowError("a large function")
        return super().write(data)


def _pickled(fn: Any) -> bytes | None:
    """Pickle a function with what it holds; None if that cannot be, or is too much."""
    import cloudpickle

    file = _Room()
    try:
        cloudpickle.CloudPickler(file, protocol=5).dump(fn)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    return file.getvalue()


def _arguments(fn: Any) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Any]:
    """Return what partials give a function, by position and by name, and the function."""
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        args, keywords = (*fn.args, *args), {**fn.keywords, **keywords}
        fn = fn.func
    return (args, keywords), fn


def _held(fn: Any) -> list[Any]:
    """Return what a function holds besides its name; of a lambda, which has none, also what it does."""
    if isinstance(fn, FunctionType):
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        code = [code_key(fn.__code__)] if fn.__name__ == "<lambda>" else []
        return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *code]
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        return [] if isinstance(owner, ModuleType) else [owner]
    return [] if hasattr(fn, "__qualname__") else [fn]


def _key_of(find: Callable[[], list[Any]]) -> str | None:
    """Return the key of some values; None if one has none, or another in each run: raypool's own objects."""
    try:
        values = find()
        if any(type(value).__module__.partition(".")[0] == "raypool" for value in values):
            return None
        return content_key(values, "it")
    except Exception:
        return None
