"""Starts Ray on this machine, safe and quiet, or joins a running one; ends only a Ray that it
started.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from raypool import ray_private
from raypool.cluster import connect
from raypool.cluster import connect as shipping
from raypool.cluster.connect import make_token, token_path
from raypool.errors import StartupError
from raypool.gpus.devices import Inventory, usable_cpus, visible_gpus
from raypool.gpus.table import import_ray
from raypool.profiles import CLIENT, LOOPBACK, Profile
from raypool.worker.folders import LOCK, hold, make_private, remove_unheld, run_aside

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With "0" Ray binds everything to 127.0.0.1; for Linux it is not documented, and a test looks at
the ports.
"""

GIVE_UP_S = 5.0
"""How long to try to fetch values from a Ray that no longer works [s]."""

BRING_HOME_S = 60.0
"""How long to try to fetch values from a Ray that is about to end [s]."""

SHUTDOWN_S = 20.0
"""How long Ray may take to shut down before its processes are killed, and then once more [s]."""

RAYS_THREAD = "worker.io"

CLIENT_TRIES = 3
"""How often connecting to Ray Client is tried."""

FORKED = (
    "This process was forked from one that uses Ray, and Ray's threads did not come along: no pool"
    " on Ray can work here. Start the process by spawn (multiprocessing.get_context('spawn')), or"
    " open a pool of threads: parpool(profile='threads')."
)

DIED_AT_ONCE = ("Starting Ray client server failed", "ZombieProcess", "NoSuchProcess")
"""What Ray's proxy says of a server that died as it was started: which of them depends on the
instant in which it looks.
"""

END_WHAT_IS_LEFT = """
import fcntl, os, signal, sys, time

def is_rays(pid):
    with open(f"/proc/{pid}/comm", "rb") as comm, open(f"/proc/{pid}/cmdline", "rb") as line:
        name, words = comm.read(), line.read()
    if not (name.startswith((b"ray", b"gcs_server")) or b"/ray/_private/" in words):
        return False
    files = f"/proc/{pid}/fd"
    return any(os.readlink(f"{files}/{number}").startswith(sys.argv[1] + "/") for number in os.listdir(files))

if not os.fork():
    try:
        fcntl.flock(os.open(sys.argv[1] + "/.lock", os.O_RDWR), fcntl.LOCK_EX)
    except FileNotFoundError:
        pass
    for _ in range(3):
        time.sleep(4)
        for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
            try:
                if is_rays(pid):
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass
"""
"""Waits until a driver is gone, and kills what is left of its Ray: most ends by itself, but Ray's
agents would first try for minutes to reach a control store that has gone. Ray's processes are those
that have a log open."""

ENVIRONMENT = {
    # A stranger on this machine or network can't use the cluster: it asks for a token, and listens
    # on the loopback only.
    "RAY_AUTH_MODE": "token",
    LOOPBACK_ONLY: "0",
    # Ray runs workers at niceness 15 otherwise, which starves them on a shared machine.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # They would be served to every user of this machine, without a token.
    "RAY_enable_metrics_collection": "0",
    # Ray warns that it will change this default; it is what we want.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What a Ray of our own is started with, where the user has not said otherwise. Read by Ray when it
is imported.
"""

logger = logging.getLogger("raypool")

_lock = threading.Lock()
_users = 0
_ended = threading.Event()
_shipped: dict[str, Any] = {}  # with our connection
# the connection that raypool has made; unique, so that no other is taken for it
_ours: str | None = None
_files: tuple[Path, int] | None = None  # the folder of that Ray, and the descriptor that holds it
_is_given_up = False  # Ray no longer answers: a question to it would hang


def join_ray(profile: Profile | None = None, inventory: Inventory | None = None) -> None:
    """Make sure that Ray runs in this process: the one that is there, the one at the address, or a
    new one on this machine.

    Args:
        profile: Where it runs, and what is shipped there; None: as the environment says.
        inventory: Who knows the GPUs that a new one is to have. None: Ray finds them itself.

    Raises:
        StartupError: There is no Ray at the address, or it does not let this process in; or this
            process was forked from one that uses Ray.
        InvalidValueError: What is to be shipped is more than Ray takes.
    """
    global _users, _ours, _shipped
    if is_forked():
        raise StartupError(FORKED)
    if _is_given_up:
        raise StartupError(
            "Ray does not answer any more, and does not let go of this process either. Start a new"
            " process."
        )
    profile = profile or Profile()
    address = profile.address or os.environ.get("RAY_ADDRESS")
    with _lock:
        if not _is_initialized():
            _prepare(profile, address)
        with _process_as_it_was():
            import_ray()
            import ray

            if ray.is_initialized():
                _check_joined(profile)
            else:
                shipped = shipping.runtime_env(profile)
                with _own_sigterm():
                    _connect(ray, address, inventory, shipped)
                _ours, _shipped = connection(), shipped
                _users = 0  # of a Ray that somebody has ended meanwhile
        _users += 1


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore what Ray changes in this process: Python's random state, and the hooks for exceptions
    and breakpoints.
    """
    numbers, hook = random.getstate(), sys.excepthook
    before = {name: os.environ.get(name) for name in ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE")}
    try:
        yield
    finally:
        random.setstate(numbers)
        sys.excepthook = hook
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep Ray from turning the end by SIGTERM into a crash: it replaces the handler by one of
    native code that aborts.

    The user's own handler stays. Without one, the process exits as one that was terminated, but in
    good order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(
            signal.SIGTERM, _exit_terminated if handler in (signal.SIG_DFL, None) else handler
        )


def _exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def is_forked() -> bool:
    """Whether this process was forked from one that is connected to Ray: it has inherited the
    connection, but no thread of Ray's.

    Any question to Ray hangs in such a process.
    """
    return _has_forked or (_is_initialized() and _lacks_threads())


def _lacks_threads() -> bool:
    """Whether the thread that every driver of Ray 2.60 has is missing; raypool may have been
    imported after the fork.
    """
    if _client() is not None:
        return False  # it has no such thread
    with contextlib.suppress(OSError):  # Linux only
        return all(
            name.read_text().strip() != RAYS_THREAD
            for name in Path("/proc/self/task").glob("*/comm")
        )
    return False


def _client() -> Any:
    """Return the connection of Ray Client, None if this process has none."""
    module = sys.modules.get("ray.util.client")
    return (
        module.ray.get_context().client_worker
        if module is not None and module.ray.is_connected()
        else None
    )


def _after_fork() -> None:
    """In a forked child: forget what is the parent's, and let SIGTERM end the process as it would
    without a pool.

    Native code would keep a handler in Python from running.
    """
    global _has_forked, _lock, _users, _ours, _files
    _has_forked = _has_forked or _is_initialized()
    if _files is not None:
        os.close(_files[1])  # else the folder would be held as long as this child lives
    _lock, _users, _ours, _files = threading.Lock(), 0, None, None
    if signal.getsignal(signal.SIGTERM) is _exit_terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_has_forked = False
os.register_at_fork(after_in_child=_after_fork)


def connection() -> str:
    """Return an id of this process's connection to Ray, without asking a cluster for it: it may be
    beyond reach.

    The id of a driver alone is the same in each new local Ray.
    """
    import ray

    client = _client()
    if client is not None:
        return str(client._client_id)  # private, checked on Ray 2.60
    context = ray.get_runtime_context()
    return f"{context.get_worker_id()} on {context.get_node_id()}"


def leave_ray(before_end: Callable[[], None], joined: str | None = None) -> None:
    """End Ray if it was started here and nobody uses it any more; `before_end` is called then,
    while nobody can join.

    Args:
        before_end: Called before Ray is ended.
        joined: The `connection` that was joined; nothing is done if that has ended meanwhile,
            whoever uses the next.
    """
    global _users, _ours
    with _lock:
        if joined is not None and (not _is_initialized() or joined != connection()):
            return
        _users -= 1
        if _users <= 0 and is_ours():
            processes = _wake()
            try:
                _within(BRING_HOME_S, before_end)
            finally:
                _shut_down(processes)
                _ours = None
                _ended.set()
                _remove_files()
        elif _users <= 0:
            from raypool.backends.ray import client as outside

            outside.leave()


def give_up_ray(before_end: Callable[[], None] | None) -> None:
    """End this process's part in a Ray that is beyond help, whoever has started it: else Ray ends
    this process.

    From the first moment on nobody asks that Ray anything any more: `is_up` is false.

    Args:
        before_end: Called before; it may take `GIVE_UP_S`.
    """
    global _is_given_up
    _is_given_up = True
    processes = _wake()
    with _lock:
        if _is_initialized():
            if before_end is not None:
                _within(GIVE_UP_S, before_end)
            _shut_down(processes)
        else:
            _is_given_up = False
        _ended.set()


def is_up() -> bool:
    """Whether this process is connected to a Ray that, as far as is known, answers."""
    return _is_initialized() and not _is_given_up


def _within(limit_s: float, chore: Callable[[], object]) -> bool:
    """Call something that Ray may hold up forever; return whether it has ended in time."""
    last = threading.Thread(target=chore, name="raypool-last", daemon=True)
    last.start()
    last.join(limit_s)
    return not last.is_alive()


def _wake() -> list[int]:
    """Return the raylet and the control store of our own Ray, and wake them if they were stopped;
    none of anybody else's Ray.

    Nothing could end while they are stopped, and who waits for a value from a raylet that is killed
    is ended by Ray.
    """
    if not is_ours():
        return []
    node = ray_private.worker._global_node  # None if Ray runs elsewhere
    if node is None:
        return []
    processes = [info.process.pid for infos in node.all_processes.values() for info in infos]
    _signal(processes, signal.SIGCONT)
    return processes


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, number)


def _shut_down(processes: Sequence[int]) -> None:
    """Shut Ray down; kill its processes if it does not let go of this one in time."""
    global _is_given_up
    import ray

    def end() -> None:
        with _process_as_it_was():
            ray.shutdown()

    ending = threading.Thread(target=end, name="raypool-shutdown", daemon=True)
    ending.start()
    ending.join(SHUTDOWN_S)
    if ending.is_alive():
        _signal(processes, signal.SIGKILL)
        ending.join(SHUTDOWN_S)
    _is_given_up = ending.is_alive()
    if _is_given_up:
        atexit.unregister(ray.shutdown)  # it could hang, and keep this process from ending
        logger.error(
            "Ray has not let go of this process within %g s; what it holds here stays.",
            2 * SHUTDOWN_S,
        )


def keep_logs() -> Path | None:
    """Return the folder with the logs of our own Ray, and leave it when that Ray ends; None if the
    Ray is not ours.
    """
    global _files
    if _files is None:
        return None
    (folder, _), _files = _files, None
    # the next Ray removes what has a lock that nobody holds
    (folder / LOCK).unlink(missing_ok=True)
    return folder / "session_latest" / "logs"


def folder_of_ray() -> Path:
    """Return the folder for the files of our own Rays. Only this user can enter it.

    Ray makes its own folders writable for everybody: others could read its logs and replace its
    sockets.
    """
    parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # Ray's rule
    return Path(parent) / f"ray-{os.getuid()}"


def _make_files() -> tuple[Path, int]:
    """Make a folder for the files of a new Ray, and remove those of Rays whose driver died; return
    it and what holds it.
    """
    parent = folder_of_ray()
    try:
        make_private(parent).chmod(0o700)
    except PermissionError:  # somebody else has taken the name
        parent = Path(tempfile.mkdtemp(prefix=f"{parent.name}-", dir=parent.parent))
    for folder in parent.iterdir():
        remove_unheld(folder)
    # short: the names of sockets below it have 107 letters at most
    folder = parent / uuid.uuid4().hex[:8]
    held = hold(folder)
    run_aside(END_WHAT_IS_LEFT, folder)
    return folder, held


def _remove_files() -> None:
    global _files
    if _files is not None:
        (folder, held), _files = _files, None
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def is_ours() -> bool:
    """Whether raypool has connected this process to the Ray that it is connected to."""
    if not _is_initialized():
        return False
    return _ours == connection()


def _prepare(profile: Profile, address: str | None) -> None:
    """Prepare the environment that Ray reads when it is imported, and check for problems."""
    connect.prepare(profile)
    if address is None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if os.environ["RAY_AUTH_MODE"] == "token":
            try:
                make_token()
            except OSError as error:
                raise StartupError(
                    f"The token that protects Ray cannot be written: {error}. Set"
                    " RAY_AUTH_TOKEN_PATH to a file that can be."
                ) from error
    else:
        # Ray would look at this machine's address in the network instead
        if connect.host_and_port(address)[0] in LOOPBACK:
            os.environ.setdefault(LOOPBACK_ONLY, "0")
        if "RAY_AUTH_TOKEN" in os.environ or token_path().exists():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "ray" in sys.modules:
        _reread_environment()
    if address is not None:
        connect.check(address)


def _check_joined(profile: Profile) -> None:
    """Make sure that the Ray that this process is connected to already is the one that is meant,
    with what is to be shipped.
    """
    from raypool.backends.ray import client as outside

    if profile.is_remote and outside.server() != str(profile.address).removeprefix(CLIENT):
        raise StartupError(
            f"This process is connected to another Ray than the one at {profile.address}, and can"
            " be connected to one only. Shut that down first (its pools, then ray.shutdown())."
        )
    wanted = shipping.runtime_env(profile)
    if wanted and wanted != _shipped:
        raise StartupError(
            f"{' and '.join(sorted(wanted))} can be shipped only when this process connects to Ray,"
            " which it has done already. Open this pool first, or shut that Ray down before (its"
            " pools, then ray.shutdown())."
        )


def _is_initialized() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _reread_environment() -> None:
    """Ray was imported before: what it read from the environment then is out of date. Private
    names, checked on Ray 2.60.
    """
    from raypool.ray_private import AuthenticationTokenLoader, Config, ray_constants

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_ONLY, "1") == "1"


def _init_kept(ray: Any, options: dict[str, Any]) -> None:
    """Start Ray from a thread that lives as long as that Ray: its processes are killed when the
    thread that started them ends.
    """
    if threading.current_thread() is threading.main_thread():
        ray.init(**options)
        return
    started: concurrent.futures.Future[None] = concurrent.futures.Future()
    _ended.clear()

    def keep() -> None:
        try:
            ray.init(**options)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        _ended.wait()

    threading.Thread(target=keep, name="raypool-ray", daemon=True).start()
    started.result()


def _hush(ray: Any) -> None:
    """Keep Ray from printing a dozen lines about every worker that dies: the pool replaces it, and
    says so where it matters.

    Ray has no setting for it: `log_to_driver=False` leaves these messages of its node manager.
    Private names, checked on Ray 2.60; where they are missing, the messages are printed.
    """
    from raypool.ray_private import worker as module

    show = getattr(module, "print_to_stdstream", None)
    if show is None or hasattr(show, "is_hushed"):
        return

    def show_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        is_about_death = data.get("pid") == "raylet" and "worker died" in "".join(
            map(str, data.get("lines", ()))
        )
        if not (is_about_death and is_ours()):
            show(data, *args, **kwargs)

    show_others.is_hushed = True  # type: ignore[attr-defined]
    module.print_to_stdstream = show_others


def _init_at(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Connect to a Ray; on a head that was just started servers of Ray Client may die as they are
    forked (Ray 2.60).
    """
    for tries_left in reversed(range(CLIENT_TRIES)):
        try:
            ray.init(address=address, **options)
            return
        except ConnectionError as error:
            if not tries_left or not any(words in str(error) for words in DIED_AT_ONCE):
                raise


def _connect(
    ray: Any, address: str | None, inventory: Inventory | None, shipped: dict[str, Any]
) -> None:
    global _files
    _files = None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if shipped:
        options["runtime_env"] = dict(shipped)  # Ray puts an address in the place of the folder
    try:
        if address is not None:
            _init_at(ray, address, options)
        else:
            num_gpus = (
                None if inventory is None else len(visible_gpus(os.environ, inventory.devices()))
            )
            own = {
                "address": "local",
                "num_cpus": usable_cpus(),
                "num_gpus": num_gpus,
                "include_dashboard": False,
            }
            _files = _make_files()
            with without_helpers():
                _init_kept(ray, {**own, "_temp_dir": str(_files[0]), **options})
            _hush(ray)
    except Exception as error:  # of a node that does not come up Ray says it by a plain one
        raise connect.not_started(address, error) from error
    if address is not None and address.startswith(CLIENT):
        from raypool.backends.ray import client as outside

        try:
            outside.check_raypool(address)
        except BaseException:
            ray.shutdown()
            raise


# --- start without idle processes -----------------------------------------------------------------
#
# `ray.init` starts, and waits for, the server of a dashboard that is off, the autoscaler's monitor,
# where nothing can be added, and a process that reads all logs for a driver that does not want
# them. The dashboard's agent has to be there. It is Ray's small one, without servers of its own.
# `benchmarks/bench_start.py` says what that costs. The logs are written all the same.


SWITCHES = {"no_monitor": True, "include_log_monitor": False}
"""Ray's own, which `ray start` has as options; `ray.init` has no way to set them."""

NO_SERVER = b"127.0.0.1:0"
"""Where the dashboard's server would be. Whoever asks for it (Ray's State API) hears at once that
nobody is there; Ray would look for a missing address for 40 s."""


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """Let `ray.init` leave them out. Private names, checked on Ray 2.60; where one is missing, all
    are started.
    """
    try:
        from raypool.ray_private import node, parameter, ray_constants, utils

        settings, start, why_small = (
            parameter.RayParams,
            node.Node.start_api_server,
            utils.get_dashboard_dependency_error,
        )
    except (ImportError, AttributeError):
        yield
        return
    if not SWITCHES.keys() <= inspect.signature(settings).parameters.keys():
        yield
        return

    def leave_out(node: Any, *_: Any, **__: Any) -> None:
        """Do what is left of `Node.start_api_server`."""
        node._webui_url = ""
        node.get_gcs_client().internal_kv_put(
            ray_constants.DASHBOARD_ADDRESS.encode(),
            NO_SERVER,
            True,
            ray_constants.KV_NAMESPACE_DASHBOARD,
        )

    parameter.RayParams = functools.partial(settings, **SWITCHES)
    node.Node.start_api_server = leave_out
    utils.get_dashboard_dependency_error = lambda: ImportError(
        "nobody asks the agent of the dashboard anything"
    )
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server, utils.get_dashboard_dependency_error = (
            settings,
            start,
            why_small,
        )
