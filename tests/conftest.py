"""What all tests share: a Ray with pretended GPUs, a check that nothing is left behind, ways to wait, and other processes.

Nothing in the tests sleeps to let something happen: a task waits at a `Gate`, a test waits by `eventually`, both with a deadline.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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

from raypool.engine.ray_session import ENVIRONMENT, make_token

os.environ.update(ENVIRONMENT)  # before anything imports Ray, which reads its settings then

# A machine that has other things to do makes examples slowly: that is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A shell that runs the tests in the background lets them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "RAYPOOL_TEST_PROCESS"
"""Environment variable by which a test knows what it has started, and what that has started."""

os.environ[MARK] = str(os.getpid())

TEMPORARY = Path(tempfile.mkdtemp(prefix="raypool-tests-"))
"""Where these tests, and what they start, have their temporary files, so that what is left can be told from what others have."""

os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())  # Ray's sockets need short names
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ["TMPDIR"] = str(TEMPORARY)
tempfile.tempdir = None  # it is asked for anew
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)

FAREWELL = "raypool-farewell"
"""A thread that closes the connections of groups that have ended, after two seconds: one at most, however many groups."""

GRACE_S = 20.0
"""What is done is done at once; only on a machine that is very busy does it take this long [s]."""


BEGAN_AT = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-limit", type=float, help="skip what has not begun after so many seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out, and say so, what there is no time for any more."""
    limit_s = item.config.getoption("--time-limit")
    if limit_s is not None and time.monotonic() - BEGAN_AT > limit_s:
        pytest.skip(f"no time left: it would begin more than {limit_s:g} s after the first")


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep trainings that are given no folder out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypool.train.run.RUNS", str(tmp_path_factory.mktemp("raypool_runs")))
        yield


# --- waiting ----------------------------------------------------------------------------------------------------------


def poll(condition: Callable[[], object], timeout_s: float = GRACE_S) -> bool:
    """Return whether the condition becomes true within this time; for asserts."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def eventually() -> Callable[..., bool]:
    """Give `eventually(condition, timeout_s)`, for asserts."""
    return poll


@dataclass(frozen=True)
class Gate:
    """Something that tasks wait at, in whatever process they are, until the test opens it."""

    path: Path

    def open(self) -> None:
        self.path.touch()

    def wait(self, timeout_s: float = 60.0) -> None:
        if not poll(self.path.exists, timeout_s):
            raise TimeoutError(f"Nobody has opened {self.path.name}.")


@dataclass(frozen=True)
class Marks:
    """What tasks have noted down, each note in a file of its own, so that it outlives whoever wrote it."""

    folder: Path

    def add(self, text: object) -> None:
        (self.folder / f"{text}#{uuid.uuid4().hex}").touch()

    def all(self) -> list[str]:
        return sorted(path.name.partition("#")[0] for path in self.folder.iterdir())

    def count(self, text: object) -> int:
        return self.all().count(str(text))


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Make gates; those that the test has left shut are opened at its end, so that no task waits on."""
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


def overlap(frame: Any) -> int:
    """Return how many items ran at once at most, by the timeline."""
    ran = frame.dropna(subset="started_at")
    starts = [(start, 1) for start in ran["started_at"]]
    ends = [(start + duration, -1) for start, duration in zip(ran["started_at"], ran["duration_s"], strict=True)]
    return max(itertools.accumulate(step for _, step in sorted(starts + ends)))


@pytest.fixture(scope="session")
def most_at_once() -> Callable[[Any], int]:
    """Give `most_at_once(frame)`, for the table of some results."""
    return overlap


# --- Ray in this process ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Run Ray in this process, with 4 cores and 3 GPUs that do not exist."""
    make_token()
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=3,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True, scope="module")
def by_value(request: pytest.FixtureRequest) -> None:
    """Let functions of the test modules travel as a user's script would: the workers can't import these modules."""
    if "ray" in sys.modules and request.module.__name__ in sys.modules:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(request.module)


NOT_DEAD = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING")
"""States of Ray's actors."""


@dataclass(frozen=True)
class Inventory:
    """What of a pool's could be left behind."""

    actors: int
    groups: int
    threads: int
    gpus: float
    cpus: float

    @staticmethod
    def take() -> Inventory:
        threads = sum(thread.name.startswith("raypool-") and thread.name != FAREWELL for thread in threading.enumerate())
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return Inventory(0, 0, threads, 0, 0)
        from ray._private import state

        free = ray.available_resources()
        # Asking for all that there ever was takes a tenth of a second after a thousand tests.
        actors = sum(len(state.actors(actor_state_name=name)) for name in NOT_DEAD)
        groups = {name.rpartition("_")[2] for name in free if name.startswith("bundle_group_")}
        return Inventory(actors, len(groups), threads, free.get("GPU", 0.0), free.get("CPU", 0.0))

    def has_nothing_beyond(self, other: Inventory) -> bool:
        held = self.actors <= other.actors and self.groups <= other.groups and self.threads <= other.threads
        return held and self.gpus >= other.gpus and self.cpus >= other.cpus


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make sure that a test leaves no actor, placement group or thread behind, and no resource taken."""
    parameters = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    is_on_ray = "ray_session" in request.fixturenames or any(isinstance(value, str) and value == "local" for value in parameters)
    if not is_on_ray and "make_pool" not in request.fixturenames:
        yield
        return
    before = Inventory.take()
    yield
    assert poll(lambda: Inventory.take().has_nothing_beyond(before)), f"left behind: {Inventory.take()}, before: {before}"


def strays() -> set[int]:
    """Return what was started here, by whomever, and is neither Ray's own nor a worker: children of tasks, and their orphans."""
    me = psutil.Process()
    raylets = {child.pid for child in me.children() if child.name() == "raylet"}  # their children are workers, and Ray's own
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid == me.pid or process.ppid() in raylets or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == str(me.pid) and not is_helper(process):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def groups_left() -> int:
    """Return how many placement groups there are, those included that wait for resources."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    from ray.util import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def files_left() -> list[Path]:
    """Return raypool's temporary files; but for those in which a worker that was killed had just been writing a checkpoint."""
    return [path for path in TEMPORARY.glob("raypool-*") if not path.name.startswith("raypool-fit-")]


def is_helper(process: psutil.Process) -> bool:
    """Whether a process belongs to Ray or to Python's own multiprocessing, and ends with its parent."""
    words = " ".join(process.cmdline())
    return any(name in words for name in ("resource_tracker", "/ray/", "raylet", "gcs_server"))


@pytest.fixture(scope="module", autouse=True)
def no_process_or_file_is_left() -> Iterator[None]:
    """Make sure that the tests of a file leave no process, be it a worker's child, no claim and no temporary file."""
    before, groups = strays(), groups_left()
    yield
    if "raypool.folders" in sys.modules:  # what ran outside a pool has a folder as long as this process
        sys.modules["raypool.folders"]._of_process.remove()
    gc.collect()  # pools that were made for one call go with it, and their folders
    assert poll(lambda: not strays() - before), [psutil.Process(pid).cmdline() for pid in strays() - before]
    assert poll(lambda: groups_left() <= groups)
    assert poll(lambda: not files_left()), files_left()


# --- other processes --------------------------------------------------------------------------------------------------


class Started:
    """A Python process that a test has started, and everything that it has started in turn."""

    def __init__(self, code: str, env: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        clean = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env={**clean, **env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def finish(self, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def family(self) -> list[psutil.Process]:
        """Return what is alive of it: itself, Ray's own processes, workers and their children."""
        alive = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def clean_up(self) -> None:
        """Kill what is left of it."""
        for process in self.family():
            process.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait(GRACE_S)


@pytest.fixture
def start_python() -> Iterator[Callable[..., Started]]:
    """Start Python on some code, in a process of its own, with Ray's settings as a user has them."""
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

    def run(code: str, *, timeout_s: float = 90.0, **env: str) -> subprocess.CompletedProcess[str]:
        process = Started(code, env)
        try:
            done = process.finish(timeout_s)
        finally:
            process.clean_up()
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
