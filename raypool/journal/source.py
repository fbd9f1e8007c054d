"""Where a run's function can be found again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from raypool.journal.files import digest
from raypool.journal.keys import function_key, module_name


class Source(NamedTuple):
    """Where a function stands: the module to import, its name there, the file; or the function pickled, if no name leads to it.

    Attributes:
        function: Its key, by which runs are told apart.
        module: The module's name; a script's is that of its file.
        qualname: Its name there, None if it cannot be found by it.
        file: The module's file, if it has one.
        is_script: Whether that is a script, which is not to be found by its name only.
        digest: The hash of `pickled`, in hexadecimal digits.
        pickled: The function, where it has no name to be found by.
    """

    function: str
    module: str
    qualname: str | None
    file: str | None
    is_script: bool = False
    digest: str | None = None
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
        pickled = None if qualname else _pickled(fn)
        known = None if pickled is None else digest(pickled).hex()
        return Source(function_key(fn), module_name(named), qualname, path, is_script, known, pickled)

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
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(fn, protocol=5))
    except Exception:
        return None
