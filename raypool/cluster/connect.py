"""Connecting to a cluster: token, certificates and runtime environment, and checks with a quick
error.

Ray itself would try for half a minute, or forever, and then not name the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raypool.errors import InvalidValueError, StartupError
from raypool.profiles import CLIENT, Profile

CONNECT_TIMEOUT_S = 5.0  # for a machine to accept a connection
ANSWER_S = 4.0  # for Ray to answer

TLS_VARIABLES = {
    "certificate": "RAY_TLS_SERVER_CERT",
    "key": "RAY_TLS_SERVER_KEY",
    "authority": "RAY_TLS_CA_CERT",
}


_replaced: dict[str, tuple[str | None, str | None]] = {}  # by variable: the value before, and now


def prepare(profile: Profile) -> None:
    """Put a profile's token and certificates into the environment, which Ray reads at its import.

    Variables of an earlier profile are restored first.

    Raises:
        StartupError: A file does not exist, or is empty.

    Source:
        Ray, Token authentication: RAY_AUTH_TOKEN counts before RAY_AUTH_TOKEN_PATH. Ray, TLS
        Authentication.
    """
    wanted: dict[str, str | None] = {}  # None: must be unset
    if profile.token_file is not None:
        wanted["RAY_AUTH_TOKEN_PATH"] = _readable(profile.token_file, "token_file")
        wanted["RAY_AUTH_MODE"] = "token"
        wanted["RAY_AUTH_TOKEN"] = None
    if profile.tls is not None:
        for name, variable in TLS_VARIABLES.items():
            wanted[variable] = _readable(getattr(profile.tls, name), f"tls.{name}")
        wanted["RAY_USE_TLS"] = "1"
    for name, (before, since) in _replaced.items():
        if os.environ.get(name) == since:  # else somebody has set it meanwhile
            _set(name, before)
    _replaced.clear()
    for name, value in wanted.items():
        _replaced[name] = os.environ.get(name), value
        _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _readable(entry: str | os.PathLike[str], name: str) -> str:
    path = Path(entry).expanduser().absolute()
    try:
        why = None if path.read_bytes().strip() else "is empty"
    except OSError as error:
        why = f"could not be read: {error.strerror}"
    if why:
        raise StartupError(f"{name}: {path} {why}. Copy it from the cluster's head.")
    return str(path)


def host_and_port(address: str) -> tuple[str, int | None]:
    """Return the host and port of a Ray; no port if Ray must find it.

    Example:
        >>> host_and_port("ray://head:10001"), host_and_port("10.0.0.1:6379"), host_and_port("auto")
        (('head', 10001), ('10.0.0.1', 6379), ('auto', None))
    """
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (address, None)


def listens(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Connect to an address and leave again, or raise an OSError."""
    socket.create_connection(host_and_port(address), timeout_s).close()


def living_nodes(address: str, timeout_s: float = ANSWER_S) -> dict[Any, Any]:
    """Return the living nodes of the Ray at an address, by id, without becoming its driver."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    from raypool.ray_private import GcsClient

    nodes = GcsClient(address=address).get_all_node_info(timeout=timeout_s)
    return {name: node for name, node in nodes.items() if node.state == GcsNodeInfo.ALIVE}


def check(address: str) -> None:
    """Check that a Ray at this address accepts this process, as far as can be seen from here.

    The environment is as `prepare` leaves it, and Ray has read it.

    Raises:
        StartupError: Nothing listens there; only one side encrypts; the token is refused; or the
            address is for nodes of the cluster, and this machine is not one.
    """
    host, port = host_and_port(address)
    if port is None:
        return
    try:
        listens(address)
    except OSError as error:
        raise StartupError(
            f"Nothing answers at {address} ({error}). Check the address, that Ray runs there, and"
            " that this machine can reach it."
        ) from None
    encrypts = speaks_tls(host, port)
    if _wants_tls() and not encrypts:
        raise StartupError(
            f"tls requires encryption, but the server at {address} does not encrypt. Leave tls"
            " (and RAY_USE_TLS) out, or start Ray there with RAY_USE_TLS=1."
        )
    if encrypts and not _wants_tls():
        raise StartupError(
            f"The server at {address} encrypts its connections, but this process has no"
            " certificate. Set tls=Tls(certificate=..., key=..., authority=...) in the profile."
        )
    if address.startswith(CLIENT):
        _check_server(address, f"{host}:{port}")
    else:
        _check_node(address)


def _wants_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def speaks_tls(host: str, port: int) -> bool:
    """Whether the listener speaks TLS, whatever its identity and the certificate it requires."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain:
            plain.settimeout(ANSWER_S)
            with context.wrap_socket(plain, server_hostname=host):
                return True
    except OSError:  # also ssl.SSLError, and silence
        return False


# --- Ray's own services ---------------------------------------------------------------------------


def _check_server(address: str, target: str) -> None:
    """Check for a server of Ray Client; this uses private names, checked on Ray 2.60."""
    import grpc  # type: ignore[import-untyped]
    from ray.core.generated.ray_client_pb2 import ClusterInfoRequest, ClusterInfoType
    from ray.core.generated.ray_client_pb2_grpc import RayletDriverStub

    from raypool.ray_private import init_grpc_channel

    ping = ClusterInfoRequest(type=ClusterInfoType.PING)
    with _token_as_here(address), init_grpc_channel(target) as channel:
        try:
            RayletDriverStub(channel).ClusterInfo(ping, timeout=ANSWER_S)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
            if code is grpc.StatusCode.UNAUTHENTICATED:
                refusal = _bad_token(address)
            elif _wants_tls() and code is grpc.StatusCode.UNAVAILABLE:
                # TLS was answered, so the certificates are refused
                refusal = StartupError(
                    f"The server at {address} rejected this machine's certificate, or this"
                    f" machine rejected the server's ({details}). The same authority must sign"
                    " both, and the server's must name the host of this address."
                )
            else:
                refusal = StartupError(
                    f"The server at {address} is not a working Ray Client server ({code.name}:"
                    f" {details}). Ray Client's port on the cluster's head is usually 10001."
                )
            raise refusal from None


def bad_token(where: str, source: str | Path, has_token: bool) -> str:
    """Return the message for a token that a cluster refuses, or lacks."""
    said = f"requires a token, but there is none in {source}."
    if has_token:
        said = f"rejected the token in {source}, which may be another cluster's, or out of date."
    return (
        f"The cluster at {where} {said} Copy ~/.ray/auth_token from its head, and set token_file="
        " to the copy."
    )


def _bad_token(address: str) -> StartupError:
    source = "RAY_AUTH_TOKEN" if "RAY_AUTH_TOKEN" in os.environ else token_path()
    return StartupError(bad_token(address, source, os.environ.get("RAY_AUTH_MODE") == "token"))


@contextlib.contextmanager
def _token_as_here(address: str) -> Iterator[None]:
    """Explain Ray's error for a missing token."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise _bad_token(address) from None


def _check_node(address: str) -> None:
    """Check that this machine is a node of the cluster."""
    # Elsewhere Ray would look for its local process for minutes.
    import psutil
    from ray.exceptions import RaySystemError, RpcError

    try:
        with _token_as_here(address):
            nodes = living_nodes(address)
    except (RpcError, RaySystemError) as error:
        raise StartupError(
            f"The server at {address} is not a working Ray control store ({error}). The control"
            " store's port on the cluster's head is usually 6379."
        ) from None
    there = sorted({node.node_manager_address for node in nodes.values()})
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    if not here.intersection(there):
        head = host_and_port(address)[0]
        raise StartupError(
            f"This machine is not a node of the cluster at {address} (its nodes:"
            f" {', '.join(there) or 'none'}), and only nodes can use this address. From outside,"
            f" use Ray Client: address='{CLIENT}{head}:PORT', where PORT is 10001 unless `ray"
            " start` set another (--ray-client-server-port)."
        )


FATAL_FOR_RAY = (
    ("PYTHONOPTIMIZE", "2", "-OO"),
    ("PYTHONWARNINGS", "error", "-W error"),
)
"""Variables with which Ray's agents end at once, and the options of Python that do them no harm."""


def not_started(address: str | None, error: Exception) -> StartupError:
    """Return the error for a Ray that did not start, or refused this process; `error` is Ray's."""
    where = address or "this machine"
    rays, pythons = re.findall(r"Ray: (\S+)", str(error)), re.findall(r"Python: (\S+)", str(error))
    if "Version mismatch" in str(error) and len(rays) == len(pythons) == 2:
        theirs, ours = (f"Ray {rays[side]} and Python {pythons[side]}" for side in (0, 1))
        return StartupError(
            f"The cluster at {where} runs {theirs}, this process {ours}. Ray's versions must"
            " match, and Python's in the first two numbers: make an environment with the"
            " cluster's versions."
        )
    step = ""
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of `os.getcwd`
        step = " The current folder has been deleted: change to another."
    elif "AF_UNIX path" in str(error):
        step = " Set RAY_TMPDIR to a folder with a shorter path."
    elif address is None:
        for name, value, option in FATAL_FOR_RAY:
            if value in os.environ.get(name, ""):
                step = f" Its processes end with {name}={os.environ[name]}: use python {option}."
    return StartupError(
        f"Ray could not be started or reached at {where}: {str(error).rstrip('.')}.{step}"
    )


# --- token of our own clusters --------------------------------------------------------------------


def token_path() -> Path:
    """Return the path of Ray's token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))


def make_token(path: Path | None = None) -> None:
    """Create a token file, readable by its owner only (Ray's would be readable by all).

    Args:
        path: The file. None: where Ray on this machine looks for it, if the token is not in the
            environment.
    """
    if path is None:
        if "RAY_AUTH_TOKEN" in os.environ:
            return
        path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > 0:
        path.chmod(0o600)
        return
    # Written under another name first, so that no process reads half a token, and two agree on one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        if path.exists():
            draft.replace(path)  # it was empty
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # unlike `replace`, keeps a token that came in between
    finally:
        draft.unlink(missing_ok=True)


# --- runtime environment of workers ---------------------------------------------------------------

MIB = 2**20
LARGE_BYTES = 100 * MIB  # slow to upload from a laptop: causes a warning

logger = logging.getLogger("raypool")


def runtime_env(profile: Profile) -> dict[str, Any]:
    """Return the `runtime_env` for a profile's workers, and warn of a large folder.

    Raises:
        InvalidValueError: `working_dir` is not a folder, or is larger than Ray accepts.

    Example:
        >>> runtime_env(Profile(packages=["scikit-learn>=1.5"]))
        {'pip': ['scikit-learn>=1.5']}
    """
    shipped: dict[str, Any] = {}
    if profile.packages:
        shipped["pip"] = list(profile.packages)
    if profile.working_dir is None:
        return shipped
    from raypool.ray_private import GCS_STORAGE_MAX_SIZE  # 512 MiB, if nobody has said otherwise

    folder = Path(profile.working_dir).expanduser().absolute()
    if not folder.is_dir():
        raise InvalidValueError(f"working_dir: {folder} is not a folder.")
    shipped["working_dir"] = str(folder)
    sizes = sizes_of(folder)
    total = sum(sizes.values())
    if total < min(LARGE_BYTES, GCS_STORAGE_MAX_SIZE):
        return shipped
    largest = ", ".join(
        f"{name} ({size / MIB:.0f} MiB)" for name, size in Counter(sizes).most_common(3)
    )
    words = (
        f"working_dir: {folder} has {total / MIB:.0f} MiB in {len(sizes)} entries; the largest:"
        f" {largest}."
    )
    step = "List unneeded files in a .rayignore there, in the format of .gitignore."
    if total >= GCS_STORAGE_MAX_SIZE:
        raise InvalidValueError(
            f"{words} Ray accepts {GCS_STORAGE_MAX_SIZE / MIB:.0f} MiB at most. {step}"
        )
    logger.warning("%s All of it is uploaded to the cluster. %s", words, step)
    return shipped


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the size of each entry of a folder [bytes], without files that are not uploaded."""
    # Ray packs files uncompressed. Its reader of .gitignore and .rayignore is private, checked on
    # 2.60.
    from raypool.ray_private import _dir_travel, ray_constants

    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    reads_gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    silent = logging.getLogger("raypool.shipping")
    _dir_travel(folder, [], add, include_gitignore=reads_gitignore, logger=silent)
    return dict(sizes)
