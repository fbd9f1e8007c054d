"""Ray Client: this process is outside the cluster, and speaks through a server process inside it.

Nearly everything works as inside, a few milliseconds later. This module has the exceptions: Ray
answers some questions only inside the cluster, so an actor there, `ClusterProbe`, asks them for us.
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raypool
from raypool.backends.ray.calls import UNRECORDED, loss_text
from raypool.channel.exchange import POOL_ENDED
from raypool.errors import PoolClosedError, StartupError
from raypool.ray_private import state, worker

P = ParamSpec("P")
T = TypeVar("T")

ACTOR_DEAD = 4  # ray.core.generated.gcs_pb2.ActorTableData.DEAD

AT_ONCE = 8
"""How many questions the scout answers at a time: a slow one must not hold up others."""


class ClusterProbe:
    """An actor beside the server of Ray Client."""

    def answer(self, question: Callable[..., Any], *args: Any) -> Any:
        """Return what a question is answered with."""
        return question(*args)


@dataclass(frozen=True, slots=True)
class ClientServer:
    """This process's presence in the cluster: its server's node, and the scout there."""

    connection: object
    node_id: str
    scout: Any


_outpost: ClientServer | None = None
_settling = threading.Lock()
_dead: set[bytes] = set()  # actors; replaced as a whole


def is_outside() -> bool:
    """Whether this process is connected through Ray Client."""
    return bool(client.ray.is_connected())


def server() -> str | None:
    """Return which server of Ray Client this process is connected to, "HOST:PORT"; None if to
    none.
    """
    return str(client.ray.get_context().client_worker._conn_str) if is_outside() else None


def check_raypool(address: str) -> None:
    """Make sure that this raypool is also that of the cluster.

    Raises:
        StartupError: It is not, or nothing can be started there.
    """
    ours = raypool.__version__
    try:
        theirs = ask_inside(pkgutil.resolve_name, "raypool:__version__")
    except ray.exceptions.RayError as error:
        if "No module named 'raypool'" not in str(error):
            raise StartupError(
                f"Nothing can be started on the cluster at {address}: {loss_text(error)}."
            ) from error
        raise StartupError(
            f"raypool is not installed on the cluster at {address}. Install raypool {ours} there,"
            f" or let it travel: packages=['raypool=={ours}']."
        ) from error
    if theirs != ours:
        raise StartupError(
            f"The cluster at {address} has raypool {theirs}, this process {ours}: they have to be"
            f" the same. Install {theirs} here, or {ours} there."
        )


def ask_inside(question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the answer to a question that only those who are inside can answer: a function that
    workers can import.

    Raises:
        PoolClosedError: There is no connection any more.
    """
    _check_connected()
    if not is_outside():
        return question(*args, **kwargs)
    answer: T = ray.get(_settled().scout.answer.remote(question, *args, **kwargs))
    return answer


def home_node() -> str:
    """Return the node of this process, or else that of its server.

    Raises:
        PoolClosedError: There is no connection any more.
    """
    _check_connected()
    return _settled().node_id if is_outside() else str(ray.get_runtime_context().get_node_id())


def _check_connected() -> None:
    """Keep Ray from starting a new one here, as it does when it is asked anything after its
    connection has ended.
    """
    if not ray.is_initialized():
        raise PoolClosedError(POOL_ENDED)


def is_far() -> bool:
    """Whether this process is outside, and on another machine than its server."""
    return is_outside() and ask_inside(_name_of_machine) != _name_of_machine()


def _name_of_machine() -> str:
    """Return the name of the machine where this runs."""
    return platform.node()


def driver_process() -> tuple[int, float]:
    """Return the process that everything of this one's ends with, on the home node: its number, and
    when it was started.
    """
    return (
        ask_inside(_driver_of_job)
        if is_outside()
        else (os.getpid(), psutil.Process().create_time())
    )


def _driver_of_job() -> tuple[int, float]:
    job = ray.get_runtime_context().get_job_id()
    (pid,) = (entry["DriverPid"] for entry in state.jobs() if entry["JobID"] == job)
    return pid, psutil.Process(pid).create_time()


def _settled() -> ClientServer:
    """Return the outpost of the connection that there is now."""
    global _outpost
    connection = client.ray.get_context().client_worker
    with _settling:
        if _outpost is None or _outpost.connection is not connection:
            node_id = str(ray.get_runtime_context().get_node_id())
            options = {
                "num_cpus": 0,
                "max_restarts": -1,
                "max_task_retries": -1,
                "max_concurrency": AT_ONCE,
                **UNRECORDED,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            _outpost = ClientServer(
                connection, node_id, ray.remote(ClusterProbe).options(**options).remote()
            )
        return _outpost


def fetched(ref: Any) -> Any:
    """Return what a parcel's reference stands for; from outside its buffers, which Ray Client does
    not carry, come as bytes.
    """
    return ask_inside(_portable, ref) if is_outside() else ray.get(ref)


def _portable(parcel: tuple[Any, list[Any], list[Any]]) -> tuple[bytes, list[bytes], list[Any]]:
    header, buffers, refs = parcel
    return bytes(header), [bytes(buffer) for buffer in buffers], refs


def leave() -> None:
    """Give up the outpost, if there is one."""
    global _outpost
    with _settling:
        outpost, _outpost = _outpost, None
    if outpost is not None and is_outside():
        with contextlib.suppress(Exception):  # the connection has ended meanwhile
            ray.kill(outpost.scout)


# --- dead actors ----------------------------------------------------------------------------------


def is_dead(actor: Any) -> bool:
    """Whether an actor is known to be dead, without asking anybody: from outside, since the last
    `note_deaths`.

    Inside it is the state that this process has heard of; private, checked on Ray 2.60.
    """
    if isinstance(actor, ClientActorHandle):
        return actor.actor_ref.id in _dead
    return bool(
        worker.global_worker.core_worker.get_local_actor_state(actor._actor_id) == ACTOR_DEAD
    )


def note_deaths(actors: Iterable[Any]) -> None:
    """Ask which of these actors are dead, where nobody tells."""
    global _dead
    if is_outside():
        with contextlib.suppress(Exception):  # who is cut off finds that out otherwise
            ids = [actor.actor_ref.id for actor in actors if actor is not None]
            _dead = ask_inside(_dead_of, ids) | _dead


def _dead_of(ids: Iterable[bytes]) -> set[bytes]:
    wanted = {actor_id.hex(): actor_id for actor_id in ids}
    return {
        wanted[name]
        for name in state.actors(job_id=_job(), actor_state_name="DEAD")
        if name in wanted
    }


def _job() -> Any:
    return ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
