"""A plugin for the pytest that runs another library's tests: it writes down what becomes of each,
as soon as it is known.

There is a line of JSON for each test that begins and for each that has ended, so that a run which
is killed, or crashes, has said how far it came.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = "RAYPOOL_SUITE_RECORD"
"""Environment variable: the file to write to."""

NUM_LINES = 8
"""So many lines of an error are written down, the last ones."""


def note(**what: Any) -> None:
    with Path(os.environ[RECORD]).open("a") as record:
        record.write(json.dumps(what) + "\n")


def name_of(item: pytest.Item) -> str:
    """Return what a test is called in our lists: not by its file, which versions of a library call
    differently.
    """
    return item.nodeid.partition("::")[2]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    note(begun=name_of(item))
    return (yield)


# outermost: after whoever makes of a failure that the library expects what it is
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed or report.skipped or report.when == "call":
        note(
            ended=name_of(item),
            outcome=report.outcome,
            last="\n".join(str(report.longrepr).splitlines()[-NUM_LINES:]),
        )
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(ended=report.nodeid, outcome="failed", last=str(report.longrepr))
