"""What a user has let go of is freed: arguments, functions, results and errors, as the standard
library's executors do it.
"""

from __future__ import annotations

import gc
import operator
import threading
import tracemalloc
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raypool import ParallelPool

pytestmark = pytest.mark.semantics


class Thing:
    """Something that can be watched."""

    def method(self) -> str:
        return "called"


class Faulty(Exception):
    """An error that can be watched."""


class Hollow(Exception):
    """An error that is false."""

    def __len__(self) -> int:
        return 0


def make(_: int = 0) -> Thing:
    return Thing()


def fail(_: int = 0) -> None:
    raise Faulty("not today")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Have nothing freed but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.everywhere
def test_the_function_and_its_arguments(
    pool: ParallelPool, eventually: Any, no_collector: None
) -> None:
    thing = Thing()
    watched = weakref.ref(thing)
    pool.submit(thing.method)
    assert pool.submit(type, thing).result(300).__name__ == "Thing"
    del thing
    assert eventually(lambda: watched() is None)


@pytest.mark.processes
def test_arguments_on_the_worker(pool: ParallelPool, marks: Any, eventually: Any) -> None:
    class Told:
        def __init__(self, marks: Any) -> None:
            self.marks, self.pid = marks, None

        def __del__(self) -> None:
            if self.pid is not None:
                self.marks.add("freed")

    def use(told: Any) -> None:
        import os

        told.pid = os.getpid()

    pool.submit(use, Told(marks)).result(300)
    assert eventually(lambda: marks.count("freed") == 1)


@pytest.mark.everywhere
def test_results(pool: ParallelPool, eventually: Any, no_collector: None) -> None:
    future = pool.submit(make)
    watched = weakref.ref(future.result(300))
    assert watched() is future.result(), "as long as there is the future, there is its result"
    del future
    assert eventually(lambda: watched() is None)


@pytest.mark.semantics
@pytest.mark.concurrent
def test_results_of_map_one_by_one(pool: ParallelPool, eventually: Any, no_collector: None) -> None:
    """Also where several came in one message."""
    for thing in pool.map(make, range(20)):
        watched = weakref.ref(thing)
        del thing
        assert eventually(lambda watched=watched: watched() is None)


@pytest.mark.concurrent
def test_a_result_is_the_same_for_all_who_ask_at_once(pool: ParallelPool) -> None:
    for _ in range(20):
        future = pool.submit(make)
        found: list[Any] = []
        ask = lambda future=future, found=found: found.append(future.result(300))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(map(id, found))) == 1


@pytest.mark.concurrent  # inline, the traceback reaches up to the caller
def test_errors(pool: ParallelPool, eventually: Any, no_collector: None) -> None:
    """Their tracebacks hold the frames through which they were raised, here and in the worker's
    thread.
    """
    future = pool.submit(fail)
    with pytest.raises(Faulty) as caught:
        future.result(300)
    watched, held = weakref.ref(caught.value), weakref.ref(future)
    del caught, future
    assert eventually(lambda: held() is None)
    assert eventually(lambda: watched() is None)


@pytest.mark.concurrent
def test_errors_of_map(pool: ParallelPool, eventually: Any, no_collector: None) -> None:
    results = pool.map(fail, range(3))
    for _ in range(3):
        with pytest.raises(Faulty) as caught:
            next(results)
        watched = weakref.ref(caught.value)
        del caught
        assert eventually(lambda watched=watched: watched() is None)


@pytest.mark.semantics
@pytest.mark.processes
def test_an_error_that_is_false_is_an_error(pool: ParallelPool) -> None:
    """Before Python 3.14 the standard library takes it for none."""

    def hollow() -> None:
        raise Hollow("nothing in it")

    future = pool.submit(hollow)
    with pytest.raises(Hollow, match="nothing in it"):
        future.result(300)
    assert type(future.exception()) is Hollow
    assert type(future.error) is Hollow
    assert future.state == "failed"
    with pytest.raises(Hollow):
        pool.parfor(lambda _: hollow(), range(2))
    results = pool.parfor(lambda _: hollow(), range(2), on_error="collect")
    assert [type(error) for error in results.errors.values()] == [Hollow, Hollow]


@pytest.mark.processes
@pytest.mark.quick
@pytest.mark.parametrize("way", ["loop", "loop that fails", "map", "call"])
def test_what_a_function_has_left_in_its_variables_is_freed_with_its_loop(
    pool: ParallelPool, way: str, marks: Any, eventually: Any
) -> None:
    """In workers, without another call; until then it is there for all items. The error of a loop
    that failed keeps nothing.
    """
    cache: dict[str, Any] = {}

    def train(item: int) -> int:
        if "table" not in cache:
            # they refer to each other
            cache.update(table=np.ones(32_000_000, np.uint8), train=train)
            weakref.finalize(cache["table"], marks.add, "freed").atexit = False
            marks.add("made")
        if item == 5:  # fails when no other is in the middle of making a table
            eventually(lambda: marks.count("passed") == 5, 300)
        else:
            marks.add("passed")
        return 1 // (5 - item)

    if way == "call":
        pool.parfeval(train, 1).result(300)
    elif way == "map":
        list(pool.map(train, range(5), timeout=300))
    elif way == "loop":
        pool.parfor(train, 5, chunk_size=1)
    else:
        with pytest.raises(ZeroDivisionError) as caught:
            pool.parfor(train, 6, chunk_size=1)
        assert caught

    assert eventually(lambda: marks.count("freed") == marks.count("made"))
    assert 1 <= marks.count("made") <= pool.num_workers


@pytest.mark.processes
@pytest.mark.quick
def test_rays_control_store_keeps_nothing_of_a_call(pool: ParallelPool, eventually: Any) -> None:
    """Nor of the actors that take it: a call of somebody else's, later, is recorded, and nothing of
    the pool's before it.
    """
    import ray
    from ray._private.state import state

    def names() -> list[str]:
        state._connect_and_get_accessor()
        return [event.task_info.name for event in state._get_all_task_events()]

    pool.parfor(abs, range(10), chunk_size=1)
    pool.parfeval(print, "said").result(300)
    pool.store["key"] = 1
    later = f"later {uuid.uuid4()}"
    ray.get(ray.remote(num_cpus=0)(lambda: 1).options(name=later).remote())

    assert eventually(lambda: later in names())
    assert not [
        name for name in names() if name.startswith(("PoolWorker", "NodeAgent", "ClusterProbe"))
    ]


@pytest.mark.concurrent
def test_calls_that_wait_take_little(
    pool: ParallelPool, make_pool: Any, gate: Any, eventually: Any
) -> None:
    """A hundred thousand of them are to stand in a queue; in this process each has a function of
    its own, too [bytes].
    """
    count, most = 2_000, 1_024 if make_pool.is_in_processes else 1_536
    before = pool.statistics().submitted
    busy = [pool.submit(gate.wait) for _ in range(pool.num_workers)]
    first = [pool.submit(abs, -1) for _ in range(10)]
    assert eventually(lambda: pool.statistics().submitted == before + len(busy) + 10)
    gc.collect()
    tracemalloc.start()
    try:
        futures = [pool.submit(abs, -number) for number in range(1_000, 1_000 + count)]
        assert eventually(lambda: pool.statistics().submitted == before + len(busy) + 10 + count)
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
        gate.open()
    assert each < most
    assert [future.result(300) for future in futures] == list(range(1_000, 1_000 + count))
    assert [future.result(300) for future in [*busy, *first]][-1] == 1


def test_a_fold_keeps_nothing_of_what_is_folded(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypool.parallel_for.TICK_S", 0.0)
    looks: list[int] = []

    def items() -> Iterator[int]:
        for number in range(4_000):
            if number in (1_000, 3_999):
                gc.collect()
                looks.append(tracemalloc.get_traced_memory()[0])
            yield number

    tracemalloc.start()
    try:
        total = pool.parfor(abs, items(), reduce=operator.add, progress=False)
    finally:
        tracemalloc.stop()
    assert total == sum(range(4_000))
    assert (looks[1] - looks[0]) / 3_000 < 20, "bytes for each item"
