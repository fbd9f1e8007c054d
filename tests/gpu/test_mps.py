"""NVIDIA's Multi-Process Service, the real one: workers that share a card are its clients, and it
ends with the pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raypool import WorkerResources, parpool
from raypool.backends.ray import mps
from raypool.gpus.nvml import nvml

with nvml() as library:
    HAS_GPU = library is not None and library.nvmlDeviceGetCount() > 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no GPU"),
    pytest.mark.skipif(shutil.which(mps.PROGRAM) is None, reason=f"no {mps.PROGRAM}"),
]

HALF = WorkerResources(gpus=0.5)


def compute(seconds: float) -> tuple[int, str | None]:
    """Keep the card busy for a while; return this process, and where its service is."""
    import torch

    x = torch.rand(512, 512, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        x = torch.tanh(x @ x)
    torch.cuda.synchronize()
    return os.getpid(), os.environ.get(mps.PIPES)


def asked(command: str, pipes: str) -> set[str]:
    environ = {**os.environ, mps.PIPES: pipes, mps.LOGS: str(Path(pipes).parent / "log")}
    done = subprocess.run(
        [mps.PROGRAM],
        input=f"{command}\n",
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return set(done.stdout.split())


def daemons() -> int:
    return sum(
        (process.info["name"] or "").startswith("nvidia-cuda-mps")
        for process in psutil.process_iter(["name"])
    )


def test_workers_that_share_a_card_are_its_clients(
    by_value: None, caplog: pytest.LogCaptureFixture, eventually: Callable[..., bool]
) -> None:
    before = daemons()
    with parpool(2, resources=HALF, gpus=[0], mps=True, quiet=True) as pool:
        found = pool.parfeval_on_all(compute, 1.0).result(300)
        if "take turns" in caplog.text:
            # it cannot be started here, in a container, say; that was said, and all went on
            pytest.skip(caplog.text)
        (_, pipes), (_, other) = found
        assert pipes is not None
        assert pipes == other
        (server,) = asked("get_server_list", pipes)
        assert asked(f"get_client_list {server}", pipes) >= {str(pid) for pid, _ in found}
    assert eventually(lambda: daemons() == before)


def test_a_worker_that_is_killed_in_its_work_does_not_take_the_others_with_it(
    by_value: None, caplog: pytest.LogCaptureFixture
) -> None:
    def compute_on() -> None:
        while True:
            try:
                compute(600.0)
            except BaseException:  # it does not stop
                continue

    with parpool(2, resources=HALF, gpus=[0], mps=True, cancel_grace_s=1.0, quiet=True) as pool:
        pool.parfeval_on_all(compute, 0.1).result(300)
        if "take turns" in caplog.text:
            pytest.skip(caplog.text)
        stubborn = pool.options(worker=0).parfeval(compute_on)
        innocent = pool.options(worker=1).parfeval(compute, 20.0)
        while not stubborn.running():
            time.sleep(0.01)
        stubborn.cancel()
        innocent.result(300)
        assert pool.parfeval(compute, 0.1).result(300)[1] is not None
