"""What is measured is what is said: wrong answers are found, and the page has the records'
numbers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def records(benchmark_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give the module of the records, which are kept in a folder of their own."""
    module = benchmark_of("records")
    for name in ("records", "page", "plots"):
        monkeypatch.setattr(benchmark_of(name), "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark_of("page"), "PAGE", tmp_path / "RESULTS.md")
    return module


def plainly(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in items]


def backwards(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in reversed(items)]


def test_every_party_has_its_turn(benchmark_of: Any) -> None:
    contest, peer = benchmark_of("contest"), benchmark_of("peers").Peer
    parties = {
        "raypool": peer(plainly, plainly, backwards),
        "other": peer(map=plainly, unordered=backwards),
    }
    items = {"map": [1, 2, 3], "submit": [1, 2, 3], "unordered": [3, 1, 2]}
    lines = contest.contest(
        parties,
        [contest.Workload("squares", lambda x: x * x, items, bound_s=1e-9, target=2.0)],
        rounds=3,
    )
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
    line, machine = benchmark_of("measuring").Line, benchmark_of("machine").machine()
    lost = line(
        "cancel",
        "a loop",
        "20 ms",
        "us",
        [30_000.0, 20_000.0, 40_000.0],
        target=20_000.0,
        reason="It waits.",
    )
    won = line("cancel", "a sleep", "ray.kill", "us", [10.0], [100.0], target=5.0, is_speedup=True)
    records.keep("cancel", "Cancelling", "What it costs.", [lost, won], machine, 12.0)
    peer = line("at once", "1 ms", "Ray", "us", [10.0], [25.0], is_speedup=True)
    behind = line("at once", "1 ms", "loky", "us", [10.0], [5.0], is_speedup=True)
    slow = line("at once", "1 ms", "Tune", "us", [10.0], [30.0], is_speedup=True, note="turns: 1")
    records.keep("peers", "Peers", "Side by side.", [peer, behind, slow], machine, 100.0)
    thrice = line("from the prompt", "the end", "torchrun", "us", [10.0] * 3, [20.0] * 3)
    once = line("from the prompt", "the end", "Tune", "us", [10.0], [20.0])
    counted = line("from the prompt", "lines", "torchrun", "", [10.0], [20.0])
    records.keep("launchers", "Launchers", "By each.", [thrice, once, counted], machine, 100.0)

    assert records.kept("cancel")["lines"] == [lost, won]
    assert json.loads((tmp_path / "cancel.json").read_text())["lines"][0]["values"] == [
        30_000.0,
        20_000.0,
        40_000.0,
    ]
    benchmark_of("page").write_page()
    page = (tmp_path / "RESULTS.md").read_text()
    assert "1 of 2 are met." in page
    assert (
        "- **It waits.** Cancelling, cancel: a loop, against 20 ms: 1.5 x (1-2), target missed."
        in page
    )
    assert "- **Not explained yet.** Peers, at once: 1 ms, against loky: 2 x." in page
    assert "took 12 s" in page
    assert "A real sweep (`sweep`)" in page[page.index("## Not measured") :]
    assert (
        "| cancel: a loop (3 rounds) | 30 ms (20-40) | 20 ms |  |  | at most 20 ms | MISSED |"
        in page
    )
    assert (
        "| cancel: a sleep (1 round) | 10 us | ray.kill | 100 us | 10 x as fast | at least 5 x |"
        " met |" in page
    )
    assert page.index("## Peers") < page.index("## Cancelling")
    beside = [
        "| raypool | 10 us |",
        "| Ray | 2.5 x |",
        "| loky | 0.5 x |",
        "| Tune (turns: 1) | 3 x |",
    ]
    assert "\n".join(["| at once | 1 ms (1 round) |", "| --- | --- |", *beside]) in page

    assert "| from the prompt | the end (3 rounds) | lines |" in page
    assert "| torchrun | 2 x (2-2) | 2 x |" in page
    assert "| Tune | 2 x (1 round) |  |" in page

    picture = (tmp_path / "peers.svg").read_bytes()
    assert b"loky" in picture
    assert "![Peers: the table as a picture](results/peers.svg)" in page
    assert not (tmp_path / "cancel.svg").exists()
    benchmark_of("page").write_page()
    assert (tmp_path / "peers.svg").read_bytes() == picture
    assert (tmp_path / "RESULTS.md").read_text() == page


def test_what_grows_is_drawn(benchmark_of: Any) -> None:
    line, plots = benchmark_of("measuring").Line, benchmark_of("plots")
    lines = [
        line("simulated", f"an event, {size:,} workers", "10 us", "us", [5.0])
        for size in (10, 1_000)
    ]
    assert plots.curves_of(lines) == {("simulated: an event", "us"): {10: [5.0], 1_000: [5.0]}}
    assert plots.figure_of("scheduler", lines) is None
    lines.append(line("simulated", "an event, 10,000 workers", "100 workers", "us", [7.0], [6.0]))
    assert plots.curves_of(lines)["simulated: an event", "us"] == {
        10: [5.0],
        1_000: [5.0],
        10_000: [7.0],
        100: [6.0],
    }
    assert plots.figure_of("scheduler", lines) is not None


def test_a_picture_has_room_for_many_measurements(benchmark_of: Any) -> None:
    line, plots = benchmark_of("measuring").Line, benchmark_of("plots")
    lines = [
        line("a", f"what {number}", "torchrun", "us", [1.0], [2.0 + number]) for number in range(12)
    ]
    figure = plots.figure_of("launchers", lines)
    looks = {
        (drawn.get_marker(), drawn.get_color())
        for drawn in figure.axes[0].get_lines()
        if drawn.get_marker() in plots.MARKERS
    }
    assert len(looks) == 12, "each can be told from the others"


def test_where_raypool_loses_the_reason_is_known(benchmark_of: Any) -> None:
    """Fails when new records have rows that nobody has explained: find out why, and say so in
    benchmarks/losses.py.
    """
    suite, kept = benchmark_of("suite").SUITE, benchmark_of("records").kept
    lost = [
        loss
        for name in suite
        if (record := kept(name))
        for loss in benchmark_of("losses").losses(name, record["lines"])
    ]
    assert [
        f"{line.area}: {line.what}, against {line.against}" for line, reason in lost if not reason
    ] == []


@pytest.mark.parametrize(
    ("others", "target", "expected"),
    [
        ([90.0, 95.0, 99.0, 105.0, 110.0], None, "LEVEL"),
        ([80.0, 85.0, 90.0, 95.0, 99.0], None, ""),
        ([85.0, 90.0, 94.0, 97.0, 99.0], 0.95, "UNDECIDED"),
        ([80.0, 85.0, 90.0, 92.0, 94.0], 0.95, ""),
        ([85.0, 90.0, 94.0, 97.0], 0.95, ""),  # too few rounds to say so
    ],
)
def test_what_the_rounds_cannot_tell_is_said(
    benchmark_of: Any, others: list[float], target: float | None, expected: str
) -> None:
    losses, line = benchmark_of("losses"), benchmark_of("measuring").Line
    lost = line("a", "b", "c", "us", [100.0] * len(others), others, target, is_speedup=True)
    assert losses.losses("none", [lost]) == [(lost, getattr(losses, expected, ""))]


def test_one_that_fails_does_not_end_the_others(
    benchmark_of: Any,
    records: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running, line = (
        benchmark_of("running"),
        benchmark_of("measuring").Line("a", "b", "c", "us", [1.0]),
    )
    sessions = []

    @contextlib.contextmanager
    def session() -> Iterator[int]:
        sessions.append(len(sessions))
        yield sessions[-1]

    def broken(*_: Any) -> None:
        raise OSError("no room")

    given = []
    monkeypatch.setattr(running, "session", session)
    modules = {
        "start": broken,
        "skew": lambda *_: [line],
        "gap": broken,
        "cancel": lambda number: given.append(number) or [line],
    }
    monkeypatch.setattr(
        running,
        "import_module",
        lambda name: SimpleNamespace(run=modules[name.removeprefix("benchmarks.bench_")]),
    )
    run = running.Run(modules)
    run.measure_all()
    assert run.failed == {"start": "OSError: no room", "gap": "OSError: no room"}
    assert run.found == [line, line]
    assert given == [1]  # in a new session
    assert records.duration_s("skew") is not None
    assert records.kept("gap") is None
    assert "[4/4] cancel ..." in capsys.readouterr().err


def test_each_benchmark_is_there_and_says_what_it_measures(benchmark_of: Any) -> None:
    suite, records = benchmark_of("suite"), benchmark_of("records")
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert files == {*suite.SUITE, suite.ON_GPU}
    assert {*suite.SHORT, *suite.ON_RAY, *suite.MATRICES} <= set(suite.SUITE)
    assert all(records.described_by(name) for name in files)


class Liar:
    """A system that says of each call what it is told to say; a long call is a process that
    sleeps.
    """

    def __init__(self, says: Any) -> None:
        self.says = says
        self.processes: list[subprocess.Popen[bytes]] = []

    def submit(self, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        if fn is abs:
            return lambda: fn(*args)
        path, seconds = args
        self.processes.append(
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        )
        Path(path).write_text(f"{self.processes[-1].pid}\n")
        return lambda: self.says

    def result(self, call: Callable[..., Any], timeout: float | None = None) -> Any:
        return call()

    def stop(self, call: Callable[..., Any]) -> None:
        self.processes[-1].kill()

    def renew(self) -> None:
        pass


def test_what_becomes_of_a_call_whose_worker_was_killed_is_looked_at(benchmark_of: Any) -> None:
    faults, wrong = benchmark_of("bench_peers_faults"), benchmark_of("contest").WrongAnswersError
    for name, fate in (("raypool", "again"), ("loky", "again")):
        system = Liar(fate)
        if faults.FATES[name] == fate:
            assert faults.killed(name, system) > 0
        else:
            with pytest.raises(wrong, match="there is again, and not TerminatedWorkerError"):
                faults.killed(name, system)
        assert system.processes[-1].wait(10) == -9, "it was killed"


def test_who_does_not_go_on_after_a_cancellation_is_found(benchmark_of: Any) -> None:
    faults, wrong = benchmark_of("bench_peers_faults"), benchmark_of("contest").WrongAnswersError
    system = Liar("once")
    assert faults.cancelled("raypool", system) > 0
    system.result = lambda call, timeout=None: None  # type: ignore[method-assign]
    with pytest.raises(wrong, match="raypool: None after a call that was ended, and not 7"):
        faults.cancelled("raypool", system)
    assert [process.wait(10) for process in system.processes] == [-9, -9]


def test_a_list_without_end_ends_when_nobody_wants_more(benchmark_of: Any) -> None:
    faults, wrong = benchmark_of("bench_peers_faults"), benchmark_of("contest").WrongAnswersError
    left: list[Any] = []

    def plain(fn: Callable[[Any], Any], items: Any) -> Any:
        left.append(items)
        yield from map(fn, items)

    def in_pairs(fn: Callable[[Any], Any], items: Any) -> Any:
        for first in items:
            yield from (fn(next(items)), fn(first))

    first, took, ahead = faults.streamed("raypool", plain)
    assert 0 < first <= took
    assert ahead == 1, "never less than one, of which others may have so many times as many"
    assert not list(left[0])
    with pytest.raises(wrong, match="other"):
        faults.streamed("other", in_pairs)


def test_models_that_are_made_for_each_item_are_counted(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, wrong = benchmark_of("bench_peers_setup"), benchmark_of("contest").WrongAnswersError
    monkeypatch.setattr(setup, "BUILD_S", 0.0)

    class Here:
        def __init__(
            self, num_workers: int, initializer: Callable[[], None], again: bool = False
        ) -> None:
            self.build = initializer
            self.again = again
            initializer()

        def submit(self, fn: Callable[..., Any], *args: Any) -> Any:
            if self.again:
                self.build()
            return fn(*args)

        def result(self, call: Any, timeout: float) -> Any:
            return call

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        setup, "SYSTEMS", {"once": Here, "again": lambda *args: Here(*args, again=True)}
    )
    setup.sweep("once")
    with pytest.raises(wrong, match=f"of {setup.ITEMS + 1} models"):
        setup.sweep("again")


def test_a_benchmark_that_is_none_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "parfro"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert "There is no benchmark parfro" in done.stderr


def test_numbers_that_are_apart_are_found(benchmark_of: Any) -> None:
    check_same, wrong = (
        benchmark_of("bench_launchers").check_same,
        benchmark_of("contest").WrongAnswersError,
    )
    check_same({"raypool": [1.0, 2.0], "other": [1.0, 2.00001]})
    with pytest.raises(wrong, match=r"other has trained something else .* 0\.5 apart"):
        check_same({"raypool": [1.0, 2.0], "other": [1.5, 2.0]})
    with pytest.raises(wrong, match="other has trained something else"):
        check_same({"raypool": [1.0], "other": [float("nan")]})
    note_same, noted = benchmark_of("contest").note_same, dict[str, list[float]]()
    note_same(noted, "raypool", [1.0])
    note_same(noted, "raypool", [1.00001])
    with pytest.raises(wrong, match="raypool has trained something else than before"):
        note_same(noted, "raypool", [2.0])


def test_launchers_are_held_against_raypool_in_all_that_is_asked_of_their_ranks(
    benchmark_of: Any,
) -> None:
    bench = benchmark_of("bench_launchers")

    def of(us: float, loss: float = 0.5) -> dict[int, Callable[..., list[list[float]]]]:
        def ranks(size: int) -> Callable[..., list[list[float]]]:
            return lambda what, *_: [
                [us] if what == "reduce" else [us / size, 3.0, loss] for _ in range(size)
            ]

        return {1: ranks(1), 2: ranks(2)}

    found = {"raypool": of(10.0), "torchrun": of(20.0), "by hand": of(5.0)}
    ranks = {(name, size): ask for name, its in found.items() for size, ask in its.items()}
    summing = {name: ranks[name, 2] for name in found} | {bench.BARE_REDUCE: of(9.0)[2]}
    lines = [
        *bench.step_lines(ranks, 2, {"small": 7}),
        *bench.sum_lines(summing, 2, {"1 MB": (1_000_000, 3)}),
    ]
    assert [(line.what, line.against, line.ratios()[0], line.is_met()) for line in lines] == [
        ("small model, 1 worker", "torchrun", 2.0, True),
        ("small model, 1 worker", "by hand", 0.5, False),
        ("small model, 2 workers", "torchrun", 2.0, True),
        ("small model, 2 workers", "by hand", 0.5, False),
        ("small model, 2 workers", "torchrun", 1.0, None),
        ("small model, 2 workers", "by hand", 1.0, None),
        ("small model", "torchrun", 1.0, None),
        ("small model", "by hand", 1.0, None),
        ("1 MB", "torchrun", 2.0, None),
        ("1 MB", "by hand", 0.5, None),
        ("1 MB", "itself, by torch's own", 0.9, None),
    ]
    assert all(line.reason == bench.NO_MORE_WORK for line in lines if line.is_met() is False)
    ranks["torchrun", 2] = of(20.0, loss=0.6)[2]
    with pytest.raises(benchmark_of("contest").WrongAnswersError, match="torchrun"):
        bench.step_lines(ranks, 2, {"small": 7})


def test_a_launcher_that_trains_from_the_prompt_is_held_against_raypool(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benchmark_of("bench_launchers")

    def whole(name: str, weights: dict[str, list[float]]) -> tuple[float, float, float]:
        weights[name] = [1.0]
        return {
            "raypool": (4e6, 8e6, 500.0),
            "torchrun": (2e6, 4e6, 250.0),
            "TorchTrainer": (9e6, 9e6, 900.0),
        }[name]

    monkeypatch.setattr(bench, "whole", whole)
    monkeypatch.setattr(bench, "there", lambda: ["raypool", "torchrun", "TorchTrainer"])
    lines = [line for line in bench.wholes(3) if line.against == "torchrun"]
    assert [(line.what, line.unit, line.ratios()[0]) for line in lines[:3]] == [
        ("to the first step", "us", 0.5),
        ("until all is over", "us", 0.5),
        ("most memory", "MB", 0.5),
    ]
    lost = benchmark_of("losses").losses("launchers", bench.wholes(3))
    assert {why for line, why in lost if line.against == "torchrun"} == {
        benchmark_of("losses").NO_RAY_FOR_RANKS
    }
    assert lines[3].what == "lines"
    assert lines[3].ratios()[0] > 1  # its script is longer


def test_ranks_wait_until_they_are_asked(benchmark_of: Any) -> None:
    ranks = benchmark_of("ranks")
    with ranks.waiting_ranks(ranks.by_hand(2), 2) as ask:
        (took, of_cores, loss), (*_, other) = ask("train", "small", 3)
        assert took > 0
        assert of_cores > 0
        assert loss == other  # they have put their gradients together
        assert [len(answer) for answer in ask("reduce", 1000, 2)] == [1, 1]


@pytest.mark.parametrize(
    "launcher", ["raypool", "torchrun", "TorchTrainer", "Accelerate", "Lightning Fabric"]
)
def test_each_launcher_trains_as_a_plain_loop_does(benchmark_of: Any, launcher: str) -> None:
    bench = benchmark_of("bench_launchers")
    if launcher not in bench.there():
        pytest.skip(f"{launcher} is not installed: it is one of the extra `bench`")
    plainly = (
        "from benchmarks.launchers import training as t; from torch.utils.data import DataLoader;"
        " model = t.network(); t.show(t.train(model, t.optimizer_of(model),"
        " DataLoader(t.loader().dataset, t.SIZE.batch)))"
    )
    expected = (
        benchmark_of("scripts")
        .run_script("a plain loop", ["-c", plainly], bench.ONE_THREAD)
        .said["weights"]
    )
    first_step_us, took_us, peak_mb = bench.whole(launcher, theirs := {})
    bench.check_same({"raypool": theirs[launcher], "a plain loop": expected})
    assert 0 < first_step_us < took_us
    assert peak_mb > 0
    assert bench.lines_of(bench.script(launcher)) > 5


def test_parties_without_workers_move_each_array_and_answer_like_a_plain_loop(
    benchmark_of: Any,
) -> None:
    data, tasks, moved = benchmark_of("bench_peers_data"), benchmark_of("tasks"), []
    party = data.alone(lambda array: moved.append(array.nbytes) or array)
    array = tasks.array_of((7, 80))
    assert party.map(tasks.ends_of, [array]) == [(10, 7, 7)]
    assert moved == [80]
    (answer,) = party.submit(tasks.array_of, [(7, 160)])
    assert tasks.ends_of(answer) == (20, 7, 7)
    assert moved == [80, 160]
