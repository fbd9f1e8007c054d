"""What `parfor` promises, on every kind of pool: order, failures, reduction, seeds, limits
(scenarios 7, 8, 12 to 15).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import operator
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import raypool
from raypool import (
    InvalidValueError,
    ParallelPool,
    Results,
    TaskError,
    current_task,
    load_results,
    parpool,
)
from raypool.core.messages import AttemptFinished
from raypool.engine.trace import read_trace
from tests.conftest import poll

pytestmark = pytest.mark.semantics


class Unlucky(ValueError):
    """An exception of a user's, with a field of its own."""

    def __init__(self, item: int) -> None:
        super().__init__(f"item {item} is unlucky")
        self.item = item

    def __reduce__(self) -> Any:
        return Unlucky, (self.item,)


def fail_on_3(x: int) -> int:
    if x == 3:
        raise Unlucky(x)
    return 10 * x


def root_sum(rank: int) -> float:
    return math.sqrt(rank) * 1e3 + 1 / (rank + 1)


# --- items and their order ------------------------------------------------------------------------


@pytest.mark.everywhere
def test_results_stand_in_the_order_of_the_items(pool: ParallelPool) -> None:
    sources: list[Callable[[], Any]] = [
        lambda: [5, 3, 8, 1],
        lambda: (5, 3, 8, 1),
        lambda: range(4),
        lambda: 4,
        lambda: (x * x for x in range(4)),
        lambda: {"a": 1, "b": 2}.items(),
        lambda: np.arange(4),
        lambda: iter("abcd"),
        list,
        lambda: 0,
        lambda: iter(()),
    ]
    for source in sources:
        items = source()
        expected = [(x, x) for x in (range(items) if isinstance(items, int) else items)]

        results = pool.parfor(lambda x: (x, x), source())

        assert isinstance(results, Results)
        assert list(results) == expected
        assert len(results) == len(expected)
        assert list(results.to_frame()["status"]) == ["finished"] * len(expected)


@pytest.mark.everywhere
def test_each_row_of_a_data_frame_is_a_dict(pool: ParallelPool) -> None:
    configs = pd.DataFrame({"lr": [0.1, 0.2, 0.3], "kind": ["a", "b", "c"]}, index=[7, 5, 9])

    results = pool.parfor(
        lambda config: {"text": f"{config['kind']}{config['lr']}", "type": type(config).__name__},
        configs,
    )

    frame = results.to_frame()
    assert list(frame["text"]) == ["a0.1", "b0.2", "c0.3"]
    assert set(frame["type"]) == {"dict"}
    assert list(frame["kind"]) == ["a", "b", "c"]
    assert list(frame.index) == [7, 5, 9]
    assert results.best("lr", "max").name == 9


def test_the_table_has_the_index_of_the_data_frame(pool: ParallelPool, tmp_path: Path) -> None:
    index = pd.MultiIndex.from_tuples([("a", 1), ("b", 1), ("b", 1)], names=["net", "fold"])
    configs = pd.DataFrame({"lr": [0.3, 0.1, 0.2]}, index=index)

    results = pool.parfor(lambda config: {"loss": config["lr"]}, configs, run_dir=tmp_path / "run")

    for each in (results, pickle.loads(pickle.dumps(results))):
        assert each.to_frame().index.equals(index)
    assert results.best("loss").name == ("b", 1)
    assert "<th>net</th>" in results._repr_html_()
    results.report(tmp_path / "report.html")  # it numbers the items
    assert list(load_results(tmp_path / "run").to_frame().index) == [0, 1, 2]


@pytest.mark.arguments
def test_two_columns_of_a_data_frame_with_one_name_are_refused(pool: ParallelPool) -> None:
    twice = pd.DataFrame([[0.1, 2, 0.3]], columns=["lr", "width", "lr"])
    with pytest.raises(InvalidValueError, match="several columns named 'lr'"):
        pool.parfor(lambda config: config, twice)


@pytest.mark.quick
@pytest.mark.concurrent
def test_many_short_items_keep_their_order_though_they_share_calls(pool: ParallelPool) -> None:
    before = pool.statistics()
    pool.parfor(abs, range(100))

    results = pool.parfor(abs, range(0, -20_000, -1))

    after = pool.statistics()
    assert list(results) == list(range(20_000))
    assert after.finished - before.finished == 20_100
    assert after.attempts - before.attempts < 2_000, "short items did not share calls"


@pytest.mark.quick
@pytest.mark.concurrent
def test_each_worker_takes_the_next_item_when_it_is_free(
    pool: ParallelPool, make_gate: Callable[[], Any], marks: Any, eventually: Any
) -> None:
    """Nothing is dealt out in advance: while one worker is held up, the others run all the rest
    (scenario 10).
    """
    gate, last = make_gate(), 11

    def hold_or_open(item: int) -> int:
        if item == 0:
            gate.wait()
        elif item < last:
            marks.add("done")
        else:  # one that is held up elsewhere might yet be given to whoever is free then
            eventually(lambda: marks.count("done") == last - 1)
            gate.open()
        return item

    results = pool.parfor(hold_or_open, range(last + 1), chunk_size=1)

    frame = results.to_frame()
    assert list(results) == list(range(last + 1))
    assert (frame["worker"] == frame["worker"][0]).sum() == 1


@pytest.mark.everywhere
def test_a_chunk_size_is_kept(pool: ParallelPool) -> None:
    """Not counted by what is sent: calls that wait behind one that lasts are taken back, and sent
    again.
    """

    def call_of(x: int) -> tuple[int, int]:
        from raypool.worker.running import running

        return -x, running.get().call_id  # type: ignore[union-attr]

    for chunk_size in (1, 7, 1000):
        results = list(pool.parfor(call_of, range(50), chunk_size=chunk_size))
        assert [value for value, _ in results] == [-x for x in range(50)]
        calls = [call for _, call in results]
        assert [calls.count(call) for call in dict.fromkeys(calls)] == [
            len(range(50)[start : start + chunk_size]) for start in range(0, 50, chunk_size)
        ]


@pytest.mark.quick
@pytest.mark.concurrent
def test_at_most_max_workers_run_at_once(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any
) -> None:
    def begin(item: int) -> tuple[int, float, float]:
        began = time.monotonic()  # one clock for all processes, which nobody sets
        marks.add(item)
        gate.wait()
        return item, began, time.monotonic()

    with ThreadPoolExecutor(1) as driver:
        loop = driver.submit(pool.parfor, begin, range(6), max_workers=2)
        assert eventually(lambda: len(marks.all()) == 2)
        assert pool.parfeval(abs, -1).result(300) == 1, "there was a free worker"
        assert marks.all() == ["0", "1"]
        gate.open()
        results = loop.result(300)

    assert [item for item, _, _ in results] == list(range(6))
    for _, began, _ in results:
        assert sum(start <= began < end for _, start, end in results) <= 2


@pytest.mark.everywhere
def test_max_workers_0_runs_here(pool: ParallelPool) -> None:
    """Scenario 8: in this process and thread, with the same results."""
    before = pool.statistics()
    places = pool.parfor(lambda x: (x, os.getpid(), threading.get_ident()), range(5), max_workers=0)

    assert list(places) == [(x, os.getpid(), threading.get_ident()) for x in range(5)]
    assert pool.statistics() == before
    with pytest.raises(Unlucky) as caught:
        pool.parfor(fail_on_3, range(5), max_workers=0)
    assert list(caught.value.results)[:3] == [0, 10, 20]


@pytest.mark.everywhere
def test_an_endless_generator_is_drawn_only_a_little_ahead(
    pool: ParallelPool, eventually: Any
) -> None:
    """Scenario 15, stopped by a failing item."""
    drawn = 0

    def count_up() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    def stop_at_100(x: int) -> int:
        if x > 100:
            raise StopAsyncIteration(x)
        return x

    with pytest.raises(StopAsyncIteration) as caught:
        pool.parfor(stop_at_100, count_up())

    finished = [value for value in caught.value.results if value is not None]
    # what ran beside the failing item may be missing
    assert finished == sorted(set(finished) & set(range(1, 101)))
    assert len(finished) >= 100 - 16 * pool.num_workers
    assert drawn <= 100 + 64 * pool.num_workers
    assert eventually(lambda: not pool.busy), "what ran beside the failing item goes on"


@pytest.mark.threads
def test_a_generator_is_drawn_ahead_for_the_workers_of_the_loop_only(pool: ParallelPool) -> None:
    finished: list[int] = []
    ahead: list[int] = []

    def count_up() -> Iterator[int]:
        for number in range(100):
            ahead.append(number - len(finished))
            yield number

    def train(number: int) -> None:
        while number == 0 and len(ahead) < 16:
            time.sleep(0.01)
        finished.append(number)

    pool.parfor(train, count_up(), max_workers=1)
    assert max(ahead) == 15


@pytest.mark.concurrent
def test_a_slow_generator_is_not_waited_for(
    pool: ParallelPool, marks: Any, eventually: Any
) -> None:
    """Each item starts while the next is being made; one may even depend on what an earlier one has
    done.
    """

    def careful() -> Iterator[int]:
        for number in range(5):
            yield number
            assert eventually(lambda number=number: marks.count(number) == 1), (
                f"item {number} was held back"
            )

    assert list(pool.parfor(lambda x: marks.add(x) or x, careful())) == list(range(5))


@pytest.mark.concurrent
def test_an_interrupted_loop_gives_back_what_it_has(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any, check_pool: Any, press_ctrl_c: Any
) -> None:
    def begin(item: int) -> int:
        marks.add(item)
        if item:
            gate.wait()
        return item

    def interrupt() -> None:
        # the first is done, all workers are busy
        assert eventually(lambda: len(marks.all()) == pool.num_workers + 1)
        # and the pool has its result
        assert eventually(lambda: pool.statistics().finished == before + 1)
        pool._engine.driver.barrier()  # the loop has it a little later
        press_ctrl_c()

    before = pool.statistics().finished
    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.parfor(begin, range(30), chunk_size=1)
    gate.open()

    assert caught.value.results[0] == 0
    statuses = list(caught.value.results.to_frame()["status"])
    assert statuses[0] == "finished"
    assert statuses[4:] == ["cancelled"] * 26
    assert eventually(lambda: not pool.busy and pool.idle_workers == pool.num_workers)
    assert len(marks.all()) <= 1 + 2 * pool.num_workers, (
        "more was started than what had been sent ahead"
    )
    check_pool(pool)


@pytest.mark.threads
def test_after_an_interruption_nothing_begins_however_late_the_driver_is(
    make_pool: Any, tmp_path: Path, gate: Any, marks: Any, eventually: Any, press_ctrl_c: Any
) -> None:
    def begin(item: int) -> None:
        marks.add(item)
        gate.wait()

    is_late = threading.Event()

    def interrupt() -> None:
        assert eventually(lambda: len(marks.all()) == 2)
        pool._engine.driver.do(lambda: is_late.wait(300))
        press_ctrl_c()

    with make_pool(2, trace=tmp_path / "trace") as pool, ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.options(retries=0).parfor(begin, range(30), chunk_size=1)
        gate.open()
        messages = pool._engine.driver._inbox._queue  # the interruption, and both results
        assert eventually(lambda: messages.qsize() > 2)
        is_late.set()
    events = [event for _, event in read_trace(tmp_path / "trace")]
    assert len([event for event in events if isinstance(event, AttemptFinished)]) == 2


@pytest.mark.concurrent
@pytest.mark.parametrize(
    ("options", "is_durable"), [({}, False), ({"chunk_size": 1}, False), ({"chunk_size": 8}, True)]
)
def test_a_keyboard_interrupt_of_an_item_on_a_worker_is_its_error(
    pool: ParallelPool, tmp_path: Path, options: dict[str, Any], is_durable: bool
) -> None:
    """Ctrl-C comes to the user's main thread; what is raised in a worker's thread or process, the
    item has raised by itself.
    """

    def fail(item: int) -> int:
        if item == 2:
            raise KeyboardInterrupt("by itself")
        return -item

    if is_durable:
        options = {**options, "run_dir": tmp_path}
    results = pool.parfor(fail, range(8), on_error="collect", **options)
    assert list(results) == [0, -1, None, -3, -4, -5, -6, -7]
    assert {index: type(error) for index, error in results.errors.items()} == {2: KeyboardInterrupt}
    assert list(results.to_frame()["status"]) == ["finished"] * 2 + ["failed"] + ["finished"] * 5
    if is_durable:
        kept = raypool.load_results(tmp_path).to_frame()
        assert list(kept["status"]) == list(results.to_frame()["status"])
    with pytest.raises(KeyboardInterrupt, match="by itself") as caught:
        pool.parfor(fail, range(8), chunk_size=1)
    assert type(caught.value.results.errors[2]) is KeyboardInterrupt


@pytest.mark.everywhere
def test_an_error_in_the_generator_comes_out_with_what_had_finished(
    pool: ParallelPool, check_pool: Any
) -> None:
    def spoilt() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the list of items is torn")

    with pytest.raises(OSError, match="torn") as caught:
        pool.parfor(lambda x: x, spoilt())

    assert isinstance(caught.value.results, Results)
    check_pool(pool)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.everywhere
def test_the_first_failure_is_raised_as_itself(
    pool: ParallelPool, make_pool: Any, check_pool: Any
) -> None:
    """Scenario 12: type and fields, item, worker and host in the note, the remote traceback, and
    what had finished.
    """
    with pytest.raises(Unlucky, match="item 3 is unlucky") as caught:
        pool.options(name="sweep").parfor(fail_on_3, range(5), max_workers=1)

    error = caught.value
    assert error.item == 3
    (note,) = error.__notes__
    worker = pool.workers[0]
    for words in ("item 3", "sweep", "attempt 1", "worker ", worker.host):
        assert words in note
    if worker.gpu is not None:
        assert "GPU " in note
    if make_pool.is_in_processes:
        assert "fail_on_3" in str(error.__cause__)
        assert "raise Unlucky(x)" in str(error.__cause__)
    assert list(error.results) == [0, 10, 20, None, None]
    assert list(error.results.to_frame()["status"]) == ["finished"] * 3 + ["failed", "cancelled"]
    assert error.results.errors == {3: error}
    check_pool(pool)


@pytest.mark.everywhere
def test_failures_are_collected(pool: ParallelPool) -> None:
    """Scenario 12: four rows and one failure in the table."""
    results = pool.parfor(fail_on_3, range(5), on_error="collect")

    assert list(results) == [0, 10, 20, None, 40]
    assert [type(error) for error in results.errors.values()] == [Unlucky]
    frame = results.to_frame()
    assert list(frame["status"]) == ["finished"] * 3 + ["failed", "finished"]
    assert frame["error"][3] == "Unlucky: item 3 is unlucky"
    assert frame["error"].drop(3).isna().all()
    assert list(frame["attempts"]) == [1] * 5


def test_all_may_fail(pool: ParallelPool, check_pool: Any) -> None:
    def fail(x: int) -> None:
        raise KeyError(x)

    results = pool.parfor(fail, range(200), on_error="collect")

    assert [error.args for error in results.errors.values()] == [(x,) for x in range(200)]
    assert list(results) == [None] * 200
    check_pool(pool)


def test_an_error_does_not_fail_the_items_that_share_its_call(pool: ParallelPool) -> None:
    pool.parfor(fail_on_3, range(10, 200))  # now it is known to be short

    results = pool.parfor(
        fail_on_3, [3 if x % 10 == 0 else x + 10 for x in range(300)], on_error="collect"
    )

    assert sorted(results.errors) == list(range(0, 300, 10))
    assert all(results[x] == 10 * (x + 10) for x in range(300) if x % 10)


@pytest.mark.everywhere
def test_an_exception_of_the_users_is_retried_only_if_retry_on_names_it(
    pool: ParallelPool, marks: Any
) -> None:
    def fail_twice(x: int) -> int:
        marks.add(x)
        if x == 2 and current_task().attempt < 3:
            raise ConnectionError("try again")
        return current_task().attempt

    results = pool.options(retry_on=ConnectionError).parfor(fail_twice, range(4), chunk_size=2)
    assert list(results) == [1, 1, 3, 1]
    assert marks.all() == ["0", "1", "2", "2", "2", "3"]
    assert list(results.to_frame()["attempts"]) == [1, 1, 3, 1]

    with pytest.raises(ConnectionError):
        pool.options(retry_on=[KeyError, TimeoutError]).parfor(fail_twice, [2])
    assert marks.count(2) == 4


def test_retries_are_used_up(pool: ParallelPool, marks: Any) -> None:
    def fail(x: int) -> None:
        marks.add(x)
        raise ConnectionError(x)

    with pytest.raises(ConnectionError):
        pool.options(retry_on=[OSError], retries=3).parfor(fail, [0])
    assert marks.count(0) == 4


@pytest.mark.everywhere
def test_a_task_that_calls_sys_exit_fails_alone_and_its_worker_stays(
    pool: ParallelPool, marks: Any, check_pool: Any
) -> None:
    """The error has the code, and what argparse has printed."""

    def leave(x: int) -> int:
        marks.add(x)
        if x == 2:
            sys.exit(7)
        if x == 3:
            argparse.ArgumentParser("train").parse_args(["--epochs"])
        if x == 4:
            sys.exit()
        return x

    before = pool.statistics().workers_lost
    results = pool.options(retries=1).parfor(leave, range(6), on_error="collect")

    assert [results[x] for x in (0, 1, 5)] == [0, 1, 5]
    assert [type(error) for error in results.errors.values()] == [TaskError] * 3
    assert str(results.errors[2]) == "The task called sys.exit(7)."
    assert str(results.errors[3]) == "The task called sys.exit(2)."
    assert "train: error: unrecognized arguments: --epochs" in "".join(
        traceback.format_exception(results.errors[3])
    )
    assert str(results.errors[4]) == "The task called sys.exit()."
    assert [marks.count(x) for x in range(6)] == [1] * 6
    assert pool.statistics().workers_lost == before
    check_pool(pool)


# --- reduction and seeds --------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_reduction_is_the_same_to_the_last_bit_on_any_number_of_workers(
    pool: ParallelPool,
) -> None:
    """Scenario 14."""
    expected = functools.reduce(operator.add, [root_sum(x) for x in range(500)])
    assert expected != math.fsum(root_sum(x) for x in range(500)), (
        "the order does not matter: the test shows nothing"
    )

    sums = [
        pool.parfor(root_sum, range(500), reduce=operator.add, max_workers=n)
        for n in (0, 1, 2, 3, None)
    ]

    assert sums == [expected] * 5


def test_a_reduction_goes_in_the_order_of_the_items(pool: ParallelPool) -> None:
    words = list("the order of the items")

    assert pool.parfor(str, words, reduce=operator.add) == "the order of the items"
    assert pool.parfor(str, words, reduce=operator.add, init="In ") == "In the order of the items"
    assert pool.parfor(str, [], reduce=operator.add, init="nothing") == "nothing"
    assert pool.parfor(str, [], reduce=operator.add) is None
    assert pool.parfor(lambda x: [x], range(3), reduce=operator.add, init=[]) == [0, 1, 2]


def draw(_: Any) -> tuple[Any, ...]:
    import torch

    task = current_task()
    return (
        random.random(),
        tuple(np.random.random(2)),
        tuple(torch.rand(2).tolist()),
        task.seed,
        np.random.default_rng(task.seed).random(),
    )


@pytest.mark.everywhere
def test_the_same_seed_gives_the_same_numbers_on_any_number_of_workers(pool: ParallelPool) -> None:
    """Scenario 13."""
    runs = [list(pool.parfor(draw, range(12), seed=42, max_workers=n)) for n in (1, 2, 3)]
    chunked = list(pool.parfor(draw, range(12), seed=42, chunk_size=5))
    here = list(pool.parfor(draw, range(12), seed=42, max_workers=0))

    assert runs[0] == runs[1] == runs[2] == chunked == here
    for kind in range(5):
        assert len({run[kind] for run in runs[0]}) == 12, "two items have drawn the same numbers"
    assert not set(runs[0]) & set(pool.parfor(draw, range(12), seed=43))
    assert list(pool.parfor(draw, range(3), seed=42)) == runs[0][:3]


def test_an_item_that_cannot_be_seeded_fails_alone(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is not the first of its call, it runs in another first."""
    calls: list[Any] = []

    def seed(values: Any) -> None:
        calls.append(values)
        if len(calls) in (2, 4, 5):
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(np.random, "seed", seed)
    results = pool.parfor(str, range(4), seed=1, chunk_size=4, on_error="collect")
    assert list(results) == ["0", "1", None, "3"]
    assert "device-side assert" in str(results.errors[2])


def test_items_are_those_of_the_call_whatever_becomes_of_the_list(pool: ParallelPool) -> None:
    items = [3, 1, 2]
    results = pool.parfor(abs, items)
    items.sort()
    items.append(4)
    assert results.to_frame()[["item", "value"]].values.tolist() == [[3, 3], [1, 1], [2, 2]]


@pytest.mark.threads
@pytest.mark.quick
def test_a_generator_may_yield_the_same_object_again_changed(pool: ParallelPool) -> None:
    config, batch = {"lr": 0}, np.zeros(2)

    def configs() -> Iterator[dict[str, int]]:
        for config["lr"] in range(8):
            yield config

    def batches() -> Iterator[Any]:
        for batch[:] in range(8):
            yield batch

    assert list(pool.parfor(lambda config: config["lr"], configs())) == list(range(8))
    assert list(pool.parfor(lambda batch: batch.sum(), batches())) == list(range(0, 16, 2))


@pytest.mark.processes
def test_a_row_of_a_tensor_travels_alone(pool: ParallelPool) -> None:
    import torch

    stored = pool.parfor(lambda row: row.untyped_storage().nbytes(), torch.ones(100, 2))
    assert set(stored) == {8}


@pytest.mark.threads
def test_an_item_that_was_given_up_does_not_draw_for_the_next(make_pool: Any) -> None:
    """As it ends at last, it must not put the generators back that another item uses."""
    stuck: list[threading.Thread] = []
    is_stuck, goes_on = threading.Event(), threading.Event()

    def get_stuck(_: int) -> None:
        stuck.append(threading.current_thread())
        is_stuck.set()
        goes_on.wait(300)

    def train(last: threading.Thread | None) -> list[float]:
        numbers = [random.random()]
        goes_on.set()
        if last is not None:
            last.join(300)
        return [*numbers, random.random()]

    with make_pool(1) as pool:
        [expected] = pool.parfor(train, [None], seed=1)
        goes_on.clear()
        other = make_pool(1, cancel_grace_s=0.1)

        def loop() -> None:
            with contextlib.suppress(CancelledError):
                other.parfor(get_stuck, [0], seed=2)

        looping = threading.Thread(target=loop)
        looping.start()
        assert is_stuck.wait(300)
        other.cancel_all()
        looping.join(300)
        assert list(pool.parfor(train, stuck, seed=1)) == [expected]
        other.delete()


RNG = np.random.default_rng(0)


def noise() -> float:
    return float(RNG.normal())


class Sampler:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def draw(self, old: np.random.RandomState, _: Any, torchs: Any) -> tuple[Any, ...]:
        import torch

        child = RNG.spawn(1)[0].random()
        return (
            noise(),
            old.normal(),
            self.rng.random(),
            torch.rand(1, generator=torchs).item(),
            child,
        )


@pytest.mark.everywhere
def test_a_seed_reaches_the_generators_that_a_function_brings(pool: ParallelPool) -> None:
    """Global, in an object, in a partial and in a default argument; in this process they are put
    back.
    """
    import torch

    sampler, old, torchs = Sampler(), np.random.RandomState(0), torch.Generator()

    def train(item: int, torchs: torch.Generator = torchs) -> tuple[Any, ...]:
        return functools.partial(sampler.draw, old)(item, torchs)

    before = (
        RNG.bit_generator.state,
        sampler.rng.getstate(),
        old.get_state(legacy=False),
        torchs.get_state().tolist(),
    )

    runs = [list(pool.parfor(train, range(6), seed=42, max_workers=n)) for n in (None, None, 1, 0)]

    assert runs[0] == runs[1] == runs[2] == runs[3]
    for kind in range(5):
        assert len({run[kind] for run in runs[0]}) == 6, "two items have drawn the same numbers"
    after = (
        RNG.bit_generator.state,
        sampler.rng.getstate(),
        old.get_state(legacy=False),
        torchs.get_state().tolist(),
    )
    assert str(after) == str(before)


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["parfor", "map", "parfeval", "spmd"])
def test_a_generator_that_is_copied_to_each_worker_is_warned_of_once(
    pool: ParallelPool, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(_: int) -> float:
        return noise() + random.random()  # the global ones differ from worker to worker

    train.__name__ = f"train_by_{verb}"
    list(pool.parfor(train, range(2), seed=0))
    assert not caplog.records

    calls: dict[str, Callable[[], object]] = {
        "parfor": lambda: pool.parfor(train, range(2)),
        "map": lambda: list(pool.map(train, range(2))),
        "parfeval": lambda: pool.parfeval(train, 0).result(),
        "spmd": lambda: pool.spmd(train),
    }
    for _ in range(2):
        calls[verb]()

    assert [record.message.partition(",")[0] for record in caplog.records] == [
        f"train_by_{verb} draws from the generator RNG"
    ]


@pytest.mark.processes
def test_a_captured_model_that_a_task_trains_is_warned_of_once(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains a copy, and the script's own model stays untrained; one that it only calls is
    nothing to warn of.
    """
    torch = pytest.importorskip("torch")
    net, judge = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)

    def train(_: int) -> float:
        import torch

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = judge(net(torch.ones(2))).sum()
        (gradient,) = torch.autograd.grad(loss, [net.bias])
        net.bias.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(2):
        pool.parfor(train, range(6))

    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "train has changed net"
    ]


def test_without_a_seed_there_is_none(pool: ParallelPool) -> None:
    assert list(pool.parfor(lambda _: current_task().seed, range(3))) == [None] * 3
    numbers = list(pool.parfor(lambda _: random.random(), range(30)))
    assert len(set(numbers)) == 30


def test_a_seed_leaves_the_generators_of_this_process_alone(pool: ParallelPool) -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)

    pool.parfor(draw, range(3), seed=9)
    pool.parfor(draw, range(3), seed=9, max_workers=0)

    assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_seed_leaves_the_generators_of_cuda_alone(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch, is_in_use: bool
) -> None:
    """As long as no GPU was used, torch keeps the last seed for the time when one will be."""
    torch = pytest.importorskip("torch")
    state: list[Any] = ["the user's"]
    fakes = {
        "is_initialized": lambda: is_in_use,
        "manual_seed_all": state.append,
        "get_rng_state_all": lambda: list(state),
        "set_rng_state_all": lambda before: state.__setitem__(slice(None), before),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    pool.parfor(draw, range(3), seed=9)
    assert state[-1] == ("the user's" if is_in_use else torch.initial_seed())


@pytest.mark.threads
def test_seeded_loops_of_one_process_do_not_disturb_each_other(make_pool: Any) -> None:
    begun, drawn = threading.Event(), threading.Event()

    def draw_around(meet: Callable[[], Any], item: int) -> tuple[float, float]:
        first = random.random()
        if item == 0:
            meet()
        return first, random.random()

    def let_others_draw() -> None:
        begun.set()
        drawn.wait(0.5)  # in vain: they wait for their turn

    with make_pool(1) as pool, make_pool(1) as other, ThreadPoolExecutor(3) as threads:
        alone = pool.parfor(functools.partial(draw_around, int), 3, seed=0)
        loops = [
            threads.submit(pool.parfor, functools.partial(draw_around, let_others_draw), 3, seed=0)
        ]
        assert begun.wait(300)
        loops += [
            threads.submit(
                other.parfor, functools.partial(draw_around, drawn.set), 3, seed=0, **where
            )
            for where in ({}, {"max_workers": 0})
        ]
        assert [list(loop.result(300)) for loop in loops] == [list(alone)] * 3


@pytest.mark.threads
def test_seeded_items_that_wait_for_their_turn_occupy_no_worker(make_pool: Any) -> None:
    """Nor is their `timeout_s` running."""
    begun, gate = threading.Event(), threading.Event()

    def work(_: int) -> bool:
        begun.set()
        return gate.wait(300)

    with make_pool(2) as pool, ThreadPoolExecutor(1) as threads:
        loop = threads.submit(pool.parfor, work, 4, seed=0)
        try:
            assert begun.wait(300)
            assert pool.parfeval(abs, -1).result(60) == 1
        finally:
            gate.set()
        assert list(loop.result(300)) == [True] * 4


@pytest.mark.threads
def test_a_seeded_item_that_never_ends_keeps_no_other_loop_waiting(make_pool: Any) -> None:
    lock, begun = threading.Lock(), threading.Event()
    lock.acquire()

    def stuck(_: int) -> bool:
        begun.set()
        return lock.acquire()  # in native code, where nothing interrupts it

    with (
        make_pool(1, cancel_grace_s=0.1) as pool,
        make_pool(1) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        loop = threads.submit(pool.parfor, stuck, 1, seed=0)
        assert begun.wait(300)
        pool.cancel_all()
        assert isinstance(loop.exception(300), CancelledError)
        assert list(other.parfor(str, 1, seed=0)) == ["0"]
        assert list(other.parfor(str, 1, seed=0, max_workers=0)) == ["0"]
        lock.release()


@pytest.mark.threads
def test_ctrl_c_ends_a_loop_that_waits_for_its_turn(make_pool: Any, press_ctrl_c: Any) -> None:
    begun, gate, raised = threading.Event(), threading.Event(), threading.Event()
    main = threading.main_thread().ident or 0

    def work(_: int) -> bool:
        begun.set()
        return gate.wait(300)

    def press() -> None:
        begun.wait(300)
        stack = traceback.walk_stack
        poll(
            lambda: "run_loop" in {f.f_code.co_name for f, _ in stack(sys._current_frames()[main])}
        )
        press_ctrl_c()
        raised.wait(100)
        gate.set()

    with make_pool(1) as pool, parpool(profile="inline", quiet=True) as here:
        with ThreadPoolExecutor(2) as threads:
            loop = threads.submit(pool.parfor, work, 1, seed=0)
            begun.wait(300)
            threads.submit(press)
            with pytest.raises(KeyboardInterrupt):
                here.parfor(str, 2, seed=0)
            assert not gate.is_set()
            raised.set()
            assert list(loop.result(300)) == [True]
        assert list(here.parfor(str, 2, seed=0)) == ["0", "1"]


class Fragile(random.Random):
    """A generator that fails for good, as one on a GPU with a lasting error does."""

    has_failed = False

    def setstate(self, state: Any) -> None:
        if self.has_failed:
            raise RuntimeError("CUDA error")
        super().setstate(state)


FRAGILE = Fragile()


def test_an_item_has_its_own_error_where_a_generator_fails_for_good(pool: ParallelPool) -> None:
    def fn(item: int) -> None:
        FRAGILE.has_failed = True
        raise ValueError("its own")

    results = pool.parfor(fn, 1, seed=0, on_error="collect")
    assert repr(results.errors[0]) == "ValueError('its own')"


@pytest.mark.arguments
def test_a_seed_that_is_none_is_refused_at_the_call(pool: ParallelPool, check_pool: Any) -> None:
    for seed in (-1, "lucky", 1.5):
        with pytest.raises((InvalidValueError, raypool.InvalidTypeError), match="seed"):
            pool.parfor(abs, range(3), seed=seed)  # type: ignore[arg-type]
    check_pool(pool)


# --- what a task sees -----------------------------------------------------------------------------


@pytest.mark.everywhere
def test_a_task_knows_what_it_is(pool: ParallelPool) -> None:
    seen = pool.parfor(
        lambda _: (current_task().index, current_task().attempt, current_task().name),
        range(5),
        name="look",
    )
    workers = pool.parfor(lambda _: (current_task().worker, current_task().gpu), range(5))

    assert list(seen) == [(x, 1, "look") for x in range(5)]
    by_index = {worker.index: worker.gpu for worker in pool.workers}
    assert all(by_index[worker] == gpu for worker, gpu in workers)
    frame = workers.to_frame()
    assert [worker for worker, _ in workers] == list(frame["worker"])


def test_outside_a_task_there_is_a_task_too(pool: ParallelPool) -> None:
    pool.parfor(abs, range(3))
    assert (current_task().index, current_task().attempt, current_task().seed) == (0, 1, None)


@pytest.mark.everywhere
def test_work_called_for_inside_a_task_runs_serially_there(pool: ParallelPool) -> None:
    """Scenario 7: parfor, parfeval, map, parpool and gcp in tasks; more of them than there are
    workers, without deadlock.
    """

    def nest(x: int) -> Any:
        me = os.getpid(), threading.get_ident()
        inner = raypool.gcp()
        loop = inner.parfor(lambda y: (y, os.getpid(), threading.get_ident()), range(x))
        future = inner.parfeval(lambda y: (y, os.getpid(), threading.get_ident()), x)
        with raypool.parpool(4, quiet=True) as own:
            mapped = list(own.map(lambda y: y + x, range(3)))
            on_all = own.parfeval_on_all(lambda: 1).result()
        assert list(loop) == [(y, *me) for y in range(x)]
        assert future.result() == (x, *me)
        assert len(on_all) >= 1
        return sum(mapped), current_task().index

    results = pool.parfor(nest, range(9))

    assert list(results) == [(3 + 3 * x, x) for x in range(9)]


@pytest.mark.semantics
@pytest.mark.processes
def test_the_pool_itself_may_be_in_a_closure(pool: ParallelPool) -> None:
    results = pool.parfor(lambda x: sum(pool.parfor(lambda y: x * y, range(4))), range(5))

    assert list(results) == [6 * x for x in range(5)]


@pytest.mark.concurrent
def test_two_threads_may_use_a_pool_at_once(pool: ParallelPool) -> None:
    answers: dict[int, list[int]] = {}

    def use(number: int) -> None:
        answers[number] = list(pool.parfor(lambda x: x + number, range(200)))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)

    assert answers == {number: [x + number for x in range(200)] for number in range(4)}


@pytest.mark.concurrent
def test_something_urgent_goes_between_the_items_of_a_loop(
    pool: ParallelPool, gate: Any, marks: Any, eventually: Any
) -> None:
    def begin(item: int) -> None:
        gate.wait()
        marks.add(f"{len(marks.all())} item")

    part, _ = pool.partition(workers=[0])
    with ThreadPoolExecutor(1) as driver:
        loop = driver.submit(part.parfor, begin, range(3), chunk_size=1)
        assert eventually(lambda: pool.statistics().running == 1)
        urgent = part.options(priority=1).parfeval(lambda: marks.add(f"{len(marks.all())} urgent"))
        last = part.parfeval(lambda: marks.add(f"{len(marks.all())} last"))
        gate.open()
        loop.result(300)
        urgent.result(300)
        last.result(300)
    assert marks.all() == ["0 item", "1 urgent", "2 item", "3 item", "4 last"]


def test_progress_changes_nothing(pool: ParallelPool) -> None:
    assert list(pool.parfor(abs, range(5), progress=True)) == list(range(5))
    assert list(pool.parfor(abs, range(5), progress=False)) == list(range(5))
