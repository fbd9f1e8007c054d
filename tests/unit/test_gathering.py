"""How long a pool waits for what it has asked Ray for."""

from __future__ import annotations

from typing import Any

import pytest

from raypool.backends.ray import claims


class Clock:
    """Time that goes on while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Arriving:
    """Claims of which any number will do, and of which each comes at a time of its own."""

    def __init__(self, clock: Clock, times_s: list[float]) -> None:
        self.good: list[float] = []
        self._clock, self._times_s = clock, times_s

    def go_on(self) -> None:
        self.good = [each for each in self._times_s if each <= self._clock.now_s]

    @property
    def has_enough(self) -> bool:
        return bool(self.good)

    @property
    def is_complete(self) -> bool:
        return len(self.good) == len(self._times_s)

    is_settled = has_enough


class Patient:
    def tell(self, missing: object) -> None:
        pass

    def is_over(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("times_s", "number"),
    [
        pytest.param([0.0, 0.5], 2, id="soon"),
        pytest.param([1.5, 1.9, 2.6], 3, id="Ray is slow"),
        pytest.param([0.0, 60.0], 1, id="the rest belongs to others"),
    ],
)
def test_what_is_on_its_way_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, times_s: list[float], number: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(claims, "time", clock)
    arriving: Any = Arriving(clock, times_s)
    claims._await_claims([arriving], Patient())  # type: ignore[arg-type]
    assert len(arriving.good) == number
    assert clock.now_s < times_s[number - 1] + 2
