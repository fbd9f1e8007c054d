"""Queues from tasks to here (scenario 25): live, in order for each sender, nothing lost, bounded
where that is wanted.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from raypool import (
    DataQueue,
    InvalidValueError,
    ParallelPool,
    QueueClosedError,
    SerializationError,
    parpool,
)

pytestmark = pytest.mark.semantics

TIMEOUT_S = 300.0


def by_sender(values: Any) -> dict[Any, list[Any]]:
    """Return what each sender has sent, in the order in which it came."""
    table: dict[Any, list[Any]] = defaultdict(list)
    for sender, value in values:
        table[sender].append(value)
    return dict(table)


def take(queue: DataQueue[Any], count: int) -> list[Any]:
    return [queue.get(TIMEOUT_S) for _ in range(count)]


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_nothing_is_lost_and_each_sender_keeps_its_order(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()
    pool.parfor(lambda i: [queue.put((i, step)) for step in range(500)] and None, range(12))
    assert by_sender(queue.get(timeout_s=0) for _ in range(6000)) == {
        i: list(range(500)) for i in range(12)
    }
    assert queue.backlog == 0


@pytest.mark.everywhere
def test_what_a_task_has_put_is_there_when_its_result_is(pool: ParallelPool) -> None:
    queue: DataQueue[int] = DataQueue()
    for number in range(30):
        pool.parfeval(queue.put, number).result(TIMEOUT_S)
        assert queue.backlog == 1
        assert queue.get(timeout_s=0) == number


@pytest.mark.concurrent
def test_live_curves_from_four_trainings(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    losses: DataQueue[Any] = DataQueue()
    curves: dict[int, list[float]] = defaultdict(list)

    def train(model: int) -> None:
        for epoch in range(3):
            losses.put((model, epoch))
        gate.wait()
        losses.put((model, 3))

    futures = [pool.parfeval(train, model) for model in range(3)]
    assert eventually(lambda: losses.backlog == 9), "while they run"
    losses.after_each(lambda value: curves[value[0]].append(value[1]))
    assert eventually(lambda: all(curves[model] == [0, 1, 2] for model in range(3)))
    gate.open()
    futures.append(pool.parfeval(train, 3))
    for future in futures:
        future.result(TIMEOUT_S)
    losses.close()
    assert curves == {model: [0, 1, 2, 3] for model in range(4)}


@pytest.mark.concurrent
def test_what_was_put_before_a_task_failed_or_was_cancelled_arrives(
    pool: ParallelPool, patience: None, gate: Any
) -> None:
    queue: DataQueue[str] = DataQueue()

    def fail() -> None:
        queue.put("before the error")
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        pool.parfeval(fail).result(TIMEOUT_S)
    assert queue.get(timeout_s=0) == "before the error"

    def wait() -> None:
        try:
            queue.put("running")
            gate.wait()
        finally:
            queue.put("at the end")

    future = pool.parfeval(wait)
    assert queue.get(TIMEOUT_S) == "running"
    future.cancel()
    assert queue.get(TIMEOUT_S) == "at the end"


@pytest.mark.semantics
@pytest.mark.concurrent
def test_what_was_put_arrives_though_the_worker_or_the_pool_ends_at_once(make_pool: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    with make_pool(3) as pool:
        pool.parfor(lambda i: queue.put(i), range(60), chunk_size=1)
        pool.resize(1)
        assert sorted(queue.get(timeout_s=0) for _ in range(60)) == list(range(60))
        for number in range(20):
            pool.parfeval(queue.put, number)
    assert sorted(queue.get(timeout_s=0) for _ in range(20)) == list(range(20))
    with pytest.raises(TimeoutError):
        queue.get(timeout_s=0)


@pytest.mark.semantics
@pytest.mark.processes
def test_what_a_task_in_a_process_of_its_own_puts_arrives(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()
    view = pool.options(fresh_process=True)
    futures = [view.parfeval(lambda i: [queue.put((i, k)) for k in range(50)], i) for i in range(2)]
    for future in futures:
        future.result(300)
    queue.close()
    assert by_sender(queue) == {i: list(range(50)) for i in range(2)}


@pytest.mark.concurrent
def test_what_workers_put_before_they_went_to_rest_arrives(make_pool: Any, eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue()
    with make_pool(1, idle_timeout_s=0.1) as pool:
        for number in range(2):
            assert pool.parfeval(queue.put, number).result(TIMEOUT_S) is None
            assert eventually(lambda: all(worker.state == "parked" for worker in pool.workers))
    assert [queue.get(timeout_s=0) for _ in range(2)] == [0, 1]


@pytest.mark.semantics
@pytest.mark.processes
@pytest.mark.parametrize("maxsize", [None, 4])
def test_what_workers_begin_with_may_put(make_pool: Any, maxsize: int | None) -> None:
    """A setup, and what was called on all workers and is a setup of later ones."""
    queue: DataQueue[str] = DataQueue(maxsize)
    with make_pool(1, setup=functools.partial(queue.put, "setup")) as pool:
        pool.parfeval_on_all(queue.put, "sticky", sticky=True).result(TIMEOUT_S)
        assert take(queue, 2) == ["setup", "sticky"]
        pool.resize(2)
        assert take(queue, 2) == ["setup", "sticky"]


@pytest.mark.semantics
@pytest.mark.processes
def test_threads_of_a_task_may_put(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()

    def task(i: int) -> None:
        threads = [
            threading.Thread(
                target=lambda name=name: [queue.put(((i, name), k)) for k in range(50)]
            )
            for name in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pool.parfor(task, range(3))
    assert by_sender(take(queue, 450)) == {
        (i, name): list(range(50)) for i in range(3) for name in range(3)
    }


@pytest.mark.semantics
@pytest.mark.processes
def test_queues_travel_in_whatever_holds_them(pool: ParallelPool) -> None:
    queues: list[DataQueue[Any]] = [DataQueue() for _ in range(3)]

    def task(work: dict[str, Any]) -> Any:
        for number, (queue, *_) in enumerate(work["queues"]):
            queue.put(number)
        return work["queues"]

    back = pool.parfeval(task, {"queues": [(queue, 1) for queue in queues]}).result(TIMEOUT_S)
    assert [queue.get(timeout_s=0) for queue in queues] == [0, 1, 2]
    assert all(ours is theirs for ours, (theirs, _) in zip(queues, back, strict=True))


@pytest.mark.semantics
@pytest.mark.processes
def test_a_loop_in_a_task_puts_too(pool: ParallelPool) -> None:
    queue: DataQueue[int] = DataQueue()
    pool.parfor(lambda i: pool.parfor(lambda j: queue.put(10 * i + j), range(3)) and None, range(3))
    assert sorted(take(queue, 9)) == [0, 1, 2, 10, 11, 12, 20, 21, 22]


@pytest.mark.semantics
@pytest.mark.processes
def test_two_pools_may_use_one_queue(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue(maxsize=None)
    with parpool(1, profile="threads", quiet=True) as other:
        futures = [pool.parfeval(lambda: [queue.put((1, k)) for k in range(100)] and None)]
        futures += [other.parfeval(lambda: [queue.put((2, k)) for k in range(100)] and None)]
        for future in futures:
            future.result(TIMEOUT_S)
        queue.close()
        assert by_sender(queue) == {1: list(range(100)), 2: list(range(100))}


@pytest.mark.everywhere
def test_values_of_every_kind(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()
    large = np.arange(600_000.0)

    def task() -> None:
        queue.put(None)
        queue.put(large)
        queue.put({"fn": lambda x: x + 1, "array": np.float32(2.5)})
        queue.put(ValueError("a value"))

    pool.parfeval(task).result(TIMEOUT_S)
    nothing, array, table, error = take(queue, 4)
    assert nothing is None
    assert np.array_equal(array, large)
    assert (table["fn"](1), table["array"]) == (2, 2.5)
    assert isinstance(error, ValueError)


@pytest.mark.processes
def test_a_value_that_cannot_travel_is_refused_by_name(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()
    with pytest.raises(SerializationError, match=r"a value of a queue: \['lock'\]"):
        pool.parfeval(lambda: queue.put({"lock": threading.Lock()})).result(TIMEOUT_S)
    pool.parfeval(queue.put, "next").result(TIMEOUT_S)
    assert queue.get(timeout_s=0) == "next"


@pytest.mark.processes
def test_on_ray_what_is_sent_is_what_the_value_was(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()

    def task() -> None:
        array = np.zeros(400_000)
        for number in range(3):
            array[:] = number
            queue.put(array)

    pool.parfeval(task).result(TIMEOUT_S)
    assert [float(array.sum()) for array in take(queue, 3)] == [0.0, 400_000.0, 800_000.0]


# --- a limit --------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.concurrent
def test_a_slow_reader_holds_up_those_who_put(
    pool: ParallelPool, marks: Any, eventually: Any
) -> None:
    queue: DataQueue[Any] = DataQueue(maxsize=3)

    def task(sender: int) -> None:
        for k in range(20):
            queue.put((sender, k))
            marks.add("put")

    futures = [pool.parfeval(task, sender) for sender in range(3)]
    assert eventually(lambda: marks.count("put") == 3)
    values = []
    for number in range(60):
        assert queue.backlog <= 3
        assert marks.count("put") <= number + 3
        values.append(queue.get(TIMEOUT_S))
    for future in futures:
        future.result(TIMEOUT_S)
    assert by_sender(values) == {sender: list(range(20)) for sender in range(3)}
    assert queue.backlog == 0


@pytest.mark.concurrent
def test_a_slow_listener_holds_them_up_too(pool: ParallelPool, marks: Any, eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=2)
    seen: list[int] = []
    go_on = threading.Event()

    def slowly(value: int) -> None:
        assert go_on.wait(TIMEOUT_S)
        seen.append(value)

    queue.after_each(slowly)
    future = pool.parfeval(lambda: [(queue.put(k), marks.add("put")) for k in range(10)] and None)
    assert eventually(lambda: marks.count("put") == 3)  # one is with the listener
    go_on.set()
    future.result(TIMEOUT_S)
    queue.close()
    assert seen == list(range(10))


@pytest.mark.concurrent
def test_two_pools_share_the_room_of_a_queue(
    pool: ParallelPool, marks: Any, eventually: Any
) -> None:
    queue: DataQueue[Any] = DataQueue(maxsize=2)

    def task(sender: int) -> None:
        for k in range(10):
            queue.put((sender, k))
            marks.add("put")

    with parpool(1, profile="threads", quiet=True) as other:
        futures = [pool.parfeval(task, 1), other.parfeval(task, 2)]
        assert eventually(lambda: marks.count("put") == 2)
        values = take(queue, 10)
        assert eventually(lambda: marks.count("put") == 12)
        values += take(queue, 10)
        for future in futures:
            future.result(TIMEOUT_S)
    assert by_sender(values) == {sender: list(range(10)) for sender in (1, 2)}


@pytest.mark.everywhere
def test_the_latest_are_kept_and_nobody_waits(pool: ParallelPool) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=2, policy="latest")
    pool.parfeval(lambda: [queue.put(k) for k in range(1000)] and None).result(TIMEOUT_S)
    assert queue.backlog == 2
    assert take(queue, 2) == [998, 999]


@pytest.mark.concurrent
def test_a_task_that_waits_for_room_can_be_cancelled(pool: ParallelPool, check_pool: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)

    def task() -> None:
        for number in range(5):
            queue.put(number)

    future = pool.parfeval(task)
    assert queue.get(TIMEOUT_S) == 0
    while queue.backlog == 0:
        gc.collect()
    assert future.running()
    assert future.cancel()
    check_pool(pool)


@pytest.mark.threads
def test_a_pool_may_end_while_a_task_waits_for_room(make_pool: Any, eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)
    pool = make_pool(1)
    future = pool.parfeval(lambda: [queue.put(number) for number in range(5)] and None)
    assert eventually(lambda: queue.backlog == 1)
    future.cancel()
    pool.delete()
    queue.close()
    assert next(iter(queue)) == 0


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_putting_into_a_closed_queue_is_an_error_in_tasks_too(pool: ParallelPool) -> None:
    for queue in (DataQueue(), DataQueue(maxsize=2), DataQueue(policy="latest")):
        pool.parfor(lambda i, queue=queue: queue.put(i), range(1))
        queue.close()
        with pytest.raises(QueueClosedError, match="nothing more can be put"):
            pool.parfeval(queue.put, 1).result(TIMEOUT_S)
        assert list(queue) == [0]


@pytest.mark.concurrent
@pytest.mark.parametrize("maxsize", [None, 5])
def test_a_running_task_hears_of_the_end_when_close_returns(
    maxsize: int | None, pool: ParallelPool, gate: Any
) -> None:
    queue: DataQueue[str] = DataQueue(maxsize)

    def task() -> str:
        queue.put("early")
        gate.wait()
        try:
            queue.put("late")
        except QueueClosedError:
            return "refused"
        return "let in"

    future = pool.parfeval(task)
    assert queue.get(TIMEOUT_S) == "early"
    queue.close()
    gate.open()
    assert future.result(TIMEOUT_S) == "refused"
    assert list(queue) == []


@pytest.mark.concurrent
def test_every_put_is_either_refused_or_arrives(pool: ParallelPool) -> None:
    queue: DataQueue[Any] = DataQueue()

    def task(sender: int) -> int:
        number = 0
        try:
            while True:
                queue.put((sender, number))
                number += 1
        except QueueClosedError:
            return number

    futures = [pool.parfeval(task, sender) for sender in range(3)]
    values = take(queue, 300)
    queue.close()
    values += list(queue)
    counts = [future.result(TIMEOUT_S) for future in futures]
    assert {sender: numbers[: counts[sender]] for sender, numbers in by_sender(values).items()} == {
        sender: list(range(count)) for sender, count in enumerate(counts) if count
    }


@pytest.mark.concurrent
def test_closing_releases_tasks_that_wait_for_room(pool: ParallelPool, eventually: Any) -> None:
    queue: DataQueue[int] = DataQueue(maxsize=1)

    def task() -> str:
        try:
            while True:
                queue.put(0)
        except QueueClosedError:
            return "released"

    futures = [pool.parfeval(task) for _ in range(3)]
    assert eventually(lambda: queue.backlog == 1)
    queue.close()
    assert [future.result(TIMEOUT_S) for future in futures] == ["released"] * 3


@pytest.mark.processes
def test_tasks_go_on_when_nobody_holds_the_queue_any_more(pool: ParallelPool) -> None:
    bounded: DataQueue[int] | None = DataQueue(maxsize=1)
    free: DataQueue[int] | None = DataQueue()

    def task(bounded: DataQueue[int], free: DataQueue[int]) -> str:
        for number in range(10):
            bounded.put(number)
            free.put(number)
        return "done"

    future = pool.parfeval(task, bounded, free)
    bounded = free = None
    gc.collect()
    assert future.result(TIMEOUT_S) == "done"


# --- what belongs where it was made ---------------------------------------------------------------


@pytest.mark.semantics
@pytest.mark.processes
def test_in_a_task_one_can_only_put(pool: ParallelPool) -> None:
    queue: DataQueue[int] = DataQueue()
    queue.put(1)
    for verb in (
        lambda: queue.get(0),
        lambda: list(queue),
        lambda: queue.after_each(print),
        queue.close,
    ):
        with pytest.raises(
            InvalidValueError, match="Read and close a queue in the process that made it"
        ):
            pool.parfeval(verb).result(TIMEOUT_S)
    assert queue.get() == 1


def test_a_task_may_have_a_queue_of_its_own(pool: ParallelPool) -> None:
    def task(count: int) -> list[int]:
        queue: DataQueue[int] = DataQueue(maxsize=2)
        thread = threading.Thread(
            target=lambda: [queue.put(k) for k in range(count)] and queue.close()
        )
        thread.start()
        values = list(queue)
        thread.join()
        return values

    assert list(pool.parfor(task, [3, 30])) == [list(range(3)), list(range(30))]


# --- workers that are lost ------------------------------------------------------------------------


@pytest.mark.processes
def test_a_replaced_worker_puts_into_the_same_queue(pool: ParallelPool, marks: Any) -> None:
    queue: DataQueue[Any] = DataQueue()

    def task(i: int) -> None:
        queue.put((i, os.getpid()))
        if i == 3 and marks.count("killed") == 0:
            marks.add("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    pool.parfor(task, range(12), chunk_size=1)
    queue.close()
    arrived = by_sender(queue)
    assert set(arrived) == set(range(12))
    assert len({pid for pids in arrived.values() for pid in pids}) >= 2


@pytest.mark.processes
def test_a_killed_worker_that_waited_for_room_keeps_nobody_waiting(
    pool: ParallelPool, eventually: Any, marks: Any
) -> None:
    queue: DataQueue[Any] = DataQueue(maxsize=1)

    def task(i: int) -> None:
        marks.add(f"pid {os.getpid()}")
        queue.put(i)

    queue.put("full")
    future = pool.options(retries=1).parfeval(task, 1)
    assert eventually(lambda: len(queue._end._putters) == 1)  # type: ignore[union-attr]
    os.kill(int(marks.all()[0].split()[1]), signal.SIGKILL)
    assert eventually(lambda: len(queue._end._putters) == 2)  # type: ignore[union-attr]  # it runs again
    assert take(queue, 3) == ["full", 1, 1]
    future.result(TIMEOUT_S)
    queue.close()
