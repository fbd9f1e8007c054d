"""The driver's side of the node agents, with agents that the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raypool.backends.ray import agents as module
from raypool.backends.ray.agents import Agents


class FakeAgent:
    """Answers `take` when the test says so."""

    def __init__(self) -> None:
        self.answer: Callable[[Any], None] | None = None
        self.take = SimpleNamespace(remote=lambda _: self)
        self.finish = SimpleNamespace(remote=lambda: None)


class Silent(threading.Semaphore):
    """Says when somebody waits for it."""

    def __init__(self, on_wait: Callable[[], object]) -> None:
        super().__init__(0)
        self._on_wait = on_wait

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if super().acquire(blocking=False):
            return True
        self._on_wait()
        return super().acquire(timeout=timeout)


def test_the_last_messages_come_although_an_agent_was_replaced(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    made: list[FakeAgent] = []
    told: list[Any] = []
    is_waiting = threading.Event()

    def make(*_: Any) -> FakeAgent:
        made.append(FakeAgent())
        return made[-1]

    def kill(_: Agents, killed: Any) -> None:
        told.extend(killed)
        is_waiting.set()

    def when_done(agent: FakeAgent, callback: Callable[[Any], None]) -> None:
        agent.answer = callback

    def finish(agent: FakeAgent) -> None:
        assert is_waiting.wait(300)
        assert agent.answer is not None
        agent.answer([(7, 0, "the last message")])
        agent.answer(None)

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    monkeypatch.setattr(module, "ray", SimpleNamespace(remote=lambda _: options))
    monkeypatch.setattr(
        module,
        "client",
        SimpleNamespace(is_far=bool, home_node=lambda: "01" * 28, driver_process=bool),
    )
    monkeypatch.setattr(Agents, "kill", kill)
    monkeypatch.setattr(module, "when_done", when_done)
    monkeypatch.setattr(module, "FINISH_TIMEOUT_S", 300.0)
    hub = SimpleNamespace(deliver=lambda *message: told.append(message))
    agents = Agents(hub, 0.0, lambda _: False, None, lambda: True)  # type: ignore[arg-type]
    agents._silent = Silent(is_waiting.set)

    assert agents.home() is made[0]
    assert made[0].answer is not None
    made[0].answer(RuntimeError("it was killed"))
    assert eventually(lambda: agents.home() is made[-1] is not made[0])
    finishing = threading.Thread(target=finish, args=[made[1]])
    finishing.start()
    agents.close()
    finishing.join()
    assert told == [(7, 0, "the last message"), made[1]]
