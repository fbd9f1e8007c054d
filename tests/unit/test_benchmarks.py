"""What is measured is what is said: wrong answers are found, and the page has the records' numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def records(benchmark_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give the module of the records, which are kept in a folder of their own."""
    module = benchmark_of("records")
    for name in ("records", "page"):
        monkeypatch.setattr(benchmark_of(name), "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark_of("page"), "PAGE", tmp_path / "RESULTS.md")
    return module


def plainly(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in items]


def backwards(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in reversed(items)]


def test_every_party_has_its_turn(benchmark_of: Any) -> None:
    contest, peer = benchmark_of("contest"), benchmark_of("peers").Peer
    parties = {"raypool": peer(plainly, plainly, backwards), "other": peer(map=plainly, unordered=backwards)}
    items = {"map": [1, 2, 3], "submit": [1, 2, 3], "unordered": [3, 1, 2]}
    lines = contest.contest(parties, [contest.Workload("squares", lambda x: x * x, items, bound_s=1e-9, target=2.0)], rounds=3)
    assert [(line.area, line.against) for line in lines] == [
        ("at once", "other"),
        ("at once", "the least possible"),
        ("call by call", "the least possible"),
        ("as they come", "other"),
        ("as they come", "the least possible"),
    ]
    assert all(len(line.values) == len(line.others) == 3 for line in lines)
    assert all(line.is_met() is (None if line.against == "other" else False) for line in lines)


@pytest.mark.parametrize("way", ["map", "submit"])
def test_who_mixes_up_answers_is_found(benchmark_of: Any, way: str) -> None:
    contest, peer = benchmark_of("contest"), benchmark_of("peers").Peer
    parties = {"raypool": peer(**{way: plainly}), "other": peer(**{way: backwards})}
    with pytest.raises(contest.WrongAnswersError, match="other, negatives"):
        contest.contest(parties, [contest.Workload("negatives", lambda x: -x, {way: [1, 2]})])


def test_who_loses_answers_is_found(benchmark_of: Any) -> None:
    contest, peer = benchmark_of("contest"), benchmark_of("peers").Peer
    parties = {"raypool": peer(unordered=lambda fn, items: [fn(item) for item in items[1:]])}
    with pytest.raises(contest.WrongAnswersError, match="raypool"):
        contest.contest(parties, [contest.Workload("same", lambda x: x, {"unordered": [1, 2]})])


def test_the_page_has_what_is_on_record(benchmark_of: Any, records: Any, tmp_path: Path) -> None:
    line, machine = benchmark_of("measuring").Line, {**benchmark_of("machine").machine(), "took_s": 12}
    lost = line("cancel", "a loop", "20 ms", "us", [30_000.0, 20_000.0, 40_000.0], target=20_000.0, reason="It waits.")
    won = line("cancel", "a sleep", "ray.kill", "us", [10.0], [100.0], target=5.0, is_speedup=True)
    records.keep("cancel", "Cancelling", "What it costs.", [lost, won], machine)
    records.keep(
        "peers", "Peers", "Side by side.", [line("at once", "1 ms", "Ray", "us", [10.0], [25.0], is_speedup=True)], machine
    )

    assert records.kept("cancel")["lines"] == [lost, won]
    assert json.loads((tmp_path / "cancel.json").read_text())["lines"][0]["values"] == [30_000.0, 20_000.0, 40_000.0]
    benchmark_of("page").write_page()
    page = (tmp_path / "RESULTS.md").read_text()
    assert "1 of 2 targets are met. Missed:\n\n- cancel: a loop, against 20 ms. It waits." in page
    assert "| cancel: a loop | 30 ms (20-40) | 20 ms |  |  | at most 20 ms | MISSED |" in page
    assert "| cancel: a sleep | 10 us | ray.kill | 100 us | 10 x faster | at least 5 x | met |" in page
    assert page.index("## Peers") < page.index("## Cancelling")
    assert "| at once | 1 ms |\n| --- | --- |\n| raypool | 10 us |\n| Ray | 2.5 x |" in page


def test_each_benchmark_is_there_and_says_what_it_measures(benchmark_of: Any) -> None:
    suite, records = benchmark_of("suite"), benchmark_of("records")
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert files == {*suite.SUITE, suite.ON_GPU}
    assert {*suite.SHORT, *suite.ON_RAY, *suite.MATRICES} <= set(suite.SUITE)
    assert all(records.described_by(name) for name in files)


def test_a_benchmark_that_is_none_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "parfro"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "There is no benchmark parfro" in done.stderr
