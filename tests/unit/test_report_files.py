"""`Results.report` and `Results.timeline` as files: what is in them, for every kind of results, and
what is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import stat
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import InvalidValueError, Results, WorkerLostError, load_results, parpool
from raypool.channel.feed import Feed
from raypool.channel.gpu_usage import GpuSample
from raypool.errors import LossReason, RemoteTraceback
from raypool.results import Miss, Row
from raypool.views.drawing import at_once, plan

HOSTILE = "</script><script>alert(1)</script> \"q\" 'a' & <b>b</b> {{ 7 * 7 }} ü 漢 \ud800"
NAME = HOSTILE.removesuffix("\ud800")
START = 1_000.0


class Rude(Exception):
    """An exception of a user's that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def made(items: list[Any], values: list[Any], **more: Any) -> Results:
    """Return results of items that took a second each, in turns on two workers."""
    errors = more.pop("errors", {})
    rows = [
        Row(
            "failed" if i in errors else "finished",
            1.0,
            START + i // 2,
            i % 2,
            None,
            1,
            host="lab-3",
        )
        for i in range(len(items))
    ]
    return Results(items, values, lambda: rows, errors, **more)


def told(feed_rows: list[tuple[int, dict[str, Any]]]) -> Feed:
    feed = Feed()
    for time, (item, metrics) in enumerate(feed_rows):
        feed.add_row((float(time), item, 1, metrics))
    return feed


def story_of(path: Path) -> dict[str, Any]:
    """Return what the scripts of a page draw."""
    found = re.search(
        r'<script type="application/json" id="story">(.*?)</script>', path.read_text(), re.DOTALL
    )
    assert found is not None
    story: dict[str, Any] = json.loads(found[1])
    return story


def column(story: dict[str, Any], name: str) -> list[Any]:
    names = [about["name"] for about in story["table"]["columns"]]
    cells: list[Any] = story["table"]["cells"][names.index(name)]
    return cells


def own_markup(page: str) -> str:
    """Return a page without what plotly and DataTables are."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_the_page_has_the_table_and_the_summary(tmp_path: Path) -> None:
    results = made(
        [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], [{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}]
    )

    path = results.report(tmp_path / "sweep.html")

    assert path == tmp_path / "sweep.html"
    story = story_of(path)
    assert column(story, "lr") == [0.1, 0.2, 0.3]
    assert column(story, "loss") == [3.0, 2.0, 1.0]
    assert column(story, "status") == ["finished"] * 3
    text = own_markup(path.read_text())
    assert "Results of 3 items" in text
    assert "a speed-up of 1.50" in " ".join(text.split())
    assert "efficiency 75%" in text


def test_the_best_item_has_a_card(tmp_path: Path) -> None:
    items = [{"lr": 0.1, "net": {"kind": "<mlp>"}}, {"lr": 0.2, "net": {"kind": "cnn"}}]
    values = [{"loss": 3.0, "acc": {"val": 0.5}}, {"loss": 2.5, "acc": {"val": 0.4}}]
    text = own_markup(made(items, values).report(tmp_path / "sweep.html").read_text())
    card = re.search(r'<section id="best">(.*?)</section>', text, re.DOTALL)
    assert card is not None
    assert "loss = 2.5" in card[1]
    assert "in item 1" in card[1]
    assert re.findall(r'class="given">(.*?)</span>', card[1]) == [
        "lr = 0.2",
        "net.kind = cnn",
    ]
    for values in ([1, 2], [{"width": 1}, {"width": 2}]):  # no name says what is good
        page = made(items, values).report(tmp_path / "sweep.html").read_text()
        assert 'id="best"' not in page


# --- hyperparameter importance --------------------------------------------------------------------


def importance_in(path: Path) -> tuple[str, list[tuple[str, str]]] | None:
    """Return what the card says, and its fields with their numbers; None if there is none."""
    text = own_markup(path.read_text())
    card = re.search(r'<section id="importance">(.*?)</section>', text, re.DOTALL)
    if card is None:
        return None
    bars = re.findall(r"<span>(.*?)</span><i .*?></i><b>(.*?)</b>", card[1])
    return " ".join(
        re.sub("<[^>]*>", " ", card[1].partition('<div class="bars">')[0]).split()
    ), bars


ODD = [
    *(None, math.nan, math.inf, 10**400, 1.5, True, "auto"),
    *([1, 2], {"a": {1}}, np.zeros(3), object, Rude()),
]


def sweep_of(num_items: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return configurations with all kinds of fields, drawn at random."""
    random = np.random.default_rng(seed)
    return [
        {
            "lr": float(random.random()),
            "net": {"kind": str(random.choice(["cnn", "mlp", "vit"])), "depth": 3},
            "odd": ODD[random.integers(len(ODD))],
            "name": f"run {item}",
            "rare": 1 if item == 7 else None,
            "fixed": [1, 2],
        }
        for item in range(num_items)
    ]


@pytest.mark.parametrize("has_forest", [True, False])
def test_the_field_that_moved_the_metric_is_the_most_important_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_forest: bool
) -> None:
    """The best learning rate is 0.5: only a forest sees that. One item has diverged."""
    if not has_forest:
        monkeypatch.setattr("raypool.views.importance.find_spec", lambda _: None)
    items = sweep_of(200)
    losses = [
        abs(item["lr"] - 0.5) + {"cnn": 0.0, "vit": 0.1, "mlp": 0.2}[item["net"]["kind"]]
        for item in items
    ]
    losses[3] = 1e300

    path = made(items, [{"loss": loss} for loss in losses]).report(tmp_path / "page.html")

    found = importance_in(path)
    assert found is not None
    says, bars = found
    assert {name for name, _ in bars} == {"lr", "net.kind", "odd", "rare"}, "others do not vary"
    if has_forest:
        assert "Random forest (scikit-learn) on 200 items" in says
        assert [name for name, _ in bars][:2] == ["lr", "net.kind"]
    else:
        assert "Correlation on 200 items" in says
        assert (bars[0][0], float(bars[0][1]) > 0.3) == ("net.kind", True)


def test_chance_is_not_taken_for_importance(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    losses = [{"loss": float(loss)} for loss in random.random(60)]
    found = importance_in(made(sweep_of(60), losses).report(tmp_path / "noise.html"))
    assert found is not None
    assert "No field clearly affects loss" in found[0]
    assert found[1] == []
    for num_items, values in ((19, losses), (60, [{"loss": 0.5}] * 60), (60, [{"x": 1}] * 60)):
        path = made(sweep_of(num_items), values[:num_items]).report(tmp_path / "page.html")
        assert importance_in(path) is None
    failed: dict[int, BaseException] = {item: ValueError() for item in range(41)}
    values = [None if item in failed else loss for item, loss in enumerate(losses)]
    path = made(sweep_of(60), values, errors=failed).report(tmp_path / "page.html")
    assert importance_in(path) is None, "19 have finished"


def test_no_report_is_lost_over_its_importance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("built for another NumPy")

    monkeypatch.setattr("sklearn.ensemble.RandomForestRegressor", broken)
    losses = [{"loss": item["lr"]} for item in sweep_of(30)]
    assert importance_in(made(sweep_of(30), losses).report(tmp_path / "page.html")) is None
    assert "no hyperparameter importance: RuntimeError: built for" in caplog.text


# --- the page -------------------------------------------------------------------------------------


def titles_of(path: Path) -> set[str]:
    return set(re.findall(r"<(?:title|h1)>(.*?)</", own_markup(path.read_text())))


def test_the_title_names_the_function_and_the_run(tmp_path: Path) -> None:
    def train(item: int) -> int:
        return item

    run, page = tmp_path / "lr", tmp_path / "page.html"
    with parpool(1, profile="inline", quiet=True) as pool:
        durable, other = pool.parfor(train, [1], run_dir=run), pool.parfor(train, [1], name="<lr>")
    assert titles_of(durable.report(page)) == {"train in lr"}
    assert titles_of(load_results(run).report(page)) == {"train in lr"}
    assert titles_of(pickle.loads(pickle.dumps(other)).report(page)) == {"&lt;lr&gt;"}
    assert titles_of(other.report(page, title="Mine")) == {"Mine"}


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = made([1, 2], [3, 4]).report(tmp_path / "page.html").read_text()

    assert re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", own_markup(page)) == []
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=(?!.data:)", own_markup(page))
    assert page.count("plotly.js v") == 1, "plotly is there, once"
    assert "default-src 'none'" in page


def test_texts_of_the_users_stay_texts(tmp_path: Path) -> None:
    item = {"name": HOSTILE, NAME: 1}
    error = ValueError(HOSTILE)
    feed = told([(0, {NAME: 1.0, "loss": 2.0})])
    results = made([item, item], [{NAME: HOSTILE}, None], errors={1: error}, get_feed=lambda: feed)

    path = results.report(tmp_path / "page.html", title=HOSTILE)

    page = path.read_text()
    assert "<script>alert" not in page
    assert "<b>b</b>" not in page
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)[0]
    assert column(story_of(path), "name")[0].startswith("</script><script>alert(1)</script>")


def test_halves_of_characters_harm_nothing(tmp_path: Path) -> None:
    half = "half\ud83d"
    feed = told([(0, {half: 1.0, "note": half}), (1, {half: 2.0})])
    results = made([{half: 1}, {half: 2}], [{half: half}, {half: 3}], get_feed=lambda: feed)

    story = story_of(results.report(tmp_path / "page.html", title=half))
    results.timeline(tmp_path / "timeline.png", title=half)

    assert column(story, r"half\ud83d") == [1, 2]
    assert column(story, r"result_half\ud83d") == ["half?", 3]
    assert column(story, r"last half\ud83d") == [1.0, 2.0]
    assert results.metrics["note"].tolist()[0] == half
    assert results.metrics["note"].isna().tolist() == [False, True]


def test_values_of_all_kinds_become_cells(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = [
        np.zeros((500, 500)),
        None,
        math.nan,
        math.inf,
        {str(i): i for i in range(1000)},
        torch.tensor(0.5),
        10**400,
    ]

    path = made(list(range(len(values))), values).report(tmp_path / "page.html")

    assert path.stat().st_size < 7_000_000
    cells = column(story_of(path), "value")
    assert cells[1] is cells[2] is None
    assert cells[3] == "inf"
    assert cells[5] == 0.5
    assert all(len(str(entry)) < 400 for entry in cells)


def test_configurations_within_configurations_have_columns(tmp_path: Path) -> None:
    items = [{"optimizer": {"name": "adam", "lr": 0.1}}, {"optimizer": {"name": "sgd"}}]

    story = story_of(made(items, [1, 2]).report(tmp_path / "page.html"))

    assert column(story, "optimizer.name") == ["adam", "sgd"]
    assert column(story, "optimizer.lr") == [0.1, None]


def test_curves_are_of_what_was_reported(tmp_path: Path) -> None:
    feed = told(
        [
            (0, {"epoch": 0, "loss": 2.0}),
            (0, {"epoch": 1, "loss": 1.0}),
            (1, {"epoch": 0, "loss": 3.0, "note": "text"}),
        ]
    )

    story = story_of(
        made([1, 2], [None, None], get_feed=lambda: feed).report(tmp_path / "page.html")
    )

    assert story["curves"] == {
        "items": [0, 1],
        "starts": [0, 2, 3],
        "columns": {"epoch": [0, 1, 0], "loss": [2.0, 1.0, 3.0]},
        "metrics": ["loss"],
        "steps": ["epoch"],
        "num_ranked": 2,
        "ranked_by": "last loss",
        "color_by": [],
    }
    assert column(story, "last loss") == [1.0, 3.0]


def test_the_curves_of_the_best_items_come_first(tmp_path: Path) -> None:
    items = list(range(300))
    feed = told([(item, {"loss": float(item % 150), "step": 0}) for item in items])
    values = [{"acc": item / 1000} if item != 299 else None for item in items]
    results = made(items, values, errors={299: ValueError("diverged")}, get_feed=lambda: feed)

    curves = story_of(results.report(tmp_path / "page.html"))["curves"]

    assert curves["items"][:100] == list(range(298, 198, -1)), "the returned metric counts"
    assert (curves["items"][100], curves["items"][-1]) == (198, 299)
    assert (len(curves["items"]), curves["num_ranked"], curves["ranked_by"]) == (200, 199, "acc")


def test_without_a_returned_metric_the_last_report_says_which_item_is_the_best(
    tmp_path: Path,
) -> None:
    feed = told(
        [
            (0, {"epoch": 0, "val_loss": 1.0}),
            (0, {"epoch": 1, "val_loss": 3.0}),
            (1, {"epoch": 0, "val_loss": 4.0}),
            (1, {"epoch": 1, "val_loss": 2.0}),
            (2, {"epoch": 1, "val_loss": 0.5}),
        ]
    )
    errors: dict[int, BaseException] = {2: ValueError("diverged")}
    results = made([1, 2, 3], [None] * 3, errors=errors, get_feed=lambda: feed)

    path = results.report(tmp_path / "page.html")

    assert "<b>last val_loss = 2</b>" in own_markup(path.read_text())
    assert story_of(path)["curves"]["items"] == [1, 0, 2], "an item that failed is not ranked"


def test_an_item_that_diverged_in_its_last_report_is_not_the_best(tmp_path: Path) -> None:
    feed = told([(0, {"loss": 0.1}), (0, {"loss": math.nan}), (1, {"loss": 0.9}), (1, {"lr": 1})])

    path = made([1, 2], [None] * 2, get_feed=lambda: feed).report(tmp_path / "page.html")

    assert "<b>last loss = 0.9</b>" in own_markup(path.read_text())
    assert column(story_of(path), "last loss") == [None, 0.9]


def test_the_page_says_what_it_leaves_out(tmp_path: Path) -> None:
    items = list(range(5_000))
    feed = told([(item, {"loss": float(item)}) for item in range(500)])
    rows = [Row("finished", 0.001, START + item / 1000, 0, None, 1, host="lab-3") for item in items]
    results = Results(items, items, lambda: rows, {}, lambda: feed)

    page = results.report(tmp_path / "page.html").read_text()

    assert "This page has the curves of 200 of 500 items: those of the 100 best, and others" in page
    assert re.search(r"5,000 attempts are drawn as [\d,]+ bars", page)


def test_an_empty_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = made([], []).report(tmp_path / "page.html").read_text()

    assert "There are no items" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("duration_s", "heading", "busy"), [(0.002, "busy [ms]", "2.00"), (90.0, "busy [s]", "90.00")]
)
def test_times_of_workers_have_a_unit_that_fits(
    tmp_path: Path, duration_s: float, heading: str, busy: str
) -> None:
    rows = [Row("finished", duration_s, 0.0, 0, None, 1, host="a")]

    page = own_markup(
        Results([1], [1], lambda: rows, {}).report(tmp_path / "page.html").read_text()
    )

    assert f"<th>{heading}</th>" in page
    assert f"<td>{busy}</td>" in page


def test_a_run_in_which_all_failed(tmp_path: Path) -> None:
    errors: dict[int, BaseException] = {0: KeyError("a"), 1: KeyError("a"), 2: Rude()}

    page = own_markup(
        made([1, 2, 3], [None] * 3, errors=errors).report(tmp_path / "page.html").read_text()
    )

    assert "2\N{MULTIPLICATION SIGN}" in page
    assert "KeyError: " in page
    assert "Rude" in page


def test_a_traceback_begins_in_the_users_code_and_has_each_note_once(tmp_path: Path) -> None:
    def fail(item: int) -> None:
        print("epoch 1")
        raise ValueError("diverged")

    with parpool(1, profile="inline", quiet=True) as pool:
        results = pool.parfor(fail, [1], on_error="collect", run_dir=tmp_path / "run")
    error = results.errors[0]
    text = load_results(tmp_path / "run").errors[0].__cause__
    assert isinstance(text, RemoteTraceback)
    error.__cause__ = RemoteTraceback(text.text.rpartition("\nraypool: item 0")[0])  # as on Ray
    for found in (results, load_results(tmp_path / "run")):
        page = own_markup(found.report(tmp_path / "page.html").read_text())
        lines = page.partition("<pre>")[2].partition("</pre>")[0].splitlines()
        assert lines[1].strip().endswith("in fail")
        assert [line.partition(",")[0] for line in lines[3:]] == [
            "ValueError: diverged",
            "raypool: its last output:",
            "  epoch 1",
            "raypool: item 0 of fail",
        ]


def test_what_was_there_stays_until_the_new_page_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            made([1], [1]).report(path)

    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    made([1], [1]).report(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["sweep", "sweep.pdf", "."])
def test_a_page_is_called_as_pages_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match=r"\.html"):
        made([1], [1]).report(tmp_path / name)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"There is no folder {tmp_path / 'pages'}"):
        made([1], [1]).report(tmp_path / "pages" / "sweep.html")


def test_without_the_extra_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(
        "raypool.errors.find_spec",
        lambda name: None if name in ("plotly", "matplotlib") else find(name),
    )

    with pytest.raises(ModuleNotFoundError, match=r'plotly.*pip install "raypool\[plots\]"'):
        made([1], [1]).report(tmp_path / "page.html")
    with pytest.raises(ModuleNotFoundError, match=r'matplotlib.*pip install "raypool\[plots\]"'):
        made([1], [1]).timeline(tmp_path / "timeline.png")
    assert list(tmp_path.iterdir()) == []


def test_the_gpus_have_a_line_each_on_the_time_axis_of_the_items(tmp_path: Path) -> None:
    rows = [
        Row("finished", 10.0, START, 0, 0, 1, host="a"),
        Row("finished", 10.0, START + 86_400, 0, 0, 1, host="a", run=2),
    ]
    gib = 2**30
    samples = [
        GpuSample(START - 5, 1, "a", 0, 15 * gib, 16 * gib, 1.0),  # nothing ran yet
        GpuSample(START + 2, 1, "a", 0, gib, 16 * gib, 0.25),
        GpuSample(START + 2, 1, "b", 0, 3 * gib, 16 * gib, None),
        GpuSample(START + 86_404, 2, "a", 0, 2 * gib, 16 * gib, 0.75),
        GpuSample(START + 2, 3, "a", 0, gib, 16 * gib, 0.5),  # of a call without attempts
    ]
    results = Results([1, 2], [1, 2], lambda: rows, {}, get_gpus=lambda: samples)

    path = pickle.loads(pickle.dumps(results)).report(tmp_path / "page.html")

    chart = story_of(path)["gpus"]
    assert [(line["name"], line["yaxis"], line["x"], line["y"]) for line in chart["data"]] == [
        ("a: GPU 0", "y", [2.0, 14.0], [25.0, 75.0]),
        ("b: GPU 0", "y", [2.0], [None]),
        ("a: GPU 0", "y2", [2.0, 14.0], [1.0, 2.0]),
        ("b: GPU 0", "y2", [2.0], [3.0]),
    ]
    assert chart["layout"]["yaxis2"]["range"][1] >= 16
    for few in ([], samples[:2]):
        results = Results([1, 2], [1, 2], lambda: rows, {}, get_gpus=lambda few=few: few)  # type: ignore[misc]
        assert 'id="gpus"' not in results.report(tmp_path / "page.html").read_text()


# --- the timeline ---------------------------------------------------------------------------------


def a_troubled_run() -> Results:
    """Return results of three items: one was retried, one was lost twice, one was cancelled."""
    rows = [
        Row("finished", 2.0, START + 1, 0, 1, 2, host="lab-3"),
        Row("failed", 1.0, START + 2, 1, 2, 2, host="lab-4"),
        Row("cancelled"),
    ]
    lost = WorkerLostError(
        "its worker ended", reason=LossReason.EXIT, task="item 1", attempts=2, worker=1
    )
    misses = [
        Miss(0, Row("retried", 1.0, START, 0, 1, 1, host="lab-3"), "KeyError: 'x'"),
        Miss(1, Row("lost", 1.0, START, 1, 2, 1, host="lab-4"), "signal 9"),
        Miss(2, Row("cancelled", 0.5, START + 3, 0, 1, 1, host="lab-3")),
        Miss(2, Row("lost", attempts=1)),  # of an old journal, which had no times
    ]
    return Results(
        [{"lr": 1}, {"lr": 2}, {"lr": math.nan}],
        [1, None, None],
        lambda: rows,
        {1: lost},
        get_misses=lambda: misses,
    )


def test_all_attempts_are_in_the_table() -> None:
    attempts = a_troubled_run().attempts

    shown = attempts[["item", "attempt", "status", "host"]].astype(object)
    assert shown.where(shown.notna(), None).to_numpy().tolist() == [
        [0, 1, "retried", "lab-3"],
        [0, 2, "finished", "lab-3"],
        [1, 1, "lost", "lab-4"],
        [1, 2, "lost", "lab-4"],
        [2, 1, "cancelled", "lab-3"],
        [2, 1, "lost", None],
    ]


def test_a_trace_has_a_thread_for_each_worker_and_its_times_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    a_troubled_run().timeline(path)

    events = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )["traceEvents"]

    names = {
        (e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert names == {
        ("process_name", "lab-3"),
        ("process_name", "lab-4"),
        ("thread_name", "worker 0, GPU 1"),
        ("thread_name", "worker 1, GPU 2"),
    }
    first = next(
        e for e in events if e["ph"] == "X" and e["name"] == "item 0" and e["cat"] == "finished"
    )
    assert (first["ts"], first["dur"], first["tid"]) == (1_001_000_000, 2_000_000, 0)
    assert first["args"] == {"config": {"lr": 1}, "attempt": 2, "status": "finished", "gpu": 1}
    assert sorted(e["cat"] for e in events if e["ph"] == "X") == [
        "cancelled",
        "finished",
        "lost",
        "lost",
        "retried",
    ]
    assert len({e["pid"] for e in events if e["ph"] == "X"}) == 2


def test_the_figure_has_a_line_for_each_worker_and_a_colour_for_each_status() -> None:
    figure = a_troubled_run().timeline(title="costs $5")

    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "lab-3: worker 0, GPU 1",
        "lab-4: worker 1, GPU 2",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "finished (1)",
        "lost (2)",
        "retried (1)",
        "cancelled (1)",
        "idle",
    ]
    assert {text.get_text() for text in axes.texts} >= {"0", "1", "2", "0% idle", "43% idle"}


def test_the_suffix_says_what_is_written(tmp_path: Path) -> None:
    results = {".png": a_troubled_run(), ".svg": made([], []), ".pdf": made([1], [1])}
    for suffix, begins in ((".png", b"\x89PNG\r"), (".svg", b"<?xml"), (".pdf", b"%PDF-")):
        results[suffix].timeline(tmp_path / f"timeline{suffix}")
        assert (tmp_path / f"timeline{suffix}").read_bytes().lstrip()[:5] == begins


def test_what_nobody_can_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"\.json.*\.png"):
        made([1], [1]).timeline(tmp_path / "timeline.docx")


def test_a_worker_does_one_thing_at_a_time_whatever_its_clocks_say(tmp_path: Path) -> None:
    rows = [Row("finished", 1.00001, START + i, 0, None, 1, host="a") for i in range(5)]
    # sent ahead: the times are the driver's
    misses = [Miss(5, Row("cancelled", 2.0, START + 3, 0, None, 1, host="a"))]
    results = Results(
        list(range(6)), [None] * 6, lambda: [*rows, Row("cancelled")], {}, get_misses=lambda: misses
    )

    results.timeline(tmp_path / "trace.json")

    events = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    finished = [e for e in events if e["cat"] == "finished"]
    assert all(e["ts"] + e["dur"] <= later["ts"] for e, later in itertools.pairwise(finished))
    _, counts = at_once(plan(results.attempts).attempts, num_points=100)
    assert max(counts) == 1


def test_pauses_between_sessions_are_left_out(tmp_path: Path) -> None:
    rows = [
        Row("finished", 1.0, START, 0, None, 1, host="a"),
        Row("finished", 1.0, START + 86_400, 0, None, 1, host="a", run=2),
    ]
    results = Results([1, 2], [1, 2], lambda: rows, {})
    figure, page = results.timeline(), results.report(tmp_path / "page.html")

    assert "<b>2.0 s</b><span>of run time, in 2 sessions</span>" in own_markup(page.read_text())
    assert figure.axes[0].get_xlim() == (0, 2)
    assert "pauses between sessions left out" in figure.axes[0].get_xlabel()
    assert "0% idle" in figure.axes[0].get_title(loc="left")
