"""What Ray says of the nodes of its cluster, and how to find out that it will say nothing any more."""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any, NamedTuple

import ray
from ray._private import state

from raypool.cloud.connect import host_and_port
from raypool.engine.nodes import Nodes
from raypool.engine.outside import ask_inside

REFUSED_S = 3.0
"""When nothing was heard for so long, it is looked whether anybody listens at all [s]."""

CONNECT_TIMEOUT_S = 1.0

AUTOSCALER_DRAIN_PREEMPTED = 3  # ray.core.generated.common_pb2.NodeDeathInfo


def look() -> Nodes:
    """Ask for the nodes of the cluster; where its control store is gone, this does not return for long."""
    here, table, draining = ask_inside(_told)
    to_monotonic = time.monotonic() - time.time()
    return Nodes(
        here=here,
        alive={node["NodeID"]: node["NodeManagerHostname"] for node in table if node["Alive"]},
        draining={node: at_ms / 1000 + to_monotonic if at_ms else math.inf for node, at_ms in draining.items()},
        taken=frozenset(node["NodeID"] for node in table if node.get("DeathReason") == AUTOSCALER_DRAIN_PREEMPTED),
    )


def _told() -> tuple[str, list[dict[str, Any]], dict[str, int]]:
    """Return what Ray says; which nodes drain, and until when, is in a private name of its, checked on Ray 2.60."""
    return ray.get_runtime_context().get_node_id(), ray.nodes(), state.state.get_draining_nodes()


class CutOff(NamedTuple):
    """Why nothing can be done with Ray any more; `has_values`: what is in the object store of this machine can still be had."""

    why: str
    has_values: bool


def why_cut_off(silent_s: float, is_adrift: bool, is_outside: bool = False) -> CutOff | None:
    """Return why this process can do nothing with Ray any more, None if it can, or Ray was ended in good order.

    Asks nobody but the operating system. A control store that was killed may be started again somewhere; Ray gives it a minute,
    then it ends this process, so half of that is what we give it. Private names, checked on Ray 2.60.

    Args:
        silent_s: For how long the control store has not answered [s].
        is_adrift: Whether it says that the node of this process is dead.
        is_outside: Whether this process was connected through Ray Client.
    """
    if is_outside:
        return _why_lost(silent_s)
    node = ray._private.worker.global_worker.node if ray.is_initialized() else None
    return None if node is None else _why_adrift(node, silent_s, is_adrift)


def _why_adrift(node: Any, silent_s: float, is_adrift: bool) -> CutOff | None:
    if any(raylet.process.poll() is not None for raylet in node.all_processes.get("raylet", ())):
        return CutOff("Ray's process on this machine (the raylet) has died", has_values=False)
    if is_adrift:
        return CutOff("Ray takes this machine for dead: its process here (the raylet) has ended, or cannot be reached", False)
    address = node.gcs_address
    if silent_s > REFUSED_S and node.is_head() and _is_refused(address):
        return CutOff(f"Ray's control store (GCS) at {address} has died", has_values=True)
    if silent_s > patience_s():
        return CutOff(f"Ray's control store (GCS) at {address} has not answered for {silent_s:.0f} s", has_values=True)
    return None


def _why_lost(silent_s: float) -> CutOff | None:
    """Return why a process that is connected from outside can do nothing with the cluster any more, None if it can.

    When the connection breaks, Ray Client tries for half a minute to get it back (RAY_CLIENT_RECONNECT_GRACE_PERIOD).
    """
    if not ray.is_initialized():
        return CutOff("The connection to the cluster has ended", has_values=False)
    if silent_s > patience_s():
        return CutOff(f"The cluster has not answered for {silent_s:.0f} s", has_values=False)
    return None


def patience_s() -> float:
    """Return for how long the control store may be silent [s]."""
    return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) / 2  # noqa: SIM112 - so Ray calls it


def _is_refused(address: str) -> bool:
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port or 0), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
