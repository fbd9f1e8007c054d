"""MATLAB's functions over futures: fetch_next, fetch_outputs, wait (scenarios 20, 21, 23)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from raypool import (
    Future,
    InvalidValueError,
    ParallelPool,
    after_all,
    after_each,
    fetch_next,
    fetch_outputs,
    parpool,
    wait,
)

pytestmark = pytest.mark.semantics


def fail_on_2(x: int) -> int:
    if x == 2:
        raise LookupError("two")
    return 10 * x


@pytest.mark.everywhere
def test_fetch_next_delivers_each_once(pool: ParallelPool) -> None:
    """Scenario 20: one exception, four values, then ValueError."""
    futures = [pool.parfeval(fail_on_2, x) for x in range(5)]
    values: dict[int, int] = {}
    errors = 0
    for _ in range(5):
        try:
            index, value = fetch_next(futures, timeout_s=300)
            values[index] = value
        except LookupError:
            errors += 1

    assert values == {0: 0, 1: 10, 3: 30, 4: 40}
    assert errors == 1
    assert all(future.read for future in futures)
    with pytest.raises(ValueError, match="has nothing to return"):
        fetch_next(futures, timeout_s=0)
    with pytest.raises(ValueError, match="has nothing to return"):
        fetch_next([])


@pytest.mark.concurrent
def test_fetch_next_follows_the_order_in_which_they_end(pool: ParallelPool, make_gate: Any) -> None:
    gates = [make_gate() for _ in range(3)]
    futures = [
        pool.parfeval(lambda gate=gate, x=x: gate.wait() or x) for x, gate in enumerate(gates)
    ]

    with pytest.raises(TimeoutError, match="3 futures"):
        fetch_next(futures, timeout_s=0.01)
    assert not any(future.read for future in futures), "nothing was delivered"
    for expected in (1, 2, 0):
        gates[expected].open()
        assert fetch_next(futures, timeout_s=300) == (expected, expected)


def test_fetch_next_delivers_what_ended_first_first(pool: ParallelPool) -> None:
    futures = [pool.parfeval(abs, x) for x in range(4)]
    for index in (2, 0, 3, 1):
        later = pool.parfeval(abs, -index)
        later.result(300)
        futures.append(later)
    assert wait(futures, 300)
    ended = sorted(range(8), key=lambda index: futures[index].finished_at)

    assert [fetch_next(futures)[0] for _ in range(8)] == ended


@pytest.mark.concurrent
def test_a_cancelled_future_counts_as_read_once_it_was_met(pool: ParallelPool, gate: Any) -> None:
    blockers = [pool.parfeval(gate.wait) for _ in range(3)]
    future = pool.parfeval(abs, 1)
    assert future.cancel()

    with pytest.raises(CancelledError):
        fetch_next([*blockers, future], timeout_s=300)
    assert future.read
    with pytest.raises(TimeoutError):
        fetch_next([*blockers, future], timeout_s=0.01)
    gate.open()
    assert wait(blockers, 300)


@pytest.mark.everywhere
def test_fetch_outputs_in_the_order_of_submission(pool: ParallelPool) -> None:
    futures = [pool.parfeval(pow, x, 2) for x in range(5)]

    assert fetch_outputs(futures) == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="has nothing to return"):
        fetch_next(futures)
    assert fetch_outputs(futures) == [0, 1, 4, 9, 16], "twice is no harm"
    assert fetch_outputs([]) == []


def test_fetch_outputs_stacks(pool: ParallelPool) -> None:
    """Scenario 23: equal widths stack in the order of submission; unequal ones are a clear error; a
    list is always there.
    """
    wide = [pool.parfeval(np.full, 3, x) for x in range(4)]
    tall = [pool.parfeval(np.full, (rows, 2), rows) for rows in (1, 3, 2)]
    ragged = [pool.parfeval(np.ones, width) for width in (3, 4)]

    assert fetch_outputs(wide, stack=True).tolist() == [[x] * 3 for x in range(4)]
    assert fetch_outputs(tall, stack=True)[:, 0].tolist() == [1, 3, 3, 3, 2, 2]
    assert fetch_outputs(
        [pool.parfeval(float, x) for x in range(3)], stack=True
    ).ravel().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\).*stack=False"):
        fetch_outputs(ragged, stack=True)
    assert [len(row) for row in fetch_outputs(ragged)] == [3, 4]


def test_fetch_outputs_raises_the_first_error(pool: ParallelPool) -> None:
    with pytest.raises(LookupError, match="two"):
        fetch_outputs([pool.parfeval(fail_on_2, x) for x in range(4)])


@pytest.mark.concurrent
def test_wait_never_raises(pool: ParallelPool, gate: Any) -> None:
    """Scenario 21: one failed, one slow: False, no exception."""
    failed, slow = pool.parfeval(fail_on_2, 2), pool.parfeval(gate.wait)

    assert wait([failed, slow], timeout_s=0.2) is False
    assert not failed.read
    gate.open()
    assert wait([failed, slow], timeout_s=300) is True
    assert wait([]) is True


@pytest.mark.arguments
def test_only_futures_of_pools_are_taken(pool: ParallelPool) -> None:
    future = pool.parfeval(abs, 1)
    for function in (fetch_next, fetch_outputs, wait):
        with pytest.raises(TypeError, match="not a future"):
            function([future, 5])


@pytest.mark.arguments
def test_a_future_stays_where_it_is(pool: ParallelPool) -> None:
    import pickle

    future: Future[int] = pool.parfeval(abs, 1)
    with pytest.raises(TypeError, match="result"):
        pickle.dumps(future)


# --- in a callback, which is in the pool's own thread ---------------------------------------------


@pytest.mark.concurrent
def test_a_callback_is_told_that_its_pool_would_wait_for_itself(
    pool: ParallelPool, call_back: Any
) -> None:
    waits: list[Callable[[], Any]] = [
        lambda: pool.submit(abs, -7).result(),
        lambda: pool.submit(abs, -7).result(timeout=300),
        lambda: pool.submit(abs, -7).exception(),
        lambda: wait([pool.parfeval(abs, -7)]),
        lambda: fetch_next([pool.parfeval(abs, -7)], timeout_s=300),
        lambda: fetch_outputs([pool.parfeval(abs, -7)]),
        lambda: next(pool.map(abs, [-7])),
        lambda: pool.parfeval_on_all(abs, -7).result(),
        lambda: after_all([pool.parfeval(abs, -7)], sum).result(),
        lambda: wait(after_each([pool.parfeval(abs, -7)], float)),
    ]

    def try_all(_: Any) -> list[str]:
        said = []
        for wait_in_vain in waits:
            with pytest.raises(InvalidValueError, match="wait for itself") as caught:
                wait_in_vain()
            said.append(str(caught.value))
        return said

    assert len(call_back(try_all)) == len(waits)
    assert pool.submit(abs, -2).result(300) == 2, "the pool goes on"


@pytest.mark.concurrent
def test_a_callback_may_read_what_has_ended_and_wait_for_other_pools(
    pool: ParallelPool, call_back: Any
) -> None:
    later: list[Future[int]] = []

    def read(future: Future[int]) -> tuple[Any, ...]:
        later.append(pool.parfeval(abs, -7))
        with pytest.raises(TimeoutError):
            later[0].result(timeout=0)
        read = future.result(), future.exception(), wait([future]), fetch_next([*later, future])
        return *read, other.parfeval(abs, -3).result(), fetch_outputs([other.parfeval(abs, -4)])

    with parpool(1, profile="threads", quiet=True) as other:
        assert call_back(read) == (5, None, True, (1, 5), 3, [4])
    assert later[0].result(300) == 7


@pytest.mark.concurrent
def test_a_callback_need_not_wait_for_what_it_has_cancelled(
    pool: ParallelPool, call_back: Any
) -> None:
    """The pool notes that it is cancelled after the callback only."""

    def cancel_and_wait(_: Any) -> tuple[bool, ...]:
        queued = [pool.parfeval(abs, -7) for _ in range(2)]
        assert all(future.cancel() for future in queued)
        assert wait(queued, timeout_s=0), "else the next ones would wait forever"
        return wait(queued), wait([*queued, other.parfeval(abs, -3)])

    with parpool(1, profile="threads", quiet=True) as other:
        assert call_back(cancel_and_wait) == (True, True)


@pytest.mark.concurrent
def test_whatever_a_callback_raises_harms_nothing(
    pool: ParallelPool, make_gate: Any, check_pool: Any, eventually: Any, caplog: Any
) -> None:
    for error in (
        asyncio.CancelledError,
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        pytest.fail.Exception,
    ):

        def fail(_: Any, error: type[BaseException] = error) -> None:
            raise error("of a callback")

        gate = make_gate()
        future = pool.submit(lambda gate=gate: gate.wait() or 5)
        future.add_done_callback(fail)
        gate.open()
        assert future.result(300) == 5
        check_pool(pool)
        assert eventually(lambda: "of a callback" in caplog.text)
        caplog.clear()
        future.add_done_callback(fail)  # now it is called here


@pytest.mark.concurrent
def test_nor_does_the_error_of_a_task_that_is_no_exception(
    pool: ParallelPool, gate: Any, check_pool: Any
) -> None:
    async def give_up() -> None:
        gate.wait()
        raise asyncio.CancelledError

    future = pool.submit(lambda: asyncio.run(give_up()))
    future.add_done_callback(lambda future: future.result())
    gate.open()
    assert type(future.exception(300)) is asyncio.CancelledError
    check_pool(pool)


@pytest.mark.concurrent
def test_a_callback_knows_when_a_cancelled_future_has_ended(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    running = [pool.submit(gate.wait) for _ in range(pool.num_workers)]
    assert eventually(lambda: all(future.running() for future in running))
    queued = pool.submit(abs, -1)
    (follower,) = after_each([queued], abs)
    seen: list[Any] = []
    for future in (queued, running[0], follower):
        future.add_done_callback(lambda future: seen.append(future.finished_at))
    assert follower.cancel()
    assert queued.cancel()
    assert running[0].cancel()
    assert seen == [follower.finished_at, queued.finished_at, running[0].finished_at]
    assert None not in seen
    gate.open()
    assert wait(running, 300)
