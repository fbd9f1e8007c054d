"""How fast each kind is, is found from costs in any unit, also if times do not grow in step with them."""

import pytest

from raypool.core.speeds import Fit, Speeds


def fitted(slope, speeds, costs, before=None):
    """Return what is learned from items that take cost^slope / speed."""
    fit = Fit(before or Speeds())
    for kind, speed in speeds.items():
        for cost in costs:
            fit.note(kind, cost, cost**slope / speed)
    return fit.speeds


@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0])
def test_the_ratio_of_two_kinds_and_the_slope_are_found(slope):
    speeds = fitted(slope, {0: 3.0, 1: 0.5}, [1.0, 2.0, 5.0, 10.0, 40.0])
    assert speeds.by_kind[0] / speeds.by_kind[1] == pytest.approx(6.0)
    assert speeds.slope == pytest.approx(slope, rel=0.02)


def test_items_of_equal_cost_say_nothing_of_the_slope():
    speeds = fitted(2.0, {0: 3.0, 1: 0.5}, [4.0, 4.0, 4.0])
    assert speeds.slope == pytest.approx(1.0)
    assert speeds.by_kind[0] / speeds.by_kind[1] == pytest.approx(6.0)


def test_kinds_that_have_done_other_items_are_compared_by_the_slope():
    fit = Fit(Speeds())
    for cost in (10.0, 20.0, 40.0):
        fit.note(0, cost, cost**2)
    for cost in (1.0, 2.0, 4.0):
        fit.note(1, cost, cost**2)
    assert fit.speeds.by_kind[0] == pytest.approx(fit.speeds.by_kind[1], rel=0.5), "by time for cost it would be ten times"


def test_what_another_loop_has_taught_is_brought_to_the_unit_of_this_one():
    before = fitted(1.0, {0: 4.0, 1: 1.0}, [1.0, 2.0])
    fit = Fit(before)
    assert fit.speeds == before
    fit.note(0, 1000.0, 0.25)  # milliseconds now
    assert fit.speeds.by_kind == pytest.approx({0: 4000.0, 1: 1000.0})


def test_a_cost_of_nothing_teaches_nothing():
    fit = Fit(Speeds())
    fit.note(0, 0.0, 3.0)
    assert fit.speeds == Speeds()
    assert Speeds(2.0).work(0.0) == 0.0


def test_cost_and_work_are_each_others_inverse():
    speeds = Speeds(1.7)
    assert speeds.cost(speeds.work(3.0)) == pytest.approx(3.0)
