"""The agent of a node is told to end, or answers nobody: workers are ended and replaced all the
same, and nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from raypool import ParallelPool, SpmdError, WorkerLostError, parpool, report
from raypool.backends.ray import agents, backend
from raypool.core.messages import Signal
from raypool.errors import LossReason
from tests.shared_pool import shared

Eventually = Callable[..., bool]


def living_agents() -> list[psutil.Process]:
    from ray._private import state

    found = []
    for actor in state.actors().values():
        if actor["ActorClassName"] == "NodeAgent" and actor["State"] == "ALIVE":
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray hears of its end a moment later
                found.append(psutil.Process(actor["Pid"]))
    return found


@pytest.fixture
def first(shared_pool: ParallelPool) -> Iterator[Any]:
    """Give the pool's first worker. Its store goes with the agent, so the next test gets another
    pool.
    """
    part, _ = shared_pool.partition(workers=[0])
    yield part
    shared.close()


@pytest.fixture
def pair(shared_pool: ParallelPool) -> Iterator[Any]:
    """Give the pool's first two workers, likewise."""
    part, _ = shared_pool.partition(workers=[0, 1])
    yield part
    shared.close()


@pytest.fixture
def the_agent(eventually: Eventually) -> Callable[[], psutil.Process]:
    """Give what finds the process of the only pool's agent."""

    def find() -> psutil.Process:
        found: list[psutil.Process] = []

        def is_one() -> bool:
            found[:] = living_agents()
            return len(found) == 1

        assert eventually(is_one)
        return found[0]

    return find


@pytest.mark.quick
def test_it_ends_when_it_is_told_to(
    first: Any,
    the_agent: Callable[[], psutil.Process],
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, (worker,), store = the_agent(), first.workers, first.store
    first.parfeval(store.put, "key", 1).result(300)
    store.on_change(lambda store, key: None)
    before.terminate()
    psutil.Process(worker.pid).kill()
    assert first.parfeval(os.getpid).result(300) != worker.pid
    assert eventually(lambda: not before.is_running())

    def is_shared() -> bool:
        with contextlib.suppress(WorkerLostError):  # until another takes its place
            store["other"] = 2
            return bool(first.parfeval(store.keys).result(300) == ["other"])
        return False

    assert eventually(is_shared), "also a store that has travelled"
    assert eventually(lambda: "A listener of pool.store was removed" in caplog.text)


def test_the_next_one_passes_on_what_a_running_task_reports(
    first: Any, the_agent: Callable[[], psutil.Process], eventually: Eventually, make_gate: Any
) -> None:
    has_died, gate = make_gate(), make_gate()

    def train() -> None:
        report(step=1)
        has_died.wait()
        report(step=2)
        gate.wait()

    future = first.parfeval(train)
    assert eventually(lambda: len(future.metrics) == 1)
    the_agent().kill()
    has_died.open()
    assert eventually(lambda: len(future.metrics) == 2)
    gate.open()
    future.result(300)
    assert future.metrics["step"].tolist() == [1, 2]


def test_one_that_answers_nobody_is_replaced(
    first: Any,
    the_agent: Callable[[], psutil.Process],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "END_TIMEOUT_S", 1.0)
    before, (worker,) = the_agent(), first.workers
    before.suspend()
    psutil.Process(worker.pid).kill()
    assert first.parfeval(os.getpid).result(300) != worker.pid
    assert eventually(lambda: not before.is_running())
    assert the_agent() != before


def test_what_it_is_to_cancel_ends_without_it(
    first: Any,
    the_agent: Callable[[], psutil.Process],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "END_TIMEOUT_S", 1.0)
    monkeypatch.setattr(first._engine.backend._agents, "_cancel_grace_s", 1.0)
    future = first.submit(time.sleep, 600)
    assert eventually(future.running)
    before = the_agent()
    before.suspend()
    assert future.cancel()
    assert first.parfeval(abs, -1).result(300) == 1
    assert eventually(lambda: not before.is_running())


def test_a_worker_that_is_lost_while_it_is_replaced_takes_nothing_with_it(
    first: Any, eventually: Eventually, make_gate: Any
) -> None:
    """The next worker in its place is not killed for it."""
    ray_backend = first._engine.backend

    def there() -> list[int]:
        return [key for key, slot in list(ray_backend._by_worker.items()) if slot.place == 0]

    (lost,) = there()
    agents_gate, gate = make_gate(), make_gate()
    ray_backend._agents.later(agents_gate.wait)
    ray_backend._lose(lost, LossReason.OUT_OF_MEMORY, "it used too much memory")
    future = first.options(fresh_process=True).parfeval(gate.wait)
    assert eventually(lambda: there() not in ([], [lost]))
    next_one = there()
    agents_gate.open()
    assert eventually(future.running)
    assert there() == next_one
    gate.open()
    future.result(300)


def test_a_signal_for_a_worker_that_is_lost_just_then(
    first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pool = first._engine.backend._agents
    (worker_id,) = (key for key, (agent, _) in list(of_pool._by_worker.items())[:1])

    def is_up() -> bool:
        of_pool._by_worker.pop(worker_id, None)  # another thread, just then
        return True

    monkeypatch.setattr(of_pool, "_is_up", is_up)
    of_pool.signal(worker_id, 0, 0, Signal.CANCEL, lambda: None)


def add_up(context: Any) -> int:
    return context.all_reduce(context.rank + 1)


def train() -> int:
    import ray.train

    return ray.train.get_context().get_world_size()


def test_one_that_dies_while_ranks_meet_is_a_lost_worker(
    pair: ParallelPool, the_agent: Callable[[], psutil.Process], eventually: Eventually
) -> None:
    """A training goes on with the next agent; a call of spmd, which runs once only, fails and says
    what was lost.
    """
    processes = [psutil.Process(worker.pid) for worker in pair.workers]

    def call_without_agent(call: Callable[..., Any], fn: Callable[..., Any]) -> Any:
        """Let rank 0 wait for rank 1, whose process stands still, and end the agent where they
        meet.
        """
        assert eventually(lambda: pair.idle_workers == 2)
        processes[0].suspend()
        try:
            work = call(fn, workers=[1, 0])
            assert eventually(work.running)
            agent = the_agent()
            agent.kill()
            assert eventually(lambda: not agent.is_running())
        finally:
            processes[0].resume()
        return work

    call = call_without_agent(pair.spmd_async, add_up)
    with pytest.raises(SpmdError, match="agent, through which its processes meet") as caught:
        call.result(300)
    assert isinstance(caught.value.__cause__, WorkerLostError)
    # until the end: to let go of it takes the worker that stands still
    kept = pair.spmd(add_up, workers=[0, 1])
    assert list(kept) == [3, 3]
    run = call_without_agent(pair.train, train)
    assert run.result(300).values == [2, 2]
    assert run.attempts > 1
    assert [worker.pid for worker in pair.workers] == [process.pid for process in processes]


def test_what_it_does_not_end_is_ended_with_the_pool(
    ray_session: None,
    the_agent: Callable[[], psutil.Process],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WIND_UP_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(backend, name, 1.0)
    with parpool(1, quiet=True) as pool:
        processes = [the_agent(), *(psutil.Process(worker.pid) for worker in pool.workers)]
        processes[0].suspend()
    assert eventually(lambda: not any(process.is_running() for process in processes))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_of_the_end_that_fails_keeps_no_other_from_being_done(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    with parpool(1, quiet=True) as pool:
        monkeypatch.setattr(pool._engine.backend._hub, "close", fail)
    assert eventually(lambda: all(each.name != "raypool-watch" for each in threading.enumerate()))
