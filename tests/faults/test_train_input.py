"""What cannot be trained: each its one clear error, at the call or at the step where it shows, and all workers are free then."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    ResourceError,
    RunOptions,
    SerializationError,
    TrainingError,
    TrainingOptions,
)

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.timeout(180)]

mse_loss = torch.nn.functional.mse_loss


@pytest.fixture(scope="module")
def pool(training_pool: ParallelPool) -> ParallelPool:
    return training_pool


@pytest.fixture(autouse=True)
def all_is_free_afterwards(pool: ParallelPool, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, all workers are the same, idle, and nothing of Ray's is taken."""
    before, free = pids(pool), resources()
    yield
    assert eventually(lambda: not pool.busy)
    assert eventually(lambda: pool.idle_workers == pool.num_workers == 2, 60)
    assert pids(pool) == before
    assert eventually(lambda: resources() == free), (resources(), free)


def pids(pool: ParallelPool) -> list[int]:
    return pool.parfeval_on_all(os.getpid).result(60)


def resources() -> dict[str, float]:
    import ray

    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}


def line(num_samples: int = 64) -> Any:
    x = torch.linspace(-1, 1, num_samples)[:, None]
    return x, 3 * x


def linear() -> Any:
    return torch.nn.Linear(1, 1)


def failure(run: Any) -> TrainingError:
    error = run.exception(60)
    assert type(error) is TrainingError, error
    return error


# --- pool.fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "options", "says"),
    [
        (1, {}, "There is 1 sample for 2 workers"),
        (0, {}, "0 samples|no samples|empty"),
        (64, {"mini_batch_size": 1}, "A mini-batch of 1 is less than one sample for each of 2 workers"),
        (64, {"worker_load": [1]}, "has 1 numbers, and 2 workers may train: 0, 1"),
        (64, {"worker_load": [1, 1, 1]}, "has 3 numbers, and 2 workers may train: 0, 1"),
        (64, {"worker_load": [100, 1], "mini_batch_size": 2}, "leaves nothing for worker 1"),
    ],
)
def test_too_little_for_all(pool: ParallelPool, num_samples: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValueError, match=says):
        pool.fit(linear(), line(num_samples), mse_loss, TrainingOptions(**options))


@pytest.mark.parametrize("load", [[0, 0], [-1, 2], [], [float("nan"), 1]])
def test_a_load_of_nothing(load: list[float]) -> None:
    with pytest.raises(InvalidValueError, match="worker_load"):
        TrainingOptions(worker_load=load)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_without_parameters(pool: ParallelPool, strategy: Any) -> None:
    """At the call for a model; for a function that makes one on the worker."""
    options = TrainingOptions(strategy=strategy)
    with pytest.raises(InvalidValueError, match="cannot be trained: it has no parameters"):
        pool.fit(torch.nn.Flatten(), line(), mse_loss, options)
    error = failure(pool.fit(torch.nn.Flatten, line(), mse_loss, options))
    assert "The model, a Flatten, cannot be trained: it has no parameters." in str(error)
    assert isinstance(error.__cause__, InvalidValueError)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ((7, line(), mse_loss), InvalidTypeError, "model=7 is a int"),
        ((linear(), 7, mse_loss), InvalidTypeError, "data"),
        ((linear(), (line()[0], line(32)[1]), mse_loss), InvalidValueError, "64.*32"),
        ((linear(), line(), "mse"), InvalidTypeError, "loss='mse' is not callable"),
    ],
)
def test_what_is_of_a_wrong_kind(pool: ParallelPool, arguments: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        pool.fit(*arguments)


@pytest.mark.parametrize(
    ("model", "loss", "says"),
    [
        (lambda: "no module", mse_loss, "has returned a str, not a torch.nn.Module"),
        (lambda: torch.nn.Linear(2, 1), mse_loss, "mat1 and mat2 shapes cannot be multiplied"),
        (linear, lambda y, t: (y - t) ** 2, r"a tensor of shape \(32, 1\)"),
        (linear, lambda y, t: 7.0, "has returned a float"),
        (linear, lambda y, t: mse_loss(y.detach(), t), "does not depend on the model's parameters"),
    ],
)
def test_what_shows_in_the_first_step(pool: ParallelPool, model: Any, loss: Any, says: str) -> None:
    error = failure(pool.fit(model, line(), loss, TrainingOptions(max_epochs=1, mini_batch_size=64)))
    assert error.first_rank in error.failures
    with pytest.raises(Exception, match=says):
        raise error


def test_a_checkpoint_of_another_model(pool: ParallelPool, tmp_path: Path) -> None:
    """The first key that differs is named."""
    kept = RunOptions(run_dir=tmp_path / "run")
    options = TrainingOptions(max_epochs=1, checkpoint_every=1)
    first = pool.fit(linear(), line(), mse_loss, options, run_options=kept).result(60)
    wide = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    error = failure(pool.fit(wide, line(), mse_loss, options, run_options=kept))
    assert f"{first.checkpoint.path} is a checkpoint of another model: it has no '0.weight'" in str(error)
    assert isinstance(error.__cause__, InvalidValueError)


@pytest.mark.parametrize("what", ["nothing in it", "file", "not there"])
def test_what_is_no_checkpoint_at_all(tmp_path: Path, what: str) -> None:
    """That shows when it is named."""
    path = tmp_path / "checkpoint"
    if what == "nothing in it":
        path.mkdir()
    elif what == "file":
        path.touch()
    with pytest.raises(InvalidValueError, match=f"start_from={path} is no checkpoint"):
        RunOptions(start_from=path)


def test_a_checkpoint_that_was_cut_short(pool: ParallelPool, tmp_path: Path) -> None:
    """By a disk that was full, say, before anybody looked."""
    kept = RunOptions(run_dir=tmp_path / "run")
    options = TrainingOptions(max_epochs=1, checkpoint_every=1)
    checkpoint = pool.fit(linear(), line(), mse_loss, options, run_options=kept).result(60).checkpoint
    for size in (0, 10, 1000):
        os.truncate(Path(checkpoint.path) / "training.pt", size)
        error = failure(pool.fit(linear(), line(), mse_loss, options, run_options=kept))
        assert "training.pt is no checkpoint of pool.fit: it cannot be read (" in str(error)


# --- pool.train -------------------------------------------------------------------------------------------------------


def two(config: Any, other: Any) -> None:
    """Take one argument too many."""


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"loop": 7}, InvalidTypeError, "7 is not callable"),
        ({"loop": None}, InvalidTypeError, "None is not callable"),
        ({"loop": two}, InvalidTypeError, r"The loop two\(config, other\) takes more than one argument"),
        ({"loop": abs, "config": [1]}, InvalidTypeError, r"config=\[1\] is a list"),
        ({"loop": abs, "lane": "cold"}, InvalidValueError, "lane='cold' is neither"),
        ({"loop": abs, "datasets": {"train": []}}, InvalidValueError, 'give lane="managed"'),
        ({"loop": abs, "release_workers": True}, InvalidValueError, 'give lane="managed"'),
        ({"loop": abs, "options": {"run_dir": "/tmp"}}, InvalidTypeError, r"Give RunOptions\(...\)"),
        ({"loop": abs, "workers": 3}, ResourceError, "[Rr]equested 3.*available 2|3 .*2"),
        ({"loop": abs, "workers": []}, InvalidValueError, "workers"),
        ({"loop": abs, "workers": [0, 0]}, InvalidValueError, "Worker 0 is named twice"),
        ({"loop": abs, "workers": [5]}, InvalidValueError, "There is no worker 5 here"),
        ({"loop": abs, "options": RunOptions(min_workers=3)}, InvalidValueError, "min_workers=3 is more than the 2 workers"),
    ],
)
def test_what_cannot_begin(pool: ParallelPool, arguments: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        pool.train(**arguments)


def test_a_config_that_a_loop_does_not_take(pool: ParallelPool) -> None:
    """As with Ray Train's own trainer: nobody minds, and one that a loop needs is empty if there is none."""
    assert pool.train(lambda: 1, {"a": 1}).result(60).values == [1, 1]
    assert pool.train(lambda config: config).result(60).values == [{}, {}]


def test_what_cannot_be_sent(pool: ParallelPool) -> None:
    """The variable is named, at the call."""
    door = threading.Lock()
    with pytest.raises(SerializationError, match="door"):
        pool.train(lambda: door.locked())
    with pytest.raises(SerializationError, match="gate"):
        pool.train(lambda config: None, {"gate": threading.Lock()})
    with pytest.raises(SerializationError, match="door"):
        pool.fit(linear(), line(), lambda y, t: door.locked())


def test_what_cannot_come_back(pool: ParallelPool) -> None:
    """What the loop returns: it has trained all the same, and what was reported is there."""

    def loop() -> Any:
        import ray.train

        ray.train.report({"loss": 1.0})
        return threading.Lock()

    error = failure(pool.train(loop))
    assert isinstance(error.__cause__, SerializationError)
    assert "lock" in str(error)
    assert error.result.metrics == {"loss": 1.0}


def test_a_rank_that_reports_other_keys(pool: ParallelPool) -> None:
    def loop() -> None:
        import ray.train

        ray.train.report({"loss": 1.0})
        ray.train.report({"loss": 1.0} if ray.train.get_context().get_world_rank() else {"accuracy": 1.0})

    error = failure(pool.train(loop))
    assert str(error.__cause__).startswith("Rank 1 has reported other metrics than rank 0: 'accuracy' is missing, 'loss' is not")
    assert error.result.metrics == {"loss": 1.0}


@pytest.mark.parametrize("metrics", [7, {1: 2}, {"loss": torch.zeros(3)}, {"lock": threading.Lock}])
def test_metrics_that_are_none(pool: ParallelPool, metrics: Any) -> None:
    def loop(config: dict[str, Any]) -> None:
        import ray.train

        value = config["metrics"]
        ray.train.report({"lock": threading.Lock()} if "lock" in (value if isinstance(value, dict) else ()) else value)

    error = failure(pool.train(loop, {"metrics": metrics if metrics != {"lock": threading.Lock} else {"lock": 1}}))
    assert isinstance(error.__cause__, InvalidTypeError)
    assert "report(" in str(error.__cause__)


# --- where it is kept -------------------------------------------------------------------------------------------------


def save(config: dict[str, Any]) -> None:
    import tempfile

    import ray.train

    for epoch in range(config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                (Path(folder) / "weights").write_bytes(bytes(config.get("size", 10)))
            ray.train.report({"epoch": epoch}, ray.train.Checkpoint.from_directory(folder))


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(InvalidValueError, match=f"run_dir={tmp_path / 'run'} is a file"):
        RunOptions(run_dir=tmp_path / "run")


@pytest.mark.parametrize("run_dir", ["/proc/raypool", "/dev/null/run"])
@pytest.mark.parametrize("verb", ["train", "fit"])
def test_a_folder_that_cannot_be_written(pool: ParallelPool, verb: str, run_dir: str) -> None:
    """It shows with the first checkpoint."""
    kept = RunOptions(run_dir=run_dir)
    if verb == "train":
        run = pool.train(save, {"epochs": 1}, options=kept)
    else:
        run = pool.fit(linear(), line(), mse_loss, TrainingOptions(max_epochs=1, checkpoint_every=1), run_options=kept)
    error = failure(run)
    assert isinstance(error.__cause__, OSError)
    assert f"could not write the folder of the run to {run_dir}: " in str(error)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk with room for 2 MB, if this process may make one."""
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "raypool-test", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full(pool: ParallelPool, small_disk: Path) -> None:
    """The checkpoints before are there; with room it goes on from the last one."""
    kept = RunOptions(run_dir=small_disk / "run")
    error = failure(pool.train(save, {"epochs": 5, "size": 500_000}, options=kept))
    assert set(error.failures) == {0, 1}
    text = f"Rank 0, on {os.uname().nodename}, could not write a checkpoint to {kept.run_dir}: No space left on device"
    assert text in str(error)
    assert Path(error.result.checkpoint.path).name == "checkpoint_000004"
    assert f"RunOptions(run_dir={str(kept.run_dir)!r})" in str(error)
    assert error.result.metrics["epoch"] in (3, 4)
    assert not list((small_disk / "run").glob(".*"))
    shutil.rmtree(small_disk / "run" / "checkpoint_000001")
    result = pool.train(save, {"epochs": 1, "size": 500_000}, options=kept).result(60)
    assert Path(result.checkpoint.path).name == "checkpoint_000005"
