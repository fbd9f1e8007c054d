"""The documentation's site, built as `make check` builds it, and looked at in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import raypool
from tests.documents import ROOT
from tests.integration.browser import browser, complaints, requests, serve  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Page(HTMLParser):
    """What a page leads to, what it fetches, and where in it a link can lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if place := values.get("id"):
            self.anchors.add(place)
        if (target := values.get("href")) and tag in ("a", "link"):
            (self.links if tag == "a" else self.fetched).add(target)
        if source := values.get("src"):
            self.fetched.add(source)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_all_links_lead_somewhere(pages: dict[Path, Page], site: Path) -> None:
    """Those between documents, to names in the reference, and to places on a page."""
    astray = defaultdict(list)
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if target.is_dir():
                target /= "index.html"
            is_there = target.exists() and (
                not address.fragment
                or target not in pages
                or has_place(pages[target], address.fragment)
            )
            if not is_there:
                astray[path.relative_to(site).as_posix()].append(link)
    assert not astray


def has_place(page: Page, fragment: str) -> bool:
    return unquote(fragment) in page.anchors or fragment == "__skip"


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    assert len(pages) > 25
    for path, page in pages.items():
        assert not [target for target in page.fetched if urlsplit(target).netloc], path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_public_name_has_its_place(pages: dict[Path, Page], site: Path) -> None:
    places = set().union(*(page.anchors for path, page in pages.items() if "api" in path.parts))
    assert {f"raypool.{name}" for name in raypool.__all__} <= places
    assert {
        "raypool.ParallelPool.parfor",
        "raypool.Future.cancel",
        "raypool.Results.to_frame",
    } <= places
    found = {
        entry["location"]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert "docs/api/pools.html#raypool.parpool" in found
    assert any(place.startswith("docs/durable.html#") for place in found)


def test_a_browser_shows_it(site: Path, browser: Any, serve: Callable[[Path], str]) -> None:  # noqa: F811
    """Each kind of page loads without a complaint, and without asking anybody else; what is looked
    for is found.
    """
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    root = serve(site)
    for page, title in [
        ("index.html", "raypool"),
        ("docs/durable.html", "Resumable sweeps"),
        ("docs/faults.html", "Failure modes"),
        ("notebooks/01_many_models_at_once.html", "Many models at once"),
        ("examples/watch_a_sweep.html", "watch_a_sweep.py"),
        ("docs/api/command_line.html", "Command line"),
    ]:
        browser.get(f"{root}/{page}")
        assert browser.find_element(By.TAG_NAME, "h1").text.startswith(title)
        assert complaints(browser) == []
    browser.get(f"{root}/index.html")
    # it searches anew with each letter
    torn = [NoSuchElementException, StaleElementReferenceException]
    wait = WebDriverWait(browser, 300, ignored_exceptions=torn)
    wait.until(
        lambda _: browser.find_element(
            By.CSS_SELECTOR, "[data-md-component=search-query]"
        ).is_displayed()
    )
    browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(
        "parfeval_on_all"
    )
    selector = ".md-search-result__link[href*='ParallelPool.parfeval_on_all']"
    browser.get(
        wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, selector).get_attribute("href"))
    )
    heading = browser.find_element(By.ID, "raypool.ParallelPool.parfeval_on_all")
    signature = heading.find_element(By.XPATH, "following-sibling::div[1]")
    assert "fn: Callable" in signature.text
    assert "sticky: bool = False" in signature.text
    assert complaints(browser) == []
    assert all(url.startswith((root, "data:", "blob:")) for url in requests(browser))
