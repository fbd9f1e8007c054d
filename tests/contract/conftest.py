"""One fixture opens the pools: every test in this folder holds for each kind of pool."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raypool import Future, ParallelPool, WorkerResources, parpool
from raypool.interop.multiprocessing import Pool

PROFILES = ("inline", "threads", "local")

WITH_A_POOL_OF_THEIR_OWN = {"black_hole", "composite", "constants", "corners", "life", "partition", "queues"}
"""Of these files (test_..._contract.py) the tests that open another pool on Ray, a second or more each, are `long`: the same
tests run with "threads" and "inline", and other files open and end pools on Ray."""

BUT_NOT = {
    "test_setup_runs_once_in_each_worker_before_anything_else",
    "test_a_worker_that_replaces_another_is_set_up_too",
    "test_teardown_runs_once_in_each_worker_at_its_end",
    "test_idle_workers_end_and_are_started_again",
}
"""What only a process of its own can show."""


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long on Ray only."""
    for item in items:
        name = item.path.stem.removeprefix("test_").removesuffix("_contract")
        if item.path.parent != Path(__file__).parent or name not in WITH_A_POOL_OF_THEIR_OWN:
            continue
        assert isinstance(item, pytest.Function)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        direct = item._fixtureinfo.argnames
        is_on_ray = any(isinstance(value, str) and value == "local" for value in parameters)
        if is_on_ray and "make_pool" in direct and "pool" not in direct and item.originalname not in BUT_NOT:
            item.add_marker(pytest.mark.long)


@dataclass(frozen=True)
class PoolMaker:
    """Opens pools of one kind. Those on Ray have workers without a GPU: the GPUs belong to the pool that the tests share."""

    profile: str

    def __call__(self, num_workers: int = 2, **changes: Any) -> ParallelPool:
        if self.profile == "local":
            changes.setdefault("resources", WorkerResources(gpus=0))
        return parpool(num_workers, profile=self.profile, quiet=True, **changes)

    @property
    def is_in_processes(self) -> bool:
        return self.profile == "local"


@pytest.fixture(scope="module", params=PROFILES)
def make_pool(request: pytest.FixtureRequest) -> PoolMaker:
    """Give the one that opens pools; tests that need tasks to run beside each other name the kinds that can."""
    if request.param == "local":
        request.getfixturevalue("ray_session")
    return PoolMaker(request.param)


@pytest.fixture(scope="module")
def pool(make_pool: PoolMaker, by_value: None) -> Iterator[ParallelPool]:
    """Give a pool of three workers, which the tests of a file share."""
    changes: dict[str, Any] = {"resources": WorkerResources()} if make_pool.is_in_processes else {}
    with make_pool(3, **changes) as pool:
        yield pool


@pytest.fixture
def call_back(pool: ParallelPool, make_gate: Any) -> Callable[[Callable[[Future[Any]], Any]], Any]:
    """Give a function that calls another in the callback of a future, and returns what that returns, or its error."""

    def call(fn: Callable[[Future[Any]], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def answer(future: Future[Any]) -> None:
            try:
                answers.put(fn(future))
            except BaseException as error:
                answers.put(error)

        gate = make_gate()
        job = pool.parfeval(lambda: gate.wait() or 5)
        job.add_done_callback(answer)
        gate.open()
        return answers.get(timeout=30)

    return call


@pytest.fixture
def check_pool() -> Callable[[ParallelPool], None]:
    """Give a check that a pool is as good as new: all its workers answer, and nothing is queued or running."""

    def check(pool: ParallelPool) -> None:
        assert pool.parfeval_on_all(lambda: "here").result(60) == ["here"] * pool.num_workers
        assert list(pool.parfor(lambda x: x + 1, range(7))) == list(range(1, 8))
        assert not pool.busy
        assert pool.statistics().queued == pool.statistics().running == 0

    return check


@pytest.fixture
def mp(pool: ParallelPool) -> Iterator[Pool]:
    """Give a pool in the shape of `multiprocessing.Pool`, on the pool that the tests of a file share."""
    mp = Pool(pool=pool)
    yield mp
    mp.terminate()
    mp.join()
