"""Labels of machines, and what may be asked of them, by Ray's rules."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raypool.errors import InvalidValueError

WORD = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
"""A name or a value; before a name there may be a prefix, the name of a domain and a slash."""

PREFIX = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,251}[a-zA-Z0-9])?")

VALUE = re.compile(r"(?P<no>!?)(in\((?P<several>[^()]+)\)|(?P<one>[^()!]*))")
"""What may be asked of a value: that it is this one, or one of some, or none of them."""


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a machine with these labels has all that are wanted. One that lacks a label has no value of it.

    Example:
        >>> has_labels({"market": "spot"}, {"market": "in(spot, reserved)", "region": "!eu"})
        True
    """
    return all(_has(labels.get(name), value) for name, value in wanted.items())


def for_ray(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return wanted labels as Ray understands them: to Ray (2.60) the blank of "in(a, b)" is part of the value, which none has.

    Example:
        >>> for_ray({"market": "in(spot, reserved)"})
        {'market': 'in(spot,reserved)'}
    """
    return {name: value.replace(" ", "") for name, value in wanted.items()}


def check_labels(wanted: Mapping[str, str]) -> None:
    """Refuse labels that no machine can have, and questions that Ray would not understand.

    Raises:
        InvalidValueError: One of them is such.
    """
    for name, value in wanted.items():
        prefix, slash, word = name.rpartition("/")
        if not WORD.fullmatch(word) or (slash and not PREFIX.fullmatch(prefix)):
            raise InvalidValueError(
                f"labels has the name {name!r}, which no label can have. "
                "It consists of letters and digits, with - _ . between them, and perhaps a domain and a slash before it."
            )
        if not _values(value) or not all(entry == value == "" or WORD.fullmatch(entry) for entry in _values(value)):
            raise InvalidValueError(
                f"labels has {name!r}: {value!r}, which is no value that a label can have. "
                'Give one ("spot"), what it is not ("!spot"), or several ("in(a, b)", "!in(a, b)").'
            )


def _values(wanted: str) -> list[str]:
    """Return the values that are named; none if it is no question."""
    found = VALUE.fullmatch(wanted)
    if found is None:
        return []
    return [found["one"]] if found["several"] is None else [entry.removeprefix(" ") for entry in found["several"].split(",")]


def _has(value: str | None, wanted: str) -> bool:
    return (value in _values(wanted)) != wanted.startswith("!")
