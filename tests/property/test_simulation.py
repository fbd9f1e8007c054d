"""Whatever the seed: every task is resolved once, and the same seed gives the same course of events."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypool.core.model import TaskSpec
from raypool.testing import FaultPlan, replay, sim_pool, simulate

plans = st.builds(
    FaultPlan,
    seed=st.integers(0, 2**32),
    p_loss=st.sampled_from([0.0, 0.05, 0.3]),
    p_failed_start=st.sampled_from([0.0, 0.1]),
    p_straggler=st.sampled_from([0.0, 0.1]),
    item_s=st.sampled_from([0.001, 0.02, 1.0]),
)
kinds = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(-2, 2), st.integers(0, 3), st.booleans())


def specs_of(drawn: list[tuple[int, int, int, int, bool]], num_workers: int) -> list[TaskSpec]:
    return [
        TaskSpec(number, fn_id, min(size, num_workers) if is_gang else size, priority=priority, retries=retries, is_gang=is_gang)
        for number, (fn_id, size, priority, retries, is_gang) in enumerate(drawn)
    ]


@settings(max_examples=100, deadline=None)
@given(plan=plans, num_workers=st.integers(1, 8), drawn=st.lists(kinds, max_size=15))
def test_every_task_ends_exactly_once(plan: FaultPlan, num_workers: int, drawn: list[tuple[int, int, int, int, bool]]) -> None:
    specs = specs_of(drawn, num_workers)
    report = simulate(num_workers, specs, plan, check=True)
    assert report.num_ended == len(specs)
    counts = report.counts
    assert counts.finished + counts.failed + counts.cancelled == sum(spec.size for spec in specs)


@settings(max_examples=20, deadline=None)
@given(plan=plans, num_workers=st.integers(1, 8), drawn=st.lists(kinds, max_size=15))
def test_the_same_seed_gives_the_same_trace(
    plan: FaultPlan, num_workers: int, drawn: list[tuple[int, int, int, int, bool]]
) -> None:
    specs = specs_of(drawn, num_workers)
    assert simulate(num_workers, specs, plan).trace == simulate(num_workers, specs, plan).trace


def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from raypool.testing import *; from raypool.core.model import TaskSpec;"
        "print(simulate(5, [TaskSpec(i, i % 3, 1 + i % 7) for i in range(200)], FaultPlan(seed=4, p_loss=0.1)).trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(traces) == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_workers=st.integers(1, 16), num_tasks=st.integers(1, 200))
def test_without_faults_no_worker_idles_while_something_waits(seed: int, num_workers: int, num_tasks: int) -> None:
    """The bound of list scheduling: makespan <= work / m + (1 - 1/m) * longest (Graham 1966, 1969)."""
    plan = FaultPlan(seed=seed, item_s=1.0, start_s=0.0, p_straggler=0.1)
    report = simulate(num_workers, [TaskSpec(i, 0) for i in range(num_tasks)], plan)
    longest = 1.5 * plan.straggler_factor
    assert report.makespan_s <= report.work_s / num_workers + (1 - 1 / num_workers) * longest + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    p_loss=st.sampled_from([0.0, 0.1, 0.4]),
    num_workers=st.integers(1, 6),
    count=st.integers(0, 120),
    item_s=st.sampled_from([0.001, 1.0]),
    from_generator=st.booleans(),
)
def test_a_simulated_pool_returns_every_result_in_order(
    seed: int, p_loss: float, num_workers: int, count: int, item_s: float, from_generator: bool
) -> None:
    plan = FaultPlan(seed=seed, p_loss=p_loss, p_failed_start=0.05, item_s=item_s)
    with sim_pool(num_workers, plan, retries=50) as pool:
        items = (i for i in range(count)) if from_generator else range(count)
        results = pool.parfor(lambda x: x * 3, items)
        assert results == [3 * i for i in range(count)]
        assert list(results.to_frame()["status"]) == ["finished"] * count
        futures = [pool.parfeval(divmod, i, 7) for i in range(10)]
        assert [future.result() for future in futures] == [divmod(i, 7) for i in range(10)]


def test_a_recorded_pool_can_be_replayed(tmp_path) -> None:
    trace = tmp_path / "events.jsonl"
    with sim_pool(3, FaultPlan(seed=5, p_loss=0.2), retries=20, trace=str(trace)) as pool:
        pool.parfor(lambda x: x, range(30))
        attempts = pool.statistics().attempts
    commands = [command for _, answer in replay(trace) for command in answer]
    assert sum(type(command).__name__ == "RunTasks" for command in commands) == attempts
    assert type(commands[-1]).__name__ == "ClosePool"


@pytest.mark.slow
def test_ten_thousand_workers() -> None:
    specs = [TaskSpec(number, 0) for number in range(100_000)]
    report = simulate(10_000, specs, FaultPlan(seed=1, p_loss=0.02, item_s=1.0))
    assert report.num_ended == len(specs)
    assert report.counts.finished + report.counts.failed == len(specs)
