"""What belongs to this process of tests, and what of it is left behind.

Several such processes may run on one machine, those of pytest-xdist among them. Each knows its own:
whatever it starts has its `MARK`, also the orphans of whoever has died meanwhile; and its temporary
files, Ray's among them, are in a folder of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from raypool.backends.ray import fork_server
from tests.shared_pool import shared

MARK = "RAYPOOL_TEST_PROCESS"
"""Environment variable by which a test knows what it has started, and what that has started."""

os.environ[MARK] = str(os.getpid())


def make_own_folder() -> Path:
    """Return a new folder; those of xdist's processes are in that of the one which has started
    them, and go with it.

    The names are short: those of sockets in there, Ray's and others, must not have more than 107
    characters.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return Path(tempfile.mkdtemp(prefix="rpt-"))
    folder = Path(tempfile.gettempdir(), worker)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


SHARED = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
"""Where temporary files would be: pytest's own are, and stay for a while."""

TEMPORARY = make_own_folder()
"""Where these tests, and what they start, have their temporary files, so that what is left can be
told from what others have.
"""

os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = str(TEMPORARY)
tempfile.tempdir = None  # it is asked for anew


def leave_nothing() -> None:
    """Remove the folder; the process that has started all others also ends what those have left
    that died before their time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and Path(
                    process.environ().get("TMPDIR", "/")
                ).is_relative_to(TEMPORARY):
                    process.kill()
    shutil.rmtree(TEMPORARY, ignore_errors=True)


atexit.register(leave_nothing)

FAREWELL = "raypool-farewell"
"""A thread that closes the connections of groups that have ended, after two seconds: one at most,
however many groups.
"""

GRACE_S = 120.0
"""What is done is done at once; only on a machine that is very busy does it take this long [s]."""


def poll(condition: Callable[[], object], timeout_s: float = GRACE_S) -> bool:
    """Return whether the condition becomes true within this time; for asserts."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)  # to look at all processes takes much of a core
    return True


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
        threads = sum(
            thread.name.startswith("raypool-") and thread.name != FAREWELL
            for thread in threading.enumerate()
        )
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
        held = (
            self.actors <= other.actors
            and self.groups <= other.groups
            and self.threads <= other.threads
        )
        return held and self.gpus >= other.gpus and self.cpus >= other.cpus


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make sure that a test leaves no actor, placement group or thread behind, and no resource
    taken.
    """
    names = request.fixturenames
    parameters = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    is_on_ray = "ray_session" in names or any(
        isinstance(value, str) and value in ("local", "ray") for value in parameters
    )
    if not is_on_ray and "make_pool" not in names:
        yield
        return
    if "shared_pool" in names or (is_on_ray and "make_pool" in names and "pool" in names):
        request.getfixturevalue("shared_pool")  # it stays
    elif is_on_ray and "make_pool" not in names:
        shared.close()  # the test wants the GPUs
    before = Inventory.take()
    yield
    assert poll(lambda: Inventory.take().has_nothing_beyond(before)), (
        f"left behind: {Inventory.take()}, before: {before}"
    )


def name_of(process: psutil.Process) -> str | None:
    """Return what a process is called; None if it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def strays() -> set[int]:
    """Return what was started here, by whomever, and is neither Ray's own nor a worker: children of
    tasks, and their orphans.
    """
    me = psutil.Process()
    # their children are workers, and Ray's own
    parents = {child.pid for child in me.children() if name_of(child) == "raylet"}
    if fork_server._base is not None:
        base = psutil.Process(fork_server._base.process.pid)
        parents |= {server.pid for server in base.children()}
    found = set()
    for process in psutil.process_iter():
        try:
            if (
                process.pid == me.pid
                or process.ppid() in parents
                or process.status() == psutil.STATUS_ZOMBIE
            ):
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
    """Return raypool's temporary files; but for those in which a worker that was killed had just
    been writing a checkpoint.
    """
    return [
        path
        for path in TEMPORARY.glob("raypool-*")
        if not path.name.startswith("raypool-fit-") and path != shared.folder
    ]


def is_helper(process: psutil.Process) -> bool:
    """Whether a process belongs to Ray or to Python's own multiprocessing, and ends with its
    parent; or to the shared pool.
    """
    words = " ".join(process.cmdline())
    return any(
        name in words
        for name in (
            "resource_tracker",
            "/ray/",
            "raylet",
            "gcs_server",
            str(shared.folder or "raylet"),
        )
    )


@pytest.fixture(scope="module", autouse=True)
def no_process_or_file_is_left() -> Iterator[None]:
    """Make sure that the tests of a file leave no process, be it a worker's child, no claim and no
    temporary file.
    """
    # what is there now, imported by the files before, costs the collector nothing any more
    gc.freeze()
    before, groups = strays(), groups_left() - shared.size
    yield
    # what ran outside a pool has a folder as long as this process
    if "raypool.worker.folders" in sys.modules:
        sys.modules["raypool.worker.folders"]._of_process.remove()
    gc.collect()  # pools that were made for one call go with it, and their folders
    assert poll(lambda: not strays() - before), [
        psutil.Process(pid).cmdline() for pid in strays() - before
    ]
    assert poll(lambda: groups_left() - shared.size <= groups)
    assert poll(lambda: not files_left()), files_left()
