"""Places on Ray, and what is known of the workers in them."""

from typing import Any, cast

import pytest

from raypool.backends.ray.backend import Slot


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
    seat = Slot(0, cast("Any", None))
    seat.take_in(3)
    seat.calls, seat.told_of = calls, 4
    assert seat.is_idle is is_idle


def test_a_new_worker_has_told_nothing() -> None:
    seat = Slot(0, cast("Any", None))
    seat.calls, seat.told_of, seat.is_ending = {5: 4}, 4, True
    seat.take_in(3)
    assert (seat.worker_id, seat.calls, seat.told_of, seat.is_ending) == (3, {}, -1, False)
