"""Pools for tests that hold on several backends. The mark nearest to a test says which.

- `arguments`: what a call rejects, before anything runs. Inline.
- `semantics`: order, errors, retries, options, futures. In simulated time, and inline.
- `threads`: what only threads of this process show.
- `concurrent`: several tasks at once. In threads, and on Ray.
- `processes`: pickling, killing, memory, signals. On Ray.
- `everywhere`: the promises that hold the four backends together.

On Ray, make test has what is `everywhere`; in threads and on Ray, what has the mark `quick` beside
another.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from raypool import Future, ParallelPool, WorkerResources, parpool
from raypool.interop.multiprocessing import Pool
from raypool.testing import sim_pool
from tests.leaks import GRACE_S, poll

BACKENDS = {
    "arguments": ("inline",),
    "semantics": ("simulated", "inline"),
    "threads": ("threads",),
    "concurrent": ("threads", "ray"),
    "processes": ("ray",),
    "everywhere": ("simulated", "inline", "threads", "ray"),
}

START_S = 300.0
"""How long a worker on Ray may take to come up: a process that imports much, beside others."""

LIMITS = ("channel.hub.CATCH_UP_S", "channel.capture.WAIT_S", "backends.local.TEARDOWN_TIMEOUT_S")
LIMITS_ON_RAY = ("backend.WIND_UP_TIMEOUT_S", "agents.FINISH_TIMEOUT_S", "claims.SILENT_S")
"""How long a pool waits for what nearly always comes at once: not long enough for a machine that
has much else to do.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make_pool" not in metafunc.fixturenames:
        return
    for node in reversed(metafunc.definition.listchain()):
        marks = {mark.name for mark in node.own_markers} & BACKENDS.keys()
        if marks:
            break
    else:
        pytest.fail(
            f"{metafunc.definition.nodeid} needs one of the marks {', '.join(BACKENDS)}.",
            pytrace=False,
        )
    in_ci = {"threads"} if "everywhere" in marks else {"threads", "ray"}
    if metafunc.definition.get_closest_marker("quick") is not None:
        in_ci = set()
    backends = [
        backend for name, backends in BACKENDS.items() if name in marks for backend in backends
    ]
    parameters = [
        pytest.param(name, marks=[pytest.mark.ci] if name in in_ci else [])
        for name in dict.fromkeys(backends)
    ]
    metafunc.parametrize("make_pool", parameters, indirect=True)


@dataclass(frozen=True)
class PoolMaker:
    """Opens pools on one backend. Those on Ray have workers without a GPU: the GPUs belong to the
    pool that the tests share.
    """

    backend: str

    def __call__(self, num_workers: Any = 2, **changes: Any) -> ParallelPool:
        changes.setdefault("quiet", True)
        if self.backend == "simulated":
            return sim_pool(num_workers, **changes)
        if self.backend == "ray":
            changes.setdefault("resources", WorkerResources(gpus=0))
            changes.setdefault("start_timeout_s", START_S)
        return parpool(num_workers, profile=self.profile, **changes)

    @property
    def profile(self) -> str:
        """The profile of `parpool` that stands for this backend."""
        return {"ray": "local", "simulated": "inline"}.get(self.backend, self.backend)

    @property
    def is_in_processes(self) -> bool:
        return self.backend == "ray"

    @property
    def is_concurrent(self) -> bool:
        """Whether tasks run beside the test that has handed them in."""
        return self.backend in ("threads", "ray")


@pytest.fixture
def make_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PoolMaker:
    """Open pools on the backend of this test."""
    limits = [f"raypool.{name}" for name in LIMITS]
    if request.param == "ray":
        request.getfixturevalue("ray_session")
        limits += (f"raypool.backends.ray.{name}" for name in LIMITS_ON_RAY)
    for limit in limits:
        monkeypatch.setattr(limit, GRACE_S)
    return PoolMaker(request.param)


@pytest.fixture
def pool(request: pytest.FixtureRequest, make_pool: PoolMaker) -> Iterator[ParallelPool]:
    """Give a pool of three workers: on Ray the one that all tests share, elsewhere a new one."""
    if make_pool.backend == "ray":
        yield request.getfixturevalue("shared_pool")
        return
    with make_pool(3) as pool:
        yield pool


@pytest.fixture
def call_back(pool: ParallelPool, make_gate: Any) -> Callable[[Callable[[Future[Any]], Any]], Any]:
    """Give a function that calls another in the callback of a future, and returns what that
    returns, or its error.
    """

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
        return answers.get(timeout=300)

    return call


@pytest.fixture
def patience(pool: ParallelPool, make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cancelled tasks have as much time to end as a machine takes that has much else to do."""
    backend: Any = pool._engine.backend
    if make_pool.is_in_processes:
        monkeypatch.setattr(backend._agents, "_cancel_grace_s", GRACE_S)
    else:
        monkeypatch.setattr(backend, "_profile", replace(backend._profile, cancel_grace_s=GRACE_S))


@pytest.fixture
def check_pool() -> Callable[[ParallelPool], None]:
    """Give a check that a pool is as good as new: all its workers answer, and nothing is queued or
    running.
    """

    def check(pool: ParallelPool) -> None:
        assert pool.parfeval_on_all(lambda: "here").result(300) == ["here"] * pool.num_workers
        assert list(pool.parfor(lambda x: x + 1, range(7))) == list(range(1, 8))
        # what is done of a call may be told before the call has ended
        assert poll(lambda: not pool.busy)
        assert pool.statistics().queued == pool.statistics().running == 0

    return check


@pytest.fixture
def mp(pool: ParallelPool) -> Iterator[Pool]:
    """Give a pool in the shape of `multiprocessing.Pool`, which `pool` lends its workers."""
    mp = Pool(pool=pool)
    yield mp
    mp.terminate()
    mp.join()
