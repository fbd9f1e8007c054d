"""What the driver makes of what workers say: of calls that last, of those that wait behind them,
and of those that are lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pytest

from raypool import (
    Future,
    ParallelPool,
    PoolBrokenError,
    PoolPreemptedError,
    Results,
    SpmdError,
    TaskError,
    WorkerLostError,
    wait,
)
from raypool.core import messages as m
from raypool.core.messages import Signal
from raypool.engine.engine import submit_call
from raypool.errors import LossReason
from raypool.options import Options, Where
from raypool.testing import FaultPlan, sim_pool
from tests.unit.scripted import Call, News, Workers, at_once, done, scripted


def train(item: int) -> int:
    """Stand for any function: nobody calls it."""
    raise AssertionError(item)


def used_to_it(num_workers: int, **changes: Any) -> tuple[ParallelPool, Workers]:
    """Open a pool that knows `train` to be short: a call may wait behind another."""
    pool, workers = scripted(num_workers, **changes)
    pool.parfor(train, range(2 * num_workers))
    workers.calls.clear()
    return pool, workers


def interrupted(call: Call, after_s: float = 5.0) -> News:
    """Let Ctrl-C end a loop."""
    (part,) = call.parts
    result = done(part, errors={0: KeyboardInterrupt()})
    return call.finished(replace(result, is_interrupted=True), after_s=after_s)


def rows(results: Results, *statuses: str) -> list[int]:
    """Return the items of attempts that ended in one of these ways."""
    frame = results.attempts
    return frame.loc[frame["status"].isin(statuses), "item"].tolist()


def cut_short(pool: ParallelPool, size: int, **options: Any) -> Results:
    """Run a loop that Ctrl-C ends, two items to a call; return what is known of it then."""
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(train, range(size), chunk_size=2, on_error="collect", **options)
    results: Results = caught.value.results  # type: ignore[attr-defined]
    return results


# --- a worker where everything fails --------------------------------------------------------------


def test_a_worker_that_fails_all_goes_while_the_others_are_at_their_first_item(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three GPUs train for an hour each; one is broken, and its trainings fail after ten seconds.

    It may fail nine of them, and is out of the pool long before another has ended.
    """
    pool, workers = scripted(3)

    def script(call: Call) -> Iterator[News]:
        if call.worker_id == 1:
            broken = done(call.parts[0], item_s=10.0, errors={0: OSError("no such device")})
            yield call.finished(broken, after_s=10)
        else:
            yield call.finished(after_s=3600)

    workers.script = script
    results = pool.parfor(train, range(30), on_error="collect")
    assert len(results.errors) == 9
    assert [call.worker_id for call in workers.calls].count(1) == 9
    assert "its last 9 items all failed, and calls of the same function still run on" in caplog.text


# --- values that are lost after they were returned ------------------------------------------------


class Gone:
    """Large values whose node has died."""

    def get(self) -> list[Any]:
        raise TaskError("A stored result is lost: its node died.")


@pytest.mark.parametrize("options", [{}, {"on_error": "collect"}], ids=["stop", "collect"])
def test_a_loop_keeps_its_results_if_some_values_are_lost(options: dict[str, Any]) -> None:
    pool, workers = scripted(2)

    def script(call: Call) -> Iterator[News]:
        (part,) = call.parts
        result = done(part, errors={0: ValueError("own")} if call.items == [3] else {})
        yield call.finished(replace(result, values=Gone()) if call.items[0] in (1, 3) else result)

    workers.script = script
    if options:
        results = pool.parfor(train, range(4), chunk_size=1, **options)
        assert {index: str(error) for index, error in results.errors.items()} == {
            1: "A stored result is lost: its node died.",
            3: "own",
        }
    else:
        with pytest.raises(TaskError, match="its node died") as caught:
            pool.parfor(train, range(3), chunk_size=1)
        results = caught.value.results  # type: ignore[attr-defined]
    assert (results[0], results[2]) == (0, 2)


# --- what is told of a call that lasts ------------------------------------------------------------


def test_what_is_told_early_counts_once_and_what_is_handed_back_runs_elsewhere() -> None:
    pool, workers = scripted(2)

    def script(call: Call) -> Iterator[News]:
        if call.items == [0, 1, 2, 3, 4]:
            yield call.narrowed(done(call.parts[0], 2), kept=[1])
            yield call.finished(done(call.parts[0], 3), after_s=5)
        else:
            yield call.finished()

    workers.script = script
    results = pool.parfor(train, range(10), chunk_size=5)
    assert list(results) == list(range(10))
    assert rows(results, "finished") == list(range(10))
    assert sorted(item for call in workers.calls[1:] for item in call.items) == list(range(3, 10))
    assert pool.statistics().finished == 10


@pytest.mark.parametrize("num_done", [0, 2, 3, 5])
def test_what_was_kept_may_come_back_unbegun_and_what_was_handed_back_is_not_asked_for(
    num_done: int,
) -> None:
    pool, workers = scripted(1)

    def script(call: Call) -> Iterator[News]:
        if len(workers.calls) == 1:
            yield call.narrowed(done(call.parts[0], 2), kept=[1])
            yield call.finished(done(call.parts[0], num_done))
        else:
            yield call.finished()

    workers.script = script
    results = pool.parfor(train, range(5), chunk_size=5)
    assert list(results) == list(range(5))
    again = sorted(item for call in workers.calls[1:] for item in call.items)
    assert again == ([3, 4] if num_done > 2 else [2, 3, 4])
    assert results.attempts["attempt"].tolist() == [1] * 5


def test_each_error_goes_to_its_item_once() -> None:
    pool, workers = scripted(1)
    first, second = ValueError("first"), ValueError("second")

    def script(call: Call) -> Iterator[News]:
        if len(workers.calls) == 1:
            yield call.narrowed(done(call.parts[0], 2, errors={0: first}), kept=[1])
            yield call.finished(done(call.parts[0], 3, errors={0: first, 2: second}))
        else:
            yield call.finished()

    workers.script = script
    results = pool.parfor(train, range(5), chunk_size=5, on_error="collect")
    assert results.errors == {0: first, 2: second}
    assert (pool.statistics().finished, pool.statistics().failed) == (3, 2)


def test_a_slice_that_could_not_be_opened_has_failed_as_far_as_it_was_kept() -> None:
    """That may show only after it was told of, and is said of all its items then."""
    pool, workers = scripted(1)
    error = ImportError("no module")

    def script(call: Call) -> Iterator[News]:
        if len(workers.calls) == 1:
            yield call.narrowed(done(call.parts[0], 0), kept=[1])
            yield call.finished(done(call.parts[0], errors=dict.fromkeys(range(5), error)))
        else:
            yield call.finished()

    workers.script = script
    results = pool.parfor(train, range(5), chunk_size=5, on_error="collect")
    assert results.errors == {0: error}
    assert results.attempts["status"].tolist() == ["failed", *["finished"] * 4]


def test_calls_that_were_not_sent_are_not_mixed_up_with_those_that_were() -> None:
    """One is cancelled in the instant in which it would go out, between an item of a loop and two
    other calls.
    """
    pool, workers = used_to_it(1)
    workers.script = lambda call: ()
    before = [pool.parfeval(train, number) for number in range(7)]
    calls: list[Future[int]] = []
    workers.later(
        (1, None, lambda: calls.extend(pool.parfeval(train, number) for number in (100, 101, 102))),
        workers.calls[0].finished(after_s=2),
        workers.calls[1].finished(after_s=3),
    )
    workers.packs = lambda items: calls[0].cancel() if items == [-2] else None

    def script(call: Call) -> Iterator[News]:
        if call.items == [-2, 101, 102]:
            item, kept, behind = call.parts
            yield call.narrowed(done(item), done(kept, 0), done(behind, 0), kept=[0, 1, 0])
            yield call.finished(done(item), done(kept), done(behind, 0), after_s=5)
        else:
            yield call.finished()

    workers.script = script
    assert list(pool.parfor(train, [-1, -2])) == [-1, -2]
    assert wait([*before, *calls[1:]], 0)
    assert [future.result(0) for future in (*before, *calls[1:])] == [*range(7), 101, 102]
    assert calls[0].cancelled()
    assert workers.calls[-1].items == [102], "it was handed back"


def test_what_waits_behind_a_call_that_lasts_runs_elsewhere_whatever_it_answers() -> None:
    pool, workers = used_to_it(1)

    def script(call: Call) -> Iterator[News]:
        if call.attempt_id == workers.calls[0].attempt_id:
            yield call.narrowed(done(call.parts[0], 1), kept=[1], after_s=1)
            yield call.finished(after_s=9)
        elif call.behind == workers.calls[0].attempt_id and call is workers.calls[1]:
            yield call.finished(
                done(call.parts[0], errors={0: ValueError("nobody asked")}), after_s=2
            )
        else:
            yield call.finished(after_s=9)

    workers.script = script
    results = pool.parfor(train, range(4), chunk_size=2)
    assert list(results) == [0, 1, 2, 3]
    assert [call.items for call in workers.calls] == [[0, 1], [2, 3], [2, 3]]


def test_what_comes_after_the_answer_changes_nothing() -> None:
    pool, workers = scripted(1)

    def script(call: Call) -> Iterator[News]:
        yield call.finished()
        yield call.narrowed(done(call.parts[0], 1), kept=[1], after_s=0.002)

    workers.script = script
    assert list(pool.parfor(train, range(6), chunk_size=2)) == list(range(6))
    assert [call.items for call in workers.calls] == [[0, 1], [2, 3], [4, 5]]


def test_what_is_told_of_a_loop_that_has_ended_changes_nothing() -> None:
    pool, workers = scripted(2)

    def script(call: Call) -> Iterator[News]:
        if call.items == [0, 1]:
            yield call.narrowed(done(call.parts[0], 1), kept=[1], after_s=7)
            yield call.finished(after_s=8)
        elif call.items == [2, 3]:
            yield interrupted(call)
        else:
            yield call.finished()

    workers.script = script
    cut_short(pool, 4)
    assert list(pool.parfor(train, range(5, 15))) == list(range(5, 15))
    assert {call.worker_id for call in workers.calls[2:]} == {0, 1}


# --- what runs, and what only waits ---------------------------------------------------------------


def test_only_what_a_worker_is_at_is_cancelled() -> None:
    """Worker 0 is at its first call; worker 1 is at its second, as the first has come back. Each
    has another one behind that.
    """
    pool, workers = used_to_it(2)
    workers.script = lambda call: [interrupted(call)] if call.items == [2, 3] else []
    results = cut_short(pool, 12)
    assert [(call.worker_id, call.items) for call in workers.calls] == [
        (0, [0, 1]),
        (1, [2, 3]),
        (0, [4, 5]),
        (1, [6, 7]),
        (1, [8, 9]),
    ]
    assert rows(results, "cancelled") == [0, 1, 6, 7]
    frame = results.attempts[results.attempts["status"] == "cancelled"]
    ends = frame["started_at"] + pd.to_timedelta(frame["duration_s"], unit="s")
    assert (ends <= datetime.now(UTC)).all()


def test_what_waits_behind_a_call_of_another_task_is_not_cancelled() -> None:
    pool, workers = used_to_it(2)
    workers.script = lambda call: [interrupted(call)] if call.items == [0, 1] else []
    pool.parfeval(train, -1)
    results = cut_short(pool, 12)
    assert [call.items for call in workers.calls if call.worker_id == 0] == [[-1], [2, 3]]
    assert rows(results, "cancelled") == [4, 5]


def test_what_was_lost_with_its_worker_is_not_cancelled_too() -> None:
    pool, workers = used_to_it(2, retries=1)

    def script(call: Call) -> Iterator[News]:
        if call is workers.calls[0]:
            yield call.lost()
        elif call.items == [2, 3]:
            yield interrupted(call)

    workers.script = script
    frame = cut_short(pool, 4).attempts
    assert (
        frame.loc[frame["item"] < 2, ["attempt", "status"]].values.tolist()
        == [[1, "lost"], [2, "cancelled"]] * 2
    )


def test_of_a_call_that_lasts_only_what_it_keeps_is_cancelled() -> None:
    """It has run since the items before were done."""
    pool, workers = scripted(2)

    def script(call: Call) -> Iterator[News]:
        if call.items == [0, 1]:
            yield call.narrowed(done(call.parts[0], 1, item_s=3.0), kept=[1])
        elif call.items == [2, 3]:
            yield interrupted(call)

    workers.script = script
    results = cut_short(pool, 4)
    assert rows(results, "cancelled") == [1]
    assert results.attempts["started_at"][1].timestamp() == 1003.0


def test_what_has_timed_out_is_not_cancelled_too() -> None:
    """Before it was told of, or after that, or without a word."""
    for told_at in (0.5, 3.0, None):
        pool, workers = scripted(2)

        def script(call: Call, told_at: float | None = told_at) -> Iterator[News]:
            if call.items == [0]:
                if told_at is not None:
                    yield call.narrowed(done(call.parts[0], 0), kept=[1], after_s=told_at)
            elif call.items == [1]:
                yield call.finished(after_s=1.5)
            else:
                yield interrupted(call, after_s=1.9)

        workers.script = script
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.options(timeout_s=2.0).parfor(train, range(4), on_error="collect")
        results = caught.value.results  # type: ignore[attr-defined]
        assert workers.signals[0] == (
            0,
            workers.calls[0].attempt_id,
            workers.calls[0].parts[0].task_id,
            Signal.CANCEL,
        )
        assert rows(results, "failed") == [0, 2]
        assert rows(results, "cancelled") == [3]
        assert results.attempts["started_at"].notna()[0], "it is known when it began"


def test_what_has_timed_out_is_not_lost_too() -> None:
    """Its worker does not stop, and is killed for that; or it fails late, and would run again."""
    pool, workers = scripted(1)
    late: list[Callable[[Call], News]] = [
        lambda call: call.lost(LossReason.STOPPED, after_s=5),
        lambda call: call.finished(done(call.parts[0], errors={0: KeyError()}), after_s=5),
    ]

    for end in late:

        def script(call: Call, end: Callable[[Call], News] = end) -> Iterator[News]:
            yield end(call) if call.items == [0] else call.finished()

        workers.script = script
        view = pool.options(timeout_s=2.0, retry_on=KeyError)
        results = view.parfor(train, range(2), on_error="collect")
        assert results.attempts["status"].tolist() == ["failed", "finished"]


def test_an_item_that_runs_again_has_the_time_of_the_call_that_it_failed_in() -> None:
    """Other calls have gone out by then, to the same worker."""
    pool, workers = used_to_it(1)
    ended_at = []

    def script(call: Call) -> Iterator[News]:
        if call.items == [0, 1]:
            yield 1.0, None, lambda: ended_at.append(time.time())
            yield call.finished(done(call.parts[0], errors={1: KeyError("again")}), after_s=1.001)
        else:
            yield call.finished(after_s=2.0)

    workers.script = script
    results = pool.options(retries=1, retry_on=KeyError).parfor(train, range(6), chunk_size=2)
    assert rows(results, "retried") == [1]
    (retried,) = results.attempts[results.attempts["status"] == "retried"].to_dict("records")
    assert (retried["attempt"], retried["worker"]) == (1, 0)
    assert retried["started_at"].timestamp() <= ended_at[0]
    assert list(results) == list(range(6))


@pytest.mark.parametrize(
    ("reason", "was_idle", "lost", "without_time"),
    [
        # charged: nobody knows whether the second call had begun
        (LossReason.EXIT, False, [0, 1, 2, 3], [2, 3]),
        (LossReason.PREEMPTED, False, [0, 1], []),
        (LossReason.STOPPED, False, [0, 1], []),
        (LossReason.EXIT, True, [], []),  # it had gone before anything came
    ],
)
def test_what_waited_when_its_worker_died_is_an_attempt_only_if_it_is_charged(
    reason: LossReason, was_idle: bool, lost: list[int], without_time: list[int]
) -> None:
    pool, workers = used_to_it(1, retries=1)

    def script(call: Call) -> Iterator[News]:
        if len(workers.calls) == 2:
            yield call.lost(reason, was_idle=was_idle)
        elif len(workers.calls) > 2:
            yield call.finished()

    workers.script = script
    results = pool.parfor(train, range(4), chunk_size=2)
    assert list(results) == [0, 1, 2, 3]
    assert rows(results, "lost") == lost
    frame = results.attempts[results.attempts["status"] == "lost"]
    assert frame.loc[frame["started_at"].isna(), "item"].tolist() == without_time
    assert frame["worker"].tolist() == [0] * len(lost)


def test_a_call_bound_to_a_process_that_a_fresh_one_replaces_is_told_so() -> None:
    pool, workers = scripted(1)
    bound: list[Future[int]] = []

    def script(call: Call) -> Iterator[News]:
        yield 0.5, None, lambda: bound.append(pool.options(worker=0).parfeval(train, 1))
        yield call.finished(after_s=1.0)

    workers.script = script
    submit_call(pool._engine, train, (0,), {}, Options(), Where(is_fresh=True)).result(300)
    with pytest.raises(WorkerLostError, match="a call with fresh_process=True has replaced the"):
        bound[0].result(300)


# --- its own end ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionError("Client is shutting down."),
            "The connection to the cluster has ended: Client is shutting down. ",
        ),
        (KeyError(7), "This is a bug in raypool"),
    ],
)
def test_a_connection_that_breaks_is_no_mistake_of_raypools(error: Exception, words: str) -> None:
    pool, workers = scripted(1)

    def fail(call: Call) -> Iterator[News]:
        raise error
        yield

    workers.script = fail
    future = pool.parfeval(train, 1)
    with pytest.raises(PoolBrokenError, match=words) as caught:
        future.result(0)
    assert caught.value.__cause__ is error


# --- pools all of whose nodes go ------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["collect", "raise", "stop"])
def test_a_loop_whose_nodes_all_go_ends_with_what_it_has(on_error: str) -> None:
    with sim_pool(2, FaultPlan(item_s=1.0, preempted_s=2.5)) as pool:
        with pytest.raises(PoolPreemptedError) as caught:
            pool.parfor(abs, range(8), on_error=on_error, progress=False)
        assert re.fullmatch(
            r"The pool has ended: the simulated nodes will shut down in \d s, and no other node can"
            r" come\. 6 of 8 items have finished\. Make the same call with the same run_dir on other"
            r" nodes to continue\.",
            str(caught.value),
        )
        results: Results = caught.value.results  # type: ignore[attr-defined]
        assert rows(results, "finished") == list(range(6))
        assert list(results) == [*range(6), None, None]
        for use in (lambda: pool.parfeval(abs, 1), lambda: pool.parfor(abs, [1])):
            with pytest.raises(PoolPreemptedError, match="6 of 8 items"):
                use()


def test_futures_of_a_pool_whose_nodes_all_go() -> None:
    """One that was told and came back, one that was not told and had all the time that there was,
    and one that waited.
    """
    pool, workers = scripted(2)
    workers.script = lambda call: ()
    told, once = pool.parfeval(train, 0), pool.options(retries=0).parfeval(train, 1)
    call = workers.calls[0]
    leaving = m.PoolLeaving(is_final=True, at=50.0, gone_at=60.0)
    workers.later(
        (1, leaving, "node a will shut down"),
        call.finished(done(call.parts[0], 0), after_s=2),
    )
    waiting = pool.parfeval(train, 2)
    for future in (told, once, waiting):
        with pytest.raises(PoolPreemptedError, match=r"will shut down in 0 s.* 0 of 3 items"):
            future.result(0)
        assert future.reason == "node preempted"
    assert len(workers.calls) == 2
    assert [(signal.attempt_id, signal.signal) for signal in workers.signals] == [
        (0, Signal.LEAVE),
        (1, Signal.CANCEL),
    ]


def test_a_call_on_all_workers_whose_nodes_all_go() -> None:
    """Its ranks come back when they are told, and wait for each other no longer."""
    pool = sim_pool(2, FaultPlan(item_s=100.0, preempted_s=1.0))
    with pool, pytest.raises(PoolPreemptedError):
        pool.spmd(lambda context: context.rank)


# --- gangs ----------------------------------------------------------------------------------------


def test_ranks_behind_a_gang_that_has_failed_meet_in_a_group_of_their_own() -> None:
    """The answer that frees the last worker of the first also starts the second."""
    pool, workers = scripted(2)
    workers.script = lambda call: ()
    first, second = (pool.spmd_async(lambda context: None) for _ in range(2))
    workers.script = at_once
    for call in list(workers.calls):
        workers.tell(call.finished(done(call.parts[0], errors={0: ValueError("x")})))
    assert isinstance(first.exception(300), SpmdError)
    second.result(300)
    numbers = [assignment.number for call in workers.calls for assignment in call.items]
    assert numbers == [0, 0, 1, 1]
