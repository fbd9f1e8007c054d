"""Ctrl-C in work that runs in the user's own thread: it means all of the work, as it does where
workers run it. In a task, a cancellation of the task does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import random
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raypool
from raypool import ParallelPool, PoolBrokenError, parpool
from raypool.channel.records import NOBODY, Failure, LocalValues, SliceResult
from raypool.engine.loop import LoopWork
from raypool.interop.multiprocessing import Pool

INTERRUPTED = 2

HOWS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 4},
    {"on_error": "collect"},
    {"on_error": "collect", "chunk_size": 1},
]


class Work:
    """Does its items, and is interrupted once, as Ctrl-C does it in the main thread."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.is_interrupted = False

    def __call__(self, item: int) -> int:
        self.begun.append(item)
        if item == INTERRUPTED and not self.is_interrupted:
            self.is_interrupted = True
            signal.raise_signal(signal.SIGINT)
        return -item

    def check(self, error: BaseException) -> None:
        """Make sure that nothing began after it, and that all that was begun before it is there."""
        *finished, last = self.begun
        assert last == INTERRUPTED
        results = error.results  # type: ignore[attr-defined]
        assert [results[item] for item in finished] == [-item for item in finished]
        assert list(results.to_frame()["status"]).count("finished") == len(finished)
        assert any(
            f": {len(finished)} " in note and "had finished" in note for note in error.__notes__
        )


@pytest.fixture(scope="module")
def pool() -> Iterator[ParallelPool]:
    """Give a pool of the one kind that these tests are about."""
    with parpool(2, profile="inline", quiet=True) as pool:
        yield pool


@pytest.mark.parametrize("how", HOWS)
def test_nothing_begins_after_it(pool: ParallelPool, how: dict[str, Any]) -> None:
    for make in (list, iter):
        work = Work()
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.parfor(work, make(range(6)), **how)
        work.check(caught.value)
        assert pool.submit(abs, -1).result(300) == 1


def test_what_had_failed_before_it_is_there_too(pool: ParallelPool) -> None:
    def begin(item: int) -> int:
        if item == 1:
            raise ValueError("before it")
        if item == INTERRUPTED:
            raise KeyboardInterrupt
        return item

    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(begin, range(4), on_error="collect", chunk_size=1)
    assert caught.value.results[0] == 0
    assert type(caught.value.results.errors[1]) is ValueError


def test_an_item_that_fails_while_the_results_are_made_is_not_finished(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may where the driver has a thread: here, the driver's part is done within a copy."""
    late, works, begin = ValueError("late"), [], LoopWork.__init__

    class Segments(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            if len(self) == 1:
                failures = {1: Failure(late, None)}
                result = SliceResult(1, 1, LocalValues([None]), 0, failures, array("d", [0.1]), 1.0)
                works[0].settle(self[0].items._replace(start=1, stop=2), result, NOBODY)
            return super().__iter__()

    def watch(work: Any, *args: Any) -> None:
        begin(work, *args)
        work.segments = Segments()
        works.append(work)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopWork, "__init__", watch)
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(interrupt, range(2), chunk_size=1)
    results = caught.value.results
    assert results.errors[1] is late
    assert list(results.to_frame()["status"]) == ["failed", "failed"]


@pytest.mark.parametrize("how", HOWS[::3])
def test_nor_in_a_loop_without_workers(how: dict[str, Any]) -> None:
    with parpool(2, profile="threads", quiet=True) as threads:
        work = Work()
        with pytest.raises(KeyboardInterrupt) as caught:
            threads.parfor(work, range(6), max_workers=0, **how)
        work.check(caught.value)
        assert threads.submit(abs, -1).result(300) == 1


@pytest.mark.parametrize("how", HOWS)
def test_what_had_finished_is_kept_and_the_same_call_goes_on(
    pool: ParallelPool, tmp_path: Path, how: dict[str, Any]
) -> None:
    work = Work()

    def do(item: int) -> int:
        return work(item)

    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(do, range(6), run_dir=tmp_path / "run", **how)
    work.check(caught.value)
    assert any("run the same call again" in note for note in caught.value.__notes__)
    kept = raypool.load_results(tmp_path / "run").to_frame()
    finished = work.begun[:-1]
    assert sorted(kept.loc[kept["status"] == "finished", "item"]) == sorted(finished)
    assert "failed" not in set(kept["status"])

    work.begun.clear()
    assert list(pool.parfor(do, range(6), run_dir=tmp_path / "run", **how)) == [
        -item for item in range(6)
    ]
    assert sorted(work.begun) == sorted(set(range(6)) - set(finished))


def test_it_ends_the_call_of_map(pool: ParallelPool) -> None:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        pool.map(work, range(6))
    assert work.begun == [0, 1, 2]
    assert list(pool.map(work, range(6))) == [-item for item in range(6)]


def test_it_ends_a_map_that_is_drawn_from(pool: ParallelPool) -> None:
    work = Work()
    results = pool.map(work, range(6), buffersize=1)
    assert next(results) == 0
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert list(results) == []
    assert work.begun == [0, 1, 2]


def test_it_is_what_becomes_of_a_single_call(pool: ParallelPool) -> None:
    work = Work()
    future = pool.parfeval(work, INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        future.result(300)
    assert pool.parfeval(work, INTERRUPTED).result(300) == -INTERRUPTED


def test_a_hundred_times_is_no_harm(pool: ParallelPool) -> None:
    for _ in range(100):
        with pytest.raises(KeyboardInterrupt):
            pool.parfor(Work(), range(4))
    assert pool.parfor(abs, range(4)) == list(range(4))


# from a finalizer of the standard library's, Python only reports it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_it_comes_the_pool_still_works(pool: ParallelPool) -> None:
    """It comes once at each line at which Python looks for signals: after a call, or within one."""
    seen: set[tuple[Any, ...]] = set()
    is_pressed = True

    def press(frame: Any, event: str, arg: Any) -> None:
        nonlocal is_pressed
        line = frame.f_code, frame.f_lineno, event
        if not is_pressed and event in ("call", "c_return") and line not in seen:
            seen.add(line)
            is_pressed = True
            signal.raise_signal(signal.SIGINT)

    def interrupt() -> None:
        sys.setprofile(press)
        try:
            pool.parfor(abs, [-1, -2], chunk_size=1)
        finally:
            sys.setprofile(None)

    while is_pressed:
        is_pressed = False
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
        assert pool.submit(abs, -1).result(300) == 1
    assert len(seen) > 100
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_while_an_item_is_seeded_it_ends_that_item(
    pool: ParallelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    numbers, seed = itertools.count(), random.seed

    def press(value: Any) -> None:
        if next(numbers) == 1:
            signal.raise_signal(signal.SIGINT)
        seed(value)

    monkeypatch.setattr(random, "seed", press)
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.parfor(begun.append, range(6), seed=0, chunk_size=6)
    assert begun == [0]
    assert list(caught.value.results.to_frame()["status"]).count("finished") == 1


def test_in_a_setup_it_ends_the_pool() -> None:
    presses = iter([abs, signal.raise_signal])
    pool = parpool(1, profile="inline", quiet=True, setup=lambda: next(presses)(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pool.resize(2)
    with pytest.raises(PoolBrokenError, match="Ctrl-C has ended the pool"):
        pool.submit(abs, -1)


def test_only_the_second_one_arrives_in_a_callback(pool: ParallelPool) -> None:
    presses = []

    def press(*_: object) -> None:
        for number in range(3):
            presses.append(number)
            signal.raise_signal(signal.SIGINT)

    future = pool.parfeval(raypool.report, loss=0.5)
    with pytest.raises(KeyboardInterrupt):
        future.add_report_callback(press)
    assert presses == [0, 1]
    assert pool.submit(abs, -1).result(300) == 1


def test_it_cancels_a_coroutine_as_asyncio_does(pool: ParallelPool) -> None:
    ends: list[type[BaseException]] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(300)
        except BaseException as error:
            ends.append(type(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        pool.parfeval(work).result(300)
    assert ends == [asyncio.CancelledError]


MAPS = {
    "map": lambda mp, fn, size: mp.map(fn, range(6), size),
    "starmap": lambda mp, fn, size: mp.starmap(fn, [(item,) for item in range(6)], size),
    "map_async": lambda mp, fn, size: mp.map_async(fn, range(6), size).get(300),
    "imap": lambda mp, fn, size: list(mp.imap(fn, range(6), size)),
    "imap_unordered": lambda mp, fn, size: list(mp.imap_unordered(fn, range(6), size)),
}


@pytest.mark.parametrize(
    ("verb", "chunksize"), [(verb, 1 + number % 2) for number, verb in enumerate(MAPS)]
)
def test_it_ends_those_of_multiprocessing(pool: ParallelPool, verb: str, chunksize: int) -> None:
    begun: list[int] = []

    # some of these run in a thread that draws, to which no signal comes
    def work(item: int) -> int:
        begun.append(item)
        if item == INTERRUPTED:
            raise KeyboardInterrupt
        return -item

    with Pool(pool=pool) as mp:
        with pytest.raises(KeyboardInterrupt):
            MAPS[verb](mp, work, chunksize)
        assert begun == [0, 1, 2]
        assert mp.map(abs, [-1]) == [1]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_it_comes_after_the_results_that_were_there(pool: ParallelPool, verb: str) -> None:
    def work(item: int) -> int:
        if item == INTERRUPTED:
            raise KeyboardInterrupt
        return -item

    with Pool(pool=pool) as mp:
        results = getattr(mp, verb)(work, range(6))
        assert [next(results), next(results)] == [0, -1]
        with pytest.raises(KeyboardInterrupt):
            next(results)
        assert list(results) == []


def _one_by_one(pool: ParallelPool, fn: Callable[[int], Any]) -> None:
    for item in range(6):
        with contextlib.suppress(Exception):
            pool.spmd(lambda _, item=item: fn(item))


def _as_coroutine(fn: Callable[[int], Any]) -> Callable[[int], Any]:
    async def work(item: int) -> Any:
        async def step() -> Any:
            return fn(item)

        async with asyncio.TaskGroup() as group:
            done = group.create_task(step())
        return done.result()

    return work


INSIDE: dict[str, Callable[[ParallelPool, Callable[[int], Any], Path], object]] = {
    "parfor": lambda pool, fn, folder: pool.parfor(fn, range(6), run_dir=folder),
    "parfor that collects errors": lambda pool, fn, folder: pool.parfor(
        fn, iter(range(6)), on_error="collect", run_dir=folder
    ),
    "parfor of coroutines": lambda pool, fn, folder: pool.parfor(
        _as_coroutine(fn), range(6), on_error="collect", run_dir=folder
    ),
    "parfeval": lambda pool, fn, _: [pool.parfeval(fn, item) for item in range(6)],
    "spmd": lambda pool, fn, _: _one_by_one(pool, fn),
}


@pytest.mark.parametrize("verb", INSIDE)
def test_a_cancellation_of_the_task_around_it_ends_it_too(verb: str, tmp_path: Path) -> None:
    begun: list[Any] = []
    jobs: queue.SimpleQueue[raypool.Future[Any]] = queue.SimpleQueue()

    def work(item: int) -> int:
        begun.append(item)
        if item == INTERRUPTED:
            jobs.get().cancel()
            for _ in itertools.count():  # until it is interrupted
                pass
        return -item

    def task() -> None:
        with parpool(quiet=True) as serial:
            INSIDE[verb](serial, work, tmp_path / "run")
        begun.append("it went on")

    with parpool(1, profile="threads", quiet=True, cancel_grace_s=300) as threads:
        jobs.put(threads.parfeval(task))
        assert threads.parfeval(abs, -1).result(300) == 1
    assert begun == [0, 1, 2]
    if "parfor" in verb:
        kept = raypool.load_results(tmp_path / "run").to_frame()
        assert list(kept["status"]).count("finished") == INTERRUPTED
        assert "failed" not in set(kept["status"])


def test_a_checkpoint_is_saved_whole_although_the_task_around_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saving, may_go_on, sync = threading.Event(), threading.Event(), os.fsync
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait_and_sync(descriptor: int) -> None:
        is_saving.set()
        assert may_go_on.wait(300)
        sync(descriptor)

    def task() -> None:
        try:
            with parpool(quiet=True) as serial:
                serial.parfeval(raypool.save_checkpoint, {"epoch": 3}, tmp_path / "model.pt")
            ends.put("it went on")
        finally:
            ends.put("it has ended")

    monkeypatch.setattr(os, "fsync", wait_and_sync)
    with parpool(2, profile="threads", quiet=True, cancel_grace_s=300) as threads:
        job = threads.parfeval(task)
        assert is_saving.wait(300)
        job.cancel()
        assert threads.parfeval(abs, -1).result(300) == 1  # the driver has passed both on
        may_go_on.set()
        assert ends.get(timeout=300) == "it has ended"
    assert raypool.load_checkpoint(tmp_path / "model.pt") == {"epoch": 3}
