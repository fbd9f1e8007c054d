"""The server of the live page: what it shows, and the attacks that it has to withstand."""

from __future__ import annotations

import asyncio
import html.parser
import http.client
import json
import math
import os
import re
import secrets
import shutil
import signal
import stat
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from raypool import InvalidValueError, JournalError, parpool, report
from raypool.cli.main import main
from raypool.engine.durable import RunPart
from raypool.journal.live import notes_in, want
from raypool.watch import run_reader, watch_page
from raypool.watch.run_reader import RunReader
from raypool.watch.server import RunsFolder, WatchedFolder, WatchServer, as_json
from tests.documents import blocks_of

HOSTILE = "</script><script>alert(1)</script>\ud83d"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A page that is served, and one who asks it."""

    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.token = token

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str | None
    ) -> Answer:
        """Ask for a path behind the token; None leaves out a header."""
        return self.raw(f"/{self.token}/{path}", method, body, **headers)

    def raw(
        self, path: str, method: str = "GET", body: Any = None, **headers: str | None
    ) -> Answer:
        named: dict[str, Any] = {"Host": f"127.0.0.1:{self.port}"}
        if method == "POST":
            named["X-Raypool"] = "1"
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in named.items():
                if value is not None:
                    connection.putheader(name, value)
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            lines = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, lines, answer.read())
        finally:
            connection.close()

    @property
    def run(self) -> str:
        return str(self.ask("api/runs").json()[0]["id"])


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    running = []

    def start(folder: Path, is_run: bool = True, is_read_only: bool = False) -> Site:
        listener = watch_page.listen()
        token = secrets.token_urlsafe(32)
        server = WatchServer(listener, RunsFolder(folder, is_run, is_read_only), token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread, listener))
        return Site(listener.getsockname()[1], token)

    yield start
    for server, thread, listener in running:
        server.should_exit = True
        thread.join()
        listener.close()


def train(config: dict[str, Any]) -> dict[str, float]:
    for epoch in range(10):
        report(epoch=epoch, loss=config["lr"] / (epoch + 1))
    if config["lr"] == 3:  # 10 MB
        print("much\n" * 2 * 10**6)
    print("trained", config["name"])
    if config["lr"] == 2:
        raise ValueError(HOSTILE)
    return {"loss": config["lr"], "nan": math.nan}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("watched") / "run"
    items = [{"lr": float(lr), "name": HOSTILE} for lr in range(4)]
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(train, items, run_dir=folder, on_error="collect", progress=False)
    return folder


@pytest.fixture
def site(serve: Callable[..., Site], run_dir: Path) -> Site:
    return serve(run_dir)


pytestmark = pytest.mark.quick


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["wrong/", "", "{}x/", "{}%2f", "../{}/"])
def test_without_the_token_there_is_an_empty_answer(site: Site, change: str) -> None:
    for path in (change.format(site.token), change.format(site.token[:-1])):
        answer = site.raw(f"/{path}api/runs")
        assert (answer.status, answer.body) == (401, b"")
        assert "server" not in answer.headers
    assert site.raw("*", "OPTIONS").status == 401


def test_the_token_is_compared_in_constant_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(
        "raypool.watch.server.hmac.compare_digest", lambda a, b: compared.append((a, b))
    )
    assert site.raw("/guess/").status == 401
    assert compared == [(b"guess", site.token.encode())]


@pytest.mark.parametrize(
    "host", ["evil.example:{}", "127.0.0.1", "127.0.0.1.evil.example:{}", "127.0.0.1:1", "", None]
)
def test_a_name_of_somebody_else_that_points_here_is_refused(site: Site, host: str | None) -> None:
    """DNS rebinding: the browser takes the page of evil.example for one of that site."""
    answer = site.ask("api/runs", Host=None if host is None else host.format(site.port))
    assert answer.status in (400, 403)
    assert b"runs" not in answer.body
    for name in ("localhost", "[::1]"):
        assert site.ask("api/runs", Host=f"{name}:{site.port}").status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1"])
def test_pages_of_other_sites_can_do_nothing(site: Site, origin: str) -> None:
    note = {"star": True, "text": "theirs"}
    path = f"api/runs/{site.run}/notes/0"
    for answer in (
        site.ask(path, "POST", note, Origin=origin),
        site.ask(path, "POST", note, X_Raypool=None),  # as a form sends it
        site.ask("api/runs", Origin=origin),
    ):
        assert (answer.status, answer.body) == (403, b"")
    preflight = site.ask(path, "OPTIONS", Access_Control_Request_Method="POST")
    assert (preflight.status, preflight.body) == (405, b"")
    assert not any(name.startswith("access-control") for name in preflight.headers)
    assert site.ask(path, "POST", note, Origin=f"http://127.0.0.1:{site.port}").status == 200


def test_it_listens_on_the_loopback_only() -> None:
    with watch_page.listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# --- what is answered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("static/../watch.html", "static/..%2fserver.py", "static/%2e%2e/server.py"),
        *("static/report.html.j2", "static/watch.html", "static/", "static//etc/passwd"),
        *("api/runs/..", "api/runs/..%2f..", "api/runs/0000000000000000", "api/runs/ID/items/4"),
        *("api/runs/ID/items/-1", "api/runs/ID/items/1e3", "api/runs/ID/items/..%2f0"),
        "api/runs/ID/items/99999999999999999999999",
    ],
)
def test_names_and_numbers_lead_to_no_other_file(site: Site, path: str) -> None:
    answer = site.ask(path.replace("ID", site.run))
    assert (answer.status, answer.body) == (404, b"")


def test_bodies_and_questions_are_limited(site: Site) -> None:
    path = f"api/runs/{site.run}/act"
    assert site.ask(path, "POST", b" " * 20_000).status == 413
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 16_000):
        assert site.ask(path, "POST", body).status == 400
    assert site.ask(f"api/runs/{site.run}/notes/0", "POST", {"star": 1, "text": ""}).status == 400
    for asked in ("items=a", f"items={','.join('0' * 101)}", "items=-1", "items=0&most=x"):
        assert site.ask(f"api/runs/{site.run}/curves?{asked}").status == 400


def test_every_answer_has_the_policy_of_the_page(site: Site) -> None:
    for answer in (site.ask(""), site.ask("static/watch.js"), site.ask("none"), site.raw("/x/")):
        policy = answer.headers["content-security-policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == "'self'"
        assert "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_loads_only_what_this_server_has(site: Site) -> None:
    loaded: list[str] = []

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            assert tag != "script" or named.get("src")  # no inline script
            assert not any(name.startswith("on") or name == "style" for name in named)
            loaded.extend(filter(None, (named.get("src"), named.get("href"))))

    Links().feed(site.ask("").body.decode())
    script = site.ask("static/watch.js").body.decode()
    loaded += [f"static/{name}" for name in re.findall(r'(?:from|import\() ?"\./([^"]+)"', script)]
    paths = [path for path in loaded if not path.startswith("data:")]
    assert len(paths) > 3
    for path in [*paths, "static/plotly.min.js"]:
        assert site.ask(path).status == 200, path


def test_text_of_users_stays_text(site: Site) -> None:
    """It is JSON, which no browser takes for a page, and the same text comes out."""
    answer = site.ask(f"api/runs/{site.run}")
    assert answer.headers["content-type"] == "application/json"
    state = answer.json()
    names = [column["name"] for column in state["columns"]]
    assert state["rows"][2][names.index("name")] == HOSTILE.replace("\ud83d", "?")
    assert "alert(1)" in state["rows"][2][names.index("error")]
    item = site.ask(f"api/runs/{site.run}/items/2").json()
    assert "alert(1)" in item["output"]
    assert "alert(1)" in item["traceback"]


def test_an_ended_run_and_its_items(site: Site) -> None:
    state = site.ask(f"api/runs/{site.run}").json()
    assert state["state"] == "ended"
    assert state["counts"] == {"finished": 3, "failed": 1}
    assert (state["metrics"], state["steps"]) == (["loss"], ["epoch"])
    assert (state["metric"], state["best"]["item"]) == ("loss", 0)
    assert [attempt[3] for attempt in state["attempts"]] == ["finished"] * 2 + [
        "failed",
        "finished",
    ]
    item = site.ask(f"api/runs/{site.run}/items/3").json()
    assert item["differs_from_best"] == {"lr": [3.0, 0.0]}
    assert item["metrics"] == {"epoch": 9, "loss": 0.3}
    assert len(item["output"]) == 100_000
    assert "trained" in item["output"], "its end is kept"
    answer = site.ask(f"api/runs/{site.run}/act", "POST", {"action": "cancel", "item": 1})
    assert answer.status == 409
    assert b"has ended" in answer.body


def test_a_short_curve_keeps_its_ends_and_its_extremes(tmp_path: Path) -> None:
    losses = [*map(float, range(100, 0, -1))]
    losses[40], losses[60] = 1e6, -1e6
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(
            lambda _: [report(loss=loss) for loss in losses] and None,
            [0],
            run_dir=tmp_path / "run",
            progress=False,
        )
    reader = RunReader(tmp_path / "run")
    reader.look()
    curve = reader.curves([0], "loss", "", 12)["0"]
    assert (curve["x"][0], curve["x"][-1]) == (0, 99)
    assert {1e6, -1e6} < set(curve["y"])
    assert len(curve["x"]) <= 12


def test_notes_are_for_the_owner_only_and_not_where_a_page_is_read_only(
    serve: Callable[..., Site], run_dir: Path
) -> None:
    site = serve(run_dir)
    note = {"star": True, "text": HOSTILE}
    assert site.ask(f"api/runs/{site.run}/notes/1", "POST", note).status == 200
    assert site.ask(f"api/runs/{site.run}").json()["notes"]["1"] == note
    assert stat.S_IMODE((run_dir / "notes.json").stat().st_mode) == 0o600
    assert note in notes_in(run_dir).values()
    for changed in ({"star": False}, {"text": "better"}):
        assert site.ask(f"api/runs/{site.run}/notes/1", "POST", changed).status == 200
        note |= changed
        assert note in notes_in(run_dir).values(), "the other field stays"
    assert site.ask(f"api/runs/{site.run}/notes/1", "POST", {"other": 1}).status == 400
    only = serve(run_dir, is_read_only=True)
    for path, asked in (("act", {"action": "stop_all"}), ("notes/1", note)):
        answer = only.ask(f"api/runs/{only.run}/{path}", "POST", asked)
        assert (answer.status, b"read-only" in answer.body) == (409, True)


class Threads(ThreadPoolExecutor):
    """Counts how many calls there are at once."""

    num_calls = most = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def end(_: object) -> None:
            self.num_calls -= 1

        self.num_calls += 1
        self.most = max(self.most, self.num_calls)
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(end)
        return future


def test_the_reader_has_one_thread_also_if_a_page_is_reloaded(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    look = RunReader.look
    monkeypatch.setattr(RunReader, "look", lambda reader: may_end.wait(300) and look(reader))

    async def leave(threads: Threads, request: Any) -> None:
        may_end.clear()
        task = asyncio.create_task(request)
        while not threads.num_calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def reload() -> int:
        with Threads() as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            run = WatchedFolder(run_dir, None)
            for request in (run.look, lambda: run.ask(lambda: may_end.wait(300))):
                await leave(threads, request())
                run.next_at = 0.0
                after = asyncio.create_task(run.look())
                for _ in range(9):
                    await asyncio.sleep(0)
                may_end.set()
                assert (await after)["state"] == "ended"
            return threads.most

    assert asyncio.run(reload()) == 1


# --- runs that go on ------------------------------------------------------------------------------


def test_a_run_that_is_followed_looks_as_one_that_is_read_at_its_end(tmp_path: Path) -> None:
    """In every moment the reader adds only what is new."""
    folder = tmp_path / "run"
    reader = RunReader(folder)
    assert reader.look()["state"] == "empty"
    seen = []

    def look(_: object) -> None:
        seen.append(reader.look())
        json.loads(as_json(seen[-1]))

    items = [{"lr": float(lr), "name": "b"} for lr in range(4)]
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(train, items[:2], run_dir=folder, progress=False, on_report=look)
        pool.parfor(
            train, items, run_dir=folder, progress=False, on_report=look, on_error="collect"
        )
    assert {"finished", "waiting"} <= {status for state in seen for status in state["counts"]}
    assert reader.look() == RunReader(folder).look()


def test_an_item_that_runs_again_is_shown_without_what_its_failed_call_has_reported(
    tmp_path: Path,
) -> None:
    """And items that only an earlier call had do not count."""
    folder, mended = tmp_path / "run", tmp_path / "mended"
    reader, seen = RunReader(folder), []

    def fn(item: int) -> None:
        for epoch in range(3):
            report(loss=item + 1 / (epoch + 1))
            if epoch == 1 and not mended.exists():
                raise ValueError("not yet")

    def look(_: object) -> None:
        seen.append(reader.look())

    with parpool(profile="inline", quiet=True) as pool:

        def run(items: Any) -> None:
            pool.parfor(
                fn, items, run_dir=folder, progress=False, on_report=look, on_error="collect"
            )

        run(range(3))
        reader.look()
        assert reader.curves([0], "loss", "", 9)["0"]["y"] == [1.0, 0.5]
        mended.touch()
        run(range(2))
    assert sum(seen[-1]["counts"].values()) == 2
    assert reader.look() == RunReader(folder).look()
    assert reader.curves([0], "loss", "", 9)["0"]["y"] == pytest.approx([1.0, 0.5, 1 / 3])


@pytest.mark.parametrize(
    ("rerun", "first", "second"),
    [
        ("failed", "finished", "waiting"),
        ("missing", "finished", "failed"),
        ("all", "waiting", "waiting"),
    ],
)
def test_an_outcome_that_does_not_count_waits_to_be_replaced(
    rerun: Any,
    first: str,
    second: str,
    tmp_path: Path,
    make_gate: Callable[..., Any],
    eventually: Callable[..., bool],
) -> None:
    gate, folder, may_fail = make_gate(), tmp_path / "run", [True]

    def item(number: int) -> None:
        if not may_fail:
            gate.wait()
        elif number == 1:
            raise ValueError(number)

    reader = RunReader(folder)

    def statuses() -> Any:
        want(folder)
        state = reader.look()
        return state["live"] and state["live"]["running"] and state["counts"]

    with parpool(1, profile="threads", quiet=True) as pool:
        pool.parfor(item, range(2), run_dir=folder, on_error="collect", progress=False)
        may_fail.clear()
        how: Any = {"run_dir": folder, "on_error": "collect", "progress": False, "rerun": rerun}
        loop = threading.Thread(target=lambda: pool.parfor(item, [2, 3, 0, 1], **how))
        loop.start()
        expected = Counter(["running", "waiting", first, second])
        assert eventually(lambda: statuses() == expected)
        gate.open()
        loop.join()
    counts = {"finished": 3, "failed": 1} if rerun == "missing" else {"finished": 4}
    assert reader.look()["counts"] == counts


def test_new_reports_of_a_metric_with_the_name_of_a_column_are_shown(tmp_path: Path) -> None:
    def fn(_: int) -> None:
        report(time=1.0)
        raise KeyboardInterrupt

    with parpool(profile="inline", quiet=True) as pool, pytest.raises(KeyboardInterrupt):
        pool.parfor(fn, [0], run_dir=tmp_path / "run", progress=False)
    reader = RunReader(tmp_path / "run")
    names = [column["name"] for column in reader.look()["columns"]]
    (file,) = (tmp_path / "run" / "items").glob("*/metrics.jsonl")
    with file.open("a") as lines:
        lines.write(json.dumps({"run": 1, "time": 0.0, "attempt": 1, "metrics": {"time": 2.0}}))
        lines.write("\n")
    assert reader.look()["rows"][0][names.index("last reported_time")] == 2.0


def test_of_many_metrics_none_is_left_out_without_a_note(tmp_path: Path) -> None:
    def train_many(config: dict[str, Any]) -> None:
        report(epoch=0, **{f"class_{number}": 0.5 for number in range(24)})
        report(epoch=1, val_loss=config["lr"])

    with parpool(profile="inline", quiet=True) as pool:
        items = [{"lr": 0.1}, {"lr": 0.2}]
        results = pool.parfor(train_many, items, run_dir=tmp_path / "run", progress=False)
    state = RunReader(tmp_path / "run").look()
    assert (len(state["metrics"]), state["metrics"][-1]) == (25, "val_loss")
    assert state["metric"] == "last val_loss"
    assert "last val_loss" in [column["name"] for column in state["columns"]], "items rank by it"
    note = "The table has columns for 20 of 26 reported metrics."
    assert state["table_note"] == note
    page = results.report(tmp_path / "page.html").read_text()
    assert note in page
    assert "20 of 25 metrics can be chosen." in page
    assert '"metrics":["val_loss"' in page


def test_the_list_of_runs_rests_while_a_large_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, num_reads, is_now = 0.0, 0, True
    read = run_reader.read_contents

    def read_slowly(*arguments: Any) -> Any:
        nonlocal clock, num_reads
        clock, num_reads = clock + 2, num_reads + 1
        return read(*arguments)

    def reads_after(seconds: float) -> int:
        nonlocal clock
        clock += seconds
        os.utime(run_dir / "journal.sqlite", (clock, clock))  # it has changed
        brief.look()
        return num_reads

    times = types.SimpleNamespace(time=time.time, monotonic=lambda: clock)
    monkeypatch.setattr(run_reader, "time", times)
    monkeypatch.setattr(run_reader, "read_contents", read_slowly)
    monkeypatch.setattr(run_reader, "is_any_running", lambda folder: is_now)
    brief = run_reader.Brief(run_dir)
    assert [reads_after(seconds) for seconds in (1, 1, 10, 10)] == [1, 1, 1, 2]
    is_now = False
    assert reads_after(1) == 3, "its end is seen at once"


def test_a_folder_is_removed_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reader = RunReader(folder)
    items = [{"lr": float(lr), "name": "a"} for lr in (0, 1)]

    def again(config: dict[str, Any]) -> None:
        report(loss=7.0)

    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(train, items, run_dir=folder, progress=False)
        assert len(reader.look()["rows"]) == 2
        shutil.rmtree(folder)
        pool.parfor(again, items[:1], run_dir=folder, progress=False)
    assert reader.look() == RunReader(folder).look()
    assert reader.curves([0], "loss", "", 9)["0"]["y"] == [7.0]


def test_a_part_of_a_run_begins_and_is_taken_over_between_two_looks(tmp_path: Path) -> None:
    folder, mended = tmp_path / "run", tmp_path / "mended"

    def fn(item: int) -> int:
        if not mended.exists():
            raise ValueError("not yet")
        return item

    reader = RunReader(folder)
    with parpool(profile="inline", quiet=True) as pool:

        def run(place: Any) -> None:
            pool.parfor(fn, range(4), run_dir=place, progress=False, on_error="collect")

        run(folder)
        mended.touch()
        run(RunPart(folder, "1", 1, [2, 3]))
        assert reader.look()["counts"] == {"finished": 2, "failed": 2}
        run(RunPart(folder, "0", 1, [0]))
        run(folder)
    assert reader.look() == RunReader(folder).look()


def events_of(url: str, until: str) -> list[tuple[str, Any]]:
    """Read the events of the only run, up to one of this name."""
    port, token = re.fullmatch(r"http://127.0.0.1:(\d+)/(.*)/", url).groups()  # type: ignore[union-attr]
    site = Site(int(port), token)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=300)
    connection.request("GET", f"/{token}/api/runs/{site.run}/events")
    events: list[tuple[str, Any]] = []
    with connection.getresponse() as stream:
        name = ""
        for line in stream:
            kind, _, text = line.decode().rstrip("\n").partition(": ")
            if kind == "event":
                name = text
            elif kind == "data":
                events.append((name, json.loads(text)))
                if name == until:
                    break
    connection.close()
    return events


@pytest.mark.ci
def test_a_loop_shows_itself_and_obeys(
    tmp_path: Path,
    make_gate: Callable[..., Any],
    eventually: Callable[..., bool],
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = make_gate()
    folder = tmp_path / "run"

    def item(number: int) -> int:
        report(step=number)
        if number < 2:
            gate.wait()
        return number

    with parpool(2, profile="threads", quiet=True) as pool:
        with pytest.raises(InvalidValueError, match="watch=True needs run_dir"):
            pool.parfor(item, [1], watch=True)
        with pytest.raises(InvalidValueError, match="watch=True needs run_dir"):
            pool.search(item, {}, num_trials=1, watch=True)
        with pytest.raises(InvalidValueError, match="needs run_dir"):
            pool.watch()
        page = pool.watch(folder)
        assert pool.watch(folder) is page
        loop = threading.Thread(
            target=lambda: pool.parfor(item, range(4), run_dir=folder, progress=False, watch=True)
        )
        loop.start()
        read: list[Any] = []
        reading = threading.Thread(target=lambda: read.extend(events_of(page.url, "end")))
        reading.start()
        site = Site(int(page.url.split(":")[2].split("/")[0]), page.url.split("/")[3])
        assert eventually(lambda: site.ask(f"api/runs/{site.run}").json()["can_act"])
        answer = site.ask(f"api/runs/{site.run}/act", "POST", {"action": "stop", "item": 1})
        assert answer.status == 200
        assert eventually(lambda: bool(site.ask(f"api/runs/{site.run}").json()["actions"]))
        gate.open()
        loop.join()
        reading.join()
        assert read[0][0] == "state"
        assert any("running" in state.get("counts", ()) for _, state in read)
        assert site.ask(f"api/runs/{site.run}").json()["counts"] == {"finished": 4}
        assert page.url in capfd.readouterr().err
        assert f'<iframe src="{page.url}"' in page._repr_html_()
        process = page._process
    assert page.is_closed
    assert process.poll() is not None


def test_the_page_of_a_loop_without_workers_ends_with_its_pool(tmp_path: Path) -> None:
    """With max_workers=0, and in a task."""
    pages = []

    def item(_: int) -> None:
        with parpool() as inner:
            inner.parfor(abs, [-1], run_dir=tmp_path / "inner", watch=True)
            pages.append(inner.watch())
        assert pages[0].is_closed

    with parpool(1, profile="threads", quiet=True) as pool:
        pool.parfor(item, range(1))
        pool.parfor(abs, [-1], run_dir=tmp_path / "run", watch=True, max_workers=0)
        pages.append(pool.watch())
    assert [page.run_dir.name for page in pages] == ["inner", "run"]
    assert pages[1].is_closed


@pytest.mark.ci
def test_the_server_ends_with_a_driver_that_is_killed(
    tmp_path: Path, start_python: Callable[..., Any], eventually: Callable[..., bool]
) -> None:
    driver = start_python(f"""
        import sys
        from raypool import parpool
        with parpool(1, profile="threads", quiet=True) as pool:
            page = pool.watch({str(tmp_path / "run")!r})
            print(page.url, page._process.pid, flush=True)
            sys.stdin.read()
            import time
            time.sleep(1000)
    """)
    url, pid = driver.process.stdout.readline().split()
    site = Site(int(url.split(":")[2].split("/")[0]), url.split("/")[3])
    assert site.ask("api/runs").json()[0]["state"] == "empty"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert site.token.encode() not in command  # which all users can read
    os.kill(driver.pid, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_damaged_journal_shows_what_can_be_read(tmp_path: Path, run_dir: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    next(copy.glob("items/*/metrics.jsonl")).write_text("{\n")
    journal = copy / "journal.sqlite"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2 :] = b"x" * (len(data) - len(data) // 2)
    journal.write_bytes(data)
    state = RunReader(copy).look()
    assert "could be read" in state["problem"]
    journal.write_bytes(b"no database")
    state = RunReader(copy).look()
    assert (state["state"], state["rows"]) == ("unreadable", [])
    assert state["problem"]


def test_pickles_that_others_could_have_written_stay_closed(tmp_path: Path) -> None:
    with parpool(profile="inline", quiet=True) as pool:
        pool.parfor(str, [Path("a")], run_dir=tmp_path / "run", progress=False)
    (tmp_path / "run").chmod(0o770)
    state = RunReader(tmp_path / "run").look()
    assert state["counts"] == {"finished": 1}
    assert "can be changed by others" in state["problem"]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_command_serves_all_runs_of_a_folder_until_ctrl_c(
    tmp_path: Path, run_dir: Path, start_python: Callable[..., Any]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(run_dir, tmp_path / name)
    with watch_page.listen() as taken:
        port = taken.getsockname()[1]
        command = start_python(
            f"""
            import sys
            from raypool.cli.main import main
            sys.argv = ["raypool", "watch", {str(tmp_path)!r}, "--port", "{port}"]
            main()
            """,
            SSH_CONNECTION="10.0.0.1 22 10.0.0.2 22",
        )
        url = command.process.stdout.readline().split()[-1]
        other = int(url.split(":")[2].split("/")[0])
        assert f"ssh -L {other}:127.0.0.1:{other} " in command.process.stdout.readline()
        site = Site(other, url.split("/")[3])
        runs = site.ask("api/runs").json()
    assert sorted((run["name"], run["state"]) for run in runs) == [("a", "ended"), ("b", "ended")]
    assert runs[0]["counts"] == {"finished": 3, "failed": 1}
    assert site.ask(f"api/runs/{runs[1]['id']}").json()["counts"] == runs[1]["counts"]
    command.process.send_signal(signal.SIGINT)
    done = command.finish()
    assert done.returncode == 0
    assert done.stderr.startswith(f"Port {port} cannot be used: Address already in use.")


def test_what_the_command_refuses(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> str:
        done = CliRunner().invoke(main, ["watch", str(folder)])
        assert done.exit_code != 0
        return done.output

    assert "There are no saved runs" in refused(tmp_path)
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    assert f"belongs to user {os.geteuid()}" in refused(run_dir)
    with parpool(profile="inline", quiet=True) as pool, pytest.raises(JournalError):
        pool.watch(run_dir)
    monkeypatch.setattr("raypool.errors.find_spec", lambda name: None)
    for command in (["watch", str(run_dir)], ["sweep", "a:b", "c", "--run-dir", "d", "--watch"]):
        output = CliRunner().invoke(main, command).output
        assert 'pip install "raypool[watch]"' in " ".join(output.split())


@pytest.mark.ci
def test_the_page_on_the_live_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = blocks_of("docs/watch.md", "python")
    exec(compile(block.code, "docs/watch.md", "exec"), {})
    assert "Live page: http://127.0.0.1:" in capfd.readouterr().err
