"""A queue in one process, from many threads; and from afar, by a link that is not there."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import itertools
import pickle
import signal
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raypool import (
    DataQueue,
    InvalidTypeError,
    InvalidValueError,
    PoolClosedError,
    QueueClosedError,
    SerializationError,
    WorkerLostError,
)
from raypool.channel import queues
from raypool.channel.exchange import LocalExchange
from raypool.channel.queues import deliver, offer
from raypool.errors import LossReason
from raypool.worker.running import this_process

TIMEOUT_S = 300.0


def key_of(queue: DataQueue[Any]) -> str:
    """Return what workers know a queue by."""
    return queue._key


def num_putters(queue: DataQueue[Any]) -> int:
    """Return how many wait for room, here or afar."""
    return len(queue._end._putters)  # type: ignore[union-attr]


class Aside:
    """Runs a function in a thread of its own, and brings back what came of it."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self.thread = threading.Thread(target=self._run, args=(fn,), daemon=True)
        self.thread.start()

    def _run(self, fn: Callable[[], Any]) -> None:
        try:
            self._outcome = fn()
        except BaseException as error:
            self._outcome = error

    @property
    def is_waiting(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> Any:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        return self._outcome

    def interrupt(self, error: type[BaseException]) -> None:
        assert self.thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.thread.ident), ctypes.py_object(error)
        )


def is_in_order(values: list[tuple[int, int]], num_senders: int, count: int) -> bool:
    by_sender: dict[int, list[int]] = defaultdict(list)
    for sender, number in values:
        by_sender[sender].append(number)
    return by_sender == {sender: list(range(count)) for sender in range(num_senders)}


def put_many(queue: DataQueue[Any], num_senders: int, count: int) -> list[Aside]:
    return [
        Aside(lambda sender=sender: [queue.put((sender, number)) for number in range(count)])
        for sender in range(num_senders)
    ]


# --- put and get ----------------------------------------------------------------------------------


def test_values_come_in_order_and_are_the_same_objects() -> None:
    queue: DataQueue[Any] = DataQueue()
    values = [object(), None, [1]]
    for value in values:
        queue.put(value)
    assert queue.backlog == 3
    assert all(queue.get() is value for value in values)
    assert queue.backlog == 0


@pytest.mark.parametrize("timeout_s", [0, 0.01, np.float32(0.01)])
def test_a_queue_with_nothing_in_it_times_out(timeout_s: float) -> None:
    with pytest.raises(TimeoutError, match=f"within {timeout_s:g} s"):
        DataQueue().get(timeout_s=timeout_s)


@pytest.mark.parametrize("maxsize", [None, 1, 7])
def test_many_senders_lose_nothing_and_keep_their_order(maxsize: int | None) -> None:
    queue: DataQueue[tuple[int, int]] = DataQueue(maxsize)
    senders = put_many(queue, 4, 500)
    values = [queue.get(TIMEOUT_S) for _ in range(2000)]
    assert is_in_order(values, 4, 500)
    assert queue.backlog == 0
    assert all(not isinstance(sender.result(), BaseException) for sender in senders)


def test_several_readers_share_what_comes() -> None:
    queue: DataQueue[int] = DataQueue(maxsize=3)
    readers = [Aside(lambda: list(queue)) for _ in range(4)]
    for number in range(1000):
        queue.put(number)
    queue.close()
    assert sorted(value for reader in readers for value in reader.result()) == list(range(1000))


def test_who_waits_gets_what_comes(eventually: Any) -> None:
    queue: DataQueue[str] = DataQueue()
    reader = Aside(queue.get)
    assert reader.is_waiting
    queue.put("late")
    assert reader.result() == "late"


REFUSED = [
    ({"maxsize": 0}, InvalidValueError, "maxsize must be at least 1, not"),
    ({"maxsize": -1}, InvalidValueError, "maxsize must be at least 1, not"),
    ({"maxsize": 1.5}, InvalidTypeError, "maxsize must be an integer, not"),
    ({"maxsize": True}, InvalidTypeError, "maxsize must be an integer, not"),
    ({"policy": "newest"}, InvalidValueError, "policy must be 'block' or 'latest', not"),
    ({"policy": None}, InvalidValueError, "policy must be 'block' or 'latest', not None"),
]


def test_arguments_that_cannot_work() -> None:
    for arguments, error, words in REFUSED:
        with pytest.raises(error, match=words):
            DataQueue(**arguments)


NO_TIMES = [
    (-1, InvalidValueError),
    (float("nan"), InvalidValueError),
    ("1", InvalidTypeError),
    (True, InvalidTypeError),
]


def test_times_that_cannot_be_waited() -> None:
    for timeout_s, error in NO_TIMES:
        with pytest.raises(error, match="timeout_s"):
            DataQueue().get(timeout_s)


# --- a limit --------------------------------------------------------------------------------------


def test_put_waits_for_room_and_is_let_in_by_turns(eventually: Any) -> None:
    queue: DataQueue[str] = DataQueue(maxsize=2)
    queue.put("a")
    queue.put("b")
    waiting = []
    for count, name in enumerate("cde", 1):
        waiting.append(Aside(lambda name=name: queue.put(name)))
        assert eventually(lambda count=count: num_putters(queue) == count)
    assert queue.backlog == 2
    assert queue.get() == "a"
    waiting[0].result()
    assert queue.backlog == 2
    assert waiting[1].is_waiting
    assert [queue.get() for _ in range(4)] == ["b", "c", "d", "e"]
    assert all(other.result() is None for other in waiting)


def queue_with_a_putter(eventually: Any) -> DataQueue[int]:
    """Return a queue with 0 in it, and 1 waiting for room."""
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    Aside(lambda: queue.put(1))
    assert eventually(lambda: num_putters(queue) == 1)
    return queue


def get_and(queue: DataQueue[int], meanwhile: Callable[[], object]) -> int:
    """Read a value; call this when it was taken, before those who wait for room are let in."""
    owner: Any = queue._end
    let_in = owner._let_in

    def call_first() -> None:
        owner._let_in = let_in
        meanwhile()
        let_in()

    owner._let_in = call_first
    return queue.get()


def test_a_reader_that_waits_is_woken_for_what_another_lets_in(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(queues, "LOOK_AGAIN_S", TIMEOUT_S)  # it does not look by itself
    queue = queue_with_a_putter(eventually)
    owner: Any = queue._end
    readers: list[Aside] = []

    def fall_asleep() -> None:
        readers.append(Aside(queue.get))
        assert eventually(lambda: owner._filled._waiters)

    assert get_and(queue, fall_asleep) == 0
    assert not owner._filled._waiters, "it was woken"
    assert readers[0].result() == 1


def test_a_listener_gets_what_a_reader_lets_in(eventually: Any) -> None:
    queue = queue_with_a_putter(eventually)
    seen: list[int] = []
    assert get_and(queue, lambda: queue.after_each(seen.append)) == 0
    assert eventually(lambda: seen == [1])
    queue.close()


def test_who_gives_up_waiting_has_put_nothing(eventually: Any) -> None:
    queue: DataQueue[str] = DataQueue(maxsize=1)
    queue.put("first")
    given_up, other = Aside(lambda: queue.put("given up")), None
    assert eventually(lambda: num_putters(queue) == 1)
    other = Aside(lambda: queue.put("other"))
    assert eventually(lambda: num_putters(queue) == 2)
    given_up.interrupt(KeyboardInterrupt)
    assert isinstance(given_up.result(), KeyboardInterrupt)
    assert [queue.get(), queue.get(TIMEOUT_S)] == ["first", "other"]
    assert other.result() is None
    assert queue.backlog == 0


def test_who_waits_for_room_that_nobody_makes_is_told(
    monkeypatch: Any, caplog: Any, eventually: Any
) -> None:
    monkeypatch.setattr(queues, "PATIENCE_S", 0.05)
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    waiting = Aside(lambda: queue.put(1))
    assert eventually(lambda: "and nothing was read for" in caplog.text)
    queue.close()
    assert isinstance(waiting.result(), QueueClosedError)
    assert caplog.text.count("nothing was read for") == 1


def test_putters_that_are_interrupted_anywhere_leave_the_queue_in_order() -> None:
    queue: DataQueue[int] = DataQueue(maxsize=3)
    seen: list[int] = []
    reading = Aside(lambda: seen.extend(queue))

    def put_on(begun: threading.Event) -> None:
        begun.set()
        number = 0
        while True:
            queue.put(number)
            number += 1

    gc.disable()  # an exception in a callback of the collector is lost
    try:
        for _ in range(100):
            begun = threading.Event()
            putter = Aside(functools.partial(put_on, begun))
            # what is seen may be of the one before
            assert begun.wait(TIMEOUT_S)
            while not seen and putter.is_waiting:
                pass
            putter.interrupt(KeyboardInterrupt)
            assert isinstance(putter.result(), (KeyboardInterrupt, RuntimeError))
            seen.clear()
    finally:
        gc.enable()
    own = Aside(lambda: [queue.put(-1) for _ in range(10)])
    own.result()
    queue.close()
    reading.result()
    assert seen.count(-1) == 10
    assert queue.backlog == 0


def test_the_latest_are_kept() -> None:
    queue: DataQueue[int] = DataQueue(maxsize=3, policy="latest")
    for number in range(10):
        queue.put(number)
    assert [queue.get() for _ in range(3)] == [7, 8, 9]
    one: DataQueue[int] = DataQueue(policy="latest")
    one.put(1)
    one.put(2)
    assert (one.backlog, one.get()) == (1, 2)


# --- the end --------------------------------------------------------------------------------------


def test_a_closed_queue_takes_nothing_and_gives_what_is_left() -> None:
    queue: DataQueue[int] = DataQueue()
    queue.put(1)
    queue.put(2)
    assert not queue.is_closed
    queue.close()
    queue.close()
    assert queue.is_closed
    with pytest.raises(QueueClosedError, match="nothing more can be put"):
        queue.put(3)
    assert queue.get() == 1
    assert list(queue) == [2]
    assert list(queue) == []
    with pytest.raises(QueueClosedError, match="everything in it was read"):
        queue.get(timeout_s=0)


def test_closing_releases_those_who_wait_to_put(eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    waiting = [Aside(lambda: queue.put(1)) for _ in range(3)]
    assert eventually(lambda: num_putters(queue) == 3)
    queue.close()
    assert all(isinstance(other.result(), QueueClosedError) for other in waiting)
    assert list(queue) == [0]


def test_closing_releases_those_who_wait_to_get() -> None:
    queue: DataQueue[int] = DataQueue()
    readers = [Aside(queue.get), Aside(lambda: queue.get(60.0)), Aside(lambda: list(queue))]
    queue.close()
    first, second, third = (reader.result() for reader in readers)
    assert isinstance(first, QueueClosedError)
    assert isinstance(second, QueueClosedError)
    assert third == []


# --- listeners ------------------------------------------------------------------------------------


def test_a_listener_gets_what_waits_already_then_what_comes() -> None:
    queue: DataQueue[tuple[int, int]] = DataQueue()
    seen: list[tuple[int, int]] = []
    for sender in put_many(queue, 3, 100):
        sender.result()
    queue.after_each(seen.append)
    for sender in put_many(DataQueue(), 1, 1):
        sender.result()
    queue.close()
    assert is_in_order(seen, 3, 100)


@pytest.mark.parametrize("maxsize", [None, 2])
def test_listeners_get_everything_in_order_while_it_comes(maxsize: int | None) -> None:
    queue: DataQueue[tuple[int, int]] = DataQueue(maxsize)
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    queue.after_each(first.append)
    queue.after_each(second.append)
    for sender in put_many(queue, 4, 300):
        assert not isinstance(sender.result(), BaseException)
    queue.close()
    assert is_in_order(first, 4, 300)
    assert first == second


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_what_a_listener_raises_is_logged_once_and_stops_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    queue: DataQueue[int] = DataQueue()
    seen: list[int] = []

    def fail(value: int) -> None:
        raise error

    queue.after_each(fail)
    queue.after_each(seen.append)
    for number in range(3):
        queue.put(number)
    queue.close()
    assert seen == [0, 1, 2]
    assert sum("fail" in record.getMessage() for record in caplog.records) == 1


def test_a_removed_listener_gets_no_more_and_values_wait_again(eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    first: list[int] = []
    second: list[int] = []
    listener, other = queue.after_each(first.append), queue.after_each(second.append)
    queue.put(1)
    assert eventually(lambda: first == second == [1])
    listener.remove()
    listener.remove()
    queue.put(2)
    assert eventually(lambda: second == [1, 2])
    other.remove()
    queue.put(3)
    assert queue.get(TIMEOUT_S) == 3
    assert first == [1]


def test_a_listener_can_remove_itself_and_nothing_is_lost(eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    seen: list[int] = []
    removed = threading.Event()

    def once(value: int) -> None:
        seen.append(value)
        listener.remove()
        removed.set()

    listener = queue.after_each(once)
    for number in range(5):
        queue.put(number)
    assert removed.wait(TIMEOUT_S)
    assert [queue.get(TIMEOUT_S) for _ in range(4)] == [1, 2, 3, 4]
    assert seen == [0]


def test_get_beside_listeners_is_refused(eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    reader = Aside(queue.get)
    listener = queue.after_each(lambda value: None)
    assert isinstance(reader.result(), InvalidValueError)
    with pytest.raises(
        InvalidValueError, match="while the queue has listeners, which get every value"
    ):
        queue.get()
    listener.remove()
    queue.put(1)
    assert queue.get() == 1


def test_a_listener_may_close_its_queue(eventually: Any) -> None:
    queue: DataQueue[str] = DataQueue()
    seen: list[str] = []

    def take(value: str) -> None:
        seen.append(value)
        if value == "stop":
            queue.close()

    queue.after_each(take)
    for word in ("go", "stop"):
        queue.put(word)
    assert eventually(lambda: queue.is_closed)
    assert seen == ["go", "stop"]


def test_a_thread_of_the_listeners_that_does_not_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue: DataQueue[int] = DataQueue()
    seen: list[int] = []
    queue.after_each(seen.append)

    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.put(1)
    queue.put(2)
    queue.close()
    assert seen == [2]


def test_the_thread_of_the_listeners_ends_after_a_silence_and_comes_back(eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    seen: list[int] = []
    queue.after_each(seen.append)

    def threads() -> int:
        return sum(
            thread.name == f"raypool-queue-{key_of(queue)[:8]}" for thread in threading.enumerate()
        )

    queue.put(1)
    assert eventually(lambda: seen == [1])
    assert eventually(lambda: threads() == 0)
    queue.put(2)
    assert eventually(lambda: seen == [1, 2])
    queue.close()


def test_a_listener_must_be_callable() -> None:
    with pytest.raises(InvalidTypeError, match="not callable"):
        DataQueue().after_each("print")


# --- who holds it ---------------------------------------------------------------------------------


def test_a_queue_that_nobody_holds_is_forgotten_and_what_comes_is_dropped() -> None:
    queue: DataQueue[int] | None = DataQueue(maxsize=1)
    assert queue is not None
    key, gone = key_of(queue), weakref.ref(queue)
    answers: list[str] = []
    offer(key, pickle.dumps(1), answers.append)
    offer(key, pickle.dumps(2), answers.append)
    assert answers == ["taken"]
    queue = None
    gc.collect()
    assert gone() is None
    assert answers == ["taken", "taken"]  # whoever waited for room is not left waiting
    deliver(key, pickle.dumps(3))
    offer(key, pickle.dumps(4), answers.append)
    assert answers == ["taken"] * 3


class Interrupted:
    """Takes answers to offers; each of the first few tries is interrupted."""

    def __init__(self, num_interruptions: int) -> None:
        self.num_interruptions = num_interruptions
        self.answers: list[str] = []

    def __call__(self, outcome: str) -> None:
        if self.num_interruptions:
            self.num_interruptions -= 1
            raise KeyboardInterrupt
        self.answers.append(outcome)


def test_who_waits_for_room_afar_is_let_in_although_the_reader_is_interrupted() -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    answer = Interrupted(1)
    offer(key_of(queue), pickle.dumps(1), answer)
    with pytest.raises(KeyboardInterrupt):
        queue.get()
    assert answer.answers == ["taken"]
    assert [queue.get(), queue.get()] == [0, 1]


def test_a_queue_whose_closing_is_interrupted_is_closed() -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    offer(key_of(queue), pickle.dumps(1), Interrupted(2))
    with pytest.raises(KeyboardInterrupt):
        queue.close()
    assert queue.get() == 0
    with pytest.raises(QueueClosedError):
        queue.get(timeout_s=0)


def interrupted(fn: Callable[[], Any], place: int) -> tuple[list[Any], bool]:
    """Call a method of a queue's owner, with Ctrl-C at one of the places where Python looks for
    it; return its value, if it returns, and whether it has fewer places.
    """
    num_left = place

    def press(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_left
        if event in ("call", "c_return") and frame.f_code.co_filename == queues.__file__:
            num_left -= 1
            if num_left < 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(press)
    try:
        return [fn()], num_left >= 0
    except KeyboardInterrupt:
        return [], num_left >= 0
    finally:
        sys.setprofile(None)


def full_queue(answers: list[str]) -> tuple[DataQueue[int], queues.QueueOwner]:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    queue.put(0)
    offer(key_of(queue), pickle.dumps(1), answers.append)
    assert isinstance(queue._end, queues.QueueOwner)
    return queue, queue._end


def test_wherever_a_reader_is_interrupted_no_value_is_lost_and_no_putter_waits_forever() -> None:
    places, is_over = itertools.count(), False
    while not is_over:
        answers: list[str] = []
        queue, owner = full_queue(answers)
        values, is_over = interrupted(functools.partial(owner.take, 0), next(places))
        while len(values) < 2:
            values.append(queue.get(timeout_s=0))
        assert (values, set(answers)) == ([0, 1], {"taken"})


def test_wherever_its_closing_is_interrupted_nobody_waits_forever() -> None:
    places, is_over = itertools.count(), False
    while not is_over:
        answers: list[str] = []
        queue, owner = full_queue(answers)
        _, is_over = interrupted(owner.close, next(places))
        assert set(answers) == ({"closed"} if queue.is_closed else set())
        queue.close()
        assert queue.get(timeout_s=0) == 0
        with pytest.raises(QueueClosedError):
            queue.get(timeout_s=0)


def test_a_queue_with_listeners_lives_until_they_are_removed(eventually: Any) -> None:
    queue: DataQueue[int] | None = DataQueue()
    assert queue is not None
    key, seen = key_of(queue), []
    gone, listener = weakref.ref(queue), queue.after_each(seen.append)
    queue = None
    gc.collect()
    deliver(key, pickle.dumps("still here"))
    assert eventually(lambda: seen == ["still here"])
    listener.remove()
    assert eventually(lambda: gc.collect() is not None and gone() is None)


def test_a_closed_queue_with_listeners_is_let_go() -> None:
    queue: DataQueue[int] | None = DataQueue()
    assert queue is not None
    gone, _ = weakref.ref(queue), queue.after_each(print)
    queue.close()
    queue = None
    gc.collect()
    assert gone() is None


def test_a_queue_that_its_listener_closes_is_let_go(eventually: Any) -> None:
    queue: DataQueue[int] | None = DataQueue()
    assert queue is not None
    gone = weakref.ref(queue)
    seen: list[int] = []

    def take(value: int, queue: DataQueue[int] = queue) -> None:
        seen.append(value)
        queue.close()

    queue.put(1)
    queue.put(2)
    queue.after_each(take)
    del queue, take
    assert eventually(lambda: gc.collect() is not None and gone() is None)
    assert seen == [1, 2], "what it had is not lost"


def test_a_closed_queue_that_gets_a_listener_is_let_go() -> None:
    queue: DataQueue[int] | None = DataQueue()
    assert queue is not None
    gone = weakref.ref(queue)
    queue.close()
    queue.after_each(print)
    queue = None
    gc.collect()
    assert gone() is None


# --- from afar ------------------------------------------------------------------------------------


class FakeLink:
    """A worker's link: what is sent waits until `flush`; what is asked goes to an exchange in this
    process.
    """

    def __init__(self, worker_id: int, exchange: LocalExchange) -> None:
        self.worker_id = worker_id
        self.exchange = exchange
        self.sent: list[tuple[str, bytes]] = []
        self.num_batches = 0

    def pack(self, value: Any, what: str) -> bytes:
        return pickle.dumps(value)

    def unpack(self, packed: bytes) -> Any:
        return pickle.loads(packed)

    def send(self, kind: str, key: Any, payload: Any) -> None:
        assert kind == "queue"
        self.sent.append((key, payload))

    def send_latest(self, key: str, maxsize: int, payload: bytes) -> None:
        self.send("queue", key, payload)

    def ask(self, method: str, *args: Any) -> Any:
        return self.exchange.ask(method, *args)

    def flush(self) -> int:
        self.num_batches += 1
        sent, self.sent = self.sent, []
        for key, payload in sent:
            deliver(key, payload)
        return self.num_batches


class FakePool:
    """What the driver has of a pool."""

    def __init__(self) -> None:
        self.exchange = LocalExchange(self._pass_on)
        self.caught_up: list[dict[int, int]] = []
        self.on_catch_up: Callable[[], object] = lambda: None

    def _pass_on(self, queue: str, ticket: int, value: bytes) -> None:
        offer(
            queue,
            value,
            lambda outcome: Aside(lambda: self.exchange.ask("answer", ticket, outcome)),
        )

    def ask(self, method: str, *args: Any) -> Any:
        return self.exchange.ask(method, *args)

    def pack(self, value: Any, what: str) -> bytes:
        return pickle.dumps(value)

    def unpack(self, packed: bytes) -> Any:
        return pickle.loads(packed)

    def catch_up(self, sent: dict[int, int]) -> None:
        self.caught_up.append(sent)
        self.on_catch_up()


@pytest.fixture
def far_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    monkeypatch.setattr("raypool.channel.exchange.END_TIMEOUT_S", 300.0)
    pool = FakePool()
    queues.sources.append(pool)
    yield pool
    queues.sources.remove(pool)
    pool.exchange.close()


@pytest.fixture
def far_link(far_pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    link = FakeLink(7, far_pool.exchange)
    monkeypatch.setattr(this_process, "link", link)
    return link


@pytest.fixture
def sent_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Give what a value is after it has travelled to another process."""

    def travel(value: Any) -> Any:
        pickled = pickle.dumps(value)
        with monkeypatch.context() as patch:
            patch.setattr(queues, "_here", weakref.WeakValueDictionary())
            return pickle.loads(pickled)

    return travel


def test_here_it_is_the_same_queue_also_inside_other_things() -> None:
    queue: DataQueue[int] = DataQueue(3)
    nested = pickle.loads(pickle.dumps({"a": [queue, (queue,)]}))
    assert nested["a"][0] is queue
    assert nested["a"][1][0] is queue


def test_what_is_put_afar_is_a_snapshot_and_arrives_in_order(
    far_link: FakeLink, sent_away: Any
) -> None:
    queue: DataQueue[Any] = DataQueue()
    away = sent_away(queue)
    assert away is not queue
    assert isinstance(away, DataQueue)
    value = [1]
    away.put(value)
    value.append(2)
    away.put(value)
    far_link.flush()
    assert [queue.get(), queue.get()] == [[1], [1, 2]]
    assert away.backlog == 0


def test_afar_one_can_only_put(far_link: FakeLink, sent_away: Any) -> None:
    away = sent_away(DataQueue())
    for verb in (away.get, lambda: next(iter(away)), lambda: away.after_each(print), away.close):
        with pytest.raises(InvalidValueError, match="in tasks, call put"):
            verb()
    assert "made in another process" in repr(away)


def test_without_a_link_nothing_can_be_put(sent_away: Any) -> None:
    with pytest.raises(InvalidValueError, match="neither made the queue nor is a worker"):
        sent_away(DataQueue()).put(1)


def test_a_value_that_cannot_be_opened_is_an_error_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue: DataQueue[Any] = DataQueue()
    deliver(key_of(queue), b"no pickle")
    deliver(key_of(queue), pickle.dumps("good"))
    with pytest.raises(SerializationError, match="cannot be unpickled here"):
        queue.get()
    assert queue.get() == "good"
    seen: list[Any] = []
    queue.after_each(seen.append)
    deliver(key_of(queue), b"no pickle")
    deliver(key_of(queue), pickle.dumps("good again"))
    queue.close()
    assert seen == ["good again"]
    assert "No listener receives this value" in caplog.text


class Giving:
    """Raises an error when it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _give_up, (self.error,)


def _give_up(error: type[BaseException]) -> None:
    raise error("while it was opened")


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_opening_or_a_listener_raises_the_next_value_comes(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    queue: DataQueue[Any] = DataQueue()
    seen: list[Any] = []
    queue.after_each(lambda _: _give_up(error))
    queue.after_each(seen.append)
    deliver(key_of(queue), pickle.dumps(Giving(error)))
    deliver(key_of(queue), pickle.dumps("good"))
    closing = Aside(queue.close)  # it waits for the listeners
    assert closing.result() is None
    assert seen == ["good"]
    assert "No listener receives this value" in caplog.text
    assert "failed; it is still called" in caplog.text


def test_put_afar_waits_for_room_here(far_link: FakeLink, sent_away: Any, eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=2)
    away = sent_away(queue)
    sender = Aside(lambda: [away.put(number) for number in range(6)])
    assert eventually(lambda: queue.backlog == 2 and num_putters(queue) == 1)
    own = Aside(lambda: queue.put("own"))
    assert eventually(lambda: num_putters(queue) == 2)
    assert [queue.get(TIMEOUT_S) for _ in range(7)] == [0, 1, 2, "own", 3, 4, 5]
    assert len(sender.result()) == 6
    assert own.result() is None


def test_closing_releases_those_afar_who_wait_to_put(
    far_link: FakeLink, sent_away: Any, eventually: Any
) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    away = sent_away(queue)
    senders = [Aside(lambda: [away.put(number) for number in range(3)]) for _ in range(2)]
    assert eventually(lambda: num_putters(queue) == 2)
    queue.close()
    assert all(isinstance(sender.result(), QueueClosedError) for sender in senders)
    assert list(queue) == [0]
    with pytest.raises(QueueClosedError):
        away.put(1)


@pytest.mark.parametrize("policy", ["block", "latest"])
def test_closing_is_known_afar_when_it_returns_and_what_was_put_before_is_here(
    policy: Any, far_link: FakeLink, far_pool: FakePool, sent_away: Any
) -> None:
    queue: DataQueue[int] = DataQueue(None if policy == "block" else 9, policy)
    away = sent_away(queue)
    away.put(1)
    away.put(2)
    assert far_link.sent  # on their way
    queue.close()
    assert far_pool.caught_up[-1] == {7: far_link.num_batches}
    with pytest.raises(QueueClosedError):
        away.put(3)
    far_link.flush()
    assert list(queue) == [1, 2]


def test_a_queue_that_is_closed_while_a_worker_joins_it_takes_nothing(
    far_link: FakeLink, far_pool: FakePool, sent_away: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: DataQueue[int] = DataQueue()
    away = sent_away(queue)

    def ask(method: str, *args: Any) -> Any:
        answer = far_pool.ask(method, *args)
        if method == "join_queue":
            queue.close()
        return answer

    monkeypatch.setattr(far_link, "ask", ask)
    with pytest.raises(QueueClosedError):
        away.put(1)
    assert not far_link.sent


def test_a_worker_hears_of_the_end_of_a_queue_from_the_next_exchange_too(
    far_link: FakeLink,
    far_pool: FakePool,
    sent_away: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue: DataQueue[int] = DataQueue()
    away = sent_away(queue)
    lost, far_pool.exchange = far_pool.exchange, LocalExchange(far_pool._pass_on)
    before = set(threading.enumerate())

    def ask(method: str, *args: Any) -> Any:
        try:
            return far_link.exchange.ask(method, *args)
        except PoolClosedError:
            far_link.exchange = far_pool.exchange
            raise WorkerLostError("lost", reason=LossReason.EXIT, attempts=1) from None

    monkeypatch.setattr(far_link, "ask", ask)
    away.put(1)
    (hearing,) = {
        thread for thread in set(threading.enumerate()) - before if "-ends" in thread.name
    }
    lost.close()
    assert eventually(lambda: not hearing.is_alive())
    away.put(2)
    queue.close()
    with pytest.raises(QueueClosedError):
        away.put(3)


def test_a_process_that_hears_of_a_closed_queue_later_cannot_put(
    far_link: FakeLink, sent_away: Any
) -> None:
    queue: DataQueue[int] = DataQueue()
    early = sent_away(queue)
    queue.close()
    late = sent_away(queue)
    for away in (early, late):
        with pytest.raises(QueueClosedError):
            away.put(1)
    assert late.is_closed


def test_a_reader_waits_for_what_ended_tasks_have_put(
    far_link: FakeLink, far_pool: FakePool, sent_away: Any
) -> None:
    queue: DataQueue[int] = DataQueue()
    away = sent_away(queue)
    away.put(1)
    away.put(2)
    far_pool.on_catch_up = far_link.flush
    assert queue.backlog == 2
    away.put(3)
    assert [queue.get(timeout_s=0) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(TimeoutError, match="within 0 s") as caught:
        queue.get(timeout_s=0)
    assert caught.value.__suppress_context__, "that it looked twice is of no interest"


def test_a_queue_that_has_not_travelled_asks_no_pool(far_pool: FakePool) -> None:
    queue: DataQueue[int] = DataQueue()
    assert queue.backlog == 0
    queue.close()
    assert far_pool.caught_up == []


def test_a_pool_that_has_ended_stops_no_queue(
    far_link: FakeLink, far_pool: FakePool, sent_away: Any
) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    away = sent_away(queue)
    away.put(1)
    waiting = Aside(lambda: away.put(2))
    far_pool.exchange.close()
    assert isinstance(waiting.result(), PoolClosedError)
    far_pool.catch_up = far_pool.ask  # type: ignore[assignment]
    queue.close()
    assert list(queue) == [1]


def test_a_forked_child_cannot_use_the_queues_of_its_parent(run_python: Any) -> None:
    run_python("""
        import os
        from raypool import DataQueue, InvalidValueError
        queue = DataQueue()
        queue.put("parent's")
        pid = os.fork()
        if not pid:
            try:
                queue.put("child's")
            except InvalidValueError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert queue.backlog == 1
        """)
