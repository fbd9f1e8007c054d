"""A worker that fails whatever it gets, while others do well; and items that wait before they run
again.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest

from raypool import Future, InvalidTypeError, InvalidValueError, ParallelPool, current_task

pytestmark = [pytest.mark.semantics]


def test_a_worker_that_fails_every_item_is_taken_out_and_said_by_name(
    make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(item: int) -> int:
        if current_task().worker == 1:
            raise OSError("no space left on device")
        return item

    with make_pool(3) as pool:
        results = pool.parfor(fn, range(60), on_error="collect", chunk_size=1)
        assert 2 < len(results.errors) < 40, "others do the rest"
        assert all(results[item] == item for item in range(60) if item not in results.errors)
        assert pool.num_workers == 2
        assert "Worker 1 (" in caplog.text
        assert re.search(r"its last \d+ items all failed", caplog.text)
        assert pool.parfor(abs, range(5)) == list(range(5))


@pytest.mark.threads
def test_items_that_fail_at_once_are_not_taken_for_short_ones(make_pool: Any) -> None:
    """A worker that fails what it gets is given one item at a time: in a longer call it would spoil
    most of the loop.
    """

    def fn(item: int) -> int:
        if current_task().worker == 1:
            raise OSError("no space left on device")
        time.sleep(0.1)
        return item

    with make_pool(3) as pool:
        assert 2 < len(pool.parfor(fn, range(60), on_error="collect").errors) < 40, (
            "others do the rest"
        )


def test_a_function_that_fails_everywhere_takes_out_nobody(pool: ParallelPool) -> None:
    assert len(pool.parfor(lambda x: 1 // 0, range(200), on_error="collect").errors) == 200
    assert pool.num_workers == 3


@pytest.mark.concurrent
def test_an_item_waits_before_it_runs_again(pool: ParallelPool) -> None:
    """The wait doubles from attempt to attempt."""

    def fail_twice(_: int) -> int:
        if current_task().attempt < 3:
            raise ConnectionError("not yet")
        return 7

    view = pool.options(retry_on=ConnectionError, retry_delay_s=0.1)
    starts = view.parfor(fail_twice, [0]).attempts["started_at"].tolist()
    assert starts[1] - starts[0] >= timedelta(seconds=0.1)
    assert starts[2] - starts[1] >= timedelta(seconds=0.2)


@pytest.mark.concurrent
def test_a_call_that_waits_to_run_again_is_queued(pool: ParallelPool, eventually: Any) -> None:
    """It can be cancelled, by itself or with all that is queued in its part of the pool."""

    def fail() -> None:
        raise ConnectionError("not yet")

    part, _ = pool.partition(workers=[0])
    patient = part.options(retry_on=ConnectionError, retry_delay_s=200)
    for cancel in (Future.cancel, lambda _: part.delete()):
        future = patient.parfeval(fail)
        assert eventually(lambda: future.attempts == 1 and pool.statistics().running == 0)  # noqa: B023
        assert pool.statistics().queued == 1
        cancel(future)
        assert future.cancelled()
    assert pool.parfeval(abs, -1).result(300) == 1


@pytest.mark.arguments
def test_a_delay_that_makes_no_sense_is_refused(pool: ParallelPool) -> None:
    for delay, kind in (
        ("1", InvalidTypeError),
        (None, InvalidTypeError),
        (-1, InvalidValueError),
        (301, InvalidValueError),
    ):
        with pytest.raises(kind, match="retry_delay_s"):
            pool.options(retry_delay_s=delay)
