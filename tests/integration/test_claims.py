"""Claims on GPUs: two who choose at once, and pools that grow and shrink."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from raypool import (
    ParallelPool,
    PoolClosedError,
    RaypoolError,
    ResourceError,
    StartupError,
    WorkerResources,
    parpool,
)


def test_two_pools_choose_at_once(ray_session: None, by_value: None) -> None:
    pools: dict[int, ParallelPool] = {}

    def choose(gpu: int) -> None:
        pools[gpu] = parpool(gpus=[gpu], quiet=True, start_timeout_s=300)

    threads = [threading.Thread(target=choose, args=(gpu,)) for gpu in (0, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {gpu: [worker.gpu for worker in pool.workers] for gpu, pool in pools.items()} == {
        0: [0],
        1: [1],
        2: [2],
    }
    for pool in pools.values():
        pool.delete()


def test_chosen_gpus_can_be_given_back_and_had_again(ray_session: None, by_value: None) -> None:
    with parpool(gpus=[0, 2], quiet=True) as pool:
        pool.resize(1)
        assert pool.num_workers == 1
        pool.resize(2)
        assert sorted(worker.gpu for worker in pool.workers if worker.gpu is not None) == [0, 2]
        with pytest.raises(
            ResourceError, match="requested 1, available 0: the pool may use GPU 0, 2 only"
        ):
            pool.resize(3)


def test_shares_of_a_gpu_fill_up_before_another_is_taken(ray_session: None, by_value: None) -> None:
    half = WorkerResources(gpus=0.5)
    with parpool(2, resources=half, quiet=True) as pool:
        assert (
            sorted(worker.gpu for worker in pool.workers) == [0, 1]
            or len({w.gpu for w in pool.workers}) == 2
        )
        pool.resize(4)
        gpus = [worker.gpu for worker in pool.workers]
        assert sorted(gpus.count(gpu) for gpu in set(gpus)) == [2, 2]
        pool.resize(6)
        assert sorted(worker.gpu for worker in pool.workers) == [0, 0, 1, 1, 2, 2]


def test_a_pool_that_is_shut_down_while_it_waits_for_gpus_keeps_none(
    ray_session: None, by_value: None, eventually: Callable[..., bool]
) -> None:
    with parpool(2, quiet=True), parpool(1, quiet=True, start_timeout_s=300) as pool:
        caught: list[BaseException] = []

        def grow() -> None:
            try:
                pool.resize(2)
            except RaypoolError as error:
                caught.append(error)

        thread = threading.Thread(target=grow)
        thread.start()
        pool.shutdown()
        thread.join(300)
        assert not thread.is_alive()
        assert isinstance(caught[0], (PoolClosedError, ResourceError))


# --- start_timeout_s ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "scarce"),
    [
        (WorkerResources(gpus=1), "1 GPU"),
        pytest.param(WorkerResources(gpus=0, cpus=2), "2 CPU", marks=pytest.mark.long),
    ],
)
def test_a_pool_that_cannot_grow_says_in_time_who_holds_the_rest(
    ray_session: None,
    by_value: None,
    monkeypatch: pytest.MonkeyPatch,
    resources: WorkerResources,
    scarce: str,
) -> None:
    name, others = scarce[2:], 2 if scarce == "1 GPU" else 1
    with parpool(1, resources=resources, start_timeout_s=300, quiet=True) as pool:
        other = placement_group([{name: float(scarce[:1])}] * others)
        ray.get(other.ready(), timeout=300)
        before = pool.workers
        # workers have all that time to come up, and only claims have less
        placement = pool._engine.backend._placement
        with monkeypatch.context() as patch:
            short = dataclasses.replace(placement._profile, start_timeout_s=5.0)
            patch.setattr(placement, "_profile", short)
            with pytest.raises(
                ResourceError,
                match=rf"{name}: requested .*this pool holds {scarce[:1]} of them\)\. Held by: a"
                rf" placement group \(2 {name}\)\. ",
            ) as caught:
                pool.resize(2)
        assert caught.value.available == 0
        assert pool.workers == before, "the pool stays as it is"
        assert pool.parfeval(abs, -1).result(300) == 1
        remove_placement_group(other)
        pool.resize(2)
        assert pool.num_workers == 2


def test_what_a_pool_that_ends_gives_back_is_waited_for(
    ray_session: None,
    by_value: None,
    make_gate: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., bool],
) -> None:
    """Another pool of this process is not waited for while it is open, but it is as soon as it
    takes no more work.
    """
    gate = make_gate()
    with parpool(3, quiet=True) as holder:
        with pytest.raises(
            ResourceError, match=r"This process itself holds 3: the pool opened at test_claims\.py"
        ):
            parpool(1, start_timeout_s=600, quiet=True)
        last = holder.parfeval(gate.wait)
        holder.shutdown(wait=False)
        opened: list[ParallelPool] = []
        opener = threading.Thread(
            target=lambda: opened.append(parpool(3, start_timeout_s=300, quiet=True))
        )
        opener.start()
        assert eventually(lambda: "Waiting for 3 GPU" in caplog.text)
        gate.open()
        opener.join()
        last.result(300)
    assert opened[0].num_workers == 3
    opened[0].delete()


def test_workers_that_do_not_come_up_in_time(
    ray_session: None,
    by_value: None,
    make_gate: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = make_gate()
    with pytest.raises(
        StartupError,
        match=r"2 of 2 workers did not start.*did not start within start_timeout_s=6",
    ):
        # the claims, too, have to come within that time
        parpool(2, setup=gate.wait, start_timeout_s=6, quiet=True)
    assert "teardown" not in caplog.text, "it would wait for the setup"
