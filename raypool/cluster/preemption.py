"""Watches for preemption of this machine, and tells Ray: `python -m raypool.cluster.preemption
--cloud gcp`.

The watcher runs beside Ray on each worker machine of a cluster, and ends with Ray; the files that
raypool writes start it. A notice becomes a drain of this node with a deadline: Ray places nothing
more there, and pools and trainings move elsewhere. Kubernetes needs no watcher: Ray drains its node
when its pod is asked to end.

Source:
    Compute Engine: "Spot VMs" (instance/preempted; up to 30 s) and "Handling GPU host maintenance
    events" (instance/maintenance-event; 1 h with GPUs, 60 s without). Amazon EC2: "Spot Instance
    interruption notices" (spot/instance-action; two minutes; to be looked at every 5 s) and
    "Scheduled events for your instances" (events/maintenance/scheduled). Ray 2.60: `ray drain-node`
    in ray/scripts/scripts.py.
"""

from __future__ import annotations

import argparse
import email.utils
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from raypool.errors import CloudError

logger = logging.getLogger("raypool.cluster.preemption")

ANSWER_TIMEOUT_S = 2.0
"""The time for an answer [s]: the server is a hop away, and a late one is asked again."""

MOST_BYTES = 64 * 1024
"""No answer of a metadata server is longer."""

RAY_TIMEOUT_S = 60.0
"""The time for Ray to start on this machine [s]."""

SPOT_S = 25.0
"""Compute Engine gives up to 30 s, of which some have passed when they are seen [s]."""

MAINTENANCE_S = 60.0
"""Compute Engine's notice of maintenance for a machine without GPUs [s]."""

HOUR_S = 3600.0
"""With GPUs. An event that is known for days is a notice from then on, too [s]."""

EARLIER_S = 1.0
"""A notice that brings the deadline forward by less [s] is ignored."""

NVIDIA = Path("/dev/nvidiactl")
"""Is there on a machine with GPUs, and in containers that see them."""


class Notice(NamedTuple):
    """A notice that this machine is about to go: its source, and the deadline [Unix time, s]."""

    words: str
    gone_at: float


class Metadata:
    """A cloud's metadata server at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Never through a proxy: what answered then would be another machine's.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return what stands at a path, None if nothing does.

        Raises:
            OSError: It does not answer, or has a failure of its own.
        """
        request = urllib.request.Request(
            f"{self._url}/{path}", headers=dict(headers), method=method
        )
        try:
            with self._opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return str(answer.read(MOST_BYTES).decode(errors="replace")).strip()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.NOT_FOUND:
                    return None
                raise


class Cloud(Protocol):
    """A source of notices."""

    look_s: float
    """How often to ask [s]."""

    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go."""


class Gce:
    """Google Compute Engine: preempted spot machines, and hosts under maintenance.

    Args:
        url: Of the metadata server.
    """

    look_s = 1.0

    def __init__(self, url: str = "http://metadata.google.internal") -> None:
        self._metadata = Metadata(url)

    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go."""
        if self._ask("preempted") == "TRUE":
            return Notice("Compute Engine takes this spot machine back", time.time() + SPOT_S)
        if (self._ask("maintenance-event") or "").startswith("TERMINATE"):
            notice_s = HOUR_S if NVIDIA.exists() else MAINTENANCE_S
            return Notice(
                "Compute Engine stops this machine for maintenance", time.time() + notice_s
            )
        return None

    def _ask(self, name: str) -> str | None:
        return self._metadata.ask(
            f"computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"}
        )


class Ec2:
    """Amazon EC2 (metadata version 2): interrupted spot machines, and events of the next hour.

    A recommendation to rebalance is no notice: it says that a machine may go, and most do not.

    Args:
        url: Of the metadata server.
    """

    look_s = 5.0

    def __init__(self, url: str = "http://169.254.169.254") -> None:
        self._metadata = Metadata(url)

    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go."""
        token = self._metadata.ask(
            "latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"
        )
        headers = {"X-aws-ec2-metadata-token": token or ""}
        if action := self._metadata.ask("latest/meta-data/spot/instance-action", headers):
            # {"action": "terminate", "time": "2026-11-22T08:22:00Z"}
            said = json.loads(action)
            words = f"Amazon EC2 is about to {said['action']} this spot machine"
            return Notice(words, datetime.fromisoformat(said["time"]).timestamp())
        events = self._metadata.ask("latest/meta-data/events/maintenance/scheduled", headers)
        return _first_event(json.loads(events or "[]"))


def _first_event(events: Sequence[Mapping[str, str]]) -> Notice | None:
    """Return the first event of the next hour."""
    # {"Code": "system-reboot", "NotBefore": "21 Jan 2026 09:00:43 GMT", "State": "active"}
    notices = []
    for event in events:
        begins_at = email.utils.parsedate_to_datetime(event["NotBefore"]).timestamp()
        if event.get("State", "active") == "active" and begins_at - time.time() < HOUR_S:
            notices.append(
                Notice(f"Amazon EC2 has scheduled {event['Code']} for this machine", begins_at)
            )
    return min(notices, key=lambda notice: notice.gone_at, default=None)


CLOUDS: dict[str, type[Gce] | type[Ec2]] = {"gcp": Gce, "aws": Ec2}


class RayNode:
    """Ray on this machine; its process, the raylet, says how to reach the head.

    Args:
        raylet: The process.
    """

    def __init__(self, raylet: psutil.Process) -> None:
        self._raylet = raylet
        self.node_id = _option(raylet, "node_id")
        self._address = _option(raylet, "gcs-address")
        for name, value in raylet.environ().items():
            if name.startswith(("RAY_AUTH_", "RAY_USE_TLS", "RAY_TLS_")):
                os.environ.setdefault(name, value)
        from raypool.ray_private import GcsClient  # reads the environment; now: a notice is short

        self._connect = GcsClient

    @property
    def is_alive(self) -> bool:
        """Whether Ray still runs here."""
        try:
            return self._raylet.status() != psutil.STATUS_ZOMBIE and self._raylet.is_running()
        except psutil.NoSuchProcess:
            return False

    def drain(self, notice: Notice) -> None:
        """Tell Ray that this node is about to go.

        Private names, checked on Ray 2.60; its own command (`ray drain-node`) is hidden.

        Raises:
            Exception: The head can't be reached, or does not want to hear of it.
        """
        _drain(self._connect(address=self._address), self.node_id, notice)


def _drain(client: Any, node_id: str, notice: Notice) -> None:
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    is_accepted, words = client.drain_node(
        node_id, reason, notice.words, int(notice.gone_at * 1000)
    )
    if not is_accepted:
        raise CloudError(f"Ray does not drain this node: {words}")


def drain(address: str, notice: Notice, node_address: str | None = None) -> list[str]:
    """Drain the nodes of the Ray at an address; return their names.

    Args:
        address: Of its control store.
        notice: The reason, and the deadline.
        node_address: Only the node with this IP address. None: all nodes.

    Raises:
        Exception: The head can't be reached, or refuses.
    """
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    from raypool.ray_private import GcsClient

    client = GcsClient(address=address)
    names = []
    for node_id, node in client.get_all_node_info(timeout=RAY_TIMEOUT_S).items():
        if node.state == GcsNodeInfo.ALIVE and node_address in (None, node.node_manager_address):
            _drain(client, node_id.hex(), notice)
            names.append(node.node_name)
    return names


def find_ray(node_id: str | None = None) -> RayNode:
    """Return Ray's node on this machine, as soon as it is up.

    Args:
        node_id: Its id in Ray, where there are several.

    Raises:
        CloudError: There is none, or there are several.
    """
    deadline = time.monotonic() + RAY_TIMEOUT_S
    while True:
        raylets = [raylet for raylet in _raylets() if node_id in (None, _option(raylet, "node_id"))]
        if len(raylets) > 1:
            ids = ", ".join(_option(raylet, "node_id") for raylet in raylets)
            raise CloudError(
                f"{len(raylets)} nodes of Ray run on this machine ({ids}). Say with --node which of"
                " them goes with it."
            )
        if raylets:
            return RayNode(raylets[0])
        if time.monotonic() > deadline:
            raise CloudError(
                f"Ray has not come up on this machine within {RAY_TIMEOUT_S:.0f} s. Start it first:"
                " ray start --address=..."
            )
        time.sleep(0.2)


def _raylets() -> list[psutil.Process]:
    """Return the raylets of this user."""
    # A process that has ended, and is not cleared away yet, has no command line.
    own = os.getuid()
    every = psutil.process_iter(["name", "uids", "cmdline"])
    return [
        each
        for each in every
        if each.info["name"] == "raylet" and each.info["cmdline"] and each.info["uids"].real == own
    ]


def _option(process: psutil.Process, name: str) -> str:
    """Return what a process was given as an option; nothing if it has gone meanwhile."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return next(
        (word.removeprefix(f"--{name}=") for word in words if word.startswith(f"--{name}=")), ""
    )


def watch(cloud: Cloud, node: RayNode) -> None:
    """Tell Ray of each notice with an earlier end of this machine, until Ray has ended here.

    Whatever goes wrong is said once and tried again: a metadata server that is absent, slow or
    broken, a head that restarts.
    """
    told: Notice | None = None
    trouble = ""
    while node.is_alive:
        try:
            notice = cloud.find_notice()
            if notice is not None and (told is None or notice.gone_at < told.gone_at - EARLIER_S):
                node.drain(notice)
                told = notice
                logger.warning(
                    "%s, in %.0f s: Ray drains this node.",
                    notice.words,
                    notice.gone_at - time.time(),
                )
            words = ""
        except Exception as error:  # whatever it is, the next look may go well
            words = f"{type(error).__name__}: {error}"
        if words != trouble:
            logger.warning(
                f"Preemption notices could not be read or passed on ({words}); retrying."
                if words
                else "Preemption notices work again."
            )
            trouble = words
        time.sleep(cloud.look_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch this machine; the exit status is 1 if there is no Ray to be told."""
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.preemption", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cloud", choices=CLOUDS, required=True, help="who has this machine")
    parser.add_argument(
        "--metadata",
        metavar="URL",
        help="where its metadata server is, if it is not where that always is",
    )
    parser.add_argument(
        "--node", metavar="ID", help="Ray's id of the node, where several run on one machine"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    cloud = CLOUDS[options.cloud]
    try:
        node = find_ray(options.node)
    except CloudError as error:
        logger.error("%s", error)
        return 1
    watch(cloud(options.metadata) if options.metadata else cloud(), node)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
