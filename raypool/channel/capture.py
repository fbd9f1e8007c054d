"""Captures the output of tasks: it goes to the original stream, and to the feed of the task.

A worker process has these streams for as long as it lives. In a process that also runs other code
("threads", "inline") they are installed while a task runs; other output just passes through.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from raypool.worker.running import TaskContext, note_here, notes_here

STREAMS = ("stdout", "stderr")

MAX_LINES = 10
MAX_LINE = 500
"""An error carries the last lines that its task printed: this many, of this many characters."""

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
    return tuple(getattr(sys, name, None) for name in STREAMS)


def mend(before: tuple[Any, ...]) -> None:
    """Restore the streams of before a task if it has left none, or ones that cannot be written."""
    for name, good, stream in zip(STREAMS, before, streams(), strict=True):
        if stream is not good and good is not None:
            try:
                stream.write("")
            except Exception:  # it is the user's, or none
                setattr(sys, name, good)


def _put_on() -> None:
    for name in STREAMS:
        stream = getattr(sys, name, None)
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
        text = "".join(text for index, text in note.printed if index == note.index)
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
        with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
            error.add_note("\n  ".join(["raypool: its last output:", *lines]))
