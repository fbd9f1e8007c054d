"""The error tree: as its docstring draws it, and every error survives pickling with its fields."""

from __future__ import annotations

import linecache
import pickle
import re
import traceback
from concurrent.futures import BrokenExecutor

import pytest

from raypool import Profile, errors, find_job, parpool
from raypool.errors import LossReason, RaypoolError, RemoteTraceback

RAYPOOL_ERRORS = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RaypoolError)
]


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


def test_wrong_use_of_a_verb_has_the_users_lines_and_one_of_raypool() -> None:
    nobody = Profile(jobs_address="http://127.0.0.1:1")
    for call in (lambda: parpool(workers=3), lambda: find_job("job", profile=nobody)):
        with pytest.raises(RaypoolError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.filename == __file__ for frame in frames] == [True, True, False]
        assert "another exception" not in "".join(traceback.format_exception(caught.value))


def test_a_traceback_shows_the_lines_of_cells_that_only_this_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = "/tmp/ipykernel_1/2.py"
    source = ["def train(x):\n", "    return 1 / x  # in the cell\n"]
    monkeypatch.setitem(linecache.cache, cell, (len("".join(source)), None, source, cell))
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/runner.py", line 3, in run\n'
        "    value = fn(item)\n"
        f'  File "{cell}", line 2, in train\n'
        '  File "/nowhere/else.py", line 9, in inner\n'
        "ZeroDivisionError: division by zero\n"
    )
    shown = str(RemoteTraceback(text))
    assert f'"{cell}", line 2, in train\n    return 1 / x  # in the cell\n' in shown
    assert shown.replace("    return 1 / x  # in the cell\n", "") == f'\n"""\n{text}"""'
