"""The pool is a `concurrent.futures.Executor`: what the standard library promises holds, on every
kind of pool.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raypool
from raypool import Future, ParallelPool, PoolClosedError, current_task, gcp, parpool
from raypool.core.messages import AttemptFinished
from raypool.engine.driver import Arrivals

pytestmark = pytest.mark.semantics


class Refused(Exception):
    """An exception of a user's."""


def refuse(text: str) -> None:
    raise Refused(text)


def add(a: int, b: int = 0, *more: int, c: int = 0) -> int:
    return a + b + sum(more) + c


# --- submit and map -------------------------------------------------------------------------------


def test_a_pool_is_an_executor(pool: ParallelPool) -> None:
    assert isinstance(pool, Executor)
    assert isinstance(pool.submit(add, 1), concurrent.futures.Future)


@pytest.mark.everywhere
def test_arguments_reach_the_function(pool: ParallelPool) -> None:
    for call in (pool.submit, pool.parfeval):
        assert call(add, 1).result(300) == 1
        assert call(add, 1, 2, 3, 4, c=5).result(300) == 15
        assert call(add, b=1, a=2).result(300) == 3
        assert call(dict, fn=1, name=2, self=3, retries=4).result(300) == {
            "fn": 1,
            "name": 2,
            "self": 3,
            "retries": 4,
        }


def test_map_is_the_standard_map(pool: ParallelPool) -> None:
    assert list(pool.map(add, range(5), [10] * 3)) == [10, 11, 12]
    assert list(pool.map(add, [])) == []
    results = pool.map(lambda x: 1 // x, [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.processes  # in one process, arguments are not copied
def test_what_is_sent_is_what_the_arguments_are_now(pool: ParallelPool) -> None:
    numbers = [1, 2, 3]
    future = pool.parfeval(sum, numbers)
    numbers.clear()
    assert future.result(300) == 6


@pytest.mark.everywhere
def test_the_functions_own_variables_are_those_of_each_call(pool: ParallelPool) -> None:
    offset = 1

    def shifted(x: int) -> int:
        return x + offset

    first = pool.parfeval(shifted, 1).result(300)
    offset = 10
    assert (first, pool.parfeval(shifted, 1).result(300)) == (2, 11)
    assert list(pool.parfor(shifted, range(2))) == [10, 11]


@pytest.mark.everywhere
def test_exceptions_arrive_as_themselves(pool: ParallelPool, make_pool: Any) -> None:
    future = pool.parfeval(refuse, "not today")

    with pytest.raises(Refused, match="not today"):
        future.result(300)

    error = future.exception(300)
    assert type(error) is Refused
    assert future.error is error
    assert future.state == "failed"
    assert "refuse" in error.__notes__[0]
    assert "attempt 1" in error.__notes__[0]
    if make_pool.is_in_processes:
        assert "raise Refused(text)" in str(error.__cause__)


@pytest.mark.everywhere
def test_exceptions_that_mean_something_to_python_arrive_too(pool: ParallelPool) -> None:
    def fail(error: BaseException) -> None:
        raise error

    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])
    for error in (
        StopIteration("x"),
        GeneratorExit("x"),
        CancelledError("x"),
        TimeoutError("x"),
        group,
    ):
        assert type(pool.parfeval(fail, error).exception(300)) is type(error)
        assert type(pool.parfor(fail, [error], on_error="collect").errors[0]) is type(error)


# --- futures --------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_future_tells_its_story(pool: ParallelPool, make_pool: Any) -> None:
    future = pool.options(name="job").parfeval(add, 2, 3)

    assert future.result(300) == 5
    assert (future.name, future.state, future.error, future.attempts) == (
        "job",
        "finished",
        None,
        1,
    )
    assert future.worker in [worker.index for worker in pool.workers]
    assert future.started_at <= future.finished_at
    if make_pool.backend != "simulated":  # there, work runs in 1970
        assert future.submitted_at <= future.started_at
    assert 0 <= future.running_duration_s < 60
    assert future.done()
    assert not future.running()
    assert not future.cancelled()
    assert not future.cancel()
    assert "job" in repr(future)
    assert "finished" in repr(future)
    assert pool.parfeval(add, 1).name == "add"


@pytest.mark.concurrent
def test_the_states_of_futures(
    pool: ParallelPool, make_gate: Callable[[], Any], eventually: Any
) -> None:
    """Scenario 18, the part that needs no cancelling of running work; for that see
    `test_cancel.py`.
    """
    gates = [make_gate() for _ in range(6)]
    before = pool.statistics().cancelled
    futures = [pool.parfeval(gate.wait) for gate in gates]
    assert eventually(
        lambda: [future.state for future in futures] == ["running"] * 3 + ["queued"] * 3
    )
    assert pool.queue.running == futures[:3]
    assert pool.queue.queued == futures[3:]
    assert (pool.statistics().running, pool.statistics().queued, pool.idle_workers) == (3, 3, 0)
    assert futures[3].started_at is None
    assert futures[3].running_duration_s is None
    assert futures[0].running_duration_s >= 0

    assert futures[4].cancel()
    assert futures[4].cancel(), "twice is once"
    assert futures[4].state == "cancelled"
    with pytest.raises(CancelledError):
        futures[4].result()
    assert not concurrent.futures.wait(futures[4:5], 300).not_done
    assert list(concurrent.futures.as_completed(futures[4:5], 300)) == futures[4:5]
    assert eventually(lambda: pool.queue.queued == [futures[3], futures[5]])

    gates[1].open()
    assert eventually(lambda: futures[3].running())
    gates[3].open()
    assert eventually(lambda: futures[5].running()), "the cancelled one has blocked the queue"
    assert futures[0].running()
    for gate in gates:
        gate.open()
    assert raypool.wait(futures, 300)
    assert [future.state for future in futures] == ["finished"] * 4 + ["cancelled", "finished"]
    assert pool.statistics().cancelled == before + 1


@pytest.mark.concurrent
def test_what_was_cancelled_never_runs(pool: ParallelPool, gate: Any, marks: Any) -> None:
    view = pool.options(worker=0)
    blocker = view.parfeval(gate.wait)
    futures = [view.parfeval(marks.add, number) for number in range(20)]
    assert all(future.cancel() for future in futures[::2])
    gate.open()
    assert raypool.wait([blocker, *futures], 300)
    assert marks.all() == sorted(map(str, range(1, 20, 2)))


@pytest.mark.concurrent
def test_cancel_all(pool: ParallelPool, gate: Any, eventually: Any, check_pool: Any) -> None:
    blockers = [pool.parfeval(gate.wait) for _ in range(3)]
    assert eventually(lambda: all(blocker.running() for blocker in blockers))
    futures = [pool.parfeval(add, number) for number in range(5)]
    with concurrent.futures.ThreadPoolExecutor(1) as driver:
        loop = driver.submit(pool.parfor, add, range(5))
        assert eventually(lambda: pool.statistics().queued == 10)
        pool.cancel_all()
        assert isinstance(loop.exception(300), CancelledError)
    assert [future.state for future in futures] == ["cancelled"] * 5
    assert all(blocker.cancelled() for blocker in blockers)
    assert eventually(lambda: all(blocker.worker_replaced is not None for blocker in blockers))
    check_pool(pool)


@pytest.mark.threads
def test_an_answer_that_came_in_time_counts_however_late_the_pool_is(
    pool: ParallelPool,
    make_gate: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    let_time_pass: Callable[[float], None],
) -> None:
    """A callback holds up the pool's thread until long after the time of a call is up that has
    ended meanwhile.
    """
    begun, held_up, answers = make_gate(), make_gate(), []
    inbox = pool._engine.driver._inbox
    put = inbox.put

    def put_and_note(message: Any) -> None:
        put(message)
        if isinstance(message[0], AttemptFinished):
            answers.append(message)

    def work() -> int:
        begun.open()
        held_up.wait()
        return 1

    def hold_up(_: Any) -> None:
        held_up.open()
        if eventually(lambda: len(answers) == 2):  # this call's, and that which came in time
            let_time_pass(2000)

    monkeypatch.setattr(inbox, "put", put_and_note)
    pool.parfeval(begun.wait).add_done_callback(hold_up)
    assert pool.options(timeout_s=1000).parfeval(work).result(300) == 1
    assert inbox.now() > time.monotonic() + 1000


@pytest.mark.concurrent
def test_higher_priority_goes_first(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    order: list[str] = []
    part, _ = pool.partition(workers=[0])
    blocker = part.parfeval(gate.wait)
    assert eventually(blocker.running)
    futures = []
    for name, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 5), ("e", 1), ("f", 0)]:
        future = part.options(priority=priority, name=name).parfeval(lambda: None)
        future.add_done_callback(lambda future: order.append(future.name))
        futures.append(future)
    gate.open()
    assert raypool.wait(futures, 300)
    assert eventually(lambda: order == ["d", "b", "e", "a", "f", "c"])


@pytest.mark.everywhere
def test_the_functions_of_the_standard_library_take_futures(pool: ParallelPool) -> None:
    futures = [pool.submit(add, number) for number in range(10)]
    failing = pool.submit(refuse, "no")

    done = concurrent.futures.wait([*futures, failing], 300)
    assert not done.not_done
    assert {future.result() for future in concurrent.futures.as_completed(futures, 300)} == set(
        range(10)
    )
    first = concurrent.futures.wait([*futures, failing], 60, concurrent.futures.FIRST_EXCEPTION)
    assert failing in first.done


@pytest.mark.everywhere
def test_asyncio_takes_futures(pool: ParallelPool) -> None:
    async def use() -> tuple[list[int], int, BaseException]:
        both = await asyncio.gather(
            *(asyncio.wrap_future(pool.submit(add, number)) for number in (1, 2))
        )
        here = await asyncio.get_running_loop().run_in_executor(pool, add, 3)
        (error,) = await asyncio.gather(
            asyncio.wrap_future(pool.submit(refuse, "no")), return_exceptions=True
        )
        return both, here, error

    both, here, error = asyncio.run(use())

    assert (both, here) == ([1, 2], 3)
    assert type(error) is Refused


@pytest.mark.everywhere
def test_done_callbacks(pool: ParallelPool, make_pool: Any, gate: Any, eventually: Any) -> None:
    seen: list[Any] = []
    if not make_pool.is_concurrent:
        gate.open()
    future = pool.submit(lambda: gate.wait() or 5)
    future.add_done_callback(lambda future: seen.append(future.result()))
    future.add_done_callback(lambda future: seen.append(future))
    gate.open()  # not before: one that is added as it ends may be called before the first
    assert eventually(lambda: seen == [5, future])
    future.add_done_callback(lambda _: seen.append("late"))
    assert seen[-1] == "late", "on a future that has ended it is called at once"


@pytest.mark.semantics
@pytest.mark.threads
def test_a_done_callback_may_hand_in_more_work(pool: ParallelPool, eventually: Any) -> None:
    chain: list[Future[int]] = []

    def go_on(future: Future[int]) -> None:
        if len(chain) < 20:
            chain.append(pool.submit(add, future.result(), 1))
            chain[-1].add_done_callback(go_on)

    pool.submit(add, 0).add_done_callback(go_on)

    assert eventually(lambda: len(chain) == 20)
    assert chain[-1].result(300) == 20


@pytest.mark.semantics
@pytest.mark.threads
@pytest.mark.filterwarnings("ignore")
def test_a_done_callback_that_raises_harms_nothing(
    pool: ParallelPool, check_pool: Any, caplog: Any
) -> None:
    future = pool.submit(add, 1)
    future.add_done_callback(lambda _: refuse("a broken callback"))
    assert future.result(300) == 1
    check_pool(pool)


@pytest.mark.concurrent
def test_waiting_has_a_limit(pool: ParallelPool, gate: Any) -> None:
    future = pool.submit(gate.wait)
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.01)
    with pytest.raises(TimeoutError):
        next(concurrent.futures.as_completed([future], 0.01))
    gate.open()
    assert future.result(300) is None


# --- all workers, one worker ----------------------------------------------------------------------


@pytest.mark.everywhere
def test_parfeval_on_all_runs_once_on_every_worker(pool: ParallelPool) -> None:
    future = pool.parfeval_on_all(lambda text: (text, current_task().worker), "here")

    assert future.result(300) == [("here", worker.index) for worker in pool.workers]
    assert len(future.result()) == pool.num_workers == 3
    with pytest.raises(Refused):
        pool.parfeval_on_all(refuse, "no").result(300)


@pytest.mark.concurrent
def test_parfeval_on_all_waits_for_busy_workers(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    blocker = pool.submit(gate.wait)
    assert eventually(blocker.running)
    future = pool.parfeval_on_all(lambda: current_task().worker)
    others = [pool.submit(add, number) for number in range(4)]
    assert [other.result(300) for other in others] == [0, 1, 2, 3]
    assert not future.done()
    gate.open()
    assert future.result(300) == [0, 1, 2]


@pytest.mark.everywhere
def test_work_for_a_certain_worker_waits_for_it(pool: ParallelPool) -> None:
    for index in (2, 0, 1):
        futures = [
            pool.options(worker=index).submit(lambda: current_task().worker) for _ in range(5)
        ]
        assert [future.result(300) for future in futures] == [index] * 5
        assert (
            list(pool.options(worker=index).parfor(lambda _: current_task().worker, range(4)))
            == [index] * 4
        )


# --- the end --------------------------------------------------------------------------------------


def check_is_closed(pool: ParallelPool) -> None:
    assert pool.is_closed
    assert pool.workers == []
    assert "closed" in repr(pool)
    uses = {
        "submit": lambda: pool.submit(add, 1),
        "parfeval": lambda: pool.parfeval(add, 1),
        "parfor": lambda: pool.parfor(add, [1]),
        "parfor, generator": lambda: pool.parfor(add, (x for x in [1])),
        "parfor, empty": lambda: pool.parfor(add, []),
        "map": lambda: pool.map(add, [1]),
        "parfeval_on_all": lambda: pool.parfeval_on_all(add, 1),
        "options": lambda: pool.options(retries=0).submit(add, 1),
        "resize": lambda: pool.resize(2),
    }
    for name, use in uses.items():
        with pytest.raises(PoolClosedError, match="parpool"):
            pytest.fail(f"{name} gave {use()} on a closed pool")


@pytest.mark.semantics
@pytest.mark.threads
@pytest.mark.parametrize("end", ["shutdown", "delete"])
def test_a_pool_can_be_ended_twice(make_pool: Any, end: str) -> None:
    pool = make_pool(2)
    future = pool.submit(add, 1)
    getattr(pool, end)()
    getattr(pool, end)()
    pool.shutdown(wait=False)
    if end == "shutdown":
        assert future.result(0) == 1
    check_is_closed(pool)


@pytest.mark.semantics
@pytest.mark.threads
def test_shutdown_waits_for_what_is_queued(make_pool: Any) -> None:
    pool = make_pool(1)
    futures = [pool.submit(add, number) for number in range(20)]
    pool.shutdown()
    assert [future.result(0) for future in futures] == list(range(20))
    check_is_closed(pool)


@pytest.mark.concurrent
def test_shutdown_that_does_not_wait(make_pool: Any, gate: Any, eventually: Any) -> None:
    pool = make_pool(1)
    blocker = pool.submit(gate.wait)
    queued = pool.submit(add, 1)
    assert eventually(blocker.running)

    pool.shutdown(wait=False)

    assert not blocker.done()
    with pytest.raises(PoolClosedError):
        pool.submit(add, 1)
    with pytest.raises(PoolClosedError):
        pool.parfor(add, [1])
    with pytest.raises(PoolClosedError):
        pool.parfeval_on_all(add, 1)
    gate.open()
    assert queued.result(300) == 1
    pool.shutdown()
    check_is_closed(pool)


@pytest.mark.threads
def test_shutdown_that_cancels(make_pool: Any, gate: Any, eventually: Any) -> None:
    pool = make_pool(1)
    blocker = pool.submit(lambda: gate.wait() or "done")
    futures = [pool.submit(add, number) for number in range(3)]
    assert eventually(blocker.running)

    pool.shutdown(wait=False, cancel_futures=True)

    assert concurrent.futures.wait(futures, 300).not_done == set()
    assert [future.state for future in futures] == ["cancelled"] * 3
    gate.open()
    assert blocker.result(300) == "done"
    pool.shutdown()
    check_is_closed(pool)


@pytest.mark.semantics
@pytest.mark.concurrent
def test_a_with_block_ends_the_pool(make_pool: Any) -> None:
    with make_pool(2) as pool:
        futures = [pool.submit(add, number) for number in range(5)]
    assert [future.result(0) for future in futures] == list(range(5))
    check_is_closed(pool)


@pytest.mark.threads
def test_a_with_block_that_is_left_by_an_error_cancels_what_is_queued(
    make_pool: Any, gate: Any, eventually: Any
) -> None:
    with pytest.raises(Refused, match="enough"), make_pool(1) as pool:  # noqa: PT012 - as a whole
        blocker = pool.submit(gate.wait)
        futures = [pool.submit(add, number) for number in range(3)]
        assert eventually(blocker.running)
        futures[-1].add_done_callback(lambda _: gate.open())  # the pool waits for what runs
        refuse("enough")
    assert [future.state for future in (blocker, *futures)] == ["finished"] + ["cancelled"] * 3
    check_is_closed(pool)


@pytest.mark.semantics
@pytest.mark.concurrent
def test_a_forgotten_pool_is_collected(make_pool: Any) -> None:
    """Its work is done first, as the standard library does; the leak check sees that workers and
    threads are gone.
    """
    pool = make_pool(2)
    future = pool.submit(add, 1, 2)
    forgotten = weakref.ref(pool)
    del pool
    gc.collect()
    assert forgotten() is None
    assert future.result(300) == 3


@pytest.mark.semantics
@pytest.mark.threads
def test_a_view_keeps_its_pool_open(make_pool: Any) -> None:
    view = make_pool(1).options(retries=0, name="view")
    gc.collect()
    assert view.submit(add, 1).result(300) == 1
    assert list(view.parfor(add, range(3))) == [0, 1, 2]


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_what_a_pool_has_done(pool: ParallelPool) -> None:
    before = pool.statistics()
    pool.submit(add, 1).result(300)
    pool.submit(refuse, "no").exception(300)
    pool.parfor(lambda x: 1 // x, range(5), on_error="collect")

    now = pool.statistics()

    def since(name: str) -> int:
        return getattr(now, name) - getattr(before, name)

    assert [
        since(name) for name in ("submitted", "finished", "failed", "cancelled", "workers_lost")
    ] == [7, 5, 2, 0, 0]
    assert (now.queued, now.running) == (0, 0)
    assert 1 <= since("attempts") <= 7


@pytest.mark.semantics
@pytest.mark.concurrent
def test_a_pool_grows_and_shrinks(make_pool: Any, check_pool: Any) -> None:
    with make_pool(1) as pool:
        before = pool.workers[0]
        pool.resize(3)
        assert pool.num_workers == len(pool.workers) == 3
        assert pool.workers[0] == before
        check_pool(pool)
        pool.resize(2)
        assert pool.num_workers == 2
        check_pool(pool)
        pool.resize(2)
        check_pool(pool)
        pool.resize(1)
        assert [worker.index for worker in pool.workers] == [before.index]
        check_pool(pool)


@pytest.mark.threads
def test_new_workers_are_up_on_return_however_late_the_pool_is(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread tells of a worker that is up before it has handled that."""
    note_ready = Arrivals.note_ready

    def note_and_dawdle(*arrival: Any) -> None:
        note_ready(*arrival)
        threading.Event().wait(0.2)

    monkeypatch.setattr(Arrivals, "note_ready", note_and_dawdle)
    with make_pool(2) as pool:
        assert pool.idle_workers == 2
        pool.resize(3)
        assert pool.idle_workers == 3


@pytest.mark.threads
def test_a_busy_worker_ends_after_what_it_is_running(
    make_pool: Any, make_gate: Any, eventually: Any, check_pool: Any
) -> None:
    gates = [make_gate(), make_gate()]
    with make_pool(2) as pool:
        futures = [pool.submit(gate.wait) for gate in gates]
        assert eventually(lambda: all(future.running() for future in futures))
        pool.resize(1)
        assert pool.num_workers == 1
        later = pool.submit(add, 1)
        for gate in gates:
            gate.open()
        assert raypool.wait(futures, 300)
        assert [future.state for future in futures] == ["finished"] * 2
        assert later.result(300) == 1
        assert eventually(lambda: len(pool.workers) == 1)
        check_pool(pool)


@pytest.mark.threads
def test_a_busy_worker_that_was_to_go_stays_in_a_pool_that_grows_again(
    make_pool: Any, make_gate: Any, eventually: Any, check_pool: Any
) -> None:
    gates = [make_gate(), make_gate()]
    with make_pool(2) as pool:
        before = [worker.index for worker in pool.workers]
        futures = [pool.submit(gate.wait) for gate in gates]
        assert eventually(lambda: all(future.running() for future in futures))
        pool.resize(1)
        pool.resize(2)
        assert [worker.index for worker in pool.workers] == before
        for gate in gates:
            gate.open()
        assert raypool.wait(futures, 300)
        check_pool(pool)
        assert [worker.index for worker in pool.workers] == before


@pytest.mark.everywhere
def test_the_workers_of_a_pool(pool: ParallelPool, make_pool: Any) -> None:
    import os
    import platform

    workers = pool.workers
    assert [worker.index for worker in workers] == [0, 1, 2]
    assert {worker.host for worker in workers} == {platform.node()}
    assert {worker.state for worker in workers} == {"idle"}
    pids = pool.parfeval_on_all(os.getpid).result(300)
    assert [worker.pid for worker in workers] == pids
    assert len(set(pids)) == (3 if make_pool.is_in_processes else 1)
    assert pool.idle_workers == 3


def test_the_current_pool() -> None:
    with parpool(1, profile="inline", quiet=True) as first:
        assert gcp() is first
        with parpool(1, profile="threads", quiet=True) as second:
            assert gcp() is second
            assert gcp(create=False) is second
        assert gcp() is first
    assert gcp(create=False) not in (first, second)


def test_threads_that_need_the_first_pool_at_once_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raypool.toml").write_text('default = "threads"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raypool.pool._opened", [])
    at_once = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        pools = list(threads.map(lambda _: at_once.wait() < 4 and gcp(), range(4)))
    for pool in pools:
        pool.shutdown()
    assert len(set(pools)) == 1


@pytest.mark.arguments
def test_an_unknown_option_is_refused(pool: ParallelPool) -> None:
    with pytest.raises(TypeError, match=r"speed.*retries"):
        pool.options(speed=3)
