"""What a training does on every kind of pool: Ray Train's functions in the loop, checkpoints, stop,
what is left afterwards.

On Ray three workers are the ranks; "threads" and "inline" have one rank, in this process, and need
no Ray that runs.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import (
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    RunOptions,
    TrainingError,
    current_task,
    report,
)

pytest.importorskip("torch")

pytestmark = [pytest.mark.semantics]


@pytest.fixture
def size(make_pool: Any) -> int:
    return 3 if make_pool.is_in_processes else 1


@pytest.fixture
def train(pool: ParallelPool, tmp_path: Path) -> Callable[..., Any]:
    """Train to the end, in a folder of this test's; return the result."""

    def run(loop: Callable[..., Any], config: Any = None, **options: Any) -> Any:
        options.setdefault("run_dir", tmp_path / "run")
        return pool.train(loop, config, run_options=RunOptions(**options)).result(300)

    return run


def culprit(
    train: Callable[..., Any], loop: Callable[..., Any], config: Any = None
) -> BaseException:
    """Return why a training fails."""
    with pytest.raises(TrainingError) as caught:
        train(loop, config)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def save(folder: Path | str, name: str = "state.json", **state: Any) -> None:
    (Path(folder) / name).write_text(json.dumps(state))


def epochs(config: dict[str, Any]) -> list[int]:
    """Train as the loops in Ray's documentation do; return the epochs that were made."""
    import tempfile

    import ray.train
    from ray.train import Checkpoint

    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            start = json.loads((Path(folder) / "state.json").read_text())["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        metrics = {"epoch": epoch, "loss": 1 / (epoch + 1)}
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                save(folder, epoch=epoch)
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
            else:
                ray.train.report(metrics, checkpoint=None)
    return list(range(start, config["epochs"]))


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_what_a_loop_finds_out(train: Callable[..., Any], size: int) -> None:
    def loop(config: dict[str, Any]) -> Any:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        return (
            config,
            context.get_world_size(),
            context.get_world_rank(),
            context.get_local_rank(),
            context.get_local_world_size(),
            context.get_node_rank(),
            context.get_experiment_name(),
            ray.train.get_checkpoint(),
            ray.train.get_all_reported_checkpoints(),
            ray.train.get_preemption_info(),
            str(ray.train.torch.get_device()),
        )

    result = train(loop, {"a": 1})
    assert result.values == [
        ({"a": 1}, size, rank, rank, size, 0, "run", None, [], None, "cpu") for rank in range(size)
    ]
    assert (result.metrics, result.checkpoint, result.path) == ({}, None, None)


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loop_without_an_argument(train: Callable[..., Any], size: int) -> None:
    assert train(lambda: "done", {"ignored": 1}).values == ["done"] * size
    assert train(lambda config: config).values == [{}] * size
    assert train(lambda a=5: a).values == [5] * size
    assert train(lambda a=5: a, {"used": 1}).values == [{"used": 1}] * size


@pytest.mark.everywhere
def test_a_loop_that_is_a_coroutine(train: Callable[..., Any], size: int) -> None:
    async def loop(config: dict[str, int]) -> int:
        import asyncio

        import ray.train

        await asyncio.sleep(0)
        ray.train.report(config)
        return config["a"] + ray.train.get_context().get_world_size()

    result = train(loop, {"a": 5})
    assert (result.values, result.metrics) == ([5 + size] * size, {"a": 5})


@pytest.mark.everywhere
def test_barrier_and_broadcast(train: Callable[..., Any], size: int) -> None:
    def loop() -> Any:
        import ray.train
        from ray.train.collective import barrier, broadcast_from_rank_zero

        barrier()
        rank = ray.train.get_context().get_world_rank()
        return broadcast_from_rank_zero({"from": rank}), broadcast_from_rank_zero(
            "0" if rank == 0 else None
        )

    assert train(loop).values == [({"from": 0}, "0")] * size


@pytest.mark.everywhere
def test_metrics(train: Callable[..., Any], size: int) -> None:
    def loop() -> None:
        import ray.train

        for step in range(3):
            ray.train.report(
                {
                    "loss": np.float32(0.5),
                    "step": step,
                    "rank_there": ray.train.get_context().get_world_rank(),
                }
            )
            report(own=step)

    result = train(loop)
    assert result.metrics == {"loss": 0.5, "step": 2, "rank_there": 0}
    assert type(result.metrics["loss"]) is float
    frame = result.metrics_frame
    together = frame[frame["step"].notna()]
    assert together["step"].tolist() == [0, 1, 2]
    assert together["rank"].tolist() == [0, 0, 0]
    assert together["attempt"].tolist() == [1, 1, 1]
    assert frame.groupby("rank")["own"].count().to_dict() == dict.fromkeys(range(size), 3)


@pytest.mark.semantics
@pytest.mark.processes
def test_metrics_of_any_kind(train: Callable[..., Any]) -> None:
    """They are what they were when they were reported."""

    def loop() -> None:
        import ray.train

        matrix, some = np.zeros(3), [1, None, {"a": (2,)}]
        ray.train.report(
            {"none": None, "matrix": matrix, "some": some, "text": "x" * 1000, "yes": True}
        )
        matrix[:] = 1
        some.clear()

    metrics = dict(train(loop).metrics)
    assert metrics.pop("matrix").tolist() == [0, 0, 0]
    assert metrics == {
        "none": None,
        "some": [1, None, {"a": (2,)}],
        "text": "x" * 1000,
        "yes": True,
    }


def test_metrics_that_cannot_be_reported(train: Callable[..., Any]) -> None:
    import torch

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: {"loss": torch.tensor(1.0)}, r"report loss\.item\(\)"),
        (lambda: {"loss": [torch.tensor(1.0)]}, r"report\(loss=...\) got a list"),
        (lambda: {"loss": (x for x in [])}, "cannot be pickled"),
        (lambda: 0.5, "got a float. Metrics are a dict"),
        (lambda: None, "got a NoneType. Metrics are a dict"),
    ]
    for make, text in cases:

        def loop(make: Callable[[], Any] = make) -> None:
            import ray.train

            ray.train.report(make())

        error = culprit(train, loop)
        assert type(error) is InvalidTypeError
        assert re.search(text, str(error))


def test_what_needs_the_managed_lane(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loop itself says is refused before anything starts, the rest where it is called."""

    def loop(config: dict[str, Any]) -> None:
        import ray.train

        if config["what"] == "get_dataset_shard":
            getattr(ray.train, config["what"])("train")
        else:
            ray.train.report(
                {}, checkpoint=ray.train.Checkpoint.from_directory(str(tmp_path)), validation=True
            )

    for what in ("get_dataset_shard", "validation"):
        error = culprit(train, loop, {"what": what})
        assert type(error) is InvalidValueError
        assert 'lane="managed"' in str(error)
        assert what in str(error)

    class Reader:
        def __call__(self) -> Any:
            import ray.train

            return [ray.train.get_dataset_shard(name) for name in ("train", "test")]

    with pytest.raises(
        InvalidValueError, match=r'uses ray.train.get_dataset_shard.*lane="managed"'
    ):
        train(functools.partial(Reader()))
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(InvalidValueError, match="RAY_TRAIN_V2_ENABLED=0"):
        train(lambda: None)


@pytest.mark.semantics
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This API is deprecated")  # TorchCheckpoint
def test_each_function_that_a_loop_may_call(train: Callable[..., Any], tmp_path: Path) -> None:
    """Those of `ray.train` itself have tests of their own; those that Ray has given up say what Ray
    says.
    """

    def loop() -> Any:
        import inspect

        import ray.train
        import ray.train.collective
        import ray.train.torch
        import torch

        context = ray.train.get_context()
        model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
        samples = torch.utils.data.TensorDataset(torch.zeros(12, 1))
        loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(samples))
        checkpoint = ray.train.torch.TorchCheckpoint.from_state_dict({"a": 1})
        ray.train.report({}, checkpoint if context.get_world_rank() == 0 else None)
        ended = [
            context.get_metadata,
            context.get_trial_name,
            context.get_trial_id,
            context.get_trial_resources,
        ]
        ended += [
            context.get_trial_dir,
            ray.train.torch.accelerate,
            lambda: ray.train.torch.prepare_optimizer(None),
        ]
        for function in [*ended, lambda: ray.train.torch.backward(None)]:
            with pytest.raises(DeprecationWarning):
                function()
        functions = [
            {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
            for module in (ray.train, ray.train.collective, ray.train.torch)
        ]
        methods = {name for name in dir(context) if name.startswith("get_")}
        return (
            functions,
            methods,
            str(ray.train.torch.get_devices()[0]),
            len(loader),
            type(model).__name__,
        )

    for functions, methods, device, batches, kind in train(loop).values:
        assert functions == [
            {
                f"get_{name}"
                for name in (
                    "all_reported_checkpoints",
                    "checkpoint",
                    "context",
                    "dataset_shard",
                    "preemption_info",
                )
            }
            | {"report"},
            {"barrier", "broadcast_from_rank_zero"},
            {"accelerate", "backward", "enable_reproducibility", "get_device", "get_devices"}
            | {f"prepare_{name}" for name in ("model", "optimizer", "data_loader")},
        ]
        assert methods == {
            f"get_{name}"
            for name in (
                *(
                    "experiment_name",
                    "local_rank",
                    "local_world_size",
                    "metadata",
                    "node_rank",
                    "storage",
                ),
                *(
                    "trial_dir",
                    "trial_id",
                    "trial_name",
                    "trial_resources",
                    "world_rank",
                    "world_size",
                ),
            )
        }
        assert (device, batches, kind) in (
            ("cpu", 12, "Linear"),
            ("cpu", 4, "DistributedDataParallel"),
        )


@pytest.mark.semantics
@pytest.mark.processes
def test_names_that_differ_or_are_no_texts(train: Callable[..., Any]) -> None:
    """What rank 0 reports is kept, whatever the others do; numbers are names too, as texts in the
    table.
    """

    def loop() -> None:
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        for step in range(2):
            ray.train.report(
                {0: step, "loss": 0.5, ("a", 1): 2}
                if rank == 0
                else {f"from {rank}": 1.0, "loss": 9}
            )
        ray.train.report({0: 7.0} if rank == 0 else {})

    result = train(loop)
    assert result.metrics == {0: 7.0}
    assert result.metrics_frame["0"].tolist() == [0, 1, 7]
    assert result.metrics_frame["loss"].tolist()[:2] == [0.5, 0.5]
    assert not any("from" in name for name in result.metrics_frame.columns)


@pytest.mark.everywhere
def test_an_exception_is_the_users_own(train: Callable[..., Any], pool: ParallelPool) -> None:
    def loop() -> None:
        import ray.train

        ray.train.report({"loss": 1})
        raise KeyError("mine")

    with pytest.raises(TrainingError, match="mine") as caught:
        train(loop)
    assert type(caught.value.__cause__) is KeyError
    assert caught.value.result.metrics["loss"] == 1
    assert_nothing_is_left(pool)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_run_goes_on_from_its_last_checkpoint(
    train: Callable[..., Any], size: int, tmp_path: Path
) -> None:
    first = train(epochs, {"epochs": 2})
    assert first.values == [[0, 1]] * size
    assert Path(first.checkpoint.path) == tmp_path / "run" / "checkpoint_000002"
    second = train(epochs, {"epochs": 5})
    assert second.values == [[2, 3, 4]] * size
    assert Path(second.checkpoint.path).name == "checkpoint_000005"
    assert second.metrics == {"epoch": 4, "loss": 0.2}
    other = train(epochs, {"epochs": 4}, run_dir=tmp_path / "other", start_from=first.checkpoint)
    assert other.values == [[2, 3]] * size


@pytest.mark.semantics
@pytest.mark.processes
def test_so_many_checkpoints_are_kept(train: Callable[..., Any], tmp_path: Path) -> None:
    result = train(epochs, {"epochs": 5}, keep_checkpoints=2, best_metric="loss", best_mode="max")
    folders = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert folders == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000005"]
    assert Path(result.best_checkpoint.path).name == "checkpoint_000001"
    listed = [
        (Path(checkpoint.path).name, metrics["epoch"])
        for checkpoint, metrics in result.best_checkpoints
    ]
    assert listed == [("checkpoint_000005", 4), ("checkpoint_000002", 1), ("checkpoint_000001", 0)]


@pytest.mark.semantics
@pytest.mark.processes
def test_a_misspelled_best_metric_deletes_nothing(train: Callable[..., Any], caplog: Any) -> None:
    result = train(epochs, {"epochs": 3}, keep_checkpoints=1, best_metric="los")
    assert len(result.best_checkpoints) == 3
    warnings = [each.getMessage() for each in caplog.records if "best_metric" in each.getMessage()]
    assert warnings == [
        "checkpoint_000001 was reported without best_metric='los'. Did you mean loss? No checkpoint"
        " is deleted until one has it."
    ]


@pytest.mark.everywhere
def test_what_a_loop_sees_of_its_checkpoints(train: Callable[..., Any], size: int) -> None:
    """Each rank puts in its part, and all see the whole."""

    def loop() -> Any:
        import tempfile

        import ray.train

        rank, seen = ray.train.get_context().get_world_rank(), []
        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                save(folder, f"part-{rank}.json", step=step)
                ray.train.report(
                    {"step": step},
                    ray.train.Checkpoint.from_directory(folder),
                    checkpoint_dir_name=f"step-{step}",
                )
            with ray.train.get_checkpoint().as_directory() as kept:
                seen.append((Path(kept).name, sorted(path.name for path in Path(kept).iterdir())))
        there = ray.train.get_all_reported_checkpoints()
        return seen, [
            (Path(each.checkpoint.path).name, each.metrics, each.status.value) for each in there
        ]

    parts = [f"part-{rank}.json" for rank in range(size)]
    expected = (
        [("step-0", parts), ("step-1", parts)],
        [("step-0", {"step": 0}, "COMMITTED"), ("step-1", {"step": 1}, "COMMITTED")],
    )
    assert train(loop).values == [expected] * size


@pytest.mark.semantics
@pytest.mark.processes
def test_upload_modes(train: Callable[..., Any], size: int, tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        import shutil
        import tempfile

        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        rank = ray.train.get_context().get_world_rank()
        own = Path(tempfile.mkdtemp())
        save(own, f"{rank}.json")
        ray.train.report(
            {}, Checkpoint.from_directory(own), checkpoint_upload_mode=CheckpointUploadMode.ASYNC
        )
        is_gone, first = not own.exists(), ray.train.get_checkpoint().path
        placed = Path(config["folder"]) / "placed"
        placed.mkdir(exist_ok=True)
        ray.train.report(
            {},
            Checkpoint.from_directory(placed),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )
        second = ray.train.get_checkpoint().path

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            target = Path(config["folder"]) / f"uploaded-{name}"
            shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
            return Checkpoint.from_directory(target)

        own.mkdir()
        save(own, f"{rank}.json")
        ray.train.report(
            {},
            Checkpoint.from_directory(own),
            checkpoint_dir_name="mine",
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=True,
        )
        return (
            is_gone,
            first,
            second,
            own.exists(),
            sorted(p.name for p in Path(ray.train.get_checkpoint().path).iterdir()),
        )

    files = [f"{rank}.json" for rank in range(size)]
    result = train(loop, {"folder": str(tmp_path)})
    first, placed, last = (
        tmp_path / "run" / "checkpoint_000001",
        tmp_path / "placed",
        tmp_path / "uploaded-mine",
    )
    assert result.values == [(True, str(first), str(placed), False, files)] * size
    assert Path(result.checkpoint.path) == last
    assert sorted(path.name for path in first.iterdir()) == files


@pytest.mark.everywhere
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_loop_writes_into_the_folder_of_the_run_itself(
    train: Callable[..., Any], size: int, tmp_path: Path
) -> None:
    """By Ray's storage, as its documentation does: placed there, brought there, and by torch's
    distributed checkpoints.
    """

    def loop() -> Any:
        import ray.train
        import torch
        import torch.distributed.checkpoint as dcp
        from ray.train import Checkpoint, CheckpointUploadMode

        context = ray.train.get_context()
        storage, rank, is_alone = (
            context.get_storage(),
            context.get_world_rank(),
            context.get_world_size() == 1,
        )
        assert Path(storage.storage_fs_path, context.get_experiment_name()) == Path(
            storage.experiment_fs_path
        )

        def placed(name: str) -> Checkpoint:
            return Checkpoint(
                storage.build_checkpoint_path_from_name(name), storage.storage_filesystem
            )

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            return storage.persist_current_checkpoint(checkpoint, name)

        for step in range(3):
            here = placed(f"epoch_{step}")
            dcp.save({"weight": torch.full((2,), step)}, checkpoint_id=here.path, no_dist=is_alone)
            ray.train.report(
                {"step": step}, here, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
            )
        state = {"weight": torch.zeros(2)}
        dcp.load(state, checkpoint_id=ray.train.get_checkpoint().path, no_dist=is_alone)
        own = Path(storage.experiment_fs_path) / "artifacts" / str(rank)
        own.mkdir(parents=True)
        save(own, f"{rank}.json")
        ray.train.report({"step": 3}, Checkpoint.from_directory(own), checkpoint_upload_fn=upload)
        return state["weight"].tolist(), sorted(
            path.name for path in Path(ray.train.get_checkpoint().path).iterdir()
        )

    result = train(loop, keep_checkpoints=2)
    assert result.values == [([2, 2], [f"{rank}.json" for rank in range(size)])] * size
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 3]
    left = {path.name for path in (tmp_path / "run").iterdir()} - {".training.lock"}
    assert left == {
        "artifacts",
        "epoch_2",
        "checkpoint_000003.json",
        "checkpoint_000004",
        "checkpoint_000004.json",
        "training_reports.jsonl",
    }


def test_one_folder_that_is_written_again_and_again(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    """It stays as long as a checkpoint is in it."""

    def loop() -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        storage = ray.train.get_context().get_storage()
        latest = Path(storage.build_checkpoint_path_from_name("latest"))
        latest.mkdir()
        for step in range(3):
            save(latest, step=step)
            ray.train.report(
                {"loss": math.nan},
                Checkpoint.from_directory(latest),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )

    result = train(loop, keep_checkpoints=1)
    assert [Path(checkpoint.path) for checkpoint, _ in result.best_checkpoints] == [
        tmp_path / "run" / "latest"
    ]
    assert json.loads((tmp_path / "run" / "latest" / "state.json").read_text()) == {"step": 2}


def test_a_checkpoint_in_remote_storage_is_brought_here(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    remote = tmp_path / "bucket" / "model"
    remote.mkdir(parents=True)
    save(remote, a=1)

    def loop(config: dict[str, Any]) -> None:
        import pyarrow.fs
        import ray.train

        storage = pyarrow.fs.SubTreeFileSystem(config["bucket"], pyarrow.fs.LocalFileSystem())
        ray.train.report({}, ray.train.Checkpoint("model", filesystem=storage))

    result = train(loop, {"bucket": str(remote.parent)})
    assert [path.name for path in Path(result.checkpoint.path).iterdir()] == ["state.json"]


@pytest.mark.semantics
@pytest.mark.parametrize(
    "what", ["missing", "file", "text", "name", "around", "upload", "offline", "away", "returned"]
)
def test_checkpoints_that_are_none(train: Callable[..., Any], tmp_path: Path, what: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "good").mkdir()
    texts = {
        "missing": (InvalidValueError, "which does not exist"),
        "file": (InvalidValueError, "which is a file"),
        "text": (InvalidTypeError, "got a str"),
        "name": (InvalidValueError, "checkpoint_dir_name='a/b'"),
        "around": (InvalidValueError, "The folder of the run"),
        "upload": (ZeroDivisionError, "division"),
        "offline": (ConnectionError, "no route"),
        "away": (FileNotFoundError, "nowhere"),
        "returned": (InvalidValueError, "has returned a NoneType"),
    }

    def loop(config: dict[str, Any]) -> None:
        import pyarrow.fs
        import ray.train

        def checkpoint(name: str) -> Any:
            return ray.train.Checkpoint.from_directory(Path(config["folder"]) / name)

        def offline(checkpoint: Any, name: str) -> Any:
            raise ConnectionError("no route to the bucket")

        if what in ("missing", "file"):
            ray.train.report({"a": 1}, checkpoint(what))
        elif what == "text":
            ray.train.report({"a": 1}, config["folder"])
        elif what == "name":
            ray.train.report({"a": 1}, checkpoint("good"), checkpoint_dir_name="a/b")
        elif what == "around":
            ray.train.report({"a": 1}, checkpoint(""))
        elif what == "upload":
            ray.train.report(
                {"a": 1}, checkpoint("good"), checkpoint_upload_fn=lambda c, name: 1 / 0
            )
        elif what == "offline":
            ray.train.report({"a": 1}, checkpoint("good"), checkpoint_upload_fn=offline)
        elif what == "away":
            storage = pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())
            ray.train.report({"a": 1}, ray.train.Checkpoint("nowhere", filesystem=storage))
        else:
            ray.train.report(
                {"a": 1}, checkpoint("good"), checkpoint_upload_fn=lambda c, name: None
            )

    kind, text = texts[what]
    with pytest.raises(TrainingError) as caught:
        train(loop, {"folder": str(tmp_path)})
    assert type(caught.value.__cause__) is kind
    assert text in str(caught.value.__cause__)
    left = (
        [path.name for path in (tmp_path / "run").iterdir()] if (tmp_path / "run").exists() else []
    )
    assert left == []


@pytest.mark.semantics
@pytest.mark.processes
def test_a_folder_of_its_own_that_cannot_be_made(
    pool: ParallelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a `run_dir` it is made with the first checkpoint."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("raypool.train.runs.RUNS", str(tmp_path / "file"))
    with pytest.raises(TrainingError) as caught:
        pool.train(epochs, {"epochs": 1}).result(300)
    assert isinstance(caught.value.__cause__, OSError)
    assert f"could not write the folder of the run to {tmp_path / 'file'}/" in str(
        caught.value.__cause__
    )
    assert "Rank 0, on " in str(caught.value.__cause__)


def test_what_a_killed_run_has_left_is_removed(train: Callable[..., Any], tmp_path: Path) -> None:
    left = tmp_path / "run" / ".checkpoint_000001.abc.partial"
    left.mkdir(parents=True)
    train(lambda: None)
    assert not left.exists()


# --- stop -----------------------------------------------------------------------------------------


@pytest.mark.concurrent
def test_ranks_stop_together(
    pool: ParallelPool, size: int, eventually: Callable[..., bool]
) -> None:
    """Whenever the wish comes, all find it after the same report; between two reports nothing
    changes.
    """

    def loop() -> tuple[int, bool]:
        import ray.train

        for step in range(10**9):
            before = current_task().should_stop
            ray.train.report({"step": step})
            if current_task().should_stop:
                return step, before
        return -1, False

    run = pool.train(loop)
    assert eventually(lambda: not run.metrics.empty)
    run.request_stop()
    values = run.result(300).values
    assert values == [(values[0][0], False)] * size
    assert values[0][0] > 0


@pytest.mark.concurrent
def test_a_stop_before_the_first_line(pool: ParallelPool, size: int, make_gate: Any) -> None:
    gate = make_gate()
    blockers = [pool.parfeval(gate.wait) for _ in range(pool.num_workers)]
    run = pool.train(lambda: current_task().should_stop)
    run.request_stop()
    gate.open()
    assert run.result(300).values == [True] * size
    assert all(blocker.result(300) is None for blocker in blockers)


@pytest.mark.concurrent
def test_its_end_cannot_be_waited_for_in_a_callback(
    pool: ParallelPool, call_back: Callable[..., Any]
) -> None:
    begun: list[Any] = []

    def wait(_: Any) -> None:
        begun.append(pool.train(lambda: 1))
        begun[0].result()

    error = call_back(wait)
    assert type(error) is InvalidValueError
    assert "wait for itself" in str(error)
    assert begun[0].exception(300) is None, "it goes on"


# --- what is left ---------------------------------------------------------------------------------


def assert_nothing_is_left(pool: ParallelPool) -> None:
    """Check that Ray Train knows of no training, in a task that comes after."""

    def look(_: int) -> Any:
        import ray.train
        import torch.distributed

        task = current_task()
        try:
            ray.train.get_context()
        except RuntimeError as error:
            return (
                "outside of a Ray Train" in str(error),
                torch.distributed.is_initialized(),
                task.attempt,
                task.should_stop,
            )

    assert list(pool.parfor(look, range(4))) == [(True, False, 1, False)] * 4


@pytest.mark.semantics
@pytest.mark.processes
def test_nothing_is_left_afterwards(train: Callable[..., Any], pool: ParallelPool) -> None:
    train(epochs, {"epochs": 1})
    assert_nothing_is_left(pool)


@pytest.mark.semantics
@pytest.mark.processes
def test_threads_of_the_loop_belong_to_it(train: Callable[..., Any], size: int) -> None:
    def loop() -> int:
        import threading

        import ray.train

        seen: list[int] = []
        thread = threading.Thread(
            target=lambda: seen.append(ray.train.get_context().get_world_size())
        )
        thread.start()
        thread.join()
        return seen[0]

    assert train(loop).values == [size] * size


@pytest.mark.semantics
@pytest.mark.processes
def test_a_training_in_a_training(train: Callable[..., Any], size: int) -> None:
    """Inside a task a pool is a serial one; afterwards the outer training goes on."""

    def loop() -> Any:
        import ray.train

        import raypool

        def inner() -> int:
            ray.train.report({"inner": 1})
            return ray.train.get_context().get_world_size()

        ray.train.report({"outer": 1})
        with raypool.parpool(1, profile="inline", quiet=True) as pool:
            run = pool.train(inner)
        ray.train.report({"outer": 2})
        return (
            run.result().values,
            ray.train.get_context().get_world_size(),
            run.metrics["inner"].tolist(),
        )

    result = train(loop)
    assert result.values == [([1], size, [1])] * size
    assert result.metrics_frame["outer"].tolist() == [1, 2]


@pytest.mark.semantics
@pytest.mark.processes
def test_many_trainings(train: Callable[..., Any], size: int) -> None:
    for _ in range(5):
        assert train(lambda config: config["a"], {"a": 3}).values == [3] * size
    assert math.isfinite(train(epochs, {"epochs": 3}).metrics["loss"])


@pytest.mark.threads
def test_two_trainings_in_one_process(
    pool: ParallelPool, make_gate: Any, eventually: Callable[..., bool]
) -> None:
    """Each thread finds its own training, also while others begin and end."""
    gate = make_gate()

    def loop(config: dict[str, Any]) -> Any:
        import ray.train

        seen = set()
        ray.train.report({"mine": config["name"]})
        gate.wait()
        for _ in range(200):
            ray.train.report({"mine": config["name"]})
            seen.add(ray.train.get_context().get_experiment_name())
        return seen

    halves = [
        pool.options(name=f"half-{number}").train(loop, {"name": number}, workers=[number])
        for number in range(2)
    ]
    assert eventually(lambda: not any(half.metrics.empty for half in halves))
    import ray.train

    with pytest.raises(RuntimeError, match="belongs to no training"):
        ray.train.get_context()
    gate.open()
    for number, half in enumerate(halves):
        result = half.result(300)
        assert result.values == [{half.path.name}]
        assert set(result.metrics_frame["mine"]) == {number}
    assert_nothing_is_left(pool)


@pytest.mark.threads
def test_a_group_of_the_users_own_is_left_alone(pool: ParallelPool) -> None:
    """Ray's local mode would destroy torch's default group at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert pool.train(lambda: "done").result(300).values == ["done"]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.ci
def test_no_ray_is_started(run_python: Callable[..., Any]) -> None:
    run_python(
        """
        from raypool import parpool

        def loop():
            import ray.train
            ray.train.report({"a": 1})

        for profile in ("threads", "inline"):
            with parpool(1, profile=profile, quiet=True) as pool:
                assert pool.train(loop).result(300).metrics == {"a": 1}
        import ray
        assert not ray.is_initialized()
        """,
        PYTHONWARNINGS="default",
    )
