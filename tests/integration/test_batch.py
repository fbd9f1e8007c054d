"""Functions that a real cluster calls by itself: their outputs, their errors, and what is left of
them for other processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray  # noqa: F401 - so that the functions of this file travel as a user's script's do
from click.testing import CliRunner

import raypool
from raypool import (
    CloudError,
    InvalidTypeError,
    InvalidValueError,
    Profile,
    RemoteTraceback,
    ResourceError,
    SerializationError,
    TaskError,
    WorkerResources,
)
from raypool.cli.main import main
from tests.integration import test_growth as growth

Poll = Callable[..., bool]
Run = Callable[..., subprocess.CompletedProcess[str]]

SECRET = "b3f1c0de-outputs-are-nobody-elses"


class DivergedError(Exception):
    """An exception as users have them."""

    def __init__(self, step: int) -> None:
        super().__init__(f"diverged at step {step}")
        self.step = step

    def __reduce__(self) -> Any:
        return DivergedError, (self.step,)


def squares(number: int) -> tuple[list[int], int, list[int | None]]:
    print("a line of the job's own")
    pool = raypool.gcp(create=False)
    assert pool is not None
    values = pool.parfor(lambda i: i * i, range(number))
    return list(values), os.getpid(), [worker.gpu for worker in pool.workers]


def diverge(step: int) -> None:
    raise DivergedError(step)


def wait_for(path: str) -> str:
    print("begun", flush=True)
    while not Path(path).exists():
        time.sleep(0.05)
    return "opened"


# --- a call with a pool, from its beginning to its end --------------------------------------------


def test_a_job_has_its_own_pool_and_its_outputs_are_there_for_another_process(
    head: Any, run_python: Run, gate: Any
) -> None:
    """The process that hands it in is gone before it ends."""
    submitter = f"""
    import os, time
    import raypool
    def squares(number):
        while not os.path.exists({str(gate.path)!r}):
            time.sleep(0.05)
        print("a line of the job's own")
        pool = raypool.gcp(create=False)
        return list(pool.parfor(lambda i: i * i, range(number))), [worker.gpu for worker in pool.workers], {SECRET!r}
    profile = raypool.Profile(jobs_address={head.url!r}, token_file={str(head.token_file)!r})
    job = raypool.batch(squares, 5, pool=2, profile=profile)
    print(job.id, job.state)
    """
    job_id, state = run_python(submitter).stdout.split()
    assert state in ("queued", "running")
    gate.open()
    job = raypool.find_job(job_id, profile=head.profile)
    assert job.fetch_outputs(timeout_s=300) == ([0, 1, 4, 9, 16], [0, 1], SECRET)
    assert (job.name, job.state, job.exit_code, job.error) == ("squares", "finished", 0, None)
    assert repr(job) == f"<Job {job_id} (squares): finished>"
    assert job.submitted_at < job.finished_at
    pool_line, line = job.diary.splitlines()
    assert line == "a line of the job's own"
    assert pool_line.startswith("raypool: 2 workers on ")
    assert_nobody_else_can_read(head, SECRET)
    which = ["--address", head.url, "--token-file", str(head.token_file)]
    shown = CliRunner().invoke(main, ["job", "status", "--json", *which, job_id]).stdout
    assert job_id in shown
    assert "raypool_key" not in shown


def assert_nobody_else_can_read(head: Any, secret: str) -> None:
    """A value is in no log, and in no file that another user could read."""
    [left] = [
        path
        for path in (head.session / "raypool-outputs").iterdir()
        if secret.encode() in path.read_bytes()
    ]
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    assert stat.S_IMODE(left.parent.stat().st_mode) == 0o700
    link = head.session / "logs" / "raypool-outputs"
    assert link.is_symlink()
    logs = [path for path in link.parent.rglob("*") if path.is_file() and link not in path.parents]
    assert not [path for path in logs if secret.encode() in path.read_bytes()]


def test_an_exception_comes_back_as_itself(head: Any) -> None:
    job = raypool.batch(diverge, 7, profile=head.profile, name="bold")
    with pytest.raises(DivergedError, match="diverged at step 7") as caught:
        job.fetch_outputs(timeout_s=300)
    assert caught.value.step == 7
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in diverge" in str(caught.value.__cause__)
    assert caught.value.__notes__ == [f"raypool: job {job.id} (bold)"]
    assert (job.state, job.exit_code) == ("failed", 1)
    assert job.error is caught.value
    assert "DivergedError: diverged at step 7" in job.diary


# --- refused before anything happens --------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "changes", "said"),
    [
        (
            3,
            {},
            (
                "requested 3, and the cluster has room for 2 (1 GPU for each; 2 GPU on 1"
                " node, no autoscaler)"
            ),
        ),
        ((9, 12), {"resources": WorkerResources(gpus=0.25)}, "room for 8"),
        (4, {"resources": WorkerResources(gpus=0)}, "room for 3 (1 CPU for each"),
        (1, {"resources": WorkerResources(gpus=3)}, "room for 0 (3 GPU for each"),
        (1, {"resources": WorkerResources(accelerator_type="H100")}, "room for 0"),
        (None, {"resources": [WorkerResources(gpus=0), WorkerResources(gpus=1)] * 3}, None),
        (6, {"resources": [WorkerResources(gpus=0), WorkerResources(gpus=1)] * 3}, "room for 2"),
    ],
)
def test_a_pool_that_could_never_open_is_refused_at_once(
    head: Any, pool: Any, changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_in: list[Any] = []

    class HandedInError(Exception):
        pass

    def hand_in(*args: Any, **kwargs: Any) -> None:
        handed_in.append(args)
        raise HandedInError

    monkeypatch.setattr("raypool.cluster.jobs.Jobs.submit", hand_in)
    profile = Profile(jobs_address=head.url, token_file=head.token_file, **changes)
    if said is None:
        with pytest.raises(HandedInError):
            raypool.batch(squares, 3, pool=pool, profile=profile)
        return
    with pytest.raises(ResourceError) as caught:
        raypool.batch(squares, 3, pool=pool, profile=profile)
    assert said in str(caught.value)
    assert caught.value.available < caught.value.requested
    assert not handed_in


@pytest.mark.long
@pytest.mark.parametrize("is_new", [False, True])
def test_where_an_autoscaler_could_not_make_room_the_job_itself_says_so(
    run_head: Callable[..., Any], is_new: bool, tmp_path: Path
) -> None:
    """Ray's real autoscaler, the older and the newer, which may add 3 nodes with 2 GPUs each."""
    environment = {**growth.ENVIRONMENT, "RAY_enable_autoscaler_v2": str(int(is_new))}
    if not is_new:
        del environment["RAY_NODE_TYPE_NAME"]  # as Ray's launcher does
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(growth.SETTINGS))
    with run_head(
        {"num-cpus": 1, "num-gpus": 0, "autoscaling-config": settings}, environment
    ) as head:
        job = raypool.batch(
            squares,
            3,
            pool=7,
            profile=dataclasses.replace(head.profile, resources=WorkerResources(gpus=1)),
        )
        with pytest.raises(ResourceError, match="7"):
            job.fetch_outputs(timeout_s=300)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"fn": 3}, InvalidTypeError, "3 cannot be called"),
        ({"pool": 0}, InvalidValueError, "pool must be at least 1, not 0"),
        ({"pool": (2, 1)}, InvalidValueError, "the minimum is more than the max"),
        ({"pool": "two"}, InvalidTypeError, "pool must be an integer, not 'two'"),
        ({"profile": "threads"}, InvalidValueError, "runs in this process, which"),
        ({"outputs": "results"}, InvalidValueError, "must be a URL"),
        (
            {"outputs": 3},
            InvalidTypeError,
            "outputs must be a folder or URL, such as 'gs://bucket/folder', not 3",
        ),
        ({"outputs": "s3://me:secret@bucket/a"}, InvalidValueError, "a password"),
        (
            {"outputs": "nowhere://bucket/a"},
            InvalidValueError,
            "outputs='nowhere://bucket/a' cannot be used from here",
        ),
        ({"args": (threading.Lock(),)}, SerializationError, "args[0]"),
        (
            {"fn": functools.partial(print, threading.Lock())},
            SerializationError,
            "Cannot send a call to a cluster",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    head: Any, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    settings = {"profile": head.profile, **arguments}
    fn, args = settings.pop("fn", squares), settings.pop("args", (3,))
    with pytest.raises(error) as caught:
        raypool.batch(fn, *args, **settings)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_call_that_is_too_large_is_refused_with_its_size(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.batches.MOST_BYTES", 2**20)
    with pytest.raises(CloudError, match=r"are 3 MiB; a job can carry 1 MiB"):
        raypool.batch(len, bytes(3 * 2**20), profile=head.profile)


def test_no_such_job_is_said(head: Any) -> None:
    with pytest.raises(CloudError, match="There is no job 'mars'"):
        raypool.find_job("mars", profile=head.profile)


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_hundred_megabytes_come_back_whole(head: Any) -> None:
    def make() -> Any:
        return np.random.default_rng(0).random(12_500_000)

    job = raypool.batch(make, profile=head.profile)
    assert job.wait(timeout_s=300)
    outputs = job.fetch_outputs()
    np.testing.assert_array_equal(outputs, make())


@pytest.mark.long
def test_outputs_may_lie_elsewhere(head: Any, tmp_path: Path) -> None:
    jobs = [
        raypool.batch(max, [3, 5], profile=head.profile, outputs=place)
        for place in (f"file://{tmp_path}/a/b", f"{tmp_path}/c/")
    ]
    assert [job.fetch_outputs(timeout_s=300) for job in jobs] == [5, 5]
    for job, folder in zip(jobs, (tmp_path / "a" / "b", tmp_path / "c"), strict=True):
        [left] = folder.iterdir()
        assert left.name == job.id
        assert job.outputs_at.endswith(str(left))
        assert not list((head.session / "raypool-outputs").glob(left.name))
        left.unlink()
        again = raypool.find_job(job.id, profile=head.profile)
        with pytest.raises(CloudError, match="no longer exist"):
            again.fetch_outputs()


def test_what_the_job_has_not_written_is_not_unpickled(head: Any, tmp_path: Path) -> None:
    """Whoever may write to the place could put a pickle there that runs code; a transfer may also
    break off.
    """

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "it has run",)

    job = raypool.batch(max, [3, 5], profile=head.profile, outputs=f"{tmp_path}/place")
    assert job.wait(timeout_s=300)
    left = Path(job.outputs_at)
    written = left.read_bytes()
    line, _, _ = written.partition(b"\n")
    for other in (written[:-1], written + b"x", line + b"\n" + pickle.dumps(Bomb()), line, b""):
        left.write_bytes(other)
        with pytest.raises(
            CloudError, match=rf"\({len(other)} bytes\) is not the one that job {job.id} wrote"
        ):
            job.fetch_outputs()
    assert not (tmp_path / "it has run").exists()
    left.write_bytes(written)
    assert job.fetch_outputs() == 5


def test_another_version_there_is_said(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypool.batches.version", lambda package: "0.0.9")
    job = raypool.batch(max, [3, 5], profile=head.profile)
    with pytest.raises(CloudError, match=r"but has raypool 0\.0\.9 there and"):
        job.fetch_outputs(timeout_s=300)


def test_a_place_that_cannot_be_written_to_costs_no_work(head: Any, tmp_path: Path) -> None:
    def work(place: Path, called: Path) -> str:
        called.touch()
        shutil.rmtree(place)
        place.touch()  # where a folder was there is a file now: nothing can be left there
        return "hours of work"

    (tmp_path / "file").touch()
    never = raypool.batch(
        work, tmp_path, tmp_path / "1", profile=head.profile, outputs=f"{tmp_path}/file/folder"
    )
    late = raypool.batch(
        work, tmp_path / "place", tmp_path / "2", profile=head.profile, outputs=f"{tmp_path}/place"
    )
    with pytest.raises(
        CloudError,
        match=r"The function was not called: the cluster cannot write its outputs to .*/file/folder",
    ):
        never.fetch_outputs(timeout_s=300)
    assert late.fetch_outputs(timeout_s=300) == "hours of work"
    assert "stay on this node" in late.diary
    assert not (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


@pytest.mark.long
def test_outputs_that_cannot_travel_say_so(head: Any) -> None:
    def lock() -> dict[str, Any]:
        return {"loss": 0.5, "guard": threading.Lock()}

    job = raypool.batch(lock, profile=head.profile)
    with pytest.raises(
        SerializationError,
        match=r"Cannot send a result back: \['guard'\] \(a lock\) cannot be pickled",
    ):
        job.fetch_outputs(timeout_s=300)
    assert (job.state, job.exit_code) == ("failed", 1)


def test_one_that_ends_its_process_says_so(head: Any) -> None:
    def kill() -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    killed, left, ended = (
        raypool.batch(kill, profile=head.profile),
        raypool.batch(sys.exit, 3, profile=head.profile),
        raypool.batch(sys.exit, profile=head.profile),
    )
    with pytest.raises(
        TaskError, match=r"ended with exit code -?\d+ and without a result.*last words"
    ):
        killed.fetch_outputs(timeout_s=300)
    with pytest.raises(TaskError, match="ended its process with exit code 3"):
        left.fetch_outputs(timeout_s=300)
    assert left.exit_code == 3
    with pytest.raises(TaskError, match="ended its process with exit code 0") as caught:
        ended.fetch_outputs(timeout_s=300)
    assert (ended.state, ended.exit_code, ended.error) == ("failed", 1, caught.value)


# --- while it runs --------------------------------------------------------------------------------


def test_one_that_runs_can_be_waited_for_read_and_cancelled(
    head: Any, tmp_path: Path, eventually: Poll
) -> None:
    job = raypool.batch(wait_for, str(tmp_path / "gate"), pool=2, profile=head.profile)
    assert eventually(lambda: "begun\n" in job.diary)
    assert (job.state, job.error, job.exit_code, job.finished_at) == ("running", None, None, None)
    assert not job.wait(timeout_s=0.1)
    with pytest.raises(TimeoutError, match="it keeps running"):
        job.fetch_outputs(timeout_s=0)
    other = raypool.find_job(job.id, profile=head.profile)
    assert other.cancel()
    assert job.state == "cancelled"
    assert job.error is None
    with pytest.raises(CancelledError):
        job.fetch_outputs()
    after = raypool.batch(squares, 3, pool=2, profile=head.profile)  # its GPUs are free again
    assert after.fetch_outputs(timeout_s=300)[0] == [0, 1, 4]
    assert not after.cancel()


@pytest.mark.long
def test_modules_travel_with_the_working_dir(head: Any, tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "my_models.py").write_text(
        "class MyError(Exception): pass\ndef train(x):\n    raise MyError(x)\n"
    )
    submitter = f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import my_models, raypool
    cluster = dict(jobs_address={head.url!r}, token_file={str(head.token_file)!r})
    profiles = raypool.Profile(**cluster), raypool.Profile(**cluster, working_dir={str(tmp_path)!r})
    for job in [raypool.batch(my_models.train, 3, profile=profile) for profile in profiles]:
        try:
            job.fetch_outputs(timeout_s=300)
        except Exception as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """
    without, with_it = run_python(submitter).stdout.splitlines()
    assert "No module named 'my_models'" in without
    assert "working_dir" in without
    assert with_it == "MyError: 3"


def test_a_job_that_was_made_otherwise_has_no_outputs(head: Any) -> None:
    from raypool.cluster.jobs import Jobs

    job = raypool.find_job(Jobs(head.profile).submit(["echo", "hello"]), profile=head.profile)
    with pytest.raises(CloudError, match="it was not submitted by"):
        job.fetch_outputs(timeout_s=300)
    assert job.diary == "hello\n"


@pytest.mark.long
def test_the_ray_of_this_process_will_do(head: Any, run_python: Run) -> None:
    """No profile is named: what runs in this process already has a dashboard."""
    code = f"""
    import ray, raypool
    ray.init({head.address!r}, log_to_driver=False, logging_level="ERROR")
    def squares(number):
        return list(raypool.gcp(create=False).parfor(lambda i: i * i, range(number)))
    print(raypool.batch(squares, 4, pool=1).fetch_outputs(timeout_s=300))
    """
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(head.token_file)}
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    assert run_python(code, **settings, **loopback).stdout.splitlines()[-1] == "[0, 1, 4, 9]"
