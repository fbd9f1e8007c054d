"""Training jobs: their script, and running them, also on a cluster that is made for one job."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raypool.cluster import launcher
from raypool.cluster.gcp import NAME_LIMIT
from raypool.cluster.job_files import Training
from raypool.cluster.jobs import Jobs
from raypool.cluster.launcher_file import ROLE
from raypool.cluster.plan import ClusterPlan
from raypool.cluster.slurm_jobs import SlurmJobs
from raypool.errors import CloudError
from raypool.profiles import Profile

PATIENCE_S = 1800.0  # after this, a lost connection is given up: this machine may sleep
RETRY_S = 5.0  # before a reconnection


@dataclass(frozen=True)
class Script:
    """The script of a job."""

    words: tuple[str, ...]  # the arguments of Python: ("train.py",), or ("-m", "trainer.task")
    # The folder that is uploaded, in which it runs; None for a command of an image.
    folder: Path | None

    @property
    def name(self) -> str:
        """A name for its job."""
        return name_of(self.words[-1].removesuffix(".py").rpartition("/")[2])


def name_of(text: str) -> str:
    """Return a name for a cluster, as Google's labels allow: short, small letters and digits.

    Example:
        >>> name_of("Census_Training_2021"), name_of("7up")
        ('census-training-2021', 'job-7up')
    """
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"job-{plain}")[:NAME_LIMIT].strip("-")


def own_name(name: str) -> str:
    """Return a unique name for a cluster: the launcher restarts Ray on an existing cluster."""
    mark = secrets.token_hex(3)
    return f"{name[: NAME_LIMIT - len(mark) - 1].rstrip('-')}-{mark}"


def find_script(name: str, package: Path | None = None) -> Script:
    """Return the script to run, and make sure that it exists.

    Args:
        name: A file that ends with `.py`, or the name of a module.
        package: The folder of the module's package; its parent folder is uploaded. None: the
            current folder is.

    Raises:
        CloudError: There is no such file or module.
    """
    if package is not None and not package.is_dir():
        raise CloudError(
            f"--package-path {package} is not a folder. Pass the package's folder, such as"
            " trainer/."
        )
    folder = package.resolve().parent if package is not None else Path.cwd().resolve()
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise CloudError(
                f"There is no file {name}. Name a module without .py, such as trainer.task."
            )
        if not file.is_relative_to(folder):
            folder = file.parent
        return Script((str(file.relative_to(folder)),), folder)
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise CloudError(
            f"{name!r} must be a file that ends with .py or a module, such as trainer.task."
        )
    place = folder.joinpath(*parts)
    if not (place.with_name(f"{place.name}.py").is_file() or (place / "__main__.py").is_file()):
        is_here = (folder / parts[0]).is_dir() or (folder / f"{parts[0]}.py").is_file()
        if is_here or importlib.util.find_spec(parts[0]) is None:  # else it is installed
            raise CloudError(
                f"There is no module {name} to run in {folder}, which is uploaded: neither"
                f" {place}.py nor {place}/__main__.py exists. Set --package-path to the folder of"
                " its package."
            )
    return Script(("-m", name), folder)


def command(python: str, training: Training, script: Script, args: Sequence[str]) -> list[str]:
    """Return the words of a job's command: it tries out the job's folder, waits for its machines,
    and runs the script with `--job-dir` and `args`.

    Example:
        >>> from raypool.cluster.plan import NodeGroup
        >>> training = Training(groups=(NodeGroup(name="head"),), job_dir="gs://bucket/1")
        >>> command("python", training, Script(("train.py",), Path()), ["--steps", "3"])[3:]
        ['--job-dir', 'gs://bucket/1', '--', 'train.py', '--job-dir', 'gs://bucket/1', '--steps'...
    """
    folder = [] if training.job_dir is None else ["--job-dir", training.job_dir]
    machines = ["--machines", str(training.machines)] if training.machines > 1 else []
    chief = ["--chief", training.chief] if training.chief else []
    begin = [python, "-m", "raypool.cluster.begin", *folder, *machines, *chief]
    return [*begin, "--", *script.words, *folder, *args]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A training job that is ready to run."""

    name: str  # its name
    training: Training  # its needs
    script: Script  # its script
    args: tuple[str, ...]  # the arguments of the script
    say: Callable[[str], None]  # takes messages about its progress
    show: Callable[[str], None]  # takes its output

    def jobs(self, profile: Profile) -> Jobs:
        """Return the jobs of a profile's cluster, to which the script's folder is uploaded.

        This and the other methods raise a CloudError if the cluster does not answer, or refuses.
        """
        return Jobs(replace(profile, working_dir=self.script.folder))

    def hand_in(self, jobs: Jobs | SlurmJobs) -> str:
        """Submit the job, and return its id."""
        words = command(jobs.python, self.training, self.script, self.args)
        job_id = jobs.submit(words, name=self.name)
        self.say(f"Submitted job {job_id}. It keeps running if this command is interrupted.")
        return job_id

    def follow(self, jobs: Jobs | SlurmJobs, job_id: str, seen: int = 0) -> int:
        """Show the job's output from its character `seen` on, and return its exit status."""
        for piece in jobs.follow(job_id, seen):
            self.show(piece)
        info = jobs.wait(job_id)  # has ended; unlike `look`, asks again if nobody answers
        self.say(f"Job {job_id} has ended: {info.state}, exit status {info.exit_status}.")
        idle = None
        if isinstance(jobs, Jobs) and self.training.machines > 1:
            with contextlib.suppress(CloudError, KeyError, TypeError):  # it is only a hint
                idle = idle_machines(jobs)
        if idle:
            self.say(
                f"Nothing ran on {idle}: the script runs on the master, and a pool that it opens"
                " uses machines with GPUs. Leave out unused machines."
            )
        return info.exit_status


def idle_machines(jobs: Jobs) -> str | None:
    """Return the machines besides the head that no actor or task has used; None: all were used."""
    used = set()
    for kind in ("actors", "tasks"):
        answer = jobs.dashboard.get(f"/api/v0/{kind}", detail=1, limit=10_000)
        used |= {each["node_id"] for each in answer["data"]["result"]["result"]}
    roles = Counter(
        node["labels"].get(ROLE, "other")
        for node in jobs.dashboard.nodes()
        if node["node_id"] not in used and not node["is_head_node"]
    )
    return ", ".join(f"{count} {role} machine(s)" for role, count in sorted(roles.items())) or None


def run_on(profile: Profile, submission: Submission) -> int:
    """Run a job on an existing cluster, and return its exit status.

    Raises:
        CloudError: The cluster has fewer GPUs than the job asks for, refuses the job, or does not
            answer.
    """
    jobs = submission.jobs(profile)
    wanted = submission.training.gpus
    there = sum(node["resources_total"].get("GPU", 0) for node in jobs.dashboard.nodes())
    if there < wanted and not jobs.dashboard.may_grow():
        raise CloudError(
            f"The job needs {wanted} GPUs, but the cluster has {there:g}. Request fewer, or leave"
            " --profile out to run it on a new cluster."
        )
    return submission.follow(jobs, submission.hand_in(jobs))


def run_on_slurm(profile: Profile, submission: Submission, *, requeue: bool) -> int:
    """Run a job on Slurm, on the nodes of the profile, and return its exit status.

    The job's own machines do not count. With `requeue` it runs again when its time is over.

    Raises:
        CloudError: Slurm refuses it.
    """
    profile = replace(profile, working_dir=submission.script.folder)
    jobs = SlurmJobs(profile, is_requeued=requeue)
    head_only = replace(submission.training, groups=submission.training.groups[:1])
    submission = replace(submission, training=head_only)
    return submission.follow(jobs, submission.hand_in(jobs))


def run_on_own(file: Path, submission: Submission, *, is_kept: bool) -> int:
    """Make the cluster of a file, run a job on it, delete the cluster, and return the job's exit
    status.

    A lost connection is made again. The cluster is left alone if the job may still run, so that
    its work is not lost: after Ctrl-C, and when the connection is lost for good.

    With `is_kept` the cluster stays in any case. Else one that is left alone deletes itself when
    nothing uses it any more.

    Raises:
        CloudError: The cluster does not come up, refuses the job, does not answer any more, or does
            not go away.
    """
    job_id = status = None
    try:
        launcher.up(file)
        with launcher.tunnel(file) as opened:  # for this alone: `_follow` opens its own, also again
            job_id = submission.hand_in(submission.jobs(opened.profile))
        status = _follow(file, submission, job_id)
    finally:
        is_running = job_id is not None and status is None
        if is_running:
            submission.say(
                f"Job {job_id} may keep running. `raypool cluster connect {file}` opens a tunnel"
                " to it, and prints a profile for raypool.toml. With that, `raypool job logs"
                f" --profile raypool --follow {job_id}` shows its output, and `raypool job stop"
                f" --profile raypool {job_id}` stops it."
            )
        if is_kept or is_running:
            idle = ClusterPlan.idle_shutdown_minutes
            unused = "" if is_kept else f", or until it has been unused for {idle:g} minutes"
            submission.say(
                f"The cluster keeps running, and costs money, until `raypool cluster down {file}`"
                f"{unused}."
            )
        else:
            try:
                launcher.down(file)
            except CloudError as error:
                if status is None:
                    raise
                raise CloudError(
                    f"The job ended with exit status {status}, but the cluster may still exist."
                    f" {error}"
                ) from error
    return status


def _follow(file: Path, submission: Submission, job_id: str) -> int:
    """Follow a job to its end, through one tunnel after the other."""
    seen, lost_at = 0, None

    def show(text: str) -> None:
        nonlocal seen
        seen += len(text)
        submission.show(text)

    counting = replace(submission, show=show)
    while True:
        try:
            with launcher.tunnel(file) as opened:
                jobs = counting.jobs(opened.profile)
                lost_at = None
                return counting.follow(jobs, job_id, seen)
        except CloudError as error:
            lost_at = lost_at or time.monotonic()
            is_answer = getattr(error, "status", None) is not None
            if is_answer or time.monotonic() - lost_at > PATIENCE_S:
                raise
            submission.say(f"The connection to the cluster was lost; reconnecting: {error}")
            time.sleep(RETRY_S)
