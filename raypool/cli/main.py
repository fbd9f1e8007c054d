"""The command line: `raypool demo`, `gpus`, `doctor` and `replay`; other modules have the rest."""

from __future__ import annotations

import bdb
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raypool.cli.cluster import cluster
from raypool.cli.job import job
from raypool.cli.output import INTERRUPTED, echo, errors_said, readers_may_go
from raypool.cli.search import search
from raypool.cli.submit import submit
from raypool.cli.sweep import RunFolder, export, ls, report, show, sweep, watch
from raypool.errors import traceback_text
from raypool.views.words import printable

if TYPE_CHECKING:
    from raypool.gpus.devices import Inventory
    from raypool.journal.replay import Replay


class Commands(click.Group):
    """The group of commands: Ctrl-C ends them with status 130, and a closed pipe does not fail
    them.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run as a program."""
        with readers_may_go():
            return super().main(*args, **options)

    def invoke(self, context: click.Context) -> Any:
        """Run the command that is asked for."""
        try:
            return super().invoke(context)
        except click.ClickException as error:
            # final, but nobody has seen it before it is shown
            error.message = printable(error.message)  # type: ignore[misc]
            raise
        except KeyboardInterrupt:
            echo("Interrupted.", err=True)
            raise SystemExit(INTERRUPTED) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raypool")
def main() -> None:
    """Train many models at once, one per GPU."""


main.add_command(cluster)
main.add_command(job)
main.add_command(submit)
main.add_command(sweep)
main.add_command(search)
main.add_command(ls)
main.add_command(show)
main.add_command(report)
main.add_command(watch)
main.add_command(export)


@main.command()
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of workers. Default: one per GPU; without a GPU, one per physical core.",
)
@click.option(
    "--profile", default="local", show_default=True, help="Where to run: local, threads or inline."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Folder for results.csv and learning_curves.png.",
)
def demo(workers: int | None, profile: str, out: Path) -> None:
    """Train thirteen models at once on real images of digits."""
    from raypool.cli.demo import run

    with errors_said():
        is_as_meant = run(num_workers=workers, profile=profile, out=out)
    raise SystemExit(0 if is_as_meant else 1)


@main.command()
@click.option(
    "--json",
    "is_json",
    is_flag=True,
    help="Print JSON with all columns of raypool.gpu_device_table; null means unknown.",
)
@click.pass_obj
def gpus(inventory: Inventory | None, is_json: bool) -> None:
    """List the GPUs of this machine.

    Shows their current memory and load, without making a CUDA context. Marks the GPUs that are
    visible through CUDA_VISIBLE_DEVICES.
    """
    from raypool.gpus.table import NVIDIAS, gpu_device_table
    from raypool.views import tables

    frame = gpu_device_table(inventory=inventory or NVIDIAS)
    if is_json:
        echo(tables.gpus_as_json(frame))
    elif frame.empty:
        echo(tables.NO_GPU)
    else:
        tables.show(tables.gpus_as_table(frame))
        echo(tables.legend(frame, os.environ))


COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@main.command()
@click.option(
    "--json",
    "is_json",
    is_flag=True,
    help="Print JSON: a list with check, state, fact and advice for each check.",
)
@click.pass_obj
def doctor(inventory: Inventory | None, is_json: bool) -> None:
    """Check this machine for problems.

    Each check reports ok, a warning (pools work, but not as well as they could) or a problem, with
    advice on how to fix it. Starts no pool and makes no CUDA context. Exit status: 1 if there is a
    problem, else 0.
    """
    from raypool.cli.doctor import examine

    findings = []
    for finding in examine(inventory):
        findings.append(finding)
        if not is_json:
            echo(f"{finding.state:8}", color=COLORS[finding.state], nl=False)
            echo(
                f" {finding.check:14} {finding.fact}"
                + (f"\n{'':23} {finding.advice}" if finding.advice else "")
            )
    counts = Counter(finding.state for finding in findings)
    if is_json:
        echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        echo(f"problems: {counts['problem']}, warnings: {counts['warning']}, ok: {counts['ok']}")
    raise SystemExit(1 if counts["problem"] else 0)


@main.command()
@click.argument("run_dir", type=RunFolder(file_okay=False, path_type=Path))
@click.argument("item")
@click.option(
    "--debug", is_flag=True, help="Run it under pdb; on an exception, open post-mortem debugging."
)
def replay(run_dir: Path, item: str, debug: bool) -> None:
    """Run one item of a saved run again, in this process.

    ITEM is an item's number in the table of `raypool show RUN_DIR`, or its key: the name of its
    folder in RUN_DIR/items, or the beginning of that name. Digits alone are a number. The
    function is imported by name, with its current code; a script must open its pool below
    `if __name__ == "__main__":`. Nothing in RUN_DIR changes. Prints the return value (exit status
    0), or the traceback of the exception (exit status 1).
    """
    from raypool.journal.replay import replaying

    with errors_said(), replaying(run_dir, item) as again:
        status = _shown(again, debug)
    raise SystemExit(status)


def _shown(again: Replay, debug: bool) -> int:
    """Run an item and print its outcome."""
    import pdb

    from raypool.journal.trials import trials_in
    from raypool.views.tables import whole_text

    echo(
        f"Item {again.number} ({again.key}) of {again.name}, attempt {again.attempt}:"
        f" {whole_text(again.item)}",
        err=True,
    )
    call = pdb.Pdb().runcall if debug else lambda fn, item: fn(item)
    try:
        trials = trials_in(again.run_dir, 0)
        if trials is None or trials.workers is None:
            value = again.run(call)
        else:
            from raypool.cli.search import replay_training

            value = replay_training(again, call)
    except KeyboardInterrupt:
        raise
    except bdb.BdbQuit:  # `q` in pdb is the user's wish, and needs no traceback
        return 1
    except BaseException as error:
        echo(traceback_text(error).rstrip(), err=True)
        if debug:
            pdb.post_mortem(error.__traceback__)
        return 1
    echo(whole_text(value))
    return 0
