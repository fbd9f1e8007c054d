"""Training jobs: their script, and running them on a cluster that is made for one job and then
ended.
"""

from __future__ import annotations

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
from raypool.cluster.slurm_jobs import SlurmJobs
from raypool.errors import CloudError
from raypool.profiles import Profile

PATIENCE_S = 1800.0
"""The time after which a lost connection is given up [s]."""

RETRY_S = 5.0
"""The pause before a reconnection [s]."""


@dataclass(frozen=True)
class Script:
    """The script of a job.

    Attributes:
        words: What Python is given: ("train.py",), or ("-m", "trainer.task").
        folder: The folder that goes along, in which it runs; None for a command of an image.
    """

    words: tuple[str, ...]
    folder: Path | None

    @property
    def name(self) -> str:
        """Return what to call a cluster or a job for it.

        Example:
            >>> Script(("-m", "trainer.My_Task"), Path()).name
            'trainer-my-task'
        """
        return name_of(self.words[-1].removesuffix(".py").rpartition("/")[2])


def name_of(text: str) -> str:
    """Return a name for a cluster: of Google's labels, so short, in small letters and digits.

    Example:
        >>> name_of("Census_Training_2021"), name_of("7up")
        ('census-training-2021', 'job-7up')
    """
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"job-{plain}")[:NAME_LIMIT].strip("-")


def own_name(name: str) -> str:
    """Return a name for a cluster that nobody else's has: Ray's launcher restarts Ray on one that
    is there already.

    Example:
        >>> own_name("train") != own_name("train"), len(own_name("a" * NAME_LIMIT)) <= NAME_LIMIT
        (True, True)
    """
    mark = secrets.token_hex(3)
    return f"{name[: NAME_LIMIT - len(mark) - 1].rstrip('-')}-{mark}"


def find_script(name: str, package: Path | None = None) -> Script:
    """Return what is to be run, and make sure that it is there.

    Args:
        name: A file that ends with `.py`, or the name of a module.
        package: The folder of the package that has it; the folder around that goes along. None:
            this folder does.

    Raises:
        CloudError: There is no such file or module.
    """
    folder = (package.resolve().parent if package is not None else Path.cwd()).resolve()
    if package is not None and not package.is_dir():
        raise CloudError(
            f"--package-path {package} is no folder. It should be that of the package, such as"
            " trainer/."
        )
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise CloudError(
                f"There is no file {name}. A module is named without .py, as in trainer.task."
            )
        if not file.is_relative_to(folder):
            folder = file.parent
        return Script((str(file.relative_to(folder)),), folder)
    _check_module(name, folder)
    return Script(("-m", name), folder)


def _check_module(name: str, folder: Path) -> None:
    """Make sure that a module is in the folder that goes along, or of an installed package."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise CloudError(
            f"{name!r} is neither a file that ends with .py nor the name of a module, such as"
            " trainer.task."
        )
    place = folder.joinpath(*name.split("."))
    if place.with_name(f"{place.name}.py").is_file() or (place / "__main__.py").is_file():
        return
    top = name.partition(".")[0]
    is_here = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    if is_here or importlib.util.find_spec(top) is None:
        raise CloudError(
            f"There is no module {name} to run in {folder}, which goes along: neither {place}.py"
            f" nor {place}/__main__.py. --package-path names the folder of the package that has it."
        )


def command(python: str, training: Training, script: Script, args: Sequence[str]) -> list[str]:
    """Return the words of a job's command.

    Args:
        python: The Python of the cluster.
        training: The job; `job_dir` is tried out before it begins, and its machines are waited for.
        script: What it runs.
        args: What that is given, after its `--job-dir`.

    Example:
        >>> from raypool.cluster.plan import NodeGroup
        >>> training = Training(groups=(NodeGroup(name="head"),), job_dir="gs://bucket/1")
        >>> command("python", training, Script(("train.py",), Path()), ["--steps", "3"])[3:]
        ['--job-dir', 'gs://bucket/1', '--', 'train.py', '--job-dir', 'gs://bucket/1', '--steps'...
    """
    folder = [] if training.job_dir is None else ["--job-dir", training.job_dir]
    machines = ["--machines", str(training.machines)] if training.machines > 1 else []
    chief = training.chief
    variables = ["-m", "raypool.cluster.tf_config", "--chief", chief, "--"] if chief else []
    return [
        python,
        "-m",
        "raypool.cluster.begin",
        *folder,
        *machines,
        "--",
        *variables,
        *script.words,
        *folder,
        *args,
    ]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A training job that is ready to run.

    Attributes:
        name: What to call it.
        training: What it needs.
        script: What it runs.
        args: What that is given.
        say: Is told how it goes.
        show: Is given what the job prints.
    """

    name: str
    training: Training
    script: Script
    args: tuple[str, ...]
    say: Callable[[str], None]
    show: Callable[[str], None]

    def jobs(self, profile: Profile) -> Jobs:
        """Return the jobs of a cluster, to which the script's folder goes along.

        Raises:
            CloudError: The cluster does not answer.
        """
        return Jobs(replace(profile, working_dir=self.script.folder))

    def hand_in(self, jobs: Jobs) -> str:
        """Hand the job in, and return its id.

        Raises:
            CloudError: The cluster refuses it.
        """
        job_id = jobs.submit(
            command(jobs.python, self.training, self.script, self.args), name=self.name
        )
        self.say(f"Job {job_id} is handed in. It goes on if this command is interrupted.")
        return job_id

    def follow(self, jobs: Jobs | SlurmJobs, job_id: str, seen: int = 0) -> int:
        """Show what the job prints until it has ended, but for what was seen (characters), and
        return its exit status.

        Raises:
            CloudError: The cluster does not answer any more.
        """
        for piece in jobs.follow(job_id, seen):
            self.show(piece)
        info = jobs.wait(job_id)
        self.say(f"Job {job_id} has ended: {info.state}, exit status {info.exit_status}.")
        if not isinstance(jobs, Jobs) or self.training.machines == 1:
            return info.exit_status
        if (idle := idle_machines(jobs)) is not None:
            self.say(
                f"Nothing ran on {idle}: the script runs on the master, and a pool that it opens"
                " uses machines with GPUs. Leave out machines that it does not use."
            )
        return info.exit_status


def idle_machines(jobs: Jobs) -> str | None:
    """Return which machines beside the head no actor or task has used; None if all were used."""
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
    """Run a job on a cluster that is there, and return its exit status.

    Raises:
        CloudError: The cluster has fewer GPUs than the job asks for; it refuses the job; or it does
            not answer (any more).
    """
    jobs = submission.jobs(profile)
    wanted = submission.training.gpus
    there = sum(node["resources_total"].get("GPU", 0) for node in jobs.dashboard.nodes())
    if there < wanted and not jobs.dashboard.may_grow():
        raise CloudError(
            f"The job asks for {wanted} GPUs, and the cluster has {there:g}. Ask for fewer,"
            " or leave --profile out: then it gets machines of its own."
        )
    return submission.follow(jobs, submission.hand_in(jobs))


def run_on_slurm(profile: Profile, submission: Submission, *, requeue: bool) -> int:
    """Run a job on Slurm, on the nodes that the profile asks for, and return its exit status.

    Args:
        profile: Of Slurm.
        submission: The job; what it says of machines does not count.
        requeue: Run it again when its time is over.

    Raises:
        CloudError: Slurm refuses it.
    """
    jobs = SlurmJobs(replace(profile, working_dir=submission.script.folder))
    training = replace(submission.training, groups=submission.training.groups[:1])
    words = command(jobs.python, training, submission.script, submission.args)
    job_id = jobs.submit(words, name=submission.name, requeue=requeue)
    submission.say(f"Submitted job {job_id}. It goes on if this command is interrupted.")
    return submission.follow(jobs, job_id)


def run_on_own(file: Path, submission: Submission, *, is_kept: bool) -> int:
    """Make the cluster of a file, run a job on it, end the cluster, and return the job's exit
    status.

    A connection that is lost is made again. The cluster is left alone if the job may still be
    running, since what it has done so far would be lost: after Ctrl-C, and when the connection is
    lost for good.

    Args:
        file: The file for Ray's launcher.
        submission: The job.
        is_kept: Leave the cluster there when the job has ended, too.

    Raises:
        CloudError: The cluster does not come up, refuses the job, does not answer any more, or does
            not go away.
    """
    job_id = status = None
    try:
        launcher.up(file)
        with launcher.tunnel(file) as profile:
            job_id = submission.hand_in(submission.jobs(profile))
        status = _follow(file, submission, job_id)
    finally:
        if job_id is not None and status is None:
            submission.say(
                f"Job {job_id} may go on. `raypool cluster connect {file}` makes a way to it,"
                f" `raypool job logs --follow {job_id}` shows what it does, and `raypool job stop"
                f" {job_id}` ends it."
            )
        if is_kept or (job_id is not None and status is None):
            submission.say(
                f"The cluster is left there, and costs money, until `raypool cluster down {file}`."
            )
        else:
            _end(file, status)
    return status


def _follow(file: Path, submission: Submission, job_id: str) -> int:
    """Follow a job to its end, through one tunnel after the other."""
    # This machine may sleep, or be without a network.
    seen = 0

    def show(text: str) -> None:
        nonlocal seen
        seen += len(text)
        submission.show(text)

    counting = replace(submission, show=show)
    lost_at = None
    while True:
        try:
            with launcher.tunnel(file) as profile:
                jobs = counting.jobs(profile)
                lost_at = None
                return counting.follow(jobs, job_id, seen)
        except CloudError as error:
            lost_at = lost_at or time.monotonic()
            if (
                getattr(error, "status", None) is not None
                or time.monotonic() - lost_at > PATIENCE_S
            ):
                raise
            submission.say(f"The connection to the cluster is lost, and made again: {error}")
            time.sleep(RETRY_S)


def _end(file: Path, status: int | None) -> None:
    """End a cluster, and say what has become of the job, too, if that fails."""
    try:
        launcher.down(file)
    except CloudError as error:
        if status is None:
            raise
        raise CloudError(
            f"The job has ended with exit status {status}, but the cluster may still be there."
            f" {error}"
        ) from error
