"""What the chaos needs: seeds, somebody who kills at random moments, and traces that are replayed
at the end.

A test that asks for `seed` runs with as many seeds as are wanted by `--seeds`: 3 in `make test-ci`,
where one is enough for some tests, and 200 in `make chaos` (others each time; `FIRST=` repeats
those of a run). What a seed decides is what is done and when it is tried; when it happens is the
machine's business. So a failure says where the trace is: that happens again just as it did.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raypool.core import messages as m
from raypool.testing import replay

FEW = 10
"""From so many seeds on, each test has all of them."""

DEADLY = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
"""What workers are killed with; mostly the one that nobody can do anything about."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="run the chaos with so many seeds; one without it")
    parser.addoption("--first-seed", type=int, help="the first of them; random without it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "seeds(n): so many seeds are enough where few are wanted")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("seeds")
        metafunc.parametrize("seed", seeds_of(metafunc.config, mark.args[0] if mark else FEW))


def seeds_of(config: pytest.Config, enough: int) -> range:
    wanted = config.getoption("--seeds", default=None)
    if wanted is None:
        return range(1)
    first = config.getoption("--first-seed")
    if first is None:
        run: str | None = getattr(config, "workerinput", {}).get("testrunuid")
        # the same in all processes of xdist
        first = config.stash.setdefault(FIRST, random.Random(run).randrange(10**6))
    return range(first, first + (wanted if wanted >= FEW else min(wanted, enough)))


FIRST = pytest.StashKey[int]()
TRACES = pytest.StashKey[list[Path]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    for path in item.stash.get(TRACES, []):
        report.sections.append(("trace", f"raypool.testing.replay({str(path)!r})"))
    return report


# --- traces ---------------------------------------------------------------------------------------


@pytest.fixture
def make_trace(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Give files for traces. At the end each of them is replayed, with all invariants, and nothing
    was settled twice.
    """
    paths: list[Path] = request.node.stash.setdefault(TRACES, [])

    def make() -> Path:
        paths.append(tmp_path / f"trace-{len(paths)}.jsonl")
        return paths[-1]

    yield make
    for path in paths:
        if path.exists():  # a driver that was killed before it had a pool has none
            check_course(path)


def check_course(path: Path) -> None:
    """Replay a trace, and see that every item has one end at most, and just one in a task that has
    finished.
    """
    course = replay(path)
    ends: Counter[tuple[int, int]] = Counter()
    sizes: dict[int, int] = {}
    for event, commands in course:
        if isinstance(event, m.TaskSubmitted):
            sizes[event.spec.task_id] = event.spec.size
        elif isinstance(event, m.ItemsAdded):
            sizes[event.task_id] += event.count
        for command in commands:
            if isinstance(command, (m.SettleItems, m.FailItems, m.TimeOutItems)):
                ends.update(
                    (command.items.task_id, item)
                    for item in range(command.items.start, command.items.stop)
                )
    assert not [end for end, count in ends.items() if count > 1], "(task, item) that ended twice"
    for _, commands in course:
        for command in commands:
            if isinstance(command, m.EndTask) and command.state.name == "FINISHED":
                ended = sum(
                    (command.task_id, item) in ends for item in range(sizes[command.task_id])
                )
                assert ended == sizes[command.task_id], (
                    f"task {command.task_id} has finished without some of its items"
                )


# --- killing --------------------------------------------------------------------------------------


@dataclass
class Killer:
    """Kills somebody every now and then, in a thread of its own, until there is nothing more to
    kill for.

    Args:
        chance: Decides whom, how and when.
        victims: Gives the processes that may be killed now.
        pause_s: From the end of one kill to the next one, at least and at most [s].
        limit: So many it kills at most: a place whose workers keep dying waits longer and longer
            with the next one.
    """

    chance: random.Random
    victims: Callable[[], list[int]]
    pause_s: tuple[float, float] = (0.05, 0.5)
    limit: int = 8
    killed: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="killer")

    def _work(self) -> None:
        while len(self.killed) < self.limit and not self._is_over.wait(
            self.chance.uniform(*self.pause_s)
        ):
            alive = self.victims()
            if alive:
                pid, how = self.chance.choice(alive), self.chance.choice(DEADLY)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
                    self.killed.append((pid, how.name))

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="session")
def make_killer() -> type[Killer]:
    """Give the one who kills."""
    return Killer
