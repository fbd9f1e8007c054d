"""The command line for clusters: `raypool cluster ...`."""

from __future__ import annotations

import click


@click.group()
def cluster() -> None:
    """Write, check, start and end clusters of machines with GPUs."""
