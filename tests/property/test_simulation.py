"""Whatever the seed: every task is resolved once, and the same seed gives the same course of
events.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from raypool.core.model import TaskSpec
from raypool.errors import SpmdError, StartupError, TaskTimeoutError
from raypool.testing import replay, sim_pool
from raypool.testing.simulation import FaultPlan, simulate

plans = st.builds(
    FaultPlan,
    seed=st.integers(0, 2**32),
    p_loss=st.sampled_from([0.0, 0.05, 0.3]),
    p_failed_start=st.sampled_from([0.0, 0.1]),
    p_stubborn=st.sampled_from([0.0, 0.5]),
    p_straggler=st.sampled_from([0.0, 0.1]),
    item_s=st.sampled_from([0.001, 0.02, 1.0]),
    preempted_s=st.sampled_from([None, None, 0.0, 3.0]),
)
kinds = st.fixed_dictionaries(
    {
        "fn_id": st.integers(0, 3),
        "size": st.integers(1, 40),
        "priority": st.integers(-2, 2),
        "retries": st.integers(0, 3),
        "is_gang": st.booleans(),
        "places": st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple),
        "timeout_s": st.sampled_from([None, None, 1.0]),
        "fail_fast": st.sampled_from([False, False, True]),
    }
)
Wishes = list[dict[str, Any]]


def specs_of(drawn: Wishes, num_workers: int) -> list[TaskSpec]:
    specs = [TaskSpec(number, **wishes) for number, wishes in enumerate(drawn)]
    return [
        spec._replace(size=min(spec.size, num_workers), fail_fast=False) if spec.is_gang else spec
        for spec in specs
    ]


PLAIN = {"is_gang": False, "places": None, "timeout_s": None, "fail_fast": False}

STRAGGLER: dict[str, Any] = {
    "plan": FaultPlan(seed=12484330, p_loss=0.3, p_straggler=0.1, item_s=0.02, preempted_s=3.0),
    "num_workers": 5,
    "drawn": [
        {**PLAIN, "fn_id": 0, "size": 1, "priority": 0, "retries": 0},
        {**PLAIN, "fn_id": 1, "size": 18, "priority": -1, "retries": 2},
        {**PLAIN, "fn_id": 0, "size": 21, "priority": -1, "retries": 1},
        {**PLAIN, "fn_id": 1, "size": 4, "priority": 0, "retries": 0, "places": (3,)},
    ],
}
"""A slow call is cancelled after many later calls of its worker."""


@settings(max_examples=50)
@given(plan=plans, num_workers=st.integers(1, 8), drawn=st.lists(kinds, max_size=15))
@example(**STRAGGLER)
def test_every_task_ends_exactly_once(plan: FaultPlan, num_workers: int, drawn: Wishes) -> None:
    specs = specs_of(drawn, num_workers)
    report = simulate(num_workers, specs, plan, check=True)
    assert report.num_ended == len(specs)
    counts = report.counts
    assert counts.finished + counts.failed + counts.cancelled == sum(spec.size for spec in specs)


@settings(max_examples=10)
@given(plan=plans, num_workers=st.integers(1, 8), drawn=st.lists(kinds, max_size=15))
def test_the_same_seed_gives_the_same_trace(
    plan: FaultPlan, num_workers: int, drawn: Wishes
) -> None:
    specs = specs_of(drawn, num_workers)
    assert simulate(num_workers, specs, plan).trace == simulate(num_workers, specs, plan).trace


def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from raypool.testing import *; from raypool.core.model import TaskSpec;print(simulate(5,"
        " [TaskSpec(i, i % 3, 1 + i % 7) for i in range(200)], FaultPlan(seed=4,"
        " p_loss=0.1)).trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(traces) == 1


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), num_workers=st.integers(1, 16), num_tasks=st.integers(1, 200))
def test_without_faults_no_worker_idles_while_something_waits(
    seed: int, num_workers: int, num_tasks: int
) -> None:
    """The bound of list scheduling: makespan <= work / m + (1 - 1/m) * longest (Graham 1966,
    1969).
    """
    plan = FaultPlan(seed=seed, item_s=1.0, start_s=0.0, p_straggler=0.1)
    report = simulate(num_workers, [TaskSpec(i, 0) for i in range(num_tasks)], plan)
    longest = 1.5 * plan.straggler_factor
    assert report.makespan_s <= report.work_s / num_workers + (1 - 1 / num_workers) * longest + 1e-9


@settings(max_examples=30)
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
    # Three starts in a row that fail are the end of a place, and of the pool if it was the last
    # one.
    plan = FaultPlan(
        seed=seed, p_loss=p_loss, p_failed_start=0.05 if num_workers > 2 else 0.0, item_s=item_s
    )
    try:
        pool = sim_pool(num_workers, plan, retries=50)
    except StartupError:
        reject()  # that may happen to a place at once
    with pool:
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


@pytest.mark.parametrize("num_workers", [1_000, pytest.param(10_000, marks=pytest.mark.ci)])
def test_thousands_of_workers(num_workers: int) -> None:
    specs = [TaskSpec(number, 0) for number in range(10 * num_workers)]
    report = simulate(num_workers, specs, FaultPlan(seed=1, p_loss=0.02, item_s=1.0))
    assert report.num_ended == len(specs)
    assert report.counts.finished + report.counts.failed == len(specs)


@pytest.mark.parametrize("p_stubborn", [0.0, 0.5, 1.0])
def test_items_of_a_simulated_pool_time_out_and_the_others_do_not(p_stubborn: float) -> None:
    with sim_pool(3, FaultPlan(seed=2, item_s=1.0, p_straggler=0.3, p_stubborn=p_stubborn)) as pool:
        results = pool.options(timeout_s=3.0).parfor(lambda x: x, range(60), on_error="collect")
        assert 5 < len(results.errors) < 40
        assert all(isinstance(error, TaskTimeoutError) for error in results.errors.values())
        assert all(results[item] == item for item in range(60) if item not in results.errors)
        assert (pool.statistics().workers_lost > 0) == (p_stubborn > 0)


def test_a_simulation_kills_what_does_not_stop() -> None:
    specs = [TaskSpec(number, 0, size=20, timeout_s=1.0) for number in range(3)]
    gentle = simulate(3, specs, FaultPlan(seed=1, item_s=1.0, p_straggler=0.3), check=True).counts
    stubborn = simulate(
        3, specs, FaultPlan(seed=1, item_s=1.0, p_straggler=0.3, p_stubborn=1.0), check=True
    ).counts
    assert (gentle.workers_lost, gentle.finished + gentle.failed) == (0, 60)
    assert stubborn.workers_lost > 0
    assert stubborn.finished + stubborn.failed == 60


def test_ranks_of_simulated_workers_talk_to_each_other() -> None:
    with sim_pool(3) as pool:
        assert list(pool.spmd(lambda context: context.all_reduce(context.rank + 1))) == [6, 6, 6]


def test_a_simulated_rank_that_dies_ends_the_call_and_the_next_one_works() -> None:
    ends = []
    with sim_pool(3, FaultPlan(seed=1, p_loss=0.3)) as pool:
        for _ in range(8):
            try:
                ends.append(list(pool.spmd(lambda context: context.all_reduce(1))) == [3, 3, 3])
            except SpmdError as error:
                ends.append(all("was lost" in str(failure) for failure in error.failures.values()))
    assert ends == [True] * 8
    assert pool.statistics().workers_lost > 0
