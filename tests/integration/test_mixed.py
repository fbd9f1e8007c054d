"""Pools whose workers differ: some have a GPU, some have none; on Ray, with three GPUs that do not
exist.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from raypool import (
    InvalidValueError,
    ParallelPool,
    ResourceError,
    WorkerResources,
    current_task,
    parpool,
)

pytestmark = [pytest.mark.usefixtures("ray_session", "by_value")]

CPU = WorkerResources(gpus=0, cpus=0.5)
GPU = WorkerResources(gpus=1)
HALF = WorkerResources(gpus=0.5)


def look() -> tuple[int, int | None, str | None]:
    """What a task sees of its worker and device."""
    return current_task().worker, current_task().gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


def gpus_of(pool: ParallelPool) -> list[int | None]:
    return [worker.gpu for worker in pool.workers]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- what there is --------------------------------------------------------------------------------


def test_two_workers_without_a_gpu_and_two_with_one(capfd: Any) -> None:
    with parpool(resources=[CPU] * 2 + [GPU] * 2) as pool:
        assert gpus_of(pool)[:2] == [None] * 2
        first, second = gpus_of(pool)[2:]
        assert {first, second} < {0, 1, 2}
        assert first != second
        seen = pool.parfeval_on_all(look).result(300)
        assert [index for index, _, _ in seen] == list(range(4))
        assert [visible for _, _, visible in seen] == [""] * 2 + [str(first), str(second)]
        assert len({worker.pid for worker in pool.workers}) == 4
        with parpool(quiet=True) as rest:
            assert set(gpus_of(rest)) == {0, 1, 2} - {first, second}
    assert f": GPU {first}, {second} and 2 without, ready in " in capfd.readouterr().out


@pytest.mark.long
def test_each_kind_has_its_cores_and_gpus(eventually: Any) -> None:
    free = ray.available_resources()
    with parpool(resources=[CPU, WorkerResources(gpus=2, cpus=1), CPU], quiet=True) as pool:
        assert [len(worker.gpus) for worker in pool.workers] == [0, 2, 0]

        def taken() -> tuple[float, float]:
            now = ray.available_resources()
            return free["CPU"] - now["CPU"], free["GPU"] - now.get("GPU", 0)

        assert eventually(lambda: taken() == (2, 2)), taken()


@pytest.mark.long
def test_shares_of_gpus_beside_workers_without_one() -> None:
    with parpool(resources=[HALF, CPU, HALF, HALF, HALF, HALF], quiet=True) as pool:
        gpus = gpus_of(pool)
        assert gpus[1] is None
        assert max(Counter(gpus).values()) == 2
        assert len(set(gpus) - {None}) == 3


def test_chosen_gpus_go_to_those_that_have_one() -> None:
    with parpool(resources=[CPU, GPU, CPU, GPU], gpus=[2, 0], quiet=True) as pool:
        assert gpus_of(pool) == [None, 2, None, 0]
        assert [visible for _, _, visible in pool.parfeval_on_all(look).result(300)] == [
            "",
            "2",
            "",
            "0",
        ]


@pytest.mark.long
def test_loops_use_workers_of_all_kinds(make_gate: Callable[[], Any], eventually: Any) -> None:
    gate = make_gate()
    with parpool(resources=[CPU, CPU, GPU], quiet=True) as pool:
        jobs = [
            pool.parfeval(lambda: (gate.wait(), current_task().gpu is None)[1]) for _ in range(3)
        ]
        assert eventually(lambda: all(job.running() for job in jobs))
        gate.open()
        assert sorted(job.result(300) for job in jobs) == [False, True, True]


# --- too little -----------------------------------------------------------------------------------


def test_one_kind_is_missing() -> None:
    """The error comes at once, whatever the time limit, and nothing of the other kinds is kept
    (`nothing_is_left` looks).
    """
    none, both = WorkerResources(gpus=0), WorkerResources(gpus=1, cpus=1)
    for resources, words, requested, available in (
        (
            [CPU, GPU, GPU, GPU, GPU],
            "GPU: requested 4, available 3 .*List at most 3 such workers",
            4,
            3,
        ),
        ([GPU] + [none] * 5, "CPU: requested 5, available 4 .*List at most 4 such workers", 5, 4),
        ([GPU, WorkerResources(gpus=0, cpus=9)], "CPU: requested 9, available 0", 9, 0),
        ([both] * 2 + [none] * 3, r"CPU: requested 5 \(2 \+ 3\) for 5 workers, available 4", 5, 4),
        (
            [GPU, WorkerResources(gpus=0, memory_bytes=10**15)],
            "No node of the cluster is large enough.*memory",
            1,
            0,
        ),
    ):
        with pytest.raises(ResourceError, match=f"(?s){words}") as caught:
            parpool(resources=resources, start_timeout_s=1000, quiet=True)
        assert (caught.value.requested, caught.value.available) == (requested, available)


@pytest.mark.parametrize("gpus", [[0, 1], pytest.param(None, marks=pytest.mark.long)])
def test_somebody_holds_what_one_kind_needs(gpus: list[int] | None) -> None:
    """What this pool has claimed itself meanwhile is not named among the holders."""
    others = [placement_group([{"GPU": 1}]) for _ in range(2)]
    ray.get([other.ready() for other in others], timeout=300)
    with pytest.raises(ResourceError, match=r"requested 2, available (0|1)") as caught:
        parpool(resources=[CPU, CPU, GPU, GPU], gpus=gpus, start_timeout_s=5, quiet=True)
    assert caught.value.holders == ("2 x a placement group (1 GPU)",)
    for other in others:
        remove_placement_group(other)
    with parpool(gpus=[1, 2], quiet=True):
        with pytest.raises(
            ResourceError, match=r"requested 2, available 1 .*This process itself holds 2"
        ):
            parpool(resources=[CPU, CPU, GPU, GPU], gpus=gpus, start_timeout_s=600, quiet=True)
        with parpool(resources=[CPU, CPU, GPU], quiet=True) as pool:
            assert gpus_of(pool) == [None, None, 0]


def test_another_number_of_workers_than_the_list_has() -> None:
    for number in (2, 4, (1, 2)):
        with pytest.raises(InvalidValueError, match="describes 3 workers"):
            parpool(number, resources=[CPU, CPU, GPU], quiet=True)


# --- over time ------------------------------------------------------------------------------------


def test_a_worker_of_each_kind_is_replaced_by_its_like(eventually: Any) -> None:
    with parpool(resources=[CPU, GPU, HALF, CPU], quiet=True) as pool:
        before = pool.workers
        for index in range(4):
            pool.options(worker=index).parfeval(die).exception(300)
            assert eventually(
                lambda index=index: (
                    pool.workers[index].pid != before[index].pid
                    and pool.workers[index].state == "idle"
                ),
                300,
            )
        after = pool.workers
        assert [(worker.index, worker.gpu) for worker in after] == [
            (worker.index, worker.gpu) for worker in before
        ]
        gpu, half = gpus_of(pool)[1:3]
        assert pool.parfeval_on_all(look).result(300) == [
            (0, None, ""),
            (1, gpu, str(gpu)),
            (2, half, str(half)),
            (3, None, ""),
        ]


def test_a_mixed_pool_shrinks_and_fills_up_again(eventually: Any) -> None:
    with parpool(resources=[GPU, CPU, GPU, CPU], quiet=True) as pool:
        pool.resize(1)
        assert pool.num_workers == 1
        held = [gpu for gpu in gpus_of(pool) if gpu is not None]
        assert eventually(lambda: ray.available_resources().get("GPU", 0) == 3 - len(held))
        pool.resize(4)
        assert Counter(gpu is None for gpu in gpus_of(pool)) == {True: 2, False: 2}
        assert len(set(gpus_of(pool))) == 3
        assert sorted(pool.parfeval_on_all(lambda: current_task().gpu is None).result(300)) == [
            False,
            False,
            True,
            True,
        ]
        with pytest.raises(
            ResourceError, match=r"Workers: requested 1, available 0: .* describes 4 in all"
        ):
            pool.resize(5)
        assert pool.num_workers == 4


@pytest.mark.long
def test_chosen_gpus_come_back_when_a_mixed_pool_fills_up_again() -> None:
    with parpool(resources=[CPU, GPU, GPU], gpus=[2, 1], quiet=True) as pool:
        pool.resize(1)
        pool.resize(3)
        assert sorted(gpu for gpu in gpus_of(pool) if gpu is not None) == [1, 2]


def test_two_mixed_pools_at_once() -> None:
    """Both open at the same moment, where there is enough for both."""
    pools: list[ParallelPool] = []
    starters = [
        threading.Thread(
            target=lambda: pools.append(
                parpool(resources=[CPU, GPU, CPU], quiet=True, start_timeout_s=300)
            )
        )
        for _ in range(2)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len({gpu for pool in pools for gpu in gpus_of(pool) if gpu is not None}) == 2
    for pool in pools:
        pool.delete()
