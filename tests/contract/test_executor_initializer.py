"""The standard library's name for what a worker begins with: `initializer` and `initargs`."""

from __future__ import annotations

import functools
from concurrent.futures import BrokenExecutor
from typing import Any

import pytest

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    Profile,
    StartupError,
    current_task,
    parpool,
)


@pytest.mark.concurrent
def test_it_runs_once_in_each_worker_with_its_arguments(make_pool: Any, marks: Any) -> None:
    def begin(name: str, number: int) -> None:
        marks.add(f"{name} {number} {current_task().worker}")

    with make_pool(2, initializer=begin, initargs=("ready", 7)) as pool:
        assert pool.submit(marks.all).result(300) == ["ready 7 0", "ready 7 1"]
        assert list(pool.map(abs, range(10))) == list(range(10))
    assert len(marks.all()) == 2


def test_one_that_fails_breaks_the_executor_and_says_why() -> None:
    def begin() -> None:
        raise LookupError("no such data set")

    with pytest.raises(
        StartupError, match=r"(?s)2 of 2 workers did not start.*LookupError: no such data set"
    ) as caught:
        parpool(2, profile="inline", quiet=True, initializer=begin)
    assert isinstance(caught.value, BrokenExecutor)


def test_what_cannot_work() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"initializer": 5}, InvalidTypeError, "5 is not callable"),
        (
            {"initializer": print, "initargs": 5},
            InvalidTypeError,
            r"initargs=5 is not a list or tuple.*\(argument,\)",
        ),
        (
            {"initializer": print, "setup": print},
            InvalidValueError,
            "setup and initializer mean the same",
        ),
        ({"initializer": abs}, InvalidTypeError, "argument"),
    ]
    for arguments, kind, words in cases:
        with pytest.raises(kind, match=words):
            parpool(1, profile="threads", quiet=True, **arguments)


@pytest.mark.parametrize(
    "asked",
    [
        {"initializer": list.append, "initargs": ("began",)},
        {"setup": "began", "teardown": "ended"},
        {"profile": Profile(setup=print, teardown=print), "setup": "began", "teardown": "ended"},
    ],
)
def test_in_a_task_it_runs_once_for_the_pool_there(asked: dict[str, Any]) -> None:
    log: list[Any] = []
    teardown = [] if "initializer" in asked else ["ended"]
    asked = {
        key: functools.partial(log.append, value) if key in ("setup", "teardown") else value
        for key, value in asked.items()
    }
    if "initializer" in asked:
        asked["initargs"] = (log, *asked["initargs"])

    def fn() -> int:
        with parpool(2, **asked) as pool:
            log.append("open")
            pool.submit(log.append, "call").result()
            return sum(pool.map(abs, [-1, -2]))

    with parpool(1, profile="threads", quiet=True) as pool:
        assert pool.submit(fn).result(300) == 3
    assert log == ["began", "open", "call", *teardown]


def test_also_that_of_a_profile() -> None:
    log: list[str] = []

    def fn() -> None:
        parpool(
            profile=Profile(setup=lambda: log.append("began"), teardown=lambda: log.append("ended"))
        ).shutdown()

    with parpool(1, profile="threads", quiet=True) as pool:
        pool.submit(fn).result(300)
    assert log == ["began", "ended"]


def test_one_that_fails_in_a_task_is_the_error_there() -> None:
    def begin() -> None:
        raise LookupError("no such data set")

    def fn() -> None:
        parpool(2, initializer=begin)

    with parpool(1, profile="threads", quiet=True) as pool:
        with pytest.raises(StartupError, match="LookupError: no such data set"):
            pool.submit(fn).result(300)
        assert pool.submit(abs, -1).result(300) == 1
