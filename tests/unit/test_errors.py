"""The error tree: as its docstring draws it, and every error survives pickling with its fields."""

from __future__ import annotations

import pickle
import re
from concurrent.futures import BrokenExecutor

from raypool import errors
from raypool.errors import LossReason, RaypoolError

TREE = [getattr(errors, name) for name in errors.__all__]
RAYPOOL_ERRORS = [cls for cls in TREE if isinstance(cls, type) and issubclass(cls, RaypoolError)]


def test_pickling_keeps_the_text_and_the_fields() -> None:
    for cls in RAYPOOL_ERRORS:
        error = cls("Something with 3 numbers.", reason=LossReason.NODE, attempts=3, holders=("a",))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert str(again) == "Something with 3 numbers."
        assert (again.reason, again.attempts, again.holders) == (LossReason.NODE, 3, ("a",))


def test_the_docstring_draws_the_tree() -> None:
    lines = (errors.__doc__ or "").splitlines()
    drawn, depths = {}, {}
    for cls in RAYPOOL_ERRORS:
        line = next((line for line in lines if re.search(rf"(^|[ ─]){cls.__name__}\b", line)), "")
        drawn[cls.__name__] = (len(line) - len(line.lstrip(" │├└─"))) // 4 if line else None
        depths[cls.__name__] = len([base for base in cls.__mro__ if base in RAYPOOL_ERRORS])
    assert drawn == depths


def test_errors_are_what_python_would_raise_too() -> None:
    assert issubclass(errors.InvalidValueError, ValueError)
    assert issubclass(errors.InvalidTypeError, TypeError)
    assert issubclass(errors.PoolClosedError, RuntimeError)
    assert issubclass(errors.PoolBrokenError, BrokenExecutor)
    assert not issubclass(errors.TaskTimeoutError, TimeoutError), (
        "a wait that ran out is something else"
    )
