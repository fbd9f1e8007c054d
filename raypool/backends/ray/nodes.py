"""Watches a pool's nodes: it leaves draining nodes, and replaces lost workers later.

`NodeWatch` decides; the functions below it ask Ray for the nodes, and whether Ray still answers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from raypool.backends.base import Post
from raypool.backends.ray.client import ask_inside
from raypool.cluster.connect import host_and_port
from raypool.core.messages import (
    PlaceLeaving,
    PlaceLost,
    PoolLeaving,
    PoolResumed,
    ResizeRequested,
    WorkerLost,
)
from raypool.errors import LossReason, RaypoolError
from raypool.ray_private import state, worker

if TYPE_CHECKING:
    from raypool.backends.ray.backend import RayBackend

LOOK_S = 1.0
"""How often to look at the nodes [s]."""

MARGIN_S = 2.0
"""How long before the end of a node its tasks are interrupted at the latest [s]."""

NEWS_S = 1.0
"""A node's announced end is reported again if it changes by more than this [s]."""

LAST_S = 120.0
"""How long before their end nodes are left, if others may come but none stays [s]."""

OVERDUE_S = 60.0
"""A node still there this long after its announced end stays, if no replacement has come [s]."""

MOST_NAMES = 4
"""So many nodes are named in a message."""

GROW_S = 5.0
"""How often to look for room for lost workers, besides when a node arrives [s]."""

logger = logging.getLogger("raypool")


class Nodes(NamedTuple):
    """The nodes of a cluster at one moment.

    Attributes:
        alive: The names of those that are there, by id.
        draining: When those of them that are about to go will be gone [s, `time.monotonic`];
            infinity: unknown.
        here: The node of this process.
        taken: Those that were taken away, with notice.
    """

    alive: Mapping[str, str]
    draining: Mapping[str, float]
    here: str = ""
    taken: frozenset[str] = frozenset()

    def stays(self, node: str | None) -> bool:
        """Whether a node is there, and not about to go."""
        return node in self.alive and node not in self.draining


class NodeWatch:
    """Watches the nodes of a pool, in a thread of its own.

    `grace_s`: how long an interrupted task may take to end [s].
    """

    def __init__(self, backend: RayBackend, post: Post, grace_s: float) -> None:
        self._backend = backend
        self._post = post
        self._grace_s = grace_s
        # places that the driver knows to be about to go, and the time that it was told
        self._leaving: dict[int, float] = {}
        self._lost: set[int] = set()  # those that it knows to be gone
        # that all nodes of the pool are to go, as the driver knows it: whether no other can come,
        # and when the first goes
        self._all_leaving: tuple[bool, float] | None = None
        self._num_held = 0  # places that are to go, and are kept until others come
        self._num_lost = 0  # workers, with their nodes; written by the thread that looks only
        # so many of them are there again, or not wanted any more; guarded by `_growing`
        self._num_made_up = 0
        self._names: dict[str, str] = {}  # of all nodes that were seen
        self._preempted: set[str] = set()  # those that had said that they would go
        self._grow_at = 0.0  # when to try next
        self._alive: set[str] = set()  # the nodes at the last look
        self._num_sizing = 0  # so many set the size of the pool just now
        # of three threads: those of looks, of growth, and of a user's resize
        self._growing = threading.Lock()
        self._closed = threading.Event()
        self._silent_s = 0.0
        self.is_adrift = False  # whether the node of this process counts as dead
        self._going: frozenset[str] = frozenset()  # nodes that have gone, or are about to

    def start(self) -> None:
        """Look again and again from now on."""
        threading.Thread(target=self._live, name="raypool-nodes", daemon=True).start()

    def silent_s(self, passed_s: float) -> float:
        """Return for how long nobody has answered [s]; to be called every `passed_s`."""
        # counted, not timed: while this process was stopped (Ctrl-Z, a debugger), nobody could
        self._silent_s += passed_s
        return self._silent_s

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """Let somebody set the pool's size; once it is set, earlier losses are not made up for."""
        with self._growing:  # if the pool is growing by itself just now, that takes a moment
            num_lost = self._num_lost
            self._num_sizing += 1
        try:
            yield
            with self._growing:
                self._num_made_up = max(self._num_made_up, num_lost)
        finally:
            with self._growing:
                self._num_sizing -= 1

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _live(self) -> None:
        # Ray has no public way to wait for such news
        while not self._closed.wait(LOOK_S):
            try:
                self.check()
            except Exception:
                # Ray has ended, or is being replaced; `silent_s` tells if that takes too long
                logger.debug("The nodes could not be checked.", exc_info=True)

    def check(self) -> None:
        """Look once, and tell the driver what has changed for its places."""
        nodes = self._backend.look()
        self._silent_s = 0.0
        self.is_adrift = nodes.here not in nodes.alive
        self._names.update(nodes.alive)
        self._going = frozenset(node for node in self._names if not nodes.stays(node))
        self._preempted.update(nodes.draining, nodes.taken)
        where = self._where_now(nodes)
        ours = {node for node in where.values() if node is not None and node in nodes.alive}
        steady = {node for node in nodes.alive if nodes.stays(node)}
        staying, is_final = ours & steady, False
        if ours and not staying:
            is_final = not self._backend.may_move(steady)
            left_s = {node: nodes.draining[node] - time.monotonic() for node in ours}
            used = {node for node in ours if not -OVERDUE_S < left_s[node] < LAST_S}
            staying = set() if is_final else used
        if staying:
            self._num_held = 0
            self._leave_those_that_go(nodes, where, staying)
            if self._all_leaving is not None:  # not before: nothing is to start on the others
                self._all_leaving = None
                self._post(PoolResumed(), None)
            self._make_up(nodes)
        else:
            self._leave_all(nodes, where, is_final)

    def stays(self, node: str) -> bool:
        """Whether a node is there and not about to go, by the last look."""
        return node not in self._going

    # --- nodes that go ----------------------------------------------------------------------------

    def _where_now(self, nodes: Nodes) -> dict[int, str | None]:
        where = self._backend.places()
        self._leaving = {
            place: gone_at for place, gone_at in self._leaving.items() if place in where
        }
        self._lost &= where.keys()
        for place, node in where.items():
            # Ray may have moved the claims of those whose node has died
            if node is not None and node not in nodes.alive and place not in self._lost:
                where[place] = self._backend.find(place) or node
        return where

    def _leave_those_that_go(
        self, nodes: Nodes, where: Mapping[int, str | None], staying: set[str]
    ) -> None:
        for place, node in where.items():
            if node is None or node in staying or place in self._lost:
                continue
            if node not in nodes.alive:
                self._lost.add(place)
                self._num_lost += place not in self._leaving
                is_taken, name = node in self._preempted, self._names.get(node, node[:8])
                reason = LossReason.PREEMPTED if is_taken else LossReason.NODE
                words = f"its node {name} is {'gone' if is_taken else 'lost'}"
                self._post(PlaceLost(place, reason), words)
                continue
            told, gone_at = self._leaving.get(place), nodes.draining[node]
            if told is None or _is_news(told, gone_at):
                self._num_lost += told is None
                self._leaving[place] = gone_at
                leaving = PlaceLeaving(place, self._interrupt_at(gone_at))
                self._post(leaving, self._notice([node], gone_at))

    def _interrupt_at(self, gone_at: float) -> float | None:
        if math.isinf(gone_at):
            return None
        now = time.monotonic()
        left_s = gone_at - now
        # if time is short, half of it is left to tasks before they are interrupted
        return now + max(left_s - min(self._grace_s, left_s / 2) - MARGIN_S, 0)

    def _notice(self, nodes: Iterable[str], gone_at: float = math.inf) -> str:
        left_s = gone_at - time.monotonic()
        until = f" in {left_s:.0f} s" if math.isfinite(left_s) else ""
        names = list(dict.fromkeys(self._names[node] for node in nodes))
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        which = ", ".join(names[:MOST_NAMES]) + more
        return f"node{'s' * (len(names) > 1)} {which} will shut down{until}"

    def _leave_all(self, nodes: Nodes, where: Mapping[int, str | None], is_final: bool) -> None:
        """Start nothing more: the pool ends, unless it may go on with other nodes."""
        going = {
            place: node
            for place, node in where.items()
            if node is not None and node in nodes.alive and node in nodes.draining
        }
        self._num_held = len(going.keys() - self._leaving.keys())
        if not going:  # all are lost: the places start again where Ray finds room for them
            return
        gone_at = min(nodes.draining[node] for node in going.values())
        told = self._all_leaving
        if told is None or told[0] != is_final or _is_news(told[1], gone_at):
            self._all_leaving = is_final, gone_at
            at = self._interrupt_at(gone_at) if is_final else None
            end_at = None if at is None else max(gone_at - MARGIN_S, at)
            self._post(PoolLeaving(is_final, at, end_at), self._notice(going.values()))
        if told is None or told[0] != is_final:
            logger.warning(
                "The pool starts no more tasks: %s. %s",
                self._notice(going.values(), gone_at),
                "Running tasks may finish; then the pool ends."
                if is_final
                else "Queued tasks wait for other nodes.",
            )
        if not is_final:
            self._make_up(nodes)

    def tell_lost(self, lost: WorkerLost, words: str, node: str | None) -> None:
        """Tell the driver that a worker on a node is lost; the thread may ask Ray."""
        # the loss is often known before the node's end, which was announced: it is nobody's fault
        if node in self._preempted and (
            lost.reason is LossReason.NODE
            or (lost.reason is LossReason.EXIT and self._is_gone(node))
        ):
            lost = lost._replace(reason=LossReason.PREEMPTED)
        self._post(lost, words)

    def _is_gone(self, node: str | None) -> bool:
        try:
            return node not in self._backend.look().alive
        except Exception:  # Ray is at its end
            return False

    def lose_all(self, words: str) -> None:
        """Tell the driver that all places are lost."""
        for place in self._backend.places():
            self._post(PlaceLost(place, LossReason.NODE), words)

    # --- nodes that come --------------------------------------------------------------------------

    def _make_up(self, nodes: Nodes) -> None:
        """Try to grow when a node arrives, and periodically, since other pools may have ended."""
        has_news, self._alive = nodes.alive.keys() != self._alive, set(nodes.alive)
        if self._num_owed > 0 and (has_news or time.monotonic() > self._grow_at):
            self._grow_at = time.monotonic() + GROW_S
            threading.Thread(target=self._grow, name="raypool-grow", daemon=True).start()

    @property
    def _num_owed(self) -> int:
        return self._num_lost + self._num_held - self._num_made_up

    def _grow(self) -> None:
        """Claim as many of the lost places again as fit now."""
        try:
            with self._growing:
                owed = self._num_owed
                if owed <= 0 or self._num_sizing or self._closed.is_set():
                    return
                places = self._backend.grow(owed)
                self._num_made_up += len(places)
                if not places:
                    return
                # before somebody reads the size, to set it
                self._post(ResizeRequested(add=tuple(places)), None)
            where = self._backend.places()
            nodes = [node for place in places if (node := where.get(place)) is not None]
            names = dict.fromkeys(self._names.get(node, node[:8]) for node in nodes)
            number = f"{len(places)} more worker" + ("s" if len(places) != 1 else "")
            words = ", ".join(names) or "the cluster"
            logger.warning("The pool grows again: %s on %s.", number, words)
        except RaypoolError:
            pass  # the pool ends
        except Exception:  # whatever it is: the next look tries again
            logger.debug("The pool could not grow.", exc_info=True)


def _is_news(told: float, gone_at: float) -> bool:
    # two infinities are equal, though their difference is no number
    return told != gone_at and abs(told - gone_at) > NEWS_S


# --- questions to Ray -----------------------------------------------------------------------------


REFUSED_S = 3.0
"""After this long without an answer, this process checks whether Ray still listens [s]."""

CONNECT_TIMEOUT_S = 1.0
"""How long that check may take [s]: meanwhile the watch on Ray waits."""

AUTOSCALER_DRAIN_PREEMPTED = 3  # ray.core.generated.common_pb2.NodeDeathInfo


def look() -> Nodes:
    """Return the nodes of the cluster; where its control store is gone, this blocks for long."""
    here, table, draining = ask_inside(_told)
    to_monotonic = time.monotonic() - time.time()
    return Nodes(
        here=here,
        alive={node["NodeID"]: node["NodeManagerHostname"] for node in table if node["Alive"]},
        draining={
            node: at_ms / 1000 + to_monotonic if at_ms else math.inf
            for node, at_ms in draining.items()
        },
        taken=frozenset(
            node["NodeID"]
            for node in table
            if node.get("DeathReason") == AUTOSCALER_DRAIN_PREEMPTED
        ),
    )


def _told() -> tuple[str, list[dict[str, Any]], dict[str, int]]:
    # the nodes that drain, and until when, are in a private name of Ray's, checked on Ray 2.60
    return ray.get_runtime_context().get_node_id(), ray.nodes(), state.state.get_draining_nodes()


class CutOff(NamedTuple):
    """Why Ray can no longer be used.

    `has_values`: this machine's object store can still be read.
    """

    why: str
    has_values: bool


def why_cut_off(silent_s: float, is_adrift: bool, is_outside: bool) -> CutOff | None:
    """Return why this process can no longer use Ray; None if it can, or if Ray was shut down
    normally.

    Asks only the operating system. Private names, checked on Ray 2.60.

    Args:
        silent_s: For how long the control store has not answered [s].
        is_adrift: Whether it says that the node of this process is dead.
        is_outside: Whether this process was connected through Ray Client.
    """
    if is_outside:
        # after a break, Ray Client tries to reconnect for 30 s (RAY_CLIENT_RECONNECT_GRACE_PERIOD)
        if not ray.is_initialized():
            return CutOff("The connection to the cluster has ended", has_values=False)
        if silent_s > patience_s():
            return CutOff(f"The cluster has not answered for {silent_s:.0f} s", has_values=False)
        return None
    node = worker.global_worker.node if ray.is_initialized() else None
    return None if node is None else _why_adrift(node, silent_s, is_adrift)


def _why_adrift(node: Any, silent_s: float, is_adrift: bool) -> CutOff | None:
    if any(raylet.process.poll() is not None for raylet in node.all_processes.get("raylet", ())):
        return CutOff("Ray's process on this machine (the raylet) has died", has_values=False)
    if is_adrift:
        return CutOff(
            "Ray considers this machine dead: its process here (the raylet) has ended, or cannot"
            " be reached",
            False,
        )
    store = f"Ray's control store (GCS) at {node.gcs_address}"
    if silent_s > REFUSED_S and node.is_head() and _is_refused(node.gcs_address):
        return CutOff(f"{store} has died", has_values=True)
    if silent_s > patience_s():
        return CutOff(f"{store} has not answered for {silent_s:.0f} s", has_values=True)
    return None


def patience_s() -> float:
    """Return for how long the control store may be silent [s]."""
    # it may be started again elsewhere; after all of this time Ray ends this process
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    return float(os.environ.get(name, "60")) / 2


def _is_refused(address: str) -> bool:
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port or 0), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        # anything else, such as no answer in time, may pass: it does not show that nobody listens
        return isinstance(error, ConnectionRefusedError)
    return False
