"""Asks the dashboard of a cluster: the one of its ports that has to be reachable from elsewhere, as a rule through a tunnel.

Ray's own `JobSubmissionClient` hands jobs in and follows their logs. Whatever is asked again and again, or has to be answered
within seconds, is asked here, with time limits, which that client does not know. The token goes along as a header of each
question, so that one process can ask several clusters; it is never part of a URL or of a message.

Source: Ray's `dashboard/modules/job/job_head.py`, `state/state_head.py` and `reporter/reporter_head.py` (paths and answers),
`dashboard/utils.py` (get_address_for_submission_client).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypool.errors import CloudError
from raypool.profiles import LOOPBACK, Profile

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ANSWER_TIMEOUT_S = 8.0
"""How long the dashboard may take to answer [s]; with all that goes before, a head that is not there is known within 10 s."""

PIECE_BYTES = 2**20

OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables by which Ray's client goes to another cluster than the one that it is told."""

PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Variables by which it goes through a proxy, from where the end of a tunnel on this machine is not reached."""

HEAD_TIMEOUT_S = 20.0
"""How long after its dashboard a head that has just been started may need until all of it is there [s]."""

POLL_S = 0.2
"""How often to ask whether it is [s]."""

AUTOSCALER_TIMEOUT_S = 6.0
"""An autoscaler says what it does every five seconds [s]."""

_environment_lock = threading.Lock()


class Dashboard:
    """The dashboard of a profile's cluster.

    Args:
        profile: `jobs_address` says where it is, `token_file` and `tls` how to be let in.

    Raises:
        CloudError: Nobody answers there, or not to this token; or the token would travel there for all to read.
        InvalidValueError: The profile does not say where it is.
    """

    def __init__(self, profile: Profile) -> None:
        own = _own_dashboard() if profile.address is None and profile.jobs_address is None else None
        self.url = (own or profile.jobs_url).rstrip("/")
        self._token_file = profile.token_file
        self._authority = None if profile.tls is None else str(Path(profile.tls.authority).expanduser())
        if own is None:  # that of this process's Ray is in a network that Ray itself trusts
            self._check_is_secret()
        self.version: dict[str, Any] = self.get("/api/version")
        if "ray_version" not in self.version:
            raise self._stranger()

    def get(self, path: str, **query: object) -> Any:
        """Return what is answered there.

        Raises:
            CloudError: Nobody answers, or not so; `.status` is the number of the answer, if there was one.
        """
        with self._open(path, query, ANSWER_TIMEOUT_S) as answer:
            text = answer.read()
        try:
            return json.loads(text)
        except ValueError:
            raise self._stranger() from None

    def pieces(self, path: str, **query: object) -> Iterator[bytes]:
        """Return a large answer piece by piece.

        Raises:
            CloudError: As for `get`; or it breaks off.
        """
        with self._open(path, query, 2 * ANSWER_TIMEOUT_S) as answer:
            try:
                while piece := answer.read(PIECE_BYTES):
                    yield piece
            except (OSError, http.client.HTTPException) as error:
                raise CloudError(f"The connection to {self.url} has broken off: {error}. Try again.", status=None) from error

    async def listen(self, path: str, put: Callable[[str], object]) -> None:
        """Hand on what comes there, until it ends in good order. Ray's own client leaves such connections open, which warns.

        Raises:
            ConnectionError: It breaks off.
            aiohttp.ClientError: It cannot be made.
        """
        import aiohttp

        encryption = True if self._authority is None else ssl.create_default_context(cafile=self._authority)
        timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
        async with (
            aiohttp.ClientSession(headers=self._headers()) as session,
            session.ws_connect(self.url + path, ssl=encryption, timeout=timeout) as pieces,
        ):
            async for piece in pieces:
                if piece.type is aiohttp.WSMsgType.TEXT:
                    put(piece.data)
            if pieces.close_code != aiohttp.WSCloseCode.OK:
                raise ConnectionError(f"the connection to {self.url} has broken off ({pieces.close_code})")

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the cluster that are alive, as Ray's state API describes them; it has one at least, the head."""
        deadline = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            answer = self.get("/api/v0/nodes", detail=1, limit=10_000)
            alive = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
            if alive or time.monotonic() > deadline:
                return alive
            time.sleep(POLL_S)

    def may_grow(self) -> bool:
        """Return whether the cluster has an autoscaler, so that it could have more nodes than it has."""
        nodes = self.nodes()
        if any("ray.io/node-group" in node["labels"] for node in nodes):
            return True
        own_kinds = {f"node{node['node_id']}" for node in nodes}  # without an autoscaler each node is of a kind of its own
        deadline = time.monotonic() + AUTOSCALER_TIMEOUT_S
        while time.monotonic() < deadline:
            report = (self.get("/api/cluster_status")["data"]["clusterStatus"] or {}).get("autoscalerReport")
            if report is not None:
                return any(kind.replace("_", "").lower() not in own_kinds for kind in report["activeNodes"])
            time.sleep(POLL_S)
        return False

    @contextlib.contextmanager
    def client(self) -> Iterator[JobSubmissionClient]:
        """Give Ray's own client for jobs, for requests of seconds: meanwhile the environment cannot lead it elsewhere.

        Raises:
            CloudError: Ray is installed here without what it needs.
        """
        from ray.job_submission import JobSubmissionClient

        for name in ("dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
            logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)  # they tell of every upload
        with _environment_lock, _without(OVERRIDING + (PROXIES if self._is_here() else ())):
            try:
                client = JobSubmissionClient(self.url, headers=self._headers(), verify=self._authority or True)
            except RuntimeError as error:
                raise CloudError(
                    f"Ray's client for jobs cannot be used here: {error} Try: pip install raypool[cluster]"
                ) from error
            yield client

    def _headers(self) -> dict[str, str]:
        token = self._token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _token(self) -> str | None:
        if self._token_file is None and "RAY_AUTH_TOKEN" in os.environ:
            return os.environ["RAY_AUTH_TOKEN"].strip()
        with contextlib.suppress(FileNotFoundError):
            return self._token_path().read_text(encoding="utf-8").strip()
        if self._token_file is None:
            return None
        raise CloudError(f"There is no token in {self._token_path()}. It is the file ~/.ray/auth_token of the cluster's head.")

    def _token_path(self) -> Path:
        return Path(self._token_file or os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()

    def _open(self, path: str, query: dict[str, object], timeout_s: float) -> http.client.HTTPResponse:
        url = f"{self.url}{path}?{urllib.parse.urlencode(query)}" if query else f"{self.url}{path}"
        try:
            answer = self._opener().open(urllib.request.Request(url, headers=self._headers()), timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read(500).decode(errors="replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CloudError(
                f"No dashboard of Ray answers at {self.url} ({reason}). Is the tunnel open (raypool cluster connect)? "
                "On this machine `ray start --head` starts a Ray that has one; the Ray that a pool starts for itself has none.",
                status=None,
            ) from error
        return answer  # type: ignore[no-any-return]

    def _check_is_secret(self) -> None:
        """Show the token to nobody on the way: without encryption it goes to this machine only, where tunnels end."""
        if urllib.parse.urlsplit(self.url).scheme == "http" and not self._is_here() and self._token():
            raise CloudError(
                f"The token would travel to {self.url} unencrypted, for all on the way to read. "
                "Open a tunnel (raypool cluster connect, kubectl port-forward) and name its end here as jobs_address "
                "(http://127.0.0.1:8265), or an address with https.",
                status=None,
            )

    def _opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if self._is_here():
            handlers.append(urllib.request.ProxyHandler({}))  # a tunnel's end is on this machine, where no proxy gets to
        if self._authority is not None:
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=self._authority)))
        return urllib.request.build_opener(*handlers)

    def _is_here(self) -> bool:
        return urllib.parse.urlsplit(self.url).hostname in LOOPBACK

    def _refused(self, status: int, text: str) -> CloudError:
        if 300 <= status < 400:
            return CloudError(
                f"{self.url} sends on to another address ({status}), and the token goes nowhere else. "
                "Name the dashboard itself as jobs_address.",
                status=status,
            )
        if status == 401:
            said = f"The cluster at {self.url} asks for a token, and there is none in {self._token_path()}."
        elif status == 403:
            where = "RAY_AUTH_TOKEN" if self._token_file is None and "RAY_AUTH_TOKEN" in os.environ else self._token_path()
            said = f"The cluster at {self.url} does not know the token in {where}: it may be another cluster's."
        else:
            return CloudError(f"{self.url} answers: {text.strip() or status}", status=status)
        return CloudError(f"{said} Copy ~/.ray/auth_token of its head, and name the copy with token_file=.", status=status)

    def _stranger(self) -> CloudError:
        return CloudError(f"What answers at {self.url} is no dashboard of Ray. Check jobs_address, and the tunnel.", status=None)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: the headers, and so the token, would go along."""

    def redirect_request(self, *args: object) -> None:
        """Follow none."""


def _own_dashboard() -> str | None:
    """Return the URL of the dashboard of the Ray that runs in this process, if it has one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    url = ray._private.worker.get_dashboard_url()  # the public way to it is the answer of ray.init, which another has got
    return f"http://{url}" if url else None


@contextlib.contextmanager
def _without(variables: tuple[str, ...]) -> Iterator[None]:
    """Take variables out of the environment for a while."""
    kept = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
