"""Starts Ray on this machine, safe and quiet, or joins a running one; ends only its own Ray."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from raypool import ray_private
from raypool.backends.ray import dashboard_agent, fork_client, fork_server
from raypool.channel.exchange import POOL_ENDED
from raypool.cluster import connect
from raypool.cluster.connect import make_token, token_path
from raypool.errors import PoolClosedError, StartupError
from raypool.gpus.devices import CUDA, Inventory, usable_cpus, visible_gpus
from raypool.gpus.table import NVIDIAS, import_ray
from raypool.profiles import CLIENT, LOOPBACK, Profile
from raypool.worker.folders import LOCK, hold, make_private, remove_unheld, run_aside
from raypool.worker.running import environment, this_process

if TYPE_CHECKING:
    from raypool.cluster.slurm import Allocation

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With "0" Ray binds everything to 127.0.0.1; undocumented for Linux: a test looks at the ports."""

GIVE_UP_S = 5.0
"""How long to try to fetch values from a Ray that no longer works [s]."""

BRING_HOME_S = 60.0
"""How long to try to fetch values from a Ray that is about to end [s]."""

NOT_HOME = (
    "Not all results could be copied out of Ray's object store within %g s. Once Ray is shut down,"
    " the others are lost, or may change. Save large results before the pool closes."
)

SHUTDOWN_S = 20.0
"""How long Ray may take to shut down [s]; then its processes are killed, and have as long again."""

SETTINGS = {
    # How long the caller of a worker that died waits to hear why. Ray waits 1 s, and then speaks of
    # a machine that does not answer; a busy one may need longer.
    "timeout_ms_task_wait_for_death_info": 30_000,
    # How long a process waits before it tries again to connect to the raylet or to its object
    # store. The raylet itself connects to its store, whose thread it has just started: half of all
    # starts took a second longer, since Ray waits 1 s, ten times.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}
"""Ray's settings for a Ray of our own."""

OTHER_ORDER = (
    "Workers take CUDA_VISIBLE_DEVICES=%s as numbers of nvidia-smi, but in this process CUDA counts"
    " the fastest GPU first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, too, or name the GPUs by UUID"
    " (nvidia-smi -L)."
)

RAYS_THREAD = b"worker.io"

TRIES = 20
"""How often to try, 10 ms apart, what other threads and processes may disturb."""

CLIENT_TRIES = 3
"""How often connecting to Ray Client is tried."""

FORKED = (
    "This process was forked from one that uses Ray. Ray's threads do not survive a fork, so no"
    " pool on Ray can work here. Start the process with spawn"
    " (multiprocessing.get_context('spawn')), or open a pool of threads:"
    " parpool(profile='threads')."
)

DIED_AT_ONCE = ("Starting Ray client server failed", "ZombieProcess", "NoSuchProcess")
"""What Ray's proxy says, by chance one of these, of a server that died as it was started."""

END_WHAT_IS_LEFT = """
import fcntl, os, shutil, signal, sys, time

def is_rays(pid):
    with open(f"/proc/{pid}/comm", "rb") as comm, open(f"/proc/{pid}/cmdline", "rb") as line:
        name, words = comm.read(), line.read()
    # the driver may be called raypool, or ray_train.py, and end slowly with its logs still open
    if not (name.startswith((b"ray::", b"raylet", b"gcs_server")) or b"/ray/_private/" in words):
        return False
    files = f"/proc/{pid}/fd"
    names = (os.readlink(f"{files}/{number}") for number in os.listdir(files))
    return any(name.startswith(sys.argv[1] + "/") for name in names)

if not os.fork():
    held = None
    try:
        held = os.open(sys.argv[1] + "/.lock", os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
    except FileNotFoundError:  # the driver has ended at once, and removed it
        pass
    for seconds in range(1, 13):
        time.sleep(1)
        is_over = True
        for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
            try:
                if is_rays(pid):
                    is_over = False
                    if seconds % 4 == 0:
                        os.kill(int(pid), signal.SIGKILL)
            except OSError:  # it has just ended, or is another user's
                pass
        if is_over:
            break
    if held is not None and not os.fstat(held).st_nlink:  # the driver has removed the folder
        shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Waits until a driver is gone, and until its Ray is: all processes with a log of it open. Those
that are left after four seconds are killed. If the driver has removed the folder, what they have
written there since is removed, too: of a Ray whose start was interrupted, `ray.shutdown` ends none.

Most end by themselves, but Ray's agents first try for minutes to reach the control store.
"""

CALLERS = frozenset(
    f"raypool-{name}" for name in ("driver", "agents", "watch", "nodes", "grow", "aside", "close")
)
"""Names of the threads of a pool's own that call Ray; none of them runs a user's code."""

KEPT = ".kept"
"""The name of the lock in a folder that is kept."""

UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"

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
    # Under `uv run`, workers would have a copy of the current folder, which is removed with Ray,
    # and with it the files that tasks have written there.
    UV_RUN: "0",
}
"""The environment of a Ray of our own, where the user has not set it. Ray reads it on import."""

logger = logging.getLogger("raypool")

# Ray is started, joined and ended by one thread at a time; notified when one has been given up
_lock = threading.Condition(threading.Lock())
_users = 0  # of the connection below
_used: object = None
_ended = threading.Event()
_shipped: dict[str, Any] = {}  # with our connection
# the connection that raypool has made; unique, so that no other is taken for it
_ours: object = None
_files: tuple[Path, int] | None = None  # the folder of that Ray, and the descriptor that holds it
_allocation: Allocation | None = None  # the nodes of our connection, if Slurm gave them
_is_given_up = False  # Ray no longer answers: a question to it would hang


def join_ray(
    profile: Profile | None = None,
    inventory: Inventory | None = None,
    workers: tuple[int | None, int | None] = (None, None),
) -> Profile:
    """Make sure that Ray runs in this process: the present one, one at the address, or a new one.

    Args:
        profile: Where it runs, and what is sent there; None: as the environment says.
        inventory: Knows the GPUs for a new one. None: Ray finds them itself.
        workers: The least and the greatest number of workers, for an allocation of Slurm.

    Returns:
        The profile, with the address of the allocation if there is one.

    Raises:
        CloudError: Slurm refuses the job.
        StartupError: There is no Ray at the address, or it refuses this process; or this process
            was forked from one that uses Ray.
        InvalidValueError: The files to be sent are larger than Ray allows.
    """
    global _users, _used, _ours, _shipped, _allocation
    profile = profile or Profile()
    with _lock, contextlib.ExitStack() as undo:
        if is_forked():
            raise StartupError(FORKED)
        # a thread may just be leaving a Ray that has died
        if not _lock.wait_for(lambda: not _is_given_up, GIVE_UP_S + 2 * SHUTDOWN_S):
            raise StartupError(
                "Ray no longer answers, and cannot be shut down in this process. Start a new"
                " process."
            )
        if not _is_initialized():
            _release_allocation()  # of a Ray that somebody has ended meanwhile
            undo.callback(_release_allocation)
            if profile.slurm is not None or "SLURM_JOB_ID" in os.environ:
                from raypool.cluster.slurm import allocation_for

                _allocation = allocation_for(profile, workers)
        if _allocation is not None:
            profile = _allocation.joined(profile)
        address = profile.address or os.environ.get("RAY_ADDRESS") or None  # Ray ignores ""
        if not _is_initialized():
            _prepare(profile, address)
        # its modules are imported while Ray is imported here, and starts
        server = {} if _is_initialized() or address is not None else fork_server_for(profile)
        with _process_as_it_was(), environment(server):
            import_ray()
            import ray

            _start_for_users_only()
            if ray.is_initialized():
                _check_joined(profile)
            else:
                shipped = connect.runtime_env(profile)
                undo.callback(_end, ())  # what has started: else the next `parpool` would join it
                with _own_sigterm():
                    _connect(ray, address, inventory, shipped)
                _ours, _shipped = connection(), shipped
        if _used is not connection():  # somebody has ended the Ray of the others
            _users, _used = 0, connection()
        _users += 1
        undo.pop_all()
    return profile


class _ForUsers:
    """Whether Ray starts if it is called where none is: as the user wants, but not by raypool.

    A thread of a pool's looks first whether its Ray is there, but that may end between the look
    and the call, which would start another one. Ray looks at this before each call.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted

    def __bool__(self) -> bool:
        if threading.current_thread().name not in CALLERS:
            return self._is_wanted
        if not _is_initialized():  # a call would end this process
            raise PoolClosedError(POOL_ENDED)
        return False


def _start_for_users_only() -> None:
    hook = ray_private.auto_init_hook
    if not isinstance(hook.enable_auto_connect, _ForUsers):
        hook.enable_auto_connect = _ForUsers(hook.enable_auto_connect)


def _release_allocation() -> None:
    global _allocation
    allocation, _allocation = _allocation, None
    if allocation is not None:
        allocation.release()


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore what Ray changes here: Python's random state, hooks for errors and breakpoints."""
    numbers, hook = random.getstate(), sys.excepthook
    try:
        with environment({}, "PYTHONBREAKPOINT", "RAY_CLIENT_MODE"):
            yield
    finally:
        random.setstate(numbers)
        sys.excepthook = hook


@contextlib.contextmanager
def _not_a_task() -> Iterator[None]:
    """Hide that this process is a task of Slurm's: its workers are none."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    from raypool.cluster.slurm_job import NOT_FOR_TASKS

    names = [name for name in os.environ if NOT_FOR_TASKS.match(name)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the user's SIGTERM handler, or exit in good order: Ray's, in native code, aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_default = handler in (signal.SIG_DFL, None)
        signal.signal(signal.SIGTERM, _exit_terminated if is_default else handler)


def _exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    this_process.is_terminated = True
    sys.exit(128 + number)


def is_forked() -> bool:
    """Whether this process was forked from one connected to Ray: any question to Ray hangs then."""
    global _has_forked
    _has_forked = _has_forked or (_is_initialized() and _lacks_threads())
    return _has_forked


def _lacks_threads() -> bool:
    # raypool may have been imported after the fork, so look for a thread that every driver of Ray
    # 2.60 has; Ray Client has no such thread
    if _client() is not None:
        return False
    for _ in range(TRIES):  # the kernel's list can lack a thread while another one ends
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            tasks = Path("/proc/self/task")
            if not tasks.is_dir():
                return False  # Linux only
            if any(name.read_bytes().strip() == RAYS_THREAD for name in tasks.glob("*/comm")):
                return False
        time.sleep(0.01)
    return True


def _client() -> Any:
    """Return the connection of Ray Client, None if this process has none."""
    module = sys.modules.get("ray.util.client")
    if module is None or not module.ray.is_connected():
        return None
    return module.ray.get_context().client_worker


def _after_fork() -> None:
    """Forget, in a forked child, what is the parent's."""
    global _has_forked, _lock, _users, _used, _ours, _files
    _has_forked = _has_forked or _is_initialized()
    if _files is not None:
        os.close(_files[1])  # else the folder would be held as long as this child lives
    _lock = threading.Condition(threading.Lock())  # another thread of the parent may have had it
    _users, _used, _ours, _files = 0, None, None, None
    # native code would keep a handler in Python from running
    if signal.getsignal(signal.SIGTERM) is _exit_terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_has_forked = False
os.register_at_fork(after_in_child=_after_fork)


def connection() -> object:
    """Return what stands for this process's connection to Ray: each `ray.init` makes another."""
    return _client() or ray_private.worker.global_worker.node


def leave_ray(before_end: Callable[[bool], None], joined: object = None) -> None:
    """End Ray if it was started here and nobody uses it any more.

    Args:
        before_end: Called before Ray is ended, or left to its user, while nobody can join; told
            whether the object store stays.
        joined: The `connection` that was joined; nothing is done if that has ended meanwhile.
    """
    global _users, _used
    with _lock:
        if joined is not None and (not _is_initialized() or joined is not connection()):
            if not _is_initialized():
                _release_allocation()
                _remove_files()
            return
        _users -= 1
        if _users > 0:
            return
        _used = None
        is_own, processes = is_ours(), _wake()
        try:
            # also before the user shuts a Ray of their own down
            if is_own or _client() is None:
                stays = not is_own or _files is None
                if _within(BRING_HOME_S, functools.partial(before_end, stays)).is_alive():
                    logger.error(NOT_HOME, BRING_HOME_S)
        finally:
            if is_own:
                _end(processes)
                _release_allocation()
            else:
                from raypool.backends.ray import client as outside

                outside.leave()


def _end(processes: Sequence[int]) -> None:
    """Shut our own connection down, and Ray if it was started here, and remove its files."""
    global _ours
    _shut_down(processes)
    _ours = None
    _ended.set()
    _remove_files()


def _remove_files() -> None:
    """Remove the folder of our own Ray after its end, even if the user shut it down."""
    global _files
    if _files is not None:
        (folder, held), _files = _files, None
        # without a lock it is kept: see `keep_logs`; a process that still ends may write into it
        for _ in range(TRIES if (folder / LOCK).exists() else 0):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.01)
        os.close(held)


def give_up_ray(before_end: Callable[[bool], None] | None) -> None:
    """Leave a Ray that cannot be saved: otherwise Ray ends this process.

    From then on no call goes to that Ray: `is_up` is false.

    Args:
        before_end: Called before, as in `leave_ray`; it may take `GIVE_UP_S`.
    """
    global _is_given_up
    # before the lock: `leave_ray` may have it, and wait for this Ray
    _is_given_up = True
    processes = _wake()
    with _lock:
        if _is_initialized():
            if before_end is not None:
                _within(GIVE_UP_S, functools.partial(before_end, _files is None))
            _shut_down(processes)
        else:
            _is_given_up = False
        _release_allocation()
        _ended.set()
        _lock.notify_all()


def is_up(joined: object) -> bool:
    """Whether this `connection` still exists, and its Ray answers as far as is known."""
    return _is_initialized() and not _is_given_up and connection() is joined


def _within(limit_s: float, chore: Callable[[], object]) -> threading.Thread:
    """Call something that Ray may block forever, and wait this long; return its thread."""
    last = threading.Thread(target=chore, name="raypool-last", daemon=True)
    last.start()
    last.join(limit_s)
    return last


def _wake() -> list[int]:
    """Return the processes of our own Ray, and wake any that were stopped."""
    # They could not end, and who waits for a value from a raylet that is killed is ended by Ray.
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
    """Shut Ray down; kill its processes if that takes too long."""
    global _is_given_up
    import ray

    def end() -> None:
        with _process_as_it_was():
            ray.shutdown()

    ending = _within(SHUTDOWN_S, end)
    if ending.is_alive():
        _signal(processes, signal.SIGKILL)
        ending.join(SHUTDOWN_S)
    _is_given_up = ending.is_alive()
    if _is_given_up:
        atexit.unregister(ray.shutdown)  # it could hang, and keep this process from ending
        logger.error(
            "Ray did not disconnect from this process within %g s; its resources stay in use until"
            " this process ends.",
            2 * SHUTDOWN_S,
        )


def keep_logs() -> Path | None:
    """Return the log folder of our own Ray, kept when that ends; None if the Ray is not ours."""
    if _files is None:
        return None
    folder, _ = _files
    # this Ray and later ones remove only folders with a lock
    with contextlib.suppress(FileNotFoundError):  # they are kept already
        (folder / LOCK).rename(folder / KEPT)
    return folder / "session_latest" / "logs"


def folder_of_ray() -> Path:
    """Return the folder for the files of our own Rays, which only this user can enter."""
    # Ray's own folders are writable for everybody: others could read logs and replace sockets
    parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # Ray's rule
    return Path(parent) / f"ray-{os.getuid()}"


def _private_folder() -> Path:
    parent = folder_of_ray()
    try:
        make_private(parent).chmod(0o700)
    except PermissionError:  # somebody else has taken the name
        parent = Path(tempfile.mkdtemp(prefix=f"{parent.name}-", dir=parent.parent))
    return parent


def _make_files() -> tuple[Path, int]:
    """Make a new Ray's folder, and remove those of dead drivers; return it and its descriptor."""
    parent = _private_folder()
    for folder in parent.iterdir():
        remove_unheld(folder)
    # short: the names of sockets below it have 107 letters at most
    folder = parent / uuid.uuid4().hex[:8]
    held = hold(folder)
    run_aside(END_WHAT_IS_LEFT, folder)
    return folder, held


def is_ours() -> bool:
    """Whether raypool has made this process's connection to Ray."""
    return _is_initialized() and _ours is connection()


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
                    " RAY_AUTH_TOKEN_PATH to a writable file."
                ) from None
    else:
        # for a loopback address Ray would use this machine's in the network instead
        if connect.host_and_port(address)[0] in LOOPBACK:
            os.environ.setdefault(LOOPBACK_ONLY, "0")
        if "RAY_AUTH_TOKEN" in os.environ or token_path().exists():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "ray" in sys.modules:
        # what it read before is out of date; private names, checked on Ray 2.60
        from raypool.ray_private import AuthenticationTokenLoader, Config, ray_constants

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_ONLY, "1") == "1"
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = os.environ.get(UV_RUN, "1") == "1"
    if address is not None:
        connect.check(address)


def _check_joined(profile: Profile) -> None:
    """Make sure that this process's Ray is the right one, with everything shipped."""
    from raypool.backends.ray import client as outside

    if profile.is_remote and outside.server() != str(profile.address).removeprefix(CLIENT):
        raise StartupError(
            f"This process is connected to another Ray than the one at {profile.address}, and can"
            " connect to only one. Shut that one down first (its pools, then ray.shutdown())."
        )
    wanted = connect.runtime_env(profile)
    if wanted and wanted != _shipped:
        raise StartupError(
            f"{' and '.join(sorted(wanted))} can be sent only when this process connects to Ray,"
            " and it is already connected. Open this pool first, or shut that Ray down (its pools,"
            " then ray.shutdown())."
        )


def _is_initialized() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _init_kept(ray: Any, options: dict[str, Any]) -> None:
    # Ray's processes are killed when the thread that started them ends
    if threading.current_thread() is threading.main_thread():
        ray.init(**options)
        return
    started: concurrent.futures.Future[None] = concurrent.futures.Future()
    _ended.clear()

    def keep() -> None:
        try:
            ray.init(**options)
        except BaseException as error:  # raised again where `result` is asked for
            started.set_exception(error)
            return
        started.set_result(None)
        _ended.wait()

    threading.Thread(target=keep, name="raypool-ray", daemon=True).start()
    started.result()


def _hush() -> None:
    """Keep Ray from printing a dozen lines about each dead worker: the pool replaces it."""
    # There is no setting: `log_to_driver=False` leaves these messages of the node manager. Private
    # names, checked on Ray 2.60; where they are missing, the messages are printed.
    from raypool.ray_private import worker as module

    show = getattr(module, "print_to_stdstream", None)
    if show is None or hasattr(show, "is_hushed"):
        return

    def show_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        lines = "".join(map(str, data.get("lines", ())))
        is_about_death = data.get("pid") == "raylet" and "worker died" in lines
        if not (is_about_death and is_ours()):
            show(data, *args, **kwargs)

    show_others.is_hushed = True  # type: ignore[attr-defined]
    module.print_to_stdstream = show_others


def _init_at(ray: Any, address: str, options: dict[str, Any]) -> None:
    # on a head that was just started, servers of Ray Client may die as they are forked (Ray 2.60)
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
    _remove_files()
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if shipped:
        options["runtime_env"] = dict(shipped)  # Ray puts an address in the place of the folder
    try:
        if address is not None:
            _init_at(ray, address, options)
        else:
            _files = _make_files()
            options |= {
                "address": "local",
                "num_cpus": usable_cpus(),
                "num_gpus": count_gpus(inventory),
                "include_dashboard": False,
                "_temp_dir": str(_files[0]),
                "_system_config": dict(SETTINGS),  # Ray writes into it
            }
            with without_helpers(), _not_a_task():
                _init_kept(ray, options)
            _hush()
    except Exception as error:  # of a node that does not come up Ray says it by a plain one
        raise connect.not_started(address, error) from error
    if address is not None and address.startswith(CLIENT):
        from raypool.backends.ray import client as outside

        outside.check_raypool(address)


def count_gpus(inventory: Inventory | None) -> int | None:
    """Return how many GPUs the next Ray here has; None: Ray's own count."""
    text = os.environ.get(CUDA)
    if text is not None and text.startswith("MIG-"):
        # Ray would give a worker to each divided GPU, not to each of its instances
        known = {name for card in (inventory or NVIDIAS).devices() for name in card.mig or ()}
        named = [*itertools.takewhile(known.__contains__, map(str.strip, text.split(",")))]
        if named:
            return len(set(named))
    # Ray counts the names between commas, including those by which CUDA sees nothing
    if text is not None and not text.startswith("MIG-"):
        # a process sees one instance of a divided GPU and nothing else, but a worker has one GPU
        whole = [replace(card, mig=()) for card in (inventory or NVIDIAS).devices()]
        if whole:
            seen = visible_gpus(os.environ, whole)
            if not text.startswith("GPU-") and any(gpu.index is None for gpu in seen):
                logger.warning(OTHER_ORDER, text)
            return len(seen)
    return None if inventory is None else len(visible_gpus(os.environ, inventory.devices()))


# --- start without idle processes -----------------------------------------------------------------
#
# `ray.init` starts, and waits for, the server of a dashboard that is off, the autoscaler's monitor,
# where nothing can be added, and a process that reads all logs for a driver that does not want
# them. The dashboard's agent has to be there: `dashboard_agent` takes its place.
# `benchmarks/bench_start.py` says what that costs. The logs are written all the same.


SWITCHES = {"no_monitor": True, "include_log_monitor": False}
"""Ray's own, which `ray start` has as options; `ray.init` has no way to set them."""

JOIN_S = 10.0
"""How long this machine's node is awaited here; then Ray waits for it itself [s]."""

NO_SERVER = b"127.0.0.1:0"
"""The address of the dashboard's server. Nobody is there, as Ray's State API hears at once; for a
missing address it would look for 40 s.
"""


def environment_of(profile: Profile) -> dict[str, str]:
    """Return the variables of a pool's workers, besides those of their machine."""
    if not profile.fork_server:  # also where the node forks them, as in a job of Slurm
        return {**profile.worker_env, fork_client.SERVER: ""}
    return profile.worker_env


def fork_server_for(profile: Profile) -> dict[str, str]:
    """Have a fork server made for the next Ray here; return the variable that leads Ray to it."""
    if not profile.fork_server:
        return {}
    modules = fork_server.installed(profile.preload)
    reason = fork_server.obstacle(modules)
    if reason is None:
        try:
            path = fork_server.serve(_private_folder(), modules, profile.worker_env)
            return {fork_client.SERVER: path}
        except OSError as error:
            reason = str(error)
    logger.info(fork_server.NOT_FORKED, reason)
    return {}


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """Let `ray.init` leave them out; private names, checked on Ray 2.60."""
    with contextlib.ExitStack() as undo:
        for place, name, new in _replacements():
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, new)
        yield


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return Ray's names to replace (where, which, by what); none if this Ray lacks any of them."""
    try:
        import ray

        from raypool.ray_private import node, parameter, ray_constants, services, utils

        settings, get_node = parameter.RayParams, services.get_node
        begin_own = services._build_python_executable_command_memory_profileable
        agent = ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        known = inspect.signature(settings).parameters.keys()
    except (ImportError, AttributeError):
        return []

    begun: list[Any] = []

    def leave_out(node: Any, *_: Any, **__: Any) -> None:
        """Do the rest of `Node.start_api_server`."""
        begun.append(node)
        node._webui_url = ""
        node.get_gcs_client().internal_kv_put(
            ray_constants.DASHBOARD_ADDRESS.encode(),
            NO_SERVER,
            True,
            ray_constants.KV_NAMESPACE_DASHBOARD,
        )

    def wait_for_node(address: str, node_id: str) -> Any:
        """Call `get_node` when the node is there; Ray itself looks for it once a second."""
        deadline = time.monotonic() + JOIN_S
        with contextlib.suppress(Exception):  # what is wrong, `get_node` says
            # one more client would end this process a minute after the control store has died
            control_store = begun[0].get_gcs_client()
            while time.monotonic() < deadline:
                nodes = control_store.get_all_node_info(timeout=JOIN_S)
                if any(each.hex() == node_id for each in nodes):
                    break
                time.sleep(0.02)
        return get_node(address, node_id)

    def begin_command(component: str, *args: Any, **kwargs: Any) -> list[str]:
        """Return the beginning of a component's command; Ray adds its own script and options."""
        if component == agent and ray.__version__.startswith(fork_server.RAY):
            return [sys.executable, "-S", dashboard_agent.__file__]
        return [*begin_own(component, *args, **kwargs)]

    switches: dict[str, Any] = dict(SWITCHES)
    if fork_client.SERVER in os.environ:
        switches["setup_worker_path"] = fork_client.__file__
    replacements: list[tuple[Any, str, Any]] = [
        (parameter, "RayParams", functools.partial(settings, **switches)),
        (node.Node, "start_api_server", leave_out),
        (services, "get_node", wait_for_node),
        (services, "_build_python_executable_command_memory_profileable", begin_command),
        # else Ray would import here what its own agent needs
        (utils, "get_dashboard_dependency_error", lambda: ImportError("the agent is not Ray's")),
    ]
    is_known = all(hasattr(place, name) for place, name, _ in replacements)
    return replacements if is_known and SWITCHES.keys() <= known else []
