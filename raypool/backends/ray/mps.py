"""NVIDIA's Multi-Process Service (MPS): workers on one GPU compute at once, instead of in turns.

A node's agent starts it, once for each pool, before the first worker there touches CUDA; it ends
after the agent and these workers, however they end (see `raypool.backends.ray.mps_keeper`).

No client is limited to a part of the GPU (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): one that is alone may
use all of it. Nor is its memory by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, which holds for the life of a
process: torch's own limit can be lifted for an item that runs alone. Users set either in the
profile's `env`.

Source:
    NVIDIA Multi-Process Service, "Appendix: Environment Variables": with CUDA_VISIBLE_DEVICES the
    daemon would number its devices anew, and clients would have to follow; so it is not set for it.
    "Terminating an MPS client without synchronizing with all outstanding GPU work can leave the MPS
    server and other MPS clients in an undefined state": so `terminate_client` comes before a worker
    is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import IO, NamedTuple

from raypool.backends.ray import mps_keeper
from raypool.worker.folders import hold, make_private

PROGRAM = "nvidia-cuda-mps-control"

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"

USUAL = Path("/tmp/nvidia-mps")
"""Where CUDA looks for the service by default."""

ANSWER_S = 40.0
"""How long a worker waits for the service [s]: the start of an actor, and that of the service."""

NOT_SHARED = (
    "mps=True has no effect, because no GPU of the pool is shared. Set workers_per_gpu to let"
    " several workers share one."
)


class MpsState(NamedTuple):
    """The folder of the service, None if it is not raypool's; and why there is none."""

    folder: str | None
    problem: str | None = None


class Mps:
    """The MPS service of a node, for one pool; `temporary` returns its temporary folder there."""

    def __init__(self, temporary: Callable[[], Path]) -> None:
        self._temporary = temporary
        self._control: mps_keeper.Control | None = None
        self._environ: dict[str, str] = {}
        self._held: int | None = None  # a descriptor
        self._keeper: IO[str] | None = None

    def start(self, settings: Mapping[str, str], usual: Path = USUAL) -> MpsState:
        """Start it and wait, perhaps for seconds, until it is up.

        Args:
            settings: A worker's environment, as far as it concerns the service (see `settings`).
            usual: Where a service for everybody would be.
        """
        if runs_in(usual):
            return MpsState(None)  # CUDA finds it
        environ = {**os.environ, **settings}
        program = shutil.which(PROGRAM, path=environ.get("PATH"))
        if program is None:
            return MpsState(None, f"{PROGRAM} is not on its PATH")
        temporary = self._temporary()
        folder = make_private(temporary / "mps")
        # the daemon has all GPUs, numbered as the workers number them
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._environ = {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **variables(folder)}
        for name in (PIPES, LOGS):
            make_private(Path(self._environ[name]))
        self._held = join(folder)
        problem = self._begin(folder, program, hold(temporary))
        if problem is not None:
            self.stop()
            return MpsState(None, problem)
        self._control = mps_keeper.Control(folder, program)
        return MpsState(str(folder))

    def _begin(self, folder: Path, program: str, held: int) -> str | None:
        """Start the keeper, with a hold on the temporary folder; return the problem, if any."""
        command = [sys.executable, "-I", "-S", mps_keeper.__file__, str(folder), program]
        try:
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                pass_fds=[held],
            )
        finally:
            os.close(held)
        process.wait()  # it goes on in a child of its own
        self._keeper = process.stdout
        assert self._keeper is not None
        words = self._keeper.readline().strip()
        return None if words == mps_keeper.UP else words or f"{PROGRAM} could not be started"

    @property
    def is_up(self) -> bool:
        """Whether it was started here, and not stopped."""
        return self._control is not None

    def terminate(self, pids: Collection[int]) -> None:
        """Cut processes that are about to be killed off their GPUs; others there continue."""
        if self._control is None:
            return
        for server in self._ask("get_server_list").split():
            clients = set(self._ask(f"get_client_list {server}").split())
            for pid in sorted(set(pids)):
                if str(pid) in clients:
                    self._ask(f"terminate_client {server} {pid}")

    def _ask(self, command: str) -> str:
        assert self._control is not None
        return self._control.ask(command, self._environ)

    def stop(self) -> None:
        """Give it up; return when it has ended, if no worker uses it any more."""
        self._control = None
        if self._held is not None:
            os.close(self._held)
            self._held = None
        if self._keeper is not None:
            self._keeper.read()
            self._keeper.close()
            self._keeper = None


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables by which CUDA finds the service in a folder."""
    return {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a worker's environment that the service is to have, too.

    Example:
        >>> settings({"PATH": "/bin", "HOME": "/", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"})
        {'PATH': '/bin', 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '50'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name == "PATH" or name.startswith("CUDA_MPS_")
    }


def is_chosen(environ: Mapping[str, str]) -> bool:
    """Whether the user has chosen a service, and starts and ends it."""
    return PIPES in environ


def enter(state: MpsState, environ: MutableMapping[str, str]) -> str | None:
    """Let this process use the service, before it touches CUDA; return why it does not."""
    if state.folder is not None:
        join(Path(state.folder))
        environ.update(variables(Path(state.folder)))
    return state.problem


def join(folder: Path) -> int:
    """Keep the service up while this process lives; return the descriptor that does so."""
    held = os.open(folder / "users", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def runs_in(pipes: Path) -> bool:
    """Whether a control daemon is alive that has its pipes, and its pid, in this folder."""
    try:
        pid = int((pipes / f"{PROGRAM}.pid").read_text())
        name = Path(f"/proc/{pid}/comm")
        if name.exists():
            # after a crash its number may be another process's; Linux keeps 15 letters of a name
            return name.read_text().strip() == PROGRAM[:15]
        os.kill(pid, 0)
    except PermissionError:
        return True  # somebody else's, which /proc may hide
    except (OSError, ValueError):  # no such file or process, or half a file
        pass
    return False


def turns(host: str, problem: str) -> str:
    """Return the warning for workers that share a GPU without the service."""
    return (
        f"mps=True: on {host} the workers that share a GPU take turns, because {problem}. Install"
        " the driver's MPS programs there (nvidia-cuda-mps-control), or leave mps out."
    )
