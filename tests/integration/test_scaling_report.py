"""`raypool.scaling_report`: what the workers of a training are worth, measured on the training's
own workers.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    TrainingOptions,
    parpool,
    scaling_report,
)
from raypool.train.scaling import ScalingReport

DATA = (torch.linspace(-1, 1, 64)[:, None], torch.linspace(-2, 2, 64)[:, None])
OPTIONS = TrainingOptions(max_epochs=1, mini_batch_size=16)


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give two workers."""
    return two_workers


class Slow(nn.Module):
    """A model of which each sample takes its time: so two workers are twice as fast, whatever else
    the machine does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.030 * len(x))
        return self.linear(x)


def test_a_curve_over_the_numbers_of_workers(shared_pool: Any) -> None:
    run = shared_pool.fit(Slow(), DATA, mse_loss, OPTIONS)
    before = copy.deepcopy(run.result(300).model.state_dict())

    report = scaling_report(run, num_steps=4, num_warm_up=1)

    (_, alone_s, _), (_, _, two_s), (_, step_s, compute_s) = report.times
    assert [size for size, *_ in report.times] == [1, 2, 3]
    assert alone_s >= 0.480, "one worker has all of the 16 samples"
    assert two_s >= 0.240, "each of two has half of them"
    assert compute_s >= 0.180, "one of three has six of them"
    assert (report.num_workers, report.step_s, report.one_worker_s) == (3, step_s, alone_s)
    assert report.gradient_bytes == 8
    assert report.speed_up > 1
    assert all(
        torch.equal(value, before[name]) for name, value in run.result().model.state_dict().items()
    )
    assert not shared_pool.busy


def test_on_the_workers_of_the_run(pool: Any) -> None:
    run = pool.fit(nn.Linear(1, 1), DATA, mse_loss, OPTIONS, workers=[1])
    run.result(300)
    with pool.transfer_bytes() as moved:
        report = scaling_report(run, num_steps=2, num_warm_up=0)
    assert report.num_workers == 1
    assert report.speed_up == 1
    assert moved.to_frame()["sent_bytes"].tolist()[0] == 0
    assert "only one worker" in report.advice


def test_batches_go_round_where_there_are_few(pool: Any) -> None:
    run = pool.fit(nn.Linear(1, 1), DATA, mse_loss, OPTIONS)
    run.result(300)
    report = scaling_report(run)
    assert report.num_steps == 20, "of a training that had 4"
    assert all(
        math.isfinite(value) and value > 0
        for value in (report.step_s, report.compute_s, report.one_worker_s)
    )


def test_while_it_trains_the_report_waits(pool: Any, make_gate: Callable[[], Any]) -> None:
    gate = make_gate()

    class Waiting(Slow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate.wait()
            return self.linear(x)

    run = pool.fit(Waiting(), DATA, mse_loss, OPTIONS)
    job = _in_thread(lambda: scaling_report(run, num_steps=1, num_warm_up=0))
    assert not job.done()
    gate.open()
    assert job.result(300).num_workers == 2
    assert run.done()


def _in_thread(fn: Callable[[], Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(1)
    job = executor.submit(fn)
    executor.shutdown(wait=False)
    return job


@pytest.mark.quick
@pytest.mark.parametrize("profile", ["threads", "inline"])
def test_in_this_process_there_is_one_rank(profile: str) -> None:
    with parpool(1, profile=profile, quiet=True) as pool:
        run = pool.fit(nn.Linear(1, 1), DATA, mse_loss, OPTIONS)
        run.result(300)
        assert scaling_report(run, num_steps=2).num_workers == 1


@pytest.mark.quick
def test_a_loop_of_the_users_is_not_known() -> None:
    with parpool(1, profile="inline", quiet=True) as pool:
        run = pool.train(lambda: None)
        run.result(300)
        with pytest.raises(InvalidValueError, match=r"loop of your own.*pool\.fit"):
            scaling_report(run)


@pytest.mark.quick
def test_bad_arguments() -> None:
    with parpool(1, profile="inline", quiet=True) as pool:
        run = pool.fit(nn.Linear(1, 1), DATA, mse_loss, OPTIONS)
        run.result(300)
        for bad in (None, 5, run.result(), pool.parfeval(abs, -1)):
            with pytest.raises(InvalidTypeError, match=r"Pass what pool\.fit returned"):
                scaling_report(bad)
        for changes in (
            {"num_steps": 0},
            {"num_steps": None},
            {"num_warm_up": -1},
            {"num_steps": 1.5},
        ):
            with pytest.raises((InvalidValueError, InvalidTypeError), match=next(iter(changes))):
                scaling_report(run, **changes)
    with pytest.raises(PoolClosedError):
        scaling_report(run)


@pytest.mark.long
def test_the_page_on_several_gpus_is_true(run_python: Callable[..., Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "several_gpus.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = run_python(code).stdout
    assert "2 workers:" in printed
    assert "speed-up" in printed
    for name in re.findall(r"`(\w+_(?:s|up))`|`(efficiency)`", text):
        assert (
            hasattr(ScalingReport, "".join(name)) or "".join(name) in ScalingReport.__annotations__
        )
    for name in (
        "mini_batch_size",
        "scale_batch",
        "scale_learning_rate",
        "accumulate_steps",
        "precision",
    ):
        assert f"`{name}" in text
        assert name in TrainingOptions.__annotations__
