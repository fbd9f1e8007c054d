"""`on_end`: a function or a webhook hears that a loop or search has ended, however it did."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raypool import (
    ParallelPool,
    Results,
    load_checkpoint,
    load_results,
    parpool,
    report,
    save_checkpoint,
    search,
)
from raypool.cli.main import main
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.views import notice


class Webhook(HTTPServer):
    """A server on the loopback that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/services/T1"
        self.status = 200
        self.got: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pool() -> Iterator[ParallelPool]:
    with parpool(profile="inline", quiet=True) as pool:
        yield pool


def invert(x: float) -> float:
    if x == 3:
        raise KeyboardInterrupt
    return 1 / x


def test_a_function_gets_the_results_when_the_folder_is_free(
    pool: ParallelPool, tmp_path: Path
) -> None:
    heard: list[Any] = []

    def hear(results: Results[Any]) -> None:
        heard.append((list(results), list(load_results(tmp_path))))
        pool.parfor(invert, [1, 2], run_dir=tmp_path)  # nobody holds the lock

    assert pool.parfor(invert, [1, 2], run_dir=tmp_path, on_end=hear, reduce=max) == 1
    assert heard == [([None, None], [1, 0.5])], "a fold keeps no values in memory"


@pytest.mark.parametrize(
    ("items", "error"), [([2, 0, 1], ZeroDivisionError), ([2, 3, 1], KeyboardInterrupt)]
)
def test_it_is_called_once_where_the_loop_raises(
    items: list[int], error: type[BaseException], pool: ParallelPool
) -> None:
    heard: list[Results[Any]] = []
    with pytest.raises(error) as caught:
        pool.parfor(invert, items, on_end=heard.append)
    assert [list(results) for results in heard] == [[0.5, None, None]]
    assert list(caught.value.results) == [0.5, None, None]  # type: ignore[attr-defined]


def test_an_error_in_it_is_only_logged(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(results: Results[Any]) -> None:
        raise LookupError("no mail")

    assert pool.parfor(invert, [1], on_end=fail) == [1]
    with pytest.raises(ZeroDivisionError):
        pool.parfor(invert, [0], on_end=fail)
    assert [record.message for record in caplog.records] == [
        "on_end of invert failed, which does not change its results: LookupError: no mail."
    ] * 2

    def interrupt(results: Results[Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ZeroDivisionError):  # not replaced
        pool.parfor(invert, [0], on_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.parfor(invert, [1], on_end=interrupt)


def test_a_webhook_gets_a_summary(pool: ParallelPool, webhook: Webhook, tmp_path: Path) -> None:
    run: Callable[..., Any] = pool.parfor
    run(invert, [1, 0], on_error="collect", run_dir=tmp_path, on_end=webhook.url, name="my sweep")
    with pytest.raises(ZeroDivisionError):
        run(invert, [0, 1], on_end=webhook.url)
    with pytest.raises(KeyboardInterrupt):
        run(invert, [1, 3], on_end=webhook.url)
    collected, failed, cancelled = webhook.got
    assert collected.pop("duration_s") >= 0
    text = collected.pop("text")
    assert re.fullmatch("my sweep finished after .+: 1 of 2 items finished, 1 failed", text)
    assert collected == {
        "label": "my sweep",
        "state": "finished",
        "items": 2,
        "finished": 1,
        "failed": 1,
        "run_dir": str(tmp_path),
        "error": "ZeroDivisionError: division by zero",
    }
    assert (failed["state"], failed["finished"], failed["run_dir"]) == ("failed", 0, None)
    assert (cancelled["state"], cancelled["error"]) == ("cancelled", "KeyboardInterrupt")


@pytest.mark.parametrize(("status", "said"), [(500, "HTTP Error 500"), (302, "HTTP Error 302")])
def test_a_webhook_that_fails_is_only_logged(
    status: int,
    said: str,
    pool: ParallelPool,
    webhook: Webhook,
    caplog: pytest.LogCaptureFixture,
) -> None:
    webhook.status = status
    assert pool.parfor(invert, [1], on_end=webhook.url) == [1]
    assert len(webhook.got) == 1
    assert said in caplog.text
    assert "services" not in caplog.text  # that path is a secret


def test_a_webhook_that_answers_too_slowly_is_left(
    pool: ParallelPool,
    webhook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although each of its bytes comes in time."""
    is_over = threading.Event()

    def answer_slowly(handler: Handler) -> None:
        with contextlib.suppress(OSError):
            for _ in range(40):
                handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if is_over.wait(0.1):
                    return
            handler.send_response(200)
            handler.end_headers()

    monkeypatch.setattr(Handler, "do_POST", answer_slowly)
    monkeypatch.setattr(notice, "TIMEOUT_S", 1.0)
    pool.parfor(abs, [-1], name="abs", on_end=webhook.url)
    is_over.set()
    assert "has not answered within 1 s" in caplog.text


def test_what_cannot_be_called_is_refused_before_anything_runs(pool: ParallelPool) -> None:
    def never(x: int) -> None:
        pytest.fail("it ran")

    run: Callable[..., Any] = pool.parfor
    with pytest.raises(InvalidTypeError, match="on_end=3 is neither a function"):
        run(never, [1], on_end=3)
    for url in (
        "ftp://here/a",
        "hooks.example.com",
        "https://me:secret@here/",
        "http://a b",
        "http:/",
    ):
        with pytest.raises(InvalidValueError, match="must begin with http") as caught:
            run(never, [1], on_end=url)
        assert "secret" not in str(caught.value)


def test_a_search_tells_its_trials(pool: ParallelPool, webhook: Webhook) -> None:
    heard: list[Any] = []
    space = {"x": search.uniform(1, 2)}
    found = pool.search(lambda config: config["x"], space, num_trials=2, on_end=heard.append)
    assert [each.best for each in heard] == [found.best]
    with pytest.raises(LookupError):
        pool.search(lambda config: {}["x"], space, num_trials=2, on_end=webhook.url)
    (got,) = webhook.got
    assert (got["state"], got["failed"], got["error"]) == ("failed", 2, "KeyError: 'x'")
    with pytest.raises(InvalidTypeError, match="on_end"):
        pool.search(dict, space, num_trials=1, on_end=1)  # type: ignore[arg-type]


def test_durations_stay_when_results_are_made_again(tmp_path: Path) -> None:
    """Those of a trial that an earlier call began, too."""
    num_epochs = 0

    def train(config: dict[str, Any]) -> None:
        nonlocal num_epochs
        for epoch in range((load_checkpoint() or 0) + 1, 4):
            num_epochs += 1
            if num_epochs == 7:
                raise KeyboardInterrupt
            save_checkpoint(epoch)
            report(epoch=epoch, loss=config["x"] / epoch)

    seen: list[list[float]] = []
    with parpool(profile="inline", quiet=True) as pool:
        begun, rest = (
            functools.partial(
                pool.search,
                train,
                {"x": search.uniform(0, 1)},
                metric="loss",
                num_trials=3,
                stop=search.halving(max_epochs=3),
                seed=1,
                run_dir=tmp_path,
                on_end=on_end,
            )
            for on_end in (None, lambda found: seen.append(durations(found.results)))
        )
        with pytest.raises(KeyboardInterrupt):
            begun()
        before = durations(load_results(tmp_path))
        now = durations(rest().results)
    assert any(0 < old < new for old, new in zip(before, now, strict=True)), "one has gone on"
    assert seen == [now]
    assert durations(load_results(tmp_path)) == pytest.approx(now)


def durations(results: Results[Any]) -> list[float]:
    return results.to_frame()["duration_s"].tolist()


def test_commands_notify(webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("of_on_end.py").write_text("def train(config):\n    return config['x']\n")
    Path("configs.csv").write_text("x\n1\n2\n")
    Path("space.toml").write_text("x = {uniform = [0, 1]}\n")

    def run(*words: str, url: str = webhook.url) -> int:
        options = ["--profile", "inline", "--notify", url]
        command, configs, *rest = words
        return (
            CliRunner()
            .invoke(main, [command, "of_on_end:train", configs, *rest, *options])
            .exit_code
        )

    try:
        assert run("sweep", "configs.csv", "--run-dir", "a") == 0
        assert run("search", "space.toml", "--run-dir", "b", "--num-trials", "3") == 0
        assert run("sweep", "configs.csv", "--run-dir", "a", url="here") == 2
    finally:
        sys.modules.pop("of_on_end", None)
    assert [(got["label"], got["finished"]) for got in webhook.got] == [("train", 2), ("train", 3)]
    assert Path(webhook.got[0]["run_dir"]).name == "a"
