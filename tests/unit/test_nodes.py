"""What a pool does when nodes go and come, without Ray: the driver is told in time, and what was
lost is made up for.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest

from raypool.backends.ray.nodes import LAST_S, MARGIN_S, OVERDUE_S, Nodes, NodeWatch
from raypool.core.messages import (
    PlaceLeaving,
    PlaceLost,
    PoolLeaving,
    PoolResumed,
    ResizeRequested,
    WorkerLost,
)
from raypool.errors import LossReason, ResourceError

GRACE_S = 3.0


class Land:
    """Nodes, and the places of a pool on them."""

    def __init__(self, *homes: str, may_grow: bool = False) -> None:
        self.may_grow = may_grow
        self.fitting: set[str] = set()  # nodes besides its own with room for workers
        self.where: dict[int, str | None] = dict(enumerate(homes))
        self.alive = {"here": "laptop", **{home: f"host-{home}" for home in homes}}
        self.draining: dict[str, float] = {}
        self.moved: dict[int, str] = {}
        self.room: list[str] = []

    def look(self) -> Nodes:
        return Nodes(
            dict(self.alive),
            {node: at for node, at in self.draining.items() if node in self.alive},
            "here",
        )

    def may_move(self, staying: set[str]) -> bool:
        return self.may_grow or not self.fitting.isdisjoint(staying)

    def places(self) -> dict[int, str | None]:
        return dict(self.where)

    def find(self, place: int) -> str | None:
        return self.moved.get(place)

    def grow(self, most: int) -> list[int]:
        places = [
            max(self.where, default=0) + 1 + number for number in range(min(most, len(self.room)))
        ]
        self.where.update((place, self.room.pop(0)) for place in places)
        return places


class Told(list[Any]):
    """What the driver was told: a list of (event, words), each looked at once."""

    def post(self, event: Any, words: Any) -> None:
        self.append((event, words))

    def news(self) -> list[Any]:
        events = [event for event, _ in self]
        self.clear()
        return events


def watch_over(land: Land) -> tuple[NodeWatch, Told]:
    told = Told()
    watch = NodeWatch(land, told.post, GRACE_S)
    watch.check()
    return watch, told


def is_soon(told: Told, eventually: Any, *places: int) -> bool:
    return bool(eventually(lambda: [event for event, _ in told] == [ResizeRequested(add=places)]))


def test_nothing_is_said_while_nothing_happens() -> None:
    watch, told = watch_over(Land("a", "b"))
    watch.check()
    assert told.news() == []


def test_a_node_that_goes_is_left_before_it_does() -> None:
    land = Land("a", "b", "b")
    watch, told = watch_over(land)
    gone_at = land.draining["b"] = time.monotonic() + 60

    watch.check()
    watch.check()

    assert all(re.fullmatch(r"node host-b will shut down in [2-6]\d s", words) for _, words in told)
    assert len(told) == 2
    assert told.news() == [
        PlaceLeaving(place, pytest.approx(gone_at - GRACE_S - MARGIN_S)) for place in (1, 2)
    ]
    assert not watch.stays("b")
    del land.alive["b"]
    watch.check()
    assert told.news() == [PlaceLost(place, LossReason.PREEMPTED) for place in (1, 2)]


def test_a_node_that_goes_some_day_is_left_when_what_runs_has_ended() -> None:
    land = Land("a", "b")
    watch, told = watch_over(land)
    land.draining["b"] = math.inf
    watch.check()
    assert told == [(PlaceLeaving(1, None), "node host-b will shut down")]


def test_a_deadline_that_is_too_close_is_now() -> None:
    land = Land("a", "b")
    watch, told = watch_over(land)
    land.draining["b"] = time.monotonic() + 1
    before = time.monotonic()
    watch.check()
    assert before <= told[0][0].at <= time.monotonic()


def test_a_node_that_goes_sooner_than_was_said_is_news() -> None:
    """A spot machine that waits for its maintenance, in an hour, is wanted now."""
    land = Land("a", "b")
    watch, told = watch_over(land)
    for gone_in in (3600, 25, math.inf, 25):
        told.clear()
        gone_at = land.draining["b"] = time.monotonic() + gone_in
        watch.check()
        watch.check()
        at = None if math.isinf(gone_in) else pytest.approx(gone_at - GRACE_S - MARGIN_S)
        assert told.news() == [PlaceLeaving(1, at)]
    del land.alive["b"]
    land.room = ["a", "a"]
    watch.check()
    assert told[0][0] == PlaceLost(1, LossReason.PREEMPTED)


def test_half_of_a_short_notice_is_for_saving() -> None:
    land = Land("a", "b")
    told = Told()
    watch = NodeWatch(land, told.post, grace_s=60.0)
    before = time.monotonic()
    land.draining["b"] = before + 25
    watch.check()
    left_s = told[0][0].at - before + MARGIN_S
    assert 25 / 2 <= left_s <= (25 + time.monotonic() - before) / 2


WAITS = PoolLeaving(is_final=False)


def ends(gone_at: float) -> PoolLeaving:
    """Expect that all nodes go, and that no other can come."""
    soon = pytest.approx
    return PoolLeaving(True, soon(gone_at - GRACE_S - MARGIN_S), soon(gone_at - MARGIN_S))


def test_where_all_nodes_go_and_no_other_can_come_the_pool_ends(caplog: Any) -> None:
    """Before the first of them has gone; a node that went seconds before was left for the other."""
    land = Land("a", "b", "c")
    watch, told = watch_over(land)
    first = land.draining["a"] = time.monotonic() + 600
    watch.check()
    assert told.news() == [PlaceLeaving(0, pytest.approx(first - GRACE_S - MARGIN_S))]
    del land.where[0]
    land.draining |= {"b": first + 7, "c": first + 3}
    watch.check()
    watch.check()
    assert told == [(ends(first + 3), "nodes host-b, host-c will shut down")]
    assert re.search(
        r"will shut down in (60\d|59\d) s\. Running tasks may finish; then the pool ends",
        caplog.text,
    )
    told.clear()
    land.draining["b"] = first - 300
    watch.check()
    assert told.news() == [ends(first - 300)]
    assert caplog.text.count("the pool ends") == 1


def test_a_node_beside_the_pool_that_has_room_is_waited_for() -> None:
    """It may come when the others go already; then it may go, too."""
    land = Land("a")
    watch, told = watch_over(land)
    gone_at = land.draining["a"] = time.monotonic() + 60
    watch.check()
    land.alive["c"], land.fitting = "host-c", {"c"}
    watch.check()
    land.draining["c"] = gone_at
    watch.check()
    assert told.news() == [ends(gone_at), WAITS, ends(gone_at)]


def test_without_a_deadline_it_ends_when_its_tasks_have() -> None:
    land = Land(*"abcdef")
    watch, told = watch_over(land)
    land.draining = dict.fromkeys("abcdef", math.inf)
    watch.check()
    watch.check()
    words = "nodes host-a, host-b, host-c, host-d and 2 more will shut down"
    assert told == [(PoolLeaving(is_final=True), words)]


def test_where_other_nodes_may_come_those_that_go_are_used_until_shortly_before() -> None:
    land = Land("b", "b", may_grow=True)
    watch, told = watch_over(land)
    for gone_in in (math.inf, 3600):
        land.draining["b"] = time.monotonic() + gone_in
        watch.check()
        assert told.news() == []
    land.draining["b"] = time.monotonic() + LAST_S - 1
    watch.check()
    watch.check()
    assert told == [(WAITS, "node host-b will shut down")]


def test_the_first_to_go_is_left_for_those_that_go_much_later() -> None:
    land = Land("a", "b", may_grow=True)
    watch, told = watch_over(land)
    land.draining = {"a": time.monotonic() + 60, "b": time.monotonic() + 3600}
    watch.check()
    assert [event.place for event in told.news()] == [0]


def test_a_node_that_was_to_go_and_does_not_is_used_again() -> None:
    land = Land("b", may_grow=True)
    watch, told = watch_over(land)
    land.draining["b"] = time.monotonic() - OVERDUE_S + 30
    watch.check()
    land.draining["b"] -= 30
    watch.check()
    assert told.news() == [WAITS, PoolResumed()]


def test_the_pool_waits_on_each_machine_that_goes() -> None:
    """A pool on one spot machine starts again on the next, which is taken back too."""
    land = Land("b", may_grow=True)
    watch, told = watch_over(land)
    land.draining["b"] = time.monotonic() + 60
    watch.check()
    del land.alive["b"]
    watch.check()
    assert told.news() == [WAITS], "nothing has come yet"
    land.alive["c"], land.moved[0] = "host-c", "c"
    watch.check()
    assert told.news() == [PoolResumed()]
    land.draining["c"] = time.monotonic() + 60
    watch.check()
    assert told == [(WAITS, "node host-c will shut down")]


def test_a_node_that_comes_before_the_others_have_gone_takes_their_work(eventually: Any) -> None:
    land = Land("b", "b", may_grow=True)
    watch, told = watch_over(land)
    land.draining["b"] = time.monotonic() + 60
    watch.check()
    land.alive["c"], land.room = "host-c", ["c"] * 5
    watch.check()
    assert eventually(lambda: ResizeRequested(add=(2, 3)) in [event for event, _ in told])
    told.clear()
    watch.check()
    *left, resumed = told.news()
    assert [event.place for event in left] == [0, 1]
    assert resumed == PoolResumed(), "else it would start where nothing stays"
    watch.check()
    assert told.news() == [], "it grew beyond what it had"


def test_a_node_that_is_lost_is_told_of_once() -> None:
    land = Land("a", "b")
    watch, told = watch_over(land)
    del land.alive["b"]
    watch.check()
    watch.check()
    assert told == [(PlaceLost(1, LossReason.NODE), "its node host-b is lost")]


def test_a_claim_that_ray_has_moved_is_not_lost() -> None:
    land = Land("a", "b")
    watch, told = watch_over(land)
    land.alive["c"] = "host-c"
    del land.alive["b"]
    land.moved[1] = "c"
    watch.check()
    assert told.news() == []


def test_the_last_places_are_not_given_up(eventually: Any) -> None:
    """They start again where Ray finds room for them; what else was lost is made up for then."""
    land = Land("a", "b")
    watch, told = watch_over(land)
    del land.alive["a"], land.alive["b"]
    watch.check()
    assert told.news() == []

    land.alive["c"] = "host-c"
    land.moved[0], land.room = "c", ["c"]
    watch.check()
    assert told[0][0] == PlaceLost(1, LossReason.NODE)
    assert eventually(lambda: ResizeRequested(add=(2,)) in [event for event, _ in told])


def test_what_was_lost_is_made_up_for_when_a_node_comes(eventually: Any, caplog: Any) -> None:
    land = Land("a", "b", "b")
    watch, told = watch_over(land)
    del land.alive["b"]
    watch.check()
    assert len(told.news()) == 2
    del land.where[1], land.where[2]

    land.alive["c"] = "host-c"
    land.room = ["c"] * 5
    watch.check()

    assert is_soon(told, eventually, 1, 2)
    assert eventually(lambda: "2 more workers on host-c" in caplog.text)
    told.clear()
    land.alive["d"] = "host-d"
    watch.check()
    assert told.news() == [], "it grew beyond what it had"


def test_nobody_reads_the_size_while_it_is_about_to_grow(eventually: Any) -> None:
    is_kept: list[bool] = []
    land = Land("a", "b")
    watch = NodeWatch(
        land,
        lambda event, _: type(event) is ResizeRequested and is_kept.append(watch._growing.locked()),
        GRACE_S,
    )
    watch.check()
    del land.alive["b"]
    watch.check()
    land.alive["c"], land.room = "host-c", ["c"]
    watch.check()
    assert eventually(lambda: is_kept)
    assert is_kept == [True]


def test_who_sets_the_size_is_content_with_it(eventually: Any) -> None:
    land = Land("a", "b", "b")
    watch, told = watch_over(land)
    del land.alive["b"]
    watch.check()
    told.clear()
    del land.where[1], land.where[2]

    with pytest.raises(ResourceError), watch.sizing():
        raise ResourceError("there is no room", requested=3, available=1, holders=())
    land.alive["c"] = "host-c"
    land.room = ["c"]
    watch.check()
    assert is_soon(told, eventually, 1), "a size that could not be had has changed something"

    with watch.sizing():
        pass
    land.alive["d"] = "host-d"
    land.room = ["d"]
    watch.check()
    assert told[1:] == []


def test_a_machine_that_ray_takes_for_dead() -> None:
    land = Land("a")
    watch, _ = watch_over(land)
    assert not watch.is_adrift
    del land.alive["here"]
    watch.check()
    assert watch.is_adrift


def test_silence_is_counted_by_who_asks() -> None:
    """While the process stands still, nobody asks: it has heard nothing, but nothing is wrong."""
    watch, _ = watch_over(Land("a"))
    assert [watch.silent_s(1.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    watch.check()
    assert watch.silent_s(1.0) == 1.0


@pytest.mark.parametrize("reason", [LossReason.EXIT, LossReason.NODE])
def test_a_worker_that_dies_with_a_node_that_had_given_notice_is_preempted(
    reason: LossReason,
) -> None:
    """Ray tells of the worker first, and of the node when somebody asks."""
    land = Land("a", "b")
    watch, told = watch_over(land)
    land.draining["b"] = time.monotonic() + 60
    watch.check()
    told.clear()
    for node in "ab":
        del land.alive[node]

    watch.tell_lost(WorkerLost(0, reason), "it has died", "a")
    watch.tell_lost(WorkerLost(1, reason), "it has died", "b")

    assert told.news() == [WorkerLost(0, reason), WorkerLost(1, LossReason.PREEMPTED)]


def test_a_worker_that_dies_by_itself_on_a_node_that_is_about_to_go_has_died_by_itself() -> None:
    land = Land("a")
    watch, told = watch_over(land)
    land.draining["a"] = math.inf
    watch.check()
    told.clear()

    watch.tell_lost(WorkerLost(0, LossReason.EXIT, was_idle=True), "exit code 1", "a")
    watch.tell_lost(WorkerLost(1, LossReason.OUT_OF_MEMORY), "killed", None)

    assert told == [
        (WorkerLost(0, LossReason.EXIT, was_idle=True), "exit code 1"),
        (WorkerLost(1, LossReason.OUT_OF_MEMORY), "killed"),
    ]
