"""What arrives finds its way, in order, and whoever reads after the end reads all of it."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raypool.channel import hub as hub_module
from raypool.channel import queues
from raypool.channel.feed import Feed
from raypool.channel.hub import MAX_EARLY, Hub
from raypool.errors import InternalError
from raypool.worker.running import TaskContext


class Listener:
    """Somebody who has a feed once there is something in it."""

    feed: Feed | None = None

    @property
    def text(self) -> str:
        return self.feed.text() if self.feed is not None else ""


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def hub(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(hub_module, "CATCH_UP_S", 300.0)
    hub = Hub()
    hub.watch(7, listener)
    return hub


def says(text: str, task_id: int = 7) -> bytes:
    return pickle.dumps([("text", task_id, text, 0)])


def test_a_feed_is_made_by_the_first_word(hub: Hub, listener: Listener) -> None:
    assert listener.feed is None
    note = TaskContext(3, 2, None, 0, None, None, 7)
    hub.say(note, "text", "one ")
    hub.deliver(0, 1, says("two"))
    assert listener.text == "one two"
    hub.say(note, "metrics", (12.0, {"loss": 1.5}))
    assert listener.feed is not None
    assert listener.feed.metrics("item")[["item", "attempt", "loss"]].values.tolist() == [
        [3, 2, 1.5]
    ]


def test_tasks_are_told_apart_and_those_that_nobody_holds_are_not_heard(
    hub: Hub, listener: Listener
) -> None:
    other = Listener()
    hub.watch(8, other)
    hub.deliver(
        0, 1, pickle.dumps([("text", 7, "a", 0), ("text", 8, "b", 0), ("text", 99, "c", 0)])
    )
    assert (listener.text, other.text) == ("a", "b")
    del other
    gc.collect()
    hub.deliver(
        0,
        2,
        pickle.dumps(
            [("text", 8, "d", 0), ("metrics", 8, pickle.dumps([]), {}), ("text", 7, "e", 0)]
        ),
    )
    assert listener.text == "ae"


def test_batches_count_in_order_and_once(hub: Hub, listener: Listener) -> None:
    hub.deliver(0, 3, says("3"))
    hub.deliver(1, 1, says("x"))  # another worker's
    hub.deliver(0, 1, says("1"))
    assert listener.text == "x1"
    hub.deliver(0, 2, says("2"))
    hub.deliver(0, 2, says("2"))
    hub.deliver(0, 3, says("3"))
    hub.deliver(0, 3, b"")
    assert listener.text == "x123"


def test_a_batch_that_does_not_come_holds_up_only_so_many(hub: Hub, listener: Listener) -> None:
    for number in range(2, MAX_EARLY + 3):
        assert listener.text == ""
        hub.deliver(0, number, says("."))
    assert listener.text == "." * (MAX_EARLY + 1)
    for _ in range(2):  # it counts when it comes, once
        hub.deliver(0, 1, says("late"))
    hub.deliver(0, MAX_EARLY + 3, says("!"))
    assert listener.text.endswith(".late!")


def test_whoever_waits_has_all_that_was_said_before(hub: Hub, listener: Listener) -> None:
    hub.deliver(0, 1, says("1"))
    assert hub.waiter(0, 1) is None
    wait = hub.waiter(0, 3)
    assert wait is not None
    threads = [
        threading.Thread(target=hub.deliver, args=(0, number, says(str(number))))
        for number in (3, 2)
    ]
    for thread in threads:
        thread.start()
    wait()
    assert listener.text == "123"
    wait()  # twice does no harm
    for thread in threads:
        thread.join()


def test_catching_up_waits_for_all_that_was_asked_for(hub: Hub, listener: Listener) -> None:
    hub.catch_up()
    hub.waiter(0, 1)
    hub.waiter(1, 2)
    hub.deliver(1, 1, says("b"))
    threads = [
        threading.Thread(target=hub.deliver, args=(*entry, says("x"))) for entry in ((1, 2), (0, 1))
    ]
    for thread in threads:
        thread.start()
    hub.catch_up()
    assert sorted(listener.text) == ["b", "x", "x"]
    for thread in threads:
        thread.join()


def test_what_does_not_come_is_waited_for_once(
    hub: Hub, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "CATCH_UP_S", 0.01)
    wait = hub.waiter(0, 4)
    assert wait is not None
    hub.deliver(0, 2, says("2"))
    hub.deliver(0, 5, says("5"))
    wait()
    assert listener.text == "25"
    assert hub.waiter(0, 4) is None
    for _ in range(2):
        hub.deliver(0, 4, says("4"))
    assert listener.text == "254", "it is late, but not lost"


def test_what_came_without_those_before_it_is_there_when_nobody_waits_for_them_any_more(
    hub: Hub, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before what comes later, which comes once, also if it is sent again."""
    monkeypatch.setattr(hub_module, "CATCH_UP_S", 0.01)
    wait = hub.waiter(0, 6)
    assert wait is not None
    hub.deliver(0, 3, says("3"))
    hub.deliver(0, 6, says("6"))
    wait()
    assert listener.text == "36"
    hub.deliver(0, 7, says("7"))
    hub.forget(0)
    hub.deliver(0, 7, says("7"))
    assert listener.text == "367"


@pytest.mark.parametrize("end", [lambda hub: hub.forget(0), lambda hub: hub.close()])
def test_nobody_waits_for_a_worker_that_has_gone(
    hub: Hub, listener: Listener, end: Callable[[Hub], None]
) -> None:
    wait = hub.waiter(0, 5)
    hub.deliver(0, 3, says("3"))
    hub.deliver(0, 6, says("6"))
    end(hub)
    assert wait is not None
    wait()
    assert hub.waiter(0, 9) is None
    assert listener.text == "36"
    for number in (9, 4, 9):  # they were on their way
        hub.deliver(0, number, says(str(number)))
    assert listener.text == "3694"


def test_what_nobody_knows_is_an_error_and_does_not_stop_what_follows(
    hub: Hub, listener: Listener
) -> None:
    with pytest.raises(InternalError, match="'song'"):
        hub.deliver(0, 1, pickle.dumps([("song", 7, "la")]))
    hub.deliver(0, 2, says("2"))
    assert listener.text == "2"


def test_values_of_queues_go_to_the_queues(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[Any] = []
    monkeypatch.setattr(queues, "deliver", lambda *entry: delivered.append(entry))
    hub.deliver(0, 1, pickle.dumps([("queue", "key", b"1"), ("queue", "key", b"2")]))
    assert delivered == [("key", b"1"), ("key", b"2")]


def test_what_is_told_of_calls_that_last_goes_to_who_asked_for_it_in_order(
    hub: Hub, listener: Listener
) -> None:
    seen: list[tuple[Any, ...]] = []
    hub.on_early = lambda *message: seen.append((*message, listener.text))
    hub.deliver(3, 2, pickle.dumps([("early", 9, b"second")]))
    hub.deliver(3, 1, pickle.dumps([("text", 7, "said before", 0), ("early", 8, b"first")]))
    assert seen == [(3, b"first", "said before"), (3, b"second", "said before")]


def test_where_nobody_asked_for_that_it_is_dropped(hub: Hub, listener: Listener) -> None:
    hub.deliver(3, 1, pickle.dumps([("early", 9, b""), ("text", 7, "after it", 0)]))
    assert listener.text == "after it"
