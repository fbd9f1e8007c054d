"""The server of the live page: on the loopback, for those who know the token in its address.

Every answer has an empty body unless the request has the token in its path and names this server as
its host. So pages of other sites cannot read or do anything, even with a name of theirs that points
to this machine (DNS rebinding), and other users of the machine need the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raypool.errors import InvalidValueError, JournalError
from raypool.journal.live import ask, check_action, want, write_note
from raypool.views.report import PAGE
from raypool.watch.run_reader import Brief, RunReader, State, sweeps_below

Answer = TypeVar("Answer")

MAX_BODY_BYTES = 16 * 1024
"""The size of a request's body [bytes]; a larger one is refused."""

MAX_NOTE = 2000
"""The length of a note [characters]."""

MAX_CURVES = 100
"""The most curves in an answer."""

MAX_POINTS = 5000
"""The most points of a curve."""

LOOK_S = 1.0
"""How often a run is read, at most [s]."""

REST = 1
"""After a look the reader rests for this many times as long as it took: half of a core."""

WANT_S = 2.0
"""How often the driver is told that somebody watches [s]."""

SILENT_S = 15.0
"""After this time without an event, a comment keeps the connection open [s]."""

READ_ONLY = "This page is read-only (--read-only)."

# plotly adds a style to the page and draws images of its charts
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""The headers of every answer."""

OWN_PAGE = Path(__file__).with_name("page")


# --- who may ask ----------------------------------------------------------------------------------


class Guard:
    """Passes on requests for `/TOKEN/...`, as `/...`; answers others with an empty body."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        names = ("127.0.0.1", "localhost", "[::1]")
        self._hosts = {f"{name}:{port}".encode() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI says."""
        token, slash, rest = scope["raw_path"][1:].partition(b"/")
        status = self._refusal(scope["method"], scope["headers"], token)
        if status is None and not slash:
            status = 404  # relative addresses in the page need the slash

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = dict(message["headers"])
                own = {name.lower().encode(): value.encode() for name, value in HEADERS.items()}
                message["headers"] = list((own | named).items())
            await send(message)

        if status is not None:
            await Response(status_code=status)(scope, receive, answer)
            return
        path = scope["path"][1:].partition("/")[2]
        await self._app({**scope, "path": f"/{path}", "raw_path": b"/" + rest}, receive, answer)

    def _refusal(self, method: str, headers: list[tuple[bytes, bytes]], token: bytes) -> int | None:
        """Return the status for a request that may not be answered, else None."""
        named: dict[bytes, bytes] = dict(headers)
        host = named.get(b"host", b"")
        if host not in self._hosts or named.get(b"origin", b"http://" + host) != b"http://" + host:
            return 403
        # takes the same time however much of a guess is right
        if not hmac.compare_digest(token, self._token):
            return 401
        # no page of another site can add this header without asking first
        return 403 if method == "POST" and named.get(b"x-raypool") != b"1" else None


class RefusedError(Exception):
    """A request that cannot be answered: the status, and a sentence for people."""

    def __init__(self, status: int, text: str = "") -> None:
        self.status = status
        self.text = text


# --- runs -----------------------------------------------------------------------------------------


class WatchedFolder:
    """A run that pages look at: one reader for all of them."""

    def __init__(self, folder: Path, why_not: str | None) -> None:
        self.folder = folder
        self.reader = RunReader(folder, why_not)
        self.next_at = 0.0
        self._state: State = {}
        self._wanted_at = -math.inf
        self._lock = asyncio.Lock()  # a reader works for one thread at a time

    async def look(self) -> State:
        """Return the state, at most a second old, or as old as reading it takes."""
        # A page that is reloaded cancels its request. The thread would then go on without the
        # lock, beside the next one.
        return await asyncio.shield(self._look())

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask the reader something, after a first look."""
        if not self._state:
            await self.look()
        return await asyncio.shield(self._ask(question))

    async def _look(self) -> State:
        async with self._lock:
            now = time.monotonic()
            if now >= self.next_at:
                self._state = await asyncio.to_thread(self.reader.look)
                took_s = time.monotonic() - now
                self.next_at = now + max(LOOK_S, (1 + REST) * took_s)
                if self._state["is_running"] and now >= self._wanted_at + WANT_S:
                    self._wanted_at = now
                    with contextlib.suppress(OSError, JournalError):  # so it is only looked at
                        want(self.folder)
            return self._state

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        async with self._lock:
            return await asyncio.to_thread(question)


class RunsFolder:
    """The runs that a server shows: one, or all below a folder."""

    def __init__(self, folder: Path, is_run: bool, is_read_only: bool) -> None:
        self._folder = folder
        self._is_run = is_run
        self._why_not = READ_ONLY if is_read_only else None
        self._runs: dict[str, WatchedFolder] = {}
        self._briefs: dict[Path, Brief] = {}

    @property
    def is_read_only(self) -> bool:
        """Whether nobody may change anything."""
        return self._why_not is not None

    def briefs(self) -> list[State]:
        """Return a few words on each run, the newest first."""
        found = []
        for folder in [self._folder] if self._is_run else sweeps_below(self._folder):
            run_id = blake2b(os.fsencode(folder), digest_size=8).hexdigest()
            self._runs.setdefault(run_id, WatchedFolder(folder, self._why_not))
            brief = self._briefs.setdefault(folder, Brief(folder)).look()
            name = folder.name if self._is_run else str(folder.relative_to(self._folder))
            found.append({"id": run_id, "name": name, "path": str(folder), **brief})
        return sorted(found, key=lambda run: run["started_at"] or 0.0, reverse=True)

    async def prepare(self) -> None:
        """Do what takes long at first: the imports for tables, and reading the only run."""
        await asyncio.to_thread(import_module, "pandas")
        if self._is_run:
            [run] = await asyncio.to_thread(self.briefs)
            await self._runs[run["id"]].look()

    async def find(self, run_id: str) -> WatchedFolder:
        """Return a run.

        Raises:
            RefusedError: There is none.
        """
        if run_id not in self._runs:
            await asyncio.to_thread(self.briefs)
        if run_id not in self._runs:
            raise RefusedError(404)
        return self._runs[run_id]


# --- answers --------------------------------------------------------------------------------------


def as_json(content: Any) -> str:
    """Return JSON in ASCII: user text may have halves of characters."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def answer(content: Any) -> Response:
    """Return an answer with JSON."""
    return Response(as_json(content), media_type="application/json")


def changes(before: State | None, after: State) -> tuple[str, State] | None:
    """Return the event that tells a page what has changed since a state, or None.

    Example:
        >>> state = {"rows": [[0, 1]], "attempts": [], "columns": [], "is_running": True}
        >>> changes(state, {**state, "rows": [[0, 2]]})
        ('change', {'rows': {'0': [0, 2]}})
    """
    if before is None or after["columns"] != before["columns"]:
        return "state", after
    num_rows, num_attempts = len(before["rows"]), len(before["attempts"])
    if len(after["rows"]) < num_rows or after["attempts"][:num_attempts] != before["attempts"]:
        return "state", after
    changed = {
        name: value
        for name, value in after.items()
        if name not in ("rows", "attempts", "duration_s") and value != before[name]
    }
    if rows := {
        str(item): row
        for item, row in enumerate(after["rows"])
        if item >= num_rows or row != before["rows"][item]
    }:
        changed["rows"] = rows
    if attempts := after["attempts"][num_attempts:]:
        changed["attempts"] = attempts
    if not changed:
        return None
    if not after["is_running"]:  # before, the page counts on by itself
        changed["duration_s"] = after["duration_s"]
    return "change", changed


class Pages:
    """What a server answers: the page, its files, and what the page asks for."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._files = static_files()
        self.is_ending = asyncio.Event()

    def app(self) -> ASGIApp:
        """Return the application."""
        run = "/api/runs/{run}"
        routes = [
            Route("/", self.page),
            Route("/static/{name}", self.static),
            Route("/api/runs", self.runs),
            Route(run, self.run),
            Route(f"{run}/events", self.events),
            Route(f"{run}/curves", self.curves),
            Route(f"{run}/items/{{item:int}}", self.item),
            Route(f"{run}/act", self.act, methods=["POST"]),
            Route(f"{run}/notes/{{item:int}}", self.note, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={RefusedError: _refused, HTTPException: _empty, 500: _broken},
        )
        app.router.redirect_slashes = False  # they would lack the token: the guard cuts it off
        return app

    async def page(self, _: Request) -> Response:
        """The page, without any data."""
        return FileResponse(OWN_PAGE / "watch.html")

    async def static(self, request: Request) -> Response:
        """A script or a style."""
        path = self._files.get(request.path_params["name"])
        if path is None:
            raise RefusedError(404)
        return FileResponse(path, headers={"Cache-Control": "private, max-age=86400"})

    async def runs(self, _: Request) -> Response:
        """The list of runs."""
        return answer(await asyncio.to_thread(self._folder.briefs))

    async def run(self, request: Request) -> Response:
        """The state of a run."""
        return answer(await (await self._found(request)).look())

    async def events(self, request: Request) -> Response:
        """The state of a run, then its changes."""
        run = await self._found(request)

        async def stream() -> AsyncIterator[str]:
            sent, sent_at = None, time.monotonic()
            while not self.is_ending.is_set():
                state = await run.look()
                event = changes(sent, state)
                now = time.monotonic()
                if event is not None:
                    yield f"event: {event[0]}\ndata: {as_json(event[1])}\n\n"
                    if sent is not None and sent["is_running"] and not state["is_running"]:
                        yield "event: end\ndata: {}\n\n"
                elif now >= sent_at + SILENT_S:
                    yield ":\n\n"
                else:
                    now = sent_at
                sent, sent_at = state, now
                with contextlib.suppress(TimeoutError):  # the usual end of a pause
                    pause_s = max(run.next_at - time.monotonic(), 0.01)
                    await asyncio.wait_for(self.is_ending.wait(), pause_s)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def curves(self, request: Request) -> Response:
        """The curves of some items."""
        asked, run = request.query_params, await self._found(request)
        try:
            items = [int(item) for item in asked.get("items", "").split(",") if item]
            most = min(max(int(asked.get("most", "500")), 4), MAX_POINTS)
        except ValueError:
            raise RefusedError(400) from None
        if len(items) > MAX_CURVES or min(items, default=0) < 0:
            raise RefusedError(400)
        metric, step = asked.get("metric", ""), asked.get("step", "")
        return answer(await run.ask(lambda: run.reader.curves(items, metric, step, most)))

    async def item(self, request: Request) -> Response:
        """All about one item."""
        run = await self._found(request)
        return answer(await run.ask(lambda: run.reader.item(self._item(request, run))))

    async def act(self, request: Request) -> Response:
        """Ask the driver for an action."""
        run, asked = await self._found(request), await _body(request)
        state = await run.look()
        action, item = str(asked.get("action")), asked.get("item")
        if not state["can_act"]:
            raise RefusedError(409, state["why_not"])
        try:
            check_action(action, item)
            return answer({"id": await asyncio.to_thread(ask, run.folder, action, item)})
        except InvalidValueError as error:
            raise RefusedError(400, str(error)) from None
        except (JournalError, OSError) as error:
            raise RefusedError(409, str(error)) from None

    async def note(self, request: Request) -> Response:
        """Change the star or the text of an item's note, or both."""
        run, asked = await self._found(request), await _body(request)
        changed: dict[str, Any] = {name: asked[name] for name in ("star", "text") if name in asked}
        star, text = changed.get("star", False), changed.get("text", "")
        is_note = isinstance(star, bool) and isinstance(text, str) and len(text) <= MAX_NOTE
        if not changed or not is_note:
            raise RefusedError(400, f"A note has a star and a text of up to {MAX_NOTE} characters.")
        if self._folder.is_read_only:
            raise RefusedError(409, READ_ONLY)
        try:
            key = await run.ask(lambda: run.reader.key(self._item(request, run)))
            await asyncio.to_thread(write_note, run.folder, key, changed)
        except OSError as error:
            raise RefusedError(409, f"The note could not be written: {error.strerror}.") from None
        run.next_at = 0.0  # all pages see it at once
        return answer({})

    async def _found(self, request: Request) -> WatchedFolder:
        return await self._folder.find(request.path_params["run"])

    @staticmethod
    def _item(request: Request, run: WatchedFolder) -> int:
        item: int = request.path_params["item"]
        if item >= run.reader.num_items:
            raise RefusedError(404)
        return item


def static_files() -> dict[str, Path]:
    """Return the files that a page may load, by name."""
    found = [*OWN_PAGE.iterdir(), *PAGE.iterdir()]
    for package, names in (
        ("plotly", ["package_data/plotly.min.js"]),
        ("itables", ["html/dt_bundle.js", "html/dt_bundle.css"]),
    ):
        spec = find_spec(package)  # not imported, which would take half a second
        assert spec is not None
        assert spec.origin is not None
        found += [Path(spec.origin).parent / name for name in names]
    return {path.name: path for path in found if path.suffix in (".css", ".js")}


async def _body(request: Request) -> State:
    """Return the JSON object that a request has for a body."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise RefusedError(413)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RefusedError(400)
    return content


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return Response(error.text, error.status, media_type="text/plain")


async def _empty(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code)


async def _broken(_: Request, error: Exception) -> Response:
    return Response(status_code=500)


# --- serving --------------------------------------------------------------------------------------


class WatchServer(uvicorn.Server):
    """Serves a folder of runs: `.run(sockets=[listener])` returns when it has ended."""

    def __init__(self, listener: socket, folder: RunsFolder, token: str) -> None:
        self._folder = folder
        self._pages = Pages(folder)
        config = uvicorn.Config(
            Guard(self._pages.app(), token, listener.getsockname()[1]),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,  # it would have the token
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,  # [s], before `WatchPage` kills it (`STOP_S`)
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to serve, and to read what the first page will ask for."""
        await super().startup(sockets)
        # kept, since the event loop itself holds its tasks only weakly
        self._preparing = asyncio.create_task(self._folder.prepare())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """End, which the event streams of open pages would not do by themselves."""
        self._pages.is_ending.set()
        await super().shutdown(sockets)


def serve_for(wanted: dict[str, Any]) -> None:
    """Serve a page as a `WatchPage` wants it, until its process ends or stops this one."""
    parent = wanted["parent"]
    listener = socket(fileno=wanted["listener"])
    server = WatchServer(listener, RunsFolder(Path(wanted["folder"]), True, False), wanted["token"])

    # a killed parent runs no finalizer that would stop this process
    def look_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        server.should_exit = True

    threading.Thread(target=look_for_parent, daemon=True).start()
    server.run(sockets=[listener])
