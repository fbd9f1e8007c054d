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

import abc
import argparse
import contextlib
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
from typing import Any, NamedTuple

import psutil

from raypool.cluster.connect import living_nodes
from raypool.errors import CloudError

logger = logging.getLogger("raypool.cluster.preemption")

ANSWER_TIMEOUT_S = 2.0  # the server is a hop away, and a late one is asked again
MOST_BYTES = 64 * 1024  # of an answer
RAY_TIMEOUT_S = 60.0  # for Ray to start on this machine

SPOT_S = 25.0  # Compute Engine gives up to 30 s, of which some have passed
MAINTENANCE_S = 60.0  # Compute Engine's notice of maintenance for a machine without GPUs
HOUR_S = 3600.0  # with GPUs; an event that is known for days is a notice from then on, too
EARLIER_S = 1.0  # a notice that brings the deadline forward by less is ignored

NVIDIA = Path("/dev/nvidiactl")  # exists on a machine with GPUs, and in containers that see them


class Notice(NamedTuple):
    """A notice that this machine is about to go: its source, and the deadline [Unix time, s]."""

    words: str
    gone_at: float


class Cloud(abc.ABC):
    """A cloud's metadata server at a URL.

    Args:
        url: The URL; None: where the server always is.
    """

    address = ""
    look_s = 1.0
    """The interval of questions [s]."""

    def __init__(self, url: str | None = None) -> None:
        self._url = (url or self.address).rstrip("/")
        # Never through a proxy: what answered then would be another machine's.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @abc.abstractmethod
    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go.

        Raises:
            OSError: The server does not answer, or fails.
        """

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Return the answer for a path, None if there is none."""
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


class Gce(Cloud):
    """Google Compute Engine: preempted spot machines, and hosts under maintenance."""

    address = "http://metadata.google.internal"

    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go."""
        path, headers = "computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
        if self._ask(f"{path}/preempted", headers) == "TRUE":
            return Notice(
                "Compute Engine is about to preempt this spot machine", time.time() + SPOT_S
            )
        event = self._ask(f"{path}/maintenance-event", headers) or ""
        if event.startswith("TERMINATE"):
            gone_at = time.time() + (HOUR_S if NVIDIA.exists() else MAINTENANCE_S)
            return Notice("Compute Engine is about to stop this machine for maintenance", gone_at)
        return None


class Ec2(Cloud):
    """Amazon EC2 (metadata version 2): interrupted spot machines, and events of the next hour.

    A recommendation to rebalance is not a notice: most of these machines stay.
    """

    address = "http://169.254.169.254"
    look_s = 5.0

    def find_notice(self) -> Notice | None:
        """Ask whether this machine is about to go."""
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = self._ask("latest/api/token", seconds, "PUT")
        headers = {"X-aws-ec2-metadata-token": token or ""}
        if action := self._ask("latest/meta-data/spot/instance-action", headers):
            # {"action": "terminate", "time": "2026-11-22T08:22:00Z"}
            said = json.loads(action)
            words = f"Amazon EC2 is about to {said['action']} this spot machine"
            return Notice(words, datetime.fromisoformat(said["time"]).timestamp())
        notices = []
        events = self._ask("latest/meta-data/events/maintenance/scheduled", headers)
        for event in json.loads(events or "[]"):
            # {"Code": "system-reboot", "NotBefore": "21 Jan 2026 09:00:43 GMT", "State": "active"}
            begins_at = email.utils.parsedate_to_datetime(event["NotBefore"]).timestamp()
            if event.get("State", "active") == "active" and begins_at - time.time() < HOUR_S:
                words = f"Amazon EC2 has scheduled {event['Code']} for this machine"
                notices.append(Notice(words, begins_at))
        return min(notices, key=lambda notice: notice.gone_at, default=None)


CLOUDS: dict[str, type[Cloud]] = {"gcp": Gce, "aws": Ec2}


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
        except psutil.NoSuchProcess:  # `status` raises where `is_running` returns False
            return False

    def drain(self, notice: Notice) -> None:
        """Tell Ray that this node is about to go; raises if the head does not answer or refuses."""
        _drain(self._connect(address=self._address), self.node_id, notice)


def _drain(client: Any, node_id: str, notice: Notice) -> None:
    # Private names, checked on Ray 2.60; its own command (`ray drain-node`) is hidden.
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    is_accepted, words = client.drain_node(
        node_id, reason, notice.words, int(notice.gone_at * 1000)
    )
    if not is_accepted:
        raise CloudError(f"Ray did not drain this node: {words}")


def drain(address: str, notice: Notice, node_address: str | None = None) -> list[str]:
    """Drain the nodes of the Ray at an address; return their names.

    Args:
        address: The address of its control store.
        notice: The reason, and the deadline.
        node_address: Only the node with this IP address. None: all nodes.

    Raises:
        Exception: The head does not answer, or refuses.
    """
    from raypool.ray_private import GcsClient

    names = []
    for node_id, node in living_nodes(address, RAY_TIMEOUT_S).items():
        if node_address in (None, node.node_manager_address):
            _drain(GcsClient(address=address), node_id.hex(), notice)
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
    own = os.getuid()
    while True:
        # A process that has ended, and is not cleared away yet, has no command line.
        raylets = [
            each
            for each in psutil.process_iter(["name", "uids", "cmdline"])
            if each.info["name"] == "raylet" and each.info["cmdline"]
            if each.info["uids"].real == own and node_id in (None, _option(each, "node_id"))
        ]
        if len(raylets) > 1:
            ids = ", ".join(_option(raylet, "node_id") for raylet in raylets)
            raise CloudError(
                f"{len(raylets)} nodes of Ray run on this machine ({ids}). Select one with --node."
            )
        if raylets:
            return RayNode(raylets[0])
        if time.monotonic() > deadline:
            raise CloudError(
                f"Ray did not start on this machine within {RAY_TIMEOUT_S:.0f} s. Start it first:"
                " ray start --address=..."
            )
        time.sleep(0.2)


def _option(process: psutil.Process, name: str) -> str:
    """Return an option that a process was given; "" if there is none, or the process has ended."""
    with contextlib.suppress(psutil.Error):
        for word in process.cmdline():
            if word.startswith(f"--{name}="):
                return word.removeprefix(f"--{name}=")
    return ""


def watch(cloud: Cloud, node: RayNode) -> None:
    """Tell Ray of each notice with an earlier end of this machine, until Ray has ended here.

    Errors are logged once and retried: a metadata server that is absent, slow or
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
                left_s = notice.gone_at - time.time()
                logger.warning("%s, in %.0f s: Ray drains this node.", notice.words, left_s)
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
    """Watch this machine; the exit status is 1 if no Ray runs on it."""
    parser = argparse.ArgumentParser(
        prog="python -m raypool.cluster.preemption", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cloud", choices=CLOUDS, required=True, help="cloud of this machine")
    parser.add_argument(
        "--metadata", metavar="URL", help="metadata server, if not the cloud's default"
    )
    parser.add_argument(
        "--node", metavar="ID", help="Ray's id of the node, if the machine has several"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        node = find_ray(options.node)
    except CloudError as error:
        logger.error("%s", error)
        return 1
    watch(CLOUDS[options.cloud](options.metadata), node)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
