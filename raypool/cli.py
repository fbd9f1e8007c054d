"""The command line: `raypool demo`."""

from __future__ import annotations

from pathlib import Path

import click

from raypool.errors import RaypoolError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raypool")
def main() -> None:
    """Many models at once, one on each GPU."""


@main.command()
@click.option("--workers", type=click.IntRange(min=1), help="How many workers. Default: one per GPU, else one per core.")
@click.option("--profile", default="local", show_default=True, help="Where to run: local, threads or inline.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Where to write results.csv and learning_curves.png.",
)
def demo(workers: int | None, profile: str, out: Path) -> None:
    """Train a dozen models at once on real images of digits."""
    from raypool.demo import run

    try:
        run(num_workers=workers, profile=profile, out=out)
    except RaypoolError as error:
        raise click.ClickException(str(error)) from error
