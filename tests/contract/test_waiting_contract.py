"""What is called here when futures end: after_each, after_all (scenario 24), and the standard
library's ways to wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from raypool import (
    Future,
    ParallelPool,
    after_all,
    after_each,
    fetch_next,
    fetch_outputs,
    parpool,
    wait,
)

pytestmark = pytest.mark.semantics


class Refused(Exception):
    """An exception of a user's."""


def ten_times(x: int) -> int:
    if x == 2:
        raise Refused("two")
    return 10 * x


@pytest.mark.everywhere
def test_after_each_then_after_all(pool: ParallelPool) -> None:
    """Scenario 24: callbacks here, a failing element skipped."""
    called: list[int] = []

    def note(value: int) -> int:
        called.append(value)
        return value + 1

    futures = [pool.parfeval(ten_times, x) for x in range(5)]
    followers = after_each(futures, note)
    total = after_all(followers, sum)

    assert total.result(300) == 1 + 11 + 31 + 41
    assert sorted(called) == [0, 10, 30, 40]
    assert [follower.state for follower in followers] == [
        "finished",
        "finished",
        "failed",
        "finished",
        "finished",
    ]
    assert followers[2].error is futures[2].error
    with pytest.raises(Refused, match="two"):
        followers[2].result()
    assert not any(future.read for future in [*futures, *followers])


@pytest.mark.everywhere
def test_whoever_asks_is_given_the_failing_ones_too(pool: ParallelPool) -> None:
    """Scenario 24: a failing element skipped unless asked for."""
    futures = [pool.parfeval(ten_times, x) for x in range(3)]

    states = after_each(futures, lambda future: future.state, pass_future=True)
    errors = after_all(
        futures, lambda all_of_them: [future.error for future in all_of_them], pass_future=True
    )

    assert fetch_outputs(states) == ["finished", "finished", "failed"]
    assert errors.result(300) == [None, None, futures[2].error]


@pytest.mark.semantics
@pytest.mark.threads
def test_the_calls_are_made_here_one_after_the_other_in_one_thread(pool: ParallelPool) -> None:
    inside, most = 0, 0
    names = []

    def look(_: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        names.append(threading.current_thread().name)
        threading.Event().wait(0.001)  # time for another to come in
        inside -= 1

    first = after_each([pool.parfeval(abs, x) for x in range(20)], look)
    second = after_each([pool.parfeval(abs, x) for x in range(20)], look)

    assert wait([*first, *second], 300)
    assert [follower.error for follower in (*first, *second)] == [None] * 40
    assert most == 1
    assert set(names) == {"raypool-callbacks"}


@pytest.mark.concurrent
def test_the_calls_follow_the_order_in_which_futures_end(
    pool: ParallelPool, make_gate: Any
) -> None:
    gates = [make_gate() for _ in range(3)]
    futures = [
        pool.parfeval(lambda gate=gate, x=x: gate.wait() or x) for x, gate in enumerate(gates)
    ]
    order: list[int] = []
    followers = after_each(futures, order.append)
    values = after_all(futures, list)

    for index in (1, 2, 0):
        assert not values.done()
        gates[index].open()
        followers[index].result(300)

    assert order == [1, 2, 0]
    assert values.result(300) == [0, 1, 2], "the list is in the order of the futures"


def test_the_new_futures_can_be_read_like_others(pool: ParallelPool) -> None:
    futures = [pool.parfeval(abs, x) for x in range(4)]
    followers = after_each(after_each(futures, lambda x: x + 1), str)

    assert dict(fetch_next(followers, timeout_s=300) for _ in range(4)) == {
        0: "1",
        1: "2",
        2: "3",
        3: "4",
    }
    with pytest.raises(ValueError, match="has nothing to return"):
        fetch_next(followers)
    assert fetch_outputs(followers) == ["1", "2", "3", "4"]
    assert {future.result() for future in concurrent.futures.as_completed(followers, 300)} == {
        "1",
        "2",
        "3",
        "4",
    }
    story = followers[0]
    assert story.name == "str of <lambda> of abs"
    assert (story.state, story.attempts, story.worker) == ("finished", 1, None)
    assert futures[0].submitted_at <= story.submitted_at <= story.started_at <= story.finished_at
    assert story.running_duration_s >= 0


@pytest.mark.semantics
@pytest.mark.threads
def test_what_the_function_raises_is_the_new_futures_error(
    pool: ParallelPool, check_pool: Any
) -> None:
    def fail(value: Any) -> None:
        raise KeyError(value)

    followers = after_each([pool.parfeval(abs, x) for x in (1, 2)], fail)
    last = after_all(followers, list)

    assert [type(follower.exception(300)) for follower in followers] == [KeyError, KeyError]
    assert last.result(300) == [], "all are left out"
    assert type(after_all([pool.parfeval(abs, 1)], lambda _: exit(3)).exception(300)) is SystemExit
    assert fetch_outputs(after_each([pool.parfeval(abs, 7)], str)) == ["7"], (
        "and the thread lives on"
    )
    check_pool(pool)


def test_a_single_future_counts_by_itself(pool: ParallelPool) -> None:
    assert after_all(pool.parfeval_on_all(lambda: 2), sum).result(300) == 2 * pool.num_workers
    assert (
        after_all(
            pool.parfeval(abs, -1), lambda future: future.result() + 1, pass_future=True
        ).result(300)
        == 2
    )
    with pytest.raises(Refused):
        after_all(pool.parfeval(ten_times, 2), pytest.fail).result(300)


def test_without_futures(pool: ParallelPool) -> None:
    assert after_each([], abs) == []
    assert after_all([], list).result(300) == []


def test_futures_that_have_ended_long_ago(pool: ParallelPool) -> None:
    futures = [pool.parfeval(abs, x) for x in range(3)]
    assert wait(futures, 300)

    assert fetch_outputs(after_each(futures, str)) == ["0", "1", "2"]
    assert after_all(futures, list).result(300) == [0, 1, 2]


@pytest.mark.everywhere
def test_futures_of_several_pools(pool: ParallelPool) -> None:
    with parpool(1, profile="threads", quiet=True) as other:
        futures = [pool.parfeval(abs, -1), other.parfeval(abs, -2), pool.parfeval(abs, -3)]
        assert after_all(futures, list).result(300) == [1, 2, 3]
        assert dict(fetch_next(futures, timeout_s=300) for _ in range(3)) == {0: 1, 1: 2, 2: 3}
        assert fetch_outputs(futures) == [1, 2, 3]
        assert wait(futures)


@pytest.mark.semantics
@pytest.mark.threads
def test_the_function_may_hand_in_more_work(pool: ParallelPool) -> None:
    """Unlike a done callback, which the pool itself would wait for, it may also wait for that
    work.
    """
    followers = after_each(
        [pool.parfeval(abs, x) for x in range(3)], lambda x: list(pool.parfor(abs, [x, -x]))
    )
    assert fetch_outputs(followers) == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.semantics
@pytest.mark.threads
def test_the_function_is_told_that_it_would_wait_for_itself(pool: ParallelPool) -> None:
    futures = [pool.parfeval(abs, x) for x in range(3)]
    assert wait(futures, 300), "so the calls are made in this order"
    followers: list[Future[Any]] = []
    known = threading.Event()

    def ask(x: int) -> Any:
        known.wait(300)
        return fetch_outputs(followers[x + 1 :]), wait(followers[x + 1 :])

    followers += after_each(futures, ask)
    known.set()
    assert wait(followers, 300)
    for follower in followers[:2]:
        with pytest.raises(ValueError, match="Chain them"):
            follower.result()
    assert followers[2].result() == ([], True)


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.concurrent
def test_a_cancelled_future_is_skipped(pool: ParallelPool, gate: Any) -> None:
    blockers = [pool.parfeval(gate.wait) for _ in range(3)]
    cancelled, kept = pool.parfeval(abs, 1), pool.parfeval(abs, 2)
    called: list[int] = []
    followers = after_each([cancelled, kept], called.append)
    values = after_all([cancelled, kept], list)
    states = after_all(
        [cancelled, kept], lambda both: [future.state for future in both], pass_future=True
    )
    assert cancelled.cancel()

    with pytest.raises(CancelledError):
        followers[0].result(300)
    assert followers[0].state == "cancelled"
    gate.open()
    assert wait([*blockers, *followers], 300)
    assert called == [2]
    assert values.result(300) == [2]
    assert states.result(300) == ["cancelled", "finished"]


@pytest.mark.concurrent
def test_a_call_that_has_not_begun_can_be_cancelled(pool: ParallelPool, gate: Any) -> None:
    future = pool.parfeval(gate.wait)
    called: list[Any] = []
    (follower,) = after_each([future], called.append)
    after = after_each([follower], called.append)[0]

    assert follower.cancel()
    assert follower.cancel(), "twice is no harm"
    assert not future.done(), "what it would have waited for goes on"
    assert wait([follower, after], 300)
    assert after.state == "cancelled"
    gate.open()
    assert future.result(300) is None
    assert after_all([future], lambda _: "later").result(300) == "later"
    assert called == []


@pytest.mark.semantics
@pytest.mark.threads
def test_a_call_that_runs_here_cannot_be_cancelled(pool: ParallelPool) -> None:
    begun, end = threading.Event(), threading.Event()

    def run(_: int) -> str:
        begun.set()
        end.wait(300)
        return "done"

    (follower,) = after_each([pool.parfeval(abs, 1)], run)
    assert begun.wait(300)
    assert follower.state == "running"
    assert not follower.cancel()
    end.set()
    assert follower.result(300) == "done"
    assert not follower.cancel()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.arguments
def test_only_futures_and_functions_are_taken(pool: ParallelPool) -> None:
    future = pool.parfeval(abs, 1)
    for function in (after_each, after_all):
        with pytest.raises(TypeError, match="not a future"):
            function([future, 5], abs)
        with pytest.raises(TypeError, match="not callable"):
            function([future], 5)
    with pytest.raises(TypeError, match="not a future"):
        after_all(concurrent.futures.Future(), abs)


@pytest.mark.semantics
def test_a_future_by_itself_is_a_list_of_one(pool: ParallelPool) -> None:
    future = pool.parfeval(abs, -3)
    assert wait(future)
    assert fetch_next(future) == (0, 3)
    assert fetch_outputs(future) == [3]
    assert fetch_outputs(after_each(future, float)) == [3.0]


# --- the standard library's ways, with futures that are cancelled while they run ------------------


@pytest.mark.concurrent
def test_as_completed_yields_one_that_is_cancelled_while_it_runs(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    running, other = pool.parfeval(gate.wait), pool.parfeval(gate.wait)
    assert eventually(lambda: running.running() and other.running())
    ended = concurrent.futures.as_completed([running, other], 300)
    assert running.cancel()
    assert next(ended) is running
    assert concurrent.futures.wait(
        [running, other], 60, concurrent.futures.FIRST_COMPLETED
    ).done == {running}
    gate.open()
    assert next(ended) is other
    assert pool.parfeval(abs, -1).result(300) == 1


@pytest.mark.concurrent
def test_fetch_next_and_callbacks_meet_one_that_is_cancelled_while_it_runs(
    pool: ParallelPool, gate: Any, eventually: Any
) -> None:
    running = pool.parfeval(gate.wait)
    followers = after_each([running], lambda future: future.state, pass_future=True)
    skipped = after_each([running], str)
    seen: list[str] = []
    running.add_done_callback(lambda future: seen.append(future.state))
    assert eventually(running.running)
    assert running.cancel()
    with pytest.raises(CancelledError):
        fetch_next([running], timeout_s=300)
    assert running.read
    assert seen == ["cancelled"]
    assert followers[0].result(300) == "cancelled"
    assert wait(skipped, 300)
    assert skipped[0].state == "cancelled"


@pytest.mark.concurrent
def test_asyncio_cancels_one_that_runs(pool: ParallelPool, gate: Any, eventually: Any) -> None:
    """A coroutine that gives up (a time limit, say) stops the work that it waited for."""

    async def give_up(future: Future[Any]) -> str:
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), 0.01)
        except TimeoutError:
            return "gave up"
        return "it came"

    async def meet(future: Future[Any]) -> str:
        try:
            await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            return "cancelled elsewhere"
        return "it came"

    running = pool.parfeval(gate.wait)
    assert eventually(running.running)
    assert asyncio.run(give_up(running)) == "gave up"
    assert eventually(running.cancelled)
    assert asyncio.run(meet(running)) == "cancelled elsewhere"
    assert pool.parfeval(abs, -1).result(300) == 1
