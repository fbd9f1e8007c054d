"""The live page in a real browser: it follows a sweep of another process, and its buttons act."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import load_results, parpool
from raypool.journal.live import notes_in
from tests.integration import browser as browsers
from tests.integration.browser import complaints, requests
from tests.leaks import poll as eventually

browser = browsers.browser

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

SWEEP = """
import sys, time
from pathlib import Path
from raypool import current_task, parpool, report

gates, hostile, num_epochs = Path({gates!r}), {hostile!r}, 30

def train(config):
    item = config["item"]
    print("output of", item, hostile)
    for epoch in range(num_epochs):
        report(epoch=epoch, loss=config["lr"] / (epoch + 1), **{{hostile: item}})
    while item in (0, 1, 39) and not (gates / str(item)).exists():
        if current_task().should_stop:
            return "stopped"
        time.sleep(0.01)
    if item == 2 and not (gates / "mended").exists():
        raise ValueError(hostile)
    return hostile

if __name__ == "__main__":
    configs = [{{"item": item, "lr": 1 / (item + 1), hostile: hostile}} for item in range(40)]
    with parpool(2, profile="threads", quiet=True) as pool:
        pool.parfor(train, configs, run_dir={run_dir!r}, on_error="collect")
"""
"""Items 0, 1 and 39 wait for a gate, and item 2 fails until it is mended."""

Start = Callable[..., Any]


class Watched:
    """A sweep in a process of its own, its server in another one, and its page in the browser."""

    def __init__(self, browser: Any, start_python: Start, folder: Path) -> None:
        self.browser = browser
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.run_dir = folder / HOSTILE.replace("/", "")
        with parpool(1, profile="inline", quiet=True) as pool:
            configs = [{"item": 0, "lr": 1.0, HOSTILE: HOSTILE}, {"item": 1, "lr": 7.0}]
            pool.parfor(repr, configs, run_dir=folder / "older")
        names = {"gates": str(self.gates), "hostile": HOSTILE, "run_dir": str(self.run_dir)}
        self.sweep = start_python(SWEEP.format(**names))
        assert eventually(lambda: (self.run_dir / "journal.sqlite").exists())
        arguments = ["watch", str(folder)]
        self.server = start_python(f"from raypool.cli.main import main; main({arguments!r})")
        printed = iter(self.server.process.stdout.readline, "")
        self.address = next(
            found[0] for line in printed if (found := re.search(r"http://127\S+", line))
        )
        complaints(browser), requests(browser)  # those of other tests
        browser.get(self.address)
        assert eventually(lambda: self.js("return document.querySelector('.dt-length select')"))
        self.choose(".dt-length select", "100")
        assert eventually(lambda: self.text("#items").count(f"ValueError: {HOSTILE}") == 0)

    def js(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def text(self, selector: str) -> str:
        """Return the text of an element; empty if it is hidden or does not exist."""
        code = "return document.querySelector(arguments[0])?.innerText ?? ''"
        found: str = self.js(code, selector)
        return found

    def choose(self, selector: str, value: str) -> None:
        self.js(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            " for (const kind of ['input', 'change'])"
            " field.dispatchEvent(new Event(kind, { bubbles: true }));",
            selector,
            value,
        )

    def cells(self, heading: str) -> dict[int, str]:
        """Return a column of the table by item, as it is shown."""
        code = """
        const titles = [...document.querySelectorAll("#items thead tr:first-child th")];
        const at = titles.findIndex((cell) => cell.innerText.trim() === arguments[0]);
        const rows = [...document.querySelectorAll("#items tbody tr[id]")];
        return rows.map((row) => [Number(row.id.slice(5)), row.cells[at]?.innerText]);
        """
        return dict(self.js(code, heading))

    def is_item(self, item: int, status: str) -> bool:
        return self.cells("status").get(item) == status

    def select(self, item: int) -> None:
        if self.text("#item-title") != f"Item {item}":  # else a click would deselect it
            self.js(f"document.querySelector('#item-{item} td.mark').click()")
        assert eventually(lambda: self.text("#item-title") == f"Item {item}")

    def press(self, item: int, action: str) -> None:
        from selenium.webdriver.common.by import By

        self.select(item)
        button = self.browser.find_element(By.CSS_SELECTOR, f"[data-action={action}]")
        assert eventually(button.is_displayed)
        button.click()
        if action == "cancel":
            self.browser.find_element(By.ID, "confirm-yes").click()
        assert eventually(lambda: f"{action}\t{item}\tdone" in self.text("#actions")), self.text(
            "body"
        )

    def buttons(self) -> list[str]:
        """Return the labels of the buttons that act."""
        code = """
        const buttons = [...document.querySelectorAll("button.acts")];
        return buttons.filter((it) => it.offsetParent !== null).map((it) => it.innerText);
        """
        found: list[str] = self.js(code)
        return found

    def check(self) -> None:
        """Make sure that no text of the user's was taken for HTML, and nothing came from afar."""
        assert self.js("return window.hacked") is None
        assert complaints(self.browser) == []
        origin = self.address.partition("/")[0] + "//" + self.address.split("/")[2]
        asked = {it for it in requests(self.browser) if not it.startswith((origin, "data:"))}
        assert asked == set()


@pytest.fixture
def watched(browser: Any, start_python: Start, tmp_path: Path) -> Iterator[Watched]:
    yield Watched(browser, start_python, tmp_path)
    browser.get("about:blank")  # else the page would miss its server, and say so in the next test
    complaints(browser)


def test_a_sweep_is_followed_to_its_end_and_obeys_the_buttons(watched: Watched) -> None:
    assert eventually(lambda: watched.is_item(0, "running") and watched.is_item(1, "running"))
    assert eventually(lambda: list(watched.cells("status")) == list(range(40)))
    assert watched.is_item(39, "waiting")

    watched.press(39, "first")
    watched.press(0, "stop")
    assert eventually(lambda: watched.is_item(0, "finished") and watched.is_item(39, "running"))
    watched.press(1, "cancel")
    assert eventually(lambda: watched.is_item(1, "cancelled"))
    assert eventually(lambda: watched.is_item(2, "failed"))
    watched.select(2)
    assert eventually(lambda: HOSTILE in watched.text("#item-error-text"))
    (watched.gates / "mended").touch()
    watched.press(2, "rerun")
    assert eventually(lambda: watched.is_item(2, "finished"))

    watched.select(5)
    assert eventually(lambda: f"output of 5 {HOSTILE}" in watched.text("#item-output"))
    watched.js("document.getElementById('item-note').value = arguments[0]", HOSTILE)
    watched.js(
        "document.getElementById('item-note').dispatchEvent(new Event('change'));"
        " document.getElementById('item-star').click()"
    )
    watched.choose("#filter", f'star and note == "{HOSTILE}" and lr < 0.2')
    assert eventually(lambda: watched.cells("note") == {5: HOSTILE})
    watched.choose("#filter", "lr <")
    assert watched.text("#filter-error").startswith("A value or a column is missing")

    watched.choose("#filter", "")
    watched.choose("#curve-metric", "loss")
    watched.choose("#curve-step", "epoch")
    watched.js("document.getElementById('curves').scrollIntoView()")
    drawn = "return document.getElementById('curves').data?.map(({name, x, y}) => [name, x, y])"
    epochs = list(range(30))
    expected = [["item 5", epochs, [pytest.approx(1 / 6 / (epoch + 1)) for epoch in epochs]]]
    assert eventually(lambda: watched.js(drawn) == expected), watched.js(drawn)

    watched.js("document.getElementById('timeline').scrollIntoView()")
    bars = "return document.getElementById('timeline').data?.flatMap(({ x }) => x).length ?? 0"
    assert eventually(lambda: watched.js(bars) == 40), "38 finished, 1 failed, 1 running"

    watched.select(1)
    assert eventually(lambda: watched.buttons() == ["Stop the sweep", "Rerun"])
    (watched.gates / "39").touch()
    assert watched.sweep.finish().returncode == 0
    assert eventually(lambda: "ended" in watched.text("#summary"))
    assert "The run has ended" in watched.text("#why-not")
    assert watched.buttons() == []
    watched.check()
    statuses = load_results(watched.run_dir).to_frame()["status"].value_counts().to_dict()
    assert statuses == {"finished": 39, "missing": 1}, "the next call runs it"
    assert set(watched.cells("status").values()) == {"finished", "cancelled"}


def test_runs_are_compared_and_the_page_says_when_a_sweep_or_the_server_is_gone(
    watched: Watched,
) -> None:
    assert eventually(lambda: watched.is_item(0, "running"))
    assert eventually(lambda: list(watched.cells("status")) == list(range(40)))
    older = "return [...document.querySelectorAll('#other option')].find((it) => it.text === 'older')?.value"
    assert eventually(lambda: watched.js(older))
    watched.choose("#other", watched.js(older))
    counts = f"Configurations in both: 1. Only in {watched.run_dir.name}: 39. Only in older: 1."
    assert eventually(lambda: watched.text("#comparison-note") == counts)

    watched.select(0)
    assert eventually(lambda: watched.buttons() == ["Stop the sweep", "Stop", "Cancel"])
    watched.sweep.process.kill()
    watched.sweep.process.wait()
    assert eventually(lambda: "interrupted" in watched.text("#summary"))
    assert "The process of the run is gone" in watched.text("#why-not")
    assert watched.buttons() == []
    watched.js(
        "document.querySelector('#runs tbody tr:not([aria-current]) button').click();"
        " document.querySelector('#item-1 button.star').click()"
    )
    assert eventually(lambda: watched.cells("status") == {0: "finished", 1: "finished"})
    assert watched.text("#item-title") == "Item", "nothing is selected there"
    assert eventually(lambda: notes_in(watched.run_dir)), "of the run that was still shown"
    assert notes_in(watched.run_dir.parent / "older") == {}
    watched.check()
    watched.server.process.kill()
    assert eventually(lambda: "cannot be reached" in watched.text("#lost"))
    complaints(watched.browser)  # the connection


def test_seven_tabs_follow_a_run_whatever_its_fields_are_called(
    browser: Any, tmp_path: Path
) -> None:
    """A browser has six connections to a server. Each object of a script has a constructor."""
    first = browser.current_window_handle
    js = browser.execute_script
    with parpool(1, profile="inline", quiet=True) as pool:
        configs = [{"constructor": 5, "lr": lr} for lr in (1, 2)]
        pool.parfor(lambda config: {"loss": config["lr"]}, configs, run_dir=tmp_path / "run")
        page = pool.watch()
        complaints(browser)
        for number in range(7):
            if number:
                browser.switch_to.new_window("tab")
            browser.get(page.url)
            assert eventually(lambda: "ended" in js("return document.body.innerText"))
        for tab in {*browser.window_handles} - {first}:
            browser.switch_to.window(tab)
            browser.close()
        browser.switch_to.window(first)
        js("document.querySelector('#item-1 td.mark').click()")
        text = "return document.getElementById('item-config').innerText"
        expected = ["configuration\tthis item\tthe best", "constructor\t5\t5", "lr\t2\t1"]
        assert eventually(lambda: js(text).splitlines() == expected), js(text)
        assert complaints(browser) == []
        browser.get("about:blank")
