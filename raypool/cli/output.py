"""Output and exit status of commands: 2 for wrong use, before any work; 1 for failures; 75 where
machines go.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click

from raypool.errors import (
    InvalidTypeError,
    InvalidValueError,
    JournalError,
    PoolPreemptedError,
    RaypoolError,
    ResourceError,
)
from raypool.views.words import printable

WRONG_USE = (InvalidValueError, InvalidTypeError, JournalError, ResourceError)
"""Errors that count as wrong use."""

PREEMPTED = os.EX_TEMPFAIL
"""The exit status where all nodes are about to go (75): the same command continues elsewhere."""

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""


class _Preempted(click.ClickException):
    exit_code = PREEMPTED


@contextlib.contextmanager
def errors_said(*, before_work: bool = False) -> Iterator[None]:
    """Turn errors into messages and exit statuses; an error with results arose after the work, and
    any error `before_work` is wrong use.
    """
    try:
        yield
    except RaypoolError as error:
        is_wrong_use = isinstance(error, WRONG_USE) and not hasattr(error, "results")
        if before_work or is_wrong_use:
            raise click.UsageError(str(error)) from error
        is_preempted = isinstance(error, PoolPreemptedError)
        raise (_Preempted if is_preempted else click.ClickException)(str(error)) from error


# --- output: safe texts, and readers that leave early ---------------------------------------------
#
# After the reader has gone (`head`, say), the command continues, and exits with its usual status.


READER_GONE = 141
"""The exit status of a printing command whose reader has gone, as in shells: 128 + SIGPIPE."""


class _Pipe(io.FileIO):
    """A pipe that drops further output once the reader has gone."""

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


def echo(text: str, *, err: bool = False, color: str | None = None, nl: bool = True) -> None:
    """Print a text. All output of commands goes through here or `write_out`, except that of other
    programs.
    """
    text = printable(text)
    if color is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = click.style(text, fg=color)
    click.echo(text, err=err, nl=nl)


def write_out(data: str) -> None:
    """Write data to standard output: into a file or a pipe unchanged, to a terminal safely."""
    if sys.stdout.isatty():
        echo(data)
    else:
        click.echo(data.encode())  # UTF-8, as in a file; click changes no bytes


@contextlib.contextmanager
def readers_may_go() -> Iterator[None]:
    """Let a command outlive the readers of its standard output and standard error, and characters
    that they lack.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    with (
        contextlib.redirect_stdout(_outlet(sys.stdout)),
        contextlib.redirect_stderr(_outlet(sys.stderr)),
    ):
        try:
            yield
        finally:
            # while they still stand in for sys.stdout and sys.stderr: `_outlet` has its own buffers
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()


def has_reader() -> bool:
    """Whether standard output still has a reader, as far as writes have shown."""
    file = _file_of(sys.stdout)
    return not isinstance(file, _Pipe) or file.has_reader


def _outlet(stream: TextIO) -> TextIO:
    """Return a stream into the same pipe that drops unread output; other streams stay."""
    file = _file_of(stream)
    if (
        file is None
        or not isinstance(stream, io.TextIOWrapper)
        or not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    ):
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
    """Return the file that a stream writes to; None without one, as under a test."""
    buffer: Any = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file if isinstance(file, io.FileIO) else None
