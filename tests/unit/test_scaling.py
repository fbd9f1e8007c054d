"""What a scaling report says of its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from raypool.train.scaling import ScalingReport, _typical


def report(**changes: Any) -> ScalingReport:
    numbers = {
        "num_workers": 4,
        "step_s": 0.110,
        "compute_s": 0.100,
        "one_worker_s": 0.390,
        "gradient_bytes": 100_000_000,
        "num_steps": 20,
    }
    return ScalingReport(**{**numbers, **changes})


def test_the_parts_of_a_step() -> None:
    numbers = report()
    assert numbers.communication_s == pytest.approx(0.010)
    assert numbers.speed_up == pytest.approx(0.390 / 0.110)
    assert numbers.efficiency == pytest.approx(0.390 / 0.110 / 4)
    assert report(compute_s=0.120).communication_s == 0, (
        "noise may make the parts larger than the whole"
    )


def test_the_table_has_a_row_for_one_and_one_for_all() -> None:
    frame = report().to_frame()
    assert frame.columns.tolist() == [
        "workers",
        "step_s",
        "compute_s",
        "communication_s",
        "speed_up",
        "efficiency",
    ]
    assert frame["workers"].tolist() == [1, 4]
    assert frame.loc[0].tolist() == [1, 0.390, 0.390, 0, 1, 1]
    assert frame.loc[1, "speed_up"] == pytest.approx(0.390 / 0.110)
    assert report(num_workers=1).to_frame()["workers"].tolist() == [1]


ADVICE = [
    ({}, "4 workers are worth it"),
    (
        {"step_s": 0.012, "compute_s": 0.004, "one_worker_s": 0.015},
        "step is too short: 4 ms.*hide 8 ms.*larger mini_batch_size",
    ),
    (
        {"step_s": 0.4},
        "links are too slow.*100.0 MB of gradients at about 0.5 GB/s.*fast_multinode",
    ),
    (
        {"step_s": 0.210, "compute_s": 0.200},
        (
            "takes 200 ms for a share of the mini-batch and .* for all of it.*larger"
            " mini_batch_size.*fewer workers"
        ),
    ),
    ({"num_workers": 1}, "only one worker"),
]


def test_the_advice() -> None:
    for changes, words in ADVICE:
        import re

        assert re.search(words, report(**changes).advice, re.DOTALL)


def test_it_reads_well() -> None:
    lines = str(report()).splitlines()
    assert lines == [
        "4 workers: 110 ms a step (100 ms computation, 10 ms communication); one worker: 390 ms",
        "speed-up 3.55, efficiency 89%; 100.0 MB of gradients; medians of 20 steps",
        "4 workers are worth it.",
    ]
    assert "1 worker: 1.5 s a step" in str(report(num_workers=1, step_s=1.5))


def test_the_slowest_rank_counts_and_outliers_do_not() -> None:
    assert _typical([[1.0, 2.0, 100.0], [1.5, 1.0, 1.0]]) == 2.0
