"""How commands print, and how they end: 2 for wrong use, before anything is done; 1 for what has failed."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click

from raypool.errors import InvalidTypeError, InvalidValueError, JournalError, RaypoolError, ResourceError
from raypool.views.words import printable

WRONG_USE = (InvalidValueError, InvalidTypeError, JournalError, ResourceError)
"""Something was asked for that is not there, or not as it has to be; a folder that another run has; or more than there is."""

INTERRUPTED = 130
"""The status of what Ctrl-C has ended, as shells have it."""


@contextlib.contextmanager
def errors_said() -> Iterator[None]:
    """End with what an error says; one that comes with results was met when the work was done."""
    try:
        yield
    except RaypoolError as error:
        if isinstance(error, WRONG_USE) and not hasattr(error, "results"):
            raise click.UsageError(str(error)) from error
        raise click.ClickException(str(error)) from error


# --- output: no name gives the terminal orders, and a reader may go before all is printed -----------------------------
#
# When it does, as `head` does, the command goes on to its end, and ends as what it did.


READER_GONE = 141
"""The status of what only prints, and has nobody left to print for, as shells have it: 128 and the number of SIGPIPE."""


class _Pipe(io.FileIO):
    """Drops what is written once the reader has gone."""

    has_reader = True

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.has_reader = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # processes that start from here on inherit it too
            os.close(nowhere)
            return super().write(data)


def echo(text: str, *, err: bool = False, color: str | None = None) -> None:
    """Print a text: all that commands say goes through here, but for what other programs have printed."""
    click.echo(click.style(printable(text), fg=color), err=err)


@contextlib.contextmanager
def readers_may_go() -> Iterator[None]:
    """Let a command outlive the readers of its standard output and standard error."""
    with contextlib.redirect_stdout(_outlet(sys.stdout)), contextlib.redirect_stderr(_outlet(sys.stderr)):
        try:
            yield
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()


def has_reader() -> bool:
    """Whether anybody may still read what is printed on standard output, as far as a write has shown."""
    file = _file_of(sys.stdout)
    return not isinstance(file, _Pipe) or file.has_reader


def _outlet(stream: TextIO) -> TextIO:
    """Return a stream into the same pipe that drops what nobody reads; what is no pipe stays as it is."""
    file = _file_of(stream)
    if file is None or not isinstance(stream, io.TextIOWrapper) or not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        return stream
    stream.flush()
    pipe = _Pipe(file.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        pipe if stream.write_through else io.BufferedWriter(pipe),  # python -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _file_of(stream: TextIO) -> io.FileIO | None:
    """Return the file that a stream writes to; None if it is none, as under a test."""
    buffer: Any = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file if isinstance(file, io.FileIO) else None
