"""Warnings in tasks are treated as in the script."""

from __future__ import annotations

import re
import sys
import types
import warnings

import pytest

from raypool import ParallelPool

pytestmark = pytest.mark.processes


class OurWarning(UserWarning):
    pass


def warn() -> None:
    warnings.warn("it is late", OurWarning, stacklevel=1)


def test_what_the_script_sets_holds_for_its_next_call(pool: ParallelPool) -> None:
    """Also for a category of the script; and what it takes back does not hold any more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "it is LATE", OurWarning)
        with pytest.raises(OurWarning, match="late"):
            pool.parfeval(warn).result()
        warnings.simplefilter("ignore", OurWarning)
        assert pool.parfeval_on_all(warn).result() == [None] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        job = pool.parfeval(warn)
        job.result()
    assert "OurWarning: it is late" in job.diary


def test_what_was_set_in_a_worker_comes_first(pool: ParallelPool) -> None:
    def set_up() -> None:
        warnings.simplefilter("ignore", OurWarning)

    def undo() -> None:
        warnings.filters.remove(("ignore", None, OurWarning, None, 0))  # type: ignore[attr-defined]

    pool.parfeval_on_all(set_up).result()
    try:
        with warnings.catch_warnings():
            for category in (UserWarning, Warning):
                warnings.simplefilter("error", category)
                assert pool.parfeval_on_all(warn).result() == [None] * 3
    finally:
        pool.parfeval_on_all(undo).result()


def test_a_filter_that_cannot_travel_is_left_out(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its category is made in a module that only this process has."""
    module = types.ModuleType("only_here")
    module.Strange = type("Strange", (UserWarning,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OurWarning)
        warnings.filters.insert(0, ("ignore", re.compile("x"), module.Strange, None, 0))  # type: ignore[attr-defined]
        with pytest.raises(OurWarning):
            pool.parfeval(warn).result()
