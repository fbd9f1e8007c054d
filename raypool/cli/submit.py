"""The command line for training jobs: `raypool submit`, with the options of the former `gcloud
ai-platform jobs submit training`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raypool.cli.output import echo, errors_said
from raypool.errors import CloudError

if TYPE_CHECKING:
    from raypool.cluster.training_jobs import Submission
    from raypool.profiles import Profile


ARGS = "raypool.args"
WORDS = "raypool.words"
"""The key in a context for the words after `--` (None without one), and those before."""


class Passing(click.Command):
    """A command that passes on everything after `--`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse only the words before `--`."""
        at = args.index("--") if "--" in args else len(args)
        context.meta[WORDS] = args[:at]
        context.meta[ARGS] = None if at == len(args) else args[at + 1 :]
        return super().parse_args(context, args[:at])

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Add the words after `--` to the usage line."""
        return [*super().collect_usage_pieces(context), "[-- ARGS...]"]


def _accelerator(
    context: click.Context, option: click.Parameter, value: str | None
) -> dict[str, Any] | None:
    """Return GPUs, which gcloud takes as `count=4,type=nvidia-tesla-t4`, as files have them."""
    if value is None:
        return None
    parts = dict(part.partition("=")[::2] for part in value.split(","))
    if set(parts) != {"count", "type"} or not parts["count"].isdecimal():
        raise click.BadParameter(
            f"{value!r} must have the form count=4,type=nvidia-tesla-t4.", context, option
        )
    return {"count": int(parts["count"]), "type": parts["type"]}


def _tier(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Return a scale tier, which gcloud takes in small letters, as files have it."""
    return None if value is None else value.upper().replace("-", "_")


ROLES = {
    "master": "master",
    "worker": "worker",
    "parameter-server": "parameterServer",
    "evaluator": "evaluator",
}
"""The roles of machines, as options call them, and as files do."""


def _settings() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the options for entries of the file: the entry of each, and its settings for click."""
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "--scale-tier": (
            "scaleTier",
            {"callback": _tier, "help": "basic, basic-gpu, or custom with the machine options."},
        ),
        "--region": ("region", {"help": "Region of the machines, such as us-central1."}),
        "--job-dir": (
            "jobDir",
            {"help": "Where to write outputs: gs://BUCKET/... Also passed to the script."},
        ),
        "--module-name": (
            "pythonModule",
            {"help": "The module to run. With it, the argument is the job's name, as for gcloud."},
        ),
        "--runtime-version": (
            "runtimeVersion",
            {"help": "Accepted but ignored: machines get the versions installed here."},
        ),
        "--python-version": (
            "pythonVersion",
            {"help": "Accepted but ignored: machines get the Python that runs here."},
        ),
        "--use-chief-in-tf-config": (
            "useChiefInTfConfig",
            {
                "type": bool,
                "help": "Set TF_CONFIG for the script; the master is its chief.",
            },
        ),
    }
    for flag, role in ROLES.items():
        name = flag.replace("-", " ")
        if role != "master":
            told: dict[str, Any] = {"type": int, "help": f"Number of {name}s."}
            options[f"--{flag}-count"] = f"{role}Count", told
        machines = name if role == "master" else f"{name}s"
        told = {"help": f"Machine type of the {machines}."}
        options[f"--{flag}-machine-type"] = f"{role}Type", told
        told = {"metavar": "count=N,type=KIND", "callback": _accelerator}
        told["help"] = f"GPUs per {name}."
        options[f"--{flag}-accelerator"] = f"{role}Config.acceleratorConfig", told
        told = {"help": f"Docker image that the {name}s run; the same on all machines."}
        options[f"--{flag}-image-uri"] = f"{role}Config.imageUri", told
    return options


SETTINGS = _settings()


def _with_settings(command: Any) -> Any:
    """Add the options for entries of the file to a command."""
    for option, (_, told) in reversed(SETTINGS.items()):
        command = click.option(option, **told)(command)
    return command


@click.command(cls=Passing, short_help="Run a training job from its config.yaml on a new cluster.")
@click.argument("script", metavar="[MODULE_OR_SCRIPT]", required=False)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The job's config.yaml.",
)
@_with_settings
@click.option(
    "--package-path",
    type=click.Path(path_type=Path),
    help="Folder of the module's package, such as trainer/.",
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    help="Package that pip installs besides raypool and Ray; may be repeated.",
)
@click.option(
    "--project",
    envvar=["GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"],
    help="Google Cloud project to bill.",
    show_envvar=True,
)
@click.option(
    "--zone",
    help="Zone of the machines. Default: a zone of the region that has all their GPUs.",
)
@click.option(
    "--spot/--on-demand",
    "is_spot",
    help="Whether to use spot machines, except for the master: cheaper, may be preempted.",
)
@click.option(
    "--name",
    help=(
        "Name of the job; its cluster is NAME-XXXXXX. Default: the file's jobId, else the script's"
        " name."
    ),
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the cluster file.  [default: NAME-XXXXXX.yaml]",
)
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Check everything and write the cluster file, but create nothing.",
)
@click.option(
    "--keep",
    "is_kept",
    is_flag=True,
    help="Keep the cluster after the job has ended, until `raypool cluster down`.",
)
@click.option("--profile", help="Run on the cluster of this profile instead of creating one.")
@click.option(
    "--slurm", "is_slurm", is_flag=True, help="Run as a job of Slurm, with the cluster's defaults."
)
@click.option(
    "--requeue",
    "is_requeued",
    is_flag=True,
    help="Slurm: when the job's time is over or it is preempted, run the command again.",
)
@click.pass_context
def submit(context: click.Context, /, **given: Any) -> None:
    """Run a training job from its config.yaml on a new cluster, and exit with the job's exit code.

    MODULE_OR_SCRIPT is a file (train.py) or a module (trainer.task); its folder is uploaded.
    Options override the config file. Arguments after -- are passed to the script unchanged and
    replace the file's args.

    Everything is checked before anything is created (exit status 2). Then a cluster is created on
    Google Cloud. The script starts on its head node when all machines are running, its output is
    shown here, and the cluster is deleted when the script ends. With --profile the job runs on the
    cluster of a profile, with --slurm in a job of Slurm.
    """
    from raypool.cluster.training_jobs import run_on, run_on_own, run_on_slurm

    with errors_said(before_work=True):
        submission = _submission(context, given)
        slurm = _slurm_profile(given)
        profile, file = (slurm, None) if slurm else _target(context, given, submission)
    for note in submission.training.notes:
        submission.say(note)
    if given["is_dry"]:
        return
    with errors_said():
        if slurm is not None:
            raise SystemExit(run_on_slurm(slurm, submission, requeue=given["is_requeued"]))
        if file is None:
            raise SystemExit(run_on(profile, submission))
        raise SystemExit(run_on_own(file, submission, is_kept=given["is_kept"]))


def _slurm_profile(given: dict[str, Any]) -> Profile | None:
    """Return the profile if the job is for Slurm."""
    from dataclasses import replace

    from raypool.profile_files import named_profile
    from raypool.profiles import Profile, Slurm

    if given["profile"] is not None:
        profile = named_profile(given["profile"])
    else:
        profile = Profile(slurm=Slurm() if given["is_slurm"] else None)
    if profile.slurm is not None:
        return replace(profile, packages=(*profile.packages, *given["packages"]))
    if given["is_slurm"] or given["is_requeued"]:
        raise CloudError(
            '--slurm and --requeue are for Slurm. Pass a profile with kind = "slurm", or none.'
        )
    return None


def _submission(context: click.Context, given: dict[str, Any]) -> Submission:
    """Return the requested job."""
    from raypool.cluster import job_files
    from raypool.cluster.documents import documents_of, read_documents
    from raypool.cluster.training_jobs import Script, Submission, find_script, name_of

    if given["config"] is not None:
        documents = read_documents(given["config"])
    else:  # on a cluster that is there, a job need not say what machines it wants
        tier = "scaleTier: BASIC" if given["profile"] or given["is_slurm"] else ""
        documents = documents_of(f"trainingInput: {{{tier}}}", "")
    if len(documents) != 1:
        raise CloudError(
            f"{given['config']} has {len(documents)} YAML documents. A training job must have one."
        )
    options = {
        option: ((job_files.INPUT, *entry.split(".")), value)
        for option, (entry, _) in SETTINGS.items()
        if (value := given[option.removeprefix("--").replace("-", "_")]) is not None
    }
    training = job_files.read(job_files.overridden(documents[0], options))
    name, script = given["name"], given["script"]
    if given["module_name"] is not None:  # as for gcloud, the argument is the job's name
        name, script = name or script, None
    script = script or training.module
    if script is not None:
        found = find_script(script, given["package_path"])
    elif training.container_command:
        first, *rest = training.container_command
        # the beginning of a job runs Python, which becomes the command
        start = f"import os, sys; os.execvp({first!r}, [{first!r}, *sys.argv[1:]])"
        found = Script(("-c", start, *rest), None)
    else:
        raise CloudError(
            "There is nothing to run. Pass a script (train.py), a module (trainer.task), or, for"
            " an image, its containerCommand."
        )
    args = context.meta[ARGS]
    return Submission(
        name=name_of(name or training.name or (found.name if script else "job")),
        training=training,
        script=found,
        args=training.args if args is None else tuple(args),
        say=lambda text: echo(text, err=True),
        show=lambda text: click.echo(text, nl=False),
    )


def _target(
    context: click.Context, given: dict[str, Any], submission: Submission
) -> tuple[Profile, Path | None]:
    """Return the cluster to run on; or the file of the one that is to be made, which is written."""
    from dataclasses import replace

    from raypool.cluster.cluster_file import save, text_of
    from raypool.cluster.job_files import check_today
    from raypool.cluster.machines import choose_zone
    from raypool.cluster.training_jobs import own_name
    from raypool.profile_files import named_profile
    from raypool.profiles import Profile

    if given["profile"] is not None:
        profile = named_profile(given["profile"])
        return replace(profile, packages=(*profile.packages, *given["packages"])), None
    training = submission.training
    if not given["is_dry"]:
        if given["project"] is None:
            raise CloudError(
                "There is no project to bill. Pass --project, or set GOOGLE_CLOUD_PROJECT."
            )
        if training.job_dir and "://" not in training.job_dir and not given["is_kept"]:
            raise CloudError(
                f"--job-dir {training.job_dir} is on a disk of the cluster, which is deleted with"
                " it. Use gs://BUCKET/..., or --keep."
            )
    check_today(training)
    # two jobs that share a script, or a name, share no machines
    cluster = own_name(submission.name)
    plan = training.plan(
        name=cluster,
        project=given["project"],
        zone=choose_zone(training.kinds, training.region, given["zone"]),
        spot=given["is_spot"],
        packages=given["packages"],
        is_kept=given["is_kept"],
    )
    file = given["out"] or Path(f"{cluster}.yaml")
    command = shlex.join(["raypool", "submit", *context.meta[WORDS]])
    warn = lambda text: submission.say(f"warning: {text}")  # noqa: E731
    save(text_of(plan, command, file.name, warn=warn), file, plan)
    size = f"{training.machines} machine(s) with {training.gpus} GPU(s) in all"
    submission.say(f"Wrote {file}: {size}.")
    return Profile(), file
