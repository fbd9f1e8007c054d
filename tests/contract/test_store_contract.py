"""The store of a pool: what one task puts, others and whoever has opened the pool can read, while
tasks run.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from raypool import (
    DataQueue,
    InvalidTypeError,
    InvalidValueError,
    ParallelPool,
    PoolClosedError,
    SerializationError,
    current_task,
    parpool,
)

pytestmark = pytest.mark.semantics

TIMEOUT_S = 300.0


@pytest.fixture(autouse=True)
def empty_store(request: pytest.FixtureRequest) -> None:
    """Let each test find the shared pool's store empty."""
    if "pool" in request.fixturenames:
        store = request.getfixturevalue("pool").store
        for key in store:
            store.remove(key)


@pytest.mark.everywhere
def test_what_tasks_put_is_read_here_and_by_other_tasks(pool: ParallelPool) -> None:
    def put(i: int) -> None:
        current_task().store[("square", i)] = i * i

    pool.parfor(put, range(5))
    assert sorted(pool.store.keys()) == [("square", i) for i in range(5)]
    assert pool.store["square", 3] == 9
    assert list(pool.parfor(lambda i: current_task().store["square", i], range(5))) == [
        0,
        1,
        4,
        9,
        16,
    ]


@pytest.mark.everywhere
def test_setups_and_teardowns_use_the_store_too(make_pool: Any) -> None:
    def note(what: str) -> None:
        current_task().store[what, current_task().worker] = True

    begin, end = functools.partial(note, "set up"), functools.partial(note, "torn down")
    with make_pool(2, setup=begin, teardown=end) as pool:
        assert sorted(pool.store.keys()) == [("set up", 0), ("set up", 1)]
        pool.resize(1)
        assert pool.store.wait(("torn down", 1), TIMEOUT_S)


@pytest.mark.everywhere
def test_what_is_put_here_is_read_by_tasks_however_the_store_gets_there(pool: ParallelPool) -> None:
    store = pool.store
    store["model"] = np.arange(200_000.0)

    def read(given: Any, key: str) -> list[float]:
        return [float(other[key][-1]) for other in (given, store, pool.store, current_task().store)]

    assert pool.parfeval(read, store, "model").result(TIMEOUT_S) == [199_999.0] * 4
    assert pool.parfeval(lambda: {"store": [store]}).result(TIMEOUT_S)["store"][0] is store


@pytest.mark.semantics
@pytest.mark.processes
def test_a_store_that_a_task_sends_home_is_the_pools_own(make_pool: Any) -> None:
    """Also if nobody has asked the pool for its store here."""
    with make_pool(1) as pool:
        back = pool.parfeval(lambda: current_task().store).result(TIMEOUT_S)
        back["from here"] = 1
        assert pool.store.keys() == ["from here"]


@pytest.mark.everywhere
def test_everything_that_a_store_can_do_works_in_a_task(pool: ParallelPool) -> None:
    def task() -> list[Any]:
        store = current_task().store
        store["a"] = 1
        seen: list[Any] = [
            store["a"],
            store.get("a"),
            store.get("b", 2),
            "a" in store,
            "b" in store,
            len(store),
            list(store),
        ]
        store.remove("a")
        with pytest.raises(KeyError, match="a"):
            store["a"]
        with pytest.raises(KeyError, match="a"):
            del store["a"]
        with pytest.raises(TimeoutError, match="within 0 s"):
            store.wait("a", timeout_s=0)
        return seen

    assert pool.parfeval(task).result(TIMEOUT_S) == [1, 1, 2, True, False, 1, ["a"]]
    assert "a" not in pool.store


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loop_in_a_task_and_one_that_runs_here_use_the_pools_store(pool: ParallelPool) -> None:
    def put(i: int) -> None:
        current_task().store[i] = i

    pool.parfeval(lambda: pool.parfor(put, range(3)) and None).result(TIMEOUT_S)
    pool.parfor(put, range(3, 5), max_workers=0)
    assert sorted(pool.store.keys()) == [0, 1, 2, 3, 4]


def test_integers_of_numpy_are_the_same_keys_as_pythons(pool: ParallelPool) -> None:
    pool.store[np.int64(3)] = "three"
    pool.store["loss", np.int32(4)] = "four"
    assert (pool.store[3], pool.store["loss", 4]) == ("three", "four")
    assert np.int8(3) in pool.store
    assert [type(part) for part in (pool.store.keys()[0], pool.store.keys()[1][1])] == [int, int]
    with pytest.raises(InvalidTypeError, match="A key must be a string, an integer"):
        pool.store[np.bool_(True)] = 1


@pytest.mark.concurrent
def test_a_running_task_waits_for_what_is_put_later(pool: ParallelPool) -> None:
    def task(i: int) -> Any:
        current_task().store["ready", i] = True
        return current_task().store.wait("start", TIMEOUT_S)

    futures = [pool.parfeval(task, i) for i in range(2)]
    for i in range(2):
        assert pool.store.wait(("ready", i), TIMEOUT_S) is True
    assert not any(future.done() for future in futures)
    pool.store["start"] = "go"
    assert [future.result(TIMEOUT_S) for future in futures] == ["go", "go"]


@pytest.mark.concurrent
def test_a_task_that_waits_can_be_cancelled(pool: ParallelPool, check_pool: Any) -> None:
    def task() -> None:
        current_task().store["waits"] = True
        current_task().store.wait("never")

    future = pool.parfeval(task)
    pool.store.wait("waits", TIMEOUT_S)
    assert future.cancel()
    check_pool(pool)


@pytest.mark.everywhere
def test_changes_by_tasks_are_told_here(pool: ParallelPool, eventually: Any) -> None:
    seen: list[Any] = []
    listener = pool.store.on_change(lambda store, key: seen.append((key, key in store)))
    pool.parfor(lambda i: current_task().store.put(i, i), range(10))
    assert eventually(lambda: sorted(seen) == [(i, True) for i in range(10)])
    pool.parfeval(lambda: current_task().store.remove(3)).result(TIMEOUT_S)
    assert eventually(lambda: seen[-1] == (3, False))
    listener.remove()
    pool.store["late"] = 1
    assert len(seen) == 11


@pytest.mark.concurrent
def test_changes_are_told_in_tasks_too(pool: ParallelPool) -> None:
    def task() -> list[Any]:
        changes: DataQueue[Any] = DataQueue()
        listener = current_task().store.on_change(lambda store, key: changes.put((key, store[key])))
        current_task().store["listens"] = 0
        seen = [changes.get(TIMEOUT_S), changes.get(TIMEOUT_S)]
        listener.remove()
        return seen

    future = pool.parfeval(task)
    pool.store.wait("listens", TIMEOUT_S)
    pool.store["answer"] = 42
    assert future.result(TIMEOUT_S) == [("listens", 0), ("answer", 42)]


@pytest.mark.processes
def test_on_ray_who_reads_gets_a_copy_of_what_the_value_was(pool: ParallelPool) -> None:
    value = [1]
    pool.store["list"] = value
    value.append(2)
    pool.store["list"].append(3)
    assert pool.store["list"] == [1]
    with pytest.raises(SerializationError, match="the value 'lock' of the store"):
        pool.store["lock"] = threading.Lock()


@pytest.mark.semantics
@pytest.mark.threads
def test_each_pool_has_a_store_of_its_own_which_ends_with_it(
    make_pool: Any, pool: ParallelPool
) -> None:
    with make_pool(1) as other:
        other.store["mine"] = 1
        assert "mine" not in pool.store
        store = other.store
        part, _ = other.partition(workers=[0])
        assert part.store["mine"] == 1
    for use in (lambda: store["mine"], lambda: other.store.keys(), lambda: store.put("a", 1)):
        with pytest.raises(PoolClosedError, match="The pool was shut down, and the values"):
            use()


@pytest.mark.processes
def test_the_store_of_another_pool_is_refused_in_a_task(pool: ParallelPool) -> None:
    with parpool(1, profile="threads", quiet=True) as other:
        store = other.store
        with pytest.raises(InvalidValueError, match="belongs to another pool than this task"):
            pool.parfeval(lambda: store.keys()).result(TIMEOUT_S)


@pytest.mark.semantics
@pytest.mark.threads
def test_who_waits_or_listens_is_released_at_the_end_of_the_pool(
    make_pool: Any, eventually: Any
) -> None:
    def listeners() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "raypool-store"}

    before = listeners()
    pool = make_pool(1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.store.wait("never")
        except PoolClosedError as error:
            errors.append(error)

    pool.store["a"] = 1
    listener = pool.store.on_change(print)
    thread = threading.Thread(target=wait)
    thread.start()
    pool.shutdown()
    thread.join(TIMEOUT_S)
    assert len(errors) == 1
    listener.remove()
    assert eventually(lambda: not listeners() - before)


@pytest.mark.processes
def test_what_a_worker_has_put_outlives_it(pool: ParallelPool) -> None:
    def task() -> Any:
        store = current_task().store
        if "checkpoint" in store:
            return store["checkpoint"]
        store["checkpoint"] = np.full(300_000, 7.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert float(pool.parfeval(task).result(300)[-1]) == 7.0
    assert float(pool.store["checkpoint"][0]) == 7.0


@pytest.mark.threads
def test_a_task_that_is_cancelled_at_the_first_use_leaves_no_second_thread(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, is_cancelled = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "raypool-exchange" and not has_begun.is_set():
            has_begun.set()
            is_cancelled.wait(300)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with make_pool(1) as pool:
        future = pool.parfeval(lambda: current_task().store.put("key", 1))
        assert has_begun.wait(300)
        future.cancel()
        pool._engine.driver.barrier()  # its worker knows
        is_cancelled.set()
        pool.parfeval(lambda: current_task().store.put("key", 2)).result(300)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("raypool-exchange") == 1
