"""The command line for jobs on a cluster: `raypool job ...`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from raypool.cli.output import INTERRUPTED, READER_GONE, echo, errors_said, has_reader
from raypool.views.words import one_line

if TYPE_CHECKING:
    from raypool.cluster.jobs import Jobs
    from raypool.cluster.slurm_jobs import SlurmJobs


Command = TypeVar("Command", bound=Callable[..., Any])


def which_cluster(command: Command) -> Command:
    """Add the options that select the cluster to a command."""
    options = (
        click.option(
            "--profile",
            help="Cluster to use: a profile of raypool.toml.  [default: the file's default]",
        ),
        click.option(
            "--address",
            "jobs_address",
            metavar="URL",
            help="Dashboard URL, instead of the profile's jobs_address.",
        ),
        click.option(
            "--token-file",
            metavar="FILE",
            help="File with the token, instead of the profile's token_file.",
        ),
        click.option(
            "--slurm", "is_slurm", is_flag=True, help="Jobs of Slurm, with the cluster's defaults."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def job() -> None:
    """Submit, watch and stop jobs on a cluster."""


@job.command(context_settings={"allow_interspersed_args": False})
@which_cluster
@click.option(
    "--working-dir", metavar="DIR", help="Folder to upload; the command starts in its copy."
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="Package that pip installs for the job; may be repeated.",
)
@click.option("--name", help="Name of the job.")
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable; the dashboard shows it, so do not pass secrets.",
)
@click.option(
    "--cpus",
    type=click.FloatRange(min=0),
    default=0,
    help="Cores reserved for the command itself, besides those of any pool.",
)
@click.option(
    "--gpus",
    type=click.FloatRange(min=0),
    default=0,
    help="GPUs reserved for the command itself. A pool that it opens takes its own.",
)
@click.option(
    "--follow/--no-wait",
    default=True,
    show_default=True,
    help="Show the job's output until it ends, or return at once.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    *,
    command: tuple[str, ...],
    name: str | None,
    env: tuple[str, ...],
    cpus: float,
    gpus: float,
    follow: bool,
    **cluster: Any,
) -> None:
    """Submit COMMAND as a job on a cluster.

    Example: raypool job submit --working-dir . -- python train.py --lr 0.1

    Everything from COMMAND on is passed on unchanged. Prints the job's id and, without --no-wait,
    its output, and exits with its exit code. Ctrl-C only stops watching: the job keeps running.
    """
    variables = {}
    for setting in env:
        variable, equals, value = setting.partition("=")
        if not variable or not equals:
            raise click.BadParameter(f"{setting!r} is not NAME=VALUE.", param_hint="--env")
        variables[variable] = value
    with errors_said():
        jobs = _jobs(**cluster)
        job_id = jobs.submit(command, name=name, env=variables, cpus=cpus, gpus=gpus)
        echo(job_id, err=follow)
        if follow:
            _follow_to_end(jobs, job_id, cluster)


@job.command()
@which_cluster
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.argument("job_id", required=False)
def status(job_id: str | None, is_json: bool, **cluster: Any) -> None:
    """Show the status of JOB_ID, or of all jobs."""
    import dataclasses
    import json

    from raypool.cluster.jobs import KEY

    with errors_said():
        jobs = _jobs(**cluster)
        infos = [jobs.look(job_id)] if job_id is not None else jobs.all()
    if is_json:
        shown = [dataclasses.asdict(info) for info in infos]
        for entry in shown:
            entry["metadata"].pop(KEY, None)
        echo(json.dumps(shown, default=str, indent=2))
        return
    for info in infos:
        code = f", exit code {info.exit_code}" if info.exit_code else ""
        at = f"{info.submitted_at:%Y-%m-%d %H:%M:%S} UTC" if info.submitted_at is not None else "-"
        echo(f"{info.id}  {info.state + code:24}  {at}  {one_line(info.name)}")
    if job_id is not None and infos[0].state in ("queued", "failed"):
        echo(infos[0].message.strip())


@job.command()
@which_cluster
@click.option(
    "--follow", is_flag=True, help="Print until the job ends, and exit with its exit code."
)
@click.argument("job_id")
def logs(job_id: str, follow: bool, **cluster: Any) -> None:
    """Print the output of JOB_ID."""
    with errors_said():
        jobs = _jobs(**cluster)
        if follow:
            _follow_to_end(jobs, job_id, cluster)
        else:
            click.echo(jobs.log(job_id), nl=False)


@job.command()
@which_cluster
@click.argument("job_id")
def stop(job_id: str, **cluster: Any) -> None:
    """Stop JOB_ID, queued or running, and wait until it has ended."""
    with errors_said():
        jobs = _jobs(**cluster)
        info = jobs.look(job_id)
        info = info if info.has_ended else jobs.stop(job_id)
    echo(f"{info.id}: {info.state}")


def _jobs(profile: str | None, *, is_slurm: bool, **changes: Any) -> Jobs | SlurmJobs:
    """Return the jobs of a profile's cluster, with the fields that options replace."""
    from raypool.cluster.slurm_jobs import jobs_of
    from raypool.profile_files import resolve_profile
    from raypool.profiles import Profile, Slurm

    if is_slurm and profile is not None:
        raise click.UsageError("--profile names a cluster already. Leave --slurm out.")
    given = {name: value for name, value in changes.items() if value not in (None, ())}
    base = Profile(slurm=Slurm()) if is_slurm else profile
    return jobs_of(resolve_profile(base, given))


def _follow_to_end(jobs: Jobs | SlurmJobs, job_id: str, cluster: Mapping[str, Any]) -> None:
    """Print a job's output until it ends, and exit with its status."""
    try:
        for piece in jobs.follow(job_id):
            click.echo(piece, nl=False)
            if not has_reader():
                raise SystemExit(READER_GONE)
        info = jobs.wait(job_id)  # has ended; unlike `look`, asks again if nobody answers
    except KeyboardInterrupt:
        names = {"profile": "--profile", "jobs_address": "--address", "token_file": "--token-file"}
        given = [(option, cluster[name]) for name, option in names.items() if cluster.get(name)]
        words = shlex.join(
            [
                *itertools.chain.from_iterable(given),
                *(["--slurm"] if cluster["is_slurm"] else []),
                job_id,
            ]
        )
        echo(
            f"\nJob {job_id} keeps running. `raypool job logs --follow {words}` shows its"
            f" output, `raypool job stop {words}` stops it.",
            err=True,
        )
        raise SystemExit(INTERRUPTED) from None
    if info.state != "finished":
        why = f"exit code {info.exit_code}" if info.exit_code is not None else info.message.strip()
        echo(f"Job {job_id}: {info.state}, {why}", err=True)
    raise SystemExit(info.exit_status)
