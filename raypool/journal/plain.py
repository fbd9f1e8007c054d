"""Plain data as JSON that decodes to exactly the same values and types; other data are refused.

Plain data need no pickle, so opening them runs no code.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_DEPTH = 50
"""The greatest depth of nested containers."""

MAX_BITS = 10_000
"""The greatest size of an integer [bits]; Python refuses to convert much longer ones."""

MAX_PARTS = 100_000
"""The greatest number of parts of a value: a list in many places would be written as often."""

NUMPY_NAMES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
)
"""NumPy's types of numbers that Python's represent exactly."""


class _NotPlainError(Exception):
    pass


def encode(value: Any) -> str | None:
    """Return a value as JSON; None if `decode` would not return the same value and types.

    Example:
        >>> encode({"lr": 0.1, "layers": (64, 64)})
        '{"lr":0.1,"layers":{"~tuple":[64,64]}}'
        >>> decode(encode((1, 1.0, True)))
        (1, 1.0, True)
        >>> print(encode({1, 2}))
        None
    """
    try:
        return json.dumps(
            _tagged(value, 0, [0]), ensure_ascii=False, separators=(",", ":"), check_circular=False
        )
    except (_NotPlainError, RuntimeError):  # a function in another thread still changes it
        return None


def decode(text: str) -> Any:
    """Return the value that `encode` made this of."""
    return json.loads(text, object_hook=_untagged) if '"~' in text else json.loads(text)


def _tagged(value: Any, depth: int, count: list[int]) -> Any:
    kind = type(value)
    if kind is float or kind is bool or value is None:
        return value
    if kind is int and value.bit_length() <= MAX_BITS:
        return value
    if kind is str:
        return _checked_text(value)
    count[0] += 1 if kind not in (list, tuple, dict) else 1 + len(value)
    if depth >= MAX_DEPTH or count[0] > MAX_PARTS:
        raise _NotPlainError
    if kind is list or kind is tuple:
        entries = [_tagged(entry, depth + 1, count) for entry in value]
        return entries if kind is list else {"~tuple": entries}
    if kind is dict:
        return _tagged_dict(value, depth, count)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        raise _NotPlainError
    name = value.dtype.name
    if name not in NUMPY_NAMES or numpy.dtype(name).type is not type(value):
        raise _NotPlainError
    return {"~numpy": [name, value.item()]}


def _checked_text(text: str) -> str:
    # surrogates cannot be written, and two of them would be read as one character
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _NotPlainError from None
    return text


def _tagged_dict(value: dict[Any, Any], depth: int, count: list[int]) -> dict[str, Any]:
    entries = {}
    is_tagged = False
    for key, entry in value.items():
        if type(key) is not str:
            raise _NotPlainError
        is_tagged = is_tagged or key.startswith("~")
        entries[_checked_text(key)] = _tagged(entry, depth + 1, count)
    return {"~dict": list(map(list, entries.items()))} if is_tagged else entries


def _untagged(entries: dict[str, Any]) -> Any:
    if len(entries) != 1:
        return entries
    ((tag, content),) = entries.items()
    if tag == "~tuple":
        return tuple(content)
    if tag == "~dict":
        return dict(content)
    if tag == "~numpy":
        import numpy as np

        name, number = content
        return np.dtype(name).type(number)
    return entries
