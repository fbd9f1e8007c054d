"""Trainings whose ranks fail, or are killed, in mid-training, on real Ray (scenario 40): the right
rank is named in time, workers are free, and what goes on from the last checkpoint ends as if
nothing had happened."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    LossReason,
    ParallelPool,
    RunOptions,
    TrainingError,
    TrainingOptions,
    WorkerLostError,
    current_task,
)
from tests.conftest import Marks
from tests.faults.conftest import count_ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("patience")]

EPOCHS = 5


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give the workers that train: two."""
    return two_workers


@pytest.fixture(autouse=True)
def next_training_works(pool: Any, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, a training on all workers works, and nothing is queued or running."""
    yield
    assert eventually(lambda: not pool.busy)
    assert eventually(lambda: pool.idle_workers == pool.num_workers == 2)
    assert pool.train(count_ranks).result(300).values == [2, 2]


WHOLE: list[Any] = []


@pytest.fixture
def whole(pool: Any, tmp_path: Path) -> Any:
    """Give the state at the end of a training that nothing has happened to; one serves all
    tests.
    """
    if not WHOLE:
        run = pool.train(
            descend, {"epochs": EPOCHS}, run_options=RunOptions(run_dir=tmp_path / "whole")
        )
        WHOLE.append(state_of(run.result(300)))
    return WHOLE[0]


def descend(config: dict[str, Any]) -> int:
    """Train as a loop of Ray's documentation does, with all of its state in a checkpoint after each
    epoch.
    """
    import tempfile
    from functools import partial
    from pathlib import Path

    import ray.train
    import ray.train.torch
    import torch

    strike = config.get("strike") or (lambda place, rank, epoch, *_: None)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(5)
    model = ray.train.torch.prepare_model(torch.nn.Linear(3, 1).double())
    own = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        state = torch.load(Path(checkpoint.path) / "state.pt")
        own.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        strike("between", rank, epoch)
        x = torch.randn(
            8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * epoch + rank)
        )
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.register_hook(partial(strike, "backward", rank, epoch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {
                    "epoch": epoch,
                    "model": own.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(state, Path(folder) / "state.pt")
            (Path(folder) / f"part-{rank}").touch()
            strike("report", rank, epoch)
            ray.train.report(
                {"epoch": epoch, "loss": loss.item()}, ray.train.Checkpoint.from_directory(folder)
            )
    return start


def state_of(result: Any) -> Any:
    return torch.load(Path(result.checkpoint.path) / "state.pt")


def assert_same(result: Any, whole: Any) -> None:
    """Check that a training has ended as the whole one: to the last bit."""
    torch.testing.assert_close(state_of(result), whole, rtol=0, atol=0)


def assert_begun(frame: Any) -> None:
    """Check what was reported of epochs 0, 1, which have checkpoints, and perhaps 2: a process that
    is killed takes with it what it has just said.
    """
    epochs = frame["epoch"].tolist()
    assert epochs in ([0, 1], [0, 1, 2])


@dataclass(frozen=True)
class Strike:
    """What befalls one rank, once, at one place of its loop."""

    how: str
    culprit: int
    place: str
    mark: Path
    epoch: int = 2

    def __call__(self, place: str, rank: int, epoch: int, *_: Any) -> None:
        """Strike, if this is the rank, the place and the time; the place "report" is also where
        files are copied.
        """
        if epoch != self.epoch or self.mark.exists():
            return
        if place == self.place == "report":
            self._in_report(rank)
        elif rank == self.culprit and (
            place == self.place or (place, self.place) == ("report", "copy")
        ):
            if self.place == "copy":
                shutil.copyfile = self._instead
            else:
                self._fall()

    def _in_report(self, rank: int) -> None:
        """Die in `report`, while it waits for the others, who come only after that."""
        if rank == self.culprit:
            threading.Timer(0.2, self._fall).start()
            return
        deadline = time.monotonic() + 60
        while not self.mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _instead(self, source: Any, target: Any) -> None:
        """Copy half of a file."""
        Path(target).write_bytes(Path(source).read_bytes()[:10])
        self._fall()

    def _fall(self) -> None:
        self.mark.touch()
        if self.how == "raise":
            raise KeyError("of the user's")
        if self.how == "os._exit":
            os._exit(4)
        os.kill(os.getpid(), signal.SIGKILL)


WAYS = ("raise", "os._exit", "SIGKILL")
PLACES = ("backward", "between", "report", "copy")
SHORT = {
    ("raise", 0, "backward"),
    ("os._exit", 1, "between"),
    ("os._exit", 1, "backward"),
    ("SIGKILL", 0, "report"),
}
CASES = [
    case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
    for case in itertools.product(WAYS, range(2), PLACES)
    if case[0] == "SIGKILL" or case[2] in ("backward", "between")
]
"""A value of each kind in the short ones."""


@pytest.mark.parametrize(("how", "culprit", "place"), CASES)
def test_a_rank_that_fails_in_mid_training(
    shared_pool: ParallelPool,
    pool: Any,
    tmp_path: Path,
    whole: Any,
    how: str,
    culprit: int,
    place: str,
) -> None:
    """It is named, in time; the same training made again goes on, and ends as an uninterrupted
    one.
    """
    run_dir, strike = tmp_path / "run", Strike(how, culprit, place, tmp_path / "mark")
    lost = shared_pool.statistics().workers_lost
    kept, is_killed = RunOptions(run_dir=run_dir), how in ("os._exit", "SIGKILL")

    run = pool.options(retries=0).train(
        descend, {"epochs": EPOCHS, "strike": strike}, run_options=kept
    )
    error = run.exception(300)

    assert isinstance(error, TrainingError), error
    assert set(error.failures) == {culprit}, str(error)
    assert error.first_rank == culprit
    assert error.__cause__ is error.failures[culprit]
    assert str(error).startswith(f"Rank {culprit} of descend (worker {culprit}, ")
    assert "1 was interrupted because of it" in str(error)
    if how == "raise":
        assert type(error.__cause__) is KeyError
    elif is_killed:
        assert isinstance(error.__cause__, WorkerLostError)
        assert error.__cause__.reason is LossReason.EXIT
    assert Path(error.result.checkpoint.path) == run_dir / "checkpoint_000002"
    assert f"RunOptions(run_dir={str(run_dir)!r})" in str(error)
    assert_begun(error.result.metrics_frame)
    assert shared_pool.statistics().workers_lost == lost + (how != "raise")
    assert (run.attempts, run.state) == (1, "failed")

    again = pool.train(descend, {"epochs": EPOCHS, "strike": strike}, run_options=kept).result(300)
    assert again.values == [2, 2]
    assert_same(again, whole)
    names = sorted(path.name for path in run_dir.iterdir())
    assert names == [
        *(
            f"checkpoint_{number:06}{end}"
            for number in range(1, EPOCHS + 1)
            for end in ("", ".json")
        ),
        "training_reports.jsonl",
    ]


@pytest.mark.parametrize(
    ("culprit", "place"),
    [
        pytest.param(1, "backward", marks=pytest.mark.quick),
        (0, "copy"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((0, "backward"), (1, "copy"), (1, "report"), (0, "between"))
        ),
    ],
)
def test_a_rank_that_is_lost_is_replaced(
    pool: Any, tmp_path: Path, whole: Any, culprit: int, place: str
) -> None:
    """And all begin again from the last checkpoint."""
    strike = Strike("SIGKILL", culprit, place, tmp_path / "mark")
    before = [worker.gpu for worker in pool.workers]
    run = pool.train(
        descend,
        {"epochs": EPOCHS, "strike": strike},
        run_options=RunOptions(run_dir=tmp_path / "run"),
    )
    result = run.result(300)
    assert run.attempts == 2
    assert result.values == [2, 2]
    assert_same(result, whole)
    frame = result.metrics_frame
    assert frame[frame["attempt"] == 2]["epoch"].tolist() == [2, 3, 4]
    assert_begun(frame[frame["attempt"] == 1])
    assert result.metrics["epoch"] == EPOCHS - 1
    assert [worker.gpu for worker in pool.workers] == before
    assert sum(path.is_dir() for path in (tmp_path / "run").iterdir()) == EPOCHS


def test_each_attempt_begins_with_what_was_given_at_the_call(pool: Any, tmp_path: Path) -> None:
    """Whatever changes afterwards, here or on the worker that stays."""
    scale, config, mark = [2], {"lr": 3}, tmp_path / "mark"

    def loop(config: dict[str, Any]) -> int:
        import ray.train

        value = scale[0] * config["lr"]
        scale[0] = config["lr"] = 0
        if ray.train.get_context().get_world_rank() == 1 and not mark.exists():
            mark.touch()
            os._exit(7)
        return value

    run = pool.train(loop, config)
    scale[0], config["lr"] = 5, 7
    assert run.result(300).values == [6, 6]
    assert run.attempts == 2


def test_what_the_loop_raises_is_tried_again_if_it_was_named(
    shared_pool: ParallelPool, pool: Any, tmp_path: Path, whole: Any
) -> None:
    strike, lost = (
        Strike("raise", 1, "backward", tmp_path / "mark"),
        shared_pool.statistics().workers_lost,
    )
    kept = RunOptions(run_dir=tmp_path / "run")
    run = pool.options(retry_on=KeyError).train(
        descend, {"epochs": EPOCHS, "strike": strike}, run_options=kept
    )
    assert_same(run.result(300), whole)
    assert (run.attempts, shared_pool.statistics().workers_lost) == (2, lost)


def test_a_rank_that_is_always_lost(pool: Any, tmp_path: Path, marks: Marks) -> None:
    """As often as was said; the error has what there is."""

    def loop() -> None:
        import ray.train

        ray.train.report({"epoch": 0}, None)
        has_reported = f"attempt {current_task().attempt}"
        if ray.train.get_context().get_world_rank() == 0:
            marks.add(has_reported)
        else:
            while not marks.count(has_reported):
                time.sleep(0.01)
            os._exit(7)
        ray.train.report({"epoch": 1}, None)

    run = pool.options(retries=1).train(loop, run_options=RunOptions(run_dir=tmp_path / "run"))
    with pytest.raises(TrainingError, match=r"It was attempt 2\.") as caught:
        run.result(300)
    assert caught.value.result.metrics == {"epoch": 0}
    assert caught.value.result.metrics_frame["attempt"].tolist() == [1, 2]
    assert caught.value.result.checkpoint is None
    assert caught.value.result.path is None
    assert "Resume from" not in str(caught.value)


# --- pool.fit -------------------------------------------------------------------------------------


class Fatal(torch.nn.Module):
    """A model that draws, has running statistics, and takes its process with it, once, on one rank,
    in mid-training.
    """

    def __init__(self, mark: Path, culprit: int, at_call: int) -> None:
        super().__init__()
        self.mark, self.culprit, self.at_call, self.calls = mark, culprit, at_call, 0
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 1),
        ).double()

    def forward(self, x: Any) -> Any:
        self.calls += self.training
        y = self.layers(x)
        if self.training and self.calls >= self.at_call:
            y.register_hook(self.strike)
        return y

    def strike(self, grad: Any) -> None:
        from raypool import current_task

        if current_task().index == self.culprit and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "culprit"),
    [pytest.param("ddp", 0, marks=pytest.mark.long), ("ddp", 1), ("fsdp", 0)],
)
def test_fit_ends_as_if_nothing_had_happened(
    pool: Any, tmp_path: Path, strategy: str, culprit: int
) -> None:
    """To the last bit, on two ranks: also what it draws, its running statistics, the optimizer and
    the learning rate.
    """
    x = torch.randn(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = x, x.sum(1, keepdim=True).sin()
    options = TrainingOptions(
        optimizer="adam",
        schedule="cosine",
        mini_batch_size=20,
        max_epochs=6,
        checkpoint_every=2,
        validation_data=data,
        patience=4,
        strategy=strategy,  # type: ignore[arg-type]
    )
    torch.manual_seed(1)
    model = Fatal(tmp_path / "mark", culprit, 10**9)
    whole = pool.fit(model, data, torch.nn.functional.mse_loss, options).result(300)
    model.at_call = 12  # of 18, after the first checkpoint
    run = pool.fit(
        model,
        data,
        torch.nn.functional.mse_loss,
        options,
        run_options=RunOptions(run_dir=tmp_path / "run"),
    )
    result = run.result(300)
    assert run.attempts == 2
    assert (tmp_path / "mark").exists()
    torch.testing.assert_close(
        dict(result.model.state_dict()), dict(whole.model.state_dict()), rtol=0, atol=0
    )
    for name in ("loss", "validation_loss", "learning_rate", "epoch", "step"):
        assert result.metrics[name] == whole.metrics[name], name
    assert result.metrics_frame.query("attempt == 2")["epoch"].tolist() == [2, 3, 4, 5]
