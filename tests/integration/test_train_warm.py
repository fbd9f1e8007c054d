"""The warm lane on real Ray, with GPUs that are pretended: a loop as Ray's documentation has it,
and what goes wrong in one.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypool import CollectiveError, InvalidValueError, RunOptions, TrainingError, current_task

torch = pytest.importorskip("torch")


@pytest.fixture
def pool(two_workers: Any) -> Any:
    """Give two workers, each with a GPU that does not exist."""
    return two_workers


def train_func(config):
    """Train a small network: "Get Started with Distributed Training using PyTorch" of Ray's
    documentation, with its pieces.
    """
    import os
    import tempfile

    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=8, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = torch.nn.MSELoss()

    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "model.pt"))
        start = state["epoch"] + 1
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(start, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for inputs, labels in loader:
            loss = criterion(model(inputs), labels)
            total += loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"epoch": epoch, "optimizer": optimizer.state_dict()}
                state["model"] = getattr(model, "module", model).state_dict()
                torch.save(state, os.path.join(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": total / len(loader), "epoch": epoch}, checkpoint=checkpoint)


def state_of(checkpoint: Any) -> Any:
    return torch.load(Path(checkpoint.path) / "model.pt")


def assert_nothing_is_left(pool: Any) -> None:
    """Check that tasks that come after find neither a training nor torch's default group."""

    def look(_: Any) -> Any:
        import ray.train
        import torch.distributed
        from ray.train.v2._internal.execution import train_fn_utils

        try:
            ray.train.get_context()
        except RuntimeError as error:
            is_outside = "outside of a Ray Train" in str(error)
        return (
            is_outside,
            train_fn_utils._train_fn_utils,
            torch.distributed.is_initialized(),
            "NODE_RANK" in os.environ,
        )

    assert list(pool.parfor(look, range(4))) == [(True, None, False, False)] * 4


# --- a loop as it is ------------------------------------------------------------------------------


def test_a_loop_of_the_documentation(pool: Any, tmp_path: Path) -> None:
    """In one go, and in two: the same parameters, to the last bit."""
    whole = pool.train(
        train_func, {"epochs": 4}, run_options=RunOptions(run_dir=tmp_path / "whole")
    ).result(300)
    assert whole.metrics_frame["epoch"].tolist() == [0, 1, 2, 3]
    assert whole.metrics["loss"] < whole.metrics_frame["loss"][0]
    assert state_of(whole.checkpoint)["epoch"] == 3
    halves = [
        pool.train(
            train_func, {"epochs": epochs}, run_options=RunOptions(run_dir=tmp_path / "halves")
        ).result(300)
        for epochs in (2, 4)
    ]
    assert halves[1].metrics_frame["epoch"].tolist() == [2, 3]
    for name, parameter in state_of(whole.checkpoint)["model"].items():
        assert torch.equal(parameter, state_of(halves[1].checkpoint)["model"][name]), name
    assert_nothing_is_left(pool)


@pytest.mark.long
def test_the_same_as_by_a_bare_trainer(
    pool: Any, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    """Ray's own trainer comes to the same parameters with the same loop."""
    code = f"""
        import warnings
        warnings.simplefilter("default")
        import ray, ray.train
        from ray.train.torch import TorchTrainer

        ray.init(address="local", num_cpus=4, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
        namespace = {{}}
        exec({inspect.getsource(train_func)!r}, namespace)
        trainer = TorchTrainer(
            namespace["train_func"],
            train_loop_config={{"epochs": 2}},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="bare", storage_path={str(tmp_path)!r}),
        )
        print(trainer.fit().checkpoint.path)
        ray.shutdown()
        """
    done = run_python(code, RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2")
    theirs = torch.load(Path(done.stdout.split()[-1]) / "model.pt")
    ours = state_of(
        pool.train(train_func, {"epochs": 2}, run_options=RunOptions(run_dir=tmp_path / "run"))
        .result(300)
        .checkpoint
    )
    assert ours["epoch"] == theirs["epoch"] == 1
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-6, atol=1e-7)


def test_what_torch_and_the_environment_say(pool: Any) -> None:
    def loop() -> Any:
        import ray.train.torch
        import torch.distributed as dist

        model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "NODE_RANK",
            "ACCELERATE_TORCH_DEVICE",
        )
        return (
            dist.get_rank(),
            dist.get_world_size(),
            [os.environ[name] for name in names],
            type(model).__name__,
            str(ray.train.torch.get_device()),
        )

    assert pool.train(loop).result(300).values == [
        (rank, 2, [str(rank), "2", str(rank), "2", "0", "cpu"], "DistributedDataParallel", "cpu")
        for rank in range(2)
    ]
    (value,) = pool.train(loop, workers=[1]).result(300).values
    assert value == (0, 1, ["0", "1", "0", "1", "0", "cpu"], "Linear", "cpu")
    assert_nothing_is_left(pool)


def test_threads_and_native_threads_of_the_loop_belong_to_it(pool: Any) -> None:
    def loop() -> Any:
        import ctypes
        import threading
        from concurrent.futures import ThreadPoolExecutor

        import ray.train

        def rank() -> int:
            return ray.train.get_context().get_world_rank()

        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(rank()))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as threads:
            seen.append(threads.submit(rank).result())
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: seen.append(rank()))
        libc, native = ctypes.CDLL(None), ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(native), None, call, None) == 0
        libc.pthread_join(native, None)
        return seen

    assert pool.train(loop).result(300).values == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.quick
def test_what_is_private_of_ray_is_there() -> None:
    """The warm lane stands on these names; with a Ray that has others it has to be changed
    (raypool/train/ray_train.py).
    """
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution import train_fn_utils
    from ray.train.v2.api.context import LocalTrainContext

    asked = train_fn_utils.TrainFnUtils.__abstractmethods__
    from raypool.train.ray_train import Session, _Storage, _Trainer

    assert asked == {
        "report",
        "get_checkpoint",
        "get_all_reported_checkpoints",
        "get_dataset_shard",
        "get_context",
        "get_preemption_info",
        "is_distributed",
        "barrier",
        "broadcast_from_rank_zero",
    }
    for name in asked:
        ours = inspect.signature(getattr(Session, name)).parameters
        theirs = inspect.signature(getattr(train_fn_utils.TrainFnUtils, name)).parameters
        assert list(ours) == list(theirs), name
    assert issubclass(Session, train_fn_utils.LocalTrainFnUtils)
    assert callable(train_fn_utils.set_train_fn_utils)
    with pytest.raises(RuntimeError):
        train_fn_utils.get_train_fn_utils()
    assert {"world_size", "world_rank", "local_rank", "local_world_size", "node_rank"} <= set(
        inspect.signature(LocalTrainContext).parameters
    )
    for name in ("_create_validation_file", "_check_validation_file"):
        assert getattr(_Storage, name) is not getattr(_Storage.__base__, name)
    # which is there
    assert _Trainer._get_local_controller is not TorchTrainer._get_local_controller
    trainer = TorchTrainer(lambda: "ours", scaling_config=ScalingConfig(num_workers=0))
    trainer._get_local_controller = lambda: type(
        "Controller", (), {"run": staticmethod(lambda fn: (fn(), "was asked"))}
    )
    assert trainer.fit() == ("ours", "was asked")


# --- what goes wrong ------------------------------------------------------------------------------


def failure(
    pool: Any, loop: Callable[..., Any], config: Any = None, **options: Any
) -> TrainingError:
    with pytest.raises(TrainingError) as caught:
        pool.train(loop, config, run_options=RunOptions(**options)).result(300)
    assert_nothing_is_left(pool)
    return caught.value


def test_a_rank_that_reports_other_names(pool: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What rank 0 reports is kept; one warning says which rank is the first to differ, and in
    what.
    """

    def loop() -> None:
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        ray.train.report({"loss": 1} if rank == 0 else {})  # it has nothing to say
        for _ in range(2):
            names = ["loss", *(f"acc{i}" for i in range(500))] if rank == 0 else ["loss", "other"]
            ray.train.report(dict.fromkeys(names, 1.0))
        ray.train.report({"loss": 2 + rank})

    run = pool.train(loop)
    assert run.result(300).metrics == {"loss": 2}
    assert "other" not in run.metrics
    assert caplog.text.count("Rank 1 has reported other metrics than rank 0: 'acc0', 'acc1', ") == 1
    assert (
        "and 492 more is missing, 'other' is not among those of rank 0. Only rank 0's metrics are"
        " kept" in caplog.text
    )


def test_a_rank_that_returns_while_others_report(pool: Any) -> None:
    def loop() -> None:
        import ray.train

        for step in range(3 + ray.train.get_context().get_world_rank()):
            ray.train.report({"step": step})

    error = failure(pool, loop)
    assert isinstance(error.__cause__, CollectiveError)
    assert re.search(
        r"Rank 0 has ended, rank 1 waits for it in ray.train.report \(the \d+th collective of this"
        r" call\)",
        str(error),
    )
    assert error.result.metrics == {"step": 2}


def test_a_rank_in_something_else(pool: Any) -> None:
    def loop() -> None:
        import ray.train
        from ray.train.collective import barrier

        if ray.train.get_context().get_world_rank():
            barrier()
        else:
            ray.train.report({})

    assert "Rank 0 is in ray.train.report, rank 1 is in barrier" in str(failure(pool, loop))


def test_a_disk_that_is_full_on_one_rank(pool: Any, tmp_path: Path) -> None:
    """All ranks get the error, nothing of the checkpoint is left, and the one before it is
    there.
    """

    def loop() -> None:
        import resource
        import tempfile

        import ray.train

        rank = ray.train.get_context().get_world_rank()
        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / f"part{rank}").write_bytes(bytes(10_000_000))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                if rank == step == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, before[1]))
                try:
                    ray.train.report({"step": step}, checkpoint)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, before)

    run_dir = tmp_path / "run"
    error = failure(pool, loop, run_dir=run_dir)
    assert error.failures  # the one that is told first may end the other
    for each in error.failures.values():
        assert isinstance(each, OSError)
        assert each.errno == errno.EFBIG
        assert f"could not write a checkpoint to {run_dir}: {os.strerror(errno.EFBIG)}" in str(each)
        assert "Rank 1, on " in str(each)
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "checkpoint_000001",
        "checkpoint_000001.json",
        "training_reports.jsonl",
    ]
    assert Path(error.result.checkpoint.path).name == "checkpoint_000001"
    assert str(run_dir) in str(error)


def test_an_upload_function_that_fails_on_one_rank(pool: Any, tmp_path: Path) -> None:
    """Its exception is the user's own, that of its rank; the others were interrupted."""

    def loop() -> None:
        import ray.train

        def upload(checkpoint: Any, name: str) -> Any:
            if ray.train.get_context().get_world_rank():
                raise KeyError("no credentials")
            return checkpoint

        ray.train.report(
            {}, ray.train.Checkpoint.from_directory(str(tmp_path)), checkpoint_upload_fn=upload
        )

    error = failure(pool, loop, run_dir=tmp_path / "run")
    assert list(error.failures) == [1]
    assert isinstance(error.__cause__, KeyError)


def test_a_folder_that_not_all_machines_see(pool: Any, tmp_path: Path) -> None:
    def loop() -> None:
        import tempfile
        from unittest import mock

        import ray.train

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(Path, "is_dir", _is_dir):
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({}, checkpoint)

    run_dir = tmp_path / "run"
    error = failure(pool, loop, run_dir=run_dir)
    assert isinstance(error.__cause__, InvalidValueError)
    assert f"does not see the folder {run_dir} as rank 0 does" in str(error)
    assert "Rank 1, on " in str(error)
    assert not run_dir.exists()


def _is_dir(path: Path) -> bool:
    """Stand in for a disk that is not the same on the machine of rank 1."""
    return path.exists() and os.environ["RANK"] == "0"


def test_a_beginning_that_not_all_machines_see(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "model.pt").touch()

    def blind(_: Any, is_blind: bool) -> None:
        from types import SimpleNamespace

        from raypool.train import ray_train

        ray_train.os = SimpleNamespace(path=SimpleNamespace(isdir=lambda path: not is_blind))  # type: ignore[assignment]

    pool.spmd(blind, True, workers=[1])
    try:
        error = failure(pool, lambda: None, start_from=tmp_path / "start")
    finally:
        pool.spmd(blind, False, workers=[1])
    assert isinstance(error.__cause__, InvalidValueError)
    assert (
        f"does not see the checkpoint {tmp_path / 'start'} that the training is to begin with"
        in str(error)
    )


def test_a_lost_rank_is_replaced_and_all_begin_again(pool: Any, tmp_path: Path) -> None:
    def loop() -> int:
        import json
        import tempfile

        import ray.train

        start, checkpoint = 0, ray.train.get_checkpoint()
        if checkpoint:
            start = json.loads((Path(checkpoint.path) / "epoch").read_text()) + 1
        for epoch in range(start, 4):
            if (
                epoch == 2
                and current_task().attempt == 1
                and ray.train.get_context().get_world_rank()
            ):
                os._exit(1)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "epoch").write_text(str(epoch))
                ray.train.report({"epoch": epoch}, ray.train.Checkpoint.from_directory(folder))
        return start

    run = pool.options(retries=1).train(loop, run_options=RunOptions(run_dir=tmp_path / "run"))
    result = run.result(300)
    assert result.values == [2, 2]
    assert result.metrics_frame["epoch"].tolist() == [0, 1, 2, 3]
    assert result.metrics_frame["attempt"].tolist() == [1, 1, 2, 2]
    assert_nothing_is_left(pool)


def test_cancelled_in_the_middle(pool: Any, tmp_path: Path) -> None:
    """Whatever is at hand: a report, a copy, a line of the loop; the workers are as before."""

    def loop() -> None:
        import tempfile

        import ray.train

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model").write_bytes(bytes(3_000_000))
            while True:
                ray.train.report({"a": 1}, ray.train.Checkpoint.from_directory(folder))

    for number in range(4):
        run = pool.train(
            loop, run_options=RunOptions(run_dir=tmp_path / f"{number}", keep_checkpoints=2)
        )
        while run.metrics.empty:
            assert not run.done()
            threading.Event().wait(0.01)
        assert run.cancel()
        assert_nothing_is_left(pool)
    pids = {worker.pid for worker in pool.workers}
    assert pool.train(lambda: os.getpid()).result(300).values
    assert {worker.pid for worker in pool.workers} == pids
