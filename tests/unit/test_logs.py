"""A worker sends just the log records of tasks that the driver's loggers take."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raypool.channel.capture import Forwarder, Levels, Records, levels_here, packed, unpacked
from raypool.worker.running import TaskContext, running

X = logging.getLogger("raypool_test.x")
"""A logger of the user's."""


class Worker:
    """What a worker process is for logging, with a task that runs in this thread."""

    def __init__(self) -> None:
        self.forwarder = Forwarder()
        self.payloads: list[bytes] = []

    def say(self, note: TaskContext, kind: str, payload: Any) -> None:
        assert kind == "log"
        self.payloads.append(payload)

    @property
    def records(self) -> list[logging.LogRecord]:
        return [unpacked(payload) for payload in self.payloads]


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    note = TaskContext(5, 1, None, 2, None, "train", task_id=7)
    note.say = worker.say
    token = running.set(note)
    yield worker
    running.reset(token)
    worker.forwarder.heed(Levels({}))
    worker.forwarder.remove()


def test_what_the_driver_would_drop_is_not_sent(worker: Worker) -> None:
    worker.forwarder.heed(
        Levels(
            {
                "": logging.WARNING,
                "raypool_test": logging.INFO,
                "raypool_test.x.quiet": logging.ERROR,
            }
        )
    )
    quiet, other = logging.getLogger("raypool_test.x.quiet"), logging.getLogger("raypool_other")
    for logger in (X, quiet, other):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "%d", level)
    sent = [(record.name, record.getMessage()) for record in worker.records]
    assert sent == [
        *((X.name, str(level)) for level in (20, 30, 40)),
        (quiet.name, "40"),
        *((other.name, str(level)) for level in (30, 40)),
    ]
    worker.payloads.clear()
    worker.forwarder.heed(Levels({"": logging.DEBUG}, disabled=logging.ERROR))
    X.error("disabled")
    assert not worker.payloads


def test_a_level_that_the_driver_lowers_is_lowered_until_it_raises_it_again(worker: Worker) -> None:
    worker.forwarder.heed(Levels({"": logging.WARNING}))
    assert not X.isEnabledFor(logging.INFO)
    worker.forwarder.heed(Levels({"": logging.WARNING, X.name: logging.DEBUG}))
    assert X.isEnabledFor(logging.DEBUG)
    worker.forwarder.heed(Levels({"": logging.WARNING}))
    assert not X.isEnabledFor(logging.INFO)


def test_a_level_that_was_set_in_the_worker_is_not_raised(worker: Worker) -> None:
    X.setLevel(logging.INFO)
    try:
        worker.forwarder.heed(Levels({"": logging.WARNING, X.name: logging.ERROR}))
        assert X.isEnabledFor(logging.INFO)
        X.info("for the worker's own handlers")
        assert not worker.payloads
    finally:
        X.setLevel(logging.NOTSET)


def test_a_record_travels_with_its_text_and_what_cannot_be_pickled_as_text(worker: Worker) -> None:
    worker.forwarder.heed(Levels({"": logging.INFO}))
    lock = threading.Lock()
    try:
        raise ValueError("bad")
    except ValueError:
        X.exception(
            "of %s",
            [1, lock],
            extra={"epoch": 3, "path": {"a": (1, 2)}, "lock": lock, "item": "mine"},
        )
    [record] = worker.records
    assert (record.getMessage(), record.levelno, record.funcName) == (
        f"of {[1, lock]}",
        logging.ERROR,
        "test_a_record_travels_with_its_text_and_what_cannot_be_pickled_as_text",
    )
    assert record.exc_text is not None
    assert record.exc_text.endswith("ValueError: bad")
    fields = record.__dict__
    assert (fields["epoch"], fields["path"], fields["lock"]) == (3, {"a": (1, 2)}, repr(lock))
    assert (fields["worker"], fields["item"]) == (2, "mine")


def test_a_forked_child_of_a_task_sends_nothing(worker: Worker) -> None:
    worker.forwarder.heed(Levels({"": logging.WARNING}))
    child = os.fork()
    if child == 0:
        X.error("from the child")
        os._exit(len(worker.payloads))
    assert os.waitpid(child, 0)[1] == 0


def test_a_handler_that_exits_costs_no_later_record(capsys: pytest.CaptureFixture[str]) -> None:
    class Exiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            handled.append(record.getMessage())
            sys.exit("a mistake in the handler")

    handled: list[str] = []
    handler, records = Exiting(), Records()
    X.addHandler(handler)
    try:
        for text in ("first", "second"):
            record = logging.makeLogRecord({"name": X.name, "levelno": logging.ERROR, "msg": text})
            records.put(packed(record, worker=0, item=0))
            records.wait()
    finally:
        X.removeHandler(handler)
    assert handled == ["first", "second"]
    assert capsys.readouterr().err.count("SystemExit: a mistake in the handler") == 2


def test_levels_are_looked_at_again_when_one_has_changed() -> None:
    before = levels_here()
    assert levels_here() is before
    X.setLevel(logging.ERROR)
    try:
        assert levels_here().by_name[X.name] == logging.ERROR
        logging.disable(logging.INFO)
        assert levels_here().disabled == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
        X.setLevel(logging.NOTSET)
    assert levels_here() == before
