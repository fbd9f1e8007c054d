"""Captures what tasks print and log. Text goes to the original stream, and to the task's feed.

A worker process has these streams for as long as it lives. In a process that also runs other code
("threads", "inline") they are installed while a task runs; other output just passes through.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from raypool.errors import add_note
from raypool.worker.running import PLAIN, TaskContext, note_here, notes_here

STREAMS = ("stdout", "stderr")

MAX_LINES = 10
MAX_LINE = 500
"""An error carries the last lines that its task printed: this many, of this many characters."""

# `print` writes each argument, space and line end by itself: a line may take many writes
KEPT_WRITES = 50 * MAX_LINES
KEPT_TEXT = MAX_LINES * MAX_LINE


class _Writing(threading.local):
    """The task whose text this thread is writing; else two such streams would report it twice."""

    note: TaskContext | None = None


_writing = _Writing()


class CapturedStream:
    """A stream in place of another: it passes everything on, and reports what a task writes.

    It may pass text on to another `CapturedStream`, if a library (colorama, say) has put its own
    stream between.
    """

    def __init__(self, name: str, original: Any) -> None:
        self._name = name
        self.original = original

    def write(self, text: str) -> int:
        """Write some text."""
        here = note_here()
        if here is None or here is _writing.note or not isinstance(text, str) or not text:
            return self.original.write(text)  # type: ignore[no-any-return]
        is_shown = False
        for note in notes_here():
            if note.printed is None:
                note.printed = deque(maxlen=KEPT_WRITES)
            note.printed.append((note.index, text[-KEPT_TEXT:]))
            is_shown = bool(note.say(note, "text", text)) or is_shown
        if is_shown:
            return len(text)
        # if the task is interrupted before the `try`, this stays: for this task alone
        _writing.note = here
        try:
            return self.original.write(text)  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            if not _is_closed(self.original, error):
                raise
            return len(text)
        finally:
            _writing.note = None

    def flush(self) -> None:
        """Write out what is buffered."""
        try:
            self.original.flush()
        except (OSError, ValueError) as error:
            if not _is_closed(self.original, error):
                raise

    def close(self) -> None:
        """Only flush: the stream is this process's, which outlives the task that closes it."""
        self.flush()

    def __enter__(self) -> CapturedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        """Write some lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __reduce__(self) -> Any:
        return _stream, (self._name,)  # elsewhere it is the stream of that name there


def _stream(name: str) -> Any:
    return getattr(sys, name)


def _is_closed(stream: Any, error: OSError | ValueError) -> bool:
    """Whether an earlier task has closed a stream, or its descriptor: no fault of the next one."""
    try:
        return bool(getattr(stream, "closed", False)) or (
            isinstance(error, OSError) and error.errno == errno.EBADF
        )
    except ValueError:  # it was detached
        return True


_num_listeners = 0
_switching = threading.Lock()  # several threads may install and remove
_recent: deque[CapturedStream] = deque(maxlen=8)
"""Up to Python 3.13, `print` holds no reference to its stream: the last ones live on, for a thread
that prints while another takes its stream away, which would crash the process."""


def install() -> None:
    """Listen from now on, until `remove`."""
    global _num_listeners
    with _switching:
        _num_listeners += 1
        _put_on()


def remove() -> None:
    """Undo one `install`; the last restores the streams, unless others have changed them."""
    global _num_listeners
    with _switching:
        _num_listeners -= 1
        if _num_listeners > 0:
            return
        for name in STREAMS:
            stream = getattr(sys, name, None)
            if isinstance(stream, CapturedStream):
                _keep(stream)
                setattr(sys, name, stream.original)


def put_on_top() -> None:
    """Listen again, if anybody does, after something else has replaced the streams."""
    with _switching:
        if _num_listeners > 0:
            _put_on()


def beneath(stream: Any) -> Any:
    """Return the stream to which this one passes its text on."""
    return stream.original if isinstance(stream, CapturedStream) else stream


def streams() -> tuple[Any, ...]:
    """Return standard output and error, None for a missing one."""
    # without a loop: each short call does this
    return getattr(sys, "stdout", None), getattr(sys, "stderr", None)


def mend(before: tuple[Any, ...]) -> None:
    """Restore the streams of before a task if it has left none, or ones that cannot be written."""
    for name, good in zip(STREAMS, before, strict=True):
        stream: Any = getattr(sys, name, None)
        if stream is not good and good is not None:
            try:
                stream.write("")
            except Exception:  # it is the user's, or none
                setattr(sys, name, good)


def _put_on() -> None:
    for name in STREAMS:
        stream: Any = getattr(sys, name, None)
        if stream is not None and not isinstance(stream, CapturedStream):
            known = (old for old in _recent if old.original is stream and old._name == name)
            captured = next(known, None) or CapturedStream(name, stream)
            _keep(captured)
            setattr(sys, name, captured)


def _keep(stream: CapturedStream) -> None:
    if stream not in _recent:
        _recent.append(stream)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen while the context lasts, in any number of threads."""
    install()
    try:
        yield
    finally:
        remove()


def note_last_lines(error: BaseException, note: TaskContext) -> None:
    """Note in an exception the last lines that its item printed, if any."""
    if note.printed:
        printed = list(note.printed)  # at once: a thread of the task may print meanwhile
        text = "".join(text for index, text in printed if index == note.index)
        add_last_lines(error, text)


def add_last_lines(error: BaseException, text: str) -> None:
    r"""Note the last lines of a text in an exception.

    Example:
        >>> error = ValueError("no")
        >>> add_last_lines(error, "epoch 1\nloading 10 %\rloading 90 %\n")
        >>> print(error.__notes__[0])
        raypool: its last output:
          epoch 1
          loading 90 %
    """
    lines = [
        line.rstrip().rpartition("\r")[2][:MAX_LINE]
        for line in text[-KEPT_TEXT:].rstrip().split("\n")[-MAX_LINES:]
    ]
    if any(lines):
        add_note(error, "\n  ".join(["raypool: its last output:", *lines]))


# --- log records of tasks -------------------------------------------------------------------------
#
# They go to the loggers of the same name in the driver's process. The levels of the driver's
# loggers travel with a call whenever they have changed, so a worker makes and sends only the
# records that the driver's loggers take.

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
            if logger.level == changed:  # else the user's code has set another one since
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
        # bounded: a handler that hangs must not keep a pool from closing
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
    except BaseException:  # a handler's sys.exit(), say: later records need the thread
        traceback.print_exc()
