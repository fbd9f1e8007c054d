"""How commands end that cannot do what they were told: 2 for wrong use, before anything is done; 1 for what has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from raypool.errors import InvalidTypeError, InvalidValueError, JournalError, RaypoolError, ResourceError

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
