"""The command line for clusters: `raypool cluster ...`."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from raypool.cli.output import echo, errors_said
from raypool.errors import CloudError, InvalidValueError, RaypoolError, read_text

PROVIDERS = ("gcp", "aws", "on-prem", "kubernetes", "sky", "slurm")

MADE = ("gcp", "aws")  # whose machines are made
ONLY = {
    "project": ("gcp",),
    **dict.fromkeys(("zone", "machine", "head_machine", "fallback"), MADE),
    "idle_shutdown_minutes": (*MADE, "sky"),
    "least": (*MADE, "kubernetes"),
    **dict.fromkeys(("gpu", "spot"), (*MADE, "kubernetes", "sky")),
    **dict.fromkeys(("gpus", "most"), (*MADE, "kubernetes", "sky", "slurm")),
    **dict.fromkeys(("packages", "python", "trust"), PROVIDERS[:-1]),
    **dict.fromkeys(("ssh_user", "ssh_key"), (*MADE, "on-prem")),
    "hosts": ("on-prem",),
    "job": ("kubernetes", "sky"),
    "working_dir": ("kubernetes",),
    "profile": ("slurm",),
}
"""Options of `init` that only some providers use."""


TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Do not warn of machines, GPUs and zones that raypool's dated catalogues do not list.",
)


@click.group()
def cluster() -> None:
    """Create, check, start and stop clusters of machines with GPUs."""


@cluster.command()
@click.option(
    "--gpu",
    metavar="KIND",
    help="List only machines that can have this GPU: T4, A100, nvidia-tesla-t4, ...",
)
@click.option(
    "--catalogue",
    "name",
    type=click.Choice(["gce", "aws", "ai-platform-2021"]),
    default="gce",
    show_default=True,
    help=(
        "Catalogue to list: Google Compute Engine, Amazon EC2, or Google's AI Platform Training of"
        " 2021."
    ),
)
@click.option(
    "--json", "is_json", is_flag=True, help="Print JSON, with the zones of each GPU type."
)
def machines(gpu: str | None, name: str, is_json: bool) -> None:
    """List machine types and their GPUs.

    The catalogues are part of raypool and carry a date; no cloud is contacted.
    """
    from raypool.cluster.machines import catalogue
    from raypool.views import tables

    known = catalogue(name)
    with errors_said(before_work=True):
        if is_json:
            echo(tables.machines_as_json(known, gpu))
        else:
            tables.show(tables.machines_as_table(known, gpu))
            echo(tables.where(known, gpu))


@cluster.command(short_help="Write a cluster file, or a job file for Slurm.")
@click.option(
    "--provider", type=click.Choice(PROVIDERS), required=True, help="Provider of the machines."
)
@click.option("--name", default="raypool", show_default=True, help="Name of the cluster.")
@click.option("--project", help="Google Cloud project to bill (GCP).")
@click.option(
    "--zone",
    help=(
        "Zone: us-central1-a (GCP), us-west-2a or us-west-2a,us-west-2b (AWS, tried in turn)."
        " Default: one that has the GPUs."
    ),
)
@click.option("--gpu", help="GPU type of the workers. Default: the GPU of --machine, else T4.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs per worker.  [default: 1]")
@click.option(
    "--machine",
    help="Machine type of the workers. Default: the smallest with these GPUs.",
)
@click.option("--head-machine", help="Machine type of the head node, which has no GPU.")
@click.option(
    "--min",
    "least",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Minimum number of workers.",
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Maximum number of workers.",
)
@click.option(
    "--spot/--on-demand",
    default=True,
    show_default=True,
    help="Whether workers are spot machines: cheaper, may be preempted.",
)
@click.option(
    "--fallback",
    is_flag=True,
    help="With --spot: use on-demand machines while no spot machine is available.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Machine on premises, the head node first; may be repeated.",
)
@click.option(
    "--ssh-user", default="ubuntu", show_default=True, help="User for SSH on the machines."
)
@click.option("--ssh-key", help="File with that user's private key.")
@click.option(
    "--package",
    "packages",
    multiple=True,
    help="Package to install there besides raypool and its dependencies; may be repeated.",
)
@click.option("--python", help="Python version there, such as 3.11. Default: the local one.")
@click.option(
    "--idle-shutdown-minutes",
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    help="Delete the whole cluster after this time without a job, pool or client; 0: never.",
)
@click.option(
    "--job",
    metavar="COMMAND",
    help=(
        "Kubernetes: a cluster for this command only, deleted when it ends. SkyPilot: the command"
        " that the task runs."
    ),
)
@click.option(
    "--working-dir",
    metavar="URL",
    help="Kubernetes, with --job: a zip of the code (https://..., gs://..., s3://...).",
)
@click.option("--profile", help="Slurm: the profile in raypool.toml with the allocation.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.  [default: cluster.yaml; job.sbatch for Slurm]",
)
@click.option("--force", "is_forced", is_flag=True, help="Overwrite an existing file.")
@TRUST
@click.pass_context
def init(
    context: click.Context,
    /,
    out: Path | None,
    is_forced: bool,
    trust: bool,
    **wishes: Any,
) -> None:
    """Write a cluster file, to be reviewed and started; for Slurm, a file for sbatch.

    No provider is contacted, and nothing is created.
    """
    from raypool.cluster.cluster_file import save, text_of
    from raypool.cluster.plan import draft

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
            f"{', '.join(strange)} cannot be used with --provider {wishes['provider']}."
        )
    is_slurm = wishes["provider"] == "slurm"
    out = out or Path("job.sbatch" if is_slurm else "cluster.yaml")
    if out.exists() and not is_forced:
        raise click.UsageError(
            f"{out} already exists. Overwrite it with --force, or choose another file with --out."
        )
    sizes = [option.opts[0] for option in given if option.name in ("gpus", "most")]
    if sizes and wishes["profile"] is not None:
        raise click.UsageError(
            f"{', '.join(sizes)} cannot be used with --profile, which has the whole allocation."
        )
    command = _command(context, given)
    with errors_said(before_work=True):
        if is_slurm:
            _write_slurm_file(wishes, command, out)
        else:
            del wishes["profile"]
            plan = draft(**wishes)
            text = text_of(plan, command, out.name, warn=_warn, trust=trust)
            save(text, out, plan, is_forced)
    echo(f"Wrote {out}. The comments at its top list the next steps.")


def _write_slurm_file(wishes: dict[str, Any], command: str, out: Path) -> None:
    from raypool.cluster.slurm import job_file, size_of
    from raypool.profile_files import resolve_profile
    from raypool.profiles import Profile, Slurm

    profile = Profile(slurm=Slurm(nodes=wishes["most"], gpus_per_node=wishes["gpus"] or 1))
    if wishes["profile"] is not None:
        profile = resolve_profile(wishes["profile"], {})
    if profile.slurm is None:
        raise InvalidValueError(
            f'The profile {wishes["profile"]!r} is not for Slurm: it has no kind = "slurm".'
        )
    text = job_file(
        profile.slurm,
        size_of(profile, None, None),
        ["python", "train.py"],
        name=wishes["name"],
        requeue=True,
    )
    first, rest = text.split("\n", 1)
    text = f"""{first}
# Written by: {command}
#
# Edit the last line: the command after -- runs when Ray is up on all nodes, and parpool() in it
# uses all of them. Check the file with `sbatch --test-only {out.name}`, and submit it with
# `sbatch {out.name}`. Before the job's time is over, tasks see should_stop and save, and the job is
# requeued: the command must resume, as parfor(run_dir=...) does.
{rest}"""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CloudError(f"{out} could not be written: {error.strerror}.") from error


def _warn(text: str) -> None:
    echo(f"warning: {text}", err=True)


def _command(context: click.Context, given: list[click.Parameter]) -> str:
    """Return the command line, with the options that decide the file's content."""
    words = ["raypool", "cluster", "init"]
    for option in given:
        if option.name in ("out", "is_forced", "trust"):
            continue
        value = context.params[option.name or ""]
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += (option.opts[0], str(each))
    return shlex.join(words)


@cluster.command(short_help="Check cluster and job files before anything is billed.")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@TRUST
def validate(files: tuple[Path, ...], trust: bool) -> None:
    """Check files of clusters and training jobs before anything is billed.

    Each of FILES may be for Ray's launcher (Google Cloud, AWS, on premises), for KubeRay or
    SkyPilot, or the config.yaml of a training job. Reports all mistakes with their line numbers
    (exit status 2), and warns of machines, GPUs and zones that raypool's catalogues do not have:
    they carry a date, and your machines may be newer. The Kubernetes that kubectl reaches checks
    files for KubeRay (kubectl apply --dry-run=server). No cloud is contacted, and nothing is
    created.
    """
    problems = []
    for file in files:
        try:
            warnings = _check(file, trust)
        except RaypoolError as error:
            problems.append(str(error))
        else:
            how = f"valid, {len(warnings)} warnings" if warnings else "no mistakes found"
            echo(f"{file}: {how}.")
    if problems:
        echo("\n".join(problems), err=True)
        raise SystemExit(2)


def _check(file: Path, trust: bool) -> tuple[str, ...]:
    """Check a file, and print warnings of entries that may not work."""
    from raypool.cluster.checks import check_file

    warnings: tuple[str, ...] = ()
    try:
        warnings = check_file(file, trust=trust)
    except RaypoolError as error:
        warnings = getattr(error, "warnings", ())
        raise
    finally:
        for warning in warnings:
            _warn(warning)
    return warnings


FILE = click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default="cluster.yaml"
)


@cluster.command(short_help="Add a token and safe defaults to a cluster file.")
@FILE
def harden(file: Path) -> None:
    """Secure FILE (default: cluster.yaml), which may be any file for Ray's launcher.

    Adds a token to each command that starts Ray, binds the dashboard to localhost, and lets Ray
    notice a lost machine within 8 s. Comments and everything else stay as they are. Prints the
    changes.
    """
    import difflib

    from raypool.cluster.hardening import hardened

    with errors_said():
        before = read_text(file, CloudError)
        after = hardened(before, str(file))
    file.write_text(after, encoding="utf-8")
    changes = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(file), str(file), n=0, lineterm=""
    )
    echo("\n".join(changes) or f"{file}: nothing to change.")


@cluster.command(short_help="Start a cluster, or update a running one.")
@FILE
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@TRUST
def up(file: Path, yes: bool, trust: bool) -> None:
    """Start the cluster defined in FILE (default: cluster.yaml), or update a running one.

    The file is checked first. On a running cluster Ray is restarted, which ends everything that
    runs there; you are asked to confirm that. Cloud machines are billed from now on, until `raypool
    cluster down`.
    """
    from raypool.cluster import launcher

    with errors_said(before_work=True):
        _check(file, trust)
    with errors_said():
        if not yes and launcher.is_running(file):
            click.confirm(
                f"The cluster of {file} is already running. Restart its Ray, and end everything"
                " that runs there?",
                abort=True,
            )
        launcher.up(file)
    echo(
        f"The head is running. Next: raypool cluster connect {file}; when you are done: raypool"
        f" cluster down {file}"
    )


@cluster.command(short_help="Show the machines of a cluster and the resources in use.")
@FILE
def status(file: Path) -> None:
    """Show the machines of the cluster defined in FILE (default: cluster.yaml), those that are
    starting, and the resources in use.
    """
    from raypool.cluster import launcher

    with errors_said():
        echo(launcher.status(file).strip())


@cluster.command(short_help="Shut down a cluster and everything that runs there.")
@FILE
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def down(file: Path, yes: bool) -> None:
    """Shut down the cluster defined in FILE (default: cluster.yaml), with everything that runs
    there.

    Cloud machines are deleted. On machines on premises, Ray is stopped.
    """
    from raypool.cluster import launcher

    if not yes:
        click.confirm(
            f"Shut down the cluster of {file}, and everything that runs there?", abort=True
        )
    with errors_said():
        launcher.down(file)


@cluster.command(short_help="Open a tunnel to a cluster.")
@FILE
@click.option("--name", default="raypool", show_default=True, help="Name of the profile.")
def connect(file: Path, name: str) -> None:
    """Open a tunnel to the cluster defined in FILE (default: cluster.yaml), until Ctrl-C.

    Pools and jobs of this machine can then use the cluster. Prints the profile for raypool.toml;
    with it, parpool(profile="raypool") runs there.
    """
    from raypool.cluster import launcher

    # Ctrl-C is the usual end; leaving `tunnel` ends ssh
    with contextlib.suppress(KeyboardInterrupt), errors_said(), launcher.tunnel(file) as opened:
        echo(opened.as_toml(name))
        echo("The tunnel is open until Ctrl-C.", err=True)
        opened.wait()  # never returns: a broken tunnel is an error
