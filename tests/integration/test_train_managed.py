"""The managed lane on real Ray: Ray Train on the workers' GPUs, and nothing left of it (scenarios
6, 40, 41).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypool import (
    CompositeError,
    DataQueue,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    Profile,
    ResourceError,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
    WorkerResources,
    current_task,
    parpool,
    report,
)

pytest.importorskip("torch")

from ray.train import UserCallback

from raypool.train.checkpoints import list_kept
from raypool.train.runs import RunOptions

pytestmark = [
    # Ray warns of itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
    pytest.mark.usefixtures("coordinator"),
]

LONG_S = 300.0


def folders(tmp_path: Path) -> dict[str, RunOptions]:
    return {"run_options": RunOptions(run_dir=tmp_path / "run")}


def is_free(pool: ParallelPool) -> bool:
    """Whether all workers answer."""
    return pool.parfeval_on_all(pow, 2, 3).result(300) == [8] * pool.num_workers


@pytest.fixture(scope="module")
def ray_data(ray_session: None) -> None:
    """Let Ray Data make the actor that it keeps for as long as Ray runs."""
    import ray.data

    assert ray.data.range(4).materialize().num_blocks() > 0


# --- loops ----------------------------------------------------------------------------------------


def keep(text: str) -> Any:
    """Return a checkpoint with a text in it."""
    import ray.train

    folder = tempfile.mkdtemp()
    Path(folder, "text").write_text(text)
    return ray.train.Checkpoint.from_directory(folder)


def kept_text() -> str | None:
    """Return the text in the checkpoint to go on from."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else Path(checkpoint.path, "text").read_text()


def who(config: Any = None) -> dict[str, Any]:
    import ray.train

    task = current_task()
    return {
        "rank": ray.train.get_context().get_world_rank(),
        "sees": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "gpu": task.gpu,
        "attempt": task.attempt,
    }


def learn(config: Any = None) -> dict[str, Any]:
    """Train a little model; the default of its argument is never used."""
    import ray.train
    import torch

    before = len(ray.train.get_all_reported_checkpoints())
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # in one piece: the ranks share a diary as they would a terminal
    print(f"rank {rank} begins\n", end="")
    for step in range(config["num_steps"]):
        optimizer.zero_grad()
        loss = model(torch.full((4, 2), rank + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        report(own=rank)
        checkpoint = keep(f"step {step}") if rank == 0 and step % 2 else None
        ray.train.report({"loss": loss.item(), "step": step}, checkpoint=checkpoint)
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    kept = [
        Path(each.checkpoint.path).is_dir() for each in ray.train.get_all_reported_checkpoints()
    ]
    return {
        **who(),
        "total": total,
        "weight": model.module.weight.detach(),
        "before": before,
        "kept": kept,
    }


def steps_forever(config: dict[str, Any]) -> Any:
    """Go on until somebody asks for an end; say where each rank has begun."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    first = int(kept_text() or 0)
    if "marks" in config:
        config["marks"].add(f"pid {os.getpid()} rank {rank}")
        config["marks"].add("begun")
    step = first
    while not current_task().should_stop and step < config.get("num_steps", 10**9):
        step += 1
        ray.train.report(
            {"step": step},
            checkpoint=(
                keep(str(step)) if step % config.get("every", 10) == 0 and rank == 0 else None
            ),
        )
        time.sleep(0.02)
    return {**who(), "first": first, "last": step}


# --- what it gives --------------------------------------------------------------------------------


def test_ray_train_has_the_gpus_of_the_workers(pool: ParallelPool, tmp_path: Path) -> None:
    """Scenarios 6 and 41: those that were named; the others go on; what is bound to them waits;
    then all is as before.
    """
    gpus, pids = [worker.gpu for worker in pool.workers], [worker.pid for worker in pool.workers]
    held = pool.spmd(lambda context: context.rank)
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=2, best_metric="loss")
    run = pool.options(name="learn").train(
        learn, {"num_steps": 6}, workers=[2, 0], lane="managed", run_options=kept
    )
    waiting = pool.options(worker=0).parfeval(pow, 2, 4)
    while not run.running():
        assert pool.options(worker=1).parfeval(pow, 2, 3).result(300) == 8
    result = run.result(LONG_S)
    assert waiting.result(300) == 16
    assert [(value["rank"], value["gpu"]) for value in result.values] == [(0, 0), (1, 2)]
    assert [(value["sees"], value["local_rank"]) for value in result.values] == [
        ("0,2", "0"),
        ("0,2", "1"),
    ]
    assert {value["order"] for value in result.values} == {"PCI_BUS_ID"}
    assert [value["total"].item() for value in result.values] == [3.0, 3.0]
    assert result.values[0]["weight"].equal(result.values[1]["weight"])
    assert result.metrics["step"] == 5
    frame = result.metrics_frame
    assert frame["step"].dropna().tolist() == list(range(6))
    assert frame["own"].dropna().tolist() == [0] * 6 + [1] * 6
    assert sorted(run.diary.splitlines()) == ["rank 0 begins", "rank 1 begins"]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "text").read_text() == "step 5"
    assert [each.metrics["step"] for each in list_kept(tmp_path / "run")] == [3, 5]
    assert result.best_checkpoint is not None
    assert result.path == tmp_path / "run"
    assert is_free(pool)
    assert [worker.gpu for worker in pool.workers] == gpus
    assert [worker.pid == pid for worker, pid in zip(pool.workers, pids, strict=True)] == [
        False,
        True,
        False,
    ]
    assert held[1] == 1
    with pytest.raises(CompositeError, match="rank 0"):
        held[0]


def test_a_misspelled_best_metric_is_refused_before_ray_train_deletes_checkpoints(
    pool: ParallelPool, tmp_path: Path
) -> None:
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=1, best_metric="los")
    run = pool.train(learn, {"num_steps": 2}, workers=1, lane="managed", run_options=kept)
    with pytest.raises(TrainingError, match="was reported without best_metric='los'"):
        run.result(LONG_S)


def test_a_run_goes_on_in_either_lane_and_knows_what_was_kept(
    pool: ParallelPool, tmp_path: Path
) -> None:
    """`get_all_reported_checkpoints` has those of earlier runs, of both lanes, and none that was
    deleted.
    """
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=2)
    pool.train(learn, {"num_steps": 6}, workers=1, run_options=kept).result(LONG_S)
    for num_steps, lane in ((6, "managed"), (6, "managed"), (2, "warm")):
        (value,) = (
            pool.train(learn, {"num_steps": num_steps}, workers=1, lane=lane, run_options=kept)
            .result(LONG_S)
            .values
        )
        assert (value["before"], value["kept"]) == (2, [True, True])
    assert len([path for path in (tmp_path / "run").iterdir() if path.is_dir()]) == 2


OWN_MODULE = """
import sys, tempfile
import numpy as np
import ray.train
from raypool import current_task

async def learn(config):
    errors = []
    for use in (lambda: current_task().store, lambda: config["queue"].put(1)):
        try:
            use()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    for step in range(3):
        folder = ray.train.Checkpoint.from_directory(tempfile.mkdtemp())
        metrics = {"loss": step, "weights": np.eye(2)}
        ray.train.report(metrics, checkpoint=folder, checkpoint_dir_name="last")
    return sys.argv, errors
"""


def test_a_loop_in_a_module_of_the_users_that_keeps_one_name(
    pool: ParallelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the folders that the script has added, and told what is not there; it may be a
    coroutine.
    """
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py", "--fast"])
    own_module = importlib.import_module("own_module")
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=1)
    config = {"queue": DataQueue()}
    run = pool.train(own_module.learn, config, workers=1, lane="managed", run_options=kept)
    result = run.result(LONG_S)
    ((argv, errors),) = result.values
    assert argv == ["script.py", "--fast"]
    for error, what in zip(errors, ("The store", "DataQueue.put"), strict=True):
        assert error.startswith(f'InvalidValueError: {what} is not available with lane="managed"')
    assert [path.name for path in (tmp_path / "run").glob("last*.json")] == ["last-000003.json"]
    ((_, metrics),) = result.best_checkpoints
    assert metrics == {"loss": 2, "weights": [[1, 0], [0, 1]]}
    assert result.metrics["weights"].shape == (2, 2), "reports are as they were"


class Notes(UserCallback):  # type: ignore[misc]
    """Notes in a file what was reported."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        with self.file.open("a") as stream:
            stream.write(f"{len(metrics)} {metrics[0]['step']}\n")


def rate(checkpoint: Any) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        return {"score": len(Path(folder, "text").read_text())}


def validated(config: dict[str, Any]) -> Any:
    import ray.train
    import torch.distributed as dist

    for step in range(2):
        checkpoint = (
            keep("x" * (7 - step)) if ray.train.get_context().get_world_rank() == 0 else None
        )
        ray.train.report({"step": step}, checkpoint=checkpoint, validation=checkpoint is not None)
    num_rows = sum(1 for _ in ray.train.get_dataset_shard("train").iter_rows())
    return (
        num_rows,
        [each.metrics for each in ray.train.get_all_reported_checkpoints()],
        dist.get_backend(),
    )


def test_all_that_a_trainer_takes_passes_through(
    pool: ParallelPool, tmp_path: Path, ray_data: None
) -> None:
    """Ray Data, callbacks, a file system, validation, and which checkpoints are kept: as with Ray
    Train itself.
    """
    import ray.data
    from pyarrow.fs import LocalFileSystem
    from ray.train import CheckpointConfig, DataConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.v2.api.validation_config import ValidationConfig

    result = pool.train(
        validated,
        {},
        workers=2,
        lane="managed",
        datasets={"train": ray.data.range(6)},
        dataset_config=DataConfig(datasets_to_split=[]),
        torch_config=TorchConfig(backend="gloo"),
        validation_config=ValidationConfig(fn=rate),
        scaling_config=ScalingConfig(placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="mine",
            storage_path=str(tmp_path / "storage"),
            storage_filesystem=LocalFileSystem(),
            callbacks=[Notes(tmp_path / "notes")],
            checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score"),
        ),
    ).result(LONG_S)
    assert result.values == [(6, [{"step": 1, "score": 6}, {"step": 0, "score": 7}], "gloo")] * 2, (
        "the best, and the last"
    )
    assert (tmp_path / "notes").read_text() == "2 0\n2 1\n"
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).parent == tmp_path / "storage" / "mine"
    assert is_free(pool)


def test_an_exception_of_the_loops_ends_it(pool: ParallelPool, tmp_path: Path) -> None:
    """It is raised once, though there are retries left, and what was kept before stays."""

    def fail(config: dict[str, Any]) -> None:
        import ray.train
        import torch

        rank = ray.train.get_context().get_world_rank()
        ray.train.report({"loss": 1.0}, checkpoint=keep("good"))
        if rank == 1:
            print("about to fail")
            raise KeyError("bad sample")
        torch.distributed.barrier()

    run = pool.options(retries=2).train(fail, {}, workers=2, lane="managed", **folders(tmp_path))
    with pytest.raises(
        TrainingError, match=r"Rank 1 of fail \([^)]*GPU 1\) failed: KeyError: 'bad sample'"
    ) as caught:
        run.result(LONG_S)
    error = caught.value
    assert (error.first_rank, set(error.failures)) == (1, {1})
    assert isinstance(error.__cause__, KeyError)
    assert "about to fail" in "".join(error.__cause__.__notes__)
    assert Path(error.result.checkpoint.path, "text").read_text() == "good"
    assert error.result.metrics == {"loss": 1.0}
    assert run.attempts == 1
    assert is_free(pool)


def test_cancelled_before_there_are_workers(
    pool: ParallelPool, gate: Any, eventually: Callable[..., bool]
) -> None:
    """It costs nothing, and the thread that conducts it ends."""
    busy = pool.parfeval_on_all(gate.wait)
    run = pool.train(steps_forever, {}, lane="managed")
    assert run.state == "queued"
    assert run.cancel()
    assert run.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        run.result(10)
    gate.open()
    busy.result(300)
    assert is_free(pool)


def test_what_cannot_work_is_refused_at_the_call(pool: ParallelPool, tmp_path: Path) -> None:
    """Not by a trainer in a process far away, after seconds."""
    import ray.data
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig

    def train(**wishes: Any) -> None:
        pool.train(learn, {}, lane="managed", **wishes)

    for words, wishes in {
        "trainer=": {"trainer": int},
        "TorchTrainer does not take batch_size. It takes torch_config, ": {"batch_size": 3},
        "datasets= is a Dataset. Pass a dict": {"datasets": ray.data.range(3)},
        "datasets= is a dict with a list in it. Pass a dict": {"datasets": {"train": [1, 2]}},
        "is a dict. Pass a ray.train.RunConfig": {"run_config": {"name": "mine"}},
    }.items():
        with pytest.raises(InvalidTypeError, match=words):
            train(**wishes)
    mine, kept = (
        RunConfig(storage_path="/mine"),
        RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=1)),
    )
    for words, wishes in {
        "workers=": {"scaling_config": ScalingConfig(num_workers=2)},
        "Both run_dir=": {"run_config": mine, "run_options": RunOptions(run_dir=tmp_path)},
        "Both RunOptions": {"run_config": kept, "run_options": RunOptions(keep_checkpoints=1)},
    }.items():
        with pytest.raises(InvalidValueError, match=words):
            train(**wishes)


def test_ray_data_without_a_core_is_refused_with_the_numbers(ray_session: None) -> None:
    """It would wait for one in silence, for ever."""
    import ray
    import ray.data

    num_cores = int(ray.cluster_resources()["CPU"])
    with (
        parpool(1, resources=WorkerResources(gpus=0, cpus=num_cores), quiet=True) as other,
        pytest.raises(
            ResourceError,
            match=rf"CPU: requested {num_cores + 1}, available {num_cores}: .*Ray Data",
        ) as caught,
    ):
        other.train(learn, {}, lane="managed", datasets={"train": ray.data.range(3)})
    assert (caught.value.requested, caught.value.available) == (num_cores + 1, num_cores)
    assert any("raypool in process" in holder for holder in caught.value.holders)


# --- what can happen to it ------------------------------------------------------------------------


def test_a_lost_rank_is_started_again(
    pool: ParallelPool, tmp_path: Path, marks: Any, eventually: Callable[..., bool]
) -> None:
    """Scenario 40: from the last checkpoint, on the same GPUs."""
    config = {"marks": marks, "every": 5}
    run = pool.options(retries=1).train(
        steps_forever, config, workers=[1, 2], lane="managed", **folders(tmp_path)
    )
    assert eventually(lambda: len(list_kept(tmp_path / "run")) >= 2, LONG_S)
    pid = next(int(mark.split()[1]) for mark in marks.all() if mark.endswith("rank 1"))
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: marks.count("begun") == 4, LONG_S)
    frame = run.metrics
    assert set(frame["attempt"]) <= {1, 2}
    run.request_stop()
    result = run.result(LONG_S)
    assert [(value["gpu"], value["attempt"]) for value in result.values] == [(1, 2), (2, 2)]
    first = result.values[0]["first"]
    assert first >= 10
    assert {value["first"] for value in result.values} == {first}
    assert len({value["last"] for value in result.values}) == 1, (
        "all have stopped at the same report"
    )
    assert is_free(pool)


@pytest.mark.long
def test_lost_too_often(
    pool: ParallelPool, tmp_path: Path, marks: Any, eventually: Callable[..., bool]
) -> None:
    run = pool.options(retries=0).train(
        steps_forever, {"marks": marks}, workers=2, lane="managed", **folders(tmp_path)
    )
    assert eventually(lambda: marks.count("begun") == 2, LONG_S)
    pid = next(int(mark.split()[1]) for mark in marks.all() if mark.endswith("rank 1"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TrainingError) as caught:
        run.result(LONG_S)
    assert set(caught.value.failures) == {1}
    assert isinstance(caught.value.failures[1], WorkerLostError)
    assert is_free(pool)


@pytest.mark.parametrize(
    "after_s",
    [None, *(pytest.param(after_s, marks=pytest.mark.long) for after_s in (0.0, 1.0, 4.0, 8.0))],
)
def test_cancelled_at_any_moment(
    pool: ParallelPool,
    marks: Any,
    after_s: float | None,
    eventually: Callable[..., bool],
    tmp_path: Path,
) -> None:
    """Nothing is left: no actor, no placement group, no process of a rank's (the fixture looks for
    the first two).
    """
    run = pool.train(
        steps_forever, {"marks": marks}, workers=2, lane="managed", **folders(tmp_path)
    )
    assert eventually(run.running)
    if after_s is None:
        assert eventually(lambda: marks.count("begun") == 2, LONG_S)
    else:
        eventually(lambda: False, after_s)
    assert run.cancel()
    assert run.cancel()
    assert is_free(pool)
    pids = [int(mark.split()[1]) for mark in marks.all() if mark.startswith("pid")]
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
def test_its_time_is_up(pool: ParallelPool, marks: Any, tmp_path: Path) -> None:
    run = pool.options(timeout_s=40).train(
        steps_forever, {"marks": marks, "every": 3}, workers=2, lane="managed", **folders(tmp_path)
    )
    with pytest.raises(TaskTimeoutError, match="timeout_s=40") as caught:
        run.result(LONG_S)
    assert set(caught.value.failures) == {0, 1}
    assert is_free(pool)


def test_ray_trains_controller_is_killed(
    pool: ParallelPool, marks: Any, tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    """Nothing stays behind that only the controller knew of."""
    before = controllers()  # that of the training before may not have gone yet
    run = pool.options(retries=0).train(
        steps_forever, {"marks": marks}, workers=1, lane="managed", **folders(tmp_path)
    )
    assert eventually(lambda: marks.count("begun") == 1, LONG_S)
    (controller,) = controllers() - before
    controller.kill()
    with pytest.raises(TrainingError) as caught:
        run.result(LONG_S)
    assert isinstance(caught.value.failures[0], WorkerLostError)
    assert is_free(pool)


def controllers() -> set[psutil.Process]:
    """Return those of Ray Train's, of this session's Ray only."""
    ours = psutil.Process().children(recursive=True)
    return {process for process in ours if _title(process, "TrainController")}


def _title(process: psutil.Process, text: str) -> bool:
    try:
        return text in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.long
def test_a_rank_that_reports_less_often(pool: ParallelPool) -> None:
    """Ray Train would wait for it for ever."""

    def leave(config: dict[str, Any]) -> None:
        import ray.train

        if ray.train.get_context().get_world_rank() == 0:
            ray.train.report({"loss": 1.0})

    with pytest.raises(TrainingError, match="rank 1 has returned"):
        pool.train(leave, {}, workers=2, lane="managed").result(LONG_S)
    assert is_free(pool)


# --- several, and others --------------------------------------------------------------------------


@pytest.mark.long
def test_two_at_once_on_two_parts(pool: ParallelPool, tmp_path: Path) -> None:
    """Each on its own GPUs; the second is begun in one lane and goes on in the other."""
    first, second = pool.partition(workers=[0, 1])
    kept = RunOptions(run_dir=tmp_path / "b")
    warm = second.train(steps_forever, {"num_steps": 20}, run_options=kept).result(LONG_S)
    assert warm.values[0]["first"] == 0
    runs = [
        first.train(
            steps_forever,
            {"num_steps": 20},
            lane="managed",
            run_options=RunOptions(run_dir=tmp_path / "a"),
        ),
        second.train(steps_forever, {"num_steps": 40}, lane="managed", run_options=kept),
    ]
    a, b = (run.result(LONG_S) for run in runs)
    assert sorted(value["gpu"] for value in [*a.values, *b.values]) == [0, 1, 2]
    assert [value["first"] for value in b.values] == [20]
    assert [each.metrics["step"] for each in list_kept(tmp_path / "b")] == [10, 20, 30, 40]
    again = second.train(steps_forever, {"num_steps": 50}, run_options=kept).result(LONG_S)
    assert again.values[0]["first"] == 40
    assert is_free(pool)


@pytest.mark.long
def test_other_trainers_of_rays(pool: ParallelPool) -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    result = pool.train(who, workers=[2, 1], lane="managed", trainer=DataParallelTrainer).result(
        LONG_S
    )
    assert [(value["rank"], value["gpu"]) for value in result.values] == [(0, 1), (1, 2)]


def test_somebody_else_takes_a_gpu_meanwhile(
    free_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pool waits for it as at its start, then goes on without, and says who has it."""
    from ray.util import placement_group, remove_placement_group

    from raypool.backends.ray.backend import RayBackend

    taken, take_back = [], RayBackend.take_back

    def come_before(self: Any, workers: Any) -> Any:
        taken.append(placement_group([{"GPU": 1}], name="somebody else"))
        assert taken[0].wait(300)
        # so long it waits for the GPU; its workers have all the time to come up
        placement = self._placement
        placement._profile = dataclasses.replace(placement._profile, start_timeout_s=10.0)
        return take_back(self, workers)

    monkeypatch.setattr(RayBackend, "take_back", come_before)
    with parpool(3, profile=Profile(start_timeout_s=300.0), quiet=True) as other:
        try:
            result = other.train(who, {}, workers=[1], lane="managed").result(LONG_S)
            assert [value["gpu"] for value in result.values] == [1]
            assert eventually(
                lambda: [worker.gpu for worker in other.workers] == [0, 2] and not other.busy
            )
            assert is_free(other)
        finally:
            remove_placement_group(taken[0])
    (text,) = [
        record.getMessage() for record in caplog.records if "was removed" in record.getMessage()
    ]
    assert "GPU 1 was lent to a training, and another program claimed it before the" in text
    assert "Held by: " in text
    assert "somebody else (1 GPU)" in text
    assert "The pool now has 2 workers." in text


@pytest.mark.long
def test_the_pool_ends_meanwhile(
    ray_session: None, marks: Any, eventually: Callable[..., bool], pool: ParallelPool
) -> None:
    """Ctrl-C cancels all that runs; nothing is left (the fixture looks)."""
    runs = []

    def interrupted() -> None:
        with parpool(1, resources=WorkerResources(gpus=0, cpus=0.5), quiet=True) as other:
            runs.append(other.train(steps_forever, {"marks": marks}, lane="managed"))
            assert eventually(lambda: marks.count("begun") == 1, LONG_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert eventually(runs[0].cancelled)
