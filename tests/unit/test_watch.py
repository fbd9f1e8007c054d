"""Ranks that wait for each other in different places, in simulated time; no rank is late because it
is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from raypool.spmd import group as group_module
from raypool.spmd import watch as watch_module
from raypool.spmd.group import Assignment, Group
from raypool.spmd.transport import NoTransport
from raypool.spmd.watch import ENDED, Begun, RankWatch, Whereabouts
from raypool.spmd.wire import Packer

WORLD = (0, 1, 2)

COMPUTES = Whereabouts(begun={"gloo 0": Begun(WORLD, 7)})
REPORTS = Whereabouts("ray.train.report", 3, None, 0.0, COMPUTES.begun)
HAS_ENDED = Whereabouts(ENDED, 0, None, 0.0, COMPUTES.begun)
REDUCES = Whereabouts(begun={"gloo 0": Begun(WORLD, 8, 8, "all_reduce", 0.0)})
AT_BARRIER = Whereabouts(begun={"gloo 0": Begun(WORLD, 8, 8, "barrier", 0.0)})
IN_A_PAIR = Whereabouts(
    begun={"gloo 0": Begun(WORLD, 7), "gloo 1": Begun((1, 2), 4, 4, "all_reduce", 0.0)}
)
RECEIVES_FROM_1 = Whereabouts("receive", 2, 1)
RECEIVES_FROM_0 = Whereabouts("receive", 2, 0)


class Store(dict[str, bytes]):
    """As torch's."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> Any:
        return self[key]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(watch_module, "_warn", told.append)
    return told


def look(
    places: list[Whereabouts], until: float, limit_s: float | None = 600.0
) -> tuple[float, str, tuple[int, ...]] | None:
    """Let all ranks look every five seconds; return when the first one is told that they fail, and
    what.
    """
    store = Store()
    watches = [
        RankWatch(
            rank,
            len(places),
            store,
            1,
            limit_s,
            lambda rank=rank: str(places[rank]),
            lambda rank=rank: places[rank],
        )
        for rank in range(len(places))
    ]
    for now in range(0, int(until), 5):
        for watch in watches:
            verdict = watch.look(float(now))
            if verdict is not None:
                return float(now), *verdict
    return None


@pytest.mark.parametrize(
    ("places", "told", "missing"),
    [
        (
            [REPORTS, REDUCES, REDUCES],
            "Rank 0 has been in ray.train.report (the 3rd operation of this call) since",
            (0,),
        ),
        (
            [COMPUTES, REDUCES, HAS_ENDED],
            "Rank 1 has been in torch.distributed.all_reduce since",
            (2,),
        ),
        (
            [AT_BARRIER, REDUCES, COMPUTES],
            "Rank 0 has been in torch.distributed.barrier since",
            (0, 1),
        ),
        (
            [RECEIVES_FROM_1, REPORTS, COMPUTES],
            "Rank 0 has been in receive (the 2nd operation of this call) since",
            (1,),
        ),
        (
            [RECEIVES_FROM_1, RECEIVES_FROM_0, COMPUTES],
            "Ranks 0 and 1 have been in receive",
            (0, 1),
        ),
    ],
)
def test_ranks_that_can_never_meet(
    places: list[Whereabouts], told: str, missing: tuple[int, ...], warnings: list[str]
) -> None:
    """They are warned about after 30 s, once, and fail after 10 min, whoever of them looks
    first.
    """
    assert look(places, until=30) is None
    assert not warnings
    assert look(places, until=600) is None
    assert [text[: len(told)] for text in warnings] == [told]
    assert "after mismatch_timeout_s=600 the call fails" in warnings[0]
    failed = look(places, until=700)
    assert failed is not None
    at, text, named = failed
    assert 600 <= at <= 615
    assert text.startswith(told)
    assert "drop_last=True" in text
    assert "Join" in text
    assert named == missing


@pytest.mark.parametrize(
    "places",
    [
        [REDUCES, REDUCES, COMPUTES],
        [REPORTS, COMPUTES, REPORTS],
        [HAS_ENDED, COMPUTES, HAS_ENDED],
        [REPORTS, COMPUTES, IN_A_PAIR],
        [REPORTS, IN_A_PAIR, COMPUTES],
        [COMPUTES, RECEIVES_FROM_0, REPORTS],
    ],
)
def test_slow_ranks_are_waited_for(places: list[Whereabouts], warnings: list[str]) -> None:
    assert look(places, until=3600) is None
    assert not warnings


def test_without_a_limit_there_is_a_warning_only(warnings: list[str]) -> None:
    assert look([REPORTS, REDUCES], until=3600, limit_s=None) is None
    assert len(warnings) == 1
    assert "fails" not in warnings[0]


def test_ranks_that_move_on_are_forgotten(warnings: list[str]) -> None:
    """A rank that is ahead of another for a moment, again and again, is not stuck."""
    store, places = Store(), [COMPUTES, COMPUTES]
    watches = [
        RankWatch(
            rank,
            2,
            store,
            1,
            600.0,
            lambda rank=rank: str(places[rank]),
            lambda rank=rank: places[rank],
        )
        for rank in (0, 1)
    ]
    for now in range(0, 3600, 5):
        number = now // 20
        places[:] = [
            Whereabouts("ray.train.report", number, None, 0.0, {"gloo 0": Begun((0, 1), number)}),
            Whereabouts(begun={"gloo 0": Begun((0, 1), number + 1, number + 1, "all_reduce", 0.0)}),
        ]
        assert [watch.look(float(now)) for watch in watches] == [None, None]
    assert not warnings


@pytest.mark.parametrize("is_deadlock", [False, True])
def test_messages_are_moves_too(
    is_deadlock: bool, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for a message. It arrives, rank 0 computes, and the sender ends, which torch's
    record shows. Or the other rank comes to wait for a message of rank 0's.
    """
    record = ""
    monkeypatch.setattr(group_module, "progress", lambda: record)
    monkeypatch.setattr(group_module, "begun_collectives", lambda since: {})
    store = Store()
    groups = [
        Group(Assignment(rank, 2, rank, 2, 1, True, True, "k"), NoTransport(), Packer(b""))
        for rank in (0, 1)
    ]
    watches = [
        RankWatch(rank, 2, store, 1, 60.0, group._moves, group._place)
        for rank, group in enumerate(groups)
    ]
    verdicts = []
    with ExitStack() as waits, ExitStack() as receives:
        receives.enter_context(groups[0].operation("receive", 1))
        for now in range(0, 200, 5):
            if now == 20 and is_deadlock:
                waits.enter_context(groups[1].operation("receive", 0))
            elif now == 20:
                receives.close()
                groups[1]._is_ending = True
            for rank, watch in enumerate(watches):
                record = "the end" if groups[rank]._is_ending else "the beginning"
                verdicts.append(watch.look(float(now)))
    assert any(verdicts) is bool(warnings) is is_deadlock
