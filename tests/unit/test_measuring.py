"""Who is measured takes turns, answers rightly, and is said to be ahead where it is, for reasons
that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.long


def plainly(fn: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    return [fn(item) for item in items]


def test_who_comes_first_and_after_whom_changes_from_round_to_round(benchmark_of: Any) -> None:
    measuring, said = benchmark_of("measuring"), list[str]()
    names = ["raypool", "a", "b", "dask"]
    values = measuring.in_turns(
        {name: lambda name=name: said.append(name) or len(said) for name in names}, 4, warm_ups=0
    )
    rounds = [said[at : at + 4] for at in range(0, 16, 4)]
    assert [sorted(order) for order in rounds] == [sorted(names)] * 4
    assert sorted(order[0] for order in rounds) == sorted(names)
    before = [order[order.index("raypool") - 1] for order in rounds if order[0] != "raypool"]
    assert sorted(before) == ["a", "b", "dask"]
    assert values["raypool"] == [said.index("raypool", 4 * number) + 1 for number in range(4)]


def test_who_answers_wrongly_is_found_outside_the_time(benchmark_of: Any) -> None:
    contest = benchmark_of("contest")
    assert contest.checked("one", lambda: (1, 2), [1, 2])() > 0
    for answer in ([2, 1], [1]):
        with pytest.raises(contest.WrongAnswersError, match="one: "):
            contest.checked("one", lambda answer=answer: answer, [1, 2])()


def test_a_loop_that_loses_items_is_not_measured(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, wrong = benchmark_of("bench_parfor"), benchmark_of("contest").WrongAnswersError
    monkeypatch.setattr(bench, "ITEMS", 16)

    def parfor(fn: Callable[[Any], Any], count: int, **_: Any) -> list[Any]:
        return [fn(number) for number in range(count)]

    def lost(fn: Callable[[Any], Any], items: Any) -> list[Any]:
        return [fn(item) for item in items][1:]

    here, pools = SimpleNamespace(parfor=parfor), {"ray_pool": SimpleNamespace(map=plainly)}
    assert bench.run(
        SimpleNamespace(pool=here, process_pool=SimpleNamespace(map=plainly), **pools)
    )[1].others
    with pytest.raises(wrong, match="multiprocessing: 15 answers"):
        bench.run(SimpleNamespace(pool=here, process_pool=SimpleNamespace(map=lost), **pools))


def test_numbers_that_are_added_up_wrongly_are_found(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed as dist

    trainings, wrong = benchmark_of("trainings"), benchmark_of("contest").WrongAnswersError
    for name, answer in {"get_world_size": 2, "get_rank": 1, "barrier": None}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    assert trainings.sum_us(torch.empty(4), lambda x: x.add_(1)) > 0
    with pytest.raises(wrong, match="1 to 2 gives 2 to 2"):
        trainings.sum_us(torch.empty(4), lambda x: x)


def test_reports_are_set_against_those_of_the_same_turn(
    benchmark_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, said = benchmark_of("bench_train"), list[str]()

    def costs(name: str) -> list[float]:
        said.append(name)
        return [float(len(said)), 100.0 * len(said)]

    monkeypatch.setattr(bench, "bare_fit", lambda *_: costs("bare"))
    monkeypatch.setattr(bench, "reported", lambda _, counts, lane="warm": costs(lane))
    lines = bench.costs(None)
    assert [sorted(said[at : at + 3]) for at in (0, 3, 6)] == [["bare", "managed", "warm"]] * 3
    bare, warm = (
        [at + 1.0 for at, name in enumerate(said) if name == wanted] for wanted in ("bare", "warm")
    )
    assert [(line.what, line.values, line.others) for line in lines[::2]] == [
        ("a report, warm lane", warm, bare),
        (
            "a report with a checkpoint of 10 MB, warm lane",
            [100 * us for us in warm],
            [100 * us for us in bare],
        ),
    ]


def test_turns_end_in_time_and_who_is_slow_has_one(benchmark_of: Any) -> None:
    now = 0.0

    def takes(seconds: float) -> Callable[[], float]:
        def measure() -> float:
            nonlocal now
            now += seconds
            return now

        return measure

    parties = {"quick": takes(10), "middling": takes(20), "slow": takes(61)}
    in_turns_within = benchmark_of("measuring").in_turns_within
    runs = in_turns_within(170, parties, rounds=5, clock=lambda: now)
    assert runs == {"quick": [10, 121, 131, 161], "middling": [30, 111, 151], "slow": [91]}
    now = 0.0
    assert in_turns_within(45, {"ours": takes(20), "other": takes(10)}, clock=lambda: now) == {
        "ours": [20],
        "other": [30],
    }, "nobody has more turns than the first, which has none left"


def test_what_a_loss_is(benchmark_of: Any) -> None:
    line, losses = benchmark_of("measuring").Line, benchmark_of("losses")
    ahead = line("at once", "x", "loky", "us", [1.0] * 5, [2.0] * 5)
    behind = line("at once", "x", "multiprocessing", "us", [2.0] * 5, [1.0] * 5, is_speedup=True)
    level = line("at once", "x", "loky", "us", [1.0, 1.0, 1.1, 1.2, 1.3], [1.2, 1.1, 1.0, 1.0, 1.0])
    bound = line("at once", "x", "the ideal", "us", [1.01] * 5, [1.0] * 5, target=1.05)
    missed = line("cancel", "x", "20 ms", "us", [30.0], target=20.0)
    found = losses.losses("peers", [ahead, behind, level, bound, missed])
    assert found == [(behind, losses.IN_FEW_CHUNKS), (level, losses.LEVEL), (missed, "")]


@pytest.mark.parametrize(
    "against", ["the bound", "list scheduling's guarantee", "none lost", "no workers, a memcpy"]
)
def test_a_bound_is_no_system(benchmark_of: Any, against: str) -> None:
    line, losses = benchmark_of("measuring").Line, benchmark_of("losses")
    assert not losses.losses(
        "peers_data", [line("at once", "x", against, "us", [2.0] * 5, [1.0] * 5)]
    )


@pytest.mark.parametrize(("bare", "said"), [(1.5, True), (0.9, False), (None, False)])
def test_what_a_reason_says_of_others_is_seen_in_the_table(
    benchmark_of: Any, bare: float | None, said: bool
) -> None:
    line, losses = benchmark_of("measuring").Line, benchmark_of("losses")
    behind = line("call by call", "1 ms", "multiprocessing", "us", [2.0] * 5, [1.0] * 5)
    elsewhere = line("call by call", "nothing", losses.BARE, "us", [2.0] * 5, [3.0] * 5)
    third = (
        []
        if bare is None
        else [line("call by call", "1 ms", losses.BARE, "us", [2.0] * 5, [bare] * 5)]
    )
    reasons = [
        why for found, why in losses.losses("peers", [behind, elsewhere, *third]) if found is behind
    ]
    assert reasons == [losses.BY_PIPES if said else ""]
