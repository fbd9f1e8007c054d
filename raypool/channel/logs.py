"""Log records of tasks: they go to the loggers of the same name in the driver's process.

The levels of the driver's loggers travel with a call whenever they have changed, so a worker makes
and sends only the records that the driver's loggers take.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import sys
import threading
import traceback
from typing import Any, NamedTuple

from raypool.worker.running import note_here, notes_here

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})

PICKLED_BYTES = 64 * 1024
"""A larger field that somebody has added to a record travels as text."""

SILENCE_S = 0.5
"""After this long without a record the thread that delivers them ends [s]."""

WAIT_S = 5.0
"""How long to wait for the driver's handlers to take all records [s]."""


class Levels(NamedTuple):
    """The levels that loggers have set ("" is the root), and the level disabled for all."""

    by_name: dict[str, int]
    disabled: int = 0

    def take(self, name: str, level: int) -> bool:
        """Whether the logger of this name takes a record of this level."""
        if level <= self.disabled:
            return False
        while name and name not in self.by_name:
            name = name.rpartition(".")[0]
        return level >= self.by_name.get(name, logging.WARNING)


_probe = logging.getLogger("raypool.levels")  # nobody else's
_levels = Levels({})


def levels_here() -> Levels:
    """Return the levels of this process: the same object if none has changed."""
    global _levels
    # `logging` empties this private dictionary of each logger when any level changes: so not every
    # call looks at all loggers
    if 0 not in _probe._cache:  # type: ignore[attr-defined]
        _probe._cache[0] = True  # type: ignore[attr-defined]
        loggers = list(logging.root.manager.loggerDict.items())
        by_name = {
            name: logger.level
            for name, logger in loggers
            if isinstance(logger, logging.Logger) and logger.level
        }
        levels = Levels({"": logging.root.level, **by_name}, logging.root.manager.disable)
        if levels != _levels:
            _levels = levels
    return _levels


class Forwarder:
    """Sends the log records of tasks in this worker process; its own handlers get them too."""

    def __init__(self) -> None:
        self._levels: Levels | None = None  # not before the first call
        # by logger: the level that it had, and the one that it got here
        self._changed: dict[str, tuple[int, int]] = {}
        # In place of this method: a handler on the root would not hear loggers that do not
        # propagate, and would make a task's `logging.basicConfig` do nothing.
        self._call_handlers = call_handlers = logging.Logger.callHandlers
        self._basic_config = basic_config = logging.basicConfig

        def send_or_call(logger: logging.Logger, record: logging.LogRecord) -> None:
            is_sent = self._send(record)
            # else it would be printed too, by the handler of last resort
            if not is_sent or logger.hasHandlers():
                call_handlers(logger, record)

        def unless_by_itself(**options: Any) -> None:
            # `logging.info` and the like call it where the root has no handler: what is sent would
            # be printed here too.
            if sys._getframe(1).f_globals is not vars(logging):
                basic_config(**options)

        logging.Logger.callHandlers = send_or_call  # type: ignore[method-assign, assignment]
        logging.basicConfig = unless_by_itself
        os.register_at_fork(after_in_child=self.remove)

    def remove(self) -> None:
        """Send nothing more: this is a forked child."""
        logging.Logger.callHandlers = self._call_handlers  # type: ignore[method-assign]
        logging.basicConfig = self._basic_config

    def heed(self, levels: Levels) -> None:
        """Let loggers make the records that the driver's take: lower their levels if necessary."""
        for name, (own, changed) in self._changed.items():
            logger = logging.getLogger(name)
            if logger.level == changed:
                logger.setLevel(own)
        self._changed.clear()
        for name, level in levels.by_name.items():
            logger = logging.getLogger(name)
            own = logger.level
            if level < own or (name and not own):
                self._changed[name] = own, level
                logger.setLevel(level)
        self._levels = levels

    def _send(self, record: logging.LogRecord) -> bool:
        """Send a record of a task's; return whether it goes to the driver."""
        note = note_here()
        if (
            note is None
            or self._levels is None
            or not self._levels.take(record.name, record.levelno)
        ):
            return False
        *_, note = notes_here()  # of a loop in a task, the task
        if note.task_id < 0:
            return False  # it is no task: the setup of a worker, say
        try:
            payload = packed(record, note.worker, note.index)
        except Exception:  # its arguments do not fit its text
            if logging.lastResort is not None:
                logging.lastResort.handleError(record)
            return True
        note.say(note, "log", payload)
        return True


def packed(record: logging.LogRecord, worker: int, item: int) -> bytes:
    """Pickle a record with its text; other fields than plain data as pickles, texts, or both."""
    fields = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    fields.setdefault("worker", worker)
    fields.setdefault("item", item)
    others: dict[str, tuple[bytes | None, str]] = {}
    for name in [name for name, value in fields.items() if type(value) not in PLAIN]:
        value, pickled = fields.pop(name), None
        with contextlib.suppress(Exception):  # a value that cannot be pickled travels as text
            pickled = pickle.dumps(value, protocol=5)
        try:
            text = repr(value)
        except Exception:  # the user's own __repr__
            text = f"<{type(value).__name__}>"
        others[name] = None if pickled is None or len(pickled) > PICKLED_BYTES else pickled, text
    return pickle.dumps((fields, others), protocol=5)


def unpacked(payload: bytes) -> logging.LogRecord:
    """Return the record; fields that cannot be unpickled here are texts."""
    fields, others = pickle.loads(payload)
    for name, (pickled, text) in others.items():
        fields[name] = text
        if pickled is not None:
            with contextlib.suppress(Exception):  # its class may be missing here: the text stays
                fields[name] = pickle.loads(pickled)
    return logging.makeLogRecord(fields)


class Records:
    """Hands records of workers to the loggers here, in a thread, which ends after a silence."""

    def __init__(self) -> None:
        # a thread of their own, since a handler may take long
        self._arrived: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # while it works

    def put(self, payload: bytes) -> None:
        """Take a record."""
        with self._lock:
            self._arrived.put(payload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="raypool-logs", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait a while, until the handlers have had all records that have arrived."""
        handed_out = threading.Event()
        with self._lock:
            # a handler may wait itself, in that thread
            if self._thread is None or self._thread is threading.current_thread():
                return
            self._arrived.put(handed_out)
        handed_out.wait(WAIT_S)

    def _work(self) -> None:
        while True:
            try:
                entry = self._arrived.get(timeout=SILENCE_S)
            except queue.Empty:
                # with the lock, under which `put` looks for the thread: no record is left without
                with self._lock:
                    if self._arrived.empty():
                        self._thread = None
                        return
                continue
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                _hand_out(entry)


def _hand_out(payload: bytes) -> None:
    # not in the loop above: its variables would keep the last record
    try:
        record = unpacked(payload)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):  # the level may have changed meanwhile
            logger.handle(record)
    except Exception:  # a filter of the user's, say
        traceback.print_exc()
