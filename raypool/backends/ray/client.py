"""Ray Client: this process is outside the cluster, and speaks through a server process inside it.

Ray answers some questions only inside the cluster, so an actor there, `ClusterProbe`, asks them
for us. Everything else works as inside, a few milliseconds later.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import platform
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import psutil
import ray
from ray.util import client
from ray.util.client.common import ClientActorHandle

import raypool
from raypool.backends.ray.calls import loss_text, on_node
from raypool.channel.exchange import POOL_ENDED
from raypool.errors import PoolClosedError, StartupError
from raypool.ray_private import state, worker

P = ParamSpec("P")
T = TypeVar("T")

ACTOR_DEAD = 4  # ray.core.generated.gcs_pb2.ActorTableData.DEAD

AT_ONCE = 8
"""How many questions the probe answers at a time: a slow one must not hold up others."""


class ClusterProbe:
    """An actor beside the server of Ray Client."""

    def answer(self, question: Callable[..., Any], *args: Any) -> Any:
        """Return the answer to a question."""
        return question(*args)


@dataclass(frozen=True, slots=True)
class ClientServer:
    """This process's presence in the cluster: its server's node, and the probe there."""

    connection: object
    node_id: str
    probe: Any


_outpost: ClientServer | None = None
_settling = threading.Lock()  # any thread may be the first to ask; there is one probe
_dead: set[bytes] = set()  # actors; replaced as a whole


def is_outside() -> bool:
    """Whether this process is connected through Ray Client."""
    return bool(client.ray.is_connected())


def server() -> str | None:
    """Return the address of this process's Ray Client server, "HOST:PORT"; None without one."""
    return str(client.ray.get_context().client_worker._conn_str) if is_outside() else None


def check_raypool(address: str) -> None:
    """Make sure that the cluster has the same version of raypool.

    Raises:
        StartupError: It has not, or nothing can be started there.
    """
    ours = raypool.__version__
    try:
        theirs = ask_inside(pkgutil.resolve_name, "raypool:__version__")
    except ray.exceptions.RayError as error:
        if "No module named 'raypool'" not in str(error):
            raise StartupError(
                f"Cannot start anything on the cluster at {address}: {loss_text(error)}."
            ) from None
        raise StartupError(
            f"raypool is not installed on the cluster at {address}. Install raypool {ours} there,"
            " as `raypool cluster up` does."
        ) from None
    if theirs != ours:
        raise StartupError(
            f"The cluster at {address} has raypool {theirs}, this process {ours}. Both need the"
            f" same version: install {theirs} here, or {ours} there."
        )


def ask_inside(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of calling an importable function inside the cluster.

    Raises:
        PoolClosedError: The connection has ended.
    """
    _check_connected()
    if not is_outside():
        return question(*args, **kwargs)
    answer: T = ray.get(_settled().probe.answer.remote(question, *args, **kwargs))
    return answer


def home_node() -> str:
    """Return the node of this process, or of its server.

    Raises:
        PoolClosedError: The connection has ended.
    """
    _check_connected()
    return _settled().node_id if is_outside() else str(ray.get_runtime_context().get_node_id())


def _check_connected() -> None:
    # asked anything without a connection, Ray would start a new cluster here
    if not ray.is_initialized():
        raise PoolClosedError(POOL_ENDED)


def is_far() -> bool:
    """Whether this process is outside, and on another machine than its server."""
    return is_outside() and ask_inside(_host) != _host()


def _host() -> str:
    # found by its name in there, whatever has become of `platform.node` in this process
    return platform.node()


def driver_process() -> tuple[int, float]:
    """Return the pid and start time of the home node's process that everything ends with."""
    if is_outside():
        return ask_inside(_driver_of_job)
    return os.getpid(), psutil.Process().create_time()


def _driver_of_job() -> tuple[int, float]:
    job = ray.get_runtime_context().get_job_id()
    (pid,) = (entry["DriverPid"] for entry in state.jobs() if entry["JobID"] == job)
    return pid, psutil.Process(pid).create_time()


def _settled() -> ClientServer:
    """Return this connection's presence in the cluster."""
    global _outpost
    connection = client.ray.get_context().client_worker
    with _settling:
        if _outpost is None or _outpost.connection is not connection:
            node_id = str(ray.get_runtime_context().get_node_id())
            # it remembers nothing, so Ray may start it again, and ask it again
            options = on_node(node_id) | {
                "max_restarts": -1,
                "max_task_retries": -1,
                "max_concurrency": AT_ONCE,
            }
            probe = ray.remote(ClusterProbe).options(**options).remote()
            _outpost = ClientServer(connection, node_id, probe)
        return _outpost


def fetched(ref: Any) -> Any:
    """Return a parcel by its reference; Ray Client carries no buffers, so as bytes there."""
    return ask_inside(_portable, ref) if is_outside() else ray.get(ref)


def _portable(parcel: tuple[Any, list[Any], list[Any]]) -> tuple[bytes, list[bytes], list[Any]]:
    header, buffers, refs = parcel
    return bytes(header), [bytes(buffer) for buffer in buffers], refs


def leave() -> None:
    """Remove this process's presence from the cluster, if there is one."""
    global _outpost
    with _settling:
        outpost, _outpost = _outpost, None
    if outpost is not None and is_outside():
        with contextlib.suppress(Exception):  # the connection has ended meanwhile
            ray.kill(outpost.probe)


# --- dead actors ----------------------------------------------------------------------------------


def is_dead(actor: Any) -> bool:
    """Whether an actor is known to be dead; from outside, since the last `note_deaths`.

    Asks nobody: it is the last state known to this process; private, checked on Ray 2.60.
    """
    if isinstance(actor, ClientActorHandle):
        return actor.actor_ref.id in _dead
    return bool(
        worker.global_worker.core_worker.get_local_actor_state(actor._actor_id) == ACTOR_DEAD
    )


def note_deaths(actors: Iterable[Any]) -> None:
    """From outside, ask which of these actors are dead: Ray does not report it."""
    global _dead
    if is_outside():
        with contextlib.suppress(Exception):  # who is cut off finds that out otherwise
            ids = [actor.actor_ref.id for actor in actors if actor is not None]
            _dead = ask_inside(_dead_of, ids) | _dead


def _dead_of(ids: Iterable[bytes]) -> set[bytes]:
    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    wanted = {actor_id.hex(): actor_id for actor_id in ids}
    dead = state.actors(job_id=job, actor_state_name="DEAD")
    return {wanted[name] for name in dead if name in wanted}
