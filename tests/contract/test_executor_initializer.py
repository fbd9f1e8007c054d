"""The standard library's name for what a worker begins with: `initializer` and `initargs`."""

from __future__ import annotations

from concurrent.futures import BrokenExecutor
from typing import Any

import pytest

from raypool import InvalidTypeError, InvalidValueError, StartupError, current_task, parpool


def test_it_runs_once_in_each_worker_with_its_arguments(make_pool: Any, marks: Any) -> None:
    def begin(name: str, number: int) -> None:
        marks.add(f"{name} {number} {current_task().worker}")

    with make_pool(2, initializer=begin, initargs=("ready", 7)) as pool:
        assert pool.submit(marks.all).result(60) == ["ready 7 0", "ready 7 1"]
        assert list(pool.map(abs, range(10))) == list(range(10))
    assert len(marks.all()) == 2


def test_one_that_fails_breaks_the_executor_and_says_why(make_pool: Any) -> None:
    def begin() -> None:
        raise LookupError("no such data set")

    with pytest.raises(StartupError, match=r"(?s)2 of 2 workers did not start.*LookupError: no such data set") as caught:
        make_pool(2, initializer=begin)
    assert isinstance(caught.value, BrokenExecutor)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"initializer": 5}, InvalidTypeError, "5 is not callable"),
        ({"initializer": print, "initargs": 5}, InvalidTypeError, r"initargs=5 is not a list or tuple.*\(argument,\)"),
        ({"initializer": print, "setup": print}, InvalidValueError, "two names of one thing"),
        ({"initializer": abs}, InvalidTypeError, "argument"),
    ],
)
def test_what_cannot_work(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        parpool(1, profile="threads", quiet=True, **arguments)


def test_in_a_task_there_is_nothing_to_begin() -> None:
    def fn() -> int:
        with parpool(2, initializer=print, initargs=("not here",)) as pool:
            return pool.submit(abs, -1).result()

    with parpool(1, profile="threads", quiet=True) as pool:
        assert pool.submit(fn).result(60) == 1
