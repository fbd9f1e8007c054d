"""Starts Ray on this machine, safe and quiet, or joins the one that is there; ends only what it started."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from raypool.devices.cores import usable_cpus
from raypool.devices.gpus import Inventory
from raypool.devices.visible import visible_gpus
from raypool.errors import StartupError

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With "0" Ray binds everything to 127.0.0.1; for Linux it is not documented, and a test looks at the ports."""

CONNECT_TIMEOUT_S = 5.0

GIVE_UP_S = 5.0
"""How long to try to fetch what is in a Ray that is beyond help [s]."""

ENVIRONMENT = {
    # A stranger on this machine or network can't use the cluster: it asks for a token, and listens on the loopback only.
    "RAY_AUTH_MODE": "token",
    LOOPBACK_ONLY: "0",
    # Ray runs workers at niceness 15 otherwise, which starves them on a shared machine.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns that it will change this default; it is what we want.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What a Ray of our own is started with, where the user has not said otherwise. Read by Ray when it is imported."""

_lock = threading.Lock()
_users = 0
_ended = threading.Event()
_ours: str | None = None  # our connection to the Ray that was started here; unique, so that another Ray is never taken for it


def join_ray(address: str | None, inventory: Inventory | None = None) -> None:
    """Make sure that Ray runs in this process: the one that is there, the one at the address, or a new one on this machine.

    Args:
        address: Where it runs.
        inventory: Who knows the GPUs that a new one is to have. None: Ray finds them itself.

    Raises:
        StartupError: There is no Ray at the address.
    """
    global _users, _ours
    with _lock:
        _prepare(address)
        logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in notebooks it asks for a package that nobody needs
        import ray

        if not ray.is_initialized():
            with _own_sigterm():
                _connect(ray, address, inventory)
            _ours = connection()
            _users = 0  # of a Ray that somebody has ended meanwhile
        _users += 1


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep Ray from turning the end by SIGTERM into a crash: it replaces the handler by one of native code that aborts.

    The user's own handler stays. Without one, the process exits as one that was terminated, but in good order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _exit_terminated if handler in (signal.SIG_DFL, None) else handler)


def _exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def connection() -> str:
    """Return what tells this process's connection to Ray from any other."""
    import ray

    return str(ray.get_runtime_context().get_worker_id())


def leave_ray(before_end: Callable[[], None], joined: str | None = None) -> None:
    """End Ray if it was started here and nobody uses it any more; `before_end` is called then, while nobody can join.

    Args:
        before_end: Called before Ray is ended.
        joined: The `connection` that was joined; nothing is done if that has ended meanwhile, whoever uses the next.
    """
    global _users
    with _lock:
        if joined is not None and (not _is_initialized() or joined != connection()):
            return
        _users -= 1
        if _users <= 0 and is_ours():
            import ray

            try:
                before_end()
            finally:
                ray.shutdown()
                _ended.set()


def give_up_ray(before_end: Callable[[], None] | None) -> None:
    """End this process's part in a Ray that is beyond help, whoever has started it: else Ray ends this process.

    Args:
        before_end: Called before; it may take `GIVE_UP_S`.
    """
    with _lock:
        import ray

        if before_end is not None and _is_initialized():
            last = threading.Thread(target=before_end, name="raypool-last", daemon=True)
            last.start()
            last.join(GIVE_UP_S)
        ray.shutdown()
        _ended.set()


def is_ours() -> bool:
    """Whether the Ray that runs in this process was started by us."""
    if not _is_initialized():
        return False
    return _ours == connection()


def _prepare(address: str | None) -> None:
    if _is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if os.environ["RAY_AUTH_MODE"] == "token":
            try:
                make_token()
            except OSError as error:
                raise StartupError(
                    f"The token that protects Ray cannot be written: {error}. Set RAY_AUTH_TOKEN_PATH to a file that can be."
                ) from error
    else:
        host, port = host_and_port(address)
        _check_reachable(host, port, address)
        if host in ("127.0.0.1", "localhost"):  # Ray would look for it at this machine's address in the network instead
            os.environ.setdefault(LOOPBACK_ONLY, "0")
        if token_path().exists():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "ray" in sys.modules:
        _reread_environment()


def host_and_port(address: str) -> tuple[str, int | None]:
    """Return where to look for a Ray; no port if that is for Ray to find out.

    Example:
        >>> host_and_port("ray://head:10001"), host_and_port("10.0.0.1:6379"), host_and_port("auto")
        (('head', 10001), ('10.0.0.1', 6379), ('auto', None))
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (address, None)


def _check_reachable(host: str, port: int | None, address: str) -> None:
    """Make sure that somebody listens there: Ray would try for minutes."""
    if port is None:
        return
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StartupError(
            f"Nobody answers at {address} ({error}). Check the address, and that Ray runs there and this machine may reach it."
        ) from error


def _is_initialized() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _reread_environment() -> None:
    """Ray was imported before: what it read from the environment then is out of date. Private names, checked on Ray 2.60."""
    from ray._private import ray_constants
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_ONLY, "1") == "1"


def token_path() -> Path:
    """Return where Ray's token lies."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def make_token() -> None:
    """Create the token file, readable by its owner only; Ray would create it readable by all."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > 0:
        path.chmod(0o600)
        return
    # Written apart and then given its name, so that nobody ever reads half a token, and two who come at once agree on one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        if path.exists():
            draft.replace(path)  # it was empty
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _init_kept(ray: Any, options: dict[str, Any]) -> None:
    """Start Ray from a thread that lives as long as that Ray: its processes are killed when the thread that started them ends."""
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
    """Keep Ray from printing a dozen lines about every worker that dies: the pool replaces it, and says so where it matters.

    Ray has no setting for it: `log_to_driver=False` leaves these messages of its node manager. Private names, checked on Ray
    2.60; where they are missing, the messages are printed.
    """
    module = ray._private.worker
    show = getattr(module, "print_to_stdstream", None)
    if show is None or hasattr(show, "is_hushed"):
        return

    def show_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        is_about_death = data.get("pid") == "raylet" and "worker died" in "".join(map(str, data.get("lines", ())))
        if not (is_about_death and is_ours()):
            show(data, *args, **kwargs)

    show_others.is_hushed = True  # type: ignore[attr-defined]
    module.print_to_stdstream = show_others


def _connect(ray: Any, address: str | None, inventory: Inventory | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is not None or "RAY_ADDRESS" in os.environ:
            ray.init(address=address, **quiet)
        else:
            num_gpus = None if inventory is None else len(visible_gpus(os.environ, inventory.devices()))
            own = {"address": "local", "num_cpus": usable_cpus(), "num_gpus": num_gpus, "include_dashboard": False}
            _init_kept(ray, {**own, **quiet})
            _hush(ray)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(f"Ray could not be started or reached at {address or 'this machine'}: {error}") from error
