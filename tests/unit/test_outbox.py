"""What a worker says is sent once, in order, in few batches, and holds nobody up for long."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypool import report, save_checkpoint
from raypool.channel import hub as hub_module
from raypool.channel.feed import TEXT_BYTES, Feed
from raypool.channel.hub import Hub, Outbox
from raypool.errors import InvalidValueError
from raypool.worker.running import TaskContext, running, this_process


class Agent:
    """Collects batches; while `is_open` is not set, it holds up whoever sends one."""

    def __init__(self) -> None:
        self.batches: dict[int, bytes] = {}
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_failures = 0

    def __call__(self, number: int, batch: bytes) -> None:
        assert self.is_open.wait(300)
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("no way")
        assert number not in self.batches
        self.batches[number] = batch

    def entries(self) -> list[tuple[Any, ...]]:
        return [
            entry for number in sorted(self.batches) for entry in pickle.loads(self.batches[number])
        ]


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def outbox(agent: Agent) -> Iterator[Outbox]:
    outbox = Outbox(agent)
    yield outbox
    agent.is_open.set()
    outbox.close()


@pytest.fixture
def held(outbox: Outbox, agent: Agent, eventually: Callable[..., bool]) -> Outbox:
    """Give an outbox whose first batch, with one entry, is on its way and stays there until the
    agent is open.
    """
    agent.is_open.clear()
    outbox.send("queue", "key", b"0")
    assert eventually(lambda: outbox._number == 1)
    return outbox


def note_of(outbox: Outbox, task_id: int = 7, index: int = 0) -> TaskContext:
    return TaskContext(index, 1, None, 0, None, None, task_id, say=outbox.say)


def test_sends_by_itself(outbox: Outbox, agent: Agent, eventually: Callable[..., bool]) -> None:
    outbox.send("queue", "key", b"1")
    assert eventually(lambda: agent.entries() == [("queue", "key", b"1")])
    outbox.send("queue", "key", b"2")
    assert eventually(lambda: agent.entries() == [("queue", "key", b"1"), ("queue", "key", b"2")])
    assert outbox.flush() == (2, b"")


def test_what_is_left_goes_with_the_answer(
    held: Outbox, agent: Agent, eventually: Callable[..., bool]
) -> None:
    assert held.flush() == (1, b"")
    held.send("queue", "key", b"2")
    number, rest = held.flush()
    assert (number, pickle.loads(rest)) == (2, [("queue", "key", b"2")])
    assert held.flush() == (2, b"")
    agent.is_open.set()
    assert eventually(lambda: list(agent.batches) == [1])


def test_what_is_on_its_way_goes_with_the_answer_again(held: Outbox) -> None:
    held.send("queue", "key", b"2")
    assert [(number, pickle.loads(batch)[0][2]) for number, batch in held.answer()] == [
        (1, b"0"),
        (2, b"2"),
    ]


def test_what_is_on_its_way_keeps_its_number(held: Outbox) -> None:
    """When another thread has taken the batch after it, too: else it would replace that one."""
    held.send("queue", "key", b"2")
    held.flush()
    (number, _), newest = held.answer()
    assert (number, newest) == (1, (2, b""))


def test_shares_batches_and_keeps_the_order(held: Outbox) -> None:
    for number in range(1000):
        held.send("queue", "key", str(number).encode())
        held.say(note_of(held, number % 2), "text", f"{number}\n")
        held.say(
            note_of(held, number % 2, index=number), "metrics", (float(number), {"step": number})
        )
    entries = pickle.loads(held.flush()[1])
    assert len(entries) == 1000 + 2 + 2
    assert [int(entry[2]) for entry in entries if entry[0] == "queue"] == list(range(1000))
    for task_id in (0, 1):
        mine = [entry for entry in entries if entry[1] == task_id]
        assert "".join(entry[2] for entry in mine if entry[0] == "text").split() == [
            str(i) for i in range(task_id, 1000, 2)
        ]
        rows = [row for entry in mine if entry[0] == "metrics" for row in pickle.loads(entry[2])]
        assert rows == [(float(i), i, 1, {"step": i}) for i in range(task_id, 1000, 2)]


def test_the_last_values_come_beside_the_rows(held: Outbox) -> None:
    for metrics in ({"loss": 2, "phase": "train"}, {"loss": 1, "phase": None}):
        held.say(note_of(held, index=4), "metrics", (1.0, metrics))
    ((*_, last),) = pickle.loads(held.flush()[1])
    assert last == {4: (1, {"loss": 1, "phase": "train"})}


def test_of_too_much_text_the_end_is_sent(held: Outbox) -> None:
    for letter in "abc":
        held.say(note_of(held), "text", letter * TEXT_BYTES)
    (entry,) = pickle.loads(held.flush()[1])
    assert entry == ("text", 7, "c" * TEXT_BYTES, 2 * TEXT_BYTES, 0, 0)


def test_before_the_end_all_of_it_is_sent(held: Outbox, agent: Agent) -> None:
    held.send("queue", "key", b"1")
    opener = threading.Timer(0.05, agent.is_open.set)
    opener.start()
    held.drain(30)
    assert agent.entries() == [("queue", "key", b"0"), ("queue", "key", b"1")]
    opener.join()


def test_reports_leave_before_a_checkpoint_is_saved(
    held: Outbox, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the curve of an attempt that resumes from it has a hole."""

    def drain(timeout_s: float) -> None:
        agent.is_open.set()
        held.drain(timeout_s)

    monkeypatch.setattr(this_process, "link", SimpleNamespace(drain=drain))
    held.say(note_of(held), "metrics", (1.0, {"step": 1}))
    save_checkpoint({}, tmp_path / "checkpoint.pt")
    assert [entry[0] for entry in agent.entries()] == ["queue", "metrics"]


@pytest.mark.parametrize("limit", ["MAX_ENTRIES", "MAX_BYTES"])
def test_whoever_says_far_too_much_waits(
    outbox: Outbox,
    agent: Agent,
    eventually: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    monkeypatch.setattr(hub_module, limit, 10)
    agent.is_open.clear()
    thread = threading.Thread(
        target=lambda: [outbox.send("queue", "key", b"x") for _ in range(100)]
    )
    thread.start()
    assert eventually(lambda: outbox._entries.qsize() == 10)
    assert thread.is_alive()
    agent.is_open.set()
    thread.join(300)
    assert not thread.is_alive()
    assert eventually(lambda: len(agent.entries()) == 100)


def test_a_way_that_is_broken_holds_nobody_up_and_is_tried_again(
    outbox: Outbox,
    agent: Agent,
    eventually: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub_module, "MAX_ENTRIES", 10)
    monkeypatch.setattr(hub_module, "RETRY_S", 0.01)
    agent.num_failures = 10**9
    outbox.send("queue", "key", b"first")
    assert eventually(lambda: "could not be sent" in caplog.text)
    for _ in range(100):
        outbox.send("queue", "key", b"x")
    agent.num_failures = 0
    assert eventually(
        lambda: agent.entries() == [("queue", "key", b"first")] + 10 * [("queue", "key", b"x")]
    )
    assert caplog.text.count("could not be sent") == 1


def test_a_forked_child_says_nothing_and_does_not_wait(
    outbox: Outbox, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MAX_ENTRIES", 10)
    token = running.set(note_of(outbox))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for step in range(100):
                report(step=step)
                outbox.say(note_of(outbox), "text", "x")
            outbox.send("queue", "key", b"x")
        except InvalidValueError as error:
            status = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(status)
    running.reset(token)
    assert os.waitpid(child, 0)[1] == 0
    outbox.close()
    assert not agent.batches


class Interruption(BaseException):
    pass


class Listener:
    feed: Feed | None = None


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Others have hooks in Python's garbage collector, and an interruption in one of them would be
    theirs.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_direct", [False, True])
def test_an_interruption_at_any_moment_breaks_nothing(is_direct: bool) -> None:
    """A task may be cancelled while it reports: the signal's handler raises wherever the main
    thread is.
    """
    hub, listener = Hub(), Listener()
    hub.watch(7, listener)
    outbox = Outbox(lambda number, batch: hub.deliver(0, number, batch))
    note = note_of(outbox)
    if is_direct:
        note.say = hub.say

    is_armed = False

    def interrupt(number: int, frame: Any) -> None:
        if is_armed:
            raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    token = running.set(note)
    num_done = num_interruptions = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        while num_interruptions < 300:
            try:
                is_armed = True
                report(step=num_done)
                is_armed = False
                num_done += 1
            except Interruption:
                is_armed = False
                num_interruptions += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        running.reset(token)
    note.say(note, "metrics", (0.0, {"step": -1}))
    hub.deliver(0, *outbox.flush())
    wait = hub.waiter(0, outbox.flush()[0])
    if wait is not None:
        wait()
    outbox.close()
    assert listener.feed is not None
    steps = listener.feed.metrics(None)["step"].tolist()
    assert steps[-1] == -1
    assert steps[:-1] == sorted(steps[:-1])
    assert set(range(num_done)) <= set(steps)


def test_an_entry_that_is_interrupted_takes_no_room(
    outbox: Outbox, agent: Agent, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., bool]
) -> None:
    monkeypatch.setattr(hub_module, "MAX_BYTES", 1)

    def interrupt(entry: Any) -> None:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(
            outbox, "_entries", SimpleNamespace(put=interrupt, qsize=int, empty=lambda: True)
        )
        with pytest.raises(Interruption):
            outbox.send("queue", "key", b"first")
    outbox.send("queue", "key", b"second")  # else it would wait forever
    assert eventually(lambda: agent.entries() == [("queue", "key", b"second")])


def test_of_queues_that_keep_the_latest_only_those_are_sent_and_nobody_waits(
    held: Outbox, agent: Agent, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., bool]
) -> None:
    monkeypatch.setattr(hub_module, "MAX_BYTES", 1)  # anybody else would have to wait
    for number in range(1000):
        held.send_latest("few", 3, b"%d" % number)
        held.send_latest("one", 1, b"%d" % number)
    agent.is_open.set()
    assert eventually(lambda: len(agent.batches) == 2)
    held.send_latest("one", 1, b"next")
    assert eventually(lambda: len(agent.batches) == 3)
    sent = agent.entries()[1:]
    assert [payload for _, key, payload in sent if key == "few"] == [b"997", b"998", b"999"]
    assert [payload for _, key, payload in sent if key == "one"] == [b"999", b"next"]
    assert {kind for kind, *_ in sent} == {"queue"}


class Noisy:
    """Something in a cycle, which prints as the collector finds it."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox, self.me = outbox, self

    def __del__(self) -> None:
        self.outbox.say(note_of(self.outbox), "text", "gone")


def test_a_finalizer_may_print_while_a_value_is_put(outbox: Outbox) -> None:
    def put() -> None:
        for number in range(20_000):
            Noisy(outbox)
            _ = [[] for _ in range(number % 7)]  # the collector runs at another line each time
            outbox.send_latest(str(number % 7), 1, b"x")

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        thread.join(120)
    finally:
        gc.set_threshold(*threshold)
    assert not thread.is_alive()
