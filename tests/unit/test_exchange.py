"""The exchange by itself: the ends of queues, offers, and the store of a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from raypool import InvalidTypeError, InvalidValueError, PoolClosedError, ValueStore, current_task
from raypool.channel import exchange as module
from raypool.channel.exchange import Exchange, LocalExchange

TIMEOUT_S = 20.0


def awaited_in(exchange: LocalExchange) -> dict[str, Any]:
    """Return the keys that somebody waits for."""
    return exchange._exchange._shelf._awaited


def new_exchange() -> Exchange:
    return Exchange(lambda queue, ticket, value: None, "key")


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


async def settle() -> None:
    """Let every task go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- offers ---------------------------------------------------------------------------------------


def test_an_offer_waits_for_its_own_answer() -> None:
    async def scenario() -> None:
        passed: list[tuple[str, int, bytes]] = []
        exchange = Exchange(lambda *offered: passed.append(offered), "key")
        first = asyncio.create_task(exchange.offer("q", b"1"))
        second = asyncio.create_task(exchange.offer("q", b"2"))
        await settle()
        assert [(queue, value) for queue, _, value in passed] == [("q", b"1"), ("q", b"2")]
        await exchange.answer(passed[1][1], "closed")
        assert await second == "closed"
        assert not first.done()
        await exchange.answer(passed[0][1], "taken")
        assert await first == "taken"

    run(scenario())


def test_an_answer_to_nobody_is_dropped() -> None:
    async def scenario() -> None:
        tickets: list[int] = []
        exchange = Exchange(lambda queue, ticket, value: tickets.append(ticket), "key")
        given_up = asyncio.create_task(exchange.offer("q", b""))
        await settle()
        given_up.cancel()
        await settle()
        await exchange.answer(tickets[0], "taken")
        await exchange.answer(99, "taken")

    run(scenario())


# --- ends of queues -------------------------------------------------------------------------------


def test_the_end_of_a_queue_waits_until_all_who_put_into_it_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "END_TIMEOUT_S", 300.0)

    async def scenario() -> None:
        exchange = new_exchange()
        asking = {}
        for worker_id in (1, 2, 3):
            asking[worker_id] = asyncio.create_task(exchange.queue_ends(worker_id, [], 0))
        assert not await exchange.join_queue("q", 1)
        assert not await exchange.join_queue("q", 2)
        assert not await exchange.join_queue("other", 3)
        end = asyncio.create_task(exchange.end_queue("q"))
        assert await asking[1] == ["q"]
        assert await asking[2] == ["q"]
        await settle()
        assert not asking[3].done()
        again = [asyncio.create_task(exchange.queue_ends(1, ["q"], 11))]
        await settle()
        assert not end.done()
        again.append(asyncio.create_task(exchange.queue_ends(2, ["q"], 22)))
        assert await end == {1: 11, 2: 22}
        assert await exchange.join_queue("q", 3)
        for waiting in (*again, asking[3]):
            waiting.cancel()

    run(scenario())


def test_the_end_of_a_queue_that_nobody_puts_into_is_known_at_once() -> None:
    async def scenario() -> None:
        exchange = new_exchange()
        assert await exchange.end_queue("q") == {}
        assert await exchange.join_queue("q", 1)

    run(scenario())


def test_the_end_of_a_queue_waits_for_the_dead_no_longer_than_a_while() -> None:
    async def scenario() -> None:
        loop, exchange = asyncio.get_running_loop(), new_exchange()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        await exchange.join_queue("q", 1)
        await exchange.join_queue("q", 2)
        alive = asyncio.create_task(exchange.queue_ends(2, [], 0))
        end = asyncio.create_task(exchange.end_queue("q"))
        assert await alive == ["q"]
        alive = asyncio.create_task(exchange.queue_ends(2, ["q"], 5))
        await settle()
        assert not end.done()
        now += module.END_TIMEOUT_S + 1
        assert await end == {2: 5}
        await exchange.join_queue("r", 2)
        end = asyncio.create_task(exchange.end_queue("r"))
        assert await alive == ["r"]
        now += module.END_TIMEOUT_S + 1
        assert await end == {}

    run(scenario())


def test_nobody_waits_for_a_worker_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_TIMEOUT_S", 300.0)

    async def scenario() -> None:
        exchange = new_exchange()
        await exchange.join_queue("q", 1)
        await exchange.join_queue("q", 2)
        end = asyncio.create_task(exchange.end_queue("q"))
        await exchange.forget(1)
        await settle()
        assert not end.done()
        await exchange.forget(2)
        assert await end == {}
        await exchange.join_queue("r", 1)
        asks = asyncio.create_task(exchange.queue_ends(1, [], 0))
        await settle()
        await exchange.forget(1)
        assert await asks == []
        assert await exchange.end_queue("r") == {}

    run(scenario())


# --- the store ------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[LocalExchange]:
    local = LocalExchange()
    yield local
    local.close()


@pytest.fixture
def store(local: LocalExchange) -> ValueStore:
    return ValueStore(local)


def test_values_by_name(store: ValueStore) -> None:
    assert store.keys() == list(store) == []
    store["a"] = 1
    store.put(("model", 3), [2])
    store["a"] = {"new": 1}
    assert (store["a"], store.get("a"), store[("model", 3)]) == ({"new": 1}, {"new": 1}, [2])
    assert store.keys() == list(store) == ["a", ("model", 3)]
    assert len(store) == 2
    assert "a" in store
    assert "b" not in store
    assert (store.get("b"), store.get("b", 5)) == (None, 5)
    store.remove("a")
    del store[("model", 3)]
    assert len(store) == 0


def test_a_value_of_none_is_a_value(store: ValueStore) -> None:
    store["nothing"] = None
    assert "nothing" in store
    assert store["nothing"] is store.get("nothing", 1) is store.wait("nothing") is None


def test_a_missing_key_is_named(store: ValueStore) -> None:
    for verb in (store.__getitem__, store.remove, store.__delitem__):
        with pytest.raises(KeyError, match="none such"):
            verb("none such")


def test_keys_that_are_none(store: ValueStore) -> None:
    for key in [None, 1.5, ["a"], ("a", None), b"x", True, ("a", False)]:
        for verb in (
            store.get,
            store.remove,
            store.wait,
            store.__getitem__,
            store.__contains__,
            lambda key: store.put(key, 1),
        ):
            with pytest.raises(
                InvalidTypeError, match="must be a string, an integer, or a tuple of them"
            ):
                verb(key)


def test_waiting_for_a_key(store: ValueStore) -> None:
    values: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: values.append(store.wait("start", TIMEOUT_S)))
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    with pytest.raises(TimeoutError, match=r"under 'stop' within 0.01 s"):
        store.wait("stop", timeout_s=0.01)
    with pytest.raises(InvalidValueError, match="must be at least 0, not"):
        store.wait("start", -1)
    store["start"] = "go"
    for thread in waiting:
        thread.join(TIMEOUT_S)
    assert values == ["go"] * 3
    assert store.wait("start", 0) == "go"


def test_a_value_that_was_waited_for_is_had_also_if_it_is_removed_at_once(
    local: LocalExchange, store: ValueStore, eventually: Any
) -> None:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(store.wait("flash", TIMEOUT_S)))
    thread.start()
    awaited = awaited_in(local)
    assert eventually(lambda: "flash" in awaited)
    store["flash"] = 1
    store.remove("flash")
    thread.join(TIMEOUT_S)
    assert values == [1]
    assert awaited == {}


def test_every_change_is_told_in_order(store: ValueStore, eventually: Any) -> None:
    first: list[Any] = []
    second: list[Any] = []
    listener = store.on_change(lambda changed, key: first.append((changed is store, key)))
    store["a"] = 1
    store["a"] = 2
    other = store.on_change(lambda changed, key: second.append(key))
    store.remove("a")
    store["b"] = 3
    assert eventually(lambda: first == [(True, key) for key in "aaab"])
    assert eventually(lambda: second == ["a", "b"])
    listener.remove()
    listener.remove()
    store["c"] = 4
    assert eventually(lambda: second == ["a", "b", "c"])
    other.remove()
    assert eventually(
        lambda: not any(thread.name == "raypool-store" for thread in threading.enumerate())
    )
    store["d"] = 5
    third: list[Any] = []
    store.on_change(lambda changed, key: third.append(key))
    store["e"] = 6
    assert eventually(lambda: third == ["e"])
    assert len(first) == 4
    assert len(second) == 3


def test_a_listener_that_fails_is_told_again(
    store: ValueStore, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def fail(changed: ValueStore, key: str) -> None:
        seen.append(key)
        raise ValueError(key)

    store.on_change(fail)
    store["a"] = store["b"] = 1
    assert eventually(lambda: seen == ["a", "b"])
    assert eventually(lambda: caplog.text.count("ValueError") >= 2)


def test_a_listener_that_has_gone_with_its_process_is_forgotten(
    local: LocalExchange, store: ValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHANGES", 2)
    number = local.ask("store", None, "watch")[0]
    for value in range(3):
        store["a"] = value
    assert local.ask("store", None, "changes", number) == [None]
    assert local.ask("store", None, "changes", number) == [None], "it is not known any more"


def test_the_end_of_a_store(store: ValueStore, local: LocalExchange, eventually: Any) -> None:
    errors: list[BaseException] = []
    before = set(threading.enumerate())

    def wait() -> None:
        try:
            store.wait("never")
        except PoolClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    listener = store.on_change(print)
    awaited = awaited_in(local)
    assert eventually(lambda: "never" in awaited)
    local.close()
    thread.join(TIMEOUT_S)
    assert len(errors) == 1
    for verb in (store.keys, lambda: store.put("a", 1), lambda: store.wait("a")):
        with pytest.raises(PoolClosedError, match="The pool was shut down, and the values"):
            verb()
    listener.remove()
    assert repr(store) == "<ValueStore: closed>"
    names = ("raypool-store", "raypool-exchange")
    assert eventually(
        lambda: not any(thread.name in names for thread in set(threading.enumerate()) - before)
    )


def test_a_store_that_nobody_has_asked_starts_no_thread() -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    local = LocalExchange()
    local.close()
    with pytest.raises(PoolClosedError):
        local.ask("store", None, "keys")
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert "raypool-exchange" not in started


def test_the_store_of_another_pool_is_told_from_ones_own(
    store: ValueStore, local: LocalExchange
) -> None:
    store["mine"] = 1
    assert ValueStore(local, local.ask("store", None, "identify")[0])["mine"] == 1
    with pytest.raises(InvalidValueError, match="belongs to another pool"):
        ValueStore(local, "some other key").keys()


def test_outside_a_pool_there_is_a_store_of_this_process() -> None:
    key = f"test {os.getpid()}"
    current_task().store[key] = 1
    try:
        assert current_task().store[key] == 1
    finally:
        current_task().store.remove(key)


def test_a_forked_child_is_refused_and_does_not_hang(run_python: Any) -> None:
    run_python("""
        import os
        from raypool import PoolClosedError, current_task, parpool
        pool = parpool(1, profile="threads", quiet=True)
        pool.store["a"] = current_task().store["b"] = 1
        pid = os.fork()
        if not pid:
            try:
                pool.store["a"]
            except PoolClosedError as error:
                current_task().store["own"] = 1
                os._exit(7 if "forked" in str(error) and current_task().store.keys() == ["own"] else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pool.store["a"] == 1
        pool.shutdown()
        """)
