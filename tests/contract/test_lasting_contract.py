"""An item that lasts keeps nothing from anybody: neither what was done before it in its call, nor
what waits behind it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypool import Future, ParallelPool, current_task
from raypool.interop.multiprocessing import Pool

pytestmark = pytest.mark.concurrent

LASTS = 50
"""The item that waits at a gate, among a hundred that are short and so share calls."""


@pytest.fixture
def begin(
    pool: ParallelPool, gate: Any, make_gate: Any, marks: Any
) -> Callable[..., list[Future[Any]]]:
    """Give a function that hands in a hundred calls, all before one begins, once the pool has found
    out how short they are.
    """

    def begin(value_of: Callable[[int], Any] = int) -> list[Future[Any]]:
        def run(item: int) -> Any:
            if item >= 0:
                marks.add(item)
            if item == LASTS:
                gate.wait()
            return value_of(item)

        list(pool.parfor(run, [-1] * 200))
        start = make_gate()
        others = [pool.parfeval(start.wait) for _ in range(pool.num_workers)]
        jobs = [pool.parfeval(run, item) for item in range(100)]
        start.open()
        assert [job.result(300) for job in others] == [None] * pool.num_workers
        return jobs

    return begin


@pytest.mark.quick
@pytest.mark.concurrent
def test_all_others_have_their_results_meanwhile(
    pool: ParallelPool, begin: Any, gate: Any, marks: Any
) -> None:
    jobs = begin()
    lasting = jobs.pop(LASTS)
    assert [job.result(300) for job in jobs] == [item for item in range(100) if item != LASTS]
    assert lasting.running()
    gate.open()
    assert lasting.result(300) == LASTS
    assert {job.attempts for job in (*jobs, lasting)} == {1}
    assert sorted(map(int, marks.all())) == list(range(100)), "each has run once"


def test_an_item_may_wait_for_whoever_takes_the_results(mp: Pool, gate: Any) -> None:
    def run(item: int) -> int:
        if item == LASTS:
            gate.wait()
        return item

    mp.map(run, [-1] * 200)
    taken = []
    for item in mp.imap(run, range(100)):
        taken.append(item)
        if item == LASTS - 1:
            gate.open()
    assert taken == list(range(100))


def test_what_has_failed_before_it_is_known(begin: Any, gate: Any) -> None:
    def value_of(item: int) -> int:
        if item in (LASTS - 1, LASTS, LASTS + 1):
            raise ValueError(f"no {item}")
        return item

    jobs = begin(value_of)
    lasting = jobs.pop(LASTS)
    errors = [str(error) for job in jobs if (error := job.exception(300)) is not None]
    assert errors == [f"no {LASTS - 1}", f"no {LASTS + 1}"]
    gate.open()
    with pytest.raises(ValueError, match=f"no {LASTS}"):
        lasting.result(300)


@pytest.mark.parametrize("is_durable", [False, True])
def test_in_a_loop_too(
    pool: ParallelPool, gate: Any, marks: Any, tmp_path: Path, is_durable: bool
) -> None:
    def run(item: int) -> int:
        if item >= 0:
            marks.add(item)
        if item == LASTS:
            gate.wait()
        return item

    class Bar:
        """Opens the gate when all is done but what waits there."""

        num_done = 0

        def __init__(self, **wishes: Any) -> None:
            pass

        def update(self, count: int) -> None:
            self.num_done += count
            if self.num_done == 99:
                gate.open()

        def close(self) -> None:
            pass

    list(pool.parfor(run, [-1] * 200))
    results = pool.parfor(
        run, range(100), progress=Bar, run_dir=tmp_path / "run" if is_durable else None
    )
    assert list(results) == list(range(100))
    assert sorted(map(int, marks.all())) == list(range(100))
    table = results.to_frame()
    assert set(table["attempts"]) == {1}
    assert table["duration_s"][LASTS] > table["duration_s"].median()


def test_what_the_user_wants_in_one_call_stays_in_it(pool: ParallelPool, gate: Any) -> None:
    chunk_size = 25

    def run(item: int) -> tuple[int, int]:
        if item == 3:
            gate.wait()
        return item, current_task().worker

    class Bar:
        """Opens the gate when something is done of the call of which an item lasts."""

        def __init__(self, **wishes: Any) -> None:
            self.num_done = 0

        def update(self, count: int) -> None:
            self.num_done += count
            if self.num_done % 25 == 3:
                gate.open()

        def close(self) -> None:
            pass

    list(pool.parfor(run, [-1] * 200))
    results = list(pool.parfor(run, range(100), chunk_size=chunk_size, progress=Bar))
    assert [item for item, _ in results] == list(range(100))
    assert len({worker for _, worker in results[:chunk_size]}) == 1


def test_values_that_are_large_come_with_it(begin: Any, gate: Any) -> None:
    """They travel through the object store, and belong to the call; nothing else waits for it."""
    jobs = begin(lambda item: np.full(40_000, item))
    after = [job for item, job in enumerate(jobs) if item > LASTS]
    assert [int(job.result(300)[-1]) for job in after] == list(range(LASTS + 1, 100))
    gate.open()
    assert [int(job.result(300)[0]) for job in jobs] == list(range(100))


def test_it_can_be_cancelled(
    pool: ParallelPool, begin: Any, check_pool: Any, eventually: Any
) -> None:
    jobs = begin()
    assert [job.result(300) for job in jobs[:LASTS]] == list(range(LASTS))
    assert jobs[LASTS].cancel()
    assert [job.result(300) for job in jobs[LASTS + 1 :]] == list(range(LASTS + 1, 100))
    check_pool(pool)
    assert eventually(lambda: not pool.busy)


@pytest.mark.threads
def test_its_worker_ends_in_good_order(
    make_pool: Any, make_gate: Any, gate: Any, marks: Any, eventually: Any
) -> None:
    """It is free when the item has ended: what waited behind that was taken back, though the worker
    may still have to say so.
    """

    def run(item: int) -> int:
        if item == LASTS:
            gate.wait()
        return item

    pool = make_pool(2, teardown=lambda: marks.add("teardown"))
    list(pool.parfor(run, [-1] * 200))
    start = make_gate()
    others = [pool.parfeval(start.wait) for _ in range(2)]
    jobs = [pool.parfeval(run, item) for item in range(100)]
    start.open()
    pool.shutdown(wait=False)
    lasting = jobs.pop(LASTS)
    assert [job.result(300) for job in (*others, *jobs)] == [
        None,
        None,
        *(item for item in range(100) if item != LASTS),
    ]
    gate.open()
    assert lasting.result(300) == LASTS
    assert eventually(lambda: marks.count("teardown") == 2)


@pytest.mark.processes
def test_what_was_told_does_not_run_again_when_its_worker_dies(
    pool: ParallelPool, gate: Any, marks: Any
) -> None:
    def run(item: int) -> int:
        if item >= 0:
            marks.add(item)
        if item == LASTS and current_task().attempt == 1:
            gate.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    list(pool.parfor(run, [-1] * 200))
    jobs = [pool.parfeval(run, item) for item in range(100)]
    others = [job.result(300) for job in jobs[:LASTS] + jobs[LASTS + 1 :]]
    assert others == [item for item in range(100) if item != LASTS]
    gate.open()
    assert jobs[LASTS].result(300) == LASTS
    assert jobs[LASTS].attempts == 2
    assert marks.count(LASTS) == 2
    assert len(marks.all()) == 101, "but for the one that was running"


@pytest.mark.processes
def test_a_message_that_gets_lost_loses_nothing(
    pool: ParallelPool,
    begin: Any,
    gate: Any,
    marks: Any,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    """The answer to the call has all of it."""
    lost: list[Any] = []
    monkeypatch.setattr(pool._engine.hub, "on_early", lambda *message: lost.append(message))
    jobs = begin()
    assert eventually(lambda: lost)
    gate.open()
    assert [job.result(300) for job in jobs] == list(range(100))
    assert sorted(map(int, marks.all())) == list(range(100)), "each has run once"
