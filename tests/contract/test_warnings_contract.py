"""Warnings in tasks."""

from __future__ import annotations

import warnings

import pytest

from raypool import ParallelPool


class OurWarning(UserWarning):
    pass


@pytest.mark.processes
def test_tasks_treat_warnings_as_the_script_does_when_it_calls_them(pool: ParallelPool) -> None:
    """Filters that are set, and those that are taken back, hold for the next call; also for a category of the script."""

    def warn() -> None:
        warnings.warn("it is late", OurWarning, stacklevel=1)

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
