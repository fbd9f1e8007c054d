"""Which GPU goes to whom: on Ray, with three GPUs that do not exist (scenarios 1 to 3)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import ray

from raypool import ParallelPool, ResourceError, WorkerLostError, WorkerResources, current_task, gcp, parpool

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_session", "by_value")]

HALF = WorkerResources(gpus=0.5)
NO_GPU = WorkerResources(gpus=0)


def look() -> tuple[int, int | None, str | None]:
    """What a task sees of its worker and device."""
    return current_task().worker, current_task().gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


def gpus_of(pool: ParallelPool) -> list[int | None]:
    return [worker.gpu for worker in pool.workers]


# --- chosen GPUs ------------------------------------------------------------------------------------------------------


def test_chosen_gpus_are_used_and_no_other() -> None:
    """Scenario 1: what is not chosen stays free for others; and it works again after `delete()`, in another order."""
    with parpool(gpus=[0, 2], quiet=True) as pool:
        assert gpus_of(pool) == [0, 2]
        assert pool.parfeval_on_all(look).result(60) == [(0, 0, "0"), (1, 2, "2")]
        assert set(pool.parfor(lambda _: look()[1], range(40)).to_frame()["value"]) <= {0, 2}
        with parpool(quiet=True) as rest:
            assert gpus_of(rest) == [1]
        pool.delete()
        with parpool(gpus=[2, 0], quiet=True) as again:
            assert again.parfeval_on_all(look).result(60) == [(0, 2, "2"), (1, 0, "0")]


def test_a_number_of_workers_goes_with_chosen_gpus() -> None:
    with pytest.raises(ResourceError, match=r"GPU: requested 3.*available 2"):
        parpool(3, gpus=[0, 1], quiet=True)
    with parpool((1, 2), gpus=[1, 2, 0], quiet=True) as pool:
        assert gpus_of(pool) == [1, 2]


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ResourceError, match=r"GPU 3 does not exist.* has 3") as caught:
        parpool(gpus=[1, 3], quiet=True)
    assert caught.value.available == 3
    with pytest.raises(ResourceError, match="has 3"):
        parpool(gpus=[0, 1, 2, 3], quiet=True)


def test_a_gpu_that_another_pool_holds() -> None:
    with parpool(gpus=[1], quiet=True) as holder:
        started = time.monotonic()
        with pytest.raises(ResourceError, match="GPU 1 is in use") as caught:
            parpool(gpus=[0, 1], start_timeout_s=0.5, quiet=True)
        assert time.monotonic() - started < 10
        assert (caught.value.requested, caught.value.available) == (2, 1)
        assert f"process {os.getpid()}" in str(caught.value)
        with pytest.raises(ResourceError, match="GPU 7"):
            parpool(gpus=[7], start_timeout_s=0.5, quiet=True)
        assert holder.parfeval(look).result(60) == (0, 1, "1")
        with parpool(gpus=[0, 2], quiet=True) as others:
            assert gpus_of(others) == [0, 2]


# --- any GPUs ---------------------------------------------------------------------------------------------------------


def test_one_worker_for_each_gpu_and_one_line(capfd: Any) -> None:
    """Scenario 2."""
    with parpool() as pool:
        said = capfd.readouterr()
        seen = pool.parfeval_on_all(look).result(60)
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


def test_more_workers_than_gpus() -> None:
    """Scenario 3: the error has the numbers, at once, and a range takes what there is."""
    started = time.monotonic()
    with pytest.raises(ResourceError, match="GPU: requested 5, available 3") as caught:
        parpool(5, quiet=True)
    assert time.monotonic() - started < 10, "that there are only three is known without waiting"
    assert (caught.value.requested, caught.value.available) == (5, 3)
    with parpool((1, 5), quiet=True) as pool:
        assert sorted(gpus_of(pool)) == [0, 1, 2]


def test_who_holds_the_gpus_is_named() -> None:
    """Scenario 3: a pool, and an actor of somebody else's."""
    trainer = ray.remote(num_gpus=1)(Trainer).options(name="trainer").remote()
    assert ray.get(trainer.ping.remote(), timeout=60) == "pong"
    try:
        with parpool(1, quiet=True):
            with pytest.raises(ResourceError, match="GPU: requested 2, available 1") as caught:
                parpool(2, start_timeout_s=0.5, quiet=True)
            holders = " ".join(caught.value.holders)
            assert f"process {os.getpid()}" in holders
            assert "1 GPU" in holders
            assert "trainer" in holders
            assert all(holder in str(caught.value) for holder in caught.value.holders)
            with parpool((1, 5), quiet=True) as rest:
                assert rest.num_workers == 1
            with pytest.raises(ResourceError, match="requested 3, available 1"):
                parpool((3, 5), start_timeout_s=0.5, quiet=True)
    finally:
        ray.kill(trainer)


class Trainer:
    """Somebody else's actor."""

    def ping(self) -> str:
        return "pong"


def test_no_gpu_is_left() -> None:
    with parpool(3, quiet=True), pytest.raises(ResourceError, match="requested 1, available 0"):
        parpool(start_timeout_s=0.5, quiet=True)


def test_pools_that_start_at_once_never_share_a_gpu() -> None:
    with ThreadPoolExecutor(3) as starters, ExitStack() as stack:
        starting = [starters.submit(parpool, 1, quiet=True) for _ in range(3)]
        pools = [stack.enter_context(future.result(60)) for future in starting]
        assert sorted(gpu for pool in pools for gpu in gpus_of(pool)) == [0, 1, 2]
        assert sorted(pool.parfeval(look).result(60)[2] for pool in pools) == ["0", "1", "2"]


# --- parts of a GPU, and more than one ----------------------------------------------------------------------------------


def test_fractions_are_spread_over_the_gpus() -> None:
    with parpool(2, resources=HALF, quiet=True) as pool:
        assert len(set(gpus_of(pool))) == 2, "two workers share a GPU while another is free"
        with parpool(quiet=True) as rest:
            assert not set(gpus_of(rest)) & set(gpus_of(pool)), "a shared GPU belongs to one pool"


def test_fractions_of_a_chosen_gpu() -> None:
    with parpool(gpus=[1], resources=HALF, quiet=True) as pool:
        assert [(gpu, visible) for _, gpu, visible in pool.parfeval_on_all(look).result(60)] == [(1, "1")] * 2
        assert len({worker.pid for worker in pool.workers}) == 2


def test_too_many_fractions() -> None:
    with pytest.raises(ResourceError, match=r"requested 4, available 3"):
        parpool(7, resources=HALF, quiet=True)


def test_two_gpus_for_each_worker() -> None:
    with parpool(resources=WorkerResources(gpus=2), quiet=True) as pool:
        (worker,) = pool.workers
        assert worker.gpus == (0, 1)
        assert pool.parfeval(look).result(60) == (0, 0, "0,1")
    with pytest.raises(ResourceError, match="GPU: requested 4, available 2"):
        parpool(2, resources=WorkerResources(gpus=2), quiet=True)


def test_a_worker_without_a_gpu_sees_none() -> None:
    def see() -> tuple[Any, ...]:
        import torch

        return look()[1], os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count(), str(current_task().device)

    with parpool(1, resources=NO_GPU, quiet=True) as pool:
        assert pool.parfeval(see).result(60) == (None, "", 0, "cpu")
        assert pool.workers[0].gpus == ()
        assert pool.workers[0].gpu is None


def test_more_cores_than_there_are() -> None:
    with pytest.raises(ResourceError, match="CPU: requested 5, available 4"):
        parpool(5, resources=NO_GPU, quiet=True)
    with pytest.raises(ResourceError, match="CPU: requested 9, available 0"):
        parpool(1, resources=WorkerResources(gpus=0, cpus=9), quiet=True)


# --- a pool over time ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(ray_session: None, by_value: None) -> Iterator[ParallelPool]:
    with parpool(quiet=True) as pool:
        yield pool


def test_a_worker_is_replaced_on_the_same_gpu(pool: ParallelPool, eventually: Any) -> None:
    before = pool.workers

    lost = pool.options(worker=1).parfeval(lambda: os.kill(os.getpid(), signal.SIGKILL)).exception(60)

    assert isinstance(lost, WorkerLostError)
    assert "GPU 1" in str(lost)
    assert eventually(lambda: pool.workers[1].pid != before[1].pid and pool.workers[1].state == "idle", 60)
    after = pool.workers
    assert [(worker.index, worker.gpu) for worker in after] == [(0, 0), (1, 1), (2, 2)]
    assert (after[0], after[2]) == (before[0], before[2])
    assert pool.parfeval_on_all(look).result(60) == [(index, index, str(index)) for index in range(3)]


def test_a_pool_that_shrinks_gives_its_gpus_back(pool: ParallelPool) -> None:
    pool.resize(1)
    with parpool(2, quiet=True) as other:
        assert gpus_of(pool) + sorted(gpus_of(other)) == [0, 1, 2]
        assert pool.parfeval(look).result(60) == (0, 0, "0")
    with pytest.raises(ResourceError, match=r"GPU: requested \d, available"):
        pool.resize(5)
    assert pool.num_workers == 1
    pool.resize(3)
    assert sorted(gpus_of(pool)) == [0, 1, 2]
    assert sorted(visible for _, _, visible in pool.parfeval_on_all(look).result(60)) == ["0", "1", "2"]


def test_the_environment_of_the_workers() -> None:
    with parpool(1, env={"NCCL_DEBUG": "WARN", "MY_DATA": "/data"}, resources=NO_GPU, quiet=True) as pool:
        assert pool.parfeval(lambda: (os.environ["NCCL_DEBUG"], os.environ["MY_DATA"])).result(60) == ("WARN", "/data")


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
