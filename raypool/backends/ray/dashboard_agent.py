"""Takes the place of Ray's dashboard agent on a node without a dashboard, where nobody asks it.

Ray's raylet starts this file as a script and takes no workers until it knows the agent's ports.
Ray's own agent, which would say that it has none, needs most of a second to import what it does
not use. In that time the fork server imports Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time

SERVER = "RAYPOOL_FORK_SERVER"
"""The variable with the path of the fork server's socket, as in `fork_client`."""

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""The files in which the raylet looks for the agent's ports."""

NO_PORT = "-1"
"""What such a file says where a service is not there."""


def main(words: list[str]) -> None:
    """Say that there are no ports, and stay until the raylet has ended, which ends without it."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    for name in PORTS:
        path = os.path.join(options["session-dir"], f"{name}_{os.environ['RAY_NODE_ID']}")
        with open(f"{path}.new", "w") as file:
            file.write(NO_PORT)
        os.rename(f"{path}.new", path)  # the raylet never reads half of it
    prepare()
    await_end(int(os.environ["RAY_RAYLET_PID"]))


def prepare() -> None:
    """Let the fork server import Ray for this raylet."""
    path = os.environ.get(SERVER)
    if path:
        body = json.dumps({"variables": dict(os.environ)}).encode()
        # it may have ended: then workers start without it
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            server.sendall(struct.pack("q", len(body)) + body)


def await_end(raylet: int) -> None:
    """Return when the raylet has ended."""
    try:
        select.select([os.pidfd_open(raylet)], [], [])
    except (AttributeError, OSError):  # not on macOS, nor on Linux before 5.3; or it has ended
        while os.getppid() == raylet:
            time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1:])
