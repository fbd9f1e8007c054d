"""NVIDIA's Multi-Process Service under a pool on Ray: its daemon is a program that acts as it does
(tests/fake_mps.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypool import ParallelPool, WorkerResources, parpool
from raypool.backends.ray import mps

pytestmark = pytest.mark.usefixtures("ray_session", "by_value")

FAKE = Path(__file__).parents[1] / "fake_mps.py"
HALF = WorkerResources(gpus=0.5)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Give a PATH on which there is a program that is called as NVIDIA's."""
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text()}")
    program.chmod(0o700)
    return f"{program.parent}:{os.environ['PATH']}"


def processes(pipes: str) -> list[psutil.Process]:
    """Return the daemon, its server and the keeper: what has these pipes and is no worker."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if process.environ().get(mps.PIPES) == pipes and (
                "mps-control" in words or "mps_keeper" in words
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def look() -> tuple[str | None, str | None, str | None]:
    return os.environ.get(mps.PIPES), os.environ.get(mps.LOGS), os.environ.get("SEEN_BY_SETUP")


def note_pipes() -> None:
    os.environ["SEEN_BY_SETUP"] = os.environ.get(mps.PIPES, "")


def test_workers_that_share_a_gpu_have_it(
    path: str, caplog: pytest.LogCaptureFixture, eventually: Callable[..., bool]
) -> None:
    """One service for both, before anything of the user's runs there; it ends with the pool, and
    its files go.
    """
    with parpool(
        2, resources=HALF, gpus=[0], mps=True, setup=note_pipes, env={"PATH": path}, quiet=True
    ) as pool:
        (pipes, logs, seen), other = pool.parfeval_on_all(look).result(300)
        assert other == (pipes, logs, seen)
        assert pipes == seen
        assert pipes is not None
        assert logs is not None
        assert len(processes(pipes)) == 3
        said = (Path(logs) / "control.log").read_text().splitlines()
        # Ray lets the agent see no GPU; the daemon sees all
        assert said[0] == "CUDA_VISIBLE_DEVICES=None 0o700"
        assert sum(line.startswith("start_server") for line in said) == 1
    assert eventually(lambda: not processes(pipes))
    assert eventually(lambda: not Path(pipes).exists())
    assert "mps" not in caplog.text


def test_where_it_cannot_be_the_workers_take_turns(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, however many workers, says why and what to do; all goes on."""
    (tmp_path / "bin" / "mode").write_text("fails")
    with parpool(2, resources=HALF, mps=True, env={"PATH": path}, quiet=True) as pool:
        assert pool.parfeval_on_all(look).result(300) == [(None, None, None)] * 2
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "mps" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert (
        "take turns, because nvidia-cuda-mps-control -d failed with status 1: An instance of this"
        in warnings[0]
    )


@pytest.mark.long
def test_a_gpu_that_is_not_shared_needs_none(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with parpool(2, mps=True, env={"PATH": path}, quiet=True) as pool:
        assert pool.parfeval_on_all(look).result(300) == [(None, None, None)] * 2
    assert caplog.messages == [mps.NOT_SHARED]
    caplog.clear()
    with parpool(
        1, resources=WorkerResources(gpus=0), mps=True, env={"PATH": path}, quiet=True
    ) as pool:
        assert pool.parfeval(look).result(300) == (None, None, None)
    assert caplog.messages == []


@pytest.mark.long
def test_a_service_of_the_users_own_is_left_alone(path: str, tmp_path: Path) -> None:
    with parpool(
        1, resources=HALF, mps=True, env={"PATH": path, mps.PIPES: str(tmp_path)}, quiet=True
    ) as pool:
        assert pool.parfeval(look).result(300)[0] == str(tmp_path)
        assert not processes(str(tmp_path))


def test_a_worker_that_must_be_killed_leaves_the_service_first(
    path: str, gate: Any, eventually: Callable[..., bool]
) -> None:
    """NVIDIA: one that dies in the midst of its work may take others with it. The one that replaces
    it has the service, too.
    """

    def stay() -> None:
        while True:
            try:
                gate.open()
                signal.pause()
            except BaseException:  # it does not stop
                continue

    options: dict[str, Any] = {
        "resources": HALF,
        "mps": True,
        "env": {"PATH": path},
        "cancel_grace_s": 0.5,
        "quiet": True,
    }
    with parpool(1, **options) as pool:
        pipes, logs, _ = pool.parfeval(look).result(300)
        (worker,) = pool.workers
        (Path(str(pipes)) / "clients").write_text(f"{worker.pid}\n")
        future = pool.parfeval(stay)
        gate.wait()
        future.cancel()
        assert pool.parfeval(look).result(300)[0] == pipes
        assert pool.workers[0].pid != worker.pid
        said = (Path(str(logs)) / "control.log").read_text().splitlines()
        assert [line.split()[2] for line in said if line.startswith("terminate_client")] == [
            str(worker.pid)
        ]


def test_a_driver_that_is_killed_leaves_no_service(
    path: str, start_python: Callable[..., Any], eventually: Callable[..., bool]
) -> None:
    code = """
    import os, signal
    import ray
    from raypool import WorkerResources, parpool
    from raypool.backends.ray.session import without_helpers
    with without_helpers():
        ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    pool = parpool(2, resources=WorkerResources(gpus=0.5), mps=True, env={"PATH": os.environ["FAKE_PATH"]}, quiet=True)
    print(pool.parfeval(os.getenv, "CUDA_MPS_PIPE_DIRECTORY").result(300), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start_python(code, FAKE_PATH=path, PYTHONWARNINGS="ignore")
    pipes = process.process.stdout.readline().strip()
    assert pipes.endswith("/mps/pipe")
    assert eventually(lambda: not processes(pipes))
    assert eventually(lambda: not Path(pipes).exists())


def test_without_ray_there_is_nothing_to_share(caplog: pytest.LogCaptureFixture) -> None:
    """The same line of code on a laptop."""
    with parpool(2, profile="threads", mps=True, quiet=True) as pool:
        assert isinstance(pool, ParallelPool)
        assert list(pool.parfor(abs, [-1])) == [1]
    assert caplog.messages == []
