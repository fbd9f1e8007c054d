"""What tests that run the examples share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from raypool import CloudError, ParallelPool, Profile
from raypool.backends.ray.session import LOOPBACK_ONLY
from raypool.cluster import jobs
from raypool.cluster.connect import host_and_port
from raypool.cluster.jobs import Dashboard
from tests.leaks import GRACE_S, MARK, SHARED
from tests.shared_pool import shared

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool(shared_pool: ParallelPool) -> ParallelPool:
    """Give the pool that tests on Ray share: three workers, each with a GPU that does not exist."""
    return shared_pool


@pytest.fixture
def two_workers(shared_pool: ParallelPool) -> Any:
    """Give two of its workers."""
    part, _ = shared_pool.partition(workers=[0, 1])
    return part


@pytest.fixture(scope="module")
def free_gpus(ray_session: None) -> None:
    """Let a file have a pool of its own on the GPUs: the shared one is closed."""
    shared.close()


@pytest.fixture(scope="module")
def load(ray_session: None) -> Iterator[Callable[[str], ModuleType]]:
    """Load examples, so that their functions travel to the workers as those of a user's script
    do.
    """
    from ray import cloudpickle

    loaded: dict[str, ModuleType] = {}

    def load_once(name: str) -> ModuleType:
        if name not in loaded:
            spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
            assert spec
            assert spec.loader
            module = loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)
        return loaded[name]

    yield load_once
    for name, module in loaded.items():
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[name]


@pytest.fixture(scope="module")
def coordinator(ray_session: None) -> Iterator[None]:
    """Have Ray's autoscaling coordinator now: the first training in the managed lane makes it, and
    then it stays.
    """
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    handle = get_or_create_autoscaling_coordinator()
    yield
    del handle


# --- a head with a dashboard, for jobs ------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A cluster of one machine, this one.

    `url` is that of its dashboard, `client` the address for Ray Client, `address` that for nodes;
    `folder` has all of its files.
    """

    url: str
    client: str
    address: str
    token_file: Path
    folder: Path

    @property
    def profile(self) -> Profile:
        return Profile(jobs_address=self.url, token_file=self.token_file)

    @property
    def session(self) -> Path:
        return self.folder / "session_latest"


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """Start a cluster as an administrator does, with 3 cores and 2 GPUs that do not exist."""
    with running({"num-cpus": 3, "num-gpus": 2}) as head:
        yield head


@pytest.fixture(scope="session")
def run_head() -> Callable[..., contextlib.AbstractContextManager[Head]]:
    """Give a way to start others, `run_head(options of ray start, environment, program)`."""
    return running


@contextlib.contextmanager
def running(
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("ray.scripts.scripts", "start"),
) -> Iterator[Head]:
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="rp-", dir=SHARED))  # Ray's sockets need short names
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(uuid.uuid4().hex * 2)
    port, dashboard, agent, client = free_ports(4)
    env = {**os.environ, **(environment or {}), MARK: mark, "RAY_AUTH_TOKEN_PATH": str(token_file)}
    options = {
        **options,
        "port": port,
        "ray-client-server-port": client,
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "object-store-memory": 100_000_000,
        "temp-dir": folder,
    }
    command = [
        sys.executable,
        "-m",
        *program,
        "--head",
        "--block",
        "--include-dashboard=true",
    ]
    with (folder / "start.log").open("w") as log:
        ray = subprocess.Popen(
            [
                *command,
                "--disable-usage-stats",
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    head = Head(
        f"http://127.0.0.1:{dashboard}",
        f"ray://127.0.0.1:{client}",
        f"127.0.0.1:{port}",
        token_file,
        folder,
    )
    try:
        with pytest.MonkeyPatch.context() as patch:  # a busy machine takes longer
            patch.setitem(jobs.TIMEOUTS_S, "GET", 120.0)
            patch.setattr(jobs, "HEAD_TIMEOUT_S", 300.0)
            patch.setattr(jobs, "STOP_TIMEOUT_S", 300.0)
            wait_until_up(head, ray)
            yield head
    finally:
        kill_all(mark)
        ray.wait(GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)


def kill_all(mark: str) -> None:
    """Kill the processes of a node."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


OPEN = {LOOPBACK_ONLY: "1"}
"""What a cluster has to be started with that other nodes may join."""


@pytest.fixture
def second_node() -> Iterator[Callable[..., str]]:
    """Give a way to start another node of a head that is `OPEN`: `second_node(head, options of ray
    start)`.

    It returns the mark of its processes.
    """
    started = []

    def start(head: Head, options: Mapping[str, Any]) -> str:
        mark = uuid.uuid4().hex
        env = {**os.environ, **OPEN, MARK: mark, "RAY_AUTH_TOKEN_PATH": str(head.token_file)}
        options = {**options, "address": head.address, "object-store-memory": 100_000_000}
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--disable-usage-stats",
        ]
        ray = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append((mark, ray))
        deadline = time.monotonic() + 300
        while len(Dashboard(head.profile).nodes()) <= len(started):
            assert time.monotonic() < deadline, "the node has not joined"
            time.sleep(0.1)
        return mark

    yield start
    for mark, ray in started:
        kill_all(mark)
        ray.wait(GRACE_S)


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens at: none of those that Ray gives to workers, or this system
    to whoever connects.
    """
    ports: list[int] = []
    # seeded tests leave `random` in the same state in every run, perhaps of two at once
    chance = random.SystemRandom()
    # what another process has chosen is not open yet
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    while len(ports) < number:
        port = chance.randrange(3000 + mine, 10_000, 10)
        with socket.socket() as probe:
            if port not in ports and probe.connect_ex(("127.0.0.1", port)) != 0:
                ports.append(port)
    return ports


def wait_until_up(head: Head, ray: subprocess.Popen[bytes], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if Dashboard(head.profile).nodes():
                socket.create_connection(host_and_port(head.client)).close()
                return
        except (CloudError, ConnectionRefusedError):
            said = (head.folder / "start.log").read_text()
            assert ray.poll() is None, f"`ray start` has ended with {ray.returncode}: {said}"
            assert time.monotonic() < deadline, f"not up in {timeout_s:g} s: {said}"
        time.sleep(0.1)
