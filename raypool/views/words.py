"""Texts for the views: times, rates, sizes, items, metrics and errors, each in one line."""

from __future__ import annotations

import numbers
import re
import reprlib
from collections.abc import Mapping
from typing import Any

MAX_DESCRIPTION = 200
MAX_VALUE = 60

TIMES = ("m", "M")
"""NumPy's kinds of durations and dates, which are unreadable as numbers."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = MAX_VALUE
_short.maxlist = _short.maxtuple = 12  # layers of a network


def duration(seconds: float, digits: int = 0) -> str:
    """Return a time as text, with `digits` after the point below a minute.

    Example:
        >>> duration(8.26), duration(8.26, 1), duration(75), duration(7265)
        ('8 s', '8.3 s', '1:15', '2:01:05')
    """
    if seconds < 59.5:
        return f"{max(seconds, 0.0):.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    )


def rate(count: int, seconds: float) -> str:
    """Return the rate per second, minute or hour.

    Example:
        >>> rate(12_000, 8), rate(997, 10), rate(30, 60), rate(1, 7200), rate(5, 0)
        ('1,500/s', '100/s', '30/min', '0.5/h', '')
    """
    if seconds <= 0:
        return ""
    for unit, length_s in (("s", 1), ("min", 60), ("h", 3600)):
        if count / seconds * length_s >= 1 or unit == "h":
            break
    number = count / seconds * length_s
    return f"{number:,.0f}/{unit}" if number >= 99.5 else f"{number:.2g}/{unit}"


def gibibytes(used: int, total: int | None) -> str:
    """Return memory in use as text.

    Example:
        >>> gibibytes(33_500_000_000, 85_899_345_920), gibibytes(0, None)
        ('31.2 of 80.0 GiB', '0.0 GiB')
    """
    of_total = "" if total is None else f" of {total / 2**30:.1f}"
    return f"{used / 2**30:.1f}{of_total} GiB"


CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that a terminal obeys or cannot show, except tabs and ends of lines."""


def printable(text: str) -> str:
    r"""Return a text without control characters, except tabs and ends of lines.

    Example:
        >>> printable("two\n\tlines, \x1b[31mred\x07")
        'two\n\tlines, ?[31mred?'
    """
    return CONTROLS.sub("?", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    r"""Return a text as one line without control characters.

    Example:
        >>> one_line("two\n lines, \x1b[31mred")
        'two lines, ?[31mred'
    """
    return "".join(
        character if character.isprintable() else "?" for character in " ".join(text.split())
    )


def describe_item(item: Any) -> str:
    """Return an item of any type and size in one line.

    Example:
        >>> describe_item({"network": "cnn", "lr": 0.001})
        'network=cnn, lr=0.001'
        >>> describe_item(list(range(1_000_000)))
        '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]'
    """
    if isinstance(item, dict) and all(isinstance(key, str) for key in item):
        text = ", ".join(f"{key}={_number(value, 6)}" for key, value in item.items())
    else:
        text = short_repr(item) if number_in(item) is item else _number(item, 6)
    return one_line(text[: 10 * MAX_DESCRIPTION])[:MAX_DESCRIPTION]


def describe_values(values: Mapping[str, Any]) -> str:
    """Return metrics in one line.

    Example:
        >>> describe_values({"epoch": 3, "loss": 0.41234})
        'epoch=3, loss=0.4123'
    """
    return ", ".join(f"{_value(name)}={_number(value, 4)}" for name, value in values.items())


def describe_error(error: BaseException) -> str:
    r"""Return an error in one line.

    Example:
        >>> describe_error(ValueError("no such\nnetwork")), describe_error(KeyError())
        ('ValueError: no such network', 'KeyError')
    """
    try:
        # cut twice: before it is cleaned, as it may be huge, and after, as that shortens it
        text = one_line(str(error)[: 10 * MAX_DESCRIPTION])[:MAX_DESCRIPTION]
    except Exception:  # the text comes from the user's class
        text = ""
    name = one_line(type(error).__name__)
    return f"{name}: {text}" if text else name


def number_in(value: Any) -> Any:
    """Return the number in a scalar of NumPy or a tensor without dimensions; else the value.

    Example:
        >>> import numpy as np
        >>> number_in(np.float32(0.5)), number_in(np.array(7)), number_in("a")
        (0.5, 7, 'a')
    """
    try:
        has_one = getattr(value, "shape", None) == () and hasattr(value, "item")
        is_time = has_one and getattr(getattr(value, "dtype", None), "kind", "") in TIMES
        return value.item() if has_one and not is_time else value
    except Exception:  # the user's own class, or a tensor on a device that is not here
        return value


def is_real(value: Any) -> bool:
    """Whether a value is a real number: NumPy has its durations among the integers.

    Example:
        >>> import numpy as np
        >>> is_real(np.int8(1)), is_real(np.timedelta64(1, "s"))
        (True, False)
    """
    is_time = getattr(getattr(value, "dtype", None), "kind", "") in TIMES
    return isinstance(value, numbers.Real) and not is_time


def _number(value: Any, digits: int) -> str:
    value = number_in(value)
    return f"{value:.{digits}g}" if isinstance(value, float) else _value(value)


def _value(value: Any) -> str:
    is_plain = isinstance(value, str) and len(value) <= MAX_VALUE and value.isprintable()
    return value if is_plain else short_repr(value)


def short_repr(value: Any) -> str:
    """Return a value as in code, in one line; long ones are shortened."""
    try:
        return one_line(_short.repr(value))
    except Exception:  # an integer of more than 4,300 digits, or the user's own class
        return f"a {type(value).__name__}"
