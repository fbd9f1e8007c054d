"""What a scaling report says of its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypool.futures import Future
from raypool.train import scaling
from raypool.train.fit_loop import Measure
from raypool.train.scaling import ScalingReport, _typical


def report(step_s: float = 0.110, compute_s: float = 0.100, one_s: float = 0.390) -> ScalingReport:
    times = [(1, one_s, one_s), (2, one_s / 1.9, one_s / 2), (4, step_s, compute_s)]
    return ScalingReport(times=times, gradient_bytes=100_000_000, num_steps=20)


ALONE = ScalingReport(times=[(1, 1.5, 1.5)], gradient_bytes=100_000_000, num_steps=20)


def test_the_curve_as_table_and_figure() -> None:
    frame = report().to_frame()
    assert frame["workers"].tolist() == [1, 2, 4]
    assert frame.loc[0].tolist() == [1, 0.390, 0.390, 0, 1, 1]
    assert frame.loc[2, "communication_s"] == pytest.approx(0.010)
    assert frame.loc[2, "speed_up"] == report().speed_up == pytest.approx(0.390 / 0.110)
    assert frame.loc[2, "efficiency"] == report().efficiency == pytest.approx(0.390 / 0.110 / 4)
    assert report(compute_s=0.120).communication_s == 0, (
        "noise may make the parts larger than the whole"
    )
    ideal, measured = report().plot().axes[0].lines
    assert list(ideal.get_ydata()) == [1, 2, 4]
    assert list(measured.get_ydata()) == pytest.approx([1, 1.9, 0.390 / 0.110])


ADVICE: list[tuple[dict[str, float], str]] = [
    ({}, "4 workers are worth it"),
    (
        {"step_s": 0.012, "compute_s": 0.004, "one_s": 0.015},
        "step is too short: 4 ms.*hide 8 ms.*larger mini_batch_size",
    ),
    (
        {"step_s": 0.4},
        "links are too slow.*100.0 MB of gradients at about 0.5 GB/s.*fast_multinode.*Up to 2 workers are worth it",
    ),
    (
        {"step_s": 0.210, "compute_s": 0.200},
        (
            "takes 200 ms for a share of the mini-batch and .* for all of it.*larger"
            " mini_batch_size.*fewer workers"
        ),
    ),
]


def test_the_advice() -> None:
    for changes, words in ADVICE:
        import re

        assert re.search(words, report(**changes).advice, re.DOTALL)
    assert "only one worker" in ALONE.advice


def test_it_reads_well() -> None:
    assert str(report()).splitlines() == [
        "1 worker: 390 ms a step (390 ms computation, 0 ms communication); speed-up 1.00,"
        " efficiency 100%",
        "2 workers: 205 ms a step (195 ms computation, 10.3 ms communication); speed-up 1.90,"
        " efficiency 95%",
        "4 workers: 110 ms a step (100 ms computation, 10 ms communication); speed-up 3.55,"
        " efficiency 89%",
        "100.0 MB of gradients; medians of 20 steps",
        "4 workers are worth it.",
    ]
    assert "1 worker: 1.5 s a step" in str(ALONE)


def test_the_slowest_rank_counts_and_outliers_do_not() -> None:
    assert _typical([[1.0, 2.0, 100.0], [1.5, 1.0, 1.0]]) == 2.0


def test_after_ctrl_c_no_measurement_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

    attempt = Interrupted("measure")
    lane = SimpleNamespace(begin=lambda *_: attempt)
    monkeypatch.setattr(scaling, "WarmLane", lambda *_: lane)
    recipe: Any = SimpleNamespace(engine=None, config=None, places=None)
    with pytest.raises(KeyboardInterrupt):
        scaling._steps(recipe, 1, Measure(1, 1, is_synchronized=True))
    assert attempt.cancelled()
