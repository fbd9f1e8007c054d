"""The error tree: as its docstring draws it, and every error survives pickling with its fields."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import BrokenExecutor

import pytest

from raypool import errors
from raypool.errors import LossReason, RaypoolError

TREE = [getattr(errors, name) for name in errors.__all__]
RAYPOOL_ERRORS = [cls for cls in TREE if isinstance(cls, type) and issubclass(cls, RaypoolError)]


@pytest.mark.parametrize("cls", RAYPOOL_ERRORS)
def test_pickling_keeps_the_text_and_the_fields(cls: type[RaypoolError]) -> None:
    error = cls("Something with 3 numbers.", reason=LossReason.NODE, attempts=3, holders=("a",))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "Something with 3 numbers."
    assert (again.reason, again.attempts, again.holders) == (LossReason.NODE, 3, ("a",))


@pytest.mark.parametrize("cls", RAYPOOL_ERRORS)
def test_the_docstring_draws_the_tree(cls: type[RaypoolError]) -> None:
    drawn = errors.__doc__ or ""
    line = next((line for line in drawn.splitlines() if re.search(rf"(^|[ ─]){cls.__name__}\b", line)), None)
    assert line is not None, f"{cls.__name__} is not drawn"
    depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
    bases = [base for base in cls.__mro__ if base in RAYPOOL_ERRORS]
    assert depth == len(bases), f"{cls.__name__} is drawn at the wrong depth"


def test_errors_are_what_python_would_raise_too() -> None:
    assert issubclass(errors.InvalidValueError, ValueError)
    assert issubclass(errors.InvalidTypeError, TypeError)
    assert issubclass(errors.PoolClosedError, RuntimeError)
    assert issubclass(errors.PoolBrokenError, BrokenExecutor)
    assert not issubclass(errors.TaskTimeoutError, TimeoutError), "a wait that ran out is something else"
