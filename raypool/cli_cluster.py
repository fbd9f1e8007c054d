"""The command line for clusters: `raypool cluster ...`."""

from __future__ import annotations

import click

from raypool.errors import RaypoolError


@click.group()
def cluster() -> None:
    """Write, check, start and end clusters of machines with GPUs."""


@cluster.command()
@click.option("--gpu", metavar="KIND", help="Only machines that may have GPUs of this kind: T4, A100, nvidia-tesla-t4, ...")
@click.option(
    "--catalogue",
    "name",
    type=click.Choice(["gce", "aws", "ai-platform-2021"]),
    default="gce",
    show_default=True,
    help="Whose: Google Compute Engine's, Amazon EC2's, or those of Google's AI Platform Training of 2021.",
)
@click.option("--json", "is_json", is_flag=True, help="As JSON, with the zones of each kind of GPU.")
def machines(gpu: str | None, name: str, is_json: bool) -> None:
    """List kinds of machines, and which GPUs go with them.

    What stands there comes with raypool, and says of which day it is; nobody is asked.
    """
    from raypool.cloud.machines import catalogue
    from raypool.views import devices
    from raypool.views import machines as view

    known = catalogue(name)
    try:
        if is_json:
            click.echo(view.as_json(known, gpu))
        else:
            devices.show(view.as_table(known, gpu))
            click.echo(view.where(known, gpu))
    except RaypoolError as error:
        raise click.UsageError(str(error)) from error
