"""What a worker keeps of a value until the end of its call, and what it does where there is no
memory for that.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from raypool.channel.records import Part, WorkerInfo
from raypool.worker import runner
from raypool.worker.interrupts import ThreadGuard
from raypool.worker.runner import Surroundings, run_parts


class Narrow:
    """Keeps values while there is room for them."""

    def __init__(self, room: int) -> None:
        self.loose: list[Any] = []
        self._room = room

    def keep(self, value: Any) -> Any:
        self.loose.append(value)
        return value

    def secure(self) -> bool:
        self._room -= len(self.loose)
        self.loose.clear()
        return self._room >= 0


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes all its items, however slow the machine."""
    monkeypatch.setattr(runner, "CALL_LIMIT_S", math.inf)


def run(parts: list[Part], room: int, called: list[int]) -> list[Any]:
    def same(item: int) -> list[int]:
        called.append(item)
        return [item]

    here = Surroundings(
        WorkerInfo(0, "", 0), lambda _: same, list, ThreadGuard(), lambda *_: None, Narrow(room)
    )
    return run_parts(0, parts, here)


def part(task_id: int, *items: int) -> Part:
    return Part(task_id, 0, list(items), len(items), 0, 1, is_call=False)


def test_where_there_is_no_memory_nothing_else_runs_in_the_call() -> None:
    called: list[int] = []
    (result,) = run([part(0, 10, 11, 12, 13)], 1, called)
    assert called == [10, 11]
    assert (result.done, result.values, result.errors) == (2, [[10], [11]], {})


def test_nor_do_the_other_tasks_of_the_call() -> None:
    called: list[int] = []
    first, second, third = run([part(0, 10), part(1, 20), part(2, 30)], 1, called)
    assert called == [10, 20]
    assert [result.done for result in (first, second, third)] == [1, 1, 0]
    assert third.errors == {}


def test_the_first_item_of_a_call_always_runs() -> None:
    called: list[int] = []
    (result,) = run([part(0, 10, 11)], 0, called)
    assert called == [10]
    assert result.done == 1
