"""Which GPU goes to whom: on Ray, with three GPUs that do not exist (scenarios 1 to 3)."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import ray

from raypool import (
    ParallelPool,
    ResourceError,
    WorkerLostError,
    WorkerResources,
    current_task,
    gcp,
    parpool,
)

pytestmark = pytest.mark.usefixtures("ray_session", "by_value")

HALF = WorkerResources(gpus=0.5)
NO_GPU = WorkerResources(gpus=0)


def look() -> tuple[int, int | None, str | None]:
    """What a task sees of its worker and device."""
    return current_task().worker, current_task().gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


def gpus_of(pool: ParallelPool) -> list[int | None]:
    return [worker.gpu for worker in pool.workers]


# --- chosen GPUs ----------------------------------------------------------------------------------


def test_a_number_of_workers_goes_with_chosen_gpus() -> None:
    with pytest.raises(ResourceError, match=r"GPU: requested 3.*available 2"):
        parpool(3, gpus=[0, 1], quiet=True)
    with parpool((1, 2), gpus=[1, 2, 0], quiet=True) as pool:
        assert gpus_of(pool) == [1, 2]


# --- any GPUs -------------------------------------------------------------------------------------


def test_one_worker_for_each_gpu_and_one_line(capfd: Any) -> None:
    """Scenario 2."""
    with parpool() as pool:
        said = capfd.readouterr()
        seen = pool.parfeval_on_all(look).result(300)
        assert gpus_of(pool) == [0, 1, 2]
        assert seen == [(index, index, str(index)) for index in range(3)]
        assert len({worker.pid for worker in pool.workers}) == 3
        assert pool.parfor(lambda _: print("not shown"), range(6)).errors == {}
    assert said.out.startswith(f"raypool: 3 workers on {pool_host()}: GPU 0, 1, 2, ready in ")
    assert said.out.count("\n") == 1
    assert said.err == ""
    assert capfd.readouterr() == ("", "")


def pool_host() -> str:
    import platform

    return platform.node()


def test_who_holds_the_gpus_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 3: a pool, and an actor of somebody else's, which is waited for; that is said."""
    monkeypatch.setattr("raypool.backends.ray.claims.SILENT_S", 4.0)  # the free one is claimed then
    trainer = ray.remote(num_gpus=1)(Trainer).options(name="trainer").remote()
    assert ray.get(trainer.ping.remote(), timeout=300) == "pong"
    try:
        with parpool(1, quiet=True):
            with pytest.raises(ResourceError, match="GPU: requested 2, available 1") as caught:
                parpool(2, start_timeout_s=9, quiet=True)
            assert (
                "Waiting for 2 GPU (1 granted so far), at most start_timeout_s=9. Held by: "
                in caplog.text
            )
            holders = " ".join(caught.value.holders)
            assert f"process {os.getpid()}" in holders
            assert "1 GPU" in holders
            assert "trainer" in holders
            assert all(holder in str(caught.value) for holder in caught.value.holders)
            with parpool((1, 5), quiet=True) as rest:
                assert rest.num_workers == 1
            with pytest.raises(
                ResourceError, match=r"requested 3, available 2 .*This process itself holds 1"
            ):
                parpool((3, 5), start_timeout_s=600, quiet=True)
    finally:
        ray.kill(trainer)


class Trainer:
    """Somebody else's actor."""

    def ping(self) -> str:
        return "pong"


def test_pools_that_start_at_once_never_share_a_gpu() -> None:
    with ThreadPoolExecutor(3) as starters, ExitStack() as stack:
        starting = [starters.submit(parpool, 1, quiet=True) for _ in range(3)]
        pools = [stack.enter_context(future.result(300)) for future in starting]
        assert sorted(gpu for pool in pools for gpu in gpus_of(pool)) == [0, 1, 2]
        assert sorted(pool.parfeval(look).result(300)[2] for pool in pools) == ["0", "1", "2"]


# --- parts of a GPU, and more than one ------------------------------------------------------------


def test_what_there_is_too_little_of() -> None:
    """The error has the numbers, at once."""
    for num_workers, resources, words in (
        (7, HALF, "GPU: requested 4, available 3"),
        (2, WorkerResources(gpus=2), "GPU: requested 4, available 2"),
        (5, NO_GPU, "CPU: requested 5, available 4"),
        (1, WorkerResources(gpus=0, cpus=9), "CPU: requested 9, available 0"),
    ):
        with pytest.raises(ResourceError, match=words):
            parpool(num_workers, resources=resources, start_timeout_s=600, quiet=True)


def test_fractions_are_spread_over_the_gpus() -> None:
    with parpool(2, resources=HALF, quiet=True) as pool:
        assert len(set(gpus_of(pool))) == 2, "two workers share a GPU while another is free"
        with parpool(quiet=True) as rest:
            assert not set(gpus_of(rest)) & set(gpus_of(pool)), "a shared GPU belongs to one pool"


def test_two_gpus_for_each_worker() -> None:
    with parpool(resources=WorkerResources(gpus=2), quiet=True) as pool:
        (worker,) = pool.workers
        assert worker.gpus == (0, 1)
        assert pool.parfeval(look).result(300) == (0, 0, "0,1")


def test_a_pool_that_shrinks_gives_its_gpus_back() -> None:
    with parpool(quiet=True) as pool:
        pool.resize(1)
        with parpool(2, quiet=True) as other:
            assert gpus_of(pool) + sorted(gpus_of(other)) == [0, 1, 2]
            assert pool.parfeval(look).result(300) == (0, 0, "0")
        pool.resize(3)
        assert sorted(gpus_of(pool)) == [0, 1, 2]
        assert sorted(visible for _, _, visible in pool.parfeval_on_all(look).result(300)) == [
            "0",
            "1",
            "2",
        ]


def test_the_pool_that_gcp_makes_stays() -> None:
    pool = gcp(create=False)
    if pool is not None:
        pool.delete()
    assert gcp().num_workers == 3
    first = gcp()
    try:
        assert gcp() is first
        assert list(gcp().parfor(abs, [-1])) == [1]
        assert gcp().statistics().finished == 1
    finally:
        first.delete()
    assert gcp(create=False) is None


# --- the pool that tests share --------------------------------------------------------------------


@pytest.mark.quick
def test_a_worker_is_replaced_on_the_same_gpu(pool: ParallelPool, eventually: Any) -> None:
    before = pool.workers

    lost = (
        pool.options(worker=1).parfeval(lambda: os.kill(os.getpid(), signal.SIGKILL)).exception(300)
    )

    assert isinstance(lost, WorkerLostError)
    assert "GPU 1" in str(lost)
    assert eventually(
        lambda: pool.workers[1].pid != before[1].pid and pool.workers[1].state == "idle"
    )
    after = pool.workers
    assert [(worker.index, worker.gpu) for worker in after] == [(0, 0), (1, 1), (2, 2)]
    assert (after[0].pid, after[2].pid) == (before[0].pid, before[2].pid)
    assert pool.parfeval_on_all(look).result(300) == [
        (index, index, str(index)) for index in range(3)
    ]


def test_a_worker_without_a_gpu_sees_none(shared_pool: ParallelPool) -> None:
    def see() -> tuple[Any, ...]:
        import torch

        return (
            look()[1],
            os.environ["CUDA_VISIBLE_DEVICES"],
            torch.cuda.device_count(),
            str(current_task().device),
        )

    with parpool(1, resources=NO_GPU, quiet=True) as pool:
        assert pool.parfeval(see).result(300) == (None, "", 0, "cpu")
        assert pool.workers[0].gpus == ()
        assert pool.workers[0].gpu is None
