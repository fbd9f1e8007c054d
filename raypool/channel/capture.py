"""Captures the output of tasks: it goes on to the original stream, and to the feed of the task.

A worker process has these streams for as long as it lives. In a process that also runs other code
("threads", "inline") they are installed while a task runs; output outside of tasks just passes
through.
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
"""An error carries so many lines of so many characters of what its task printed last."""

KEPT_WRITES = 50 * MAX_LINES
KEPT_TEXT = MAX_LINES * MAX_LINE


class _Writing(threading.local):
    """The task whose text an `CapturedStream` is passing on in this thread."""

    note: TaskContext | None = None


_writing = _Writing()


class CapturedStream:
    """A stream in place of another: it passes everything on, and reports what a task writes.

    It may pass text on to another `CapturedStream`, through a stream that a library (colorama, for
    example) has put between.
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
        # should it stay, as somebody stops the task in this instant, then for that one alone
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
    """Whether a stream has failed since an earlier task has closed it, or its descriptor: the next
    one cannot help that.
    """
    try:
        return bool(getattr(stream, "closed", False)) or (
            isinstance(error, OSError) and error.errno == errno.EBADF
        )
    except ValueError:  # it was detached
        return True


_num_listeners = 0
_switching = threading.Lock()
_recent: deque[CapturedStream] = deque(maxlen=8)
"""Up to Python 3.13, `print` writes its text and the end of the line to a stream that it holds no
reference to: the last ones live on, for a thread that is at it while another takes its stream away,
which would crash the process."""


def install() -> None:
    """Listen from now on, for as long as the process lives or until `remove`."""
    global _num_listeners
    with _switching:
        _num_listeners += 1
        _put_on()


def remove() -> None:
    """Undo one `install`; after the last, the streams are as they were, unless somebody else has
    changed them.
    """
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
    """Listen again, if anybody does, after something else has taken the place of the streams."""
    with _switching:
        if _num_listeners > 0:
            _put_on()


def beneath(stream: Any) -> Any:
    """Return the stream that what is written to this one passes on to."""
    return stream.original if isinstance(stream, CapturedStream) else stream


def streams() -> tuple[Any, ...]:
    """Return standard output and error as they are, None for one that is not there."""
    return tuple(getattr(sys, name, None) for name in STREAMS)


def mend(before: tuple[Any, ...]) -> None:
    """Put the streams back that were there before a task, where it has left none, or one that
    cannot be written.
    """
    for name, good, stream in zip(STREAMS, before, streams(), strict=True):
        if stream is not good and good is not None and not _is_usable(stream):
            setattr(sys, name, good)


def _is_usable(stream: Any) -> bool:
    try:
        stream.write("")
    except Exception:  # it is the user's, or none
        return False
    return True


def _put_on() -> None:
    for name in STREAMS:
        stream = getattr(sys, name, None)
        if stream is not None and not isinstance(stream, CapturedStream):
            echo = next(
                (echo for echo in _recent if echo.original is stream and echo._name == name), None
            ) or CapturedStream(name, stream)
            _keep(echo)
            setattr(sys, name, echo)


def _keep(echo: CapturedStream) -> None:
    if echo not in _recent:
        _recent.append(echo)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen while the context lasts, in any number of threads."""
    install()
    try:
        yield
    finally:
        remove()


def note_last_lines(error: BaseException, note: TaskContext) -> None:
    """Note in an exception what its item printed last, if anything."""
    if not note.printed:
        return
    text = "".join(text for index, text in note.printed if index == note.index)
    add_last_lines(error, text)


def add_last_lines(error: BaseException, text: str) -> None:
    r"""Note the last lines of a text in an exception.

    Example:
        >>> error = ValueError("no")
        >>> add_last_lines(error, "epoch 1\nloading 10 %\rloading 90 %\n")
        >>> print(error.__notes__[0])
        raypool: it printed last:
          epoch 1
          loading 90 %
    """
    lines = [
        line.rstrip().rpartition("\r")[2][:MAX_LINE]
        for line in text[-KEPT_TEXT:].rstrip().split("\n")[-MAX_LINES:]
    ]
    if any(lines):
        with contextlib.suppress(Exception):  # it is the user's class, and may refuse attributes
            error.add_note("\n  ".join(["raypool: it printed last:", *lines]))
