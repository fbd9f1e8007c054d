"""The page of `Results.report` in a real browser: it loads without a complaint, sorts, filters, and
asks nobody for anything.
"""

from __future__ import annotations

import base64
import functools
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raypool import (
    Results,
    current_task,
    load_checkpoint,
    load_results,
    parpool,
    report,
    save_checkpoint,
    search,
)
from tests.integration import browser as browsers
from tests.integration.browser import complaints, requests
from tests.integration.test_live_view import run_cells
from tests.leaks import poll as eventually

browser = browsers.browser

HEADINGS = "#items thead tr:first-child th"

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&"


def train(config: dict[str, Any]) -> dict[str, Any]:
    for epoch in range(4):
        report(epoch=epoch, loss=config["lr"] / (epoch + 1))
    if config["lr"] == 0.3:
        raise ValueError(HOSTILE)
    return {"accuracy": 1 - config["lr"], "name": HOSTILE}


@pytest.fixture(scope="module")
def results() -> Results:
    configs = [
        {"lr": lr, "network": network, HOSTILE: lr}
        for lr in (0.2, 0.1, 0.3, 10)
        for network in ("cnn", "mlp")
    ]
    with parpool(2, profile="threads", quiet=True) as pool:
        found: Results = pool.parfor(train, configs, on_error="collect")
        return found


def headings(browser: Any) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((cell) => cell.innerText.trim())",
        HEADINGS,
    )
    return found


def cells(browser: Any, heading: str) -> list[str]:
    """Return what stands in a column of the table, as it is shown."""
    found: list[str] = browser.execute_script(
        """
        const rows = document.querySelectorAll("#items tbody tr");
        return [...rows].map((row) => row.cells[arguments[0]].innerText);
        """,
        headings(browser).index(heading),
    )
    return found


def open_page(browser: Any, path: Path) -> None:
    complaints(browser), requests(browser)  # those of other tests
    browser.get(path.as_uri())
    assert eventually(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#items tbody tr').length") > 0
        )
    )
    for chart in browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map((chart) => chart.id)"
    ):
        browser.execute_script("document.getElementById(arguments[0]).scrollIntoView()", chart)
        assert eventually(functools.partial(is_drawn, browser, chart))


@pytest.fixture(scope="module")
def written(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a page; it takes seconds to load, so tests share it."""
    return results.report(tmp_path_factory.mktemp("page") / "sweep.html", title=HOSTILE)


@pytest.fixture
def page(browser: Any, written: Path) -> Iterator[Any]:
    """Give the browser with that page, loaded if it is not there already. A test that filters it
    takes that back.
    """
    if browser.current_url != written.as_uri():
        open_page(browser, written)
    yield browser
    assert complaints(browser) == []


def test_it_loads_without_a_complaint_and_asks_nobody(browser: Any, written: Path) -> None:
    open_page(browser, written)
    assert browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length") == 4
    assert complaints(browser) == []
    assert {address.partition(":")[0] for address in requests(browser)} <= {"file", "data", "blob"}
    browser.execute_async_script(  # an image that fails after all others
        "Object.assign(new Image(), { onerror: () => arguments[0](), src: 'data:,' })"
    )
    assert browser.execute_script("return window.hacked") is None
    assert (
        browser.execute_script("return document.querySelectorAll('[data-title*=hare]').length") == 0
    ), "nothing sends data away"


def is_drawn(browser: Any, chart: str) -> bool:
    found: bool = browser.execute_script(
        "return document.getElementById(arguments[0]).classList.contains('js-plotly-plot')", chart
    )
    return found


EXTENTS = """
const boxes = [...document.querySelectorAll(arguments[0])].map((mark) => mark.getBoundingClientRect());
return boxes.map(({ width, height }) => [width, height]);
"""

PIXELS = """
return [...document.querySelectorAll("#coordinates .gl-container canvas")].map((drawn) => {
  const copy = Object.assign(document.createElement("canvas"), { width: drawn.width, height: drawn.height }).getContext("2d");
  copy.drawImage(drawn, 0, 0);
  return copy.getImageData(0, 0, drawn.width, drawn.height).data.filter((part, i) => i % 4 === 3 && part > 0).length;
});
"""
"""How many pixels of each canvas of the parallel coordinates are not transparent."""


def test_every_chart_has_drawn_something(page: Any) -> None:
    def wide(marks: str) -> int:
        return sum(
            width > 1 and height > 1 for width, height in page.execute_script(EXTENTS, marks)
        )

    assert eventually(lambda: wide("#curves .scatterlayer .js-line") == 8), "a line for each item"
    assert eventually(
        lambda: (
            sum(height > 5 for _, height in page.execute_script(EXTENTS, "#timeline .bars path"))
            >= 2
        )
    )
    assert eventually(lambda: wide("#concurrency .scatterlayer path") >= 1)
    assert eventually(lambda: max(page.execute_script(PIXELS), default=0) > 1000), (
        page.execute_script(PIXELS)
    )
    assert complaints(page) == []


def colours_of(browser: Any) -> int:
    """Return how many colours there are on the whole page, also below the window."""
    from PIL import Image

    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    wanted = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"]
    return len(Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB").getcolors(2**24) or ())


def test_the_page_is_not_blank(page: Any) -> None:
    assert eventually(lambda: colours_of(page) > 100)


def test_numbers_sort_as_numbers_and_the_best_item_comes_first(page: Any) -> None:
    from selenium.webdriver.common.by import By

    assert cells(page, "lr") == ["0.1", "0.1", "0.2", "0.2", "10", "10", "0.3", "0.3"]
    heading = page.find_elements(By.CSS_SELECTOR, HEADINGS)[headings(page).index("lr")]
    heading.click()
    assert eventually(
        lambda: cells(page, "lr") == ["0.1", "0.1", "0.2", "0.2", "0.3", "0.3", "10", "10"]
    )
    heading.click()
    assert eventually(
        lambda: cells(page, "lr") == ["10", "10", "0.3", "0.3", "0.2", "0.2", "0.1", "0.1"]
    )


def test_an_item_that_diverged_sorts_last_and_leaves_the_metric_to_the_charts(
    browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By

    losses = [9.5, 10.25, -math.inf, 100.5, math.inf, 2.25]
    configs = [{"loss": loss, "clip": clip} for loss in losses for clip in (1.0, math.inf)]
    with parpool(profile="inline", quiet=True) as pool:
        found = pool.parfor(lambda config: {"final": config["loss"]}, configs)
        open_page(browser, found.report(tmp_path / "page.html"))
    browser.find_elements(By.CSS_SELECTOR, HEADINGS)[headings(browser).index("final")].click()
    expected = ["-inf", "2.25", "9.5", "10.25", "100.5", "inf"]
    assert eventually(lambda: cells(browser, "final")[::2] == expected)
    code = "return [...document.getElementById('coordinates-metric').options].map((it) => it.value)"
    assert browser.execute_script(code) == ["final", "duration_s"]
    code = """
    const [{ dimensions, line }] = document.getElementById("coordinates").data;
    return [dimensions.map(({ ticktext }) => ticktext), line.color];
    """
    ticks, colors = browser.execute_script(code)
    assert sorted(colors) == [2.25, 2.25, 9.5, 9.5, 10.25, 10.25, 100.5, 100.5]
    assert ["1", "inf"] in ticks, "as a field of configurations it has a place"
    assert complaints(browser) == []


def curves_drawn(page: Any) -> int:
    count: int = page.execute_script("return document.getElementById('curves').data.length")
    return count


def choose(page: Any, name: str, value: str) -> None:
    page.execute_script(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        " for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind));",
        name,
        value,
    )


def test_the_search_filters_the_table_and_the_charts(page: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    assert curves_drawn(page) == 8
    field = page.find_element(By.CSS_SELECTOR, "div.dt-search input")
    field.send_keys("mlp")
    assert eventually(lambda: cells(page, "network") == ["mlp"] * 4)
    assert eventually(lambda: sorted(items_drawn(page)) == [1, 3, 5, 7])
    field.send_keys(Keys.BACKSPACE * len("mlp"))
    assert eventually(lambda: curves_drawn(page) == 8)
    field.send_keys("ValueError: </script>")
    assert eventually(lambda: cells(page, "status") == ["failed"] * 2)
    field.send_keys(Keys.BACKSPACE * len("ValueError: </script>"))
    assert eventually(lambda: curves_drawn(page) == 8)


def coordinates_drawn(page: Any) -> int:
    count: int = page.execute_script(
        "return document.querySelectorAll('#coordinates canvas').length"
    )
    return count


def test_a_column_can_be_filtered(page: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    at = headings(page).index("status")
    fields = page.find_elements(By.CSS_SELECTOR, "#items thead tr:nth-child(2) :is(th, td)")[at]
    field = fields.find_element(By.CSS_SELECTOR, "input")
    field.send_keys("failed")
    assert eventually(lambda: cells(page, "status") == ["failed"] * 2)
    assert eventually(lambda: not coordinates_drawn(page)), "none of these has an accuracy"
    assert page.execute_script(
        "return document.getElementById('coordinates-note').innerText"
    ).startswith("No item")
    field.send_keys(Keys.BACKSPACE * len("failed"))
    assert eventually(lambda: coordinates_drawn(page) > 0)


def test_values_that_are_too_close_to_be_written_beside_each_other_have_round_ticks_instead(
    page: Any,
) -> None:
    axes = (
        "return document.getElementById('coordinates').data[0].dimensions.map((axis) =>"
        " [axis.label, axis.ticktext ?? null])"
    )
    written = dict(page.execute_script(axes))
    assert sorted(written["lr"]) == ["0.1", "0.2", "10"]
    assert written["accuracy"] is None, "0.8, 0.9 and -9"


@pytest.mark.parametrize("width", [1400, 420])
def test_it_fits_into_the_window_light_and_dark(page: Any, width: int) -> None:
    colours = set()
    is_dark = "return document.documentElement.classList.contains('dark')"
    try:
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        for scheme in ("light", "dark"):
            page.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            assert eventually(lambda: page.execute_script(is_dark) == (scheme == "dark"))  # noqa: B023 - called at once
            colours.add(
                page.execute_script("return getComputedStyle(document.body).backgroundColor")
            )
            assert eventually(
                lambda: page.execute_script("return document.documentElement.scrollWidth") <= width
            )
    finally:  # other tests have the same browser
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(colours) == 2


def test_another_metric_can_be_chosen(page: Any) -> None:
    choose(page, "coordinates-metric", "duration_s")
    labels = page.execute_script(
        "return document.getElementById('coordinates').data[0].dimensions.map((axis) => axis.label)"
    )
    assert labels[0] == "lr"
    assert labels[-1] == "duration_s"


# --- other pages ----------------------------------------------------------------------------------


def test_a_chart_below_the_window_is_drawn_when_somebody_gets_near_it(
    browser: Any, written: Path
) -> None:
    """All charts at once, and plotly itself, would keep the table of a large page for seconds."""
    browser.get(written.as_uri())
    assert eventually(lambda: browser.execute_script("return window.Plotly !== undefined"))
    browser.execute_async_script(  # what is near the window is drawn by then
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))"
    )
    assert not is_drawn(browser, "concurrency")
    browser.execute_script("document.getElementById('concurrency').scrollIntoView()")
    assert eventually(lambda: is_drawn(browser, "concurrency"))
    assert complaints(browser) == []


BOXES = """
for (const details of document.querySelectorAll("details")) details.open = true;
return [...document.querySelectorAll("#items .error, summary .error, pre")].map((box) => ({
  text: box.textContent,
  hidden: box.scrollWidth - box.clientWidth,
  right: box.getBoundingClientRect().right, // without scrolling sideways
  scrolls: getComputedStyle(box).overflowY === "auto",
}));
"""
"""The boxes that have the text of an error: in the table, and in the list of failures twice."""


def test_no_error_is_cut_however_long_and_narrow(browser: Any, tmp_path: Path) -> None:
    text = "begin " + "x" * 1500 + "\n" + "words and lines\n" * 200 + "end"

    def fail(item: dict[str, float]) -> None:
        raise ValueError(text)

    with parpool(1, profile="inline", quiet=True) as pool:
        found = pool.parfor(fail, [{f"field {i}": i / 7 for i in range(20)}], on_error="collect")
    path = found.report(tmp_path / "page.html")
    try:
        for width in (1280, 390):
            window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
            open_page(browser, path)
            boxes = browser.execute_script(BOXES)
            assert len(boxes) == 3
            for box in boxes:
                assert f"ValueError: {text}" in box["text"]
                assert box["scrolls"]
                assert box["hidden"] <= 0
                assert box["right"] <= width
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints(browser) == []


def items_drawn(page: Any) -> list[int]:
    found: list[str] = page.execute_script(
        "return document.getElementById('curves').data.map((line) => line.hovertemplate ?? '')"
    )
    return [int(text.split()[1].strip(":")) for text in found if text]


def test_the_ten_best_curves_are_drawn_until_others_are_chosen(
    browser: Any, tmp_path: Path
) -> None:
    def descend(config: dict[str, Any]) -> dict[str, float]:
        report(loss=1.0)
        report(loss=1 - config["rate"])
        return {"loss": 1 - config["rate"]}

    items = [
        {"is_long": item > 9, "seed": 0, "rate": item / 100, "network": "abc"[item % 3]}
        for item in range(24)
    ]
    color = "return document.getElementById('curve-color').value"
    with parpool(1, profile="inline", quiet=True) as pool:
        constant = pool.parfor(descend, items[-1:] * 3)
        found = pool.parfor(descend, items)
    open_page(browser, constant.report(tmp_path / "page.html"))
    assert browser.execute_script(color) == "rank by loss", "no field varies"
    open_page(browser, found.report(tmp_path / "page.html"))
    assert browser.execute_script(color) == "rate", "is_long does not vary among those drawn"

    assert items_drawn(browser) == list(range(23, 13, -1))
    for choice, drawn in (("-10", range(9, -1, -1)), ("24", range(23, -1, -1)), ("named", ())):
        choose(browser, "curve-items", choice)
        assert items_drawn(browser) == list(drawn)
    choose(browser, "curve-numbers", "3, 7-9 x 99")
    assert items_drawn(browser) == [9, 8, 7, 3]
    assert complaints(browser) == []


def test_items_that_lack_a_field_are_drawn_with_those_that_they_have(
    browser: Any, tmp_path: Path
) -> None:
    """Resumed with a renamed field, a run has items of both kinds."""
    layers = [(128, 256, 512, 1024), (128, 256, 512, 2048)]
    items = [{"hidden": i, "layers": layers[i % 2]} for i in range(4)]
    items += [{"width": i, "layers": layers[i % 2]} for i in range(5)]

    def train(config: dict[str, Any]) -> dict[str, int]:
        return {"score": 10 // config.get("width", 1)}

    with parpool(1, profile="inline", quiet=True) as pool:
        found = pool.parfor(train, items, on_error="collect")
    open_page(browser, found.report(tmp_path / "page.html"))

    axes = browser.execute_script(
        "return document.getElementById('coordinates').data[0].dimensions.map((axis) =>"
        " [axis.label, axis.values, axis.tickvals, axis.ticktext])"
    )
    assert [label for label, *_ in axes] == ["hidden", "layers", "width", "score"]
    for label, values, places, ticks in axes[:-1]:
        at = dict(zip(places, ticks, strict=True))
        assert [at[value] for value in values] == [
            str(item.get(label, "none")).replace(", ", ",")
            for item in items
            if item.get("width") != 0
        ]
    assert min(axes[0][2]) < 0, "below the values"
    note = browser.execute_script("return document.getElementById('coordinates-note').innerText")
    assert note.startswith("1 of 9 items have no score and are left out.")
    assert complaints(browser) == []


def test_the_page_of_a_search_has_its_best_so_far_and_marks_pruned_trials(
    browser: Any, tmp_path: Path
) -> None:
    def searched(config: dict[str, Any]) -> float:
        for epoch in range(4):
            report(epoch=epoch, quality=config["x"] * (epoch + 1))
            if current_task().should_stop:
                break
        return config["x"] * (epoch + 1)

    space = {"x": search.uniform(0, 1), "kind": search.choice("a", "b")}
    stop = lambda metrics: metrics["quality"] < 0.5  # noqa: E731
    with parpool(2, profile="threads", quiet=True) as pool:
        found = pool.search(
            searched,
            space,
            metric="quality",
            mode="max",
            num_trials=12,
            seed=1,
            stop=stop,
            run_dir=tmp_path,
        )
    num_pruned = int((found.to_frame()["state"] == "pruned").sum())
    assert 0 < num_pruned < 12
    open_page(browser, load_results(tmp_path).report(tmp_path / "page.html"))

    assert cells(browser, "state") == ["complete"] * (12 - num_pruned) + ["pruned"] * num_pruned
    assert cells(browser, "index")[0] == str(found.best.number)
    for over, title in (("trials", "trial"), ("time", "run time [")):
        choose(browser, "best-so-far-over", over)
        charts = "const { data, layout } = document.getElementById('best-so-far');"
        traces, axis = browser.execute_script(
            f"{charts} return [data.map(({{ name, x, y }}) => [name, x, y]), layout.xaxis.title.text]"
        )
        assert axis.startswith(title)
        assert [name for name, *_ in traces] == [
            f"complete ({12 - num_pruned})",
            f"pruned ({num_pruned})",
            "best so far",
        ]
        [_, _, pruned], [_, places, best] = traces[1:]
        assert len(pruned) == num_pruned
        assert best[-1] == pytest.approx(found.best.score)
        assert places == sorted(places)
    labels, metric = browser.execute_script(
        "return [document.getElementById('coordinates').data[0].dimensions.map((axis) => axis.label),"
        " document.getElementById('coordinates-metric').value]"
    )
    assert labels == ["x", "kind", "state", "quality"]
    assert metric == "quality"
    assert complaints(browser) == []


def test_the_page_of_an_empty_run_loads_without_a_complaint(browser: Any, tmp_path: Path) -> None:
    with parpool(1, profile="inline", quiet=True) as pool:
        path = pool.parfor(train, []).report(tmp_path / "empty.html")
    complaints(browser), requests(browser)
    browser.get(path.as_uri())
    assert "There are no items" in browser.execute_script("return document.body.innerText")
    assert complaints(browser) == []
    assert {address.partition(":")[0] for address in requests(browser)} <= {"file", "data", "blob"}


@pytest.mark.parametrize(
    ("fn", "items"),
    [
        pytest.param(abs, [-3], id="one", marks=pytest.mark.long),
        pytest.param(lambda x: 1 / 0, [1, 2, 3], id="all failed", marks=pytest.mark.long),
        pytest.param(lambda config: None, [{"a": {"b": 1}}, {"a": {"b": "x"}}], id="mixed"),
    ],
)
def test_other_runs_load_without_a_complaint(
    browser: Any, tmp_path: Path, fn: Callable[[Any], Any], items: list[Any]
) -> None:
    with parpool(2, profile="threads", quiet=True) as pool:
        path = pool.parfor(fn, items, on_error="collect").report(tmp_path / "page.html")
    open_page(browser, path)

    assert len(cells(browser, "status")) == len(items)
    assert complaints(browser) == []


def test_a_notebook_shows_the_timeline_also_without_pyplot(tmp_path: Path) -> None:
    make = (
        "from raypool import parpool\nwith parpool(profile='inline', quiet=True) as pool:\n   "
        " results = pool.parfor(abs, [1])"
    )
    svg = "%matplotlib inline\n%config InlineBackend.figure_formats = ['svg']"

    _, outputs = run_cells(
        [make, "results.timeline()", svg, "results.timeline()"], tmp_path / "gate", tmp_path
    )

    kinds = [
        [set(output["data"]) for output in cell if output["output_type"] == "execute_result"]
        for cell in outputs
    ]
    assert kinds[1] == [{"image/png", "text/plain"}]
    assert kinds[3] == [{"image/svg+xml", "text/plain"}], "what the user has chosen stays"


def test_the_page_of_a_population_shows_who_took_over_from_whom(
    browser: Any, tmp_path: Path
) -> None:
    def train(config: dict[str, Any]) -> None:
        first = load_checkpoint() or 0
        for epoch in range(first, 6):
            report(epoch=epoch, quality=config["x"] * (epoch + 1))
            if current_task().should_stop:
                save_checkpoint(epoch + 1)
                break

    stop = search.population(size=4, every=2, max_epochs=6)
    with parpool(profile="inline", quiet=True) as pool:
        found = pool.search(
            train,
            {"x": search.uniform(0, 1)},
            metric="quality",
            mode="max",
            stop=stop,
            seed=0,
            run_dir=tmp_path,
        )
    taken = found.to_frame().set_index("trial")["parent"].dropna().astype(int).to_dict()
    assert taken
    open_page(browser, load_results(tmp_path).report(tmp_path / "page.html"))
    choose(browser, "best-so-far-over", "epochs")
    lines = dict(
        browser.execute_script(
            "return document.getElementById('best-so-far').data.map(({ name, x, y }) => [name, [x, y]])"
        )
    )
    for child, parent in taken.items():
        (before,) = [
            points for name, points in lines.items() if name.split(",")[0] == f"trial {parent}"
        ]
        epochs, scores = lines[f"trial {child}, from trial {parent}"]
        assert (epochs[0], scores[0]) in zip(*before, strict=True)
        assert epochs == [*range(epochs[0], epochs[-1] + 1)]
    assert complaints(browser) == []
