"""Trainings whose pool ends, rests, or loses a place for good, on real Ray with GPUs that do not
exist (scenarios 6 and 40).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    PoolClosedError,
    RunOptions,
    TrainingError,
    TrainingOptions,
    current_task,
    parpool,
)
from tests.faults.conftest import add_up, count_ranks

torch = pytest.importorskip("torch")


on_ray = pytest.mark.usefixtures("ray_session", "by_value")

long = pytest.mark.long


# --- its pool ends --------------------------------------------------------------------------------


class Blow:
    """Kills the worker of one rank once, at an epoch, when the gate is open."""

    def __init__(self, mark: Path, gate: Any, inside: Any) -> None:
        self.mark, self.gate, self.inside = mark, gate, inside

    def __call__(self, epoch: int) -> None:
        if epoch == 2 and current_task().index == 1 and not self.mark.exists():
            self.inside.open()
            self.gate.wait()
            self.mark.touch()
            os._exit(9)


@pytest.fixture
def blow(tmp_path: Path, make_gate: Callable[[], Any]) -> Blow:
    return Blow(tmp_path / "mark", make_gate(), make_gate())


@on_ray
def test_a_pool_that_ends_in_good_order_waits_for_another_attempt(
    tmp_path: Path, blow: Blow
) -> None:
    blow.gate.open()
    with parpool(2, quiet=True) as pool:
        run = pool.train(
            add_up, {"epochs": 5, "hold": blow}, run_options=RunOptions(run_dir=tmp_path / "run")
        )
    assert run.done()
    assert run.result(0).values == [[2, 5.0]] * 2
    assert run.attempts == 2


@on_ray
@pytest.mark.parametrize(
    ("how", "is_struck"),
    [
        ("delete", True),
        ("shutdown", False),
        ("interrupt", True),
        *(
            pytest.param(*case, marks=long)
            for case in (("delete", False), ("shutdown", True), ("interrupt", False))
        ),
        *(pytest.param("error", is_struck, marks=long) for is_struck in (False, True)),
    ],
)
def test_a_pool_that_ends_in_mid_training(
    tmp_path: Path, blow: Blow, eventually: Any, how: str, is_struck: bool
) -> None:
    """What runs goes on to its end, unless somebody has interrupted it; there is no other
    attempt.
    """
    if not is_struck:
        blow.mark.touch()
    runs: list[Any] = []

    def work() -> None:
        with parpool(2, quiet=True) as pool:

            def hold(epoch: int) -> None:
                if epoch == 2 and not is_struck:
                    blow.inside.open()
                    blow.gate.wait()
                blow(epoch)

            runs.append(
                pool.train(
                    add_up,
                    {"epochs": 5, "hold": hold},
                    run_options=RunOptions(run_dir=tmp_path / "run"),
                )
            )
            runs.append(pool.train(count_ranks))
            blow.inside.wait()
            # when the driver has heard of it: it ends what waits
            runs[1].add_done_callback(lambda _: blow.gate.open())
            if how == "error":
                raise LookupError("of the user's")
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "delete":
                pool.delete()
            else:
                pool.shutdown(wait=False, cancel_futures=True)

    if how in ("error", "interrupt"):
        with pytest.raises(LookupError if how == "error" else KeyboardInterrupt):
            work()
    else:
        work()
    assert eventually(lambda: all(run.done() for run in runs))
    assert runs[1].cancelled()
    if how == "interrupt":
        assert runs[0].cancelled()
    elif is_struck:
        with pytest.raises(TrainingError, match="Rank 1 of add_up") as caught:
            runs[0].result(0)
        assert Path(caught.value.result.checkpoint.path).name == "checkpoint_000002"
    else:
        assert runs[0].result(0).values == [[0, 5.0]] * 2


@pytest.mark.quick
def test_a_pool_that_has_ended() -> None:
    pool = parpool(1, profile="inline", quiet=True)
    pool.delete()
    with pytest.raises(PoolClosedError):
        pool.train(count_ranks)
    with pytest.raises(PoolClosedError):
        pool.fit(
            torch.nn.Linear(1, 1),
            (torch.ones(4, 1), torch.ones(4, 1)),
            torch.nn.functional.mse_loss,
        )


@long
@on_ray
def test_workers_that_rest_begin_again(eventually: Any, tmp_path: Path) -> None:
    """Scenario 6: restart, then train."""
    x = torch.ones(8, 1)
    with parpool(2, quiet=True, idle_timeout_s=0.2) as pool:
        for number in range(2):
            assert eventually(lambda: {worker.state for worker in pool.workers} == {"parked"})
            result = pool.train(
                add_up, {"epochs": 2 * number + 2}, run_options=RunOptions(run_dir=tmp_path / "run")
            ).result(300)
            assert result.values == [[2 * number, 2.0 * number + 2]] * 2
        assert eventually(lambda: {worker.state for worker in pool.workers} == {"parked"})
        options = TrainingOptions(max_epochs=2)
        fitted = pool.fit(
            torch.nn.Linear(1, 1), (x, x), torch.nn.functional.mse_loss, options
        ).result(300)
        assert fitted.values[1]["epochs"] == 2
        assert pool.statistics().workers_lost == 0


# --- a place is gone ------------------------------------------------------------------------------


@on_ray
@pytest.mark.parametrize("least", [1, pytest.param(None, marks=long)])
def test_a_place_that_is_lost_for_good(
    tmp_path: Path, breaking_cards: Any, eventually: Any, least: int | None
) -> None:
    """It goes on with those that are left, if they are enough; `fit` comes to what one process
    comes to.
    """
    flag = breaking_cards.flag
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    data, model = (x, x.sum(1, keepdim=True)), torch.nn.Linear(3, 1).double()

    class Broken(torch.nn.Module):
        def __init__(self, culprit: int | None) -> None:
            super().__init__()
            self.layer, self.culprit, self.calls = torch.nn.Linear(3, 1).double(), culprit, 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            if self.calls == 16 and current_task().worker == self.culprit and not flag.exists():
                flag.touch()
                os._exit(1)
            return self.layer(x)

    options = TrainingOptions(mini_batch_size=10, max_epochs=6, checkpoint_every=1)
    torch.manual_seed(0)
    model = Broken(0)
    with parpool(2, inventory=breaking_cards, quiet=True) as pool:
        kept = RunOptions(run_dir=tmp_path / "run", min_workers=least)
        run = pool.fit(model, data, torch.nn.functional.mse_loss, options, run_options=kept)
        error = run.exception(300)
        assert eventually(lambda: pool.num_workers == 1)
        if least is None:
            assert isinstance(error, TrainingError)
            assert error.result.checkpoint is not None
            return
        result = run.result(0)
        assert len(result.values) == 1
        assert result.metrics["epoch"] == 5
    with parpool(1, profile="inline", quiet=True) as pool:
        model.culprit = None
        alone = pool.fit(model, data, torch.nn.functional.mse_loss, options).result(300).model
    torch.testing.assert_close(
        dict(result.model.state_dict()), dict(alone.state_dict()), rtol=0, atol=1e-12
    )
