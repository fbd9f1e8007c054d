"""Where a run's function can be found again, and what it holds."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from raypool.errors import SerializationError
from raypool.journal.files import cloudpickled, digest
from raypool.journal.keys import content_key, function_key, module_name

MAX_WORDS = 300


class Source(NamedTuple):
    """Where a function stands: the module to import, its name there, the file; or the function pickled, if no name leads to it.

    Attributes:
        function: Its key, by which runs are told apart.
        module: The module's name; a script's is that of its file.
        qualname: Its name there, None if it cannot be found by it.
        file: The module's file, if it has one.
        is_script: Whether that is a script, which is not to be found by its name only.
        digest: The hash of `pickled`, in hexadecimal digits.
        given: The key of what a partial gives it; None if nothing, or what has no key.
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
        given, inner = _arguments(fn)
        words = ", ".join([*map(_said, given[0]), *(f"{name}={_said(value)}" for name, value in given[1].items())])
        return source._replace(given=_key_of(lambda: given), words=words[:MAX_WORDS] or None, held=_key_of(lambda: _held(inner)))

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


def _pickled(fn: Any) -> bytes | None:
    """Pickle a function with what it holds; None if that cannot be."""
    try:
        return cloudpickled(fn)
    except SerializationError:
        return None


def _arguments(fn: Any) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Any]:
    """Return what partials give a function, by position and by name, and the function."""
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        args, keywords = (*fn.args, *args), {**fn.keywords, **keywords}
        fn = fn.func
    return (args, keywords), fn


def _held(fn: Any) -> Any:
    """Return what a function holds besides its name; of one without a name of its own also what it does."""
    if isinstance(fn, FunctionType):
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        code = (fn.__code__.co_code, list(map(repr, fn.__code__.co_consts))) if fn.__name__ == "<lambda>" else None
        return cells, fn.__defaults__, fn.__kwdefaults__, code
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        return None if isinstance(owner, ModuleType) else owner
    return None if hasattr(fn, "__qualname__") else fn


def _key_of(make: Callable[[], Any]) -> str | None:
    """Return the key of a value; None if it has none, or one that may be another in the next run: raypool's own objects."""
    try:
        value = make()
        return None if b"raypool" in cloudpickled(value) else content_key(value, "it")
    except Exception:
        return None


def _said(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
