"""The agent of a node is told to end, or answers nobody: workers are ended and replaced all the same, and nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from raypool import parpool
from raypool.engine import agents, ray_backend

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(180)]

Eventually = Callable[..., bool]


def living_agents() -> list[psutil.Process]:
    from ray._private import state

    actors = [actor for actor in state.actors().values() if actor["ActorClassName"] == "NodeAgent"]
    return [psutil.Process(actor["Pid"]) for actor in actors if actor["State"] == "ALIVE"]


@pytest.fixture
def the_agent(eventually: Eventually) -> Callable[[], psutil.Process]:
    """Give the one that finds the process of the only pool's agent."""

    def find() -> psutil.Process:
        assert eventually(lambda: len(living_agents()) == 1)
        return living_agents()[0]

    return find


def test_it_ends_when_it_is_told_to(the_agent: Callable[[], psutil.Process], eventually: Eventually) -> None:
    with parpool(1, quiet=True) as pool:
        before = the_agent()
        before.terminate()
        psutil.Process(pool.workers[0].pid).kill()
        assert pool.parfeval(abs, -1).result(60) == 1
        assert eventually(lambda: not before.is_running())


def test_one_that_answers_nobody_is_replaced(
    the_agent: Callable[[], psutil.Process], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "END_TIMEOUT_S", 1.0)
    with parpool(1, quiet=True) as pool:
        before = the_agent()
        before.suspend()
        psutil.Process(pool.workers[0].pid).kill()
        assert pool.parfeval(abs, -1).result(60) == 1
        assert eventually(lambda: not before.is_running())
        assert the_agent() != before


def test_what_it_is_to_cancel_ends_without_it(
    the_agent: Callable[[], psutil.Process], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "END_TIMEOUT_S", 1.0)
    with parpool(1, cancel_grace_s=0.1, quiet=True) as pool:
        future = pool.submit(time.sleep, 600)
        assert eventually(lambda: pool.busy)
        before = the_agent()
        before.suspend()
        assert future.cancel()
        assert pool.parfeval(abs, -1).result(60) == 1
        assert eventually(lambda: not before.is_running())


def test_what_it_does_not_end_is_ended_with_the_pool(
    the_agent: Callable[[], psutil.Process], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WIND_UP_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(ray_backend, name, 1.0)
    with parpool(2, quiet=True) as pool:
        processes = [the_agent(), *(psutil.Process(worker.pid) for worker in pool.workers)]
        processes[0].suspend()
    assert eventually(lambda: not any(process.is_running() for process in processes))
