"""The command line for clusters: `raypool cluster ...`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from raypool.cli.output import echo
from raypool.errors import RaypoolError

PROVIDERS = ("gcp", "aws", "on-prem", "kubernetes")

MADE = ("gcp", "aws")  # whose machines are made
ONLY = {
    "project": ("gcp",),
    **dict.fromkeys(("zone", "machine", "head_machine"), MADE),
    **dict.fromkeys(("gpu", "gpus", "least", "most", "spot"), (*MADE, "kubernetes")),
    **dict.fromkeys(("ssh_user", "ssh_key"), (*MADE, "on-prem")),
    "hosts": ("on-prem",),
    "job": ("kubernetes",),
}
"""Options of `init` that only some providers use."""


@click.group()
def cluster() -> None:
    """Write, check, start and end clusters of machines with GPUs."""


@cluster.command()
@click.option(
    "--gpu",
    metavar="KIND",
    help="Only machines that may have GPUs of this kind: T4, A100, nvidia-tesla-t4, ...",
)
@click.option(
    "--catalogue",
    "name",
    type=click.Choice(["gce", "aws", "ai-platform-2021"]),
    default="gce",
    show_default=True,
    help=(
        "Whose: Google Compute Engine's, Amazon EC2's, or those of Google's AI Platform Training of"
        " 2021."
    ),
)
@click.option(
    "--json", "is_json", is_flag=True, help="As JSON, with the zones of each kind of GPU."
)
def machines(gpu: str | None, name: str, is_json: bool) -> None:
    """List kinds of machines, and which GPUs go with them.

    What stands there comes with raypool, and says of which day it is; nobody is asked.
    """
    from raypool.cluster.machines import catalogue
    from raypool.views import tables

    known = catalogue(name)
    try:
        if is_json:
            echo(tables.machines_as_json(known, gpu))
        else:
            tables.show(tables.machines_as_table(known, gpu))
            echo(tables.where(known, gpu))
    except RaypoolError as error:
        raise click.UsageError(str(error)) from error


@cluster.command()
@click.option(
    "--provider", type=click.Choice(PROVIDERS), required=True, help="Who has the machines."
)
@click.option("--name", default="raypool", show_default=True, help="What to call the cluster.")
@click.option("--project", help="The project that pays (GCP).")
@click.option(
    "--zone", help="Where: us-central1-a (GCP), us-west-2a (AWS). Default: one that has the GPUs."
)
@click.option(
    "--gpu", help="The kind of GPU of the workers. Default: what --machine comes with, else T4."
)
@click.option("--gpus", type=click.IntRange(min=1), help="How many each worker has.  [default: 1]")
@click.option(
    "--machine",
    help="The kind of machine of the workers. Default: the smallest that has these GPUs.",
)
@click.option("--head-machine", help="The kind of machine of the head, which has no GPU.")
@click.option(
    "--min",
    "least",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="So many workers at least.",
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="So many workers at most.",
)
@click.option(
    "--spot/--on-demand",
    default=True,
    show_default=True,
    help="Whether workers may be taken back: cheap.",
)
@click.option(
    "--host", "hosts", multiple=True, help="A machine on premises, the head first; for each one."
)
@click.option(
    "--ssh-user", default="ubuntu", show_default=True, help="Who logs in on the machines."
)
@click.option("--ssh-key", help="The file with that user's private key.")
@click.option(
    "--package",
    "packages",
    multiple=True,
    help="What pip installs there instead of raypool and Ray; for each one.",
)
@click.option("--python", help="The version of Python there, such as 3.11. Default: the one here.")
@click.option(
    "--job",
    metavar="COMMAND",
    help="Kubernetes: a cluster for this command only, which ends with it.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="cluster.yaml",
    show_default=True,
    help="The file.",
)
@click.option("--force", "is_forced", is_flag=True, help="Write over a file that is there.")
@click.pass_context
def init(
    context: click.Context, /, out: Path, job: str | None, is_forced: bool, **wishes: Any
) -> None:
    """Write the file of a cluster, ready to be looked through and started.

    Nothing is asked of any provider, and nothing is made.
    """
    from raypool.cluster.cluster_file import save, text_of
    from raypool.cluster.drafts import Draft

    given = [
        option
        for option in context.command.params
        if context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE
    ]
    if strange := [
        option.opts[0]
        for option in given
        if wishes["provider"] not in ONLY.get(option.name or "", PROVIDERS)
    ]:
        raise click.UsageError(
            f"{', '.join(strange)} does not go with --provider {wishes['provider']}."
        )
    if out.exists() and not is_forced:
        raise click.UsageError(
            f"{out} is there already. Say --force to write over it, or --out with another name."
        )
    try:
        text = text_of(Draft(**wishes).plan(), _command(context, given), out.name, job, warn=_warn)
        save(text, out, is_forced)
    except RaypoolError as error:
        raise click.UsageError(str(error)) from error
    echo(f"Wrote {out}. Its first lines say what comes next.")


def _warn(text: str) -> None:
    echo(f"warning: {text}", err=True)


def _command(context: click.Context, given: list[click.Parameter]) -> str:
    """Return the command that was given, with the options that say what to write."""
    words = ["raypool", "cluster", "init"]
    for option in given:
        if option.name in ("out", "is_forced"):
            continue
        value = context.params[option.name or ""]
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += (option.opts[0], str(each))
    return shlex.join(words)


@cluster.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def validate(files: tuple[Path, ...]) -> None:
    """Check files of clusters and of training jobs, before money is spent.

    Each FILE may be one for Ray's launcher (Google Cloud, AWS, on premises), one for KubeRay, or
    the config.yaml of a training job. Reports every mistake with its line (status 2), and warns of
    machines, GPUs and zones that the catalogues here do not
    have: each catalogue is of a day, and yours may be newer. The Kubernetes that kubectl reaches
    checks files for KubeRay (kubectl apply --dry-run=server). No cloud is asked, and nothing is
    made.
    """
    problems = []
    for file in files:
        try:
            _check(file)
        except RaypoolError as error:
            problems.append(str(error))
        else:
            echo(f"{file}: nothing is wrong with it.")
    if problems:
        echo("\n".join(problems), err=True)
        raise SystemExit(2)


def _check(file: Path) -> None:
    """Check a file, and print warnings of entries that may not work."""
    from raypool.cluster.checks import check_file

    warnings: tuple[str, ...] = ()
    try:
        warnings = check_file(file)
    except RaypoolError as error:
        warnings = getattr(error, "warnings", ())
        raise
    finally:
        for warning in warnings:
            _warn(warning)


FILE = click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default="cluster.yaml"
)


@cluster.command()
@FILE
@click.option("--yes", is_flag=True, help="Do not ask.")
def up(file: Path, yes: bool) -> None:
    """Start the cluster of FILE (cluster.yaml), or change one that runs into what FILE says.

    The file is checked before. On a cluster that runs, Ray is started anew, and all that runs there
    ends; you are asked before. Machines of a cloud cost money from now on, until `raypool cluster
    down`.
    """
    from raypool.cluster import launcher

    try:
        _check(file)
    except RaypoolError as error:
        raise click.UsageError(str(error)) from error
    with _failures():
        if not yes and launcher.is_running(file):
            click.confirm(
                f"The cluster of {file} runs already. Start its Ray anew, and end all that runs"
                " there?",
                abort=True,
            )
        launcher.up(file)
    echo(
        f"The head runs. Next: raypool cluster connect {file}; at last: raypool cluster down {file}"
    )


@cluster.command()
@FILE
def status(file: Path) -> None:
    """Say which machines the cluster of FILE (cluster.yaml) has, which are coming, and what is in
    use.
    """
    from raypool.cluster import launcher

    with _failures():
        echo(launcher.status(file).strip())


@cluster.command()
@FILE
@click.option("--yes", is_flag=True, help="Do not ask.")
def down(file: Path, yes: bool) -> None:
    """End the cluster of FILE (cluster.yaml), with all that runs there, and give its machines back.

    Machines on premises stay, without Ray.
    """
    from raypool.cluster import launcher

    if not yes:
        click.confirm(f"End the cluster of {file}, and all that runs there?", abort=True)
    with _failures():
        launcher.down(file)


@cluster.command()
@FILE
@click.option("--name", default="raypool", show_default=True, help="What to call the profile.")
def connect(file: Path, name: str) -> None:
    """Keep a tunnel to the cluster of FILE (cluster.yaml) open until Ctrl-C, for pools and jobs
    from this machine.

    Prints the profile that goes into raypool.toml; then parpool(profile="raypool") runs there.
    """
    from raypool.cluster import launcher

    with contextlib.suppress(KeyboardInterrupt), _failures(), launcher.open_tunnel(file) as opened:
        echo(opened.as_toml(name))
        echo("The tunnel is open until Ctrl-C.", err=True)
        opened.wait()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of clusters into the command's error message."""
    try:
        yield
    except RaypoolError as error:
        raise click.ClickException(str(error)) from error
