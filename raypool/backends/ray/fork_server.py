"""Forks the workers of this machine from a process that has imported what they need.

A worker that imports torch itself needs seconds until its first result, and 200 MB of its own. The
driver calls `serve` for each Ray that it starts, before it imports Ray. That starts this file as a
script, once: the base, which imports the user's libraries and forks a server for each of these
Rays. A server imports Ray when it first hears of its raylet (Ray then reads that one's number, for
good), and forks all of its workers. It has one thread, never touches a GPU, and ends with its
raylet; the base ends with the driver.

A fork differs from its siblings as new processes would: in its random numbers, keys and ids. What
is read before Python's `main`, or as a library is imported, cannot differ. Then the server refuses,
and the worker is a plain process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEFORE_MAIN = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONHASHSEED", "MALLOC_ARENA_MAX")
"""Variables that are read before `main`."""

AT_IMPORT = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "RAY_"),
    *("TORCH", "PYTORCH_", "JAX_", "XLA_", "TF_", "HF_", "TRANSFORMERS_"),
)
"""Beginnings of variables that are read as a library is imported."""

PER_WORKER = {
    "OMP_NUM_THREADS",  # Ray sets it as the actor starts: see `limit_threads`
    "OPENBLAS_NUM_THREADS",
    "RAY_RAYLET_PID",
    "RAY_JOB_ID",
    "RAY_NODE_ID",
    "RAY_SESSION_NAME",
    "RAY_LD_PRELOAD",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_CLIENT_MODE",
    "RAY_WORKER_PROCESS_SETUP_HOOK",
}
"""Those among them that may differ: a worker reads them later."""

OF_RAY = (
    *("numpy", "requests", "jsonschema", "psutil", "yaml", "google.protobuf.message", "grpc"),
    *("pyarrow", "pydantic.v1.fields", "starlette.datastructures"),
)
"""What Ray imports: the base can import these, but not Ray itself."""

OF_WORKERS = (
    "ray._private.workers.default_worker",
    "ray._private.runtime_env.setup_hook",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "raypool.backends.ray.worker",
    "raypool.backends.ray.fork_server",
)

OF_TRAININGS = ("torch._dynamo",)
"""What the ranks of a training import, with `DistributedDataParallel` or an optimizer.

Not Ray Train: importing it seeds Ray's generator of ids, and all forks would draw the same ids.
"""

OF_GPUS = ("/dev/nvidia", "/dev/kfd")
"""Beginnings of the files that a process has open while it uses a GPU: NVIDIA's, AMD's."""

NO_JOB = "ffffffff"
"""The job of a worker as it starts: Ray gives it one with its first task."""

RAY = "2.60."
"""The Ray whose way to start workers this is."""

NOT_FORKED = "The fork server is not used, so workers start more slowly and share no memory: %s."
"""How the reason is told why workers are not forks."""

OF_REQUEST = {"words", "variables", "folder", "mask", "oom_score_adj"}
"""The entries of a request for a worker."""

REQUEST_S = 5.0
"""How long a client may take to send its request [s]."""

TRIAL_S = 60
"""How long the fork that imports what trainings do may take [s]."""

NO_TRIAL = -1
"""The process of a trial that is over."""


# --- in the driver --------------------------------------------------------------------------------


class Base(NamedTuple):
    """The base process, what it has imported and read, its folder, and how to reach it."""

    process: Any
    state: tuple[list[str], dict[str, str]]
    folder: Any
    held: int
    control: socket.socket


_base: Base | None = None

own_server: str | None = None
"""In a fork, the path of its server's socket."""


def installed(preload: Sequence[str]) -> list[str]:
    """Return those of the modules that are installed."""
    return [name for name in preload if importlib.util.find_spec(name.partition(".")[0])]


def obstacle(modules: Sequence[str]) -> str | None:
    """Return why workers on this machine would not be forks, None if they would."""
    if sys.platform != "linux":
        return f"forks need Linux, and this is {sys.platform}"
    version = importlib.metadata.version("ray")
    if not version.startswith(RAY):
        return f"forks need Ray {RAY}*, and this is {version}"
    return None if modules else "none of the modules in preload= is installed"


def serve(parent: Any, modules: list[str], variables: dict[str, str]) -> str:
    """Have a server forked for the next Ray; return the path of its socket.

    Args:
        parent: A folder that only this user can enter.
        modules: What workers shall have imported.
        variables: The environment of workers, beside this process's.
    """
    global _base
    variables = {**os.environ, **variables}
    state = modules, read_early(variables)
    if _base is not None and (_base.process.poll() is not None or _base.state != state):
        end()
    if _base is None:
        _base = _start(parent, state, variables)
    path = str(_base.folder / uuid.uuid4().hex[:8])
    with socket.socket(socket.AF_UNIX) as listener:
        # it takes clients from now on, and refuses them once the server is gone
        listener.bind(path)
        listener.listen(64)
        socket.send_fds(_base.control, [b"\n"], [listener.fileno()])
    return path


def _start(parent: Any, state: tuple[list[str], dict[str, str]], variables: dict[str, str]) -> Base:
    from raypool.worker.folders import hold  # the script does without raypool

    folder = parent / uuid.uuid4().hex[:8]
    held = hold(folder)
    control, theirs = socket.socketpair()
    root = str(Path(__file__).parents[3])
    with theirs, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, root, *state[0]],
            stdin=theirs.fileno(),
            stdout=log,
            stderr=log,
            env=variables,
            start_new_session=True,  # Ctrl-C is for the driver
        )
    atexit.register(end)
    return Base(process, state, folder, held, control)


def end() -> None:
    """Let the base end, and remove its folder; workers that run stay."""
    global _base
    base, _base = _base, None
    if base is not None:
        atexit.unregister(end)
        base.control.close()
        base.process.kill()  # it may still be importing
        base.process.wait()
        shutil.rmtree(base.folder, ignore_errors=True)
        os.close(base.held)


def _forget() -> None:
    global _base
    if _base is not None:  # of the parent, whose end the base must notice
        _base.process.returncode = 0  # else Python would warn that it still runs
        _base.control.close()
        os.close(_base.held)
        _base = None


os.register_at_fork(after_in_child=_forget)


# --- in the base and the servers ------------------------------------------------------------------


def read_early(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change."""
    return {
        name: value
        for name, value in variables.items()
        if name not in PER_WORKER and (name in BEFORE_MAIN or name.startswith(AT_IMPORT))
    }


def import_all(modules: Sequence[str]) -> None:
    """Import those of the modules that can be imported."""
    for name in modules:
        with contextlib.suppress(Exception):  # the worker that needs it will say what is wrong
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, and so would copy shared pages


def uses_gpu() -> bool:
    """Whether this process has a GPU open."""
    return any(str(file.resolve()).startswith(OF_GPUS) for file in Path("/proc/self/fd").iterdir())


def hindrance() -> str | None:
    """Return why this process cannot fork workers."""
    num_threads = len([*Path("/proc/self/task").iterdir()])
    if num_threads > 1:
        return f"its process has {num_threads} threads, and one that forks must have one"
    return "its process uses a GPU, and forks could not" if uses_gpu() else None


def find_users_modules() -> None:
    """Find out which modules are the user's: each worker asks, and forks inherit the answers."""
    with contextlib.suppress(Exception):  # else each worker finds out by itself
        from raypool.channel.users_code import is_users

        for name in sys.modules.copy():
            is_users(name)


def flaw() -> str | None:
    """Return why no fork of this base can be a worker."""
    if uses_gpu():
        return "a module of preload uses a GPU"
    # Python's only: a fork lacks these, but pyarrow, say, works without its native one
    num_threads = threading.active_count() - 1
    if num_threads:
        return f"a module of preload has started threads ({num_threads} run)"
    # the number of the raylet that Ray has read: none, or a wrong one, with which workers hang
    return "a module of preload imports Ray" if "ray" in sys.modules else None


class ForkServer:
    """Forks workers until its raylet ends; in a fork, `run` returns the request for it.

    With a `flaw` of its base it refuses them all.
    """

    def __init__(
        self,
        listener: socket.socket,
        before: dict[str, str],
        raypool: str,
        flaw: str | None = None,
    ) -> None:
        self._listener, self._before, self._raypool = listener, before, raypool
        self._flaw = flaw
        self._clients: dict[socket.socket, int] = {}  # the process of each
        self._children: dict[int, socket.socket] = {}
        self._trial: int | None = None  # the fork that imports what trainings do
        self._wake = socket.socketpair()
        for one in self._wake:
            one.setblocking(False)
        # a handler of Python's, since only such a signal is written to the wakeup descriptor
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1].fileno())
        self._owner = os.pidfd_open(os.getppid())  # at first the base, then the raylet
        self._has_ray = False
        self._watch = selectors.DefaultSelector()
        for source in (listener, self._wake[0], self._owner):
            self._watch.register(source, selectors.EVENT_READ)

    def run(self) -> dict[str, Any] | None:
        """Serve; return None once the owner has ended."""
        while True:
            for key, _ in self._watch.select():
                if key.fileobj == self._owner:
                    return None
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj is self._wake[0]:
                    self._wake[0].recv(4096)
                    self._reap()
                # a client was killed; its child may have ended too, and been reaped just now
                elif isinstance(client := key.fileobj, socket.socket) and client in self._clients:
                    pid = self._clients.pop(client)
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
                    del self._children[pid]
                    self._watch.unregister(client)
                    client.close()

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        client.settimeout(REQUEST_S)
        streams: list[int] = []
        try:
            request, streams = received(client)
            self._check(request)
            if not self._has_ray:
                self._import_ray(request["variables"])
            if "words" not in request:  # the raylet is up, or its workers train
                if "trains" in request:
                    self._prepare_for_trainings(client)
                client.close()
                return None
            if (reason := hindrance()) is not None:
                raise ValueError(reason)
            # those with other values here and there
            wanted = read_early(request["variables"])
            differ = {name for name, _ in wanted.items() ^ self._before.items()}
            if differ:
                raise ValueError(
                    f"the imported libraries have read other values of {', '.join(sorted(differ))}"
                )
            pid = os.fork()
            if pid == 0:
                path = self._listener.getsockname()
                self._let_go(client)
                take_over(request, streams, path)
                return request
            self._clients[client], self._children[pid] = pid, client
            self._watch.register(client, selectors.EVENT_READ)
            answer(client, {"pid": pid})
        except (OSError, ValueError, struct.error) as error:
            answer(client, {"refused": str(error)})
            client.close()
        finally:
            for stream in streams:
                with contextlib.suppress(OSError):  # closed by `take_over`
                    os.close(stream)
        return None

    def _check(self, request: dict[str, Any]) -> None:
        if self._flaw is not None:
            raise ValueError(self._flaw)
        if "words" in request and request.keys() != OF_REQUEST:
            raise ValueError("raypool has been updated since the fork server was started")

    def _import_ray(self, variables: dict[str, str]) -> None:
        raylet = os.pidfd_open(int(variables["RAY_RAYLET_PID"]))
        os.environ.update({name: value for name, value in variables.items() if name in PER_WORKER})
        os.environ["RAY_JOB_ID"] = NO_JOB
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        sys.path.append(self._raypool)
        import_all(OF_WORKERS)
        find_users_modules()
        sys.path.remove(self._raypool)
        self._has_ray = True
        self._watch.unregister(self._owner)
        os.close(self._owner)
        self._owner = raylet
        self._watch.register(raylet, selectors.EVENT_READ)

    def _prepare_for_trainings(self, client: socket.socket) -> None:
        """Import what trainings do in a fork, and then here if that fork could fork workers.

        An import cannot be undone, and one that starts threads would leave no worker a fork.
        """
        if self._trial is not None:
            return
        self._trial = os.fork()
        if self._trial == 0:
            self._let_go(client)
            signal.alarm(TRIAL_S)
            import_all(OF_TRAININGS)
            os._exit(0 if hindrance() is None else 1)

    def _let_go(self, client: socket.socket) -> None:
        """Close, in a fork, what is the server's."""
        signal.set_wakeup_fd(-1)
        self._watch.close()
        for one in (*self._clients, client, self._listener, *self._wake):
            one.close()
        os.close(self._owner)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no fork is left
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._trial:
                    self._trial = NO_TRIAL
                    if status == 0:
                        import_all(OF_TRAININGS)
                        find_users_modules()
                client = self._children.pop(pid, None)
                if client is not None:
                    del self._clients[client]
                    self._watch.unregister(client)
                    answer(client, {"status": status})
                    client.close()


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and the standard streams that came with it."""
    streams = array.array("i")
    size, extra, _, _ = client.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, part in extra:
        streams.frombytes(part)
    (num_bytes,) = struct.unpack("q", size)
    body = b""
    while len(body) < num_bytes:
        more = client.recv(1 << 20)
        if not more:
            raise ValueError("the request was cut off")
        body += more
    request: dict[str, Any] = json.loads(body)
    return request, list(streams)


def answer(client: socket.socket, words: dict[str, Any]) -> None:
    """Tell a client, unless it has gone."""
    with contextlib.suppress(OSError):
        client.sendall(json.dumps(words).encode() + b"\n")


# --- in a fork ------------------------------------------------------------------------------------


def take_over(request: dict[str, Any], streams: list[int], server: str) -> None:
    """Make this fork the process that its client stands for; `server`: the path of its server."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.setpgid(0, 0)  # like Ray's workers, it leads a process group, which the agent kills
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    with contextlib.suppress(OSError):  # a lower one takes a privilege
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = request["words"]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [
        str(Path(sys.argv[0]).parent),
        *(path for path in added if path and path not in sys.path),
    ]
    importlib.invalidate_caches()  # modules may have been added since the base listed folders
    from raypool.backends.ray import fork_server as imported  # this is the script, `__main__`

    imported.own_server = server
    see_gpus()
    draw_anew()
    limit_threads()


@functools.cache
def prepare_successors() -> None:
    """Tell the server of this worker, if it has one, that its workers train; once per process.

    It imports what they have imported: a worker that takes over a killed rank then need not.
    """
    if own_server is None:
        return
    body = json.dumps({"trains": True}).encode()
    # without it, the successor imports them by itself
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.settimeout(REQUEST_S)
        server.connect(own_server)
        server.sendall(struct.pack("q", len(body)) + body)


def see_gpus() -> None:
    """Let Ray choose among the visible GPUs of the worker, not of the base.

    The base may be from an earlier Ray. Ray reads the variables as it is imported.
    """
    from raypool.ray_private import utils, worker

    worker.global_worker.original_visible_accelerator_ids = utils.get_visible_accelerator_ids()


def draw_anew() -> None:
    """Let the fork draw other random numbers and keys than its siblings."""
    import multiprocessing.process as processes

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # not torch.seed(): that touches GPUs
    processes.current_process().authkey = os.urandom(32)


def limit_threads() -> None:
    """Let OMP_NUM_THREADS, which Ray sets as the actor starts, count for imported libraries."""
    from raypool.ray_private import utils

    set_variable = utils.set_omp_num_threads_if_unset

    def set_and_apply() -> Any:
        done = set_variable()
        number = os.environ.get("OMP_NUM_THREADS", "")
        if number.isdigit():
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(int(number))
            if "OPENBLAS_NUM_THREADS" not in os.environ:
                limit_openblas(int(number))
        return done

    utils.set_omp_num_threads_if_unset = set_and_apply


def limit_openblas(number: int) -> None:
    """Tell each loaded OpenBLAS, NumPy's and SciPy's, how many threads it may use."""
    import ctypes

    with Path("/proc/self/maps").open() as maps:
        paths = {line.split()[-1] for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(number)


def main(raypool: str, *modules: str) -> None:
    """Fork a server for each socket that the driver sends; in its forks, become a worker."""
    before = read_early(os.environ)
    # OpenBLAS would start threads as NumPy is imported, and a process with threads cannot fork
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.pop("OMP_NUM_THREADS", None)
    with contextlib.suppress(ValueError):  # with `python -P` it is not there
        sys.path.remove(str(Path(__file__).resolve().parent))
    import_all([*modules, *OF_RAY])
    reason = flaw()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps servers that have ended
    with socket.socket(fileno=os.dup(0)) as control:
        while (sent := socket.recv_fds(control, 1, 1))[0]:
            listener = socket.socket(fileno=sent[1][0])
            if os.fork() == 0:
                control.close()
                with Path(os.devnull).open() as nothing:
                    os.dup2(nothing.fileno(), 0)
                request = ForkServer(listener, before, raypool, reason).run()
                if request is not None:
                    runpy.run_path(request["words"][0], run_name="__main__")
                return
            listener.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
