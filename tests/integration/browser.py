"""A real browser for the tests that look at pages: headless Chromium, with no network but this
machine's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--use-angle=swiftshader",  # WebGL on the cores: parallel coordinates are drawn by it
    "--enable-unsafe-swiftshader",
    "--window-size=1400,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Give a Chromium; the tests are skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium with its driver here")
    with started() as driver:
        yield driver


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """Give a new Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(110)  # the driver answers within 120
    try:
        yield driver
    finally:
        driver.quit()


def complaints(browser: Any) -> list[str]:
    """Return what the console has said since the last time: warnings and errors."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] in ("WARNING", "SEVERE")
    ]


def requests(browser: Any) -> set[str]:
    """Return the addresses that the browser has asked for since the last time."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }


class Quiet(SimpleHTTPRequestHandler):
    """Gives files, and says nothing of it."""

    def log_message(self, *args: object) -> None:
        """Be silent."""


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Path], str]]:
    """Give `serve(folder)`: it lets a browser on this machine have a folder's files, and returns
    their address.
    """
    servers: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
        )
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
