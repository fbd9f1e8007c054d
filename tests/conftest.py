"""What all tests share: a Ray with pretended GPUs, a check that nothing is left behind, ways to
wait, and other processes.

Nothing in the tests sleeps to let something happen: a task waits at a `Gate`, a test waits by
`eventually`, both with a deadline.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from raypool import ParallelPool
from raypool.backends.ray.session import ENVIRONMENT, SETTINGS, fork_server_for, without_helpers
from raypool.cluster.connect import make_token
from raypool.profiles import Profile
from raypool.worker.running import environment
from tests.leaks import GRACE_S, MARK, no_process_or_file_is_left, nothing_is_left, poll  # noqa: F401 - fixtures
from tests.shared_pool import shared
from tests.time_limits import (
    pytest_exception_interact,  # noqa: F401 - a hook
    pytest_timeout_set_timer,  # noqa: F401 - a hook
)

os.environ.update(ENVIRONMENT)  # before anything imports Ray, which reads its settings then
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112 - Ray gives a node 30 s; beside others it needs more

# A machine that has other things to do makes examples slowly: that is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A shell that runs the tests in the background lets them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent

CI_FOLDERS = {HERE / "integration": "ci", HERE / "faults": "ci", HERE / "chaos": "long"}
"""Folders whose tests are not in the quick lane unless a mark says so."""


def pytest_collection_finish() -> None:
    """Spare the collector what is there for good, 1,500,000 objects: it took a second at the end of
    each file to look at them.
    """
    gc.collect()
    gc.freeze()


# --- lanes and processes --------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.turns import Turns

    # by the number of tests: how long they take is another matter
    config.option.loadscopereorder = False
    return Turns(config, log)


@pytest.hookimpl(tryfirst=True)  # before a lane leaves out what is not its own
def pytest_itemcollected(item: pytest.Item) -> None:
    """Put a test into its lane: see docs/internals/testing.md."""
    if not any(item.get_closest_marker(lane) for lane in ("quick", "ci", "long")):
        item.add_marker(CI_FOLDERS.get(item.path.parent, "quick"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.turns import in_turn

        items[:] = in_turn(items)


# --- session --------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep trainings that are given no folder out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypool.train.runs.RUNS", str(tmp_path_factory.mktemp("raypool_runs")))
        yield


# --- waiting --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def eventually() -> Callable[..., bool]:
    """Give `eventually(condition, timeout_s)`, for asserts."""
    return poll


@pytest.fixture
def let_time_pass(pool: ParallelPool, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give a function that lets the clock of the pool go ahead by so much [s]: whatever still runs
    is late then, on any machine, and nothing is before.
    """
    driver: Any = pool._engine.driver

    def let_pass(seconds: float) -> None:
        monkeypatch.setattr(driver._inbox, "now", lambda: time.monotonic() + seconds)
        driver.barrier()  # it looks at its clock again

    return let_pass


@dataclass(frozen=True)
class Gate:
    """Something that tasks wait at, in whatever process they are, until the test opens it."""

    path: Path

    def open(self) -> None:
        self.path.touch()

    def wait(self, timeout_s: float = 300.0) -> None:
        if not poll(self.path.exists, timeout_s):
            raise TimeoutError(f"Nobody has opened {self.path.name}.")


@dataclass(frozen=True)
class Marks:
    """What tasks have noted down, each note in a file of its own, so that it outlives whoever wrote
    it.
    """

    folder: Path

    def add(self, text: object) -> None:
        (self.folder / f"{text}#{uuid.uuid4().hex}").touch()

    def all(self) -> list[str]:
        return sorted(path.name.partition("#")[0] for path in self.folder.iterdir())

    def count(self, text: object) -> int:
        return self.all().count(str(text))


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Make gates; those that the test has left shut are opened at its end, so that no task waits
    on.
    """
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate(tmp_path / f"gate-{len(gates)}"))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()


@pytest.fixture
def gate(make_gate: Callable[[], Gate]) -> Gate:
    """Give a gate that is shut."""
    return make_gate()


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    """Give a place for notes."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return Marks(folder)


@pytest.fixture
def press_ctrl_c() -> Iterator[Callable[[], None]]:
    """Give what lets Ctrl-C reach the main thread, from another one.

    Pressed in the instant in which the main thread begins to wait, Python hears of it only when
    that ends; other signals wake it.
    """
    main = threading.main_thread().ident
    assert main is not None
    is_over = threading.Event()

    def wake() -> None:
        while not is_over.wait(0.05):
            signal.pthread_kill(main, signal.SIGURG)

    waker = threading.Thread(target=wake)

    def press() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        waker.start()

    before = signal.signal(signal.SIGURG, lambda *_: None)
    yield press
    is_over.set()
    if waker.ident is not None:
        waker.join()
    signal.signal(signal.SIGURG, before)


def overlap(frame: Any) -> int:
    """Return how many items ran at once at most, by the timeline."""
    ran = frame.dropna(subset="started_at")
    began = [start.timestamp() for start in ran["started_at"]]
    starts = [(start, 1) for start in began]
    ends = [
        (start + duration, -1) for start, duration in zip(began, ran["duration_s"], strict=True)
    ]
    return max(itertools.accumulate(step for _, step in sorted(starts + ends)))


@pytest.fixture(scope="session")
def most_at_once() -> Callable[[Any], int]:
    """Give `most_at_once(frame)`, for the table of some results."""
    return overlap


# --- Ray in this process --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Run Ray in this process, with 4 cores and 3 GPUs that do not exist."""
    make_token()
    import ray
    from ray import cloudpickle

    for name in (__name__, poll.__module__):  # gates travel
        cloudpickle.register_pickle_by_value(sys.modules[name])
    with environment(fork_server_for(Profile())), without_helpers():
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=3,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config=dict(SETTINGS),
        )
    yield
    shared.close()
    ray.shutdown()


@pytest.fixture
def shared_pool(
    request: pytest.FixtureRequest, ray_session: None, by_value: None
) -> Iterator[ParallelPool]:
    """Lend the pool that tests on Ray share. A test may kill its workers, or close it, but has to
    leave nothing to do.
    """
    pool = shared.open()
    gc.collect()  # what was left in cycles (a Composite, say) makes calls as it goes: not later
    assert poll(shared.is_at_rest)
    before = pool.num_workers
    failed = request.session.testsfailed
    yield pool
    is_well = poll(shared.is_at_rest) and (pool.is_closed or pool.num_workers == before)
    if request.session.testsfailed != failed or not is_well:
        shared.close()
    assert is_well, f"left behind in the shared pool: {pool.statistics()}, {pool.workers}"


@pytest.fixture(autouse=True, scope="module")
def by_value(request: pytest.FixtureRequest) -> None:
    """Let functions of the test modules travel as a user's script would: the workers can't import
    these modules.
    """
    if "ray" in sys.modules and request.module.__name__ in sys.modules:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(request.module)


# --- other processes ------------------------------------------------------------------------------


class Started:
    """A Python process that a test has started, and everything that it has started in turn."""

    def __init__(self, code: str, env: dict[str, str], stdin: int = subprocess.DEVNULL) -> None:
        self.mark = uuid.uuid4().hex
        clean = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env={**clean, **env, MARK: self.mark},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def finish(self, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def family(self) -> list[psutil.Process]:
        """Return what is alive of it: itself, Ray's own processes, workers and their children."""
        alive = []
        for process in psutil.process_iter():
            try:
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get(MARK) == self.mark
                ):
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def clean_up(self) -> None:
        """Kill what is left of it."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray's processes end by themselves too
                process.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait(GRACE_S)


@pytest.fixture
def start_python() -> Iterator[Callable[..., Started]]:
    """Start Python on some code, in a process of its own, with Ray's settings as a user has
    them.
    """
    started: list[Started] = []

    def start(code: str, **env: str) -> Started:
        started.append(Started(code, env))
        return started[-1]

    yield start
    for process in started:
        process.clean_up()


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run some code in a process of its own to its end, and make sure that it ends well."""

    def run(code: str, *, timeout_s: float = 500.0, **env: str) -> subprocess.CompletedProcess[str]:
        process = Started(code, env)
        try:
            done = process.finish(timeout_s)
        finally:
            process.clean_up()
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
