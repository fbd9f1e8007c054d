"""Parts of pools on Ray, with three GPUs that do not exist (scenario 5)."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from raypool import ParallelPool, ResourceError, WorkerResources, current_task, parpool

pytestmark = [pytest.mark.usefixtures("ray_session", "by_value")]

CPU = WorkerResources(gpus=0, cpus=0.5)
GPU = WorkerResources(gpus=1)
HALF = WorkerResources(gpus=0.5)


def look() -> tuple[int, int | None, str | None]:
    """What a task sees of its worker and device."""
    return current_task().worker, current_task().gpu, os.environ.get("CUDA_VISIBLE_DEVICES")


def gpus_of(view: Any) -> list[int | None]:
    return [worker.gpu for worker in view.workers]


def test_two_pools_of_a_mixed_one_run_at_the_same_time(
    make_gate: Callable[[], Any], eventually: Any
) -> None:
    """Scenario 5: workers without a GPU prepare, those with one train; neither waits for the
    other.
    """
    gate = make_gate()
    with parpool(resources=[CPU] * 2 + [GPU] * 2, quiet=True) as pool:
        training, preparing = pool.partition(per_gpu=1)
        assert [worker.index for worker in training.workers] == [2, 3]
        assert [worker.index for worker in preparing.workers] == [0, 1]

        def train(_: int) -> str | None:
            gate.wait()
            return look()[2]

        models = [training.parfeval(train, number) for number in range(4)]
        assert eventually(
            lambda: [model.state for model in models] == ["running"] * 2 + ["queued"] * 2
        )
        prepared = preparing.parfor(lambda x: (x + 1, *look()[1:]), 60)
        assert [value for value, _, _ in prepared] == list(range(1, 61))
        assert {(gpu, visible) for _, gpu, visible in prepared} == {(None, "")}
        assert (training.idle_workers, preparing.idle_workers) == (0, 2)
        gate.open()
        assert {model.result(300) for model in models} == {str(gpu) for gpu in gpus_of(training)}
        assert [value[0] for value in pool.parfeval_on_all(look).result(300)] == list(range(4))


def test_so_many_workers_for_each_gpu() -> None:
    with parpool(6, resources=HALF, quiet=True) as pool:
        for number, expected in ((1, [1, 1, 1]), (2, [2, 2, 2]), (5, [2, 2, 2])):
            part, rest = pool.partition(per_gpu=number)
            assert sorted(Counter(gpus_of(part)).values()) == expected
            assert part.num_workers + rest.num_workers == 6
            assert Counter(gpus_of(part)) + Counter(gpus_of(rest)) == Counter(gpus_of(pool))
            assert {gpu for _, gpu, _ in part.parfeval_on_all(look).result(300)} == {0, 1, 2}


@pytest.mark.long
def test_workers_with_several_gpus() -> None:
    with parpool(resources=[WorkerResources(gpus=2), CPU, GPU], quiet=True) as pool:
        part, rest = pool.partition(per_gpu=1)
        assert [len(worker.gpus) for worker in part.workers] == [2, 1]
        assert gpus_of(rest) == [None]


def test_parts_of_a_pool_that_rests(eventually: Any) -> None:
    """Which GPU is whose is known also while no worker has a process; and each comes back to its
    own.
    """
    with parpool(resources=[CPU, GPU, GPU], idle_timeout_s=0.3, quiet=True) as pool:
        before = [(worker.index, worker.gpu) for worker in pool.workers]
        assert eventually(lambda: {worker.state for worker in pool.workers} == {"parked"})
        training, preparing = pool.partition(per_gpu=1)
        assert [(worker.index, worker.gpu) for worker in training.workers] == before[1:]
        with pytest.raises(ResourceError, match="requested 2, available 1"):
            parpool(2, start_timeout_s=0.5, quiet=True)
        assert set(training.parfor(lambda _: look()[1], 10)) <= {gpu for _, gpu in before[1:]}
        assert pool.parfeval_on_all(look).result(300) == [
            (index, gpu, "" if gpu is None else str(gpu)) for index, gpu in before
        ]
        assert preparing.parfeval(look).result(300)[0] == 0


# --- the pool that tests share --------------------------------------------------------------------


def test_a_worker_that_is_replaced_stays_in_its_part(
    pool: ParallelPool, eventually: Any, marks: Any
) -> None:
    """And a sticky call of a part is for the part's workers only, also for those that come
    later.
    """
    part, rest = pool.partition(workers=[1])
    part.parfeval_on_all(lambda: marks.add(f"part {look()[0]}"), sticky=True).result(300)
    before = pool.workers
    for view, index in ((part, 1), (rest, 0)):
        view.options(worker=index, retries=0).parfeval(
            os.kill, before[index].pid, signal.SIGKILL
        ).exception(300)
        assert eventually(
            lambda index=index: (
                pool.workers[index].pid != before[index].pid and pool.workers[index].state == "idle"
            ),
            300,
        )
    assert [worker.index for worker in part.workers] == [1]
    assert part.parfeval(look).result(300) == (1, before[1].gpu, str(before[1].gpu))
    assert rest.parfeval_on_all(look).result(300) == [
        (place, before[place].gpu, str(before[place].gpu)) for place in (0, 2)
    ]
    assert marks.all() == ["part 1", "part 1"]


@pytest.mark.quick
def test_items_of_a_part_run_again_in_the_part(pool: ParallelPool) -> None:
    _, rest = pool.partition(workers=[2])

    def die_once(item: int) -> int:
        if item == 3 and current_task().attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return current_task().worker

    assert set(rest.parfor(die_once, 8)) <= {0, 1}


@pytest.mark.quick
def test_the_gpus_of_a_part_stay_the_pools(pool: ParallelPool) -> None:
    """Also when the part is shut down."""
    part, rest = pool.partition(workers=[0])
    part.delete()
    with pytest.raises(ResourceError, match="requested 1, available 0"):
        parpool(1, start_timeout_s=0.1, quiet=True)
    assert len(rest.parfeval_on_all(look).result(300)) == 2
