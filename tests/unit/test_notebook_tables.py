"""What a notebook shows below a cell that ends with an object of raypool's."""

import re
from html import unescape
from typing import Any

import pytest

from raypool import parpool, report


def shown(thing: Any) -> list[list[str]]:
    """Return the title and the rows of the table, with red cells marked."""
    title, rows = thing._repr_html_().split("\n", 1)
    marked = re.sub(r'<td style="color: #c62828">', "<td>red ", rows)
    cells = [
        [unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr.*?</tr>", marked, re.DOTALL)
    ]
    return [[unescape(title).removeprefix("<p>").removesuffix("</p>")], *cells]


def train(config: dict[str, int]) -> dict[str, float]:
    if config["lr"] in (3, 20):
        raise ValueError("<b> diverged")
    return {"loss": abs(config["lr"] - 5), "epochs": 3}


def test_results_have_the_best_items_first_and_failures_in_red() -> None:
    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(train, [{"lr": lr} for lr in range(40)], on_error="collect")
    [title], heading, _, *rows = shown(results)
    assert title == (
        "<Results of 40 items: 38 finished, 2 failed>; the best by loss; .to_frame() has 28 more"
    )
    assert heading[1:4] == ["lr", "loss", "epochs"]
    assert [row[1] for row in rows] == [
        "5",
        "4",
        "6",
        "7",
        "2",
        "8",
        "1",
        "9",
        "0",
        "10",
        "3",
        "20",
    ]
    assert [row[4] for row in rows] == ["finished"] * 10 + ["red failed"] * 2
    assert rows[-1][-1] == "ValueError: <b> diverged"


def test_values_that_have_no_text_are_told_by_their_class() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    with parpool(profile="inline", quiet=True) as pool:
        shown = pool.parfor(lambda x: x, [Shy(), 10**5000])._repr_html_()
    assert "<td>a Shy</td>" in shown
    assert "<td>a int</td>" in shown


def test_results_without_a_metric_stay_in_order() -> None:
    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(str, 12)
    [title], _, _, *rows = shown(results)
    assert title == "<Results of 12 items: 12 finished>; .to_frame() has 2 more"
    assert [row[0] for row in rows] == list(map(str, range(10)))
    with parpool(profile="inline", quiet=True) as pool:
        assert shown(pool.parfor(str, 0))[0] == ["<Results of 0 items: none>"]


@pytest.mark.parametrize("name", ["report", "trial"])
def test_fields_that_have_the_names_of_raypools_columns(name: str) -> None:
    with parpool(profile="inline", quiet=True) as pool:
        results = pool.parfor(len, [{name: 1}])
    _, heading, _, row = shown(results)
    assert heading[1:4] == [name, "value", "status"]
    assert row[1:4] == ["1", "1", "finished"]


def test_a_pool_and_its_calls(gate: Any, eventually: Any) -> None:
    with parpool(2, profile="threads", quiet=True) as pool:
        pool.options(name="first", worker=0).parfeval(gate.wait)
        waiting = pool.options(name="second", worker=0).parfeval(gate.wait)
        assert eventually(lambda: pool.workers[0].state == "busy")
        [title], _, _, *rows = shown(pool)
        assert title == "<ParallelPool: 2 workers, 1 idle>"
        assert [row[3:] for row in rows] == [["busy", "first"], ["idle", "-"]]
        assert repr(pool.queue) == "<TaskQueue: 1 running, 1 queued>"
        _, heading, *rows = shown(pool.queue)
        assert heading[:3] == ["name", "state", "worker"]
        assert [row[:3] for row in rows] == [["first", "running", "0"], ["second", "queued", "-"]]
        assert shown(waiting)[0] == ["<Future 'second': queued>"]
        gate.open()
        failed = pool.parfeval(train, {"lr": 3})
        with pytest.raises(ValueError, match="diverged"):
            failed.result(300)
        assert shown(failed)[2][1] == "red failed"
        assert shown(failed)[2][-1] == "ValueError: <b> diverged"
        waiting.result(300)
    assert shown(pool)[0] == ["<ParallelPool: closed>"]


def test_values_of_ranks_and_a_training() -> None:
    def loop() -> None:
        for epoch in range(8):
            report(epoch=epoch)

    with parpool(2, profile="threads", quiet=True) as pool:
        _, _, _, *rows = shown(pool.spmd(lambda context: context.rank))
        assert rows == [["0", "0", "int"], ["1", "1", "int"]]
        run = pool.train(loop, workers=1)
        run.result(300)
        [title], heading, *rows = shown(run)
        assert title == "<TrainingRun 'loop': finished>"
        assert (heading[-1], [row[-1] for row in rows]) == ("epoch", ["3", "4", "5", "6", "7"])
