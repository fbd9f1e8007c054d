"""Mixed pools in simulation: with the speeds learned as the loop goes on, it ends sooner than without, and never much later."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from raypool.core.model import TaskSpec
from raypool.testing import FaultPlan, SimReport, sim_pool, simulate

COSTS = {
    "even": lambda chance: chance.uniform(1, 10),
    "skewed": lambda chance: chance.expovariate(1) + 0.05,
    "a few long ones": lambda chance: 20.0 if chance.random() < 0.1 else 1.0,
    "all equal": lambda _: 1.0,
}


def scene(seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the speeds of the workers, two or three kinds of up to four each, and the costs of the items."""
    chance = random.Random(seed)
    kinds = [1.0] + [chance.choice([0.1, 0.2, 0.33, 0.5, 0.7, 0.9, 0.999]) for _ in range(chance.choice([1, 1, 2]))]
    speeds = [speed for speed in kinds for _ in range(chance.randint(1, 4))]
    chance.shuffle(speeds)
    draw = COSTS[chance.choice(list(COSTS))]
    return tuple(speeds), tuple(sorted((draw(chance) for _ in range(chance.randint(2, 120))), reverse=True))


def run(seed: int, knows_kinds: bool, check: bool = False, num_loops: int = 1, **faults: float) -> SimReport:
    speeds, costs = scene(seed)
    how = {"start_s": 0.1, "submit_s": 0.1, "item_s": 10.0, "spread": 0.0, **faults}
    plan = FaultPlan(seed=seed, speeds=speeds, knows_kinds=knows_kinds, **how)
    specs = [TaskSpec(number, 0, len(costs), costs=costs) for number in range(num_loops)]
    report = simulate(len(speeds), specs, plan, check=check)
    assert report.num_ended == num_loops
    return report


def ratio(seed: int, **faults: float) -> float:
    """Return how long a loop takes with the policy, of what it takes without."""
    return (run(seed, knows_kinds=True, **faults).makespan_s - 0.1) / (run(seed, knows_kinds=False, **faults).makespan_s - 0.1)


@pytest.mark.parametrize("num_seeds", [60, pytest.param(300, marks=pytest.mark.ci)])
def test_with_true_costs_it_is_never_more_than_a_twentieth_slower_and_mostly_faster(num_seeds: int) -> None:
    """Of 2,400 seeds it takes 0.94 of the time on average, 1.05 at worst (measured on 2026-11-22).

    Seeds 701 and 791 were worse, when a kind that nothing had come back from was taken for a fast one.
    """
    ratios = [ratio(seed) for seed in (*range(num_seeds), 701, 791)]
    assert max(ratios) <= 1.05 + 1e-9
    assert fmean(ratios) < 0.95


@pytest.mark.parametrize("spread", [pytest.param(0.1, marks=pytest.mark.ci), 0.3])
def test_with_rough_costs_it_is_faster_on_average(spread: float) -> None:
    """A single course may be unlucky: which item gets which time depends on the order in which they start."""
    ratios = sorted(ratio(seed, spread=spread) for seed in range(200))
    assert fmean(ratios) < 0.95
    assert ratios[-20] <= 1.05, "nine in ten"


def test_whatever_goes_wrong_every_item_ends() -> None:
    faults = {"p_loss": 0.1, "p_straggler": 0.1, "p_failed_start": 0.05, "spread": 0.5}
    for seed in range(25):
        counts = run(seed, knows_kinds=True, check=True, num_loops=2, **faults).counts
        assert counts.finished + counts.failed + counts.cancelled == counts.submitted, seed


def test_with_one_kind_the_course_is_the_same_to_the_last_command() -> None:
    for seed in range(20):
        _, costs = scene(seed)
        spec = TaskSpec(0, 0, len(costs))
        plan = FaultPlan(seed=seed, item_s=1.0, spread=0.0)
        with_costs = simulate(4, [spec._replace(costs=(1.0,) * len(costs))], plan)
        assert with_costs.trace == simulate(4, [spec], plan).trace


def test_a_pool_knows_the_kinds_by_the_names_of_the_devices() -> None:
    plan = FaultPlan(seed=3, item_s=1.0, spread=0.0, speeds=(1.0, 0.1))
    with sim_pool(2, plan) as pool:
        results = pool.parfor(lambda x: -x, range(20), cost=[1.0] * 20)
        assert list(results) == [-x for x in range(20)]
        by_worker = results.to_frame()["worker"].value_counts()
        assert by_worker[0] >= 18, "the slow one gets no more than it can do while the other does the rest"
        assert list(pool.parfor(str, [1, 2, 3], cost=[0.5, float("inf"), 0.1])) == ["1", "2", "3"], "no times: their order counts"
