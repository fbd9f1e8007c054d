"""What tasks log reaches the loggers of the same name here."""

from __future__ import annotations

import logging
import sys

import pytest

from raypool import ParallelPool, current_task, parpool

pytestmark = pytest.mark.processes

X = "raypool_test.x"


def test_records_reach_the_loggers_here_before_the_loop_returns(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the item and its worker; a warning does not go to standard error of the worker as
    well.
    """
    caplog.set_level(logging.INFO, X)

    def work(x: int) -> tuple[int, bool]:
        logger = logging.getLogger(X)
        logger.debug("dropped")
        logger.info("item %d", x)
        logger.warning("warned")
        logging.warning("by the root")  # which would give it a handler where it has none
        return current_task().worker, logger.isEnabledFor(logging.DEBUG)

    results = pool.parfor(work, 4, progress=False)
    records = [record for record in caplog.records if record.name == X]
    assert sorted(
        (record.item, record.worker, record.getMessage()) for record in records
    ) == sorted(  # type: ignore[attr-defined]
        (item, worker, text)
        for item, (worker, _) in enumerate(results)
        for text in (f"item {item}", "warned")
    )
    assert [record.name for record in caplog.records if record.getMessage() == "by the root"] == [
        "root"
    ] * 4
    assert not any(is_enabled for _, is_enabled in results)
    assert list(results.diary) == [""] * 4


def test_a_level_that_changes_counts_for_the_next_call(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    def is_enabled() -> bool:
        return logging.getLogger(X).isEnabledFor(logging.DEBUG)

    view = pool.options(worker=0)
    seen = []
    for level in (logging.WARNING, logging.DEBUG, logging.ERROR):
        with caplog.at_level(level, X):
            seen.append(view.parfeval(is_enabled).result(300))
    assert seen == [False, True, False]


def test_a_task_may_configure_logging_for_itself(
    pool: ParallelPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, X)

    def work() -> None:
        handler = logging.StreamHandler(sys.stdout)
        logger = logging.getLogger(X)
        logger.addHandler(handler)
        try:
            logger.info("seen twice")
            with parpool(1, profile="inline", quiet=True) as inner:
                inner.parfor(lambda x: logger.info("of a loop in it"), 1, progress=False)
        finally:
            logger.removeHandler(handler)

    future = pool.parfeval(work)
    future.result(300)
    assert future.diary == "seen twice\nof a loop in it\n"
    pool.parfor(abs, 1, progress=False)
    assert [record.getMessage() for record in caplog.records if record.name == X] == [
        "seen twice",
        "of a loop in it",
    ]
