"""A metadata server as Compute Engine and Amazon EC2 have it, on the loopback, that says what a
test wants it to.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a token of version 2"

GCE = "/computeMetadata/v1/instance/"
EC2 = "/latest/meta-data/"


@dataclass
class FakeMetadata:
    """What the server says. Each cloud's own rules hold: without its header Compute Engine refuses,
    without a token EC2.
    """

    url: str = ""
    preempted: str = "FALSE"
    maintenance: str = "NONE"
    action: str | None = None  # JSON
    events: str | None = None  # JSON
    status: int | None = None  # every answer is this failure
    delay_s: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    def take_back(self, after_s: float) -> None:
        """Give EC2's notice."""
        self.action = json.dumps({"action": "terminate", "time": in_iso(after_s)})

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if self.status is not None:
            return self.status, "a page of somebody else's"
        if path.startswith(GCE):
            said = {"preempted": self.preempted, "maintenance-event": self.maintenance}.get(
                path.removeprefix(GCE)
            )
            return (
                (403, "Missing Metadata-Flavor:Google header.")
                if headers.get("Metadata-Flavor") != "Google"
                else found(said)
            )
        if path == "/latest/api/token":
            is_well = (
                method == "PUT"
                and headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
            )
            return (200, TOKEN) if is_well else (400, "")
        if headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return 401, ""
        said = {
            "spot/instance-action": self.action,
            "events/maintenance/scheduled": self.events,
        }.get(path.removeprefix(EC2))
        return found(said)


def found(said: str | None) -> tuple[int, str]:
    return (404, "") if said is None else (200, said)


def in_iso(after_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + after_s))


def in_mail(after_s: float) -> str:
    return time.strftime("%d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + after_s))


@contextmanager
def serving() -> Iterator[FakeMetadata]:
    """Serve on a free port of the loopback."""
    fake = FakeMetadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.is_over.wait(fake.delay_s)
            status, text = fake.answer(self.command, self.path, self.headers)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())
            except ConnectionError:
                pass  # nobody has waited for it

        do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield fake
    finally:
        fake.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
