"""What cannot be trained: each its one clear error, at the call or at the step where it shows, and
all workers are free then.
"""

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
    JournalError,
    ResourceError,
    RunOptions,
    SerializationError,
    TrainingError,
    TrainingOptions,
)

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.usefixtures("patience")]

mse_loss = torch.nn.functional.mse_loss


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give the workers that train: two."""
    return two_workers


@pytest.fixture(autouse=True)
def all_is_free_afterwards(pool: Any, eventually: Callable[..., bool]) -> Iterator[None]:
    """After whatever it was, all workers are the same, idle, and nothing of Ray's is taken."""
    before, free = pids(pool), unclaimed()
    yield
    assert eventually(lambda: not pool.busy)
    assert eventually(lambda: pool.idle_workers == pool.num_workers == 2)
    assert pids(pool) == before
    assert eventually(lambda: resources() == free), (resources(), free)


def pids(pool: Any) -> list[int]:
    return pool.parfeval_on_all(os.getpid).result(300)


def resources() -> dict[str, float]:
    """Return what is free, as far as Ray has heard: a pool that was just opened may be missing."""
    import ray

    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in ("CPU", "GPU")}


def unclaimed() -> dict[str, float]:
    """Return what no pool has claimed."""
    import ray
    from ray.util import placement_group_table

    rest = {name: ray.cluster_resources()[name] for name in ("CPU", "GPU")}
    for group in placement_group_table().values():
        for bundle in group["bundles"].values() if group["state"] != "REMOVED" else ():
            for name in rest:
                rest[name] -= bundle.get(name, 0.0)
    return rest


def line(num_samples: int = 64) -> Any:
    x = torch.linspace(-1, 1, num_samples)[:, None]
    return x, 3 * x


def linear() -> Any:
    return torch.nn.Linear(1, 1)


def failure(run: Any) -> TrainingError:
    error = run.exception(300)
    assert type(error) is TrainingError, error
    return error


# --- pool.fit -------------------------------------------------------------------------------------


def test_a_function_that_makes_a_model_without_parameters(pool: Any) -> None:
    """It is told on the worker; tests/unit/test_fit_arguments.py has what is told at the call."""
    error = failure(pool.fit(torch.nn.Flatten, line(), mse_loss))
    assert "The model, a Flatten, cannot be trained: it has no parameters." in str(error)
    assert isinstance(error.__cause__, InvalidValueError)


def test_a_checkpoint_that_was_cut_short(pool: Any, tmp_path: Path) -> None:
    """By a disk that was full, say, before anybody looked."""
    kept = RunOptions(run_dir=tmp_path / "run")
    options = TrainingOptions(max_epochs=1, checkpoint_every=1)
    checkpoint = (
        pool.fit(linear(), line(), mse_loss, options, run_options=kept).result(300).checkpoint
    )
    for size in (0, 10, 1000):
        os.truncate(Path(checkpoint.path) / "training.pt", size)
        error = failure(pool.fit(linear(), line(), mse_loss, options, run_options=kept))
        assert "training.pt is not a checkpoint of pool.fit: it cannot be read (" in str(error)


# --- pool.train -----------------------------------------------------------------------------------


def two(config: Any, other: Any) -> None:
    """Take one argument too many."""


CANNOT_BEGIN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loop": 7}, InvalidTypeError, "7 is not callable"),
    (
        {"loop": two},
        InvalidTypeError,
        r"The loop two\(config, other\) takes more than one argument",
    ),
    ({"loop": abs, "config": [1]}, InvalidTypeError, r"config=\[1\] is a list"),
    (
        {"loop": abs, "lane": "cold"},
        InvalidValueError,
        "lane must be 'warm' or 'managed', not 'cold'",
    ),
    ({"loop": abs, "datasets": {"train": []}}, InvalidValueError, 'add lane="managed"'),
    (
        {"loop": abs, "torch_config": object()},
        InvalidValueError,
        'torch_config= is no argument .*add lane="managed"',
    ),
    (
        {"loop": abs, "run_options": {"run_dir": "/tmp"}},
        InvalidTypeError,
        r"Pass RunOptions\(...\)",
    ),
    ({"loop": abs, "workers": 3}, ResourceError, "[Rr]equested 3.*available 2|3 .*2"),
    ({"loop": abs, "workers": []}, InvalidValueError, "workers"),
    ({"loop": abs, "workers": [0, 0]}, InvalidValueError, "Worker 0 is listed twice"),
    ({"loop": abs, "workers": [5]}, InvalidValueError, "There is no worker 5 here"),
    (
        {"loop": abs, "run_options": RunOptions(min_workers=3)},
        InvalidValueError,
        "min_workers=3 is more than the 2 workers",
    ),
]


def test_what_cannot_begin(pool: Any) -> None:
    for arguments, kind, says in CANNOT_BEGIN:
        with pytest.raises(kind, match=says):
            pool.train(**arguments)


def test_a_config_that_a_loop_does_not_take(pool: Any) -> None:
    """As with Ray Train's own trainer: nobody minds, and one that a loop needs is empty if there is
    none.
    """
    assert pool.train(lambda: 1, {"a": 1}).result(300).values == [1, 1]
    assert pool.train(lambda config: config).result(300).values == [{}, {}]


def test_what_cannot_be_sent(pool: Any) -> None:
    """The variable is named, at the call."""
    door = threading.Lock()
    with pytest.raises(SerializationError, match="door"):
        pool.train(lambda: door.locked())
    with pytest.raises(SerializationError, match="gate"):
        pool.train(lambda config: None, {"gate": threading.Lock()})
    with pytest.raises(SerializationError, match="door"):
        pool.fit(linear(), line(), lambda y, t: door.locked())


def test_what_cannot_come_back(pool: Any) -> None:
    """What the loop returns: it has trained all the same, and what was reported is there."""

    def loop() -> Any:
        import ray.train

        ray.train.report({"loss": 1.0})
        return threading.Lock()

    error = failure(pool.train(loop))
    assert isinstance(error.__cause__, SerializationError)
    assert "lock" in str(error)
    assert error.result.metrics == {"loss": 1.0}


# --- where it is kept -----------------------------------------------------------------------------


def save(config: dict[str, Any]) -> None:
    import tempfile

    import ray.train

    for epoch in range(config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                (Path(folder) / "weights").write_bytes(bytes(config.get("size", 10)))
            ray.train.report({"epoch": epoch}, ray.train.Checkpoint.from_directory(folder))


def test_a_folder_that_cannot_be_written(pool: Any) -> None:
    """It shows at the call, before anything trains."""
    options = TrainingOptions(max_epochs=1)
    for folder in ("/proc/raypool", "/dev/null/run", "a" * 300):
        kept = RunOptions(run_dir=folder)
        with pytest.raises(JournalError, match=f"{folder} cannot be written") as caught:
            pool.train(save, {"epochs": 1}, run_options=kept)
        assert caught.value.run_dir == str(kept.run_dir)
        with pytest.raises(JournalError, match=f"{folder} cannot be written"):
            pool.fit(linear(), line(), mse_loss, options, run_options=kept)


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


def test_a_disk_that_is_full(pool: Any, small_disk: Path) -> None:
    """The checkpoints before are there; with room it goes on from the last one."""
    kept = RunOptions(run_dir=small_disk / "run")
    error = failure(pool.train(save, {"epochs": 5, "size": 500_000}, run_options=kept))
    assert set(error.failures) == {0, 1}
    text = (
        f"Rank 0, on {os.uname().nodename}, could not write a checkpoint to {kept.run_dir}: No"
        " space left on device"
    )
    assert text in str(error)
    assert Path(error.result.checkpoint.path).name == "checkpoint_000004"
    assert f"RunOptions(run_dir={str(kept.run_dir)!r})" in str(error)
    assert error.result.metrics["epoch"] in (3, 4)
    assert not list((small_disk / "run").glob(".*"))
    shutil.rmtree(small_disk / "run" / "checkpoint_000001")
    result = pool.train(save, {"epochs": 1, "size": 500_000}, run_options=kept).result(300)
    assert Path(result.checkpoint.path).name == "checkpoint_000005"
