"""The managed lane on real Ray: guests of the pool's workers, on their GPUs, and nothing left of them (scenarios 6, 40, 41)."""

from __future__ import annotations

import concurrent.futures
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
    InvalidTypeError,
    ParallelPool,
    TaskTimeoutError,
    TrainingError,
    WorkerLostError,
    WorkerResources,
    current_task,
    parpool,
    report,
)

pytest.importorskip("torch")

from raypool.train.checkpoints import list_kept
from raypool.train.runs import RunOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),  # Ray warns of itself
    pytest.mark.usefixtures("coordinator"),
]

LONG_S = 300.0


def folders(tmp_path: Path) -> dict[str, RunOptions]:
    return {"options": RunOptions(run_dir=tmp_path / "run")}


def is_free(pool: ParallelPool) -> bool:
    """Whether all workers answer."""
    return pool.parfeval_on_all(pow, 2, 3).result(300) == [8] * pool.num_workers


# --- loops ------------------------------------------------------------------------------------------------------------


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


def who() -> dict[str, Any]:
    import ray.train

    task = current_task()
    return {
        "rank": ray.train.get_context().get_world_rank(),
        "pin": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "worker": task.worker,
        "gpu": task.gpu,
        "attempt": task.attempt,
    }


def learn(config: dict[str, Any]) -> dict[str, Any]:
    """Train a little model, with all that Ray Train offers for that."""
    import ray.train
    import ray.train.torch
    import torch

    context = ray.train.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(f"rank {rank} begins\n", end="")  # in one piece: the ranks share a diary as they would a terminal
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
    return {**who(), "total": total, "weight": model.module.weight.detach(), "last": kept_text(), "omp": torch.get_num_threads()}


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
            {"step": step}, checkpoint=keep(str(step)) if step % config.get("every", 10) == 0 and rank == 0 else None
        )
        time.sleep(0.02)
    return {**who(), "first": first, "last": step}


# --- what it gives ----------------------------------------------------------------------------------------------------


def test_guests_are_on_the_workers_gpus(pool: ParallelPool, tmp_path: Path) -> None:
    """Scenarios 6 and 41: those that were named, in that order; the others go on; nothing is asked of Ray."""
    import ray

    free = ray.available_resources().get("GPU", 0.0)
    kept = RunOptions(run_dir=tmp_path / "run", keep_checkpoints=2, best_metric="loss")
    run = pool.options(name="learn").train(learn, {"num_steps": 6}, workers=[2, 0], lane="managed", options=kept)
    while not run.running():
        assert pool.options(worker=1).parfeval(pow, 2, 3).result(300) == 8
    assert ray.available_resources().get("GPU", 0.0) == free
    waiting = pool.options(worker=0).parfeval(pow, 2, 4)
    result = run.result(LONG_S)
    assert waiting.result(300) == 16
    assert [(value["rank"], value["worker"], value["pin"], value["gpu"]) for value in result.values] == [
        (0, 2, "2", 2),
        (1, 0, "0", 0),
    ]
    assert [value["total"].item() for value in result.values] == [3.0, 3.0]
    assert result.values[0]["weight"].equal(result.values[1]["weight"])
    assert [value["omp"] for value in result.values] == [1, 1]
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
    with pytest.raises(TrainingError, match=r"Rank 1 of fail \(worker 1, .*\) failed: KeyError: 'bad sample'") as caught:
        run.result(LONG_S)
    error = caught.value
    assert (error.first_rank, set(error.failures)) == (1, {1})
    assert isinstance(error.__cause__, KeyError)
    assert "about to fail" in "".join(error.__cause__.__notes__)
    assert Path(error.result.checkpoint.path, "text").read_text() == "good"
    assert error.result.metrics == {"loss": 1.0}
    assert run.attempts == 1
    assert is_free(pool)


def test_cancelled_before_there_are_workers(pool: ParallelPool, gate: Any, eventually: Callable[..., bool]) -> None:
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


def test_no_trainer(pool: ParallelPool) -> None:
    with pytest.raises(InvalidTypeError, match="trainer="):
        pool.train(learn, {}, lane="managed", trainer=int)


# --- what can happen to it --------------------------------------------------------------------------------------------


def test_a_lost_guest_is_started_again(pool: ParallelPool, tmp_path: Path, marks: Any, eventually: Callable[..., bool]) -> None:
    """Scenario 40: from the last checkpoint, on the same GPUs, by Ray Train."""
    config = {"marks": marks, "every": 5}
    run = pool.options(retries=1).train(steps_forever, config, workers=[1, 2], lane="managed", **folders(tmp_path))
    assert eventually(lambda: len(list_kept(tmp_path / "run")) >= 2, LONG_S)
    pid = next(int(mark.split()[1]) for mark in marks.all() if mark.endswith("rank 1"))
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: marks.count("begun") == 4, LONG_S)
    frame = run.metrics
    assert set(frame["attempt"]) <= {1, 2}
    run.request_stop()
    result = run.result(LONG_S)
    assert [(value["pin"], value["attempt"]) for value in result.values] == [("1", 2), ("2", 2)]
    first = result.values[0]["first"]
    assert first >= 10
    assert {value["first"] for value in result.values} == {first}
    assert len({value["last"] for value in result.values}) == 1, "all have stopped at the same report"
    assert is_free(pool)


@pytest.mark.long
def test_lost_too_often(pool: ParallelPool, tmp_path: Path, marks: Any, eventually: Callable[..., bool]) -> None:
    run = pool.options(retries=0).train(steps_forever, {"marks": marks}, workers=2, lane="managed", **folders(tmp_path))
    assert eventually(lambda: marks.count("begun") == 2, LONG_S)
    pid = next(int(mark.split()[1]) for mark in marks.all() if mark.endswith("rank 1"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TrainingError) as caught:
        run.result(LONG_S)
    assert set(caught.value.failures) == {1}
    assert isinstance(caught.value.failures[1], WorkerLostError)
    assert is_free(pool)


@pytest.mark.long
def test_a_lost_host_ends_the_attempt_and_the_next_one_goes_on(
    pool: ParallelPool, tmp_path: Path, marks: Any, eventually: Callable[..., bool]
) -> None:
    config = {"marks": marks, "every": 5}
    run = pool.options(retries=1).train(steps_forever, config, workers=[1, 2], lane="managed", **folders(tmp_path))
    assert eventually(lambda: list_kept(tmp_path / "run"), LONG_S)
    os.kill(pool.workers[1].pid, signal.SIGKILL)
    assert eventually(lambda: marks.count("begun") == 4, LONG_S)
    run.request_stop()
    result = run.result(LONG_S)
    assert [(value["pin"], value["attempt"]) for value in result.values] == [("1", 2), ("2", 2)]
    assert result.values[0]["first"] >= 5
    assert is_free(pool)


@pytest.mark.parametrize("after_s", [None, *(pytest.param(after_s, marks=pytest.mark.long) for after_s in (0.0, 1.0, 4.0, 8.0))])
def test_cancelled_at_any_moment(
    pool: ParallelPool, marks: Any, after_s: float | None, eventually: Callable[..., bool], tmp_path: Path
) -> None:
    """Nothing is left: no actor, no placement group, no process of a guest's (the fixture looks for the first two)."""
    run = pool.train(steps_forever, {"marks": marks}, lane="managed", **folders(tmp_path))
    assert eventually(run.running)
    if after_s is None:
        assert eventually(lambda: marks.count("begun") == 3, LONG_S)
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


def test_ray_trains_controller_is_killed(pool: ParallelPool, marks: Any, tmp_path: Path, eventually: Callable[..., bool]) -> None:
    """Nothing stays behind that only the controller knew of."""
    run = pool.options(retries=0).train(steps_forever, {"marks": marks}, workers=2, lane="managed", **folders(tmp_path))
    assert eventually(lambda: marks.count("begun") == 2, LONG_S)
    ours = psutil.Process().children(recursive=True)  # of this session's Ray only
    (controller,) = [process for process in ours if _title(process, "TrainController")]
    controller.kill()
    with pytest.raises(TrainingError) as caught:
        run.result(LONG_S)
    assert isinstance(caught.value.failures[0], WorkerLostError)
    assert is_free(pool)


def _title(process: psutil.Process, text: str) -> bool:
    try:
        return text in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.long
def test_ranks_that_do_not_agree(pool: ParallelPool, tmp_path: Path) -> None:
    def differ(config: dict[str, Any]) -> None:
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        ray.train.report({"loss": 1.0} if rank == 0 else {"accuracy": 1.0})

    def leave(config: dict[str, Any]) -> None:
        import ray.train

        if ray.train.get_context().get_world_rank() == 0:
            ray.train.report({"loss": 1.0})

    runs = [pool.train(differ, {}, workers=[0], lane="managed"), pool.train(leave, {}, workers=[1, 2], lane="managed")]
    runs[0].result(LONG_S)
    with pytest.raises(TrainingError, match="rank 1 has returned"):
        runs[1].result(LONG_S)
    with pytest.raises(TrainingError, match="other metrics than rank 0"):
        pool.train(differ, {}, workers=2, lane="managed").result(LONG_S)
    assert is_free(pool)


# --- several, and others ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_at_once_on_two_parts(pool: ParallelPool, tmp_path: Path) -> None:
    """Each on its own GPUs; the second is begun in one lane and goes on in the other."""
    first, second = pool.partition(workers=[0, 1])
    kept = RunOptions(run_dir=tmp_path / "b")
    warm = second.train(steps_forever, {"num_steps": 20}, options=kept).result(LONG_S)
    assert warm.values[0]["first"] == 0
    runs = [
        first.train(steps_forever, {"num_steps": 20}, lane="managed", options=RunOptions(run_dir=tmp_path / "a")),
        second.train(steps_forever, {"num_steps": 40}, lane="managed", options=kept),
    ]
    a, b = (run.result(LONG_S) for run in runs)
    assert [value["pin"] for value in a.values] == ["0", "1"]
    assert [(value["pin"], value["first"]) for value in b.values] == [("2", 20)]
    assert [each.metrics["step"] for each in list_kept(tmp_path / "b")] == [10, 20, 30, 40]
    again = second.train(steps_forever, {"num_steps": 50}, options=kept).result(LONG_S)
    assert again.values[0]["first"] == 40
    assert is_free(pool)


@pytest.fixture(scope="module")
def ray_data(ray_session: None) -> None:
    """Let Ray Data make the actor that it keeps for as long as Ray runs."""
    import ray.data

    assert ray.data.range(4).materialize().num_blocks() > 0


@pytest.mark.long
def test_datasets_of_ray_data(pool: ParallelPool, ray_data: None) -> None:
    """Their blocks are read on the machine's cores, which this pool leaves to others."""
    import ray.data

    def add_up(config: dict[str, Any]) -> int:
        import ray.train

        return sum(row["id"] for row in ray.train.get_dataset_shard("train").iter_rows())

    data = ray.data.range(20)
    result = pool.train(add_up, {}, workers=2, lane="managed", datasets={"train": data}).result(LONG_S)
    assert sum(result.values) == sum(range(20))
    assert all(result.values)


@pytest.mark.long
def test_other_trainers_of_rays(pool: ParallelPool) -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    result = pool.train(who, workers=[2, 1], lane="managed", trainer=DataParallelTrainer).result(LONG_S)
    assert [(value["rank"], value["pin"]) for value in result.values] == [(0, "2"), (1, "1")]


def test_the_workers_processes_end_first(pool: ParallelPool) -> None:
    """What they have on their GPUs goes with them; those that were not named stay."""
    assert is_free(pool)
    before = [worker.pid for worker in pool.workers]
    result = pool.train(who, workers=[1, 2], lane="managed", release_workers=True).result(LONG_S)
    assert [value["pin"] for value in result.values] == ["1", "2"]
    after = [worker.pid for worker in pool.workers]
    assert after[0] == before[0]
    assert set(after[1:]).isdisjoint(before)
    assert is_free(pool)


@pytest.mark.long
def test_the_pool_ends_meanwhile(ray_session: None, marks: Any, eventually: Callable[..., bool], pool: ParallelPool) -> None:
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
