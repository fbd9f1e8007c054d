"""What counts as a whole number: Python's integers, NumPy's, and whatever else Python takes for an index; no bool."""

from __future__ import annotations

import operator
from typing import Any

from raypool.errors import InvalidTypeError, InvalidValueError


def whole_number(value: Any) -> int | None:
    """Return a whole number as Python's `int`; None for anything else.

    Example:
        >>> import numpy as np
        >>> whole_number(np.int64(3)), whole_number(True), whole_number(3.0), whole_number("3")
        (3, None, None, None)
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if isinstance(value, bool) or str(dtype).endswith("bool") or shape != ():  # torch takes bools and [3] for an index
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def checked_count(name: str, value: Any, least: int) -> int:
    """Return a count as Python's `int`.

    Raises:
        InvalidTypeError: It is not a whole number.
        InvalidValueError: It is less than `least`.
    """
    number = whole_number(value)
    if number is None:
        raise InvalidTypeError(f"{name}={value!r} is not a whole number.")
    if number < least:
        raise InvalidValueError(f"{name}={number} is less than {least}.")
    return number


def optional_count(name: str, value: Any, least: int) -> int | None:
    """Return a count as Python's `int`, or None for None; raises as `checked_count` does."""
    return None if value is None else checked_count(name, value, least)
