"""Places on Ray, and what is known of the workers in them."""

from typing import Any, cast

import pytest

from raypool.backends.ray.backend import Slot
from raypool.channel.records import Function


@pytest.mark.parametrize(
    ("calls", "is_idle"),
    [
        ({}, True),
        ({4: None}, False),
        ({4: None, 5: 4}, False),
        ({5: 4}, True),  # it was sent behind what lasted, and is refused
        ({6: None}, False),
        ({6: None, 7: 6}, False),
    ],
)
def test_a_worker_is_idle_while_it_only_refuses(
    calls: dict[int, int | None], is_idle: bool
) -> None:
    slot = Slot(0, cast("Any", None))
    slot.take_in(3)
    slot.calls, slot.told_of = calls, 4
    assert slot.is_idle is is_idle


def test_a_new_worker_has_told_nothing() -> None:
    slot = Slot(0, cast("Any", None))
    slot.calls, slot.told_of, slot.is_ending = {5: 4}, 4, True
    slot.take_in(3)
    assert (slot.worker_id, slot.calls, slot.told_of, slot.is_ending) == (3, {}, -1, False)


def test_a_function_that_many_workers_had_is_forgotten_once() -> None:
    slot, function = Slot(0, cast("Any", None)), Function(7, b"", "train")
    for worker_id in range(3):
        slot.take_in(worker_id)
        assert slot.learn(function)
        assert not slot.learn(function)
    del function
    assert slot.take_stale() == [7]
    assert slot.learn(Function(7, b"", "train")), "one with the same number is another"
