"""The command line for what runs on a cluster without us: `raypool job ...` and `raypool submit`."""

from __future__ import annotations

import click


@click.group()
def job() -> None:
    """Work that a cluster does by itself: submit it, look after it, stop it."""
