"""The benchmarks beside the peers: each system has its turns, answers are looked at, and
counted.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.long


def test_warm_ups_are_not_counted(benchmark_of: Any) -> None:
    contest, calls = benchmark_of("contest"), []
    peer = benchmark_of("peers").Peer(
        map=lambda fn, items: calls.append(items) or [fn(item) for item in items]
    )
    for warm_ups in (0, 2):
        workload = contest.Workload(
            "same", lambda x: x, {"map": [1, 2]}, bound_s=1e-9, warm_ups=warm_ups
        )
        calls.clear()
        (line,) = contest.contest({"raypool": peer}, [workload], rounds=3)
        assert len(line.values) == 3
        assert len(calls) == 3 + warm_ups


def test_a_system_that_starts_and_answers_wrongly_is_found(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, wrong = benchmark_of("bench_peers_start"), benchmark_of("contest").WrongAnswersError
    monkeypatch.setattr(start, "fresh_process", lambda *_: json.dumps([1.0, 2.0, 3.0, [0, 1]]))
    assert start.started("loky") == (1.0, 2.0, 3.0)
    monkeypatch.setattr(start, "fresh_process", lambda *_: json.dumps([1.0, 2.0, 3.0, [0, None]]))
    with pytest.raises(wrong, match=r"loky: \[0, None\] of the numbers below 2"):
        start.started("loky")


def test_who_starts_on_ray_has_a_core_for_each_worker(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, peers = [], benchmark_of("peers")

    @contextlib.contextmanager
    def own_ray(**settings: Any) -> Iterator[None]:
        started.append(settings)
        yield

    @contextlib.contextmanager
    def opener(_num_workers: int) -> Iterator[Any]:
        yield peers.Peer(map=lambda fn, items: [fn(item) for item in items])

    monkeypatch.setattr(benchmark_of("own_ray"), "own_ray", own_ray)
    monkeypatch.setitem(peers.PEERS, "fake", ("ray", opener))
    monkeypatch.setattr(sys, "argv", ["-c", "fake", "2"])
    exec(benchmark_of("bench_peers_start").PROGRAM, {"__name__": "__main__"})
    assert started == [{"num_cpus": 2}]
    assert json.loads(capsys.readouterr().out)[3] == [0, 1]


def test_who_skips_an_item_of_a_skewed_load_is_found(benchmark_of: Any) -> None:
    skew, wrong = benchmark_of("bench_skew"), benchmark_of("contest").WrongAnswersError
    pool = SimpleNamespace(parfor=lambda fn, items, **_: items)
    lines = skew.run(
        SimpleNamespace(pool=pool, ray_pool=SimpleNamespace(map=lambda fn, items, **_: items))
    )
    assert len(lines) == 4
    with pytest.raises(wrong, match="of "):
        skew.run(
            SimpleNamespace(
                pool=pool, ray_pool=SimpleNamespace(map=lambda fn, items, **_: items[1:])
            )
        )


def test_long_items_go_every_way_and_the_bounds_are_right(benchmark_of: Any) -> None:
    long, ways = benchmark_of("bench_peers_long"), {*benchmark_of("contest").WAYS}
    workloads = {workload.name: workload for workload in long.WORKLOADS}
    assert set(workloads["1 s"].items) == set(workloads["50 ms"].items) == ways
    assert long.least_s([0.6, *[0.03] * 11]) == 0.6
    assert long.least_s([0.5, 0.5, 0.5, 0.5]) == 1.0
    assert all(workloads[name].bound_s for name in ("the first of 12 is long", "heavy tail"))
    longest = sorted(long.HEAVY, reverse=True)
    assert sum(longest[:4]) >= sum(longest[4:]) > sum(longest[:3])


def test_of_each_system_there_is_said_what_becomes_of_its_calls(benchmark_of: Any) -> None:
    systems = set(benchmark_of("systems").SYSTEMS)
    assert systems == set(benchmark_of("bench_peers_faults").FATES)
    assert {*systems, *benchmark_of("streams").STREAMS} < set(benchmark_of("peers").PEERS)


def test_calls_that_wait_are_counted_for_each_system(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, counts = benchmark_of("bench_many"), {}

    def queue(_program: str, name: str, is_on_ray: int, _workers: int, count: int) -> str:
        counts[name] = (count, bool(is_on_ray))
        return json.dumps([600.0 * count, 50.0 * count])

    monkeypatch.setattr(many, "fresh_process", queue)
    monkeypatch.setattr(many, "installed", lambda: list(benchmark_of("peers").PEERS))
    lines = {(line.what, line.against): line for line in many.run()}
    assert counts["raypool"] == (100_000, True)
    assert counts["loky"] == (100_000, False)
    assert counts["bare actors of Ray"] == (many.FEW, True)
    assert "Ray's Pool" not in counts
    assert lines["memory", "loky"].note == ""
    assert lines["memory", "dask.distributed"].note == "5,000 calls"
    assert lines["memory", "dask.distributed"].ratios() == [1.0] * 5
    assert lines["memory of all", "150 MB"].values == [60.0] * 5


def test_reasons_of_streams_stand_where_they_hold(benchmark_of: Any) -> None:
    faults = benchmark_of("bench_peers_faults")
    values = {
        "raypool": [(9.0, 9.0, 32)] * 5,
        "bare actors of Ray": [(5.0, 5.0, 32)] * 5,
        "MPIRE": [(1.0, 7.0, 4)] * 5,
    }
    reasons = {
        what: {line.against: line.reason for line in faults._stream_lines(what, values, at)}
        for at, what in enumerate(("the first result", "200 results", "items drawn ahead"))
    }
    assert set(reasons["the first result"].values()) == {""}
    assert reasons["200 results"] == {"bare actors of Ray": "", "MPIRE": ""}
    assert reasons["items drawn ahead"]["MPIRE"] == "As many as `buffersize` says: 32."


def test_a_loop_round_actors_keeps_its_order_and_its_distance(benchmark_of: Any) -> None:
    streams = benchmark_of("streams")
    drawn = streams.Drawn()
    results = streams.in_order(lambda item: item, abs, drawn, 4)
    assert next(results) == 0
    assert drawn.count == 4
    assert [next(results) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert drawn.count <= 4 + 6
    drawn.stop()
    assert list(results) == list(range(6, drawn.count))


def test_what_a_driver_takes_is_of_the_items_that_were_run(benchmark_of: Any) -> None:
    view, wrong = benchmark_of("bench_live_view"), benchmark_of("contest").WrongAnswersError
    assert (
        view.driver_share("raypool", lambda fn, items: [fn(item) for item in items], [0.0, 0.01])
        >= 0
    )
    with pytest.raises(wrong, match="bare actors"):
        view.driver_share("bare actors", lambda fn, items: items[1:], [0.0, 0.01])
    lines = view.driver_lines(
        {"raypool": [2.0] * 5, "bare actors": [4.0] * 5, "nothing": [1.0] * 5}
    )
    assert [(line.against, line.ratios()[0]) for line in lines] == [
        ("a loop over bare actors", 0.5),
        ("", 1.0),
    ]


def test_mpire_is_stopped_killed_and_goes_on(benchmark_of: Any) -> None:
    pytest.importorskip("mpire")
    faults, systems = benchmark_of("bench_peers_faults"), benchmark_of("systems")
    system = systems.open_warm("MPIRE", 1)
    try:
        assert faults.cancelled("MPIRE", system) > 0
        assert faults.killed("MPIRE", system) > 0
        assert faults.killed("MPIRE", system) > 0
    finally:
        system.close()
    benchmark_of("bench_peers_setup").sweep("MPIRE")
