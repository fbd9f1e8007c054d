"""A simulated pool of two levels: each item has one outcome, whatever drivers are lost, and no
driver idles for long.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.long

WITH_FIXTURE = [HealthCheck.function_scoped_fixture]  # it gives a module, the same each time


@pytest.fixture
def two_level(benchmark_of: Any) -> Any:
    """Give the module of the simulation."""
    return benchmark_of("two_level")


def items(seed: int, count: int) -> list[float]:
    random = Random(seed)
    return [random.uniform(1.0, 2.0) for _ in range(count)]


@settings(max_examples=60, deadline=None, suppress_health_check=WITH_FIXTURE)
@given(
    seed=st.integers(0, 2**32),
    num_drivers=st.integers(1, 6),
    per_driver=st.integers(1, 12),
    count=st.integers(0, 400),
)
def test_each_item_runs_once_and_the_makespan_is_bounded(
    two_level: Any, seed: int, num_drivers: int, per_driver: int, count: int
) -> None:
    """Beside list scheduling's longest item, a driver may be left with what it had asked for ahead:
    not two items a worker.
    """
    durations, num_workers = items(seed, count), num_drivers * per_driver
    outcome = two_level.simulate(durations, num_workers, num_drivers, two_level.Costs(call_s=1e-4))
    assert list(outcome.ends) == list(outcome.runs) == [1] * count
    slack_s = 3 * max(durations, default=0.0) + 0.02 * (outcome.num_messages + 1)
    assert outcome.makespan_s <= sum(durations) / num_workers + slack_s


@settings(max_examples=60, deadline=None, suppress_health_check=WITH_FIXTURE)
@given(
    seed=st.integers(0, 2**32),
    num_drivers=st.integers(2, 6),
    per_driver=st.integers(1, 8),
    count=st.integers(1, 200),
    losses=st.lists(st.floats(0, 30), max_size=5),
)
def test_what_a_lost_driver_had_runs_elsewhere(
    two_level: Any, seed: int, num_drivers: int, per_driver: int, count: int, losses: list[float]
) -> None:
    lost = [(at, number) for number, at in enumerate(losses[: num_drivers - 1])]
    costs = two_level.Costs(call_s=1e-4)
    outcome = two_level.simulate(
        items(seed, count), num_drivers * per_driver, num_drivers, costs, lost
    )
    assert list(outcome.ends) == [1] * count
    assert all(1 <= runs <= 1 + len(lost) for runs in outcome.runs)


def test_one_driver_is_too_slow_for_many_workers_and_several_are_not(two_level: Any) -> None:
    durations, costs = items(0, 4000), two_level.Costs(call_s=0.015)  # keeps 100 workers busy
    one, several = (
        two_level.simulate(durations, 400, num_drivers, costs) for num_drivers in (1, 8)
    )
    assert one.busy[1] > 0.9
    assert one.makespan_s > 2 * several.makespan_s
    assert several.makespan_s < 1.25 * several.bound_s


def test_sizes_of_the_pool_take_turns(benchmark_of: Any) -> None:
    lines = benchmark_of("bench_scheduler").lines_of("faults", 400, (100, 10))
    whats = ["an event, 10 workers", "makespan, 100 workers", "makespan, 10 workers"]
    assert [line.what for line in lines] == whats
    assert int(lines[0].note.split()[0]) >= 800, "400 tasks are handed in, and come back"
    assert all(ratio >= 1 for line in lines[1:] for ratio in line.ratios())


@pytest.mark.parametrize("name", ["even", "heavy tail"])
def test_schedules_are_as_good_as_list_scheduling_promises(benchmark_of: Any, name: str) -> None:
    lines = benchmark_of("bench_scheduler").lines_of(name, 400, (100, 10))
    held = [line for line in lines if line.against == "list scheduling's guarantee"]
    assert [line.what for line in held] == ["makespan, 100 workers", "makespan, 10 workers"]
    assert all(line.is_met() for line in held)
    bounds = {line.what: line.others for line in lines if line.against == "the bound"}
    for line, num_workers in zip(held, (100, 10), strict=True):
        assert bounds[line.what][0] < line.others[0] <= (2 - 1 / num_workers) * bounds[line.what][0]


def test_most_tasks_are_simulated_with_few_workers_and_with_all_that_can_go_wrong(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, loads, seen = benchmark_of("bench_scheduler"), benchmark_of("simulated").LOADS, []
    monkeypatch.setattr(
        bench,
        "lines_of",
        lambda name, tasks, sizes=bench.SIZES: seen.append((name, tasks, sizes)) or [],
    )
    bench.run()
    assert {name for name, _, _ in seen} == set(loads)
    assert ("even", 1_000_000, (10_000, 100, 10)) in seen
    assert ("all at once", 1_000_000, (10_000,)) in seen


@pytest.mark.parametrize(
    "name", ["even", "heavy tail", "stragglers", "faults", "gangs", "all at once"]
)
def test_the_scheduler_alone_does_each_task_once(benchmark_of: Any, name: str) -> None:
    simulated = benchmark_of("simulated")
    course = simulated.Course(20, 600, simulated.LOADS[name])
    for _ in course.slices(100):
        pass
    assert 1.0 <= course.end_s / course.bound_s() < 2.0
    assert course.num_events >= 1200


@pytest.mark.parametrize(
    "name", ["even", "stragglers", "faults", "gangs", "all at once", "short items"]
)
@pytest.mark.parametrize("num_drivers", [1, 3])
def test_each_load_is_done_once_on_two_levels_too(
    benchmark_of: Any, two_level: Any, name: str, num_drivers: int
) -> None:
    """No worker does two things at a time, so nothing is faster than the bound; with a driver lost,
    all has an outcome too.
    """
    bench = benchmark_of("bench_two_level")
    load, random, costs = bench.LOADS[name], Random(1), two_level.Costs(call_s=1e-4)
    durations = [load.item_s(random) for _ in range(450)]
    outcome = two_level.simulate(durations, 45, num_drivers, costs, load=load)
    bench.check(outcome, most_runs=1)
    assert sum(outcome.events) >= len(durations)
    if num_drivers > 1:
        lost = [(outcome.makespan_s / 2, 1)]
        bench.check(two_level.simulate(durations, 45, num_drivers, costs, lost, load), most_runs=2)


def test_who_is_faster_than_the_bound_is_found(benchmark_of: Any, two_level: Any) -> None:
    outcome = two_level.simulate([1.0, 1.0], 1, 1, two_level.Costs(call_s=1e-4))
    outcome.makespan_s = 1.9
    with pytest.raises(AssertionError, match="two things at a time"):
        benchmark_of("bench_two_level").check(outcome, 1)


def test_a_worker_that_is_lost_for_ever_makes_its_items_fail(
    benchmark_of: Any, two_level: Any
) -> None:
    load = benchmark_of("simulated").Load("doomed", p_loss=0.7)
    outcome = two_level.simulate(items(0, 60), 6, 2, two_level.Costs(call_s=1e-4), load=load)
    benchmark_of("bench_two_level").check(outcome, most_runs=1)
    assert outcome.failed


def test_two_levels_are_held_against_the_bound_in_all_loads_and_drawn(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, curves_of = benchmark_of("bench_two_level"), benchmark_of("plots").curves_of
    monkeypatch.setattr(bench, "_call_us", lambda: 1000.0)
    lines = bench.run(sizes=(10, 20), lamed=10, many={})
    held = [line for line in lines if line.against == "the bound"]
    assert {line.area for line in held} == set(bench.LOADS)
    assert len(held) == 2 * 2 * len(bench.LOADS)
    assert len([line for line in lines if line.against == "none lost"]) == len(bench.LOADS)
    curves = curves_of(lines)
    parts = {
        (f"{name}: {what}", "us")
        for name in bench.WEIGHED
        for what in ("an event in a driver", "a message at the root")
    }
    makespans = {
        (f"{name}: makespan, {levels}", "s")
        for name in bench.DRAWN
        for levels in ("one level", "two levels")
    }
    assert set(curves) == parts | makespans
    assert all(set(points) == {10, 20} for points in curves.values())
